"""The keys of an experiment's file and their checks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import OmegaConf
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from tfidf_tune._checks import suggestion
from tfidf_tune._files import config_path, find_file
from tfidf_tune.training import SetupError, load_config, setup_errors

CONFIGS = Path(__file__).parents[1] / "configs"
"""Folder of the experiments that come with the repository."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Keys of a training config that the experiment sets, and by which of its own keys.
_OWN_KEYS = {
    "output_dir": "output_dir",
    "seed": "seeds",
    "loss": "objectives",
    "save_at_percent": "milestones",
}

_T = TypeVar("_T")


def _distinct(values: list[_T]) -> list[_T]:
    repeated = [value for index, value in enumerate(values) if value in values[:index]]
    if repeated:
        raise ValueError(f"it has {repeated[0]} more than once")
    return values


def _of_training_config(overrides: dict[str, Any]) -> dict[str, Any]:
    for key in overrides:
        if key in _OWN_KEYS:
            raise ValueError(f"{key} is set by the experiment's {_OWN_KEYS[key]}")
        if "." in key:  # next to a nested key it would be unclear which of the two counts
            raise ValueError(f"{key} has a dot; in a file, keys of sections are nested")
    return overrides


_Names = Annotated[dict[str, _T], Field(min_length=1)]
_Distinct = Annotated[list[_T], Field(min_length=1), AfterValidator(_distinct)]
_Rates = _Distinct[Annotated[float, Field(gt=0)]]
_Overrides = Annotated[dict[str, Any], AfterValidator(_of_training_config)]
_Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    """A section of the file; a key that is null has its default."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: Any) -> Any:
        return (
            {key: value for key, value in content.items() if value is not None}
            if type(content) is dict
            else content
        )


class Model(_Section):
    """What is trained: a row of the tables."""

    recipe: Literal["full_finetune", "lora_finetune"]
    # Name or path of a training config.
    config: Annotated[str, AfterValidator(lambda name: config_path(name) and name)]
    # Keys of the training config; they take precedence over the experiment's own overrides.
    overrides: _Overrides = {}
    metadata: dict[
        str, Any
    ] = {}  # settings of the tasks for this model; they take precedence over those of ``eval``
    start: dict[str, Any] | None = None
    """Component that makes the checkpoint folder to start from. It is called with ``(folder, model,
    seed)``: the training config's section ``model``, and the run's seed unless one is given here.
    Null: the training config's checkpoint."""
    learning_rates: _Rates | None = None
    """Null: the experiment's. Adapters, for example, need higher learning rates than complete
    models.
    """


class Objective(_Section):
    """What is minimized: a column of the tables. A section with ``_component_`` is only a loss."""

    loss: dict[str, Any]  # the training config's ``loss``
    overrides: _Overrides = {}
    """Keys of the training config, such as ``dataset: {deduplicate: exact}``; they take precedence
    over the model's.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_loss(cls, content: Any) -> Any:
        return (
            {"loss": content} if isinstance(content, dict) and "_component_" in content else content
        )


class EvalSettings(_Section):
    """How checkpoints are evaluated."""

    batch_size: _Count = 64
    device: str | None = None  # null: that of the training config
    dtype: Literal["fp32", "bf16", "fp16"] | None = None  # null: that of the training config
    limit: _Count | None = None  # documents of each task. Null: all
    metadata: dict[str, Any] = {}  # settings of the tasks: sources, prefix lengths and others
    model_args: dict[
        str, Any
    ] = {}  # more arguments of the harness's Hugging Face model, ``parallelize`` for example


class Launcher(_Section):
    """How jobs are started; further keys are options of Slurm, as submitit names them
    (``partition``, ...).
    """

    model_config = ConfigDict(extra="allow")

    name: Literal["local", "slurm"] = "local"
    timeout_min: _Count | None = (
        None  # time limit of a job (a training and its evaluations), required for Slurm
    )
    gpus_per_node: _Count | None = None  # GPUs of a job
    cpus_per_task: _Count | None = None
    nodes: Literal[1] | None = None  # a job is one process on one machine
    tasks_per_node: Literal[1] | None = None

    @model_validator(mode="after")
    def _limits_time(self) -> "Launcher":
        if self.name == "slurm" and self.timeout_min is None:
            raise ValueError(
                "slurm needs timeout_min, the time limit of a job: a training and its evaluations"
            )
        return self


class Experiment(_Section):
    """Everything that is trained and evaluated: each model with each objective, learning rate and
    seed.
    """

    output_dir: str
    models: _Names[Model]  # by the names that the tables show, as objectives
    objectives: _Names[Objective]
    learning_rates: _Rates | None = None
    """The training config's ``optimizer.lr``; the report is then that of the frontier. Null: the
    training config's.
    """
    references: list[str] = []
    """Objectives that the others are compared with in the frontier, in addition to the baseline."""
    seeds: _Distinct[int] = [0]  # seeds of weights, data order and injections
    milestones: _Distinct[Annotated[int, Field(ge=1, le=100)]] = [10, 25, 50, 75, 100]
    """Training progress in percent at which a checkpoint is saved and evaluated."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Of fp32 products of matrices in training, see ``torch.set_float32_matmul_precision``. "medium"
    rounds what is multiplied to bf16 on processors that do that faster.
    """
    tasks: _Distinct[str]  # tasks and groups of the evaluation harness
    eval: EvalSettings = EvalSettings()
    launcher: Launcher = Launcher()
    overrides: _Overrides = {}  # keys of all training configs

    @model_validator(mode="after")
    def _agrees_on_learning_rates(self) -> "Experiment":
        for name in self.references:
            if name not in self.objectives:
                raise ValueError(
                    f"references: no objective {name!r}{suggestion(name, self.objectives)}"
                )
        if self.learning_rates is None:
            needing = [
                f"models: {name}: learning_rates"
                for name, one in self.models.items()
                if one.learning_rates
            ]
            if needing or self.references:
                raise ValueError(
                    f"{[*needing, 'references'][0]}: the experiment has no learning_rates; set them"
                )
            return self
        overrides = {f"models: {name}: ": model.overrides for name, model in self.models.items()}
        overrides |= {
            f"objectives: {name}: ": one.overrides for name, one in self.objectives.items()
        }
        for where, own in {"": self.overrides, **overrides}.items():
            optimizer = own.get("optimizer")
            if isinstance(optimizer, dict) and "lr" in optimizer:
                raise ValueError(
                    f"{where}overrides: optimizer.lr is set by the experiment's learning_rates"
                )
        return self


def load_experiment(name: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment and check its keys; training configs are not read yet.

    Args:
        name (str): a path, or the name of one of research/configs (``demo``).
        overrides (Sequence[str]): ``key=value`` as for a recipe; a model whose name has dots is
            written ``models[Pythia 1.4B].overrides.batch_size=4``. Default: none.

    Returns:
        Experiment: the experiment. References in ``overrides`` are kept: the training config
            resolves them.

    Raises:
        ValueError: If there is no such experiment, the file is not valid YAML, or a key is unknown,
            missing or out of range.
    """
    cfg = load_config(find_file("experiment", name, CONFIGS), overrides)
    with setup_errors("experiment"):
        content = _plain(cfg)
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        raise SetupError(_message(error)) from error


def _plain(section: Any) -> Any:
    """Convert a section to plain data; references are resolved, except in overrides of a training
    config.
    """
    if OmegaConf.is_list(section):
        return [_plain(value) for value in section]
    if not OmegaConf.is_dict(section):
        return section
    raw: Any = OmegaConf.to_container(section)
    plain = {}
    for key in section:
        plain[key] = raw[key] if key == "overrides" else _plain(section[key])
    return plain


def _message(error: ValidationError) -> str:
    """Describe the first problem; an unknown key comes first, because it may be a missing one that
    is misspelled.
    """
    problem = min(
        error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden"
    )
    where = "experiment"
    for part in problem["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f": {part}"
    where = where.replace(": [", "[")
    if problem["type"] == "extra_forbidden":
        sections: tuple[type[_Section], ...] = (Experiment, Model, Objective, EvalSettings)
        known: set[str] = set()
        for section in sections:
            known.update(section.model_fields)
        return f"{where}: there is no such key{suggestion(str(problem['loc'][-1]), known)}"
    value = "" if isinstance(problem["input"], dict | _Section) else f" {problem['input']!r}:"
    return f"{where}:{value} {problem['msg'].removeprefix('Value error, ')}"
