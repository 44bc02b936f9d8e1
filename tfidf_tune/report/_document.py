"""The parts of a report, before they are written in any format."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tfidf_tune._printing import visible
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, Interval
from tfidf_tune.results._table import BY_LABEL

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas as pd

Value: TypeAlias = str | float | int | None
"""A cell of a table; None if it was not measured."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")


@dataclass(frozen=True)
class Table:
    """A data frame with a caption.

    Args:
        name (str): unique in the report, of lower-case letters, digits and underscores: a file name and an anchor.
        title (str): one line.
        frame (pandas.DataFrame): a column of texts or numbers for each header; missing values were not measured.
        notes (Sequence[str]): sentences below the table. Default: none.
        formats (Mapping[str, str]): header -> format specification of its numbers (``.2f``). Default: whole numbers.
        better (Mapping[str, str]): header -> "lower" or "higher" where one end is better. Default: none.
    """

    name: str
    title: str
    frame: "pd.DataFrame"
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
        columns = (
            [_plain(value, self.formats.get(name)) for value in own.tolist()] for name, own in self.frame.items()
        )
        return list(zip(*columns, strict=True))

    def text(self, header: str, value: Value) -> str:
        """Format a cell."""
        if value is None:
            return "\N{EN DASH}"
        return value if isinstance(value, str) else format(value, self.formats.get(header, ""))

    def without_empty_columns(self) -> "Table":
        """Leave out the columns without any value."""
        return replace(self, frame=self.frame.dropna(axis="columns", how="all"))

    def without_lone_model(self) -> "Table":
        """Leave out a first column Model that is the same in every row."""
        is_lone = self.headers[:1] == ["Model"] and self.frame.iloc[:, 0].nunique() == 1
        return replace(self, frame=self.frame.iloc[:, 1:]) if is_lone else self

    def csv(self) -> str:
        """Write CSV with full precision; text that a spreadsheet would take for a formula gets an apostrophe.

        Returns:
            str: header and rows, ending in CR LF each; cells that were not measured or are not finite are empty.
        """
        import pandas as pd

        cells = [[_csv_cell(value) for value in row] for row in self.rows]
        frame = pd.DataFrame(cells, columns=list(map(_csv_cell, self.headers)), dtype=object)
        return str(frame.to_csv(index=False, lineterminator="\r\n"))


@dataclass(frozen=True)
class Figure:
    """A drawing, made without pyplot, with its caption in sentences; the name is as a table's."""

    name: str
    title: str  # one line; also the text alternative of the drawing
    figure: "matplotlib.figure.Figure"
    caption: str


@dataclass(frozen=True)
class Continuation:
    """What one model generated: consecutive pieces of text, and whether each is the recited span."""

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
    truth_pieces: tuple[tuple[str, bool], ...] = ()  # as of a continuation, if parts of the truth are marked too


@dataclass(frozen=True)
class Section:
    """Paragraphs under a heading; the name is an anchor and, capitalized, the entry of the table of contents."""

    name: str
    title: str
    paragraphs: tuple[str, ...]


RECITED_MARK = "what a model recites, the longest run of tokens that its continuation shares with the true one"
SHARED_MARK = "runs of words that the continuation shares with the true one, in order; all else differs"


@dataclass(frozen=True)
class Report:
    """All that a page shows.

    Args:
        title (str): of the page.
        verdict (str): the first line below the title: the main result with its numbers. Default: none.
        statements (Sequence[str]): the findings in sentences, the most important first.
        tables (Sequence[Table]): the tables.
        figures (Sequence[Figure]): the figures, above the tables; the first stands next to the findings.
        examples (Sequence[Example]): the examples.
        provenance (Mapping[str, str]): folders, versions, seeds, settings, date.
        lead (str): sentences above the statements that say what is shown and explain its terms. Default: none.
        footnotes (Sequence[str]): caveats; "[1]" in a text refers to the first. Default: none.
        sections (Sequence[Section]): more text, between the examples and the footnotes. Default: none.
        mark (str): what is marked in the examples.
        summary (Mapping[str, Any]): the numbers for a program; written as a file of its own. Default: none.
    """

    title: str
    statements: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    examples: Sequence[Example] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    lead: str = ""
    verdict: str = ""
    footnotes: Sequence[str] = ()
    sections: Sequence[Section] = ()
    mark: str = RECITED_MARK
    summary: Mapping[str, Any] = field(default_factory=dict)


def tabulate(
    name: str,
    title: str,
    frame: "pd.DataFrame",
    columns: Sequence[tuple[str, str, str]],
    notes: Sequence[str] = (),
    better: Mapping[str, Literal["lower", "higher"]] | None = None,
) -> Table:
    """Make a table of some columns of a data frame: the header, the column's name and the format of each."""
    import pandas as pd

    headers = pd.Index([header for header, *_ in columns], dtype=object)  # a name may be a text that Arrow cannot hold
    chosen = frame[[source for _, source, _ in columns]].set_axis(headers, axis="columns")
    return Table(name, title, chosen, notes, {header: form for header, _, form in columns if form}, better or {})


def finite(value: Value) -> Value:
    """Return None for a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any, form: str | None) -> Value:
    if value is None or value != value:
        return None
    # Grouping makes floats of integers.
    return int(value) if isinstance(value, float) and not form and value.is_integer() else value


def _csv_cell(value: Value) -> Value:
    if not isinstance(value, str):
        return finite(value)
    # https://owasp.org/www-community/attacks/CSV_Injection
    return visible(f"'{value}" if value.startswith(_FORMULA_STARTS) else value)


LMS_EXPLAINED = (
    "LMS, the longest memorized substring, is the longest run of tokens that a continuation shares with the passage"
)
NEAR_EXPLAINED = (
    "Edit distance: tokens to replace, insert and delete, as a share of the longer text. Common subsequence: tokens "
    "that occur in both in one order."
)
TEXT_PROMPTS = (
    "prompts were sent as text, so the responses were tokenized again: LMS and prefix match are approximate, even "
    "where no token id was lost. `tfidf-tune eval` is exact."
)
SIGNIFICANCE_NOTE = (
    "p (Holm): two-sided, from the same resamples, corrected for the number of comparisons of the model by Holm's "
    f"method. Significant: the interval excludes 0 and p is below 0.05. With fewer than {MIN_UNITS} units there is no "
    "verdict."
)
NOT_CORRECTED = "not after Holm's correction"
FEW_UNITS = (
    f"From {MIN_UNITS} to {ENOUGH_UNITS - 1} units, such an interval excludes 0 in 7 to 11 % of cases without any "
    "difference, instead of 5 %."
)
SEVERAL_COMPARISONS = (
    "Verdicts are corrected for the number of comparisons of a model by Holm's method. Intervals are not: without any "
    "difference, one in twenty excludes 0."
)
BOUND = (
    "The bound is the upper end of the 95 % interval of targets minus controls. It holds for these passages and "
    "prompts, and does not show that nothing is memorized."
)


class Footnotes:
    """The caveats of a report, each said once and marked wherever it applies."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, *texts: str) -> str:
        """Return the marks of footnotes, "[1][2]"; new ones are added."""
        self.texts += [text for text in dict.fromkeys(texts) if text not in self.texts]
        return "".join(f"[{self.texts.index(text) + 1}]" for text in texts)


def joined(names: Iterable[str]) -> str:
    """Join different names, at least one, as in a sentence: "a, b and c"."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def percent_text(percent: float) -> str:
    """Write a change: "+5.0 %"; never "-0.0 %"."""
    return f"{round(percent, 1) + 0.0:+.1f} %"


def span(low: float, high: float, *, decimals: int, suffix: str = "") -> str:
    """Write a range: "34.9 % to 71.1 %"; ends that look alike once."""
    ends = (round(end, decimals) + 0.0 for end in (low, high))  # no "-0.0"
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}{suffix}" for end in ends))


def prompt_length(length: float) -> int | str:
    """Return the length of a prompt for tables; completions have prompts of any length, recorded as 0."""
    return int(length) or "own"


def interval_text(interval: Interval, unit: str, *, decimals: int, suffix: str = "") -> str:
    """Write an interval of a unit ("passage"): "95 % interval 34.9 % to 71.1 %", or "equal for all passages"."""
    if math.isclose(interval.low, interval.high, rel_tol=1e-9, abs_tol=1e-12):
        return f"equal for all {unit}s"
    return f"95 % interval {span(interval.low, interval.high, decimals=decimals, suffix=suffix)}"


def at_progress(progress: int, comma: str = "") -> str:
    """Name a checkpoint: " at 50 % of training", with a comma before it or not; nothing at the end of training."""
    return "" if progress == 100 else f"{comma} at {progress} % of training"


def why_no_interval(one: Any) -> str:
    """Say why a reduction is undefined or has no interval; for the row see :func:`compare_objectives`."""
    if math.isnan(one.reduction):
        return "the baseline is 0" if one.baseline == 0 else "a value is not finite"
    measure = BY_LABEL[one.measure]
    if one.num_units < 2:
        return f"there is a single {measure.unit}"
    return f"the baseline's {measure.phrase} is 0 in some resamples, because few {measure.unit}s have another value"
