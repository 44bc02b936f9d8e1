"""The words that verdicts, tables and footnotes of reports share."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tfidf_tune._printing import counted
from tfidf_tune.results.intervals import ENOUGH_UNITS, MIN_UNITS, Interval
from tfidf_tune.results.table import BY_LABEL, PASSAGE_NLL, PERPLEXITY

MOST_CLAUSES = 3  # of a verdict
STILL_DETECTABLE = ", but its loss still tells the two apart"
AT_CHANCE = "recites no more than text it never saw"


def cell(
    value: float, interval: Interval | tuple[float, float], decimals: int = 2, sign: str = ""
) -> str | None:
    """Write a value with its interval in a cell, "6.25 (5.51 to 7.01)"; None if the value is
    unknown.
    """
    if math.isnan(value):
        return None
    low, high = interval[:2]
    form = f"{sign}.{decimals}f"
    ends = "" if math.isnan(low) else f" ({low + 0.0:{form}} to {high + 0.0:{form}})"
    return f"{value + 0.0:{form}}{ends}"


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
    said = []
    for checkpoint, name in names.items():
        own = scores[scores["checkpoint"] == checkpoint]
        size = own.loc[own["metric"] == "vocab_size", "value"].max()  # NaN in older results
        known = (
            own[(own["metric"] == one.metric) & (own["kind"] == one.kind)]
            for one in (PERPLEXITY, PASSAGE_NLL)
        )
        nll = next((rows for rows in known if len(rows)), None)
        if nll is not None:
            perplexity = math.exp(min(np.average(nll["value"], weights=nll["count"]), 20))
            if perplexity > size / 4:
                shown = f"{perplexity:,.0f}" if perplexity < 1e6 else "over a million"
                said.append(f"{name} (perplexity {shown}, vocabulary {size:,.0f})")
    more = f" and {len(said) - MOST_CLAUSES} more" if len(said) > MOST_CLAUSES else ""
    return f" Hardly learned: {', '.join(said[:MOST_CLAUSES])}{more}." if said else ""


def about_words(num_tokens: float, rate: float) -> str:
    """Say how many words so many tokens are, ", about 22 words"; "" if the rate is unknown."""
    if math.isnan(rate):
        return ""
    return f", about {counted(round(rate * num_tokens), 'word')}"


def few_units(fewest: float) -> list[str]:
    """Return the caveat about intervals from few units, if it applies."""
    return [FEW_UNITS] if MIN_UNITS <= fewest < ENOUGH_UNITS else []


def span(low: float, high: float, *, decimals: int) -> str:
    """Write a range: "34.9 to 71.1"; ends that look alike once."""
    ends = (round(end, decimals) + 0.0 for end in (low, high))  # no "-0.0"
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}" for end in ends))


def prompt_length(length: float) -> int | str:
    """Return the length of a prompt for tables; completions have prompts of any length, recorded as
    0.
    """
    return int(length) or "own"


def why_no_interval(one: Any) -> str:
    """Say why a reduction is undefined or has no interval; for the row see
    :func:`compare_objectives`.
    """
    if math.isnan(one.reduction):
        return "the baseline is 0" if one.baseline == 0 else "a value is not finite"
    measure = BY_LABEL[one.measure]
    unit = "passage" if measure.kind == "target" else measure.kind
    if one.num_units < 2:
        return f"there is a single {unit}"
    return (
        f"the baseline's {measure.phrase} is 0 in some resamples, because few {unit}s have another "
        "value"
    )
