"""The training loop and its step."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._signals import Interrupted, stop_request
from tfidf_tune.loss import WeightedCrossEntropyLoss, weight_statistics, weight_sums
from tfidf_tune.training import _data as data
from tfidf_tune.training._distributed import gather_tensors, is_lost_process
from tfidf_tune.training._errors import (
    LostProcessError,
    TrainingError,
    first_line,
    is_out_of_memory,
)
from tfidf_tune.training._metrics import ProgressLog, StepGuard, require_finite
from tfidf_tune.training._monitor import MemorizationMonitor
from tfidf_tune.training._resume import ResumePoint, TrainState
from tfidf_tune.training._run import Run, milestone_name, milestone_steps
from tfidf_tune.weighting import TokenBatch


class StepResult(NamedTuple):
    """Scalars of one optimizer step over all processes, metrics still on the device.

    Attributes:
        metrics (dict[str, Tensor]): ``loss`` (the objective), ``cross_entropy`` (unweighted,
            comparable between objectives), ``weight_mean``, ``weight_std`` and ``weight_max`` over
            the valid tokens, ``grad_norm`` before clipping; under fp16 also ``loss_scale``, the
            factor of the next step's loss.
        num_tokens (int): valid label tokens.
        num_sequences (int): rows of all mini-batches, on all processes.
        is_finite (Tensor): bool scalar: whether loss and gradient are; under fp16 only the loss,
            since gradients overflow occasionally.
        is_lost (bool): whether ``is_finite`` was checked and false, so that the weights did not
            change.
        overflowed (Tensor | None): bool scalar under fp16: whether they did not because gradients
            overflowed.
    """

    metrics: dict[str, Tensor]
    num_tokens: int
    num_sequences: int
    is_finite: Tensor
    is_lost: bool
    overflowed: Tensor | None


def train_step(
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    optimizer: Optimizer,
    batches: data.StepBatches,
    *,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    clip_grad_norm: float | None,
    look_at_finite: bool = False,
    first_pass: bool = True,
) -> StepResult:
    r"""One optimizer step on one or more mini-batches on each process, each counting by its share
    of the valid tokens.

    The gradient is that of :math:`\frac{1}{M}\sum_b M_b \mathcal{L}_b` with :math:`M_b` the valid
    tokens of mini-batch b and the sum over the mini-batches of all processes: for plain
    cross-entropy exactly the gradient of one large batch. Weights are computed within each
    mini-batch.

    Args:
        model (nn.Module): torchtune model that returns what the loss takes, see
            :func:`prepare_model`.
        loss (WeightedCrossEntropyLoss): the objective, in ``.train()`` mode.
        optimizer (Optimizer): over all parameters that are trained; their gradients are cleared at
            the end.
        batches (StepBatches): the mini-batches, of :func:`agree_on_step`.
        scaler (torch.amp.GradScaler): enabled under fp16, where the model runs under autocast.
        device (torch.device): the model's device.
        clip_grad_norm (float | None): largest gradient norm. None: the norm is only measured.
        look_at_finite (bool): leave the weights unchanged if loss or gradient is not finite; the
            host waits for the device. Default: False.
        first_pass (bool): False from the second epoch on, for weightings that count what they have
            seen. Default: True.
    """
    # Loss and gradients of all mini-batches.
    sums = _accumulate_gradients(
        model, loss, batches, scaler=scaler, device=device, first_pass=first_pass
    )
    num_tokens = batches.num_tokens

    # FSDP2 has summed the gradients over the processes; the metrics are summed here.
    gathered = gather_tensors(sums)
    total, cross_entropy, weight_sum, deviations, _ = gathered.sum(0)

    # The gradient is scaled back and clipped; its norm is reported as it was before.
    scaler.unscale_(optimizer)
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    largest_norm = math.inf if clip_grad_norm is None else clip_grad_norm
    grad_norm = nn.utils.clip_grad_norm_(parameters, largest_norm)
    if isinstance(grad_norm, DTensor):
        grad_norm = grad_norm.full_tensor().to(device)  # offloaded gradients are not there
    is_finite = total.isfinite()
    if not scaler.is_enabled():
        is_finite = is_finite & grad_norm.isfinite()

    # The optimizer's step. The scaler leaves out a step whose scaled gradients overflow, and lowers
    # its scale.
    loss_scale = scaler.scale(torch.ones((), device=device))
    is_lost = look_at_finite and not is_finite
    if not is_lost:
        scaler.step(optimizer)
    scaler.update()
    next_scale = scaler.scale(torch.ones((), device=device))
    optimizer.zero_grad(set_to_none=True)

    # What is reported, still on the device.
    weight_mean, weight_std = weight_statistics(weight_sum, deviations, num_tokens)
    metrics = {
        "loss": total,
        "cross_entropy": cross_entropy,
        "weight_mean": weight_mean,
        "weight_std": weight_std,
        "weight_max": gathered[:, 4].max(),
        "grad_norm": grad_norm,
    }
    overflowed = None
    if scaler.is_enabled():
        metrics["loss_scale"] = next_scale
        overflowed = next_scale < loss_scale
    return StepResult(
        metrics=metrics,
        num_tokens=num_tokens,
        num_sequences=batches.num_sequences,
        is_finite=is_finite,
        is_lost=is_lost,
        overflowed=overflowed,
    )


def _accumulate_gradients(
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    batches: data.StepBatches,
    *,
    scaler: torch.amp.GradScaler,
    device: torch.device,
    first_pass: bool,
) -> Tensor:
    """Add up the gradients of the mini-batches of this process.

    A mini-batch counts by its share of the tokens of all processes: with 300 and 100 tokens in two
    of them, 3/4 of the first loss and 1/4 of the second are summed. Nothing is read from the device
    here.

    Returns:
        Tensor: float32 ``[5]``: objective, cross-entropy, sum and squared deviations of the
            weights, largest weight; of this process.
    """
    sums = torch.zeros(4, device=device)
    weight_max = torch.zeros(1, device=device)
    inputs = [data.to_device(batch, device) for batch in batches.batches]
    for batch, valid, shape in zip(inputs, batches.num_valid, batches.largest_shapes, strict=True):
        labels = batch["labels"]
        documents = {name: batch[name] for name in ("mask", "input_pos") if name in batch}
        with torch.autocast(device.type, torch.float16, enabled=scaler.is_enabled()):
            logits = model(batch["tokens"], **documents)
        token_batch = TokenBatch(
            labels,
            batch.get("document_ids"),
            batch.get(data.UNPADDED_TOKENS),
            largest_shape=shape,
            first_pass=first_pass,
        )
        terms = loss.terms(logits, token_batch)
        # Otherwise they would stay complete while the backward pass frees them chunk by chunk.
        del logits
        share = valid / max(batches.num_tokens, 1)
        torch.autograd.backward(scaler.scale(terms.loss * share))
        losses = (terms.loss.detach() * share, terms.cross_entropy * share)
        sums += torch.stack([*losses, *weight_sums(terms.weights, labels)])
        weight_max = torch.maximum(weight_max, terms.weights.max())
    return torch.cat([sums, weight_max])


def build_grad_scaler(run: Run) -> torch.amp.GradScaler:
    """Build the scaler that keeps fp16 gradients from vanishing; disabled for other dtypes."""
    return torch.amp.GradScaler(run.device.type, enabled=run.dtype is torch.float16)


def count_steps(cfg: FinetuneConfig, dataloader: DataLoader[data.Batch]) -> int:
    """Count the optimizer steps of the run: all epochs, or ``max_steps`` if that is less."""
    total = cfg.epochs * data.steps_per_epoch(cfg, dataloader)
    return total if cfg.max_steps is None else min(total, cfg.max_steps)


class _Checkpoints:
    """The milestones of a run, written by ``save(folder)``, and its checkpoints to resume from."""

    def __init__(
        self,
        cfg: FinetuneConfig,
        state: TrainState,
        run: Run,
        progress: ProgressLog,
        resume: ResumePoint,
        save: Callable[[Path], None],
    ) -> None:
        self._every_n_steps = cfg.save_every_n_steps if resume.is_kept else None
        self._milestones = milestone_steps(cfg.save_at_percent, progress.total_steps)
        self._state = state
        self._folder = run.output_dir
        self._progress = progress
        self._resume = resume
        self._save = save

    def missing(self) -> list[str]:
        """Return the milestones of steps that are done already, which will not be written."""
        names = []
        for step, percent in self._milestones.items():
            name = milestone_name(percent)
            if step <= self._resume.step and not (self._folder / name).is_dir():
                names.append(name)
        return names

    def is_due(self, step: int) -> bool:
        """Return whether a step is saved, as a milestone or to resume from."""
        if step in self._milestones:
            return True
        return self._every_n_steps is not None and step % self._every_n_steps == 0

    def write(self, step: int) -> None:
        """Write the milestone of a step, if it has one, and the checkpoint to resume from."""
        require_finite(self._state.model, step)
        if step in self._milestones:
            self._save(self._folder / milestone_name(self._milestones[step]))
        if self._resume.is_kept:
            self._resume.save(step, self._state, self._progress)
        self._progress.restart_clock()

    def write_early_end(self, step: int) -> str:
        """Write a run that ends before its last step, also as a milestone; return the
        name of that.
        """
        # Rounded up, 33 of 70 steps to 48 %: not the name of an earlier milestone.
        percent = self._milestones.setdefault(step, -(-100 * step // self._progress.total_steps))
        self.write(step)
        return milestone_name(percent)


def train(
    cfg: FinetuneConfig,
    state: TrainState,
    dataloader: DataLoader[data.Batch],
    run: Run,
    progress: ProgressLog,
    resume: ResumePoint,
    *,
    save: Callable[[Path], None],
    monitor: MemorizationMonitor | None = None,
) -> None:
    """Train to the end of the run; write milestones, by ``save(folder)``, and resume checkpoints.

    Raises:
        TrainingError: If loss or gradient is not finite, weights are 0 for too many steps, fp16
            gradients overflow at any scale, a checkpoint cannot be written, or the model is above
            the monitor's threshold from the start.
        Interrupted: If SIGTERM, SIGINT or SIGHUP was received; the step was finished and saved.
    """
    total_steps = progress.total_steps
    state.model.train()
    state.loss.train()
    checkpoints = _Checkpoints(cfg, state, run, progress, resume, save)
    missing = ", ".join(checkpoints.missing())
    if missing:
        progress.note(
            f"{missing} of save_at_percent will not be written: step {resume.step} is done already"
        )
    if resume.step >= total_steps:
        progress.note(f"the run is finished: all {total_steps} steps are done already")
        return
    guard = StepGuard(
        run.device,
        cfg.on_non_finite == "skip",
        total_steps,
        partial(data.step_indices, cfg, dataloader),
        progress.note,
    )
    steps = data.step_batches(cfg, dataloader, first_step=resume.step + 1)

    # Step 0 is measured; then each step is taken, checked, logged, measured and saved.
    with stop_request() as request, _naming_last_checkpoint(resume):
        progress.start()
        if monitor is not None and resume.step == 0:
            _measure_before_training(monitor, state, progress, save)
        # The last thing before training, because measuring may draw numbers.
        resume.restore_random_states()
        batches = _next_batches(steps, request)
        for step in range(resume.step + 1, total_steps + 1):
            # A tensor would change under the schedule.
            learning_rate = float(state.optimizer.param_groups[0]["lr"])
            result = train_step(
                state.model,
                state.loss,
                state.optimizer,
                batches,
                scaler=state.scaler,
                device=run.device,
                clip_grad_norm=cfg.clip_grad_norm,
                look_at_finite=guard.looks_at_each_step,
                first_pass=step <= data.steps_per_epoch(cfg, dataloader),
            )
            guard.add(step, result.is_finite, result.metrics, num_tokens=result.num_tokens)

            # A GPU still computes: the next batches are fetched before anything waits for it. A
            # step that is measured or saved fetches them afterwards, so that an error in the data
            # does not cost the checkpoint.
            is_measured = monitor is not None and monitor.is_due(step, total_steps)
            is_saved = checkpoints.is_due(step)
            if not (is_measured or is_saved):
                batches = _next_batches(steps, request)

            # The schedule follows the steps that changed the weights.
            overflowed = _look_at_overflow(step, result, state, progress)
            is_step_taken = not overflowed and not result.is_lost
            if is_step_taken and state.lr_scheduler is not None:
                state.lr_scheduler.step()

            # The step is checked and logged.
            if guard.looks_at_each_step or is_measured or is_saved or progress.is_due(step):
                guard.check()
            metrics: dict[str, Tensor | float] = {
                **result.metrics,
                "lr": learning_rate,
                "num_sequences": result.num_sequences,
            }
            progress.step(step, metrics, result.num_tokens)

            # The model is measured, which can end the run, and saved.
            if monitor is not None and is_measured:
                reason = monitor.measure(step, state.model, progress, save)
                if reason is not None and step < total_steps:
                    milestone = checkpoints.write_early_end(step)
                    progress.note(
                        f"the run ends after step {step} of {total_steps}: {reason}; {milestone} "
                        f"is written; {resume.last_checkpoint()}"
                    )
                    return
            if is_saved:
                checkpoints.write(step)
            if is_measured or is_saved:
                batches = _next_batches(steps, request)

            # A signal ends the run after its step is saved.
            if batches.stop and step < total_steps:
                if resume.is_kept and not is_saved:
                    guard.check()
                    checkpoints.write(step)
                raise Interrupted(
                    f"stopped after step {step} of {total_steps}; {resume.last_checkpoint()}",
                    batches.stop,
                )


def _next_batches(steps: Iterator[list[data.Batch]], request: SimpleNamespace) -> data.StepBatches:
    """Return the batches of the next step, none after the last one, and whether any process is
    asked to stop.
    """
    return data.agree_on_step(next(steps, []), stop=request.signal_number)


def _measure_before_training(
    monitor: MemorizationMonitor,
    state: TrainState,
    progress: ProgressLog,
    save: Callable[[Path], None],
) -> None:
    """Measure step 0; a threshold that the model exceeds before it has learned anything is an
    error.
    """
    reason = monitor.measure(0, state.model, progress, save)
    if reason is not None:
        raise TrainingError(
            f"before training {reason}: choose a higher threshold, or other targets"
        )


def _look_at_overflow(
    step: int, result: StepResult, state: TrainState, progress: ProgressLog
) -> bool:
    """Return whether fp16 gradients overflowed, so that the step was left out; an error if no lower
    scale is left.

    Under fp16 each step is waited for: the schedule must not follow what was left out.
    """
    is_overflow = result.overflowed is not None and bool(result.overflowed)
    if not is_overflow:
        return False
    scale = state.scaler.get_scale()
    progress.note(f"step {step}: gradients overflowed in fp16; step skipped, loss scale {scale:g}")
    if scale < 1:
        raise TrainingError(f"gradients overflow in fp16 at step {step} even without a loss scale")
    return True


@contextmanager
def _naming_last_checkpoint(resume: ResumePoint) -> Iterator[None]:
    """Name the last checkpoint in errors that end a run, including the loss of another process."""
    try:
        yield
    except TrainingError as error:
        raise TrainingError(f"{error}; {resume.last_checkpoint()}") from error
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise TrainingError(
                f"out of memory ({first_line(error)}): try enable_activation_checkpointing=True, "
                "fsdp_cpu_offload=True or more processes; for a new run also a smaller batch_size "
                "with more gradient_accumulation_steps, shorter sequences, LoRA; "
                f"{resume.last_checkpoint()}"
            ) from error
        if not is_lost_process(error):
            raise
        raise LostProcessError(
            "another process of the run was lost: its own message or torchrun's says why; "
            f"{resume.last_checkpoint()}"
        ) from error
