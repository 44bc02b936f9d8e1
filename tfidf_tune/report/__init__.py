"""Reports of any content: tables, figures and texts as terminal text, Markdown, JSON, CSV and one
HTML page.
"""

from tfidf_tune.report._html import html_page, require_report_folder, write_report
from tfidf_tune.report._markdown import markdown, terminal_text
from tfidf_tune.report.document import (
    Column,
    Continuation,
    Example,
    Figure,
    Footnotes,
    Report,
    Section,
    Table,
    tabulate,
)

__all__ = [
    "Column",
    "Continuation",
    "Example",
    "Figure",
    "Footnotes",
    "Report",
    "Section",
    "Table",
    "html_page",
    "markdown",
    "require_report_folder",
    "tabulate",
    "terminal_text",
    "write_report",
]
