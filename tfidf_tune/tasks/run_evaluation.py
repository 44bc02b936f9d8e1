"""All milestones of a run, evaluated in one process: ``tfidf-tune eval RUN``."""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from tfidf_tune._checks import SetupError
from tfidf_tune._printing import say
from tfidf_tune.passages import Passage, read_probe_file
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.probe.run_identity import (
    ALL_PASSAGES,
    EVALUATION,
    HELD_OUT,
    MILESTONE,
    START,
    start_of_run,
)
from tfidf_tune.probe.sample_fields import MEMBERSHIP
from tfidf_tune.tasks._kept import kept_between_evaluations
from tfidf_tune.tasks.evaluation import MODEL_NAME, evaluate, with_positive_controls


def milestones(folder: Path) -> list[Path]:
    """Return the milestones of a run, the last one last."""
    numbers = {}
    for path in folder.glob("checkpoint_*pct"):
        match = MILESTONE.fullmatch(path.name)
        if match and path.is_dir():
            numbers[int(match[1])] = path
    return [numbers[percent] for percent in sorted(numbers)]


def tasks_of_run(folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the tasks for the passages of a run, and their settings.

    They are memorization and membership of the passages that its data sets wrote, and the
    perplexity on the text that was held out, if it was.

    Raises:
        SetupError: If the run wrote no passages.
    """
    file = _probe_file(folder)
    passages = read_probe_file(file)
    settings: dict[str, Any] = {"probe_file": str(file)}
    memorization, lengths = _memorization_task(passages)
    if lengths:
        settings["prefix_lengths"] = lengths
    tasks = [memorization, MEMBERSHIP]
    if (folder / HELD_OUT).is_file():
        tasks.append("tfidf_wikitext2_ppl")
        settings["wikitext2_source"] = str(folder / HELD_OUT)
        without_prompt = [passage for passage in passages if passage.num_prompt is None]
        settings["block_size"] = min(len(passage.token_ids) for passage in without_prompt)
    return tasks, settings


def _probe_file(folder: Path) -> Path:
    """Return the file with the passages of all data sets of a run."""
    if (folder / ALL_PASSAGES).is_file():
        return folder / ALL_PASSAGES
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        dataset = config["dataset"]
        sections = dataset if isinstance(dataset, list) else [dataset]
        names = [section["probe_file"] for section in sections]
        files = [Path(name.replace("${output_dir}", str(folder))) for name in names]
    except (OSError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        files = []
    for file in files:
        if file.expanduser().is_file():
            return file.expanduser()
    raise SetupError(
        f"{folder} has no passages that could be evaluated: its config.yaml names no probe_file "
        "that exists. Name one by --metadata probe_file=FILE"
    )


def _memorization_task(passages: Sequence[Passage]) -> tuple[str, list[int]]:
    """Choose the task for passages of this length, and its prefix lengths; [] for its own."""
    without_prompt = [passage for passage in passages if passage.num_prompt is None]
    if not without_prompt:  # answers are asked for once, from their own prompts
        return "tfidf_memorization_p50", []
    shortest = min(len(passage.token_ids) for passage in without_prompt)
    if shortest > max(PREFIX_LENGTHS):
        return "tfidf_memorization", []
    # Of short passages at least a half is left to be recited.
    half = shortest // 2
    lengths = [length for length in PREFIX_LENGTHS if length <= half]
    if not lengths:
        lengths = [max(1, half)]
    return "tfidf_memorization_prefixes", lengths


def evaluate_run(
    folder: Path,
    tasks: Sequence[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    *,
    model_args: Mapping[str, Any] | None = None,
    batch_size: int = 32,
    device: str | None = None,
    limit: int | None = None,
    overwrite: bool = False,
    with_start: bool = True,
) -> None:
    """Evaluate the milestones of a run, each into ``evaluation/checkpoint_<n>pct`` of its folder.

    The model that the run was started from is evaluated first, into ``evaluation/start``. Texts are
    tokenized once, and a reference model is loaded once. A model that has results of the same tasks
    with the same settings, newer than its weights and its passages, is left as it is.

    Args:
        folder (Path): of the run.
        tasks (Sequence[str] | None): names of our tasks and groups. Default: None,
            :func:`tasks_of_run`
        metadata (Mapping[str, Any] | None): settings of the tasks, beside those of the run.
            Default: None
        model_args (Mapping[str, Any] | None): of the harness's ``hf`` model, beside ``pretrained``.
            Default: None
        batch_size (int): sequences in a forward pass. Default: 32
        device (str | None): device of the model. Default: None, a GPU if there is one, else the CPU
        limit (int | None): documents of each task. Default: None, all
        overwrite (bool): evaluate milestones again that have results. Default: False
        with_start (bool): evaluate the start too, if it is a folder that is still there. Default:
            True

    Raises:
        SetupError: If the run has no milestone or no passages.
        ValueError: If a task or a setting is not possible.
    """
    checkpoints = milestones(folder)
    if not checkpoints:
        raise SetupError(f"{folder} has no checkpoint_<n>pct: name the folder of a run")
    # What is evaluated: the tasks of the run with its settings, or named tasks with its passages.
    settings = dict(metadata or {})
    if tasks is None:
        tasks, settings_of_run = tasks_of_run(folder)
        settings = settings_of_run | settings
    elif "probe_file" not in settings:
        _, settings_of_run = tasks_of_run(folder)
        settings = {"probe_file": settings_of_run["probe_file"]} | settings
    tasks = with_positive_controls(tasks, settings)
    # Where the results of each model go, and what is recorded of it beside the settings.
    models: dict[Path, tuple[str, dict[str, Any]]] = {}
    start = start_of_run(folder) if with_start else None
    if start is not None:
        base, description = start
        models[base] = START, {"run": description}
    for checkpoint in checkpoints:
        models[checkpoint] = checkpoint.name, {}
    # Texts and the reference model are the same for all models.
    num_evaluated = 0
    with (
        kept_between_evaluations(),
        tqdm(models.items(), desc=f"Evaluating {folder.name}", unit="model") as bar,
    ):
        for model, (name, recorded) in bar:
            output = folder / EVALUATION / name
            if not overwrite and limit is None and _has_results(output, model, tasks, settings):
                continue
            num_evaluated += 1
            evaluate(
                {"pretrained": str(model)} | dict(model_args or {}),
                tasks,
                output,
                metadata=settings | recorded,
                batch_size=batch_size,
                device=device,
                limit=limit,
                model_name=MODEL_NAME,
            )
    if num_evaluated == 0:
        say(f"all models of {folder} are evaluated already: {folder / EVALUATION}", file=sys.stderr)


def _has_results(
    output: Path, checkpoint: Path, tasks: Sequence[str], settings: Mapping[str, Any]
) -> bool:
    """Return whether there are complete results of all tasks with these settings, newer than what
    they follow from.
    """
    inputs = [*checkpoint.iterdir(), Path(str(settings["probe_file"])).expanduser()]
    newest_input = max(path.stat().st_mtime for path in inputs if path.is_file())
    for file in sorted(output.rglob("results_*.json"), reverse=True):
        if file.stat().st_mtime < newest_input:
            continue
        configs = json.loads(file.read_text(encoding="utf-8")).get("configs", {})
        has_tasks = all(any(name.startswith(task) for name in configs) for task in tasks)
        has_same = all(_has_settings(config, settings) for config in configs.values())
        if configs and has_tasks and has_same and _has_samples(file, configs):
            return True
    return False


def _has_samples(file: Path, tasks: Iterable[str]) -> bool:
    """Return whether the samples of tasks were written beside a file of results."""
    date = file.stem.removeprefix("results_")
    for task in tasks:
        samples = file.parent / f"samples_{task}_{date}.jsonl"
        if not samples.is_file():
            return False
    return True


def _has_settings(config: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Return whether a task was run with settings."""
    recorded = config.get("metadata") or {}
    return all(recorded.get(name) == value for name, value in settings.items())
