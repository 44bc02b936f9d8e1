"""The table "Likelihood and membership" in the three reports."""

from itertools import product

import numpy as np
import pytest
from helpers.fakes.runs import blocks, controls, evaluation, results, run, targets
from sklearn.metrics import roc_auc_score

from tfidf_tune.compare import comparison_report
from tfidf_tune.probe import exposure, extraction_probability
from tfidf_tune.results.wording import AT_CHANCE, STILL_DETECTABLE

NUM_PASSAGES = 40


def one_run(objective, gap, seed=0, *, lms=3, has_comparisons=True):
    """A run with scores of passages: the NLL of controls around 5, of targets lower by a gap.

    Older results have no comparisons with the reference by token.
    """
    rng = np.random.default_rng([seed, *objective.encode()])
    passages = []
    for kind in ("target", "control"):
        for number in range(NUM_PASSAGES):
            mean = 5 - gap if kind == "target" else 5
            nll = rng.normal(mean, 0.3)
            scores = {
                "nll": nll,
                "zlib": nll / 2,
                "min_k": -2 * nll,
                "min_k_plus_plus": -nll,
                "reference_nll": 6.0,
            }
            if has_comparisons:
                scores["wbc"] = 1 / (1 + nll)
                scores["error_zone"] = 3 - nll / 10
            named = {
                "passage_id": f"{kind}-{number:02}",
                "kind": kind,
                "token_ids": [number],
                "prompts": "token_ids",
            }
            passages.append(
                {**named, "round_trip": True, "scores": scores, "continuations": [[32, nll * 2]]}
            )
    probed = [*targets(*[lms] * 12), *controls(*[3] * 12)]
    return run(
        objective, [evaluation(samples=probed, blocks=blocks(20.0), passages=passages)], seed=seed
    )


def table_of(report):
    (table,) = [table for table in report.tables if table.name == "membership"]
    return table


@pytest.fixture(scope="module")
def compared():
    return results(
        one_run("CE", 1, seed=0),
        one_run("CE", 1, seed=1),
        one_run("Ours", 0, seed=0),
        one_run("Ours", 0, seed=1),
    )


def test_a_comparison_has_a_row_for_each_objective_with_intervals(compared):
    table = table_of(comparison_report(compared))
    frame = table.frame.set_index("Objective")
    scores = compared.scores.astype({"metric": str, "kind": str})
    for objective, checkpoints in (("CE", (0, 1)), ("Ours", (2, 3))):
        own = {}
        kinds = ("target", "control")
        for at, kind, metric in product(checkpoints, kinds, ("passage_nll", "continuation_nll")):
            rows = scores.query("checkpoint == @at and kind == @kind and metric == @metric")
            own[at, kind, metric] = rows["value"]
        row = frame.loc[objective]
        nll = [
            np.mean([own[at, kind, "passage_nll"].mean() for at in checkpoints])
            for kind in ("target", "control")
        ]
        assert row[["NLL of targets", "NLL of controls", "Gap"]].tolist() == pytest.approx(
            [*nll, nll[1] - nll[0]]
        )
        assert row["Gap from"] < row["Gap"] < row["Gap to"]
        labels = [1] * NUM_PASSAGES + [0] * NUM_PASSAGES
        aucs = [
            roc_auc_score(
                labels, [*-own[at, "target", "passage_nll"], *-own[at, "control", "passage_nll"]]
            )
            for at in checkpoints
        ]
        attacks = [
            "AUC",
            "AUC zlib",
            "AUC Min-K%",
            "AUC Min-K%++",
            "AUC Loss against start",
            "AUC WBC",
            "AUC Error zone",
        ]
        for shown in ("{}", "{} from", "{} to"):  # all order the passages by their NLL
            expected = np.mean(aucs) if shown == "{}" else row[shown.format("AUC")]
            assert row[[shown.format(name) for name in attacks]].tolist() == pytest.approx(
                [expected] * 7
            )
        bits = [
            exposure(own[at, "target", "passage_nll"], own[at, "control", "passage_nll"])
            for at in checkpoints
        ]
        assert row["Exposure (bits)"] == pytest.approx(np.mean(bits))
        nll = np.concatenate([own[at, "target", "continuation_nll"] for at in checkpoints])
        expected = 100 * np.mean(extraction_probability(nll, 1000))
        assert row["Extracted by 1,000 samples (%)"] == pytest.approx(expected)
    assert frame.loc["CE", "AUC from"] > 0.9
    assert frame.loc["Ours", "AUC from"] < 0.5 < frame.loc["Ours", "AUC to"]


def test_results_without_comparisons_by_token_have_no_columns_or_empty_cells_for_them():
    older = one_run("CE", 1, has_comparisons=False)
    also_older = one_run("Ours", 0, has_comparisons=False)
    columns = {*table_of(comparison_report(results(older, also_older))).frame}
    assert "AUC Loss against start" in columns
    assert not {"AUC WBC", "AUC WBC from", "AUC Error zone", "AUC Error zone to"} & columns
    both = table_of(comparison_report(results(older, one_run("Ours", 0)))).frame
    cells = both.set_index("Objective")[["AUC WBC", "AUC Error zone to"]]
    assert cells.loc["CE"].isna().all()
    assert cells.loc["Ours"].notna().all()


def test_the_verdict_names_detectable_membership_only_of_objectives_that_recite_nothing(compared):
    # Ours is not detectable, CE the baseline.
    assert STILL_DETECTABLE not in comparison_report(compared).verdict
    swapped = comparison_report(compared, baseline="Ours").verdict
    assert swapped.startswith(f"CE, like Ours, {AT_CHANCE}")
    # Also beside a baseline that recites as little.
    assert swapped.startswith(f"CE, like Ours, {AT_CHANCE}{STILL_DETECTABLE}")
    said = comparison_report(results(one_run("CE", 3, lms=40), one_run("A", 3))).verdict
    assert said.startswith(f"A {AT_CHANCE}{STILL_DETECTABLE}")
