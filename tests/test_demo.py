"""The demo, end to end, on a run cut down to seconds."""

import contextlib
import io
import signal

import pytest
from omegaconf import OmegaConf

from tfidf_tune.commands import demo
from tfidf_tune.commands.experiment import main as experiment_command
from tfidf_tune.results import import_results

SMALL = """
base: experiments/demo
output_dir: out
seeds: [3]
milestones: [50, 100]
overrides:
  model: {num_layers: 1, embed_dim: 24, intermediate_dim: 32, vocab_size: 512, num_heads: 2, num_kv_heads: 2}
  dataset: {num_base: 16, num_targets: 2, num_repeats: 4}
  batch_size: 4
  log_every_n_steps: 1
eval:
  metadata: {num_blocks: 4}
"""


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory):
    """A demo of six steps on a smaller model, run twice: what the first and the second print, and its folder.

    The command runs in this process, what it starts does not: each import of the libraries takes seconds.
    """
    folder = tmp_path_factory.mktemp("demo")
    (folder / "small.yaml").write_text(SMALL)
    printed = [io.StringIO(), io.StringIO()]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("OMP_NUM_THREADS", "1")
        patched.setattr(signal, "signal", lambda number, handler: None)  # it would outlast the test
        for out in printed:
            with contextlib.redirect_stdout(out):
                experiment_command(["small.yaml"])
    return [out.getvalue() for out in printed], folder / "out"


def tables_of(text):
    return [line for line in text.splitlines() if line.startswith("| ")]


def test_both_objectives_are_evaluated_at_every_milestone(finished_demo):
    results = import_results([finished_demo[1] / "llama-3m-full"])

    assert [(one.objective, one.seed, one.progress) for one in results.checkpoints] == [
        *(("CE", 3, progress) for progress in (50, 100)),
        *(("TF-IDF", 3, progress) for progress in (50, 100)),
    ]
    scores = results.scores
    for number in range(len(results.checkpoints)):
        own = scores[scores["checkpoint"] == number]
        assert set(own["prefix"].dropna()) == {32, 50, 100}
        assert set(own["kind"]) == {"target", "control", "block"}
        assert (own["kind"] == "block").sum() == 4
    blocks = [scores.loc[(scores["checkpoint"] == at) & (scores["kind"] == "block"), "value"].tolist() for at in (1, 3)]
    assert blocks[0] != blocks[1], "different objectives, different models"


def test_it_ends_with_tables_intervals_an_example_and_the_page(finished_demo):
    (first, _), folder = finished_demo

    for words in ("| Avg LMS |", "| Perplexity |", "95 % interval", "Truth", "CE (LMS ", "TF-IDF (LMS "):
        assert words in first
    assert first.splitlines()[-1] == "The complete report, with figures: out/report/index.html"
    assert (folder / "report" / "index.html").is_file()
    assert list((folder / "report" / "figures").glob("*.png"))


def test_a_second_run_does_nothing_again_and_shows_the_same(finished_demo):
    first, second = finished_demo[0]

    assert "(0 of 6 left" in first
    assert "training" in first
    assert "begun" not in second
    assert tables_of(second) == tables_of(first)
    assert len(tables_of(second)) > 10


def test_each_objective_trained_from_the_common_start(finished_demo):
    folders = [finished_demo[1] / "llama-3m-full" / objective / "seed3" for objective in ("ce", "tf-idf")]
    configs = [OmegaConf.load(folder / "config.yaml") for folder in folders]

    (start,) = {cfg.checkpointer.checkpoint_dir for cfg in configs}
    assert start.startswith("out/starts/llama-3m-full/seed3-")
    assert [cfg.loss._component_ for cfg in configs] == [
        "tfidf_tune.loss.CrossEntropyLoss", "tfidf_tune.loss.TFIDFCrossEntropyLoss",
    ]  # fmt: skip


def test_the_command_is_the_experiment_of_that_name(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(demo, "run", given.append)

    demo.main(["--output-dir", str(tmp_path / "a=b"), "--seed", "7"])

    (experiment,) = given
    assert (experiment.output_dir, experiment.seeds) == (str(tmp_path / "a=b"), [7])
    assert experiment.milestones == [10, 25, 50, 75, 100]
    assert list(experiment.objectives) == ["CE", "TF-IDF"]
