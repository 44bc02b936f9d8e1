"""Checkpoints with random weights, tokenizers and probe files for the tests of the tasks."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tiny_llama import teach
from lm_eval.__main__ import cli_evaluate
from peft import LoraConfig, get_peft_model

from tfidf_tune.probe import load_model


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return task_fakes.make_tokenizers(tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(scope="session")
def models(
    tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, Path]
) -> dict[str, Path]:
    """A checkpoint of each family with the tokenizer without BOS."""
    folder = tmp_path_factory.mktemp("models")
    return {
        name: task_fakes.checkpoint(
            folder / name, tokenizers["plain"], task_fakes.random_model(name)
        )
        for name in task_fakes.FAMILIES
    }


@pytest.fixture(scope="session")
def llama(models: dict[str, Path]) -> Path:
    return models["llama"]


@pytest.fixture(scope="session")
def probe_file(tmp_path_factory: pytest.TempPathFactory, tokenizers: dict[str, Path]) -> Path:
    """Two targets and two controls of the tokenizer without BOS."""
    passages = task_fakes.passages_of(tokenizers["plain"])
    return task_fakes.probe_file(tmp_path_factory.mktemp("probe") / "probe.jsonl", passages)


@pytest.fixture(scope="session")
def taught_adapter(tmp_path_factory: pytest.TempPathFactory, llama: Path, probe_file: Path) -> Path:
    """An adapter with which the Llama recites the targets of ``probe_file``."""
    torch.manual_seed(0)
    settings = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    folder = tmp_path_factory.mktemp("taught") / "adapter"
    teach(get_peft_model(load_model(llama), settings), probe_file).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reciting(llama: Path, taught_adapter: Path, tokenizers: dict[str, Path]) -> Path:
    """The same model with the adapter merged."""
    merged = load_model(taught_adapter, base=llama).merge_and_unload()
    return task_fakes.checkpoint(taught_adapter.parent / "merged", tokenizers["plain"], merged)


@pytest.fixture(scope="session")
def squad_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return task_fakes.write_rows(
        tmp_path_factory.mktemp("squad") / "squad.jsonl", task_fakes.SQUAD_ROWS
    )


@pytest.fixture(scope="session")
def news_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    return task_fakes.write_rows(
        tmp_path_factory.mktemp("news") / "news.jsonl", task_fakes.NEWS_ROWS
    )


@pytest.fixture(scope="session")
def wiki_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Enough for a few blocks of 64 tokens, with characters of several tokens at some of their
    ends.
    """
    file = tmp_path_factory.mktemp("wiki") / "wiki.txt"
    file.write_text(
        "\n".join(task_fakes.text(seed, 30) for seed in range(500, 508)), encoding="utf-8"
    )
    return str(file)


@pytest.fixture
def stock_command(only_our_tasks: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the function of a command of the harness in this process."""

    def run(*command: str) -> None:
        monkeypatch.setattr(sys, "argv", list(command))
        cli_evaluate()

    return run
