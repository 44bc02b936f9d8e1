import dataclasses
import math
import re

import pytest
from helpers.fakes.results import grown_records, record, results_of, seeds
from helpers.fakes.runs import grown_runs, write_run
from matplotlib.collections import PathCollection

from research.frontier import trace_frontiers
from research.frontier_report import frontier_drawing, frontier_report, main
from tfidf_tune.report import markdown


def report_of(records, provenance=None, **options):
    return frontier_report(results_of(records, provenance), **options)


def table(made, name):
    (found,) = (one for one in made.tables if one.name == name)
    return [dict(zip(found.headers, row, strict=True)) for row in found.rows]


def drawn(records):
    return frontier_drawing("Tiny", trace_frontiers(results_of(records)).points)


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_differences_are_in_tokens_and_in_percent_with_intervals():
    log = math.log(1.1)
    made = report_of([*seeds("CE", [10, 20], [3.0, 3.2]), *seeds("B", [4, 12], [3.0 + log, 3.2 + log])])
    half = 12.7062  # of the interval of two values 2 apart
    assert table(made, "differences") == [
        {
            "Model": "Tiny",
            "Objective": "B",
            "Against": "CE",
            "Learning rate": 1e-3,
            "Against's rate": 1e-3,
            "Pairs": 2,
            "LMS difference": -7.0,
            "LMS from": pytest.approx(-7 - half, rel=1e-4),
            "LMS to": pytest.approx(-7 + half, rel=1e-4),
            "LMS reduction %": pytest.approx(100 * 14 / 30),
            **dict.fromkeys(("Perplexity %", "Perplexity from %", "Perplexity to %"), pytest.approx(10.0)),
            "LMS p (Holm)": pytest.approx(2 * math.atan2(1, 7) / math.pi),  # of t with one degree of freedom
            "Perplexity p (Holm)": pytest.approx(0, abs=1e-9),
            "Verdict": "LMS unclear, perplexity higher",
        }
    ]
    row = table(made, "operating_points")[0]
    assert (row["LMS from"], row["LMS to"]) == pytest.approx((15 - 5 * half, 15 + 5 * half), rel=1e-4)
    assert row["Perplexity to"] == pytest.approx(math.exp(3.1 + half * 0.1), rel=1e-4)


def test_diverged_runs_are_stated_and_have_no_numbers():
    bad = record("B", 0.0, log_perplexity=math.inf)
    made = report_of([*grown_records(("CE",)), bad])
    row = table(made, "operating_points")[1]
    assert (row["Perplexity"], row["On the front"]) == (None, "diverged")
    assert table(made, "points")[-1]["Operating point"] == "diverged"
    (equal,) = table(made, "equal_learning_rate")
    assert (equal["Verdict"], equal.get("Perplexity %")) == ("no verdict: fewer than two pairs", None)
    assert not re.search(r"\bnan\b", markdown(made))
    assert report_of([bad]).figures == []


def test_statements_follow_from_the_numbers():
    records = [
        *seeds("CE", [10, 11, 12], [3.0, 3.1, 3.2]),
        *seeds("C", [2, 3.1, 4], [3.08, 3.18, 3.281]),
        *seeds("B", [4, 5.1, 6], [2.98, 3.08, 3.181]),
        *seeds("D", [10, 11, 12], [3.0, 3.1, 3.2]),
    ]
    made = report_of(records, references=["B"])
    assert made.verdict == (
        "Against CE: better: B; recites less, perplexity higher: C; no difference shown: D. Against B: recites less, "
        "perplexity higher: C; worse: CE and D. 3 seeds."
    )
    front = {row["Objective"] for row in table(made, "operating_points") if row["On the front"] == "yes"}
    assert front == {"B", "C"}


def test_the_figure_goes_through_the_learning_rates_with_the_operating_point_emphasised():
    figure = drawn(list(reversed(grown_records())))
    (axes,) = figure.axes
    markers = [one for one in axes.collections if isinstance(one, PathCollection)]
    points, operating = markers[0], [one for one in markers if len(one.get_offsets()) == 1]
    assert points.get_offsets()[:, 1].tolist() == pytest.approx([20.1, 40.1, 60.1])
    assert list(points.get_sizes()) == sorted(set(points.get_sizes()))
    assert operating[0].get_offsets().tolist() == [pytest.approx([math.exp(3.002), 40.1])]
    assert labels(figure) == [
        *("1  CE", "2  Goldfish", "3  TF-IDF"),
        *("lr 0.0003", "lr 0.001", "lr 0.003", "held out (chance)"),
    ]


def test_a_frontier_is_made_of_folders_and_again_of_its_records(tmp_path, capsys):
    for rate in (1e-3, 1e-2):
        for made in grown_runs(num_passages=4, downstream=False):
            last = dataclasses.replace(made, learning_rate=rate, evaluations=made.evaluations[-1:])
            write_run(tmp_path / "experiment" / f"{made.objective}-{rate}", last)
    options = ["--reference", "TF-IDF", "--output-dir"]
    main([str(tmp_path / "experiment"), *options, str(tmp_path / "frontier")])
    printed = capsys.readouterr().out
    assert printed.startswith("# Recitation against perplexity\n")
    assert "Against TF-IDF: " in " ".join(printed.split())
    main([str(tmp_path / "frontier/results.jsonl"), *options, str(tmp_path / "again")])
    assert capsys.readouterr().out.splitlines()[:-1] == printed.splitlines()[:-1]
    assert (tmp_path / "again/results.jsonl").read_text() == (tmp_path / "frontier/results.jsonl").read_text()
