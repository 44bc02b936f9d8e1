"""Stand-ins for passages, tokenizers, models and results, small enough to reason about."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tfidf_tune.passages import Passage
from tfidf_tune.probe import token_likelihoods

VOCAB_SIZE = 64


def a_passage(name, token_ids, kind="target", num_prompt=None):
    of_tokenizer = {"tokenizer": "words", "tokenizer_fingerprint": "f1"}
    return Passage(name, kind, "", token_ids, 1, [], "mine", **of_tokenizer, num_prompt=num_prompt)


@dataclass(frozen=True)
class WordTokenizer:
    """Id 7 <-> the word "w7". By default its EOS is outside the vocabulary of the models here."""

    eos_id: int = VOCAB_SIZE
    fingerprint: str = "f1"
    bos_id: int | None = None

    def decode(self, ids):
        return " ".join(f"w{i}" for i in ids)

    def encode(self, text, add_bos=True, add_eos=True):
        """A line end has no id."""
        ids = [int(word[1:]) for word in text.split()]
        before = [self.bos_id] if add_bos and self.bos_id is not None else []
        return [*before, *ids, *([self.eos_id] if add_eos else [])]


class SuccessorModel(nn.Module):
    """Predicts id + 1 (modulo the vocabulary) after each id, and records the ids of every call."""

    def __init__(self, vocab_size=VOCAB_SIZE):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 1)
        self.calls = []

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, past_key_values=None, use_cache=None, logits_to_keep=0):
        self.calls.append(input_ids.tolist())
        num_ids = self.embedding.num_embeddings
        logits = nn.functional.one_hot((input_ids + 1) % num_ids, num_ids).float()
        return SimpleNamespace(logits=logits[:, -logits_to_keep:], past_key_values=None)


def tiny_llama(seed=0, **config):
    """Weights wide enough that greedy text does not fall into a loop at once."""
    torch.manual_seed(seed)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.5, **(settings | config))).eval()


@torch.no_grad()
def greedy_without_cache(model, prompts, num_tokens):
    """The definition: a forward pass over all ids for each new id. Prompts have one length."""
    ids = torch.tensor(prompts)
    for _ in range(num_tokens):
        following = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    return ids[:, len(prompts[0]) :].tolist()


def token_perplexity(model, blocks):
    """Of blocks ``[n, s]``, the first id of each only context."""
    return math.exp(np.mean([one.nll for one in token_likelihoods(model, blocks.tolist())]))


def random_ids(length, seed):
    return torch.randint(
        0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@pytest.fixture(scope="session")
def llama():
    return tiny_llama()


@pytest.fixture(scope="session")
def recited(llama):
    """Targets that the model has memorized: a random prompt of 8 ids and its own greedy
    continuation.
    """
    prompts = [random_ids(8, seed) for seed in range(3)]
    continuations = greedy_without_cache(llama, prompts, 44)
    texts = zip(prompts, continuations, strict=True)
    return [
        a_passage(f"target-{i}", prompt + continuation)
        for i, (prompt, continuation) in enumerate(texts)
    ]


@pytest.fixture(scope="session")
def unseen():
    return [a_passage(f"control-{i}", random_ids(52, 100 + i), kind="control") for i in range(3)]
