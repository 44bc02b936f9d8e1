"""Pythia in all its sizes, "Pythia: A Suite for Analyzing Large Language Models", https://arxiv.org/abs/2304.01373.

Sizes: the config.json of https://huggingface.co/EleutherAI/pythia-70m and so on to pythia-12b.
"""

from typing import Any

from torchtune.modules import TransformerDecoder

from tfidf_tune.models.gpt_neox._component_builders import gpt_neox, lora_gpt_neox

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


def pythia(size: str) -> TransformerDecoder:
    """Build a Pythia model.

    Args:
        size (str): ``70m``, ``160m``, ``410m``, ``1b``, ``1.4b``, ``2.8b``, ``6.9b`` or ``12b``.

    Returns:
        TransformerDecoder: the model, randomly initialised.

    Raises:
        ValueError: If there is no such size.
    """
    return gpt_neox(**_sizes(size))


def lora_pythia(
    size: str,
    lora_attn_modules: list[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Build a Pythia model with LoRA.

    Args:
        size (str): see :func:`pythia`.
        lora_attn_modules (list[str]): attention layers with LoRA, of ``query_key_value``, ``output_proj``.
        apply_lora_to_mlp (bool): LoRA on the MLPs' linear layers too. Default: False.
        apply_lora_to_output (bool): LoRA on the output projection too. Default: False.
        lora_rank (int): rank of the adapters. Default: 8.
        lora_alpha (float): the adapters' contribution is scaled by alpha / rank. Default: 16.
        lora_dropout (float): dropout before the adapters. Default: 0.0.
        quantize_base (bool): NF4 for all linear layers but the output projection, adapters aside. Default: False.

    Returns:
        TransformerDecoder: the model, randomly initialised.

    Raises:
        ValueError: If there is no such size.
    """
    return lora_gpt_neox(
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        quantize_base=quantize_base,
        **_sizes(size),
    )


def _sizes(size: str) -> dict[str, Any]:
    if size not in _PYTHIA:
        raise ValueError(f"there is no Pythia of size '{size}'; there are {', '.join(_PYTHIA)}")
    vocab_size, num_layers, num_heads, embed_dim = _PYTHIA[size]
    return {
        "vocab_size": vocab_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "embed_dim": embed_dim,
        "intermediate_dim": 4 * embed_dim,
        "max_seq_len": 2048,
    }
