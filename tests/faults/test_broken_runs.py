"""A short form of the fault table: one process, full fine-tuning, a third of the damaged files.

What befalls one process of two is in tests/recipes/test_distributed_faults.py; `make faults` tries every row.
"""

import pytest
from broken_runs import JOB_FULL, all_breaks, end_of_run_alone, try_break
from kills import make_inputs

DAMAGED = [row for row in all_breaks() if "newest checkpoint" in row.what and row.job.num_processes == 1]
ROWS = [*DAMAGED[::4], *(row for row in all_breaks() if row.job == JOB_FULL)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """How each job ends when it is left alone, made when a row first asks."""
    folder = tmp_path_factory.mktemp("alone")
    inputs, ends = make_inputs(folder / "inputs"), {}

    def end(job):
        if job not in ends:
            ends[job] = end_of_run_alone(job, folder / f"job_{len(ends)}", inputs)
        return inputs, ends[job]

    return end


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.what}-{row.job.recipe}-{row.job.num_processes}")
def test_a_broken_run_says_what_is_wrong_and_its_older_state_is_usable(tmp_path, expected, row):
    inputs, end = expected(row.job)

    tried = try_break(row, tmp_path / "row", inputs, end)

    assert tried.problems == ()
