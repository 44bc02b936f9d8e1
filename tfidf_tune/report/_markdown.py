"""A report as GitHub Markdown, and in the same layout as text for a terminal."""

import re
import textwrap
from collections.abc import Callable, Sequence

from tfidf_tune._printing import visible
from tfidf_tune.report._document import Column, Example, Report, Table, Value

_WIDTH = 100
_MISSING = "\N{EN DASH}"
# What Markdown would interpret: emphasis (not an underscore inside a word), code, links, bare addresses, strikethrough,
# formulas, table cells, escapes, HTML and entities.
_INLINE = re.compile(
    r"[`*\[\]~$|\\]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=\bwww)\.|<(?=[A-Za-z/!?])|&(?=#|[A-Za-z])", re.IGNORECASE
)
# Words that begin a block at the start of a line, where wrapping may move any word.
_BLOCK = re.compile(r"(?<!\S)(#+|[-+]+|=+|>\S*|0*1[.)])(?!\S)|^(\d+[.)])(?!\S)")


def markdown(report: Report) -> str:
    """Write a report as GitHub Markdown, with figures as links to ``figures/``; names and texts are escaped."""
    return _laid_out(report, _inert)


def terminal_text(report: Report) -> str:
    """Write a report in the layout of :func:`markdown` for a terminal; only control characters are escaped."""
    return _laid_out(report, visible)


def _inert(text: str) -> str:
    """Escape what Markdown would interpret."""
    text = _INLINE.sub(r"\\\g<0>", " ".join(visible(text).split()))
    # Before a number's dot or bracket, before any other sign.
    return _BLOCK.sub(lambda match: re.sub(r"(?=[^\w\\])", r"\\", match[0], count=1), text)


def _laid_out(report: Report, change: Callable[[str], str]) -> str:
    """Lay out a report; examples, which are fenced, only get their control characters shown."""
    parts = [f"# {_line(report.title, change)}"]
    parts += [_wrapped(change(report.lead))] if report.lead else []
    parts += [_list(report.statements, change)] if report.statements else []
    parts += [f"## {_line(table.title, change)}\n\n{_table(table, change)}" for table in report.tables]
    for figure in report.figures:
        title = _line(figure.title, change)
        parts.append(f"## {title}\n\n![{title}](figures/{figure.name}.png)\n\n{_wrapped(change(figure.caption))}")
    if report.examples:
        parts.append("## Examples\n\nWhat a model recites stands between ⟦ and ⟧.")
    parts += [_example(example, change) for example in report.examples]
    if report.provenance:
        rows = [(_line(name, change), _line(value, change)) for name, value in report.provenance]
        parts.append("## Provenance\n\n" + _aligned(("What", "Value"), rows, ("<", "<")))
    return "\n\n".join(parts) + "\n"


def _table(table: Table, change: Callable[[str], str]) -> str:
    table = table.without_lone_model()
    rows = [
        [_cell(value, column, change) for value, column in zip(row, table.columns, strict=True)] for row in table.rows
    ]
    sides = ["<" if any(isinstance(row[i], str) for row in table.rows) else ">" for i in range(len(table.columns))]
    text = _aligned([_line(column.name, change) for column in table.columns], rows, sides)
    return text + (f"\n\n{_list(table.notes, change)}" if table.notes else "")


def _list(sentences: Sequence[str], change: Callable[[str], str]) -> str:
    return "\n".join(_wrapped(change(sentence), "- ", "  ") for sentence in sentences)


def _wrapped(text: str, first_indent: str = "", indent: str = "") -> str:
    filled = textwrap.fill(
        text.replace(" %", "\N{NO-BREAK SPACE}%"),  # a number and its unit stay on one line
        _WIDTH,
        initial_indent=first_indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace("\N{NO-BREAK SPACE}%", " %")


def _line(text: str, change: Callable[[str], str] = visible) -> str:
    return " ".join(change(text).split())


def _cell(value: Value, column: Column, change: Callable[[str], str]) -> str:
    if value is None:
        return _MISSING
    return _line(value, change) if isinstance(value, str) else format(value, column.format)


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Pad columns to one width: "<" aligns to the left, ">" to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if side == "<" else "-" * (width - 1) + ":" for width, side in zip(widths, sides, strict=True)]
    return "\n".join(
        "| " + " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)) + " |"
        for line in (header, rule, *rows)
    )


def _example(example: Example, change: Callable[[str], str]) -> str:
    parts = [("Prompt", example.prompt), ("Truth", example.truth)]
    for one in example.continuations:
        marked = "".join(f"⟦{text}⟧" if recited else text for text, recited in one.pieces)
        parts.append((_line(f"{one.label} ({one.scores})"), marked))
    indent = " " * 4
    text = "\n\n".join(f"{title}\n{_wrapped(visible(words), indent, indent)}" for title, words in parts)
    # A model may write anything: the fence is longer than any in the text.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"### {_line(example.title, change)}\n\n{fence}text\n{text}\n{fence}"
