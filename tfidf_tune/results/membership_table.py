"""Whether the likelihoods of passages tell training text from other text."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tfidf_tune.probe import exposure, extraction_probability, membership_scores
from tfidf_tune.report.document import Footnotes, Table
from tfidf_tune.results.intervals import NUM_RESAMPLES, bootstrap_interval, membership
from tfidf_tune.results.wording import few_units

SCORES = (
    "passage_nll",
    "zlib",
    "min_k",
    "min_k_plus_plus",
    "reference_nll",
    "wbc",
    "error_zone",
)
_NUM_SAMPLES = 1000
ATTACKS = ("Loss", "zlib", "Min-K%", "Min-K%++", "Loss against start", "WBC", "Error zone")
_EXTRACTED = f"Extracted by {_NUM_SAMPLES:,} samples (%)"
TPR = ("TPR at 1 % FPR (%)", "TPR from", "TPR to")


def membership_table(
    scores: pd.DataFrame,
    groups: Sequence[tuple[Mapping[str, str], Sequence[int]]],
    footnotes: Footnotes,
) -> Table:
    """Make a table of groups of checkpoints (one for each seed), under their first cells, that have
    the scores.

    Its notes explain the NLL, the AUC, true positives, the exposure, extraction, and intervals.
    """
    rows = []
    for labels, checkpoints in groups:
        row = _row(scores, checkpoints)
        if row:
            rows.append({**labels, **row})
    if not rows:
        return Table("membership", "Likelihood and membership", pd.DataFrame())
    frame = pd.DataFrame(rows, columns=list(rows[0]))
    fewest = frame.pop("units").min()
    notes = [
        "NLL: nats per token of complete passages; the gap is controls minus targets.",
        "AUC: probability that a target looks more like training text than a control, by the loss "
        "or another attack; 0.5 is chance, and membership stays detectable where the interval of "
        "the AUC excludes it.",
        "TPR: targets found by the loss at a threshold that at most 1 % of the controls exceed.",
        "Exposure: log2(controls + 1), its maximum, minus log2 of the rank of a target's NLL among "
        "the controls', on average over targets; 1.44 or less by chance.",
        "Extracted: targets of which at least one sample at temperature 1 is exactly the "
        "continuation, computed from its NLL, on average over prompts.",
        f"From and to: 95 %, percentile bootstrap of {NUM_RESAMPLES:,} resamples of passages, "
        f"targets and controls separately.{footnotes.mark(*few_units(fewest))}",
    ]
    formats = dict.fromkeys(frame, ".2f") | dict.fromkeys((*TPR, _EXTRACTED), ".1f")
    table = Table("membership", "Likelihood and membership", frame, notes, formats)
    return table.without_empty_columns()


def auc_header(attack: str) -> str:
    """Return the header of an attack's AUC in :func:`membership_table`; " from" and " to" after it
    make those of its interval.
    """
    return "AUC" if attack == "Loss" else f"AUC {attack}"


def is_detectable(row: Mapping[str, Any], attack: str = "Loss") -> bool:
    """Return whether the interval of an attack's AUC in a row of
    :func:`membership_table` excludes chance.
    """
    header = auc_header(attack)
    return bool(row.get(f"{header} from", 0) > 0.5 or row.get(f"{header} to", 1) < 0.5)


def _row(scores: pd.DataFrame, checkpoints: Sequence[int]) -> dict[str, Any]:
    """Return the values of a row and the number of "units", or nothing without scores of targets
    and controls.
    """
    rows = scores[scores["checkpoint"].isin(checkpoints)]
    targets = _by_passage(rows, "target")
    controls = _by_passage(rows, "control")
    if "nll" not in targets or "nll" not in controls:
        return {}
    # How likely the passages are: the gap between the averages.
    nll_of_targets = float(targets["nll"].mean())
    nll_of_controls = float(controls["nll"].mean())
    gap = bootstrap_interval(
        _gap, targets["nll"].mean(axis=0), controls["nll"].mean(axis=0), paired=False
    )
    row: dict[str, Any] = {
        "NLL of targets": nll_of_targets,
        "NLL of controls": nll_of_controls,
        "Gap": nll_of_controls - nll_of_targets,
        "Gap from": gap.low,
        "Gap to": gap.high,
    }
    # How well each attack tells them apart.
    scores_of_targets = membership_scores(targets)
    scores_of_controls = membership_scores(controls)
    separations = {}
    for attack, members in scores_of_targets.items():
        if attack in scores_of_controls:
            separations[attack] = membership(members, scores_of_controls[attack])
    for attack in ATTACKS:  # also those without scores, so that all rows have one order
        name = auc_header(attack)
        separation = separations.get(attack)
        if separation is None:
            row |= {name: None, f"{name} from": None, f"{name} to": None}
        else:
            interval = separation.auc_interval
            row |= {
                name: separation.auc,
                f"{name} from": interval.low,
                f"{name} to": interval.high,
            }
    by_loss = separations["Loss"]
    shares = (by_loss.tpr, by_loss.tpr_interval.low, by_loss.tpr_interval.high)
    for name, share in zip(TPR, shares, strict=True):
        row[name] = 100 * share
    # How far single passages stand out: exposure for each checkpoint, and samples.
    nlls = zip(targets["nll"], controls["nll"], strict=True)
    exposures = [exposure(*pair).mean() for pair in nlls]
    row["Exposure (bits)"] = float(np.mean(exposures))
    is_continuation = (rows["metric"] == "continuation_nll") & (rows["kind"] == "target")
    continuations = rows["value"][is_continuation]
    row[_EXTRACTED] = None
    if len(continuations):
        row[_EXTRACTED] = 100 * extraction_probability(continuations, _NUM_SAMPLES).mean()
    row["units"] = by_loss.auc_interval.num_units
    return row


class AttackScores(NamedTuple):
    """The scores of an attack on the likelihoods of one checkpoint, the higher the more likely a
    member.

    Attributes:
        attack (str): "Loss", "zlib", ...
        targets (pandas.Series): float64, by passage.
        controls (pandas.Series): float64, by passage.
    """

    attack: str
    targets: pd.Series
    controls: pd.Series


def attack_scores(scores: pd.DataFrame, checkpoint: int) -> list[AttackScores]:
    """Return the scores of each attack; nothing without scores of targets and controls."""
    rows = scores[scores["checkpoint"] == checkpoint]
    units = {}
    by_attack = {}
    for kind in ("target", "control"):
        values = _by_passage(rows, kind)
        if "nll" not in values:
            return []
        of_kind = rows[(rows["kind"] == kind) & (rows["metric"] == "passage_nll")]
        units[kind] = sorted(of_kind["unit"].astype(str).unique())
        by_attack[kind] = membership_scores(values)
    found = []
    for attack in ATTACKS:
        if attack in by_attack["target"] and attack in by_attack["control"]:
            targets = pd.Series(by_attack["target"][attack][0], index=units["target"])
            controls = pd.Series(by_attack["control"][attack][0], index=units["control"])
            found.append(AttackScores(attack=attack, targets=targets, controls=controls))
    return found


def _gap(targets: Any, controls: Any, axis: int = -1) -> Any:
    """Return how much higher the average NLL of the controls is."""
    return controls.mean(axis) - targets.mean(axis)


def _by_passage(rows: pd.DataFrame, kind: str) -> dict[str, Any]:
    """Score -> float64 ``[m, n]`` of checkpoints and passages, of scores that all of them have."""
    scored = rows[(rows["kind"] == kind) & rows["metric"].isin(SCORES)]
    num_checkpoints = rows["checkpoint"].nunique()
    values = {}
    for metric, group in scored.groupby("metric", observed=True):
        table = group.pivot_table(index="checkpoint", columns="unit", values="value", observed=True)
        is_complete = np.isfinite(table.to_numpy()).all() and len(table) == num_checkpoints
        if is_complete:
            values[str(metric).removeprefix("passage_")] = table.to_numpy(np.float64)
    return values
