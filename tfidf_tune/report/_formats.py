"""Tables as CSV and figures as image files."""

import csv
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune._printing import visible
from tfidf_tune.report._document import Table, Value

if TYPE_CHECKING:
    import matplotlib.figure

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


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


def draw(figure: "matplotlib.figure.Figure", to: Path | io.BytesIO, **options: Any) -> None:
    """Save a figure; with a fixed salt and without a date, the same figure makes the same file."""
    import matplotlib

    if options["format"] == "svg":
        options["metadata"] = {"Date": None}
    with matplotlib.rc_context({"svg.hashsalt": "tfidf-tune"}):
        figure.savefig(to, **options)


def _csv_cell(value: Value) -> Value:
    if not isinstance(value, str):
        return finite(value)
    # https://owasp.org/www-community/attacks/CSV_Injection
    return visible(f"'{value}" if value.startswith(_FORMULA_STARTS) else value)


def finite(value: Value) -> Value:
    """Return None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
