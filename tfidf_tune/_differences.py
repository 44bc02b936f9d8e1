"""Differences between two sets of settings, in words."""

import json
from typing import Any


def differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Compare settings, and return a phrase for each key that differs: ``optimizer.lr was 0.001, is 0.002``."""
    found = []
    for key in sorted(before.keys() | now.keys()):
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif _shown(before, key) != _shown(now, key):
            found.append(f"{prefix}{key} was {_shown(before, key)}, is {_shown(now, key)}")
    return found


def _shown(settings: dict[str, Any], key: str) -> str:
    return json.dumps(settings[key], sort_keys=True) if key in settings else "not set"
