"""Token weights from token statistics, and from what a model predicts. Needs torch only."""

from tfidf_tune.weighting._difficulty import FocalWeighting, MiLeWeighting
from tfidf_tune.weighting._goldfish import GoldfishWeighting
from tfidf_tune.weighting._labels import IGNORE_INDEX, Predictions, TokenBatch, shift_labels, shift_tokens
from tfidf_tune.weighting._repetition import RepetitionWeighting
from tfidf_tune.weighting._tfidf import (
    DocumentWindow,
    TermFrequency,
    TFIDFWeighting,
    distinct_terms,
    inverse_document_frequency,
    term_frequency,
)
from tfidf_tune.weighting._weighting import TokenWeighting, UniformWeighting, unit_mean

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
    "distinct_terms",
    "inverse_document_frequency",
    "shift_labels",
    "shift_tokens",
    "term_frequency",
    "unit_mean",
]
