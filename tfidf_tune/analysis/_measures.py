"""What is measured, each measure as totals over the units that the bootstrap resamples."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tfidf_tune.analysis._runs import Evaluation
from tfidf_tune.analysis._samples import ProbeSample

Floats: TypeAlias = npt.NDArray[np.float64]
Record: TypeAlias = tuple[Any, float | None, float]
"""The unit it belongs to, a value, and how many values it is the sum of."""


@dataclass(frozen=True)
class Measure:
    """A number that an evaluation gives, ``sum of values / their count``, or e to the power of it.

    Args:
        name (str): as tables show it: "Avg LMS".
        phrase (str): as sentences say it: "average LMS".
        unit (str): what is resampled as a whole: "passage", "block", "article", "question".
        better (str): "lower" or "higher".
        records (Callable[[Evaluation], Iterable[Record]]): its values; one that is None makes the measure missing.
        exponential (bool): whether the measure is e to the power of the mean. Default: False.
    """

    name: str
    phrase: str
    unit: Literal["passage", "block", "article", "question"]
    better: Literal["lower", "higher"]
    records: Callable[[Evaluation], Iterable[Record]]
    exponential: bool = False

    def totals(self, evaluation: Evaluation) -> tuple[Floats, Floats] | None:
        """Sum the values of each unit: a passage's prefix lengths stay together.

        Args:
            evaluation (Evaluation): of one checkpoint.

        Returns:
            tuple[np.ndarray, np.ndarray] | None: float64 ``[n]`` sums and ``[n]`` counts of the units in the order of
                their ids; None where the measure is missing.
        """
        sums: dict[Any, float] = {}
        counts: dict[Any, float] = {}
        for unit, value, count in self.records(evaluation):
            if value is None:
                return None
            sums[unit] = sums.get(unit, 0.0) + value
            counts[unit] = counts.get(unit, 0.0) + count
        if not sums:
            return None
        order = sorted(sums)
        return np.array([sums[unit] for unit in order]), np.array([counts[unit] for unit in order])

    def mean_totals(self, evaluations: Sequence[Evaluation]) -> tuple[Floats, Floats] | None:
        """:meth:`totals`, each sum the mean over seeds: a passage's seeds stay together.

        Args:
            evaluations (Sequence[Evaluation]): of the same checkpoint, one a seed, over the same units.

        Returns:
            tuple[np.ndarray, np.ndarray] | None: as :meth:`totals`; None where a seed misses the measure, or there is
                none.
        """
        totals = [self.totals(evaluation) for evaluation in evaluations]
        if not totals or any(one is None for one in totals):
            return None
        sums, counts = zip(*(one for one in totals if one is not None), strict=True)
        return np.mean(sums, axis=0), counts[0]

    def value(self, sums: Floats, counts: Floats, axis: int = -1) -> Any:
        """The measure over units, along an axis.

        Args:
            sums (np.ndarray): float64 ``[..., n]``.
            counts (np.ndarray): float64 ``[..., n]``.
            axis (int): the units' axis. Default: -1.

        Returns:
            np.ndarray: float64 ``[...]``.
        """
        mean = sums.sum(axis) / counts.sum(axis)
        with np.errstate(over="ignore"):  # a model that diverged has a perplexity of infinity
            return np.exp(mean) if self.exponential else mean

    def of(self, evaluations: Sequence[Evaluation]) -> float | None:
        """The measure over seeds: the mean over them; for perplexity, over all their predictions.

        Args:
            evaluations (Sequence[Evaluation]): of the same checkpoint, one a seed.

        Returns:
            float | None: None where it is missing.
        """
        totals = self.mean_totals(evaluations)
        return None if totals is None else float(self.value(*totals))


def _of_targets(read: Callable[[ProbeSample], float]) -> Callable[[Evaluation], Iterable[Record]]:
    return lambda evaluation: (
        (sample.passage_id, read(sample), 1) for sample in evaluation.samples if sample.kind == "target"
    )


LMS = Measure("Avg LMS", "average LMS", "passage", "lower", _of_targets(lambda sample: sample.lms))
CONTROL_LMS = Measure(
    "Control LMS",
    "average LMS of the controls",
    "passage",
    "lower",
    lambda evaluation: ((s.passage_id, s.lms, 1) for s in evaluation.samples if s.kind == "control"),
)
PREFIX_MATCH = Measure(
    "Avg Prefix", "average prefix match", "passage", "lower", _of_targets(lambda sample: sample.prefix_match)
)
ROUGE_L = Measure("ROUGE-L", "ROUGE-L of the targets", "passage", "lower", _of_targets(lambda sample: sample.rouge_l))
PERPLEXITY = Measure(
    "Perplexity",
    "perplexity",
    "block",
    "lower",
    lambda evaluation: ((block.block, -block.log_likelihood, block.num_predictions) for block in evaluation.blocks),
    exponential=True,
)


def _of_summaries(name: str, field: str) -> Measure:
    return Measure(
        f"Summary {name}",
        name,
        "article",
        "higher",
        lambda evaluation: ((summary.id, getattr(summary, field), 1) for summary in evaluation.summaries),
    )


def _of_answers(name: str, phrase: str, field: str) -> Measure:
    return Measure(
        f"Answer {name}",
        phrase,
        "question",
        "higher",
        lambda evaluation: ((answer.id, getattr(answer, field), 1) for answer in evaluation.answers),
    )


SUMMARY_MEASURES = (
    _of_summaries("ROUGE-1", "rouge1"),
    _of_summaries("ROUGE-2", "rouge2"),
    _of_summaries("ROUGE-L", "rouge_l"),
    _of_summaries("BERTScore-F1", "bertscore_f1"),
)
ANSWER_MEASURES = (
    _of_answers("EM", "exact match", "exact_match"),
    _of_answers("F1", "F1", "f1"),
)
DOWNSTREAM_MEASURES = (*SUMMARY_MEASURES, *ANSWER_MEASURES)
MEASURES = (LMS, PREFIX_MATCH, ROUGE_L, PERPLEXITY, *DOWNSTREAM_MEASURES)
