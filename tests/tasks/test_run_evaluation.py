"""``tfidf-tune eval RUN``: all milestones of a run in one process, as if each was evaluated by
itself.
"""

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import Output, run_tasks

from tfidf_tune._checks import SetupError
from tfidf_tune.passages import read_probe_file, write_probe_file
from tfidf_tune.results import import_results
from tfidf_tune.tasks import membership, memorization, perplexity, run_evaluation
from tfidf_tune.tasks.run_evaluation import evaluate_run, milestones, tasks_of_run

pytestmark = pytest.mark.usefixtures("only_our_tasks")


@pytest.fixture
def run(llama, reciting, probe_file, tmp_path):
    """A run with two milestones and held-out text."""
    folder = tmp_path / "runs" / "mine"
    for percent, checkpoint in ((100, reciting), (50, llama)):
        shutil.copytree(checkpoint, folder / f"checkpoint_{percent}pct")
    shutil.copy(probe_file, folder / "probe.jsonl")
    task_fakes.write_rows(
        folder / "held_out.jsonl", [{"text": task_fakes.text(seed, 60)} for seed in range(900, 906)]
    )
    (folder / "checkpoint_50").mkdir()
    (folder / "config.yaml").write_text(
        yaml.safe_dump({"dataset": {"probe_file": "${output_dir}/probe.jsonl"}})
    )
    return folder


@pytest.fixture
def evaluated(monkeypatch):
    """The checkpoints that are evaluated; nothing is computed, but all files are written."""
    checkpoints = []

    def evaluate(model_args, tasks, output_path, *, metadata, **_):
        checkpoints.append(model_args["pretrained"].rpartition("_")[2])
        folder = output_path / "model"
        folder.mkdir(parents=True, exist_ok=True)
        number = len(checkpoints)
        configs = {name: {"metadata": metadata | model_args} for name in tasks}
        (folder / f"results_{number}.json").write_text(json.dumps({"configs": configs}))
        for name in tasks:
            (folder / f"samples_{name}_{number}.jsonl").touch()

    monkeypatch.setattr(run_evaluation, "evaluate", evaluate)

    def done():
        found = [*checkpoints]
        checkpoints.clear()
        return found

    return done


def test_the_samples_are_those_of_evaluations_one_by_one_and_what_they_share_is_computed_once(
    run, llama, monkeypatch, tmp_path
):
    loaded = []
    tokenized = []
    read = []
    load_model = membership.load_model
    text_blocks = perplexity.text_blocks

    def counted_loading(*arguments, **more):
        loaded.append(arguments)
        return load_model(*arguments, **more)

    def counted_tokenizing(*arguments, **more):
        tokenized.append(arguments)
        return text_blocks(*arguments, **more)

    def counted_reading(file):
        read.append(file)
        return read_probe_file(file)

    monkeypatch.setattr(memorization, "read_probe_file", counted_reading)
    monkeypatch.setattr(membership, "load_model", counted_loading)
    monkeypatch.setattr(perplexity, "text_blocks", counted_tokenizing)
    tasks, settings = tasks_of_run(run)
    more = {"reference_model": str(llama), "max_new_tokens": 8}
    evaluate_run(run, None, more, model_args={"dtype": "float32"}, device="cpu")
    assert (len(loaded), len(tokenized), len(read)) == (1, 1, 1)
    tasks = [*tasks, "tfidf_positive_control", "tfidf_positive_control_nll"]
    for checkpoint in milestones(run):
        alone = run_tasks(
            checkpoint, tasks, tmp_path / checkpoint.name, batch_size=32, **settings, **more
        )
        together = Output(run / "evaluation" / checkpoint.name)
        expected, written = (json.loads(output.file.read_text()) for output in (alone, together))
        assert written["results"] == expected["results"]
        assert written["configs"] == expected["configs"]
        for name in written["configs"]:
            assert together.samples(name) == alone.samples(name)
    # Nothing is kept from one evaluation to the next.
    assert (len(loaded), len(tokenized), len(read)) == (
        3,
        3,
        3,
    )


def test_tasks_and_settings_follow_from_what_the_run_wrote(run):
    assert [path.name for path in milestones(run)] == ["checkpoint_50pct", "checkpoint_100pct"]
    passages = read_probe_file(run / "probe.jsonl")
    shortest = min(len(passage.token_ids) for passage in passages)
    tasks, settings = tasks_of_run(run)
    assert tasks == ["tfidf_memorization", "tfidf_membership", "tfidf_wikitext2_ppl"]
    assert settings == {
        "probe_file": str(run / "probe.jsonl"),
        "wikitext2_source": str(run / "held_out.jsonl"),
        "block_size": shortest,
    }
    (run / "held_out.jsonl").unlink()
    for length, lengths in ((100, [32, 50]), (80, [32]), (20, [10]), (1, [1])):
        cut = [replace(passage, token_ids=passage.token_ids[:length]) for passage in passages]
        write_probe_file(run / "probe.jsonl", cut)
        tasks, settings = tasks_of_run(run)
        assert tasks == ["tfidf_memorization_prefixes", "tfidf_membership"]
        assert settings["prefix_lengths"] == lengths
    write_probe_file(
        run / "all_passages.jsonl", [replace(passage, num_prompt=4) for passage in passages]
    )
    assert tasks_of_run(run) == (
        ["tfidf_memorization_p50", "tfidf_membership"],
        {"probe_file": str(run / "all_passages.jsonl")},
    )


def test_a_milestone_is_evaluated_once_and_again_when_its_results_are_of_something_else(
    run, evaluated
):
    evaluate_run(run)
    assert evaluated() == ["50pct", "100pct"]
    evaluate_run(run)
    assert evaluated() == []
    evaluate_run(run, overwrite=True)
    assert evaluated() == ["50pct", "100pct"]
    # Other settings, other tasks.
    evaluate_run(run, None, {"max_new_tokens": 4})
    evaluate_run(run, ["tfidf_memorization_p32"])
    assert evaluated() == ["50pct", "100pct"] * 2
    # An evaluation that was killed before its last samples.
    for file in (run / "evaluation" / "checkpoint_50pct").rglob("samples_tfidf_membership_*"):
        file.unlink()
    evaluate_run(run)
    assert evaluated() == ["50pct"]
    # Newer weights, newer passages; a part of the documents does not count as results of all.
    later = os.stat(run / "probe.jsonl").st_mtime + 1000
    os.utime(next((run / "checkpoint_100pct").glob("*.safetensors")), (later, later))
    evaluate_run(run)
    assert evaluated() == ["100pct"]
    os.utime(run / "probe.jsonl", (later, later))
    evaluate_run(run, limit=2)
    assert evaluated() == ["50pct", "100pct"]


def test_the_start_is_evaluated_beside_the_milestones_and_is_one_model_for_all_runs_from_it(
    run, llama, monkeypatch, tmp_path
):
    """Under any label of a run; the runs have seeds and learning rates, the start has none."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {
        "model": {"_component_": "m"},
        "loss": {"_component_": "tfidf_tune.loss.TFIDFLoss"},
        "seed": 3,
    }
    config["checkpointer"] = {"checkpoint_dir": str(llama)}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.setattr(run_evaluation, "milestones", lambda folder: [folder / "checkpoint_100pct"])
    other = shutil.copytree(run, tmp_path / "runs" / "other")
    settings = {"max_new_tokens": 8}
    for folder in (run, other):
        evaluate_run(
            folder,
            ["tfidf_memorization_p50"],
            settings,
            model_args={"dtype": "float32"},
            device="cpu",
        )
    found = import_results([f"first={run}", f"second={other}"])
    assert [(one.objective, one.progress, one.seed) for one in found.checkpoints] == [
        ("first", 100, 3),
        ("start", 0, None),
        ("second", 100, 3),
    ]
    assert {one.model for one in found.checkpoints} == {f"{llama.name} (full)"}
    assert {len(one.samples) for one in found.checkpoints} == {len(found.checkpoints[0].samples)}
    lms = [max(sample.lms for sample, _ in one.samples) for one in found.checkpoints]
    assert lms[1] < lms[0] == lms[2]
    # Later evaluations leave it as it is, and without its weights, or by an option, there is none.
    written = sorted(run.rglob("results_*.json"))
    evaluate_run(run, ["tfidf_memorization_p50"], settings)
    assert sorted(run.rglob("results_*.json")) == written
    for more, name in (({"with_start": False}, llama), ({}, tmp_path / "gone")):
        (run / "config.yaml").write_text(
            yaml.safe_dump(config | {"checkpointer": {"checkpoint_dir": str(name)}})
        )
        shutil.rmtree(run / "evaluation")
        evaluate_run(run, ["tfidf_memorization_p50"], settings, **more, device="cpu", limit=1)
        assert [path.name for path in (run / "evaluation").iterdir()] == ["checkpoint_100pct"]


def test_what_is_no_run_or_has_no_passages_is_refused(run, tmp_path, evaluated, run_command):
    with pytest.raises(SetupError, match=r"has no checkpoint_<n>pct: name the folder of a run"):
        evaluate_run(tmp_path)
    (run / "config.yaml").write_text("dataset: {_component_: x}")
    with pytest.raises(SetupError, match=r"mine has no passages .* --metadata probe_file=FILE"):
        evaluate_run(run)
    with pytest.raises(SystemExit):
        run_command("eval", run / "checkpoint_50pct")
    probe = str(run / "probe.jsonl")
    run_command(
        "eval",
        run,
        "--tasks",
        "tfidf_memorization_p32",
        "--metadata",
        f"probe_file={probe}",
        "--limit",
        "1",
    )
    assert evaluated() == ["50pct", "100pct"]
    assert SimpleNamespace(**yaml.safe_load((run / "config.yaml").read_text())).dataset == {
        "_component_": "x"
    }
