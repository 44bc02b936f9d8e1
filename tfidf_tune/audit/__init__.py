"""Audit one model: does it recite its training text more than text it never saw?"""

from tfidf_tune.audit._audit import AuditResult, AuditSpec, ServerSpec, audit, audit_results, choose_passages, estimate
from tfidf_tune.audit._measures import Bound, parse_bounds
from tfidf_tune.audit._report import audit_report

__all__ = [
    "AuditResult",
    "AuditSpec",
    "Bound",
    "ServerSpec",
    "audit",
    "audit_report",
    "audit_results",
    "choose_passages",
    "estimate",
    "parse_bounds",
]
