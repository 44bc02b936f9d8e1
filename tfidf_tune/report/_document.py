"""What a report consists of, before it becomes Markdown, files or a page."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import matplotlib.figure

Value: TypeAlias = str | float | int | None
"""A cell of a table; None is a value that was not measured."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name (str): its header.
        format (str): a format specification for its numbers (``.2f``); empty for text and whole numbers.
        better (str | None): "lower" or "higher" where one end is better; None where neither is.
    """

    name: str
    format: str = ""
    better: Literal["lower", "higher"] | None = None


@dataclass(frozen=True)
class Table:
    """Rows under columns, all of them plain values.

    Args:
        name (str): short, unique in the report, of lower-case letters, digits and underscores: a file name, an anchor.
        title (str): one line.
        columns (tuple[Column, ...]): the columns.
        rows (tuple[tuple[Value, ...], ...]): a value for each column in every row.
        notes (tuple[str, ...]): sentences below the table: why a value is missing, how an interval was made.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A drawing and the words below it.

    Args:
        name (str): as a table's.
        title (str): one line; also what a reader hears who does not see the drawing.
        figure (matplotlib.figure.Figure): the drawing, made without pyplot.
        caption (str): what is drawn, in sentences.
    """

    name: str
    title: str
    figure: matplotlib.figure.Figure
    caption: str


@dataclass(frozen=True)
class Example:
    """One prompt, the truth, and what models made of it.

    Args:
        title (str): which passage, which prefix length.
        prompt (str): text of the prompt.
        truth (str): text that follows in the passage.
        continuations (tuple[Continuation, ...]): one a model.
    """

    title: str
    prompt: str
    truth: str
    continuations: tuple["Continuation", ...]


@dataclass(frozen=True)
class Continuation:
    """What one model generated, cut into pieces.

    Args:
        label (str): the objective or model.
        scores (str): for example "LMS 128, ROUGE-L 100.0".
        pieces (tuple[tuple[str, bool], ...]): text, and whether it is the recited span; the pieces joined are the
            whole continuation.
    """

    label: str
    scores: str
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Report:
    """All that a page shows, in its order: lead, statements, tables, figures, examples, provenance.

    Args:
        title (str): the page's title.
        statements (tuple[str, ...]): the findings in sentences, the most important first.
        tables (tuple[Table, ...]): the tables.
        figures (tuple[Figure, ...]): the figures.
        examples (tuple[Example, ...]): the examples.
        provenance (tuple[tuple[str, str], ...]): names and values: folders, versions, seeds, settings, date.
        lead (str): one or two sentences that say what is shown and explain its terms, above the statements. Default:
            none.
    """

    title: str
    statements: tuple[str, ...]
    tables: tuple[Table, ...]
    figures: tuple[Figure, ...]
    examples: tuple[Example, ...]
    provenance: tuple[tuple[str, str], ...]
    lead: str = ""


def without_empty_columns(table: Table) -> Table:
    """Leave out the columns that hold nothing in any row.

    Args:
        table (Table): any table.

    Returns:
        Table: without them.
    """
    kept = [index for index in range(len(table.columns)) if any(row[index] is not None for row in table.rows)]
    rows = tuple(tuple(row[index] for index in kept) for row in table.rows)
    return replace(table, columns=tuple(table.columns[index] for index in kept), rows=rows)


def without_lone_model(table: Table) -> Table:
    """Leave out a first column Model that says the same in every row: to a reader it only takes room.

    Args:
        table (Table): any table.

    Returns:
        Table: without that column; the table itself where there is none.
    """
    if not table.columns or table.columns[0].name != "Model" or len({row[0] for row in table.rows}) != 1:
        return table
    return replace(table, columns=table.columns[1:], rows=tuple(row[1:] for row in table.rows))
