"""The run that wrote a milestone: what the files in its folder say, recorded with the results of
every evaluation.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import TypeAdapter
from typing_extensions import NotRequired, TypedDict

from tfidf_tune.corpus.sources import SampleBy
from tfidf_tune.probe.sample_fields import (
    UNREADABLE,
    Count,
    Flag,
    Progress,
    Rate,
    Seed,
    Text,
    cause_of,
)

ALL_PASSAGES = "all_passages.jsonl"
"""In the folder of a run, the probe file of all its data sets, where several of
them have passages.
"""
HELD_OUT = "held_out.jsonl"
"""In the folder of a run, the text of its controls."""
EVALUATION = "evaluation"
"""In the folder of a run, the results of its milestones."""
START = "start"
"""Objective of the model that a run was started from, which no objective has trained."""
MILESTONE = re.compile(r"checkpoint_(100|\d\d?)pct")
# A milestone, or what transformers' Trainer writes. Many runs have checkpoints of these names.
_CHECKPOINT = re.compile(rf"{MILESTONE.pattern}|checkpoint-\d+")
# Where the class does not have the usual name; GoldfishWeighting and GoldfishCrossEntropyLoss do.
_OBJECTIVES = {"": "CE", "Linear": "CE", "Uniform": "CE", "TFIDF": "TF-IDF"}
_REMOVALS = {"exact": ", exact copies removed", "minhash": ", near copies removed"}
# Arguments that change how the loss is computed, not what is optimized.
_TECHNICAL_ARGUMENTS = (
    "_component_",
    "ignore_index",
    "num_output_chunks",
    "head",
    "accumulate_in_fp32",
)
# Data sets of documents and of examples put BOS first, blocks of text have none.
_TEXT_DATASET = "tfidf_tune.data.text_dataset"
_WRITES_BOS = {
    _TEXT_DATASET: True,
    "tfidf_tune.data.sft_dataset": True,
    "tfidf_tune.data.squad_dataset": True,
    "tfidf_tune.data.cnn_dailymail_dataset": True,
    "tfidf_tune.data.text_blocks_dataset": False,
    "tfidf_tune.data.injected_corpus_dataset": False,
}


class _Run(TypedDict):
    """What a run is known by: fields of a checkpoint, and where it was trained."""

    model: Text
    objective: Text
    learning_rate: Rate | None
    seed: Seed | None
    progress: Progress
    folder: Text
    recipe: Text | None
    loss: dict[str, Any] | None
    training_seconds: Rate | None
    provenance: dict[str, Text] | None
    bos: NotRequired[Flag | None]
    num_sequences: NotRequired[Count | None]


_RUN = TypeAdapter(_Run)


def run_of(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the run that wrote a milestone, from the files in the folder above it.

    ``tfidf-tune eval``, audits and experiments record it with their results, in the harness's
    metadata under ``run`` (``configs.<task>.metadata.run`` of ``results_<date>.json``).

    Args:
        model_args (Mapping[str, Any]): of the harness: the milestone is ``peft``, else
            ``pretrained``.

    Returns:
        dict[str, Any]: "model", "objective", "seed" and "learning_rate" (None if unknown), from
            ``cell.json`` of an experiment or ``config.yaml`` of a recipe, and "progress" in
            percent; "folder", the run's; the config's "loss" and "bos", see :func:`written_bos`;
            "num_sequences" of its first logged step; and of an experiment's run "recipe",
            "training_seconds" and "provenance". Empty for a model that is not ``checkpoint_<n>pct``
            in the folder of a run.

    Raises:
        ValueError: If a file of the run cannot be read.
    """
    name_of_checkpoint = model_args.get("peft") or model_args.get("pretrained") or ""
    checkpoint = Path(str(name_of_checkpoint)).expanduser()
    milestone = MILESTONE.fullmatch(checkpoint.name)
    if milestone is None:
        return {}
    # cell.json and trained.json are of an experiment, config.yaml is of any run of a recipe.
    folder = checkpoint.resolve().parent
    cell = _read(folder / "cell.json")
    config = _read(folder / "config.yaml")
    trained = _read(folder / "trained.json")
    if not all(isinstance(config.get(name), dict) for name in ("model", "loss", "checkpointer")):
        config = {}  # of something else
    # How the run is called: by its experiment, or else by its config.
    if cell:
        names = cell
    elif config:
        names = {
            "model": _model_name(config),
            "objective": objective_name(config["loss"]) + _removal_name(config.get("dataset")),
            "seed": config.get("seed"),
        }
    else:
        return {}
    settings = trained.get("settings")
    run = {
        "model": names.get("model"),
        "objective": names.get("objective"),
        "seed": names.get("seed"),
        "learning_rate": names.get("learning_rate"),
        "progress": int(milestone[1]),
        "folder": str(folder),
        "recipe": settings.get("recipe") if isinstance(settings, dict) else None,
        "loss": config.get("loss"),
        "training_seconds": trained.get("seconds"),
        "provenance": trained.get("provenance"),
        "bos": written_bos(config.get("dataset")),
        "num_sequences": _num_sequences(folder / "metrics.jsonl"),
    }
    return checked_run(run, folder)


def start_of_run(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder of the model that a run was started from, and its description beside the
    milestones.

    The description is as in :func:`run_of`, with the objective "start" and a progress of 0; it is
    the same for all runs from this model. None if the run's config names no folder with weights.
    """
    run = run_of({"pretrained": str(folder / "checkpoint_100pct")})
    checkpointer = _read(folder / "config.yaml").get("checkpointer")
    if not run or not isinstance(checkpointer, dict):
        return None
    base = Path(str(checkpointer.get("checkpoint_dir"))).expanduser()
    if not any(base.glob("*.safetensors")) and not any(base.glob("*.bin")):
        return None
    start = {
        **run,
        "objective": START,
        "progress": 0,
        "folder": str(base.resolve()),
        # Nothing was trained.
        "learning_rate": None,
        "seed": None,
        "recipe": None,
        "loss": None,
        "training_seconds": None,
        "num_sequences": None,
    }
    return base, checked_run(start, folder)


def sample_by_of_run(model_args: Mapping[str, Any]) -> SampleBy | None:
    """Return what a document of a ``.txt`` file was in the run that wrote a milestone; None without
    a run of ours.
    """
    run = run_of(model_args)
    if not run:
        return None
    dataset = _read(Path(run["folder"]) / "config.yaml").get("dataset")
    sections = dataset if isinstance(dataset, list) else [dataset]
    values = set()
    for section in sections:
        if isinstance(section, Mapping):
            values.add(section.get("sample_by", "line"))
    if len(values) != 1:  # the data sets do not agree
        return None
    sample_by: SampleBy = values.pop()
    return sample_by if sample_by in get_args(SampleBy) else None


def written_bos(dataset: Any) -> bool | None:
    """Return whether the data sets of a config put BOS, if the tokenizer has it, before their
    sequences.

    Args:
        dataset (Any): the section ``dataset``: a component, or a list of components.

    Returns:
        bool | None: None if a data set is not ours, or they do not agree.
    """
    sections = dataset if isinstance(dataset, list) else [dataset]
    written: set[bool | None] = set()
    for section in sections:
        is_written = None
        if isinstance(section, Mapping):
            component = str(section.get("_component_", ""))
            is_written = _WRITES_BOS.get(component)
            if component == _TEXT_DATASET and section.get("add_bos", True) is not True:
                is_written = False
        written.add(is_written)
    return written.pop() if len(written) == 1 else None


def checked_run(run: dict[str, Any], source: Path) -> dict[str, Any]:
    """Check the description of a run, or raise a ValueError that names where it was read."""
    try:
        return dict(_RUN.validate_python(run))
    except UNREADABLE as error:
        raise ValueError(
            f"{source}: the run is not described correctly: {cause_of(error)}"
        ) from error


def _read(file: Path) -> dict[str, Any]:
    """Read JSON or YAML; {} if there is no such file, or it holds no section."""
    if not file.is_file():
        return {}
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read ({error}): correct or remove it") from error
    return content if isinstance(content, dict) else {}


def _num_sequences(file: Path) -> int | None:
    """Return the sequences of the first logged step of a run, of all its processes; None if they
    are not known.
    """
    if not file.is_file():
        return None
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(
                    f"{file}: cannot be read ({error}): correct or remove it"
                ) from error
            # Entries of the monitor have none. The number is checked with the rest of the run.
            if isinstance(entry, dict) and "num_sequences" in entry:
                number: int | None = entry["num_sequences"]
                return number
    return None


def _model_name(config: Mapping[str, Any]) -> str:
    model = config["model"]
    component = str(model.get("_component_", ""))
    if "qlora" in component or model.get("quantize_base"):
        method = "QLoRA"
    elif "lora_" in component:
        method = "LoRA"
    else:
        method = "full"
    return f"{name_of_model(str(config['checkpointer'].get('checkpoint_dir')))} ({method})"


def name_of_model(checkpoint: str) -> str:
    """Name a model by the end of its path, and a checkpoint of a run by the run's, too:
    "my_run, checkpoint_100pct".
    """
    path = Path(checkpoint)
    if _CHECKPOINT.fullmatch(path.name) and path.parent.name:
        return f"{path.parent.name}, {path.name}"
    return path.name


def _removal_name(dataset: Any) -> str:
    """Name the copies that the data sets of a config leave out: ", near copies removed"; "" if they
    leave out none.
    """
    names = set()
    for section in dataset if isinstance(dataset, list) else [dataset]:
        removed = section.get("deduplicate") if isinstance(section, Mapping) else None
        method = str(removed)
        arguments = []
        if isinstance(removed, Mapping):
            method = removed.get("method", "minhash")
            arguments = [f"{key}={value}" for key, value in removed.items() if key != "method"]
        name = _REMOVALS.get(method, "")
        if name and arguments:
            name += f" ({', '.join(arguments)})"
        names.add(name)
    return names.pop() if len(names) == 1 else ", copies removed from a part"


def objective_name(loss: Mapping[str, Any]) -> str:
    """Name the objective of a section ``loss``, or of the weighting inside
    it: "TF-IDF (tf=log)".
    """
    weighting = loss.get("weighting")
    if isinstance(weighting, dict):
        return objective_name(weighting)
    _, _, class_name = str(loss.get("_component_", "")).rpartition(".")
    bare = class_name.removesuffix("Weighting").removesuffix("CrossEntropyLoss")
    name = _OBJECTIVES.get(bare, bare.removesuffix("Loss"))
    arguments = []
    for key, value in loss.items():
        if key not in _TECHNICAL_ARGUMENTS:
            arguments.append(f"{key}={value}")
    return f"{name} ({', '.join(arguments)})" if arguments else name
