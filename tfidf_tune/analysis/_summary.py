"""The samples of one checkpoint as the numbers of the paper's Table 1."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfidf_tune.results import ProbeSample


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
    """Summarize samples by kind, "target" or "control"; kinds without samples are left out."""
    summaries = {}
    for kind in dict.fromkeys(sample.kind for sample in samples):
        own = [sample for sample in samples if sample.kind == kind]
        summaries[kind] = MemorizationSummary(
            num_passages=len({sample.passage_id for sample in own}),
            avg_prefix=float(np.mean([sample.prefix_match for sample in own])),
            max_prefix=max(sample.prefix_match for sample in own),
            avg_lms=float(np.mean([sample.lms for sample in own])),
            max_lms=max(sample.lms for sample in own),
            rouge_l=float(np.mean([sample.rouge_l for sample in own])),
            verbatim_rate=float(np.mean([sample.verbatim for sample in own])),
        )
    return summaries
