"""The benchmarks run, and compare with baselines that compute the same. Speed is not tested."""

from math import comb

import audit_limits
import fused_head
import measuring
import memaudit
import pytest
import torch
from authors_way import AuthorsWay
from helpers.fakes.label_batches import WEIGHT_RTOL, random_stream

from tfidf_tune.weighting import TFIDFWeighting


def test_the_authors_way_gives_the_weights_that_ours_gives():
    """Over more batches than the window holds, of changing shapes, with ignored labels and empty
    rows.
    """
    theirs = AuthorsWay(num_batches=3)
    ours = TFIDFWeighting(num_batches=3)
    varied = 0
    for labels in random_stream(0, num_batches=8, max_rows=4, max_length=24, vocab_size=50):
        weights = ours(labels)
        torch.testing.assert_close(theirs(labels), weights, rtol=2 * WEIGHT_RTOL, atol=0.0)
        varied += len(weights.unique()) > 2
    assert varied, "weights other than 0 and one value have to be compared"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_all_ways_give_correct_gradients_and_a_wrong_one_is_detected(dtype):
    wrong = fused_head.Way(
        lambda head, labels, weights: fused_head.plain(
            head, labels, (labels != fused_head.IGNORED).float()
        )
    )
    case = fused_head.Case("small", 4096, 24, 96, dtype, rounds=1)
    errors, not_measured = fused_head.gradient_errors(
        case, {**fused_head.WAYS, "wrong": wrong}, "cpu"
    )

    assert not_measured.keys() == {"Liger", "cut-cross-entropy"}
    assert min(errors.pop("wrong").values()) > 0.1
    assert errors.keys() == fused_head.WAYS.keys() - not_measured.keys()
    eps = torch.finfo(fused_head.DTYPES[dtype]).eps
    # A sum over 16 chunks rounds by half an eps in each.
    assert all(max(of_inputs.values()) < 8 * eps for of_inputs in errors.values())


def test_the_interval_of_a_median_covers_it_in_95_cases_of_100():
    """As many ratios lie below the median as coins show heads: binomials say where an interval must
    reach.
    """
    num_rounds = 31
    low, high = measuring.median_ratio_interval(
        [float(index) for index in range(num_rounds)], [1.0] * num_rounds
    )
    below = int(low)
    above = num_rounds - 1 - int(high)
    assert below == above

    def coverage(outside):
        return 1 - 2 * sum(comb(num_rounds, heads) for heads in range(outside + 1)) / 2**num_rounds

    assert coverage(below) >= 0.95 > coverage(below + 1)


def test_a_simulated_limit_is_seldom_exceeded_by_unseen_text_and_always_where_all_copies_are_recited(
    monkeypatch,
):
    num_draws = 200
    monkeypatch.setattr(audit_limits, "_NUM_DRAWS", num_draws)
    unseen = [{"lms": number % 7, "of": 128, "verbatim": False} for number in range(230)]
    recited = [{"lms": 30, "of": 128, "verbatim": True}] * 24

    def exceeded(num_others, num_known):
        made = audit_limits._simulated(
            unseen, recited, num_others=num_others, num_controls=100, num_known=num_known
        )
        return {limit: number / num_draws for limit, number in made["exceeded"].items()}

    of_unseen = exceeded(77, 0)
    assert of_unseen["recited=0"] <= 0.05 + 3 * (0.05 * 0.95 / num_draws) ** 0.5
    assert of_unseen["lms=20"] == 0
    assert exceeded(0, 24) == dict.fromkeys(audit_limits.SIMULATED, 1)
    diluted = exceeded(77, 24)
    assert (diluted["recited=0"], diluted["lms=20"]) == (1, 0)  # a mean of (24 * 30 + 77 * 3) / 101


def test_the_table_of_two_tools_pools_the_seeds_of_the_record():
    def audit(kind, seed, ours, theirs):
        def found(number):
            return {"found": {"1": [0, 34], "4": [number, 33], "16": [33, 33]}, "auc": number / 33}

        attacks = {name: found(ours) for name in ("Loss", "Min-K%++", "WBC")}
        return {
            "model": memaudit.FINE_TUNED,
            "kind": kind,
            "seed": seed,
            "ours": {"attacks": attacks},
            "theirs": {"attack": "base_calibrated_min_k_plus_plus", **found(theirs)},
        }

    audits = [audit(kind, seed, seed, 2 * seed) for kind in memaudit.HEADLINES for seed in (1, 2)]
    table = memaudit.detection_table({"audits": audits})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["random"] * 4 + ["natural"] * 4
    headlines = {row[1].split(", ")[1]: row for row in rows if ": the headline" in row[1]}
    assert headlines["Min-K%++: the headline"][0] == "random"
    assert headlines["WBC: the headline"][0] == "natural"
    by_name = {row[1].split(":")[0]: row[2:] for row in rows[:4]}
    once = "0 of 68 (0 to 5 %)"  # 1 - 0.025 ** (1 / 68), exactly
    assert by_name["ours, Loss"] == [
        once,
        measuring.share(3, 66),
        measuring.share(66, 66),
        "0.05 (0.03 to 0.06)",
    ]
    assert by_name["memaudit, Min-K%++ minus the reference's"][:2] == [once, measuring.share(6, 66)]


def test_the_table_of_false_alarms_has_audits_that_only_one_tool_makes():
    def found(number):
        return {"found": {"1": [number, 34], "4": [0, 33], "16": [0, 33]}, "auc": 0.5}

    named = {"kind": "random", "seed": 0}
    theirs = {"attack": "base_calibrated_min_k_plus_plus", "without_reference": found(1)}
    audits = [
        {
            **named,
            "model": memaudit.CLEAN,
            "ours": {"attacks": {"Loss": found(2)}},
            "theirs": theirs | found(3),
        },
        {**named, "model": memaudit.START_ITSELF, "theirs": theirs | found(34)},
    ]
    table = memaudit.alarms_table({"audits": audits})
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()[2:]]
    assert rows == [
        [
            "memaudit, Min-K%++ minus the reference's: the headline",
            measuring.share(3, 100),
            "",
            measuring.share(34, 100),
        ],
        ["memaudit, Min-K%++", measuring.share(1, 100), "", measuring.share(1, 100)],
        ["ours, Loss", measuring.share(2, 100), "", ""],
    ]
