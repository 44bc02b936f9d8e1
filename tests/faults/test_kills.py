"""A short form of the kill table: one process and two, SIGKILL at random moments and in the middle of saves."""

import pytest
from fault_tables import failing_rows
from kills import Job, kill_table

JOBS = [
    Job(lora=True, loss="TFIDFCrossEntropyLoss", num_processes=1),
    Job(lora=False, loss="TFIDFCrossEntropyLoss", num_processes=2),
]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.recipe}-{job.loss}-{job.num_processes}")
def test_a_killed_run_ends_bit_for_bit_like_one_that_was_left_alone(tmp_path, job):
    table = kill_table(tmp_path, num_kills=4 if job.num_processes == 1 else 2, jobs=[job])

    assert failing_rows(table) == 0, table.rows
