"""Write the tables and figures of docs/results.md from results files of experiments.

    python benchmarks/results_page.py

A table is between two comments that say what it is and which file it comes from; the text around them is by hand.

    <!-- table: operating_points frontier.jsonl -->
    <!-- end -->

A figure is a file beside the results, one for each model of frontier.jsonl.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path

from measuring import markdown_table  # type: ignore[import-not-found]

from tfidf_tune.analysis._frontier import Curve, Frontier, Point, SeedDifference, run_table, trace_frontiers
from tfidf_tune.analysis._over_seeds import SeedEstimate, over_seeds
from tfidf_tune.report._frontier_figure import frontier_drawing
from tfidf_tune.results import Results, read_results

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
RESULTS = PAGE.parent / "results"
_BASELINE, _PEER, _PAPER = "CE", "Goldfish", "TF-IDF"
_START = "Start"  # the model before it was fine-tuned
_BLOCK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Replace the tables of a page (Markdown).

    Raises:
        KeyError: If there is no table of a name.
        FileNotFoundError: If there is no results file of a name.
    """

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{_TABLES[match[2]](read_results(RESULTS / match[3]))}\n\n{match[5]}"

    return _BLOCK.sub(block, page)


def _provenance(results: Results) -> str:
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


def _operating_points(results: Results) -> str:
    """Each objective at its learning rate of the lowest held-out perplexity, and what it is compared with."""
    parts = []
    runs = run_table(results)
    for frontier in _frontiers(results):
        against = {(one.objective, one.reference): one for one in frontier.at_operating_points}
        rows = [
            [
                curve.objective,
                _rate(curve),
                _interval(curve.operating.lms),
                _interval(curve.operating.log_perplexity, math.exp),
                *_verdicts(curve, against),
            ]
            for curve in frontier.curves
            if curve.operating is not None
        ]
        columns = [
            *("objective", "lr", "LMS", "perplexity", f"LMS, perplexity against {_BASELINE}"),
            *(f"verdict against {_BASELINE}", f"against {_PEER}"),
        ]
        floor = statistics.fmean(runs.loc[runs["model"] == frontier.model, "control_lms"].dropna())
        parts.append(f"**{frontier.model}** (controls {floor:.1f})\n\n" + markdown_table(columns, rows))
    return "\n\n".join(parts)


def _curves(results: Results) -> str:
    """The means over seeds of each objective at each learning rate."""
    parts = []
    for frontier in _frontiers(results):
        points = {
            curve.objective: {point.learning_rate: point for point in curve.points if point.learning_rate is not None}
            for curve in frontier.curves
        }
        rates = sorted({rate for of_objective in points.values() for rate in of_objective})
        rows = [
            [objective, *(_means(of_objective[rate]) if rate in of_objective else "" for rate in rates)]
            for objective, of_objective in points.items()
            if of_objective
        ]
        columns = ["objective", *(f"{rate:g}" for rate in rates)]
        parts.append(f"**{frontier.model}**\n\n" + markdown_table(columns, rows))
    return "\n\n".join(parts)


def _means(point: Point) -> str:
    return f"{point.lms.mean:.1f} / {point.perplexity:.1f}"


def _paper(results: Results) -> str:
    """The paper's objective against plain cross-entropy at each learning rate alone."""
    rows = [
        [
            frontier.model,
            f"{one.learning_rate:g}",
            f"{_mean_lms(frontier, _BASELINE, one.learning_rate):.2f}",
            f"{_mean_lms(frontier, _PAPER, one.learning_rate):.2f}",
            "" if one.reduction is None else f"{100 * one.reduction:.0f} %",
            "" if one.lms is None else _interval(one.lms, signed=True),
            "" if one.log_perplexity is None else _percent(one.log_perplexity),
        ]
        for frontier in _frontiers(results)
        for one in frontier.at_equal_rates or frontier.at_operating_points  # of a single rate they are the same
        if (one.objective, one.reference) == (_PAPER, _BASELINE)
    ]
    columns = ("setting", "lr", f"LMS {_BASELINE}", f"LMS {_PAPER}", "reduction", "LMS difference", "perplexity")
    return str(markdown_table(columns, rows))


def _trajectory(results: Results) -> str:
    """Each objective at each checkpoint, and minus plain cross-entropy at the same one."""
    if len(settings := {(one.model, one.learning_rate) for one in results.checkpoints}) > 1:
        raise ValueError(f"checkpoints are compared in one setting, not in {len(settings)}")
    runs = run_table(results)
    if missing := [row.title for row in runs.itertuples() if math.isnan(row.lms) or math.isnan(row.log_perplexity)]:
        raise ValueError(f"{missing[0]}: LMS or perplexity was not measured")
    measured = {(row.objective, row.progress, row.seed): (row.lms, row.log_perplexity) for row in runs.itertuples()}
    rows = []
    for objective, progress in dict.fromkeys(zip(runs["objective"], runs["progress"], strict=True)):
        seeds = [seed for name, at, seed in measured if (name, at) == (objective, progress)]
        ours, theirs = ([measured[name, progress, seed] for seed in seeds] for name in (objective, _BASELINE))
        lms, log_perplexity = (over_seeds(values) for values in zip(*ours, strict=True))
        row = [objective, f"{progress} %", _interval(lms), "", _interval(log_perplexity, math.exp), ""]
        if objective != _BASELINE:
            pairs = list(zip(ours, theirs, strict=True))
            row[3] = _interval(over_seeds([one[0] - other[0] for one, other in pairs]), signed=True)
            row[5] = _percent(over_seeds([one[1] - other[1] for one, other in pairs]))
        rows.append(row)
    columns = ("objective", "checkpoint", "LMS", "LMS difference", "perplexity", "perplexity difference")
    return str(markdown_table(columns, rows))


_TABLES: dict[str, Callable[[Results], str]] = {
    "provenance": _provenance,
    "operating_points": _operating_points,
    "curves": _curves,
    "paper": _paper,
    "trajectory": _trajectory,
}


def _frontiers(results: Results) -> list[Frontier]:
    return trace_frontiers(results, baseline=_BASELINE, references=[_PEER])


def _mean_lms(frontier: Frontier, objective: str, rate: float | None) -> float:
    curve = next(curve for curve in frontier.curves if curve.objective == objective)
    return next(point.lms.mean for point in curve.points if point.learning_rate == rate)


def _verdicts(curve: Curve, against: Mapping[tuple[str, str], SeedDifference]) -> list[str]:
    if curve.objective == _START:
        return ["", "", ""]
    to_baseline, to_peer = (against.get((curve.objective, reference)) for reference in (_BASELINE, _PEER))
    return [_change(to_baseline), _words(to_baseline), _words(to_peer)]


def _rate(curve: Curve) -> str:
    if curve.operating is None or curve.operating.learning_rate is None:
        return ""
    mark = f" ({curve.range_end})" if curve.range_end else ""
    return f"{curve.operating.learning_rate:g}{mark}"


def _interval(estimate: SeedEstimate, scale: Callable[[float], float] = float, *, signed: bool = False) -> str:
    form = "{:+.1f}" if signed else "{:.1f}"
    mean = form.format(scale(estimate.mean))
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} ({form.format(scale(estimate.low))} to {form.format(scale(estimate.high))})"


def _percent(estimate: SeedEstimate) -> str:
    return _interval(estimate, lambda logarithm: 100 * math.expm1(logarithm), signed=True) + " %"


def _change(one: SeedDifference | None) -> str:
    if one is None or one.log_perplexity is None:
        return ""
    lms = "" if one.reduction is None else f"{-100 * one.reduction:+.0f} %, "
    return f"{lms}{100 * math.expm1(one.log_perplexity.mean):+.1f} %"


def _words(one: SeedDifference | None) -> str:
    return "" if one is None else one.verdict


def draw_figures(file: str = "frontier.jsonl") -> None:
    """Draw the frontier of each model of a results file, into the folder of that file."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "results"  # the same file for the same results
    for frontier in _frontiers(read_results(RESULTS / file)):
        drawing = frontier_drawing(frontier)
        if drawing is not None:
            name = frontier.model.lower().replace(" ", "-")
            drawing.savefig(RESULTS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_figures()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
