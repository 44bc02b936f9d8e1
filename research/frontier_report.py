"""Runs over learning rates as a report: the frontier of recitation against perplexity."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Drawing

from research.frontier import VERDICTS, Frontiers, trace_frontiers
from tfidf_tune._printing import say
from tfidf_tune.compare._figures import FLOOR_LINE, OPERATING, set_axes
from tfidf_tune.report import terminal_text, write_report
from tfidf_tune.report.document import Figure, Footnotes, Report, Table, joined, tabulate
from tfidf_tune.report.figures import (
    LONE_HEIGHT,
    draw_cross,
    drawn,
    label_points,
    legend_above,
    new_panels,
    styles_of,
)
from tfidf_tune.results import Results, load_results, write_results
from tfidf_tune.results.figures import FLOOR
from tfidf_tune.results.membership_table import membership_table
from tfidf_tune.results.table import CONTROLS, LMS, NEAR_VERBATIM, PERPLEXITY, RECITED
from tfidf_tune.results.wording import NEAR_EXPLAINED

# Of the drawing: a line style for each seven objectives, inches of a line of the legend.
_LINES = ("-", (0, (4, 2)), (0, (1, 1.5)))
_LEGEND_LINE = 0.2
# Areas of the markers in square points, from the lowest learning rate to the highest.
_SMALLEST = 6.0
_LARGEST = 26.0
_FURTHEST = (
    4.0  # points above this multiple of the highest perplexity of an operating point are not shown
)
_HIGHEST = 1e304  # of perplexities that can be drawn

# Columns: header, column of the data frame, format.
_WHO = (("Model", "model", ""), ("Objective", "objective", ""))
_RATE = ("Learning rate", "learning_rate", "g")
_SEEDS = ("Seeds", "num_seeds", "")


def _ranged(
    header: str, source: str, form: str, short: str, unit: str = ""
) -> tuple[tuple[str, str, str], ...]:
    """Return the columns of a value and of the ends of its interval."""
    ends = (
        (f"{short} {end}{unit}", f"{source}_{name}", form)
        for end, name in (("from", "low"), ("to", "high"))
    )
    return ((header, source, form), *ends)


_MEASURED = (
    *_ranged(LMS.label, "lms", ".2f", "LMS"),
    *_ranged(PERPLEXITY.label, "perplexity", ".2f", "Perplexity"),
)
_COMPARED = (
    ("Pairs", "num_pairs", ""),
    *_ranged("LMS difference", "lms", "+.2f", "LMS"),
    ("LMS reduction %", "percent", ".1f"),
    *_ranged("Perplexity %", "perplexity", "+.2f", "Perplexity", " %"),
    ("LMS p (Holm)", "lms_p", ".4f"),
    ("Perplexity p (Holm)", "perplexity_p", ".4f"),
    ("Verdict", "verdict", ""),
)
_INTERVALS = (
    "Intervals are at 95 %, Student's t over seeds; there is none from a single one. Differences "
    "are paired by seed. The intervals of an LMS difference and of targets minus controls cover "
    "the choice of passages too, if they were kept one by one; the others do not."
)
_BEYOND = "A better learning rate may lie beyond the range that was tried."
_VERDICTS_EXPLAINED = (
    "Better: LMS and perplexity are lower, or the interval of the perplexity ends at 0: it recites "
    "less at a perplexity that is not higher. Worse: the mirror image. Lower and higher: the "
    "interval lies below or above 0, and p (Holm), corrected for all comparisons of LMS and "
    "perplexity of the model in this table, is below 0.05; unclear: neither, which does not show "
    "the two to be equal."
)
_CAPTION = (
    "A line for each objective from its lowest learning rate to its highest, the markers growing "
    "with it. Large, numbered and with a cross: the operating point, the learning rate of the "
    "lowest held-out perplexity, with 95 % intervals over seeds. Lower: recites less. Further "
    "left: predicts unseen text better. Dashed: held-out passages, which is chance. Learning rates "
    "with more than four times the highest perplexity of an operating point lie outside."
)


def frontier_report(
    results: Results, *, baseline: str | None = None, references: Sequence[str] = ()
) -> Report:
    """Show what each objective recites at which perplexity, through its learning rates, with
    intervals over seeds.

    Args:
        results (Results): of any models, objectives, learning rates and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else
            the first run's.
        references (Sequence[str]): more objectives to compare with. Default: none.

    Raises:
        ValueError: If there is no run, none has the baseline or a reference, two runs have the same
            names, or runs of a model were not asked the same.
    """
    found = trace_frontiers(results, baseline=baseline, references=references)
    models = dict.fromkeys(one.model for one in results.checkpoints)
    several = len(models) > 1
    notes = Footnotes()
    differences = found.differences[found.differences["at"] == "operating points"]
    differences = differences.sort_values(
        "verdict", key=lambda said: said.map(VERDICTS.index), kind="stable"
    )
    figures = []
    for number, model in enumerate(models, start=1):
        points = found.points[found.points["model"] == model]
        if points["operating"].any():
            name, of_model = (f"frontier_{number}", f": {model}") if several else ("frontier", "")
            figures.append(
                Figure(
                    name,
                    f"LMS against held-out perplexity{of_model}",
                    frontier_drawing(model, points),
                    _CAPTION,
                )
            )
    operating = _operating_points(found, notes)
    tables = (
        operating,
        _likelihoods(results, found, notes),
        *_differences(found, notes),
        _points(found, notes),
    )
    seeds = len({one.seed for one in results.checkpoints} - {None})
    counted = f"{seeds} seeds" if seeds > 1 else "One seed, no interval over seeds"
    return Report(
        title="Recitation against perplexity",
        verdict=f"{_verdict(differences, found.references, several=several)} {counted}.",
        tables=[table.without_empty_columns() for table in tables if len(table.frame)],
        figures=figures,
        provenance={
            "Compared with": joined(found.references),
            "Runs": str(len({one.run for one in results.checkpoints})),
            "Intervals": "95 %, over seeds, differences paired by seed, those of the LMS over "
            "passages too",
            **results.provenance,
        },
        footnotes=notes.texts,
    )


def _verdict(differences: pd.DataFrame, references: Sequence[str], *, several: bool) -> str:
    """Say how the objectives came out at their operating points, the best first."""
    sentences = []
    for reference in references:
        own = differences[differences["reference"] == reference]
        clauses = []
        for kind, alike in own.groupby("verdict", sort=False):
            names = list(alike["objective"])
            if several:
                names = [f"{one.objective} of {one.model}" for one in alike.itertuples()]
            clauses.append(f"{kind.replace(':', ',')}: {joined(names)}")
        sentences += [f"Against {reference}: {'; '.join(clauses)}."] if clauses else []
    return " ".join(sentences) or "Nothing is compared."


def _operating_points(found: Frontiers, footnotes: Footnotes) -> Table:
    baseline = found.references[0]
    columns = (
        *_WHO,
        _RATE,
        ("End of range", "range_end", ""),
        _SEEDS,
        *_MEASURED,
        (f"LMS at {baseline}'s perplexity", "lms_at_baseline", ".2f"),
        ("On the front", "on_front", ""),
    )
    names = ["model", "objective"]
    curves = pd.MultiIndex.from_frame(found.points[names].drop_duplicates())
    operating = (
        found.points[found.points["operating"]].set_index(names).reindex(curves).reset_index()
    )
    frame = operating.assign(
        num_seeds=operating["seeds"].map(len, na_action="ignore"),
        on_front=operating["on_front"].map({True: "yes", False: "no"}).fillna("diverged"),
    )
    finite = found.points[found.points["finite"].astype(bool)]
    seeds = finite["seeds"].map(frozenset).groupby(finite["objective"], sort=False).nunique()
    notes = [
        "Operating point: the learning rate with the lowest mean held-out perplexity, over the "
        "seeds that all learning rates of the objective have, or by the seeds of each if none is "
        "common; it does not depend on the passages. The perplexity is the geometric mean over "
        f"seeds. From and to: the interval.{footnotes.mark(_INTERVALS)} End of range: that "
        f"learning rate is the lowest, the highest or the only one tried.{footnotes.mark(_BEYOND)}",
        f"LMS at {baseline}'s perplexity: on the objective's own line through its learning rates, "
        f"where it has the perplexity of {baseline}'s operating point (linear in log perplexity; "
        "where it has it twice, at the lower learning rate); empty where it never has it. On the "
        "front: no objective has at any learning rate as low an LMS and as low a perplexity, one "
        "of them lower, by the means.",
    ]
    if any(seeds > 1):
        notes.append(
            f"Not every learning rate of {joined(seeds.index[seeds > 1])} has the same seeds."
        )
    better: dict[str, Any] = {LMS.label: "lower", PERPLEXITY.label: "lower"}
    return tabulate("operating_points", "Operating points", frame, columns, notes, better)


def _likelihoods(results: Results, found: Frontiers, notes: Footnotes) -> Table:
    """Show the last checkpoints of the operating points, as far as their passages were scored."""
    groups = []
    for one in found.points[found.points["operating"]].itertuples():
        names = (one.model, one.objective)
        rates = (one.learning_rate, None)
        numbered = [
            (run.progress, at)
            for at, run in enumerate(results.checkpoints)
            if run.learning_rate in rates
        ]
        own = [
            (progress, at) for progress, at in numbered if results.checkpoints[at].run[:2] == names
        ]
        last = [at for progress, at in own if progress == max(own)[0]]
        groups.append(({"Model": one.model, "Objective": one.objective}, last))
    return membership_table(results.scores, groups, notes)


def _differences(found: Frontiers, footnotes: Footnotes) -> tuple[Table, Table]:
    frame = found.differences.assign(percent=100 * found.differences["reduction"].astype(float))
    operating, equal = (frame[frame["at"] == at] for at in ("operating points", "equal rates"))
    who = (*_WHO, ("Against", "reference", ""), _RATE)
    columns = (*who, ("Against's rate", "reference_rate", "g"), *_COMPARED)
    notes = (
        "Objective minus reference, each at its own operating point, paired by seed; perplexity in "
        f"percent of the reference's. From and to: the interval.{footnotes.mark(_INTERVALS)} LMS "
        "reduction: (reference - objective) / reference of the means over the pairs.",
        _VERDICTS_EXPLAINED,
    )
    note = (
        "As at the operating points, but at one learning rate, which need not be the best for "
        "either."
    )
    return (
        tabulate("differences", "Differences at the operating points", operating, columns, notes),
        tabulate(
            "equal_learning_rate",
            "Differences at equal learning rate",
            equal,
            (*who, *_COMPARED),
            [note],
        ),
    )


def _points(found: Frontiers, footnotes: Footnotes) -> Table:
    columns = (
        *_WHO,
        _RATE,
        *_MEASURED,
        *RECITED[3:],
        CONTROLS,
        *NEAR_VERBATIM,
        _SEEDS,
        ("Operating point", "mark", ""),
    )
    points = found.points
    frame = points.assign(
        verbatim_percent=100 * points["verbatim"],
        num_seeds=points["seeds"].map(len),
        mark=points["operating"]
        .map({True: "yes", False: "no"})
        .where(points["finite"], "diverged"),
    )
    notes = [
        "LMS, ROUGE-L and verbatim share: means over passages, prefix lengths and seeds; Max LMS: "
        f"the largest. From and to: the interval.{footnotes.mark(_INTERVALS)}",
        *([NEAR_EXPLAINED] if points["edit_distance"].notna().any() else []),
        *(f"Left out: {text}." for text in found.left_out),
    ]
    return tabulate("points", "Every learning rate", frame, columns, notes)


def frontier_drawing(model: str, points: pd.DataFrame) -> Drawing:
    """Draw the points of a model, see :class:`Frontiers` and the caption; at least one is an
    operating point.

    Learning rates with a diverged run are left out. If the averages lie far apart, the axis of the
    LMS is logarithmic above 1 token.
    """
    operating = points[points["operating"]]
    rates = sorted(points["learning_rate"].fillna(0.0).unique())
    areas = dict(zip(rates, np.linspace(_SMALLEST, _LARGEST, len(rates)).tolist(), strict=True))
    num_lines = (len(operating) + len(areas) + 2) // 2
    figure, (axes,) = new_panels([model], panel_height=LONE_HEIGHT + _LEGEND_LINE * num_lines)
    styles = styles_of([dict.fromkeys(operating["objective"])])
    finite = points[points["finite"]]
    for number, chosen in enumerate(operating.itertuples(), start=1):
        color, marker = styles[chosen.objective]
        look: dict[str, Any] = {"color": color, "marker": marker}
        own = finite[finite["objective"] == chosen.objective]
        line = _LINES[(number - 1) // 7 % len(_LINES)]
        sizes = own["learning_rate"].fillna(0.0).map(areas)
        axes.plot(
            own["perplexity"], own["lms"], color=color, linestyle=line, linewidth=1, alpha=0.5
        )
        axes.scatter(
            own["perplexity"], own["lms"], s=sizes, alpha=0.6, linewidths=0, zorder=3, **look
        )
        axes.plot([], [], linestyle=line, label=f"{number}  {drawn(chosen.objective)}", **look)
        x = chosen.perplexity
        y = chosen.lms
        perplexity = chosen.perplexity_low, min(chosen.perplexity_high, _HIGHEST)
        draw_cross(axes, (x, y), (perplexity, (chosen.lms_low, chosen.lms_high)), color)
        axes.scatter([x], [y], s=OPERATING, edgecolors="black", linewidths=0.8, zorder=5, **look)
    shown = points[points["perplexity"] <= _FURTHEST * operating["perplexity"].max()]
    controls = shown.dropna(subset=["control_lms"])
    lms = shown["lms"].tolist()
    if len(controls):
        # Over runs.
        floor = float(np.average(controls["control_lms"], weights=controls["seeds"].map(len)))
        axes.axhline(floor, label=FLOOR, **FLOOR_LINE)
        lms.append(floor)
    set_axes(axes, shown["perplexity"].tolist(), lms)
    for rate, area in (areas if len(areas) > 1 else {}).items():
        axes.plot(
            [],
            [],
            "o",
            color="0.5",
            markersize=area**0.5,
            label=f"lr {rate:g}" if rate else "lr of the config",
        )
    legend_above(figure, [axes], FLOOR)
    figure.draw_without_rendering()
    ends = zip(operating["perplexity"], operating["lms"], strict=True)
    label_points(axes, {str(number): point for number, point in enumerate(ends, start=1)})
    return figure


def main(arguments: Sequence[str]) -> None:
    """Trace the frontier of evaluated runs, and write the report."""
    parser = argparse.ArgumentParser(
        prog="python -m research.frontier_report", description=main.__doc__
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="as for `tfidf-tune compare`")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("frontier"), help="default: %(default)s"
    )
    parser.add_argument(
        "--baseline", metavar="OBJECTIVE", help="default: CE, or the first run's objective"
    )
    parser.add_argument(
        "--reference",
        action="append",
        default=[],
        metavar="OBJECTIVE",
        help="compare with it as well",
    )
    options = parser.parse_args(arguments)
    results = load_results(options.runs)
    report = frontier_report(results, baseline=options.baseline, references=options.reference)
    write_report(
        report, options.output_dir, more={"results.jsonl": partial(write_results, results)}
    )
    say(f"{terminal_text(report)}\nReport: {options.output_dir / 'index.html'}")


if __name__ == "__main__":
    main(sys.argv[1:])
