"""A report as one HTML page that works offline, on a phone, in dark mode and on paper.

All text is escaped by the templates' environment. The page's policy lets a browser run only our
scripts and load nothing from outside, so that a text that slipped through unescaped would stay
inert.
"""

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from tfidf_tune._files import is_leftover, update_files
from tfidf_tune._printing import visible
from tfidf_tune.report._markdown import markdown, shown_lines
from tfidf_tune.report.document import Example, Figure, Report, Table, Value, finite
from tfidf_tune.report.figures import draw

if TYPE_CHECKING:
    import matplotlib.figure

_MARK = re.compile(r"\[([1-9]\d*)\]")
_TOGETHER = re.compile(r"(\S*-\S*(?: %)?|\S+ %)")


def html_page(report: Report, section: str | None = None, **context: Any) -> str:
    """Make a page of a report: figures are drawn into it, and it has the CSV of every table to be
    saved.

    Args:
        report (Report): the report.
        section (str | None): one more section, below the first table: its id and the name of its
            template and script. Default: None.
        **context (Any): what the template of that section needs.
    """
    script_names = ["sort.js"]
    if section:
        script_names.append(f"{section}.js")
    # The policy names the hash of each script: a browser runs no other.
    scripts = []
    hashes = []
    for name in script_names:
        script = Markup(_TEMPLATES.get_template(name).render())
        digest = hashlib.sha256(script.encode()).digest()
        scripts.append(script)
        hashes.append(f"'sha256-{_base64(digest)}'")
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; img-src "
        "data:; base-uri 'none'; form-action 'none'"
    )
    page = _TEMPLATES.get_template("page.html")
    return page.render(context, report=report, section=section, policy=policy, scripts=scripts)


def _best(table: Table) -> set[tuple[int, int]]:
    """Row and column of the best values of each group of rows, and of values that look alike.

    Rows with the same first cell (a model) are a group; if no two share it, all rows are one.
    """
    rows = table.rows
    groups: dict[Value, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row[0], []).append(number)
    if len(groups) == len(rows):
        groups = {None: list(range(len(rows)))}
    best = set()
    for column, header in enumerate(table.headers):
        if header not in table.better:
            continue
        for row_numbers in groups.values():
            cells = {number: rows[number][column] for number in row_numbers}
            for number in _best_cells(table, header, cells):
                best.add((number, column))
    return best


def _best_cells(table: Table, header: str, cells: Mapping[int, Value]) -> list[int]:
    """Return the row numbers of the best cells; none if fewer than two have a number."""
    numbers = {row: value for row, value in cells.items() if isinstance(value, int | float)}
    if len(numbers) < 2:
        return []
    top = max(numbers.values())
    if table.better[header] == "lower":
        top = min(numbers.values())
    shown = table.text(header, top)
    return [row for row, value in numbers.items() if table.text(header, value) == shown]


def _svg(figure: "matplotlib.figure.Figure") -> dict[str, Any]:
    """Draw a figure as a data URI (as an image, its ids cannot clash) of a size in CSS pixels, 96
    an inch.
    """
    buffer = io.BytesIO()
    draw(figure, buffer, format="svg", transparent=True)
    width, height = figure.get_size_inches()
    return {
        "uri": f"data:image/svg+xml;base64,{_base64(buffer.getvalue())}",
        "width": round(96 * width),
        "height": round(96 * height),
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _inert(value: object) -> object:
    """Make control characters visible, in text that is escaped after this and in markup."""
    if not isinstance(value, str):
        return value
    return type(value)(visible(value))


def _together(text: str) -> Markup:
    """Keep a short word with a hyphen (TF-IDF), and a number with its percent sign, on one line."""
    span = Markup('<span class="together">{}</span>')
    markup = []
    for number, part in enumerate(_TOGETHER.split(text)):
        is_match = number % 2 == 1  # a split by a group returns every second part as its match
        if is_match and len(part) <= 20:
            markup.append(span.format(part))
        else:
            markup.append(escape(part))
    return Markup("").join(markup)


def _marked(text: str, report: Report) -> Markup:
    """Keep words together, and link the marks of footnotes to them."""

    def link(match: re.Match[str]) -> str:
        mark, number = match.group(0, 1)
        if int(number) > len(report.footnotes):
            return mark
        return f'<sup><a href="#footnote-{number}">{mark}</a></sup>'

    words = str(_together(text))
    return Markup(_MARK.sub(link, words))


def _text_columns(table: Table) -> set[int]:
    """Return the numbers of the columns that hold text."""
    columns = set()
    for row in table.rows:
        columns |= {number for number, value in enumerate(row) if isinstance(value, str)}
    return columns


def _text_base64(text: str) -> str:
    return _base64(text.encode())


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfidf_tune.report"),
    autoescape=True,
    finalize=_inert,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters["together"] = _together
_TEMPLATES.filters["marked"] = _marked
_TEMPLATES.filters["base64"] = _text_base64
_TEMPLATES.filters["lines"] = shown_lines
_TEMPLATES.globals["best_of"] = _best
_TEMPLATES.globals["svg"] = _svg
_TEMPLATES.globals["text_columns"] = _text_columns

_INDEX = "report.json"


def write_report(
    report: Report,
    folder: Path,
    *,
    more: Mapping[str, Callable[[Path], object]] | None = None,
    **page: Any,
) -> None:
    """Write ``report.json``, ``report.md``, ``tables/*.csv``, ``figures/*.png`` and ``*.svg``, and
    ``index.html``.

    The files appear when all of them are complete. An older report in the folder is replaced,
    including tables and figures that only it had; other files stay.

    Args:
        report (Report): the report.
        folder (Path): created if missing.
        more (Mapping[str, Callable[[Path], object]] | None): names of more files, and functions
            that write them to a path. Default: None.
        **page (Any): more for :func:`html_page`.

    Raises:
        ValueError: If the folder holds files but no report, see :func:`require_report_folder`.
        OSError: If a file cannot be written; the message names it, and the older report is left as
            it was.
    """
    require_report_folder(folder)
    files: dict[str, Callable[[Path], object]] = {}
    for table in report.tables:
        files[f"tables/{table.name}.csv"] = partial(_write_text, table.csv())
    for figure in report.figures:
        files[f"figures/{figure.name}.png"] = partial(draw, figure.figure, format="png", dpi=200)
        files[f"figures/{figure.name}.svg"] = partial(draw, figure.figure, format="svg")
    older = _listed_files(folder) - files.keys()
    content = _as_json(report, list(files))
    index = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    files.update(more or {})
    files["report.md"] = partial(_write_text, markdown(report))
    files["index.html"] = partial(_write_text, html_page(report, **page))
    # The last is renamed first: it says that the folder has a report.
    files[_INDEX] = partial(_write_text, index)
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
    if (folder / _INDEX).is_file():
        return
    if any(path.is_file() and not is_leftover(path) for path in folder.rglob("*")):
        raise ValueError(
            f"{folder} has files but no report ({_INDEX}): give the report a folder of its own"
        )


def _write_text(text: str, path: Path) -> None:
    # In JSON, a lone surrogate, which UTF-8 cannot hold, becomes an escape; other texts have none.
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def _listed_files(folder: Path) -> set[str]:
    """Return the tables and figures in the folder that its report lists."""
    try:
        text = (folder / _INDEX).read_text(encoding="utf-8")
        listed = set(json.loads(text)["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    present = set()
    for part in ("tables", "figures"):
        for path in folder.glob(f"{part}/*"):
            present.add(f"{part}/{path.name}")
    return listed & present


def _as_json(report: Report, files: list[str]) -> dict[str, Any]:
    return {
        "title": report.title,
        "subject": report.subject,
        "verdict": report.verdict,
        "footnotes": report.footnotes,
        "provenance": report.provenance,
        "tables": [_table_as_json(table) for table in report.tables],
        "figures": [_figure_as_json(figure) for figure in report.figures],
        "examples": [_example_as_json(example) for example in report.examples],
        "sections": [vars(section) for section in report.sections],
        "files": files,
    }


def _figure_as_json(figure: Figure) -> dict[str, str]:
    return {"name": figure.name, "title": figure.title, "caption": figure.caption}


def _table_as_json(table: Table) -> dict[str, Any]:
    columns = [{"name": name, "better": table.better.get(name)} for name in table.headers]
    rows = [list(map(finite, row)) for row in table.rows]
    return {
        "name": table.name,
        "title": table.title,
        "columns": columns,
        "rows": rows,
        "notes": table.notes,
    }


def _example_as_json(example: Example) -> dict[str, Any]:
    continuations = []
    for continuation in example.continuations:
        pieces = []
        for text, recited in continuation.pieces:
            pieces.append({"text": text, "recited": recited})
        continuations.append(vars(continuation) | {"pieces": pieces})
    return vars(example) | {"continuations": continuations}
