"""Where metrics go: the user's logger, ``metrics.jsonl``, the progress bar."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune import training
from tqdm import tqdm

from tfidf_tune._files import atomic_file
from tfidf_tune.training._config import FinetuneConfig, instantiate
from tfidf_tune.training._errors import TrainingError
from tfidf_tune.training._run import Run

# One batch whose labels are all masked is no error; a run that begins with so many steps of them is.
_STEPS_WITHOUT_LABELS = 10


class JSONLinesLogger:
    """torchtune metric logger that appends one JSON object a line: ``{"step": 1, "loss": 2.5, ...}``.

    Args:
        path (Path): the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        """Write one line and bring it to the file at once; what is not finite becomes null, which is JSON."""
        values = {name: value if math.isfinite(value) else None for name, value in payload.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ProgressLog:
    """Reports training steps to the loggers and on a progress bar with loss, tokens/s and time left.

    Args:
        loggers (list[Any]): torchtune metric loggers.
        total_steps (int): optimizer steps of the run.
        log_every_n_steps (int): steps between two entries; the last step gets one in any case.
        memory_device (torch.device | None): CUDA device whose peak memory is logged. Default: None.
    """

    def __init__(
        self,
        loggers: list[Any],
        *,
        total_steps: int,
        log_every_n_steps: int,
        memory_device: torch.device | None = None,
    ) -> None:
        self._loggers = loggers
        self._total_steps = total_steps
        self._every = log_every_n_steps
        self._memory_device = memory_device
        self._bar: Any = None  # not before there is progress: loading may show a bar of its own
        self._tokens: torch.Tensor | int = 0  # since the last entry
        self._tokens_seen: torch.Tensor | int = 0  # in the whole run
        self._start = time.perf_counter()

    def start(self) -> None:
        """Start bar and clock: what came before (loading the model) is no part of the run's speed."""
        self._bar = tqdm(total=self._total_steps, unit="step", dynamic_ncols=True)
        self.restart_clock()

    def step(self, step: int, metrics: Mapping[str, torch.Tensor | float], num_tokens: torch.Tensor) -> None:
        """Count a finished step; read its metrics off the device only when they are due.

        Args:
            step (int): number of the step, from 1.
            metrics (Mapping[str, torch.Tensor | float]): scalars.
            num_tokens (torch.Tensor): tokens that the step was trained on, integer scalar.

        Raises:
            TrainingError: If, at an entry, the loss is not finite, or ten steps (or the whole run) had no token at all.
        """
        self._tokens = self._tokens + num_tokens
        self._tokens_seen = self._tokens_seen + num_tokens
        self._bar.update()
        if step % self._every and step != self._total_steps:
            return
        on_device = {name: value for name, value in metrics.items() if isinstance(value, torch.Tensor)}
        numbers = [*on_device.values(), self._tokens, self._tokens_seen]
        # One transfer for all: each would wait for the device.
        *found, tokens, tokens_seen = torch.stack(
            [torch.as_tensor(number, dtype=torch.float64, device=num_tokens.device) for number in numbers]
        ).tolist()
        values = {**metrics, **dict(zip(on_device, found, strict=True))}
        if not math.isfinite(values["loss"]):
            raise TrainingError(
                f"the loss is {values['loss']} at step {step}: try a lower learning rate, fp32, clipping; "
                "checkpoints of earlier steps are whole"
            )
        if not tokens_seen and step >= min(_STEPS_WITHOUT_LABELS, self._total_steps):
            raise TrainingError(f"no label was left to learn from up to step {step}: the data set masks them all")
        tokens_per_second = tokens / (time.perf_counter() - self._start)
        values["tokens_per_second_per_gpu"] = tokens_per_second
        if self._memory_device is not None:
            values |= training.get_memory_stats(device=self._memory_device)
        for logger in self._loggers:
            logger.log_dict(values, step=step)
        self._bar.set_postfix_str(f"loss {values['loss']:.4f}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        self.restart_clock()

    def note(self, text: str) -> None:
        """Say something beside the progress bar."""
        self._bar.write(text, file=sys.stderr)

    def restart_clock(self) -> None:
        """Leave what was done since the last entry (writing a checkpoint) out of the tokens per second."""
        self._tokens = 0
        self._start = time.perf_counter()

    def close(self) -> None:
        """Close loggers and bar."""
        if self._bar is not None:
            self._bar.close()
        for logger in self._loggers:
            logger.close()


@contextmanager
def open_progress(cfg: FinetuneConfig, run: Run, total_steps: int) -> Iterator[ProgressLog]:
    """Open the run's folder: the resolved config, ``metrics.jsonl``, the config's metric logger, the progress bar.

    Args:
        cfg (FinetuneConfig): the checked config.
        run (Run): gives folder and device.
        total_steps (int): optimizer steps of the run.

    Yields:
        ProgressLog: closed with its loggers at the end.

    Raises:
        SetupError: If the metric logger cannot be built from the settings given.
    """
    metric_logger = instantiate(cfg, "metric_logger")
    metric_logger.log_config(cfg)
    with atomic_file(run.output_dir / "config.yaml") as file:
        OmegaConf.save(cast(DictConfig, cfg), file)
    progress = ProgressLog(
        [JSONLinesLogger(run.output_dir / "metrics.jsonl"), metric_logger],
        total_steps=total_steps,
        log_every_n_steps=cfg.log_every_n_steps,
        memory_device=run.device if cfg.log_peak_memory_stats and run.device.type == "cuda" else None,
    )
    try:
        yield progress
    finally:
        progress.close()
