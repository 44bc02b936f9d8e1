"""The cache of tokenized data sets, and the hashes that name its folders."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_folder

# Part of every cache key. Increase it when a change of code changes what is cached.
_FORMAT_VERSION = 5


def digest(value: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of JSON data; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def cached_folder(
    cache_dir: str | None, settings: dict[str, Any], build: Callable[[Path], Mapping[str, int]]
) -> tuple[Path, dict[str, int]]:
    """Return the cache folder for ``settings``, everything its contents depend on, and the counts of ``build``.

    If it does not exist, ``build`` fills an empty folder and returns counts, which are stored with the settings in
    ``settings.json``. Processes that ask at the same time each build a folder, and the first complete one is kept.
    """
    root = Path(cache_dir or os.environ.get("TFIDF_TUNE_CACHE") or "~/.cache/tfidf_tune").expanduser()
    folder = root / digest(settings | {"format_version": _FORMAT_VERSION})
    if not folder.is_dir():
        try:
            with atomic_folder(folder) as temporary:
                contents = {"settings": settings, "counts": build(temporary)}
                (temporary / "settings.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster; its folder is the same
                raise
    counts: dict[str, int] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["counts"]
    return folder, counts
