"""A report as one HTML page that works offline, on a phone, in dark mode and on paper.

All text is escaped by the templates' environment. The page's policy lets a browser run only our scripts and load
nothing from outside, so that a text that slipped through unescaped would stay inert.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from tfidf_tune._files import is_leftover, update_files
from tfidf_tune._printing import visible
from tfidf_tune.report._document import Continuation, Report, Table, Value, finite
from tfidf_tune.report._figures import draw
from tfidf_tune.report._markdown import markdown

if TYPE_CHECKING:
    import matplotlib.figure

_MARK = re.compile(r"\[([1-9]\d*)\]")
_TOGETHER = re.compile(r"\S*-\S*(?: %)?|\S+ %")


def html_page(report: Report, section: str | None = None, **context: Any) -> str:
    """Make a page of a report: figures are drawn into it, and it has the CSV of every table to be saved.

    Args:
        report (Report): the report.
        section (str | None): one more section, below the first table: its id and the name of its template and script.
            Default: None.
        **context (Any): what the template of that section needs.
    """
    names = ["sort.js", *([f"{section}.js"] if section else [])]
    scripts = [Markup(_TEMPLATES.get_template(name).render()) for name in names]
    hashes = " ".join(f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" for text in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return _TEMPLATES.get_template("page.html").render(
        context,
        report=report,
        section=section,
        policy=policy,
        scripts=scripts,
    )


def _columns(table: Table) -> list[dict[str, Any]]:
    """Format the cells of a table, column by column.

    The best value of a column that has a better end is marked among the rows of equal first cell (those of one model),
    or among all rows if no first cell occurs twice. Values that look alike are equally best.
    """
    columns = list(zip(*table.rows, strict=True)) or [()] * len(table.headers)
    groups = columns[0] if len(set(columns[0])) < len(columns[0]) else [None] * len(columns[0])
    formatted = []
    for header, values in zip(table.headers, columns, strict=True):
        best = _best(groups, values, table, header) if header in table.better else set()
        cells = [
            {
                "text": table.text(header, value),
                # JavaScript's Number() reads JSON's numbers and its Infinity.
                "sort_value": json.dumps(value) if isinstance(value, int | float) else None,
                "missing": value is None,
                "best": row in best,
            }
            for row, value in enumerate(values)
        ]
        is_number = not any(isinstance(value, str) for value in values)
        formatted.append({"name": header, "better": table.better.get(header), "number": is_number, "cells": cells})
    return formatted


def _best(groups: Sequence[Value], values: Sequence[Value], table: Table, header: str) -> set[int]:
    best = set()
    for group in dict.fromkeys(groups):
        own = zip(groups, values, strict=True)
        numbers = {row: value for row, (of, value) in enumerate(own) if of == group and isinstance(value, int | float)}
        if len(numbers) > 1:
            top = (min if table.better[header] == "lower" else max)(numbers.values())
            best |= {row for row, value in numbers.items() if table.text(header, value) == table.text(header, top)}
    return best


def _svg(figure: "matplotlib.figure.Figure") -> dict[str, Any]:
    """Draw a figure as a data URI (as an image, its ids cannot clash) of a size in CSS pixels, 96 an inch."""
    buffer = io.BytesIO()
    draw(figure, buffer, format="svg", transparent=True)
    width, height = (round(96 * length) for length in figure.get_size_inches())
    return {"uri": f"data:image/svg+xml;base64,{_base64(buffer.getvalue())}", "width": width, "height": height}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _inert(value: object) -> object:
    """Make control characters visible, in text that is escaped after this and in markup."""
    return type(value)(visible(value)) if isinstance(value, str) else value


def _together(text: str) -> Markup:
    """Keep a short word with a hyphen (TF-IDF), and a number with its percent sign, on one line."""
    parts, end = [], 0
    for match in _TOGETHER.finditer(text):
        if len(match[0]) <= 20:
            parts += [escape(text[end : match.start()]), Markup('<span class="together">{}</span>').format(match[0])]
            end = match.end()
    return Markup("").join([*parts, text[end:]])


def _marked(text: str, report: Report) -> Markup:
    """Keep words together, and link the marks of footnotes to them."""

    def link(match: re.Match[str]) -> str:
        if int(match[1]) > len(report.footnotes):
            return match[0]
        return f'<sup><a href="#footnote-{match[1]}">{match[0]}</a></sup>'

    return Markup(_MARK.sub(link, str(_together(text))))


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfidf_tune.report"),
    autoescape=True,
    finalize=_inert,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(together=_together, marked=_marked, base64=lambda text: _base64(text.encode()))
_TEMPLATES.globals.update(columns_of=_columns, svg=_svg)

_INDEX = "report.json"


def write_report(
    report: Report,
    folder: Path,
    *,
    more: Mapping[str, Callable[[Path], object]] | None = None,
    **page: Any,
) -> None:
    """Write ``report.json``, ``report.md``, ``tables/*.csv``, ``figures/*.png`` and ``*.svg``, and ``index.html``.

    The files appear when all of them are complete. An older report in the folder is replaced, including tables and
    figures that only it had; other files stay.

    Args:
        report (Report): the report.
        folder (Path): created if missing.
        more (Mapping[str, Callable[[Path], object]] | None): names of more files, and functions that write them to a
            path. Default: None.
        **page (Any): more for :func:`html_page`.

    Raises:
        ValueError: If the folder holds files but no report, see :func:`require_report_folder`.
        OSError: If a file cannot be written; the message names it, and the older report is left as it was.
    """
    require_report_folder(folder)
    files: dict[str, Callable[[Path], object]] = {
        f"tables/{table.name}.csv": partial(_write_text, table.csv()) for table in report.tables
    }
    for one in report.figures:
        files[f"figures/{one.name}.png"] = partial(draw, one.figure, format="png", dpi=200)
        files[f"figures/{one.name}.svg"] = partial(draw, one.figure, format="svg")
    texts = {
        _INDEX: json.dumps(_as_json(report, list(files)), indent=1, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": markdown(report),
        "index.html": html_page(report, **page),
    }
    older = _listed_files(folder) - files.keys()
    files |= {name: partial(_write_text, text) for name, text in texts.items()} | dict(more or {})
    update_files(folder, files)
    for name in older:
        (folder / name).unlink(missing_ok=True)


def require_report_folder(folder: Path) -> None:
    """Check that a report can be written to a folder without touching anything else.

    Raises:
        ValueError: If it is a file, or holds other files and no report.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the report a folder of its own")
    others = (path for path in folder.iterdir() if not is_leftover(path)) if folder.is_dir() else ()
    if any(others) and not (folder / _INDEX).is_file():
        raise ValueError(f"{folder} has files but no report ({_INDEX}): give the report a folder of its own")


def _write_text(text: str, path: Path) -> None:
    # In JSON, a lone surrogate, which UTF-8 cannot hold, becomes an escape; other texts have none.
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def _listed_files(folder: Path) -> set[str]:
    """Return the tables and figures in the folder that its report lists."""
    try:
        listed = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return listed & {f"{part}/{path.name}" for part in ("tables", "figures") for path in folder.glob(f"{part}/*")}


def _as_json(report: Report, files: list[str]) -> dict[str, Any]:
    tables = [
        {
            "name": table.name,
            "title": table.title,
            "columns": [{"name": name, "better": table.better.get(name)} for name in table.headers],
            "rows": [list(map(finite, row)) for row in table.rows],
            "notes": table.notes,
        }
        for table in report.tables
    ]
    examples = [vars(one) | {"continuations": list(map(_shown, one.continuations))} for one in report.examples]
    names = ("title", "verdict", "footnotes", "provenance")
    return {name: getattr(report, name) for name in names} | {
        "tables": tables,
        "figures": [{"name": one.name, "title": one.title, "caption": one.caption} for one in report.figures],
        "examples": examples,
        "sections": list(map(vars, report.sections)),
        "files": files,
    }


def _shown(one: Continuation) -> dict[str, Any]:
    return vars(one) | {"pieces": [{"text": text, "recited": recited} for text, recited in one.pieces]}
