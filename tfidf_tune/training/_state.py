"""The objects that a training step changes and a resume checkpoint saves."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tfidf_tune.loss import WeightedCrossEntropyLoss


@dataclass(frozen=True)
class TrainState:
    """Everything with a state that a training step reads and changes.

    Attributes:
        model (nn.Module): torchtune model with weights, ready for training.
        loss (WeightedCrossEntropyLoss): the objective.
        optimizer (Optimizer): over all parameters that are trained.
        lr_scheduler (Any): stepped after each optimizer step that was not skipped, or None.
        scaler (torch.amp.GradScaler): scales the loss under fp16; a disabled one does nothing.
    """

    model: nn.Module
    loss: WeightedCrossEntropyLoss
    optimizer: Optimizer
    lr_scheduler: Any
    scaler: torch.amp.GradScaler
