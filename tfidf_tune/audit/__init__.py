"""Audit one model: does it recite its training text more than text it never saw?"""

from tfidf_tune.audit._audit import AuditResult, audit, audit_results, estimate
from tfidf_tune.audit._choosing import choose_passages
from tfidf_tune.audit._headline import Headline
from tfidf_tune.audit._measures import Bound, parse_bounds
from tfidf_tune.audit._report import audit_report
from tfidf_tune.audit._spec import AuditSpec, ServerSpec
from tfidf_tune.audit._verify import Check, Verification, verify

__all__ = [
    "AuditResult",
    "AuditSpec",
    "Bound",
    "Check",
    "Headline",
    "ServerSpec",
    "Verification",
    "audit",
    "audit_report",
    "audit_results",
    "choose_passages",
    "estimate",
    "parse_bounds",
    "verify",
]
