"""The results file: JSON lines, one checkpoint a line, below a line with provenance and the units'
names.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from tfidf_tune._files import atomic_file
from tfidf_tune.probe.sample_fields import UNREADABLE, Count, Finite, Text, cause_of
from tfidf_tune.results.importer import import_results
from tfidf_tune.results.table import Checkpoint, Results, merge_provenance, scores_table

_FORMAT = "tfidf-tune results, version 2"
_FIELDS = [each.name for each in fields(Checkpoint) if each.name != "samples"]
_SINCE_0_3 = ("prompt_obstacle", "num_sequences")  # older files do not have it
_REMEDY = "restore it, or make it again from the runs' folders by `tfidf-tune compare`"


def write_results(results: Results, file: str | Path) -> None:
    """Write results; an older file is replaced atomically.

    A checkpoint's line has the fields of :class:`Checkpoint`, its samples left out, and ``scores``:
    a list of ``[metric, kind, prefix, units, values, counts]``, ``units`` being an index into the
    first line's lists of unit ids and ``counts`` one number if all counts are equal. JSON has
    neither NaN nor infinity: they are null and "inf".
    """
    units: dict[tuple[str, ...], int] = {}
    lines: list[Any] = []
    for checkpoint in results.checkpoints:
        line: dict[str, Any] = {name: getattr(checkpoint, name) for name in _FIELDS}
        line["scores"] = []
        lines.append(line)
    keys = ["checkpoint", "metric", "kind", "prefix"]
    groups = results.scores.groupby(keys, observed=True, dropna=False, sort=False)
    for (number, metric, kind, prefix), rows in groups:
        index = units.setdefault(tuple(rows["unit"]), len(units))
        length = None if math.isnan(prefix) else int(prefix)
        values = [_plain(value) for value in rows["value"]]
        counts = [int(count) for count in rows["count"]]
        written_counts = counts[0] if len(set(counts)) == 1 else counts
        lines[number]["scores"].append([metric, kind, length, index, values, written_counts])
    header = {
        "format": _FORMAT,
        "checkpoints": len(lines),
        "provenance": results.provenance,
        "units": list(units),
    }
    with atomic_file(Path(file)) as temporary, temporary.open("w", encoding="utf-8") as stream:
        for line in (header, *lines):
            text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str)
            stream.write(f"{text}\n")


def read_results(file: str | Path) -> Results:
    """Read a file of :func:`write_results`.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not such a file, a line is damaged (the message names file and line),
            or lines are missing.
    """
    path = Path(file)
    try:
        first, *lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
        header = json.loads(first)
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
        header = _HEADER.validate_python(header)
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a results file ({cause_of(error)}): {_REMEDY}") from error
    checkpoints: list[Checkpoint] = []
    rows: list[tuple[Any, ...]] = []
    number = 0
    try:
        for number, line in enumerate(lines):
            values = json.loads(line)
            for scores in values.pop("scores"):
                metric, kind, prefix, index, numbers, counts = _SCORES.validate_python(scores)
                units = header["units"][index]
                if not isinstance(counts, list):
                    counts = [counts] * len(numbers)
                for unit, value, count in zip(units, numbers, counts, strict=True):
                    score = math.nan if value is None else float(value)
                    rows.append((number, metric, kind, unit, prefix, score, count))
            missing = [name for name in _FIELDS if name not in values and name not in _SINCE_0_3]
            if missing:
                raise ValueError(f"without {missing}")
            checkpoints.append(_CHECKPOINT.validate_python(values))
    except UNREADABLE as error:
        raise ValueError(
            f"{path}, line {number + 2}: a damaged line ({cause_of(error)}): {_REMEDY}"
        ) from error
    num_expected = header["checkpoints"]
    if len(checkpoints) != num_expected:
        raise ValueError(
            f"{path}: the header lists {num_expected} checkpoints, the file has "
            f"{len(checkpoints)}: {_REMEDY}"
        )
    return Results(tuple(checkpoints), scores_table(rows), header["provenance"])


def load_results(paths: Sequence[str | Path]) -> Results:
    """Read results files, and import the runs below folders.

    Args:
        paths (Sequence[str | Path]): files of :func:`write_results`, and what
            :func:`import_results` takes.

    Returns:
        Results: those of the files first.

    Raises:
        FileNotFoundError: If there is no such file or folder, or it has no results of our tasks
            below it.
        ValueError: If a file is damaged, or two runs in folders have the same names.
    """
    files = [path for path in paths if Path(path).expanduser().is_file()]
    folders = [path for path in paths if path not in files]
    parts = [read_results(Path(path).expanduser()) for path in files]
    if folders:
        parts.append(import_results(folders))
    tables: list[pd.DataFrame] = []
    checkpoints: tuple[Checkpoint, ...] = ()
    for part in parts:
        # Checkpoints are numbered through all parts.
        numbers = part.scores["checkpoint"] + len(checkpoints)
        tables.append(part.scores.assign(checkpoint=numbers))
        checkpoints += part.checkpoints
    scores = pd.concat(tables, ignore_index=True)
    provenance = merge_provenance([part.provenance for part in parts])
    return Results(checkpoints, scores_table(scores), provenance)


def _plain(value: float) -> float | int | str | None:
    if math.isnan(value):
        return None
    if math.isinf(value):
        return "inf"
    return int(value) if value.is_integer() else value


class _Header(TypedDict):
    format: str
    checkpoints: Count
    provenance: dict[str, Text]
    units: list[list[Text]]


_HEADER = TypeAdapter(_Header)
_CHECKPOINT = TypeAdapter(Checkpoint)
_SCORE = Finite | Literal["inf"] | None
_PREDICTIONS = Annotated[Count, Field(ge=1)]
_SCORES = TypeAdapter(
    tuple[Text, Text, Count | None, Count, list[_SCORE], _PREDICTIONS | list[_PREDICTIONS]]
)
