"""Token weightings in torchtitan: a Trainer and a loss, which a function puts into a config."""

import copy
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import CompileConfig
from torchtitan.trainer import Trainer

from tfidf_tune.integrations._state import from_bytes, to_bytes
from tfidf_tune.loss import token_cross_entropy
from tfidf_tune.weighting import IGNORE_INDEX, TFIDFWeighting, TokenWeighting
from tfidf_tune.weighting._weighting import check_weighting, require_no_tokens

__all__ = ["TokenWeightingLoss", "TokenWeightingTrainer", "with_token_weighting"]


def with_token_weighting(config: Trainer.Config, weighting: TokenWeighting | None = None) -> "Trainer.Config":
    """Return a config of torchtitan with token weights.

    Args:
        config (Trainer.Config): of a causal language model that is trained on cross-entropy.
        weighting (TokenWeighting | None): gives the weights; the trainer takes a copy. Default: None,
            :class:`~tfidf_tune.weighting.TFIDFWeighting`.

    Returns:
        Trainer.Config: of a :class:`TokenWeightingTrainer`, with the other settings of ``config``.

    Raises:
        ValueError: If ``weighting`` is not a weighting, needs the predictions of the model, or counts all tokens.
    """
    num_chunks = config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1
    loss = TokenWeightingLoss.Config(num_chunks=num_chunks, weighting=weighting or TFIDFWeighting())
    _check_weighting(loss.weighting)
    settings = {each.name: getattr(config, each.name) for each in fields(config)}
    return TokenWeightingTrainer.Config(**(settings | {"loss": loss}))


def _check_weighting(weighting: TokenWeighting) -> None:
    check_weighting("weighting", weighting)
    require_no_tokens(weighting, "torchtitan")
    if weighting.needs_predictions:
        raise ValueError(
            f"weighting is a {type(weighting).__name__}, which needs the model's predictions before the loss, but "
            "torchtitan computes logits and loss of one chunk of a sequence at a time: use a weighting without them"
        )


def _weighted_sum(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return (token_cross_entropy(logits, labels) * weights).sum()


class _ChunkLoss(BaseLoss):  # type: ignore[misc]
    """The weighted sum of the cross-entropies of a chunk, divided by all tokens of the step."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):  # type: ignore[misc]
        """No arguments."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.fn = _weighted_sum
        self._maybe_compile(compile_config)

    def __call__(
        self, pred: Tensor, labels: Tensor, global_valid_tokens: Tensor | None = None, *, weights: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        total = self.fn(pred, labels, weights)
        return (total if global_valid_tokens is None else total / global_valid_tokens), {}


class TokenWeightingLoss(ChunkedLossWrapper):  # type: ignore[misc]
    r"""The loss of torchtitan with token weights, :math:`-\frac{1}{M}\sum_i w_i \log P(x_i | x_{<i})`.

    M are the tokens of all mini-batches and ranks of a step. The weights of a mini-batch are computed from whole
    sequences; a document begins wherever ``positions`` are 0. Without gradients, in validation, the loss is plain
    cross-entropy and the weighting stays as it is.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """Arguments: ``num_chunks`` of torchtitan, and the weighting."""

        loss_fn: BaseLoss.Config = field(default_factory=_ChunkLoss.Config)
        weighting: Annotated[TokenWeighting, tyro.conf.Suppress] = field(default_factory=TFIDFWeighting)

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        super().__init__(config, compile_config=compile_config)
        self.weighting = copy.deepcopy(config.weighting).train()

    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of hidden states ``[b, s, d]`` and labels ``[b, s]``, which torchtitan has shifted."""
        if torch.is_grad_enabled():
            # Input and label of a document's last token are both in the document: torchtitan shifts inside of it.
            documents = None if positions is None else (positions == 0).cumsum(dim=1)
            weights = self.weighting(labels, document_ids=documents, vocab_size=self.lm_head.weight.shape[0])
        else:
            weights = (labels != IGNORE_INDEX).float()
        loss: tuple[Tensor, dict[str, Tensor]] = super().__call__(pred, labels, global_valid_tokens, weights=weights)
        return loss


class TokenWeightingTrainer(Trainer):  # type: ignore[misc]
    """The Trainer of torchtitan with the state of the weighting in its checkpoints, for each rank.

    Raises:
        ValueError: If the config has a loss without weights, parallelism that divides sequences or the vocabulary, or
            CUDA graphs, in which weights have not been tested.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):  # type: ignore[misc]
        """The config of torchtitan's Trainer."""

        loss: BaseLoss.Config = field(default_factory=TokenWeightingLoss.Config)

    def __init__(self, config: Config) -> None:
        _check_config(config)
        super().__init__(config)
        special = (getattr(self.tokenizer, name, None) for name in ("bos_id", "eos_id"))
        self.loss_fn.weighting.set_special_tokens(token_id for token_id in special if token_id is not None)

    @property
    def _state_name(self) -> str:
        return f"token_weighting_rank{dist.get_rank()}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the Trainer and of this rank's weighting."""
        state: dict[str, Any] = super().state_dict()
        return state | {self._state_name: to_bytes(self.loss_fn.weighting)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the Trainer and of this rank's weighting."""
        super().load_state_dict(state_dict)
        from_bytes(self.loss_fn.weighting, state_dict[self._state_name])


def _check_config(config: Trainer.Config) -> None:
    if not isinstance(config.loss, TokenWeightingLoss.Config):
        raise ValueError(
            f"loss is a {type(config.loss).__qualname__}, without weights: use with_token_weighting(config)"
        )
    _check_weighting(config.loss.weighting)
    for name in ("tensor", "context", "pipeline"):
        degree = getattr(config.parallelism, f"{name}_parallel_degree")
        if degree > 1:
            raise ValueError(
                f"parallelism.{name}_parallel_degree is {degree}, but the weights need whole sequences and the loss "
                "whole logits: set it to 1; data parallelism works"
            )
    if not config.training.disable_cuda_graphs:
        raise ValueError(
            "training.disable_cuda_graphs is False, but token weights have not been tested in torchtitan's CUDA "
            "graphs: set it to True"
        )
