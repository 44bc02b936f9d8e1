"""Which run an evaluation belongs to, and what it is called: model, learning rate, objective, seed, progress."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tfidf_tune.analysis._fields import UNREADABLE, number, optional, seed, text

_MILESTONE = re.compile(r"checkpoint_(100|\d\d?)pct")
# Where the class does not have the name that people know: GoldfishWeighting does.
_OBJECTIVES = {"": "CE", "Uniform": "CE", "TFIDF": "TF-IDF", "TokenDrop": "Token drop", "PowerLaw": "Power law"}
# They change where and how the loss is computed, not what is optimized.
_TECHNICAL_ARGUMENTS = ("_component_", "ignore_index", "num_output_chunks", "head", "accumulate_in_fp32")
_UNKNOWN_OBJECTIVE = "unknown"


@dataclass(frozen=True)
class RunName:
    """Whose results a file holds.

    Args:
        key (str): equal for the files of one run, different for those of different runs.
        model (str | None): None where only a name given by hand is known.
        objective (str): "CE", "TF-IDF", ...
        seed (int | None): None where it is not known.
        folder (str): the run's folder; for a model without one, the folder of the results.
        progress (int): training progress in percent; 100 for a model that is no milestone.
        checkpoint (str): folder or hub id of the model or adapter.
        learning_rate (float | None): None where ``cell.json`` names none.
    """

    key: str
    model: str | None
    objective: str
    seed: int | None
    folder: str
    progress: int
    checkpoint: str
    learning_rate: float | None

    def with_model(self, model: str) -> "RunName":
        """The same with another model.

        Args:
            model (str): its name.

        Returns:
            RunName: the copy.
        """
        return dataclasses.replace(self, model=model)


def name_run(model_args: Mapping[str, str], results_file: Path, label: str | None) -> RunName:
    """Find the run that a results file belongs to.

    The run's folder is that of the checkpoint, if it is there and named ``checkpoint_<n>pct``; else the nearest folder
    at or above the file with ``cell.json``, or with the ``config.yaml`` of a run whose milestone this is.

    Args:
        model_args (Mapping[str, str]): of the harness: ``pretrained``, maybe ``peft``.
        results_file (Path): ``results_<date>.json``.
        label (str | None): ``OBJECTIVE`` or ``MODEL:OBJECTIVE``, given by hand.

    Returns:
        RunName: its names.

    Raises:
        ValueError: If ``pretrained`` is missing, or the run's ``cell.json`` or ``config.yaml`` cannot be read.
    """
    if "pretrained" not in model_args:
        raise ValueError(
            f"{results_file}: its config.model_args name no model (pretrained=...): evaluate a Hugging Face model or a "
            "PEFT adapter"
        )
    checkpoint = model_args.get("peft", model_args["pretrained"])
    milestone = _MILESTONE.fullmatch(Path(checkpoint).name)
    folder = _run_folder(checkpoint, milestone is not None, results_file)
    # The milestones of a run that has left nothing else are still one run.
    trained = str(Path(checkpoint).parent) if milestone else checkpoint
    names: tuple[str | None, str, int | None, float | None]
    if folder is None:
        names = (_foreign_model(model_args, trained, labelled=label is not None), _UNKNOWN_OBJECTIVE, None, None)
    else:
        names = _names_in(folder)
    model, objective, seed, learning_rate = names
    if label is not None:
        given_model, _, objective = label.rpartition(":")
        model = given_model.strip() or model
    return RunName(
        key=f"{label}\n{folder or trained}",
        model=model,
        objective=objective.strip(),
        seed=seed,
        folder=str(folder or results_file.parent),
        progress=int(milestone[1]) if milestone else 100,
        checkpoint=checkpoint,
        learning_rate=learning_rate,
    )


def _run_folder(checkpoint: str, is_milestone: bool, results_file: Path) -> Path | None:
    if is_milestone and Path(checkpoint).is_dir():
        folder = Path(checkpoint).resolve().parent
        if (folder / "cell.json").is_file() or training_config(folder):
            return folder
    for folder in results_file.parents:
        # A base model may be evaluated inside a run's folder: only a milestone is what the config has trained.
        if (folder / "cell.json").is_file() or (is_milestone and training_config(folder)):
            return folder
    return None


def _names_in(folder: Path) -> tuple[str, str, int | None, float | None]:
    cell = folder / "cell.json"
    if cell.is_file():
        try:
            content = json.loads(cell.read_text(encoding="utf-8"))
            rate = optional(number, {"learning_rate": None, **content}, "learning_rate", 0)
            return text(content, "model"), text(content, "objective"), seed(content), rate
        except UNREADABLE as error:
            raise ValueError(
                f"{cell}: expected model, objective and seed, and maybe a learning_rate "
                f"({type(error).__name__}: {error}): correct it"
            ) from error
    config = training_config(folder)
    try:
        configured = seed({"seed": None, **config})
    except ValueError as error:
        file = folder / "config.yaml"
        raise ValueError(f"{file}: {error}: correct it, or name the run as OBJECTIVE=FOLDER") from error
    return _model_name(config), _objective_name(config["loss"]), configured, None


def training_config(folder: Path) -> dict[str, Any]:
    """Read what the recipe trained with.

    Args:
        folder (Path): of a run.

    Returns:
        dict[str, Any]: the resolved config; empty where the folder's ``config.yaml``, if any, is of something else.

    Raises:
        ValueError: If ``config.yaml`` cannot be read.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read ({error}): mend it, or name the run as OBJECTIVE=FOLDER") from error
    sections = ("model", "loss", "checkpointer")
    if not isinstance(config, dict) or not all(isinstance(config.get(section), dict) for section in sections):
        return {}
    return config


def _model_name(config: dict[str, Any]) -> str:
    model = config["model"]
    component = str(model.get("_component_", ""))
    if "qlora" in component or model.get("quantize_base"):
        method = "QLoRA"
    else:
        method = "LoRA" if "lora_" in component else "full"
    return f"{Path(str(config['checkpointer'].get('checkpoint_dir'))).name} ({method})"


def _objective_name(loss: dict[str, Any]) -> str:
    """The name of a loss or, for the factors of a product, of a weighting: "TF-IDF (tf=log)", "Goldfish × TF-IDF"."""
    class_name = str(loss.get("_component_", "")).rpartition(".")[2]
    bare = class_name.removesuffix("Weighting").removesuffix("CrossEntropyLoss")
    parts = {key: _objective_name(value) for key, value in loss.items() if isinstance(value, dict)}
    name = " × ".join(parts.values()) if parts else _OBJECTIVES.get(bare, bare.removesuffix("Loss"))  # noqa: RUF001 (of a product)
    own = [key for key in loss if key not in (*_TECHNICAL_ARGUMENTS, *parts)]
    arguments = ", ".join(f"{key}={loss[key]}" for key in own)
    return f"{name} ({arguments})" if arguments else name


def _foreign_model(model_args: Mapping[str, str], trained: str, *, labelled: bool) -> str | None:
    """An adapter's base is a name that several share; a full model's own is not, so a label leaves it open."""
    if "peft" in model_args:
        return f"{Path(model_args['pretrained']).name} (LoRA)"
    return None if labelled else Path(trained).name
