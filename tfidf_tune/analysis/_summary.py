"""The samples of one checkpoint, as the numbers of the paper's Table 1."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfidf_tune.analysis._samples import ProbeSample


@dataclass(frozen=True)
class MemorizationSummary:
    """Means and maxima over passages and prefix lengths, each (passage, prefix length) counting once.

    Args:
        num_passages (int): number of different passages.
        avg_prefix (float): mean longest prefix match, in tokens.
        max_prefix (int): largest longest prefix match, in tokens.
        avg_lms (float): mean longest memorized substring, in tokens.
        max_lms (int): largest longest memorized substring, in tokens.
        rouge_l (float): mean ROUGE-L F-measure × 100.
        verbatim_rate (float): share of samples, in [0, 1], whose whole reference was reproduced.
    """

    num_passages: int
    avg_prefix: float
    max_prefix: int
    avg_lms: float
    max_lms: int
    rouge_l: float
    verbatim_rate: float


def summarize(samples: Sequence[ProbeSample]) -> dict[str, MemorizationSummary]:
    """Summarizes the samples of each kind of passage.

    Args:
        samples (Sequence[ProbeSample]): what one model gave, any mix of kinds and prefix lengths.

    Returns:
        dict[str, MemorizationSummary]: kind -> summary, for the kinds that occur; empty for no samples.
    """
    kinds = dict.fromkeys(sample.kind for sample in samples)
    return {kind: _summarize_kind([sample for sample in samples if sample.kind == kind]) for kind in kinds}


def _summarize_kind(samples: Sequence[ProbeSample]) -> MemorizationSummary:
    prefix = [sample.prefix_match for sample in samples]
    lms = [sample.lms for sample in samples]
    return MemorizationSummary(
        num_passages=len({sample.passage_id for sample in samples}),
        avg_prefix=float(np.mean(prefix)),
        max_prefix=max(prefix),
        avg_lms=float(np.mean(lms)),
        max_lms=max(lms),
        rouge_l=float(np.mean([sample.rouge_l for sample in samples])),
        verbatim_rate=float(np.mean([sample.verbatim for sample in samples])),
    )
