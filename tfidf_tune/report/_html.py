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
from tfidf_tune.report.document import Report, Table, finite
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
    names = ["sort.js", *([f"{section}.js"] if section else [])]
    scripts = [Markup(_TEMPLATES.get_template(name).render()) for name in names]
    hashes = " ".join(
        f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'" for text in scripts
    )
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    page = _TEMPLATES.get_template("page.html")
    return page.render(context, report=report, section=section, policy=policy, scripts=scripts)


def _best(table: Table) -> set[tuple[int, int]]:
    """Row and column of the best values, or those that look alike, of each first cell (of all if no
    two share it).
    """
    first = [row[0] for row in table.rows]
    groups = first if len(set(first)) < len(first) else [None] * len(first)
    best = set()
    for column, header in enumerate(table.headers):
        if header in table.better:
            values = [row[column] for row in table.rows]
            for group in set(groups):
                in_group = ((at, value) for at, value in enumerate(values) if groups[at] == group)
                numbers = {at: value for at, value in in_group if isinstance(value, int | float)}
                if len(numbers) > 1:
                    top = (min if table.better[header] == "lower" else max)(numbers.values())
                    shown = table.text(header, top)
                    best |= {
                        (at, column)
                        for at, value in numbers.items()
                        if table.text(header, value) == shown
                    }
    return best


def _svg(figure: "matplotlib.figure.Figure") -> dict[str, Any]:
    """Draw a figure as a data URI (as an image, its ids cannot clash) of a size in CSS pixels, 96
    an inch.
    """
    buffer = io.BytesIO()
    draw(figure, buffer, format="svg", transparent=True)
    width, height = (round(96 * length) for length in figure.get_size_inches())
    return {
        "uri": f"data:image/svg+xml;base64,{_base64(buffer.getvalue())}",
        "width": width,
        "height": height,
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _inert(value: object) -> object:
    """Make control characters visible, in text that is escaped after this and in markup."""
    return type(value)(visible(value)) if isinstance(value, str) else value


def _together(text: str) -> Markup:
    """Keep a short word with a hyphen (TF-IDF), and a number with its percent sign, on one line."""
    span = Markup('<span class="together">{}</span>')
    joined = Markup("")
    for number, part in enumerate(_TOGETHER.split(text)):
        is_word = number % 2 == 1  # every second part is such a word
        joined += span.format(part) if is_word and len(part) <= 20 else escape(part)
    return joined


def _marked(text: str, report: Report) -> Markup:
    """Keep words together, and link the marks of footnotes to them."""

    def link(match: re.Match[str]) -> str:
        is_known = int(match[1]) <= len(report.footnotes)
        return f'<sup><a href="#footnote-{match[1]}">{match[0]}</a></sup>' if is_known else match[0]

    return Markup(_MARK.sub(link, str(_together(text))))


def _text_columns(table: Table) -> set[int]:
    """Return the numbers of the columns that hold text."""
    columns = set()
    for row in table.rows:
        columns |= {number for number, value in enumerate(row) if isinstance(value, str)}
    return columns


_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("tfidf_tune.report"),
    autoescape=True,
    finalize=_inert,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(
    together=_together, marked=_marked, base64=lambda text: _base64(text.encode())
)
_TEMPLATES.filters["lines"] = shown_lines
_TEMPLATES.globals.update(best_of=_best, svg=_svg, text_columns=_text_columns)

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
    files: dict[str, Callable[[Path], object]] = {
        f"tables/{table.name}.csv": partial(_write_text, table.csv()) for table in report.tables
    }
    for one in report.figures:
        files[f"figures/{one.name}.png"] = partial(draw, one.figure, format="png", dpi=200)
        files[f"figures/{one.name}.svg"] = partial(draw, one.figure, format="svg")
    texts = {
        "report.md": markdown(report),
        "index.html": html_page(report, **page),
        # The last is renamed first: it says that the folder has a report.
        _INDEX: json.dumps(
            _as_json(report, list(files)), indent=1, ensure_ascii=False, allow_nan=False
        )
        + "\n",
    }
    older = _listed_files(folder) - files.keys()
    files |= dict(more or {}) | {name: partial(_write_text, text) for name, text in texts.items()}
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
    others = (path for path in folder.rglob("*") if path.is_file() and not is_leftover(path))
    if any(others) and not (folder / _INDEX).is_file():
        raise ValueError(
            f"{folder} has files but no report ({_INDEX}): give the report a folder of its own"
        )


def _write_text(text: str, path: Path) -> None:
    # In JSON, a lone surrogate, which UTF-8 cannot hold, becomes an escape; other texts have none.
    path.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def _listed_files(folder: Path) -> set[str]:
    """Return the tables and figures in the folder that its report lists."""
    try:
        listed = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    there: set[str] = set()
    for part in ("tables", "figures"):
        there |= {f"{part}/{path.name}" for path in folder.glob(f"{part}/*")}
    return listed & there


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
    examples = [
        vars(one)
        | {
            "continuations": [
                vars(of)
                | {"pieces": [{"text": text, "recited": recited} for text, recited in of.pieces]}
                for of in one.continuations
            ]
        }
        for one in report.examples
    ]
    names = ("title", "subject", "verdict", "footnotes", "provenance")
    return {name: getattr(report, name) for name in names} | {
        "tables": tables,
        "figures": [
            {"name": one.name, "title": one.title, "caption": one.caption} for one in report.figures
        ],
        "examples": examples,
        "sections": list(map(vars, report.sections)),
        "files": files,
    }
