"""Token weights from token statistics alone: no model in sight."""

from tfidf_tune.weighting._document_window import DocumentWindow
from tfidf_tune.weighting._interface import TokenWeighting
from tfidf_tune.weighting._ranks import LabelExchange
from tfidf_tune.weighting._term_statistics import (
    TermFrequency,
    inverse_document_frequency,
    term_frequency,
    unit_mean,
)
from tfidf_tune.weighting._terms import Terms, distinct_terms
from tfidf_tune.weighting._tfidf import Normalization, TFIDFWeighting
from tfidf_tune.weighting._uniform import UniformWeighting

__all__ = [
    "DocumentWindow",
    "LabelExchange",
    "Normalization",
    "TFIDFWeighting",
    "TermFrequency",
    "Terms",
    "TokenWeighting",
    "UniformWeighting",
    "distinct_terms",
    "inverse_document_frequency",
    "term_frequency",
    "unit_mean",
]
