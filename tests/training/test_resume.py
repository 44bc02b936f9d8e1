"""A run that was stopped and goes on is the run that never stopped, bit for bit."""

import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from tfidf_tune.recipes import full_finetune, lora_finetune

from tfidf_tune.training import SetupError, TrainingError, _resume, _train
from tfidf_tune.training._interrupt import Interrupted

# 24 sequences in batches of 4, two epochs: 12 steps, or 6 with two mini-batches each.
SMALL = {
    "dataset.num_base": 16,
    "dataset.num_targets": 2,
    "dataset.num_repeats": 4,
    "epochs": 2,
    "save_at_percent": [30, 100],
}
DROPOUT = {"model.lora_dropout": 0.3}


class Killed(BaseException):
    """What no handler takes for an error, as a process that is gone handles none."""


@pytest.fixture
def small_config(recipe_config):
    """The config of a short run: ``small_config("folder", lora=True, epochs=1)``."""

    def make(name="run", *, lora=False, **overrides):
        cfg = recipe_config(lora=lora, **SMALL)
        cfg.output_dir = str(Path(cfg.output_dir).with_name(name))
        for key, value in overrides.items():
            OmegaConf.update(cfg, key, value, merge=False)
        return cfg

    return make


def run(cfg, *, resume=False, **overrides):
    cfg = OmegaConf.merge(cfg, {"resume_from_checkpoint": resume, **overrides})
    recipe = lora_finetune if "lora_" in cfg.model._component_ else full_finetune
    recipe.recipe_main.__wrapped__(cfg)
    return Path(cfg.output_dir)


@pytest.fixture
def end_after(monkeypatch):
    """Run to the end of a step, then be killed, or be sent a signal during it: ``end_after(3, cfg)``."""

    def run_until(step, cfg, *, how=Killed, **options):
        taken = []

        def train_step(*args, **kwargs):
            taken.append(1)
            if how is Killed and len(taken) > step:
                raise Killed
            if how is not Killed and len(taken) == step:
                os.kill(os.getpid(), how)
            return original(*args, **kwargs)

        original = _train.train_step
        monkeypatch.setattr(_train, "train_step", train_step)
        with pytest.raises(Killed if how is Killed else Interrupted) as ended:
            run(cfg, **options)
        monkeypatch.setattr(_train, "train_step", original)
        return str(ended.value)

    return run_until


def read_metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second_per_gpu"} for line in lines]


def newest(folder):
    return max((folder / "resume").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))


def assert_bits_equal(found, expected, where=""):
    assert type(found) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_bits_equal(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_bits_equal(*pair, f"{where}/{index}")
    else:
        assert found == expected, where


def assert_same_run(found, expected):
    """Weights of milestones; weights, optimizer, schedule, loss, scaler, random states at the end; metrics."""
    assert read_metrics(found) == read_metrics(expected)
    compared = 0
    for part in ("checkpoint_30pct", "checkpoint_100pct", newest(expected).relative_to(expected)):
        files = sorted((expected / part).glob("*.safetensors"))
        assert [file.name for file in sorted((found / part).glob("*.safetensors"))] == [file.name for file in files]
        for file in files:
            assert_bits_equal(load_file(found / part / file.name), load_file(file), str(file))
            compared += 1
    assert compared == 3
    states = [torch.load(newest(folder) / "process_00000.pt", weights_only=True) for folder in (found, expected)]
    assert_bits_equal(*states)


@pytest.mark.parametrize("how", [Killed, signal.SIGTERM])
@pytest.mark.parametrize(
    ("lora", "overrides", "num_steps"),
    [
        (False, {"loss._component_": "tfidf_tune.loss.CrossEntropyLoss"}, 12),
        (False, {"loss.num_batches": 4}, 12),
        (False, {"gradient_accumulation_steps": 2, "shuffle": False}, 6),
        (False, {"dtype": "bf16", "lr_scheduler": None}, 12),
        (False, {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}}, 12),
        (True, DROPOUT | {"loss._component_": "tfidf_tune.loss.CrossEntropyLoss"}, 12),
        (True, DROPOUT | {"gradient_accumulation_steps": 2}, 6),
        (True, DROPOUT | {"dtype": "bf16", "enable_activation_checkpointing": True}, 12),
        (True, DROPOUT | {"dtype": "fp16"}, 12),
    ],
    ids=str,
)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(small_config, end_after, lora, overrides, num_steps, how):
    """Stopped three times: in the first step after a checkpoint, in the second epoch, and before the last step."""
    expected = run(small_config("expected", lora=lora, **overrides))
    assert len(read_metrics(expected)) == num_steps
    # Every second step, so that steps are lost with a kill; every step, so that any can be the last.
    cfg = small_config(lora=lora, **overrides, save_every_n_steps=2)
    if how is Killed:
        end_after(3, cfg)
        end_after(num_steps // 2, cfg, resume=True)
        run(cfg, resume=True)
    else:
        end_after(1, cfg, how=how)
        end_after(num_steps // 2, cfg, how=how, resume=True)
        end_after(num_steps - 2 - num_steps // 2, cfg, how=how, resume=True)
        assert newest(Path(cfg.output_dir)).name == f"step_{num_steps - 1}"
        run(cfg, resume=True)

    assert_same_run(Path(cfg.output_dir), expected)


@pytest.mark.parametrize("step", range(1, 12))
def test_it_is_so_from_any_step(small_config, end_after, tmp_path, step):
    expected = run(small_config("expected", lora=True, **DROPOUT))
    cfg = small_config(lora=True, **DROPOUT)
    end_after(step, cfg, how=signal.SIGTERM)
    assert newest(tmp_path / "run").name == f"step_{step}"

    assert_same_run(run(cfg, resume=True), expected)


def test_scale_and_growth_of_fp16_go_on(small_config, end_after, monkeypatch, tmp_path):
    """The scale overflows at first and grows every third step; a fresh scaler would do both at other steps."""
    monkeypatch.setattr(
        "tfidf_tune.training.build_grad_scaler",
        lambda run: torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3),
    )
    cfg = {"lora": True, "dtype": "fp16"}
    expected = run(small_config("expected", **cfg))
    scales = [line["loss_scale"] for line in read_metrics(expected)]
    assert len(set(scales)) > 2

    end_after(5, small_config(**cfg), how=signal.SIGTERM)
    state = torch.load(tmp_path / "run" / "resume" / "step_5" / "process_00000.pt", weights_only=True)["scaler"]

    assert state["scale"] == scales[4]
    assert_same_run(run(small_config(**cfg), resume=True), expected)


def test_all_random_states_go_on(small_config, end_after, monkeypatch):
    """A data set or a model of the user's may draw from any of them."""
    drawn = []

    def draw(*args, **kwargs):
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return original(*args, **kwargs)

    original = _train.train_step
    monkeypatch.setattr(_train, "train_step", draw)
    run(small_config("expected"))
    expected = list(drawn)
    drawn.clear()

    end_after(5, small_config(), how=signal.SIGTERM)
    random.seed(99)
    np.random.seed(99)
    torch.manual_seed(99)
    run(small_config(), resume=True)

    assert len(expected) == 12
    assert drawn == expected


def test_a_chosen_seed_stays_the_runs(small_config, end_after):
    cfg = small_config(seed=None)
    end_after(4, cfg, how=signal.SIGTERM)
    seed = OmegaConf.load(Path(cfg.output_dir) / "config.yaml").seed

    run(cfg, resume=True)

    assert OmegaConf.load(Path(cfg.output_dir) / "config.yaml").seed == seed
    assert_same_run(Path(cfg.output_dir), run(small_config("expected", seed=seed)))


def contents(folder):
    """Of all files but for the config, which says that the run was to go on, and logs of torchtune."""
    files = [path for path in folder.rglob("*") if path.is_file() and "logs" not in path.parts]
    return {path: path.read_bytes() for path in files if "config" not in path.name or "checkpoint" in str(path)}


def test_a_finished_run_says_so_and_changes_nothing(small_config, capsys):
    folder = run(small_config())
    before = contents(folder)
    capsys.readouterr()

    run(small_config(), resume=True)

    told = capsys.readouterr().err.splitlines()
    assert f"going on from {folder / 'resume' / 'step_12'}" in told
    assert "all 12 steps are done already" in told
    assert len(before) > 10
    assert contents(folder) == before


def test_with_nothing_there_it_starts_from_the_beginning(small_config, capsys):
    """One command for the first start and every later one."""
    folder = run(small_config(), resume=True)

    assert "there is no resume checkpoint yet: starting from the beginning" in capsys.readouterr().err
    assert_same_run(folder, run(small_config("expected")))


def test_a_folder_that_can_go_on_is_not_started_anew(small_config, end_after, tmp_path):
    end_after(2, small_config(), how=signal.SIGTERM)

    with pytest.raises(
        SetupError,
        match=r"run already holds a run that can go on, step_2 of its folder resume: set resume_from_checkpoint=True",
    ):
        run(small_config())
    assert newest(tmp_path / "run").name == "step_2"


def test_milestones_without_a_resume_checkpoint_are_not_gone_on_from(small_config):
    run(small_config(keep_last_n_checkpoints=0))

    with pytest.raises(SetupError, match="checkpoint_100pct, checkpoint_30pct, but no resume checkpoint to go on from"):
        run(small_config(keep_last_n_checkpoints=0), resume=True)


def test_a_run_that_keeps_none_writes_none(small_config, end_after):
    cfg = small_config(keep_last_n_checkpoints=0)

    told = end_after(3, cfg, how=signal.SIGTERM)

    assert told == "stopped after step 3 of 12; no resume checkpoint was written; milestones written so far are whole"
    assert not (Path(cfg.output_dir) / "resume").exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"optimizer.lr": 5e-3}, "optimizer.lr was 0.01, is 0.005"),
        ({"seed": 1}, "dataset.seed was 0, is 1; seed was 0, is 1"),
        ({"epochs": 3}, "epochs was 2, is 3"),
        ({"max_steps": 7}, "max_steps was null, is 7"),
        ({"clip_grad_norm": None}, "clip_grad_norm was 1.0, is null"),
        ({"dtype": "bf16"}, 'dtype was "fp32", is "bf16"'),
        ({"loss.num_batches": 3}, "loss.num_batches was not set, is 3"),
        ({"batch_size": 2}, "batch_size x gradient_accumulation_steps x processes was 4, is 2"),
        ({"dataset.num_base": 17}, "dataset.num_base was 16, is 17"),
        ({"shuffle": False}, "shuffle was true, is false"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_name(small_config, end_after, overrides, told):
    end_after(2, small_config(), how=signal.SIGTERM)

    with pytest.raises(SetupError) as refusal:
        run(small_config(**overrides), resume=True)

    assert f"step_2 is of a run with other settings: {told}" in str(refusal.value)
    assert "Set them back, or choose another output_dir" in str(refusal.value)


def test_a_data_set_that_has_grown_is_refused(small_config, end_after, monkeypatch):
    """Under the same settings: a file that was added to."""
    end_after(2, small_config(), how=signal.SIGTERM)
    from tfidf_tune import training

    build = training.build_dataset
    monkeypatch.setattr(training, "build_dataset", lambda *args: torch.utils.data.ConcatDataset([build(*args)] * 2))

    with pytest.raises(
        SetupError, match=r"the data set has 48 items, and had 24 when .*step_2 was written: bring the data"
    ):
        run(small_config(), resume=True)


def test_what_computes_the_same_may_change(small_config, end_after):
    """How much is shown and kept, and how memory is saved; the numbers are the same."""
    expected = run(small_config("expected"))
    end_after(5, small_config(), how=signal.SIGTERM)
    free = {
        "enable_activation_checkpointing": True,
        "keep_last_n_checkpoints": 1,
        "save_every_n_steps": 2,
        "refuse_if_too_large": False,
        "on_non_finite": "skip",
        "log_peak_memory_stats": True,
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
    }

    folder = run(small_config(**free), resume=True)

    assert_same_run(folder, expected)
    assert [path.name for path in (folder / "resume").iterdir()] == ["step_12"]


def test_accumulation_may_change_where_it_computes_the_same_mathematics(small_config, end_after):
    """Plain cross-entropy: the same sequences in a step, in other mini-batches, up to rounding."""
    loss = {"loss._component_": "tfidf_tune.loss.CrossEntropyLoss"}
    expected = read_metrics(run(small_config("expected", **loss)))
    end_after(5, small_config(**loss), how=signal.SIGTERM)

    found = read_metrics(run(small_config(**loss, batch_size=2, gradient_accumulation_steps=2), resume=True))

    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in expected], rel=1e-4)


def test_the_folder_may_have_moved(small_config, end_after, tmp_path):
    expected = run(small_config("expected"))
    end_after(5, small_config(), how=signal.SIGTERM)
    (tmp_path / "run").rename(tmp_path / "elsewhere")

    assert_same_run(run(small_config("elsewhere"), resume=True), expected)


def test_milestones_after_the_step_are_written_anew_and_those_before_stay(small_config, tmp_path, end_after):
    expected = run(small_config("expected", save_at_percent=[20, 60, 100]))
    cfg = small_config(save_at_percent=[20, 60, 100], save_every_n_steps=4, keep_last_n_checkpoints=9)
    folder = run(cfg)
    for step in (8, 12):
        shutil.rmtree(folder / "resume" / f"step_{step}")  # 60% is step 8
    inodes = {}
    for percent in (20, 60, 100):
        inodes[percent] = (folder / f"checkpoint_{percent}pct").stat().st_ino
        (folder / f"checkpoint_{percent}pct" / "marker").touch()

    run(cfg, resume=True)

    assert (folder / "checkpoint_20pct").stat().st_ino == inodes[20]
    assert [(folder / f"checkpoint_{percent}pct" / "marker").exists() for percent in (20, 60, 100)] == [
        True, False, False,
    ]  # fmt: skip
    for percent in (20, 60, 100):
        name = f"checkpoint_{percent}pct/model.safetensors"
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize("torn", ["", '{"step": 6, "lo', '{"step": 6, "loss": 1.0}'])
def test_metrics_beyond_the_step_are_dropped(small_config, end_after, tmp_path, torn):
    expected = run(small_config("expected"))
    cfg = small_config(save_every_n_steps=3)
    end_after(5, cfg)  # the newest checkpoint is of step 4, a milestone
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert len(read_metrics(tmp_path / "run")) == 5
    with metrics.open("a") as file:
        file.write(torn)

    assert newest(tmp_path / "run").name == "step_4"
    assert_same_run(run(cfg, resume=True), expected)


def test_nothing_but_plain_values_is_unpickled(small_config, end_after, monkeypatch):
    end_after(5, small_config(), how=signal.SIGTERM)
    asked = []
    original = torch.load

    def load(*args, **kwargs):
        asked.append(kwargs.get("weights_only"))
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    run(small_config(), resume=True)

    assert asked
    assert all(asked)


class Payload:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (Path.touch, (self.file,))


def test_a_pickle_that_would_do_something_is_refused(small_config, end_after, tmp_path):
    """The manifest matches: whoever made the checkpoint made both."""
    end_after(5, small_config(), how=signal.SIGTERM)
    checkpoint = tmp_path / "run" / "resume" / "step_5"
    torch.save({"loss": Payload(tmp_path / "done")}, checkpoint / "process_00000.pt")
    seal(checkpoint)

    with pytest.raises(
        SetupError,
        match=r"process_00000\.pt holds something other than tensors and plain values, .*: move .*step_5 away",
    ):
        run(small_config(), resume=True)
    assert not (tmp_path / "done").exists()


def seal(checkpoint):
    """Make the manifest say what is there."""
    import hashlib

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        content = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(small_config, end_after, tmp_path, capsys):
    expected = run(small_config("expected"))
    cfg = small_config(save_every_n_steps=2)
    end_after(7, cfg)
    broken = tmp_path / "run" / "resume" / "step_6"
    (broken / "settings.yaml").unlink()

    run(cfg, resume=True)

    told = capsys.readouterr().err.splitlines()
    assert f"{broken} is damaged: settings.yaml is missing; the one before it is used" in told
    assert f"going on from {broken.with_name('step_4')}" in told
    assert_same_run(tmp_path / "run", expected)


def test_a_checkpoint_holds_trained_weights_alone(small_config, end_after, tmp_path):
    """The frozen base of a LoRA run is where it always was."""
    end_after(2, small_config(lora=True), how=signal.SIGTERM)
    [file] = (tmp_path / "run" / "resume" / "step_2").glob("*.safetensors")

    names = load_file(file).keys()

    assert names
    assert all("lora_" in name for name in names)


def test_tokens_seen_go_on_with_the_log(small_config, end_after, tmp_path):
    end_after(2, small_config(), how=signal.SIGTERM)

    part = torch.load(tmp_path / "run" / "resume" / "step_2" / "process_00000.pt", weights_only=True)

    assert part["progress"] == {"tokens_seen": 2 * 4 * 31}


def test_an_error_while_training_names_the_checkpoint_to_go_on_from(small_config, monkeypatch, tmp_path):
    taken = []

    def poisoned(model, *args, **kwargs):
        taken.append(1)
        if len(taken) == 6:
            next(model.parameters()).data.fill_(float("nan"))
        return original(model, *args, **kwargs)

    original = _train.train_step
    monkeypatch.setattr(_train, "train_step", poisoned)

    with pytest.raises(TrainingError) as error:
        run(small_config(save_every_n_steps=2))

    assert str(error.value).startswith("not finite: loss nan and gradient norm nan at step 6 (items ")
    checkpoint = tmp_path / "run" / "resume" / "step_4"
    assert str(error.value).endswith(
        f"the last good checkpoint is {checkpoint}: resume_from_checkpoint=True goes on from there"
    )


def test_a_checkpoint_of_a_run_that_cannot_be_written_ends_it_and_leaves_the_one_before(
    small_config, monkeypatch, tmp_path
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    original = _resume.save
    saved = []

    def save(*args, **kwargs):
        saved.append(1)
        return full() if len(saved) == 2 else original(*args, **kwargs)

    monkeypatch.setattr(_resume, "save", save)
    folder = tmp_path / "run" / "resume"

    with pytest.raises(TrainingError) as error:
        run(small_config(save_every_n_steps=2))

    assert str(error.value) == (
        f"resume checkpoint {folder / 'step_4'} could not be written: [Errno 28] No space left on device; the last "
        f"good checkpoint is {folder / 'step_2'}: resume_from_checkpoint=True goes on from there"
    )
    assert [path.name for path in folder.iterdir()] == ["step_2"]


def test_lines_of_metrics_are_on_the_disk_before_the_checkpoint_counts_on_them(small_config, monkeypatch, tmp_path):
    synced, fsync = [], os.fsync

    def record(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).relative_to(tmp_path / "run").as_posix())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    run(small_config(max_steps=1))

    assert synced.index("metrics.jsonl") < synced.index("resume/.step_1.partial/manifest.json")


def test_what_a_killed_process_left_is_gone_when_the_run_goes_on(small_config, end_after, tmp_path):
    end_after(2, small_config(), how=signal.SIGTERM)
    left = tmp_path / "run" / "resume" / ".step_3.partial"
    left.mkdir()
    (left / "half").touch()

    run(small_config(), resume=True)

    assert not left.exists()
