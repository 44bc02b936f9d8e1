"""Token weightings in ms-swift: a loss for ``--loss_type``, registered in a file for ``--external_plugins``."""

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from swift.callbacks import TrainerCallback, callbacks_map
from swift.loss import BaseLoss, loss_map
from torch import Tensor

from tfidf_tune.loss import WeightedCrossEntropyLoss, token_cross_entropy
from tfidf_tune.weighting import IGNORE_INDEX, TFIDFWeighting, TokenWeighting, shift_labels
from tfidf_tune.weighting._weighting import check_weighting, require_no_tokens

__all__ = ["TokenWeightingLoss", "register_loss"]

_CALLBACK = "token_weighting"


def register_loss(name: str, weighting: TokenWeighting | None = None) -> None:
    """Register a loss with token weights, to be chosen by ``--loss_type``.

    Args:
        name (str): its name.
        weighting (TokenWeighting | None): gives the weights; each trainer takes a copy. Default: None,
            :class:`~tfidf_tune.weighting.TFIDFWeighting`.

    Raises:
        ValueError: If the name is one of ms-swift's own losses, or ``weighting`` is not a weighting or counts all
            tokens.
    """
    if name in loss_map and not isinstance(loss_map[name], partial):
        raise ValueError(f"name is {name!r}, a loss of ms-swift: choose another one")
    weighting = TFIDFWeighting() if weighting is None else weighting
    check_weighting("weighting", weighting)
    require_no_tokens(weighting, "ms-swift")
    loss_map[name] = partial(TokenWeightingLoss, weighting=weighting)


class TokenWeightingLoss(BaseLoss):  # type: ignore[misc]
    r"""The loss of ms-swift with token weights, :math:`-\frac{1}{M}\sum_i w_i \log P(x_i | x_{<i})`.

    M are the tokens of all mini-batches and ranks of a step. Without gradients, in evaluation, the loss is plain
    cross-entropy and the weighting stays as it is. A callback puts the state of the weighting into the checkpoints.

    Args:
        args (Any): training arguments of ms-swift.
        trainer (Any): trainer of ms-swift.
        weighting (TokenWeighting): gives the weights.

    Raises:
        ValueError: If a setting would be ignored, or sequences are packed or divided.
    """

    def __init__(self, args: Any, trainer: Any, *, weighting: TokenWeighting) -> None:
        super().__init__(args, trainer)
        _check_settings(args, trainer)
        self.weighting = copy.deepcopy(weighting).train()
        self.weighting.set_special_tokens(trainer.template.tokenizer.all_special_ids)
        self._loss = WeightedCrossEntropyLoss(self.weighting, num_output_chunks=1)
        if _CALLBACK not in args.callbacks:
            args.callbacks = [*args.callbacks, _CALLBACK]  # ms-swift makes its callbacks after the loss

    def __call__(
        self,
        outputs: Any,
        labels: Tensor,
        *,
        num_items_in_batch: Tensor | int | None = None,
        loss_scale: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the loss of a mini-batch with labels ``[b, s]``, which are not shifted.

        Raises:
            ValueError: If the data has weights of its own, ``loss_scale``.
        """
        if loss_scale is not None:
            raise ValueError("the data has weights of its own for its tokens: set --loss_scale default")
        labels = shift_labels(labels.to(outputs.logits.device))
        num_valid = (labels != IGNORE_INDEX).sum()
        count = num_valid if num_items_in_batch is None else num_items_in_batch
        if torch.is_grad_enabled():
            mean: Tensor = self._loss(outputs.logits, labels)
            return mean * (num_valid / count)
        return token_cross_entropy(outputs.logits, labels).sum() / count


def _check_settings(args: Any, trainer: Any) -> None:
    template = trainer.template
    if template.task_type != "causal_lm":
        raise ValueError(f"task_type is {template.task_type!r}: token weights are for 'causal_lm'")
    if template.padding_free:
        raise ValueError(
            "packing or padding_free is on, but a loss does not see where a document ends: set both to false"
        )
    if template.sequence_parallel_size > 1:
        raise ValueError(
            f"sequence_parallel_size is {template.sequence_parallel_size}, but weights need whole sequences: set it "
            "to 1"
        )
    if args.label_smoothing_factor != 0:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor}, which would be ignored: set it to 0"
        )
    if getattr(args, "enable_dft_loss", False):
        raise ValueError("enable_dft_loss is on, but its loss would be ignored: set it to false")


class _SaveWeighting(TrainerCallback):  # type: ignore[misc]
    """Saves the state of the weighting of each process in the checkpoints, and restores it."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        os.makedirs(folder, exist_ok=True)
        torch.save(self.trainer.compute_loss_func.weighting.state_dict(), folder / self._file_name(args))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            return
        file = Path(args.resume_from_checkpoint) / self._file_name(args)
        self.trainer.compute_loss_func.weighting.load_state_dict(
            torch.load(file, map_location="cpu", weights_only=True)
        )

    def _file_name(self, args: Any) -> str:
        return f"token_weighting_{args.process_index}.pth"


callbacks_map[_CALLBACK] = _SaveWeighting
