"""Token weights from token statistics, and from what a model predicts. Needs torch only."""

from tfidf_tune.weighting._context_weightings import GoldfishWeighting, RepetitionWeighting
from tfidf_tune.weighting._tfidf import DocumentWindow, TermFrequency, TFIDFWeighting
from tfidf_tune.weighting._weighting import (
    IGNORE_INDEX,
    FocalWeighting,
    MiLeWeighting,
    Predictions,
    TokenBatch,
    TokenWeighting,
    UniformWeighting,
    shift_labels,
    shift_tokens,
    unit_mean,
)

__all__ = [
    "IGNORE_INDEX",
    "DocumentWindow",
    "FocalWeighting",
    "GoldfishWeighting",
    "MiLeWeighting",
    "Predictions",
    "RepetitionWeighting",
    "TFIDFWeighting",
    "TermFrequency",
    "TokenBatch",
    "TokenWeighting",
    "UniformWeighting",
    "shift_labels",
    "shift_tokens",
    "unit_mean",
]
