"""Metrics: the user's logger, ``metrics.jsonl``, the progress bar; and steps that learn nothing,
which end a run.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torchtune import training
from torchtune.utils import get_world_size_and_rank
from tqdm import tqdm

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import atomic_file, sync_to_disk
from tfidf_tune.training._config import loggable
from tfidf_tune.training._distributed import (
    gather_objects,
    is_main_process,
    local_tensor,
    parameters_by_name,
)
from tfidf_tune.training._errors import TrainingError
from tfidf_tune.training._folder import CONFIG, METRICS
from tfidf_tune.training._run import Run
from tfidf_tune.training.components import default_arguments, instantiate

_REMEDY = "try a lower learning rate, fp32, clipping"
# This many bad steps in a row are not chance: even if batches are so small that one step in ten has
# no token left, ten in a row come once in 10 billion steps.
_MAX_IN_A_ROW = 10
_MAX_INDICES_SHOWN = 32


class JSONLinesLogger:
    """Appends a JSON object for each entry, ``{"step": 1, "loss": 2.5}``, to an earlier run's up to
    ``last_step``.
    """

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        lines = path.read_bytes().splitlines() if path.is_file() else []
        kept = [line + b"\n" for line in lines if _step_of(line) <= last_step]
        with atomic_file(path) as temporary:
            temporary.write_bytes(b"".join(kept))
        self.path = path
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Write and flush one line; NaN and infinity become null."""
        entry: dict[str, float | None] = {"step": step}
        for name, value in payload.items():
            entry[name] = value if math.isfinite(value) else None
        try:
            self._file.write(json.dumps(entry) + "\n")
            self._file.flush()
        except OSError as error:
            raise TrainingError(f"{self.path} could not be written: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _step_of(line: bytes) -> float:
    """Return the step of a line of a log, infinity if a crash of the machine has damaged it."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return step if isinstance(step, int) else math.inf


@dataclass
class ProgressLog:
    """Reports steps to torchtune loggers (on rank 0) and on a progress bar with loss, tokens/s and
    remaining time.
    """

    loggers: list[Any]
    total_steps: int
    log_every_n_steps: int
    steps_done: int = 0
    tokens_seen: int = 0  # label tokens of the whole run on all processes
    memory_device: torch.device | None = None
    # Made by start(), because loading shows another bar.
    _bar: Any = field(default=None, init=False)

    def start(self) -> None:
        """Start bar and clock."""
        self._bar = tqdm(
            total=self.total_steps,
            initial=self.steps_done,
            unit="step",
            dynamic_ncols=True,
            disable=not is_main_process(),
        )
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last entry, for example of saving, from the
        tokens per second.
        """
        self._tokens = 0  # since the last entry
        self._start = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Return whether a step gets an entry."""
        return step % self.log_every_n_steps == 0 or step == self.total_steps

    def step(self, step: int, metrics: Mapping[str, Tensor | float], num_tokens: int) -> None:
        """Count a finished step, from 1; its metrics are read from the device only when an entry is
        due.
        """
        self._tokens += num_tokens
        self.tokens_seen += num_tokens
        self._bar.update()
        if not self.is_due(step):
            return
        values = dict(metrics)
        on_device = {name: value for name, value in metrics.items() if isinstance(value, Tensor)}
        if on_device:
            # One transfer for all: each would wait for the device.
            numbers = torch.stack([value.double() for value in on_device.values()]).tolist()
            values |= zip(on_device, numbers, strict=True)
        num_processes, _ = get_world_size_and_rank()
        tokens_per_second = self._tokens / num_processes / (time.perf_counter() - self._start)
        values["tokens_per_second_per_gpu"] = tokens_per_second
        if self.memory_device is not None:
            values |= training.get_memory_stats(device=self.memory_device)
        self.log(step, values)
        self._bar.set_postfix_str(
            f"loss {values['loss']:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False
        )
        self.restart_clock()

    def log(self, step: int, metrics: Mapping[str, Tensor | float]) -> None:
        """Write an entry of a step, which may have others."""
        for logger in self.loggers:
            logger.log_dict(metrics, step=step)

    def note(self, text: str) -> None:
        """Print a line above the progress bar."""
        if is_main_process():
            tqdm.write(text, file=sys.stderr)

    def sync_to_disk(self) -> None:
        """Flush ``metrics.jsonl`` to disk."""
        for logger in self.loggers:
            if isinstance(logger, JSONLinesLogger):
                sync_to_disk(logger.path)

    def close(self) -> None:
        """Close loggers and bar."""
        if self._bar is not None:
            self._bar.close()
        for logger in self.loggers:
            logger.close()


@contextmanager
def open_progress(
    cfg: FinetuneConfig, run: Run, total_steps: int, steps_done: int = 0, tokens_seen: int = 0
) -> Iterator[ProgressLog]:
    """Write the resolved config with all defaults, open ``metrics.jsonl`` and the config's logger;
    rank 0 writes.

    Entries of the ``steps_done`` stay in ``metrics.jsonl``; ``tokens_seen`` are the label tokens of
    those steps.

    Raises:
        SetupError: If the metric logger cannot be built from these settings.
    """
    loggers: list[Any] = []
    if is_main_process():
        metric_logger = instantiate(cfg, "metric_logger")
        # The config is the first file: with it a run that is started again knows that the others
        # are of a run.
        text = OmegaConf.to_yaml(cast(DictConfig, cfg)) + default_arguments(cfg)
        with atomic_file(run.output_dir / CONFIG) as file:
            file.write_text(text, encoding="utf-8")
        metric_logger.log_config(loggable(cast(DictConfig, cfg)))
        loggers = [JSONLinesLogger(run.output_dir / METRICS, last_step=steps_done), metric_logger]
    memory_device = run.device if cfg.log_peak_memory_stats and run.device.type == "cuda" else None
    progress = ProgressLog(
        loggers, total_steps, cfg.log_every_n_steps, steps_done, tokens_seen, memory_device
    )
    try:
        yield progress
    finally:
        progress.close()


@dataclass
class StepGuard:
    """Stops a run, or skips a step, if loss or gradient is not finite; stops a run whose weights
    are all 0.

    ``indices_of`` gives the items of the data set of a step, ``note`` reports a skipped one. On a
    GPU the loss is read only at logged or saved steps, unless ``looks_at_each_step``.
    """

    device: torch.device
    skip: bool
    total_steps: int
    indices_of: Callable[[int], list[int]]
    note: Callable[[str], None]
    _num_skipped: int = 0  # in a row
    _num_weightless: int = 0  # in a row
    # Since the last check; values stay on the device, so that reading can wait.
    _recorded: list[tuple[int, int, Tensor]] = field(default_factory=list)

    @property
    def looks_at_each_step(self) -> bool:
        """Return whether each step has to be checked at once."""
        return self.skip or self.device.type == "cpu"

    def add(
        self, step: int, is_finite: Tensor, metrics: Mapping[str, Tensor], *, num_tokens: int
    ) -> None:
        """Record a step, from 1; a step without tokens says nothing about weights."""
        values = (is_finite, metrics["loss"], metrics["grad_norm"], metrics["weight_max"])
        self._recorded.append((step, num_tokens, torch.stack([value.double() for value in values])))

    def check(self) -> None:
        """Raise a TrainingError if a step since the last check must end the run; this waits for the
        device.
        """
        recorded = self._recorded
        self._recorded = []
        if not recorded:
            return
        # One transfer for all steps.
        rows = torch.stack([values for _, _, values in recorded]).tolist()
        for (step, num_tokens, _), row in zip(recorded, rows, strict=True):
            is_finite, loss, grad_norm, weight_max = row
            if num_tokens:
                self._num_weightless = self._num_weightless + 1 if weight_max == 0 else 0
            if self._num_weightless == min(_MAX_IN_A_ROW, self.total_steps):
                raise TrainingError(
                    f"the weights of all tokens were 0 in {self._num_weightless} steps in a row, "
                    f"up to step {step}: set the weighting in `loss` to hold back less, or raise "
                    "batch_size"
                )
            if is_finite:
                self._num_skipped = 0
            else:
                self._num_skipped += 1
                what = f"loss {loss:g} and gradient norm {grad_norm:g} at step {step}"
                self._report(what, self.indices_of(step))

    def _report(self, what: str, indices: list[int]) -> None:
        items = ", ".join(str(index) for index in indices[:_MAX_INDICES_SHOWN])
        if len(indices) > _MAX_INDICES_SHOWN:
            items += f" and {len(indices) - _MAX_INDICES_SHOWN} more"
        what += f" (items {items} of the data set)"
        if not self.skip:
            raise TrainingError(f"not finite: {what}: {_REMEDY}, or on_non_finite=skip")
        if self._num_skipped >= _MAX_IN_A_ROW:
            raise TrainingError(f"not finite, {_MAX_IN_A_ROW} steps in a row: {what}: {_REMEDY}")
        self.note(f"step skipped, not finite: {what}")


def require_finite(model: nn.Module, step: int) -> None:
    """Raise a TrainingError if a trained weight of any process is not finite; every process has to
    call.
    """
    trained = {
        name: value for name, value in parameters_by_name(model).items() if value.requires_grad
    }
    # Read at once.
    flags = torch.stack([local_tensor(value).isfinite().all() for value in trained.values()])
    lost = []
    for name, is_finite in zip(trained, flags.tolist(), strict=True):
        if not is_finite:
            lost.append(name)
    lost_on_any = [names[0] for names in gather_objects(lost[:1]) if names]
    if lost_on_any:
        raise TrainingError(f"{lost_on_any[0]} is not finite after step {step}: {_REMEDY}")
