"""Checks of arguments and comparison of settings, with messages for the user. Imports only the
standard library.
"""

import difflib
import inspect
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any


class SetupError(ValueError):
    """A setting or file of the user is wrong; the message says how to fix it."""


def require_integer(
    name: str, value: Any, lowest: int, meaning: str = "", highest: int | None = None
) -> None:
    """Raise a ``ValueError`` unless a value is an integer from ``lowest`` to ``highest``.

    The message gives the argument's ``meaning`` where there is one.
    """
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if is_integer and lowest <= value and (highest is None or value <= highest):
        return
    if not meaning:
        raise ValueError(f"{name} must be a whole number of at least {lowest}, got {value!r}")
    limits = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
    raise ValueError(
        f"{name} is {value!r}: {meaning}, set it to "
        f"{'' if is_integer else 'a whole number of '}{limits}"
    )


def check_at_least(lowest: int, **values: Any) -> None:
    """Call :func:`require_integer` for each of several arguments, given by name."""
    for name, value in values.items():
        require_integer(name, value, lowest)


def require_number(
    name: str,
    value: Any,
    lowest: float,
    highest: float,
    meaning: str,
    *,
    reason: str = "",
    positive: bool = False,
) -> None:
    """Raise a ``ValueError`` with the argument's meaning unless it is a number from ``lowest`` to
    ``highest``.

    The message gives the ``reason`` for the range. If ``positive``, ``lowest`` is 0 and excluded.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not lowest <= value <= highest or (positive and value == 0):
        limits = f"above 0, up to {highest:g}" if positive else f"from {lowest:g} to {highest:g}"
        raise ValueError(
            f"{name} is {value!r}: {meaning}, set it to a number "
            f"{limits}{reason and f' ({reason})'}"
        )


def require_bool(name: str, value: Any) -> None:
    """Raise a ``ValueError`` unless an argument is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}: set it to true or false")


def require_choice(name: str, value: Any, possible: tuple[str, ...]) -> None:
    """Raise a ``ValueError`` unless an argument is one of the strings that are possible."""
    if value not in possible:
        # true, not True, as in a config
        shown = value if isinstance(value, str) else json.dumps(value, default=str)
        raise ValueError(f"{name} is '{shown}': possible are {', '.join(possible)}")


def require_base_url(url: str) -> None:
    """Raise a ``ValueError`` unless an address has a scheme and a host, and neither user name nor
    query, not shown.
    """
    match = re.fullmatch(
        r"https?://(?:[\w.-]+|\[[\da-fA-F:.]+\])(?::(\d{1,5}))?(?:/[^\s@?#\x7f]{0,999})?", url
    )
    if not match or int(match[1] or 0) >= 1 << 16:
        raise ValueError(
            "base_url must be like http://localhost:8000/v1, without user name, password and query"
        )


def base_model(model: Any) -> Any:
    """Return the model without the adapters of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def cache_argument(model: Any) -> str:
    """Return under which name a model of transformers, or of PEFT, takes and returns a KV cache:
    5.24 renamed it.
    """
    return (
        "cache"
        if "cache" in inspect.signature(type(base_model(model)).forward).parameters
        else "past_key_values"
    )


def suggestion(name: str, possible: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar possible name, or all of
    them.
    """
    names = sorted(possible)
    return closest(name, names) or f"; possible are {', '.join(names)}"


def closest(name: str, possible: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the most similar possible name, empty if
    none is similar.
    """
    similar = most_similar(name, possible)
    return f"; did you mean '{similar}'?" if similar else ""


def most_similar(name: str, possible: Iterable[str]) -> str:
    """Return the most similar possible name, "" if none is similar; capital letters make no
    difference.
    """
    names = {each.lower(): each for each in possible}
    close = difflib.get_close_matches(name.lower(), list(names), n=1)
    return names[close[0]] if close else ""


def first_problem(error: Any, **parts: bool) -> tuple[str, dict[str, Any]]:
    """Return the key, ``a.b[1]``, and the description of the first problem of a
    ``pydantic.ValidationError``.
    """
    problem = error.errors(include_url=False, **parts)[0]
    path = ""
    for part in problem["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip("."), problem


def require_no_options(model_args: Mapping[str, Any]) -> None:
    """Raise a ValueError if options of an evaluation are among the arguments of the model, and so
    doubled.
    """
    doubled = [name for name in ("batch_size", "max_batch_size", "device") if name in model_args]
    if doubled:
        raise ValueError(
            f"--model-args: {', '.join(doubled)} cannot be among the arguments of the model: use "
            "the options of the same name"
        )


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Compare settings, and return a phrase for each key that differs: ``optimizer.lr was 0.001, is
    0.002``.

    Of hashes, which nobody can read, it says that the content has changed.
    """
    phrases = []
    for key in sorted(before.keys() | now.keys()):
        old = before.get(key)
        new = now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            phrases += differences(old, new, f"{prefix}{key}.")
        elif _is_hash(old) or _is_hash(new):
            # A file is named by its path, which says enough.
            name = key if "/" in key else f"{prefix}{key}"
            if old is None:
                phrases.append(f"{name} was not there before")
            elif new is None:
                phrases.append(f"{name} is not there any more")
            elif old != new:
                phrases.append(f"the content of {name} has changed")
        elif _shown(before, key) != _shown(now, key):
            phrases.append(f"{prefix}{key} was {_shown(before, key)}, is {_shown(now, key)}")
    return phrases


def _is_hash(value: Any) -> bool:
    """Return whether a value looks like a SHA-256, or the first 16 digits of one."""
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{16}|[0-9a-f]{64}", value) is not None


def _shown(settings: dict[str, Any], key: str) -> str:
    return json.dumps(settings[key], sort_keys=True) if key in settings else "not set"
