"""A table as HTML: numbers formatted, the best of each group in bold, headers ready to sort."""

import base64
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TypeGuard

from markupsafe import Markup

from tfidf_tune.report._csv import csv_text
from tfidf_tune.report._document import Column, Table, Value, without_lone_model
from tfidf_tune.report._page import TEMPLATES


@dataclass(frozen=True)
class _Cell:
    text: str
    sort_value: str | None
    missing: bool
    best: bool


def table_html(table: Table) -> Markup:
    """Render a table in a container of its own that scrolls when it is wide, its notes below.

    The best value of a column with ``better`` is bold among the rows of equal first cell (those of one model); where no
    two rows have the same first cell, among all rows. Values that look alike are equally best. A column Model of one
    value is left out.

    Args:
        table (Table): the table; ``table-NAME`` is the id of its heading, which is not part of the result.

    Returns:
        Markup: the HTML; it needs the style and the script of :func:`page`.
    """
    table = without_lone_model(table)
    best = _best_cells(table)
    rows = [
        [
            _cell(value, column, best=(i, j) in best)
            for j, (value, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        for i, row in enumerate(table.rows)
    ]
    numeric = [all(row[j].missing or row[j].sort_value is not None for row in rows) for j in range(len(table.columns))]
    return Markup(TEMPLATES.get_template("table.html").render(table=table, rows=rows, numeric=numeric))


def csv_uri(table: Table) -> str:
    """Write a table as CSV into an address, to be saved from a page that is alone.

    Args:
        table (Table): the table, with all its columns.

    Returns:
        str: a data URI.
    """
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(csv_text(table).encode()).decode()


def _cell(value: Value, column: Column, *, best: bool) -> _Cell:
    if value is None:
        return _Cell("\N{EN DASH}", None, missing=True, best=False)
    if isinstance(value, str):
        return _Cell(value, None, missing=False, best=False)
    # JSON's numbers, and its Infinity, are what JavaScript's Number() reads.
    return _Cell(format(value, column.format), json.dumps(value), missing=not _is_number(value), best=best)


def _is_number(value: Value) -> TypeGuard[float | int]:
    """Say whether a value can be compared: NaN and text cannot."""
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
        if column.better is None:
            continue
        for members in groups.values():
            values = {i: value for i in members if _is_number(value := table.rows[i][j])}
            if len(values) > 1:
                top = min(values.values()) if column.better == "lower" else max(values.values())
                shown = format(top, column.format)
                best |= {(i, j) for i, value in values.items() if format(value, column.format) == shown}
    return best
