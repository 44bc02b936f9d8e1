"""Errors of the user's: found while a run is set up, told in one message."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torchtune.config._errors import InstantiationError
from yaml import YAMLError

# What components and files can raise when settings do not suit them. KeyError and the like stay what they are: bugs.
_CAUSES = (
    ValueError,
    TypeError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    OSError,
    ImportError,
    SafetensorError,
    InstantiationError,
    OmegaConfBaseException,
    YAMLError,
)


class SetupError(ValueError):
    """Something that the user gave does not work; the message says what and how to mend it."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to try."""


class LostProcessError(TrainingError):
    """Another process of the run is gone; all that are left notice."""


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether a device's memory, or the host's, was too small."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def cause_of(error: BaseException) -> str:
    """What an error says in a message around it: its first line, and its kind where the words need it."""
    if isinstance(error, CheckpointException):
        return "; ".join(cause_of(failure) for failure, _ in error.failures.values())
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """What an error says, without what libraries add below; nothing where it says nothing."""
    return str(error).strip().partition("\n")[0]


@contextmanager
def setup_errors(where: str = "", given: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn what fails in the block into a :class:`SetupError`, the cause chained.

    Args:
        where (str): put before the message, the config's key for example. Default: "".
        given (Mapping[str, Any] | None): arguments of what is called in the block, reported with a TypeError or
            LookupError, which do not name the values. A LookupError is the user's only with them. Default: None.

    Raises:
        SetupError: If the block fails for a reason that lies in what the user gave.
    """
    causes = (*_CAUSES, LookupError) if given else _CAUSES
    try:
        yield
    except SetupError:
        raise
    except causes as error:
        told = _told(error)
        if given and isinstance(error, (TypeError, LookupError)):
            told += f"; given were {', '.join(f'{name}={value!r}' for name, value in given.items())}"
        raise SetupError(f"{where}: {told}" if where else told) from error


def _told(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return f"something is nested too deeply ({first_line(error)})"
    if isinstance(error, OmegaConfBaseException):
        key = f" (key {str(error.full_key)!r})" if error.full_key else ""
        return f"{first_line(error)}{key}"
    return str(error) if isinstance(error, (ValueError, OSError, YAMLError)) else f"{type(error).__name__}: {error}"
