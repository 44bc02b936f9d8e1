"""What repeats in the source of a data set, as a run says it: searched once, and then read from the
cache.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from tfidf_tune.corpus.repeated_text import Repeats, find_repeated_text
from tfidf_tune.corpus.sources import (
    TextSource,
    is_local,
    source_fingerprint,
    tasks_of,
    texts_of_rows,
)
from tfidf_tune.data.learned_text import learned_texts
from tfidf_tune.data.sequences import CacheKey, cached_folder

MOST_BYTES = 8 << 20
"""Bytes of the files of a source that a run searches: half a minute on one core."""


def repeats_of_source(
    place: TextSource, *, learned: bool, cache_dir: str | None = None
) -> Repeats | None:
    """Find what repeats in local files.

    Args:
        place (TextSource): the source.
        learned (bool): whether what is learned of conversations and prompts is a document, see
            :func:`learned_texts`.
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        Repeats | None: the numbers. None if the source is not local, if its files are larger than
            :data:`MOST_BYTES`, or if the extra ``scale`` is not installed.
    """
    if not is_local(place.source) or find_spec("datatrove") is None:
        return None
    files = tasks_of([place.source])
    if sum(Path(file).stat().st_size for file in files) > MOST_BYTES:
        return None
    read: Callable[[str], Iterator[tuple[str, str]]]
    if learned:
        read = partial(learned_texts, sample_by=place.sample_by)
    else:
        read = partial(texts_of_rows, column=place.column, sample_by=place.sample_by)

    def build(folder: Path) -> dict[str, int]:
        # Its bars are for texts that take longer.
        with TemporaryDirectory() as work, redirect_stderr(io.StringIO()):
            return find_repeated_text(
                files, Path(work), read=read, for_advice=True
            ).repeats._asdict()

    key = CacheKey({"kind": "repeats", "learned": learned, "sources": [source_fingerprint(*place)]})
    _, counts = cached_folder(cache_dir, key, build)
    return Repeats(**counts)
