"""TF-IDF weighted cross-entropy for torchtune, and the measure of what a fine-tuned model recites."""

import tfidf_tune._quiet  # noqa: F401  (before anything imports torchao)
from tfidf_tune.loss import CrossEntropyLoss, HeadInput, TFIDFCrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.weighting import TFIDFWeighting

__all__ = ["CrossEntropyLoss", "HeadInput", "TFIDFCrossEntropyLoss", "TFIDFWeighting", "WeightedCrossEntropyLoss"]
