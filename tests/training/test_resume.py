"""A run that was stopped and goes on is the run that never stopped, bit for bit."""

import itertools
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tfidf_tune.recipes import full_finetune, lora_finetune
from tiny_run import seal

from tfidf_tune import training
from tfidf_tune._files import locked_folder
from tfidf_tune.loss import TFIDFCrossEntropyLoss
from tfidf_tune.training import SetupError, TrainingError, _resources, _snapshot, _train
from tfidf_tune.training._interrupt import Interrupted
from tfidf_tune.training._run import hold_folder

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


def load_tensors(folder):
    """All tensors of a folder, however many files they are in."""
    tensors = [load_file(file) for file in folder.glob("*.safetensors")]
    merged = {name: value for part in tensors for name, value in part.items()}
    assert len(merged) == sum(map(len, tensors)) > 0
    return merged


def assert_same_run(found, expected):
    """Weights of milestones; weights, optimizer, schedule, loss, scaler, random states at the end; metrics."""
    assert read_metrics(found) == read_metrics(expected)
    for part in ("checkpoint_30pct", "checkpoint_100pct", newest(expected).relative_to(expected)):
        assert_bits_equal(load_tensors(found / part), load_tensors(expected / part), str(part))
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


@pytest.mark.parametrize(
    "content", [b"", b"seed: [", b"- 1", b"seed: x", b"seed:", b"seed: ???", b"epochs: 2", b"\xff"]
)
def test_a_chosen_seed_that_cannot_be_read_is_one_message(small_config, end_after, content):
    cfg = small_config(seed=None)
    end_after(2, cfg, how=signal.SIGTERM)
    file = Path(cfg.output_dir) / "config.yaml"
    file.write_bytes(content)

    with pytest.raises(SetupError) as refusal:
        run(cfg, resume=True)

    assert str(refusal.value).startswith(
        f"config: seed is null, and that of the run to resume cannot be read from {file} ("
    )
    assert str(refusal.value).endswith("): set seed to it")


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
    assert f"resuming from {folder / 'resume' / 'step_12'}" in told
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
        match="already holds a run that can be resumed, from step_2 of its folder resume: set resume_from_checkpoint=True",
    ):
        run(small_config())
    assert newest(tmp_path / "run").name == "step_2"


def test_milestones_without_a_resume_checkpoint_are_not_gone_on_from(small_config):
    run(small_config(keep_last_n_checkpoints=0))

    with pytest.raises(SetupError, match="checkpoint_100pct, checkpoint_30pct, but no resume checkpoint"):
        run(small_config(keep_last_n_checkpoints=0), resume=True)


def test_a_run_that_keeps_none_writes_none(small_config, end_after):
    cfg = small_config(keep_last_n_checkpoints=0)

    told = end_after(3, cfg, how=signal.SIGTERM)

    assert (
        told == "stopped after step 3 of 12; no resume checkpoint was written; milestones written so far are complete"
    )
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
        ({"batch_size": 2}, "batch_size x processes was 4, is 2"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps was 1, is 2"),
        (
            {"batch_size": 2, "gradient_accumulation_steps": 2},
            "batch_size x processes was 4, is 2; gradient_accumulation_steps was 1, is 2",
        ),
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
    assert "Change them back, or choose another output_dir" in str(refusal.value)


def test_a_data_set_that_has_grown_is_refused(small_config, end_after, monkeypatch):
    """Under the same settings: a file that was added to."""
    end_after(2, small_config(), how=signal.SIGTERM)
    build = training.build_dataset
    monkeypatch.setattr(training, "build_dataset", lambda *args: torch.utils.data.ConcatDataset([build(*args)] * 2))

    with pytest.raises(
        SetupError,
        match=r"was written with other inputs: data set was .24 items \(\w+\).*, is .48 items \(\w+\).*\. Restore them",
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
        (folder / f"checkpoint_{percent}pct" / "scores").mkdir()
        (folder / f"checkpoint_{percent}pct" / "scores" / "mine.txt").write_text("of the user")
        (folder / f"checkpoint_{percent}pct" / "my_model.safetensors").touch()
        (folder / f"checkpoint_{percent}pct" / "model-00001-of-00002.safetensors").touch()  # transformers might read it

    run(cfg, resume=True)

    assert [(folder / f"checkpoint_{percent}pct").stat().st_ino == inodes[percent] for percent in inodes] == [
        True, False, False,
    ]  # fmt: skip
    for percent in (20, 60, 100):
        assert (folder / f"checkpoint_{percent}pct" / "scores" / "mine.txt").read_text() == "of the user"
        assert (folder / f"checkpoint_{percent}pct" / "my_model.safetensors").is_file()
    assert [path.parent.name for path in folder.glob("*/model-00001*")] == ["checkpoint_20pct"]
    for percent in (20, 60, 100):
        name = f"checkpoint_{percent}pct/model.safetensors"
        assert (folder / name).read_bytes() == (expected / name).read_bytes()
    assert not list(folder.rglob(".*"))


@pytest.mark.parametrize(
    "torn",
    ["", '{"step": 6, "lo', '{"step": 6, "loss": 1.0}', '{"step": 1, "lo', '{"loss": 1.0}\n', "[1]\n", "3\n", "\n"],
)
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


@pytest.mark.parametrize(
    "damage", [b"\0" * 40, b'{"step": 2, "lo\xff": 1.0}', b'{"step": "2"}', b'{"loss": 1.0}', b"null", b"\xff\xfe{"]
)
def test_a_damaged_line_of_metrics_goes_and_the_others_stay(small_config, end_after, tmp_path, damage):
    end_after(5, small_config(), how=signal.SIGTERM)
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([lines[0], damage, *lines[2:]]) + b"\n")

    run(small_config(), resume=True)

    assert metrics.read_bytes().splitlines()[:4] == [lines[0], *lines[2:]]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, *range(3, 13)]


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


def test_a_pickle_that_would_do_something_is_refused(small_config, end_after, tmp_path, capsys):
    """The manifest matches: whoever made the checkpoint made both."""
    end_after(5, small_config(), how=signal.SIGTERM)
    checkpoint = tmp_path / "run" / "resume" / "step_5"
    torch.save({"loss": Payload(tmp_path / "done")}, checkpoint / "process_00000.pt")
    seal(checkpoint)

    run(small_config(), resume=True)

    assert (
        "step_5 is damaged: process_00000.pt holds objects other than tensors and plain values, which are never "
        "loaded; the previous one is used"
    ) in capsys.readouterr().err
    assert not (tmp_path / "done").exists()


def without_key(checkpoint, key):
    part = torch.load(checkpoint / "process_00000.pt", weights_only=True)
    del part[key]
    torch.save(part, checkpoint / "process_00000.pt")
    seal(checkpoint)


def with_value(checkpoint, key, value):
    part = torch.load(checkpoint / "process_00000.pt", weights_only=True)
    torch.save(part | {key: value}, checkpoint / "process_00000.pt")
    seal(checkpoint)


def rewritten(checkpoint, name, content):
    (checkpoint / name).write_bytes(content)
    seal(checkpoint)


def listing(checkpoint, change):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = change(manifest["files"])
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def without(name):
    return lambda files: {listed: entry for listed, entry in files.items() if name not in listed}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: listing(folder, lambda files: {}),
            "its manifest does not list process_00000.pt, settings.yaml",
        ),
        (lambda folder: listing(folder, without("settings")), "its manifest does not list settings.yaml"),
        (lambda folder: listing(folder, without("shard")), "none of its files holds model.layers.0"),
        (lambda folder: rewritten(folder, "settings.yaml", b"seed: [0"), "ParserError: while parsing a flow sequence"),
        (lambda folder: rewritten(folder, "settings.yaml", b"- seed"), "settings.yaml does not hold keys and values"),
        (lambda folder: rewritten(folder, "process_00000.pt", b"PK\3\4"), "process_00000.pt cannot be read"),
        (lambda folder: without_key(folder, "loss"), "process_00000.pt lacks loss"),
        (lambda folder: without_key(folder, "random_states"), "process_00000.pt lacks random_states"),
        (lambda folder: with_value(folder, "random_states", None), "process_00000.pt lacks random_states"),
        (lambda folder: with_value(folder, "inputs", None), "process_00000.pt lacks inputs"),
        (lambda folder: rewritten(folder, "process_00000.pt", b"junk"), "process_00000.pt cannot be read"),
        (lambda folder: rewritten(folder, "settings.yaml", b""), "settings.yaml does not hold keys and values"),
    ],
    ids=[
        "no file",
        "no settings",
        "no weights",
        "no YAML",
        "a list",
        "no process file",
        "no loss",
        "no random states",
        "no states",
        "no inputs",
        "junk",
        "empty settings",
    ],
)
def test_a_checkpoint_that_lacks_something_is_named_and_the_one_before_used(
    small_config, end_after, tmp_path, capsys, damage, message
):
    """What its manifest lists is what was written, but it is not all that the run needs."""
    expected = run(small_config("expected"))
    end_after(6, small_config(save_every_n_steps=3), how=signal.SIGTERM)
    damage(tmp_path / "run" / "resume" / "step_6")

    assert_same_run(run(small_config(), resume=True), expected)

    said = capsys.readouterr().err
    assert re.search(rf"step_6 is damaged: {re.escape(message)}.*; the previous one is used\n", said)
    assert re.search(r"resuming from .*step_4\n", said)


@pytest.mark.parametrize("name", ["zz-extra.safetensors", "._shard-00001-model-00001-of-00001.safetensors"])
def test_files_that_the_manifest_does_not_list_are_not_read(small_config, end_after, tmp_path, name):
    expected = run(small_config("expected"))
    end_after(5, small_config(), how=signal.SIGTERM)
    checkpoint = tmp_path / "run" / "resume" / "step_5"
    if name.startswith("."):
        (checkpoint / name).write_bytes(b"Mac OS X")
    else:
        save_file({key: torch.ones_like(value) for key, value in load_tensors(checkpoint).items()}, checkpoint / name)

    assert_same_run(run(small_config(), resume=True), expected)


def test_a_value_that_does_not_fit_is_one_message(small_config, end_after, tmp_path):
    end_after(5, small_config(), how=signal.SIGTERM)
    checkpoint = tmp_path / "run" / "resume" / "step_5"
    part = torch.load(checkpoint / "process_00000.pt", weights_only=True)
    torch.save(part | {"optimizer_groups": [{"lr": 0.1}, {}]}, checkpoint / "process_00000.pt")
    seal(checkpoint)

    with pytest.raises(TrainingError, match=r"step_5 cannot be restored \(ValueError: zip.*\): move it away to resume"):
        run(small_config(), resume=True)


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(small_config, end_after, tmp_path, capsys):
    expected = run(small_config("expected"))
    cfg = small_config(save_every_n_steps=2)
    end_after(7, cfg)
    broken = tmp_path / "run" / "resume" / "step_6"
    (broken / "settings.yaml").unlink()

    run(cfg, resume=True)

    told = capsys.readouterr().err.splitlines()
    assert f"{broken} is damaged: settings.yaml is missing; the previous one is used" in told
    assert f"resuming from {broken.with_name('step_4')}" in told
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

    assert part["tokens_seen"] == 2 * 4 * 31


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
        f"the last good checkpoint is {checkpoint}: set resume_from_checkpoint=True to resume from it"
    )


def test_a_checkpoint_of_a_run_that_cannot_be_written_ends_it_and_leaves_the_one_before(
    small_config, monkeypatch, tmp_path
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    original = _snapshot.save
    saved = []

    def save(*args, **kwargs):
        saved.append(1)
        return full() if len(saved) == 2 else original(*args, **kwargs)

    monkeypatch.setattr(_snapshot, "save", save)
    folder = tmp_path / "run" / "resume"

    with pytest.raises(TrainingError) as error:
        run(small_config(save_every_n_steps=2))

    assert str(error.value) == (
        f"resume checkpoint {folder / 'step_4'} could not be written: [Errno 28] No space left on device; the last "
        f"good checkpoint is {folder / 'step_2'}: set resume_from_checkpoint=True to resume from it"
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


# ---- checkpoints before there is any optimizer state


TERMS = TFIDFCrossEntropyLoss.terms


def spoil_first_losses(monkeypatch, number):
    """Make the losses of the first steps NaN, counted over a stop."""
    taken = []

    def spoilt(*args):
        taken.append(1)
        found = TERMS(*args)
        return found._replace(loss=found.loss * float("nan")) if len(taken) <= number else found

    monkeypatch.setattr(TFIDFCrossEntropyLoss, "terms", spoilt)


BEFORE_ANY_STATE = {
    "not finite": (False, {"on_non_finite": "skip"}),
    "not finite, adapters": (True, DROPOUT | {"on_non_finite": "skip"}),
    "overflow in fp16": (True, DROPOUT | {"dtype": "fp16"}),
    "no state ever": (False, {"optimizer": {"_component_": "torch.optim.SGD", "lr": 0.1}}),
}


@pytest.mark.parametrize("case", BEFORE_ANY_STATE)
def test_a_save_before_there_is_optimizer_state_changes_nothing(small_config, end_after, monkeypatch, tmp_path, case):
    lora, overrides = BEFORE_ANY_STATE[case]
    monkeypatch.setattr(
        "tfidf_tune.training.build_grad_scaler",
        lambda run: torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=run.dtype is torch.float16),
    )

    def prepare():
        if "not finite" in case:
            spoil_first_losses(monkeypatch, 2)
        return lora

    def config(name, **more):
        return small_config(name, lora=prepare(), **overrides, **more)

    def written(folder):
        return {part: load_tensors(folder / part) for part in ("checkpoint_30pct", "checkpoint_100pct")}

    unsaved = run(config("unsaved", keep_last_n_checkpoints=0))
    assert not (unsaved / "resume").exists()
    saved = run(config("saved", save_every_n_steps=1))
    cfg = config("run", save_every_n_steps=1)
    end_after(1, cfg, how=signal.SIGTERM)
    part = torch.load(tmp_path / "run" / "resume" / "step_1" / "process_00000.pt", weights_only=True)
    assert not part["optimizer_has_state"]
    end_after(1, cfg, how=signal.SIGTERM, resume=True)
    part = torch.load(tmp_path / "run" / "resume" / "step_2" / "process_00000.pt", weights_only=True)
    assert not part["optimizer_has_state"]
    run(cfg, resume=True)

    assert_same_run(tmp_path / "run", saved)
    assert read_metrics(saved) == read_metrics(unsaved)
    assert_bits_equal(written(saved), written(unsaved))
    rates = [line["lr"] for line in read_metrics(saved)]
    assert len(set(rates)) > 5
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates)), "linear, to 0 at the end"


# ---- files of a checkpoint


def test_tensors_go_into_several_files_by_size(monkeypatch):
    monkeypatch.setattr(_snapshot, "_FILE_BYTES", 40)
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 3, "f": 7, "g": 1}  # of 4 bytes; d has more than a file

    numbers = _snapshot._file_numbers({name: torch.zeros(size) for name, size in sizes.items()})

    assert numbers == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4, "f": 4, "g": 5}


@pytest.mark.parametrize("lora", [False, True])
def test_a_checkpoint_of_several_files_is_gone_on_from(small_config, end_after, monkeypatch, lora):
    expected = run(small_config("expected", lora=lora))
    monkeypatch.setattr(_snapshot, "_FILE_BYTES", 4_000)
    cfg = small_config(lora=lora)
    end_after(5, cfg, how=signal.SIGTERM)
    checkpoint = newest(Path(cfg.output_dir))
    names = {file.name for file in checkpoint.glob("*.safetensors")}

    assert len(names) > 3
    assert names < json.loads((checkpoint / "manifest.json").read_text())["files"].keys()
    assert len(list(newest(expected).glob("*.safetensors"))) == 1
    assert_same_run(run(cfg, resume=True), expected)


def test_tensors_that_share_memory_are_taken_apart():
    book, other = torch.arange(4.0), torch.ones(2)
    tensors = {"a": book, "b": book, "c": book[1:], "d": other}

    apart = _snapshot._without_shared_memory(tensors)

    assert_bits_equal(apart, tensors)
    assert apart["a"] is book
    assert apart["d"] is other
    assert len({value.untyped_storage().data_ptr() for value in apart.values()}) == 4


# ---- quantized optimizer state

EIGHT_BITS = {"optimizer": {"_component_": "torchao.optim.AdamW8bit", "lr": 1e-2}}


@pytest.fixture
def uncompiled(monkeypatch):
    """torchao compiles its step, which takes a minute and changes no bit of what is saved."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def test_quantized_optimizer_state_goes_on(small_config, end_after, uncompiled):
    expected = run(small_config("expected", **EIGHT_BITS))
    cfg = small_config(**EIGHT_BITS)
    end_after(5, cfg, how=signal.SIGTERM)
    names = load_tensors(newest(Path(cfg.output_dir))).keys()

    for part in ("codes", "scale", "qmap"):
        assert f"state.tok_embeddings.weight.exp_avg.{part}" in names
    assert_same_run(run(cfg, resume=True), expected)


def test_the_learning_rate_that_is_logged_is_that_of_the_step(small_config, uncompiled):
    """Also where the optimizer keeps it as a tensor, which the schedule changes in place."""
    as_tensor, as_number = (
        [line["lr"] for line in read_metrics(run(small_config(name, **overrides)))]
        for name, overrides in (("tensor", EIGHT_BITS), ("number", {}))
    )

    assert as_number[0] == 1e-2
    assert as_tensor == pytest.approx(as_number, rel=1e-6)


def test_quantized_state_that_is_sharded_is_refused_before_work_begins(small_config, monkeypatch, uncompiled, tmp_path):
    monkeypatch.setattr(_resources, "dist", SimpleNamespace(is_initialized=lambda: True))

    with pytest.raises(
        SetupError,
        match=r"optimizer: torchao\.optim\.AdamW8bit keeps its state as OptimState8bit, .*keep_last_n_checkpoints=0$",
    ):
        run(small_config(**EIGHT_BITS))
    assert not (tmp_path / "run").exists()

    run(small_config("none_kept", **EIGHT_BITS, keep_last_n_checkpoints=0))
    run(small_config("plain"))


# ---- another run in the same folder


def test_a_run_keeps_others_out_of_its_folder_until_it_ends(small_config, monkeypatch, tmp_path):
    refused = []

    def train_step(*args, **kwargs):
        with pytest.raises(BlockingIOError), locked_folder(tmp_path / "run"):
            pass
        refused.append(1)
        return original(*args, **kwargs)

    original = _train.train_step
    monkeypatch.setattr(_train, "train_step", train_step)
    run(small_config())

    assert len(refused) == 12
    with locked_folder(tmp_path / "run"):
        pass


@pytest.mark.parametrize("step", ["check_resources", "count_steps", "open_progress"])
def test_a_run_that_is_set_up_keeps_others_out_of_its_folder(small_config, monkeypatch, tmp_path, step):
    """Else a run that is held up would replace what another has finished meanwhile."""
    original, refused = getattr(training, step), []

    def held_up(*args, **kwargs):
        with pytest.raises(SetupError, match="another process is writing into output_dir"):
            run(small_config(seed=1))
        refused.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(training, step, held_up)
    run(small_config())

    assert refused == [1]
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").seed == 0


def test_a_refused_run_leaves_the_probe_file_of_the_folder_as_it_is(small_config, end_after, tmp_path):
    """Checkpoints of one text are never evaluated on the passages of another."""
    source = shutil.copyfile(small_config().dataset.source, tmp_path / "source.txt")
    cfg = small_config(**{"dataset.target_source": str(source)})
    end_after(5, cfg, how=signal.SIGTERM)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert tmp_path / "run" / "probe.jsonl" in before
    first, *others = source.read_text().splitlines()
    source.write_text("\n".join([*others, first]))

    with pytest.raises(SetupError, match="was written with other inputs: data set was"):
        run(cfg, resume=True)

    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_refused_and_leaves_all_as_it_is(small_config, end_after, tmp_path, resume):
    folder = tmp_path / "run"
    if resume:
        end_after(5, small_config(), how=signal.SIGTERM)
    for left in ("resume/.step_6.partial", f".checkpoint_60pct.{'0' * 32}"):
        (folder / left).mkdir(parents=True)
        (folder / left / "half").touch()
    (folder / f".config.{'0' * 32}.yaml").touch()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    with locked_folder(folder), pytest.raises(SetupError) as refusal:
        run(small_config(), resume=resume)

    assert str(refusal.value) == (
        f"another process is writing into output_dir {folder}: wait until it ends, or choose another output_dir"
    )
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert after == before


def test_an_error_of_the_run_is_not_taken_for_a_second_one(tmp_path):
    """A terminal that does not block gives the same kind of error."""
    with pytest.raises(BlockingIOError, match="could not complete"), hold_folder(tmp_path):
        raise BlockingIOError(11, "write could not complete without blocking")


# ---- what a run began with


def test_a_data_set_with_other_contents_is_refused_with_both(small_config, end_after, monkeypatch):
    """As many items: a text that was edited."""
    end_after(2, small_config(), how=signal.SIGTERM)
    build = training.build_dataset

    def edited(*args):
        dataset = build(*args)
        items = [dataset[index] for index in range(len(dataset))]
        items[7] = items[7] | {"tokens": [5, *items[7]["tokens"][1:]]}
        return items

    monkeypatch.setattr(training, "build_dataset", edited)

    with pytest.raises(SetupError) as refusal:
        run(small_config(), resume=True)
    found = re.search(r'data set was "24 items \((\w{16})\)", is "24 items \((\w{16})\)"\. Restore', str(refusal.value))
    assert found
    assert found[1] != found[2]
    assert "base weights" not in str(refusal.value)


def test_base_weights_that_were_replaced_are_refused_with_both(small_config, end_after, tiny_checkpoint, tmp_path):
    base = shutil.copytree(tiny_checkpoint, tmp_path / "base")
    cfg = small_config(lora=True, **{"checkpointer.checkpoint_dir": str(base)})
    end_after(2, cfg, how=signal.SIGTERM)
    content = (base / "model.safetensors").read_bytes()
    (base / "model.safetensors").write_bytes(content[:-2] + bytes([content[-2] ^ 1, content[-1]]))

    with pytest.raises(SetupError) as refusal:
        run(cfg, resume=True)
    found = re.search(r'other inputs: base weights was "(\w{16})", is "(\w{16})"\. Restore them', str(refusal.value))
    assert found
    assert found[1] != found[2]

    (base / "model.safetensors").write_bytes(content)  # the same again, at another time
    run(cfg, resume=True)
    assert newest(tmp_path / "run").name == "step_12"


# ---- out of memory


@pytest.mark.parametrize("every", [None, 2])
def test_too_little_memory_while_training_is_one_message(small_config, monkeypatch, tmp_path, every):
    taken = []

    def train_step(*args, **kwargs):
        taken.append(1)
        if len(taken) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmuch more")
        return original(*args, **kwargs)

    original = _train.train_step
    monkeypatch.setattr(_train, "train_step", train_step)

    with pytest.raises(TrainingError) as error:
        run(small_config(save_every_n_steps=every))

    left = (
        f"the last good checkpoint is {tmp_path / 'run' / 'resume' / 'step_2'}: set resume_from_checkpoint=True to "
        "resume from it"
        if every
        else "no resume checkpoint was written; milestones written so far are complete"
    )
    assert str(error.value) == (
        "out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.): try enable_activation_checkpointing=True, "
        "fsdp_cpu_offload=True or more processes; for a new run also a smaller batch_size with more "
        f"gradient_accumulation_steps, shorter sequences, LoRA; {left}"
    )


# ---- milestones that are past


def test_milestones_that_are_past_are_told_once_and_the_others_written(small_config, end_after, tmp_path, capsys):
    end_after(5, small_config(), how=signal.SIGTERM)  # 30% is step 4, and is there
    capsys.readouterr()

    run(small_config(save_at_percent=[10, 30, 40, 50, 100]), resume=True)

    told = [line for line in capsys.readouterr().err.splitlines() if "save_at_percent" in line]
    assert told == ["checkpoint_10pct, checkpoint_40pct of save_at_percent will not be written: step 5 is done already"]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint_*")) == [
        "checkpoint_100pct", "checkpoint_30pct", "checkpoint_50pct",
    ]  # fmt: skip
