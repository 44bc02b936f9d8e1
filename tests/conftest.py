"""What several test folders share: a tiny Llama with a tokenizer of its own, and text
to train on.
"""

import functools
import gc
import os
import sys

# Before anything imports a Hugging Face library: a test that would reach for the network fails at
# once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Models this small gain nothing from a second thread, and lose minutes to it on a busy machine.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tfidf_tune._torchao

# Here: it looks for referrers of objects, which it does not find among frozen ones.
import hypothesis
import pytest
import torch.utils.collect_env
from helpers.fakes.data import passage
from helpers.fakes.sentencepiece_model import train_sentencepiece
from helpers.fakes.tiny_llama import make_llama, make_tokenizer
from helpers.fakes.tiny_run import run_config, write_documents
from helpers.processes.browser import browser_fixture  # noqa: F401
from omegaconf import DictConfig

import tfidf_tune.cli
from tfidf_tune._quiet import hide_messages
from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer

hide_messages()
# No result depends on the speed of the machine.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(optionalhook=True)  # without pytest-xdist there is no such hook
def pytest_xdist_auto_num_workers() -> int:
    """Run one worker more than there are CPUs: tests of several processes often wait for each
    other.
    """
    return 1 + (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--device cuda`` runs the tests that take the fixture ``device``, and no others."""
    parser.addoption(
        "--device", default="cpu", help="where the tests compute that take a device; default: cpu"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With a device, leave out the tests that would compute on the CPU anyway."""
    if config.getoption("--device") == "cpu":
        return
    chosen = [item for item in items if "device" in getattr(item, "fixturenames", ())]
    if not torch.cuda.is_available():
        for item in chosen:
            item.add_marker(pytest.mark.skip(reason="torch finds no GPU"))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Where a test computes."""
    return torch.device(pytestconfig.getoption("--device"))


def pytest_collection() -> None:
    """Collect no garbage among modules and items, which live until the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave modules and items out of garbage collection: a quarter of the time went into looking
    through them.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenized corpora of the tests stay out of the user's cache, in this process and in those it
    starts.
    """
    folder = tmp_path_factory.mktemp("cache")
    os.environ["TFIDF_TUNE_CACHE"] = str(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files of the tests need not outlive a power cut; a test that asks for it looks
    at the calls.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_list_of_packages() -> Iterator[None]:
    """The harness writes pip's list of packages, the GPUs and compilers into each record, which
    takes seconds.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.utils.collect_env, "run", lambda command: (1, "", ""))
        yield


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sentences of a small grammar, see :func:`~tiny_run.write_documents`."""
    return write_documents(tmp_path_factory.mktemp("text") / "documents.txt")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    """A complete Hugging Face folder: tiny random Llama with grouped queries, and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_llama")
    return make_tokenizer(make_llama(folder), text_file)


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Callable[..., Path]:
    """Make a random checkpoint of an architecture, in several files, with a tokenizer:
    ``make_base("gptj", 64)``.
    """

    @cache
    def make(name: str, dim: int = 64) -> Path:
        # Which imports torchtune, as many tests do not.
        from helpers.fakes.tiny_models import (
            MODELS,
        )

        folder = tmp_path_factory.mktemp("base") / name
        MODELS[name].build_hf(dim).save_pretrained(folder, max_shard_size=f"{2 * dim}KB")
        return make_tokenizer(folder, text_file)

    return make


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run ``tfidf-tune`` in this process."""

    def run(*arguments: object) -> None:
        from torchtune import _recipe_registry

        monkeypatch.setattr(_recipe_registry, "_ALL_RECIPES", [*_recipe_registry._ALL_RECIPES])
        words = [str(Path(sys.executable).with_name("tfidf-tune")), *map(str, arguments)]
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, *words])
        monkeypatch.setattr(sys, "path", [*sys.path])
        tfidf_tune.cli.main()

    return run


@pytest.fixture
def only_our_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The index of the harness's own tasks takes seconds."""
    from lm_eval.tasks import TaskManager

    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager", functools.partial(TaskManager, include_defaults=False)
    )
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="module")
def quick_reports() -> Iterator[None]:
    """Draw no figures and resample a tenth as often, which is a third of an audit's time.

    For tests of what an audit does. tests/commands/test_probe_command.py,
    tests/audit/test_audit_report.py and tests/report have reports with all of that.
    """

    def draw_nothing(figure: Any, to: Any, **options: Any) -> None:
        to.write_bytes(b"") if isinstance(to, Path) else to.write(b"")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tfidf_tune.report._html.draw", draw_nothing)
        patched.setattr("tfidf_tune.results.intervals.NUM_RESAMPLES", 1000)
        yield


@pytest.fixture
def recipe_config(
    tmp_path: Path, tiny_checkpoint: Path, text_file: Path
) -> Callable[..., DictConfig]:
    """Make the config of a run on the tiny Llama: ``recipe_config(lora=True, **{"optimizer.lr":
    1e-2})``.
    """

    def make(*, lora: bool = False, **overrides: Any) -> DictConfig:
        return run_config(tmp_path / "run", tiny_checkpoint, text_file, lora=lora, **overrides)

    return make


@pytest.fixture(scope="session")
def embedded_tokenizer_folder(tmp_path_factory):
    """A folder with a small real tokenizer: byte-level BPE of 512 tokens."""
    return train_embedded_tokenizer(
        tmp_path_factory.mktemp("tokenizer") / "bpe-512", vocab_size=512
    )


@pytest.fixture(scope="session")
def tokenizer(embedded_tokenizer_folder):
    return hf_tokenizer(str(embedded_tokenizer_folder))


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory):
    """A folder with nothing but tokenizer.model and config.json, SentencePiece trained as Llama's
    was.
    """
    folder = train_sentencepiece(
        tmp_path_factory.mktemp("sentencepiece"),
        [passage(seed, 40) for seed in range(50)],
        vocab_size=400,
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    """40 lines: short ones and ones of more than 32 tokens by turns."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    lines = []
    for number in range(40):
        num_words = 60 if number % 2 else 5
        lines.append(passage(number, num_words))
    file.write_text("\n".join(lines), encoding="utf-8")
    return file
