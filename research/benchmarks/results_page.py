"""Write the tables and figures of pages of the documentation from the records of experiments and
benchmarks.

    python research/benchmarks/results_page.py

A table is between two comments that say what it is and which file it comes from; the text around
them is by hand.

    <!-- table: operating_points frontier.jsonl -->
    <!-- end -->

Figures are files in research/results, one for each model of frontier.jsonl, and summary.svg. The
figure of docs/results.md is docs/results/utility.svg.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import decisive_tables
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from measuring import markdown_table

from research.frontier import Frontiers, trace_frontiers
from research.frontier_report import frontier_drawing
from research.seeds import over_seeds
from tfidf_tune.compare import run_table
from tfidf_tune.compare._evaluations import compare_objectives, evaluation_table
from tfidf_tune.report.document import Footnotes
from tfidf_tune.results import Results, bootstrap_interval, read_results
from tfidf_tune.results.membership_table import membership_table
from tfidf_tune.results.wording import cell

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
RESULTS = Path(__file__).parents[1] / "results"
README = Path(__file__).parents[2] / "README.md"
EVIDENCE = RESULTS / "evidence.md"
ALL_TABLES = RESULTS / "README.md"
# Pages, and where the records of their tables are.
PAGES = dict.fromkeys((README, PAGE, EVIDENCE, ALL_TABLES, RESULTS / "decisive.md"), RESULTS)
PAGES |= dict.fromkeys(
    (
        RESULTS / "smollm2.md",
        RESULTS / "audits.md",
        RESULTS / "memaudit.md",
        PAGE.with_name("audit_evidence.md"),
        PAGE.with_name("data.md"),
    ),
    Path(__file__).parent / "results",
)
_BASELINE = "CE"
_PEER = "Goldfish"
_PAPER = "TF-IDF"
_START = "Start"  # the model before it was fine-tuned
_DEDUPLICATED = "CE MinHash dedup"
# The arms and settings of the first table and figure.
_ARMS = [
    "CE",
    "CE lower lr",
    "TF-IDF",
    "Goldfish",
    _DEDUPLICATED,
    "CE MinHash 0.11",
    "Repetition",
    "Repetition, MinHash dedup",
]
_TOKENS = "CE MinHash 0.35"  # an arm of the frontier, which was measured with n-grams of tokens
_COPIES = ["exact", "fuzzy 10%"]
_BLOCK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_Columns = Mapping[str, Callable[[Any], str]]  # header -> the cell of a row


def filled(page: str, folder: Path | None = None) -> str:
    """Replace the tables of a page (Markdown) by those of records in a folder, by default RESULTS.

    Raises:
        KeyError: If the name of a table is unknown.
        FileNotFoundError: If a results file is missing.
    """

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_TABLES[match[2]]((folder or RESULTS) / match[3])}\n\n{match[5]}"

    return _BLOCK.sub(block, page)


@cache
def _read(file: Path) -> Results:
    return read_results(file)


@cache
def _runs(file: Path) -> Any:
    return run_table(_read(file))


@cache
def _trace(file: Path, peer: str = _PEER) -> Frontiers:
    return trace_frontiers(_read(file), baseline=_BASELINE, references=[peer])


def _differences(found: Frontiers) -> dict[tuple[str, str, str], Any]:
    """Model, objective and reference -> their difference at the operating points; the start is
    compared with none.
    """
    rows = found.differences[found.differences["at"] == "operating points"].itertuples()
    return {
        (one.model, one.objective, one.reference): one for one in rows if one.objective != _START
    }


def _table(rows: Iterable[Any], columns: _Columns) -> str:
    return markdown_table([*columns], [[cell(row) for cell in columns.values()] for row in rows])


def _by_model(rows: Any, columns: _Columns, floors: Any) -> str:
    """Lay out a table for each model; ``floors`` has the LMS of its controls."""
    tables = [
        (model, _table(own.itertuples(), columns))
        for model, own in rows.groupby("model", sort=False)
    ]
    return "\n\n".join(
        f"**{model}** (controls {floors[model]:.1f})\n\n{table}" for model, table in tables
    )


def _interval(row: Any, name: str, sign: str = "") -> str:
    """Write a mean of a row and the ends of its interval, if it has one."""
    return _with_ends([getattr(row, name + end) for end in ("", "_low", "_high")], sign=sign)


def _with_ends(values: Sequence[float], decimals: int = 1, sign: str = "", unit: str = "") -> str:
    mean, low, high = values
    return cell(mean, (low, high), decimals, sign, unit) or ""


def _provenance(file: Path) -> str:
    results = _read(file)
    runs = _runs(file)
    seconds = [
        one.training_seconds for one in results.checkpoints if one.training_seconds is not None
    ]
    passages = results.scores[(results.scores["kind"] == "target") & (results.scores["unit"] != "")]
    num_targets = passages.groupby("checkpoint")["unit"].nunique()
    asked = sorted(set(zip(num_targets, runs["num_predictions"].astype(int), strict=True)))
    sizes = [f"{targets}, {tokens:,}" for targets, tokens in asked]
    seeds = sorted(runs["seed"].dropna().unique())
    rows = {
        "runs": f"{runs['run'].nunique()}, seeds {', '.join(map(str, seeds))}",
        "targets, held-out tokens": "; ".join(sizes),
        "seconds of a training": f"{min(seconds):.0f} to {max(seconds):.0f}",
        **{name: value for name, value in results.provenance.items() if name != "platform"},
    }
    return markdown_table(("", ""), [*rows.items()])


def _summary(file: Path) -> str:
    """What the main arms recite and cost where copies are exact and where they differ."""
    points = _trace(file, _DEDUPLICATED).points.set_index(["objective", "model"])
    shown: dict[str, Callable[[Any], str]] = {
        "recited above chance": lambda names: _interval(points.loc[names], "excess"),
        "perplexity": lambda names: _interval(points.loc[names], "perplexity"),
        "membership AUC": lambda names: _auc(file, names[1], names[0]),
    }
    rows = []
    for objective in _ARMS:
        cells = []
        for text in shown.values():
            for model in _COPIES:
                names = (objective, model)
                cells.append(text(names) if names in points.index else "")
        rows.append([objective, *cells])
    header = ["objective"]
    for name in shown:
        header += [f"{name}, {model}" for model in _COPIES]
    return markdown_table(header, rows)


def _settings(file: Path) -> str:
    """Each arm in each setting: recitation, perplexity on text of two kinds, and verdicts."""
    found = _trace(file, _DEDUPLICATED)
    others = _other_perplexity(file)
    against = _differences(found)
    columns = {
        "objective": lambda one: one.objective,
        "seeds": lambda one: str(len(one.seeds)),
        "LMS": lambda one: _interval(one, "lms"),
        "largest": lambda one: f"{one.max_lms:.0f}",
        "perplexity": lambda one: _interval(one, "perplexity"),
        "of other text": lambda one: others.get((one.model, one.objective), ""),
        f"against {_BASELINE}": lambda one: _verdict(against, one, _BASELINE),
        f"against {_DEDUPLICATED}": lambda one: _verdict(against, one, _DEDUPLICATED),
    }
    return _by_model(found.points, columns, found.points.groupby("model")["control_lms"].mean())


def _exposures(file: Path) -> str:
    """Each number of exposures of repetition weights in each setting."""
    points = _trace(file, "1 exposure").points
    columns = {
        "objective": lambda one: one.objective,
        "seeds": lambda one: str(len(one.seeds)),
        "recited above chance": lambda one: _interval(one, "excess"),
        "perplexity": lambda one: _interval(one, "perplexity"),
        "membership AUC": lambda one: _auc(file, one.model, one.objective),
    }
    return _by_model(points, columns, points.groupby("model")["control_lms"].mean())


def _verdict(against: Mapping[tuple[str, str, str], Any], one: Any, reference: str) -> str:
    difference = against.get((one.model, one.objective, reference))
    return "" if difference is None else str(difference.verdict)


def _other_perplexity(file: Path) -> dict[tuple[str, str], str]:
    """Model and objective -> geometric mean over seeds of the perplexity on other text."""
    return {
        names: f"{math.exp(nll):.1f}" for names, nll in _means(file, "other_nll", "block").items()
    }


def _means(file: Path, metric: str, kind: str) -> dict[tuple[str, str], float]:
    """Model and objective -> mean over seeds of a score, which is weighted by its counts within a
    checkpoint.
    """
    scores = _read(file).scores
    rows = scores[(scores["metric"] == metric) & (scores["kind"] == kind)]
    sums = (
        rows.assign(sum=rows["value"] * rows["count"]).groupby("checkpoint")[["sum", "count"]].sum()
    )
    means = _runs(file)[["model", "objective"]].join(
        (sums["sum"] / sums["count"]).rename("mean"), how="inner"
    )
    return {
        names: float(mean)
        for names, mean in means.groupby(["model", "objective"])["mean"].mean().items()
    }


def _likelihoods(file: Path) -> str:
    """Likelihood, membership and near-verbatim recitation of each arm in each setting."""
    frame = _membership(file).sort_values(["Model", "Objective"])
    distances, common = (
        _means(file, metric, "target") for metric in ("edit_distance", "common_subsequence")
    )
    attacks = ("AUC", "AUC zlib", "AUC Min-K%", "AUC Min-K%++", "AUC Loss against start")
    decimals = dict.fromkeys(("NLL of targets", "NLL of controls", *attacks), 2)
    decimals |= {"TPR at 1 % FPR (%)": 0, "Exposure (bits)": 2}
    shown = {name: number for name, number in decimals.items() if name in frame}
    rows = []
    for _, one in frame.iterrows():
        names = one["Model"], one["Objective"]
        near = (f"{distances[names]:.2f}", f"{common[names]:.0f}")
        rows.append(
            [*names, *(_of_membership(one, name, number) for name, number in shown.items()), *near]
        )
    columns = ["setting", "objective", *shown, "edit distance", "common subsequence (tokens)"]
    return markdown_table(columns, rows)


def _auc(file: Path, model: str, objective: str) -> str:
    membership = _membership(file)
    rows = membership[(membership["Objective"] == objective) & (membership["Model"] == model)]
    return "" if rows.empty else _of_membership(rows.iloc[0], "AUC", 2)


def _of_membership(row: Any, name: str, decimals: int) -> str:
    """A cell of a row of the membership table, with its interval if it has one."""
    # The ends of "TPR at 1 % FPR (%)" are "TPR from" and "TPR to".
    start = name.removesuffix(" at 1 % FPR (%)")
    return _with_ends(
        [row[name], *(row.get(f"{start} {end}", math.nan) for end in ("from", "to"))], decimals
    )


@cache
def _membership(file: Path) -> Any:
    """The table of likelihood and membership of a file's last checkpoints."""
    runs = _runs(file)
    runs = runs[runs["progress"] == runs.groupby("model")["progress"].transform("max")]
    groups = [
        ({"Model": model, "Objective": objective}, own.index.tolist())
        for (model, objective), own in runs.groupby(["model", "objective"], sort=False)
    ]
    return membership_table(_read(file).scores, groups, Footnotes()).frame


def _relearning(file: Path) -> str:
    """Steps of training that bring passages and controls back, of models named by
    `runs/frontier/SETTING/OBJECTIVE`.
    """
    settings = dict(zip(("llama-high", "llama-high-fuzzy"), _COPIES, strict=True))
    objectives = {name.lower().replace(" ", "-"): name for name in (*_ARMS, _TOKENS)}
    steps: dict[tuple[str, str], list[list[list[int]]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        setting, objective = [*run["model"].split("/")[2:4], "", ""][:2]
        own = [
            [one["steps"] for one in run["passages"] if one["kind"] == kind]
            for kind in ("target", "control")
        ]
        steps.setdefault((settings.get(setting, ""), objectives.get(objective, _START)), []).append(
            own
        )
    rows = []
    for names, of_seeds in sorted(steps.items()):
        targets, controls = np.array(of_seeds, dtype=np.float64).mean(axis=0)
        sooner = bootstrap_interval(
            lambda ours, theirs, axis=-1: theirs.mean(axis) - ours.mean(axis),
            targets,
            controls,
            paired=False,
        )
        difference = _with_ends([controls.mean() - targets.mean(), sooner.low, sooner.high])
        rows.append(
            [
                *names,
                str(len(of_seeds)),
                f"{targets.mean():.1f}",
                f"{controls.mean():.1f}",
                difference,
            ]
        )
    columns = ["setting", "objective", "runs", "passages", "controls", "controls minus passages"]
    return markdown_table(columns, rows)


def _operating_points(file: Path) -> str:
    """Each objective at its learning rate of the lowest held-out perplexity, and what it is
    compared with.
    """
    found = _trace(file)
    against = _differences(found)
    columns = {
        "objective": lambda one: one.objective,
        "lr": _rate,
        "LMS": lambda one: _interval(one, "lms"),
        "perplexity": lambda one: _interval(one, "perplexity"),
        f"LMS, perplexity against {_BASELINE}": lambda one: _change(
            against.get((one.model, one.objective, _BASELINE))
        ),
        f"verdict against {_BASELINE}": lambda one: _verdict(against, one, _BASELINE),
        f"against {_PEER}": lambda one: _verdict(against, one, _PEER),
    }
    points = found.points[found.points["operating"]]
    tables = _by_model(points, columns, _runs(file).groupby("model")["control_lms"].mean())
    edges = [
        f"{model}: {', '.join(f'{one.objective} ({one.range_end})' for one in own.itertuples())}"
        for model, own in points[points["range_end"].isin(["lowest", "highest"])].groupby(
            "model", sort=False
        )
    ]
    return (
        f"{tables}\n\nOperating points at an end of the learning rates tried: "
        f"{'; '.join(edges) or 'none'}."
    )


def _rate(point: Any) -> str:
    if math.isnan(point.learning_rate):
        return ""
    return f"{point.learning_rate:g}" + (f" ({point.range_end})" if point.range_end else "")


def _change(one: Any) -> str:
    if one is None or math.isnan(one.perplexity):
        return ""
    lms = "" if math.isnan(one.reduction) else f"{-100 * one.reduction:+.0f} %, "
    return f"{lms}{one.perplexity:+.1f} %"


def _curves(file: Path) -> str:
    """The means over seeds of each objective at each learning rate."""
    points = _trace(file).points.dropna(subset=["learning_rate"])
    points = points.assign(
        means=[f"{one.lms:.1f} / {one.perplexity:.1f}" for one in points.itertuples()]
    )
    parts = []
    for model, own in points.groupby("model", sort=False):
        table = own.pivot(index="objective", columns="learning_rate", values="means").fillna("")
        rows = table.reindex(own["objective"].unique()).reset_index().to_numpy().tolist()
        parts.append(
            f"**{model}**\n\n"
            + markdown_table(["objective", *(f"{rate:g}" for rate in table)], rows)
        )
    return "\n\n".join(parts)


def _paper(file: Path) -> str:
    """The paper's objective against plain cross-entropy at each learning rate."""
    found = _trace(file)
    lms = found.points.set_index(["model", "objective", "learning_rate"])["lms"]
    differences = found.differences
    differences = differences[
        (differences["objective"] == _PAPER) & (differences["reference"] == _BASELINE)
    ]
    # Of a single rate, the operating points are all that there is.
    at_equal = differences.groupby("model")["at"].transform(
        lambda at: "equal rates" if len(at) > 1 else at
    )
    columns = {
        "setting": lambda one: one.model,
        "lr": lambda one: f"{one.learning_rate:g}",
        f"LMS {_BASELINE}": lambda one: f"{lms[one.model, _BASELINE, one.learning_rate]:.2f}",
        f"LMS {_PAPER}": lambda one: f"{lms[one.model, _PAPER, one.learning_rate]:.2f}",
        "reduction": lambda one: (
            "" if math.isnan(one.reduction) else f"{100 * one.reduction:.0f} %"
        ),
        "LMS difference": lambda one: _interval(one, "lms", "+") if one.num_pairs else "",
        "perplexity": lambda one: f"{_interval(one, 'perplexity', '+')} %" if one.num_pairs else "",
    }
    return _table(differences[differences["at"] == at_equal].itertuples(), columns)


def _trajectory(file: Path) -> str:
    """Each objective at each checkpoint, and minus plain cross-entropy at the same one."""
    runs = _runs(file).set_index(["progress", "seed"])
    if runs["setting"].nunique() > 1 or runs[["lms", "log_perplexity"]].isna().any(axis=None):
        raise ValueError(
            f"{file.name}: checkpoints are compared in one setting, with LMS and perplexity"
        )
    of_baseline = runs[runs["objective"] == _BASELINE]
    rows = []
    for (objective, progress), own in runs.groupby(["objective", "progress"], sort=False):
        row = [objective, f"{progress} %"]
        for name, scale, of_difference, unit in (
            ("lms", float, float, ""),
            ("log_perplexity", math.exp, lambda value: 100 * math.expm1(value), " %"),
        ):
            row.append(_with_ends([*map(scale, over_seeds(own[name].tolist())[:3])]))
            difference = over_seeds((own[name] - of_baseline.loc[own.index, name]).tolist())[:3]
            text = _with_ends([*map(of_difference, difference)], sign="+") + unit
            row.append("" if objective == _BASELINE else text)
        rows.append(row)
    columns = (
        "objective",
        "checkpoint",
        "LMS",
        "LMS difference",
        "perplexity",
        "perplexity difference",
    )
    return markdown_table(columns, rows)


def _recitation(file: Path) -> str:
    """Targets and controls of each objective in each setting, and the change against plain
    cross-entropy.
    """
    reductions = compare_objectives(evaluation_table(_read(file), baseline=_BASELINE)[1], _BASELINE)
    change = {
        (one.setting, one.objective, one.measure): _percent(one) for one in reductions.itertuples()
    }
    others = _other_perplexity(file)
    header = [
        "objective",
        "runs",
        "LMS",
        "largest",
        "of controls",
        "perplexity",
        "of other text",
        "membership AUC",
        f"LMS against {_BASELINE}",
        f"perplexity against {_BASELINE}",
    ]
    parts = []
    for model, of_model in _runs(file).groupby("model", sort=False):
        rows = []
        for objective, own in of_model.groupby("objective", sort=False):
            row = [
                objective,
                str(len(own)),
                f"{own['lms'].mean():.1f}",
                f"{own['max_lms'].max():.0f}",
                f"{own['control_lms'].mean():.1f}",
                f"{math.exp(own['log_perplexity'].mean()):.2f}",
                others.get((model, objective), ""),
                _auc(file, model, objective),
                change.get((model, objective, "Avg LMS"), ""),
                change.get((model, objective, "Perplexity"), ""),
            ]
            rows.append(row)
        # Columns without a cell are left out.
        measured = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
        names, *shown_rows = zip(*measured, strict=True)
        parts.append(f"**{model}**\n\n" + markdown_table(names, shown_rows))
    return "\n\n".join(parts)


def _percent(one: Any) -> str:
    """Write a change in percent with its interval over passages or blocks."""
    values = [-100 * end for end in (one.reduction, one.high, one.low)]
    return _with_ends(values, sign="+", unit=" %")


def _of_script(name: str, table: str = "table") -> Callable[[Path], str]:
    """Return the table of a script of this folder; its import is slow."""
    return lambda file: str(
        getattr(import_module(name), table)(json.loads(file.read_text(encoding="utf-8")))
    )


def _audit(file: Path) -> str:
    """The first table of an audit's report."""
    shown = json.loads(file.read_text(encoding="utf-8"))["tables"][0]
    names = [column["name"] for column in shown["columns"]]
    return markdown_table(names, [[_cell(value) for value in row] for row in shown["rows"]])


def _cell(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


_TABLES: dict[str, Callable[[Path], str]] = {
    "provenance": _provenance,
    "summary": _summary,
    "settings": _settings,
    "exposures": _exposures,
    "likelihoods": _likelihoods,
    "relearning": _relearning,
    "operating_points": _operating_points,
    "curves": _curves,
    "paper": _paper,
    "trajectory": _trajectory,
    "recitation": _recitation,
    "audit": _audit,
    "speed": _of_script("smollm2"),
    "implementations": _of_script("implementations"),
    "trust": _of_script("audit_trust"),
    "server": _of_script("audit_server"),
    "limits": _of_script("audit_limits", "limits_table"),
    "draws": _of_script("audit_limits", "simulation_table"),
    "readings": _of_script("audit_limits", "readings_table"),
    "scale": _of_script("corpus_scale"),
    "differing": _of_script("copies_that_differ"),
    "holdout_copies": _of_script("holdout_copies"),
    "detection": _of_script("memaudit", "detection_table"),
    "recited_by_both": _of_script("memaudit", "recitation_table"),
    "alarms": _of_script("memaudit", "alarms_table"),
    "costs": _of_script("memaudit", "costs_table"),
    "development": decisive_tables.development,
    "contrasts": decisive_tables.contrasts,
    "not_worse": decisive_tables.not_worse,
    "arms": decisive_tables.arms,
    "methods": decisive_tables.methods,
    "utility": decisive_tables.utility,
    "copies": decisive_tables.copies,
    "changes": decisive_tables.changes,
    "attacks": decisive_tables.membership,
    "loss_by_copies": decisive_tables.detection,
    "early": decisive_tables.early,
    "afterwards": decisive_tables.afterwards,
    "natural": decisive_tables.natural,
    "larger": decisive_tables.larger,
    "larger_contrasts": decisive_tables.larger_contrasts,
    "counts": decisive_tables.counts,
    "machine": decisive_tables.machine,
}


def draw_summary() -> None:
    """Draw the main arms where copies are exact and where they differ."""
    points = _trace(RESULTS / "evidence.jsonl", _DEDUPLICATED).points.set_index(
        ["model", "objective"]
    )
    figure = Figure(figsize=(8.4, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    colors = ("#000000", "0.55", "#CC79A7", "#E69F00", "#56B4E9", "#0072B2", "#D55E00", "#009E73")
    for axes, model in zip(panels, _COPIES, strict=True):
        axes.set_title(f"{model} copies", loc="left", fontsize="medium")
        floor = points.loc[model, "control_lms"].mean()
        axes.axhline(floor, color="0.4", linestyle="--", label="never seen: chance")
        for objective, marker, color in zip(_ARMS, "oosDssPP", colors, strict=True):
            at = points.loc[model, objective]
            axes.errorbar(
                at["perplexity"],
                at["lms"],
                xerr=_reach(at, "perplexity"),
                yerr=_reach(at, "lms"),
                fmt=marker,
                color=color,
                label=objective,
            )
        axes.set(yscale="log", xlabel="perplexity on unseen text", yticks=[2, 5, 10, 20, 40])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("recited tokens (LMS)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.savefig(RESULTS / "summary.svg", metadata={"Date": None})


def _reach(point: Any, name: str) -> list[list[float]]:
    """Return how far an interval reaches below its mean, and above."""
    below = point[name] - point[f"{name}_low"]
    above = point[f"{name}_high"] - point[name]
    return [[below], [above]]


def draw_figures() -> None:
    """Draw the frontier of each model."""
    for model, points in _trace(RESULTS / "frontier.jsonl").points.groupby("model", sort=False):
        if points["operating"].any():
            name = model.lower().replace(" ", "-")
            frontier_drawing(model, points).savefig(
                RESULTS / f"{name}.svg", metadata={"Date": None}
            )


if __name__ == "__main__":
    matplotlib.rcParams["svg.hashsalt"] = "results"  # the same file for the same results
    decisive_tables.draw_curves(RESULTS / "decisive.jsonl", PAGE.parent / "results" / "utility.svg")
    draw_summary()
    draw_figures()
    for page, folder in PAGES.items():
        page.write_text(filled(page.read_text(encoding="utf-8"), folder), encoding="utf-8")
