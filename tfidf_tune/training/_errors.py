"""Errors of the user's: found while a run is set up, told in one message."""

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torchtune.config._errors import InstantiationError

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
)


class SetupError(ValueError):
    """Something that the user gave does not work; the message says what and how to mend it."""


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to try."""


def first_line(error: Exception) -> str:
    """What an error says, without what libraries add below; nothing where it says nothing."""
    return str(error).strip().partition("\n")[0]


@contextmanager
def setup_errors(where: str = "") -> Iterator[None]:
    """Turn what fails in the block into a :class:`SetupError`, the cause chained.

    Args:
        where (str): put before the message, the config's key for example. Default: "".

    Raises:
        SetupError: If the block fails for a reason that lies in what the user gave.
    """
    try:
        yield
    except SetupError:
        raise
    except _CAUSES as error:
        told = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
        raise SetupError(f"{where}: {told}" if where else told) from error
