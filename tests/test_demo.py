"""The demo, end to end, on a run cut down to seconds."""

import signal

from fork_jobs import ForkExecutor
from omegaconf import OmegaConf

from tfidf_tune.commands import demo
from tfidf_tune.commands.experiment import main as experiment_command
from tfidf_tune.experiment import _run
from tfidf_tune.results import import_results

SMALL = """
base: experiments/demo
output_dir: out
seeds: [3]
milestones: [50, 100]
models:
  Llama 650K: {start: {epochs: 1, source_split: "docstrings_train[:20]"}}
overrides:
  model: {num_layers: 1, embed_dim: 24, intermediate_dim: 32, vocab_size: 512, num_heads: 2, num_kv_heads: 2}
  dataset: {num_base: 16, num_targets: 2, num_repeats: 4, target_split: "docstrings_train[60%:]"}
  batch_size: 4
  log_every_n_steps: 1
eval:
  metadata: {num_blocks: 4, max_new_tokens: 16}
"""


def test_a_demo_of_six_steps_trains_evaluates_and_compares_its_objectives(tmp_path, monkeypatch, capsys):
    """The command runs in this process, its jobs in forks."""
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_run, "make_executor", lambda launcher, folder: ForkExecutor(folder))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # it would outlast the test
    printed = []
    for _ in range(2):
        experiment_command(["small.yaml"])
        printed.append(capsys.readouterr().out)
    first, second = printed

    results = import_results([tmp_path / "out" / "llama-650k"])
    assert [(one.objective, one.seed, one.progress) for one in results.checkpoints] == [
        (objective, 3, progress) for objective in ("CE", "Repetition", "TF-IDF") for progress in (50, 100)
    ]
    blocks = []
    for _, own in results.scores.groupby("checkpoint"):
        assert {32, 50, 100} <= set(own["prefix"].dropna())
        assert {"lms", "passage_nll", "nll"} <= set(own["metric"])
        assert set(own["kind"]) == {"target", "control", "block"}
        blocks.append(own.loc[own["kind"] == "block", "value"].tolist())
    assert [len(values) for values in blocks] == [4] * 6
    assert blocks[1] != blocks[3] != blocks[5], "different objectives, different models"

    for words in (
        "| Avg LMS |",
        "| Perplexity |",
        "95 % interval",
        "Truth",
        "CE (LMS ",
        "TF-IDF (LMS ",
        "Repetition (LMS ",
    ):
        assert words in first
    assert first.splitlines()[-1] == "The complete report, with figures: out/report/index.html"
    assert (tmp_path / "out" / "report" / "index.html").is_file()
    assert list((tmp_path / "out" / "report" / "figures").glob("*.png"))

    folders = [tmp_path / "out" / "llama-650k" / name / "seed3" for name in ("ce", "tf-idf", "repetition")]
    configs = [OmegaConf.load(folder / "config.yaml") for folder in folders]
    (start,) = {cfg.checkpointer.checkpoint_dir for cfg in configs}
    assert start.startswith("out/starts/llama-650k/seed0-")
    losses = [cfg.loss._component_.removeprefix("tfidf_tune.loss.") for cfg in configs]
    assert losses == ["CrossEntropyLoss", "TFIDFCrossEntropyLoss", "WeightedCrossEntropyLoss"]
    assert (tmp_path / "out" / "report" / "figures" / "frontier.png").is_file()

    # The second run trains and evaluates nothing and shows the same tables.
    assert "(0 of 9 left" in first
    assert "begun" not in second
    tables = [[line for line in text.splitlines() if line.startswith("| ")] for text in printed]
    assert tables[0] == tables[1]
    assert len(tables[1]) > 10


def test_the_command_is_the_experiment_of_that_name(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(demo, "run", given.append)

    demo.main(["--output-dir", str(tmp_path / "a=b"), "--seed", "7"])

    (experiment,) = given
    assert (experiment.output_dir, experiment.seeds) == (str(tmp_path / "a=b"), [7])
    assert experiment.milestones == [25, 50, 75, 100]
    assert list(experiment.objectives) == ["CE", "TF-IDF", "Repetition"]
