"""The tables of docs/results.md and of other pages follow from their records."""

import json
import math
import re
import statistics

import numpy as np
import pytest
import results_page
from scipy import stats

from tfidf_tune.compare import comparison_report, read_results, run_table
from tfidf_tune.compare._evaluations import compare_objectives, evaluation_table
from tfidf_tune.compare._intervals import over_seeds_and_passages
from tfidf_tune.compare._verdict import AT_CHANCE, STILL_DETECTABLE

PAGE = "\n".join(file.read_text(encoding="utf-8") for file in (results_page.PAGE, results_page.ALL_TABLES))
README = (results_page.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
VERDICTS = {
    (-1, -1): "better",
    (-1, 0): "recites less, perplexity unclear",
    (-1, 1): "recites less, perplexity higher",
    (0, -1): "LMS unclear, perplexity lower",
    (0, 0): "no difference shown",
    (0, 1): "LMS unclear, perplexity higher",
    (1, -1): "recites more, perplexity lower",
    (1, 0): "recites more, perplexity unclear",
    (1, 1): "worse",
}
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

    def more(one, other):
        return f"{100 * (perplexity(one) / perplexity(other) - 1):.0f} %"

    scores = results_page._read(results_page.RESULTS / "evidence.jsonl").scores
    membership = results_page._membership(results_page.RESULTS / "evidence.jsonl").set_index(["Model", "Objective"])

    def values(own, metric):
        """Checkpoint and kind -> the values of its passages."""
        rows = scores[(scores["metric"] == metric) & scores["checkpoint"].isin([one.Index for one in own])]
        return {at: of.sort_values("unit")["value"].to_numpy() for at, of in rows.groupby(["checkpoint", "kind"])}

    def auc(own, metric="passage_nll", sign=1, minus=None):
        """By counting pairs, for each seed."""
        found = values(own, metric)
        if minus is not None:
            found = {at: found[at] - other for at, other in values(own, minus).items()}
        shares = []
        for one in own:
            targets, controls = (sign * found[one.Index, kind] for kind in ("target", "control"))
            shares.append(statistics.mean((a < b) + (a == b) / 2 for a in targets for b in controls))
        return statistics.mean(shares)

    def strongest(own):
        """The AUC of the attack with the highest, with the interval that the table has for it."""
        attacks = {
            "AUC": auc(own),
            "AUC zlib": auc(own, "zlib"),
            "AUC Min-K%": auc(own, "min_k", -1),
            "AUC Min-K%++": auc(own, "min_k_plus_plus", -1),
            "AUC Loss against start": auc(own, minus="reference_nll"),
        }
        name = max(attacks, key=attacks.get)
        row = membership.loc[own[0].model, own[0].objective]
        return f"{attacks[name]:.2f} ({row[name + ' from']:.2f} to {row[name + ' to']:.2f})"

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
    assert f"and CE recites {above(fuzzy[usual]):.1f} tokens above the floor" in said
    both = [_interval(_other_nlls(scores, answers[name]), math.exp) for name in (tuned, usual)]
    assert "(perplexity {} instead of {})".format(*both) in said
    assert f"the floor in both settings (fuzzy: {above(fuzzy[ours]):.1f}, 95 %" in said
    assert f"at a perplexity of {perplexity(exact[ours]):.1f}. If 20 %" in said
    assert f"{perplexity(exact[ours]):.1f}" == f"{perplexity(fuzzy[ours]):.1f}"
    least = f"{above(noisy[ours]):.1f} tokens, at a perplexity of {perplexity(noisy[ours]):.1f}"
    assert f"recite less than the others, but above the floor: {least}" in said
    assert above(noisy[ours]) == min(above(own) for own in noisy.values())
    recited, cost = above(noisy[tuned]), perplexity(noisy[tuned])
    assert f"CE then recites {recited:.1f} tokens above the floor, at {cost:.1f}." in said
    both = [f"{auc(of[name]):.2f}" for name in (ours, tuned) for of in (exact, fuzzy)]
    assert "AUC of {} (exact) and {} (fuzzy) under repetition weights, {} and {} under CE on".format(*both) in said
    assert all(round(auc(of[name]), 2) == 1 for of in (exact, fuzzy) for name in ("CE", "Goldfish", "TF-IDF"))
    assert "and 1.00 under CE, Goldfish and TF-IDF." in said
    most = [strongest(of[ours]) for of in (exact, fuzzy)]
    assert "has {} and {} under repetition weights, 1.00 and 1.00 under CE at 0.11.".format(*most) in said
    assert [strongest(of[tuned]).split(" ")[0] for of in (exact, fuzzy)] == ["1.00", "1.00"]
    single = exact["CE exact dedup, equal epochs"]
    row = membership.loc["exact", single[0].objective]
    by_loss = f"{auc(single):.2f} ({row['AUC from']:.2f} to {row['AUC to']:.2f})"
    assert f"once, the loss has {by_loss} and the strongest attack {strongest(single)}." in said
    assert f"Before training, the loss has {auc(exact['CE'][:1], 'reference_nll'):.2f}." in said
    assert f"a perplexity {between(exact[ours], exact[tuned])} above that of CE on text deduplicated at 0.11" in said
    assert f"; {between(once[ours], once['CE'])} above that of CE without copies" in said
    costs = [_interval([one.log_perplexity for one in framed[name]], math.exp) for name in (ours, usual)]
    assert "perplexity is {}, and {} under CE on deduplicated text".format(*costs) in said
    (file,) = (results_page.PAGE.parents[1] / "research" / "benchmarks" / "results").glob(
        "*_repetition/weights_cpu.json"
    )
    step = {
        one["weighting"]: one
        for one in json.loads(file.read_text(encoding="utf-8"))["repetition"]
        if (one["batch_size"], one["seq_len"]) == (8, 256)
    }
    weights, of_tfidf = step["RepetitionWeighting()"], step["TFIDFWeighting"]
    memory, (slow, fast) = weights["state_bytes"] / 2**20, (one["median_ms"] for one in (weights, of_tfidf))
    assert f"take {memory:.0f} MiB, and {slow:.1f} ms for 8 \N{MULTIPLICATION SIGN} 256 tokens" in said
    assert f"on one core, TF-IDF {fast:.1f} ms" in said
    assert f"recites {above(exact['TF-IDF']):.1f} tokens above the floor instead of {above(exact['CE']):.1f}" in said
    assert f"at a perplexity {between(exact['TF-IDF'], exact['CE'])} above that of CE" in said
    lower = exact["CE lower lr"]
    assert f"recites {above(lower):.1f}, at {between(lower, exact['CE'])}" in said
    goals = PAGE.split("The goals that were set")[1].split("## Over learning rates")[0]
    of_fuzzy = [perplexity(fuzzy[name]) for name in (ours, "CE", "Goldfish", usual, tuned)]
    assert "{:.1f} against {:.1f}, {:.1f}, and {:.1f} (0.8) or {:.1f} (0.11)".format(*of_fuzzy) in goals
    exactly = [
        more(exact[name], exact[of])
        for name, of in ((ours, usual), (ours, tuned), ("Repetition, MinHash dedup", usual))
    ]
    assert "{} above (0.8), {} (0.11); {} if trained on deduplicated text".format(*exactly) in goals
    assert f"*once* {100 * (perplexity(once[ours]) / perplexity(once['CE']) - 1):.1f} % above" in goals
    rest = " ".join(
        PAGE.split("## Every arm")[1].split("## Likelihood, membership, near-verbatim recitation")[0].split()
    )
    epochs = arms("epochs", 3)
    assert f"cost {100 * (perplexity(once['Repetition']) / perplexity(once['CE']) - 1):.1f} %." in rest
    assert abs(perplexity(epochs["Repetition"]) / perplexity(epochs["CE"]) - 1) < 0.01
    assert f"perplexity is {more(framed[ours], framed['CE'])} above that of CE, which" in rest
    assert f"recite {above(noisy['Repetition']):.1f} tokens more, CE {above(noisy['CE']):.1f}." in rest
    assert f"contexts recite {above(fuzzy['Repetition plain']):.1f} tokens above the floor" in rest
    assert f"it recites {above(fuzzy['Goldfish']):.1f} tokens above the floor" in rest
    k3 = fuzzy["Repetition k=3"]
    assert f"at a perplexity {more(k3, fuzzy[ours])} higher in *fuzzy 10%*" in rest
    assert f"with an AUC {auc(fuzzy[ours]) - auc(k3):.2f} lower." in rest
    assert abs(above(k3) - above(fuzzy[ours])) < 0.1
    assert f"perplexity is {more(framed[tuned], framed[usual])} above that at 0.8" in rest
    assert above(arms("fuzzy 10% mixed", 3)[tuned]) < 0
    assert perplexity(answers[tuned]) < perplexity(answers[usual])
    assert f"with an AUC of {auc(once['CE']):.2f} already" in " ".join(PAGE.split())
    sampled = membership["Extracted by 1,000 samples (%)"].max()
    assert "at most 0.002 % in every row" in " ".join(PAGE.split())
    assert 0.001 < sampled <= 0.002
    for own in (arms("fuzzy 5%", 3), arms("fuzzy 10% mixed", 3), answers):
        assert above(own["Repetition"]) < 0.1


def test_what_is_said_of_learning_rates_follows_from_the_records():
    names = {**{name: name for name in results_page._ARMS}, "CE lower lr": "CE", "CE MinHash 0.11": "CE MinHash 0.35"}
    tried = {
        (model, name): {} for model in ("Llama high", "Llama high fuzzy") for name in names.values()
    }  # objective -> rate -> log-perplexities
    for one in records_of("frontier.jsonl"):
        if (one.model, one.objective) in tried:
            tried[one.model, one.objective].setdefault(one.learning_rate, []).append(one.log_perplexity)
    assert {name for (_, name), own in tried.items() if not own} == {"Repetition, MinHash dedup"}  # the last arm
    assert results_page._ARMS[-1] == "Repetition, MinHash dedup"
    for own in filter(None, tried.values()):
        lowest = {rate: statistics.fmean(values) for rate, values in own.items()}
        assert min(lowest) < 0.002 < max(lowest)
        assert lowest[0.002] - min(lowest.values()) < math.log(1.02)
    assert "At 0.002 the perplexity of each is within 2 % of its lowest" in " ".join(PAGE.split())
    deduplicated = [
        f"{math.exp(statistics.fmean(tried[model, name][0.002])):.1f}"
        for model, name in (
            *(("Llama high", name) for name in ("CE MinHash dedup", "CE MinHash 0.35")),
            ("Llama high fuzzy", "CE MinHash 0.35"),
        )
    ]
    said = " ".join(PAGE.split())
    assert "{} (MinHash at 0.8) and {} (0.35) in *high*, {} (0.35) in *high fuzzy*".format(*deduplicated) in said


def test_what_is_said_of_relearning_follows_from_the_records():
    steps = {}
    for run in map(json.loads, (results_page.RESULTS / "relearning.jsonl").read_text(encoding="utf-8").splitlines()):
        for kind in ("target", "control"):
            own = [one["steps"] for one in run["passages"] if one["kind"] == kind]
            steps.setdefault((*run["model"].split("/")[2:4], kind), []).append(statistics.fmean(own))
        assert run["learning_rate"] == 3e-4
    mean = {names: statistics.fmean(own) for names, own in steps.items()}
    assert {len(own) for names, own in steps.items() if len(names) == 3} == {5}  # "runs/start" has neither folder
    rows = {(row[0], row[1]): row for row in _cells(_block("relearning", "relearning.jsonl"))[2:]}
    folders = {"exact": "llama-high", "fuzzy 10%": "llama-high-fuzzy"}
    sooner = {}
    for (setting, name), row in rows.items():
        at = (folders[setting], name.lower().replace(" ", "-")) if setting else ()
        targets, controls = (mean[(*at, kind)] for kind in ("target", "control"))
        assert row[3:5] == [f"{targets:.1f}", f"{controls:.1f}"]
        assert row[5].startswith(f"{controls - targets:.1f} (")
        sooner[setting, name] = f"{controls - targets:.1f}"
    assert len(rows) == 7
    said = " ".join(PAGE.split("### Relearning")[1].split("## Over learning rates")[0].split())
    ours, tuned = ([sooner[setting, name] for setting in folders] for name in ("Repetition", "CE MinHash 0.35"))
    assert "come back {} or {} steps sooner than controls".format(*ours) in said
    assert "deduplicated text {} or {}.".format(*tuned) in said
    most, least = (round(float(sooner[setting, "CE"])) for setting in folders)
    assert f": {least} to {most} fewer than controls" in said
    for name, number in (("repetition", 28), ("ce", 19)):
        for folder in folders.values():
            assert abs(mean[folder, name, "control"] - number) < 1
    assert "a control takes 28 steps, under CE 19." in said


def test_what_is_said_of_the_arguments_of_repetition_weights_follows_from_the_records():
    runs = {(one.model, one.objective): one for one in records_of("repetition_choice.jsonl")}
    cost, aucs = {}, {}
    membership = results_page._membership(results_page.RESULTS / "repetition_choice.jsonl")
    for (model, name), one in runs.items():
        cost[model, name] = 100 * math.expm1(one.log_perplexity - runs[model, "Repetition"].log_perplexity)
        own = membership[(membership["Model"] == model) & (membership["Objective"] == name)]
        aucs[model, name] = own["AUC"].item()
    weaker, stronger = ("alpha = 1", "quantile = 0.5", "k = 5"), ("alpha = 4", "quantile = 0.9", "k = 3", "sample = 1")
    assert all(max(cost[model, name] for model in ("fuzzy 10%", "once")) < 0 for name in weaker[:2])
    low, *_, high = sorted(aucs["fuzzy 10%", name] for name in weaker)
    said = " ".join(PAGE.split("### What the arguments")[1].split())
    assert f"AUC {low:.2f} to {high:.2f} instead of {aucs['fuzzy 10%', 'Repetition']:.2f}." in said
    ranges = []
    for model in ("fuzzy 10%", "once"):
        low, *_, high = sorted(cost[model, name] for name in stronger)
        ranges.append(f"{low:.0f} to {high:.0f} %")
    assert "cost {} of perplexity in *fuzzy 10%* and {} in *once*".format(*ranges) in said
    others = {name for _, name in runs if 0.4 < aucs["fuzzy 10%", name] < 0.7}
    assert not any(max(cost["fuzzy 10%", name], cost["once", name]) < 0 for name in others)
    assert {name for name in others if cost["fuzzy 10%", name] < 0} == {"span = 129"}
    assert f"`span=129` has in *fuzzy 10%*, by {-cost['fuzzy 10%', 'span = 129']:.1f} %." in said


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
    of_size = {round(one["tokens"], -6): one for one in runs if one["way"] == "data dedup, minhash"}
    marginal = [
        of_size[10**7]["seconds"] - of_size[10**6]["seconds"],
        of_size[10**8]["seconds"] - of_size[10**7]["seconds"],
    ]
    assert 8 < marginal[1] / marginal[0] < 12  # of ten times as many tokens
    assert max(one["peak_bytes"] for one in runs) < 2**30


def test_all_records_are_used_and_all_tables_have_rows():
    assert sorted(file.name for file in results_page.RESULTS.glob("*.jsonl")) == FILES
    blocks = re.findall(r"<!-- table: .*? -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert len(blocks) == PAGE.count("<!-- table: ") == PAGE.count("<!-- end -->") > 0
    for block in blocks:
        assert len(re.findall(r"^\|", block, re.MULTILINE)) > 2


@pytest.mark.parametrize("file", files_of("operating_points"))
def test_operating_points_and_intervals_follow_from_the_records(file):
    """Computed independently from the records."""
    records, passages = records_of(file), lms_of_passages(file)
    models = re.split(r"^\*\*(.+?)\*\* .*$", _block("operating_points", file), flags=re.MULTILINE)[1:]
    assert models[::2] == list(dict.fromkeys(record.model for record in records))
    for model, table in zip(models[::2], models[1::2], strict=True):
        rows = _cells(table)
        points = {}
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
            points[objective] = {r.seed: (passages[r.Index], r.log_perplexity) for r in by_rate[best]}
            assert rate.split(" ")[0] == f"{best:g}"
            assert lms == _interval([r.lms for r in by_rate[best]])
            assert perplexity == _interval([r.log_perplexity for r in by_rate[best]], math.exp)
        told = {
            (row[0], reference): row[-2 + at]
            for row in rows[2:]
            if row[0] != START
            for at, reference in enumerate(("CE", "Goldfish"))
            if row[0] != reference and reference in points
        }
        assert told == _verdicts(points, told)
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
    said = " ".join(page.read_text(encoding="utf-8").split())
    assert all(own["Repetition"][1] == min(one[1] for one in own.values()) for own in means.values())
    (file,) = {path for path in files.values() if path.name == "results.jsonl"}
    shown = {}
    for baseline in ("CE MinHash dedup", "CE MinHash 0.35"):
        found = compare_objectives(evaluation_table(read_results(file), baseline=baseline)[1], baseline)
        own = found[(found["objective"] == "Repetition") & (found["measure"] == "Perplexity")]
        for one in own.itertuples():
            value, low, high = (-100 * end for end in (one.reduction, one.high, one.low))
            shown[one.setting, baseline] = (value, f"{value:+.1f} % ({low:+.1f} to {high:+.1f})", low < 0 < high)
    pairs = [
        *(("LoRA exact", "CE MinHash dedup"), ("LoRA fuzzy 10%", "CE MinHash 0.35")),
        *(("full exact", "CE MinHash dedup"), ("full fuzzy 10%", "CE MinHash 0.35")),
    ]
    assert "it is {} and {} with LoRA, and {} and {} after full".format(*(shown[pair][1] for pair in pairs)) in said
    assert [shown[pair][2] for pair in pairs] == [False, False, True, True]
    smaller, larger = sorted(round(-shown[pair][0]) for pair in pairs[:2])
    of_results = " ".join(PAGE.split())
    assert f"Their perplexity is {smaller} to {larger} % lower with LoRA; after full fine-tuning no" in of_results
    aucs = [lines["full exact"][name][7] for name in ("Repetition", "CE MinHash dedup")]
    assert "in *full exact* better ({}) than after deduplication ({})".format(*aucs) in said
    low, _, high, highest = sorted(100 * own["TF-IDF"][0] / own["CE"][0] for own in means.values())
    assert f"recites {low:.0f} to {high:.0f} % of CE's tokens; after full fine-tuning on exact" in said
    assert f"on exact copies {highest:.0f} %, some" in said
    ways = json.loads(files["implementations"].read_text(encoding="utf-8"))["implementations"]
    assert [row[1] for row in cells["implementations"]] == [f"{way['tokens_per_second']:,.0f}" for way in ways.values()]


def _verdicts(points, pairs):
    """In the words of the report, from both intervals, p-values corrected by Holm's method over all pairs."""
    estimates = {}
    for objective, reference in pairs:
        ours, theirs = points[objective], points[reference]
        differences = [[a - b for a, b in zip(ours[seed], theirs[seed], strict=True)] for seed in ours.keys() & theirs]
        if len(differences) > 1:
            recited, logs = (np.array(values) for values in zip(*differences, strict=True))
            lms, test = over_seeds_and_passages(recited), stats.ttest_1samp(logs, 0)
            ends = [(lms.low, lms.high), test.confidence_interval()]
            estimates[objective, reference] = (*zip(ends, (lms.p_value, test.pvalue), strict=True),)
    values = [p for own in estimates.values() for _, p in own]
    found = {}
    for pair in pairs:
        signs = []
        for (low, high), own in estimates.get(pair, ()):
            adjusted = max((len(values) - sum(q < p for q in values)) * p for p in values if p <= own)
            signs.append((int(low > 0) - int(high < 0)) * (adjusted < 0.05))
        found[pair] = VERDICTS[tuple(signs)] if signs else "no verdict: fewer than two pairs"
    return found


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
