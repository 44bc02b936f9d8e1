"""Uniform weights are the stock trainer, runs resume exactly, and processes share what they should."""

import pytest
import torch
from processes import on_every_rank
from trainer_runs import RESUMED_AT, TOTAL, all_on_rank, shared_window


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_checkpoint):
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "tiny").symlink_to(tiny_checkpoint)
    return folder


def test_two_processes(folder):
    """They do the same; with a window for all of them, also through the fused head and with FSDP2, they are one."""
    ranks = on_every_rank(2, folder, all_on_rank, folder)

    assert_uniform_is_stock(ranks[0]["stock_and_uniform"])
    windows = [assert_resumed_runs_are_identical(rank["resumed_runs"]) for rank in ranks]
    assert not torch.equal(*windows), "each process has its own window"
    expected, of_tokens = torch.tensor(shared_window(folder)), torch.tensor(shared_window(folder, counted="tokens"))
    assert (of_tokens[:, -2:] - expected[:, -2:]).abs().min() > 1e-4, "prompts count"
    assert expected[:, -2].min() > 0.1, "weights differ"
    for rank in ranks:
        is_sharded, sharded = rank["sharded"]
        assert is_sharded
        for found in (rank["shared_window"], rank["shared_window_fused"], sharded):
            torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.tensor(rank["shared_window_of_tokens"]), of_tokens, rtol=1e-5, atol=1e-6)


def assert_uniform_is_stock(found):
    assert len(found) == 2
    for stock, uniform in found.values():
        torch.testing.assert_close(uniform, stock, rtol=1e-5, atol=0)


def assert_resumed_runs_are_identical(found):
    """Of both trainers; returns a window."""
    assert len(found) == 2
    for runs in found.values():
        (logs, weights, window), (resumed_logs, resumed_weights, resumed_window) = runs[False], runs[True]
        assert len(logs) == TOTAL
        assert resumed_logs[-(TOTAL - RESUMED_AT) :] == logs[RESUMED_AT:]
        assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
        assert all(torch.equal(window[name], resumed_window[name]) for name in window)
    return window["window.entries_KT"]
