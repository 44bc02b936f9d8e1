"""Optimizer, learning-rate schedule, gradient scaler and loss of the config."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._components import instantiate, is_own
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._errors import SetupError
from tfidf_tune.training._run import Run


def build_loss(cfg: FinetuneConfig) -> WeightedCrossEntropyLoss:
    """Build the objective of the config.

    Raises:
        SetupError: If it cannot be built, or is not one of tfidf_tune's.
    """
    loss = instantiate(cfg, "loss")
    if not isinstance(loss, WeightedCrossEntropyLoss):
        raise SetupError(
            f"loss is {cfg.loss['_component_']}: these recipes need one of tfidf_tune's objectives, for example "
            "tfidf_tune.loss.TFIDFCrossEntropyLoss or tfidf_tune.loss.CrossEntropyLoss"
        )
    return loss


def build_optimizer(cfg: FinetuneConfig, parameters: Iterable[nn.Parameter], total_steps: int) -> tuple[Optimizer, Any]:
    """Build optimizer and learning-rate schedule of the config.

    Args:
        cfg (FinetuneConfig): the checked config.
        parameters (Iterable[nn.Parameter]): those without ``requires_grad`` are left out.
        total_steps (int): optimizer steps of the run, which the schedule spans.

    Returns:
        tuple[Optimizer, Any]: the optimizer; the schedule, None if the config has none.

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


def build_grad_scaler(run: Run) -> torch.amp.GradScaler:
    """Build the scaler that keeps fp16 gradients from vanishing; disabled for other dtypes."""
    return torch.amp.GradScaler(run.device.type, enabled=run.dtype is torch.float16)


def check_loss(cfg: FinetuneConfig) -> None:
    """Refuse an objective that cannot be built, unless it has a component of the user, which is not called here."""
    if is_own("loss", cfg.loss):
        build_loss(cfg)


def check_optimizer(cfg: FinetuneConfig) -> None:
    """Refuse an optimizer or schedule that cannot be built, on a dummy parameter."""
    build_optimizer(cfg, [nn.Parameter(torch.zeros(1))], total_steps=1)
