"""The results file: JSON lines, one checkpoint a line, below a line with provenance and the units' names."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_file
from tfidf_tune.results._fields import FLAG, SEED, TEXT, TEXTS, UNREADABLE, Field, checked, integer, number, optional
from tfidf_tune.results._importer import import_results, split_label
from tfidf_tune.results._table import WRITTEN_FIELDS, Checkpoint, Results, join_results, scores_table

_FORMAT = "tfidf-tune results, version 2"
_REMEDY = "restore it, or make it again from the runs' folders by `tfidf-tune compare`"


def write_results(results: Results, file: str | Path) -> None:
    """Write results; an older file is replaced atomically.

    A checkpoint's line has the fields of :class:`Checkpoint`, its samples left out, and ``scores``: a list of
    ``[metric, kind, prefix, units, values, counts]``, ``units`` being an index into the first line's lists of unit ids
    and ``counts`` one number if all counts are equal. JSON has neither NaN nor infinity: they are null and "inf".
    """
    units: dict[tuple[str, ...], int] = {}
    lines: list[dict[str, Any]] = [
        {name: getattr(one, name) for name in WRITTEN_FIELDS} | {"scores": []} for one in results.checkpoints
    ]
    for (at, metric, kind, prefix), rows in results.scores.groupby(
        ["checkpoint", "metric", "kind", "prefix"], observed=True, dropna=False, sort=False
    ):
        index = units.setdefault(tuple(rows["unit"]), len(units))
        counts = [int(count) for count in rows["count"]]
        lines[at]["scores"].append(
            [
                *(metric, kind, None if math.isnan(prefix) else int(prefix), index, list(map(_plain, rows["value"]))),
                counts[0] if len(set(counts)) == 1 else counts,
            ]
        )
    header = {
        "format": _FORMAT,
        "checkpoints": len(lines),
        "provenance": results.provenance,
        "units": list(map(list, units)),
    }
    with (
        atomic_file(Path(file)) as temporary,
        temporary.open("w", encoding="utf-8") as stream,
    ):
        for line in (header, *lines):
            stream.write(json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str) + "\n")


def read_results(file: str | Path) -> Results:
    """Read a file of :func:`write_results`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not such a file, a line is damaged (the message names file and line), or lines are missing.
    """
    path = Path(file)
    try:
        first, *lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        header = json.loads(first)
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
        first_line = checked(header, {"checkpoints": integer(), "provenance": TEXTS})
        expected, provenance, units = *first_line.values(), header["units"]
        if not all(isinstance(name, str) for names in units for name in names):
            raise ValueError("units are not lists of names")
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a results file ({type(error).__name__}: {error}): {_REMEDY}") from error
    checkpoints: list[Checkpoint] = []
    rows: list[tuple[Any, ...]] = []
    at = 0
    try:
        for at, line in enumerate(lines):
            fields = json.loads(line)
            for scores in fields.pop("scores"):
                rows += [(at, *row) for row in _score_rows(scores, units)]
            checkpoints.append(Checkpoint(**fields | checked(fields, _CHECKPOINT)))
    except UNREADABLE as error:
        raise ValueError(
            f"{path}, line {at + 2}: a damaged line ({type(error).__name__}: {error}): {_REMEDY}"
        ) from error
    if len(checkpoints) != expected:
        raise ValueError(f"{path}: the header lists {expected} checkpoints, the file has {len(checkpoints)}: {_REMEDY}")
    return Results(tuple(checkpoints), scores_table(rows), provenance)


def require_runs(paths: Sequence[str | Path]) -> None:
    """Raise a ``FileNotFoundError`` unless all files and folders of :func:`load_results` exist; imports no pandas."""
    for path in paths:
        if not Path(path).expanduser().is_file():
            split_label(str(path))


def load_results(paths: Sequence[str | Path]) -> Results:
    """Read results files, and import the runs below folders.

    Args:
        paths (Sequence[str | Path]): files of :func:`write_results`, and what :func:`import_results` takes.

    Returns:
        Results: those of the files first.

    Raises:
        FileNotFoundError: If there is no such file or folder, or it has no results of our tasks below it.
        ValueError: If a file is damaged, or two runs in folders have the same names.
    """
    files = [path for path in paths if Path(path).expanduser().is_file()]
    folders = [path for path in paths if path not in files]
    parts = [read_results(Path(path).expanduser()) for path in files]
    return join_results([*parts, import_results(folders)] if folders else parts)


def _plain(value: float) -> float | int | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf"
    return int(value) if value.is_integer() else value


def _score_rows(scores: list[Any], units: list[list[str]]) -> list[tuple[Any, ...]]:
    fields = checked(dict(zip(_SCORES, scores, strict=True)), _SCORES)
    metric, kind, prefix, index, values, counts = fields.values()
    counts = counts if isinstance(counts, list) else [counts] * len(values)
    return [
        (metric, kind, unit, prefix, value, count)
        for unit, value, count in zip(units[index], values, counts, strict=True)
    ]


def _list_of(fits: Callable[[Any], bool], expected: str, convert: Callable[[list[Any]], Any] = list) -> Field:
    return Field(lambda values: isinstance(values, list) and all(map(fits, values)), f"a list of {expected}", convert)


_FINITE, _COUNT = number(), integer(1)
_COUNTS = _list_of(_COUNT.fits, "integers from 1")
_SCORES = {
    "metric": TEXT,
    "kind": TEXT,
    "prefix": optional(integer()),
    "units": integer(),
    "values": _list_of(
        lambda value: value in (None, "inf") or _FINITE.fits(value),
        "finite numbers, null and 'inf'",
        lambda values: [math.nan if value is None else float(value) for value in values],
    ),
    "counts": Field(
        lambda counts: _COUNT.fits(counts) or _COUNTS.fits(counts), f"{_COUNT.expected} or {_COUNTS.expected}"
    ),
}
_CHECKPOINT = {
    **dict.fromkeys(("model", "objective", "folder", "checkpoint"), TEXT),
    "recipe": optional(TEXT),
    "seed": SEED,
    "asked": TEXTS,
    **dict.fromkeys(("learning_rate", "training_seconds"), optional(number(0))),
    "progress": integer(most=100),
    **dict.fromkeys(("lost_prompts", "lost_blocks"), integer()),
    "text_prompts": FLAG,
    "bertscore_missing": _list_of(TEXT.fits, "texts", tuple),
}
