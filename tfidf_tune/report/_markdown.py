"""A report as GitHub Markdown that also reads well in a terminal."""

import re
import textwrap
from collections.abc import Sequence

from tfidf_tune.report._document import Column, Example, Figure, Report, Table, Value, without_lone_model

_WIDTH = 100
_MISSING = "\N{EN DASH}"


def markdown(report: Report) -> str:
    """Write a report as Markdown: lead, findings, tables, figures as links to ``figures/``, examples, provenance.

    Args:
        report (Report): the report.

    Returns:
        str: the text, with a final newline.
    """
    parts = [f"# {report.title}"]
    parts += [_wrapped(report.lead)] if report.lead else []
    parts += [_list(report.statements)] if report.statements else []
    parts += [f"## {table.title}\n\n{markdown_table(table)}" for table in report.tables]
    parts += [_figure(figure) for figure in report.figures]
    if report.examples:
        parts.append("## Examples\n\nWhat a model recites stands between ⟦ and ⟧.")
    parts += [_example(example) for example in report.examples]
    if report.provenance:
        rows = [(_escaped(name), _escaped(value)) for name, value in report.provenance]
        parts.append("## Provenance\n\n" + _aligned(("What", "Value"), rows, ("<", "<")))
    return "\n\n".join(parts) + "\n"


def markdown_table(table: Table) -> str:
    """Write a table as Markdown, its notes as a list below; a column Model of one value is left out.

    Args:
        table (Table): the table; its title is not part of the result.

    Returns:
        str: the text, without a final newline.
    """
    table = without_lone_model(table)
    rows = [tuple(_cell(value, column) for value, column in zip(row, table.columns, strict=True)) for row in table.rows]
    sides = [
        "<" if any(isinstance(row[index], str) for row in table.rows) else ">" for index in range(len(table.columns))
    ]
    text = _aligned([_escaped(column.name) for column in table.columns], rows, sides)
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
    return _escaped(value) if isinstance(value, str) else format(value, column.format)


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], sides: Sequence[str]) -> str:
    """Columns padded to one width: "<" to the left, ">" to the right."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width if side == "<" else "-" * (width - 1) + ":" for width, side in zip(widths, sides, strict=True)]
    return "\n".join(
        "| " + " | ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)) + " |"
        for line in (header, rule, *rows)
    )


def _escaped(text: str) -> str:
    """A bar would start a column, a line end a row."""
    return " ".join(text.split()).replace("|", "\\|")


def _figure(figure: Figure) -> str:
    return f"## {figure.title}\n\n![{figure.title}](figures/{figure.name}.png)\n\n{_wrapped(figure.caption)}"


def _example(example: Example) -> str:
    parts = [("Prompt", example.prompt), ("Truth", example.truth)]
    for one in example.continuations:
        marked = "".join(f"⟦{text}⟧" if recited else text for text, recited in one.pieces)
        parts.append((f"{one.label} ({one.scores})", marked))
    indent = " " * 4
    text = "\n\n".join(f"{title}\n{_wrapped(words, indent, indent)}" for title, words in parts)
    # Models write anything: the fence is longer than any in the text.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"### {example.title}\n\n{fence}text\n{text}\n{fence}"
