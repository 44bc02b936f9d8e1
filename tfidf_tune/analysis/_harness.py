"""What lm-evaluation-harness wrote, read back as runs: which files there are and what stands in them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tfidf_tune.analysis._fields import UNREADABLE, flag, number, optional, text, whole
from tfidf_tune.analysis._run_names import RunName, name_run
from tfidf_tune.analysis._runs import AnswerScore, BlockScore, Evaluation, Run, SummaryScore
from tfidf_tune.analysis._samples import ProbeSample, checked_sample

_RESULTS_FILE = re.compile(r".+_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json")
_MEMORIZATION, _PERPLEXITY, _SUMMARIZATION, _QA = (
    "tfidf_memorization",
    "tfidf_wikitext2_ppl",
    "tfidf_cnn_dailymail",
    "tfidf_squad",
)

Doc: TypeAlias = dict[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Result:
    """One results file of the harness: whose it is, and its samples files by task."""

    run: RunName
    date: str
    samples_files: dict[str, Path]


class _Probed(NamedTuple):
    """What stands in a document of the memorization task."""

    sample: ProbeSample
    prompt: str
    round_trip: bool
    num_injections: int
    as_text: bool


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read the evaluations below folders and put them together to runs.

    Files are recognised by the harness's names, ``results_<date>.json`` and ``samples_<task>_<date>.jsonl``, at any
    depth. Where a checkpoint has several results of one task, the newest counts.

    Args:
        folders (Sequence[str | Path]): a run's folder, a folder of results, one with many of either below it, or
            ``OBJECTIVE=PATH``, which names the objective of all that lies below PATH (``MODEL:OBJECTIVE=PATH``: and
            the model).

    Returns:
        list[Run]: in the order of the folders, and by path within one.

    Raises:
        FileNotFoundError: If a folder is not there, or has no results of our tasks below it.
        ValueError: If a file cannot be read (the message names file and line), or two runs have the same model,
            objective, learning rate and seed.
    """
    labelled = [_split_label(str(folder)) for folder in folders]
    results: dict[Path, _Result] = {}
    for label, folder in sorted(labelled, key=lambda item: item[0] is None):  # a name given by hand wins
        for file, result in _results_below(folder, label):
            results.setdefault(file, result)
    order = [file for _, folder in labelled for file in _results_files(folder)]
    by_run: dict[str, list[_Result]] = {}
    for file in order:
        by_run.setdefault(results[file].run.key, []).append(results[file])
    names = _with_models([same[0].run for same in by_run.values()])
    _require_distinct(names)
    return [_run(name, same) for name, same in zip(names, by_run.values(), strict=True)]


def _split_label(text: str) -> tuple[str | None, Path]:
    """Label and folder; a label may hold "=" itself, "Goldfish (k=4)", and so may a folder."""
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


def _results_files(folder: Path) -> list[Path]:
    files = (file for file in folder.rglob("*.json") if _RESULTS_FILE.fullmatch(file.name))
    return sorted(file.resolve() for file in files)


def _results_below(folder: Path, label: str | None) -> Iterator[tuple[Path, _Result]]:
    files = _results_files(folder)
    found = 0
    for file in files:
        date = file.stem.rsplit("_", maxsplit=1)[1]
        samples_files = {
            sample.name[len("samples_") : -len(f"_{date}.jsonl")]: sample
            for sample in sorted(file.parent.glob(f"samples_*_{date}.jsonl"))
        }
        found += any(map(_is_ours, samples_files))
        yield file, _Result(name_run(_config_of(file), file, label), date, samples_files)
    if not found:
        raise FileNotFoundError(
            f"no results of our tasks below {folder} (looked for results_<date>.json with samples_<task>_<date>.jsonl "
            f"beside it, the task one of {_MEMORIZATION}_*, {_PERPLEXITY}, {_SUMMARIZATION}, {_QA}; there are "
            f"{len(files)} results files): evaluate it by `tfidf-tune eval` with --log_samples and --output_path"
        )


def _is_ours(task: str) -> bool:
    return task.startswith(_MEMORIZATION) or task in (_PERPLEXITY, _SUMMARIZATION, _QA)


def _config_of(file: Path) -> dict[str, str]:
    """The model arguments of a results file, which the harness keeps as a dict or as "k=v,k=v"."""
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


def _with_models(names: Sequence[RunName]) -> list[RunName]:
    """A model named by hand alone is the one that all other runs have, if they agree."""
    known = {name.model for name in names if name.model is not None}
    model = known.pop() if len(known) == 1 else "model"
    return [name if name.model is not None else name.with_model(model) for name in names]


def _require_distinct(names: Sequence[RunName]) -> None:
    seen: dict[tuple[Any, ...], RunName] = {}
    for name in names:
        first = seen.setdefault((name.model, name.objective, name.learning_rate, name.seed), name)
        if first is not name:
            seed = "an unknown seed" if name.seed is None else f"seed {name.seed}"
            rate = "" if name.learning_rate is None else f"lr {name.learning_rate:g}, "
            raise ValueError(
                f"{first.folder} and {name.folder} are both {name.model}, {name.objective}, {rate}{seed}: leave one "
                "out, or tell them apart as OBJECTIVE=FOLDER"
            )


def _run(name: RunName, results: Sequence[_Result]) -> Run:
    by_progress: dict[int, list[_Result]] = {}
    for result in results:
        by_progress.setdefault(result.run.progress, []).append(result)
    evaluations = [_evaluation(by_progress[progress]) for progress in sorted(by_progress)]
    assert name.model is not None
    return Run(
        model=name.model,
        objective=name.objective,
        seed=name.seed,
        folder=name.folder,
        evaluations=tuple(evaluation for evaluation in evaluations if evaluation is not None),
        learning_rate=name.learning_rate,
    )


def _evaluation(results: Sequence[_Result]) -> Evaluation | None:
    """The newest documents of each task of one checkpoint; None where none is ours."""
    newest: dict[str, Path] = {}
    by_date = sorted(results, key=lambda result: result.date)
    for result in by_date:
        newest |= {task: file for task, file in result.samples_files.items() if _is_ours(task)}
    if not newest:
        return None
    probed: dict[tuple[str, int, int], _Probed] = {}
    for task, file in newest.items():
        if task.startswith(_MEMORIZATION):
            for doc in _parse(file, _probed):
                probed[doc.sample.passage_id, doc.sample.offset, doc.sample.prefix_length] = doc
    blocks = _of(newest, _PERPLEXITY, _block)
    return Evaluation(
        progress=by_date[-1].run.progress,
        checkpoint=by_date[-1].run.checkpoint,
        samples=tuple(doc.sample for doc in probed.values()),
        prompts={key: doc.prompt for key, doc in probed.items()},
        blocks=tuple(block for block, _ in blocks),
        summaries=_of(newest, _SUMMARIZATION, _summary),
        answers=_of(newest, _QA, _answer),
        num_not_round_trip=sum(not doc.round_trip for doc in probed.values()),
        num_blocks_not_round_trip=sum(not round_trip for _, round_trip in blocks),
        num_injections={doc.sample.passage_id: doc.num_injections for doc in probed.values()},
        text_prompts=any(doc.as_text for doc in probed.values()),
    )


def _of(files: dict[str, Path], task: str, read: Callable[[Doc], _T]) -> tuple[_T, ...]:
    return tuple(_parse(files[task], read)) if task in files else ()


def _parse(file: Path, read: Callable[[Doc], _T]) -> Iterable[_T]:
    number = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 (named in the message)
                yield read(json.loads(line)["doc"])
    except UNREADABLE as error:
        raise ValueError(
            f"{file}, line {number}: not a document of our tasks ({type(error).__name__}: {error}): evaluate again, or "
            "take the file away"
        ) from error


def _probed(doc: Doc) -> _Probed:
    return _Probed(
        sample=checked_sample(doc["sample"]),
        prompt=text(doc, "prompt_text"),
        round_trip=flag(doc, "round_trip"),
        num_injections=whole(doc, "num_injections"),
        as_text=doc.get("prompts") == "text",
    )


def _block(doc: Doc) -> tuple[BlockScore, bool]:
    # Not finite where the model has diverged.
    log_likelihood = number(doc, "log_likelihood", most=0, finite=False)
    score = BlockScore(whole(doc, "block"), whole(doc, "num_predictions", least=1), log_likelihood)
    return score, flag(doc, "round_trip")


def _summary(doc: Doc) -> SummaryScore:
    return SummaryScore(
        id=text(doc, "id"),
        rouge1=number(doc, "rouge1", 0, 100),
        rouge2=number(doc, "rouge2", 0, 100),
        rouge_l=number(doc, "rouge_l", 0, 100),
        bertscore_f1=optional(number, doc, "bertscore_f1"),
        bertscore_missing=optional(text, doc, "bertscore_missing"),
    )


def _answer(doc: Doc) -> AnswerScore:
    return AnswerScore(id=text(doc, "id"), exact_match=number(doc, "exact_match", 0, 100), f1=number(doc, "f1", 0, 100))
