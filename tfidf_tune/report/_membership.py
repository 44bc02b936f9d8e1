"""The table "Likelihood and membership": do likelihoods tell the training text from text that was never seen?"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfidf_tune.analysis import (
    Membership,
    bootstrap_interval,
    exposure,
    extraction_probability,
    membership,
    membership_scores,
)
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, NUM_RESAMPLES
from tfidf_tune.report._document import Table
from tfidf_tune.report._wording import FEW_UNITS, Footnotes, joined, span

if TYPE_CHECKING:
    import pandas as pd

_SCORES = ("passage_nll", "zlib", "min_k", "min_k_plus_plus", "reference_nll")
_NUM_SAMPLES = 1000
_ENDS = ("", " from", " to")
_ATTACKS = ("Loss", "zlib", "Min-K%", "Min-K%++", "Loss against start")
_EXTRACTED = f"Extracted by {_NUM_SAMPLES:,} samples (%)"
_IN_PERCENT = ("TPR at 1 % FPR (%)", "TPR from", "TPR to")
_HEADERS = (
    *("NLL of targets", "NLL of controls", "Gap", "Gap from", "Gap to"),
    *(f"AUC{'' if attack == 'Loss' else f' {attack}'}{end}" for attack in _ATTACKS for end in _ENDS),
    *(*_IN_PERCENT, "Exposure (bits)", _EXTRACTED),
)


def membership_table(
    scores: "pd.DataFrame", groups: Sequence[tuple[Mapping[str, str], Sequence[int]]], footnotes: Footnotes
) -> tuple[Table, dict[tuple[str, ...], str]]:
    """Make the table of groups of checkpoints, one for each seed, of the same passages, under their first cells.

    Returns:
        tuple[Table, dict[tuple[str, ...], str]]: the table, without groups that have no scores of targets and
            controls; and by first cells the AUC of each group whose interval of it excludes 0.5: "AUC 0.98, 95 %
            interval 0.96 to 0.99".
    """
    import pandas as pd

    rows, detectable, fewest = [], {}, []
    for labels, checkpoints in groups:
        found = _row(scores, checkpoints)
        if found is None:
            continue
        row, made = found
        rows.append({**labels, **row})
        fewest.append(made.auc_interval.num_units)
        if made.detectable:
            ends = span(*made.auc_interval[:2], decimals=2)
            detectable[tuple(labels.values())] = f"AUC {made.auc:.2f}, 95 % interval {ends}"
    frame = pd.DataFrame(rows, columns=[*(groups[0][0] if groups else ()), *_HEADERS])
    few = [FEW_UNITS] if fewest and MIN_UNITS <= min(fewest) < ENOUGH_UNITS else []
    intervals = (
        f"From and to: 95 %, percentile bootstrap of {NUM_RESAMPLES:,} resamples of passages, targets and controls "
        f"separately.{footnotes.mark(*few)}"
    )
    named = [f"{', '.join(names)} ({auc})" for names, auc in detectable.items()]
    notes = [
        "NLL: nats per token of complete passages; the gap is controls minus targets. AUC: probability that a target "
        "looks more like training text than a control, by the loss or another attack; 0.5 is chance. TPR: targets "
        "found at a threshold that at most 1 % of the controls exceed.",
        "Exposure: log2(controls + 1), its maximum, minus log2 of the rank of a target's NLL among the controls', on "
        "average over targets; 1.44 or less by chance.",
        "Extracted: targets of which at least one sample at temperature 1 is exactly the continuation, computed from "
        f"its NLL, on average over prompts. {intervals}",
        f"Membership stays detectable: {joined(named)}."
        if detectable
        else "No interval of the AUC by the loss excludes 0.5.",
    ]
    formats = dict.fromkeys(_HEADERS, ".2f") | dict.fromkeys((*_IN_PERCENT, _EXTRACTED), ".1f")
    table = Table("membership", "Likelihood and membership", frame, notes if rows else [], formats)
    return table.without_empty_columns(), detectable


def _row(scores: "pd.DataFrame", checkpoints: Sequence[int]) -> tuple[dict[str, Any], Membership] | None:
    rows = scores[scores["checkpoint"].isin(checkpoints)]
    targets, controls = (_by_passage(rows, kind) for kind in ("target", "control"))
    if "nll" not in targets or "nll" not in controls:
        return None
    gap = bootstrap_interval(
        lambda ours, theirs, axis=-1: theirs.mean(axis) - ours.mean(axis),
        *(values["nll"].mean(axis=0) for values in (targets, controls)),
        paired=False,
    )
    attacks, others = membership_scores(targets), membership_scores(controls)
    found = {name: membership(scores, others[name]) for name, scores in attacks.items() if name in others}
    by_loss, nlls = found["Loss"], [float(values["nll"].mean()) for values in (targets, controls)]
    exposed = [exposure(*pair).mean() for pair in zip(targets["nll"], controls["nll"], strict=True)]
    continuations = rows[(rows["metric"] == "continuation_nll") & (rows["kind"] == "target")]["value"]
    values = (
        *(*nlls, nlls[1] - nlls[0], *gap[:2]),
        *(
            value
            for one in map(found.get, _ATTACKS)
            for value in ((one.auc, *one.auc_interval[:2]) if one else (None,) * 3)
        ),
        *(100 * value for value in (by_loss.tpr, *by_loss.tpr_interval[:2])),
        float(np.mean(exposed)),
        100 * extraction_probability(continuations, _NUM_SAMPLES).mean() if len(continuations) else None,
    )
    return dict(zip(_HEADERS, values, strict=True)), by_loss


def _by_passage(rows: "pd.DataFrame", kind: str) -> dict[str, Any]:
    """Score -> float64 ``[m, n]`` of checkpoints and passages, of scores that all of them have."""
    own = rows[(rows["kind"] == kind) & rows["metric"].isin(_SCORES)]
    values = {}
    for metric, of in own.groupby("metric", observed=True):
        table = of.pivot_table(index="checkpoint", columns="unit", values="value", observed=True)
        if np.isfinite(table.to_numpy()).all() and len(table) == rows["checkpoint"].nunique():
            values[str(metric).removeprefix("passage_")] = table.to_numpy(np.float64)
    return values
