"""A run that must not begin: how it is made and started, and what has to be true of its end."""

import io
import os
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Collection
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from fault_tables import Tried
from omegaconf import DictConfig, OmegaConf
from tiny_llama import make_llama, make_tokenizer
from tiny_run import run_config, write_documents

from tfidf_tune.training import _train

RUN = "run"
CONFIG = "mine.yaml"
# What is written when the run's folder is opened, before weights are read.
OPENED = ("config.yaml", "torchtune_config.yaml", "metrics.jsonl", "probe.jsonl", "logs", "logs/*")


@dataclass(frozen=True)
class Site:
    """Where a row is made.

    Attributes:
        folder (Path): the row's own; ``run`` in it is the run's, which holds notes and metrics of an earlier one.
        checkpoint (Path): a whole tiny Llama with its tokenizer, not to be changed.
        text_file (Path): documents, not to be changed.
    """

    folder: Path
    checkpoint: Path
    text_file: Path

    def config(self, *, lora: bool = False, **overrides: Any) -> DictConfig:
        """The config of a run that works, and what is to be different in it."""
        return run_config(self.folder / RUN, self.checkpoint, self.text_file, lora=lora, **overrides)


@dataclass(frozen=True)
class BadInput:
    """A row of the table.

    Attributes:
        what (str): is wrong.
        make (Callable[[Site], DictConfig | str]): writes what the config names; returns the config, or its text.
        message (str): regular expression that the one error message has to hold.
        lora (bool): the recipe is lora_finetune, not full_finetune.
        arguments (tuple[str, ...]): of the recipe; ``{folder}`` stands for the row's.
        command (tuple[str, ...]): starts the recipe in a process. Default: none, the recipe is run in this one.
        leaves (Collection[str]): patterns of files of the run that may be new or changed. Default: none.
        only_training_shows (bool): nothing could be known before the first step.
    """

    what: str
    make: Callable[[Site], DictConfig | str]
    message: str
    lora: bool = False
    arguments: tuple[str, ...] = ("--config", f"{{folder}}/{CONFIG}")
    command: tuple[str, ...] = ()
    leaves: Collection[str] = field(default_factory=frozenset)
    only_training_shows: bool = False


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        code (int): exit code of the process.
        stderr (str): what it said there.
        num_steps (int): training steps that were begun.
    """

    code: int
    stderr: str
    num_steps: int

    @property
    def message(self) -> str:
        """What begins with ``error:``, to the end; empty if there is nothing."""
        return self.stderr[found.start() :].strip() if (found := re.search(r"^error: ", self.stderr, re.M)) else ""


def make_materials(folder: Path) -> tuple[Path, Path]:
    """Write the checkpoint and the documents that rows are made from."""
    folder.mkdir(parents=True, exist_ok=True)
    text_file = write_documents(folder / "documents.txt")
    return make_tokenizer(make_llama(folder / "tiny_llama"), text_file), text_file


def try_row(row: BadInput, site: Site) -> Tried:
    """Make a row, start its run, and judge how it ends."""
    (site.folder / RUN).mkdir(parents=True)
    (site.folder / RUN / "notes.txt").write_text("of the user's\n")
    (site.folder / RUN / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0}\n')
    config = row.make(site)
    (site.folder / CONFIG).write_text(
        config if isinstance(config, str) else OmegaConf.to_yaml(config), errors="surrogateescape"
    )
    before = _contents(site.folder)
    arguments = [argument.format(folder=site.folder) for argument in row.arguments]
    ended = _in_process(row.command, arguments, site) if row.command else run_here(arguments, lora=row.lora)
    after = _contents(site.folder)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    told = ended.message.removeprefix("error: ").replace(str(site.folder), "...").replace(str(site.checkpoint), "base")
    return Tried((row.what, _shortened(told)), tuple(_problems(row, ended, changed)))


def run_here(arguments: list[str], *, lora: bool = False) -> Ended:
    """Run a recipe in this process as ``tune run`` does, its training steps counted."""
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
    return Ended(int(code), _lines(stderr.getvalue()), train_step.call_count)


def _in_process(command: tuple[str, ...], arguments: list[str], site: Site) -> Ended:
    finished = subprocess.run(
        [*command, *arguments],
        cwd=site.folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return Ended(finished.returncode, _lines(finished.stderr), 0)


def _lines(stderr: str) -> str:
    """Without progress bars, which return to the start of their line."""
    return "\n".join(line.rsplit("\r", 1)[-1] for line in stderr.split("\n"))


def _problems(row: BadInput, ended: Ended, changed: list[str]) -> list[str]:
    problems = []
    if ended.code == 0:
        problems.append("exit code 0")
    if "Traceback (most recent call last)" in ended.stderr:
        problems.append(f"a traceback: {ended.stderr.strip().splitlines()[-1]}")
    if len(re.findall(r"^error: ", ended.stderr, re.M)) != 1:
        problems.append(f"not one message but: {ended.stderr.strip()[-300:]!r}")
    elif not re.search(row.message, ended.message, re.S):
        problems.append(f"no /{row.message}/ in the message {ended.message!r}")
    if ended.num_steps and not row.only_training_shows:
        problems.append("training had begun")
    allowed = [f"{RUN}/{pattern}" for pattern in row.leaves]
    if unwanted := sorted(name for name in changed if not any(fnmatch(name, pattern) for pattern in allowed)):
        problems.append(f"written or changed: {', '.join(unwanted)}")
    return problems


def _contents(folder: Path) -> dict[str, bytes | None]:
    """Every file's content by its name, None for folders."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def _shortened(text: str, length: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else f"{text[: length - 3]}..."
