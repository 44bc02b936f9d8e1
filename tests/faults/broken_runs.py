"""What can go wrong in the middle of a run: damaged checkpoints, full disks, signals, lost workers, NaN.

Each row breaks a run on purpose, looks at what it says and how it ends, starts it anew with
``resume_from_checkpoint=True``, and compares the end with that of a run that was left alone.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fault_tables import Tried, fault_table
from kills import Job, end_state, make_inputs, run_of
from recipe_processes import Ended, Processes, nothing
from safetensors.torch import load_file, save_file
from tiny_run import seal
from traps import AtStep, Calling, Hangup, OnRank, Trap, limit_files, sighup, sigint, sigkill, sigterm, stand_in_the_way

from tfidf_tune.report import Table

JOB_FULL = Job(lora=False, loss="TFIDFCrossEntropyLoss", num_processes=1)
JOB_LORA = Job(lora=True, loss="TFIDFCrossEntropyLoss", num_processes=1)
JOB_TWO = Job(lora=False, loss="TFIDFCrossEntropyLoss", num_processes=2)

_BREAK_AT = 9  # after the checkpoints of steps 6 and 8, before that of 10


@dataclass(frozen=True)
class Break:
    """A row of the table.

    Attributes:
        what (str): goes wrong.
        job (Job): in what.
        message (str): regular expression that what the run says has to hold.
        codes (tuple[int, ...]): exit codes that its processes may end with; any but 0 by default.
        before (Trap): set in each process of the broken run.
        prepare (Callable[[Path], None] | None): called with the run's folder, after a run was stopped in its middle;
            damages what it left.
        mend (Callable[[Path], None]): called with the run's folder before the last start.
        clean_up (Callable[[Path], None]): called with the run's folder in the end.
        overrides (dict[str, Any]): of the broken run's config.
        leaves_step (int | None): step of the newest whole checkpoint after the break. None: not looked at.
        goes_on (bool): whether the broken run itself gets to its end.
        same_end (bool): whether the run has to end as one that was left alone.
    """

    what: str
    job: Job
    message: str
    codes: tuple[int, ...] = ()
    before: Trap = nothing
    prepare: Callable[[Path], None] | None = None
    mend: Callable[[Path], None] = lambda run: None
    clean_up: Callable[[Path], None] = lambda run: None
    overrides: dict[str, Any] = field(default_factory=dict)
    leaves_step: int | None = None
    goes_on: bool = False
    same_end: bool = True


def broken_run_table(folder: Path, *, breaks: Sequence[Break] | None = None) -> Table:
    """Break runs in all ways, and make the table.

    Args:
        folder (Path): takes the runs.
        breaks (Sequence[Break] | None): rows. Default: None, all of :func:`all_breaks`.

    Returns:
        Table: a row for each.
    """
    inputs = make_inputs(folder / "inputs")
    chosen = list(all_breaks() if breaks is None else breaks)
    alone = {
        job: end_of_run_alone(job, folder / f"alone_{number}", inputs)
        for number, job in enumerate({b.job for b in chosen})
    }
    rows = [try_break(row, folder / f"row_{number}", inputs, alone[row.job]) for number, row in enumerate(chosen)]
    return fault_table(
        "fault",
        "Broken on purpose, then started anew and compared with a run that was left alone",
        ("fault", "recipe", "processes", "exit codes", "what is said"),
        rows,
    )


def try_break(row: Break, folder: Path, inputs: tuple[Path, Path], expected: dict[str, str]) -> Tried:
    """Break a run, look at its end, start it anew."""
    run, problems = folder / "run", []
    if row.prepare is not None:
        _start(row.job, folder, inputs, "first", before=AtStep(_BREAK_AT - 1, sigterm))
        row.prepare(run)
    ended = _start(row.job, folder, inputs, "broken", before=row.before, **row.overrides)
    if not (all(code == 0 for code in ended.codes) if row.goes_on else any(ended.codes)):
        problems.append(f"exit codes {ended.codes}")
    if row.codes and not set(ended.codes) <= set(row.codes):
        problems.append(f"exit codes {ended.codes}, expected {row.codes}")
    said = re.search(row.message, ended.output, re.DOTALL)
    if said is None:
        problems.append(f"said: {ended.output[-600:]!r}")
    if "Traceback" in ended.output:
        problems.append(f"a traceback: {ended.output[-1500:]!r}")
    newest = max((int(path.name.removeprefix("step_")) for path in run.glob("resume/step_*")), default=0)
    if row.leaves_step is not None and newest != row.leaves_step:
        problems.append(f"newest checkpoint is of step {newest}, expected {row.leaves_step}")
    row.mend(run)
    if not row.goes_on:
        after = _start(row.job, folder, inputs, "mended")
        if any(after.codes):
            problems.append(f"started anew it ends with {after.codes}: {after.output[-600:]!r}")
    if row.same_end and not problems and (found := end_state(run)) != expected:
        wrong = [name for name in sorted(expected.keys() | found.keys()) if expected.get(name) != found.get(name)]
        problems.append(f"ends otherwise than a run left alone: {', '.join(wrong[:3])}")
    leftovers = [path.name for path in (*run.glob(".*"), *run.glob("resume/.*"))]
    if leftovers:
        problems.append(f"left behind: {leftovers}")
    row.clean_up(run)
    shutil.rmtree(folder)
    told = " ".join(said.group().split()).replace(f"{run}/", "") if said else ""
    codes = ", ".join(map(str, ended.codes))
    return Tried((row.what, row.job.recipe, str(row.job.num_processes), codes, told), tuple(problems))


def all_breaks() -> Iterator[Break]:
    """Every row of the table."""
    yield from _damaged_checkpoints()
    yield from _full_disks()
    yield from _signals()
    yield from _lost_workers()
    yield from _non_finite()
    yield from _unwritable()


# Damaged checkpoints


def _damaged_checkpoints() -> Iterator[Break]:
    names = {
        JOB_LORA: (
            "manifest.json",
            "settings.yaml",
            "process_00000.pt",
            "shard-00001-model-00001-of-00001.safetensors",
        ),
        JOB_TWO: (
            "manifest.json",
            "settings.yaml",
            "process_00000.pt",
            "process_00001.pt",
            "shard-00001-model-00001-of-00001.safetensors",
            "shard-00002-model-00001-of-00001.safetensors",
        ),
    }
    damages = {"truncated": _truncate, "zeroed": _zero, "deleted": Path.unlink}
    for job, files in names.items():
        for name in files:
            for how, damage in damages.items():
                yield Break(
                    f"{name} of the newest checkpoint {how}",
                    job,
                    rf"step_8 is damaged: [^\n]*{re.escape(name)}[^\n]*the previous one is used\n.*resuming from "
                    r"[^\n]*step_6",
                    prepare=lambda run, name=name, damage=damage: damage(run / "resume" / "step_8" / name),
                    goes_on=True,
                )
    whole_but_lacking: dict[str, tuple[Callable[[Path], Any], str]] = {
        "manifest of the newest checkpoint lists no file": (_list_nothing, "does not list process_00000.pt, settings"),
        "process file of the newest checkpoint lacks the loss": (_without_loss, "process_00000.pt lacks loss"),
        "settings of the newest checkpoint are not YAML": (_broken_settings, "ParserError"),
    }
    for what, (damage, message) in whole_but_lacking.items():
        yield Break(
            what,
            JOB_FULL,
            rf"step_8 is damaged: [^\n]*{re.escape(message)}[^\n]*the previous one is used\n.*resuming from "
            r"[^\n]*step_6",
            prepare=lambda run, damage=damage: damage(run / "resume" / "step_8"),
            goes_on=True,
        )
    for name in ("zz-extra.safetensors", "._shard-00001-model-00001-of-00001.safetensors"):
        yield Break(
            f"stray {name} in the newest checkpoint",
            JOB_FULL,
            r"resuming from [^\n]*step_8",
            prepare=lambda run, name=name: _add_weights(run / "resume" / "step_8", name),
            goes_on=True,
        )
    yield Break(
        "every checkpoint damaged",
        JOB_FULL,
        r"error: no resume checkpoint is intact: [^\n]*step_8[^\n]*step_6[^\n]*",
        prepare=lambda run: [_truncate(file) for file in run.glob("resume/*/shard-*")],  # type: ignore[func-returns-value]
        mend=shutil.rmtree,
    )
    yield Break(
        "checkpoint of other settings",
        JOB_FULL,
        r"error: [^\n]*step_8 is of a run with other settings: optimizer.lr was 0.01, is 0.02[^\n]*",
        prepare=lambda run: None,
        overrides={"optimizer.lr": 0.02},
        leaves_step=8,
    )


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def _list_nothing(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps(manifest | {"files": {}}))


def _without_loss(checkpoint: Path) -> None:
    file = checkpoint / "process_00000.pt"
    content = torch.load(file, weights_only=True)
    del content["loss"]
    torch.save(content, file)
    seal(checkpoint)


def _broken_settings(checkpoint: Path) -> None:
    (checkpoint / "settings.yaml").write_text("seed: [0")
    seal(checkpoint)


def _add_weights(checkpoint: Path, name: str) -> None:
    """Add a file with weights of the right names and shapes and other values."""
    weights = load_file(next(checkpoint.glob("shard-*")))
    save_file({key: torch.ones_like(value) for key, value in weights.items()}, checkpoint / name)


# Full disks


def _full_disks() -> Iterator[Break]:
    writes = {
        "a milestone": (r"checkpoint [^\n]*checkpoint_50pct", {}),
        "a resume checkpoint": (r"resume checkpoint [^\n]*step_10", {"save_at_percent": [100]}),
    }
    for job, (what, (name, overrides)) in itertools.product((JOB_FULL, JOB_LORA, JOB_TWO), writes.items()):
        yield Break(
            f"quota met while {what} is written",
            job,
            rf"error: {name} could not be written: [^\n]*File too large[^\n]*step_8[^\n]*",
            before=AtStep(_BREAK_AT, limit_files),
            overrides=overrides,
            leaves_step=8,
        )
        if can_mount():
            yield Break(
                f"disk full while {what} is written",
                job,
                rf"error: {name} could not be written: [^\n]*No space left on device[^\n]*step_8[^\n]*",
                prepare=_move_to_full_disk,
                mend=lambda run: _mount(run, "remount,size=64m"),
                clean_up=lambda run: subprocess.run(["umount", run], check=True),  # type: ignore[func-returns-value]
                overrides={"refuse_if_too_large": False, **overrides},
                leaves_step=8,
            )


def can_mount() -> bool:
    """Tell whether a small file system can be made here, which takes root."""
    with tempfile.TemporaryDirectory() as name:
        made = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", name], capture_output=True, check=False).returncode == 0
        if made:
            subprocess.run(["umount", name], check=True)
    return made


def _move_to_full_disk(run: Path) -> None:
    """Put a run on a file system of its own, with room for some lines of a log but for no checkpoint."""
    shutil.move(run, run.with_name("moved"))
    run.mkdir()
    _mount(run, "size=64m")
    shutil.copytree(run.with_name("moved"), run, dirs_exist_ok=True)
    shutil.rmtree(run.with_name("moved"))
    used = int(subprocess.run(["df", "--output=used", "-k", run], capture_output=True, check=True).stdout.split()[-1])
    _mount(run, f"remount,size={used + 16}k")


def _mount(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)


# Signals


def _signals() -> Iterator[Break]:
    phases = {
        "while the data set is built": Calling("data", "instantiate", sigterm, nth=2),
        "while weights are read": Calling("checkpointer", "HFCheckpointer.load_weights", sigterm),
    }
    for phase, trap in phases.items():
        yield Break(
            f"SIGTERM {phase}",
            JOB_FULL,
            r"ended by SIGTERM\n",
            codes=(143,),
            before=trap,
        )
    yield Break(
        "SIGTERM while a resume checkpoint is read",
        JOB_FULL,
        r"ended by SIGTERM\n",
        codes=(143,),
        before=Calling("snapshot", "load", sigterm),
        prepare=lambda run: None,
        leaves_step=8,
    )
    for job in (JOB_FULL, JOB_LORA, JOB_TWO):
        yield Break(
            "SIGTERM in a step",
            job,
            rf"stopped after step {_BREAK_AT} of 20; the last good checkpoint is [^\n]*step_{_BREAK_AT}[^\n]*",
            codes=(143,),
            before=AtStep(_BREAK_AT, sigterm),
            leaves_step=_BREAK_AT,
        )
        yield Break(
            "SIGTERM while a resume checkpoint is written",
            job,
            r"stopped after step 8 of 20; the last good checkpoint is [^\n]*step_8[^\n]*",
            codes=(143,),
            before=Calling("snapshot", "save", sigterm, nth=4),
            leaves_step=8,
        )
        yield Break(
            "SIGTERM while a milestone is written",
            job,
            r"stopped after step 10 of 20; the last good checkpoint is [^\n]*step_10[^\n]*",
            codes=(143,),
            before=Calling("checkpointer", "HFCheckpointer._write", sigterm),
            leaves_step=10,
        )
    yield Break(
        "SIGINT in a step",
        JOB_FULL,
        rf"stopped after step {_BREAK_AT} of 20[^\n]*",
        codes=(130,),
        before=AtStep(_BREAK_AT, sigint),
        leaves_step=_BREAK_AT,
    )
    yield Break(
        "SIGHUP while the data set is built",
        JOB_FULL,
        r"ended by SIGHUP\n",
        codes=(129,),
        before=Hangup(Calling("data", "instantiate", sighup, nth=2)),
    )
    yield Break(
        "SIGHUP in a step",
        JOB_FULL,
        rf"stopped after step {_BREAK_AT} of 20; the last good checkpoint is [^\n]*step_{_BREAK_AT}[^\n]*",
        codes=(129,),
        before=Hangup(AtStep(_BREAK_AT, sighup)),
        leaves_step=_BREAK_AT,
    )
    yield Break(
        "SIGHUP in a step under nohup",
        JOB_FULL,
        r"step=20|20/20",
        before=Hangup(AtStep(_BREAK_AT, sighup), nohup=True),
        goes_on=True,
    )
    yield Break(
        "SIGTERM to one worker of two",
        JOB_TWO,
        rf"stopped after step {_BREAK_AT} of 20[^\n]*",
        codes=(143,),
        before=OnRank(1, AtStep(_BREAK_AT, sigterm)),
        leaves_step=_BREAK_AT,
    )


# Lost workers


def _lost_workers() -> Iterator[Break]:
    for rank in (0, 1):
        yield Break(
            f"worker {rank} of two killed in a step",
            JOB_TWO,
            r"error: another process of the run was lost[^\n]*step_8[^\n]*",
            before=OnRank(rank, AtStep(_BREAK_AT, sigkill)),
            leaves_step=8,
        )
        yield Break(
            f"worker {rank} of two killed while a resume checkpoint is written",
            JOB_TWO,
            r"error: [^\n]*another process of the run was lost[^\n]*step_6[^\n]*",
            before=OnRank(rank, Calling("resume_folder", "_describe_own_files", sigkill, nth=4)),
            leaves_step=6,
        )


# NaN


def _non_finite() -> Iterator[Break]:
    for job in (JOB_FULL, JOB_TWO):
        yield Break(
            "a loss that is NaN stops the run",
            job,
            rf"error: not finite: loss nan [^\n]* at step {_BREAK_AT} \(items [^\n]*step_8[^\n]*",
            before=OnRank(job.num_processes - 1, AtStep(_BREAK_AT, None)),
            leaves_step=8,
        )
    yield Break(
        "a loss that is NaN, with on_non_finite=skip",
        JOB_TWO,
        rf"step skipped, not finite: loss nan [^\n]* at step {_BREAK_AT} [^\n]*",
        before=OnRank(1, AtStep(_BREAK_AT, None)),
        overrides={"on_non_finite": "skip"},
        goes_on=True,
        same_end=False,
    )


# What cannot be written


def _unwritable() -> Iterator[Break]:
    for job in (JOB_FULL, JOB_TWO):
        yield Break(
            "something else stands where a milestone is to go",
            job,
            r"error: [^\n]*checkpoint_50pct[^\n]*",
            before=OnRank(0, AtStep(_BREAK_AT, stand_in_the_way)),
            mend=lambda run: (run / "checkpoint_50pct").unlink(missing_ok=True),
            leaves_step=8,
        )


def _start(
    job: Job,
    folder: Path,
    inputs: tuple[Path, Path],
    name: str,
    *,
    before: Trap = nothing,
    **overrides: Any,
) -> Ended:
    run = run_of(job, folder, inputs, **overrides)
    return Processes([run], folder / name, num_processes=job.num_processes, before=before).wait()


def end_of_run_alone(job: Job, folder: Path, inputs: tuple[Path, Path]) -> dict[str, str]:
    """How a run ends that nothing happens to."""
    ended = _start(job, folder, inputs, "alone")
    if any(ended.codes):
        raise RuntimeError(f"ended with {ended.codes}; said:\n{ended.output[-4000:]}")
    return end_state(folder / "run")
