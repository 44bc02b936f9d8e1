"""Components that a config names: checked against their signatures before anything is called, then
built.
"""

import inspect
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.optim import Optimizer
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path

from tfidf_tune._processes import search_working_directory_last
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._errors import SetupError, setup_errors

DEFAULTS = "# Defaults of arguments that are not set above:\n"
_PLAIN = (bool, int, float, str, list, tuple, type(None))
_SWITCHES = {bool, type(None)}
_NUMBERS = _SWITCHES | {int, float, Tensor}


class _Kind(NamedTuple):
    """What the recipes need of a component, and the arguments that they give to it."""

    example: str
    methods: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    handed_over: tuple[str, ...] = ()

    def check(self, where: str, path: str, component: Any) -> None:
        """Refuse a component that lacks something; attributes of a class are known when it is
        built.
        """
        needed = list(self.methods)
        if not inspect.isclass(component):
            needed += self.attributes
        lacking = [name for name in needed if not hasattr(component, name)]
        if lacking:
            raise SetupError(
                f"config: {where}: {path} has no {', '.join(lacking)}: take, for example, "
                f"{self.example}"
            )


COMPONENTS = {
    "model": _Kind(
        "torchtune.models.llama2.llama2",
        attributes=("tok_embeddings", "layers", "max_seq_len"),
        handed_over=("hf_config",),
    ),
    "checkpointer": _Kind(
        "tfidf_tune.training.HFCheckpointer", ("check_model", "load_weights", "save_model")
    ),
    "tokenizer": _Kind(
        "tfidf_tune.data.hf_tokenizer", ("encode",), ("vocab_size", "max_seq_len", "pad_id")
    ),
    "dataset": _Kind(
        "tfidf_tune.data.text_blocks_dataset",
        ("__len__", "__getitem__"),
        handed_over=("tokenizer",),
    ),
    "loss": _Kind("tfidf_tune.loss.TFIDFCrossEntropyLoss", ("terms",), ("weighting",)),
    "optimizer": _Kind("torch.optim.AdamW", ("step", "zero_grad"), ("param_groups",), ("params",)),
    "lr_scheduler": _Kind(
        "transformers.get_linear_schedule_with_warmup",
        ("step",),
        handed_over=("optimizer", "num_training_steps"),
    ),
    "metric_logger": _Kind(
        "torchtune.training.metric_logging.DiskLogger", ("log_config", "log_dict", "close")
    ),
}


def check_components(cfg: Any) -> None:
    """Refuse components that do not exist, are of another kind, or take other arguments, without
    calling them.
    """
    find_component("collate_fn", cfg.collate_fn)
    for key, kind in COMPONENTS.items():
        if key == "lr_scheduler" and cfg[key] is None:
            continue
        for where, section in sections(key, cfg[key]):
            component = _check_component(where, section, kind.handed_over)
            if inspect.isclass(component):  # what a function makes is known when it is called
                kind.check(where, section["_component_"], component)
            if key == "loss":
                for place, part in _parts_of(where, section):
                    _check_component(place, part)


def instantiate(cfg: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Build a component of a checked config; a list of them where the config has a list of
    sections.

    ``args`` and ``kwargs`` are what the recipe hands over.

    Raises:
        SetupError: If it cannot be built from these settings, or lacks what the recipes need.
    """
    kind = COMPONENTS[key]
    components = []
    for where, section in sections(key, getattr(cfg, key)):
        # Only a loss has components within it; arguments of others may be sections that they build
        # by themselves.
        component = _build(where, section, *args, builds_parts=key == "loss", **kwargs)
        kind.check(where, section["_component_"], component)
        components.append(component)
    return components if OmegaConf.is_list(getattr(cfg, key)) else components[0]


def sections(key: str, value: Any) -> Sequence[tuple[str, Any]]:
    """Return the section of a component by its name, or every section of a list of data sets."""
    if key == "dataset" and OmegaConf.is_list(value):
        return [(f"{key}[{index}]", section) for index, section in enumerate(value)]
    return [(key, value)]


def default_arguments(cfg: Any) -> str:
    """Return the plain defaults of a checked config's components, of arguments that it leaves out,
    as YAML comments.
    """
    comments = []
    for key in COMPONENTS:
        for where, section in sections(key, getattr(cfg, key)):
            if section is None:  # only a schedule may be null
                continue
            for part_key, part in [(where, section), *_parts_of(where, section)]:
                parameters = signature_of(part_key, part["_component_"]).parameters
                for name, parameter in parameters.items():
                    if name not in part and isinstance(parameter.default, _PLAIN):
                        comments.append(f"# {part_key}.{name}: {json.dumps(parameter.default)}\n")
    return DEFAULTS + "".join(comments) if comments else ""


def find_component(where: str, path: Any) -> Any:
    """Import a class or function by its dotted path; a SetupError names ``where`` if it does not
    exist.

    It may be in a module of the working directory.
    """
    search_working_directory_last()
    try:
        component = _get_component_from_path(str(path))
    except (InstantiationError, ValueError) as error:
        raise SetupError(
            f"config: {where}: no component '{path}': {str(error).splitlines()[-1]}"
        ) from error
    if not callable(component):
        raise SetupError(f"config: {where}: '{path}' is not a class or function")
    return component


def signature_of(where: str, path: str) -> inspect.Signature:
    """Return the signature of a component; a SetupError names ``where`` if there is none."""
    with setup_errors(f"config: {where}: {path}"):  # dict has no signature
        return inspect.signature(find_component(where, path))


def _check_component(where: str, section: Any, handed_over: Sequence[str] = ()) -> Any:
    """Check a section against the signature of its class or function; return that."""
    if not OmegaConf.is_dict(section) or not section.get("_component_"):
        raise SetupError(f"config: {where} has to be a section with `_component_`")
    path = section["_component_"]
    signature = signature_of(where, path)
    given: dict[str, Any] = {
        str(name): value for name, value in section.items() if name != "_component_"
    }
    from_recipe = [name for name in handed_over if name in signature.parameters]
    try:
        signature.bind(**dict.fromkeys(from_recipe) | given)
    except TypeError as error:
        arguments = [name for name in signature.parameters if name not in handed_over]
        raise SetupError(
            f"config: {where}: {path}: {error}; its arguments are {', '.join(arguments) or 'none'}"
        ) from error
    for name, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SetupError(f"config: {where}: {name} is {value!r}, it has to be a finite number")
        if isinstance(value, str) and name in signature.parameters:
            needed = _needed_for(signature.parameters[name].annotation)
            if needed:
                # As it is written: what an environment variable holds may be secret.
                written: Any = OmegaConf.to_container(section, resolve=False)
                raise SetupError(
                    f"config: {where}: {name} is {written[name]!r}, it has to be {needed}"
                )
    return find_component(where, path)


def _needed_for(annotation: Any) -> str:
    """Return what an argument has to be if its annotation excludes text for sure, else "".

    ``float | Tensor`` and ``int | None`` need a number; of ``Sequence[int]``, of a class and of an
    annotation that is a text nothing is known.
    """
    kinds = {annotation}
    if get_origin(annotation) in (Union, UnionType):
        kinds = set(get_args(annotation))
    if kinds <= _SWITCHES:
        return "true or false"
    if kinds <= _NUMBERS:
        return "a number"
    return ""


def _parts_of(where: str, section: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sections of components within a section by their keys: the weighting of a loss."""
    for name, part in section.items():
        if OmegaConf.is_dict(part) and "_component_" in part:
            yield f"{where}.{name}", part
            yield from _parts_of(f"{where}.{name}", part)


def _build(where: str, section: Any, *args: Any, builds_parts: bool, **kwargs: Any) -> Any:
    given: Any = OmegaConf.to_container(section, resolve=True)
    path = given.pop("_component_")
    # Without the values of environment variables.
    shown: Any = OmegaConf.to_container(section, resolve=False)
    del shown["_component_"]
    if builds_parts:
        for name, part in section.items():
            if OmegaConf.is_dict(part) and "_component_" in part:
                given[name] = _build(f"{where}.{name}", part, builds_parts=True)
    with setup_errors(f"config: {where}", shown):
        return find_component(where, path)(*args, **given | kwargs)


def build_loss(cfg: Any) -> WeightedCrossEntropyLoss:
    """Build the objective of a checked config; a SetupError says why it cannot be built from these
    settings.
    """
    loss: WeightedCrossEntropyLoss = instantiate(cfg, "loss")
    return loss


def check_loss(cfg: Any) -> None:
    """Raise a SetupError for an objective that cannot be built; components of the user are not
    called here.
    """
    for where, part in [("loss", cfg.loss), *_parts_of("loss", cfg.loss)]:
        component = find_component(where, part["_component_"])
        if not component.__module__.startswith("tfidf_tune."):
            return
    build_loss(cfg)


def build_optimizer(
    cfg: Any, parameters: Iterable[nn.Parameter], total_steps: int
) -> tuple[Optimizer, Any]:
    """Build the optimizer of the parameters with ``requires_grad``, and the schedule over so many
    steps or None.

    Raises:
        SetupError: If optimizer or schedule cannot be built from these settings.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer: Optimizer = instantiate(cfg, "optimizer", trainable)
    if cfg.lr_scheduler is None:
        return optimizer, None
    return optimizer, instantiate(cfg, "lr_scheduler", optimizer, num_training_steps=total_steps)
