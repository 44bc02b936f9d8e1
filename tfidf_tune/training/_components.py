"""Components that a config names: checked against their signatures before anything is called, then built."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin

from omegaconf import OmegaConf
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torchtune.config._errors import InstantiationError
from torchtune.config._utils import _get_component_from_path
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.training.metric_logging import MetricLoggerInterface

from tfidf_tune._checks import suggestion
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._errors import SetupError, setup_errors

DEFAULT_COLLATE = "torchtune.data.padded_collate_sft"
# Types of which an argument is checked before its component is called: in words, and what they allow.
_PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str: ("a text", (str,)),
    NoneType: ("null", (NoneType,)),
}


class _Kind(NamedTuple):
    """What a section of the config must name: a class derived from ``base``, or one that has all ``methods``."""

    noun: str
    example: str
    base: type
    methods: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    """What the recipes need of an instance, in addition to the methods."""
    handed_over: tuple[str, ...] = ()
    """Arguments that the recipe gives, the positional one first."""

    def includes(self, made: Any) -> bool:
        if not inspect.isclass(made):
            return False
        # Some bases are protocols, which issubclass() refuses.
        return self.base in made.__mro__ or (bool(self.methods) and all(hasattr(made, name) for name in self.methods))


# fmt: off
COMPONENTS = {
    "model": _Kind("a model", "torchtune.models.llama2.llama2", nn.Module,
                   attributes=("tok_embeddings", "layers", "max_seq_len"), handed_over=("hf_config",)),
    "checkpointer": _Kind("a checkpointer", "tfidf_tune.training.HFCheckpointer", NoneType,
                          methods=("check_model", "load_weights", "save_model")),
    "tokenizer": _Kind("a tokenizer", "tfidf_tune.data.hf_tokenizer", ModelTokenizer,
                       methods=("encode",), attributes=("vocab_size", "max_seq_len", "pad_id")),
    "dataset": _Kind("a map-style data set", "tfidf_tune.data.text_blocks_dataset", Dataset,  # which has no length
                     methods=("__len__", "__getitem__"), handed_over=("tokenizer",)),
    "loss": _Kind("one of tfidf_tune's objectives", "tfidf_tune.loss.TFIDFCrossEntropyLoss", WeightedCrossEntropyLoss),
    "optimizer": _Kind("an optimizer", "torch.optim.AdamW", Optimizer,
                       methods=("step", "zero_grad"), attributes=("param_groups",), handed_over=("params",)),
    "lr_scheduler": _Kind("a learning-rate schedule", "transformers.get_linear_schedule_with_warmup", LRScheduler,
                          methods=("step",), handed_over=("optimizer", "num_training_steps")),
    "metric_logger": _Kind("a metric logger", "torchtune.training.metric_logging.DiskLogger", MetricLoggerInterface,
                           methods=("log_config", "log_dict", "close")),
}
# fmt: on
_LOSS_PART = _Kind("a module", "tfidf_tune.weighting.TFIDFWeighting", nn.Module)


def check_components(cfg: Any) -> None:
    """Check all components of a config without calling any of them.

    Raises:
        SetupError: If a component does not exist, is of another kind than its section needs, or does not take the
            arguments given.
    """
    for key, kind in COMPONENTS.items():
        if key == "lr_scheduler" and cfg[key] is None:
            continue
        for where, section in sections(key, cfg[key]):
            _check_component(where, section, kind)
    _check_packing(cfg.dataset)
    collate = _signature("collate_fn", cfg.collate_fn, find_component("collate_fn", cfg.collate_fn))
    if lacking := {"padding_idx", "ignore_idx"} - collate.parameters.keys():
        raise SetupError(
            f"config: collate_fn: {cfg.collate_fn} takes no {', '.join(sorted(lacking))}: take, for example, "
            f"{DEFAULT_COLLATE}"
        )


def instantiate(cfg: Any, key: str, *args: Any, **kwargs: Any) -> Any:
    """Build a component of a checked config; a list of them where the config has a list of sections.

    Args:
        cfg (Any): the checked config.
        key (str): the component's key.
        *args (Any): positional arguments of the recipe.
        **kwargs (Any): keyword arguments of the recipe.

    Raises:
        SetupError: If it cannot be built from these settings, or lacks what the recipes need.
    """
    kind, components = COMPONENTS[key], []
    for where, section in sections(key, getattr(cfg, key)):
        component = _build(where, section, *args, builds_parts=key == "loss", **kwargs)
        if lacking := [name for name in (*kind.methods, *kind.attributes) if not hasattr(component, name)]:
            raise SetupError(
                f"config: {where}: {section['_component_']} has no {', '.join(lacking)}: take, for example, "
                f"{kind.example}"
            )
        components.append(component)
    return components if OmegaConf.is_list(getattr(cfg, key)) else components[0]


def sections(key: str, value: Any) -> Sequence[tuple[str, Any]]:
    """Return the sections of a component by name: one, or those of a list of data sets."""
    if key == "dataset" and OmegaConf.is_list(value):
        return [(f"{key}[{index}]", section) for index, section in enumerate(value)]
    return [(key, value)]


def default_arguments(where: str, section: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of the plain defaults of a component, and of those within it, that a section leaves out."""
    path = section["_component_"]
    for name, parameter in _signature(where, path, find_component(where, path)).parameters.items():
        if name not in section and isinstance(parameter.default, bool | int | float | str | list | tuple | None):
            yield name, parameter.default
    for name, part in _parts(section):
        yield from ((f"{name}.{inner}", value) for inner, value in default_arguments(f"{where}.{name}", part))


def is_own(where: str, section: Any) -> bool:
    """Return whether a component and all components within it belong to this package."""
    module: str = find_component(where, section["_component_"]).__module__
    return module.startswith("tfidf_tune.") and all(is_own(f"{where}.{name}", part) for name, part in _parts(section))


def find_component(where: str, path: Any) -> Any:
    """Import a class or function by its dotted path; a SetupError names ``where`` if it does not exist."""
    if not isinstance(path, str):
        raise SetupError(
            f"config: {where}: component is {path!r}, it has to be a dotted path such as torch.optim.AdamW"
        )
    try:
        component = _get_component_from_path(path)
    except (InstantiationError, ValueError) as error:
        raise SetupError(f"config: {where}: no component '{path}': {str(error).splitlines()[-1]}") from error
    if not callable(component):
        raise SetupError(f"config: {where}: '{path}' is not a class or function")
    return component


def _check_component(where: str, section: Any, kind: _Kind) -> None:
    if not OmegaConf.is_dict(section) or not section.get("_component_"):
        alternative = ", or a list of such" if where == "dataset" else ""
        raise SetupError(f"config: {where} has to be a section with `_component_`{alternative}")
    path = section["_component_"]
    component = find_component(where, path)
    parameters = _signature(where, path, component).parameters
    check_kind(where, path, component, kind)
    given = {str(name): value for name, value in section.items() if name != "_component_"}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in given.keys() - parameters.keys():
            raise SetupError(f"config: {where}: {path} has no argument '{name}'{suggestion(name, parameters)}")
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in (*given, *kind.handed_over)
    ]
    if missing:
        raise SetupError(f"config: {where}: {path} needs {', '.join(missing)}")
    for name, value in given.items():
        _check_argument(f"config: {where}: {name} is {value!r}", value, parameters.get(name))
    if kind in (COMPONENTS["loss"], _LOSS_PART):
        for name, part in _parts(section):
            _check_component(f"{where}.{name}", part, _LOSS_PART)


def _check_argument(what: str, value: Any, parameter: inspect.Parameter | None) -> None:
    """Refuse NaN, infinity, and a value of another type than a plain annotation such as ``int | None`` allows.

    Any other annotation is left to the component.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise SetupError(f"{what}, it has to be a finite number")
    if parameter is None or parameter.kind is parameter.VAR_KEYWORD or (value is None and parameter.default is None):
        return
    types = _alternatives(parameter.annotation)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if all(each in _PLAIN for each in types):
        words, allowed = zip(*(_PLAIN[each] for each in types), strict=True)
        if type(value) not in sum(allowed, ()):
            raise SetupError(f"{what}, it has to be {' or '.join(words)}")


def check_kind(where: str, path: str, component: Callable[..., Any], kind: _Kind) -> None:
    """Raise a SetupError if a class or function does not make what its section needs, without calling it.

    A function needs a return annotation, or must take what the recipe gives (``tokenizer``, ``params``,
    ``optimizer``) by that name.
    """
    made: list[Any] = [component]
    if not inspect.isclass(component):
        signature = _signature(where, path, component)
        annotation = signature.return_annotation
        if annotation is signature.empty or isinstance(annotation, str):
            if kind.handed_over and kind.handed_over[0] in signature.parameters:
                return
            raise SetupError(
                f"config: {where}: {path} does not declare what it returns, which has to be {kind.noun}: annotate its "
                f"return type, or take, for example, {kind.example}"
            )
        made = [get_origin(each) or each for each in _alternatives(annotation) if each not in (None, NoneType)]
    if not made or not all(map(kind.includes, made)):
        names = " or ".join(getattr(each, "__name__", str(each)) for each in made) or "nothing"
        raise SetupError(f"config: {where}: {path} makes {names}, not {kind.noun}: take, for example, {kind.example}")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _signature(where: str, path: str, component: Any) -> inspect.Signature:
    """Return a signature, with the annotations themselves unless they are text that only type checkers understand."""
    try:
        try:
            return inspect.signature(component, eval_str=True)
        except NameError:
            return inspect.signature(component)
    except ValueError as error:  # dict, for example
        raise SetupError(f"config: {where}: {path} does not declare its arguments: name a class or function") from error


def _check_packing(dataset: Any) -> None:
    is_packed = {where: bool(section.get("packed")) for where, section in sections("dataset", dataset)}
    if not is_packed:
        raise SetupError("config: dataset is an empty list: name one data set or more")
    if len({*is_packed.values()}) > 1:
        packed, others = (", ".join(where for where in is_packed if is_packed[where] is kind) for kind in (True, False))
        raise SetupError(
            f"config: {packed} packed, {others} not: of the data sets that are mixed, all have to be packed or none"
        )


def _parts(section: Any) -> Iterator[tuple[str, Any]]:
    """Yield the components within a component: the weighting of a loss."""
    for name, part in section.items():
        if OmegaConf.is_dict(part) and "_component_" in part:
            yield str(name), part


def _build(where: str, section: Any, *args: Any, builds_parts: bool, **kwargs: Any) -> Any:
    parts = dict(_parts(section)) if builds_parts else {}
    values: Any = OmegaConf.to_container(section, resolve=True)
    given = {str(name): value for name, value in values.items() if name not in ("_component_", *parts)}
    built = {name: _build(f"{where}.{name}", part, builds_parts=True) for name, part in parts.items()}
    with setup_errors(f"config: {where}", given):
        return find_component(where, section["_component_"])(*args, **given | built | kwargs)


def build_loss(cfg: Any) -> WeightedCrossEntropyLoss:
    """Build the objective of a checked config.

    Raises:
        SetupError: If it cannot be built from these settings.
    """
    loss = instantiate(cfg, "loss")
    if not isinstance(loss, WeightedCrossEntropyLoss):  # whatever a function of the user promises
        raise SetupError(f"config: loss: {cfg.loss._component_} makes {type(loss).__name__}, not an objective")
    return loss


def build_optimizer(cfg: Any, parameters: Iterable[nn.Parameter], total_steps: int) -> tuple[Optimizer, Any]:
    """Build optimizer and learning-rate schedule of the config; None if it has no schedule.

    Args:
        cfg (Any): the checked config.
        parameters (Iterable[nn.Parameter]): those without ``requires_grad`` are left out.
        total_steps (int): optimizer steps of the run, which the schedule spans.

    Raises:
        SetupError: If one of them cannot be built from these settings.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer: Optimizer = instantiate(cfg, "optimizer", trainable)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise SetupError(
            f"config: optimizer: {cfg.optimizer['_component_']} needs a closure that computes the loss several times a "
            "step, which these recipes do not have: choose an optimizer whose step() works without one"
        )
    if cfg.lr_scheduler is None:
        return optimizer, None
    return optimizer, instantiate(cfg, "lr_scheduler", optimizer, num_training_steps=total_steps)


def check_loss(cfg: Any) -> None:
    """Raise a SetupError for an objective that cannot be built; components of the user are not called here."""
    if is_own("loss", cfg.loss):
        build_loss(cfg)
