"""A report as one HTML page that works offline, on a phone, in dark mode and on paper.

All text is escaped by the templates' environment. The page's policy lets a browser run only our scripts and load
nothing from outside, so that a text that slipped through unescaped would stay inert.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from tfidf_tune._printing import visible
from tfidf_tune.report._document import Report, Table, Value
from tfidf_tune.report._figures import draw

if TYPE_CHECKING:
    import matplotlib.figure

_MARK = re.compile(r"\[([1-9]\d*)\]")
_TOGETHER = re.compile(r"\S*-\S*(?: %)?|\S+ %")


def html_page(report: Report, section: str | None = None, **context: Any) -> str:
    """Make a page of a report: figures are drawn into it, and it has the CSV of every table to be saved.

    Args:
        report (Report): the report.
        section (str | None): one more section, below the findings: its id and the name of its template and script.
            Default: None.
        **context (Any): what the template of that section needs.
    """
    names = ["sort.js", *([f"{section}.js"] if section else [])]
    scripts = [Markup(_TEMPLATES.get_template(name).render()) for name in names]
    hashes = " ".join(f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" for text in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    num_main = min(1, len(report.statements))  # the first figure is next to the findings
    links = [(f"figure-{figure.name}", figure.title) for figure in report.figures]
    # Parts of the page in their order, with what they hold, and the entries of the table of contents below them.
    entries = {
        "findings": (report.statements, links[:num_main]),
        **({section: (True, ())} if section else {}),
        "figures": (links[num_main:], links[num_main:]),
        "tables": (report.tables, [(f"table-{table.name}", table.title) for table in report.tables]),
        "examples": (report.examples, [(f"example-{at}", one.title) for at, one in enumerate(report.examples, 1)]),
        **{one.name: (one.paragraphs, ()) for one in report.sections},
        "footnotes": (report.footnotes, ()),
        "provenance": (report.provenance, ()),
    }
    return _TEMPLATES.get_template("page.html").render(
        context,
        report=report,
        section=section,
        main_figures=report.figures[:num_main],
        figures=report.figures[num_main:],
        contents={name: below for name, (content, below) in entries.items() if content},
        policy=policy,
        scripts=scripts,
    )


def _columns(table: Table) -> list[dict[str, Any]]:
    """Format the cells of a table, column by column.

    The best value of a column that has a better end is marked among the rows of equal first cell (those of one model),
    or among all rows if no first cell occurs twice. Values that look alike are equally best.
    """
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.headers)
    groups = columns[0] if len(set(columns[0])) < len(columns[0]) else [None] * len(columns[0])
    formatted = []
    for header, values in zip(table.headers, columns, strict=True):
        best = _best(groups, values, table, header) if header in table.better else set()
        cells = [
            {
                "text": table.text(header, value),
                # JavaScript's Number() reads JSON's numbers and its Infinity.
                "sort_value": json.dumps(value) if isinstance(value, int | float) else None,
                "missing": value is None,
                "best": row in best,
            }
            for row, value in enumerate(values)
        ]
        is_number = not any(isinstance(value, str) for value in values)
        formatted.append({"name": header, "better": table.better.get(header), "number": is_number, "cells": cells})
    return formatted


def _best(groups: Sequence[Value], values: Sequence[Value], table: Table, header: str) -> set[int]:
    best = set()
    for group in dict.fromkeys(groups):
        own = zip(groups, values, strict=True)
        numbers = {row: value for row, (of, value) in enumerate(own) if of == group and isinstance(value, int | float)}
        if len(numbers) > 1:
            top = (min if table.better[header] == "lower" else max)(numbers.values())
            best |= {row for row, value in numbers.items() if table.text(header, value) == table.text(header, top)}
    return best


def _svg(figure: "matplotlib.figure.Figure") -> dict[str, Any]:
    """Draw a figure as a data URI (as an image, its ids cannot clash) of a size in CSS pixels, 96 an inch."""
    buffer = io.BytesIO()
    draw(figure, buffer, format="svg", transparent=True)
    width, height = (round(96 * length) for length in figure.get_size_inches())
    return {"uri": f"data:image/svg+xml;base64,{_base64(buffer.getvalue())}", "width": width, "height": height}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _inert(value: object) -> object:
    """Make control characters visible, in text that is escaped after this and in markup."""
    return type(value)(visible(value)) if isinstance(value, str) else value


def _together(text: str) -> Markup:
    """Keep a short word with a hyphen (TF-IDF), and a number with its percent sign, on one line."""
    parts, end = [], 0
    for match in _TOGETHER.finditer(text):
        if len(match[0]) <= 20:
            parts += [escape(text[end : match.start()]), Markup('<span class="together">{}</span>').format(match[0])]
            end = match.end()
    return Markup("").join([*parts, text[end:]])


def _marked(text: str, report: Report) -> Markup:
    """Keep words together, and link the marks of footnotes to them."""

    def link(match: re.Match[str]) -> str:
        if int(match[1]) > len(report.footnotes):
            return match[0]
        return f'<sup><a href="#footnote-{match[1]}">{match[0]}</a></sup>'

    return Markup(_MARK.sub(link, str(_together(text))))


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfidf_tune.report"),
    autoescape=True,
    finalize=_inert,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(together=_together, marked=_marked, base64=lambda text: _base64(text.encode()))
_TEMPLATES.globals.update(columns_of=_columns, svg=_svg)
