"""The parts of a report, before they are written in any format."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import pandas as pd

from tfidf_tune._printing import visible

if TYPE_CHECKING:
    import matplotlib.figure

Value: TypeAlias = str | float | int | None
"""A cell of a table; None if it was not measured."""


@dataclass(frozen=True)
class Table:
    """A data frame with a caption.

    Args:
        name (str): unique in the report, of lower-case letters, digits and underscores: a file name
            and an anchor.
        title (str): one line.
        frame (pandas.DataFrame): a column of texts or numbers for each header; missing values were
            not measured.
        notes (Sequence[str]): sentences below the table. Default: none.
        formats (Mapping[str, str]): header -> format specification of its numbers (``.2f``).
            Default: whole numbers.
        better (Mapping[str, str]): header -> "lower" or "higher" where one end is better. Default:
            none.
    """

    name: str
    title: str
    frame: pd.DataFrame
    notes: Sequence[str] = ()
    formats: Mapping[str, str] = field(default_factory=dict)
    better: Mapping[str, Literal["lower", "higher"]] = field(default_factory=dict)

    @property
    def headers(self) -> list[str]:
        """The headers in the order of the columns."""
        return list(self.frame.columns)

    @property
    def rows(self) -> list[tuple[Value, ...]]:
        """Plain values; NaN becomes None, and a whole number without a format an integer."""
        columns = []
        for header, cells in self.frame.items():
            number_format = self.formats.get(header)
            columns.append([_plain(value, number_format) for value in cells.tolist()])
        return list(zip(*columns, strict=True))

    def text(self, header: str, value: Value) -> str:
        """Format a cell."""
        if value is None:
            return "\N{EN DASH}"
        if isinstance(value, str):
            return value
        return format(value, self.formats.get(header, ""))

    def without_empty_columns(self) -> "Table":
        """Leave out the columns without any value."""
        return replace(self, frame=self.frame.dropna(axis="columns", how="all"))

    def without_lone_model(self) -> "Table":
        """Leave out a first column Model that is the same in every row."""
        if self.headers[:1] != ["Model"]:
            return self
        models = self.frame.iloc[:, 0]
        if models.nunique() != 1:
            return self
        return replace(self, frame=self.frame.iloc[:, 1:])

    def csv(self) -> str:
        """Write CSV with full precision; text that a spreadsheet would take for a formula gets an
        apostrophe.

        Returns:
            str: header and rows, ending in CR LF each; cells that were not measured or are not
                finite are empty.
        """
        text = io.StringIO()
        writer = csv.writer(text)
        for row in [self.headers, *self.rows]:
            writer.writerow([_csv_cell(value) for value in row])
        return text.getvalue()


@dataclass(frozen=True)
class Figure:
    """A drawing, made without pyplot, with its caption in sentences; the name is as a table's."""

    name: str
    title: str  # one line; also the text alternative of the drawing
    figure: "matplotlib.figure.Figure"
    caption: str


@dataclass(frozen=True)
class Continuation:
    """What one model generated: consecutive pieces of text, and whether each is
    the recited span.
    """

    label: str
    scores: str  # "LMS 128, ROUGE-L 100.0"
    pieces: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Example:
    """One prompt, the true text that follows it, and the continuations of models."""

    title: str
    prompt: str
    truth: str
    continuations: tuple[Continuation, ...]
    truth_pieces: tuple[
        tuple[str, bool], ...
    ] = ()  # as of a continuation, if parts of the truth are marked too


@dataclass(frozen=True)
class Section:
    """Paragraphs under a heading; the name is an anchor and, capitalized, the entry of the table of
    contents.
    """

    name: str
    title: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """All that a page shows: title, verdict, the first tables and the figures; everything else is
    folded as details.

    Args:
        title (str): of the page.
        verdict (str): the main result in one line.
        tables (Sequence[Table]): the tables; the first ones are read with the verdict.
        figures (Sequence[Figure]): the figures.
        examples (Sequence[Example]): the examples.
        provenance (Mapping[str, str]): folders, versions, seeds, settings, date.
        footnotes (Sequence[str]): caveats; "[1]" in a text refers to the first. Default: none.
        sections (Sequence[Section]): more text, between the examples and the footnotes. Default:
            none.
        mark (str): what is marked in the examples. Default: nothing.
        summary (Mapping[str, Any]): the numbers for a program; written as a file of its own.
            Default: none.
        subject (str): what the report is about, in a line below the title. Default: nothing.
        num_leading (int): tables that are read with the verdict. Default: 1.
    """

    title: str
    verdict: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    examples: Sequence[Example] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    footnotes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    mark: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    subject: str = ""
    num_leading: int = 1


class Column(NamedTuple):
    """A column of a table that :func:`tabulate` makes of a data frame.

    Attributes:
        header (str): its header in the table: "Avg LMS".
        source (str): the column of the data frame.
        format (str): format specification of its numbers (``.2f``). Default: whole numbers.
    """

    header: str
    source: str
    format: str = ""


def tabulate(
    name: str,
    title: str,
    frame: pd.DataFrame,
    columns: Sequence[tuple[str, str, str]],
    notes: Sequence[str] = (),
    better: Mapping[str, Literal["lower", "higher"]] | None = None,
) -> Table:
    """Make a table of some columns of a data frame.

    Args:
        name (str): see :class:`Table`.
        title (str): see :class:`Table`.
        frame (pandas.DataFrame): the values; it may have more columns.
        columns (Sequence[tuple[str, str, str]]): a :class:`Column`, or a tuple of header, source
            and format, for each column of the table.
        notes (Sequence[str]): sentences below the table. Default: none.
        better (Mapping[str, str] | None): header -> "lower" or "higher" where one end is better.
            Default: none.
    """
    headers = []
    sources = []
    formats = {}
    for header, source, number_format in columns:
        headers.append(header)
        sources.append(source)
        if number_format:
            formats[header] = number_format
    # A header may be a text that Arrow cannot hold, as the name of a model: hence "object".
    index = pd.Index(headers, dtype=object)
    chosen = frame[sources].set_axis(index, axis="columns")
    return Table(name, title, chosen, notes, formats, better or {})


def finite(value: Value) -> Value:
    """Return None for a number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _plain(value: Any, number_format: str | None) -> Value:
    plain: Value = value
    if pd.isna(value):
        plain = None
    elif isinstance(value, float) and not number_format and value.is_integer():
        plain = int(value)  # grouping makes floats of integers
    return plain


def _csv_cell(value: Value) -> Value:
    if not isinstance(value, str):
        return finite(value)
    # https://owasp.org/www-community/attacks/CSV_Injection
    if value.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        value = f"'{value}"
    return visible(value)


class Footnotes:
    """The caveats of a report, each said once and marked wherever it applies."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, *texts: str) -> str:
        """Return the marks of footnotes, two marks together; new ones are added."""
        for text in texts:
            if text not in self.texts:
                self.texts.append(text)
        marks = ""
        for number, text in enumerate(self.texts, start=1):
            if text in texts:
                marks += f"[{number}]"
        return marks


def joined(names: Iterable[str]) -> str:
    """Join different names, at least one, as in a sentence: "a, b and c"."""
    *first, last = dict.fromkeys(names)
    if not first:
        return last
    return f"{', '.join(first)} and {last}"
