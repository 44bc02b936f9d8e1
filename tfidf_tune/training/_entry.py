"""How a recipe is started as a command, and how errors and signals end its process."""

import argparse
import gc
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import NoReturn

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from tfidf_tune._printing import say, visible
from tfidf_tune._processes import OWN_COMMAND
from tfidf_tune._quiet import hide_messages
from tfidf_tune._signals import ENDING, Interrupted, ended_by
from tfidf_tune.training import _errors as errors
from tfidf_tune.training._config import load_config
from tfidf_tune.training._distributed import (
    claim_error_report,
    is_lost_process,
    is_main_process,
    print_once,
)
from tfidf_tune.training._next_steps import NextSteps, print_left

_SECONDS_FOR_MAIN_PROCESS = 5.0
# Variables.
_OF_TORCHRUN = (
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
)


def recipe(main: Callable[[DictConfig], NextSteps | None]) -> Callable[[], None]:
    """Make a function the entry point of a recipe: ``--config FILE_OR_NAME key=value ...``.

    Commands of ``tfidf-tune`` that it returns are run when its memory is free again, and then those
    that are left are printed.
    User-facing errors are reported in one message without a traceback, with the exit code 2 of
    ``tfidf-tune run``. SIGTERM ends the run with exit code 143, Ctrl-C with 130, SIGHUP with 129.
    An error of several processes is reported once. What is returned reads ``sys.argv``; the recipe
    itself is its ``__wrapped__``.
    """

    @wraps(main)
    def entry_point() -> None:
        hide_messages()
        with ended_by(ENDING, _say_signal):
            _run(main)

    return entry_point


def _say_signal(name: str) -> None:
    """Name the signal that ends a process; who has pressed Ctrl-C knows it."""
    if name != "SIGINT":
        print_once(f"ended by {name}")


def _run(main: Callable[[DictConfig], NextSteps | None]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(
        "--config",
        required=True,
        help="a file, or the name of a config that comes with the package",
    )
    options, overrides = parser.parse_known_args()
    try:
        flags = [argument for argument in overrides if argument.startswith("--")]
        if flags:
            raise errors.SetupError(
                f"config: unknown options {', '.join(flags)}: write keys as key=value"
            )
        steps = main(load_config(options.config, overrides)) or NextSteps([], [])
    except Interrupted as request:
        print_once(str(request))
        sys.exit(request.exit_code)
    except KeyboardInterrupt:
        print("interrupted; the checkpoints written so far are complete", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except MemoryError as error:
        cause = f" ({error})" if str(error) else ""
        _exit_with_error(f"out of host memory{cause}: use less text or a smaller model")
    except (errors.SetupError, OSError, RuntimeError) as error:
        if isinstance(error, errors.LostProcessError):
            _exit_after_lost_process(str(error))
        # A process that is lost breaks whatever the others do together, also if that has another
        # message.
        has_message = isinstance(error, (errors.SetupError, OSError, errors.TrainingError))
        failure = error.__cause__ if has_message else error
        if isinstance(failure, RuntimeError) and is_lost_process(failure):
            _exit_after_lost_process(
                "another process of the run was lost before training began: see its message"
            )
        if has_message:
            _exit_with_error(str(error))
        if errors.is_out_of_memory(error):
            _exit_with_error(
                f"out of memory before training began ({errors.first_line(error)}): try "
                "model.quantize_base=True with LoRA, dtype=bf16, fsdp_cpu_offload=True or more "
                "processes"
            )
        raise

    # The run is over. Its commands run when its memory is free again.
    if dist.is_initialized():
        dist.destroy_process_group()
    if steps.commands:
        gc.collect()
        torch.cuda.empty_cache()
    # A command is a process of its own, not another rank of torchrun's.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(_OF_TORCHRUN)}
    for command in steps.commands:
        print(f"$ {shlex.join(['tfidf-tune', *command])}", file=sys.stderr, flush=True)
        exit_code = subprocess.run([*OWN_COMMAND, *command], env=alone, check=False).returncode
        if exit_code < 0:  # ended by a signal: -15 becomes 143
            exit_code = 128 - exit_code
        if exit_code:
            sys.exit(exit_code)
    print_left(steps)


def _exit_with_error(message: str) -> NoReturn:
    """Exit with a message, unless another process has reported the same, usually rank 0."""
    if not is_main_process():
        time.sleep(_SECONDS_FOR_MAIN_PROCESS)
    elif dist.is_torchelastic_launched():  # sends SIGTERM to all processes when one fails
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    claim_error_report()  # so that no process reports that this one is lost
    if not claim_error_report(message):
        sys.exit(1)
    if not is_main_process():
        message = f"process {os.environ['RANK']}: {message}"
    sys.exit(visible(f"error: {message}"))


def _exit_after_lost_process(message: str) -> NoReturn:
    """Exit because another process has ended: all remaining processes notice, one reports it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of torchrun, until the message is written
    if claim_error_report():
        say(f"\nerror: {message}", file=sys.stderr)  # that process may have left a progress bar
    sys.exit(1)
