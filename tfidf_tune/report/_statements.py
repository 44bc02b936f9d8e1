"""The findings of a comparison in sentences."""

from collections.abc import Sequence

from tfidf_tune.analysis import (
    ANSWER_MEASURES,
    ENOUGH_UNITS,
    LMS,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Bracket,
    Comparison,
    EqualPerplexity,
    Floor,
    Interval,
    Reduction,
)
from tfidf_tune.report._intervals import interval_text, significance

# An average LMS so far above the controls' is called near it.
_NEAR_FLOOR = 0.2


def reduction_statement(comparison: Comparison, baseline: str) -> str:
    """Say how an objective changes the average LMS, and what that costs in perplexity.

    Args:
        comparison (Comparison): of the objective, with a reduction of the average LMS.
        baseline (str): the baseline.

    Returns:
        str: one or two sentences.
    """
    at, recited = comparison.reductions[LMS.name]
    text = f"{comparison.objective} {change(recited)} against {baseline}{_when(at)}, {_verdict(recited)}."
    if PERPLEXITY.name not in comparison.reductions:
        return f"{text} Perplexity was not measured for both, so what it costs is not known."
    perplexity_at, perplexity = comparison.reductions[PERPLEXITY.name]
    return f"{text} It {change(perplexity)}{_when(perplexity_at)}, {_verdict(perplexity)}."


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
    goal, objective, bracket = f"{equal.perplexity:.2f}", comparison.objective, equal.bracket
    if bracket is None:
        lowest, highest = min(equal.baseline_perplexities), max(equal.baseline_perplexities)
        return (
            f"At equal perplexity nothing can be said: {objective} ends with {goal}, and {baseline}'s checkpoints lie "
            f"between {lowest:.2f} and {highest:.2f}, never at it."
        )
    if bracket.before == bracket.after:
        where, recited = f"at {bracket.before} %", f"{bracket.interpolated:.2f} tokens on average"
    else:
        where = f"between {bracket.before} and {bracket.after} %"
        recited = (
            f"between {min(_ends(bracket)):.2f} and {max(_ends(bracket)):.2f} tokens on average "
            f"({bracket.interpolated:.2f} interpolated)"
        )
    return (
        f"At equal perplexity ({baseline} first had {objective}'s final {goal} {where} of its training) {baseline} "
        f"recited {recited}; {objective} recites {equal.lms:.2f}: {_at_equal_perplexity(equal, bracket, baseline)}."
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
    if floor.reached and floor.excess is not None:
        return (
            f"{objective} is at the floor ({values}): the difference of {floor.difference:.2f} tokens "
            f"({interval_text(floor.excess, 'passage', decimals=2)}) is not clear of 0, so little or nothing is left "
            "to reduce."
        )
    if floor.targets <= (1 + _NEAR_FLOOR) * floor.controls:
        return f"{objective} is near the floor ({values}), so little is left to reduce."
    return None


def seeds_statement(comparison: Comparison, num_seeds: int) -> str:
    """Say what the intervals leave out, with what each seed gave where there are several.

    Args:
        comparison (Comparison): of the objective.
        num_seeds (int): runs of the objective, or of the baseline if it has fewer.

    Returns:
        str: one sentence.
    """
    if num_seeds < 2:
        return (
            "One training run alone does not tell an objective from its seed: intervals cover the choice of passages "
            "only."
        )
    text = "Intervals cover the choice of passages, not that of seeds"
    if not comparison.lms_by_seed:
        return f"{text}."
    by_seed = ", ".join("undefined" if one is None else f"{100 * one:.1f} %" for one in comparison.lms_by_seed)
    return f"{text}; per seed the reduction of the average LMS under {comparison.objective} was {by_seed}."


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
        return f"leaves the {phrase} as it is ({values}{_interval(reduction, 1, ';')})"
    sign = 1 if reduction.reduction > 0 else -1
    verb = "lowers" if sign == 1 else "raises"
    amount = f"{100 * abs(reduction.reduction):.1f} %"
    return f"{verb} the {phrase} by {amount} ({values}{_interval(reduction, sign, ';')})"


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
    verdict = _short_verdict(reduction.interval, reduction.measure.unit)
    return f"{values} ({amount}{_interval(reduction, -1, ',')}, {verdict})"


def _short_verdict(interval: Interval, unit: str) -> str:
    if interval.significant == "too few":
        return significance(interval, unit)
    if interval.significant == "no":
        return "not significant"
    return (
        "significant"
        if interval.num_units >= ENOUGH_UNITS
        else f"significant, but {interval.num_units} {unit}s are few"
    )


def _verdict(reduction: Reduction) -> str:
    if reduction.reduction is None:
        return f"since {_why_undefined(reduction)}"
    if reduction.interval is None:
        return f"which has no interval: {why_no_interval(reduction)}"
    return significance(reduction.interval, reduction.measure.unit)


def _at_equal_perplexity(equal: EqualPerplexity, bracket: Bracket, baseline: str) -> str:
    """The verdict that needs no interpolation."""
    if equal.at_floor and bracket.at_floor:
        return "both at the floor, where there is nothing to tell apart"
    if equal.lms > max(_ends(bracket)):
        return f"no gain, more than {baseline} did there"
    if equal.lms < min(_ends(bracket)):
        return f"less than {baseline} did there"
    return "no clear gain or loss"


def _ends(bracket: Bracket) -> tuple[float, float]:
    return bracket.lms_before, bracket.lms_after


def _why_undefined(reduction: Reduction) -> str:
    return "the baseline is 0" if reduction.baseline == 0 else "a value is not finite"


def _interval(reduction: Reduction, sign: int, separator: str) -> str:
    if reduction.interval is None:
        return ""
    low, high = sorted(100 * sign * end for end in (reduction.interval.low, reduction.interval.high))
    in_percent = Interval(low, high, reduction.interval.num_units)
    return f"{separator} {interval_text(in_percent, reduction.measure.unit, decimals=1, suffix=' %')}"


def _when(progress: int) -> str:
    return "" if progress == 100 else f" at {progress} % of training"
