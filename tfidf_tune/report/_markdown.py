"""A report as GitHub Markdown, and in the same layout as text for a terminal."""

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from tfidf_tune._printing import visible
from tfidf_tune.report.document import Example, Report, Table

_WIDTH = 100
_MOST_LINES = 20  # of a short report on a terminal
# What Markdown would interpret: emphasis (not an underscore inside a word), code, links, bare
# addresses, strikethrough, formulas, table cells, escapes, HTML and entities.
_INLINE = re.compile(
    r"[`*\[\]~$|\\]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=\bwww)\.|<(?=[A-Za-z/!?])|&(?=#|[A-Za-z])",
    re.IGNORECASE,
)
# Words that begin a block at the start of a line, where wrapping may move any word.
_BLOCK = re.compile(r"(?<!\S)(#+|[-+]+|=+|>\S*|0*1[.)])(?!\S)|^(\d+[.)])(?!\S)")
_Escape: TypeAlias = Callable[[str], str]


def markdown(report: Report) -> str:
    """Write a report as GitHub Markdown, with figures as links to ``figures/``; names and texts are
    escaped.
    """
    return _laid_out(report, _inert)


def terminal_text(report: Report, *, verbose: bool = False) -> str:
    """Write the first table and below it the verdict for a terminal, where only control characters
    are escaped.

    Args:
        report (Report): the report.
        verbose (bool): write everything in the layout of :func:`markdown`, the verdict again last.
            Default: False, at most 20 lines; rows that do not fit are counted.
    """
    if verbose:
        return f"{_laid_out(report, _on_one_line)}\n{_wrapped(_on_one_line(report.verdict))}\n"
    # Without marks of footnotes.
    verdict = _wrapped(re.sub(r"\[\d+\]", "", _on_one_line(report.verdict)))
    lines = [f"# {_on_one_line(report.title)}", ""]
    if report.tables:
        table = report.tables[0].without_empty_columns()
        table_lines = _aligned_table(table, _on_one_line).split("\n")
        num_verdict = len(verdict.split("\n"))
        # Besides the table there are the title, the verdict, and two lines between them.
        num_shown = _MOST_LINES - len(lines) - 2 - num_verdict
        lines += table_lines[:num_shown]
        num_hidden = len(table_lines) - num_shown
        if num_hidden > 0:
            lines.append(f"and {num_hidden} more rows: --verbose")
        lines.append("")
    return "\n".join([*lines, verdict]) + "\n"


def _on_one_line(text: str) -> str:
    return " ".join(visible(text).split())


def _inert(text: str) -> str:
    """Put a text on one line and escape what Markdown would interpret."""
    text = _INLINE.sub(r"\\\g<0>", _on_one_line(text))
    return _BLOCK.sub(_escaped_block, text)


def _escaped_block(match: re.Match[str]) -> str:
    """Put a backslash before a number's dot or bracket, or before any other sign."""
    return re.sub(r"(?=[^\w\\])", r"\\", match[0], count=1)


def _laid_out(report: Report, escape: _Escape) -> str:
    parts = [f"# {escape(report.title)}"]
    if report.subject:
        parts.append(_wrapped(escape(report.subject)))
    if report.verdict:
        parts.append(_wrapped(escape(report.verdict)))
    # The first tables are read with the verdict; the others stand below the figures.
    tables = [f"## {escape(table.title)}\n\n{_table(table, escape)}" for table in report.tables]
    parts += tables[: report.num_leading]
    for figure in report.figures:
        title = escape(figure.title)
        image = f"![{title}](figures/{figure.name}.png)"
        caption = _wrapped(escape(figure.caption))
        parts.append(f"## {title}\n\n{image}\n\n{caption}")
    parts += tables[report.num_leading :]
    if report.examples:
        mark = _wrapped(f"Between ⟦ and ⟧: {report.mark}.")
        parts.append(f"## Examples\n\n{mark}")
    parts += [_example(example, escape) for example in report.examples]
    for section in report.sections:
        parts.append(f"## {escape(section.title)}")
        for paragraph in section.paragraphs:
            parts.append(_wrapped(escape(paragraph)))
    if report.footnotes:
        footnotes = []
        for number, text in enumerate(report.footnotes, start=1):
            label = f"{number}. "
            footnotes.append(_wrapped(escape(text), label, " " * len(label)))
        parts.append("## Footnotes\n\n" + "\n".join(footnotes))
    if report.provenance:
        rows = [("What", "Value")]
        for name, value in report.provenance.items():
            rows.append((escape(name), escape(value)))
        parts.append("## Provenance\n\n" + _aligned(rows, "<<"))
    return "\n\n".join(parts) + "\n"


def _table(table: Table, escape: _Escape) -> str:
    """Write a table with its notes as a list below it."""
    text = _aligned_table(table, escape)
    if not table.notes:
        return text
    notes = "\n".join(_wrapped(escape(note), "- ", "  ") for note in table.notes)
    return f"{text}\n\n{notes}"


def _aligned_table(table: Table, escape: _Escape) -> str:
    table = table.without_lone_model()
    headers = table.headers
    rows = table.rows
    lines = [[escape(header) for header in headers]]
    for row in rows:
        cells = zip(headers, row, strict=True)
        lines.append([escape(table.text(header, value)) for header, value in cells])
    # A column with a text is aligned to the left, a column of numbers to the right.
    sides = [">"] * len(headers)
    for row in rows:
        for column, value in enumerate(row):
            if isinstance(value, str):
                sides[column] = "<"
    return _aligned(lines, sides)


def _wrapped(text: str, first_indent: str = "", indent: str = "") -> str:
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")  # a number and its unit stay on one line
    wrapper = textwrap.TextWrapper(
        _WIDTH, first_indent, indent, break_long_words=False, break_on_hyphens=False
    )
    return wrapper.fill(text).replace("\N{NO-BREAK SPACE}%", " %")


def _aligned(lines: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Pad the columns of a header and rows to one width: "<" aligns to the left, ">"
    to the right.
    """
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = []
    for width, side in zip(widths, sides, strict=True):
        dashes = "-" * width
        if side == ">":
            dashes = dashes[:-1] + ":"
        rule.append(dashes)
    aligned = []
    for line in (lines[0], rule, *lines[1:]):
        cells = zip(line, sides, widths, strict=True)
        padded = [f"{cell:{side}{width}}" for cell, side, width in cells]
        aligned.append(f"| {' | '.join(padded)} |")
    return "\n".join(aligned)


def shown_lines(text: str) -> str:
    """Put three or more line ends on one line, as ⏎, and a text of nothing else too: they would
    fill a page unseen.
    """
    least = 3 if text.strip() else 1
    line_ends = rf"(?:[ \t]*\n){{{least},}}"
    return re.sub(line_ends, lambda match: "⏎" * match[0].count("\n") + "\n", text)


def _marked(pieces: Iterable[tuple[str, bool]]) -> str:
    text = ""
    for piece, is_marked in pieces:
        shown = shown_lines(piece)
        if is_marked:
            shown = f"⟦{shown}⟧"
        text += shown
    return text


def _example(example: Example, escape: _Escape) -> str:
    truth = _marked(example.truth_pieces) or example.truth
    parts = [("Prompt", example.prompt), ("Truth", truth)]
    for continuation in example.continuations:
        title = _on_one_line(f"{continuation.label} ({continuation.scores})")
        parts.append((title, _marked(continuation.pieces)))
    indent = " " * 4
    paragraphs = []
    for title, words in parts:
        paragraphs.append(f"{title}\n{_wrapped(visible(words), indent, indent)}")
    text = "\n\n".join(paragraphs)
    # A model may write anything: the fence is longer than any in the text.
    backticks = re.findall("`+", text)
    longest = max(map(len, backticks), default=0)
    fence = "`" * max(3, longest + 1)
    return f"### {escape(example.title)}\n\n{fence}text\n{text}\n{fence}"
