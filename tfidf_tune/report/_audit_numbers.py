"""The numbers of an audit: one evaluation, its targets held against its controls."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tfidf_tune.analysis import Evaluation, Interval, ProbeSample, bootstrap_interval

Samples = tuple[ProbeSample, ...]


@dataclass(frozen=True)
class Contrast:
    """Average LMS of targets against controls, each passage counting once.

    Args:
        targets (float): average LMS of the targets, in tokens.
        controls (float | None): that of the controls; None where there are none.
        interval (Interval | None): 95 % of the difference ``targets - controls``; None where there are fewer than two
            targets or two controls.
    """

    targets: float
    controls: float | None
    interval: Interval | None

    @property
    def difference(self) -> float | None:
        """``targets - controls``; None without controls."""
        return None if self.controls is None else self.targets - self.controls


@dataclass(frozen=True)
class RepeatGroup:
    """Targets that stood about as often in the training text.

    Args:
        repeats (str): "1", or "3 to 4".
        samples (Samples): theirs.
    """

    repeats: str
    samples: Samples


def of_kind(evaluation: Evaluation, kind: str) -> Samples:
    """Select samples.

    Args:
        evaluation (Evaluation): of one checkpoint.
        kind (str): "target" or "control".

    Returns:
        Samples: those of the kind.
    """
    return tuple(sample for sample in evaluation.samples if sample.kind == kind)


def contrast(targets: Sequence[ProbeSample], controls: Sequence[ProbeSample]) -> Contrast:
    """Compare the average LMS of targets and controls.

    The interval resamples whole passages, since the prefix lengths of one are no independent observations; targets and
    controls apart, since they are different passages.

    Args:
        targets (Sequence[ProbeSample]): at least one.
        controls (Sequence[ProbeSample]): maybe none.

    Returns:
        Contrast: the averages and the interval.
    """
    of_targets, of_controls = _lms_by_passage(targets), _lms_by_passage(controls)
    if not len(of_controls):
        return Contrast(float(of_targets.mean()), None, None)
    interval = bootstrap_interval(
        lambda first, second, axis: first.mean(axis) - second.mean(axis), of_targets, of_controls, paired=False
    )
    return Contrast(float(of_targets.mean()), float(of_controls.mean()), interval)


def verbatim_passages(samples: Sequence[ProbeSample]) -> set[str]:
    """Find the passages that were recited whole from at least one of their prompts.

    Args:
        samples (Sequence[ProbeSample]): any.

    Returns:
        set[str]: their ids.
    """
    return {sample.passage_id for sample in samples if sample.verbatim}


def best_samples(samples: Sequence[ProbeSample]) -> list[ProbeSample]:
    """Take of each passage the sample that recites most, the shortest prompt of equals.

    Args:
        samples (Sequence[ProbeSample]): any.

    Returns:
        list[ProbeSample]: a sample a passage, by descending LMS.
    """
    ordered = sorted(samples, key=lambda sample: (-sample.lms, sample.prefix_length))
    best: dict[str, ProbeSample] = {}
    for sample in ordered:
        best.setdefault(sample.passage_id, sample)
    return list(best.values())


def repeat_groups(evaluation: Evaluation) -> list[RepeatGroup]:
    """Group the targets by how often they stood in the training text: 1, 2, 3 to 4, 5 to 8, 9 to 16, ...

    Args:
        evaluation (Evaluation): its ``num_injections`` say how often.

    Returns:
        list[RepeatGroup]: by ascending repeats, named by the numbers that occur; empty where they are not known.
    """
    groups: dict[int, list[ProbeSample]] = {}
    known = evaluation.num_injections
    for sample in of_kind(evaluation, "target"):
        if repeats := known.get(sample.passage_id):
            groups.setdefault((repeats - 1).bit_length(), []).append(sample)
    named = []
    for _, samples in sorted(groups.items()):
        least, most = (bound(known[sample.passage_id] for sample in samples) for bound in (min, max))
        named.append(RepeatGroup(f"{least}" if least == most else f"{least} to {most}", tuple(samples)))
    return named


def _lms_by_passage(samples: Sequence[ProbeSample]) -> npt.NDArray[np.float64]:
    by_passage: dict[str, list[int]] = {}
    for sample in samples:
        by_passage.setdefault(sample.passage_id, []).append(sample.lms)
    return np.array([np.mean(lms) for lms in by_passage.values()], dtype=np.float64)
