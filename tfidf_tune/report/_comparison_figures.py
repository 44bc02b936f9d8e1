"""The figures of a comparison: which numbers are drawn."""

from collections.abc import Sequence
from typing import TypeVar

from tfidf_tune.analysis import CONTROL_LMS, LMS, PERPLEXITY, ModelRuns
from tfidf_tune.report._document import Figure
from tfidf_tune.report._figures import frontier, lms_distribution, lms_progress

_T = TypeVar("_T")


def comparison_figures(models: Sequence[ModelRuns]) -> tuple[Figure, ...]:
    """Draw what there is to draw: progress, frontier, distribution.

    Args:
        models (Sequence[ModelRuns]): the runs.

    Returns:
        tuple[Figure, ...]: progress where an objective has several checkpoints, the frontier where perplexity was
            measured, a distribution for each model that was probed.
    """
    drawings = [_progress(models), _frontier(models), *(_distribution(models, model) for model in models)]
    return tuple(figure for figure in drawings if figure is not None)


def _progress(models: Sequence[ModelRuns]) -> Figure | None:
    curves = _without_empty(
        {
            model.model: {
                objective: [
                    (at, lms, CONTROL_LMS.of(evaluations))
                    for at in model.checkpoints(LMS, objective=objective)
                    if (lms := LMS.of(evaluations := model.at(objective, at))) is not None
                ]
                for objective in model.objectives
            }
            for model in models
        }
    )
    if all(len(points) < 2 for by_objective in curves.values() for points in by_objective.values()):
        return None
    caption = (
        "Average LMS of the injected passages at each checkpoint. Dashed: passages that were never injected, the floor "
        "that fluency alone reaches. Lower is better."
    )
    return Figure("lms_progress", "Average LMS against training progress", lms_progress(curves), caption)


def _frontier(models: Sequence[ModelRuns]) -> Figure | None:
    paths = _without_empty(
        {
            model.model: {
                objective: [
                    (at, perplexity, lms)
                    for at in model.checkpoints(LMS, PERPLEXITY, objective=objective)
                    if (perplexity := PERPLEXITY.of(model.at(objective, at))) is not None
                    and (lms := LMS.of(model.at(objective, at))) is not None
                ]
                for objective in model.objectives
            }
            for model in models
        }
    )
    if not paths:
        return None
    caption = (
        "Each objective's way through its checkpoints, along the arrows; the markers grow with training. Further down: "
        "recites less. Further left: predicts unseen text better. A reduction is worth something where it lies below "
        "the baseline's way at the same perplexity."
    )
    return Figure("frontier", "Memorization against perplexity", frontier(paths), caption)


def _distribution(models: Sequence[ModelRuns], model: ModelRuns) -> Figure | None:
    samples = {
        objective: [s for evaluation in model.at(objective, model.last(LMS)) for s in evaluation.samples]
        for objective in model.objectives
    }
    samples = {objective: of_objective for objective, of_objective in samples.items() if of_objective}
    if not samples:
        return None
    name, title = "lms_distribution", "Distribution of the LMS"
    if len(models) > 1:
        name, title = f"{name}_{1 + models.index(model)}", f"{title}: {model.model}"
    caption = (
        "The share of continuations whose longest memorized substring has at least so many tokens, over passages, "
        "prefix lengths and seeds. Dashed: passages that were never injected."
    )
    return Figure(name, title, lms_distribution(samples), caption)


def _without_empty(by_model: dict[str, dict[str, list[_T]]]) -> dict[str, dict[str, list[_T]]]:
    filled = {
        model: {objective: points for objective, points in by_objective.items() if points}
        for model, by_objective in by_model.items()
    }
    return {model: by_objective for model, by_objective in filled.items() if by_objective}
