"""Tables of what was tried and how it ended, as Markdown that also reads well in a terminal."""

from collections.abc import Sequence
from dataclasses import dataclass

from tfidf_tune.report import Column, Report, Table, terminal_text

_FAILED = "FAILED"


@dataclass(frozen=True)
class Tried:
    """A row: what was tried, and how it ended.

    Attributes:
        cells (tuple[str, ...]): one for each of the table's columns.
        problems (tuple[str, ...]): what was not as it has to be; none for a row that passes.
    """

    cells: tuple[str, ...]
    problems: tuple[str, ...] = ()


def fault_table(name: str, title: str, columns: Sequence[str], rows: Sequence[Tried]) -> Table:
    """A table with a last column that says whether the row passes."""
    results = [f"{_FAILED}: {'; '.join(row.problems)}" if row.problems else "ok" for row in rows]
    failing = sum(bool(row.problems) for row in rows)
    return Table(
        name=name,
        title=title,
        columns=tuple(Column(column) for column in (*columns, "result")),
        rows=tuple((*row.cells, result) for row, result in zip(rows, results, strict=True)),
        notes=(f"{len(rows)} rows, {failing} of them failing.",),
    )


def failing_rows(table: Table) -> int:
    """Count the rows of :func:`fault_table` that do not pass."""
    return sum(str(row[-1]).startswith(_FAILED) for row in table.rows)


def printed(tables: Sequence[Table]) -> str:
    """All tables as one text."""
    return terminal_text(Report("Faults", statements=(), tables=tuple(tables), figures=(), examples=(), provenance=()))
