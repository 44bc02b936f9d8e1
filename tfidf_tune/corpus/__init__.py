"""Text of any size: how it is read, which of its windows occur again, and which of its documents
are copies.
"""

from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.corpus.holdout import Holdout, read_holdout
from tfidf_tune.corpus.jobs import TaskRunner

__all__ = ["Deduplication", "Holdout", "TaskRunner", "read_holdout"]
