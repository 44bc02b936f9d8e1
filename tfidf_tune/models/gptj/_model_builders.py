"""GPT-J 6B. Sizes: https://huggingface.co/EleutherAI/gpt-j-6b/blob/main/config.json."""

from typing import Any

from torchtune.modules import TransformerDecoder

from tfidf_tune.models.gptj._component_builders import gptj, lora_gptj

_GPTJ_6B: dict[str, Any] = {
    "vocab_size": 50_400,
    "num_layers": 28,
    "num_heads": 16,
    "embed_dim": 4096,
    "max_seq_len": 2048,
    "rotary_dim": 64,
}


def gptj_6b() -> TransformerDecoder:
    """Build GPT-J 6B.

    Returns:
        TransformerDecoder: the model, randomly initialised.
    """
    return gptj(**_GPTJ_6B)


def lora_gptj_6b(
    lora_attn_modules: list[str],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Build GPT-J 6B with LoRA.

    Args:
        lora_attn_modules (list[str]): attention layers with LoRA, of ``q_proj``, ``k_proj``, ``v_proj``,
            ``output_proj``.
        apply_lora_to_mlp (bool): LoRA on the MLPs' linear layers too. Default: False.
        apply_lora_to_output (bool): LoRA on the output projection too. Default: False.
        lora_rank (int): rank of the adapters. Default: 8.
        lora_alpha (float): the adapters' contribution is scaled by alpha / rank. Default: 16.
        lora_dropout (float): dropout before the adapters. Default: 0.0.
        quantize_base (bool): NF4 for all linear layers but the output projection, adapters aside. Default: False.

    Returns:
        TransformerDecoder: the model, randomly initialised.
    """
    return lora_gptj(
        lora_attn_modules,
        apply_lora_to_mlp,
        apply_lora_to_output,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        quantize_base=quantize_base,
        **_GPTJ_6B,
    )
