"""The verdict of a comparison in one line, and the words that tables and footnotes of reports share."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tfidf_tune.compare._intervals import ENOUGH_UNITS, MIN_UNITS, Interval
from tfidf_tune.compare._table import ANSWER_MEASURES, BY_LABEL, LMS, PERPLEXITY, SUMMARY_MEASURES
from tfidf_tune.report._document import joined

if TYPE_CHECKING:
    import pandas as pd

_MOST_CLAUSES = 3
STILL_DETECTABLE = ", but its loss still tells the two apart"
AT_CHANCE = "recites no more than text it never saw"


# In the order of preference: what a reduction costs.
_UTILITIES = [PERPLEXITY, SUMMARY_MEASURES[2], ANSWER_MEASURES[1]]
_Names: TypeAlias = tuple[str, str]  # setting and objective


def verdict(
    reductions: "pd.DataFrame", names: Sequence[_Names], at_chance: set[_Names], detectable: set[_Names], baseline: str
) -> str:
    """Say what each objective recites and at which cost, and which settings have nothing to compare.

    ``at_chance`` are those that recite no more than held-out passages, ``detectable`` those whose loss tells the two
    apart.
    """
    objectives: dict[str, list[str]] = {}
    for setting, objective in names:
        objectives.setdefault(setting, []).append(objective)
    alone = {name: joined(own) for name, own in objectives.items() if baseline not in own or own == [baseline]}
    if len(alone) == len(objectives):
        have = "; ".join(f"{name}: {own}" for name, own in alone.items())
        return (
            f"Nothing is compared: no model has runs of {baseline} and of another objective ({have}). To name the "
            "objective of a model trained elsewhere, give OBJECTIVE=FOLDER."
        )
    clauses = []
    for setting, objective in names:
        if setting in alone or objective == baseline:
            continue
        own = reductions[(reductions["setting"] == setting) & (reductions["objective"] == objective)]
        rows = {row.measure: row for row in own.itertuples()}
        recited = rows.get(LMS.label)
        direction, size = _change(recited)
        said = {
            -1: f"{objective} recites {size} less than {baseline}",
            0: f"{objective} is not shown to recite less or more than {baseline}",
            1: f"{objective} recites {size} more than {baseline}",
            None: f"too little was measured to judge what {objective} recites",
        }[direction]
        if {(setting, objective), (setting, baseline)} <= at_chance:
            said = f"{objective}, like {baseline}, {AT_CHANCE}"
        elif (setting, objective) in at_chance:
            said = f"{objective} {AT_CHANCE}{STILL_DETECTABLE if (setting, objective) in detectable else ''}"
        # The cost of what is recited is that of the same checkpoint.
        costs = [rows[utility.label] for utility in _UTILITIES if utility.label in rows]
        cost = next((one for one in costs if recited is None or one.progress == recited.progress), None)
        direction, size = _change(cost)
        if cost is not None and direction is not None:
            differs = {-1: f"is {size} lower", 0: "is not shown to differ", 1: f"is {size} higher"}[direction]
            said += f"; its {BY_LABEL[cost.measure].phrase} {differs}"
        clauses.append(f"{setting}: {said}" if len(objectives) > 1 else said)
    if hidden := len(clauses) - _MOST_CLAUSES:
        clauses[_MOST_CLAUSES:] = [f"{hidden} more are in the table"] if hidden > 0 else []
    left_out = [f" Not compared: {joined(f'{name} (only {own})' for name, own in alone.items())}."] if alone else []
    return "".join([f"{'. '.join(clauses)}.", *left_out])


def _change(row: Any) -> tuple[int | None, str]:
    """Return -1 if a measure is lower than the baseline's, 1 higher, 0 not shown to differ, else None; and its size."""
    if row is None or math.isnan(row.reduction) or row.significant not in ("yes", "no"):
        return None, ""
    direction = 0 if row.significant == "no" else -1 if row.reduction > 0 else 1
    return direction, f"{abs(100 * row.reduction):.1f} %"


def cell(value: float, interval: Interval | tuple[float, float], decimals: int = 2, sign: str = "") -> str | None:
    """Write a value with its interval in a cell, "6.25 (5.51 to 7.01)"; None if the value is unknown."""
    if math.isnan(value):
        return None
    low, high = interval[:2]
    form = f"{sign}.{decimals}f"
    ends = "" if math.isnan(low) else f" ({low + 0.0:{form}} to {high + 0.0:{form}})"
    return f"{value + 0.0:{form}}{ends}"


RECITED_MARK = "what a model recites, the longest run of tokens that its continuation shares with the true one"
SHARED_MARK = "runs of words that the continuation shares with the true one, in order; all else differs"


LMS_EXPLAINED = (
    "LMS, the longest memorized substring, is the longest run of tokens that a continuation shares with the passage"
)
NEAR_EXPLAINED = (
    "Edit distance: tokens to replace, insert and delete, as a share of the longer text. Common subsequence: tokens "
    "that occur in both in one order."
)
TEXT_PROMPTS = (
    "prompts were sent as text, so the responses were tokenized again: LMS and prefix match are approximate, even "
    "where no token id was lost. `tfidf-tune eval` is exact."
)
FEW_UNITS = (
    f"From {MIN_UNITS} to {ENOUGH_UNITS - 1} units, such an interval excludes 0 in 7 to 11 % of cases without any "
    "difference, instead of 5 %."
)
BOUND = (
    "The upper end of the interval is a bound for these passages and prompts; it does not show that nothing is "
    "memorized."
)


def few_units(fewest: float) -> list[str]:
    """Return the caveat about intervals from few units, if it applies."""
    return [FEW_UNITS] if MIN_UNITS <= fewest < ENOUGH_UNITS else []


def span(low: float, high: float, *, decimals: int) -> str:
    """Write a range: "34.9 to 71.1"; ends that look alike once."""
    ends = (round(end, decimals) + 0.0 for end in (low, high))  # no "-0.0"
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}" for end in ends))


def prompt_length(length: float) -> int | str:
    """Return the length of a prompt for tables; completions have prompts of any length, recorded as 0."""
    return int(length) or "own"


def why_no_interval(one: Any) -> str:
    """Say why a reduction is undefined or has no interval; for the row see :func:`compare_objectives`."""
    if math.isnan(one.reduction):
        return "the baseline is 0" if one.baseline == 0 else "a value is not finite"
    measure = BY_LABEL[one.measure]
    unit = "passage" if measure.kind == "target" else measure.kind
    if one.num_units < 2:
        return f"there is a single {unit}"
    return f"the baseline's {measure.phrase} is 0 in some resamples, because few {unit}s have another value"
