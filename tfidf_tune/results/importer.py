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
from tfidf_tune.probe.run_identity import (
    MILESTONE,
    START,
    checked_run,
    name_of_model,
    run_of,
)
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
# Infinite in a diverged model; its other scores are missing.
_NLLS = ("passage_nll", "continuation_nll", "nll_with_copy", "nll_without_copy")


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
    if task == logged.PERPLEXITY:
        return _of_block("perplexity blocks", "nll", fields)
    if task == logged.OTHER_PERPLEXITY:
        return _of_block("blocks of other text", "other_nll", fields)
    if task == logged.SUMMARIZATION:
        return _of_answer("article", fields)
    if task == logged.QA:
        return _of_answer("question", fields)
    if task == logged.MEMBERSHIP:
        return _of_passage(fields)
    if task == logged.POSITIVE_CONTROL:
        return _of_reading(fields)
    if task == logged.POSITIVE_CONTROL_NLL:
        return _of_copy_likelihood(fields)
    return _of_prompt(fields)


def _of_block(what: str, metric: str, fields: Mapping[str, Any]) -> _Document:
    block = str(fields["block"])
    count = fields["num_predictions"]
    nll = -fields["log_likelihood"] / count
    if math.isnan(nll):
        nll = math.inf
    row = (metric, "block", block, math.nan, nll, count)
    return _Document(what, block, count, [row], fields)


def _of_answer(kind: str, fields: Mapping[str, Any]) -> _Document:
    """Return the document of an article, which is summarized, or of a question."""
    scores = dict(fields)
    unit = scores.pop("id")
    scores.pop("bertscore_missing", None)
    return _Document(f"{kind}s", unit, None, _rows(kind, unit, scores), fields)


def _of_passage(fields: Mapping[str, Any]) -> _Document:
    kind = fields["kind"]
    unit = fields["passage_id"]
    scores = {}
    for name, value in fields["scores"].items():
        if name == "nll":
            name = "passage_nll"  # "nll" alone is that of perplexity blocks
        scores[name] = value
    rows = _rows(kind, unit, scores)
    for prefix, nll in fields["continuations"]:
        rows += _rows(kind, unit, {"continuation_nll": nll}, prefix)
    if fields.get("is_random"):
        rows += _rows(kind, unit, {"is_random": 1.0})
    return _Document("passages", f"{kind} {unit}", fields["token_ids"], rows, fields)


def _of_reading(fields: Mapping[str, Any]) -> _Document:
    unit = fields["passage_id"]
    path = fields["path"]
    reference_ids = fields["reference_ids"]
    end = _end_by_copy(fields)
    scores = {f"num_read_{end}": fields["num_read"], "num_to_read": len(reference_ids)}
    rows = _rows(f"{COPY} {path}", unit, scores)
    return _Document("positive controls", f"{path} {unit} {end}", reference_ids, rows, fields)


def _of_copy_likelihood(fields: Mapping[str, Any]) -> _Document:
    unit = fields["passage_id"]
    unigram_nll = fields["unigram_nll"]
    end = _end_by_copy(fields)
    scores = {f"nll_{end}": fields["nll"], "unigram_nll": unigram_nll}
    rows = _rows(f"{COPY} likelihoods", unit, scores)
    return _Document("positive controls by likelihood", f"{unit} {end}", unigram_nll, rows, fields)


def _end_by_copy(fields: Mapping[str, Any]) -> str:
    return "with_copy" if fields["has_copy"] else "without_copy"


def _of_prompt(fields: Mapping[str, Any]) -> _Document:
    sample: logged.ProbeSample = fields["sample"]
    # No match can be longer than the shorter of the two.
    longest = min(len(sample.generated_ids), len(sample.reference_ids))
    for name in ("prefix_match", "lms", "common_subsequence"):
        length = getattr(sample, name) or 0
        if length > longest:
            raise ValueError(f"{name} is {length}, expected at most {longest}")
    # Noise in the prompt and other generation are other questions.
    asked = {name: fields[name] for name in ("prompt_noise", "generation") if fields.get(name)}
    expected: Any = sample.reference_ids
    if asked:
        expected = [sample.reference_ids, asked]
    scores: dict[str, float] = {}
    if sample.attack in _BY_PREFIX:
        for name in _MATCHES:
            value = getattr(sample, name)
            if value is not None:
                scores[name] = value
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
            value = math.inf if metric in _NLLS else math.nan
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
    last_of_each = {(doc.what, doc.unit): doc for doc in documents}
    in_order = sorted(last_of_each.values(), key=lambda doc: doc.what == "prompts")
    # What was asked, and how many documents have token ids that did not survive as text.
    asked: dict[str, dict[str, Any]] = {}
    lost: Counter[str] = Counter()
    rows = []
    sizes = []
    bos_settings = (
        set()
    )  # squad and CNN/DailyMail have BOS in their prompts whatever the setting is
    bertscore_missing: dict[str, None] = {}
    text_prompts = False
    for doc in in_order:
        fields = doc.fields
        asked.setdefault(doc.what, {})[doc.unit] = doc.expected
        rows += doc.rows
        if not fields.get("round_trip", True):
            lost[doc.what] += 1
        if "vocab_size" in fields:
            sizes.append(fields["vocab_size"])
        if fields.get("bos") is not None:
            bos_settings.add(fields["bos"])
        if fields.get("prompts") == "text":
            text_prompts = True
        if fields.get("bertscore_f1", 0) is None:
            bertscore_missing[fields["bertscore_missing"] or "no reason given"] = None
    if len(bos_settings) > 1:
        raise ValueError(
            f"{checkpoint.folder} was evaluated with and without BOS: evaluate it again with one "
            "bos=..."
        )
    # What the prompts of a passage know of it.
    of_prompts = [doc.fields for doc in in_order if doc.what == "prompts"]
    samples: list[logged.ProbeSample] = []
    num_injections = {}
    with_eos = set()
    for fields in of_prompts:
        sample = fields["sample"]
        passage = (sample.kind, sample.passage_id)
        samples.append(sample)
        num_injections[passage] = fields["num_injections"]
        if fields.get("has_eos"):
            with_eos.add(passage)
    for (kind, unit), number in num_injections.items():
        rows += _rows(kind, unit, {"num_injections": number})
    for kind, unit in sorted(with_eos):
        rows += _rows(kind, unit, {"has_eos": 1.0})
    # What is known of the model.
    rate = _words_a_token(samples)
    if not math.isnan(rate):
        rows += _rows("model", "", {"words_a_token": rate})
    if sizes:
        rows += _rows("model", "", {"vocab_size": max(sizes)})
    for bos in bos_settings:
        rows += _rows("model", "", {"has_bos": float(bos)})
    completed = replace(
        checkpoint,
        asked={what: _digest(questions) for what, questions in asked.items()},
        lost_prompts=lost["prompts"],
        lost_blocks=lost["perplexity blocks"],
        text_prompts=text_prompts,
        bertscore_missing=tuple(bertscore_missing),
        samples=tuple((fields["sample"], fields["prompt_text"]) for fields in of_prompts),
    )
    return completed, rows


def _digest(questions: Mapping[str, Any]) -> str:
    """Return twelve hexadecimal digits of the SHA-256 of questions and what was expected."""
    text = json.dumps(sorted(questions.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# The harness's names of models.
_LOADED_HERE = ("tfidf-hf", "tfidf-vllm", "hf", "hf-auto", "huggingface", "vllm")
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
    labelled = [_split_label(str(folder)) for folder in folders]  # refuses any before one is read
    by_file: dict[Path, _ResultsFile] = {}
    for label, folder in labelled:
        for file, result in _results_below(folder, label):
            run_before = by_file.setdefault(file, result).run
            if run_before[0] is None:  # a label counts, in whichever folder
                by_file[file] = result
            elif result.run[0] is not None and result.run != run_before:
                raise ValueError(f"{file} is named twice, with two labels: name it once")
    by_run: dict[tuple[str | None, str], list[_ResultsFile]] = {}
    for result in by_file.values():
        by_run.setdefault(result.run, []).append(result)
    runs = _named_runs([files_of_run[0].named for files_of_run in by_run.values()])
    checkpoints: list[Checkpoint] = []
    rows: list[tuple[Any, ...]] = []
    for run, files_of_run in zip(runs, by_run.values(), strict=True):
        by_progress: dict[int, list[_ResultsFile]] = {}
        for result in files_of_run:
            by_progress.setdefault(result.named.progress, []).append(result)
        for progress in sorted(by_progress):
            completed, scores = _checkpoint_of(run, by_progress[progress])
            if completed is not None:
                rows += [(len(checkpoints), *score) for score in scores]
                checkpoints.append(completed)
    provenance = merge_provenance([files_of_run[0].provenance for files_of_run in by_run.values()])
    return Results(tuple(checkpoints), scores_table(rows), provenance)


def _named_runs(runs: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the runs, each with a model; two runs with the same names are an error.

    A run of which only the objective is known has the model of all others, if they agree.
    """
    models = {run.model for run in runs} - {""}
    shared = models.pop() if len(models) == 1 else "model"
    distinct: dict[tuple[Any, ...], Checkpoint] = {}
    for unnamed in runs:
        run = replace(unnamed, model=unnamed.model or shared)
        first = distinct.setdefault(run.run, run)
        if first is not run:
            raise ValueError(
                f"{first.folder} and {run.folder} are both {run.title}: leave one out, or label "
                "them as OBJECTIVE=FOLDER"
            )
    return list(distinct.values())


def _checkpoint_of(
    run: Checkpoint, results: Sequence[_ResultsFile]
) -> tuple[Checkpoint | None, list[_Row]]:
    """Read the documents of one checkpoint of a run; None if there are none."""
    by_date = sorted(results, key=lambda result: result.date)
    documents: list[_Document] = []
    for task, file in _newest(by_date).items():
        documents += _documents(task, file)
    if not documents:
        return None, []
    last = by_date[-1].named
    named = replace(
        run,
        progress=last.progress,
        checkpoint=last.checkpoint,
        prompt_obstacle=last.prompt_obstacle,
    )
    completed, rows = _with_scores(named, documents)
    if any(result.is_served for result in by_date):
        rows += _rows("model", "", {"is_served": 1.0})
    return completed, rows


def _newest(by_date: Sequence[_ResultsFile]) -> dict[str, Path]:
    """Return the newest samples of each task; a positive control that is older than the answers
    does not count.
    """
    newest: dict[str, Path] = {}
    for result in by_date:
        has_answers = any(_kind(task) == logged.MEMORIZATION for task in result.samples_files)
        if has_answers:
            for task in _CONTROLS:
                newest.pop(task, None)
        newest |= result.samples_files
    return newest


def _split_label(text: str) -> tuple[str | None, Path]:
    """Return label and folder; either may contain "=": "Goldfish (k=4)"."""
    # Every "=" may be the end of the label: the first reading that is a folder counts.
    readings: list[tuple[str | None, str]] = [(None, text)]
    for number, sign in enumerate(text):
        if sign == "=":
            readings.append((text[:number], text[number + 1 :]))
    for label, path in readings:
        folder = Path(path).expanduser()
        if path and folder.is_dir():
            if label == "":
                raise ValueError(
                    f"{text!r} has no label before the '=': write OBJECTIVE=FOLDER, Goldfish{text}"
                )
            return label, folder
    _, meant = readings[:2][-1]  # what follows the first "=", else the whole text
    raise FileNotFoundError(
        f"there is no folder {meant}: give a run's folder, one with lm_eval's output, or "
        "OBJECTIVE=FOLDER"
    )


def _results_below(folder: Path, label: str | None) -> Iterator[tuple[Path, _ResultsFile]]:
    files = sorted(
        file.resolve() for file in folder.rglob("*.json") if _RESULTS_FILE.fullmatch(file.name)
    )
    is_empty = True
    for file in files:
        date = file.stem.rsplit("_", maxsplit=1)[1]
        samples_files = {}
        for samples_file in sorted(file.parent.glob(f"samples_*_{date}.jsonl")):
            task = samples_file.name.removeprefix("samples_").removesuffix(f"_{date}.jsonl")
            if _kind(task) in _SCHEMAS:
                samples_files[task] = samples_file
                is_empty = False
        run, named, provenance, is_served = _identified(file, label)
        yield file, _ResultsFile(run, named, provenance, date, samples_files, is_served)
    if is_empty:
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
    evaluation = _read_evaluation(file)
    model_args = evaluation.model_args
    names_of_model = [
        model_args[key] for key in ("peft", "pretrained", "model") if key in model_args
    ]
    if not names_of_model:
        raise ValueError(
            f"{file}: its config.model_args name no model, by pretrained=... or model=..."
        )
    checkpoint = names_of_model[0]
    run = _described_run(file, evaluation, checkpoint)
    if run:
        source = run["folder"]
    else:
        source, run = _undescribed_run(file, model_args, checkpoint, label)
    if label is not None:
        model, _, objective = label.rpartition(":")
        run["model"] = model.strip() or run["model"]
        if run["objective"] == START:
            label = None  # the start of runs with different labels is one model
        else:
            run["objective"] = objective.strip()
    provenance = run.pop("provenance")
    run.pop("bos", None)  # the documents have what was given
    others = evaluation.backends - {"None", *_LOADED_HERE}
    is_served = "base_url" in model_args or bool(others)
    prompt_obstacle = None
    for metadata in evaluation.metadata:
        if prompt_obstacle is None:
            prompt_obstacle = metadata.get("prompt_obstacle")
    named = Checkpoint(**run, checkpoint=checkpoint, prompt_obstacle=prompt_obstacle)
    return (label, source), named, provenance, is_served


class _Evaluation(NamedTuple):
    """What a results file of the harness says of an evaluation."""

    model_args: dict[str, str]
    metadata: list[dict[str, Any]]  # of each task
    runs: list[Any]  # the descriptions of the run in them, None where there is none
    backends: set[str]


def _read_evaluation(file: Path) -> _Evaluation:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        config = content["config"]
        arguments = config["model_args"] or {}
        if isinstance(arguments, str):
            arguments = dict(part.split("=", maxsplit=1) for part in arguments.split(",") if part)
        model_args = {key: str(value) for key, value in arguments.items()}
        metadata = [task.get("metadata") or {} for task in content.get("configs", {}).values()]
        return _Evaluation(
            model_args=model_args,
            metadata=metadata,
            runs=[each.get("run") for each in metadata],
            backends={str(each.get("backend") or config.get("model")) for each in metadata},
        )
    except logged.UNREADABLE as error:
        raise ValueError(
            f"{file}: not a results file of lm_eval ({logged.cause_of(error)})"
        ) from error


def _described_run(file: Path, evaluation: _Evaluation, checkpoint: str) -> dict[str, Any]:
    """Return the description of the run that wrote a checkpoint, {} if there is none.

    It is what the evaluation has recorded, else what lies next to the checkpoint, or if the folder
    was moved, in the nearest folder above the results.
    """
    for recorded in evaluation.runs:
        if recorded:
            return checked_run(recorded, file)
    run = run_of(evaluation.model_args)
    if run:
        return run
    name = Path(checkpoint).name
    for folder in file.resolve().parents:
        moved = run_of({"pretrained": str(folder / name)})
        if moved:
            return moved
    return {}


def _undescribed_run(
    file: Path, model_args: Mapping[str, str], checkpoint: str, label: str | None
) -> tuple[str, dict[str, Any]]:
    """Return what a model without a description comes from, and what its names tell of it."""
    source = checkpoint
    progress = 100
    milestone = MILESTONE.fullmatch(Path(checkpoint).name)
    if milestone:
        source = str(Path(checkpoint).parent)  # the same for all milestones of a run
        progress = int(milestone[1])
    model = name_of_model(source) if label is None else ""
    if "peft" in model_args:  # several adapters share their base's name
        model = f"{name_of_model(model_args['pretrained'])} (LoRA)"
    run = {
        "model": model,
        "objective": UNKNOWN_OBJECTIVE,
        "learning_rate": None,
        "seed": None,
        "progress": progress,
        "folder": str(file.parent),
        "provenance": None,
    }
    return source, run


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
