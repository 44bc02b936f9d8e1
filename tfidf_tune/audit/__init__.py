"""Audit one model: does it recite its training text more than text it never saw?"""

from tfidf_tune.audit._report import audit_report
from tfidf_tune.audit._tables import Bound, parse_bounds

__all__ = ["Bound", "audit_report", "parse_bounds"]
