"""A table as CSV."""

import csv
import io
import math

from tfidf_tune._printing import visible
from tfidf_tune.report._document import Table, Value

_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


def csv_text(table: Table) -> str:
    """Write a table as CSV, with full precision; text that a spreadsheet would take for a formula gets an apostrophe.

    Args:
        table (Table): the table.

    Returns:
        str: header and rows, ending in CR LF each; the cell of what was not measured or is not finite is empty.
    """
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer)
    writer.writerow(_cell(column.name) for column in table.columns)
    writer.writerows([_cell(value) for value in row] for row in table.rows)
    return buffer.getvalue()


def _cell(value: Value) -> Value:
    if not isinstance(value, str):
        return finite(value)
    # https://owasp.org/www-community/attacks/CSV_Injection
    return visible(f"'{value}" if value.startswith(_FORMULA_STARTS) else value)


def finite(value: Value) -> Value:
    """Take what is no number in a file for missing.

    Args:
        value (Value): of a cell.

    Returns:
        Value: None for what is not finite.
    """
    return None if isinstance(value, float) and not math.isfinite(value) else value
