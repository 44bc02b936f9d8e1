"""Which run an evaluation belongs to: model, learning rate, objective, seed, progress."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tfidf_tune.results._fields import SEED, TEXT, TEXTS, UNREADABLE, checked, number, optional
from tfidf_tune.results._table import UNKNOWN_OBJECTIVE, Checkpoint

_MILESTONE = re.compile(r"checkpoint_(100|\d\d?)pct")
# Where the class does not have the usual name; GoldfishWeighting and GoldfishCrossEntropyLoss do.
_OBJECTIVES = {"": "CE", "Uniform": "CE", "TFIDF": "TF-IDF", "TokenDrop": "Token drop", "PowerLaw": "Power law"}
# Arguments that change how the loss is computed, not what is optimized.
_TECHNICAL_ARGUMENTS = ("_component_", "ignore_index", "num_output_chunks", "head", "accumulate_in_fp32")
_CELL = {"model": TEXT, "objective": TEXT, "seed": SEED, "learning_rate": optional(number(0))}
_MANIFEST = {"seconds": optional(number(0)), "provenance": optional(TEXTS)}


def identify(
    model_args: Mapping[str, str], results_file: Path, label: str | None
) -> tuple[tuple[str | None, str], Checkpoint]:
    """Find the run that a results file belongs to.

    The run's folder is that of the checkpoint, if it exists and is named ``checkpoint_<n>pct``; otherwise the nearest
    folder at or above the file with ``cell.json``, or with the ``config.yaml`` of a run whose milestone this is.

    Args:
        model_args (Mapping[str, str]): of the harness: ``pretrained``; ``peft`` for an adapter; ``model`` of a server.
        results_file (Path): ``results_<date>.json``.
        label (str | None): ``OBJECTIVE`` or ``MODEL:OBJECTIVE``, given by the user.

    Returns:
        tuple[tuple[str | None, str], Checkpoint]: what all files of a run have in common, its label and its folder or
            model; and the names of the checkpoint. The model is empty if only the objective is known.
    """
    named = next((model_args[key] for key in ("peft", "pretrained", "model") if key in model_args), None)
    if named is None:
        raise ValueError(
            f"{results_file}: its config.model_args name no model (pretrained=... or model=...): evaluate a Hugging "
            "Face model, a PEFT adapter or the model of a server"
        )
    checkpoint = named
    milestone = _MILESTONE.fullmatch(Path(checkpoint).name)
    folder = _run_folder(checkpoint, milestone is not None, results_file)
    trained = str(Path(checkpoint).parent) if milestone else checkpoint  # the same for all milestones of a run
    if folder is not None:
        model, objective, seed, rate = _names_in(folder)
    else:
        # Several adapters share their base's name; a full model has a name of its own, so a label leaves it open.
        base = f"{Path(model_args['pretrained']).name} (LoRA)" if "peft" in model_args else ""
        model = base or ("" if label is not None else Path(trained).name)
        objective, seed, rate = UNKNOWN_OBJECTIVE, None, None
    if label is not None:
        given_model, _, objective = label.rpartition(":")
        model = given_model.strip() or model
    progress = int(milestone[1]) if milestone else 100
    source = str(folder or results_file.parent)
    return (label, str(folder or trained)), Checkpoint(
        model, objective.strip(), rate, seed, progress, folder=source, checkpoint=checkpoint
    )


def run_of(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the run that wrote a milestone, from the ``cell.json`` or ``config.yaml`` in the folder above it.

    ``tfidf-tune eval``, audits and experiments record it with their results, in the harness's metadata under ``run``
    (``configs.<task>.metadata.run`` of ``results_<date>.json``).

    Args:
        model_args (Mapping[str, Any]): of the harness: the milestone is ``peft``, else ``pretrained``.

    Returns:
        dict[str, Any]: "model", "objective", "seed" and "learning_rate" (None if unknown), "progress" in percent and
            "folder", the run's; empty for a model that is not ``checkpoint_<n>pct`` in the folder of a run.

    Raises:
        ValueError: If the run's file cannot be read.
    """
    checkpoint = Path(str(model_args.get("peft") or model_args.get("pretrained") or "")).expanduser()
    milestone, folder = _MILESTONE.fullmatch(checkpoint.name), checkpoint.resolve().parent
    if milestone is None or not ((folder / "cell.json").is_file() or training_config(folder)):
        return {}
    names = dict(zip(("model", "objective", "seed", "learning_rate"), _names_in(folder), strict=True))
    return names | {"progress": int(milestone[1]), "folder": str(folder)}


def _run_folder(checkpoint: str, is_milestone: bool, results_file: Path) -> Path | None:
    if is_milestone and Path(checkpoint).is_dir():
        folder = Path(checkpoint).resolve().parent
        if (folder / "cell.json").is_file() or training_config(folder):
            return folder
    for folder in results_file.parents:
        # A base model may be evaluated inside a run's folder; only a milestone was trained by the run's config.
        if (folder / "cell.json").is_file() or (is_milestone and training_config(folder)):
            return folder
    return None


def _names_in(folder: Path) -> tuple[str, str, int | None, float | None]:
    cell = folder / "cell.json"
    if cell.is_file():
        try:
            content = json.loads(cell.read_text(encoding="utf-8"))
            names = checked({"learning_rate": None, **content}, _CELL)
            return names["model"], names["objective"], names["seed"], names["learning_rate"]
        except UNREADABLE as error:
            raise ValueError(
                f"{cell}: expected model, objective and seed, and optionally a learning_rate "
                f"({type(error).__name__}: {error}): correct it"
            ) from error
    config = training_config(folder)
    try:
        configured = checked({"seed": None, **config}, {"seed": SEED})["seed"]
    except ValueError as error:
        file = folder / "config.yaml"
        raise ValueError(f"{file}: {error}: correct it, or name the run as OBJECTIVE=FOLDER") from error
    return _model_name(config), objective_name(config["loss"]), configured, None


def training_config(folder: Path) -> dict[str, Any]:
    """Return the resolved config in a run's folder; empty if its ``config.yaml``, if any, is of something else."""
    file = folder / "config.yaml"
    if not file.is_file():
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read ({error}): fix it, or name the run as OBJECTIVE=FOLDER") from error
    sections = ("model", "loss", "checkpointer")
    if not isinstance(config, dict) or not all(isinstance(config.get(section), dict) for section in sections):
        return {}
    return config


def training_manifest(folder: Path) -> dict[str, Any]:
    """Return ``trained.json`` of an experiment's run; empty if there is none."""
    file = folder / "trained.json"
    if not file.is_file():
        return {}
    try:
        manifest: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        checked({"recipe": None, **manifest.get("settings", {})}, {"recipe": optional(TEXT)})
        checked({"seconds": None, "provenance": None, **manifest}, _MANIFEST)
    except UNREADABLE as error:
        raise ValueError(f"{file}: cannot be read ({error}): run the experiment again, or remove the file") from error
    return manifest


def _model_name(config: dict[str, Any]) -> str:
    model = config["model"]
    component = str(model.get("_component_", ""))
    if "qlora" in component or model.get("quantize_base"):
        method = "QLoRA"
    else:
        method = "LoRA" if "lora_" in component else "full"
    return f"{Path(str(config['checkpointer'].get('checkpoint_dir'))).name} ({method})"


def objective_name(loss: dict[str, Any]) -> str:
    """Name the objective of a section ``loss``, or a weighting inside it: "TF-IDF (tf=log)", "Goldfish × TF-IDF"."""
    class_name = str(loss.get("_component_", "")).rpartition(".")[2]
    bare = class_name.removesuffix("Weighting").removesuffix("CrossEntropyLoss")
    parts = {key: objective_name(value) for key, value in loss.items() if isinstance(value, dict)}
    name = " × ".join(parts.values()) if parts else _OBJECTIVES.get(bare, bare.removesuffix("Loss"))  # noqa: RUF001
    own = [key for key in loss if key not in (*_TECHNICAL_ARGUMENTS, *parts)]
    arguments = ", ".join(f"{key}={loss[key]}" for key in own)
    return f"{name} ({arguments})" if arguments else name
