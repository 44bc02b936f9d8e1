"""Token weightings and the monitor of memorization in Axolotl, by keys of its YAML file.

plugins:
  - tfidf_tune.integrations.axolotl.TokenWeightingPlugin
token_weighting: tfidf
token_weighting_args: {num_batches: 16}
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import BasePlugin, PluginManager
from axolotl.utils.dict import DictDefault
from axolotl.utils.import_helper import get_cls_from_module_str
from pydantic import BaseModel, model_validator
from transformers import Trainer, TrainerCallback

from tfidf_tune import weighting as weightings
from tfidf_tune._checks import closest
from tfidf_tune._printing import say
from tfidf_tune.integrations.monitor import MemorizationCallback
from tfidf_tune.integrations.transformers import TokenWeightingMixin
from tfidf_tune.passages import check_canaries
from tfidf_tune.weighting import TokenWeighting

__all__ = ["TokenWeightingArgs", "TokenWeightingPlugin"]

WEIGHTINGS: dict[str, type[TokenWeighting]] = {
    "tfidf": weightings.TFIDFWeighting,
    "goldfish": weightings.GoldfishWeighting,
    "mile": weightings.MiLeWeighting,
    "focal": weightings.FocalWeighting,
    "repetition": weightings.RepetitionWeighting,
    "ce": weightings.UniformWeighting,
    "uniform": weightings.UniformWeighting,
}

_OTHER_OBJECTIVES = (
    "rl",
    "reward_model",
    "process_reward_model",
    "orpo_alpha",
    "use_eaft",
    "chunked_cross_entropy",
    "cut_cross_entropy",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)


class TokenWeightingArgs(BaseModel):
    """The keys of the plugin, checked with the whole file before Axolotl loads data or a model.

    Attributes:
        token_weighting (str): name of the weighting, or the dotted path of a subclass of
            ``TokenWeighting``.
        token_weighting_args (dict[str, Any] | None): its arguments.
        memorization_monitor (dict[str, Any] | None): arguments of
            :class:`~tfidf_tune.integrations.monitor.MemorizationCallback` without ``trainer``.
        canary_check (dict[str, Any] | None): arguments of
            :func:`~tfidf_tune.passages.check_canaries` without ``trainer``.
    """

    token_weighting: str = "tfidf"
    token_weighting_args: dict[str, Any] | None = None
    memorization_monitor: dict[str, Any] | None = None
    canary_check: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def check_around_token_weighting(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Raise a ``ValueError`` for misspelled keys and for settings that weights cannot be
        combined with.
        """
        for key in data.keys() - cls.model_fields.keys():  # Axolotl ignores them
            suggestion = closest(key, TokenWeightingArgs.model_fields)
            if suggestion:
                raise ValueError(f"{key} is no key of Axolotl or of a plugin{suggestion}")
        settings = {name: field.default for name, field in cls.model_fields.items()} | data
        for name in _OTHER_OBJECTIVES:
            value = settings.get(name)
            if value:
                raise ValueError(
                    f"{name} is {value}, which puts another loss in place of ours: set it to false"
                )
        for name in ("context_parallel_size", "sequence_parallel_degree"):
            value = settings.get(name) or 1
            if value > 1:
                raise ValueError(
                    f"{name} is {value}, but weights need whole sequences in each process: set it "
                    "to 1"
                )
        return data

    @model_validator(mode="after")
    def check_token_weighting(self) -> "TokenWeightingArgs":
        """Raise a ``ValueError`` for wrong names and arguments, and for packed rows if all tokens
        are counted.
        """
        weighting = _build_weighting(self.token_weighting, self.token_weighting_args)
        is_packed = getattr(self, "sample_packing", False)  # a field of Axolotl's own model
        if weighting.needs_tokens and is_packed:
            raise ValueError(
                "sample_packing is true, and without an attention mask padding would be counted as "
                "tokens: set sample_packing to false, or counted to labels"
            )
        for key, target in (
            ("memorization_monitor", MemorizationCallback),
            ("canary_check", check_canaries),
        ):
            given = getattr(self, key)
            if given is None:
                continue
            _check_arguments(key, target, {**given, "trainer": None})
            file = Path(given["probe_file"])
            if not file.is_file():
                raise ValueError(f"probe_file of {key} is {file}: there is no such file")
        return self


class TokenWeightingPlugin(BasePlugin):  # type: ignore[misc]
    """Plugin of Axolotl that trains on weighted cross-entropy, see :class:`TokenWeightingArgs` for
    its keys.

    Everything but the loss is Axolotl's own: sample packing, whose documents are those of the
    weights, adapters, evaluation. With gradient accumulation Axolotl averages the losses of the
    mini-batches, and so does the plugin: with uniform weights the training is that without it.
    """

    def get_input_args(self) -> str:
        """Return the dotted name of the model of the plugin's keys."""
        return f"{TokenWeightingArgs.__module__}.{TokenWeightingArgs.__name__}"

    def register(self, cfg: DictDefault) -> None:
        """Raise a ``ValueError`` if another plugin has a trainer of its own."""
        for name, plugin in PluginManager.get_instance().plugins.items():
            is_another = name in cfg.plugins and plugin is not self
            if is_another and plugin.get_trainer_cls(cfg) is not None:
                raise ValueError(
                    f"the plugin {name} has a trainer of its own, but Axolotl uses one: remove one "
                    "plugin"
                )

    def get_trainer_cls(self, cfg: DictDefault) -> type[Trainer]:
        """Return the trainer class of a configuration with token weights."""
        base: Any = AxolotlTrainer
        if cfg.trainer_cls:
            base = get_cls_from_module_str(cfg.trainer_cls)
        weighting = _build_weighting(cfg.token_weighting, cfg.token_weighting_args)

        class TokenWeightingAxolotlTrainer(TokenWeightingMixin, base):  # type: ignore[misc]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, weighting=weighting, **kwargs)
                # Axolotl averages the losses of accumulated mini-batches: it does not have the
                # tokens counted.
                self.model_accepts_loss_kwargs = self._model_takes_num_items

        return TokenWeightingAxolotlTrainer

    def post_trainer_create(self, cfg: DictDefault, trainer: Trainer) -> None:
        """Raise a ``ValueError`` if canaries do not arrive as they should, before training."""
        if cfg.canary_check is not None:
            found = check_canaries(trainer, **cfg.canary_check)
            if trainer.is_world_process_zero():
                say(str(found))

    def add_callbacks_post_trainer(
        self, cfg: DictDefault, trainer: Trainer
    ) -> list[TrainerCallback]:
        """Return the monitor, if there is one."""
        if cfg.memorization_monitor is None:
            return []
        return [MemorizationCallback(**cfg.memorization_monitor, trainer=trainer)]


def _build_weighting(
    token_weighting: str, token_weighting_args: Mapping[str, Any] | None = None
) -> TokenWeighting:
    weighting: Any = WEIGHTINGS.get(token_weighting)
    if weighting is None:
        with suppress(ImportError, AttributeError, ValueError):
            weighting = get_cls_from_module_str(token_weighting)
    if not (isinstance(weighting, type) and issubclass(weighting, TokenWeighting)):
        raise ValueError(
            f"token_weighting is {token_weighting!r}: possible are {', '.join(WEIGHTINGS)}, or the "
            "dotted path of a subclass of TokenWeighting"
        )
    arguments = dict(token_weighting_args or {})
    _check_arguments("token_weighting_args", weighting, arguments)
    return weighting(**arguments)


def _check_arguments(key: str, target: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    signature = inspect.signature(target)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = [name for name in signature.parameters if arguments.get(name, "") is not None]
        possible = ", ".join(names) or "none"
        raise ValueError(f"{key}: {error}; possible are {possible}") from error
