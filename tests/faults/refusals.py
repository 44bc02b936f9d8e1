"""A run that must not begin: how it is described and started, and what has to be true of its end."""

import io
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from omegaconf import DictConfig, OmegaConf
from sentences import changed_sentence
from tiny_run import run_config

from tfidf_tune.training import _train

RUN = "run"
_TESTS = Path(__file__).parents[1]
CONFIG = "mine.yaml"
# What is written when the run's folder is opened, before weights are read.
OPENED = ("config.yaml", "torchtune_config.yaml", "metrics.jsonl", "probe.jsonl", "logs", "logs/*")


@dataclass(frozen=True)
class Site:
    """Where a row runs: a folder of its own, with an earlier run's notes in ``run``; a tiny Llama; documents."""

    folder: Path
    checkpoint: Path
    text_file: Path

    def config(self, *, lora: bool = False, **overrides: Any) -> DictConfig:
        """Return the config of a run that works, with overrides."""
        return run_config(self.folder / RUN, self.checkpoint, self.text_file, lora=lora, **overrides)


@dataclass(frozen=True)
class BadInput:
    """A row of a table.

    Attributes:
        what (str): is wrong.
        make (Callable[[Site], DictConfig | str]): writes what the config names; returns the config, or its text.
        message (str): what the error message names, the key or file, as a regular expression.
        lora (bool): the recipe is lora_finetune, not full_finetune.
        arguments (tuple[str, ...]): of the recipe; ``{folder}`` stands for the row's.
        begins (bool): the error is known when the run's folder is open, or only in training.
    """

    what: str
    make: Callable[[Site], DictConfig | str]
    message: str
    lora: bool = False
    arguments: tuple[str, ...] = ("--config", f"{{folder}}/{CONFIG}")
    begins: bool = False


def value(key: str, given: Any, message: str, *, lora: bool = False, **expected: Any) -> BadInput:
    """Make a row in which one key has a wrong value."""
    return BadInput(
        f"{key}={given}"[:60], lambda site: site.config(lora=lora, **{key: given}), message, lora=lora, **expected
    )


def each_row(rows: Collection[BadInput]) -> Any:
    """Parametrize a test by rows."""
    return pytest.mark.parametrize("row", [pytest.param(row, id=row.what) for row in rows])


def problems_of(row: BadInput, site: Site) -> list[str]:
    """Run a row, and describe what is not as it has to be: one message, nothing written, no training step."""
    (site.folder / RUN).mkdir(parents=True)
    (site.folder / RUN / "notes.txt").write_text("of the user\n")
    (site.folder / RUN / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    config = row.make(site)
    text = config if isinstance(config, str) else OmegaConf.to_yaml(config)
    (site.folder / CONFIG).write_text(text, errors="surrogateescape")
    before = _contents(site.folder)
    code, stderr, num_steps = _run_here(
        [argument.format(folder=site.folder) for argument in row.arguments], lora=row.lora
    )
    after = _contents(site.folder)
    # Progress bars return to the start of their line.
    stderr = "\n".join(line.rsplit("\r", 1)[-1] for line in stderr.split("\n"))
    problems = []
    if code == 0:
        problems.append("exit code 0")
    if "Traceback (most recent call last)" in stderr:
        problems.append(f"a traceback: {stderr.strip().splitlines()[-1]}")
    messages = re.split(r"^error: ", stderr, flags=re.M)[1:]
    if len(messages) != 1:
        problems.append(f"not one message but: {stderr.strip()[-300:]!r}")
    elif not re.search(row.message, f"error: {messages[0].strip()}", re.S):
        problems.append(f"no /{row.message}/ in the message {messages[0]!r}")
    else:
        places = {"folder": site.folder, "text": site.text_file, "checkpoint": site.checkpoint, "tests": _TESTS}
        changed = changed_sentence(row.what, messages[0].strip(), **places)
        problems += [changed] if changed else []
    if num_steps and not row.begins:
        problems.append("training had begun")
    allowed = [f"{RUN}/{pattern}" for pattern in OPENED if row.begins]
    differing = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if unwanted := [name for name in differing if not any(fnmatch(name, pattern) for pattern in allowed)]:
        problems.append(f"written or changed: {', '.join(unwanted)}")
    return problems


def _run_here(arguments: list[str], *, lora: bool) -> tuple[int, str, int]:
    """Run a recipe in this process as ``tune run`` does; return exit code, stderr and the number of training steps."""
    module = import_module(f"tfidf_tune.recipes.{'lora' if lora else 'full'}_finetune")
    stderr = io.StringIO()
    code = 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with (
            patch.object(sys, "argv", ["recipe", *arguments]),
            patch.object(_train, "train_step", wraps=_train.train_step) as train_step,
            redirect_stderr(stderr),
            redirect_stdout(io.StringIO()),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("default")  # errors are what pytest makes of them, not what a user sees
            module.recipe_main()
    except SystemExit as ended:
        code, text = (ended.code or 0, "") if not isinstance(ended.code, str) else (1, ended.code)
        stderr.write(f"{text}\n")
    except Exception:
        code = 1
        stderr.write(traceback.format_exc())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(code), stderr.getvalue(), train_step.call_count


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Return every file's content by its name, None for folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }
