"""The verdict of every kind of report against numbers computed from the scores by other means, and its caveats."""

import itertools
import re

import lxml.html
import numpy as np
import pytest
from frontier_fakes import grown_records, record, results_of, seeds
from run_fakes import BlockScore, answers, evaluation, results, run, sample, targets
from scipy import stats

from tfidf_tune.report import audit_report, comparison_report, frontier_report, html_page, markdown, terminal_text

FLOOR = r"the floor \((?:at most|by) \d+\.\d\d(?: to \d+\.\d\d)? tokens(?: above it)?, 95 %\)"


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
    rng, values = np.random.default_rng(7), []
    for _ in range(4000):
        index = rng.integers(0, len(arrays[0]), len(arrays[0]))
        values.append(statistic(*(one[index if paired else rng.integers(0, len(one), len(one))] for one in arrays)))
    return np.percentile(values, [2.5, 97.5])


def relative(ours, theirs):
    return 100 * (ours.mean() - theirs.mean()) / theirs.mean()


def relative_perplexity(ours, theirs):
    return 100 * np.expm1(ours.mean() - theirs.mean())


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
            rf"{prefix}(?<![-\w]){objective} (?:recites|is not).*?(?=\.(?:\[| |$))(?!\.\d)", sentences
        )[:1]
        ours, theirs = (by_passage(source, model, one) for one in (objective, "CE"))
        change = relative(ours, theirs) if theirs.any() else 0.0
        if len(ours) < 10:
            few = f"Too few passages ({len(ours)}; it takes 10) to judge whether "
            assert made.verdict.startswith(f"{few}{objective} recites less or more than CE, at a ")
            assert "% less" not in made.verdict
        elif theirs.any():
            low, high = percentiles(relative, ours, theirs, paired=True)
            assert ("is not shown to recite less or more" in sentence) == (low <= 0 <= high)
            text = re.search(r"95 % interval (-?[\d.]+) % to (-?[\d.]+) %", sentence)
            ends = sorted((-1 if change < 0 and high < 0 else 1) * end for end in (low, high))
            assert [float(end) for end in text.groups()] == pytest.approx(ends, abs=2)
        if "is not shown to recite" not in sentence and len(ours) >= 10:
            verb = f"recites {abs(change):.1f} % {'less' if change < 0 else 'more'} than CE"
            assert (verb if theirs.any() else "is not compared with CE: the baseline is 0") in sentence
        nll = [by_passage(source, model, one, "block", "nll") for one in (objective, "CE")]
        if not len(nll[0]):
            word = (
                "an equal F1 of answers" if "utility" in name else "perplexity was not measured for both, so the cost"
            )
            assert word in sentence or "F1 of answers that is not shown to differ" in sentence
        else:
            cost = relative_perplexity(*nll)
            low, high = percentiles(relative_perplexity, *nll, paired=True)
            if low <= 0 <= high:
                assert "at a perplexity that is not shown to differ" in sentence
            else:
                assert f" at a {abs(cost):.1f} % {'higher' if cost > 0 else 'lower'} perplexity (" in sentence
        samples = [by_passage(source, model, objective, kind) for kind in ("target", "control")]
        require_right_floor(sentence, samples)
        unknown = (
            f"it cannot be excluded that both recite only the floor ({len(samples[1])} targets or controls; it takes"
        )
        assert (unknown in sentence) == (0 < len(samples[1]) < 10)
        assert ("; the floor is unknown (no controls)" in sentence) == (len(samples[1]) == 0)


def require_right_floor(sentence, samples):
    """Claim the floor where the interval of targets minus controls does not lie above 0, with its upper end."""
    claim = re.search(rf"what it recites (?:cannot be told from|lies below) {FLOOR}", sentence)
    if not len(samples[1]) or min(map(len, samples)) < 10:
        assert claim is None
        return
    low, high = percentiles(lambda first, second: first.mean() - second.mean(), *samples, paired=False)
    assert (claim is not None) == (low <= 0)
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
        "measured for both, so the cost is unknown; it cannot be excluded that both recite only the floor (9 targets "
        "or controls; it takes 10)."
    )
    many = made("CE", "TF-IDF", "IDF", "Goldfish")
    require_good_caveats(many)
    assert many.verdict.startswith(
        "Of 3 comparisons with CE: 3 (TF-IDF, IDF and Goldfish) without a verdict; 3 may recite only the floor (9 "
    )
    few_controls = made("CE", "TF-IDF", number=40).verdict
    assert "it cannot be excluded that both recite only the floor (9 targets or controls; it takes 10)" in few_controls
    assert "Too few" not in few_controls


def test_a_summary_counts_the_sentences_below_it():
    made = comparison_report(results(*COMPARISONS["many"]))
    assert re.match(
        r"Of 3 comparisons with CE: 1 \(TF-IDF\) recites less \(\d\d\.\d %\) at a higher perplexity \(25\.0 %\); 1 "
        r"\(IDF\) recites more \(\d\d\.\d %\) at a higher perplexity \(5\.0 %\); 1 \(Goldfish\) recites less "
        r"\(\d\d\.\d %\) at a lower perplexity \(5\.0 %\); what Goldfish recites cannot be told from the floor \(at ",
        made.verdict,
    )
    unknown = "; the floor is unknown (no controls)"
    assert unknown not in made.verdict
    assert f"{unknown}." in comparison_report(results(*COMPARISONS["many without controls"])).verdict
    mixed = comparison_report(results(*COMPARISONS["many"], *runs_of(controls=None, model="Other"))).verdict
    assert f"{unknown} for 1 of 4." in mixed
    for name, percent in re.findall(r"\((\S+)\) recites \S+ \((\d\d\.\d) %\)", made.verdict):
        assert any(text.startswith(f"{name} recites {percent} % ") for text in made.statements)


def test_the_verdict_at_equal_perplexity_is_part_of_the_first_line():
    def path(objective, points):
        return run(
            objective, [evaluation(at, targets(*[lms] * 12), blocks=noisy_blocks(ppl)) for at, ppl, lms in points]
        )

    ce = path("CE", [(50, 40, 3), (100, 20, 7)])
    for lms, clause in ((8, "; at equal perplexity it recites more than CE, no gain"), (5, ""), (1, "less as well")):
        verdict = comparison_report(results(ce, path("TF-IDF", [(50, 60, 0), (100, 30, lms)]))).verdict
        assert clause in verdict
        assert ("equal perplexity" in verdict) == bool(clause)


@pytest.mark.parametrize("number", [4, 12, 40])
@pytest.mark.parametrize(("mean", "of_controls"), [(9, 2), (2, 2), (2, 9), (9, None)])
def test_the_verdict_of_an_audit_equals_the_scores(number, mean, of_controls):
    source = results(next(runs_of((mean,), objectives=("CE",), controls=of_controls, number=number)))
    made = audit_report(source)
    require_good_caveats(made)
    assert made.lead.startswith("One checkpoint, no interval over seeds: Tiny, CE, seed 0.")
    samples = [by_passage(source, "Tiny", "CE", kind) for kind in ("target", "control")]
    require_right_floor(made.verdict.replace("What runs/CE-0 recites on average", "what it recites"), samples)
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
    "one seed": ([9], [3.0], [5], [3.1]),
    "nothing": ([0.0, 0.0], [3.0, 3.1], [1.0, 2.0], [3.1, 3.2]),
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
    assert ("is not shown to recite" in made.verdict) == (low <= 0 <= high)
    if not low <= 0 <= high:
        assert f"B recites {abs(percent):.1f} % {'less' if percent < 0 else 'more'} than CE" in made.verdict
        assert f"{min(abs(low), abs(high)):.2f} tokens to {max(abs(low), abs(high)):.2f} tokens" in made.verdict
    assert ("perplexity that is not shown to differ" in made.verdict) == (log_ends[0] <= 0 <= log_ends[1])
    excess = stats.ttest_1samp(ours - 1.0, 0).confidence_interval()
    claim = re.search(rf"what it recites (?:cannot be told from|lies below) {FLOOR}", made.verdict)
    assert (claim is not None) == (excess.low <= 0)
    if claim:
        bound = f"at most {excess.high:.2f}" if excess.high >= 0 else f"by {-excess.high:.2f} to {-excess.low:.2f}"
        assert bound in claim[0]


def test_frontiers_of_one_run_one_objective_many_or_a_diverged_one_have_a_verdict():
    one, diverged = record(), record("B", 0.0, log_perplexity=np.inf)
    for records, start in (
        ([one], "Nothing is compared: Tiny, CE recites 4.00 tokens on average at a perplexity of 20.00."),
        (grown_records(("CE",)), "Nothing is compared: Tiny, CE recites"),
        ([diverged], "Nothing is compared."),
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
