"""A report as files: a page, Markdown, tables as CSV, all of it as JSON, figures as PNG and SVG."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_update, is_leftover
from tfidf_tune.report._document import Report, finite, write_csv
from tfidf_tune.report._figures import draw
from tfidf_tune.report._html import html_page
from tfidf_tune.report._markdown import markdown
from tfidf_tune.results import Results, write_results

_INDEX, _RESULTS = "report.json", "results.jsonl"


def write_report(
    report: Report,
    folder: Path,
    *,
    results: Results | None = None,
    more: Mapping[str, Callable[[Path], object]] | None = None,
    **page: Any,
) -> None:
    """Write ``report.json``, ``report.md``, ``tables/*.csv``, ``figures/*.png`` and ``*.svg``, and ``index.html``.

    The files appear when all of them are complete. An older report in the folder is replaced, including tables and
    figures that only it had; other files stay.

    Args:
        report (Report): the report.
        folder (Path): created if missing.
        results (Results | None): to be written to ``results.jsonl``, from which the report can be made again. Default:
            None.
        more (Mapping[str, Callable[[Path], object]] | None): names of more files, and functions that write them to a
            path. Default: None.
        **page (Any): more for :func:`html_page`.

    Raises:
        ValueError: If the folder holds files but no report, see :func:`require_report_folder`.
        OSError: If a file cannot be written; the message names it, and the older report is left as it was.
    """
    require_report_folder(folder)
    older = _tables_and_figures(folder)
    content, html = _as_json(report), html_page(report, **page)
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    files: dict[str, Callable[[Path], object]] = {
        # A lone surrogate, which UTF-8 cannot hold, becomes an escape of JSON.
        _INDEX: lambda path: path.write_text(text, encoding="utf-8", errors="backslashreplace"),
        **{f"tables/{table.name}.csv": partial(write_csv, table) for table in report.tables},
        **{f"figures/{one.name}.png": partial(draw, one.figure, format="png", dpi=200) for one in report.figures},
        **{f"figures/{one.name}.svg": partial(draw, one.figure, format="svg") for one in report.figures},
        "report.md": lambda path: path.write_text(markdown(report), encoding="utf-8"),
        "index.html": lambda path: path.write_text(html, encoding="utf-8"),
        **({} if results is None else {_RESULTS: lambda path: write_results(results, path)}),
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

    Raises:
        ValueError: If it is a file, or holds other files and no report.
    """
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the report a folder of its own")
    others = (path for path in folder.iterdir() if not is_leftover(path)) if folder.is_dir() else ()
    if any(others) and not (folder / _INDEX).is_file():
        raise ValueError(f"{folder} has files but no report ({_INDEX}): give the report a folder of its own")


def _tables_and_figures(folder: Path) -> set[Path]:
    """Find the tables and figures that the report in the folder lists."""
    try:
        listed = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return set()
    return {
        path for part in ("tables", "figures") for path in folder.glob(f"{part}/*") if f"{part}/{path.name}" in listed
    }


def _as_json(report: Report) -> dict[str, Any]:
    tables = [
        {
            "name": table.name,
            "title": table.title,
            "columns": [{"name": column.name, "better": column.better} for column in table.columns],
            "rows": [[finite(value) for value in row] for row in table.rows],
            "notes": table.notes,
        }
        for table in report.tables
    ]
    examples = [asdict(example) for example in report.examples]
    for continuation in (one for example in examples for one in example["continuations"]):
        continuation["pieces"] = [{"text": text, "recited": recited} for text, recited in continuation["pieces"]]
    return {
        "title": report.title,
        "lead": report.lead,
        "statements": report.statements,
        "tables": tables,
        "figures": [{"name": one.name, "title": one.title, "caption": one.caption} for one in report.figures],
        "examples": examples,
        "provenance": dict(report.provenance),
        "files": [f"tables/{table.name}.csv" for table in report.tables]
        + [f"figures/{one.name}.{suffix}" for one in report.figures for suffix in ("png", "svg")],
    }
