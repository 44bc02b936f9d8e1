"""The findings of a comparison in sentences."""

from collections.abc import Iterable, Sequence

from tfidf_tune.analysis import (
    ANSWER_MEASURES,
    LMS,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Comparison,
    Floor,
    Interval,
    Reduction,
)

# An average LMS so far above the controls' is called near it.
_NEAR_FLOOR = 0.2
# Percentile intervals from fewer observations cover the truth clearly less often than they say.
_FEW_UNITS = 30


def reduction_statement(comparison: Comparison, baseline: str) -> str:
    """Say how an objective changes the average LMS, and what that costs in perplexity.

    Args:
        comparison (Comparison): of the objective, with a reduction of the average LMS.
        baseline (str): the baseline.

    Returns:
        str: one or two sentences.
    """
    at, recited = comparison.reductions[LMS.name]
    text = f"{comparison.objective} {change(recited)} against {baseline}{_when(at)}, {significance(recited)}."
    if PERPLEXITY.name not in comparison.reductions:
        return f"{text} Perplexity was not measured for both, so what it costs is not known."
    perplexity_at, perplexity = comparison.reductions[PERPLEXITY.name]
    return f"{text} It {change(perplexity)}{_when(perplexity_at)}, {significance(perplexity)}."


def downstream_statements(comparison: Comparison) -> list[str]:
    """Say how an objective changes summaries and answers.

    Args:
        comparison (Comparison): of the objective.

    Returns:
        list[str]: one a task that was run for both.
    """
    statements = []
    for task, measures in (("Summaries", SUMMARY_MEASURES), ("Answers", ANSWER_MEASURES)):
        measured = [
            comparison.reductions[measure.name] for measure in measures if measure.name in comparison.reductions
        ]
        if measured:
            scores = ", ".join(_score(reduction) for _, reduction in measured)
            statements.append(f"{task} under {comparison.objective}{_when(measured[0][0])}: {scores}.")
    return statements


def equal_perplexity_statement(comparison: Comparison, baseline: str) -> str | None:
    """Say what the baseline recited when it had the perplexity that the objective ends with.

    Args:
        comparison (Comparison): of the objective.
        baseline (str): the baseline.

    Returns:
        str | None: None where LMS and perplexity were not measured together.
    """
    equal = comparison.equal_perplexity
    if equal is None:
        return None
    goal, objective = f"{equal.perplexity:.2f}", comparison.objective
    if equal.reduction is None or equal.between is None:
        lowest, highest = min(equal.baseline_perplexities), max(equal.baseline_perplexities)
        return (
            f"At equal perplexity nothing can be said: {objective} ends with {goal}, and {baseline}'s checkpoints lie "
            f"between {lowest:.2f} and {highest:.2f}, never at it."
        )
    first, second = equal.between
    where = f"at {first} % of its training" if first == second else f"between {first} and {second} % of its training"
    return (
        f"At equal perplexity ({baseline} had {objective}'s final {goal} {where}), {objective} "
        f"{change(equal.reduction)}, {significance(equal.reduction)}."
    )


def floor_statement(objective: str, floor: Floor) -> str | None:
    """Say that an objective recites no more, or hardly more, than chance and fluency alone give.

    Args:
        objective (str): the objective.
        floor (Floor): targets and controls at its last checkpoint.

    Returns:
        str | None: None where it is well above the floor.
    """
    values = f"average LMS {floor.targets:.2f}, that of passages never seen {floor.controls:.2f}"
    if floor.excess is not None and floor.excess.low <= 0:
        return (
            f"{objective} is at the floor ({values}): the 95 % interval of the difference, {floor.excess.low:.2f} to "
            f"{floor.excess.high:.2f} tokens, does not lie above 0, so little or nothing is left to reduce."
        )
    if floor.targets <= (1 + _NEAR_FLOOR) * floor.controls:
        return f"{objective} is near the floor ({values}), so little is left to reduce."
    return None


def few_units_statement(comparisons: Iterable[Comparison]) -> str | None:
    """Warn where an interval rests on few passages, blocks, articles or questions.

    Args:
        comparisons (Iterable[Comparison]): all of them.

    Returns:
        str | None: None where there are enough.
    """
    found = {
        reduction.measure.unit: reduction.num_units
        for comparison in comparisons
        for _, reduction in comparison.reductions.values()
        if reduction.interval is not None and reduction.num_units < _FEW_UNITS
    }
    if not found:
        return None
    few = joined([f"{count} {unit}s" for unit, count in found.items()])
    return f"Intervals from only {few} are narrower than they should be: take {_FEW_UNITS} or more to rely on them."


def seeds_statement(num_seeds: Iterable[int]) -> str | None:
    """Warn where runs stand for themselves.

    Args:
        num_seeds (Iterable[int]): of each model and objective.

    Returns:
        str | None: None where each has several seeds.
    """
    if min(num_seeds, default=2) > 1:
        return None
    return (
        "One training run alone does not tell an objective from its seed: intervals cover the choice of passages only."
    )


def change(reduction: Reduction) -> str:
    """Say a change and its interval, without a subject.

    Args:
        reduction (Reduction): of any measure.

    Returns:
        str: "lowers the average LMS by 57.8 % (8.30 to 3.50; 95 % interval 34.9 % to 71.1 %)".
    """
    phrase = reduction.measure.phrase
    values = f"{reduction.baseline:.2f} to {reduction.other:.2f}"
    if reduction.reduction is None:
        return f"has no defined relative change of the {phrase} ({values})"
    if reduction.reduction == 0:
        return f"leaves the {phrase} as it is ({values}{_interval(reduction.interval, 1)})"
    sign = 1 if reduction.reduction > 0 else -1
    verb = "lowers" if sign == 1 else "raises"
    amount = f"{100 * abs(reduction.reduction):.1f} %"
    return f"{verb} the {phrase} by {amount} ({values}{_interval(reduction.interval, sign)})"


def significance(reduction: Reduction) -> str:
    """Say whether a change is significant, or why that is not known.

    Args:
        reduction (Reduction): of any measure.

    Returns:
        str: a clause.
    """
    if reduction.reduction is None:
        return f"since {_why_undefined(reduction)}"
    if reduction.interval is None:
        return f"which has no interval: {why_no_interval(reduction)}"
    if reduction.interval.excludes_zero():
        return "which is significant: the interval excludes 0"
    return "which is not significant: the interval includes 0"


def why_no_interval(reduction: Reduction) -> str:
    """Say why a reduction has no interval.

    Args:
        reduction (Reduction): one without an interval.

    Returns:
        str: a clause.
    """
    if reduction.reduction is None:
        return _why_undefined(reduction)
    if reduction.num_units < 2:
        return f"there is a single {reduction.measure.unit}"
    return (
        f"the baseline's {reduction.measure.phrase} is 0 in some resamples, so few {reduction.measure.unit}s have any"
    )


def joined(names: Sequence[str]) -> str:
    """Write a list as a sentence has it.

    Args:
        names (Sequence[str]): at least one.

    Returns:
        str: "a, b and c".
    """
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _score(reduction: Reduction) -> str:
    """ROUGE-1 30.00 to 31.50 (+5.0 %, 95 % interval 1.0 % to 9.0 %, significant)."""
    values = f"{reduction.measure.phrase} {reduction.baseline:.2f} to {reduction.other:.2f}"
    if reduction.reduction is None:
        return f"{values} (relative change undefined, {_why_undefined(reduction)})"
    amount = f"{round(-100 * reduction.reduction, 1) + 0.0:+.1f} %"
    if reduction.interval is None:
        return f"{values} ({amount}, no interval, {why_no_interval(reduction)})"
    significant = "significant" if reduction.interval.excludes_zero() else "not significant"
    return f"{values} ({amount}{_interval(reduction.interval, -1).replace(';', ',')}, {significant})"


def _why_undefined(reduction: Reduction) -> str:
    return "the baseline is 0" if reduction.baseline == 0 else "a value is not finite"


def _interval(interval: Interval | None, sign: int) -> str:
    if interval is None:
        return ""
    low, high = sorted(round(100 * sign * end, 1) + 0.0 for end in (interval.low, interval.high))  # no "-0.0"
    return f"; 95 % interval {low:.1f} % to {high:.1f} %"


def _when(progress: int) -> str:
    return "" if progress == 100 else f" at {progress} % of training"
