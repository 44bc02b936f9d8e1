"""The monitor in both recipes: what it writes, what it leaves alone, what its threshold does."""

import json
from dataclasses import replace
from functools import partial
from itertools import chain, product

import pytest
import torch
from helpers.fakes.data import write_rows
from helpers.fakes.tiny_models import MODELS
from helpers.fakes.tiny_run import means_by_kind, read_metrics, read_weights, run_config
from helpers.processes.recipes import ALL, RecipeRun, run_to_the_end
from helpers.references.probe import probe
from torch._dynamo.utils import counters

from tfidf_tune.data import embedded_documents, hf_tokenizer
from tfidf_tune.passages import read_probe_file, write_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.training import SetupError

PREFIX = 8
MEASURED = {
    f"memorization_{kind}_{name}"
    for kind, name in product(("target", "control"), ("lms", "prefix_match", "nll"))
}
DROPOUT = {"lora": True, "model.lora_dropout": 0.2, "model.apply_lora_to_mlp": True}


@pytest.fixture
def make_run(tmp_path, tiny_checkpoint, text_file):
    """Make a run on one process; with ``every``, it has a monitor of so many steps."""

    def make(name, *, every=None, lora=False, base=tiny_checkpoint, monitor=(), **overrides):
        settings = {"max_steps": 10, "save_at_percent": [100]} | overrides
        if "dataset" not in overrides:
            settings = {"dataset.num_base": 20} | settings
        if every is not None:
            section = {
                "probe_file": "${dataset.probe_file}",
                "every_n_steps": every,
                "prefix_length": PREFIX,
            }
            settings["memorization_monitor"] = section | {"batch_size": 3} | dict(monitor)
        return RecipeRun(run_config(tmp_path / name, base, text_file, lora=lora, **settings), lora)

    return make


def measurements(folder):
    """The monitor's lines by their step, none of which is measured twice, also where a run is
    resumed.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [line for line in lines if line.keys() >= MEASURED]
    by_step = {line["step"]: line for line in measured}
    assert len(by_step) == len(measured)
    return by_step


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def count_graphs(run):
    """Return the folder of a run, and the number of graphs that torch.compile made in it."""
    torch._dynamo.reset()  # functions compiled in an earlier run
    before = counters["stats"]["unique_graphs"]
    return run.here(), counters["stats"]["unique_graphs"] - before


def means(folder, checkpoint, base, **options):
    """LMS and prefix match of targets and controls, by transformers on the checkpoint."""
    model = load_model(folder / checkpoint, base=base)
    passages = read_probe_file(folder / "probe.jsonl")
    return means_by_kind(
        probe(model, hf_tokenizer(str(base)), passages, prefix_lengths=(PREFIX,), **options)
    )


SETTINGS = {
    "full": {"dataset.num_repeats": 20, "epochs": 2, "max_steps": 40, "log_every_n_steps": 4},
    "compiled adapters": {
        "gradient_accumulation_steps": 2,
        "epochs": 2,
        "enable_activation_checkpointing": True,
        "max_steps": 5,
        "loss.head": "chunked",
        "compile": True,
        **DROPOUT,
    },
}


# Dynamo looks at the gradient of a tensor that has none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("kind", SETTINGS)
def test_training_is_the_same_with_and_without_the_monitor(
    make_run, tiny_checkpoint, monkeypatch, kind
):
    settings = SETTINGS[kind]
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    alone, num_graphs = count_graphs(make_run("alone", **settings))
    state = torch.get_rng_state()
    monitored, num_graphs_monitored = count_graphs(make_run("monitored", every=4, **settings))

    assert num_graphs_monitored == num_graphs
    assert bool(num_graphs) == ("compile" in settings)
    assert read_metrics(monitored) == read_metrics(alone)
    assert_equal(
        read_weights(monitored / "checkpoint_100pct"), read_weights(alone / "checkpoint_100pct")
    )
    assert torch.equal(torch.get_rng_state(), state)
    last = settings["max_steps"]
    found = measurements(monitored)
    assert [*found] == sorted({*range(0, last, 4), last})
    assert found[last]["memorization_target_nll"] < found[0]["memorization_target_nll"]
    expected = means(monitored, "checkpoint_100pct", tiny_checkpoint)
    assert {name: found[last][name] for name in expected} == expected
    if "lora" not in settings:
        assert expected["memorization_target_lms"] > 1.5 * expected["memorization_control_lms"]


def test_two_processes_measure_in_lockstep(make_run, make_base, tmp_path):
    """Sharded: layers that stay gathered under a tied, fused head; offloaded NF4 weights, logits in
    chunks, dropout.
    """
    adapters = {"lora": True, "lora_dropout": 0.2, "quantize_base": True}
    offloaded = {
        "lora": True,
        "merge_adapter": True,
        "fsdp_cpu_offload": True,
        "loss.head": "chunked",
    }
    cases = {
        "tied": ("llama3_2-tied", 64, {}, {"fsdp_reshard_after_forward": False}),
        "nf4": ("llama", 256, adapters, offloaded),
    }
    if not ALL:
        del cases["nf4"]
    keep = {"stop_above": 8, "when_above": "keep", "max_new_tokens": 8}
    bases = {}
    runs = {}
    for name, (model, dim, of_model, settings) in cases.items():
        bases[name] = make_base(model, dim)
        settings |= {
            "model": MODELS[model].section(dim, **of_model),
            "max_steps": 3,
            "batch_size": 2,
        }
        make = partial(make_run, base=bases[name], **settings)
        runs[name] = (make(f"{name} alone"), make(name, every=2, monitor=keep))

    run_to_the_end(list(chain.from_iterable(runs.values())), tmp_path / "processes")

    for name, (alone, monitored) in runs.items():
        assert read_metrics(monitored.folder) == read_metrics(alone.folder), name
        weights = read_weights(monitored.folder / "checkpoint_100pct")
        assert_equal(weights, read_weights(alone.folder / "checkpoint_100pct"))
        assert_equal(weights, read_weights(monitored.folder / "below_threshold"))
        found = measurements(monitored.folder)
        assert [*found] == [0, 2, 3], name
        if name != "nf4":  # whose merged weights are rounded
            expected = means(monitored.folder, "checkpoint_100pct", bases[name], max_new_tokens=8)
            assert {key: found[3][key] for key in expected} == expected, name


THRESHOLD = {"dataset.num_repeats": 20, "epochs": 2, "max_steps": 40}


def test_a_run_that_the_threshold_ends_can_be_resumed(make_run, capsys):
    alone = make_run("alone", **THRESHOLD).here()
    folder = make_run("stopped", every=5, monitor={"stop_above": 3}, **THRESHOLD).here()

    above = {
        step: entry["memorization_target_lms"] > 3 for step, entry in measurements(folder).items()
    }
    step = [*above][-1]
    assert 0 < step < 40
    assert [*above.values()] == [False] * (len(above) - 1) + [True]
    milestone = f"checkpoint_{-(-100 * step // 40)}pct"
    assert sorted(path.name for path in folder.glob("checkpoint_*")) == [milestone]
    printed = capsys.readouterr().err.replace("\n", " ")
    assert f"the run ends after step {step} of 40: the targets' mean LMS is " in printed
    assert (
        f"{milestone} is written; the last good checkpoint is "
        f"{folder / 'resume' / f'step_{step}'}: set" in printed
    )

    make_run("stopped", every=5, resume_from_checkpoint=True, **THRESHOLD).here()

    assert [*measurements(folder)] == [*range(0, 41, 5)]
    assert read_metrics(folder) == read_metrics(alone)
    assert_equal(
        read_weights(folder / "checkpoint_100pct"), read_weights(alone / "checkpoint_100pct")
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"every_n_step": 5}, "no key 'memorization_monitor.every_n_step'"),
        ({"stop_above": 30}, "memorization_monitor: stop_above is 30.0"),
        ({"prefix_length": 32}, "memorization_monitor: Passage 'target-0000' has 32 tokens"),
        ({"probe_file": "absent.jsonl"}, "memorization_monitor: .*'absent.jsonl'"),
    ],
    ids=str,
)
def test_a_wrong_section_is_refused_before_any_work(make_run, section, message):
    run = make_run("run", every=5, monitor=section)

    with pytest.raises(SetupError, match=f"config: {message}"):
        run.here()
    assert not run.folder.exists()


def test_a_probe_file_that_does_not_fit_is_refused(make_run, tmp_path):
    source = make_run("source", max_steps=1).here()
    passages = read_probe_file(source / "probe.jsonl")
    first = passages[0]
    long = passages[0].token_ids * 3

    for content, message in (
        (
            [replace(first, tokenizer_fingerprint="0")],
            "fingerprint '0'; the given one, '.*tiny_llama0', has",
        ),
        ([one for one in passages if one.kind == "control"], "is a target"),
        ([replace(first, token_ids=long)], "up to 96 tokens, the model takes at most 64"),
    ):
        write_probe_file(tmp_path / "other", content)
        with pytest.raises(SetupError, match=f"config: memorization_monitor: .*{message}"):
            make_run("run", every=5, monitor={"probe_file": str(tmp_path / "other")}).here()


def test_passages_of_another_run_are_looked_for_in_the_training_text(make_run, tmp_path, capsys):
    """Controls that are there are not measured; all of them are an error; absent targets are
    counted in a line.
    """
    text = write_rows(
        tmp_path / "text.jsonl", [text[:300] for text in embedded_documents("train")[:100]]
    )
    blocks = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": text,
        "block_size": 32,
        "holdout": 0.02,
    }
    probes = tmp_path / "probes.jsonl"
    make_run("source", dataset=blocks | {"probe_file": str(probes)}, max_steps=1).here()
    source = read_probe_file(probes)
    targets = [one for one in source if one.kind == "target"][:4]
    controls = [one for one in source if one.kind == "control"][:4]
    as_control = {"kind": "control", "num_injections": 0, "positions": []}
    trained = [
        replace(one, id=f"control-9{number}", **as_control) for number, one in enumerate(targets)
    ]
    absent = [
        replace(one, id=f"target-9{number}", kind="target") for number, one in enumerate(controls)
    ]
    file = tmp_path / "other.jsonl"
    means_of = {}
    for name, passages in (
        ("mixed", [targets[0], *absent[1:], controls[0], *trained[1:]]),
        ("clean", [targets[0], *absent[1:], controls[0]]),
    ):
        write_probe_file(file, passages)
        run = make_run(
            name, every=1, monitor={"probe_file": str(file)}, max_steps=2, dataset=blocks
        )
        capsys.readouterr()
        means_of[name] = measurements(run.here())
        printed = capsys.readouterr().err
        said = (
            f"3 of 4 controls of {file} are in the training text of dataset and are not measured\n"
        )
        assert (said in printed) == (name == "mixed")
        assert f"3 of 4 targets of {file} are not in the training text\n" in printed
    assert means_of["mixed"] == means_of["clean"]
    write_probe_file(file, [*targets, *trained])
    with pytest.raises(
        SetupError,
        match="memorization_monitor: 4 of 4 controls of .*other.jsonl are in the training",
    ):
        make_run("all", every=1, monitor={"probe_file": str(file)}, dataset=blocks).here()


def test_the_probe_file_of_a_run_is_known_however_it_is_spelled(
    make_run, tmp_path, text_file, monkeypatch
):
    """An older file in its place is never measured, also where the run has no passages to write."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    spelled = {"dataset.probe_file": "probe.jsonl", "max_steps": 1}
    older = measurements(make_run("older", every=1, **spelled, **{"dataset.seed": 1}).here())
    before = (tmp_path / "probe.jsonl").read_bytes()
    found = []
    for number, name in enumerate(
        ("probe.jsonl", "x/../probe.jsonl", tmp_path / "probe.jsonl", "link/probe.jsonl")
    ):
        (tmp_path / "probe.jsonl").write_bytes(before)
        run = make_run(f"run {number}", every=1, monitor={"probe_file": str(name)}, **spelled)
        found.append(measurements(run.here()))
    assert found == [found[0]] * 4
    assert found[0] != older

    blocks = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": str(text_file),
        "block_size": 32,
    }
    nothing = blocks | {"holdout": 0.0, "probe_file": "probe.jsonl"}
    run = make_run("none", every=1, monitor={"probe_file": "link/probe.jsonl"}, dataset=nothing)
    with pytest.raises(SetupError, match="no passages to write to the probe_file link/probe.jsonl"):
        run.here()
