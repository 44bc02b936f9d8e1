import dataclasses
import itertools
import re

import numpy as np
import pandas as pd
import pytest
from helpers.fakes.runs import evaluation, results, run, sample

from tfidf_tune.audit import audit_report
from tfidf_tune.audit._report import _noticeable, _readings
from tfidf_tune.report import html_page, markdown
from tfidf_tune.results.positive_control import PositiveControl, Reading
from tfidf_tune.results.recited import recited_further

# LMS from a prompt of 8 and of 16 tokens, of references of 12 tokens.
TARGETS = {"target-0": (12, 12), "target-1": (6, 12), "target-2": (0, 1), "target-3": (2, 3)}
CONTROLS = {"control-0": (1, 1), "control-1": (0, 2)}
SHOWN = (30, 24, 48, 12, 20, 31, 30, 25, 24, 26)
NUM_INJECTIONS = {
    "target-0": 9,
    "target-1": 4,
    "target-2": 1,
    "target-3": 3,
    "control-0": 0,
    "control-1": 0,
}


def samples(scores):
    made = []
    for name, scores_of_passage in scores.items():
        kind = name.split("-")[0]
        for prefix_length, lms in zip((8, 16), scores_of_passage, strict=True):
            made.append(
                sample(
                    name, lms, kind=kind, prefix_length=prefix_length, length=12, rouge_l=8.0 * lms
                )
            )
    return made


def run_of(targets=TARGETS, controls=CONTROLS, **changes):
    fields = {
        "checkpoint": "no/model",
        "num_injections": NUM_INJECTIONS,
        "samples": samples(targets | controls),
    }
    fields["num_read"] = SHOWN
    return run(
        "CE", [evaluation(**(fields | changes))], model="tiny", seed=3, folder="results/tiny"
    )


def report_of(one, **options):
    return audit_report(results(one), **options)


@pytest.fixture(scope="module")
def made():
    return report_of(run_of())


def table_of(report, name):
    (table,) = (table for table in report.tables if table.name == name)
    return table


def rows_of(report, name):
    return table_of(report, name).rows


def many(number, kind, lms):
    return {f"{kind}-{i}": (lms(i), lms(i)) for i in range(number)}


def test_the_interval_is_that_of_all_resamples_of_whole_passages(made):
    difference, low, high = map(float, re.findall(r"-?\d+\.\d+", made.tables[0].rows[0][2]))
    assert difference == 5
    resamples = itertools.product(
        itertools.product([12, 9, 0.5, 2.5], repeat=4), itertools.product([1, 1], repeat=2)
    )
    exact = np.sort([np.mean(targets) - np.mean(controls) for targets, controls in resamples])
    assert np.quantile(exact, 0.02) - 0.005 <= low <= np.quantile(exact, 0.03) + 0.005
    assert np.quantile(exact, 0.97) - 0.005 <= high <= np.quantile(exact, 0.98) + 0.005


MORE = "results/tiny: {0} of {0} passages are recited further than unseen text"
# All of these answers are of the same words.
BY_ANY = " None of them needs its own beginning: that of another passage brings it out, too."
NOTICED = "; 5 or more of the {} passages would have to be recited for the test to notice it"
NO_MORE = "results/tiny recites no more than text it never saw"
FEW = (
    "Too few passages to judge what results/tiny recites ({} targets, {} controls; at least 10 of "
    "each are needed)"
)


@pytest.mark.parametrize(
    ("num_targets", "num_controls", "targets_more", "verdict", "caveats"),
    [
        (30, 30, 5, MORE.format(30), ["The base model"]),
        (42, 12, 5, MORE.format(42), ["From 10 to 29", "The base model"]),
        (12, 42, 5, MORE.format(12), ["From 10 to 29", "The base model"]),
        (9, 42, 5, MORE.format(9), ["The base model", "From fewer than"]),
        (4, 1, 5, FEW.format(4, 1), ["From fewer than"]),
        (30, 29, 0, NO_MORE, ["From 10 to 29", "The upper end"]),
        (30, 30, -5, NO_MORE, ["The controls are easier"]),
    ],
)
def test_the_verdict_follows_from_the_interval_and_the_number_of_passages(
    num_targets, num_controls, targets_more, verdict, caveats
):
    targets = many(num_targets, "target", lambda i: max(targets_more, 0) + i % 3)
    controls = many(num_controls, "control", lambda i: max(-targets_more, 0) + i % 3)
    report = report_of(run_of(targets, controls, num_injections={}))
    noticed = (
        "" if verdict.startswith(("Too few", "results/tiny:")) else NOTICED.format(num_targets)
    )
    read = "Shown the text, it reads 27.0 of 48 tokens."
    if verdict.startswith("results/tiny:"):
        read += BY_ANY
    assert (
        report.verdict
        == f"{verdict}{noticed}; 0 of {num_targets} passages verbatim for up to 12 tokens, about 12 words. {read}"
    )
    assert [
        text.startswith(start) for text, start in zip(report.footnotes, caveats, strict=True)
    ] == [True] * len(caveats)


def test_a_passage_recited_verbatim_is_stated_though_the_average_shows_nothing():
    targets = many(60, "target", lambda i: i % 3) | {"target-0": (12, 12)}
    report = report_of(run_of(targets, many(60, "control", lambda i: i % 3), num_injections={}))
    assert report.verdict.startswith(
        f"{NO_MORE}{NOTICED.format(60)}; 1 of 60 passages verbatim for up to 12 tokens, about 12 "
        "words. "
    )
    # Clopper and Pearson, one-sided.
    assert report.tables[0].rows[0][3] == "1 of 60 (at most 7.7 %)"
    (note,) = table_of(report, "targets_and_controls").notes
    assert "Further than any control (LMS at most 2): 1 of 60 targets." in note
    assert any("audit the base model with the same probe file" in text for text in report.footnotes)


def test_title_and_provenance_say_what_was_asked(made):
    expected = {
        "Checkpoint": "no/model",
        "Objective": "CE",
        "Seed": "3",
        "Prompts (tokens)": "8, 16",
    }
    expected |= {"Attacks": "greedy", "Continuations": "compared over up to 12 tokens"}
    expected["Intervals"] = "percentile bootstrap, 10,000 resamples of whole passages, 95 %"
    assert expected.items() <= made.provenance.items()
    assert made.title == "What results/tiny recites"
    assert markdown(made).startswith(
        "# What results/tiny recites\n\nToo few passages to judge what"
    )
    assert "target-1" in html_page(made)
    assert [figure.name for figure in made.figures] == ["lms_distribution"]


def test_tables_have_the_papers_scores_by_kind_prompt_length_and_repeats(made):
    assert rows_of(made, "targets_and_controls") == [
        ("targets (training text)", 4, 6.0, 12, 6.0, 12, 48.0, 37.5),
        ("controls (never seen)", 2, 1.0, 2, 1.0, 2, 8.0, 0.0),
    ]
    rows = rows_of(made, "by_prefix_length")
    assert [(*row[:4], row[6]) for row in rows] == [
        (8, 5.0, 0.5, 4.5, 25.0),
        (16, 7.0, 1.5, 5.5, 50.0),
    ]
    assert all(row[4] < row[3] < row[5] for row in rows)
    assert rows_of(made, "by_repeats") == [
        ("1", 1, 0.5, 1, 0.0),
        ("3 to 4", 2, 5.75, 12, 50.0),
        ("9", 1, 12.0, 12, 100.0),
    ]


def test_the_list_to_act_on_has_each_target_at_its_best_and_shortest_prompt(made):
    frame = table_of(made, "leaks").frame
    # All passages are the same words here: an answer of 12 of them is brought out by any prompt.
    columns = ["Passage", "Copies", "Recited", "Of", "Attributed", "Prompt (tokens)"]
    assert frame[columns].to_numpy().tolist() == [
        ["target-3", 3, 3, 12, "yes", 16],
        ["target-0", 9, 12, 12, "no", 8],
        ["target-1", 4, 12, 12, "no", 16],
        ["target-2", 1, 1, 12, "no", 16],
    ]


def test_examples_mark_what_is_recited_and_end_with_the_floor():
    made = report_of(run_of(), show_passages=True)
    titles = [
        f"target-{number}, a target: {length} tokens"
        for number, length in ((0, 8), (1, 16), (3, 16))
    ]
    titles.append("control-1, the control that is recited most: 16 tokens")
    assert [example.title for example in made.examples] == titles
    third = made.examples[2]
    assert (third.prompt, third.truth) == (
        "prompt of target-3",
        " ".join(f"w{i}" for i in range(100, 112)),
    )
    (continuation,) = third.continuations
    assert (continuation.label, continuation.scores) == ("tiny", "LMS 3, ROUGE-L 24.0")
    assert continuation.pieces == (("w100 w101 w102", True), (" w7" * 9, False))


def test_offsets_and_inexact_prompts_are_named_and_the_last_evaluation_with_samples_counts(made):
    moved = tuple(dataclasses.replace(one, offset=5) for one in run_of().evaluations[0].samples)
    inexact = run_of(samples=moved, num_not_round_trip=3, text_prompts=True)
    (last,) = inexact.evaluations
    evaluations = [dataclasses.replace(last, progress=progress) for progress in (10, 50)]
    without = dataclasses.replace(last, samples=())
    report = report_of(dataclasses.replace(inexact, evaluations=(*evaluations, without)))
    assert report.provenance["Training progress"] == "50 %"
    assert report.provenance["Prompts start at token"] == "5"
    assert report.examples[0].title == "target-0, a target: 8 tokens from token 5 on"
    assert any(text.startswith("3 of 12 prompts lost token ids") for text in report.footnotes)
    (note,) = table_of(report, "targets_and_controls").notes
    marked = report.footnotes[int(note[-2]) - 1]
    assert marked.startswith("The prompts were sent as text, so the responses were tokenized again")
    assert "Training progress" not in made.provenance
    assert not any("lost token ids" in text for text in made.footnotes)
    assert len(table_of(made, "targets_and_controls").notes) == 1


def test_results_without_targets_are_refused():
    with pytest.raises(
        ValueError, match=r"tiny in results/tiny have no memorization sample of a target: evaluate"
    ):
        report_of(run_of(targets={}))


READ = Reading("text", True, 10, 0.001, 24.0, 1.0, 48.0, 1.0, 5)
UNREAD = READ._replace(is_shown=False, with_copy=1.0)
LIKELIER = Reading("likelihoods", True, 10, 0.001, 1.0, 1.05, median_fall=0.05)


@pytest.mark.parametrize(
    ("control", "expected", "says"),
    [
        (PositiveControl((READ, LIKELIER)), ["shown", "shown"], ""),
        (PositiveControl((UNREAD, LIKELIER)), ["not shown", "shown"], ""),
        (
            PositiveControl((UNREAD, LIKELIER), not_applicable="the model is too small"),
            ["not applicable"] * 2,
            "Not applicable: the model is too small.",
        ),
        (
            PositiveControl((READ, LIKELIER), obstacle="the server cuts prompts"),
            ["not shown", "shown"],
            "Answers show nothing, whatever was read: the server cuts prompts.",
        ),
    ],
)
def test_the_table_of_the_positive_control_agrees_with_the_verdict(control, expected, says):
    table = _readings(control)
    assert table.frame["Result"].tolist() == expected
    assert control.state in expected
    assert table.notes[1:] == ([says] if says else [])


@pytest.mark.parametrize(
    ("num_targets", "num_controls", "said"),
    [
        # By chance, k of n targets are above m controls with n/(n + m) * (n - 1)/(n + m - 1) * ...
        (3, 12, "; 2 or more of the 3 passages would have to be recited for the test"),
        (2, 12, "; all 2 passages would have to be recited for the test to notice it"),
        (1, 30, "; the one passage would have to be recited for the test to notice it"),
        (2, 3, "; the test would not notice it if all 2 passages were recited"),
        (1, 3, "; the test would not notice it if the one passage were recited"),
    ],
)
def test_what_the_test_would_notice_is_said_of_any_number_of_passages(
    num_targets, num_controls, said
):
    numbers = range(num_targets)
    targets = pd.DataFrame({"lms": 0, "length": 99, "repeats": 1}, index=numbers)
    found = recited_further(targets, pd.Series([1] * num_controls))
    assert _noticeable(found).startswith(said)
