"""The cache of tokenized corpora, and the hashes that name its folders."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfidf_tune._files import atomic_folder


def digest(value: Any) -> str:
    """Hash plain data.

    Args:
        value (Any): whatever ``json.dumps`` takes; the order of a dictionary's keys does not matter.

    Returns:
        str: the first 16 hexadecimal digits of a SHA-256.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def cached_folder(cache_dir: str | None, settings: dict[str, Any], build: Callable[[Path], dict[str, int]]) -> Path:
    """Return the cache folder that belongs to ``settings``, built first when it is not there.

    Several processes may ask at once: each builds its own and the first to finish is kept.

    Args:
        cache_dir (str | None): the cache; by default ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``.
        settings (dict[str, Any]): everything the contents depend on; their hash is the folder's name.
        build (Callable[[Path], dict[str, int]]): fills an empty folder and returns counts worth keeping.
            They are stored with the settings in ``settings.json``, see :func:`cached_counts`.

    Returns:
        Path: the whole folder.
    """
    root = Path(cache_dir or os.environ.get("TFIDF_TUNE_CACHE") or "~/.cache/tfidf_tune").expanduser()
    folder = root / digest(settings)
    if folder.is_dir():
        return folder
    try:
        with atomic_folder(folder) as temporary:
            contents = {"settings": settings, "counts": build(temporary)}
            (temporary / "settings.json").write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    except OSError:
        if not folder.is_dir():  # else another process was first, and theirs is the same
            raise
    return folder


def cached_counts(folder: Path) -> dict[str, int]:
    """Return the counts that the builder of a cache folder reported.

    Args:
        folder (Path): a folder that :func:`cached_folder` returned.

    Returns:
        dict[str, int]: the counts by name.
    """
    counts: dict[str, int] = json.loads((folder / "settings.json").read_text(encoding="utf-8"))["counts"]
    return counts
