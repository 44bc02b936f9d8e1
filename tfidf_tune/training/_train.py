"""The training loop and its step."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._data import Batch
from tfidf_tune.training._errors import TrainingError
from tfidf_tune.training._metrics import ProgressLog
from tfidf_tune.training._milestones import milestone_name, milestone_steps
from tfidf_tune.training._run import Run


class StepResult(NamedTuple):
    """Scalars of one optimizer step, still on the device.

    Attributes:
        metrics (dict[str, Tensor]): ``loss`` (the objective), ``cross_entropy`` (unweighted, comparable between
            objectives), ``weight_std`` and ``weight_max`` over the valid tokens, ``grad_norm`` before clipping.
            Under fp16 also ``loss_scale``, what the next step's loss is multiplied by.
        num_tokens (Tensor): valid label tokens.
        skipped (bool): whether fp16 gradients overflowed, so that the weights stayed as they were.
    """

    metrics: dict[str, Tensor]
    num_tokens: Tensor
    skipped: bool


def shift_labels(labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Move labels one position to the left, so that position i holds the token that follows token i.

    Args:
        labels (Tensor): integer ``[b, s]``, aligned with the tokens.
        ignore_index (int): what the last position gets. Default: -100.

    Returns:
        Tensor: integer ``[b, s]``.
    """
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], ignore_index)], dim=1)


def train_step(
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    optimizer: Optimizer,
    batches: Sequence[Batch],
    *,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    clip_grad_norm: float | None,
) -> StepResult:
    r"""One optimizer step on one or more mini-batches, each counting by its share of the valid tokens.

    The gradient is that of :math:`\frac{1}{M}\sum_b M_b \mathcal{L}_b` with :math:`M_b` the valid tokens of mini-batch
    b: for plain cross-entropy exactly that of one large batch. Weights are those of each mini-batch.

    Args:
        model (nn.Module): torchtune model that returns what the loss takes, see :func:`prepare_model`.
        loss (WeightedCrossEntropyLoss): the objective, in ``.train()`` mode.
        optimizer (Optimizer): over all parameters that are trained; their gradients are cleared at the end.
        batches (Sequence[Batch]): mini-batches of ``tokens`` and ``labels``, int64 ``[b, s]``.
        scaler (torch.amp.GradScaler): scales the loss under fp16, where the model runs under autocast; a disabled one
            does nothing.
        device (torch.device): the model's device.
        clip_grad_norm (float | None): largest gradient norm. None: the norm is measured alone.

    Returns:
        StepResult: metrics and the number of tokens.
    """
    inputs = [batch["tokens"].to(device, non_blocking=True) for batch in batches]
    labels = [shift_labels(batch["labels"].to(device, non_blocking=True), loss.ignore_index) for batch in batches]
    num_valid = [(label != loss.ignore_index).sum() for label in labels]
    num_tokens = torch.stack(num_valid).sum()
    total = torch.zeros((), device=device)
    cross_entropy, squared_weights, weight_max = total.clone(), total.clone(), total.clone()
    for tokens, label, valid in zip(inputs, labels, num_valid, strict=True):
        with torch.autocast(device.type, torch.float16, enabled=scaler.is_enabled()):
            logits = model(tokens)
        terms = loss.terms(logits, label)
        del logits  # or they would stay whole while the backward pass lets them go chunk by chunk
        share = valid / num_tokens.clamp_min(1)
        torch.autograd.backward(scaler.scale(terms.loss * share))
        total += terms.loss.detach() * share
        cross_entropy += terms.cross_entropy * share
        squared_weights += terms.weights.square().sum()
        weight_max = torch.maximum(weight_max, terms.weights.max())
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(
        [parameter for group in optimizer.param_groups for parameter in group["params"]],
        float("inf") if clip_grad_norm is None else clip_grad_norm,
    )
    loss_scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    next_scale = scaler.get_scale()
    skipped = next_scale < loss_scale  # the sign of an overflow
    optimizer.zero_grad(set_to_none=True)
    variance = squared_weights / num_tokens.clamp_min(1) - 1  # the mean of the weights is 1
    metrics = {
        "loss": total,
        "cross_entropy": cross_entropy,
        "weight_std": variance.clamp_min(0).sqrt(),
        "weight_max": weight_max,
        "grad_norm": grad_norm,
    }
    if scaler.is_enabled():
        metrics["loss_scale"] = torch.tensor(next_scale)
    return StepResult(metrics, num_tokens, skipped)


def count_steps(cfg: FinetuneConfig, dataloader: DataLoader[Batch]) -> int:
    """Count the optimizer steps of the run: all epochs, or ``max_steps`` if that is less."""
    total = cfg.epochs * (len(dataloader) // cfg.gradient_accumulation_steps)
    return total if cfg.max_steps is None else min(total, cfg.max_steps)


def train(
    cfg: FinetuneConfig,
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    optimizer: Optimizer,
    lr_scheduler: Any,
    scaler: torch.amp.GradScaler,
    dataloader: DataLoader[Batch],
    *,
    total_steps: int,
    run: Run,
    progress: ProgressLog,
    save: Callable[[Path], None],
) -> None:
    """Train to the end of the run, saving at its milestones.

    Args:
        cfg (FinetuneConfig): the checked config.
        model (nn.Module): torchtune model, ready for training.
        loss (WeightedCrossEntropyLoss): the objective.
        optimizer (Optimizer): over the trainable parameters.
        lr_scheduler (Any): stepped after each optimizer step that was not skipped, or None.
        scaler (torch.amp.GradScaler): see :func:`train_step`.
        dataloader (DataLoader[Batch]): see :func:`~tfidf_tune.training.build_dataloader`.
        total_steps (int): optimizer steps of the run, see :func:`count_steps`.
        run (Run): gives device and folder.
        progress (ProgressLog): takes the metrics; not closed here.
        save (Callable[[Path], None]): writes a checkpoint into the given folder.

    Raises:
        TrainingError: If the loss is not finite at an entry of the log, a weight is not when it would be saved, or
            fp16 gradients overflow at any scale.
    """
    milestones = milestone_steps(cfg.save_at_percent, total_steps)
    model.train()
    loss.train()
    progress.start()
    steps = islice(_steps(cfg, dataloader), total_steps)
    batches = next(steps)
    for step in range(1, total_steps + 1):
        learning_rate = optimizer.param_groups[0]["lr"]
        result = train_step(
            model, loss, optimizer, batches, scaler=scaler, device=run.device, clip_grad_norm=cfg.clip_grad_norm
        )
        if result.skipped:
            progress.note(f"step {step}: gradients overflowed in fp16; step skipped, loss scale {scaler.get_scale():g}")
            if scaler.get_scale() < 1:
                raise TrainingError(
                    f"gradients overflow in fp16 at step {step} even without a loss scale: try dtype=bf16, or a lower "
                    "learning rate; checkpoints of earlier steps are whole"
                )
        elif lr_scheduler is not None:
            lr_scheduler.step()
        if step not in milestones:
            batches = next(steps, [])  # before metrics are read: until then a GPU is still at work
        progress.step(step, {**result.metrics, "lr": learning_rate}, result.num_tokens)
        if step in milestones:
            _require_finite(model, step)
            for percent in milestones[step]:
                save(run.output_dir / milestone_name(percent))
                progress.restart_clock()
            batches = next(steps, [])  # a fault of the data must not cost the checkpoint


def _require_finite(model: nn.Module, step: int) -> None:
    """Let no checkpoint be written of a model that is lost, whose loss may not be logged before."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not parameter.isfinite().all():
            raise TrainingError(
                f"{name} is not finite after step {step}: try a lower learning rate, fp32, clipping; "
                "checkpoints of earlier steps are whole"
            )


def _steps(cfg: FinetuneConfig, dataloader: DataLoader[Batch]) -> Iterator[list[Batch]]:
    """The mini-batches of each step, epoch after epoch; what does not fill a step at an epoch's end is left out."""
    size = cfg.gradient_accumulation_steps
    for epoch in range(cfg.epochs):
        cast("DistributedSampler[Any]", dataloader.sampler).set_epoch(epoch)
        batches = iter(dataloader)
        while len(step := list(islice(batches, size))) == size:
            yield step
