"""Runs that may be compared: grouped by model and objective, and checked to have been asked the same."""

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tfidf_tune.analysis._measures import Floats, Measure
from tfidf_tune.results import Checkpoint, Results
from tfidf_tune.results._documents import prompt_label

if TYPE_CHECKING:
    import pandas as pd

_DEFAULT_BASELINE = "CE"


class Setting:
    """Runs of one model, at one learning rate if several are compared.

    Args:
        name (str): see :attr:`Checkpoint.setting`.
        objectives (dict[str, list[int]]): objective -> its checkpoints, as indices; the baseline comes first.
        results (Results): of these and other runs.
    """

    def __init__(self, name: str, objectives: dict[str, list[int]], results: Results) -> None:
        self.name, self.objectives, self.results = name, objectives, results
        used = [at for checkpoints in objectives.values() for at in checkpoints]
        scores = results.scores
        self.scores = scores[scores["checkpoint"].isin(used) & (scores["unit"] != "")]
        self._rows = self.scores.groupby(["checkpoint", "metric", "kind"], observed=True).indices
        self._totals = cache(self._totals_of_checkpoint)

    def rows(self, checkpoints: Sequence[int]) -> "pd.DataFrame":
        """Return the rows of the table of results of some checkpoints, aggregates left out."""
        return self.scores[self.scores["checkpoint"].isin(checkpoints)]

    def num_seeds(self, objective: str) -> int:
        """Return how many runs an objective has."""
        return len({self.results.checkpoints[at].run for at in self.objectives[objective]})

    def at(self, objective: str, progress: int | None) -> list[int]:
        """Return the checkpoints of an objective at a progress in percent, one a run."""
        return [at for at in self.objectives[objective] if self.results.checkpoints[at].progress == progress]

    def progress(self, *measures: Measure, objective: str | None = None) -> list[int]:
        """Return in ascending order where all runs (of an objective) that have the measures anywhere have them."""
        by_run: dict[Any, set[int]] = {}
        for name, checkpoints in self.objectives.items():
            for at in checkpoints if objective in (None, name) else ():
                one = self.results.checkpoints[at]
                if all(self.totals(measure, [at]) is not None for measure in measures):
                    by_run.setdefault(one.run, set()).add(one.progress)
        return sorted(set.intersection(*by_run.values())) if by_run else []

    def last(self, *measures: Measure) -> int | None:
        """Return the last progress that all runs share, or None."""
        return max(self.progress(*measures), default=None)

    def at_last(self, measure: Measure) -> dict[str, list[int]]:
        """Return for each objective that has a measure at the last shared progress its checkpoints there."""
        found = {name: self.at(name, self.last(measure)) for name in self.objectives}
        having = {name: [at for at in of if self.totals(measure, [at]) is not None] for name, of in found.items()}
        return {name: checkpoints for name, checkpoints in having.items() if checkpoints}

    def totals(self, measure: Measure, checkpoints: Sequence[int]) -> tuple[Floats, Floats] | None:
        """Sum a measure by unit: the prefix lengths of a passage stay together; sums are means over checkpoints.

        Args:
            measure (Measure): what is measured.
            checkpoints (Sequence[int]): of one progress, one a seed.

        Returns:
            tuple[np.ndarray, np.ndarray] | None: float64 ``[n]`` sums and ``[n]`` counts by ascending unit; None if
                there is no checkpoint, or one misses the measure.
        """
        totals = [self._totals(measure, at) for at in checkpoints]
        known = [one for one in totals if one is not None]
        if not totals or len(known) < len(totals):
            return None
        return np.mean([sums for sums, _ in known], axis=0), known[0][1]

    def value(self, measure: Measure, checkpoints: Sequence[int]) -> float | None:
        """Return a measure over seeds, None if it is missing; perplexity is over all their predictions."""
        totals = self.totals(measure, checkpoints)
        return None if totals is None else float(measure.value(*totals))

    def _totals_of_checkpoint(self, measure: Measure, checkpoint: int) -> tuple[Floats, Floats] | None:
        rows = self._rows.get((checkpoint, measure.metric, measure.kind))
        if rows is None:
            return None
        own = self.scores.iloc[rows]
        if own["value"].isna().any():
            return None
        sums = (own["value"] * own["count"]).groupby(own["unit"], observed=True).sum()
        counts = own["count"].groupby(own["unit"], observed=True).sum()
        order = sorted(sums.index, key=(lambda unit: (len(unit), unit)) if measure.kind == "block" else None)
        return sums[order].to_numpy(float), counts[order].to_numpy(float)


def group_results(results: Results, *, baseline: str | None = None) -> tuple[str, list[Setting]]:
    """Return the baseline and the results by model and objective, in the order of the first runs.

    Args:
        results (Results): of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    checkpoints = results.checkpoints
    if len({one.run for one in checkpoints}) < 2:
        one = checkpoints[0] if checkpoints else None
        found = f"only {one.folder} ({one.setting}, {one.objective})" if one else "no run"
        raise ValueError(
            f"nothing to compare: there is {found}. Give a second run, of the baseline or another objective; to look "
            "at a single model, use `tfidf-tune probe audit`"
        )
    baseline, objectives = choose_baseline(checkpoints, baseline)
    require_comparable(results)
    settings = []
    for name in dict.fromkeys(one.setting for one in checkpoints):
        of_setting = {
            objective: [at for at, one in enumerate(checkpoints) if (one.setting, one.objective) == (name, objective)]
            for objective in objectives
        }
        settings.append(Setting(name, {objective: own for objective, own in of_setting.items() if own}, results))
    return baseline, settings


def choose_baseline(checkpoints: Sequence[Checkpoint], baseline: str | None) -> tuple[str, list[str]]:
    """Return the baseline, by default "CE" or the first objective, and all objectives, the baseline first.

    Raises:
        ValueError: If no checkpoint has the baseline.
    """
    objectives = list(dict.fromkeys(one.objective for one in checkpoints))
    if baseline is None:
        baseline = _DEFAULT_BASELINE if _DEFAULT_BASELINE in objectives else objectives[0]
    if baseline not in objectives:
        raise ValueError(f"no run has the baseline {baseline!r}: there are {', '.join(objectives)}")
    return baseline, sorted(objectives, key=lambda name: name != baseline)


def require_comparable(results: Results) -> None:
    """Check that runs are distinct, and that those of a model had the same prompts, blocks, articles and questions.

    Checkpoints of all learning rates are compared; a task that was not run is not a difference.

    Raises:
        ValueError: If a checkpoint occurs twice, a run has checkpoints of two trainings, or two checkpoints of a model
            were asked different things; the message names both and the first difference.
    """
    seen: dict[tuple[object, ...], dict[int, Checkpoint]] = {}
    first_asked: dict[tuple[str, str], int] = {}
    for at, one in enumerate(results.checkpoints):
        others = seen.setdefault(one.run, {})
        if one.progress in others or any(_training(one) != _training(other) for other in others.values()):
            raise ValueError(f"two runs are both {one.title}: leave out one of the files or folders that have them")
        others[one.progress] = one
        for what, digest in one.asked.items():
            first = first_asked.setdefault((one.model, what), at)
            if results.checkpoints[first].asked[what] != digest:
                raise ValueError(
                    f"{_where(results.checkpoints[first])} and {_where(one)} cannot be compared, their {what} differ: "
                    f"{_difference(_questions(results, first, what), _questions(results, at, what))}. Evaluate both "
                    "with one probe file, data set and settings"
                )


def _training(one: Checkpoint) -> tuple[object, ...]:
    return one.recipe, one.loss, one.training_seconds


def _where(one: Checkpoint) -> str:
    if not one.folder:
        return f"{one.title}, {one.progress} %"
    return f"{one.folder} ({one.setting}, {one.objective}, {one.progress} %)"


def _questions(results: Results, checkpoint: int, what: str) -> dict[str, Any]:
    """Return each question and what was expected; from a results file, the references are not known."""
    samples = results.checkpoints[checkpoint].samples
    if what == "prompts" and samples:
        return {prompt_label(sample): sample.reference_ids for sample, _ in samples}
    kinds = {"prompts": ("target", "control"), "perplexity blocks": ("block",)}.get(what, (what.removesuffix("s"),))
    scores = results.scores
    own = scores[(scores["checkpoint"] == checkpoint) & scores["kind"].isin(kinds)]
    if what == "perplexity blocks":
        return dict(zip(own["unit"], (f"{count:g} predictions" for count in own["count"]), strict=True))
    prefixes = ("" if math.isnan(prefix) else f", {prefix:g} tokens" for prefix in own["prefix"])
    return {f"{unit}{prefix}": None for unit, prefix in zip(own["unit"], prefixes, strict=True)}


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    for key in first | second:
        if key not in second:
            return f"only the first has {key}"
        if key not in first:
            return f"only the second has {key}"
        if first[key] != second[key]:
            return f"{key} expects {_short(first[key])} in the first and {_short(second[key])} in the second"
    return "references or offsets are not the same"


def _short(value: Any) -> str:
    return f"{value[:5]}... ({len(value)} ids)" if isinstance(value, list) else str(value)
