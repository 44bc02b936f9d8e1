"""The tables and figures of docs/results.md, from the records that experiments wrote.

    python benchmarks/results_page.py            write them

A table stands between two comments that say what it is and which file it comes from; the text around them is by hand.

    <!-- table: operating_points frontier.jsonl -->
    <!-- end -->

A figure is a file beside the records, one for each model of frontier.jsonl.
"""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from measuring import markdown_table  # type: ignore[import-not-found]

from tfidf_tune.analysis import (
    Frontier,
    FrontierCurve,
    FrontierPoint,
    RunRecord,
    SeedDifference,
    SeedEstimate,
    over_seeds,
    read_records,
    trace_frontiers,
)
from tfidf_tune.report import frontier_drawing

PAGE = Path(__file__).parents[1] / "docs" / "results.md"
RECORDS = PAGE.parent / "results"
_BASELINE, _PEER, _PAPER = "CE", "Goldfish", "TF-IDF"
_START = "Start"  # the model before it was fine-tuned
_BLOCK = re.compile(r"(<!-- table: (\w+) (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: str) -> str:
    """Put the tables into a page.

    Args:
        page (str): Markdown, whatever stands between its comments.

    Returns:
        str: the page with its tables.

    Raises:
        KeyError: If there is no table of a name.
        FileNotFoundError: If there is no file of records of a name.
    """

    def block(match: re.Match[str]) -> str:
        records, provenance = read_records(RECORDS / match[3])
        return f"{match[1]}\n{_TABLES[match[2]](records, provenance)}\n\n{match[5]}"

    return _BLOCK.sub(block, page)


def _provenance(records: Sequence[RunRecord], provenance: dict[str, str]) -> str:
    seeds = sorted({record.seed for record in records if record.seed is not None})
    seconds = [record.training_seconds for record in records if record.training_seconds is not None]
    rows = {
        "runs": f"{len({record.run for record in records})}, seeds {', '.join(map(str, seeds))}",
        "targets, held-out tokens": _numbers_of_questions(records),
        "seconds of a training": f"{min(seconds):.0f} to {max(seconds):.0f}",
        **{name: value for name, value in provenance.items() if name != "platform"},
    }
    return str(markdown_table(("", ""), [list(row) for row in rows.items()]))


def _numbers_of_questions(records: Sequence[RunRecord]) -> str:
    numbers = {(len(record.lms_by_passage), record.num_predictions) for record in records}
    return "; ".join(f"{targets}, {tokens:,}" for targets, tokens in sorted(numbers))


def _operating_points(records: Sequence[RunRecord], _: dict[str, str]) -> str:
    """Each objective at its learning rate of the lowest held-out perplexity, and what it is compared with."""
    parts = []
    for frontier in _frontiers(records):
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
        controls = [record.control_lms for record in records if record.model == frontier.model]
        floor = statistics.fmean(value for value in controls if value is not None)
        parts.append(f"**{frontier.model}** (controls {floor:.1f})\n\n" + markdown_table(columns, rows))
    return "\n\n".join(parts)


def _curves(records: Sequence[RunRecord], _: dict[str, str]) -> str:
    """The means over seeds of each objective at each learning rate."""
    parts = []
    for frontier in _frontiers(records):
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


def _means(point: FrontierPoint) -> str:
    return f"{point.lms.mean:.1f} / {point.perplexity:.1f}"


def _paper(records: Sequence[RunRecord], _: dict[str, str]) -> str:
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
        for frontier in _frontiers(records)
        for one in frontier.at_equal_rates or frontier.at_operating_points  # of a single rate they are the same
        if (one.objective, one.reference) == (_PAPER, _BASELINE)
    ]
    columns = ("setting", "lr", f"LMS {_BASELINE}", f"LMS {_PAPER}", "reduction", "LMS difference", "perplexity")
    return str(markdown_table(columns, rows))


def _trajectory(records: Sequence[RunRecord], _: dict[str, str]) -> str:
    """Each objective at each checkpoint, and minus plain cross-entropy at the same one."""
    if len(settings := {(one.model, one.learning_rate) for one in records}) > 1:
        raise ValueError(f"checkpoints are compared in one setting, not in {len(settings)}")
    measured = {(one.objective, one.progress, one.seed): _measured(one) for one in records}
    rows = []
    for objective, progress in dict.fromkeys((one.objective, one.progress) for one in records):
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


def _measured(record: RunRecord) -> tuple[float, float]:
    if record.lms is None or record.log_perplexity is None:
        raise ValueError(f"{record.title}: LMS or perplexity was not measured")
    return record.lms, record.log_perplexity


_TABLES: dict[str, Callable[[Sequence[RunRecord], dict[str, str]], str]] = {
    "provenance": _provenance,
    "operating_points": _operating_points,
    "curves": _curves,
    "paper": _paper,
    "trajectory": _trajectory,
}


def _frontiers(records: Sequence[RunRecord]) -> list[Frontier]:
    return trace_frontiers(records, baseline=_BASELINE, references=[_PEER])


def _mean_lms(frontier: Frontier, objective: str, rate: float | None) -> float:
    curve = next(curve for curve in frontier.curves if curve.objective == objective)
    return next(point.lms.mean for point in curve.points if point.learning_rate == rate)


def _verdicts(curve: FrontierCurve, against: Mapping[tuple[str, str], SeedDifference]) -> list[str]:
    if curve.objective == _START:
        return ["", "", ""]
    to_baseline, to_peer = (against.get((curve.objective, reference)) for reference in (_BASELINE, _PEER))
    return [_change(to_baseline), _words(to_baseline), _words(to_peer)]


def _rate(curve: FrontierCurve) -> str:
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
    """Draw each model's frontier beside the records.

    Args:
        file (str): of records. Default: "frontier.jsonl".
    """
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "results"  # the same file for the same records
    for frontier in _frontiers(read_records(RECORDS / file)[0]):
        drawing = frontier_drawing(frontier)
        if drawing is not None:
            name = frontier.model.lower().replace(" ", "-")
            drawing.savefig(RECORDS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw_figures()
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
