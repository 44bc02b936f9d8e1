"""TinyLlama 1.1B; Llama-2 7B and 13B are torchtune's own ``llama2_7b``, ``llama2_13b`` and their ``lora_`` forms.

Sizes: https://huggingface.co/TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T/blob/main/config.json
"""

from typing import Any

from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.modules import TransformerDecoder
from torchtune.modules.peft import LORA_ATTN_MODULES

_TINYLLAMA_1_1B: dict[str, Any] = {
    "vocab_size": 32_000,
    "num_layers": 22,
    "num_heads": 32,
    "num_kv_heads": 4,
    "embed_dim": 2048,
    "max_seq_len": 2048,
    "intermediate_dim": 5632,
    "attn_dropout": 0.0,
    "norm_eps": 1e-5,
}


def tinyllama_1_1b() -> TransformerDecoder:
    """Build TinyLlama 1.1B, "TinyLlama: An Open-Source Small Language Model" (https://arxiv.org/abs/2401.02385).

    Returns:
        TransformerDecoder: the model, randomly initialised.
    """
    return llama2(**_TINYLLAMA_1_1B)


def lora_tinyllama_1_1b(
    lora_attn_modules: list[LORA_ATTN_MODULES],
    apply_lora_to_mlp: bool = False,
    apply_lora_to_output: bool = False,
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    quantize_base: bool = False,
) -> TransformerDecoder:
    """Build TinyLlama 1.1B with LoRA on the named linear layers, as torchtune's ``lora_llama2_7b`` does.

    Args:
        lora_attn_modules (list[LORA_ATTN_MODULES]): attention projections with LoRA, of ``q_proj``, ``k_proj``,
            ``v_proj``, ``output_proj``.
        apply_lora_to_mlp (bool): LoRA on the MLP's linear layers too. Default: False.
        apply_lora_to_output (bool): LoRA on the output projection too. Default: False.
        lora_rank (int): rank of the adapters. Default: 8.
        lora_alpha (float): the adapters' contribution is scaled by alpha / rank. Default: 16.
        lora_dropout (float): dropout before the adapters. Default: 0.0.
        quantize_base (bool): NF4 for all linear layers but the output projection, adapters aside. Default: False.

    Returns:
        TransformerDecoder: the model, randomly initialised.
    """
    return lora_llama2(
        lora_attn_modules=lora_attn_modules,
        apply_lora_to_mlp=apply_lora_to_mlp,
        apply_lora_to_output=apply_lora_to_output,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        quantize_base=quantize_base,
        **_TINYLLAMA_1_1B,
    )
