"""Whether the likelihoods of passages tell training text from other text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tfidf_tune.probe import exposure, extraction_probability, membership_scores
from tfidf_tune.report.document import Footnotes, Table
from tfidf_tune.results.intervals import NUM_RESAMPLES, bootstrap_interval, membership
from tfidf_tune.results.wording import few_units

_SCORES = ("passage_nll", "zlib", "min_k", "min_k_plus_plus", "reference_nll")
_NUM_SAMPLES = 1000
_ATTACKS = ("Loss", "zlib", "Min-K%", "Min-K%++", "Loss against start")
_EXTRACTED = f"Extracted by {_NUM_SAMPLES:,} samples (%)"
_TPR = ("TPR at 1 % FPR (%)", "TPR from", "TPR to")


def membership_table(
    scores: pd.DataFrame,
    groups: Sequence[tuple[Mapping[str, str], Sequence[int]]],
    footnotes: Footnotes,
) -> Table:
    """Make a table of groups of checkpoints (one for each seed), under their first cells, that have
    the scores.
    """
    rows = []
    for labels, checkpoints in groups:
        row = _row(scores, checkpoints)
        if row:
            rows.append({**labels, **row})
    frame = pd.DataFrame(rows, columns=list(rows[0]) if rows else [])
    fewest = frame.pop("units").min() if rows else 0
    intervals = (
        f"From and to: 95 %, percentile bootstrap of {NUM_RESAMPLES:,} resamples of passages, "
        f"targets and controls separately.{footnotes.mark(*few_units(fewest))}"
    )
    notes = [
        "NLL: nats per token of complete passages; the gap is controls minus targets. AUC: "
        "probability that a target looks more like training text than a control, by the loss or "
        "another attack; 0.5 is chance, and membership stays detectable where the interval of the "
        "AUC excludes it. TPR: targets found at a threshold that at most 1 % of the controls "
        "exceed.",
        "Exposure: log2(controls + 1), its maximum, minus log2 of the rank of a target's NLL among "
        "the controls', on average over targets; 1.44 or less by chance.",
        "Extracted: targets of which at least one sample at temperature 1 is exactly the "
        f"continuation, computed from its NLL, on average over prompts. {intervals}",
    ]
    formats = dict.fromkeys(frame, ".2f") | dict.fromkeys((*_TPR, _EXTRACTED), ".1f")
    table = Table("membership", "Likelihood and membership", frame, notes if rows else [], formats)
    return table.without_empty_columns()


def is_detectable(row: Mapping[str, Any]) -> bool:
    """Return whether the interval of the AUC in a row of
    :func:`membership_table` excludes chance.
    """
    return bool(row.get("AUC from", 0) > 0.5 or row.get("AUC to", 1) < 0.5)


def _row(scores: pd.DataFrame, checkpoints: Sequence[int]) -> dict[str, Any]:
    """Return the values of a row and the number of "units", or nothing without scores of targets
    and controls.
    """
    rows = scores[scores["checkpoint"].isin(checkpoints)]
    targets, controls = (_by_passage(rows, kind) for kind in ("target", "control"))
    if "nll" not in targets or "nll" not in controls:
        return {}
    of_targets, of_controls = (float(values["nll"].mean()) for values in (targets, controls))
    row: dict[str, Any] = {"NLL of targets": of_targets, "NLL of controls": of_controls}
    row["Gap"] = of_controls - of_targets
    means = [values["nll"].mean(axis=0) for values in (targets, controls)]
    gap = bootstrap_interval(
        lambda a, b, axis=-1: b.mean(axis) - a.mean(axis), *means, paired=False
    )
    row |= {"Gap from": gap.low, "Gap to": gap.high}
    attacks = membership_scores(targets)
    others = membership_scores(controls)
    found = {name: membership(own, others[name]) for name, own in attacks.items() if name in others}
    for attack in _ATTACKS:  # also those without scores, so that all rows have one order
        one = found.get(attack)
        name = "AUC" if attack == "Loss" else f"AUC {attack}"
        values = (None,) * 3 if one is None else (one.auc, *one.auc_interval[:2])
        row |= dict(zip((name, f"{name} from", f"{name} to"), values, strict=True))
    by_loss = found["Loss"]
    for name, share in zip(_TPR, (by_loss.tpr, *by_loss.tpr_interval[:2]), strict=True):
        row[name] = 100 * share
    exposed = [exposure(*pair).mean() for pair in zip(targets["nll"], controls["nll"], strict=True)]
    row["Exposure (bits)"] = float(np.mean(exposed))
    continuations = rows[(rows["metric"] == "continuation_nll") & (rows["kind"] == "target")][
        "value"
    ]
    row[_EXTRACTED] = (
        100 * extraction_probability(continuations, _NUM_SAMPLES).mean()
        if len(continuations)
        else None
    )
    return row | {"units": by_loss.auc_interval.num_units}


def _by_passage(rows: pd.DataFrame, kind: str) -> dict[str, Any]:
    """Score -> float64 ``[m, n]`` of checkpoints and passages, of scores that all of them have."""
    own = rows[(rows["kind"] == kind) & rows["metric"].isin(_SCORES)]
    values = {}
    for metric, of in own.groupby("metric", observed=True):
        table = of.pivot_table(index="checkpoint", columns="unit", values="value", observed=True)
        if np.isfinite(table.to_numpy()).all() and len(table) == rows["checkpoint"].nunique():
            values[str(metric).removeprefix("passage_")] = table.to_numpy(np.float64)
    return values
