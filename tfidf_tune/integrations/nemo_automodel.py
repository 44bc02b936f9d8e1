"""Token weightings in NeMo AutoModel: a loss and a recipe, which a YAML file names."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction
from torch import Tensor

from tfidf_tune.integrations._state import from_bytes, to_bytes
from tfidf_tune.loss import token_predictions
from tfidf_tune.weighting import TFIDFWeighting, TokenWeighting
from tfidf_tune.weighting._weighting import check_weighting, require_no_tokens

__all__ = ["TokenWeightedCrossEntropy", "TokenWeightingRecipe"]


class TokenWeightedCrossEntropy(MaskedCrossEntropy):  # type: ignore[misc]
    r"""The cross-entropy of NeMo AutoModel with token weights, :math:`-\frac{1}{M}\sum_i w_i \log P(x_i | x_{<i})`.

    M are the tokens of all mini-batches and ranks of a step. The weights multiply those of the recipe, where it has
    any. Without gradients, in validation, the loss is that of NeMo AutoModel and the weighting stays as it is.

    Args:
        weighting (TokenWeighting | Mapping[str, Any] | None): gives the weights; in YAML a section with its class,
            ``_target_``, and arguments. Default: None, :class:`~tfidf_tune.weighting.TFIDFWeighting`.

    Raises:
        ValueError: If ``weighting`` is not a weighting, or counts all tokens.
    """

    def __init__(self, weighting: TokenWeighting | Mapping[str, Any] | None = None) -> None:
        super().__init__()
        made: Any = TFIDFWeighting() if weighting is None else weighting
        if isinstance(weighting, Mapping) and "_target_" in weighting:
            arguments = dict(weighting)
            made = arguments.pop("_target_")(**arguments)
        check_weighting("weighting", made)
        require_no_tokens(made, "NeMo AutoModel")
        self.weighting: TokenWeighting = made

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        num_label_tokens: int | None = None,
        loss_weights: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss of logits ``[b, s, v]`` and labels ``[b, s]``, which the data set has shifted."""
        if mask is not None:
            labels = labels.masked_fill(mask.view_as(labels) == 0, self.ignore_index)
        if torch.is_grad_enabled():
            predictions = token_predictions([logits], labels) if self.weighting.needs_predictions else None
            weights = self.weighting(labels, vocab_size=logits.shape[-1], predictions=predictions)
            loss_weights = weights if loss_weights is None else weights * loss_weights
        loss: Tensor = super().forward(logits, labels, num_label_tokens=num_label_tokens, loss_weights=loss_weights)
        return loss


class TokenWeightingRecipe(TrainFinetuneRecipeForNextTokenPrediction):  # type: ignore[misc]
    """The fine-tuning recipe with the state of the weighting in its checkpoints, for each rank.

    Raises:
        ValueError: If the config has another loss than :class:`TokenWeightedCrossEntropy`, packed sequences, whose
            documents the loss does not see, or parallelism that divides sequences or a mini-batch.
    """

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        # The recipe saves the attributes that have a state_dict, but no attribute whose name contains "loss".
        self.token_weighting = _State(self)

    def setup(self) -> None:
        """Build everything that the recipe needs, after a check of the config."""
        self._check_config()
        super().setup()
        if self.tokenizer is not None:
            self.loss_fn.weighting.set_special_tokens(self.tokenizer.all_special_ids)

    def _check_config(self) -> None:
        target = self.cfg.get("loss_fn._target_", None)
        if not (isinstance(target, type) and issubclass(target, TokenWeightedCrossEntropy)):
            raise ValueError(
                f"loss_fn is {target!r}, without weights: set loss_fn._target_ to {__name__}.TokenWeightedCrossEntropy"
            )
        if self.cfg.dataloader.packing is not None or self.cfg.dataloader.emits_thd:
            raise ValueError(
                "packed sequences are on, but the loss does not see where a document ends: remove packed_sequence"
            )
        for name in ("pp_size", "cp_size"):
            size = self.cfg.get(f"distributed.{name}", None) or 1
            if size > 1:
                raise ValueError(
                    f"distributed.{name} is {size}, but weights need the whole sequences of a mini-batch: set it to 1"
                )


class _State:
    """State of the weighting of a recipe, in the form that its distributed checkpoints take."""

    use_distributed_checkpointing = True

    def __init__(self, recipe: TokenWeightingRecipe) -> None:
        self._recipe = recipe

    def state_dict(self) -> dict[str, bytes]:
        return {f"rank{dist.get_rank()}": to_bytes(self._recipe.loss_fn.weighting)}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        from_bytes(self._recipe.loss_fn.weighting, state_dict[f"rank{dist.get_rank()}"])
