"""SIGKILL at random moments: a run that is killed again and again ends bit for bit like one that
was not.
"""

import random
import shutil
import time
from itertools import product

import pytest
from helpers.processes.broken_runs import Job, end_state, finish, start
from helpers.processes.recipes import ALL

JOBS = [Job(loss="repetition")]
if ALL:
    JOBS = [
        Job(lora, number, loss)
        for number, lora, loss in product((1, 2), (False, True), ("CE", "TF-IDF"))
    ]


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_not(tmp_path, inputs, job):
    rng = random.Random(0)
    began = time.monotonic()
    expected = finish(job, tmp_path / "undisturbed", inputs)
    duration = time.monotonic() - began
    num_kills = 50 if ALL else 1
    in_saves = 0
    while num_kills:
        site = tmp_path / "killed"
        while num_kills:
            # Of three kills one waits until a checkpoint is being written.
            moment = None if rng.randrange(3) == 0 else rng.uniform(0, duration)
            processes = start(job, site, inputs, "killed")
            if not kill(processes, site / "run", moment):
                break
            num_kills -= 1
            in_saves += is_saving(site / "run")
        else:
            finish(job, site, inputs)
        processes.wait()
        assert end_state(site / "run") == expected
        shutil.rmtree(site)
    print(f"{in_saves} kills while a checkpoint was being written")


def kill(processes, run, moment):
    """Kill at a moment, None: while a checkpoint is written; return False if the
    run ended before.
    """
    end = time.monotonic()
    if moment is not None:
        end += moment
    while processes.is_running():
        if time.monotonic() >= end if moment is not None else is_saving(run):
            if moment is None:
                time.sleep(random.uniform(0, 0.02))
            if not processes.is_running():
                return False
            processes.kill()
            return True
        time.sleep(0.0005)
    return False


def is_saving(run):
    return any(run.glob(".checkpoint_*")) or any(run.glob("resume/.step_*"))
