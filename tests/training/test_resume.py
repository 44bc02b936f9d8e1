"""A run that was stopped and resumed is the run that never stopped, bit for bit."""

import itertools
import os
import random
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from helpers.fakes.tiny_run import Payload, read_metrics, read_weights, run_config, run_recipe, seal
from omegaconf import OmegaConf
from safetensors.torch import save_file

from tfidf_tune import training
from tfidf_tune._files import locked_folder
from tfidf_tune._signals import Interrupted
from tfidf_tune.training import (
    LoRAFinetuneConfig,
    Run,
    SetupError,
    TrainingError,
    _resume,
    _train,
    check_config,
    open_resume,
)

# 24 sequences in batches of 4, two epochs: 12 steps, or 6 with two mini-batches each. 30% is step
# 4.
SMALL = {
    "dataset.num_base": 16,
    "dataset.num_targets": 2,
    "dataset.num_repeats": 4,
    "epochs": 2,
    "save_at_percent": [30, 100],
}
ADAPTERS = {"lora": True, "model.lora_dropout": 0.3}
CPU = torch.device("cpu")
SGD = {"_component_": "torch.optim.SGD", "lr": 0.1}


class CountingSGD(torch.optim.Optimizer):
    """A user's optimizer with state that is not a tensor, and a table that all parameters share."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.table = torch.arange(3.0)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                self.state[parameter]["table"] = self.table
                parameter.data.sub_(parameter.grad, alpha=group["lr"] / count)


@pytest.fixture(scope="module")
def make_config(tiny_checkpoint, text_file):
    """Make the config of a short run: ``make_config(folder, lora=True, epochs=1)``."""

    def make(folder, *, lora=False, **overrides):
        return run_config(folder, tiny_checkpoint, text_file, lora=lora, **(SMALL | overrides))

    return make


@pytest.fixture
def small_config(make_config, tmp_path):
    return lambda name="run", **settings: make_config(tmp_path / name, **settings)


def run(cfg, *, resume=False):
    cfg = OmegaConf.merge(cfg, {"resume_from_checkpoint": resume})
    return run_recipe(cfg, lora="lora_" in cfg.model._component_)


def end_after(step, cfg, *, resume=False):
    """Run to the end of a step, in which a signal arrives."""
    begun = itertools.count(1)
    original = _train.train_step

    def train_step(*args, **kwargs):
        if next(begun) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    with patch.object(_train, "train_step", train_step), pytest.raises(Interrupted):
        run(cfg, resume=resume)


@pytest.fixture(scope="module")
def finished_run(make_config, tmp_path_factory):
    """A run that never stopped."""
    return run(make_config(tmp_path_factory.mktemp("finished")))


@pytest.fixture(scope="module")
def stopped_run(make_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    end_after(6, make_config(folder))
    return folder


@pytest.fixture
def stopped(stopped_run, tmp_path):
    """A copy of a run that was stopped after step 6, with resume checkpoints of steps 4 and 6."""
    return shutil.copytree(stopped_run, tmp_path / "run")


def newest(folder):
    return max(
        (folder / "resume").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_"))
    )


def process_state(checkpoint):
    return torch.load(checkpoint / "process_00000.pt", weights_only=True)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_run(found, expected):
    """Compare metrics, weights of milestones, and at the end optimizer, schedule, loss, scaler and
    random states.
    """
    assert read_metrics(found) == read_metrics(expected)
    for part in ("checkpoint_30pct", "checkpoint_100pct", newest(expected).relative_to(expected)):
        torch.testing.assert_close(
            read_weights(found / part), read_weights(expected / part), rtol=0, atol=0
        )
    state, expected_state = (
        (newest(run) / "process_00000.pt").read_bytes() for run in (found, expected)
    )
    assert state == expected_state, "schedule, loss, scaler, random states"


KINDS = {
    "accumulated": {
        "loss.num_batches": 4,
        "gradient_accumulation_steps": 2,
        "shuffle": False,
        "lr_scheduler": None,
        "optimizer": {"_component_": "test_resume.CountingSGD", "lr": 0.1},
    },
    "no optimizer state": {"optimizer": SGD},
    "8-bit optimizer state": {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 1e-2}},
    "fp16": {"dtype": "fp16", **ADAPTERS},
    "bf16": {
        "dtype": "bf16",
        "enable_activation_checkpointing": True,
        **ADAPTERS,
        "loss._component_": "tfidf_tune.loss.CrossEntropyLoss",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_run_that_never_stopped(small_config, monkeypatch, finished_run, kind):
    """Stopped in the first step, in the second epoch, and before the last step."""
    # torchao compiles its step, which takes a minute and changes no bit of what is saved.
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    # The scale overflows at first and grows every third step; a fresh scaler would do both at other
    # steps.
    make_scaler = partial(torch.amp.GradScaler, "cpu", init_scale=2.0**24, growth_interval=3)
    monkeypatch.setattr(
        training, "build_grad_scaler", lambda run: make_scaler(enabled=run.dtype is torch.float16)
    )
    expected = run(small_config("expected", **KINDS[kind]))
    metrics = read_metrics(expected)
    half = len(metrics) // 2

    cfg = small_config(**KINDS[kind])
    end_after(1, cfg)
    end_after(half, cfg, resume=True)
    end_after(len(metrics) - 2 - half, cfg, resume=True)

    checkpoint = newest(Path(cfg.output_dir))
    assert checkpoint.name == f"step_{len(metrics) - 1}"
    names = read_weights(checkpoint).keys()
    if kind == "fp16":
        assert process_state(checkpoint)["scaler"]["scale"] == metrics[-2]["loss_scale"]
        assert len({line["loss_scale"] for line in metrics}) > 2
    if kind == "8-bit optimizer state":
        assert {
            f"state.tok_embeddings.weight.exp_avg.{part}" for part in ("codes", "scale", "qmap")
        } < names
        # Also a learning rate that is a tensor, which the schedule changes in place, is logged as
        # it was in the step.
        assert [line["lr"] for line in metrics] == pytest.approx(
            [line["lr"] for line in read_metrics(finished_run)]
        )
    assert all("lora_" in name for name in names) == ("lora" in KINDS[kind])
    assert_same_run(run(cfg, resume=True), expected)


def test_a_run_can_be_resumed_after_every_step_with_all_random_states(small_config, monkeypatch):
    """A data set or model of the user may draw from any generator."""
    drawn = []
    original = _train.train_step

    def draw(*args, **kwargs):
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return original(*args, **kwargs)

    monkeypatch.setattr(_train, "train_step", draw)
    settings = {"dataset.num_base": 4, **ADAPTERS}  # two epochs of three steps
    expected = run(small_config("expected", **settings))
    undisturbed = drawn[:]
    drawn.clear()
    for step in range(1, 6):
        end_after(1, small_config(**settings), resume=step > 1)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(99)

    assert_same_run(run(small_config(**settings), resume=True), expected)
    assert len(undisturbed) == 6
    assert drawn == undisturbed


# ---- what may change, and what is refused


def test_a_resumed_run_keeps_the_seed_that_was_chosen_at_random(small_config):
    cfg = small_config(seed=None)
    end_after(4, cfg)
    file = Path(cfg.output_dir) / "config.yaml"
    written = file.read_bytes()
    seed = OmegaConf.load(file).seed
    for content in (b"seed: [", b"epochs: 2"):
        file.write_bytes(content)
        with pytest.raises(SetupError, match=f"config: seed is null.*{file}"):
            run(cfg, resume=True)
    file.write_bytes(written)

    run(cfg, resume=True)

    assert OmegaConf.load(file).seed == seed
    assert_same_run(Path(cfg.output_dir), run(small_config("expected", seed=seed)))


def test_with_nothing_to_resume_it_starts_from_the_beginning_and_a_finished_run_is_not_changed(
    small_config, finished_run, capsys
):
    """One command for the first start and every later one."""
    folder = run(small_config(), resume=True)
    assert (
        "there is no resume checkpoint yet: starting from the beginning" in capsys.readouterr().err
    )
    assert_same_run(folder, finished_run)
    before = contents(folder)

    run(small_config(), resume=True)

    messages = capsys.readouterr().err.splitlines()
    assert f"resuming from {folder / 'resume' / 'step_12'}" in messages
    assert "the run is finished: all 12 steps are done already" in messages
    after = contents(folder)
    changed = {path.name for path in after if after[path] != before.get(path)}
    assert changed <= {
        "torchtune_config.yaml",
        *(path.name for path in (folder / "logs").iterdir()),
    }
    with pytest.raises(SetupError, match="already holds step_12, step_4"):
        run(small_config())


# Another value of each key of a config: of those that may change when a run is resumed, and of
# those that may not.
FREE = {
    "output_dir": None,  # the folder has moved
    "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
    "save_at_percent": [50, 100],
    "save_every_n_steps": 3,
    "keep_last_n_checkpoints": 1,
    "resume_from_checkpoint": True,
    "memorization_monitor": {"probe_file": "probe.jsonl", "every_n_steps": 3},
    "on_non_finite": "skip",
    "enable_activation_checkpointing": True,
    "compile": True,
    "fsdp_cpu_offload": True,
    "fsdp_reshard_after_forward": False,
    "evaluate": True,
    "log_every_n_steps": 5,
    "log_peak_memory_stats": True,
}
FIXED = {
    "model.lora_dropout": 0.1,
    "checkpointer.max_shard_size": "1MB",
    "tokenizer.max_seq_len": 20,
    "dataset.num_repeats": 3,
    "collate_fn": "torchtune.data.padded_collate",
    "loss.num_batches": 3,
    "optimizer.lr": 5e-3,
    "lr_scheduler": None,
    "seed": 1,
    "shuffle": False,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "epochs": 3,
    "max_steps": 7,
    "clip_grad_norm": None,
    "device": "cuda",
    "dtype": "bf16",
    "fsdp_param_dtype": "bf16",
    "fsdp_reduce_dtype": "fp32",
    "merge_adapter": True,
}


@pytest.fixture(scope="module")
def stopped_adapters(make_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    end_after(1, make_config(folder, lora=True))
    return folder


def test_of_each_key_it_is_decided_whether_it_may_change():
    assert {
        key.partition(".")[0] for key in (*FREE, *FIXED)
    } == LoRAFinetuneConfig.model_fields.keys()


@pytest.mark.parametrize("key", [*FREE, *FIXED])
def test_a_setting_may_change_or_is_refused_by_name(small_config, stopped_adapters, key):
    changed = {} if key == "output_dir" else {key: (FREE | FIXED)[key]}
    as_before = {"dataset.seed": 0, "resume_from_checkpoint": True}  # not the seed of the run
    cfg = small_config(lora=True, **(as_before | changed))
    shutil.copytree(stopped_adapters, cfg.output_dir)
    run_here = Run(CPU, torch.float32, 0, Path(cfg.output_dir))
    start = partial(open_resume, check_config(cfg, LoRAFinetuneConfig), run_here)

    if key in FREE:
        assert start().step == 1
        return
    with pytest.raises(SetupError, match="is of a run with other settings: ") as refusal:
        start()
    name = "batch_size x processes" if key == "batch_size" else key
    assert re.findall(r"([\w.]+(?: x processes)?) was ", str(refusal.value)) == [name]


def test_settings_that_change_results_are_refused_by_name(small_config, stopped):
    changed = {
        "optimizer.lr": 5e-3,
        "epochs": 3,
        "clip_grad_norm": None,
        "loss.num_batches": 3,
        "shuffle": False,
    }
    with pytest.raises(SetupError) as refusal:
        run(small_config(**changed, batch_size=2, gradient_accumulation_steps=2), resume=True)

    for text in (
        str(stopped / "resume" / "step_6"),
        "batch_size x processes was 4, is 2",
        "clip_grad_norm was 1.0, is null",
        "epochs was 2, is 3",
        "gradient_accumulation_steps was 1, is 2",
        "loss.num_batches was not set, is 3",
        "optimizer.lr was 0.01, is 0.005",
        "shuffle was true, is false",
    ):
        assert text in str(refusal.value)


def test_other_settings_and_the_folder_may_change(small_config, stopped, finished_run, capsys):
    """A milestone that is passed already is reported, a later one is written."""
    stopped.rename(stopped.with_name("elsewhere"))
    free = {
        "enable_activation_checkpointing": True,
        "keep_last_n_checkpoints": 1,
        "save_every_n_steps": 2,
        "save_at_percent": [10, 30, 40, 60, 100],
        "on_non_finite": "skip",
        "log_peak_memory_stats": True,
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
    }

    folder = run(small_config("elsewhere", **free), resume=True)

    assert_same_run(folder, finished_run)
    assert [path.name for path in (folder / "resume").iterdir()] == ["step_12"]
    missed = (
        "checkpoint_10pct, checkpoint_40pct of save_at_percent will not be written: step 6 is done "
        "already"
    )
    assert capsys.readouterr().err.count(missed) == 1
    assert {path.name for path in folder.glob("checkpoint_*")} == {
        f"checkpoint_{n}pct" for n in (30, 60, 100)
    }


def test_other_data_and_base_weights_are_refused_and_the_folder_is_not_changed(
    small_config, tiny_checkpoint, tmp_path
):
    """Checkpoints of one text are never evaluated on the passages of another, nor
    resumed with it.
    """
    source = shutil.copyfile(small_config().dataset.source, tmp_path / "source.txt")
    base = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    cfg = small_config(
        **{"dataset.target_source": str(source), "checkpointer.checkpoint_dir": str(base)}
    )
    end_after(5, cfg)
    before = contents(tmp_path / "run")
    assert tmp_path / "run" / "probe.jsonl" in before

    def reorder(text):
        first, *others = text.splitlines()
        return b"\n".join([*others, first])

    def flip_a_bit(weights):
        return weights[:-2] + bytes([weights[-2] ^ 1, weights[-1]])

    for file, change, what in (
        (source, reorder, r'data set was "24 items \(\w{16}\)", is "24 items \(\w{16}\)"'),
        (base / "model.safetensors", flip_a_bit, "the content of base weights has changed"),
    ):
        content = file.read_bytes()
        file.write_bytes(change(content))
        with pytest.raises(SetupError, match=f"step_5 was written with other inputs: {what}"):
            run(cfg, resume=True)
        file.write_bytes(content)  # the same again, at another time
    assert contents(tmp_path / "run") == before
    run(cfg, resume=True)


# ---- what is on disk


def test_what_does_not_belong_to_the_checkpoint_is_ignored_or_removed(
    small_config, stopped, finished_run
):
    """Files that are not in the manifest; leftovers; damaged and later lines of metrics."""
    checkpoint = stopped / "resume" / "step_6"
    wrong = {key: torch.ones_like(value) for key, value in read_weights(checkpoint).items()}
    save_file(wrong, checkpoint / "zz-extra.safetensors")
    (checkpoint / "._shard-00001-model-00001-of-00001.safetensors").write_bytes(b"Mac OS X")
    left = stopped / "resume" / ".step_7.partial"
    left.mkdir()
    (left / "half").touch()
    metrics = stopped / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    damaged = [b"\0" * 40, b'{"step": "2"}', b"null"]
    later = [b'{"step": 7, "loss": 1.0}', b"[1]", b'{"step": 8,']
    metrics.write_bytes(b"\n".join([lines[0], *damaged, *lines[1:], *later]))

    assert_same_run(run(small_config(), resume=True), finished_run)

    assert not left.exists()
    assert metrics.read_bytes().splitlines()[:6] == lines


def test_milestones_after_the_checkpoint_are_written_again_and_earlier_ones_are_kept(
    small_config, finished_run
):
    cfg = small_config(
        save_at_percent=[20, 30, 60, 100], save_every_n_steps=4, keep_last_n_checkpoints=9
    )
    folder = run(cfg)
    for step in (8, 12):
        shutil.rmtree(folder / "resume" / f"step_{step}")  # 60% is step 8
    inodes = {
        percent: (folder / f"checkpoint_{percent}pct").stat().st_ino for percent in (20, 60, 100)
    }
    for percent in inodes:
        milestone = folder / f"checkpoint_{percent}pct"
        (milestone / "scores").mkdir()
        (milestone / "scores" / "mine.txt").write_text("of the user")
        (milestone / "model-00001-of-00002.safetensors").touch()  # transformers might read it

    run(cfg, resume=True)

    kept = [
        percent
        for percent in inodes
        if (folder / f"checkpoint_{percent}pct").stat().st_ino == inodes[percent]
    ]
    assert kept == [20]
    assert len([*folder.glob("checkpoint_*/scores/mine.txt")]) == 3
    assert [path.parent.name for path in folder.glob("*/model-00001*")] == ["checkpoint_20pct"]
    for name in ("checkpoint_30pct/model.safetensors", "checkpoint_100pct/model.safetensors"):
        assert (folder / name).read_bytes() == (finished_run / name).read_bytes()
    assert not list(folder.rglob(".*"))


def test_a_checkpoint_that_does_not_fit_the_run_is_one_message_and_its_code_is_not_run(
    small_config, stopped, tmp_path
):
    checkpoint = stopped / "resume" / "step_6"
    executed = tmp_path / "executed"
    content = process_state(checkpoint)
    for changes, message in (
        ({"optimizer_groups": [{"lr": 0.1}, {}]}, "step_6 cannot be restored"),
        ({"tensors": ["model.a"]}, r"model\.a"),
        ({"loss": Payload(executed)}, "UnpicklingError"),
    ):
        torch.save(content | changes, checkpoint / "process_00000.pt")
        seal(checkpoint)
        with pytest.raises((SetupError, TrainingError), match=message):
            run(small_config(), resume=True)
    assert not executed.exists()


def test_large_state_is_split_into_files_written_after_the_metrics(
    small_config, monkeypatch, finished_run, tmp_path
):
    """Metrics are on disk before the checkpoint that counts on them."""
    synced = []
    fsync = os.fsync

    def record(descriptor):
        synced.append(
            Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            .relative_to(tmp_path / "run")
            .as_posix()
        )
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(_resume, "_FILE_BYTES", 5_000)
    end_after(1, small_config())
    checkpoint = tmp_path / "run" / "resume" / "step_1"

    assert synced.index("metrics.jsonl") < synced.index("resume/.step_1.partial/manifest.json")
    assert len(list(checkpoint.glob("*.safetensors"))) > 3
    assert len(list(newest(finished_run).glob("*.safetensors"))) == 1
    assert_same_run(run(small_config(), resume=True), finished_run)


def test_a_run_keeps_others_out_of_its_folder_until_it_ends(small_config, stopped, monkeypatch):
    """A refused run does not remove what looks like the remains of a killed one."""
    original = training.train

    def busy(*args, **kwargs):
        for left in ("resume/.step_7.partial", f".checkpoint_60pct.{'0' * 32}"):
            (stopped / left).mkdir(parents=True)
        before = contents(stopped)
        with pytest.raises(SetupError, match=f"another process is writing into {stopped}"):
            run(small_config(seed=1), resume=True)
        assert contents(stopped) == before
        return original(*args, **kwargs)

    monkeypatch.setattr(training, "train", busy)
    run(small_config(), resume=True)

    assert OmegaConf.load(stopped / "config.yaml").seed == 0
    with locked_folder(stopped):
        pass
