"""Import the files that lm-evaluation-harness writes."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfidf_tune.results._documents import MEMBERSHIP, MEMORIZATION, OTHER_PERPLEXITY, PERPLEXITY, QA, SUMMARIZATION
from tfidf_tune.results._fields import UNREADABLE
from tfidf_tune.results._identity import identify, training_config, training_manifest
from tfidf_tune.results._provenance import NAMES
from tfidf_tune.results._scores import Scored, is_ours, parse_document, with_scores
from tfidf_tune.results._table import Checkpoint, Results, merge_provenance, scores_table

_RESULTS_FILE = re.compile(r".+_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json")


@dataclass(frozen=True)
class _ResultsFile:
    """One results file of the harness: label and source of its run, its checkpoint, its samples files by task."""

    run: tuple[str | None, str]
    named: Checkpoint
    date: str
    samples_files: dict[str, Path]


def import_results(folders: Sequence[str | Path]) -> Results:
    """Read the evaluations below folders.

    Files are recognized by the harness's names, ``results_<date>.json`` and ``samples_<task>_<date>.jsonl``, at any
    depth. If a checkpoint has several results of one task, the newest counts.

    Args:
        folders (Sequence[str | Path]): a run's folder, a folder of results, one with many of either below it, or
            ``OBJECTIVE=PATH``, which names the objective of all that is below PATH (``MODEL:OBJECTIVE=PATH``: and
            the model).

    Returns:
        Results: runs in the order of the folders, and by path within a folder.

    Raises:
        FileNotFoundError: If a folder does not exist, or has no results of our tasks below it.
        ValueError: If a file cannot be read (the message names file and line), or two runs have the same model,
            objective, learning rate and seed.
    """
    labelled = [split_label(str(folder)) for folder in folders]
    found: dict[Path, _ResultsFile] = {}
    for label, folder in labelled:
        for file, result in _results_below(folder, label):
            if found.setdefault(file, result).run[0] is None:  # a label counts, in whichever folder
                found[file] = result
    by_run: dict[tuple[str | None, str], list[_ResultsFile]] = {}
    for result in found.values():
        by_run.setdefault(result.run, []).append(result)
    # A run of which only the objective is known has the model of all others, if they agree.
    known = {same[0].named.model for same in by_run.values()} - {""}
    shared = known.pop() if len(known) == 1 else "model"
    runs = [replace(same[0].named, model=same[0].named.model or shared) for same in by_run.values()]
    _require_distinct(runs)
    checkpoints: list[Checkpoint] = []
    rows: list[tuple[Any, ...]] = []
    provenance = []
    for run, same in zip(runs, by_run.values(), strict=True):
        manifest = training_manifest(Path(run.folder))
        provenance.append(manifest.get("provenance", dict.fromkeys(NAMES, "unknown")))
        run = replace(
            run,
            recipe=manifest.get("settings", {}).get("recipe"),
            loss=training_config(Path(run.folder)).get("loss"),
            training_seconds=manifest.get("seconds"),
        )
        for progress in sorted({result.named.progress for result in same}):
            results = sorted((one for one in same if one.named.progress == progress), key=lambda one: one.date)
            if documents := list(_newest_documents(results)):
                named = replace(run, progress=progress, checkpoint=results[-1].named.checkpoint)
                completed, scores = with_scores(named, documents)
                rows += [(len(checkpoints), *score) for score in scores]
                checkpoints.append(completed)
    return Results(tuple(checkpoints), scores_table(rows), merge_provenance(provenance))


def split_label(text: str) -> tuple[str | None, Path]:
    """Return label and folder; either may contain "=": "Goldfish (k=4)"."""
    cuts = [position for position, letter in enumerate(text) if letter == "="]
    readings = [(None, text), *((text[:cut], text[cut + 1 :]) for cut in cuts)]
    for label, path in readings:
        folder = Path(path).expanduser()
        if path and folder.is_dir():
            if label == "":
                raise ValueError(f"{text!r} has no label before the '=': write OBJECTIVE=FOLDER, Goldfish{text}")
            return label, folder
    raise FileNotFoundError(
        f"there is no folder {readings[min(1, len(cuts))][1]}: give a run's folder, one with lm_eval's output, or "
        "OBJECTIVE=FOLDER"
    )


def _results_below(folder: Path, label: str | None) -> Iterator[tuple[Path, _ResultsFile]]:
    files = sorted(file.resolve() for file in folder.rglob("*.json") if _RESULTS_FILE.fullmatch(file.name))
    found = False
    for file in files:
        date = file.stem.rsplit("_", maxsplit=1)[1]
        samples_files = {
            sample.name[len("samples_") : -len(f"_{date}.jsonl")]: sample
            for sample in sorted(file.parent.glob(f"samples_*_{date}.jsonl"))
        }
        found |= any(map(is_ours, samples_files))
        yield file, _ResultsFile(*identify(_model_args(file), file, label), date, samples_files)
    if not found:
        raise FileNotFoundError(
            f"no results of our tasks below {folder} (looked for results_<date>.json with samples_<task>_<date>.jsonl "
            f"next to it, the task one of {MEMORIZATION}_*, {MEMBERSHIP}, {PERPLEXITY}, {OTHER_PERPLEXITY}, "
            f"{SUMMARIZATION}, {QA}; there are {len(files)} results files): evaluate it by `tfidf-tune eval` with "
            "--log_samples and --output_path"
        )


def _model_args(file: Path) -> dict[str, str]:
    """Return the model's arguments, which the harness writes as an object or as "k=v,k=v"."""
    try:
        arguments = json.loads(file.read_text(encoding="utf-8"))["config"]["model_args"]
        if isinstance(arguments, str):
            arguments = dict(part.split("=", maxsplit=1) for part in arguments.split(",") if part)
        return {key: str(value) for key, value in (arguments or {}).items()}
    except UNREADABLE as error:
        raise ValueError(
            f"{file}: not a results file of lm_eval ({type(error).__name__}: {error}): move it out of the folder, or "
            "evaluate again"
        ) from error


def _require_distinct(runs: Sequence[Checkpoint]) -> None:
    seen: dict[tuple[Any, ...], Checkpoint] = {}
    for run in runs:
        first = seen.setdefault(run.run, run)
        if first is not run:
            raise ValueError(
                f"{first.folder} and {run.folder} are both {run.title}: leave one out, or label them as "
                "OBJECTIVE=FOLDER"
            )


def _newest_documents(results: Sequence[_ResultsFile]) -> Iterator[Scored]:
    """Read the newest documents of each task of one checkpoint, of results by ascending date."""
    newest = {task: file for one in results for task, file in one.samples_files.items() if is_ours(task)}
    for task, file in newest.items():
        number = 0
        try:
            with file.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):  # noqa: B007 (for the message)
                    yield parse_document(task, json.loads(line)["doc"])
        except UNREADABLE as error:
            raise ValueError(
                f"{file}, line {number}: not a document of our tasks ({type(error).__name__}: {error}): evaluate "
                "again, or remove the file"
            ) from error
