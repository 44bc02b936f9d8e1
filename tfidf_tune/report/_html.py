"""A report as one HTML page that works offline, on a phone, in the dark and on paper.

All text is escaped by the templates' environment. The page's policy lets a browser run only our scripts and load
nothing from outside, so that a text that slipped through unescaped would stay inert.
"""

import base64
import hashlib
import io
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import jinja2
from markupsafe import Markup, escape

from tfidf_tune._printing import visible
from tfidf_tune.report._document import Column, Report, Table, Value, csv_text
from tfidf_tune.report._figures import draw

if TYPE_CHECKING:
    import matplotlib.figure

_TOGETHER = re.compile(r"\S*-\S*(?: %)?|\S+ %")


@dataclass(frozen=True)
class _Cell:
    text: str
    sort_value: str | None
    missing: bool
    best: bool


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
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _TEMPLATES.get_template("page.html").render(
        context,
        report=report,
        section=section,
        contents=_contents(report, section),
        policy=policy,
        scripts=scripts,
    )


def _contents(report: Report, section: str | None) -> list[tuple[str, list[tuple[str, str]]]]:
    """List the sections that are not empty: the id of each, and the ids and titles of its parts."""
    sections: list[tuple[str, Any, list[tuple[str, str]]]] = [
        ("findings", report.statements, []),
        (section or "", section, []),
        ("tables", report.tables, [(f"table-{table.name}", table.title) for table in report.tables]),
        ("figures", report.figures, [(f"figure-{figure.name}", figure.title) for figure in report.figures]),
        ("examples", report.examples, [(f"example-{i}", one.title) for i, one in enumerate(report.examples, 1)]),
        ("provenance", report.provenance, []),
    ]
    return [(name, parts) for name, content, parts in sections if content]


def cells(table: Table) -> list[list[_Cell]]:
    """Format the cells of a table.

    The best value of a column with ``better`` is marked among the rows of equal first cell (those of one model), or
    among all rows if no first cell occurs twice. Values that look alike are equally best.
    """
    best = _best_cells(table)
    return [
        [
            _cell(value, column, best=(i, j) in best)
            for j, (value, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        for i, row in enumerate(table.rows)
    ]


def _numeric(rows: list[list[_Cell]], column: int) -> bool:
    return all(row[column].missing or row[column].sort_value is not None for row in rows)


def _cell(value: Value, column: Column, *, best: bool) -> _Cell:
    if value is None:
        return _Cell("\N{EN DASH}", None, missing=True, best=False)
    if isinstance(value, str):
        return _Cell(value, None, missing=False, best=False)
    # JavaScript's Number() reads JSON's numbers and its Infinity.
    return _Cell(format(value, column.format), json.dumps(value), missing=not _is_number(value), best=best)


def _is_number(value: Value) -> TypeGuard[float | int]:
    return isinstance(value, float | int) and value == value


def _best_cells(table: Table) -> set[tuple[int, int]]:
    """Find the (row, column) of every value that is the best of its group."""
    groups: dict[Value, list[int]] = defaultdict(list)
    for i, row in enumerate(table.rows):
        groups[row[0]].append(i)
    if len(groups) == len(table.rows):
        groups = {None: list(range(len(table.rows)))}
    best = set()
    for j, column in enumerate(table.columns):
        for members in groups.values() if column.better else ():
            values = {i: value for i in members if _is_number(value := table.rows[i][j])}
            if len(values) > 1:
                top = min(values.values()) if column.better == "lower" else max(values.values())
                shown = format(top, column.format)
                best |= {(i, j) for i, value in values.items() if format(value, column.format) == shown}
    return best


def _svg(figure: "matplotlib.figure.Figure") -> dict[str, Any]:
    """Draw a figure as a data URI (as an image, its ids cannot clash) of a size in CSS pixels, 96 an inch."""
    buffer = io.BytesIO()
    draw(figure, buffer, format="svg", transparent=True)
    width, height = (round(96 * length) for length in figure.get_size_inches())
    uri = "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"uri": uri, "width": width, "height": height}


def _csv_uri(table: Table) -> str:
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(csv_text(table).encode()).decode()


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


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfidf_tune.report"),
    autoescape=True,
    finalize=_inert,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["together"] = _together
_TEMPLATES.globals.update(cells=cells, numeric=_numeric, svg=_svg, csv_uri=_csv_uri)
