"""Relearning: how few steps of plain training on a passage alone bring it back."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tfidf_tune._checks import check_at_least
from tfidf_tune.analysis._loading import require_known_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tfidf_tune.data import Passage


def relearning_steps(
    model: "PreTrainedModel",
    passages: Sequence["Passage"],
    *,
    prefix_length: int = 32,
    max_new_tokens: int = 32,
    max_steps: int = 50,
    learning_rate: float = 1e-4,
    progress: Callable[[int], None] | None = None,
) -> list[int | None]:
    """Count the steps of training on each passage alone until it is recited.

    Each passage starts from the model's own weights. A step is one of AdamW (without weight decay) on the mean
    cross-entropy of the prompt and its continuation, of a completion only on the continuation; all floating-point
    weights are trained, without dropout. A passage is recited when greedy decoding from the prompt gives the whole
    continuation, which the forward pass of the next step shows. Afterwards the model is as before.

    Args:
        model (PreTrainedModel): causal language model; half-precision weights round small steps away.
        passages (Sequence[Passage]): targets and controls.
        prefix_length (int): tokens of the prompt; a completion has its own.
        max_new_tokens (int): most tokens of the continuation that are to be recited.
        max_steps (int): after which a passage is given up; 0 only looks whether it is recited already.
        learning_rate (float): of AdamW, constant.
        progress (Callable[[int], None] | None): called after each passage with the number done.

    Returns:
        list[int | None]: steps by passage, 0 if it is recited without any; None if it is not after ``max_steps``.

    Raises:
        ValueError: If a number is out of range, or a passage is too short or too long or not of this vocabulary.
    """
    check_at_least(1, prefix_length=prefix_length, max_new_tokens=max_new_tokens)
    check_at_least(0, max_steps=max_steps)
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be above 0, got {learning_rate!r}")
    positions = getattr(model.config, "max_position_embeddings", None)
    divided = [passage.divide(prefix_length, max_new_tokens) for passage in passages]
    for passage, (prompt, continuation) in zip(passages, divided, strict=True):
        require_known_ids(model, np.asarray(passage.token_ids))
        if not continuation or (positions is not None and len(prompt) + len(continuation) > positions):
            raise ValueError(
                f"Passage {passage.id!r} has {len(prompt)} tokens of prompt and {len(continuation)} to recite, not 1 "
                f"or more within the model's {positions} positions: lower prefix_length or max_new_tokens."
            )
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    own = [(weight.detach().clone(), weight.requires_grad) for weight in weights]
    was_training = model.training
    model.eval()
    steps: list[int | None] = []
    try:
        for passage, (prompt, continuation) in zip(passages, divided, strict=True):
            for weight, (before, _) in zip(weights, own, strict=True):
                weight.data.copy_(before)
                weight.requires_grad_(True)
            ids = torch.tensor(prompt + continuation, device=weights[0].device)
            num_given = 1 if passage.num_prompt is None else len(prompt)
            optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
            steps.append(_steps_until_recited(model, optimizer, ids, len(prompt), num_given, max_steps))
            if progress is not None:
                progress(len(steps))
    finally:
        for weight, (before, was_trained) in zip(weights, own, strict=True):
            weight.data.copy_(before)
            weight.requires_grad_(was_trained).grad = None
        model.train(was_training)
    return steps


def _steps_until_recited(
    model: "PreTrainedModel",
    optimizer: torch.optim.Optimizer,
    ids_s: Tensor,
    num_prompt: int,
    num_given: int,
    max_steps: int,
) -> int | None:
    for step in range(max_steps + 1):
        logits_sv = model(input_ids=ids_s[None], use_cache=False).logits[0, :-1].float()
        if torch.equal(logits_sv[num_prompt - 1 :].argmax(dim=-1), ids_s[num_prompt:]):
            return step
        if step < max_steps:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits_sv[num_given - 1 :], ids_s[num_given:])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return None
