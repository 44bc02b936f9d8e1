"""The words that verdicts, tables and footnotes of reports share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from tfidf_tune._printing import counted
from tfidf_tune.results.intervals import ENOUGH_UNITS, MIN_UNITS, Interval
from tfidf_tune.results.table import BY_LABEL, PASSAGE_NLL, PERPLEXITY

MOST_CLAUSES = 3  # of a verdict
AT_CHANCE = "recites no more than text it never saw"


def still_detectable(what: str) -> str:
    """Say that membership inference finds what is not recited, by a score in words: "its loss"."""
    return f", but {what} still tells the two apart"


STILL_DETECTABLE = still_detectable("its loss")


def cell(
    value: float,
    interval: Interval | tuple[float, float],
    decimals: int = 2,
    sign: str = "",
    unit: str = "",
) -> str | None:
    """Write a value with its interval in a cell, "6.25 (5.51 to 7.01)"; None if the value is
    unknown. A unit stands after the value, "6.25 % (5.51 to 7.01)".
    """
    if math.isnan(value):
        return None
    number_format = f"{sign}.{decimals}f"
    low, high = interval[:2]
    # 0.0 is added to what is rounded, so that no "-0.0" is shown.
    text, low_text, high_text = [
        format(round(number, decimals) + 0.0, number_format) for number in (value, low, high)
    ]
    text += unit
    return text if math.isnan(low) else f"{text} ({low_text} to {high_text})"


RECITED_MARK = (
    "what a model recites, the longest run of tokens that its continuation shares with the true one"
)
SHARED_MARK = (
    "runs of words that the continuation shares with the true one, in order; all else differs"
)
LMS_EXPLAINED = (
    "LMS, the longest memorized substring, is the longest run of tokens that a continuation shares "
    "with the passage"
)
NEAR_EXPLAINED = (
    "Edit distance: tokens to replace, insert and delete, as a share of the longer text. Common "
    "subsequence: tokens that occur in both in one order."
)
TEXT_PROMPTS = (
    "prompts were sent as text, so the responses were tokenized again: LMS and prefix match are "
    "approximate, even where no token id was lost. `tfidf-tune eval` is exact."
)
FEW_UNITS = (
    f"From {MIN_UNITS} to {ENOUGH_UNITS - 1} units, such an interval excludes 0 in 7 to 11 % of "
    "cases without any difference, instead of 5 %."
)
BOUND = (
    "The upper end of the interval is a bound for these passages and prompts; it does not show "
    "that nothing is memorized."
)


def hardly_learned(scores: pd.DataFrame, names: Mapping[int, str]) -> str:
    """Return a sentence that names the checkpoints that predict hardly better than equal
    probabilities do, or "".
    """
    clauses = []
    for checkpoint, name in names.items():
        rows = scores[scores["checkpoint"] == checkpoint]
        vocab_size = rows["value"][rows["metric"] == "vocab_size"].max()  # NaN in older results
        nll = _log_perplexity(rows)
        if nll is None:
            continue
        perplexity = math.exp(min(nll, 20))
        if perplexity > vocab_size / 4:
            shown = f"{perplexity:,.0f}" if perplexity < 1e6 else "over a million"
            clauses.append(f"{name} (perplexity {shown}, vocabulary {vocab_size:,.0f})")
    if not clauses:
        return ""
    num_hidden = len(clauses) - MOST_CLAUSES
    more = f" and {num_hidden} more" if num_hidden > 0 else ""
    return f" Hardly learned: {', '.join(clauses[:MOST_CLAUSES])}{more}."


def _log_perplexity(rows: pd.DataFrame) -> float | None:
    """Return the average NLL of the perplexity blocks of a checkpoint, or else of its targets; None
    if neither was measured.
    """
    for measure in (PERPLEXITY, PASSAGE_NLL):
        measured = rows[(rows["metric"] == measure.metric) & (rows["kind"] == measure.kind)]
        if len(measured):
            return float(np.average(measured["value"], weights=measured["count"]))
    return None


def about_words(num_tokens: float, rate: float) -> str:
    """Say how many words so many tokens are, ", about 22 words"; "" if the rate is unknown, or it
    is no word.
    """
    if math.isnan(rate) or round(rate * num_tokens) < 1:
        return ""
    return f", about {counted(round(rate * num_tokens), 'word')}"


def few_units(fewest: float) -> list[str]:
    """Return the caveat about intervals from few units, if it applies."""
    if MIN_UNITS <= fewest < ENOUGH_UNITS:
        return [FEW_UNITS]
    return []


def number_of_times(numbers: Sequence[int]) -> str:
    """Write sorted numbers of copies: "once", "10 times", "20 or 40 times", "3 to 35 times"."""
    if list(numbers) == [1]:
        return "once"
    if len(numbers) < 3:
        return f"{' or '.join(str(number) for number in numbers)} times"
    return f"{numbers[0]} to {numbers[-1]} times"


def span(low: float, high: float, *, decimals: int) -> str:
    """Write a range: "34.9 to 71.1"; ends that look alike once."""
    texts = []
    for end in (low, high):
        rounded = round(end, decimals) + 0.0  # no "-0.0"
        texts.append(f"{rounded:.{decimals}f}")
    return " to ".join(dict.fromkeys(texts))


def prompt_length(length: float) -> int | str:
    """Return the length of a prompt for tables; completions have prompts of any length, recorded as
    0.
    """
    return int(length) or "own"


def why_no_interval(row: Any) -> str:
    """Say why a reduction is undefined or has no interval; for the row see
    :func:`compare_objectives`.
    """
    if math.isnan(row.reduction):
        if row.baseline == 0:
            return "the baseline is 0"
        return "a value is not finite"
    measure = BY_LABEL[row.measure]
    unit = "passage" if measure.kind == "target" else measure.kind
    if row.num_units < 2:
        return f"there is a single {unit}"
    return (
        f"the baseline's {measure.phrase} is 0 in some resamples, because few {unit}s have another "
        "value"
    )
