"""A training step on random tokens: what it reports, and the gradients that the optimizer sees."""

from typing import Any

import torch
from torch import nn

from helpers.fakes.tiny_llama import VOCAB_SIZE
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import StepResult, agree_on_step, train_step


def make_batch(
    num_sequences: int, length: int = 24, *, seed: int = 0, ignored: int = 0
) -> dict[str, torch.Tensor]:
    """Make a mini-batch whose first labels are ignored."""
    tokens = torch.randint(
        VOCAB_SIZE, (num_sequences, length), generator=torch.Generator().manual_seed(seed)
    )
    labels = tokens.clone()
    labels[:, :ignored] = -100
    return {"tokens": tokens, "labels": labels}


def step_and_gradients(
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    *batches: dict[str, torch.Tensor],
    **options: Any,
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Take a step that changes no weight; metrics and gradients are on the CPU."""
    gradients = {}

    class Recorder(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            gradients.update(
                {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
            )

    result = train_step(
        model,
        loss,
        Recorder([p for p in model.parameters() if p.requires_grad], lr=0.0),
        agree_on_step(batches),
        device=next(model.parameters()).device,
        **(
            {"scaler": torch.amp.GradScaler("cpu", enabled=False), "clip_grad_norm": None} | options
        ),
    )
    return result._replace(
        metrics={name: value.cpu() for name, value in result.metrics.items()}
    ), gradients
