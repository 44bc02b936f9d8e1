"""Checkpoint folders to start from that nobody has to download."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def random_llama(folder: Path, model: Mapping[str, Any], seed: int) -> None:
    """Write a Llama of random weights with a tokenizer trained on the embedded corpus.

    Args:
        folder (Path): an existing folder; gets a complete Hugging Face model.
        model (Mapping[str, Any]): section ``model`` of a training config whose builder is
            ``torchtune.models.llama2.llama2``: the sizes.
        seed (int): of the weights.
    """
    import torch
    import transformers

    from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer

    train_embedded_tokenizer(folder, vocab_size=model["vocab_size"])
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=model["vocab_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_heads"],
        num_key_value_heads=model["num_kv_heads"],
        hidden_size=model["embed_dim"],
        intermediate_size=model["intermediate_dim"],
        max_position_embeddings=model["max_seq_len"],
        rms_norm_eps=model["norm_eps"],
        bos_token_id=None,
        eos_token_id=hf_tokenizer(str(folder)).eos_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
