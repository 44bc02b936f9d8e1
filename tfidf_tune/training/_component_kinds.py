"""What each section of a config has to name, checked before anything that it names is called."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.training.metric_logging import MetricLoggerInterface

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._errors import SetupError


@dataclass(frozen=True)
class _Kind:
    """A kind of component.

    Attributes:
        noun (str): its name in messages.
        base (type): classes derived from it are of this kind.
        example (str): a component of this kind.
        methods (tuple[str, ...]): a class that has all of these is of this kind too. Default: none, only ``base``.
        attributes (tuple[str, ...]): what the recipes need of an instance besides. Default: none.
    """

    noun: str
    base: type
    example: str
    methods: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()

    def includes(self, made: Any) -> bool:
        if not inspect.isclass(made):
            return False
        # Some bases are protocols, which issubclass() does not take.
        return self.base in made.__mro__ or (bool(self.methods) and all(hasattr(made, name) for name in self.methods))


_KINDS = {
    "model": _Kind(
        "a model",
        nn.Module,
        "torchtune.models.llama2.llama2",
        attributes=("tok_embeddings", "layers", "max_seq_len"),
    ),
    "checkpointer": _Kind(
        "a checkpointer",
        type(None),
        "tfidf_tune.training.HFCheckpointer",
        methods=("check_model", "load_weights", "save_model"),
    ),
    "tokenizer": _Kind(
        "a tokenizer",
        ModelTokenizer,
        "tfidf_tune.data.hf_tokenizer",
        methods=("encode",),
        attributes=("vocab_size", "max_seq_len", "pad_id"),
    ),
    "dataset": _Kind(
        "a map-style data set",
        Dataset,
        "tfidf_tune.data.text_blocks_dataset",
        methods=("__len__", "__getitem__"),
        attributes=("__len__", "__getitem__"),  # torch's base class has no length
    ),
    "loss": _Kind("one of tfidf_tune's objectives", WeightedCrossEntropyLoss, "tfidf_tune.loss.TFIDFCrossEntropyLoss"),
    "optimizer": _Kind(
        "an optimizer",
        Optimizer,
        "torch.optim.AdamW",
        methods=("step", "zero_grad"),
        attributes=("param_groups",),
    ),
    "lr_scheduler": _Kind(
        "a learning-rate schedule", LRScheduler, "transformers.get_linear_schedule_with_warmup", methods=("step",)
    ),
    "metric_logger": _Kind(
        "a metric logger",
        MetricLoggerInterface,
        "torchtune.training.metric_logging.DiskLogger",
        methods=("log_config", "log_dict", "close"),
    ),
}
_PART = _Kind("a module", nn.Module, "tfidf_tune.weighting.TFIDFWeighting")


def check_kind(
    where: str, path: str, component: Callable[..., Any], *, key: str | None, handed_over: Sequence[str] = ()
) -> None:
    """Refuse a class or function that does not make what its section needs, without calling it.

    A function has to be annotated with what it returns. One without an annotation is accepted if it takes what the
    recipe hands over (``tokenizer``, ``params``, ``optimizer``) by that name.

    Args:
        where (str): the section, for the message.
        path (str): as the config names the component.
        component (Callable[..., Any]): the class or function.
        key (str | None): the config's key; None for a part of a loss.
        handed_over (Sequence[str]): arguments that the recipe itself gives, the positional one first. Default: none.

    Raises:
        SetupError: If it makes something else, or does not declare what it makes.
    """
    kind = _PART if key is None else _KINDS[key]
    made = _what_it_makes(component)
    if made is None:
        if handed_over and handed_over[0] in inspect.signature(component).parameters:
            return
        raise SetupError(
            f"config: {where}: {path} does not declare what it returns, which has to be {kind.noun}: annotate its "
            f"return type, or take, for example, {kind.example}"
        )
    if not made or not all(map(kind.includes, made)):
        names = " or ".join(getattr(each, "__name__", str(each)) for each in made) or "nothing"
        raise SetupError(f"config: {where}: {path} makes {names}, not {kind.noun}: take, for example, {kind.example}")


def check_made(key: str, path: str, made: Any) -> None:
    """Refuse a component that lacks what the recipes need of it.

    Raises:
        SetupError: If it does.
    """
    kind = _KINDS[key]
    if lacking := [name for name in (*kind.methods, *kind.attributes) if not hasattr(made, name)]:
        raise SetupError(f"config: {key}: {path} has no {', '.join(lacking)}: take, for example, {kind.example}")


def _what_it_makes(component: Callable[..., Any]) -> list[Any] | None:
    """The possible types of what a class or function makes; None where its annotations do not say."""
    if inspect.isclass(component):
        return [component]
    try:
        annotation = inspect.signature(component, eval_str=True).return_annotation
    except NameError:  # a name that is imported for type checkers only
        return None
    if annotation is inspect.Signature.empty:
        return None
    possible = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return [get_origin(each) or each for each in possible if each not in (None, NoneType)]
