"""The parts of a report, before they are written in any format."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tfidf_tune._printing import visible

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd

Value: TypeAlias = str | float | int | None
"""A cell of a table; None if it was not measured."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name (str): its header.
        format (str): format specification of its numbers (``.2f``); empty for text and integers. Default: empty.
        better (str | None): "lower" or "higher" if one end is better. Default: None.
        source (str): column of the data frame that :func:`tabulate` takes the values from. Default: empty, ``name``.
    """

    name: str
    format: str = ""
    better: Literal["lower", "higher"] | None = None
    source: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of plain values.

    Args:
        name (str): unique in the report, of lower-case letters, digits and underscores: a file name and an anchor.
        title (str): one line.
        columns (tuple[Column, ...]): the columns.
        rows (tuple[tuple[Value, ...], ...]): a value for each column in every row.
        notes (tuple[str, ...]): sentences below the table. Default: none.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()

    def without_empty_columns(self) -> "Table":
        """Leave out the columns without any value."""
        return self._with_columns([i for i in range(len(self.columns)) if any(row[i] is not None for row in self.rows)])

    def without_lone_model(self) -> "Table":
        """Leave out a first column Model that is the same in every row."""
        if not self.columns or self.columns[0].name != "Model" or len({row[0] for row in self.rows}) != 1:
            return self
        return self._with_columns(range(1, len(self.columns)))

    def _with_columns(self, kept: Sequence[int]) -> "Table":
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return replace(self, columns=tuple(self.columns[i] for i in kept), rows=rows)


@dataclass(frozen=True)
class Figure:
    """A drawing with its caption.

    Args:
        name (str): as a table's.
        title (str): one line; also the text alternative of the drawing.
        figure (matplotlib.figure.Figure): the drawing, made without pyplot.
        caption (str): what is drawn, in sentences.
    """

    name: str
    title: str
    figure: "matplotlib.figure.Figure"
    caption: str


@dataclass(frozen=True)
class Continuation:
    """What one model generated.

    Args:
        label (str): the objective or model.
        scores (str): for example "LMS 128, ROUGE-L 100.0".
        pieces (tuple[tuple[str, bool], ...]): texts that joined are the whole continuation, and whether each is the
            recited span.
    """

    label: str
    scores: str
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Example:
    """One prompt, the true text that follows it, and the continuations of models."""

    title: str
    prompt: str
    truth: str
    continuations: tuple[Continuation, ...]


@dataclass(frozen=True)
class Report:
    """All that a page shows, in its order.

    Args:
        title (str): of the page.
        statements (tuple[str, ...]): the findings in sentences, the most important first.
        tables (tuple[Table, ...]): the tables.
        figures (tuple[Figure, ...]): the figures.
        examples (tuple[Example, ...]): the examples.
        provenance (tuple[tuple[str, str], ...]): names and values: folders, versions, seeds, settings, date.
        lead (str): sentences above the statements that say what is shown and explain its terms. Default: none.
    """

    title: str
    statements: tuple[str, ...]
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    examples: tuple[Example, ...]
    provenance: tuple[tuple[str, str], ...]
    lead: str = ""


def tabulate(
    name: str,
    title: str,
    columns: Sequence[Column],
    rows: "pd.DataFrame | Sequence[Sequence[Any]]",
    notes: Sequence[str] = (),
) -> Table:
    """Make a table of a data frame, or of rows with a value for each column; NaN becomes None."""
    if not isinstance(rows, Sequence):
        sources = [rows[column.source or column.name].tolist() for column in columns]
        rows = list(zip(*sources, strict=True))
    plain = tuple(tuple(map(_plain, row, columns)) for row in rows)
    return Table(name, title, tuple(columns), plain, tuple(notes))


def _plain(value: Any, column: Column) -> Value:
    value = value.item() if hasattr(value, "item") else value  # a scalar of NumPy
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    # Grouping makes floats of integers.
    return int(value) if isinstance(value, float) and not column.format and value.is_integer() else value


def csv_text(table: Table) -> str:
    """Write a table as CSV with full precision; text that a spreadsheet would take for a formula gets an apostrophe.

    Returns:
        str: header and rows, ending in CR LF each; cells that were not measured or are not finite are empty.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(_csv_cell(column.name) for column in table.columns)
    writer.writerows([_csv_cell(value) for value in row] for row in table.rows)
    return buffer.getvalue()


def write_csv(table: Table, path: Path) -> None:
    """Write a table to a CSV file."""
    path.write_bytes(csv_text(table).encode())


def _csv_cell(value: Value) -> Value:
    if not isinstance(value, str):
        return finite(value)
    # https://owasp.org/www-community/attacks/CSV_Injection
    return visible(f"'{value}" if value.startswith(_FORMULA_STARTS) else value)


def finite(value: Value) -> Value:
    """Return None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
