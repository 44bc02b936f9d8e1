"""Token weights from token statistics, and from what a model predicts. Needs torch only."""

from tfidf_tune.weighting._difficulty import FocalWeighting, MiLeWeighting
from tfidf_tune.weighting._goldfish import GoldfishWeighting
from tfidf_tune.weighting._repetition import RepetitionWeighting
from tfidf_tune.weighting.tfidf import DocumentWindow, TermFrequency, TFIDFWeighting
from tfidf_tune.weighting.token_weighting import (
    IGNORE_INDEX,
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
