"""True positives at 1 % false positives, against counts by hand and scipy's intervals."""

import numpy as np
import pytest
from helpers.fakes.runs import evaluation, likelihoods, results, run, sample
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from tfidf_tune.audit import audit_report
from tfidf_tune.report import markdown
from tfidf_tune.results.intervals import binomial_interval


@given(st.integers(0, 30), st.integers(1, 300))
def test_the_interval_is_that_of_clopper_and_pearson(found, number):
    found = min(found, number)
    exact = binomtest(found, number).proportion_ci(confidence_level=0.95, method="exact")
    assert binomial_interval(found, number) == pytest.approx((exact.low, exact.high))


COPIES = (1, 1, 1, 1, 2, 3, 2, 3, 8, 8)


def report_of(num_controls):
    """The loss finds the passages with eight copies and one with two; Min-K% finds none."""
    samples = []
    scored = []
    numbers = {"target": len(COPIES), "control": num_controls}
    for kind, number in numbers.items():
        for at in range(number):
            name = f"{kind}-{at}"
            samples.append(sample(name, at % 3, kind=kind))
            nll = (4.0 if kind == "target" else 3.0) + at / 1000
            if name in ("target-4", "target-8", "target-9"):
                nll = 1.0
            # Of 250 controls two may be above the threshold.
            if name in ("control-0", "control-1"):
                nll = 0.5
            scored.append(likelihoods(name, kind, nll, min_k=-5.0))
    injections = {f"target-{at}": copies for at, copies in enumerate(COPIES)}
    injections |= {f"control-{at}": 0 for at in range(num_controls)}
    evaluated = evaluation(samples=samples, passages=tuple(scored), num_injections=injections)
    return audit_report(results(run("CE", [evaluated], model="tiny")))


def tables_of(report):
    return {table.name: table for table in report.tables}


def test_rows_are_those_counted_by_hand():
    report = report_of(250)
    table = tables_of(report)["true_positives"]
    counted = [(row[0], row[1], row[2], row[6]) for row in table.rows]
    assert counted == [
        ("Loss (headline)", "all", "3 of 10", "2 of 250"),
        ("Loss (headline)", "1", "0 of 4", "2 of 250"),
        ("Loss (headline)", "2 to 3", "1 of 4", "2 of 250"),
        ("Loss (headline)", "8", "2 of 2", "2 of 250"),
        ("Min-K%", "all", "0 of 10", "0 of 250"),
    ]
    exact = binomtest(3, 10).proportion_ci(method="exact")
    assert table.rows[0][3:6] == pytest.approx((30, 100 * exact.low, 100 * exact.high))
    most = binomtest(2, 250, alternative="less").proportion_ci(method="exact").high
    assert table.rows[0][7] == pytest.approx(100 * most)


def test_with_fewer_than_100_controls_there_are_none():
    report = report_of(99)
    tables = tables_of(report)
    assert "true_positives" not in tables
    text = " ".join(markdown(report).split())
    assert "1 % takes 100 controls, and there are 99" in text
    assert np.isfinite(tables["membership"].frame["AUC"]).all()
    assert "true_positives" in tables_of(report_of(100))
