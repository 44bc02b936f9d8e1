"""The verdict of every kind of report against numbers computed from the scores by other means, and its caveats."""

import itertools
import re

import lxml.html
import numpy as np
import pytest
from results_fakes import grown_records, record, results_of, seeds
from run_fakes import BlockScore, answers, evaluation, results, run, sample, targets
from scipy import stats

from research.frontier_report import frontier_report
from tfidf_tune.audit import audit_report
from tfidf_tune.compare import comparison_report
from tfidf_tune.report import html_page, markdown, terminal_text

FLOOR = r"the floor \((?:at most|by) \d+\.\d\d(?: to \d+\.\d\d)? tokens(?: above it)?, 95 %\)"


@pytest.fixture(autouse=True)
def no_drawing(monkeypatch):
    """The words of a page do not depend on its figures, which take most of the time."""
    monkeypatch.setattr("tfidf_tune.report._html._svg", lambda figure: {"uri": "", "width": 1, "height": 1})


def drawn(mean, number, *, kind="target", seed=0):
    values = np.random.default_rng([seed, number]).poisson(mean, number)
    return [sample(f"{kind}-{at}", int(value), kind=kind, length=128) for at, value in enumerate(values)]


def noisy_blocks(perplexity, number=40):
    noise = np.random.default_rng(0).normal(0, 0.1, number)
    values = np.log(perplexity) + noise - noise.mean()
    return tuple(BlockScore(at, 10, -10 * float(value)) for at, value in enumerate(values))


def runs_of(lms=(20, 10), perplexity=(20, 25), *, objectives=("CE", "TF-IDF"), number=40, **options):
    """Runs under objectives of these mean LMS and perplexities."""
    progress, model = options.get("progress", (100,)), options.get("model", "Tiny")
    for at, (name, mean) in enumerate(zip(objectives, lms, strict=True)):
        for seed in options.get("seeds", (0,)):
            probed = drawn(mean, number, seed=1 + seed + 10 * at)
            if options.get("controls", 2) is not None:
                probed += drawn(options.get("controls", 2), number, kind="control", seed=99)
            fields = {} if perplexity is None else {"blocks": noisy_blocks(perplexity[at], options.get("blocks", 40))}
            fields |= options.get("fields", {})
            yield run(name, [evaluation(one, probed, **fields) for one in progress], model=model, seed=seed)


COMPARISONS = {
    "less, higher": [*runs_of()],
    "better": [*runs_of(perplexity=(25, 20))],
    "worse": [*runs_of((10, 20))],
    "noise": [*runs_of((10, 10), (20, 20))],
    "equal": [*runs_of((0, 0), (20, 20), controls=0)],
    "floor": [*runs_of((20, 2))],
    "both at the floor": [*runs_of((2, 2))],
    "below the floor": [*runs_of((20, 2), controls=9)],
    "both below the floor": [*runs_of((2, 2), controls=9)],
    "a little": [*runs_of((20, 10), (20, 19.9999))],
    "no controls": [*runs_of(controls=None)],
    "no perplexity": [*runs_of(perplexity=None)],
    "another utility": [*runs_of(perplexity=None, fields={"answers": answers(*[100, 0] * 20)})],
    "three seeds": [*runs_of(seeds=(0, 1, 2))],
    "several checkpoints": [*runs_of(progress=(50, 100))],
    "few passages": [*runs_of(number=12)],
    "too few passages": [*runs_of(number=4)],
    "too few blocks": [*runs_of(blocks=3)],
    "two models": [*runs_of(), *runs_of((20, 2), (20, 21), model="Other")],
    "many without controls": [*runs_of((20, 10, 9, 9), (20,) * 4, objectives=("CE", "A", "B", "C"), controls=None)],
    "many": [*runs_of((20, 10, 30, 2), (20, 25, 21, 19), objectives=("CE", "TF-IDF", "IDF", "Goldfish"))],
}


def by_passage(made, model, objective, kind="target", metric="lms"):
    """Values by unit, averaged over seeds, of the last checkpoints of an objective."""
    scores = made.scores[(made.scores["metric"] == metric) & (made.scores["kind"] == kind)]
    at = [
        number
        for number, one in enumerate(made.checkpoints)
        if (one.model, one.objective, one.progress) == (model, objective, 100)
    ]
    units = sorted(set(scores["unit"]))
    return np.array(
        [scores.loc[scores["checkpoint"].isin(at) & (scores["unit"] == unit), "value"].mean() for unit in units]
    )


def percentiles(statistic, *arrays, paired):
    """The ends of the bootstrap's 95 % interval of a statistic of resampled rows."""
    rng, number = np.random.default_rng(7), 4000
    index = rng.integers(0, len(arrays[0]), (number, len(arrays[0])))
    drawn = [one[index if paired else rng.integers(0, len(one), (number, len(one)))] for one in arrays]
    return np.percentile(statistic(*drawn), [2.5, 97.5])


def relative(ours, theirs):
    return 100 * (ours.mean(-1) - theirs.mean(-1)) / theirs.mean(-1)


def relative_perplexity(ours, theirs):
    return 100 * np.expm1(ours.mean(-1) - theirs.mean(-1))


def plain(text):
    """Markdown without its escapes, on one line."""
    return " ".join(re.sub(r"\\(\W)", r"\1", text).split())


def pages(made):
    """The report as a reader of each format sees it."""
    html = lxml.html.document_fromstring(html_page(made))
    for script in html.xpath("//script|//style"):
        script.getparent().remove(script)
    return [plain(markdown(made)), plain(terminal_text(made)), " ".join(html.text_content().split())]


def require_good_caveats(made):
    assert made.verdict
    for page in pages(made):
        assert made.verdict in page
        assert page.index(made.verdict) < page.index(made.lead)
        # No claim about the floor without a bound; "the floor" by itself is a definition.
        claims = re.findall(r"(?:at|near|from|below|above|to|reaches) the floor.{60}", page)
        assert all(re.search(FLOOR, claim) for claim in claims)
        assert not re.search(r"\b(\d+(?:\.\d+)?(?: %)?) to \1(?![\d.])", page)  # a range with equal ends
        for number, footnote in enumerate(made.footnotes, 1):
            assert page.count(footnote) == 1
            assert page.count(f"[{number}]") >= 1
        assert f"[{len(made.footnotes) + 1}]" not in page
    sentences = [one for text in made.footnotes for one in re.split(r"(?<=\.) ", text)]
    assert len(sentences) == len(set(sentences))


@pytest.mark.parametrize("name", COMPARISONS)
def test_the_verdict_of_a_comparison_equals_the_scores(name):
    source = results(*COMPARISONS[name])
    made = comparison_report(source)
    require_good_caveats(made)
    sentences = " ".join(made.statements) if made.verdict.startswith("Of 3") else made.verdict
    pairs = dict.fromkeys((one.model, one.objective) for one in source.checkpoints if one.objective != "CE")
    for model, objective in pairs:
        prefix = f"{model}: " if len({one for one, _ in pairs}) > 1 else ""
        (sentence,) = re.findall(
            rf"{prefix}(?<![-\w])(?:{objective} (?:recites|is not)|What {objective} )"
            r".*?(?=\.(?:\[| |$))(?!\.\d)",
            sentences,
        )[:1]
        ours, theirs = (by_passage(source, model, one) for one in (objective, "CE"))
        change = relative(ours, theirs) if theirs.any() else 0.0
        if len(ours) < 10:
            few = f"Too few passages ({len(ours)}; it takes 10) to judge whether "
            assert made.verdict.startswith(f"{few}{objective} recites less or more than CE; {objective} at a ")
            assert "% less" not in made.verdict
        elif sentence.startswith(f"{prefix}What"):
            assert " % less" not in sentence
            assert " % more" not in sentence
        elif theirs.any():
            low, high = percentiles(relative, ours, theirs, paired=True)
            assert ("is not shown to recite less or more" in sentence) == (low <= 0 <= high)
            text = re.search(r"95 % interval (-?[\d.]+) % to (-?[\d.]+) %", sentence)
            ends = sorted((-1 if change < 0 and high < 0 else 1) * end for end in (low, high))
            assert [float(end) for end in text.groups()] == pytest.approx(ends, abs=2)
        if re.match(rf"{prefix}{objective} (?!is not shown)", sentence) and len(ours) >= 10:
            verb = f"recites {abs(change):.1f} % {'less' if change < 0 else 'more'} than CE"
            assert (verb if theirs.any() else "is not compared with CE: the baseline is 0") in sentence
        nll = [by_passage(source, model, one, "block", "nll") for one in (objective, "CE")]
        if not len(nll[0]):
            unknown = "perplexity was not measured for both, so the cost"
            assert ("F1 of answers that is not shown to differ" if "utility" in name else unknown) in sentence
        else:
            cost = relative_perplexity(*nll)
            low, high = percentiles(relative_perplexity, *nll, paired=True)
            if max(abs(end) for end in (low, high)) < 0.05:
                little = "at a less than 0.1 % lower perplexity (equal for all blocks"
                none = "at a perplexity that is not shown to differ (+0.0 %, equal for all blocks"
                assert (little if name == "a little" else none) in sentence
            elif low <= 0 <= high:
                assert "at a perplexity that is not shown to differ" in sentence
            else:
                assert f" at a {abs(cost):.1f} % {'higher' if cost > 0 else 'lower'} perplexity (" in sentence
        samples, of_baseline = (
            [by_passage(source, model, one, kind) for kind in ("target", "control")] for one in (objective, "CE")
        )
        require_right_floor(sentence, samples, of_baseline, objective)
        number = len(samples[1])
        few = f"; the floor is unknown ({number} targets or controls; it takes 10)"
        assert (few in sentence) == (0 < number < 10)
        assert ("; the floor is unknown (no controls)" in sentence) == (number == 0)


def excess(samples):
    return percentiles(lambda first, second: first.mean(-1) - second.mean(-1), *samples, paired=False)


def require_right_floor(sentence, samples, of_baseline=None, objective=r"\S+"):
    """Claim the floor where the interval of targets minus controls does not lie above 0, with its upper end.

    If both are there, the sentence begins with it.
    """
    claim = re.search(
        rf"[Ww]hat {objective} recites(?: on average)? (?:cannot be told from|lies below) {FLOOR}", sentence
    )
    if not len(samples[1]) or min(map(len, samples)) < 10:
        assert claim is None
        return
    low, high = excess(samples)
    assert (claim is not None) == (low <= 0)
    if of_baseline:
        assert bool(re.match(rf"(?:\S+: )?What {objective}", sentence)) == (low <= 0 and excess(of_baseline)[0] <= 0)
    if claim:
        stated = [float(end) for end in re.findall(r"\d+\.\d\d", claim[0])]
        assert stated == pytest.approx([high] if high >= 0 else [-high, -low], abs=0.15)


def test_nothing_is_claimed_from_nine_passages_even_without_an_interval():
    """The floor alone, where most passages have an LMS of 0."""
    floor = [sample(f"control-{at}", int(at < 3), kind="control") for at in range(9)]

    def made(*objectives, number=9):
        lms = {"CE": [1, 1, *[0] * (number - 2)]}
        probed = {name: [*targets(*lms.get(name, [1] * number)), *floor] for name in objectives}
        return comparison_report(results(*(run(name, [evaluation(100, own)]) for name, own in probed.items())))

    two = made("CE", "TF-IDF")
    require_good_caveats(two)
    assert two.verdict.startswith(
        "Too few passages (9; it takes 10) to judge whether TF-IDF recites less or more than CE; perplexity was not "
        "measured for both, so the cost is unknown; the floor is unknown (9 targets or controls; it takes 10)."
    )
    many = made("CE", "TF-IDF", "IDF", "Goldfish")
    require_good_caveats(many)
    assert many.verdict.startswith(
        "Of 3 comparisons with CE: without a verdict: TF-IDF, IDF and Goldfish; the floor is unknown for 3 of 3 (9 "
    )
    few_controls = made("CE", "TF-IDF", number=40).verdict
    assert "; the floor is unknown (9 targets or controls; it takes 10)" in few_controls
    assert "Too few" not in few_controls


def test_a_summary_counts_the_sentences_below_it():
    made = comparison_report(results(*COMPARISONS["many"]))
    assert re.match(
        r"Of 3 comparisons with CE: recites less, perplexity higher: TF-IDF \(LMS -\d\d\.\d %, perplexity \+25\.0 %\); "
        r"recites more, perplexity higher: IDF \(LMS \+\d\d\.\d %, perplexity \+5\.0 %\); "
        r"recites less, perplexity lower: Goldfish \(LMS -\d\d\.\d %, perplexity -5\.0 %\); "
        r"what Goldfish recites cannot be told from the floor \(at ",
        made.verdict,
    )
    assert "the floor is unknown" not in made.verdict
    assert "; the floor is unknown for 3 of 3 (no controls)." in (
        comparison_report(results(*COMPARISONS["many without controls"])).verdict
    )
    mixed = comparison_report(results(*COMPARISONS["many"], *runs_of(controls=None, model="Other"))).verdict
    assert "; the floor is unknown for 1 of 4 (no controls)." in mixed
    for name, sign, percent in re.findall(r"(\S+) \(LMS ([-+])(\d\d\.\d) %", made.verdict):
        verb = f"recites {percent} % {'less' if sign == '-' else 'more'} than CE"
        assert any(text.startswith(f"{name} {verb}") for text in made.statements)


@pytest.mark.parametrize("lms", [(20, 2, 2, 2), (2, 2, 2, 9)])
def test_a_summary_has_the_highest_bound_of_all_that_cannot_be_told_from_the_floor(lms):
    source = results(*runs_of(lms, (20,) * 4, objectives=("CE", "TF-IDF", "IDF", "Goldfish")))
    made = comparison_report(source).verdict
    highs = {
        objective: high
        for objective in ("CE", "TF-IDF", "IDF", "Goldfish")
        for low, high in [excess([by_passage(source, "Tiny", objective, kind) for kind in ("target", "control")])]
        if low <= 0
    }
    assert max(highs.values()) - min(highs.values()) > 0.3
    names, bound = re.search(r"; what (.*) recite cannot be told from the floor \(at most (\d\.\d\d)", made).groups()
    assert sorted(re.split(", | and ", names)) == sorted(highs)
    assert float(bound) == pytest.approx(max(highs.values()), abs=0.1)
    if "CE" in highs:  # the difference of two floors counts as none
        assert re.match(
            r"Of 3 comparisons with CE: not above the floor: TF-IDF .* and IDF .*; recites more, .*: Gold", made
        )


def test_the_verdict_at_equal_perplexity_is_part_of_the_first_line():
    def path(objective, points, noise=(0,)):
        return run(
            objective,
            [
                evaluation(at, targets(*[lms + more for more in noise] * (12 // len(noise))), blocks=noisy_blocks(ppl))
                for at, ppl, lms in points
            ],
        )

    # The baseline's LMS at 50 and 100 % of training, the other's; what the verdict says of equal perplexity.
    cases = (
        (3, 7, 5, ""),
        (3, 7, 1, "; at equal perplexity it recites less as well"),
        (3, 5, 4, ""),
        (1, 5, 4, ""),
        (1, 2, 4, "; at equal perplexity it recites more as well"),
        (7, 6, 5, "; at equal perplexity it recites less as well"),
    )
    for before, after, lms, clause in cases:
        ce, other = path("CE", [(50, 40, before), (100, 20, after)]), path("TF-IDF", [(50, 60, 0), (100, 30, lms)])
        assert re.findall("[;,][^;,]*equal perplexity[^;.]*", comparison_report(results(ce, other)).verdict) == (
            [clause] if clause else []
        )
    # With the perplexity of the baseline's first checkpoint, only that one counts.
    for before, after, lms, noise, clause in (
        (7, 2, 5, (0,), ", but less at equal perplexity"),
        (2, 7, 5, (0,), "; at equal perplexity it recites more than CE, no gain"),
        (7, 5, 5, (0, 1, -1), ""),
        (2, 5, 5, (0, 1, -1), ""),
    ):
        ce = path("CE", [(50, 40, before), (100, 20, after)])
        verdict = comparison_report(results(ce, path("TF-IDF", [(50, 60, 1), (100, 40, lms)], noise))).verdict
        assert ("is not shown to recite less or more" in verdict) == (len(noise) > 1)
        assert re.findall("[;,][^;,]*equal perplexity[^;.]*", verdict) == ([clause] if clause else [])


def test_recitation_and_cost_are_of_one_checkpoint():
    def path(objective, *points):
        return run(
            objective,
            [
                evaluation(at, targets(*[lms] * 12) if lms else [], blocks=noisy_blocks(ppl) if ppl else ())
                for at, lms, ppl in points
            ],
        )

    # Perplexity at 50 % only, at none that has both, and later than the LMS.
    early = comparison_report(results(path("CE", (50, 6, 20), (100, 7, 0)), path("TF-IDF", (50, 3, 20), (100, 2, 0))))
    never = comparison_report(results(path("CE", (50, 0, 20), (100, 7, 0)), path("TF-IDF", (50, 0, 25), (100, 2, 0))))
    for made in (early, never):
        assert re.match(
            r"TF-IDF recites 71\.4 % less than CE \(equal for all passages\[\d\]\); perplexity was not measured for "
            r"all runs at 100 % of training, so the cost is unknown; the floor is unknown \(no controls\)\.",
            made.verdict,
        )
    assert early.statements == never.statements == []
    tables = {one.name: one for one in early.tables}
    expected = ("Tiny", "TF-IDF", pytest.approx(20.0), "50", 6.0, 6.0, 6.0, 3.0, "less", 50)
    assert tables["equal_perplexity"].rows == [expected]
    assert "equal_perplexity" not in {one.name for one in never.tables}
    late = comparison_report(results(path("CE", (50, 6, 20), (100, 0, 10)), path("TF-IDF", (50, 3, 25), (100, 0, 10))))
    assert re.match(
        r"TF-IDF recites 50\.0 % less than CE \(equal for all passages, at 50 % of training\[\d\]\) at a 25\.0 % "
        r"higher perplexity \(equal for all blocks, at 50 % of training\); the floor is unknown",
        late.verdict,
    )
    (equal,) = (one for one in late.tables if one.name == "equal_perplexity")
    assert equal.rows == [("Tiny", "TF-IDF", pytest.approx(25.0), 3.0, 50)]
    assert "CE has 20.00." in equal.notes[-1]


def test_a_model_without_a_run_to_compare_with_is_named():
    others = [*runs_of(objectives=("TF-IDF", "IDF"), model="B")], [*runs_of((9,), (20,), objectives=("CE",), model="C")]
    made = comparison_report(results(*COMPARISONS["less, higher"], *itertools.chain(*others)))
    require_good_caveats(made)
    assert made.verdict.endswith("] Not compared: B (only TF-IDF and IDF) and C (only CE).")
    grown = [*grown_records(), *grown_records(("B",), model="Other")]
    made = frontier_report(results_of(grown))
    assert made.verdict.endswith(" Not compared: Other (only B).")


@pytest.mark.parametrize("number", [4, 12, 40])
@pytest.mark.parametrize(("mean", "of_controls"), [(9, 2), (2, 2), (2, 9), (9, None)])
def test_the_verdict_of_an_audit_equals_the_scores(number, mean, of_controls):
    source = results(next(runs_of((mean,), objectives=("CE",), controls=of_controls, number=number)))
    made = audit_report(source)
    require_good_caveats(made)
    assert made.lead.startswith("One checkpoint, no interval over seeds: Tiny, CE, seed 0.")
    samples = [by_passage(source, "Tiny", "CE", kind) for kind in ("target", "control")]
    require_right_floor(made.verdict, samples)
    if of_controls is None or number < 10:
        assert f"recites {samples[0].mean():.2f} tokens of a target" in made.verdict
    elif mean > of_controls:
        assert f"recites {samples[0].mean() - samples[1].mean():.2f} tokens more of a target" in made.verdict


FRONTIERS = {
    "better": ([10, 11, 12], [3.0, 3.1, 3.2], [4, 5.1, 6], [2.98, 3.08, 3.181]),
    "worse": ([4, 5.1, 6], [2.98, 3.08, 3.181], [10, 11, 12], [3.0, 3.1, 3.2]),
    "unclear": ([9, 11, 12], [3.0, 3.1, 3.2], [12, 9, 11], [3.1, 3.0, 3.25]),
    "equal": ([9, 11], [3.0, 3.1], [9, 11], [3.0, 3.1]),
    "floor": ([9, 11, 12], [3.0, 3.1, 3.2], [1.2, 0.9, 1.1], [3.1, 3.2, 3.3]),
    "below": ([9, 11, 12], [3.0, 3.1, 3.2], [0.2, 0.1, 0.3], [3.1, 3.2, 3.3]),
    "both at the floor": ([1.3, 0.8, 1.1], [3.0, 3.1, 3.2], [1.1, 0.9, 1.0], [3.1, 3.2, 3.3]),
    "one seed": ([9], [3.0], [5], [3.1]),
    "nothing": ([0.0, 0.0], [3.0, 3.1], [9.0, 9.1], [3.1, 3.2]),
}


@pytest.mark.parametrize("name", FRONTIERS)
def test_the_verdict_of_a_frontier_equals_the_paired_t_test(name):
    ce, ce_log, ours, ours_log = map(np.array, FRONTIERS[name])
    made = frontier_report(results_of([*seeds("CE", ce, ce_log), *seeds("B", ours, ours_log)]))
    require_good_caveats(made)
    percent = 100 * (ours.mean() - ce.mean()) / ce.mean() if ce.any() else None
    if percent is None:
        assert made.verdict.startswith("B is not compared with CE: the baseline recites nothing")
        return
    if len(ce) == 1:
        assert f"recites {-percent:.1f} % less than CE (no interval: 1 pair of seeds)" in made.verdict
        assert "one seed, no interval over seeds" in made.lead
        return
    ends = []
    for first, second in ((ours, ce), (ours_log, ce_log)):
        gap = first - second
        equal = np.ptp(gap) == 0
        ends.append((gap[0], gap[0]) if equal else tuple(stats.ttest_rel(first, second).confidence_interval()))
    (low, high), log_ends = ends
    own, of_baseline = (stats.ttest_1samp(one - 1.0, 0).confidence_interval() for one in (ours, ce))
    if own.low <= 0 and of_baseline.low <= 0:
        assert re.match(rf"What B recites .* {FLOOR}; what CE recites .* {FLOOR}; B at", made.verdict)
        assert f"{own.high:.2f} tokens above it" in made.verdict
        assert f"{of_baseline.high:.2f} tokens above it" in made.verdict
        assert "than CE" not in made.verdict
    else:
        assert ("is not shown to recite" in made.verdict) == (low <= 0 <= high)
        claim = re.search(rf"what B recites (?:cannot be told from|lies below) {FLOOR}", made.verdict)
        assert (claim is not None) == (own.low <= 0)
        if claim:
            bound = f"at most {own.high:.2f}" if own.high >= 0 else f"by {-own.high:.2f} to {-own.low:.2f}"
            assert bound in claim[0]
        if not low <= 0 <= high:
            assert f"B recites {abs(percent):.1f} % {'less' if percent < 0 else 'more'} than CE" in made.verdict
            assert f"{min(abs(low), abs(high)):.2f} tokens to {max(abs(low), abs(high)):.2f} tokens" in made.verdict
    equal = log_ends[0] == log_ends[1] == 0
    assert ("perplexity that is not shown to differ" in made.verdict) == (log_ends[0] <= 0 <= log_ends[1])
    assert ("perplexity that is not shown to differ (+0.0 %" in made.verdict) == equal


def test_a_shown_difference_that_rounds_to_0_has_a_direction_and_a_bound():
    """Student's t over seeds; the perplexity of all seeds is 0.03 to 0.05 % higher."""
    ce, ours = np.array([3.0, 3.1, 3.2]), np.array([3.0003, 3.1004, 3.2005])
    made = frontier_report(results_of([*seeds("CE", [9, 11, 12], ce), *seeds("B", [4, 5, 6], ours)]))
    assert " at a less than 0.1 % higher perplexity (95 % interval over 3 seeds 0.02 % to 0.06 %)" in made.verdict


def test_frontiers_of_one_run_one_objective_many_or_a_diverged_one_have_a_verdict():
    one, diverged = record(), record("B", 0.0, log_perplexity=np.inf)
    for records, start in (
        ([one], "Nothing is compared: no model has runs of CE and of another objective (Tiny: CE)"),
        (grown_records(("CE",)), "Nothing is compared: no model"),
        ([diverged], "Nothing is compared: "),
        (grown_records([f"O{at}" for at in range(9)]), "Of 8 comparisons with O0: "),
        (
            [record(control_lms=None), record("B", 2.0, control_lms=None)],
            "B recites 50.0 % less than CE (no ",
        ),
        (list(itertools.chain(*(grown_records(model=model) for model in "AB"))), "Of 4 comparisons with CE: "),
    ):
        made = frontier_report(results_of(records))
        require_good_caveats(made)
        assert made.verdict.startswith(start)
        assert ("; the floor is unknown (no controls)" in made.verdict) == start.startswith("B recites")
