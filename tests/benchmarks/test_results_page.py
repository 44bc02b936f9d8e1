"""The tables of docs/results.md and of other pages follow from their records."""

import dataclasses
import json
import math
import re
import statistics

import pytest
import results_page
from frontier_fakes import grown_records, record, replace, results_of
from scipy import stats

from tfidf_tune.analysis import run_table
from tfidf_tune.report import comparison_report
from tfidf_tune.results import read_results, write_results

PAGE = results_page.PAGE.read_text(encoding="utf-8")
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


FILES = sorted(set(re.findall(r"<!-- table: \w+ (\S+) -->", PAGE)))


def files_of(table):
    return sorted(set(re.findall(rf"<!-- table: {table} (\S+) -->", PAGE)))


@pytest.mark.parametrize("page", results_page.PAGES, ids=lambda page: page.name)
def test_the_tables_of_the_pages_are_those_of_the_records(page):
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
    assert results_page.filled(text, results_page.PAGES[page]) == text


def operating_points(model):
    """Objective -> its records at the learning rate of the lowest mean log perplexity, by plain arithmetic."""
    groups = {}
    for one in records_of("frontier.jsonl"):
        if one.model == model:
            groups.setdefault(one.objective, {}).setdefault(one.learning_rate, []).append(one)
    return {
        objective: min(by_rate.values(), key=lambda own: statistics.mean(one.log_perplexity for one in own))
        for objective, by_rate in groups.items()
    }


def test_the_table_of_needs_in_the_readme_follows_from_the_records():
    section = README.split("## Which objective for which need")[1].split("\n## ")[0]
    rows = re.findall(r"^\| [^|]+\| `(\w+)`[^|]*\| +([\d.]+) \| +([\d.]+) \|$", section, re.MULTILINE)
    names = {"CrossEntropyLoss": "CE", "TFIDFCrossEntropyLoss": "TF-IDF", "TokenDropWeighting": "Token drop"}
    points = operating_points("Llama high")
    chance = []
    for component, lms, perplexity in rows:
        own = points[names.get(component, component.removesuffix("Weighting"))]
        assert len(own) == 5  # seeds
        assert f"{statistics.mean(one.lms for one in own):.1f}" == lms
        assert f"{math.exp(statistics.mean(one.log_perplexity for one in own)):.1f}" == perplexity
        chance += [one.control_lms for one in own]
    assert len(rows) == 6
    assert f"{statistics.mean(chance):.1f} are chance" in " ".join(section.split())


def test_the_bound_of_repetition_weights_in_the_summary_is_the_highest_of_the_settings_with_copies():
    models = {one.model for one in records_of("frontier.jsonl") if one.objective == "Repetition"} - {"Llama epochs"}
    bounds = []
    for model in models:
        excess = [one.lms - one.control_lms for one in operating_points(model)["Repetition"]]
        bounds.append(stats.ttest_1samp(excess, 0).confidence_interval().high)
    assert len(bounds) == 7
    assert f"cannot be told from the floor (at most {max(bounds):.2f} tokens above it, 95 %)" in " ".join(PAGE.split())


def test_the_figures_of_the_demo_in_readme_and_quick_start_are_those_of_its_record():
    (file,) = (results_page.RESULTS.parents[1] / "benchmarks" / "results").glob("*_demo/results.jsonl")
    verdict = comparison_report(read_results(file)).verdict
    lms, perplexity = map(float, re.findall(r"([\d.]+) % (?:less|higher)", verdict))
    assert f"recites {lms:.0f} % less at a perplexity {perplexity:.0f} % higher" in " ".join(README.split())
    assert "at equal perplexity it recites more than CE, no gain" in verdict
    quoted = re.search(r"^> .*(?:\n> .*)*", (results_page.PAGE.parent / "quickstart.md").read_text(), re.MULTILINE)[0]
    assert " ".join(quoted.replace("> ", "").split()) == re.sub(r"\[\d\]", "", verdict)


def test_all_records_are_used_and_all_tables_have_rows():
    assert sorted(file.name for file in results_page.RESULTS.glob("*.jsonl")) == FILES
    blocks = re.findall(r"<!-- table: .*? -->\n(.*?)<!-- end -->", PAGE, re.DOTALL)
    assert len(blocks) == PAGE.count("<!-- table: ") == PAGE.count("<!-- end -->") > 0
    for block in blocks:
        assert len(re.findall(r"^\|", block, re.MULTILINE)) > 2


def test_run_once_more_the_reduced_experiment_gave_the_same_numbers():
    first, again = (
        results_page._read(results_page.RESULTS / file) for file in ("frontier.jsonl", "frontier_reduced.jsonl")
    )
    at = {one.run: number for number, one in enumerate(first.checkpoints)}
    ours, theirs = (made.scores.groupby("checkpoint") for made in (again, first))
    assert len(again.checkpoints) == 63
    for number, one in enumerate(again.checkpoints):
        same = first.checkpoints[at[one.run]]
        assert dataclasses.replace(one, training_seconds=None) == dataclasses.replace(same, training_seconds=None)
        rows = (group.get_group(key).iloc[:, 1:].astype(str) for group, key in ((ours, number), (theirs, at[one.run])))
        assert next(rows).values.tolist() == next(rows).values.tolist()


@pytest.mark.parametrize("file", files_of("operating_points"))
def test_operating_points_and_intervals_follow_from_the_records(file):
    """Computed independently from the records."""
    records = records_of(file)
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
            points[objective] = {r.seed: (r.lms, r.log_perplexity) for r in by_rate[best]}
            assert rate.split(" ")[0] == f"{best:g}"
            assert lms == _interval([r.lms for r in by_rate[best]])
            assert perplexity == _interval([r.log_perplexity for r in by_rate[best]], math.exp)
        for objective, *_, against_ce, against_goldfish in (row for row in rows[2:] if row[0] != START):
            for reference, verdict in (("CE", against_ce), ("Goldfish", against_goldfish)):
                assert verdict == _verdict(points[objective], points.get(reference)) or objective == reference


@pytest.mark.parametrize("file", files_of("paper"))
def test_what_is_said_of_the_paper_follows_from_the_records(file):
    records = records_of(file)
    rows = _cells(_block("paper", file))[2:]
    assert rows
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
        assert cells[3] == _interval([ours[seed].lms - ce[seed].lms for seed in seeds], form="{:+.1f}")
        differences = [ours[seed].log_perplexity - ce[seed].log_perplexity for seed in seeds]
        assert cells[4] == _interval(differences, lambda value: 100 * math.expm1(value), form="{:+.1f}") + " %"


def test_the_numbers_of_smollm2_follow_from_its_records():
    """Read off the files by hand."""
    (page,) = (page for page in results_page.PAGES if page.name == "smollm2.md")
    tables = re.findall(r"<!-- table: (\w+) (\S+) -->\n(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    cells = {name: _cells(text)[2:] for name, _, text in tables}
    files = {name: results_page.PAGES[page] / file for name, file, _ in tables}
    rows = files["recitation"].read_text(encoding="utf-8").splitlines()[1:]
    mean = {}
    for row in map(json.loads, rows):
        own = {}
        for metric, kind, _prefix, _, values, _ in row["scores"]:
            own.setdefault((metric, kind), []).extend(values if len(values) > 1 else ())
        nll = statistics.fmean(own["nll", "block"])
        mean[row["objective"]] = [statistics.fmean(own["lms", "target"]), math.exp(nll)]
        (line,) = (line for line in cells["recitation"] if line[0] == row["objective"])
        control = statistics.fmean(own["lms", "control"])
        assert [line[1], line[4], line[5]] == [f"{mean[line[0]][0]:.1f}", f"{control:.1f}", f"{math.exp(nll):.2f}"]
    assert mean.keys() == {"CE", "TF-IDF", "Start"}
    for name, *_, lms, perplexity in cells["recitation"]:
        if name != "CE":
            changes = (100 * (one / ce - 1) for one, ce in zip(mean[name], mean["CE"], strict=True))
            assert [of.split(" %")[0] for of in (lms, perplexity)] == [f"{change:+.1f}" for change in changes]
    ways = json.loads(files["implementations"].read_text(encoding="utf-8"))["implementations"]
    assert [row[1] for row in cells["implementations"]] == [f"{way['tokens_per_second']:,.0f}" for way in ways.values()]


def test_the_figures_of_the_page_are_there():
    for figure in re.findall(r"!\[.*?\]\((.+?)\)", PAGE):
        assert (results_page.PAGE.parent / figure).is_file()


def test_tables_of_made_up_records(tmp_path, monkeypatch):
    """The start has a row without a verdict, runs count once, and checkpoints of two settings are not mixed."""
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    early = [replace(one, progress=50, lms=1.0) for one in grown_records()]
    start = record("Start", 2.5, 33.0, seed=None, learning_rate=None)
    write_results(results_of([*early, *grown_records(), start], {"date": "2020-02-02"}), tmp_path / "a.jsonl")

    def table(name, file="a.jsonl"):
        return results_page.filled(f"<!-- table: {name} {file} -->\n<!-- end -->")

    assert re.search(r"^\| Start +\| +\| +2\.5 \| +33\.0 \| +\| +\| +\|$", table("operating_points"), re.MULTILINE)
    assert re.search(r"^\| runs +\| +28, seeds 0, 1, 2 \|$", table("provenance"), re.MULTILINE)
    with pytest.raises(ValueError, match="compared in one setting, not in 4"):
        table("trajectory")
    one_rate = [one for one in (*early, *grown_records()) if one.checkpoint.learning_rate == 1e-3]
    write_results(results_of(one_rate), tmp_path / "b.jsonl")
    rows = _cells(table("trajectory", "b.jsonl"))[2:]
    objectives = ["CE", "TF-IDF", "Goldfish"]
    assert [row[:2] for row in rows] == [[name, at] for at in ("50 %", "100 %") for name in objectives]


def _verdict(ours, theirs):
    """In the words of the report, from the intervals of the paired t-test."""
    seeds = ours.keys() & (theirs or {}).keys()
    if len(seeds) < 2:
        return "no verdict: fewer than two pairs" if theirs else ""
    signs = []
    for measure in range(2):
        low, high = _ends([ours[seed][measure] - theirs[seed][measure] for seed in seeds])
        signs.append((low > 0) - (high < 0))
    return VERDICTS[tuple(signs)]


def _cells(text):
    """Of each line of a table, its head and the line under that included."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


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
