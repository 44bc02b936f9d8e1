"""What tasks and evaluations in one process share: passages, blocks of text, the scores of a
reference model.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.utils import collect_env

_Value = TypeVar("_Value")

_values: ContextVar[dict[str, Any] | None] = ContextVar("values", default=None)


@contextmanager
def kept_between_evaluations() -> Iterator[None]:
    """Keep what :func:`kept` computes until the outermost block ends; outside of such a block
    nothing is kept.

    The harness records the machine with each result, for which it asks pip for all packages; here
    once.
    """
    if _values.get() is not None:
        yield
        return
    token = _values.set({})
    of_torch = collect_env.get_pretty_env_info
    collect_env.get_pretty_env_info = functools.cache(of_torch)
    try:
        yield
    finally:
        collect_env.get_pretty_env_info = of_torch
        _values.reset(token)


def kept(key: str, compute: Callable[[], _Value]) -> _Value:
    """Return the value of a key, a digest of all that it follows from, computed once in a block."""
    values = _values.get()
    if values is None:
        return compute()
    if key not in values:
        values[key] = compute()
    value: _Value = values[key]
    return value
