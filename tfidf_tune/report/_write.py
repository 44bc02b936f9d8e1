"""A report as files: a page, Markdown, tables as CSV, all of it as JSON, figures as PNG and SVG."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.figure

from tfidf_tune._files import atomic_update, is_leftover
from tfidf_tune.report._csv import csv_text, finite
from tfidf_tune.report._document import Report, Table
from tfidf_tune.report._html import html_page
from tfidf_tune.report._markdown import markdown

_INDEX = "report.json"


def write_report(report: Report, folder: Path, more: Mapping[str, Callable[[Path], object]] | None = None) -> None:
    """Write ``report.json``, ``report.md``, ``tables/*.csv``, ``figures/*.png`` and ``*.svg``, and ``index.html``.

    The files appear when all of them are whole. An older report in the folder is replaced, tables and figures that only
    it had included; other files stay.

    Args:
        report (Report): the report.
        folder (Path): where to; it is made.
        more (Mapping[str, Callable[[Path], object]] | None): names of more files, or of some of the above to be written
            otherwise, and what writes them to a path. Default: None.

    Raises:
        ValueError: If the folder holds files but no report, see :func:`require_report_folder`.
        OSError: If a file cannot be written; the message names it, and the older report is left as it was.
    """
    require_report_folder(folder)
    older = _tables_and_figures(folder)
    content = _as_json(report)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    files: dict[str, Callable[[Path], object]] = {
        # Half a surrogate pair, which UTF-8 cannot hold, becomes JSON's own escape.
        _INDEX: lambda path: path.write_text(text, encoding="utf-8", errors="backslashreplace"),
        **{f"tables/{table.name}.csv": partial(write_csv, table) for table in report.tables},
        **{f"figures/{figure.name}.png": partial(_draw, figure.figure, dpi=200) for figure in report.figures},
        **{
            f"figures/{figure.name}.svg": partial(_draw, figure.figure, metadata={"Date": None})
            for figure in report.figures
        },
        "report.md": lambda path: path.write_text(markdown(report), encoding="utf-8"),
        "index.html": lambda path: path.write_text(html_page(report), encoding="utf-8"),
        **(more or {}),
    }
    with atomic_update(folder) as new_file:
        for name, write in files.items():
            with new_file(name) as path:
                write(path)
    for path in older - {folder / name for name in content["files"]}:
        path.unlink(missing_ok=True)


def require_report_folder(folder: Path) -> None:
    """Check that a report can be written to a folder without touching anything else.

    Args:
        folder (Path): it may be missing, empty, or hold a report.

    Raises:
        ValueError: If it is a file, or holds other files and no report.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the report a folder of its own")
    others = (path for path in folder.iterdir() if not is_leftover(path)) if folder.is_dir() else ()
    if any(others) and not (folder / _INDEX).is_file():
        raise ValueError(f"{folder} holds files and no report ({_INDEX}): give the report a folder of its own")


def _tables_and_figures(folder: Path) -> set[Path]:
    """Those of the report that is there, as far as it lists them."""
    try:
        listed = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {
        path for part in ("tables", "figures") for path in folder.glob(f"{part}/*") if f"{part}/{path.name}" in listed
    }


def _as_json(report: Report) -> dict[str, Any]:
    tables = [f"tables/{table.name}.csv" for table in report.tables]
    figures = [f"figures/{figure.name}.{suffix}" for figure in report.figures for suffix in ("png", "svg")]
    return {
        "title": report.title,
        "lead": report.lead,
        "statements": report.statements,
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "columns": [{"name": column.name, "better": column.better} for column in table.columns],
                "rows": [[finite(value) for value in row] for row in table.rows],
                "notes": table.notes,
            }
            for table in report.tables
        ],
        "figures": [
            {"name": figure.name, "title": figure.title, "caption": figure.caption} for figure in report.figures
        ],
        "examples": [
            {
                "title": example.title,
                "prompt": example.prompt,
                "truth": example.truth,
                "continuations": [
                    {
                        "label": one.label,
                        "scores": one.scores,
                        "pieces": [{"text": text, "recited": recited} for text, recited in one.pieces],
                    }
                    for one in example.continuations
                ],
            }
            for example in report.examples
        ],
        "provenance": dict(report.provenance),
        "files": tables + figures,
    }


def write_csv(table: Table, path: Path) -> None:
    """Write a table as CSV."""
    path.write_bytes(csv_text(table).encode())


def _draw(figure: matplotlib.figure.Figure, path: Path, **options: Any) -> None:
    # A fixed salt and no date: the same report makes the same files.
    with matplotlib.rc_context({"svg.hashsalt": "tfidf-tune"}):
        figure.savefig(path, format=path.suffix.lstrip("."), **options)
