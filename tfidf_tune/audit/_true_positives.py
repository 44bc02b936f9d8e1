"""How many targets membership inference finds when it takes at most 1 % of the controls for
targets: an AUC does not say whether single passages are found.
"""

import pandas as pd

from tfidf_tune.probe.membership_scores import threshold_of
from tfidf_tune.report.document import Table, tabulate
from tfidf_tune.results.intervals import binomial_interval, binomial_upper_bound
from tfidf_tune.results.membership_table import AttackScores, attack_scores
from tfidf_tune.results.recited import tiers_of_copies

FEWEST_CONTROLS = 100
"""Controls of which one is 1 %."""
_COLUMNS = (
    ("Attack", "attack", ""),
    ("Times in the training text", "copies", ""),
    ("Targets found", "found", ""),
    ("TPR (%)", "rate", ".1f"),
    ("95 % from", "low", ".1f"),
    ("95 % to", "high", ".1f"),
    ("Controls above", "controls", ""),
    ("FPR, at most (%)", "most_false", ".1f"),
)


def true_positives(
    scores: pd.DataFrame, checkpoint: int, repeats: pd.Series, headline: str | None
) -> Table:
    """Show a row for each attack, the headline first, and for the headline also one for each tier
    of copies.

    Args:
        scores (pandas.DataFrame): of the results.
        checkpoint (int): the number of the audited checkpoint.
        repeats (pandas.Series): how often each target occurs in the training text, by passage; NaN
            if that is unknown.
        headline (str | None): the attack that was named before the first question.

    Returns:
        Table: empty with fewer than 100 controls, or without likelihoods.
    """
    rows = []
    attacks = attack_scores(scores, checkpoint)
    attacks.sort(key=lambda attack: attack.attack != headline)
    for attack in attacks:
        if len(attack.controls) < FEWEST_CONTROLS:
            continue
        if attack.attack != headline:
            rows.append(_row(attack, attack.targets, "all"))
            continue
        attack = attack._replace(attack=f"{headline} (headline)")
        rows.append(_row(attack, attack.targets, "all"))
        # Passages with many copies are found first; all together they are diluted.
        targets = pd.DataFrame({"score": attack.targets, "repeats": repeats})
        tiers = tiers_of_copies(targets.dropna(subset=["score"]))
        if len(tiers) > 1:
            rows += [_row(attack, tier["score"], copies) for copies, tier in tiers]
    notes = [
        "Targets found: those with a score above a threshold that at most 1 % of the controls "
        "exceed. TPR: their share, with the exact two-sided 95 % interval of Clopper and Pearson. "
        "FPR, at most: the one-sided 95 % bound of Clopper and Pearson for the share of such "
        "controls above the threshold. The threshold is chosen on these controls. Passages of one "
        "document count as independent.",
    ]
    columns = ["attack", "copies", "found", "rate", "low", "high", "controls", "most_false"]
    return tabulate(
        "true_positives",
        "True positives at 1 % false positives",
        pd.DataFrame(rows, columns=columns),
        _COLUMNS,
        notes,
    )


def _row(attack: AttackScores, targets: pd.Series, copies: str) -> dict[str, str | float]:
    """Count the targets of a row above the threshold of all controls."""
    threshold = float(threshold_of(attack.controls.to_numpy(float))[0])
    num_found = int((targets > threshold).sum())
    num_false = int((attack.controls > threshold).sum())
    low, high = binomial_interval(num_found, len(targets))
    return {
        "attack": attack.attack,
        "copies": copies,
        "found": f"{num_found} of {len(targets)}",
        "rate": 100 * num_found / len(targets),
        "low": 100 * low,
        "high": 100 * high,
        "controls": f"{num_false} of {len(attack.controls)}",
        "most_false": 100 * binomial_upper_bound(num_false, len(attack.controls)),
    }
