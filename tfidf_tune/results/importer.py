"""Import the files that lm-evaluation-harness writes: their documents as scores, and the runs they
belong to.
"""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from pydantic import TypeAdapter

from tfidf_tune.probe import sample_fields as logged
from tfidf_tune.probe.run_identity import MILESTONE, START, checked_run, run_of
from tfidf_tune.results.table import (
    LONGEST_WORD,
    UNKNOWN_OBJECTIVE,
    Checkpoint,
    Results,
    merge_provenance,
    scores_table,
)

_Row: TypeAlias = tuple[str, str, str, float, float, float]
"""metric, kind, unit, prefix, value, count."""

_SCHEMAS: dict[str, TypeAdapter[Any]] = {
    logged.MEMORIZATION: TypeAdapter(logged.PromptDocument),
    logged.PERPLEXITY: TypeAdapter(logged.BlockDocument),
    logged.OTHER_PERPLEXITY: TypeAdapter(logged.BlockDocument),
    logged.MEMBERSHIP: TypeAdapter(logged.PassageDocument),
    logged.SUMMARIZATION: TypeAdapter(logged.SummaryDocument),
    logged.QA: TypeAdapter(logged.AnswerDocument),
    logged.POSITIVE_CONTROL: TypeAdapter(logged.ReadingDocument),
    logged.POSITIVE_CONTROL_NLL: TypeAdapter(logged.CopyLikelihoodDocument),
}
_MATCHES = ("lms", "prefix_match", "rouge_l", "verbatim", "edit_distance", "common_subsequence")
_CONTROLS = (logged.POSITIVE_CONTROL, logged.POSITIVE_CONTROL_NLL)
COPY = "copy"
"""Beginning of the kind of units of the positive control, which no average is over."""
_BY_PREFIX = ("", "greedy")  # attacks whose scores are averaged by the length of the prompt


class _Document(NamedTuple):
    """A document of a task: what was asked and expected, its scores, and the fields that the task
    logged.
    """

    # "prompts", "passages", "perplexity blocks", "blocks of other text", "articles", "questions".
    what: str
    unit: str
    expected: Any
    rows: list[_Row]
    fields: Mapping[str, Any]


def _kind(task: str) -> str:
    """Return the key of a task's schema; there is none for a task that is not ours."""
    return logged.MEMORIZATION if task.startswith(logged.MEMORIZATION) else task


def _parse(task: str, doc: Any) -> _Document:
    """Check a document and return what the table of results has of it; a wrong one raises one of
    ``UNREADABLE``.
    """
    fields = _SCHEMAS[_kind(task)].validate_python(doc)
    if task in (logged.PERPLEXITY, logged.OTHER_PERPLEXITY):
        is_other = task == logged.OTHER_PERPLEXITY
        metric, what = (
            ("other_nll", "blocks of other text") if is_other else ("nll", "perplexity blocks")
        )
        block = str(fields["block"])
        count = fields["num_predictions"]
        nll = -fields["log_likelihood"] / count
        row = (metric, "block", block, math.nan, math.inf if math.isnan(nll) else nll, count)
        return _Document(what, block, count, [row], fields)
    if task in (logged.SUMMARIZATION, logged.QA):
        kind = "article" if task == logged.SUMMARIZATION else "question"
        scores = {
            name: value for name, value in fields.items() if name not in ("id", "bertscore_missing")
        }
        return _Document(f"{kind}s", fields["id"], None, _rows(kind, fields["id"], scores), fields)
    if task == logged.MEMBERSHIP:
        kind = fields["kind"]
        unit = fields["passage_id"]
        # "nll" alone is the metric of perplexity blocks.
        scores = {}
        for name, value in fields["scores"].items():
            scores["passage_nll" if name == "nll" else name] = value
        rows = _rows(kind, unit, scores)
        for prefix, nll in fields["continuations"]:
            rows += _rows(kind, unit, {"continuation_nll": nll}, prefix)
        return _Document("passages", f"{kind} {unit}", fields["token_ids"], rows, fields)
    if task == logged.POSITIVE_CONTROL:
        unit = fields["passage_id"]
        end = "with_copy" if fields["has_copy"] else "without_copy"
        scores = {
            f"num_read_{end}": fields["num_read"],
            "num_to_read": len(fields["reference_ids"]),
        }
        rows = _rows(f"{COPY} {fields['path']}", unit, scores)
        return _Document(
            "positive controls",
            f"{fields['path']} {unit} {end}",
            fields["reference_ids"],
            rows,
            fields,
        )
    if task == logged.POSITIVE_CONTROL_NLL:
        unit = fields["passage_id"]
        end = "with_copy" if fields["has_copy"] else "without_copy"
        scores = {f"nll_{end}": fields["nll"], "unigram_nll": fields["unigram_nll"]}
        rows = _rows(f"{COPY} likelihoods", unit, scores)
        return _Document(
            "positive controls by likelihood", f"{unit} {end}", fields["unigram_nll"], rows, fields
        )
    sample: logged.ProbeSample = fields["sample"]
    # No match can be longer than the shorter of the two.
    longest = min(len(sample.generated_ids), len(sample.reference_ids))
    for name in ("prefix_match", "lms", "common_subsequence"):
        if (getattr(sample, name) or 0) > longest:
            raise ValueError(f"{name} is {getattr(sample, name)}, expected at most {longest}")
    asked = {name: fields[name] for name in ("prompt_noise", "generation") if fields.get(name)}
    expected = [sample.reference_ids, asked] if asked else sample.reference_ids
    names = _MATCHES if sample.attack in _BY_PREFIX else ()
    scores = {name: getattr(sample, name) for name in names if getattr(sample, name) is not None}
    scores["num_compared"] = len(sample.reference_ids)
    rows = _rows(sample.kind, sample.passage_id, scores, sample.prefix_length)
    return _Document("prompts", sample.prompt_label, expected, rows, fields)


def _rows(
    kind: str, unit: str, values: Mapping[str, float | None], prefix: float = math.nan
) -> list[_Row]:
    """Make rows of scores; of a diverged model the NLLs are infinite, and other scores missing."""
    rows = []
    for metric, value in values.items():
        if value is None or not math.isfinite(value):
            is_nll = metric in (
                "passage_nll",
                "continuation_nll",
                "nll_with_copy",
                "nll_without_copy",
            )
            value = math.inf if is_nll else math.nan
        rows.append((metric, kind, unit, prefix, float(value), 1.0))
    return rows


def _words_a_token(samples: Iterable[logged.ProbeSample]) -> float:
    """Return how many words a token of the passages has on average; NaN for text without spaces
    between words.
    """
    num_characters = 0
    num_words = 0
    num_tokens = 0
    for sample in samples:
        num_characters += len(sample.reference_text)
        num_words += len(sample.reference_text.split())
        num_tokens += len(sample.reference_ids)
    if num_tokens == 0 or num_characters > LONGEST_WORD * num_words:
        return math.nan
    return num_words / num_tokens


def _with_scores(
    checkpoint: Checkpoint, documents: Iterable[_Document]
) -> tuple[Checkpoint, list[_Row]]:
    """Complete a checkpoint, and return its scores; a prompt that several tasks have counts once,
    as in the last.
    """
    in_order = sorted(
        {(doc.what, doc.unit): doc for doc in documents}.values(),
        key=lambda doc: doc.what == "prompts",
    )
    asked: dict[str, dict[str, Any]] = {}
    lost: Counter[str] = Counter()  # documents whose token ids did not survive as text
    for doc in in_order:
        asked.setdefault(doc.what, {})[doc.unit] = doc.expected
        lost[doc.what] += not doc.fields.get("round_trip", True)
    of_prompts = [(doc.fields["sample"], doc.fields) for doc in in_order if doc.what == "prompts"]
    injections = {
        (sample.kind, sample.passage_id): fields["num_injections"] for sample, fields in of_prompts
    }
    rows: list[_Row] = []
    for doc in in_order:
        rows += doc.rows
    for (kind, passage_id), number in injections.items():
        rows += _rows(kind, passage_id, {"num_injections": number})
    with_eos = {
        (sample.kind, sample.passage_id) for sample, fields in of_prompts if fields.get("has_eos")
    }
    for kind, passage_id in sorted(with_eos):
        rows += _rows(kind, passage_id, {"has_eos": 1.0})
    rate = _words_a_token(sample for sample, _ in of_prompts)
    if not math.isnan(rate):
        rows += _rows("model", "", {"words_a_token": rate})
    sizes = [doc.fields["vocab_size"] for doc in in_order if "vocab_size" in doc.fields]
    if sizes:
        rows += _rows("model", "", {"vocab_size": max(sizes)})
    # Squad and CNN/DailyMail have BOS in their prompts whatever the setting is.
    given = {doc.fields["bos"] for doc in in_order if doc.fields.get("bos") is not None}
    if len(given) > 1:
        raise ValueError(
            f"{checkpoint.folder} was evaluated with and without BOS: evaluate it again with one "
            "bos=..."
        )
    rows += _rows("model", "", {"has_bos": float(given.pop())} if given else {})
    unscored = (doc.fields for doc in in_order if doc.fields.get("bertscore_f1", 0) is None)
    completed = replace(
        checkpoint,
        asked={
            what: hashlib.sha256(json.dumps(sorted(questions.items())).encode()).hexdigest()[:12]
            for what, questions in asked.items()
        },
        lost_prompts=lost["prompts"],
        lost_blocks=lost["perplexity blocks"],
        text_prompts=any(doc.fields.get("prompts") == "text" for doc in in_order),
        bertscore_missing=tuple(
            dict.fromkeys(one["bertscore_missing"] or "no reason given" for one in unscored)
        ),
        samples=tuple((sample, fields["prompt_text"]) for sample, fields in of_prompts),
    )
    return completed, rows


# The harness's names of models.
_LOADED_HERE = (
    "tfidf-hf",
    "tfidf-vllm",
    "hf",
    "hf-auto",
    "huggingface",
    "vllm",
)
_RESULTS_FILE = re.compile(r".+_(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d(?:\.\d+)?)\.json")


class _ResultsFile(NamedTuple):
    """One results file of the harness; ``run``, a label and what it is of, is the same for all
    files of a run.
    """

    run: tuple[str | None, str]
    named: Checkpoint
    provenance: dict[str, str] | None
    date: str
    samples_files: dict[str, Path]
    is_served: bool


def import_results(folders: Sequence[str | Path]) -> Results:
    """Read the evaluations below folders.

    Files are recognized by the harness's names, ``results_<date>.json`` and
    ``samples_<task>_<date>.jsonl``, at any depth. If a checkpoint has several results of one task,
    the newest counts.

    Args:
        folders (Sequence[str | Path]): a run's folder, a folder of results, one with many of either
            below it, or ``OBJECTIVE=PATH``, which names the objective of all that is below PATH
            (``MODEL:OBJECTIVE=PATH``: and the model).

    Returns:
        Results: runs in the order of the folders, and by path within a folder.

    Raises:
        FileNotFoundError: If a folder does not exist, or has no results of our tasks below it.
        ValueError: If a file cannot be read (the message names file and line), or two runs have the
            same model, objective, learning rate and seed.
    """
    found: dict[Path, _ResultsFile] = {}
    for label, folder in [
        _split_label(str(folder)) for folder in folders
    ]:  # refuses any before one is read
        for file, result in _results_below(folder, label):
            named_before = found.setdefault(file, result).run
            if named_before[0] is None:  # a label counts, in whichever folder
                found[file] = result
            elif result.run[0] is not None and result.run != named_before:
                raise ValueError(f"{file} is named twice, with two labels: name it once")
    by_run: dict[tuple[str | None, str], list[_ResultsFile]] = {}
    for result in found.values():
        by_run.setdefault(result.run, []).append(result)
    # A run of which only the objective is known has the model of all others, if they agree.
    known = {same[0].named.model for same in by_run.values()} - {""}
    shared = known.pop() if len(known) == 1 else "model"
    runs = [replace(same[0].named, model=same[0].named.model or shared) for same in by_run.values()]
    distinct: dict[tuple[Any, ...], Checkpoint] = {}
    for run in runs:
        first = distinct.setdefault(run.run, run)
        if first is not run:
            raise ValueError(
                f"{first.folder} and {run.folder} are both {run.title}: leave one out, or label "
                "them as OBJECTIVE=FOLDER"
            )
    checkpoints: list[Checkpoint] = []
    rows: list[tuple[Any, ...]] = []
    for run, same in zip(runs, by_run.values(), strict=True):
        for progress in sorted({result.named.progress for result in same}):
            by_date = sorted(
                (one for one in same if one.named.progress == progress), key=lambda one: one.date
            )
            newest = _newest(by_date)
            documents: list[_Document] = []
            for task, file in newest.items():
                documents += _documents(task, file)
            if documents:
                last = by_date[-1].named
                named = replace(
                    run,
                    progress=progress,
                    checkpoint=last.checkpoint,
                    prompt_obstacle=last.prompt_obstacle,
                )
                completed, scores = _with_scores(named, documents)
                if any(one.is_served for one in by_date):
                    scores += _rows("model", "", {"is_served": 1.0})
                rows += [(len(checkpoints), *score) for score in scores]
                checkpoints.append(completed)
    provenance = merge_provenance([same[0].provenance for same in by_run.values()])
    return Results(tuple(checkpoints), scores_table(rows), provenance)


def _newest(by_date: Sequence[_ResultsFile]) -> dict[str, Path]:
    """Return the newest samples of each task; a positive control that is older than the answers
    does not count.
    """
    newest: dict[str, Path] = {}
    for result in by_date:
        if any(_kind(task) == logged.MEMORIZATION for task in result.samples_files):
            newest = {task: file for task, file in newest.items() if _kind(task) not in _CONTROLS}
        newest |= result.samples_files
    return newest


def _split_label(text: str) -> tuple[str | None, Path]:
    """Return label and folder; either may contain "=": "Goldfish (k=4)"."""
    readings = [
        (None, text),
        *((text[:at], text[at + 1 :]) for at, sign in enumerate(text) if sign == "="),
    ]
    for label, path in readings:
        folder = Path(path).expanduser()
        if path and folder.is_dir():
            if label == "":
                raise ValueError(
                    f"{text!r} has no label before the '=': write OBJECTIVE=FOLDER, Goldfish{text}"
                )
            return label, folder
    raise FileNotFoundError(
        f"there is no folder {readings[:2][-1][1]}: give a run's folder, one with lm_eval's "
        "output, or OBJECTIVE=FOLDER"
    )


def _results_below(folder: Path, label: str | None) -> Iterator[tuple[Path, _ResultsFile]]:
    files = sorted(
        file.resolve() for file in folder.rglob("*.json") if _RESULTS_FILE.fullmatch(file.name)
    )
    found = False
    for file in files:
        date = file.stem.rsplit("_", maxsplit=1)[1]
        samples = {
            sample.name.removeprefix("samples_").removesuffix(f"_{date}.jsonl"): sample
            for sample in sorted(file.parent.glob(f"samples_*_{date}.jsonl"))
        }
        samples = {task: sample for task, sample in samples.items() if _kind(task) in _SCHEMAS}
        found |= bool(samples)
        run, named, provenance, is_served = _identified(file, label)
        yield file, _ResultsFile(run, named, provenance, date, samples, is_served)
    if not found:
        raise FileNotFoundError(
            f"no results of our tasks below {folder} ({len(files)} results files): evaluate by "
            "`tfidf-tune eval` with --log_samples and --output_path"
        )


def _identified(
    file: Path, label: str | None
) -> tuple[tuple[str | None, str], Checkpoint, dict[str, str] | None, bool]:
    """Return what all files of a run share, the names of the checkpoint, the run's provenance, and
    if it was served.

    The model's name is empty if only the objective is known.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        arguments = content["config"]["model_args"] or {}
        if isinstance(arguments, str):
            arguments = dict(part.split("=", maxsplit=1) for part in arguments.split(",") if part)
        model_args = {key: str(value) for key, value in arguments.items()}
        settings = [task.get("metadata") or {} for task in content.get("configs", {}).values()]
        recorded = [each.get("run") for each in settings]
        backends = {str(each.get("backend") or content["config"].get("model")) for each in settings}
    except logged.UNREADABLE as error:
        raise ValueError(
            f"{file}: not a results file of lm_eval ({logged.cause_of(error)})"
        ) from error
    checkpoint = next(
        (model_args[key] for key in ("peft", "pretrained", "model") if key in model_args), None
    )
    if checkpoint is None:
        raise ValueError(
            f"{file}: its config.model_args name no model, by pretrained=... or model=..."
        )
    # The run is what the evaluation has recorded, else what lies next to the checkpoint, or if the
    # folder was moved, in the nearest folder above the results.
    run = next((checked_run(one, file) for one in recorded if one), None) or run_of(model_args)
    moved = (
        run_of({"pretrained": str(folder / Path(checkpoint).name)})
        for folder in file.resolve().parents
    )
    run = run or next(filter(None, moved), {})
    if run:
        source = run["folder"]
    else:
        milestone = MILESTONE.fullmatch(Path(checkpoint).name)
        # The same for all milestones of a run.
        source = str(Path(checkpoint).parent) if milestone else checkpoint
        model = Path(source).name if label is None else ""
        if "peft" in model_args:  # several adapters share their base's name
            model = f"{Path(model_args['pretrained']).name} (LoRA)"
        run = {"model": model, "objective": UNKNOWN_OBJECTIVE, "learning_rate": None, "seed": None}
        run |= {
            "progress": int(milestone[1]) if milestone else 100,
            "folder": str(file.parent),
            "provenance": None,
        }
    if label is not None:
        model, _, objective = label.rpartition(":")
        run["model"] = model.strip() or run["model"]
        if run["objective"] == START:
            label = None  # the start of runs with different labels is one model
        else:
            run["objective"] = objective.strip()
    provenance = run.pop("provenance")
    run.pop("bos", None)  # the documents have what was given
    is_served = "base_url" in model_args or any(
        backend not in _LOADED_HERE for backend in backends - {"None"}
    )
    obstacles = [
        each["prompt_obstacle"] for each in settings if each.get("prompt_obstacle") is not None
    ]
    named = Checkpoint(
        **run, checkpoint=checkpoint, prompt_obstacle=obstacles[0] if obstacles else None
    )
    return (label, source), named, provenance, is_served


def _documents(task: str, file: Path) -> Iterator[_Document]:
    number = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):  # noqa: B007 (for the message)
                yield _parse(task, json.loads(line)["doc"])
    except logged.UNREADABLE as error:
        cause = logged.cause_of(error)
        raise ValueError(
            f"{file}, line {number}: not a document of our tasks ({cause}): evaluate again"
        ) from error
