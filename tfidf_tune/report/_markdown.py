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
        table = _table(
            report.tables[0].without_empty_columns(), _on_one_line, with_notes=False
        ).split("\n")
        num_shown = _MOST_LINES - len(lines) - 2 - len(verdict.split("\n"))
        lines += table[:num_shown]
        hidden = len(table) - num_shown
        lines += [f"and {hidden} more rows: --verbose"] if hidden > 0 else []
        lines.append("")
    return "\n".join([*lines, verdict]) + "\n"


def _on_one_line(text: str) -> str:
    return " ".join(visible(text).split())


def _inert(text: str) -> str:
    """Put a text on one line and escape what Markdown would interpret."""
    text = _INLINE.sub(r"\\\g<0>", _on_one_line(text))
    # Before a number's dot or bracket, before any other sign.
    return _BLOCK.sub(lambda match: re.sub(r"(?=[^\w\\])", r"\\", match[0], count=1), text)


def _laid_out(report: Report, escape: _Escape) -> str:
    parts = [f"# {escape(report.title)}"]
    parts += [_wrapped(escape(report.subject))] if report.subject else []
    parts += [_wrapped(escape(report.verdict))] if report.verdict else []
    tables = [f"## {escape(table.title)}\n\n{_table(table, escape)}" for table in report.tables]
    parts += tables[:1]
    for figure in report.figures:
        title = escape(figure.title)
        image = f"![{title}](figures/{figure.name}.png)"
        parts.append(f"## {title}\n\n{image}\n\n{_wrapped(escape(figure.caption))}")
    parts += tables[1:]
    parts += (
        [f"## Examples\n\n{_wrapped(f'Between ⟦ and ⟧: {report.mark}.')}"]
        if report.examples
        else []
    )
    parts += [_example(example, escape) for example in report.examples]
    for one in report.sections:
        parts += [f"## {escape(one.title)}", *(_wrapped(escape(text)) for text in one.paragraphs)]
    if report.footnotes:
        starts = [(f"{number}. ", escape(text)) for number, text in enumerate(report.footnotes, 1)]
        parts.append(
            "## Footnotes\n\n" + "\n".join(_wrapped(text, at, " " * len(at)) for at, text in starts)
        )
    if report.provenance:
        rows = [
            ("What", "Value"),
            *((escape(name), escape(value)) for name, value in report.provenance.items()),
        ]
        parts.append("## Provenance\n\n" + _aligned(rows, "<<"))
    return "\n\n".join(parts) + "\n"


def _table(table: Table, escape: _Escape, *, with_notes: bool = True) -> str:
    table = table.without_lone_model()
    headers = table.headers
    rows = table.rows
    lines = [
        headers,
        *([table.text(*cell) for cell in zip(headers, row, strict=True)] for row in rows),
    ]
    sides = []
    for column in range(len(headers)):
        has_text = any(isinstance(row[column], str) for row in rows)
        sides.append("<" if has_text else ">")
    text = _aligned([list(map(escape, line)) for line in lines], sides)
    notes = [_wrapped(escape(note), "- ", "  ") for note in table.notes] if with_notes else []
    return text + ("\n\n" + "\n".join(notes) if notes else "")


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
        rule.append("-" * width if side == "<" else "-" * (width - 1) + ":")
    text = []
    for line in (lines[0], rule, *lines[1:]):
        columns = zip(line, sides, widths, strict=True)
        cells = [f"{cell:{side}{width}}" for cell, side, width in columns]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def shown_lines(text: str) -> str:
    """Put three or more line ends on one line, as ⏎, and a text of nothing else too: they would
    fill a page unseen.
    """
    least = 3 if text.strip() else 1
    return re.sub(
        rf"(?:[ \t]*\n){{{least},}}", lambda found: "⏎" * found[0].count("\n") + "\n", text
    )


def _marked(pieces: Iterable[tuple[str, bool]]) -> str:
    shown = ""
    for text, marked in pieces:
        lines = shown_lines(text)
        shown += f"⟦{lines}⟧" if marked else lines
    return shown


def _example(example: Example, escape: _Escape) -> str:
    parts = [("Prompt", example.prompt), ("Truth", _marked(example.truth_pieces) or example.truth)]
    parts += [
        (_on_one_line(f"{one.label} ({one.scores})"), _marked(one.pieces))
        for one in example.continuations
    ]
    indent = " " * 4
    text = "\n\n".join(
        f"{title}\n{_wrapped(visible(words), indent, indent)}" for title, words in parts
    )
    # A model may write anything: the fence is longer than any in the text.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"### {escape(example.title)}\n\n{fence}text\n{text}\n{fence}"
