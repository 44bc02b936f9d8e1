"""A run: device, dtype, seed, folder and milestones; how a recipe is started, and how errors and signals end it."""

import argparse
import gc
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torchtune import training, utils

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import locked_folder, require_writable
from tfidf_tune._printing import say, visible
from tfidf_tune._processes import OWN_COMMAND
from tfidf_tune._signals import ENDING, Interrupted, ended_by
from tfidf_tune.training import _errors as errors
from tfidf_tune.training._config import load_config
from tfidf_tune.training._distributed import (
    claim_error_report,
    connect_processes,
    is_lost_process,
    is_main_process,
    print_once,
    started_processes,
)
from tfidf_tune.training._folder import EVALUATION, check_folder
from tfidf_tune.training.components import sections

_DEVICES = ("cpu", "cuda")
_SECONDS_FOR_MAIN_PROCESS = 5.0
_OF_TORCHRUN = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")  # variables


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
    """Lock the run's folder, choose device, dtype and seed, and connect the processes that torchrun started.

    The main process holds the lock until the block ends, so that what is checked in the block is still true when the
    run writes. Nothing is written here.

    Raises:
        SetupError: If another process holds the folder, the folder holds checkpoints that the run does not resume
            from, or files of the user that it would replace, or cannot be written, or the device is not available.
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
                raise ValueError("torch finds no such device on this machine: set it to cpu, or to cuda where a GPU is")
        with errors.setup_errors():
            dtype = training.get_dtype(cfg.dtype, device=device)
            # Features of FSDP2 need a process group even on one process.
            if started_processes() > 1 or cfg.fsdp_cpu_offload or cfg.fsdp_param_dtype or cfg.fsdp_reduce_dtype:
                connect_processes(device)
            # Each process has its own seed, this one plus its rank: dropout differs between them.
            run = Run(device, dtype, training.set_seed(seed=cfg.seed), output_dir, cfg.fsdp_cpu_offload)
        yield run


def _say_what_is_repeated(cfg: FinetuneConfig) -> None:
    """Say first if passages of the user's own text are repeated: a model that is to be used should not learn them."""
    for _, section in sections("dataset", cfg.dataset):
        is_injected = str(section.get("_component_")).endswith("injected_corpus_dataset")
        if is_injected and section.get("target_source", "") is None:
            number = section.get("num_repeats", 10)
            print_once(
                f"passages of your text are repeated {number} times, so that it can be measured what is recited; the "
                "configs mine/lora and mine/full train on your text as it is"
            )


def milestone_steps(percents: Sequence[int], total_steps: int) -> dict[int, int]:
    """Return the milestones, in percent, by the step that writes them; a step of a short run has only its last."""
    return {-(-total_steps * percent // 100): percent for percent in sorted(set(percents))}


def milestone_name(percent: int) -> str:
    """Return the name of a milestone's folder, ``checkpoint_25pct``."""
    return f"checkpoint_{percent}pct"


def recipe(main: Callable[[DictConfig], list[list[str]] | None]) -> Callable[[], None]:
    """Make a function the entry point of a recipe: ``--config FILE_OR_NAME key=value ...``.

    Commands of ``tfidf-tune`` that it returns, in parts, are run when its memory is free again.
    User-facing errors are reported in one message without a traceback, with the exit code 2 of ``tfidf-tune run``.
    SIGTERM ends the run with exit code 143, Ctrl-C with 130, SIGHUP with 129. An error of several processes is reported
    once. What is returned reads ``sys.argv``; the recipe itself is its ``__wrapped__``.
    """

    @wraps(main)
    def entry_point() -> None:
        with ended_by(ENDING, lambda name: None if name == "SIGINT" else print_once(f"ended by {name}")):
            _run(main)

    return entry_point


def _run(main: Callable[[DictConfig], list[list[str]] | None]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", required=True, help="a file, or the name of a config that comes with the package")
    options, overrides = parser.parse_known_args()
    try:
        if flags := [argument for argument in overrides if argument.startswith("--")]:
            raise errors.SetupError(f"config: unknown options {', '.join(flags)}: write keys as key=value")
        commands = main(load_config(options.config, overrides)) or []
    except Interrupted as request:
        print_once(str(request))
        sys.exit(request.exit_code)
    except KeyboardInterrupt:
        print("interrupted; the checkpoints written so far are complete", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except MemoryError as error:
        _exit_with_error(f"out of host memory{f' ({error})' if str(error) else ''}: use less text or a smaller model")
    except (errors.SetupError, OSError, RuntimeError) as error:
        if isinstance(error, errors.LostProcessError):
            _exit_after_lost_process(str(error))
        # A process that is lost breaks whatever the others do together, also if that has another message.
        has_message = isinstance(error, (errors.SetupError, OSError, errors.TrainingError))
        failure = error.__cause__ if has_message else error
        if isinstance(failure, RuntimeError) and is_lost_process(failure):
            _exit_after_lost_process("another process of the run was lost before training began: see its message")
        if has_message:
            _exit_with_error(str(error))
        if errors.is_out_of_memory(error):
            remedies = "model.quantize_base=True with LoRA, dtype=bf16, fsdp_cpu_offload=True or more processes"
            _exit_with_error(f"out of memory before training began ({errors.first_line(error)}): try {remedies}")
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    if commands:
        gc.collect()
        torch.cuda.empty_cache()
    # A command is a process of its own, not another rank of torchrun's.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)}
    for command in commands:
        print(f"$ {shlex.join(['tfidf-tune', *command])}", file=sys.stderr, flush=True)
        ended = subprocess.run([*OWN_COMMAND, *command], env=alone, check=False)
        if ended.returncode:
            sys.exit(ended.returncode if ended.returncode > 0 else 128 - ended.returncode)


def _exit_with_error(message: str) -> NoReturn:
    """Exit with a message, unless another process has reported the same, usually rank 0."""
    if not is_main_process():
        time.sleep(_SECONDS_FOR_MAIN_PROCESS)
    elif dist.is_torchelastic_launched():  # sends SIGTERM to all processes when one fails
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    claim_error_report()  # so that no process reports that this one is lost
    if not claim_error_report(message):
        sys.exit(1)
    sys.exit(visible(f"error: {'' if is_main_process() else 'process ' + os.environ['RANK'] + ': '}{message}"))


def _exit_after_lost_process(message: str) -> NoReturn:
    """Exit because another process has ended: all remaining processes notice, one reports it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, until the message is written
    if claim_error_report():
        say(f"\nerror: {message}", file=sys.stderr)  # that process may have left a progress bar
    sys.exit(1)
