"""A report as one HTML page."""

from tfidf_tune.report._document import Report
from tfidf_tune.report._html_figure import figure_html
from tfidf_tune.report._html_table import csv_uri, table_html
from tfidf_tune.report._page import TEMPLATES, page


def html_page(report: Report) -> str:
    """Make a page that holds the whole report: lead, findings, tables, figures, examples, provenance.

    It needs nothing else: figures are drawn into it, and the CSV of every table is there to be saved.

    Args:
        report (Report): the report.

    Returns:
        str: the page.
    """
    body = TEMPLATES.get_template("report.html").render(
        report=report, contents=_contents(report), table_html=table_html, csv_uri=csv_uri, figure_html=figure_html
    )
    return page(report.title, body)


def _contents(report: Report) -> list[tuple[str, list[tuple[str, str]]]]:
    """List the sections that are not empty: the id of each, and of its parts the ids and titles."""
    sections = [
        ("findings", report.statements, []),
        ("tables", report.tables, [(f"table-{table.name}", table.title) for table in report.tables]),
        ("figures", report.figures, [(f"figure-{figure.name}", figure.title) for figure in report.figures]),
        (
            "examples",
            report.examples,
            [(f"example-{i}", example.title) for i, example in enumerate(report.examples, 1)],
        ),
        ("provenance", report.provenance, []),
    ]
    return [(section, parts) for section, content, parts in sections if content]
