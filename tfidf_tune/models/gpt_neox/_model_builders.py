"""Pythia in all its sizes, "Pythia: A Suite for Analyzing Large Language Models", https://arxiv.org/abs/2304.01373.

Sizes: the config.json of https://huggingface.co/EleutherAI/pythia-70m and so on to pythia-12b.
"""

from torchtune.modules import TransformerDecoder

from tfidf_tune.models._linear import PLAIN, LinearFactory, with_lora
from tfidf_tune.models.gpt_neox._component_builders import gpt_neox

# By size: vocab_size, num_layers, num_heads, embed_dim; MLPs are four times as wide, positions 2,048 throughout.
_PYTHIA: dict[str, tuple[int, int, int, int]] = {
    "70m": (50_304, 6, 8, 512),
    "160m": (50_304, 12, 12, 768),
    "410m": (50_304, 24, 16, 1024),
    "1b": (50_304, 16, 8, 2048),
    "1.4b": (50_304, 24, 16, 2048),
    "2.8b": (50_304, 32, 32, 2560),
    "6.9b": (50_432, 32, 32, 4096),
    "12b": (50_688, 36, 40, 5120),
}


def pythia(size: str, linear: LinearFactory = PLAIN) -> TransformerDecoder:
    """Build a Pythia model.

    Args:
        size (str): ``70m``, ``160m``, ``410m``, ``1b``, ``1.4b``, ``2.8b``, ``6.9b`` or ``12b``.
        linear (LinearFactory): makes the linear layers. Default: plain ones.

    Returns:
        TransformerDecoder: the model, randomly initialised.

    Raises:
        ValueError: If there is no such size.
    """
    if size not in _PYTHIA:
        raise ValueError(f"there is no Pythia of size '{size}'; there are {', '.join(_PYTHIA)}")
    vocab_size, num_layers, num_heads, embed_dim = _PYTHIA[size]
    return gpt_neox(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        intermediate_dim=4 * embed_dim,
        max_seq_len=2048,
        linear=linear,
    )


lora_pythia = with_lora(pythia)
