"""Token weights from token statistics, and from what a model predicts: no model in sight."""

from tfidf_tune.weighting._difficulty import FocalWeighting, MiLeWeighting
from tfidf_tune.weighting._document_window import DocumentWindow
from tfidf_tune.weighting._goldfish import GoldfishStrategy, GoldfishWeighting
from tfidf_tune.weighting._interface import Predictions, TokenWeighting, check_weighting
from tfidf_tune.weighting._labels import check_label_type
from tfidf_tune.weighting._power_law import PowerLawWeighting
from tfidf_tune.weighting._product import ProductWeighting
from tfidf_tune.weighting._ranks import LabelExchange
from tfidf_tune.weighting._repetition import RepetitionWeighting
from tfidf_tune.weighting._term_statistics import (
    TermFrequency,
    inverse_document_frequency,
    term_frequency,
    unit_mean,
)
from tfidf_tune.weighting._terms import Terms, distinct_terms
from tfidf_tune.weighting._tfidf import Normalization, TFIDFWeighting
from tfidf_tune.weighting._token_drop import TokenDropWeighting
from tfidf_tune.weighting._uniform import UniformWeighting

__all__ = [
    "DocumentWindow",
    "FocalWeighting",
    "GoldfishStrategy",
    "GoldfishWeighting",
    "LabelExchange",
    "MiLeWeighting",
    "Normalization",
    "PowerLawWeighting",
    "Predictions",
    "ProductWeighting",
    "RepetitionWeighting",
    "TFIDFWeighting",
    "TermFrequency",
    "Terms",
    "TokenDropWeighting",
    "TokenWeighting",
    "UniformWeighting",
    "check_label_type",
    "check_weighting",
    "distinct_terms",
    "inverse_document_frequency",
    "term_frequency",
    "unit_mean",
]
