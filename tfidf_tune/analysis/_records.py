"""Checkpoints of runs in a line each: what of an evaluation is needed, small enough to be kept beside documents."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tfidf_tune._files import atomic_file
from tfidf_tune.analysis._comparability import asked_digest, require_comparable
from tfidf_tune.analysis._fields import UNREADABLE, number, optional, seed, text, texts, whole
from tfidf_tune.analysis._harness import read_runs
from tfidf_tune.analysis._measures import LMS, PERPLEXITY
from tfidf_tune.analysis._provenance import describe_machine, merge_provenance
from tfidf_tune.analysis._run_names import training_config
from tfidf_tune.analysis._runs import Evaluation, Run
from tfidf_tune.analysis._summary import summarize

_FORMAT = "tfidf-tune runs, version 1"
# Of a passage's LMS, the mean over a few prefix lengths: two decimals keep 700 runs over 100 passages below 1.5 MB.
_DECIMALS = 2
_REMEDY = "restore it, or make it again from the runs' folders by `tfidf-tune compare --frontier`"

# Fields that hold a number or None, and the largest that it may be.
_NUMBERS = {
    "learning_rate": math.inf,
    "training_seconds": math.inf,
    "lms": math.inf,
    "prefix_match": math.inf,
    "rouge_l": 100,
    "verbatim_rate": 1,
    "control_lms": math.inf,
    "log_perplexity": math.inf,
}

_Line: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """One run at one checkpoint.

    Args:
        model (str): what was trained.
        objective (str): "CE", "TF-IDF", ...
        learning_rate (float | None): None where its experiment names none.
        seed (int | None): None where it is not known.
        progress (int): of the checkpoint, in percent.
        recipe (str | None): "full_finetune" or "lora_finetune"; None where it is not known.
        loss (dict[str, Any] | None): section ``loss`` of the resolved training config; None where it is not known.
        training_seconds (float | None): how long the training took; None where it is not known.
        asked (str): digest of prompts, references and blocks: only records of one digest can be compared.
        lms (float | None): average LMS over targets and prefix lengths; None, as all up to ``lms_by_passage``, where
            no target was probed.
        max_lms (int | None): the largest.
        prefix_match (float | None): average longest prefix match.
        rouge_l (float | None): average ROUGE-L × 100.
        verbatim_rate (float | None): share of the continuations that are the passage's whole rest.
        lms_by_prefix (dict[int, float]): prefix length -> average LMS.
        lms_by_passage (dict[str, float]): target -> average LMS over prefix lengths, to two decimals.
        control_lms (float | None): average LMS of the controls; None where there are none.
        log_perplexity (float | None): mean negative log-likelihood of a held-out token, infinite where the model
            diverged; None where it was not measured.
        num_predictions (int): held-out tokens that were predicted.
        num_injections (tuple[int, ...]): how often the targets stood in the training text: the different numbers.
    """

    model: str
    objective: str
    learning_rate: float | None
    seed: int | None
    progress: int
    recipe: str | None
    loss: dict[str, Any] | None
    training_seconds: float | None
    asked: str
    lms: float | None
    max_lms: int | None
    prefix_match: float | None
    rouge_l: float | None
    verbatim_rate: float | None
    lms_by_prefix: dict[int, float]
    lms_by_passage: dict[str, float]
    control_lms: float | None
    log_perplexity: float | None
    num_predictions: int
    num_injections: tuple[int, ...]

    @property
    def run(self) -> tuple[str, str, float | None, int | None]:
        """Of which run it is a checkpoint: model, objective, learning rate, seed."""
        return self.model, self.objective, self.learning_rate, self.seed

    @property
    def title(self) -> str:
        """Which run it is: "Tiny, TF-IDF, lr 0.001, seed 0"."""
        rate = [] if self.learning_rate is None else [f"lr {self.learning_rate:g}"]
        return ", ".join(
            [self.model, self.objective, *rate, "seed unknown" if self.seed is None else f"seed {self.seed}"]
        )


def records_of(runs: Sequence[Run]) -> list[RunRecord]:
    """Take of each run what its checkpoints scored.

    Args:
        runs (Sequence[Run]): of any models, objectives, learning rates and seeds.

    Returns:
        list[RunRecord]: in their order, of each run by ascending progress.

    Raises:
        ValueError: If runs of a model were not asked the same, or a run's ``config.yaml`` or ``trained.json`` cannot
            be read.
    """
    require_comparable(runs)
    return [_record(run, evaluation) for run in runs for evaluation in run.evaluations]


def provenance_of(runs: Sequence[Run]) -> dict[str, str]:
    """Say when and with what runs were trained, as their ``trained.json`` have it.

    Args:
        runs (Sequence[Run]): of an experiment, or evaluated by hand.

    Returns:
        dict[str, str]: as :func:`describe_machine`, with the different values of each name; "unknown" among them where
            a run does not say.

    Raises:
        ValueError: If a ``trained.json`` cannot be read.
    """
    unknown = dict.fromkeys(describe_machine(), "unknown")
    return merge_provenance([_training_manifest(Path(run.folder)).get("provenance", unknown) for run in runs])


def write_records(records: Sequence[RunRecord], file: str | Path, provenance: Mapping[str, str]) -> None:
    """Write records in JSON, one a line, below a line with the provenance; the file appears whole or not at all.

    The names of the passages stand once, in the first line.

    Args:
        records (Sequence[RunRecord]): what to write, in this order.
        file (str | Path): the ``.jsonl`` file; an older one is replaced.
        provenance (Mapping[str, str]): when and with what the runs were made, see :func:`provenance_of`.
    """
    passages = list(dict.fromkeys(tuple(record.lms_by_passage) for record in records))
    header = {"format": _FORMAT, "runs": len(records), "provenance": dict(provenance), "passages": passages}
    with (
        atomic_file(Path(file)) as temporary,
        temporary.open(
            "w",
            encoding="utf-8",
            errors="backslashreplace",  # half a surrogate pair becomes JSON's own escape
        ) as stream,
    ):
        for line in (header, *(_as_line(record, passages) for record in records)):
            stream.write(json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=str) + "\n")


def read_records(file: str | Path) -> tuple[list[RunRecord], dict[str, str]]:
    """Read what :func:`write_records` wrote.

    Args:
        file (str | Path): the ``.jsonl`` file.

    Returns:
        tuple[list[RunRecord], dict[str, str]]: the records in the file's order, and the provenance.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is not such a file, a line is damaged (the message names file and line), or lines are missing.
    """
    path = Path(file)
    try:
        first, *rest = path.read_text(encoding="utf-8").split("\n")
        header = json.loads(first)
        if header["format"] != _FORMAT:
            raise ValueError(f"its format is {header['format']!r}, not {_FORMAT!r}")
        num_runs, provenance, passages = whole(header, "runs"), texts(header, "provenance"), header["passages"]
        if not all(isinstance(name, str) for names in passages for name in names):
            raise ValueError("passages are not lists of names")
    except UNREADABLE as error:
        raise ValueError(f"{path}: not a file of records ({type(error).__name__}: {error}): {_REMEDY}") from error
    lines = rest[:-1] if rest and not rest[-1] else rest
    records = [_parse(line, passages, f"{path}, line {at}") for at, line in enumerate(lines, start=2)]
    if len(records) != num_runs:
        raise ValueError(f"{path}: its first line promises {num_runs} runs, and there are {len(records)}: {_REMEDY}")
    return records, provenance


def load_records(paths: Sequence[str | Path]) -> tuple[list[RunRecord], dict[str, str]]:
    """Read records from files of them, and make them of the runs below folders.

    Args:
        paths (Sequence[str | Path]): a file of :func:`write_records`, or what :func:`read_runs` takes.

    Returns:
        tuple[list[RunRecord], dict[str, str]]: those of the files first, and the provenance, see
            :func:`provenance_of`.

    Raises:
        FileNotFoundError: If there is no such file or folder, or it has no results of our tasks below it.
        ValueError: If a file is damaged, two runs have the same names, or runs of a model were not asked the same.
    """
    files = [path for path in paths if Path(path).expanduser().is_file()]
    folders = [path for path in paths if path not in files]
    read = [read_records(Path(path).expanduser()) for path in files]
    if folders:
        runs = read_runs(folders)
        read.append((records_of(runs), provenance_of(runs)))
    return [record for records, _ in read for record in records], merge_provenance([one for _, one in read])


def _record(run: Run, evaluation: Evaluation) -> RunRecord:
    folder = Path(run.folder)
    manifest = _training_manifest(folder)
    by_kind = summarize(evaluation.samples)
    targets, controls = by_kind.get("target"), by_kind.get("control")
    by_passage = _lms_by_passage(evaluation)
    log_perplexity, num_predictions = _log_perplexity(evaluation)
    times = {evaluation.num_injections[passage] for passage in by_passage if passage in evaluation.num_injections}
    return RunRecord(
        model=run.model,
        objective=run.objective,
        learning_rate=run.learning_rate,
        seed=run.seed,
        progress=evaluation.progress,
        recipe=manifest.get("settings", {}).get("recipe"),
        loss=training_config(folder).get("loss"),
        training_seconds=manifest.get("seconds"),
        asked=asked_digest(evaluation),
        lms=None if targets is None else targets.avg_lms,
        max_lms=None if targets is None else targets.max_lms,
        prefix_match=None if targets is None else targets.avg_prefix,
        rouge_l=None if targets is None else targets.rouge_l,
        verbatim_rate=None if targets is None else targets.verbatim_rate,
        lms_by_prefix=_lms_by_prefix(evaluation),
        lms_by_passage=by_passage,
        control_lms=None if controls is None else controls.avg_lms,
        log_perplexity=log_perplexity,
        num_predictions=num_predictions,
        num_injections=tuple(sorted(times)),
    )


def _lms_by_passage(evaluation: Evaluation) -> dict[str, float]:
    totals = LMS.totals(evaluation)
    if totals is None:
        return {}
    passages = sorted({sample.passage_id for sample in evaluation.samples if sample.kind == "target"})
    means = (round(float(lms), _DECIMALS) for lms in totals[0] / totals[1])
    return dict(zip(passages, means, strict=True))


def _lms_by_prefix(evaluation: Evaluation) -> dict[int, float]:
    by_length: dict[int, list[int]] = {}
    for sample in evaluation.samples:
        if sample.kind == "target":
            by_length.setdefault(sample.prefix_length, []).append(sample.lms)
    return {length: sum(lms) / len(lms) for length, lms in sorted(by_length.items())}


def _log_perplexity(evaluation: Evaluation) -> tuple[float | None, int]:
    """With the number of predictions; a model that has come to predict NaN has diverged."""
    totals = PERPLEXITY.totals(evaluation)
    if totals is None:
        return None, 0
    mean = float(totals[0].sum() / totals[1].sum())
    return mean if math.isfinite(mean) else math.inf, int(totals[1].sum())


def _training_manifest(folder: Path) -> _Line:
    """What an experiment says of a run's training; empty where nothing is said."""
    file = folder / "trained.json"
    if not file.is_file():
        return {}
    try:
        manifest: _Line = json.loads(file.read_text(encoding="utf-8"))
        optional(text, {"recipe": None, **manifest.get("settings", {})}, "recipe")
        optional(number, {"seconds": None, **manifest}, "seconds", 0)
        optional(texts, {"provenance": None, **manifest}, "provenance")
    except UNREADABLE as error:
        raise ValueError(f"{file}: cannot be read ({error}): run the experiment again, or take it away") from error
    return manifest


def _as_line(record: RunRecord, passages: list[tuple[str, ...]]) -> _Line:
    line = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    line["passages"] = passages.index(tuple(record.lms_by_passage))
    line["lms_by_passage"] = list(record.lms_by_passage.values())
    if record.log_perplexity == math.inf:
        line["log_perplexity"] = "inf"  # JSON has no such number
    return line


def _parse(line: str, passages: list[list[str]], where: str) -> RunRecord:
    try:
        return _from_line(json.loads(line), passages)
    except (*UNREADABLE, IndexError) as error:
        raise ValueError(f"{where}: a damaged record ({type(error).__name__}: {error}): {_REMEDY}") from error


def _from_line(line: _Line, passages: list[list[str]]) -> RunRecord:
    line = dict(line)
    names = passages[whole(line, "passages")]
    del line["passages"]
    line["lms_by_passage"] = dict(zip(names, map(_lms, line["lms_by_passage"]), strict=True))
    line["lms_by_prefix"] = {int(length): _lms(lms) for length, lms in line["lms_by_prefix"].items()}
    line["num_injections"] = tuple(whole({"num_injections": n}, "num_injections") for n in line["num_injections"])
    for name in ("model", "objective", "asked"):
        text(line, name)
    optional(text, line, "recipe")
    seed(line)
    whole(line, "progress", most=100)
    whole(line, "num_predictions")
    optional(whole, line, "max_lms")
    diverged = line["log_perplexity"] == "inf"
    for name, most in _NUMBERS.items():
        line[name] = math.inf if name == "log_perplexity" and diverged else optional(number, line, name, 0, most)
    return RunRecord(**line)


def _lms(value: Any) -> float:
    return number({"lms": value}, "lms", 0)
