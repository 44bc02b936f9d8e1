import dataclasses
import json

import pytest
from run_fakes import controls, evaluation, grown_runs, targets, write_evaluation, write_run

from tfidf_tune.commands.compare import main


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """The folder of an experiment of two cells, seen from its parent."""
    monkeypatch.chdir(tmp_path)
    for made in grown_runs(num_passages=4, downstream=False):
        write_run(tmp_path / "experiment" / made.objective, made)
    return tmp_path / "experiment"


def test_it_prints_the_report_and_ends_with_the_page(experiment, capsys):
    main([str(experiment)])
    printed = capsys.readouterr().out
    assert printed.startswith("# TF-IDF against CE\n")
    assert "\nRuns of Tiny, asked to continue passages" in printed
    assert "- TF-IDF lowers the average LMS by" in printed
    assert "too few passages (4) to judge" in " ".join(printed.split())
    assert "## Memorization\n" in printed
    assert printed.splitlines()[-1] == "Report: comparison/index.html"
    assert (experiment.parent / "comparison" / "index.html").is_file()


def test_folder_title_and_baseline_can_be_chosen(experiment, capsys):
    runs = [str(experiment / "TF-IDF"), str(experiment / "CE")]
    main([*runs, "--output-dir", "out/here", "--title", "Mine", "--baseline", "TF-IDF"])
    assert capsys.readouterr().out.startswith("# Mine\n")
    content = json.loads((experiment.parent / "out/here/report.json").read_text())
    assert content["provenance"]["Baseline"] == "TF-IDF"


def test_foreign_results_are_compared_by_label(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, lms in (("theirs", 6), ("ours", 2)):
        samples = [*targets(lms, lms + 1), *controls(0, 1)]
        write_evaluation(tmp_path / name, evaluation(samples=samples, checkpoint=f"org/{name}"))
    main(["CE=theirs", "TF-IDF=ours"])
    assert "TF-IDF lowers the average LMS by 61.5 %" in " ".join(capsys.readouterr().out.split())


def test_a_frontier_is_made_of_folders_and_again_of_its_records(experiment, capsys):
    for rate in (1e-3, 1e-2):
        for made in grown_runs(num_passages=4, downstream=False):
            write_run(experiment / f"{made.objective}-{rate}", dataclasses.replace(made, learning_rate=rate))
    main(["--frontier", str(experiment), "--reference", "TF-IDF"])
    printed = capsys.readouterr().out
    assert printed.startswith("# Recitation against perplexity\n")
    assert "Against TF-IDF, each at its operating point" in " ".join(printed.split())
    assert printed.splitlines()[-1] == "Report: frontier/index.html"
    folder = experiment.parent / "frontier"
    main(["--frontier", str(folder / "results.jsonl"), "--reference", "TF-IDF", "--output-dir", "again"])
    assert capsys.readouterr().out.splitlines()[:-1] == printed.splitlines()[:-1]
    assert (experiment.parent / "again" / "results.jsonl").read_text() == (folder / "results.jsonl").read_text()


def test_a_reference_without_a_frontier_is_refused(experiment, capsys):
    with pytest.raises(SystemExit):
        main([str(experiment), "--reference", "CE"])
    assert "--reference is for --frontier" in capsys.readouterr().err


def test_a_comparison_can_be_made_again_from_its_results_without_examples(experiment, capsys):
    main([str(experiment)])
    main(["comparison/results.jsonl", "--output-dir", "again"])
    first, again = (
        json.loads((experiment.parent / name / "report.json").read_text()) for name in ("comparison", "again")
    )
    assert first.pop("examples") != []
    assert again.pop("examples") == []
    assert again == first


def test_a_folder_of_other_files_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(ValueError, match="give the report a folder of its own"):
        main([str(tmp_path), "--output-dir", str(tmp_path)])


def test_one_run_alone_leaves_nothing_behind(experiment):
    with pytest.raises(ValueError, match=r"nothing to compare: there is only .*CE.*probe audit"):
        main([str(experiment / "CE")])
    assert not (experiment.parent / "comparison").exists()
