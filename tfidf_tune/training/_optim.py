"""Optimizer, learning-rate schedule and loss of the config."""

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchtune import config

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._config import FinetuneConfig


def build_loss(cfg: FinetuneConfig) -> WeightedCrossEntropyLoss:
    """Build the objective of the config.

    Raises:
        ValueError: If it is not one of tfidf_tune's.
    """
    loss = config.instantiate(cfg.loss)
    if not isinstance(loss, WeightedCrossEntropyLoss):
        raise ValueError(
            f"loss is {cfg.loss['_component_']}: these recipes take tfidf_tune's objectives, for example "
            "tfidf_tune.loss.TFIDFCrossEntropyLoss or tfidf_tune.loss.CrossEntropyLoss"
        )
    return loss


def build_optimizer(cfg: FinetuneConfig, model: nn.Module) -> Optimizer:
    """Build the optimizer of the config over the trainable parameters."""
    optimizer: Optimizer = config.instantiate(
        cfg.optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    return optimizer


def build_lr_scheduler(cfg: FinetuneConfig, optimizer: Optimizer, total_steps: int) -> Any:
    """Build the learning-rate schedule of the config over the steps of the run; None if it has none."""
    return config.instantiate(cfg.lr_scheduler, optimizer, num_training_steps=total_steps)
