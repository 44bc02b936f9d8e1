"""The findings of a frontier in sentences."""

from collections.abc import Sequence

from tfidf_tune.analysis import VERDICTS, Frontier, SeedDifference
from tfidf_tune.report._frontier_tables import in_percent
from tfidf_tune.report._statements import joined

# So many objectives have their numbers in a sentence, whatever the verdict.
_FEW = 4


def frontier_statements(frontiers: Sequence[Frontier]) -> tuple[str, ...]:
    """Say what the operating points show: who is better than each reference, who is on the front, and what to doubt.

    Args:
        frontiers (Sequence[Frontier]): one a model.

    Returns:
        tuple[str, ...]: the findings of each model, in the models' order.
    """
    prefix = len(frontiers) > 1
    return tuple(
        f"{frontier.model}: {text}" if prefix else text
        for frontier in frontiers
        for text in (*_verdicts(frontier), *_front(frontier), *_doubts(frontier))
    )


def _verdicts(frontier: Frontier) -> list[str]:
    statements = []
    for reference in frontier.references:
        against = [one for one in frontier.at_operating_points if one.reference == reference]
        pairs = {one.num_pairs for one in against}
        shown = "" if len(pairs) > 1 else f" ({_pairs(*pairs)})" if pairs else ""
        by_verdict = [(said, [one for one in against if one.verdict == said]) for said in VERDICTS]
        found = []
        for said, same in by_verdict:
            # Of many objectives, the table has the numbers of those that one would not choose.
            brief = len(against) > _FEW and said not in VERDICTS[:2]
            names = [one.objective if brief else _change(one, with_pairs=len(pairs) > 1) for one in same]
            found += [f"{said}: {joined(names)}"] if names else []
        if found:
            statements.append(f"Against {reference}, each at its operating point{shown}: {'; '.join(found)}.")
    return statements


def _change(one: SeedDifference, *, with_pairs: bool) -> str:
    """Goldfish (LMS -86.0 %, perplexity +1.2 %)."""
    changes = [] if one.reduction is None else [f"LMS {_percent(-100 * one.reduction)}"]
    perplexity, *_ = in_percent(one.log_perplexity)
    changes += [] if perplexity is None else [f"perplexity {_percent(perplexity)}"]
    changes += [_pairs(one.num_pairs)] if with_pairs else []
    return f"{one.objective} ({', '.join(changes)})" if changes else one.objective


def _percent(value: float) -> str:
    return f"{round(value, 1) + 0.0:+.1f} %"  # no "-0.0"


def _pairs(number: int) -> str:
    return f"{number} pair{'s' * (number != 1)} of seeds"


def _front(frontier: Frontier) -> list[str]:
    on_front = [
        (curve.operating.log_perplexity.mean, curve.objective)
        for curve in frontier.curves
        if curve.operating is not None and curve.on_front
    ]
    if len(frontier.curves) < 2 or not on_front:
        return []
    names = joined([objective for _, objective in sorted(on_front)])
    points = ", by ascending perplexity, are the operating points" if len(on_front) > 1 else " is the operating point"
    return [
        f"On the Pareto front of all points{points} of {names}: no other point has less of one without more of the "
        "other."
    ]


def _doubts(frontier: Frontier) -> list[str]:
    return [*_range_ends(frontier), *_unequal_seeds(frontier), *_diverged(frontier)]


def _range_ends(frontier: Frontier) -> list[str]:
    statements = []
    for end in ("lowest", "highest"):
        objectives = [curve.objective for curve in frontier.curves if curve.range_end == end]
        if objectives:
            statements.append(
                f"The operating point of {joined(objectives)} is at the {end} learning rate that was tried: a better "
                "one may lie beyond."
            )
    return statements


def _unequal_seeds(frontier: Frontier) -> list[str]:
    unequal = [
        curve
        for curve in frontier.curves
        if len({frozenset(record.seed for record in point.records) for point in curve.points if point.finite}) > 1
    ]
    statements = []
    for has_common, how in ((True, "those that all have"), (False, "each one's own, since none is common to all")):
        objectives = [curve.objective for curve in unequal if bool(curve.chosen_by) == has_common]
        if objectives:
            statements.append(
                f"Not every learning rate of {joined(objectives)} has the same seeds: the operating point is chosen by "
                f"{how}."
            )
    return statements


def _diverged(frontier: Frontier) -> list[str]:
    objectives = [curve.objective for curve in frontier.curves if curve.operating is None]
    if not objectives:
        return []
    return [f"At every learning rate a run of {joined(objectives)} diverged, so that there is no operating point."]
