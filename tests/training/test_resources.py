"""The sizes that a recipe prints, and what it refuses."""

from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.fakes.tiny_run import run_recipe

from tfidf_tune.training import HFCheckpointer, SetupError, _resources

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def companions(tiny_checkpoint):
    """Bytes of a checkpoint's files other than weights: the tokenizer's, and settings of
    generation.
    """
    return HFCheckpointer(checkpoint_dir=str(tiny_checkpoint)).companion_bytes


@pytest.mark.parametrize(("lora", "trained", "frozen"), [(False, 39_072, 0), (True, 1_792, 39_072)])
def test_weights_and_optimizer_state_are_printed_before_training(
    recipe_config, capsys, lora, trained, frozen
):
    """Parameters by hand: 2 x 320 x 32 + 2 x (2 x 32 x 32 + 2 x 32 x 16 + 3 x 32 x 64 + 2 x 32) +
    32, and of rank 4: 2 x 4 x (2 x (32 + 32) + 2 x (32 + 16))."""
    run_recipe(recipe_config(lora=lora, max_steps=1), lora=lora)

    printed = capsys.readouterr().err
    sizes = [4 * number / 2**20 for number in (trained + frozen, 2 * trained)]
    line = (
        f"{trained:,} parameters are trained, {frozen:,} frozen: weights {sizes[0]:.2f} MiB, "
        f"optimizer state {sizes[1]:.2f} MiB\n"
    )
    assert printed.index(line) < printed.index("step/s")


@pytest.mark.parametrize(("lora", "trained", "frozen"), [(False, 39_072, 0), (True, 1_792, 39_072)])
def test_the_least_time_is_printed_before_the_first_step(
    recipe_config, monkeypatch, capsys, lora, trained, frozen
):
    """Of 4 operations a token for each weight, and 2 for each that is trained."""
    cfg = recipe_config(lora=lora, max_steps=3)
    tokens = 3 * cfg.batch_size * cfg.dataset.block_size
    operations = tokens * (4 * (trained + frozen) + 2 * trained)
    monkeypatch.setattr(
        _resources, "_operations_per_second", lambda run, sufficient_rate: operations / 7300
    )
    run_recipe(cfg, lora=lora)
    printed = capsys.readouterr().err
    assert printed.index(
        "Time: at least 2 hours, by the products of matrices alone\n"
    ) < printed.index("step/s")


def test_slow_trials_do_not_lengthen_the_least_time(monkeypatch):
    """The device multiplies at 10 GFLOPS, but the first trials of each size take a hundred times as
    long.
    """

    class BusyTimer:
        def __init__(self, statement, globals, num_threads):
            self._seconds = 2 * len(globals["matrix"]) ** 3 / 1e10
            self._num_trials = 0

        def timeit(self, number):
            self._num_trials += 1
            factor = 100 if self._num_trials < 3 else 1
            return SimpleNamespace(median=factor * self._seconds)

    monkeypatch.setattr(_resources, "Timer", BusyTimer)
    run = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    rate = _resources._operations_per_second(run, sufficient_rate=1e12)
    assert rate == pytest.approx(1e10)


def test_the_rate_is_measured_for_a_limited_time(monkeypatch):
    """Of a dtype that takes ten seconds for a product, one trial is made."""
    clock = SimpleNamespace(now=0.0)

    class SlowTimer:
        def __init__(self, statement, globals, num_threads):
            pass

        def timeit(self, number):
            clock.now += 10
            return SimpleNamespace(median=10.0)

    monkeypatch.setattr(_resources, "Timer", SlowTimer)
    monkeypatch.setattr(_resources.time, "monotonic", lambda: clock.now)
    run = SimpleNamespace(dtype=torch.float32, device=torch.device("cpu"))
    rate = _resources._operations_per_second(run, sufficient_rate=1e12)
    assert rate == pytest.approx(2 * 128**3 / 10)
    assert clock.now == 10


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.01, "1 second"),
        (1.4, "1 second"),
        (1.6, "2 seconds"),
        (119, "119 seconds"),
        (120, "2 minutes"),
        (1801, "30 minutes"),
        (9000, "2.5 hours"),
        (7200 * 12, "24 hours"),
        (86_400 * 2.25, "2.2 days"),
        (86_400 * 1234, "1,234 days"),
    ],
)
def test_times_are_written_to_two_digits(seconds, text):
    assert _resources.format_seconds(seconds) == text


def test_merged_adapters_are_counted_as_complete_models_and_no_resume_checkpoints_if_none_are_kept(
    recipe_config, monkeypatch, companions
):
    cfg = recipe_config(lora=True, max_steps=1, merge_adapter=True, keep_last_n_checkpoints=0)
    cfg.save_at_percent = [50, 100, 50]
    needed = 2 * (39_072 * 4 + companions)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**7, 0, needed - 1))
    with pytest.raises(SetupError, match="2 checkpoints of .* and 0 to resume from"):
        run_recipe(cfg, lora=True)

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**7, 0, needed))
    run_recipe(cfg, lora=True)


def test_checkpoints_that_do_not_fit_on_the_disk_are_refused(
    recipe_config, monkeypatch, companions, tmp_path
):
    """5 x 156,288 bytes and the tokenizer; 3 x (3 x as much): two to keep, one being written."""
    free = 14 * 39_072 * 4 + 5 * companions - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(10**7, 0, free))
    cfg = recipe_config()

    sizes = r"5 checkpoints of 0\.16 MiB and 2 to resume from of 0\.45 MiB .*run, where 2\.13 MiB"
    with pytest.raises(SetupError, match=sizes):
        run_recipe(cfg)

    cfg.keep_last_n_checkpoints = 1
    cfg.max_steps = 1
    run_recipe(cfg)

    # One checkpoint more.
    threshold = {
        "probe_file": "${dataset.probe_file}",
        "every_n_steps": 5,
        "stop_above": 3,
    }
    with pytest.raises(SetupError, match=r"6 checkpoints of"):
        run_recipe(
            recipe_config(memorization_monitor=threshold, output_dir=str(tmp_path / "other"))
        )


def test_sharded_quantized_optimizer_state_is_refused_unless_no_checkpoint_is_kept(
    recipe_config, monkeypatch
):
    # torchao compiles its step, which takes a minute and changes no size.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(_resources, "dist", SimpleNamespace(is_initialized=lambda: True))
    cfg = recipe_config(
        max_steps=1, optimizer={"_component_": "torchao.optim.AdamW8bit", "lr": 1e-2}
    )

    with pytest.raises(
        SetupError, match=r"optimizer: torchao\.optim\.AdamW8bit .*keep_last_n_checkpoints=0"
    ):
        run_recipe(cfg)
    assert not Path(cfg.output_dir).exists()

    cfg.keep_last_n_checkpoints = 0
    run_recipe(cfg)
