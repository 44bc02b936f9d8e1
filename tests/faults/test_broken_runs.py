"""A run that breaks ends in one message, and resumes to the end of a run that did not break, bit
for bit.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import hooks
from helpers.processes.broken_runs import (
    Job,
    can_mount,
    end_state,
    finish,
    mount,
    newest_step,
    start,
)
from helpers.processes.hooks import at_call, at_step, send
from helpers.processes.recipes import ALL, nothing

FULL = Job()
LORA = Job(lora=True)
FULL_TWO = Job(num_processes=2)
TWO = Job(lora=True, num_processes=2)
STEP = 5  # after the checkpoints of steps 2 and 4, before that of 6
STOPPED = r"stopped after step {} of 12; the last good checkpoint is [^\n]*step_{}: "
TERMINATE = partial(send, signal.SIGTERM)


@dataclass(frozen=True)
class Break:
    """A way to break a run, which is resumed and ends as an undisturbed one."""

    what: str
    job: Job
    message: str  # regular expression of what has to be said exactly once
    before: Callable[[int], None] = nothing  # hook of the processes
    code: int | None = None  # exit code after a signal; None: an error, unless the run succeeds
    prepare: Callable[[Path], object] | None = (
        None  # called with the folder of a run that was stopped after step 4
    )
    # Called with the run's folder before it is resumed.
    repair: Callable[[Path], object] = lambda run: None
    overrides: dict[str, Any] = field(default_factory=dict)  # of the broken run's config
    newest: int | None = None  # step of the newest resume checkpoint afterwards
    succeeds: bool = False  # the broken run reaches its end
    same_end: bool | None = (
        True  # False: as it skipped a step; None: it is not resumed, but leaves no temporary file
    )
    rare: bool = False  # `make test` leaves it out


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def damaged(job: Job, name: str, damage: Callable[[Path], object]) -> Break:
    """Damage a file of the newest checkpoint."""
    return Break(
        f"{damage.__name__} {name}",
        job,
        rf"step_4 is damaged: [^\n]*{re.escape(name)}[^\n]*; the previous one is used\n.*resuming from \S*step_2",
        prepare=lambda run: damage(run / "resume" / "step_4" / name),
        succeeds=True,
        rare=(job, name, damage) != (TWO, "process_00001.pt", Path.unlink),
    )


def move_to_full_disk(run: Path) -> None:
    """Move a run to a file system of its own, with room for some lines of a log but not for a
    checkpoint.
    """
    shutil.move(run, run.with_name("moved"))
    run.mkdir()
    mount(run, "size=64m")
    shutil.copytree(run.with_name("moved"), run, dirs_exist_ok=True)
    used = int(
        subprocess.run(
            ["df", "--output=used", "-k", run], capture_output=True, check=True
        ).stdout.split()[-1]
    )
    mount(run, f"remount,size={used + 16}k")


SHARDS = tuple(f"shard-0000{number}-model-00001-of-00001.safetensors" for number in (1, 2))
COMMON = ("manifest.json", "settings.yaml", "process_00000.pt", SHARDS[0])
OF_TWO = (*COMMON, "process_00001.pt", SHARDS[1])
HANG_UP = partial(send, signal.SIGHUP)
LOST = r"error: [^\n]*another process of the run was lost[^\n]*step_{}"
LOSE = partial(hooks.spoil_terms, ("loss",), float("nan"), {1: range(STEP, STEP + 1)})
NAN = rf"not finite: loss nan and gradient norm nan at step {STEP} \(items "
DAMAGES = (truncate, zero, Path.unlink)
ROWS = [
    *(damaged(LORA, name, damage) for name, damage in product(COMMON, DAMAGES)),
    *(damaged(TWO, name, damage) for name, damage in product(OF_TWO, DAMAGES)),
    Break(
        "every checkpoint damaged",
        FULL,
        r"error: no resume checkpoint is intact: [^\n]*step_4[^\n]*step_2",
        prepare=lambda run: [truncate(file) for file in run.glob("resume/*/shard-*")],
        same_end=None,
        rare=True,
    ),
    Break(
        "a quota is met by a resume checkpoint",
        FULL,
        r"error: resume checkpoint [^\n]*step_6 could not be written: [^\n]*File too large[^\n]*step_4",
        partial(at_call, "_train.train_step", hooks.limit_files, nth=STEP),
        overrides={"save_at_percent": [100]},
        newest=4,
        same_end=None,
        rare=can_mount(),
    ),
    *[
        Break(
            "a milestone fills the disk",
            FULL,
            r"error: checkpoint [^\n]*50pct could not be written: [^\n]*No space left on device[^\n]*step_4",
            hooks.ignore_disk,
            prepare=move_to_full_disk,
            repair=lambda run: mount(run, "remount,size=64m"),
            newest=4,
        )
    ]
    * can_mount(),
    Break(
        "SIGHUP while data are loaded",
        FULL,
        r"ended by SIGHUP\n",
        partial(hooks.hang_up, partial(at_call, "_data.instantiate", HANG_UP, nth=2), False),
        129,
        same_end=None,
        rare=True,
    ),
    Break(
        "SIGTERM while a resume checkpoint is read",
        FULL,
        r"ended by SIGTERM\n",
        partial(at_call, "_resume.load", TERMINATE),
        143,
        prepare=lambda run: None,
        newest=4,
        rare=True,
    ),
    Break(
        "SIGHUP under nohup",
        FULL,
        "Checkpoints in ",
        partial(hooks.hang_up, partial(at_step, STEP, signal.SIGHUP), True),
        succeeds=True,
    ),
    Break(
        "SIGTERM in a milestone",
        FULL,
        STOPPED.format(6, 6),
        partial(at_call, "_checkpointer.HFCheckpointer._write", TERMINATE),
        143,
        newest=6,
    ),
    Break(
        "SIGTERM to one process",
        TWO,
        STOPPED.format(STEP, STEP),
        partial(at_step, STEP, signal.SIGTERM, ranks=(1,)),
        143,
        newest=STEP,
    ),
    *(
        Break(
            f"process {rank} is killed in {name}",
            TWO,
            LOST.format(newest),
            partial(at_call, name, partial(send, signal.SIGKILL), nth=nth, ranks=(rank,)),
            newest=newest,
            rare=rank == 0,
        )
        for rank, name, nth, newest in (
            (0, "_train.train_step", STEP, 4),
            (1, "_resume._describe_own_files", 2, 2),
        )
    ),
    Break(
        "the loss of one process is NaN",
        TWO,
        rf"error: {NAN}[^\n]*step_4",
        LOSE,
        newest=4,
        same_end=None,
        rare=True,
    ),
    Break(
        "a step is skipped because the loss of one process is NaN",
        TWO,
        f"step skipped, {NAN}",
        LOSE,
        overrides={"on_non_finite": "skip"},
        succeeds=True,
        same_end=False,
    ),
    Break(
        "all weights are 0 for ten steps, in one process from step 3 on, in the other from step 1 "
        "on",
        TWO,
        "error: the weights of all tokens were 0 in 10 steps in a row, up to step 12",
        partial(hooks.spoil_terms, ("loss", "weights"), 0.0, {0: range(3, 13), 1: range(1, 13)}),
        newest=10,
        same_end=None,
        rare=True,
    ),
    Break(
        "a milestone cannot be written",
        FULL_TWO,
        r"error: checkpoint [^\n]*checkpoint_100pct could not be written: [^\n]*No space left on device",
        partial(at_call, "_checkpointer.hf.write_weights", hooks.write_one_part, nth=2, ranks=(0,)),
        newest=10,
        same_end=None,
        rare=True,
    ),
    Break(
        "one process cannot write its resume file",
        TWO,
        r"error: (process 1: )?resume checkpoint [^\n]*step_4 could not be written: [^\n]*No space left",
        partial(at_call, "_resume.torch.save", hooks.refuse, nth=2, ranks=(1,)),
        newest=2,
        same_end=None,
    ),
    Break(
        "one process finds its base checkpoint damaged",
        TWO,
        r"error: process 1: the copy of this machine is damaged\n",
        hooks.damage_base,
        newest=0,
        same_end=None,
        rare=True,
    ),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory, inputs):
    """Return the end of a job's undisturbed run."""
    return cache(lambda job: finish(job, tmp_path_factory.mktemp("undisturbed"), inputs))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, inputs):
    """Return the folder of a job's run that was stopped after the checkpoint before STEP."""

    def stop(job):
        folder = tmp_path_factory.mktemp("stopped")
        start(
            job, folder, inputs, "first", before=partial(at_step, STEP - 1, signal.SIGTERM)
        ).wait()
        return folder / "run"

    return cache(stop)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    yield folder
    if os.path.ismount(folder):
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if ALL or not row.rare], ids=lambda row: row.what
)
def test_a_broken_run_ends_in_one_message_and_resumes_to_the_same_end(
    tmp_path, inputs, run, stopped, expected, row
):
    if row.prepare is not None:
        shutil.copytree(stopped(row.job), run)
        row.prepare(run)

    ended = start(row.job, tmp_path, inputs, "broken", before=row.before, **row.overrides).wait()

    if row.succeeds or row.code:
        assert set(ended.codes) == {row.code or 0}, ended.output
        assert "error: " not in ended.output
    else:
        assert 0 not in ended.codes
        # One message, which may hold the "I/O error: " of a library.
        assert len(re.findall(r"^error: ", ended.output, flags=re.MULTILINE)) == 1, ended.output
    assert len(re.findall(row.message, ended.output, re.DOTALL)) == 1, ended.output
    assert "Traceback" not in ended.output
    assert row.newest in (None, newest_step(run))
    if row.same_end is None:  # before anything was written, or with everything complete
        assert not [*run.glob(".*"), *run.glob("resume/.*")]
        return
    row.repair(run)
    if not row.succeeds:
        finish(row.job, tmp_path, inputs)
    assert (end_state(run) == expected(row.job)) == row.same_end
