"""GPT-J 6B. Sizes: https://huggingface.co/EleutherAI/gpt-j-6b/blob/main/config.json."""

from torchtune.modules import TransformerDecoder

from tfidf_tune.models._linear import PLAIN, LinearFactory, with_lora
from tfidf_tune.models.gptj._component_builders import gptj


def gptj_6b(linear: LinearFactory = PLAIN) -> TransformerDecoder:
    """Build GPT-J 6B.

    Args:
        linear (LinearFactory): makes the linear layers. Default: plain ones.

    Returns:
        TransformerDecoder: the model, randomly initialised.
    """
    return gptj(
        vocab_size=50_400, num_layers=28, num_heads=16, embed_dim=4096, max_seq_len=2048, rotary_dim=64, linear=linear
    )


lora_gptj_6b = with_lora(gptj_6b)
