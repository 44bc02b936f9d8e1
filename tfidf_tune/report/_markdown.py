"""A report as GitHub Markdown, and in the same layout as text for a terminal."""

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace

from tfidf_tune._printing import visible
from tfidf_tune.report._document import Column, Example, Figure, Report, Table, Value, without_lone_model

_WIDTH = 100
_MISSING = "\N{EN DASH}"
# What Markdown would act on: emphasis (an underscore inside a word is not), code, links, bare addresses, strikethrough,
# formulas, table cells, escapes, HTML and entities.
_INLINE = re.compile(
    r"[`*\[\]~$|\\]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=\bwww)\.|<(?=[A-Za-z/!?])|&(?=#|[A-Za-z])", re.IGNORECASE
)
# Words that begin a block at the start of a line, where wrapping may put any word.
_BLOCK = re.compile(r"(?<!\S)(#+|[-+]+|=+|>\S*|0*1[.)])(?!\S)|^(\d+[.)])(?!\S)")


def markdown(report: Report) -> str:
    """Write a report as Markdown: lead, findings, tables, figures as links to ``figures/``, examples, provenance.

    Text stays text: nothing in names, findings and passages is taken for Markdown or HTML.

    Args:
        report (Report): the report.

    Returns:
        str: the text, with a final newline.
    """
    return _laid_out(_with_texts(report, _inert))


def terminal_text(report: Report) -> str:
    """Write a report in the layout of :func:`markdown` to be read in a terminal, where nothing has to be escaped.

    Args:
        report (Report): the report.

    Returns:
        str: the text, with a final newline; print it by :func:`tfidf_tune._printing.say`.
    """
    return _laid_out(_with_texts(report, visible))


def _inert(text: str) -> str:
    """Escape what Markdown would act on."""
    text = _INLINE.sub(r"\\\g<0>", " ".join(visible(text).split()))
    # Before a number's dot or bracket, before any other sign.
    return _BLOCK.sub(lambda match: re.sub(r"(?=[^\w\\])", r"\\", match[0], count=1), text)


def _with_texts(report: Report, change: Callable[[str], str]) -> Report:
    """Change every text of a report but that of its examples, which stands in fences and is only made visible."""
    return replace(
        report,
        title=change(report.title),
        lead=change(report.lead),
        statements=tuple(map(change, report.statements)),
        tables=tuple(_table_with_texts(table, change) for table in report.tables),
        figures=tuple(
            replace(figure, title=change(figure.title), caption=change(figure.caption)) for figure in report.figures
        ),
        examples=tuple(
            replace(
                example,
                title=change(example.title),
                prompt=visible(example.prompt),
                truth=visible(example.truth),
                continuations=tuple(
                    replace(
                        one,
                        label=visible(one.label),
                        scores=visible(one.scores),
                        pieces=tuple((visible(text), recited) for text, recited in one.pieces),
                    )
                    for one in example.continuations
                ),
            )
            for example in report.examples
        ),
        provenance=tuple((change(name), change(value)) for name, value in report.provenance),
    )


def _table_with_texts(table: Table, change: Callable[[str], str]) -> Table:
    return replace(
        table,
        title=change(table.title),
        columns=tuple(replace(column, name=change(column.name)) for column in table.columns),
        rows=tuple(tuple(change(value) if isinstance(value, str) else value for value in row) for row in table.rows),
        notes=tuple(map(change, table.notes)),
    )


def _laid_out(report: Report) -> str:
    parts = [f"# {_one_line(report.title)}"]
    parts += [_wrapped(report.lead)] if report.lead else []
    parts += [_list(report.statements)] if report.statements else []
    parts += [f"## {_one_line(table.title)}\n\n{_table(table)}" for table in report.tables]
    parts += [_figure(figure) for figure in report.figures]
    if report.examples:
        parts.append("## Examples\n\nWhat a model recites stands between ⟦ and ⟧.")
    parts += [_example(example) for example in report.examples]
    if report.provenance:
        rows = [(_one_line(name), _one_line(value)) for name, value in report.provenance]
        parts.append("## Provenance\n\n" + _aligned(("What", "Value"), rows, ("<", "<")))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Write a table as Markdown, its notes as a list below; a column Model of one value is left out.

    Args:
        table (Table): the table; its title is not part of the result.

    Returns:
        str: the text, without a final newline.
    """
    return _table(_table_with_texts(table, _inert))


def _table(table: Table) -> str:
    table = without_lone_model(table)
    rows = [tuple(_cell(value, column) for value, column in zip(row, table.columns, strict=True)) for row in table.rows]
    sides = [
        "<" if any(isinstance(row[index], str) for row in table.rows) else ">" for index in range(len(table.columns))
    ]
    text = _aligned([_one_line(column.name) for column in table.columns], rows, sides)
    return text + (f"\n\n{_list(table.notes)}" if table.notes else "")


def _list(sentences: Sequence[str]) -> str:
    return "\n".join(_wrapped(sentence, "- ", "  ") for sentence in sentences)


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


def _cell(value: Value, column: Column) -> str:
    if value is None:
        return _MISSING
    return _one_line(value) if isinstance(value, str) else format(value, column.format)


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Columns padded to one width: "<" to the left, ">" to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if side == "<" else "-" * (width - 1) + ":" for width, side in zip(widths, sides, strict=True)]
    return "\n".join(
        "| " + " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)) + " |"
        for line in (header, rule, *rows)
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _figure(figure: Figure) -> str:
    figure = replace(figure, title=_one_line(figure.title))
    return f"## {figure.title}\n\n![{figure.title}](figures/{figure.name}.png)\n\n{_wrapped(figure.caption)}"


def _example(example: Example) -> str:
    parts = [("Prompt", example.prompt), ("Truth", example.truth)]
    for one in example.continuations:
        marked = "".join(f"⟦{text}⟧" if recited else text for text, recited in one.pieces)
        parts.append((_one_line(f"{one.label} ({one.scores})"), marked))
    indent = " " * 4
    text = "\n\n".join(f"{title}\n{_wrapped(words, indent, indent)}" for title, words in parts)
    # Models write anything: the fence is longer than any in the text.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"### {_one_line(example.title)}\n\n{fence}text\n{text}\n{fence}"
