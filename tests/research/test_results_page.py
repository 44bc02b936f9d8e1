"""The tables of docs/results.md and of other pages follow from their records."""

import json
import math
import re
import statistics
from itertools import chain, product, repeat

import numpy as np
import pytest
import results_page
from scipy import stats

from tfidf_tune.compare import comparison_report, run_table
from tfidf_tune.results import read_results
from tfidf_tune.results.membership_table import membership_table
from tfidf_tune.results.wording import AT_CHANCE, STILL_DETECTABLE

# Tables that have columns of membership.
OF_MEMBERSHIP = ("summary", "likelihoods", "recitation", "exposures")
QUOTED = {
    ("exact", "CE exact dedup, equal epochs"),
    *product(("exact", "fuzzy 10%"), ("TF-IDF", "Goldfish", "Repetition", "CE MinHash 0.11")),
}
PAGE = "\n".join(
    file.read_text(encoding="utf-8") for file in (results_page.EVIDENCE, results_page.ALL_TABLES)
)
README = (results_page.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")


def records_of(file):
    """A row for each checkpoint of a results file."""
    return list(run_table(results_page._read(results_page.RESULTS / file)).itertuples())


@pytest.fixture(autouse=True, scope="module")
def few_rows_of_membership():
    """Each row takes a third of a second: those that sentences quote, and CE in every setting."""

    def some(scores, groups, footnotes):
        chosen = [
            (labels, own)
            for labels, own in groups
            if (labels["Model"], labels["Objective"]) in QUOTED
        ]
        chosen += [(labels, own) for labels, own in groups if labels["Objective"] == "CE"]
        return membership_table(scores, chosen, footnotes)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(results_page, "membership_table", some)
        yield


def test_the_tables_of_the_pages_are_those_of_the_records():
    """In one test: what the pages share is computed once."""
    files = set()
    for page, folder in results_page.PAGES.items():
        text = page.read_text(encoding="utf-8")
        tables = results_page._BLOCK.findall(text)
        assert text.count("<!-- table: ") == text.count("<!-- end -->") == len(tables) > 0
        for begin, name, file, shown, end in tables:
            made = results_page.filled(begin + end, folder)
            if name in OF_MEMBERSHIP:
                lines = iter(_cells(shown))
                missing = [
                    own for own in _cells(made) if not any(map(_is_part, repeat(own), lines))
                ]
                assert missing == [], (page, name)
            else:
                assert made == begin + shown + end, (page, name)
            files |= {file} if folder == results_page.RESULTS else set()
    assert {file.name for file in results_page.RESULTS.glob("*.jsonl")} == files


def _is_part(some, line):
    """Whether cells are those of a line, where they are not empty."""
    return len(some) == len(line) and all(
        own in ("", cell) for own, cell in zip(some, line, strict=True)
    )


def arms(model, num_seeds=5):
    """Objective -> its records in a setting of the experiment evidence, one for each seed."""
    found = {}
    for one in records_of("evidence.jsonl"):
        if one.model == model:
            found.setdefault(one.objective, []).append(one)
    assert {tuple(sorted(run.seed for run in own)) for own in found.values()} == {
        tuple(range(num_seeds))
    }
    return found


def perplexity(own):
    return math.exp(statistics.mean(one.log_perplexity for one in own))


def test_what_readme_says_of_the_earlier_experiment_follows_from_its_records():
    exact = arms("exact")
    fuzzy = arms("fuzzy 10%")
    said = " ".join(README.split())

    def both(objective):
        """LMS and perplexity, exact and fuzzy."""
        values = [statistics.mean(one.lms for one in of[objective]) for of in (exact, fuzzy)]
        values += [perplexity(of[objective]) for of in (exact, fuzzy)]
        return [f"{value:.1f}" for value in values]

    assert (
        "plain cross-entropy recites {} tokens (exact) and {} (10 % of the tokens of each copy "
        "differ), at perplexities of {} and {}".format(*both("CE"))
        in said
    )
    *recited, cost, cost_of_fuzzy = both("Repetition")
    assert cost == cost_of_fuzzy
    assert f"repetition weights {recited[0]} and {recited[1]} at {cost}," in said
    assert "near copies removed {} and {} at {} and {}".format(*both("CE MinHash dedup")) in said
    assert "are alike removed {} and {} at {} and {}".format(*both("CE MinHash 0.11")) in said
    assert "TF-IDF {} and {} at {} and {}".format(*both("TF-IDF")) in said
    chance = statistics.mean(one.control_lms for one in chain.from_iterable(exact.values()))
    assert f"unseen passages {chance:.1f}" in said
    once = arms("once")
    without = " ".join(PAGE.split()).partition("ext without copies**")[2][:200]
    for name in ("CE", "Repetition", "TF-IDF"):
        assert f"{perplexity(once[name]):.1f}" in without


def test_the_sentences_of_the_first_screen_follow_from_the_records():
    exact = arms("exact")
    fuzzy = arms("fuzzy 10%")
    said = " ".join(PAGE.split("## How it was measured")[0].split())

    def above(own):
        return statistics.mean(one.lms - one.control_lms for one in own)

    scores = results_page._read(results_page.RESULTS / "evidence.jsonl").scores
    membership = results_page._membership(results_page.RESULTS / "evidence.jsonl").set_index(
        ["Model", "Objective"]
    )

    def shown(own, *attacks):
        """The AUC of the strongest of these attacks, with its interval."""
        row = membership.loc[own[0].model, own[0].objective]
        name = max(attacks, key=row.get)
        return f"{row[name]:.2f} ({row[name + ' from']:.2f} to {row[name + ' to']:.2f})"

    def auc(own):
        return shown(own, "AUC").split(" ")[0]

    def strongest(own):
        return shown(own, "AUC", "AUC zlib", "AUC Min-K%", "AUC Min-K%++", "AUC Loss against start")

    def between(one, other):
        """Percent by which the perplexity is higher, with the t-interval over seeds."""
        pairs = zip(*(sorted(own, key=lambda run: run.seed) for own in (one, other)), strict=True)
        logs = [a.log_perplexity - b.log_perplexity for a, b in pairs]
        mean, low, high = (
            100 * math.expm1(value) for value in (statistics.fmean(logs), *_ends(logs))
        )
        form = ".0f" if round(mean) > 4 else ".1f"
        return f"{mean:{form}} % ({low:{form}} to {high:{form}})"

    usual = "CE MinHash dedup"
    tuned = "CE MinHash 0.11"
    ours = "Repetition"
    noisy = arms("fuzzy 20%")
    framed = arms("boilerplate")
    once = arms("once")
    answers = arms("repeated answers")
    for of in (exact, fuzzy):
        assert abs(above(of[tuned])) < 0.5
        best = min(perplexity(own) for own in of.values())
        assert best <= perplexity(of[tuned]) < 1.002 * best
    assert (
        f": {perplexity(exact[tuned]):.1f} where copies are exact, {perplexity(fuzzy[tuned]):.1f} "
        "where 10 %" in said
    )
    assert f"and CE recites {above(fuzzy[usual]):.1f} tokens above chance" in said
    both = [_interval(_other_nlls(scores, answers[name]), math.exp) for name in (tuned, usual)]
    assert "(perplexity {} instead of {})".format(*both) in said
    assert f"chance in both settings (fuzzy: {above(fuzzy[ours]):.1f}, 95 %" in said
    assert f"at a perplexity of {perplexity(exact[ours]):.1f}. If 20 %" in said
    assert f"{perplexity(exact[ours]):.1f}" == f"{perplexity(fuzzy[ours]):.1f}"
    least = f"{above(noisy[ours]):.1f} tokens, at a perplexity of {perplexity(noisy[ours]):.1f}"
    assert f"recite less than the others, but above chance: {least}" in said
    assert above(noisy[ours]) == min(above(own) for own in noisy.values())
    recited = above(noisy[tuned])
    cost = perplexity(noisy[tuned])
    assert f"CE then recites {recited:.1f} tokens above chance, at {cost:.1f}." in said
    both = [auc(of[name]) for name, of in product((ours, tuned), (exact, fuzzy))]
    assert (
        "AUC of {} (exact) and {} (fuzzy) under repetition weights, {} and {} under CE on".format(
            *both
        )
        in said
    )
    detected = product((exact, fuzzy), ("CE", "Goldfish", "TF-IDF"))
    assert {auc(of[name]) for of, name in detected} == {"1.00"}
    assert "and 1.00 under CE, Goldfish and TF-IDF." in said
    most = [strongest(of[ours]) for of in (exact, fuzzy)]
    assert (
        "has {} and {} under repetition weights, 1.00 and 1.00 under CE at 0.11.".format(*most)
        in said
    )
    assert [strongest(of[tuned]).split(" ")[0] for of in (exact, fuzzy)] == ["1.00", "1.00"]
    single = exact["CE exact dedup, equal epochs"]
    assert (
        f"once, the loss has {shown(single, 'AUC')} and the strongest attack {strongest(single)}."
        in said
    )
    assert (
        f"a perplexity {between(exact[ours], exact[tuned])} above CE's on text deduplicated at 0.11"
        in said
    )
    assert f"; {between(once[ours], once['CE'])} above CE's without copies" in said
    costs = [
        _interval([one.log_perplexity for one in framed[name]], math.exp) for name in (ours, usual)
    ]
    assert "perplexity is {}, and {} under CE on deduplicated text".format(*costs) in said
    assert (
        f"recites {above(exact['TF-IDF']):.1f} tokens above chance instead of "
        f"{above(exact['CE']):.1f}" in said
    )
    assert f"at a perplexity {between(exact['TF-IDF'], exact['CE'])} above CE's" in said
    lower = exact["CE lower lr"]
    assert f"recites {above(lower):.1f}, at {between(lower, exact['CE'])}" in said


def test_the_figures_of_the_demo_in_readme_and_quick_start_are_those_of_its_record():
    (file,) = (results_page.PAGE.parents[1] / "research" / "benchmarks" / "results").glob(
        "*_demo/results.jsonl"
    )
    verdict = comparison_report(read_results(file)).verdict
    lms, higher, lower = (
        round(float(x)) for x in re.findall(r"([\d.]+) % (?:less|higher|lower)", verdict)
    )
    said = " ".join(README.split())
    assert f"it recites {lms} % less, and its perplexity is {higher} % higher." in said
    assert (
        f"recite no more than text that was never seen, and their perplexity is {lower} % lower"
        in said
    )
    assert f"Repetition {AT_CHANCE}{STILL_DETECTABLE}" in verdict
    quoted = re.search(
        r"^> .*(?:\n> .*)*", (results_page.PAGE.parent / "quickstart.md").read_text(), re.MULTILINE
    )[0]
    assert " ".join(quoted.replace("> ", "").split()) == verdict.partition(" Repetition")[0]


def test_the_hours_for_a_trillion_tokens_follow_from_the_record():
    (page,) = (page for page in results_page.PAGES if page.name == "data.md")
    text = page.read_text(encoding="utf-8")
    file = results_page.PAGES[page] / re.search(r"<!-- table: scale (\S+) -->", text)[1]
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    largest = {one["way"].split(", ")[1]: one for one in runs if one["tokens"] > 5e7}
    hours = {
        way: 1e12 / (one["tokens"] / one["cpu_seconds"]) / 3600 for way, one in largest.items()
    }
    text = " ".join(text.split())
    assert (
        f"{hours['minhash']:,.0f} hours of one core by MinHash, {hours['exact']:,.0f} for exact"
        in text
    )
    assert (
        f"{hours['duplicates']:,.0f} hours for duplicates, {hours['near-duplicates']:,.0f} for "
        "near-d" in text
    )
    assert max(one["peak_bytes"] for one in runs) < 2**30


def test_what_is_said_of_the_paper_follows_from_the_records():
    # with what CE recites; all in percent
    reductions = []
    costs = []
    for block in re.findall(r"<!-- table: paper \S+ -->\n(.*?)<!-- end -->", PAGE, re.DOTALL):
        for _, _, recited, ours, _, _, cost in _cells(block)[1:]:
            reductions.append((float(recited), 100 * (1 - float(ours) / float(recited))))
            costs.append(float(cost.split(" ")[0]))
    much, some, rest = (
        sorted(share for recited, share in reductions if low <= recited < high)
        for low, high in ((20, 128), (7, 11), (0, 7))
    )
    assert len(much) + len(some) + len(rest) == len(reductions)
    assert f"by {much[0]:.0f} to {much[-1]:.0f} % wherever CE recites more than 20 tokens" in PAGE
    least = (
        f"by {some[0]:.0f} to {some[-1]:.0f} % where it recites 7 to 11, otherwise by at most "
        f"{rest[-1]:.0f} %"
    )
    assert least in PAGE
    assert f"| {min(costs):.1f} to {max(costs):.0f} % higher at every learning rate" in PAGE


def _cells(text):
    """Of each line of a table, its head included."""
    lines = [
        line for line in text.splitlines() if line.startswith("|") and not set(line) <= set("|-: ")
    ]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def _other_nlls(scores, own):
    """The loss on other text of each run, over its tokens."""
    rows = scores[
        (scores["metric"] == "other_nll") & scores["checkpoint"].isin([one.Index for one in own])
    ]
    return [
        np.average(of["value"], weights=of["count"])
        for _, of in rows.groupby("checkpoint", sort=False)
    ]


def _interval(values, scale=float, form="{:.1f}"):
    mean = form.format(scale(statistics.fmean(values)))
    if len(values) == 1:
        return mean
    low, high = _ends(values)
    return f"{mean} ({form.format(scale(low))} to {form.format(scale(high))})"


def _ends(values):
    """Of the t-interval, by its textbook formula: scipy's own test warns where values are nearly
    equal.
    """
    half = (
        float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    )
    return statistics.fmean(values) - half, statistics.fmean(values) + half


@pytest.mark.parametrize("text", [README, PAGE], ids=["README", "results"])
def test_what_is_said_of_the_pretrained_model_is_in_its_table(text):
    page = (results_page.RESULTS / "smollm2.md").read_text(encoding="utf-8")
    table = page.partition("**LoRA exact**")[2].partition("**full exact**")[0]
    rows = {cells[0]: cells for cells in _cells(table)}
    said = " ".join(text.split())
    for objective in ("CE", "TF-IDF", "Goldfish", "CE MinHash dedup", "Repetition"):
        _, _, lms, _, _, perplexity_there, *_ = rows[objective]
        assert lms in said
        assert f"{float(perplexity_there):.1f}" in said
