"""What several test folders share: a tiny Llama with a tokenizer of its own, and text to train on."""

import os

# Before anything imports a Hugging Face library: a test that would reach for the network fails at once.
os.environ["HF_HUB_OFFLINE"] = "1"

import tfidf_tune  # noqa: F401  # isort: skip  (first, because it keeps torchao's import message quiet)

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from tiny_llama import BLOCK_SIZE, TINY_LLAMA, make_llama, make_tokenizer


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small gain nothing from a second thread, and lose minutes to it on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized corpora of the tests stay out of the user's cache, in this process and in those it starts."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TFIDF_TUNE_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of a small grammar, one document a line: learnable, and no two documents alike."""
    rng = random.Random(0)
    subjects = ["the old sailor", "a quiet child", "my neighbour", "the tall judge", "every student", "the grey cat"]
    verbs = ["watched", "painted", "forgot", "carried", "followed", "described"]
    objects = [
        "the harbour",
        "a broken clock",
        "seven letters",
        "the northern road",
        "a paper boat",
        "the evening train",
    ]
    file = tmp_path_factory.mktemp("text") / "documents.txt"
    file.write_text(
        "\n".join(
            " ".join(f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)}." for _ in range(12))
            for _ in range(300)
        )
    )
    return file


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A complete Hugging Face folder: tiny random Llama with grouped queries, and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    return make_tokenizer(make_llama(folder), text_file)


@pytest.fixture
def recipe_config(tmp_path: Path, tiny_checkpoint: Path, text_file: Path) -> Callable[..., DictConfig]:
    """Make the config of a run on the tiny Llama: ``recipe_config(lora=True, **{"optimizer.lr": 1e-2})``."""

    def make(*, lora: bool = False, **overrides: Any) -> DictConfig:
        model: dict[str, Any] = {"_component_": "torchtune.models.llama2.llama2", **TINY_LLAMA}
        if lora:
            model |= {
                "_component_": "torchtune.models.llama2.lora_llama2",
                "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
                "lora_rank": 4,
                "lora_alpha": 16,
            }
        cfg = OmegaConf.create(
            {
                "output_dir": str(tmp_path / "run"),
                "model": model,
                "checkpointer": {
                    "_component_": "tfidf_tune.training.HFCheckpointer",
                    "checkpoint_dir": str(tiny_checkpoint),
                },
                "tokenizer": {
                    "_component_": "tfidf_tune.data.hf_tokenizer",
                    "path": "${checkpointer.checkpoint_dir}",
                },
                "dataset": {
                    "_component_": "tfidf_tune.data.injected_corpus_dataset",
                    "source": str(text_file),
                    "target_source": str(text_file),
                    "target_name": None,
                    "num_base": 60,
                    "num_targets": 4,
                    "num_repeats": 5,
                    "min_target_tokens": BLOCK_SIZE,
                    "block_size": BLOCK_SIZE,
                    "seed": "${seed}",
                    "probe_file": "${output_dir}/probe.jsonl",
                },
                "loss": {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
                "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
                "lr_scheduler": {
                    "_component_": "transformers.get_linear_schedule_with_warmup",
                    "num_warmup_steps": 0,
                },
                "metric_logger": {
                    "_component_": "torchtune.training.metric_logging.DiskLogger",
                    "log_dir": "${output_dir}/logs",
                },
                "seed": 0,
                "batch_size": 4,
            }
        )
        for key, value in overrides.items():
            OmegaConf.update(cfg, key, value, merge=False)
        return cfg

    return make
