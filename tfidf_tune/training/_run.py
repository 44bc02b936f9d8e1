"""A run: device, dtype, seed, folder and milestones."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtune import training, utils

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import locked_folder, require_writable
from tfidf_tune._printing import counted
from tfidf_tune.probe.run_identity import EVALUATION
from tfidf_tune.training import _errors as errors
from tfidf_tune.training._distributed import (
    connect_processes,
    is_main_process,
    print_once,
    started_processes,
)
from tfidf_tune.training._folder import check_folder
from tfidf_tune.training.components import sections

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Run:
    """Device and dtype of the weights, seed of this process, folder of a run."""

    device: torch.device
    dtype: torch.dtype
    seed: int
    output_dir: Path
    fsdp_cpu_offload: bool = False

    @property
    def storage_device(self) -> torch.device:
        """Return where the weights are kept between computations."""
        return torch.device("cpu") if self.fsdp_cpu_offload else self.device


@contextmanager
def open_run(cfg: FinetuneConfig) -> Iterator[Run]:
    """Lock the run's folder, choose device, dtype and seed, and connect the processes that torchrun
    started.

    The main process holds the lock until the block ends, so that what is checked in the block is
    still true when the run writes. Nothing is written here.

    Raises:
        SetupError: If another process holds the folder, the folder holds checkpoints that the run
            does not resume from, or files of the user that it would replace, or cannot be written,
            or the device is not available.
    """
    output_dir = Path(cfg.output_dir)
    with ExitStack() as stack:
        if is_main_process():
            with errors.setup_errors():
                require_writable("output_dir", output_dir)
                if cfg.evaluate:
                    require_writable("output_dir", output_dir / EVALUATION)
                stack.enter_context(locked_folder(output_dir))
        check_folder(cfg)
        _say_what_is_repeated(cfg)
        with errors.setup_errors(f"device '{cfg.device}'"):
            device = utils.get_device(device=cfg.device)
            if device.type not in _DEVICES or not cfg.device.startswith(device.type):
                raise ValueError(
                    "torch finds no such device on this machine: set it to cpu, or to cuda where a "
                    "GPU is"
                )
        with errors.setup_errors():
            dtype = training.get_dtype(cfg.dtype, device=device)
            # Features of FSDP2 need a process group even on one process.
            uses_fsdp = cfg.fsdp_cpu_offload or cfg.fsdp_param_dtype or cfg.fsdp_reduce_dtype
            if started_processes() > 1 or uses_fsdp:
                connect_processes(device)
            # Each process has its own seed, this one plus its rank: dropout differs between them.
            seed = training.set_seed(seed=cfg.seed)
            run = Run(device, dtype, seed, output_dir, cfg.fsdp_cpu_offload)
        yield run


def _say_what_is_repeated(cfg: FinetuneConfig) -> None:
    """Say first if passages of the user's own text are repeated: a model that is to be used should
    not learn them.
    """
    for _, section in sections("dataset", cfg.dataset):
        is_injected = str(section.get("_component_")).endswith("injected_corpus_dataset")
        if is_injected and section.get("target_source", "") is None:
            number = section.get("num_repeats", 10)
            print_once(
                f"passages of your text are repeated {counted(number, 'time')}, so that it can be "
                "measured what is recited; the configs mine/lora and mine/full train on your text "
                "as it is"
            )


def milestone_steps(percents: Sequence[int], total_steps: int) -> dict[int, int]:
    """Return the milestones, in percent, by the step that writes them; a step of a short run has
    only its last.

    Of 3 steps and the milestones 25, 30, 50 and 100, the first step writes 30, the second 50.
    """
    return {-(-total_steps * percent // 100): percent for percent in sorted(set(percents))}


def milestone_name(percent: int) -> str:
    """Return the name of a milestone's folder, ``checkpoint_25pct``."""
    return f"checkpoint_{percent}pct"
