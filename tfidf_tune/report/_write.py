"""A report as files: a page, Markdown, tables as CSV, all of it as JSON, figures as PNG and SVG."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tfidf_tune._files import is_leftover, update_files
from tfidf_tune.report._document import Continuation, Report, finite
from tfidf_tune.report._figures import draw
from tfidf_tune.report._html import html_page
from tfidf_tune.report._markdown import markdown
from tfidf_tune.results import Results, write_results

_INDEX = "report.json"


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
    if results is not None:
        files["results.jsonl"] = partial(write_results, results)
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
    shown = {name: getattr(report, name) for name in ("title", "verdict", "lead", "statements")}
    return shown | {
        "tables": tables,
        "figures": [{"name": one.name, "title": one.title, "caption": one.caption} for one in report.figures],
        "examples": examples,
        "sections": list(map(vars, report.sections)),
        "footnotes": report.footnotes,
        "provenance": report.provenance,
        "files": files,
    }


def _shown(one: Continuation) -> dict[str, Any]:
    return vars(one) | {"pieces": [{"text": text, "recited": recited} for text, recited in one.pieces]}
