import json
import re

import pytest
from helpers.fakes.runs import (
    controls,
    evaluation,
    grown_runs,
    targets,
    write_evaluation,
    write_run,
)
from helpers.processes.commands import run_in_forks
from tokenizers import Tokenizer, models

from tfidf_tune.commands.compare import main


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """The folder of an experiment of two cells, whose checkpoints have a tokenizer."""
    folder = tmp_path_factory.mktemp("compare") / "experiment"
    for made in grown_runs(num_passages=4, downstream=False):
        write_run(folder / made.objective, made)
        for checkpoint in folder.glob("*/checkpoint_*"):
            Tokenizer(models.WordLevel({"w7": 7}, unk_token="w7")).save(
                str(checkpoint / "tokenizer.json")
            )
    return folder


@pytest.fixture(scope="module")
def compared(experiment):
    """The folder of a report, and the command that made it in a process of its own."""
    folder = experiment.parent / "comparison"
    (ended,) = run_in_forks([["compare", str(experiment), "--output-dir", str(folder)]])
    return folder, ended


def test_it_prints_the_page_and_the_report_whose_verdict_is_last(compared):
    folder, ended = compared
    assert (ended.code, ended.err) == (0, "")
    verdict = json.loads((folder / "report.json").read_text())["verdict"]
    assert "too little was measured to judge what TF-IDF recites" in verdict
    assert len(ended.out.splitlines()) <= 25
    assert " ".join(ended.out.split()).endswith(verdict)
    assert re.search(r"\| Objective +\| Recited further +\| Recited above chance ", ended.out)
    assert ended.out.startswith(f"The page: {folder / 'index.html'}\n\n# TF-IDF against CE\n")
    assert (folder / "index.html").is_file()


def test_it_needs_neither_torch_nor_what_only_training_and_evaluation_need(compared):
    """Examples included, which are decoded by the tokenizer of the checkpoint."""
    heavy = {
        "datasets",
        "lm_eval",
        "omegaconf",
        "peft",
        "rouge_score",
        "torch",
        "torchtune",
        "transformers",
    }
    modules = set(compared[1].modules)
    assert {"matplotlib.figure", "pandas", "tokenizers"} <= modules
    assert not modules & (heavy | {"matplotlib.pyplot", "tfidf_tune.training"})


def test_a_comparison_can_be_made_again_from_its_results_without_examples(compared, tmp_path):
    folder, _ = compared
    main([str(folder / "results.jsonl"), "--output-dir", str(tmp_path / "again")])
    first, again = (
        json.loads((path / "report.json").read_text()) for path in (folder, tmp_path / "again")
    )
    assert first.pop("examples") != []
    assert again.pop("examples") == []
    assert again == first


def test_labels_baseline_title_and_folder_can_be_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, lms in (("theirs", 6), ("ours", 2)):
        samples = [*targets(lms, lms + 1), *controls(0, 1)]
        write_evaluation(tmp_path / name, evaluation(samples=samples, checkpoint=f"org/{name}"))
    main(
        [
            "TF-IDF=ours",
            "CE=theirs",
            "--output-dir",
            "out/here",
            "--title",
            "Mine",
            "--baseline",
            "TF-IDF",
        ]
    )
    printed = capsys.readouterr().out
    assert printed.startswith("The page: out/here/index.html\n\n# Mine\n")
    assert "too little was measured to judge what CE recites" in " ".join(printed.split())
    assert (
        json.loads((tmp_path / "out/here/report.json").read_text())["provenance"]["Baseline"]
        == "TF-IDF"
    )


def test_what_cannot_be_compared_is_refused_and_leaves_nothing_behind(
    experiment, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="give the report a folder of its own"):
        main([str(experiment), "--output-dir", str(experiment)])
    with pytest.raises(ValueError, match=r"nothing to compare: there is only .*CE.*probe audit"):
        main([str(experiment / "CE")])
    assert not [*tmp_path.iterdir()]
