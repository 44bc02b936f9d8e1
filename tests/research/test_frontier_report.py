import dataclasses
import math
import re
from functools import partial

import pytest
from matplotlib.collections import LineCollection, PathCollection
from results_fakes import grown_records, record, replace, results_of, seeds
from run_fakes import blocks, evaluation, grown_runs, results, run, targets, write_run

from research.frontier import trace_frontiers
from research.frontier_report import frontier_drawing, frontier_report, main
from tfidf_tune.compare import read_results, write_results
from tfidf_tune.report import markdown, write_report


def report_of(records, provenance=None, **options):
    return frontier_report(results_of(records, provenance), **options)


def table(made, name):
    (found,) = (one for one in made.tables if one.name == name)
    return [dict(zip(found.headers, row, strict=True)) for row in found.rows]


def drawn(records):
    return frontier_drawing("Tiny", trace_frontiers(results_of(records)).points)


def labels(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_operating_points_have_intervals_range_ends_and_the_front():
    made = report_of([*grown_records(num_seeds=1), record("B", 2.0, perplexity=30.0)])
    rows = table(made, "operating_points")
    who = {"Model": "Tiny", "Objective": "CE", "Learning rate": 1e-3, "End of range": None, "Seeds": 1}
    measured = {"Avg LMS": 40.0, "Perplexity": pytest.approx(math.exp(3)), "LMS at CE's perplexity": 40.0}
    assert rows[0] == {**who, **measured, "On the front": "yes"}
    assert (rows[3]["Objective"], rows[3]["End of range"], rows[3]["On the front"]) == ("B", "only", "yes")


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


def test_every_point_and_pair_has_a_row():
    made = report_of([*grown_records(), record("B", None)], references=["Goldfish"])
    names = ["operating_points", "differences", "equal_learning_rate", "points"]
    assert [one.name for one in made.tables] == names
    points = table(made, "points")
    assert [row["Operating point"] for row in points] == ["no", "yes", "no"] * 3
    scores = ("Seeds", "Control LMS", "Verbatim %", "Max LMS")
    assert [points[0][name] for name in scores] == [3, 1.0, 25.0, 9]
    assert len(table(made, "equal_learning_rate")) == 3 * 4
    assert made.tables[-1].notes[-1] == "Left out: Tiny, B, lr 0.001, seed 0: LMS not measured."


def test_without_learning_rates_no_table_has_them():
    made = report_of([record(learning_rate=None), record("B", 3.0, learning_rate=None)])
    assert [one.name for one in made.tables] == ["operating_points", "differences", "points"]
    assert "Learning rate" not in table(made, "points")[0]


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


def test_ends_of_the_range_are_stated_for_each_model():
    records = [
        record(name, perplexity=20 + rate * sign, learning_rate=rate, model=model)
        for model in ("A", "B")
        for name, sign in (("CE", 1), ("X", -1))
        for rate in (0.1, 0.2)
    ]
    made = report_of(records)
    ends = {(row["Model"], row["Objective"]): row["End of range"] for row in table(made, "operating_points")}
    assert (ends["A", "CE"], ends["B", "X"]) == ("lowest", "highest")
    assert "A better learning rate may lie beyond the range that was tried." in made.footnotes
    assert [figure.name for figure in made.figures] == ["frontier_1", "frontier_2"]


@pytest.mark.parametrize(
    ("kept", "stated"),
    [
        (lambda one: True, 0),
        (lambda one: one.run != ("Tiny", "CE", 3e-3, 2), 1),
        (lambda one: one.objective != "CE" or one.seed == int(one.learning_rate == 1e-3), 1),
    ],
)
def test_learning_rates_with_different_seeds_are_stated(kept, stated):
    runs = [one for one in grown_records() if kept(one.checkpoint)]
    runs.append(record("CE", seed=0, learning_rate=0.1, log_perplexity=math.inf))  # does not count
    (operating,) = (one for one in report_of(runs).tables if one.name == "operating_points")
    assert operating.notes.count("Not every learning rate of CE has the same seeds.") == stated
    assert sum("the same seeds" in note for note in operating.notes) == stated


def test_the_verdict_and_the_provenance_say_what_the_runs_are():
    early = [replace(one, progress=50) for one in grown_records()]
    start = record("Start", seed=None, learning_rate=None)
    made = report_of([*early, *grown_records(), start], references=["Goldfish"], provenance={"cpu": "fast"})
    assert made.verdict.endswith(" 3 seeds.")
    expected = {"Compared with": "CE and Goldfish", "cpu": "fast", "Runs": "28"}
    assert expected.items() <= made.provenance.items()
    alone = report_of([start])
    assert alone.verdict == "Nothing is compared. One seed, no interval over seeds."


def test_the_figure_goes_through_the_learning_rates_with_the_operating_point_emphasised():
    figure = drawn(list(reversed(grown_records())))
    (axes,) = figure.axes
    markers = [one for one in axes.collections if isinstance(one, PathCollection)]
    points, operating = markers[0], [one for one in markers if len(one.get_offsets()) == 1]
    assert points.get_offsets()[:, 1].tolist() == pytest.approx([20.1, 40.1, 60.1])
    assert points.get_offsets()[:, 0].tolist() == pytest.approx([math.exp(3 + x) for x in (0.102, 0.002, 0.102)])
    assert list(points.get_sizes()) == sorted(set(points.get_sizes()))
    assert len(operating) == 3
    assert operating[0].get_offsets().tolist() == [pytest.approx([math.exp(3.002), 40.1])]
    assert operating[0].get_sizes()[0] > max(points.get_sizes())
    assert sorted(text.get_text() for text in axes.texts) == ["1", "2", "3"]
    assert axes.get_xscale() == "log"
    assert labels(figure) == [
        *("1  CE", "2  Goldfish", "3  TF-IDF"),
        *("lr 0.0003", "lr 0.001", "lr 0.003", "held out (chance)"),
    ]


def test_the_cross_is_the_intervals():
    records = seeds("CE", [9, 10, 11], [3.0, 3.01, 3.02])
    (point,) = trace_frontiers(results_of(records)).points.itertuples()
    ends = [one for one in drawn(records).axes[0].collections if isinstance(one, LineCollection)]
    across, upright = (one.get_segments()[0] for one in ends)
    assert across[:, 0].tolist() == pytest.approx([point.perplexity_low, point.perplexity_high])
    assert upright[:, 1].tolist() == pytest.approx([point.lms_low, point.lms_high])


def test_sixteen_objectives_are_distinct_and_the_legend_covers_nothing():
    names = [f"TF-IDF (tf=log, cap={i})" for i in range(16)]
    figure = drawn(grown_records(names, num_seeds=2))
    (axes,) = figure.axes
    handles = [line for line in axes.get_lines() if re.match(r"\d", line.get_label())]
    assert len({(one.get_color(), one.get_marker()) for one in handles}) == 16
    figure.draw_without_rendering()
    assert figure.get_figwidth() <= 5
    box = figure.legends[0].get_window_extent()
    assert (box.x0 >= 0, box.x1 <= figure.bbox.width, box.y0 >= axes.get_window_extent().y1) == (True, True, True)


def test_the_axes_hold_the_means_logarithmic_where_they_are_wide():
    (axes,) = drawn([record(lms=60.0), record("B", 0.5), record("C", 5.0, control_lms=None)]).axes
    assert axes.get_yscale() == "symlog"
    assert axes.get_ylim()[0] == 0
    assert drawn([record(lms=3.0), record("B", 2.0)]).axes[0].get_yscale() == "linear"
    records = [
        *seeds("CE", [4, 40], [3.0, 150.0], learning_rate=1e-2),  # far off
        *(record("CE", 4.0, 20.0, seed=seed) for seed in (0, 1)),
        *seeds("B", [1, 9], [3.0, 4.0]),  # with wide intervals
    ]
    (axes,) = drawn(records).axes
    assert axes.get_xlim()[1] < 50
    assert axes.get_ylim()[1] < 10


def test_the_same_report_is_made_from_its_results_file(tmp_path):
    made = results(
        *(
            run(name, [evaluation(samples=targets(lms, 6), blocks=blocks(20 + rate))], seed=seed, learning_rate=rate)
            for name, lms in (("CE", 6), ("TF-IDF", 2))
            for rate in (1.0, 2.0)
            for seed in (0, 1)
        )
    )
    write_report(
        frontier_report(made, references=["TF-IDF"]),
        tmp_path / "out",
        more={"results.jsonl": partial(write_results, made)},
    )
    again = read_results(tmp_path / "out" / "results.jsonl")
    write_report(
        frontier_report(again, references=["TF-IDF"]),
        tmp_path / "again",
        more={"results.jsonl": partial(write_results, again)},
    )
    files = [path.relative_to(tmp_path / "again") for path in (tmp_path / "again").rglob("*.*")]
    assert len(files) == 10
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "out" / file).read_bytes(), file


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
