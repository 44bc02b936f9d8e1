"""Phrases that several reports use."""

import math
from collections.abc import Iterable
from typing import Any

from tfidf_tune.analysis.evaluations import BY_NAME
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, Interval

LMS_EXPLAINED = (
    "LMS, the longest memorized substring, is the longest run of tokens that a continuation shares with the passage"
)
TEXT_PROMPTS = (
    "prompts were sent as text, so the responses were tokenized again: LMS and prefix match are approximate, even "
    "where no token id was lost. `tfidf-tune eval` is exact."
)
SIGNIFICANCE_NOTE = (
    f"Significant: the interval excludes 0. With fewer than {MIN_UNITS} units there is no verdict. With {MIN_UNITS} to "
    f"{ENOUGH_UNITS - 1}, the rate of false positives is 7 to 11 % instead of 5 %."
)


def joined(names: Iterable[str]) -> str:
    """Join different names, at least one, as in a sentence: "a, b and c"."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def prompt_length(length: float) -> int | str:
    """Return the length of a prompt for tables; completions have prompts of any length, recorded as 0."""
    return int(length) or "own"


def interval_text(interval: Interval, unit: str, *, decimals: int, suffix: str = "") -> str:
    """Write an interval of a unit ("passage"): "95 % interval 34.9 % to 71.1 %", or "equal for all passages"."""
    if math.isclose(interval.low, interval.high, rel_tol=1e-9, abs_tol=1e-12):
        return f"equal for all {unit}s"
    low, high = (round(end, decimals) + 0.0 for end in (interval.low, interval.high))  # no "-0.0"
    return f"95 % interval {low:.{decimals}f}{suffix} to {high:.{decimals}f}{suffix}"


def significance(interval: Interval, unit: str) -> str:
    """Say whether an interval is significant, and how far that can be relied on: a clause to follow a comma."""
    if interval.significant == "too few":
        return f"from too few {unit}s ({interval.num_units}) to judge"
    if interval.significant == "no":
        return "which is not significant: the interval includes 0"
    if interval.num_units < ENOUGH_UNITS:
        return (
            f"which is nominally significant, but from only {interval.num_units} {unit}s the rate of false positives "
            f"is 7 to 11 % instead of 5 %"
        )
    return "which is significant: the interval excludes 0"


def why_no_interval(one: Any) -> str:
    """Say why a reduction is undefined or has no interval; for the row see :func:`compare_objectives`."""
    if math.isnan(one.reduction):
        return "the baseline is 0" if one.baseline == 0 else "a value is not finite"
    measure = BY_NAME[one.measure]
    if one.num_units < 2:
        return f"there is a single {measure.unit}"
    return f"the baseline's {measure.phrase} is 0 in some resamples, because few {measure.unit}s have another value"
