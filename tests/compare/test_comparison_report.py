import math
import re
from itertools import product

import pytest
from helpers.fakes.runs import (
    answers,
    block,
    blocks,
    controls,
    evaluation,
    grown_runs,
    results,
    run,
    sample,
    summaries,
    targets,
)

from research.frontier_report import frontier_report
from tfidf_tune.compare import comparison_report


def report(*runs, **options):
    return comparison_report(results(*runs), **options)


def pair(ce, tfidf, model="Tiny"):
    """Two runs with one checkpoint each."""
    return run("CE", [evaluation(**ce)], model=model), run(
        "TF-IDF", [evaluation(**tfidf)], model=model
    )


def table(made, name):
    (found,) = (table for table in made.tables if table.name == name)
    return [dict(zip(found.headers, row, strict=True)) for row in found.rows]


def notes(made, name):
    return " ".join(next(table for table in made.tables if table.name == name).notes)


def test_each_passage_has_what_every_run_recites_of_it_the_most_recited_first():
    """Two audits, before and after a fix: the same list."""
    recited = {
        "before": {
            ("target-0", 32): 3,
            ("target-0", 50): 8,
            ("target-1", 32): 5,
            ("target-2", 32): 4,
        },
        "after": {
            ("target-0", 32): 1,
            ("target-0", 50): 2,
            ("target-1", 32): 7,
            ("target-2", 32): 1,
        },
    }
    samples = {
        name: [sample(unit, lms, prefix_length=length) for (unit, length), lms in values.items()]
        for name, values in recited.items()
    }
    before = [*samples["before"], *controls(1)]
    after = [*samples["after"], *controls(1)]
    made = report(
        run("before", [evaluation(samples=before, num_injections={"target-0": 40})], model="m"),
        run("after", [evaluation(samples=after)], model="m"),
        baseline="before",
    )
    rows = table(made, "by_passage")
    assert [(row["Passage"], row["before"], row["after"]) for row in rows] == [
        ("target-0", 8, 2),
        ("target-1", 5, 7),
        ("target-2", 4, 1),
    ]
    assert rows[0]["Copies"] == 40


def test_a_grown_comparison_has_all_tables_figures_and_examples():
    made = report(*grown_runs(("CE", "TF-IDF", "IDF"), seeds=(0, 1), num_passages=4))
    assert made.title == "TF-IDF and IDF against CE"
    assert [one.name for one in made.tables] == [
        "overview",
        "memorization",
        "perplexity",
        "summarization",
        "qa",
        "reductions",
        "equal_perplexity",
        "lms_spread",
        "by_passage",
        "by_prefix_length",
        "progress",
    ]
    assert [one.name for one in made.figures] == ["frontier", "lms_progress", "lms_distribution"]
    assert [one.label for one in made.examples[0].continuations] == ["CE", "TF-IDF", "IDF"]
    assert made.provenance["Baseline"] == "CE"
    assert (
        made.provenance["Tiny, IDF, seed 1"]
        == "runs/Tiny None/IDF-1 (evaluated at 10 %, 25 %, 50 %, 75 %, 100 %)"
    )
    assert made.provenance["Intervals"] == "percentile bootstrap, 10,000 resamples, seed 0"
    progress = table(made, "progress")
    by_length = table(made, "by_prefix_length")
    assert [(row["Objective"], row["Progress %"]) for row in progress] == list(
        product(("CE", "TF-IDF", "IDF"), (10, 25, 50, 75, 100))
    )
    assert [row["Answer F1"] is None for row in progress[:5]] == [True, True, True, True, False]
    lengths = [(row["Objective"], row["Prefix length"]) for row in by_length]
    assert lengths[:3] == [("CE", 32), ("CE", 50), ("TF-IDF", 32)]
    average = table(made, "memorization")[0]["Avg LMS"]
    assert average == pytest.approx((by_length[0]["Avg LMS"] + by_length[1]["Avg LMS"]) / 2)
    assert average == pytest.approx(progress[4]["Avg LMS"])


def test_a_model_that_predicts_hardly_better_than_by_guessing_is_said_to_have_hardly_learned():
    def verdict(ce, tfidf, vocab_size):
        runs = (
            {"blocks": [one | {"vocab_size": vocab_size} for one in blocks(value)]}
            for value in (ce, tfidf)
        )
        return report(*pair(*runs)).verdict

    said = "seed 0 (perplexity 1,738, vocabulary 2,048)"
    assert verdict(20.0, 1738.0, 2048).endswith(f". Hardly learned: Tiny, TF-IDF, {said}.")
    both = (
        f" Hardly learned: Tiny, CE, {said}, Tiny, TF-IDF, seed 0 (perplexity over a million, "
        "vocabulary 2,048)."
    )
    assert verdict(1738.0, math.inf, 2048).endswith(both)
    # A quarter of it; of word frequencies alone: a tenth.
    assert "Hardly" not in verdict(20.0, 511.9, 2048)
    assert "Hardly" not in verdict(20.0, 1738.0, 50_000)
    # Unknown.
    assert "Hardly" not in report(*pair({"blocks": blocks(20.0)}, {"blocks": blocks(1e6)})).verdict
    runs = [
        run("CE", [evaluation(blocks=[one | {"vocab_size": 9} for one in blocks(8.0)])], seed=n)
        for n in range(5)
    ]
    assert report(*runs, baseline="CE").verdict.endswith(
        "Tiny, CE, seed 2 (perplexity 8, vocabulary 9) and 2 more."
    )


def test_the_memorization_table_has_the_papers_columns_and_the_spread_quantiles():
    ce = [sample("a", 8), sample("b", 2, prefix_match=1, rouge_l=20.0), *controls(1, 2, 3)]
    made = report(
        *pair({"samples": ce}, {"samples": [sample("a", 1), sample("b", 0), *controls(0, 0, 0)]})
    )
    first, second = table(made, "memorization")
    who = {"Model": "Tiny", "Objective": "CE"}
    recited = {
        "Avg Prefix": 4.5,
        "Max Prefix": 8,
        "Avg LMS": 5.0,
        "Max LMS": 8,
        "ROUGE-L": 60.0,
        "Verbatim %": 50.0,
    }
    assert first == {**who, **recited, "Control LMS": 2.0, "Passages": 2, "Seeds": 1}
    assert (second["Objective"], second["Avg LMS"], second["Control LMS"]) == ("TF-IDF", 0.5, 0.0)
    assert "Not the end of training" not in notes(made, "memorization")
    spread = table(made, "lms_spread")[0]
    quantiles = {"Median": 5.0, "90th percentile": pytest.approx(7.4), "Max": 8}
    assert spread == {**who, "Avg LMS": 5.0, "From": 2.0, "To": 8.0, **quantiles}
    assert "one seed, which cannot separate an objective from its seed" in notes(made, "overview")


def test_continuations_that_are_nearly_verbatim_have_columns_if_they_were_measured():
    def probed(targets, controls):
        samples = []
        for kind, scores in (("target", targets), ("control", controls)):
            for number, (distance, common) in enumerate(scores):
                scored = {"edit_distance": distance, "common_subsequence": common}
                samples.append(sample(f"{kind}-{number}", kind=kind, **scored))
        return samples

    ce = probed([(0.25, 6), (0.5, 5)], [(1.0, 0), (0.75, 2)])
    ours = probed([(1.0, 1)] * 2, [(0.75, 2)] * 2)
    runs = pair({"samples": ce, "blocks": blocks(20.0)}, {"samples": ours, "blocks": blocks(20.0)})
    headers = ("Edit distance", "Common subsequence", "Control distance", "Control subsequence")
    expected = [[0.375, 5.5, 0.875, 1.0], [1.0, 1.0, 0.75, 2.0]]
    for made, name in (
        (report(*runs), "memorization"),
        (frontier_report(results(*runs)), "points"),
    ):
        assert [[row[header] for header in headers] for row in table(made, name)] == expected
        assert "Edit distance: tokens to replace, insert and delete" in notes(made, name)
    (memorization,) = (one for one in report(*runs).tables if one.name == "memorization")
    assert [memorization.better[header] for header in headers[:2]] == ["higher", "lower"]
    without = report(*pair({"samples": targets(3)}, {"samples": targets(1)}))
    assert not set(headers) & set(table(without, "memorization")[0])
    assert "Edit distance" not in notes(without, "memorization")


def test_seeds_are_averaged():
    runs = [
        run("CE", [evaluation(samples=targets(*lms))], seed=seed)
        for seed, lms in enumerate([(2, 4), (4, 8)])
    ]
    made = report(*runs, run("TF-IDF", [evaluation(samples=targets(1, 1))]))
    row = table(made, "memorization")[0]
    spread = table(made, "lms_spread")[0]
    assert (row["Avg LMS"], row["Max LMS"], row["Passages"], row["Seeds"]) == (4.5, 8, 2, 2)
    assert (spread["Lowest seed"], spread["Highest seed"], spread["Seeds"]) == (3.0, 6.0, 2)
    assert "not over seeds" in notes(made, "overview")


def test_scores_and_their_reductions_are_by_objective():
    ce = {
        "blocks": blocks(20.0, 4),
        "summaries": summaries(20, 20),
        "answers": answers(100, 50, 100),
    }
    tfidf = {
        "blocks": blocks(25.0, 4),
        "summaries": summaries(25, 25),
        "answers": answers(0, 50, 100),
    }
    made = report(*pair(ce, tfidf))
    who = {"Model": "Tiny", "Objective": "TF-IDF"}
    seeds = {"Seeds": 1}
    assert table(made, "perplexity")[1] == {
        **who,
        "Perplexity": pytest.approx(25.0),
        "Blocks": 4,
        **seeds,
    }
    rouge = {"ROUGE-1": 25.0, "ROUGE-2": 12.5, "ROUGE-L": 20.0, "BERTScore-F1": 88.0}
    assert table(made, "summarization")[1] == {**who, **rouge, "Articles": 2, **seeds}
    assert [row["F1 %"] for row in table(made, "qa")] == pytest.approx([250 / 3, 50])
    rows = {row["Measure"]: row for row in table(made, "reductions")}
    changes = [
        (-rows[name]["Reduction %"], rows[name]["From %"], rows[name]["Significant"])
        for name in ("Summary ROUGE-1", "Answer EM")
    ]
    assert changes == [(25.0, -25.0, "too few"), (-50.0, None, None)]


def test_what_was_lost_or_is_missing_is_noted():
    ce = {
        "samples": targets(4, 4),
        "num_not_round_trip": 1,
        "num_injections": {"target-0": 10, "target-1": 10},
    }
    ce |= {"blocks": blocks(20.0), "summaries": summaries(30, 30)}
    tfidf = {
        "samples": targets(2, 2),
        "text_prompts": True,
        "blocks": blocks(20.0),
        "num_blocks_not_round_trip": 3,
    }
    tfidf["summaries"] = summaries(30, 30, bertscore=None, missing="bert-score is not installed")
    made = report(*pair(ce, tfidf))
    assert "Each target occurs 10 times in the training text." in notes(made, "memorization")
    noted = " ".join(made.footnotes)
    assert (
        "Prompts changed when converted to text (1 of 2 of Tiny, CE), so the model saw tokens that "
        "differ" in noted
    )
    assert noted.count("prompts were sent as text") == 1
    assert "Tiny, TF-IDF: prompts were sent as text, so the responses were tokenized again" in noted
    assert "Tiny, TF-IDF: 3 of 4 blocks changed when converted to text" in noted
    for name, text in (
        ("memorization", "sent as text"),
        ("perplexity", "3 of 4"),
        ("summarization", "BERTScore"),
    ):
        marked = [
            made.footnotes[int(mark) - 1] for mark in re.findall(r"\[(\d)\]", notes(made, name))
        ]
        assert any(text in footnote for footnote in marked)
    assert [row["BERTScore-F1"] for row in table(made, "summarization")] == [88.0, None]
    missing = (
        "Tiny, TF-IDF: BERTScore-F1 is missing for 2 of 2 summaries: bert-score is not installed."
    )
    assert missing in made.footnotes
    assert "Summary BERTScore-F1" not in [row["Measure"] for row in table(made, "reductions")]


CHANGES = {
    "A": ((4,) * 30, (2,) * 29 + (4,)),
    "B": ([1, 8, 3, 4] * 3, [8, 1, 3, 3] * 3),
    "D": ([4] * 9, [2] * 9),
    "E": ([4] * 29, [2] * 29),
    "F": ([0] * 10, [1, 2] * 5),
    "G": ([0] * 11 + [4], [0] * 11 + [2]),
}


def test_reductions_have_intervals_and_caveats():
    cases = {model: [{"samples": targets(*lms)} for lms in both] for model, both in CHANGES.items()}
    for fields, perplexity in zip(cases["A"], (20.0, 25.0), strict=True):
        fields["blocks"] = blocks(perplexity)
    runs = []
    for model, both in cases.items():
        runs += pair(*both, model)
    made = report(*runs)
    rows = {row["Model"]: row for row in table(made, "reductions") if row["Measure"] == "Avg LMS"}
    p = pytest.approx(6 / 10_001)  # of the resamples none is at 0, of three measures
    half = dict.fromkeys(("Reduction %", "From %", "To %"), pytest.approx(50.0))
    expected = {
        "CE": 4.0,
        "Value": 2.0,
        **half,
        "p (Holm)": p,
        "Significant": "yes",
        "Progress %": 100,
    }
    assert rows["E"] == {"Model": "E", "Objective": "TF-IDF", "Measure": "Avg LMS", **expected}
    assert [rows[model]["Significant"] for model in "BDFG"] == ["no", "too few", None, None]
    assert [rows["F"][name] for name in ("CE", "Reduction %", "From %", "To %")] == [
        0.0,
        None,
        None,
        None,
    ]
    noted = notes(made, "reductions")
    (mark,) = re.findall(r"With fewer than 10 units there is no verdict\.\[(\d)\]", noted)
    assert made.footnotes[int(mark) - 1].startswith(
        "From 10 to 29 units, such an interval excludes 0 in 7 to 11 %"
    )
    assert "F, TF-IDF, Avg LMS: no interval, the baseline is 0." in noted
    assert (
        "the baseline's average LMS is 0 in some resamples, because few passages have another value"
        in noted
    )


def test_the_comparison_at_equal_perplexity_needs_no_interpolation():
    def path(*points):
        return [
            evaluation(
                at, [*targets(*[lms] * 12), *controls(*[1, 2] * 6)], blocks=blocks(perplexity)
            )
            for at, perplexity, lms in points
        ]

    cases = {
        "A": ((2, 6), (50, 3), "between"),
        "B": ((6, 2), (50, 7), "more"),
        "D": ((2, 6), (100, 2), "between"),
        "E": ((1, 1), (50, 1), "not above controls"),
        "F": ((2, 6), (20, 2), None),
    }
    runs = []
    for model, (ends, (perplexity, lms), _) in cases.items():
        baseline = path((50, 100, ends[0]), (100, 25, ends[1]))
        other = path((50, 200, 0), (100, perplexity, lms))
        runs += [run("CE", baseline, model=model), run("TF-IDF", other, model=model)]
    made = report(*runs)
    rows = {row.pop("Model"): row for row in table(made, "equal_perplexity")}
    assert [row["Recites"] for row in rows.values()] == [said for *_, said in cases.values()]
    assert [rows["D"][name] for name in ("CE at %", "CE LMS before", "CE LMS after")] == [
        "50",
        2.0,
        2.0,
    ]
    assert max(rows["E"][name] for name in ("Bound", "CE bound")) < 1
    where = {
        "CE at %": "50 to 100",
        "CE LMS before": 2.0,
        "CE LMS after": 6.0,
        "Interpolated": pytest.approx(4.0),
    }
    found = {
        "Avg LMS": 3.0,
        "Recites": "between",
        "Bound": None,
        "CE bound": None,
        "Progress %": 100,
    }
    assert rows["A"] == {"Objective": "TF-IDF", "Perplexity": pytest.approx(50.0), **where, **found}
    assert [*rows["F"].values()][2:7] == [None, None, None, None, 2.0]
    assert " of TF-IDF (it has 25.00 to 100.00), so that" in notes(made, "equal_perplexity")


def test_a_diverged_model_does_not_stop_the_report_and_the_baseline_can_be_named():
    worst, sane = ((block(0, 1, log), block(1, 1, log)) for log in (-1e4, -3.0))
    runs = pair(
        {"samples": targets(4, 4), "blocks": sane}, {"samples": targets(2, 2), "blocks": worst}
    )
    made = report(*runs, baseline="TF-IDF")
    assert [math.isinf(row["Perplexity"]) for row in table(made, "perplexity")] == [True, False]
    assert made.verdict == "too little was measured to judge what CE recites."
    assert "frontier" in [figure.name for figure in made.figures]
    assert [row["Objective"] for row in table(made, "memorization")] == ["TF-IDF", "CE"]
