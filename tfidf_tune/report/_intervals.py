"""Intervals and what they allow to say, in the words of every report."""

from tfidf_tune.analysis import ENOUGH_UNITS, MIN_UNITS, Interval

SIGNIFICANCE_NOTE = (
    f"Significant: the interval excludes 0. From fewer than {MIN_UNITS} nothing is called so, and from {MIN_UNITS} to "
    f"{ENOUGH_UNITS - 1} by chance alone in 7 to 11 % of cases, not in 5 %."
)


def interval_text(interval: Interval, unit: str, *, decimals: int, suffix: str = "") -> str:
    """Write an interval.

    Args:
        interval (Interval): in the unit of measure that is to be shown.
        unit (str): what was resampled: "passage".
        decimals (int): of its ends.
        suffix (str): after each end: " %". Default: none.

    Returns:
        str: "95 % interval 34.9 % to 71.1 %"; "equal for all passages" where it has no width.
    """
    if interval.is_point:
        return f"equal for all {unit}s"
    low, high = (round(end, decimals) + 0.0 for end in (interval.low, interval.high))  # no "-0.0"
    return f"95 % interval {low:.{decimals}f}{suffix} to {high:.{decimals}f}{suffix}"


def significance(interval: Interval, unit: str) -> str:
    """Say whether what an interval is of is significant, and how far that can be relied on.

    Args:
        interval (Interval): the interval.
        unit (str): what was resampled: "passage".

    Returns:
        str: a clause, to stand after a comma.
    """
    if interval.significant == "too few":
        return f"from too few {unit}s ({interval.num_units}) to judge"
    if interval.significant == "no":
        return "which is not significant: the interval includes 0"
    if interval.num_units < ENOUGH_UNITS:
        return (
            f"which the interval calls significant, but {interval.num_units} {unit}s are few: by chance alone such "
            "intervals exclude 0 in 7 to 11 % of cases, not in 5 %"
        )
    return "which is significant: the interval excludes 0"
