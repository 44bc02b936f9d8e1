"""The tables of docs/results.md and of other pages follow from their records."""

import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
import results_page
from scipy import stats

from research.seeds import over_seeds_and_passages
from tfidf_tune.compare import comparison_report, run_table
from tfidf_tune.results import read_results
from tfidf_tune.results.wording import AT_CHANCE, STILL_DETECTABLE

PAGE = "\n".join(file.read_text(encoding="utf-8") for file in (results_page.PAGE, results_page.ALL_TABLES))
README = (results_page.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
START = "Start"  # the model before it was fine-tuned


def records_of(file):
    """A row for each checkpoint of a results file."""
    return list(run_table(results_page._read(results_page.RESULTS / file)).itertuples())


def lms_of_passages(file):
    """Checkpoint -> the LMS of each target."""
    scores = results_page._read(results_page.RESULTS / file).scores
    targets = scores[(scores["metric"] == "lms") & (scores["kind"] == "target") & (scores["unit"] != "")]
    assert targets.groupby("checkpoint")["count"].nunique().eq(1).all()  # equal weights
    return {number: own.sort_values("unit")["value"].to_numpy() for number, own in targets.groupby("checkpoint")}


FILES = sorted(set(re.findall(r"<!-- table: \w+ (\S+) -->", PAGE)))


def files_of(table):
    return sorted(set(re.findall(rf"<!-- table: {table} (\S+) -->", PAGE)))


def test_the_tables_of_the_pages_are_those_of_the_records():
    """In one test: what the pages share is computed once."""
    for page, folder in results_page.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
        assert results_page.filled(text, folder) == text, page
    assert sorted(file.name for file in results_page.RESULTS.glob("*.jsonl")) == FILES


def arms(model, num_seeds=5):
    """Objective -> its records in a setting of the experiment evidence, one for each seed."""
    found = {}
    for one in records_of("evidence.jsonl"):
        if one.model == model:
            found.setdefault(one.objective, []).append(one)
    assert {tuple(sorted(run.seed for run in own)) for own in found.values()} == {tuple(range(num_seeds))}
    return found


def perplexity(own):
    return math.exp(statistics.mean(one.log_perplexity for one in own))


def test_the_table_of_needs_in_the_readme_follows_from_the_records():
    section = README.split("## Which objective for which need")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+\| `(\w+)`([^|]*)\|(.*)\|$", section, re.MULTILINE)
    names = {"CrossEntropyLoss": "CE", "TFIDFCrossEntropyLoss": "TF-IDF"}
    exact, fuzzy = arms("exact"), arms("fuzzy 10%")
    for component, more, cells in rows:
        name = names.get(component, component.removesuffix("Weighting"))
        if "minhash" in more:
            name += " MinHash 0.11" if "0.11" in more else " MinHash dedup"
        expected = [statistics.mean(one.lms for one in of[name]) for of in (exact, fuzzy)]
        expected += [perplexity(of[name]) for of in (exact, fuzzy)]
        assert [cell.strip() for cell in cells.split("|")] == [f"{value:.1f}" for value in expected]
    assert len(rows) == 6
    chance = statistics.mean(one.control_lms for own in exact.values() for one in own)
    said = " ".join(section.split())
    assert f"never saw, {chance:.1f}." in said
    (noisy, framed), stock = map(arms, ("fuzzy 20%", "boilerplate")), arms("repeated answers")
    scores = results_page._read(results_page.RESULTS / "evidence.jsonl").scores
    tuned, usual = (
        math.exp(statistics.fmean(_other_nlls(scores, stock[f"CE MinHash {name}"]))) for name in ("0.11", "dedup")
    )
    assert f"(perplexity {tuned:.1f} instead of {usual:.1f})" in said
    ours, tuned = (
        statistics.mean(one.lms - one.control_lms for one in noisy[name]) for name in ("Repetition", "CE MinHash 0.11")
    )
    assert f"misses the copies ({tuned:.1f} tokens above chance)" in said
    assert f"they recite {ours:.1f} tokens above chance" in said
    costs = [perplexity(framed[name]) for name in ("Repetition", "CE MinHash dedup")]
    assert "(perplexity {:.1f}, on deduplicated text {:.1f})".format(*costs) in said


def test_the_sentences_of_the_first_screen_follow_from_the_records():
    exact, fuzzy = arms("exact"), arms("fuzzy 10%")
    said = " ".join(PAGE.split("## How it was measured")[0].split())

    def above(own):
        return statistics.mean(one.lms - one.control_lms for one in own)

    scores = results_page._read(results_page.RESULTS / "evidence.jsonl").scores
    membership = results_page._membership(results_page.RESULTS / "evidence.jsonl").set_index(["Model", "Objective"])

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
        mean, low, high = (100 * math.expm1(value) for value in (statistics.fmean(logs), *_ends(logs)))
        form = ".0f" if round(mean) > 4 else ".1f"
        return f"{mean:{form}} % ({low:{form}} to {high:{form}})"

    usual, tuned, ours = "CE MinHash dedup", "CE MinHash 0.11", "Repetition"
    noisy, framed, once, answers = arms("fuzzy 20%"), arms("boilerplate"), arms("once"), arms("repeated answers")
    for of in (exact, fuzzy):
        assert abs(above(of[tuned])) < 0.5
        best = min(perplexity(own) for own in of.values())
        assert best <= perplexity(of[tuned]) < 1.002 * best
    assert f": {perplexity(exact[tuned]):.1f} where copies are exact, {perplexity(fuzzy[tuned]):.1f} where 10 %" in said
    assert f"and CE recites {above(fuzzy[usual]):.1f} tokens above chance" in said
    both = [_interval(_other_nlls(scores, answers[name]), math.exp) for name in (tuned, usual)]
    assert "(perplexity {} instead of {})".format(*both) in said
    assert f"chance in both settings (fuzzy: {above(fuzzy[ours]):.1f}, 95 %" in said
    assert f"at a perplexity of {perplexity(exact[ours]):.1f}. If 20 %" in said
    assert f"{perplexity(exact[ours]):.1f}" == f"{perplexity(fuzzy[ours]):.1f}"
    least = f"{above(noisy[ours]):.1f} tokens, at a perplexity of {perplexity(noisy[ours]):.1f}"
    assert f"recite less than the others, but above chance: {least}" in said
    assert above(noisy[ours]) == min(above(own) for own in noisy.values())
    recited, cost = above(noisy[tuned]), perplexity(noisy[tuned])
    assert f"CE then recites {recited:.1f} tokens above chance, at {cost:.1f}." in said
    both = [auc(of[name]) for name in (ours, tuned) for of in (exact, fuzzy)]
    assert "AUC of {} (exact) and {} (fuzzy) under repetition weights, {} and {} under CE on".format(*both) in said
    assert {auc(of[name]) for of in (exact, fuzzy) for name in ("CE", "Goldfish", "TF-IDF")} == {"1.00"}
    assert "and 1.00 under CE, Goldfish and TF-IDF." in said
    most = [strongest(of[ours]) for of in (exact, fuzzy)]
    assert "has {} and {} under repetition weights, 1.00 and 1.00 under CE at 0.11.".format(*most) in said
    assert [strongest(of[tuned]).split(" ")[0] for of in (exact, fuzzy)] == ["1.00", "1.00"]
    single = exact["CE exact dedup, equal epochs"]
    assert f"once, the loss has {shown(single, 'AUC')} and the strongest attack {strongest(single)}." in said
    assert f"a perplexity {between(exact[ours], exact[tuned])} above CE's on text deduplicated at 0.11" in said
    assert f"; {between(once[ours], once['CE'])} above CE's without copies" in said
    costs = [_interval([one.log_perplexity for one in framed[name]], math.exp) for name in (ours, usual)]
    assert "perplexity is {}, and {} under CE on deduplicated text".format(*costs) in said
    assert f"recites {above(exact['TF-IDF']):.1f} tokens above chance instead of {above(exact['CE']):.1f}" in said
    assert f"at a perplexity {between(exact['TF-IDF'], exact['CE'])} above CE's" in said
    lower = exact["CE lower lr"]
    assert f"recites {above(lower):.1f}, at {between(lower, exact['CE'])}" in said


def test_the_figures_of_the_demo_in_readme_and_quick_start_are_those_of_its_record():
    (file,) = (results_page.PAGE.parents[1] / "research" / "benchmarks" / "results").glob("*_demo/results.jsonl")
    verdict = comparison_report(read_results(file)).verdict
    lms, higher, lower = (round(float(x)) for x in re.findall(r"([\d.]+) % (?:less|higher|lower)", verdict))
    said = " ".join(README.split())
    assert f"it recites {lms} % less, and its perplexity is {higher} % higher." in said
    assert f"recite no more than text that was never seen, and their perplexity is {lower} % lower" in said
    assert f"Repetition {AT_CHANCE}{STILL_DETECTABLE}" in verdict
    quoted = re.search(r"^> .*(?:\n> .*)*", (results_page.PAGE.parent / "quickstart.md").read_text(), re.MULTILINE)[0]
    assert " ".join(quoted.replace("> ", "").split()) == verdict.partition(" Repetition")[0]


def test_the_hours_for_a_trillion_tokens_follow_from_the_record():
    (page,) = (page for page in results_page.PAGES if page.name == "data.md")
    text = page.read_text(encoding="utf-8")
    file = results_page.PAGES[page] / re.search(r"<!-- table: scale (\S+) -->", text)[1]
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    largest = {one["way"].split(", ")[1]: one for one in runs if one["tokens"] > 5e7}
    hours = {way: 1e12 / (one["tokens"] / one["cpu_seconds"]) / 3600 for way, one in largest.items()}
    text = " ".join(text.split())
    assert f"{hours['minhash']:,.0f} hours of one core by MinHash, {hours['exact']:,.0f} for exact" in text
    assert f"{hours['duplicates']:,.0f} hours for duplicates, {hours['near-duplicates']:,.0f} for near-d" in text
    assert max(one["peak_bytes"] for one in runs) < 2**30


@pytest.mark.parametrize("file", files_of("operating_points"))
def test_operating_points_and_intervals_follow_from_the_records(file):
    """Computed independently from the records."""
    records = records_of(file)
    models = re.split(r"^\*\*(.+?)\*\* .*$", _block("operating_points", file), flags=re.MULTILINE)[1:]
    assert models[::2] == list(dict.fromkeys(record.model for record in records))
    for model, table in zip(models[::2], models[1::2], strict=True):
        rows = _cells(table)
        for objective, rate, lms, perplexity, *_ in rows[2:]:
            if objective == START:
                (own,) = (one for one in records if (one.model, one.objective) == (model, objective))
                assert [rate, lms, perplexity] == ["", f"{own.lms:.1f}", f"{math.exp(own.log_perplexity):.1f}"]
                continue
            own = [record for record in records if (record.model, record.objective) == (model, objective)]
            by_rate = {rate: [r for r in own if r.learning_rate == rate] for rate in {r.learning_rate for r in own}}
            common = set.intersection(*({r.seed for r in runs} for runs in by_rate.values()))
            assert common
            of_common = {rate: [r.log_perplexity for r in runs if r.seed in common] for rate, runs in by_rate.items()}
            best = min(of_common, key=lambda rate: statistics.fmean(of_common[rate]))
            assert rate.split(" ")[0] == f"{best:g}"
            assert lms == _interval([r.lms for r in by_rate[best]])
            assert perplexity == _interval([r.log_perplexity for r in by_rate[best]], math.exp)
        edges = re.search(
            rf"^Operating points at an end .*{re.escape(model)}: (.*?)(?:;|\.$)", _block("operating_points", file), re.M
        )
        marked = [f"{row[0]} ({end[1]})" for row in rows[2:] if (end := re.search(r"\((lowest|highest)\)", row[1]))]
        assert (edges[1].split(", ") if edges else []) == marked


@pytest.mark.parametrize("file", files_of("paper"))
def test_what_is_said_of_the_paper_follows_from_the_records(file):
    records, passages = records_of(file), lms_of_passages(file)
    rows = _cells(_block("paper", file))[2:]
    assert rows
    reductions, costs = [], []  # with what CE recites; all in percent
    for model, rate, *cells in rows:
        ce, ours = (
            {r.seed: r for r in records if (r.model, r.objective) == (model, name) and f"{r.learning_rate:g}" == rate}
            for name in ("CE", "TF-IDF")
        )
        seeds = ce.keys() & ours.keys()
        recited = [statistics.fmean(of[seed].lms for seed in of) for of in (ce, ours)]
        assert cells[:2] == [f"{value:.2f}" for value in recited]
        if seeds == ce.keys() == ours.keys():
            assert cells[2] == f"{100 * (1 - recited[1] / recited[0]):.0f} %"
        differences = [passages[ours[seed].Index] - passages[ce[seed].Index] for seed in seeds]
        lms = over_seeds_and_passages(np.array(differences))
        assert cells[3] == f"{lms.mean:+.1f}" + (f" ({lms.low:+.1f} to {lms.high:+.1f})" if len(seeds) > 1 else "")
        reductions.append((recited[0], 100 * (1 - recited[1] / recited[0])))
        differences = [ours[seed].log_perplexity - ce[seed].log_perplexity for seed in seeds]
        costs.append(100 * math.expm1(statistics.fmean(differences)))
        assert cells[4] == _interval(differences, lambda value: 100 * math.expm1(value), form="{:+.1f}") + " %"
    much, some, rest = (
        sorted(share for recited, share in reductions if low <= recited < high)
        for low, high in ((20, 128), (7, 11), (0, 7))
    )
    assert len(much) + len(some) + len(rest) == len(reductions)
    assert f"by {much[0]:.0f} to {much[-1]:.0f} % wherever CE recites more than 20 tokens" in PAGE
    assert (
        f"by {some[0]:.0f} to {some[-1]:.0f} % where it recites 7 to 11, otherwise by at most {rest[-1]:.0f} %" in PAGE
    )
    assert f"| {min(costs):.1f} to {max(costs):.0f} % higher at every learning rate" in PAGE


def test_the_numbers_of_smollm2_follow_from_its_records():
    """Read off the files by hand."""
    (page,) = (page for page in results_page.PAGES if page.name == "smollm2.md")
    tables = re.findall(r"<!-- table: (\w+) (\S+) -->\n(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    cells = {name: _cells(text)[2:] for name, _, text in tables}
    files = {name: results_page.PAGES[page] / file for name, file, _ in tables}
    of_page = re.split(r"^\*\*(.+?)\*\*$", tables[0][2], flags=re.MULTILINE)[1:]
    lines = {
        name: {line[0]: line for line in _cells(text)[2:]}
        for name, text in zip(of_page[::2], of_page[1::2], strict=True)
    }
    scores = {}
    for row in map(json.loads, files["recitation"].read_text(encoding="utf-8").splitlines()[1:]):
        own = scores.setdefault(row["model"], {}).setdefault(row["objective"], {})
        for metric, kind, _prefix, _, values, _ in row["scores"]:
            own.setdefault((metric, kind), []).extend(values if len(values) > 1 else ())
    assert lines.keys() == scores.keys()
    means = {}
    for model, arms_of_model in scores.items():
        mean = {
            name: [statistics.fmean(own["lms", "target"]), math.exp(statistics.fmean(own["nll", "block"]))]
            for name, own in arms_of_model.items()
        }
        means[model] = mean
        assert mean.keys() == lines[model].keys() >= {"CE", "CE MinHash dedup", "Goldfish", "TF-IDF", "Repetition"}
        for name, own in arms_of_model.items():
            line = lines[model][name]
            control = statistics.fmean(own["lms", "control"])
            assert [line[2], line[4], line[5]] == [f"{mean[name][0]:.1f}", f"{control:.1f}", f"{mean[name][1]:.2f}"]
            if name != "CE":
                changes = (100 * (one / ce - 1) for one, ce in zip(mean[name], mean["CE"], strict=True))
                assert [of.split(" %")[0] for of in line[-2:]] == [f"{change:+.1f}" for change in changes]
    assert all(own["Repetition"][1] == min(one[1] for one in own.values()) for own in means.values())
    ways = json.loads(files["implementations"].read_text(encoding="utf-8"))["implementations"]
    assert [row[1] for row in cells["implementations"]] == [f"{way['tokens_per_second']:,.0f}" for way in ways.values()]


def _cells(text):
    """Of each line of a table, its head and the line under that included."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def _other_nlls(scores, own):
    """The loss on other text of each run, over its tokens."""
    rows = scores[(scores["metric"] == "other_nll") & scores["checkpoint"].isin([one.Index for one in own])]
    return [np.average(of["value"], weights=of["count"]) for _, of in rows.groupby("checkpoint", sort=False)]


def _block(name, file):
    return re.search(rf"<!-- table: {name} {re.escape(file)} -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)[1]


def _interval(values, scale=float, form="{:.1f}"):
    mean = form.format(scale(statistics.fmean(values)))
    if len(values) == 1:
        return mean
    low, high = _ends(values)
    return f"{mean} ({form.format(scale(low))} to {form.format(scale(high))})"


def _ends(values):
    """Of the t-interval, by its textbook formula: scipy's own test warns where values are nearly equal."""
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values) - half, statistics.fmean(values) + half


def test_what_the_page_says_about_limits_follows_from_the_record():
    file = Path(results_page.__file__).parent / "results" / "2026-11-28_audit_limits" / "limits.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    outcome = {
        (one["model"], one["others"] > 0, limit): found["outcome"]
        for one in record["audits"]
        for limit, found in one["limits"].items()
    }
    for model, has_others, limit in outcome:
        if limit == "recited=0":
            recites = model.split(", ")[-1] in ("ce", "tf-idf", "goldfish")
            assert outcome[model, has_others, limit] == ("fail" if recites else "pass")
    assert outcome["demo, ce", False, "lms=20"] == "fail"
    for passed in (
        ("demo, ce", True, "lms=20"),
        ("demo, tf-idf", False, "lms=20"),
        ("demo, tf-idf", True, "excess=3"),
        ("demo, ce", True, "verbatim.upper=0.05"),
    ):
        assert outcome[passed] == "pass"
    assert outcome["SmolLM2-135M", True, "verbatim.upper=0.05"] == "fail"
    shares = {
        (one["copied"] + one["others"], one["controls"], one["known"]): one["exceeded"]["recited=0"] / one["draws"]
        for one in record["simulated"]
    }
    assert max(share for (_, _, known), share in shares.items() if known == 0) < 0.01
    for targets, controls, noticed, before in ((24, 24, 6, 4), (101, 24, 6, 4), (101, 100, 4, 3)):
        assert shares[targets, controls, noticed] == 1
        assert shares[targets, controls, before] < 0.2
