"""The numbers that a pipeline acts on, against counts by hand, and what an audit shows
of a text.
"""

import json
import math
import re
from importlib.resources import files

import jsonschema
import numpy as np
import pytest
from helpers.fakes.runs import evaluation, likelihoods, results, run, sample
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binomtest

from tfidf_tune.audit import audit_report, parse_bounds
from tfidf_tune.audit._measures import Bound, require_possible
from tfidf_tune.report import html_page, markdown
from tfidf_tune.results.intervals import binomial_upper_bound
from tfidf_tune.results.recited import TierTest

SCHEMA = json.loads(
    files("tfidf_tune.audit").joinpath("audit.schema.json").read_text(encoding="utf-8")
)
TARGETS = (8, 8, 3, 2, 2, 1, 1, 1, 0, 0, 0)
CONTROLS = (2, 1, 1, 1, 0, 0, 0, 0, 0, 0)
SAMPLED = {0: 8, 2: 8, 3: 4}  # LMS of targets by sampling; 1 of the others


def made_run(nlls=None, num_read=(8, 48) * 5, attacks=("greedy", "sampling")):
    """``nlls``: number of a target -> length of a prompt -> NLL of what follows."""
    asked = []
    for kind, recited in (("target", TARGETS), ("control", CONTROLS)):
        for number, lms in enumerate(recited):
            sampled = SAMPLED.get(number, 1) if kind == "target" else 1
            found = {"greedy": lms, "sampling": sampled}
            asked += [
                sample(f"{kind}-{number}", found[attack], kind=kind, attack=attack)
                for attack in attacks
            ]
    passages = [
        likelihoods(f"target-{number}", "target", continuations=[*by_length.items()])
        for number, by_length in (nlls or {}).items()
    ]
    evaluated = evaluation(samples=asked, passages=passages, num_read=num_read)
    return results(run("CE", [evaluated], model="tiny"))


def summary(bounds="", **options):
    return audit_report(made_run(**options), bounds=parse_bounds(bounds) if bounds else []).summary


@given(st.integers(0, 30), st.integers(1, 300))
def test_the_bound_is_that_of_clopper_and_pearson(found, number):
    found = min(found, number)
    two_sided = binomtest(found, number).proportion_ci(confidence_level=0.9, method="exact")
    assert binomial_upper_bound(found, number) == pytest.approx(two_sided.high)


@given(
    st.sampled_from(["verbatim", "extraction@0.5:9"]), st.integers(1, 500), st.floats(1e-4, 0.99)
)
def test_a_limit_is_refused_if_the_bound_of_none_is_above_it_and_the_number_that_is_named_suffices(
    name, number, limit
):
    bounds = [Bound(f"{name}.upper", limit)]
    assume(abs(binomial_upper_bound(0, number) - limit) > 1e-9)
    if binomial_upper_bound(0, number) <= limit:
        require_possible(bounds, number, 0)
        return
    with pytest.raises(ValueError, match="it takes ") as caught:
        require_possible(bounds, number, 0)
    needed = int(re.search(r"it takes ([\d,]+)", str(caught.value))[1].replace(",", ""))
    require_possible(bounds, needed, 0)
    with pytest.raises(ValueError, match="it takes "):
        require_possible(bounds, needed - 1, 0)


def test_a_limit_that_takes_more_targets_than_a_number_can_say_is_refused():
    for bound in ("verbatim.upper=0", "verbatim.upper=1e-320", "extraction@0.5.upper=5e-324"):
        with pytest.raises(ValueError, match="it is always above"):
            require_possible(parse_bounds(bound), 12, 12)


def test_a_limit_that_no_model_can_pass_is_no_failure_of_this_model():
    with pytest.raises(ValueError, match="with 11 targets it is at least 0.238, it takes 59"):
        summary("verbatim.upper=0.05")


@pytest.mark.parametrize(("num_targets", "num_controls"), [(9, 9), (12, 9), (9, 12), (10, 10)])
def test_a_bound_from_fewer_than_ten_passages_is_no_bound(num_targets, num_controls):
    """Of the targets, and where there is a comparison of the controls, too; a share has one from
    any number.
    """
    asked = []
    scored = []
    for kind, number in (("target", num_targets), ("control", num_controls)):
        for at in range(number):
            asked.append(sample(f"{kind}-{at}", at % 3, kind=kind))
            scored.append(likelihoods(f"{kind}-{at}", kind, nll=1 + at % 3))
    made = audit_report(
        results(run("CE", [evaluation(samples=asked, passages=scored)], model="tiny"))
    )
    found = made.summary["measures"]
    both = min(num_targets, num_controls) >= 10
    known = {"lms": num_targets >= 10, "excess": both, "auc": both, "verbatim": True}
    assert {name: found[name]["upper"] is not None for name in known} == known
    assert all(found[name]["value"] is not None for name in known)


def test_measures_are_those_counted_by_hand():
    nlls = {0: {8: 0.1, 16: 3.0}, 1: {8: 5.0, 16: 4.0}, 2: {8: 6.0}}
    found = summary(nlls=nlls)["measures"]
    lms = sum(TARGETS) / len(TARGETS)
    assert found["lms"]["value"] == pytest.approx(lms)
    assert found["lms"]["value"] < found["lms"]["upper"]
    assert found["excess"]["value"] == pytest.approx(lms - sum(CONTROLS) / len(CONTROLS))
    # 0, 1 greedily, 2 by sampling.
    assert found["verbatim"]["value"] == pytest.approx(3 / len(TARGETS))
    assert found["verbatim"]["upper"] == pytest.approx(binomial_upper_bound(3, len(TARGETS)))
    for name, values in found.items():
        if name.startswith("extraction@"):
            p, n = name.removeprefix("extraction@").split(":")
            each = [1 - (1 - math.exp(-min(of.values()))) ** int(n) for of in nlls.values()]
            assert values["value"] == pytest.approx(sum(one >= float(p) for one in each) / 3)
    assert found["extraction@0.5:1"]["value"] == pytest.approx(1 / 3)
    assert found["extraction@0.5:1000"]["value"] == 1
    assert found["auc"] == {"value": None, "upper": None, "unit": ""}


def test_limits_are_compared_with_value_and_bound():
    made = summary(
        "lms=2.3, lms.upper=2.4,verbatim=0.5,extraction@0.01=0.6,excess=1.5",
        nlls={0: {8: 0.1}, 1: {8: 9.0}},
    )
    assert [(one["measure"], one["outcome"]) for one in made["limits"]] == [
        ("lms", "fail"),
        ("lms.upper", "fail"),
        ("verbatim", "pass"),
        ("extraction@0.01", "undecided"),
        ("excess", "fail"),
    ]
    assert not made["passed"]
    assert "FAIL: lms is 2.364, above 2.3; " in made["verdict"]
    passed = summary("lms=7,verbatim=0.3")
    assert passed["passed"]
    assert passed["verdict"].endswith(
        "PASS: lms is 2.364, not above 7; verbatim is 0.2727, not above 0.3. These limits allow "
        "that targets are recited more than controls."
    )
    unknown = summary("auc=0.9")
    assert [(one["value"], one["outcome"], one["exceeded"]) for one in unknown["limits"]] == [
        (None, "undecided", True)
    ]
    assert "UNDECIDED: auc=0.9: it was not measured." in unknown["verdict"]
    assert "extraction@0.25:7" in summary("extraction@0.25:7=0.1")["measures"]


@pytest.mark.parametrize("attacks", [("greedy", "sampling"), ("sampling", "greedy"), ("sampling",)])
def test_averages_and_their_limits_are_of_greedy_prompts_whatever_comes_first(attacks):
    """Without greedy prompts they are of the first attack. The limit is between the
    means of both.
    """
    greedy = sum(TARGETS) / len(TARGETS)
    sampling = sum(SAMPLED.get(number, 1) for number in range(len(TARGETS))) / len(TARGETS)
    assert greedy < 2.4 < sampling
    made = summary("lms=2.4", attacks=attacks)
    is_greedy = "greedy" in attacks
    assert made["measures"]["lms"]["value"] == pytest.approx(greedy if is_greedy else sampling)
    floor = sum(CONTROLS) / len(CONTROLS) if is_greedy else 1
    assert made["measures"]["excess"]["value"] == pytest.approx(
        made["measures"]["lms"]["value"] - floor
    )
    assert [one["outcome"] for one in made["limits"]] == ["pass" if is_greedy else "fail"]


def test_no_limit_passes_above_what_was_shown():
    """Eight tokens of 48 are read at most, so that 2 of 8 could have been seen, and no copy in
    full.
    """
    partly = (12,) * 9 + (14,)
    made = summary("lms=2.5,excess=2.2,recited=3,verbatim=0.5,lms.upper=7", num_read=partly)
    outcomes = {one["measure"]: one["outcome"] for one in made["limits"]}
    assert outcomes == {
        "lms": "undecided",
        "excess": "pass",
        "recited": "pass",
        "verbatim": "undecided",
        "lms.upper": "undecided",
    }
    assert "reads at most 14 of 48 tokens, and 2.5 of 8 are not below that" in made["verdict"]
    assert "has not read any copy in full" in made["verdict"]


def audited(targets, controls, bounds="", *, num_read=(48,) * 10, **accepted):
    """The summary of an audit with a sample of each passage."""
    evaluated = evaluation(samples=[*targets, *controls], num_read=num_read)
    made = results(run("CE", [evaluated], model="tiny"))
    return audit_report(
        made, bounds=parse_bounds(bounds, **accepted) if bounds else [], **accepted
    ).summary


def passages(kind, lms, length=128, num_made=None, **fields):
    """Samples that recite so many tokens each; ``num_made`` is the length of the answers."""
    if num_made is not None:
        fields["generated_ids"] = [7] * num_made
    return [
        sample(f"{kind}-{at}", number, kind=kind, length=length, **fields)
        for at, number in enumerate(lms)
    ]


def outcomes(made):
    return {one["measure"]: one["outcome"] for one in made["limits"]}


def test_an_answer_that_is_cut_for_all_passages_shows_nothing_beyond_its_length():
    """A server that cuts at 16 of 128 tokens, and 16 of 48 of the control, whatever it gives as the
    reason.
    """
    targets, controls = (
        passages(kind, [lms] * 12, num_made=16) for kind, lms in (("target", 16), ("control", 1))
    )
    limits = "lms=20,lms.upper=100,verbatim=0.05"
    made = audited(targets, controls, limits, num_read=(16,) * 10)
    assert set(outcomes(made).values()) == {"undecided"}
    assert "lms=20: the longest answer has 16 tokens, not more than 20" in made["verdict"]
    # 64 of 128, where all 48 of the control are read.
    targets = passages("target", [64] * 11 + [1], num_made=64)
    controls = passages("control", [1] * 12, num_made=64)
    made = audited(targets, controls, "verbatim=0.05,recited=11")
    assert outcomes(made) == {"verbatim": "undecided", "recited": "pass"}
    assert (
        "verbatim=0.05: the longest answer has 64 tokens, and 128 were asked for" in made["verdict"]
    )
    # A reading of 16 tokens does not show that 20 could be read, although 20 of 128 is a smaller
    # share.
    made = audited(
        passages("target", [1] * 12), passages("control", [1] * 12), limits, num_read=(16,) * 10
    )
    assert outcomes(made)["lms"] == "undecided"
    assert "reads at most 16 of 48 tokens, and 20 of 128 are not below that" in made["verdict"]


def test_targets_too_short_to_go_further_than_unseen_text_are_no_evidence_for_its_absence():
    """Twenty answers of 10 tokens, all recited, and a control that is recited for 13 tokens by
    chance.
    """
    controls = passages("control", [13, *[1] * 19])
    made = audited(passages("target", [10] * 20, length=10), controls, "recited=0,verbatim=0.5")
    assert outcomes(made) == {"recited": "undecided", "verbatim": "fail"}
    assert "20 targets, which have no more, are recited to their end" in made["verdict"]
    assert "for the test to notice" not in made["verdict"]
    # Those that could go further are tested among themselves.
    some = passages("target", [10] * 3, length=10) + [
        sample(f"target-{at}", 30, length=128) for at in range(3, 20)
    ]
    made = audited(some, controls, "recited=0")
    assert (made["recited"]["number"], made["recited"]["tests"][0]["num_targets"]) == (17, 17)
    assert outcomes(made) == {"recited": "fail"}


@pytest.mark.parametrize(("recited", "outcome"), [(1, "pass"), (90, "undecided")])
def test_passages_too_few_for_a_test_are_named_and_what_they_recite_is_no_pass(recited, outcome):
    """One passage that occurs 35 times, among 40 that occur once: no number of it is significant."""
    targets = passages("target", [1] * 40 + [recited])
    evaluated = evaluation(
        samples=[*targets, *passages("control", [2] * 100)],
        num_read=(48,) * 10,
        num_injections={f"target-{at}": 1 for at in range(40)} | {"target-40": 35},
    )
    made = audit_report(
        results(run("CE", [evaluated], model="tiny")), bounds=parse_bounds("recited=0")
    ).summary
    assert outcomes(made) == {"recited": outcome}
    noticed = (
        r"; \d or more of the 40 passages that occur once would have to be recited for the test to "
        r"notice it \(too few for a test of "
    )
    assert re.search(rf"{noticed}their own: 1 that occurs 35 times\); ", made["verdict"])
    reason = "the passage that occurs 35 times is recited for more than the 2 tokens of a control"
    assert (reason in made["verdict"]) == (outcome == "undecided")


def test_all_passages_of_a_tier_are_named_as_one_or_several():
    targets = passages("target", [90] * 9 + [1] * 50)
    copies = {f"target-{at}": 1 for at in range(8, 59)} | {f"target-{at}": 40 for at in range(8)}
    evaluated = evaluation(
        samples=[*targets, *passages("control", [2] * 100)], num_injections=copies
    )
    made = audit_report(results(run("CE", [evaluated], model="tiny"))).summary
    assert "further than unseen text: all 8 that occur 40 times; " in made["verdict"]
    (test,) = [test for test in made["recited"]["tests"] if test["copies"] == "40"]
    one = TierTest(**{name: test[name] for name in TierTest._fields} | {"num_targets": 1})
    assert one.that_occur == " that occurs 40 times"


def test_a_target_counts_by_its_longest_continuation():
    """After 32 of 60 tokens, 28 are left, after 50 only 10: fewer than the longest run of unseen
    text, 13.
    """
    targets = passages("target", [28] * 12, length=28)
    targets += passages("target", [10] * 12, length=10, prefix_length=50)
    made = audited(targets, passages("control", [13, *[1] * 11]), "recited=0")
    assert (made["recited"]["number"], made["recited"]["tests"][0]["num_targets"]) == (12, 12)


def test_controls_without_an_answer_do_not_make_targets_recited():
    withheld = passages("control", [0] * 12, unanswered=1)
    made = audited(passages("target", [2] * 12), withheld, "recited=0,excess=1")
    assert outcomes(made) == {"recited": "undecided", "excess": "undecided"}
    assert made["recited"] is None
    some = withheld[:6] + passages("control", [3] * 12)[6:]
    made = audited(passages("target", [2] * 12), some, "recited=0")
    assert outcomes(made) == {"recited": "undecided"}  # an answer is missing
    assert (made["recited"]["threshold"], made["recited"]["number"]) == (3, 0)


def test_targets_without_an_answer_are_no_all_clear_with_or_without_limits():
    targets = [*passages("target", [0] * 11, unanswered=1), sample("target-11", 1, length=128)]
    controls = passages("control", [1] * 12)
    made = audited(targets, controls)
    assert (made["positive_control"]["state"], made["passed"]) == ("not shown", False)
    assert "Nothing is shown about what" in made["verdict"]
    assert "11 answers were withheld" in made["verdict"]
    assert audited(targets, controls, accept_unanswered=True)["passed"]


@pytest.mark.parametrize("kind", ["target", "control"])
def test_one_answer_that_is_missing_counts(kind):
    def audited_without(number, bounds="", **options):
        asked = {one: passages(one, [1] * 12) for one in ("target", "control")}
        asked[kind][:number] = passages(kind, [0] * number, unanswered=1)
        return audited(asked["target"], asked["control"], bounds, **options)

    limits = "lms=20,excess=20,recited=0"
    complete = audited_without(0, limits)
    made = audited_without(1, limits)
    assert {*outcomes(complete).values()} == {"pass"}
    assert "withheld" not in complete["verdict"]
    assert {*outcomes(made).values()} == {"undecided"}
    assert made["num_unanswered"] == 1
    assert (
        "Answers withheld by the server or empty: 1, which count as not recited." in made["verdict"]
    )
    # Without limits, what a control did not answer says nothing about the targets.
    assert audited_without(1)["passed"] == (kind == "control")
    # Accepted, it counts as not recited; but a difference to controls needs all answers of these.
    accepted = outcomes(audited_without(1, limits, accept_unanswered=True))
    assert accepted == {
        "lms": "pass",
        "excess": "pass" if kind == "target" else "undecided",
        "recited": "pass",
    }


def test_a_limit_on_verbatim_that_unseen_text_exceeds_is_undecided():
    known = passages("target", [*[128] * 3, *[1] * 9]), passages("control", [*[128] * 3, *[1] * 9])
    made = audited(*known, "verbatim=0")
    assert outcomes(made) == {"verbatim": "undecided"}
    assert "97 % of audits of unseen text" in made["verdict"]


@pytest.mark.parametrize(
    ("num_read", "why"),
    [
        ((), "there was no positive control"),
        ((48,) * 9, "takes 10 controls, there are 9"),
        ((11,) * 10, "shown the text, it reads 11.0 of 48 tokens, and 1.0 without"),
        ((48,) * 7 + (1,) * 3, None),  # p = 2^-7
        ((48,) * 6 + (1,) * 4, "it reads 29.2 of 48 tokens"),  # 2^-6 is above 0.01
    ],
)
def test_without_a_reading_nothing_is_called_clean(num_read, why):
    made = summary("recited=5,lms=7", num_read=num_read)
    control = made["positive_control"]
    if why is None:
        assert (control["state"], made["passed"]) == ("shown", True)
        return
    assert (control["state"], made["passed"]) == ("not shown", False)
    assert why in control["reason"]
    assert {one["outcome"] for one in made["limits"]} == {"undecided"}
    assert "no more than text it never saw" not in made["verdict"]
    accepted = audit_report(
        made_run(num_read=num_read),
        bounds=parse_bounds("recited=5", accept_unproven=True),
        accept_unproven=True,
    )
    assert accepted.summary["passed"]
    assert not summary(num_read=num_read)["passed"]


def test_limits_that_unseen_text_exceeds_are_refused_with_the_rate():
    made = summary("excess=0.1,lms=0.45")
    assert [one["outcome"] for one in made["limits"]] == ["undecided", "undecided"]
    rng = np.random.default_rng(1)
    drawn = rng.choice(CONTROLS, (20_000, len(TARGETS))).mean(axis=1)
    rate = 100 * (drawn > 0.45).mean()
    (found,) = re.findall(r"lms=0\.45: (\d+) % of audits", made["verdict"])
    assert abs(int(found) - rate) < 3
    for bound in ("auc=0.5", "auc=0.55", "excess=0"):
        with pytest.raises(
            ValueError, match=f"{bound} .* of audits of unseen text would be above this limit"
        ):
            require_possible(parse_bounds(bound), 24, 24)
    require_possible(parse_bounds("auc=0.7,excess=1,auc.upper=0.6,recited=0"), 24, 24)
    with pytest.raises(ValueError, match="the test would not notice it if all targets"):
        require_possible(parse_bounds("recited=0"), 1, 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lms",
        "recited.upper=1",
        "recall=3",
        "extraction=0.1",
        "extraction@2=0.1",
        "lms=many",
        "lms=nan",
        "lms=1_0",
        "lms=٣",
        "extraction@0.5:0=0.1",
    ],
)
def test_wrong_limits_are_refused(text):
    with pytest.raises(ValueError, match=f"'{text}': write MEASURE=LIMIT"):
        parse_bounds(text)


@pytest.mark.parametrize(
    "text",
    [
        "extraction@.0=0.1",
        "extraction@9e-0=0.1",
        "extraction@1e-400=0.1",
        "verbatim=5",
        "auc=2",
        "verbatim.upper=1",
    ],
)
def test_limits_that_nothing_can_be_above_are_refused(text):
    with pytest.raises(ValueError, match=f"'{text}': (a probability|nothing can be above it)"):
        parse_bounds(text)


def test_the_summary_has_the_documented_schema_and_no_text():
    made = summary("lms=1,auc=0.99", nlls={0: {8: 0.1}})
    jsonschema.validate(made, SCHEMA, format_checker=jsonschema.FormatChecker())
    assert not [text for text in ("w100 w101", "prompt of") if text in json.dumps(made)]
    assert made["recites_targets_more"] is True
    best = {one["id"]: (one["lms"], one["attack"]) for one in made["passages"]}
    assert best["target-2"] == (8, "sampling")
    assert best["target-0"] == (8, "greedy")
    assert [one["kind"] for one in made["passages"]] == ["target"] * len(TARGETS) + [
        "control"
    ] * len(CONTROLS)
    for missing in ("measures", "passed"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(
                {key: value for key, value in made.items() if key != missing}, SCHEMA
            )


def test_attacks_are_compared_by_the_best_prompt_of_a_passage():
    report = audit_report(made_run())
    (table,) = [one for one in report.tables if one.name == "by_attack"]
    rows = {row[0]: row for row in table.rows}
    assert list(rows) == ["greedy", "sampling", "any of these"]
    best = [max(lms, SAMPLED.get(number, 1)) for number, lms in enumerate(TARGETS)]
    assert rows["any of these"][2] == pytest.approx(sum(best) / len(best))
    assert rows["greedy"][2] == pytest.approx(sum(TARGETS) / len(TARGETS))
    assert [row[7] for row in rows.values()] == ["2 of 11", "2 of 11", "3 of 11"]


def test_no_passage_is_shown_in_full_unless_asked_for():
    made = made_run()
    (checkpoint,) = made.checkpoints
    for show in (False, True):
        report = audit_report(made, show_passages=show)
        for written in (html_page(report), markdown(report)):
            text = " ".join(written.split())
            for one, _ in checkpoint.samples:
                if one.verbatim:
                    assert (one.reference_text in text) == show
        assert ("Passages are shown in full" in markdown(report)) == show
        assert "Method and limits" in markdown(report)
