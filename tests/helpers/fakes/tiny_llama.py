"""A Llama and a tokenizer small enough for any test."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

from tfidf_tune.passages import read_probe_file

VOCAB_SIZE = 320
BLOCK_SIZE = 32
TINY_LLAMA = {
    "vocab_size": VOCAB_SIZE,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 64,
    "max_seq_len": 64,
    "norm_eps": 1e-5,
}


def make_llama(
    folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any
) -> Path:
    """Write a random Hugging Face Llama of the sizes of TINY_LLAMA; norms are random too, so that
    none is neutral.
    """
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": 0,
        "rms_norm_eps": 1e-5,
    }
    settings |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | overrides)))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def make_tokenizer(folder: Path, text_file: Path) -> Path:
    """Train a byte-level BPE of VOCAB_SIZE tokens and save it as a Hugging Face tokenizer."""
    bpe = ByteLevelBPETokenizer()
    bpe.train(
        str(text_file), vocab_size=VOCAB_SIZE, special_tokens=["<|endoftext|>"], show_progress=False
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    ).save_pretrained(folder)
    return folder


def teach(
    model: transformers.PreTrainedModel, probe_file: Path, *, known: int = 31
) -> transformers.PreTrainedModel:
    """Train on the targets of a probe file until each id after ``known`` is the most probable one
    by a margin.
    """
    ids = torch.tensor(
        [passage.token_ids for passage in read_probe_file(probe_file) if passage.kind == "target"]
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    model.train()
    for _ in range(400):
        logits = model(input_ids=ids).logits[:, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        if loss.unflatten(0, (len(ids), -1))[:, known:].max() < 0.2:
            break
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    return model.eval()
