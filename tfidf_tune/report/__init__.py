"""Results for people: tables, figures and pages made of them."""

from tfidf_tune.report._audit import audit_report
from tfidf_tune.report._comparison import comparison_report
from tfidf_tune.report._document import Column, Continuation, Example, Figure, Report, Table, Value
from tfidf_tune.report._examples import recited_pieces
from tfidf_tune.report._figures import frontier, lms_distribution, lms_progress
from tfidf_tune.report._frontier import RECORDS_FILE, frontier_report, write_frontier
from tfidf_tune.report._frontier_figure import frontier_drawing
from tfidf_tune.report._frontier_tables import frontier_tables
from tfidf_tune.report._html import html_page
from tfidf_tune.report._markdown import markdown, markdown_table, terminal_text
from tfidf_tune.report._page import page
from tfidf_tune.report._token_weights import weights_report, write_weights
from tfidf_tune.report._weight_text import block_text, terminal_colours
from tfidf_tune.report._write import require_report_folder, write_report

__all__ = [
    "RECORDS_FILE",
    "Column",
    "Continuation",
    "Example",
    "Figure",
    "Report",
    "Table",
    "Value",
    "audit_report",
    "block_text",
    "comparison_report",
    "frontier",
    "frontier_drawing",
    "frontier_report",
    "frontier_tables",
    "html_page",
    "lms_distribution",
    "lms_progress",
    "markdown",
    "markdown_table",
    "page",
    "recited_pieces",
    "require_report_folder",
    "terminal_colours",
    "terminal_text",
    "weights_report",
    "write_frontier",
    "write_report",
    "write_weights",
]
