"""A run that must not begin: how it is described and started, and what has to be true
of its end.
"""

import io
import re
import sys
import warnings
from collections.abc import Callable, Collection
from contextlib import redirect_stderr
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
from omegaconf import DictConfig, OmegaConf

from helpers.fakes.tiny_run import run_config
from tfidf_tune.training import FinetuneConfig, _train, check_config

RUN = "run"
CONFIG = "mine.yaml"
SEEN: dict[str, str] = {}  # name of a row -> its message, which `make faults` prints
# What is written when the run's folder is opened, before weights are read.
OPENED = (
    "config.yaml",
    "torchtune_config.yaml",
    "metrics.jsonl",
    "probe.jsonl",
    "held_out.jsonl",
    "logs",
    "logs/*",
)


@dataclass(frozen=True)
class Site:
    """Where a row runs: a folder of its own, with an earlier run and notes in ``run``; a tiny
    Llama; documents.
    """

    folder: Path
    checkpoint: Path
    text_file: Path

    def config(self, *, lora: bool = False, **overrides: Any) -> DictConfig:
        """Return the config of a run that works, with overrides."""
        return run_config(
            self.folder / RUN, self.checkpoint, self.text_file, lora=lora, **overrides
        )


@dataclass(frozen=True)
class BadInput:
    """A case of bad input: its name, and a function that writes the input and returns the config or
    its text.
    """

    what: str
    make: Callable[[Site], DictConfig | str]
    message: str  # what the error names, key or file, value and remedy, as a regular expression
    lora: bool = False  # the recipe is lora_finetune, not full_finetune
    arguments: tuple[str, ...] = ("--config", f"{{folder}}/{CONFIG}")  # of the recipe
    begins: bool = False  # the error is known when the run's folder is open, or only in training


def value(key: str, given: Any, message: str, *, lora: bool = False, **expected: Any) -> BadInput:
    """Make a row in which one key has a wrong value."""
    return BadInput(
        f"{key}={given}"[:60],
        lambda site: site.config(lora=lora, **{key: given}),
        message,
        lora=lora,
        **expected,
    )


def each_row(rows: Collection[BadInput]) -> Any:
    """Parametrize a test by rows."""
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.what) for row in rows])


def assert_refused(row: BadInput, site: Site) -> None:
    """Run a row as ``tune run`` does: it ends in one message, nothing is written, no training step
    is taken.
    """
    (site.folder / RUN).mkdir(parents=True)
    (site.folder / RUN / "notes.txt").write_text("of the user\n")
    (site.folder / RUN / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    earlier = cast(DictConfig, check_config(site.config(), FinetuneConfig))
    (site.folder / RUN / "config.yaml").write_text(OmegaConf.to_yaml(earlier))
    config = row.make(site)
    text = config if isinstance(config, str) else OmegaConf.to_yaml(config)
    (site.folder / CONFIG).write_text(text, errors="surrogateescape")
    before = _contents(site.folder)
    with (
        patch("signal.signal", lambda *_: None),
        patch.object(
            sys,
            "argv",
            ["recipe", *(argument.format(folder=site.folder) for argument in row.arguments)],
        ),
        patch.object(_train, "train_step", wraps=_train.train_step) as train_step,
        redirect_stderr(io.StringIO()) as stderr,
        warnings.catch_warnings(),
    ):
        # Errors are what pytest makes of them, not what a user sees.
        warnings.simplefilter("default")
        with pytest.raises(SystemExit) as ended:
            import_module(
                f"tfidf_tune.recipes.{'lora' if row.lora else 'full'}_finetune"
            ).recipe_main()
    sentence = str(ended.value.code).removeprefix("error: ")
    SEEN[row.what] = sentence
    assert re.search(row.message, sentence, re.DOTALL), sentence
    assert not re.search("^error: |^Traceback", stderr.getvalue(), re.MULTILINE)
    assert row.begins or not train_step.call_count
    after = _contents(site.folder)
    differing = {
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    }
    allowed = [f"{RUN}/{pattern}" for pattern in OPENED if row.begins]
    assert [
        name for name in differing if not any(fnmatch(name, pattern) for pattern in allowed)
    ] == []


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Return every file's content by its name, None for folders."""
    contents: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        contents[name] = path.read_bytes() if path.is_file() else None
    return contents
