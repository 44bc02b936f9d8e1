"""The commands at the end of a run, which are run or printed: they evaluate it, train the other
model, and compare both.
"""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch.distributed as dist
from torch.utils.data import Dataset

from tfidf_tune._checks import SetupError
from tfidf_tune._config import OBJECTIVES, FinetuneConfig, read_config
from tfidf_tune.corpus.advice import NOTHING
from tfidf_tune.probe import run_of
from tfidf_tune.probe.run_identity import EVALUATION, HELD_OUT
from tfidf_tune.training._data import probe_files
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._folder import METRICS, RESUME_FOLDER
from tfidf_tune.training._messages import advised_setting
from tfidf_tune.training._run import Run, milestone_name

_WITHOUT_COPIES = "_dedup"  # after the name of a run's folder


class NextSteps(NamedTuple):
    """What follows a run.

    Attributes:
        commands (list[list[str]]): commands of ``tfidf-tune`` to run now, in parts.
        left (list[str]): command lines to print when these are done.
    """

    commands: list[list[str]]
    left: list[str]


def next_steps(cfg: FinetuneConfig, dataset: Dataset[Any], run: Run) -> NextSteps:
    """Print where the checkpoints are; return the commands that ``evaluate`` asks to run, and those
    that are left.

    The first evaluates the milestones of the run. The next are for the other model of a comparison:
    the command that trains it, with plain cross-entropy if this had weights or less text, else as
    the advice for the text says, or with the objective of the config, or repetition weights if that
    is cross-entropy; if it is trained already, the command that evaluates it, unless that is done,
    and the command that compares both. If nothing repeats in the text, cross-entropy needs no other
    model, and the next command audits it.
    """
    if not is_main_process():
        return NextSteps([], [])
    folder = run.output_dir
    checkpoints = _checkpoints(folder)
    names = ", ".join(path.name for path in checkpoints)
    print(f"Checkpoints in {folder}: {names}", file=sys.stderr)
    if not checkpoints or not probe_files(cfg, dataset):
        return NextSteps([], [])

    # This run is evaluated, and compared if the other one is evaluated already.
    evaluate = ["eval", str(folder)]
    is_baseline = _run_in(folder).get("objective") == "CE"
    advised = advised_setting(cfg) if is_baseline else None
    other = _other_folder(folder, is_baseline=is_baseline)
    if advised is not None and "deduplicate" in advised and not _checkpoints(other):
        other = other.with_name(f"{other.name.removesuffix('_weighted')}{_WITHOUT_COPIES}")
    compare = ["compare", str(other), str(folder)]
    if is_baseline:  # it is named first
        compare = ["compare", str(folder), str(other)]
    commands = [evaluate]
    is_other_evaluated = (other / EVALUATION).is_dir()
    if is_other_evaluated:
        commands.append(compare)

    # What is missing for the comparison is printed: the other evaluation, or the other run.
    is_other_trained = is_other_evaluated or bool(_checkpoints(other))
    printed: list[list[str]] = []
    if not cfg.evaluate:
        if _is_evaluated(folder, checkpoints):
            print(f"Evaluation in {folder / EVALUATION}", file=sys.stderr)
            commands.remove(evaluate)
        printed += commands
        commands = []
    if is_other_trained and not is_other_evaluated:
        printed += [["eval", str(other)], compare]
    started_by = _started_by()
    lines = [[_own_command(started_by), *command] for command in printed]
    if advised == NOTHING.setting and not is_other_trained:
        results = str(folder / EVALUATION)
        audit = ["probe", "audit", "--results", results, "--output-dir", str(folder / "audit")]
        lines.append([_own_command(started_by), *audit])
    elif started_by and not is_other_trained:
        words = [word for word in started_by if not word.startswith("dataset.deduplicate")]
        settings = _settings_of_other(other, started_by, advised, is_baseline=is_baseline)
        lines.append([*words, *settings])
    return NextSteps(commands, [shlex.join(line) for line in lines])


def print_left(steps: NextSteps) -> None:
    """Print the commands that are left."""
    if not steps.left:
        return
    print("Next:", file=sys.stderr)
    for line in steps.left:
        print(f"  {line}", file=sys.stderr)


def _is_evaluated(folder: Path, checkpoints: Sequence[Path]) -> bool:
    """Return whether each milestone has results that are newer than its files and the passages of
    the run.
    """
    passages = [*folder.glob("*.jsonl")]
    passages = [path for path in passages if path.name not in (METRICS, HELD_OUT)]
    for checkpoint in checkpoints:
        inputs = [path for path in [*checkpoint.iterdir(), *passages] if path.is_file()]
        newest_input = max(path.stat().st_mtime for path in inputs)
        results = (folder / EVALUATION / checkpoint.name).rglob("results_*.json")
        if not any(path.stat().st_mtime >= newest_input for path in results):
            return False
    return True


def _checkpoints(folder: Path) -> list[Path]:
    """Return the milestones of a run, the last one last."""
    paths = [folder / milestone_name(percent) for percent in range(1, 101)]
    return [path for path in paths if path.is_dir()]


def _run_in(folder: Path) -> dict[str, Any]:
    """Describe the run of a folder, also one without checkpoints; {} if there is none that can be
    read.
    """
    try:
        return run_of({"pretrained": str(folder / milestone_name(100))})
    except ValueError:  # a folder beside the run's may hold anything
        return {}


def _other_folder(folder: Path, *, is_baseline: bool) -> Path:
    """Return the folder of the other model: ``runs/mine_ce`` is the baseline of ``runs/mine``."""
    # "." and "runs/.." end in no name; "/" has none.
    named = folder
    if folder.name in ("", ".."):
        named = folder.resolve()
    if not is_baseline:
        # The name that was printed for the weighted model of a baseline "mine".
        stem = named.name.removesuffix("_weighted").removesuffix(_WITHOUT_COPIES) or named.name
        first = named.parent / stem
        if first != named and _run_in(first).get("objective") == "CE":
            return first
        if named.name.endswith(_WITHOUT_COPIES):
            return named.parent / f"{stem}_ce"
        return named.parent / f"{named.name}_ce"
    weighted = named.name.removesuffix("_ce")
    if weighted in ("", named.name):
        weighted = f"{named.name}_weighted"
    return named.parent / weighted


def _settings_of_other(
    other: Path, started_by: Sequence[str], advised: str | None, *, is_baseline: bool
) -> list[str]:
    """Return the overrides that train the other model with the command of this run, which they
    follow.
    """
    settings = []
    if not is_baseline:
        settings.append("loss=ce")
    else:
        begun_loss = _run_in(other).get("loss")
        if begun_loss:
            settings.append(f"loss={json.dumps(begun_loss)}")
        elif advised is not None:
            settings += advised.split()
            if "loss=" not in advised:
                settings.append("loss=ce")
        elif _loss_of_config(started_by) in ("", OBJECTIVES["ce"]["loss"]):
            settings.append("loss=repetition")
    settings.append(f"output_dir={other}")
    if any(other.glob(f"{RESUME_FOLDER}/step_*")):
        settings.append("resume_from_checkpoint=True")
    return settings


def _loss_of_config(started_by: Sequence[str]) -> str:
    """Return the component of the loss in the config that a command names, without overrides; "" if
    it is not known.
    """
    for word, following in pairwise([*started_by, ""]):
        if not word.startswith("--config"):
            continue
        name = following if word == "--config" else word.removeprefix("--config=")
        try:
            return str(read_config(name)["loss"]["_component_"])
        except (SetupError, LookupError, TypeError):
            return ""
    return ""


def _started_by() -> list[str]:
    """Return the command that started the run, with torchrun's options and without what the other
    model has its own of.

    [] if it was started from another program.
    """
    words = sys.orig_argv
    if dist.is_torchelastic_launched():
        # The parent's options decide the number of processes.
        try:
            words = psutil.Process(os.getppid()).cmdline()
        except psutil.Error:
            return []
    if "--config" not in words and not any(word.startswith("--config=") for word in words):
        return []
    own = ("loss=", "loss.", "output_dir=", "resume_from_checkpoint=")
    words = [word for word in words if not word.startswith(own)]
    # "/opt/venv/bin/python /opt/venv/bin/tune run" was typed as "tune run", or with the script's
    # path.
    script = words[1]
    if not os.access(script, os.X_OK):
        return words
    return [_as_typed(script), *words[2:]]


def _as_typed(script: str) -> str:
    """Return the name of a command if the shell finds it by that, else its path."""
    is_found = shutil.which(Path(script).name) == script
    return Path(script).name if is_found else script


def _own_command(started_by: Sequence[str]) -> str:
    """Return how ``tfidf-tune`` is typed: as it was, or as the command of this Python."""
    if started_by and Path(started_by[0]).name == "tfidf-tune":
        return started_by[0]
    script = Path(sys.executable).with_name("tfidf-tune")
    return _as_typed(str(script)) if script.is_file() else "tfidf-tune"
