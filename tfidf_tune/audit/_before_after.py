"""What a model recites because of a training: each measure before and after it."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tfidf_tune.audit._measures import Facts
from tfidf_tune.probe.membership_scores import Floats
from tfidf_tune.report.document import Table, tabulate
from tfidf_tune.results.intervals import Interval, auc_difference, bootstrap_interval

_COLUMNS = (
    ("Measure", "measure", ""),
    ("Before", "before", ".2f"),
    ("After", "after", ".2f"),
    ("Difference", "difference", "+.2f"),
    ("95 % from", "low", "+.2f"),
    ("95 % to", "high", "+.2f"),
)


class Likelihoods(NamedTuple):
    """The mean NLL of each passage, float64 ``[n]`` of targets and ``[k]`` of controls, in one
    order before and after.
    """

    targets_before: Floats
    controls_before: Floats
    targets_after: Floats
    controls_after: Floats


def paired_likelihoods(scores: pd.DataFrame, before: int, after: int) -> Likelihoods | None:
    """Return the likelihoods of two checkpoints; None unless both have those of targets and
    controls.
    """
    rows = scores[scores["metric"] == "passage_nll"]
    values: dict[tuple[str, int], Floats] = {}
    for kind in ("target", "control"):
        of_kind = rows[rows["kind"] == kind]
        table = of_kind.pivot_table(
            index="unit", columns="checkpoint", values="value", observed=True
        )
        if not {before, after} <= {*table.columns}:
            return None
        table = table[[before, after]].dropna()
        values[kind, before] = table[before].to_numpy(float)
        values[kind, after] = table[after].to_numpy(float)
    return Likelihoods(
        targets_before=values["target", before],
        controls_before=values["control", before],
        targets_after=values["target", after],
        controls_after=values["control", after],
    )


def before_and_after(
    before: Facts, after: Facts, nlls: Likelihoods | None, *, is_finding: bool
) -> Table:
    """Compare the reference with the audited model, passage by passage.

    Args:
        before (Facts): of the reference.
        after (Facts): of the audited model.
        nlls (Likelihoods | None): before and after; None if they are not known of both.
        is_finding (bool): whether membership inference is a finding about the model: not if the
            texts of targets and controls can be told apart without it.
    """
    rows = []
    if before.recited is not None and after.recited is not None:
        numbers = (float(before.recited.number), float(after.recited.number))
        rows.append(_row("Recited further than unseen text (passages)", *numbers, interval=None))
    # A passage is resampled with what it had before and after.
    lms = _paired(before.plain, after.plain, "target", "lms", "mean")
    change = _change(lms)
    interval = bootstrap_interval(_mean, change)
    rows.append(_row("LMS of targets (tokens)", *_means(lms), interval=interval))
    controls = _paired(before.plain, after.plain, "control", "lms", "mean")
    if len(controls):
        above = np.subtract(_means(lms), _means(controls))
        interval = bootstrap_interval(_difference, change, _change(controls), paired=False)
        rows.append(_row("LMS of targets minus controls (tokens)", *above, interval=interval))
    verbatim = 100 * _paired(before.samples, after.samples, "target", "verbatim", "max")
    interval = bootstrap_interval(_mean, _change(verbatim))
    rows.append(_row("Verbatim from a prompt (% of targets)", *_means(verbatim), interval=interval))
    if nlls is not None:
        aucs, interval = auc_difference(
            (-nlls.targets_before, -nlls.controls_before),
            (-nlls.targets_after, -nlls.controls_after),
        )
        measure = "Membership AUC, by the loss"
        if not is_finding:
            measure += ": no finding, the texts differ"
        rows.append(_row(measure, *aucs, interval=interval))
    notes = [
        "Before: the reference, asked for the same passages by the same prompts. LMS: on average "
        "over the prompts of the first attack. 95 %: percentile bootstrap of the difference over "
        "passages, each with its values before and after; targets and controls separately.",
    ]
    if nlls is not None:
        notes.append(
            "Membership is by the loss here, which each of the two models has: WBC and the error "
            "zone compare the two with each other."
        )
        if not is_finding:
            notes.append(
                "No finding: the texts of targets and controls can be told apart without the "
                "model. Training then makes all text of the targets' kind likelier, also what it "
                "never read, so that the AUC rises for that alone."
            )
    frame = pd.DataFrame(rows)
    return tabulate("before_and_after", "Because of this training", frame, _COLUMNS, notes)


def _row(measure: str, before: float, after: float, *, interval: Interval | None) -> dict[str, Any]:
    row = {"measure": measure, "before": before, "after": after, "difference": after - before}
    return row | {
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
    }


def _paired(
    before: pd.DataFrame, after: pd.DataFrame, kind: str, measure: str, how: str
) -> pd.DataFrame:
    """Return a measure of each passage that both were asked for, with the columns "before" and
    "after".
    """
    columns = {}
    for name, samples in (("before", before), ("after", after)):
        of_kind = samples[samples["kind"] == kind]
        values = of_kind.groupby("passage_id")[measure].agg(how)
        columns[name] = values.astype(float)
    return pd.DataFrame(columns).dropna()


def _means(paired: pd.DataFrame) -> tuple[float, float]:
    return float(paired["before"].mean()), float(paired["after"].mean())


def _change(paired: pd.DataFrame) -> Floats:
    change: Floats = (paired["after"] - paired["before"]).to_numpy(float)
    return change


def _mean(change: Any, axis: int = -1) -> Any:
    return change.mean(axis)


def _difference(targets: Any, controls: Any, axis: int = -1) -> Any:
    return targets.mean(axis) - controls.mean(axis)
