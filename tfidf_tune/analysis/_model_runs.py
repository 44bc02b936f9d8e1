"""Runs put together by model (with a learning rate, each) and objective, and the checkpoints that they share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tfidf_tune.analysis._comparability import require_comparable
from tfidf_tune.analysis._measures import Measure
from tfidf_tune.analysis._runs import Evaluation, Run

_DEFAULT_BASELINE = "CE"


@dataclass(frozen=True)
class ModelRuns:
    """All runs of one model.

    Args:
        model (str): its name, and the learning rate where its runs name one: see :attr:`Run.setting`.
        objectives (dict[str, tuple[Run, ...]]): objective -> its runs, one a seed; the baseline comes first.
    """

    model: str
    objectives: dict[str, tuple[Run, ...]]

    def at(self, objective: str, progress: int | None) -> list[Evaluation]:
        """The evaluations of an objective at a checkpoint.

        Args:
            objective (str): one of ``objectives``, or another, which has none.
            progress (int | None): in percent; None, as of :meth:`last`, has none.

        Returns:
            list[Evaluation]: one for each seed that was evaluated there.
        """
        runs = self.objectives.get(objective, ())
        return [evaluation for run in runs for evaluation in run.evaluations if evaluation.progress == progress]

    def checkpoints(self, *measures: Measure, objective: str | None = None) -> list[int]:
        """Where all runs have the measures, those left out that have them nowhere.

        Args:
            *measures (Measure): what must be there.
            objective (str | None): look at its runs alone; None looks at all.

        Returns:
            list[int]: progress in percent, ascending.
        """
        runs = [run for name, runs in self.objectives.items() if objective in (None, name) for run in runs]
        having = [
            {e.progress for e in run.evaluations if all(measure.totals(e) is not None for measure in measures)}
            for run in runs
        ]
        having = [progress for progress in having if progress]
        return sorted(set.intersection(*having)) if having else []

    def last(self, *measures: Measure) -> int | None:
        """The last of :meth:`checkpoints`.

        Args:
            *measures (Measure): what must be there.

        Returns:
            int | None: progress in percent; None where there is none.
        """
        return max(self.checkpoints(*measures), default=None)


def group_runs(runs: Sequence[Run], *, baseline: str | None = None) -> tuple[str, list[ModelRuns]]:
    """Put runs together by model and objective.

    Args:
        runs (Sequence[Run]): of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" where there is one, else the first run's.

    Returns:
        tuple[str, list[ModelRuns]]: the baseline, and the models in the order of their first run.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    if len(runs) < 2:
        found = f"only {runs[0].folder} ({runs[0].setting}, {runs[0].objective})" if runs else "no run"
        raise ValueError(
            f"nothing to compare: there is {found}. Give a second run, of the baseline or another objective; one model "
            "alone is what `tfidf-tune probe audit` is for"
        )
    objectives = list(dict.fromkeys(run.objective for run in runs))
    baseline = choose_baseline(objectives, baseline)
    require_comparable(runs)
    objectives.sort(key=lambda objective: objective != baseline)
    models = []
    for model in dict.fromkeys(run.setting for run in runs):
        of_model = {name: tuple(r for r in runs if (r.setting, r.objective) == (model, name)) for name in objectives}
        models.append(ModelRuns(model, {name: same for name, same in of_model.items() if same}))
    return baseline, models


def choose_baseline(objectives: Sequence[str], baseline: str | None) -> str:
    """Name the objective that others are compared with.

    Args:
        objectives (Sequence[str]): those that there are, at least one.
        baseline (str | None): the one to take; None takes "CE" where there is one, else the first.

    Returns:
        str: one of ``objectives``.

    Raises:
        ValueError: If ``baseline`` is none of them.
    """
    if baseline is None:
        return _DEFAULT_BASELINE if _DEFAULT_BASELINE in objectives else objectives[0]
    if baseline not in objectives:
        raise ValueError(f"no run has the baseline {baseline!r}: there are {', '.join(objectives)}")
    return baseline


def last_evaluations(models: Sequence[ModelRuns], measure: Measure) -> Iterator[tuple[str, str, list[Evaluation]]]:
    """Each model and objective at the last checkpoint that all runs of the model share, where it has the measure.

    Args:
        models (Sequence[ModelRuns]): the runs.
        measure (Measure): what must be there.

    Yields:
        tuple[str, str, list[Evaluation]]: model, objective, and its evaluations, one a seed.
    """
    for model in models:
        for objective in model.objectives:
            evaluations = model.at(objective, model.last(measure))
            having = [evaluation for evaluation in evaluations if measure.totals(evaluation) is not None]
            if having:
                yield model.model, objective, having
