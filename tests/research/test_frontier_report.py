import math

import pytest
from helpers.fakes.results import results_of, seeds

from research.frontier_report import frontier_report


def report_of(records, provenance=None, **options):
    return frontier_report(results_of(records, provenance), **options)


def table(made, name):
    (found,) = (one for one in made.tables if one.name == name)
    return [dict(zip(found.headers, row, strict=True)) for row in found.rows]


def test_differences_are_in_tokens_and_in_percent_with_intervals():
    log = math.log(1.1)
    made = report_of(
        [*seeds("CE", [10, 20], [3.0, 3.2]), *seeds("B", [4, 12], [3.0 + log, 3.2 + log])]
    )
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
            **dict.fromkeys(
                ("Perplexity %", "Perplexity from %", "Perplexity to %"), pytest.approx(10.0)
            ),
            # Of t with one degree of freedom.
            "LMS p (Holm)": pytest.approx(2 * math.atan2(1, 7) / math.pi),
            "Perplexity p (Holm)": pytest.approx(0, abs=1e-9),
            "Verdict": "LMS unclear, perplexity higher",
        }
    ]
    row = table(made, "operating_points")[0]
    assert (row["LMS from"], row["LMS to"]) == pytest.approx(
        (15 - 5 * half, 15 + 5 * half), rel=1e-4
    )
    assert row["Perplexity to"] == pytest.approx(math.exp(3.1 + half * 0.1), rel=1e-4)


def test_statements_follow_from_the_numbers():
    records = [
        *seeds("CE", [10, 11, 12], [3.0, 3.1, 3.2]),
        *seeds("C", [2, 3.1, 4], [3.08, 3.18, 3.281]),
        *seeds("B", [4, 5.1, 6], [2.98, 3.08, 3.181]),
        *seeds("D", [10, 11, 12], [3.0, 3.1, 3.2]),
    ]
    made = report_of(records, references=["B"])
    assert made.verdict == (
        "Against CE: better: B; recites less, perplexity higher: C; no difference shown: D. "
        "Against B: recites less, perplexity higher: C; worse: CE and D. 3 seeds."
    )
    front = {
        row["Objective"] for row in table(made, "operating_points") if row["On the front"] == "yes"
    }
    assert front == {"B", "C"}
