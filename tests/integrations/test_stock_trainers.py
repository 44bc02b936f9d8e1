"""Uniform weights are the stock trainer; runs resume exactly; processes share what they should."""

import pytest
import torch
from hosts import in_processes
from trainer_runs import RESUMED_AT, TOTAL, all_in_two, resumed_runs, shared_window, stock_and_uniform


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_checkpoint):
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "tiny").symlink_to(tiny_checkpoint)
    return folder


@pytest.fixture(scope="module")
def of_two(folder):
    """What each of two processes returned."""
    return in_processes(all_in_two, folder)


def test_uniform_weights_are_the_stock_trainer(folder, of_two):
    for found in (stock_and_uniform(folder), of_two[0]["stock_and_uniform"]):
        assert len(found) == 8
        for name, (logs, evaluated) in found.items():
            if name.endswith("weighted"):
                expected, expected_evaluated = found[name.replace("weighted", "stock")]
                torch.testing.assert_close(torch.tensor(logs), torch.tensor(expected), rtol=1e-5, atol=0)
                torch.testing.assert_close(torch.tensor(evaluated), torch.tensor(expected_evaluated), rtol=1e-5, atol=0)


def test_a_resumed_run_is_the_uninterrupted_one(folder, of_two):
    windows = []
    for found in (resumed_runs(folder), *(each["resumed_runs"] for each in of_two)):
        for runs in found.values():
            (logs, weights, window), (resumed_logs, resumed_weights, resumed_window) = runs[False], runs[True]
            assert len(logs) == TOTAL
            assert resumed_logs[-(TOTAL - RESUMED_AT) :] == logs[RESUMED_AT:]
            assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
            assert all(torch.equal(window[name], resumed_window[name]) for name in window)
        windows.append(window["window.entries_KT"])
    assert not torch.equal(windows[1], windows[2]), "each process has its own window"


def test_a_shared_window_is_that_of_one_process(folder, of_two):
    """Also through the fused head, and with weights that FSDP2 shards."""
    expected = torch.tensor(shared_window(folder))
    assert expected[:, -2].min() > 0.1, "weights differ"
    for rank in of_two:
        is_sharded, sharded = rank["sharded"]
        assert is_sharded
        for found in (rank["shared_window"], rank["shared_window_fused"], sharded):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)
