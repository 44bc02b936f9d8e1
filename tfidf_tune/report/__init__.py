"""Reports: tables, figures and pages."""

from tfidf_tune.report._audit import audit_report
from tfidf_tune.report._audit_tables import Bound, parse_bounds
from tfidf_tune.report._comparison import comparison_report
from tfidf_tune.report._document import Continuation, Example, Figure, Report, Table
from tfidf_tune.report._figures import frontier_drawing
from tfidf_tune.report._frontier import frontier_report
from tfidf_tune.report._html import html_page, require_report_folder, write_report
from tfidf_tune.report._markdown import markdown, terminal_text

__all__ = [
    "Bound",
    "Continuation",
    "Example",
    "Figure",
    "Report",
    "Table",
    "audit_report",
    "comparison_report",
    "frontier_drawing",
    "frontier_report",
    "html_page",
    "markdown",
    "parse_bounds",
    "require_report_folder",
    "terminal_text",
    "write_report",
]
