"""A report as files: a page, Markdown, tables as CSV, all of it as JSON, figures as PNG and SVG."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.figure

from tfidf_tune._files import atomic_file
from tfidf_tune.report._csv import csv_text, finite
from tfidf_tune.report._document import Report, Table
from tfidf_tune.report._html import html_page
from tfidf_tune.report._markdown import markdown

_INDEX = "report.json"


def write_report(report: Report, folder: Path) -> None:
    """Write ``report.json``, ``report.md``, ``tables/*.csv``, ``figures/*.png`` and ``*.svg``, and ``index.html``.

    Each file appears whole or not at all. An older report in the folder is replaced, tables and figures that only it
    had included; other files stay.

    Args:
        report (Report): the report.
        folder (Path): where to; it is made.

    Raises:
        ValueError: If the folder holds files but no report, see :func:`require_report_folder`.
    """
    require_report_folder(folder)
    older = _tables_and_figures(folder)
    content = _as_json(report)
    _write_text(folder / _INDEX, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    for table in report.tables:
        write_csv(table, folder / "tables" / f"{table.name}.csv")
    # A fixed salt and no date: the same report makes the same files.
    with matplotlib.rc_context({"svg.hashsalt": "tfidf-tune"}):
        for figure in report.figures:
            _draw(figure.figure, folder / "figures" / f"{figure.name}.png", dpi=200)
            _draw(figure.figure, folder / "figures" / f"{figure.name}.svg", metadata={"Date": None})
    _write_text(folder / "report.md", markdown(report))
    _write_text(folder / "index.html", html_page(report))
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
    if folder.is_dir() and any(folder.iterdir()) and not (folder / _INDEX).is_file():
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
    with atomic_file(path) as temporary:
        temporary.write_bytes(csv_text(table).encode())


def _write_text(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _draw(figure: matplotlib.figure.Figure, path: Path, **options: Any) -> None:
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip("."), **options)
