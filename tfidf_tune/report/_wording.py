"""Phrases that several reports use."""

import math
from collections.abc import Iterable
from typing import Any

from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, Interval
from tfidf_tune.results._table import BY_LABEL

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
SIGNIFICANCE_NOTE = (
    "p (Holm): two-sided, from the same resamples, corrected for the number of comparisons of the model by Holm's "
    f"method. Significant: the interval excludes 0 and p is below 0.05. With fewer than {MIN_UNITS} units there is no "
    "verdict."
)
NOT_CORRECTED = "not after Holm's correction"
FEW_UNITS = (
    f"From {MIN_UNITS} to {ENOUGH_UNITS - 1} units, such an interval excludes 0 in 7 to 11 % of cases without any "
    "difference, instead of 5 %."
)
SEVERAL_COMPARISONS = (
    "Verdicts are corrected for the number of comparisons of a model by Holm's method. Intervals are not: without any "
    "difference, one in twenty excludes 0."
)
BOUND = (
    "The bound is the upper end of the 95 % interval of targets minus controls. It holds for these passages and "
    "prompts, and does not show that nothing is memorized."
)


class Footnotes:
    """The caveats of a report, each said once and marked wherever it applies."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, *texts: str) -> str:
        """Return the marks of footnotes, "[1][2]"; new ones are added."""
        self.texts += [text for text in dict.fromkeys(texts) if text not in self.texts]
        return "".join(f"[{self.texts.index(text) + 1}]" for text in texts)


def joined(names: Iterable[str]) -> str:
    """Join different names, at least one, as in a sentence: "a, b and c"."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def percent_text(percent: float) -> str:
    """Write a change: "+5.0 %"; never "-0.0 %"."""
    return f"{round(percent, 1) + 0.0:+.1f} %"


def span(low: float, high: float, *, decimals: int, suffix: str = "") -> str:
    """Write a range: "34.9 % to 71.1 %"; ends that look alike once."""
    ends = (round(end, decimals) + 0.0 for end in (low, high))  # no "-0.0"
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}{suffix}" for end in ends))


def prompt_length(length: float) -> int | str:
    """Return the length of a prompt for tables; completions have prompts of any length, recorded as 0."""
    return int(length) or "own"


def interval_text(interval: Interval, unit: str, *, decimals: int, suffix: str = "") -> str:
    """Write an interval of a unit ("passage"): "95 % interval 34.9 % to 71.1 %", or "equal for all passages"."""
    if math.isclose(interval.low, interval.high, rel_tol=1e-9, abs_tol=1e-12):
        return f"equal for all {unit}s"
    return f"95 % interval {span(interval.low, interval.high, decimals=decimals, suffix=suffix)}"


def at_progress(progress: int, comma: str = "") -> str:
    """Name a checkpoint: " at 50 % of training", with a comma before it or not; nothing at the end of training."""
    return "" if progress == 100 else f"{comma} at {progress} % of training"


def why_no_interval(one: Any) -> str:
    """Say why a reduction is undefined or has no interval; for the row see :func:`compare_objectives`."""
    if math.isnan(one.reduction):
        return "the baseline is 0" if one.baseline == 0 else "a value is not finite"
    measure = BY_LABEL[one.measure]
    if one.num_units < 2:
        return f"there is a single {measure.unit}"
    return f"the baseline's {measure.phrase} is 0 in some resamples, because few {measure.unit}s have another value"
