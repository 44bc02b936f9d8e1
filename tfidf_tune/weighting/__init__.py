"""Token weights from token statistics alone: no model in sight."""

from tfidf_tune.weighting._document_window import DocumentWindow
from tfidf_tune.weighting._interface import TokenWeighting
from tfidf_tune.weighting._term_statistics import (
    TermFrequency,
    inverse_document_frequency,
    occurrences,
    term_frequency,
    unit_mean,
)
from tfidf_tune.weighting._tfidf import TFIDFWeighting
from tfidf_tune.weighting._uniform import UniformWeighting

__all__ = [
    "DocumentWindow",
    "TFIDFWeighting",
    "TermFrequency",
    "TokenWeighting",
    "UniformWeighting",
    "inverse_document_frequency",
    "occurrences",
    "term_frequency",
    "unit_mean",
]
