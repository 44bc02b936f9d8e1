import dataclasses
import math

import pytest
from frontier_fakes import record, replace, results_of
from run_fakes import (
    BlockScore,
    answers,
    blocks,
    controls,
    decode,
    evaluation,
    grown_runs,
    results,
    run,
    sample,
    summaries,
    targets,
)

from tfidf_tune.analysis.intervals import Interval
from tfidf_tune.report import comparison_report
from tfidf_tune.report._wording import interval_text


@pytest.fixture(scope="module")
def grown():
    return comparison_report(
        results(*grown_runs(("CE", "TF-IDF", "IDF"), seeds=(0, 1), num_passages=8)), decoder=lambda checkpoint: decode
    )


def report(*runs, **options):
    return comparison_report(results(*runs), decoder=lambda checkpoint: None, **options)


def table(made, name):
    (found,) = (table for table in made.tables if table.name == name)
    return [dict(zip([column.name for column in found.columns], row, strict=True)) for row in found.rows]


def notes(made, name):
    return " ".join(next(table for table in made.tables if table.name == name).notes)


def pair(ce, tfidf):
    """Two runs with one checkpoint each."""
    return run("CE", [evaluation(**ce)]), run("TF-IDF", [evaluation(**tfidf)])


def said(made):
    return "\n".join(made.statements)


def test_the_memorization_table_is_the_papers():
    ce = [
        dataclasses.replace(sample("a", 8, length=8), prefix_match=8, rouge_l=100.0),
        dataclasses.replace(sample("b", 2, length=8), prefix_match=1, rouge_l=20.0),
        *controls(1, 2, 3),
    ]
    tfidf = [sample("a", 1), sample("b", 0), *controls(0, 0, 0)]
    made = report(*pair({"samples": ce}, {"samples": tfidf}))
    rows = table(made, "memorization")
    assert rows[0] == {
        "Model": "Tiny",
        "Objective": "CE",
        "Avg Prefix": 4.5,
        "Max Prefix": 8,
        "Avg LMS": 5.0,
        "Max LMS": 8,
        "ROUGE-L": 60.0,
        "Verbatim %": 50.0,
        "Control LMS": 2.0,
        "Passages": 2,
        "Seeds": 1,
    }
    assert (rows[1]["Objective"], rows[1]["Avg LMS"], rows[1]["Control LMS"]) == ("TF-IDF", 0.5, 0.0)
    assert "Not the end of training" not in notes(made, "memorization")


def seeded(objective, lms_by_seed, **fields):
    return [
        run(objective, [evaluation(samples=targets(*lms))], seed=seed, **fields) for seed, lms in lms_by_seed.items()
    ]


def test_means_and_maxima_are_over_seeds():
    made = report(*seeded("CE", {0: (2, 4), 1: (4, 8)}), *seeded("TF-IDF", {0: (1, 1)}))
    row = table(made, "memorization")[0]
    assert (row["Avg LMS"], row["Max LMS"], row["Passages"], row["Seeds"]) == (4.5, 8, 2, 2)
    spread = table(made, "lms_spread")[0]
    assert (spread["Lowest seed"], spread["Highest seed"], spread["Seeds"]) == (3.0, 6.0, 2)
    assert "not that of seeds" in notes(made, "reductions")
    assert "A single training run" in said(made)  # TF-IDF has one


def test_the_reduction_of_each_seed_is_stated(grown):
    made = report(*seeded("CE", {0: (8, 8), 1: (4, 4)}), *seeded("TF-IDF", {0: (2, 2), 1: (3, 3)}))
    text = "Intervals cover the choice of passages, not that of seeds"
    expected = f"{text}; per seed the reduction of the average LMS under TF-IDF was 75.0 %, 25.0 %."
    assert made.statements[-1] == expected
    assert "its seed" not in said(made)
    assert [statement.count("per seed") for statement in grown.statements[-2:]] == [1, 1]  # TF-IDF and IDF
    apart = report(*seeded("CE", {0: (2, 4), 1: (2, 4)}), *seeded("IDF", {2: (1, 2), 3: (1, 2)}))
    assert apart.statements[-1] == f"{text}."


def test_single_runs_are_warned_of_once_and_only_where_there_are_any():
    made = report(*(run(name, [evaluation(samples=targets(2, 4))]) for name in ("CE", "TF-IDF", "IDF")))
    assert (
        said(made).count("A single training run cannot separate the effect of the objective from that of the seed") == 1
    )
    assert "Lowest seed" not in table(made, "lms_spread")[0]
    of_models = {"A": (0,), "B": (0, 1), "C": (0,)}
    runs = [
        one
        for model, seeds in of_models.items()
        for name, own in (("CE", seeds), ("TF-IDF", (0, 1)))
        for one in seeded(name, dict.fromkeys(own, (4, 4)), model=model)
    ]
    found = [text[:22] for text in report(*runs).statements[-2:]]
    assert found == ["A single training run ", "B: Intervals cover the"]


def test_the_spread_has_median_percentile_and_the_averages_interval():
    (row, _) = table(report(*pair({"samples": targets(*range(8))}, {"samples": targets(*range(8))})), "lms_spread")
    assert (row["Avg LMS"], row["Median"], row["90th percentile"], row["Max"]) == (3.5, 3.5, pytest.approx(6.3), 7)
    assert 1.5 < row["From"] < 3.5 < row["To"] < 5.5


def test_a_table_appears_only_where_there_is_something_in_it(grown):
    made = report(*pair({"answers": answers(100, 0)}, {"answers": answers(100, 100)}))
    assert [table.name for table in made.tables] == ["qa", "reductions"]
    assert (made.figures, made.examples) == ((), ())
    assert [table.name for table in grown.tables] == [
        "memorization",
        "perplexity",
        "summarization",
        "qa",
        "reductions",
        "equal_perplexity",
        "lms_spread",
        "by_prefix_length",
        "progress",
    ]
    assert [figure.name for figure in grown.figures] == ["lms_progress", "frontier", "lms_distribution"]


def test_scores_are_by_model_and_objective():
    ce = {"blocks": blocks(20.0, 4), "summaries": summaries(40, 20), "answers": answers(100, 50)}
    tfidf = {"blocks": blocks(25.0, 4), "summaries": summaries(30, 20), "answers": answers(50, 50)}
    made = report(*pair(ce, tfidf))
    assert table(made, "perplexity")[1] == {
        "Model": "Tiny",
        "Objective": "TF-IDF",
        "Perplexity": pytest.approx(25.0),
        "Blocks": 4,
        "Seeds": 1,
    }
    assert table(made, "summarization")[0] == {
        "Model": "Tiny",
        "Objective": "CE",
        "ROUGE-1": 30.0,
        "ROUGE-2": 15.0,
        "ROUGE-L": pytest.approx(24.0),
        "BERTScore-F1": 88.0,
        "Articles": 2,
        "Seeds": 1,
    }
    assert [(row["Exact Match %"], row["F1 %"]) for row in table(made, "qa")] == [(50.0, 75.0), (0.0, 50.0)]


def test_a_missing_bertscore_is_none_with_its_reason():
    ce = {"summaries": summaries(30, 30)}
    tfidf = {"summaries": summaries(30, 30, bertscore=None, missing="bert-score is not installed")}
    made = report(*pair(ce, tfidf))
    assert [row["BERTScore-F1"] for row in table(made, "summarization")] == [88.0, None]
    assert "Tiny, TF-IDF: BERTScore-F1 is missing for 2 of 2 summaries: bert-score is not installed." in notes(
        made, "summarization"
    )
    assert "Summary BERTScore-F1" not in [row["Measure"] for row in table(made, "reductions")]


def test_reductions_are_in_percent_with_interval_and_significance():
    made = report(*pair({"samples": targets(*[4] * 10)}, {"samples": targets(*[2] * 10)}))
    assert table(made, "reductions")[0] == {
        "Model": "Tiny",
        "Objective": "TF-IDF",
        "Measure": "Avg LMS",
        "CE": 4.0,
        "Value": 2.0,
        "Reduction %": 50.0,
        "From %": pytest.approx(50.0),
        "To %": pytest.approx(50.0),
        "Significant": "yes",
        "Progress %": 100,
    }
    few = report(*pair({"samples": targets(*[4] * 9)}, {"samples": targets(*[2] * 9)}))
    assert table(few, "reductions")[0]["Significant"] == "too few"
    assert "With fewer than 10 units there is no verdict. With 10 to 29, the rate of false positives is 7" in notes(
        few, "reductions"
    )


def test_why_there_is_no_reduction_or_no_interval_is_said():
    samples = [dataclasses.replace(s, rouge_l=5.0) for s in targets(0, 0)]
    made = report(*pair({"samples": samples}, {"samples": targets(1, 2)}))
    row = table(made, "reductions")[0]
    undefined = ("Reduction %", "From %", "To %", "Significant")
    assert [row[name] for name in ("CE", *undefined)] == [0.0, *[None] * 4]
    assert "Tiny, TF-IDF, Avg LMS: no interval, the baseline is 0." in notes(made, "reductions")
    change = "has an undefined relative change of the average LMS (0.00 to 1.50) against CE, since the baseline is 0."
    assert change in said(made)
    made = report(*pair({"samples": targets(0, 0, 4)}, {"samples": targets(0, 0, 2)}))
    assert "the baseline's average LMS is 0 in some resamples, because few passages have another value" in notes(
        made, "reductions"
    )
    assert "lowers the average LMS by 50.0 % (1.33 to 0.67) against CE, which has no interval" in said(made)
    single = report(*pair({"samples": targets(4)}, {"samples": targets(2)}))
    assert "which has no interval: there is a single passage" in said(single)


def test_the_lead_says_what_is_compared_and_explains_what_occurs(grown):
    assert grown.lead == (
        "Runs of Tiny, asked to continue passages of their training text. LMS, the longest memorized substring, is the "
        "longest run of tokens that a continuation shares with the passage; its floor is the average over passages "
        "that were never injected."
    )
    assert report(*pair({"samples": targets(4, 4)}, {"samples": targets(2, 2)})).lead.endswith("with the passage.")
    assert report(*pair({"answers": answers(1)}, {"answers": answers(2)})).lead == "Runs of Tiny."


def test_the_price_in_perplexity_stands_in_the_same_statement():
    made = report(
        *pair(
            {"samples": targets(*[4] * 29, 4), "blocks": blocks(20.0)},
            {"samples": targets(*[2] * 29, 4), "blocks": blocks(25.0)},
        )
    )
    assert made.statements[0] == (
        "TF-IDF lowers the average LMS by 48.3 % (4.00 to 2.07; 95 % interval 45.0 % to 50.0 %) against CE, which is "
        "significant: the interval excludes 0. It raises the perplexity by 25.0 % (20.00 to 25.00; equal for all "
        "blocks), from too few blocks (4) to judge."
    )


@pytest.mark.parametrize(
    ("ce", "tfidf", "text"),
    [
        ((4, 4), (2, 2), "Perplexity was not measured for both, so what it costs is not known."),
        ([1, 8, 3, 4] * 3, [8, 1, 3, 3] * 3, "which is not significant: the interval includes 0"),
        (
            *((2, 4, 2, 4), (3, 8, 3, 8)),
            "TF-IDF raises the average LMS by 83.3 % (3.00 to 5.50; 95 % interval 50.0 % to 100.0 %)",
        ),
        ((2, 4), (2, 4), "does not change the average LMS (3.00 to 3.00; equal for all passages)"),
        ([4] * 9, [2] * 9, "(4.00 to 2.00; equal for all passages) against CE, from too few passages (9) to judge."),
        (
            *([4] * 29, [2] * 29),
            "which is nominally significant, but from only 29 passages the rate of false positives is 7 to 11 % "
            "instead of 5 %.",
        ),
        ([4] * 30, [2] * 30, "which is significant: the interval excludes 0."),
    ],
)
def test_a_change_is_stated_with_its_interval_and_caveat(ce, tfidf, text):
    assert text in report(*pair({"samples": targets(*ce)}, {"samples": targets(*tfidf)})).statements[0]


def test_no_interval_ends_at_minus_zero():
    interval = Interval(-0.03, 5.0, 50)
    assert interval_text(interval, "passage", decimals=1, suffix=" %") == "95 % interval 0.0 % to 5.0 %"


def test_summaries_and_answers_are_one_statement_each_higher_being_plus():
    ce = {"summaries": summaries(20, 20), "answers": answers(100, 50, 100)}
    tfidf = {"summaries": summaries(25, 25), "answers": answers(0, 50, 100)}
    made = report(*pair(ce, tfidf))
    rise = "(+25.0 %, equal for all articles, from too few articles (2) to judge)"
    assert made.statements[0] == (
        f"Summaries under TF-IDF: ROUGE-1 20.00 to 25.00 {rise}, ROUGE-2 10.00 to 12.50 {rise}, ROUGE-L 16.00 to 20.00 "
        f"{rise}, BERTScore-F1 88.00 to 88.00 (+0.0 %, equal for all articles, from too few articles (2) to judge)."
    )
    assert made.statements[1].startswith("Answers under TF-IDF: exact match 66.67 to 33.33 (-50.0 %, no interval, the")
    assert (
        "F1 83.33 to 50.00 (-40.0 %, 95 % interval -100.0 % to 0.0 %, from too few questions (3) to judge)"
        in (made.statements[1])
    )


@pytest.mark.parametrize(
    ("ce", "tfidf", "text"),
    [
        ([40] * 30, [50, 80] * 15, ", significant)."),
        ([40] * 29, [50, 80] * 14 + [50], ", significant, but 29 questions are few)."),
        ([65] * 29, [80, 50, 65] * 9 + [80, 50], ", not significant)."),
        ([0, 0], [0, 50], "F1 0.00 to 25.00 (relative change undefined, the baseline is 0)."),
    ],
)
def test_a_score_has_its_caveat_next_to_it(ce, tfidf, text):
    made = report(*pair({"answers": answers(*ce)}, {"answers": answers(*tfidf)}))
    assert made.statements[0].endswith(text)


def path(*points):
    return [evaluation(at, targets(lms, lms), blocks=blocks(ppl)) for at, ppl, lms in points]


def test_equal_perplexity_is_said():
    made = report(run("CE", path((50, 100, 2), (100, 25, 6))), run("TF-IDF", path((50, 200, 0), (100, 50, 3))))
    assert (
        "At equal perplexity (CE first had TF-IDF's final 50.00 between 50 and 100 % of its training) CE recited "
        "between 2.00 and 6.00 tokens on average (4.00 interpolated); TF-IDF recites 3.00: no clear gain or loss."
    ) in made.statements
    assert table(made, "equal_perplexity") == [
        {
            "Model": "Tiny",
            "Objective": "TF-IDF",
            "Perplexity": pytest.approx(50.0),
            "CE at %": "50 to 100",
            "CE LMS before": 2.0,
            "CE LMS after": 6.0,
            "Interpolated": pytest.approx(4.0),
            "Avg LMS": 3.0,
        }
    ]


@pytest.mark.parametrize(
    ("ends", "lms", "verdict"),
    [
        ((2, 6), 7, "no gain, more than CE did there"),
        ((6, 2), 6, "no clear gain or loss"),
        ((2, 6), 2, "no clear gain or loss"),
        ((6, 2), 1, "less than CE did there"),
    ],
)
def test_the_verdict_at_equal_perplexity_needs_no_interpolation(ends, lms, verdict):
    ce = path((50, 100, ends[0]), (100, 25, ends[1]))
    (text,) = (s for s in report(run("CE", ce), run("TF-IDF", path((100, 50, lms)))).statements if "At equal" in s)
    assert "recited between 2.00 and 6.00 tokens" in text
    assert text.endswith(f"TF-IDF recites {lms:.2f}: {verdict}.")
    assert "significant" not in text
    assert "interval" not in text


def test_a_perplexity_exactly_at_a_checkpoint_is_not_bracketed():
    made = report(run("CE", path((50, 100, 2), (100, 25, 6))), run("TF-IDF", path((100, 100, 1))))
    assert (
        "At equal perplexity (CE first had TF-IDF's final 100.00 at 50 % of its training) CE recited 2.00 tokens on "
        "average; TF-IDF recites 1.00: less than CE did there."
    ) in made.statements


@pytest.mark.parametrize(
    ("ce", "tfidf", "verdict"),
    [
        (1, 1, "both at the floor, where they cannot be distinguished"),
        (6, 1, "less than CE did there"),
        (1, 6, "no gain, more than CE did there"),
    ],
)
def test_where_both_are_at_the_floor_there_is_no_verdict_at_equal_perplexity(ce, tfidf, verdict):
    def around(*points):
        return [
            evaluation(at, [*targets(*[lms] * 12), *controls(*[1, 2] * 6)], blocks=blocks(perplexity))
            for at, perplexity, lms in points
        ]

    made = report(run("CE", around((50, 100, ce), (100, 25, ce))), run("TF-IDF", around((100, 50, tfidf))))
    assert f"TF-IDF recites {tfidf:.2f}: {verdict}." in said(made)


def test_perplexity_out_of_range_is_said():
    made = report(run("CE", path((50, 100, 2), (100, 25, 6))), run("TF-IDF", path((50, 200, 0), (100, 20, 2))))
    assert (
        "There is no comparison at equal perplexity: TF-IDF ends with 20.00, and CE's checkpoints range from 25.00 to "
        "100.00 and never reach it." in said(made)
    )
    (row,) = table(made, "equal_perplexity")
    assert [row[name] for name in ("CE at %", "CE LMS before", "CE LMS after", "Interpolated")] == [None] * 4
    assert row["Avg LMS"] == 2.0
    assert "out of range" in notes(made, "equal_perplexity")


@pytest.mark.parametrize(
    ("ce", "tfidf", "control", "text"),
    [
        (
            *([8, 8, 7, 8] * 3, [1, 2, 2, 1] * 3, [1, 2] * 6),
            "TF-IDF is at the floor (average LMS 1.50, that of passages never seen 1.50): the difference of 0.00 "
            "tokens (95 % interval -0.",
        ),
        (
            *([8] * 10, [7] * 10, [6] * 10),  # 8 / 6 is more than a fifth above the floor
            "TF-IDF is near the floor (average LMS 7.00, that of passages never seen 6.00)",
        ),
    ],
)
def test_an_lms_at_or_near_the_floor_is_said(ce, tfidf, control, text):
    made = report(*pair(*({"samples": [*targets(*lms), *controls(*control)]} for lms in (ce, tfidf))))
    assert text in said(made)
    assert "CE is" not in said(made)


def test_models_and_learning_rates_are_compared_by_themselves():
    runs = [
        run(name, [evaluation(samples=targets(lms, lms))], model=model, learning_rate=rate)
        for model, rate, name, lms in [
            *(("A", 1e-3, "CE", 8), ("A", 1e-3, "TF-IDF", 2), ("A", 2e-3, "CE", 4), ("A", 2e-3, "TF-IDF", 2)),
            *(("B", None, "CE", 4), ("B", None, "TF-IDF", 1)),
        ]
    ]
    made = report(*runs)
    settings = ["A, lr 0.001", "A, lr 0.002", "B"]
    for statement, name, percent in zip(made.statements, settings, ("75.0", "50.0", "75.0"), strict=False):
        assert statement.startswith(f"{name}: TF-IDF lowers the average LMS by {percent} %")
    rows = [(row["Model"], row["Objective"], row["Avg LMS"]) for row in table(made, "memorization")]
    assert rows[:4] == [
        (name, objective, lms)
        for name, objective, lms in zip(
            [settings[0]] * 2 + [settings[1]] * 2, ["CE", "TF-IDF"] * 2, (8.0, 2.0, 4.0, 2.0), strict=True
        )
    ]
    assert [figure.name for figure in made.figures] == [f"lms_distribution_{number}" for number in (1, 2, 3)]
    assert made.figures[2].title == "Distribution of the LMS: B"
    assert len(dict(made.provenance)) == len(made.provenance)


def test_nothing_comparable_is_said_and_the_tables_stand():
    runs = [
        run("CE", [evaluation(samples=targets(4, 4))], model="A"),
        run("IDF", [evaluation(samples=targets(2, 2))], model="B"),
    ]
    made = report(*runs)
    assert made.statements[0].startswith(
        "Nothing is compared: no model has runs of CE and of another objective (A: CE; B: IDF)"
    )
    assert len(table(made, "memorization")) == 2


def test_runs_without_a_common_checkpoint_are_said():
    made = report(run("CE", [evaluation(50, targets(2, 2))]), run("TF-IDF", [evaluation(100, targets(1, 1))]))
    assert "TF-IDF and CE share no checkpoint with memorization results" in said(made)


def test_a_comparison_before_the_end_of_training_is_said():
    made = report(
        run("CE", [evaluation(50, targets(4, 4)), evaluation(100, targets(8, 8))]),
        run("TF-IDF", [evaluation(50, targets(2, 2))]),
    )
    assert "against CE at 50 % of training" in made.statements[0]
    assert "the last checkpoint that all runs of the model share: Tiny at 50 %" in notes(made, "memorization")


def test_every_checkpoint_and_prefix_length_has_a_row(grown):
    progress = table(grown, "progress")
    assert [(row["Objective"], row["Progress %"]) for row in progress[:6]] == [
        *[("CE", at) for at in (10, 25, 50, 75, 100)],
        ("TF-IDF", 10),
    ]
    assert len(progress) == 15
    assert [row["Answer F1"] is None for row in progress[:5]] == [True, True, True, True, False]
    by_length = table(grown, "by_prefix_length")
    assert [(row["Objective"], row["Prefix length"]) for row in by_length[:3]] == [
        ("CE", 32),
        ("CE", 50),
        ("TF-IDF", 32),
    ]
    memorization = table(grown, "memorization")[0]
    assert memorization["Avg LMS"] == pytest.approx((by_length[0]["Avg LMS"] + by_length[1]["Avg LMS"]) / 2)
    assert memorization["Avg LMS"] == pytest.approx(progress[4]["Avg LMS"])


def test_the_progress_table_has_no_column_that_is_empty_throughout():
    made = report(*(run(name, [evaluation(at, targets(2, 2)) for at in (50, 100)]) for name in ("CE", "TF-IDF")))
    columns = list(table(made, "progress")[0])
    assert columns[2:4] + columns[-2:] == ["Progress %", "Avg Prefix", "Verbatim %", "Seeds"]


def test_injections_and_lost_prompts_are_noted():
    ce = {"samples": targets(4, 4), "num_not_round_trip": 1, "num_injections": {"target-0": 10, "target-1": 10}}
    made = report(*pair(ce, {"samples": targets(2, 2)}))
    assert "Each target occurs 10 times in the training text." in notes(made, "memorization")
    assert "Tiny, CE: 1 of 2 prompts changed when converted to text" in notes(made, "memorization")
    assert "prompts were sent as text" not in notes(made, "memorization")
    made = report(*pair({"samples": targets(4, 4), "text_prompts": True}, {"samples": targets(2, 2)}))
    assert "Tiny, CE: prompts were sent as text, so the responses were tokenized again" in notes(made, "memorization")
    assert "Tiny, TF-IDF: prompts were sent as text" not in notes(made, "memorization")
    lost = {"blocks": blocks(20.0), "num_blocks_not_round_trip": 3}
    made = report(*pair({"blocks": blocks(20.0)}, lost))
    assert "Tiny, TF-IDF: 3 of 4 blocks changed when converted to text" in notes(made, "perplexity")


def test_a_model_that_diverged_does_not_stop_the_report():
    worst = (BlockScore(0, 1, -1e4), BlockScore(1, 1, -1e4))
    sane = (BlockScore(0, 1, -3.0), BlockScore(1, 1, -3.0))
    made = report(*pair({"samples": targets(4, 4), "blocks": sane}, {"samples": targets(0, 0), "blocks": worst}))
    assert math.isinf(table(made, "perplexity")[1]["Perplexity"])
    assert "since a value is not finite" in made.statements[0]
    assert "frontier" in [figure.name for figure in made.figures]


def test_title_provenance_and_examples_name_every_objective(grown):
    assert grown.title == "TF-IDF and IDF against CE"
    provenance = dict(grown.provenance)
    assert provenance["Baseline"] == "CE"
    assert provenance["Tiny, IDF, seed 1"] == "runs/IDF-1 (evaluated at 10 %, 25 %, 50 %, 75 %, 100 %)"
    assert provenance["Intervals"] == "percentile bootstrap, 10,000 resamples, seed 0"
    assert len(grown.examples) == 2
    assert [one.label for one in grown.examples[0].continuations] == ["CE", "TF-IDF", "IDF"]


def test_the_baseline_can_be_named():
    made = report(*pair({"samples": targets(4, 4)}, {"samples": targets(2, 2)}), baseline="TF-IDF")
    assert made.statements[0].startswith("CE raises the average LMS by 100.0 %")
    assert [row["Objective"] for row in table(made, "memorization")] == ["TF-IDF", "CE"]


def test_means_over_prefix_lengths_have_no_maximum_and_no_quantiles():
    """Of older runs only these are left."""
    records = [record("CE", 8.0, 20.0), record("TF-IDF", 2.0, 25.0)]
    made = comparison_report(results_of([replace(one, learning_rate=None) for one in records]))
    first, second = table(made, "memorization")
    assert [(row["Avg LMS"], row["Max LMS"], row["ROUGE-L"], row["Control LMS"]) for row in (first, second)] == [
        (8.0, 9, 30.25, 1.0),
        (2.0, 9, 30.25, 1.0),
    ]
    spread = table(made, "lms_spread")[0]
    assert [spread[name] for name in ("Avg LMS", "Median", "90th percentile", "Max")] == [8.0, None, None, None]
    assert table(made, "reductions")[0]["Reduction %"] == 75.0
