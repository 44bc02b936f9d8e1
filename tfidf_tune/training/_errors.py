"""User-facing errors: reported in one message, without a traceback."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torchtune.config._errors import InstantiationError
from yaml import YAMLError

from tfidf_tune._checks import SetupError as SetupError

# Errors whose message is complete without their type.
_MESSAGES = (ValueError, OSError, YAMLError, OmegaConfBaseException)
# What components and files raise for wrong settings. KeyError and the like are bugs.
_OF_LIBRARIES = (SafetensorError, InstantiationError, UnpicklingError)
_CAUSES = (*_MESSAGES, *_OF_LIBRARIES, TypeError, AssertionError, RuntimeError, ImportError)


def listed(problems: Sequence[str]) -> str:
    """Return the first five problems, one per line, and how many more there are."""
    lines = [f"  {problem}" for problem in problems[:5]]
    if len(problems) > 5:
        lines.append(f"  and {len(problems) - 5} more")
    return "\n".join(lines)


class TrainingError(RuntimeError):
    """Training cannot continue; the message says why and what to try."""


class LostProcessError(TrainingError):
    """Another process of the run has ended; every remaining process notices."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the memory of a device or of the host was too small."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def cause_of(error: BaseException) -> str:
    """Describe an error within another message: its first line, with its type unless it is an
    OSError.
    """
    if isinstance(error, CheckpointException):
        return "; ".join(cause_of(failure) for failure, _ in error.failures.values())
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


@contextmanager
def setup_errors(where: str = "", given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn errors of the block into a :class:`SetupError`, the cause chained.

    ``where`` is the beginning of the message, the config's key for example; ``given`` are arguments
    of the call in the block, shown with a TypeError or LookupError. Without them a LookupError is a
    bug.

    Raises:
        SetupError: If the block fails for a reason that the user can fix.
    """
    causes = (*_CAUSES, LookupError) if given else _CAUSES
    try:
        yield
    except SetupError:
        raise
    except causes as error:
        message = str(error) if isinstance(error, _MESSAGES) else f"{type(error).__name__}: {error}"
        if given and isinstance(error, (TypeError, LookupError)):
            arguments = [f"{name}={value!r}" for name, value in given.items()]
            message += f"; given were {', '.join(arguments)}"
        raise SetupError(f"{where}: {message}" if where else message) from error
