"""How much lower one objective is than the baseline, with intervals, and at which price."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tfidf_tune.analysis.evaluations import Floats, at_last, shared_progress, unit_totals, value_of
from tfidf_tune.analysis.intervals import ALPHA, Interval, bootstrap_interval, holm
from tfidf_tune.results._measures import COMPARED, CONTROL_LMS, LMS, PERPLEXITY, Measure

if TYPE_CHECKING:
    import pandas as pd


def compare_objectives(evaluations: "pd.DataFrame", baseline: str) -> "pd.DataFrame":
    """Compare each objective of a setting with the baseline.

    Args:
        evaluations (pandas.DataFrame): of :func:`evaluation_table`.
        baseline (str): the baseline; settings without it are left out.

    Returns:
        pandas.DataFrame: a row for each "setting", "objective" and "measure" that both have at the last checkpoint that
            all runs share, if possible one where the LMS is known too ("progress", in percent), with the columns
            "baseline" and "other" (values), "reduction" (``(baseline - other) / baseline``; NaN if the baseline is 0 or
            a value is not finite), "low" and "high" (its interval; NaN if there is none), "num_units" (passages,
            blocks, articles or questions), "p_value" (by Holm's method over all rows of the setting), and "significant"
            ("yes", "no", "too few" or None, see :class:`Interval`; "yes" only if the p-value is below 0.05 too).
    """
    import pandas as pd

    rows = []
    for setting, own in evaluations.groupby("setting", sort=False):
        for objective in own["objective"].unique()[1:] if (own["objective"] == baseline).any() else ():
            for measure in COMPARED:
                last = at_last(own, LMS, measure)
                last = at_last(own, measure) if last.empty else last
                before, after = (unit_totals(last[last["objective"] == of], measure) for of in (baseline, objective))
                if before is not None and after is not None:
                    progress = last["progress"].iloc[0]
                    rows.append((setting, objective, measure.label, *_reduction(measure, before, after), progress))
    names = ["setting", "objective", "measure", "baseline", "other", "reduction", *Interval._fields, "progress"]
    table = pd.DataFrame(rows, columns=names)
    table["p_value"] = table.groupby("setting")["p_value"].transform(holm)
    found = [Interval(one.low, one.high, one.num_units).significant for one in table.itertuples()]
    table["significant"] = [
        "no" if said == "yes" and p >= ALPHA else said for said, p in zip(found, table["p_value"], strict=True)
    ]
    return table


def compare_seeds(evaluations: "pd.DataFrame", baseline: str) -> dict[tuple[str, str], list[float]]:
    """Return the reduction of the average LMS by ascending seed, at the last checkpoint that all runs share.

    By setting and objective; NaN if one is undefined. A run of an unknown seed is paired with one of an unknown seed.
    """
    reductions: dict[tuple[str, str], list[float]] = {}
    for setting, own in evaluations.groupby("setting", sort=False):
        last = at_last(own, LMS).dropna(subset=[LMS.label])
        by_objective = last.groupby("objective", sort=False)
        lms = {name: dict(zip(of["seed"], of["lms"], strict=True)) for name, of in by_objective}
        before = lms.pop(baseline, {})
        for objective, after in lms.items():
            shared = sorted(before.keys() & after.keys(), key=lambda seed: seed or 0)
            reductions[str(setting), objective] = [_relative(before[seed], after[seed]) for seed in shared]
    return reductions


def compare_at_equal_perplexity(evaluations: "pd.DataFrame", baseline: str) -> "pd.DataFrame":
    """Compare what an objective recites at the end with what the baseline recited when it had the same perplexity.

    Args:
        evaluations (pandas.DataFrame): of :func:`evaluation_table`.
        baseline (str): the baseline; settings without it are left out.

    Returns:
        pandas.DataFrame: a row for each "setting" and "objective" of which both measures are known wherever they were
            measured together, with the columns

            - "progress" of the last checkpoint that all runs share; "perplexity" and "lms": at it; "floor_bound": how
              far above the floor that LMS is at most, in tokens, if it cannot be told from it, else NaN,
            - "lowest" and "highest": of the baseline's perplexities,
            - "before" and "after": progress of the baseline's checkpoints between which it first had that perplexity
              (equal if exactly at one), "lms_before" and "lms_after": its average LMS there, "interpolated": between
              them, linearly in log perplexity; NaN if it never had it,
            - "baseline_floor_bound": the same of the baseline at both, the higher; NaN if one can be told.
    """
    import pandas as pd

    rows = []
    for setting, own in evaluations.groupby("setting", sort=False):
        of_baseline, last = own[own["objective"] == baseline], at_last(own, LMS, PERPLEXITY)
        path = [of_baseline[of_baseline["progress"] == at] for at in shared_progress(of_baseline, LMS, PERPLEXITY)]
        points = np.array([[value_of(one, PERPLEXITY), value_of(one, LMS)] for one in path])
        for objective in own["objective"].unique()[1:] if path and np.isfinite(points).all() else ():
            end = last[last["objective"] == objective]
            perplexity, lms = value_of(end, PERPLEXITY), value_of(end, LMS)
            if math.isfinite(perplexity) and not math.isnan(lms):
                crossing = first_crossing(np.log(points[:, 0]), math.log(perplexity))
                where: tuple[Any, ...] = (math.nan,) * 6
                if crossing is not None:
                    first, second, weight = crossing
                    before, after = points[[first, second], 1]
                    where = (path[first]["progress"].iloc[0], path[second]["progress"].iloc[0], before, after)
                    bounds = [_floor_bound(path[at]) for at in (first, second)]
                    where += ((1 - weight) * before + weight * after, float(np.max(bounds)))
                extremes = points[:, 0].min(), points[:, 0].max()
                progress = end["progress"].iloc[0]
                rows.append((setting, objective, progress, perplexity, lms, _floor_bound(end), *extremes, *where))
    return pd.DataFrame(rows, columns=_AT_EQUAL_PERPLEXITY)


_AT_EQUAL_PERPLEXITY = [
    *("setting", "objective", "progress", "perplexity", "lms", "floor_bound", "lowest", "highest"),
    *("before", "after", "lms_before", "lms_after", "interpolated", "baseline_floor_bound"),
]


class Floor(NamedTuple):
    """The average LMS of the targets, and of the controls: what is recited of text that was never seen."""

    targets: float
    controls: float
    excess: Interval  # of targets - controls, drawn independently

    @property
    def difference(self) -> float:
        """``targets - controls``."""
        return self.targets - self.controls

    @property
    def reached(self) -> bool:
        """Whether the interval does not lie above 0 and is from enough passages for a verdict."""
        return self.excess.significant in ("yes", "no") and self.excess.low <= 0


def lms_floor(evaluations: "pd.DataFrame") -> Floor | None:
    """Compare the targets' average LMS with the controls'; None if there are no targets or no controls."""
    targets, controls = (unit_totals(evaluations, measure) for measure in (LMS, CONTROL_LMS))
    if targets is None or controls is None:
        return None
    return floor_of(targets[0] / targets[1], controls[0] / controls[1])


def floor_of(targets: Floats, controls: Floats) -> Floor:
    """Compare the average LMS of passages: targets ``[n]`` and controls ``[m]``."""

    def difference(targets: Floats, controls: Floats, axis: int = -1) -> Any:
        return targets.mean(axis) - controls.mean(axis)

    excess = bootstrap_interval(difference, targets, controls, paired=False)
    return Floor(float(targets.mean()), float(controls.mean()), excess)


def first_crossing(path: Floats, goal: float) -> tuple[int, int, float] | None:
    """Return the points of a path ``[n]`` before and after it first has a value, linearly, and the second's weight."""
    if path[0] == goal:
        return 0, 0, 0.0
    for after in range(1, len(path)):
        start, end = path[after - 1], path[after]
        if min(start, end) <= goal <= max(start, end):
            return after - 1, after, float((goal - start) / (end - start))
    return None


def _reduction(measure: Measure, baseline: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> tuple[float, ...]:
    """Return both values, the reduction and its interval."""
    counts = baseline[1]

    def reduction(before: Floats, after: Floats, counts: Floats, axis: int = -1) -> Any:
        reference = measure.value(before, counts, axis)
        return (reference - measure.value(after, counts, axis)) / reference

    values = [float(measure.value(sums, counts)) for sums in (baseline[0], other[0])]
    relative = _relative(*values)
    if math.isnan(relative):
        return (*values, relative, *Interval(math.nan, math.nan, len(counts)))
    return (*values, relative, *bootstrap_interval(reduction, baseline[0], other[0], counts))


def _relative(baseline: float, other: float) -> float:
    """Return the reduction, NaN if it is not finite."""
    reduction = (baseline - other) / baseline if baseline else math.nan
    return reduction if math.isfinite(reduction) else math.nan


def _floor_bound(evaluations: "pd.DataFrame") -> float:
    floor = lms_floor(evaluations)
    return floor.excess.high if floor is not None and floor.reached else math.nan
