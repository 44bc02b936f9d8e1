"""The numbers of an audit: the samples of one evaluation chosen and grouped."""

from collections.abc import Sequence
from dataclasses import dataclass

from tfidf_tune.analysis import Evaluation, ProbeSample

Samples = tuple[ProbeSample, ...]


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
