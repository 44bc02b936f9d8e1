"""Write the tables and figures of pages of the documentation from the records of experiments and benchmarks.

    python research/benchmarks/results_page.py

A table is between two comments that say what it is and which file it comes from; the text around them is by hand.

    <!-- table: operating_points frontier.jsonl -->
    <!-- end -->

Figures are files in research/results, one for each model of frontier.jsonl; the first of docs/results.md is beside it.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from measuring import markdown_table

from research.frontier import Frontiers, trace_frontiers
from research.frontier_report import frontier_drawing
from tfidf_tune.compare import Results, bootstrap_interval, over_seeds, read_results, run_table
from tfidf_tune.compare._evaluations import compare_objectives, evaluation_table
from tfidf_tune.compare._tables import membership_table
from tfidf_tune.report._document import Footnotes

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
RESULTS = Path(__file__).parents[1] / "results"
ALL_TABLES = RESULTS / "README.md"
# Pages, and where the records of their tables are.
PAGES = {PAGE: RESULTS, ALL_TABLES: RESULTS} | {
    page: Path(__file__).parent / "results"
    for page in (RESULTS / "smollm2.md", RESULTS / "audits.md", PAGE.with_name("audit.md"), PAGE.with_name("data.md"))
}
_BASELINE, _PEER, _PAPER = "CE", "Goldfish", "TF-IDF"
_START = "Start"  # the model before it was fine-tuned
_DEDUPLICATED = "CE MinHash dedup"
# The arms and settings of the first table and figure.
_ARMS = [
    *("CE", "CE lower lr", "TF-IDF", "Goldfish"),
    *(_DEDUPLICATED, "CE MinHash 0.11", "Repetition", "Repetition, MinHash dedup"),
]
_TOKENS = "CE MinHash 0.35"  # an arm of the frontier, which was measured with n-grams of tokens
_COPIES = ["exact", "fuzzy 10%"]
_BLOCK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: str, folder: Path | None = None) -> str:
    """Replace the tables of a page (Markdown) by those of records in a folder, by default RESULTS.

    Raises:
        KeyError: If the name of a table is unknown.
        FileNotFoundError: If a results file is missing.
    """

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_TABLES[match[2]]((folder or RESULTS) / match[3])}\n\n{match[5]}"

    return _BLOCK.sub(block, page)


def _provenance(file: Path) -> str:
    results = _read(file)
    runs = results.checkpoints
    seeds = sorted({one.seed for one in runs if one.seed is not None})
    seconds = [one.training_seconds for one in runs if one.training_seconds is not None]
    passages = results.scores[(results.scores["kind"] == "target") & (results.scores["unit"] != "")]
    num_targets = passages.groupby("checkpoint")["unit"].nunique()
    num_predictions = run_table(results)["num_predictions"].astype(int)
    asked = sorted(set(zip(num_targets, num_predictions, strict=True)))
    rows = {
        "runs": f"{len({one.run for one in runs})}, seeds {', '.join(map(str, seeds))}",
        "targets, held-out tokens": "; ".join(f"{targets}, {tokens:,}" for targets, tokens in asked),
        "seconds of a training": f"{min(seconds):.0f} to {max(seconds):.0f}",
        **{name: value for name, value in results.provenance.items() if name != "platform"},
    }
    return str(markdown_table(("", ""), [list(row) for row in rows.items()]))


def _summary(file: Path) -> str:
    """What the main arms recite and cost where copies are exact and where they differ."""
    points = _trace(file, _DEDUPLICATED).points.set_index(["objective", "model"])
    membership = _membership(file)
    shown: list[tuple[str, Callable[[Any], str]]] = [
        ("recited above the floor", lambda at: _interval(*_ends(points.loc[at], "excess"))),
        ("perplexity", lambda at: _interval(*_ends(points.loc[at], "perplexity"))),
        ("membership AUC", lambda at: _auc(membership, at)),
    ]
    rows = [
        [
            objective,
            *(
                text((objective, model)) if (objective, model) in points.index else ""
                for _, text in shown
                for model in _COPIES
            ),
        ]
        for objective in _ARMS
    ]
    return str(markdown_table(["objective", *(f"{name}, {model}" for name, _ in shown for model in _COPIES)], rows))


def _settings(file: Path) -> str:
    """Each arm in each setting: recitation, perplexity on text of two kinds, and verdicts."""
    found = _trace(file, _DEDUPLICATED)
    against = {(one.model, one.objective, one.reference): one for one in found.differences.itertuples()}
    others = _other_perplexity(file)
    parts = []
    for model, points in found.points.groupby("model", sort=False):
        rows = []
        for one in points.itertuples():
            to = [against.get((model, one.objective, name)) for name in (_BASELINE, _DEDUPLICATED)]
            rows.append(
                [
                    *(one.objective, str(len(one.seeds)), _interval(*_ends(one, "lms")), f"{one.max_lms:.0f}"),
                    *(_interval(*_ends(one, "perplexity")), others.get((model, one.objective), "")),
                    *("" if difference is None else difference.verdict for difference in to),
                ]
            )
        columns = [
            *("objective", "seeds", "LMS", "largest", "perplexity", "of other text"),
            *(f"against {name}" for name in (_BASELINE, _DEDUPLICATED)),
        ]
        floor = points["control_lms"].mean()
        parts.append(f"**{model}** (controls {floor:.1f})\n\n" + markdown_table(columns, rows))
    return "\n\n".join(parts)


def _other_perplexity(file: Path) -> dict[tuple[str, str], str]:
    """Model and objective -> geometric mean over seeds of the perplexity on other text."""
    return {names: f"{math.exp(nll):.1f}" for names, nll in _means(file, "other_nll", "block").items()}


def _means(file: Path, metric: str, kind: str) -> dict[tuple[str, str], float]:
    """Model and objective -> mean over seeds of a score, which is weighted by its counts within a checkpoint."""
    results = _read(file)
    rows = results.scores[(results.scores["metric"] == metric) & (results.scores["kind"] == kind)]
    sums = rows.assign(sum=rows["value"] * rows["count"]).groupby("checkpoint")[["sum", "count"]].sum()
    means = run_table(results)[["model", "objective"]].join((sums["sum"] / sums["count"]).rename("mean"), how="inner")
    return {names: float(mean) for names, mean in means.groupby(["model", "objective"])["mean"].mean().items()}


def _likelihoods(file: Path) -> str:
    """Likelihood, membership and near-verbatim recitation of each arm in each setting."""
    frame = _membership(file).sort_values(["Model", "Objective"])
    near = [_means(file, metric, "target") for metric in ("edit_distance", "common_subsequence")]
    names = {
        "NLL of targets": ".2f",
        "NLL of controls": ".2f",
        **dict.fromkeys(("AUC", "AUC zlib", "AUC Min-K%", "AUC Min-K%++", "AUC Loss against start"), ".2f"),
        "TPR at 1 % FPR (%)": ".0f",
        "Exposure (bits)": ".2f",
    }
    shown = {name: form for name, form in names.items() if name in frame}
    rows = [
        [
            *(one["Model"], one["Objective"]),
            *(_of_membership(one, name, form) for name, form in shown.items()),
            *(
                f"{means[one['Model'], one['Objective']]:{form}}"
                for means, form in zip(near, (".2f", ".0f"), strict=True)
            ),
        ]
        for _, one in frame.iterrows()
    ]
    columns = ["setting", "objective", *shown, "edit distance", "common subsequence (tokens)"]
    return str(markdown_table(columns, rows))


def _auc(membership: Any, at: tuple[str, str]) -> str:
    if membership.empty:
        return ""
    own = membership[(membership["Objective"] == at[0]) & (membership["Model"] == at[1])]
    if own.empty:
        return ""
    return _of_membership(own.iloc[0], "AUC", ".2f")


def _of_membership(row: Any, name: str, form: str) -> str:
    """A cell of a row of the membership table, with its interval if it has one."""
    start = name.removesuffix(" at 1 % FPR (%)")  # the ends of "TPR at 1 % FPR (%)" are "TPR from" and "TPR to"
    value = f"{row[name]:{form}}"
    if f"{start} from" not in row:
        return value
    return value + f" ({row[f'{start} from']:{form}} to {row[f'{start} to']:{form}})"


@cache
def _membership(file: Path) -> Any:
    """The table of likelihood and membership of a file's last checkpoints."""
    results = _read(file)
    runs = run_table(results)
    runs = runs[runs["progress"] == runs.groupby("model")["progress"].transform("max")]
    groups = [
        (dict(zip(("Model", "Objective"), names, strict=True)), own.index.tolist())
        for names, own in runs.groupby(["model", "objective"], sort=False)
    ]
    return membership_table(results.scores, groups, Footnotes()).frame


def _relearning(file: Path) -> str:
    """Steps of training that bring passages and controls back, of models named by `runs/frontier/SETTING/OBJECTIVE`."""
    settings = dict(zip(("llama-high", "llama-high-fuzzy"), _COPIES, strict=True))
    objectives = {name.lower().replace(" ", "-"): name for name in (*_ARMS, _TOKENS)}
    steps: dict[tuple[str, str], list[list[list[int]]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        setting, objective = [*run["model"].split("/")[2:4], "", ""][:2]
        own = [[one["steps"] for one in run["passages"] if one["kind"] == kind] for kind in ("target", "control")]
        steps.setdefault((settings.get(setting, ""), objectives.get(objective, _START)), []).append(own)
    rows = []
    for names, of_seeds in sorted(steps.items()):
        targets, controls = np.array(of_seeds, dtype=np.float64).mean(axis=0)
        sooner = bootstrap_interval(
            lambda ours, theirs, axis=-1: theirs.mean(axis) - ours.mean(axis), targets, controls, paired=False
        )
        difference = controls.mean() - targets.mean()
        cells = (f"{targets.mean():.1f}", f"{controls.mean():.1f}", _interval(difference, sooner.low, sooner.high))
        rows.append([*names, str(len(of_seeds)), *cells])
    columns = ["setting", "objective", "runs", "passages", "controls", "controls minus passages"]
    return str(markdown_table(columns, rows))


def _operating_points(file: Path) -> str:
    """Each objective at its learning rate of the lowest held-out perplexity, and what it is compared with."""
    found, runs = _trace(file), run_table(_read(file))
    differences = found.differences[found.differences["at"] == "operating points"]
    against = {(one.model, one.objective, one.reference): one for one in differences.itertuples()}
    columns = [
        *("objective", "lr", "LMS", "perplexity", f"LMS, perplexity against {_BASELINE}"),
        *(f"verdict against {_BASELINE}", f"against {_PEER}"),
    ]
    parts = []
    for model, points in found.points.groupby("model", sort=False):
        rows = []
        for one in points[points["operating"]].itertuples():
            to_baseline, to_peer = (against.get((model, one.objective, name)) for name in (_BASELINE, _PEER))
            verdicts = [_change(to_baseline), *("" if to is None else to.verdict for to in (to_baseline, to_peer))]
            rows.append(
                [
                    *(one.objective, _rate(one), _interval(*_ends(one, "lms")), _interval(*_ends(one, "perplexity"))),
                    *(["", "", ""] if one.objective == _START else verdicts),
                ]
            )
        floor = runs.loc[runs["model"] == model, "control_lms"].mean()
        parts.append(f"**{model}** (controls {floor:.1f})\n\n" + markdown_table(columns, rows))
    return "\n\n".join([*parts, _on_an_edge(found)])


def _on_an_edge(found: Frontiers) -> str:
    """List the operating points that are the lowest or the highest of several learning rates."""
    points = found.points[found.points["operating"] & found.points["range_end"].isin(["lowest", "highest"])]
    named = [
        f"{model}: {', '.join(f'{one.objective} ({one.range_end})' for one in own.itertuples())}"
        for model, own in points.groupby("model", sort=False)
    ]
    return f"Operating points at an end of the learning rates tried: {'; '.join(named) or 'none'}."


def _curves(file: Path) -> str:
    """The means over seeds of each objective at each learning rate."""
    points = _trace(file).points.dropna(subset=["learning_rate"])
    points = points.assign(means=[f"{one.lms:.1f} / {one.perplexity:.1f}" for one in points.itertuples()])
    parts = []
    for model, own in points.groupby("model", sort=False):
        table = own.pivot(index="objective", columns="learning_rate", values="means").fillna("")
        rows = table.reindex(own["objective"].unique()).reset_index().to_numpy().tolist()
        columns = ["objective", *(f"{rate:g}" for rate in table.columns)]
        parts.append(f"**{model}**\n\n" + markdown_table(columns, rows))
    return "\n\n".join(parts)


def _paper(file: Path) -> str:
    """The paper's objective against plain cross-entropy at each learning rate."""
    found = _trace(file)
    lms = found.points.set_index(["model", "objective", "learning_rate"])["lms"]
    of_paper = found.differences[
        (found.differences["objective"] == _PAPER) & (found.differences["reference"] == _BASELINE)
    ]
    rows = [
        [
            *(model, f"{one.learning_rate:g}"),
            *(f"{lms[model, name, one.learning_rate]:.2f}" for name in (_BASELINE, _PAPER)),
            "" if math.isnan(one.reduction) else f"{100 * one.reduction:.0f} %",
            _interval(*_ends(one, "lms"), signed=True) if one.num_pairs else "",
            f"{_interval(*_ends(one, 'perplexity'), signed=True)} %" if one.num_pairs else "",
        ]
        for model, own in of_paper.groupby("model", sort=False)
        for equal in [own["at"] == "equal rates"]
        for one in own[equal if equal.any() else ~equal].itertuples()  # of a single rate they are the same
    ]
    columns = ("setting", "lr", f"LMS {_BASELINE}", f"LMS {_PAPER}", "reduction", "LMS difference", "perplexity")
    return str(markdown_table(columns, rows))


def _trajectory(file: Path) -> str:
    """Each objective at each checkpoint, and minus plain cross-entropy at the same one."""
    results = _read(file)
    if len(settings := {(one.model, one.learning_rate) for one in results.checkpoints}) > 1:
        raise ValueError(f"checkpoints are compared in one setting, not in {len(settings)}")
    runs = run_table(results)
    measured = ["lms", "log_perplexity"]
    if len(missing := runs[runs[measured].isna().any(axis=1)]):
        raise ValueError(f"{missing['title'].iloc[0]}: LMS or perplexity was not measured")
    of_baseline = runs[runs["objective"] == _BASELINE].set_index(["progress", "seed"])[measured]
    rows = []
    for (objective, progress), own in runs.groupby(["objective", "progress"], sort=False):
        values = own.set_index(["progress", "seed"])[measured]
        lms, log_perplexity = (over_seeds(values[name].tolist())[:3] for name in measured)
        row = [objective, f"{progress} %", _interval(*lms), "", _interval(*map(math.exp, log_perplexity)), ""]
        if objective != _BASELINE:
            differences = values - of_baseline.loc[values.index]
            lms, log_perplexity = (over_seeds(differences[name].tolist())[:3] for name in measured)
            row[3] = _interval(*lms, signed=True)
            row[5] = f"{_interval(*(100 * math.expm1(value) for value in log_perplexity), signed=True)} %"
        rows.append(row)
    columns = ("objective", "checkpoint", "LMS", "LMS difference", "perplexity", "perplexity difference")
    return str(markdown_table(columns, rows))


def _recitation(file: Path) -> str:
    """Targets and controls of each objective in each setting, and the change against plain cross-entropy."""
    results = _read(file)
    reductions = compare_objectives(evaluation_table(results, baseline=_BASELINE)[1], _BASELINE)
    change = {(one.setting, one.objective, one.measure): one for one in reductions.itertuples()}
    others, membership = _other_perplexity(file), _membership(file)
    runs = run_table(results)
    parts = []
    for model, of_model in runs.groupby("model", sort=False):
        rows = []
        for objective, own in of_model.groupby("objective", sort=False):
            changes = [change.get((model, objective, measure)) for measure in ("Avg LMS", "Perplexity")]
            rows.append(
                [
                    *(objective, str(len(own)), f"{own['lms'].mean():.1f}", f"{own['max_lms'].max():.0f}"),
                    *(f"{own['control_lms'].mean():.1f}", f"{math.exp(own['log_perplexity'].mean()):.2f}"),
                    *(others.get((model, objective), ""), _auc(membership, (objective, model))),
                    *("" if of is None else _percent(of) for of in changes),
                ]
            )
        columns = [
            *("objective", "runs", "LMS", "largest", "of controls", "perplexity", "of other text", "membership AUC"),
            *(f"{measure} against {_BASELINE}" for measure in ("LMS", "perplexity")),
        ]
        shown = [number for number in range(len(columns)) if any(row[number] for row in rows)]
        columns, *rows = ([line[number] for number in shown] for line in (columns, *rows))
        parts.append(f"**{model}**\n\n" + markdown_table(columns, rows))
    return "\n\n".join(parts)


def _percent(one: Any) -> str:
    """Return a change in percent with its interval over passages or blocks."""
    value, low, high = (0 - 100 * end for end in (one.reduction, one.high, one.low))  # not -0
    return f"{value:+.1f} %" + ("" if math.isnan(low) else f" ({low:+.1f} to {high:+.1f})")


def _of_script(name: str) -> Callable[[Path], str]:
    """Return the table of a script of this folder; its import is slow."""
    return lambda file: str(import_module(name).table(json.loads(file.read_text(encoding="utf-8"))))


def _audit(file: Path) -> str:
    """The first table of an audit's report."""
    shown = json.loads(file.read_text(encoding="utf-8"))["tables"][0]
    names = [column["name"] for column in shown["columns"]]
    cells = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in shown["rows"]]
    return str(markdown_table(names, cells))


_TABLES: dict[str, Callable[[Path], str]] = {
    "provenance": _provenance,
    "summary": _summary,
    "settings": _settings,
    "likelihoods": _likelihoods,
    "relearning": _relearning,
    "operating_points": _operating_points,
    "curves": _curves,
    "paper": _paper,
    "trajectory": _trajectory,
    "recitation": _recitation,
    "speed": _of_script("smollm2"),
    "implementations": _of_script("implementations"),
    "audit": _audit,
    "trust": _of_script("audit_trust"),
    "server": _of_script("audit_server"),
    "scale": _of_script("corpus_scale"),
}


@cache
def _read(file: Path) -> Results:
    return read_results(file)


@cache
def _trace(file: Path, peer: str = _PEER) -> Frontiers:
    return trace_frontiers(_read(file), baseline=_BASELINE, references=[peer])


def _rate(point: Any) -> str:
    if math.isnan(point.learning_rate):
        return ""
    return f"{point.learning_rate:g}" + (f" ({point.range_end})" if point.range_end else "")


def _ends(row: Any, name: str) -> Iterator[float]:
    """Return a mean and the ends of its interval."""
    return (getattr(row, name + end) for end in ("", "_low", "_high"))


def _interval(mean: float, low: float, high: float, *, signed: bool = False) -> str:
    form = "{:+.1f}" if signed else "{:.1f}"
    return form.format(mean) + ("" if math.isnan(low) else f" ({form.format(low)} to {form.format(high)})")


def _change(one: Any) -> str:
    if one is None or math.isnan(one.perplexity):
        return ""
    lms = "" if math.isnan(one.reduction) else f"{-100 * one.reduction:+.0f} %, "
    return f"{lms}{one.perplexity:+.1f} %"


def draw_summary(file: str = "evidence.jsonl") -> None:
    """Draw the main arms where copies are exact and where they differ, into the folder of that file."""
    from matplotlib.figure import Figure

    points = _trace(RESULTS / file, _DEDUPLICATED).points.set_index(["model", "objective"])
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    colors = ("#000000", "0.55", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#D55E00", "#009E73")
    styles = zip(_ARMS, "oosDssPP", colors, strict=True)
    for axes, model in zip(panels, _COPIES, strict=True):
        axes.set_title(f"{model} copies", loc="left", fontsize="medium")
        axes.axhline(
            points.loc[model, "control_lms"].mean(), color="0.4", linestyle="--", label="never seen: the floor"
        )
    for objective, marker, color in styles:
        for axes, model in zip(panels, _COPIES, strict=True):
            at = points.loc[model, objective]
            reach = {
                error: [[at[name] - at[f"{name}_low"]], [at[f"{name}_high"] - at[name]]]
                for error, name in (("xerr", "perplexity"), ("yerr", "lms"))
            }
            axes.errorbar(at["perplexity"], at["lms"], **reach, fmt=marker, color=color, label=objective)
    for axes in panels:
        axes.set(yscale="log", xlabel="perplexity on unseen text", yticks=[2, 5, 10, 20, 40])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("recited tokens (LMS)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(PAGE.parent / "results" / "summary.svg", metadata={"Date": None})


def draw_figures(file: str = "frontier.jsonl") -> None:
    """Draw the frontier of each model of a results file, into the folder of that file."""
    for model, points in _trace(RESULTS / file).points.groupby("model", sort=False):
        if points["operating"].any():
            name = model.lower().replace(" ", "-")
            frontier_drawing(model, points).savefig(RESULTS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "results"  # the same file for the same results
    draw_summary()
    draw_figures()
    for page, folder in PAGES.items():
        page.write_text(filled(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
