"""Remove rows of a data set that repeat others: exact copies, or near copies by MinHash."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tfidf_tune._checks import require_choice, require_integer, require_number, suggestion
from tfidf_tune.data._duplicates import Mask
from tfidf_tune.data._tokenizer import TokenArray

logger = logging.getLogger(__name__)

DeduplicationMethod = Literal["none", "exact", "minhash"]
Deduplicate = DeduplicationMethod | Mapping[str, Any]
"""The section ``deduplicate`` of a data set: a method, or a mapping of the arguments of :class:`Deduplication`."""
_NUM_FUNCTIONS = 256
_ERRORS = (0.02, 0.98)  # weights of false candidates, which are checked, and of copies that are missed
_NUM_CACHED = 1024  # rows: a candidate comes again with each of its copies


@dataclass(frozen=True)
class Deduplication:
    """Which rows of a data set are removed; the first of several copies always stays.

    - ``none``: no rows.
    - ``exact``: rows whose tokens equal those of an earlier row.
    - ``minhash``: rows whose Jaccard similarity to an earlier row that stays is ``threshold`` or more. The sets that
      are compared are those of the ``ngram`` consecutive tokens. MinHash with locality-sensitive hashing finds the
      candidates, then their similarity is computed exactly, so nothing less similar is removed. With the defaults, a
      copy with a similarity of 0.8 to one other row is missed in 2 % of cases, one of 0.9 in fewer than 0.1 %.

    Threshold and n-gram are those of "Deduplicating Training Data Makes Language Models Better" (Lee et al. 2022). They
    use 9,000 hash functions, and remove all but one row of each connected component of similar rows.

    Args:
        method (Literal["none", "exact", "minhash"]): see above. Default: "minhash"
        threshold (float): the least Jaccard similarity of near copies, above 0 and, with ``minhash``, below 0.999.
            Default: 0.8
        ngram (int): tokens of an n-gram; a shorter row is one n-gram. Default: 5

    Raises:
        ValueError: If a value is out of range.
    """

    method: DeduplicationMethod = "minhash"
    threshold: float = 0.8
    ngram: int = 5

    def __post_init__(self) -> None:
        require_choice("deduplicate.method", self.method, ("none", "exact", "minhash"))
        require_number(
            "deduplicate.threshold", self.threshold, 0, 1, "the least Jaccard similarity of near copies",
            reason="1 is that of equal sets", positive=True,
        )  # fmt: skip
        require_integer("deduplicate.ngram", self.ngram, 1)
        if self.method == "minhash":
            self._make_index()

    @classmethod
    def of(cls, given: Deduplicate) -> "Deduplication":
        """Read the section ``deduplicate`` of a data set; raises a ``ValueError`` if a key or value is wrong."""
        if not isinstance(given, Mapping):
            return cls(given)
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise ValueError(f"deduplicate has no key '{name}'{suggestion(str(name), names)}")
        return cls(**given)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the part of a cache key, empty if nothing is removed."""
        used = {"none": {}, "exact": {"method": "exact"}, "minhash": asdict(self)}[self.method]
        return {"deduplicate": used} if used else {}

    def kept(self, rows: TokenArray | Sequence[TokenArray], source: str) -> Mask:
        """Return for each row of int32 token ids whether it stays, bool ``[num_rows]``; a log line has the numbers."""
        if self.method == "none":
            return np.ones(len(rows), dtype=np.bool_)
        kept = self._first_of_equal(rows) if self.method == "exact" else self._without_near_copies(rows)
        near = f"{self.ngram}-gram Jaccard similarity of {self.threshold} or more"
        logger.info(
            f"{source}: {len(rows) - kept.sum():,} of {len(rows):,} rows removed as copies of earlier rows "
            f"({'equal tokens' if self.method == 'exact' else near})"
        )
        return kept

    @staticmethod
    def _first_of_equal(rows: TokenArray | Sequence[TokenArray]) -> Mask:
        first = {row.tobytes(): number for number, row in reversed(list(enumerate(rows)))}
        return np.isin(np.arange(len(rows)), list(first.values()))

    def _without_near_copies(self, rows: TokenArray | Sequence[TokenArray]) -> Mask:
        from datasketch import MinHash

        kept = np.zeros(len(rows), dtype=np.bool_)
        index = self._make_index()
        grams_of = lru_cache(_NUM_CACHED)(lambda number: self._grams(rows[number]))
        for number, row in enumerate(rows):
            grams = self._grams(row)
            signature = MinHash(_NUM_FUNCTIONS)
            signature.update_batch(list(grams))
            if all(_jaccard(grams, grams_of(other)) < self.threshold for other in index.query(signature)):
                index.insert(number, signature)
                kept[number] = True
        return kept

    def _make_index(self) -> Any:
        from datasketch import MinHashLSH

        try:
            return MinHashLSH(self.threshold, _NUM_FUNCTIONS, weights=_ERRORS)
        except ValueError as error:  # a single band
            raise ValueError(
                f"deduplicate.threshold {self.threshold} is too high for {_NUM_FUNCTIONS} hash functions: lower it, or "
                "set deduplicate.method to exact to remove only equal rows"
            ) from error

    def _grams(self, row: TokenArray) -> set[bytes]:
        return {row[start : start + self.ngram].tobytes() for start in range(max(1, len(row) - self.ngram + 1))}


def _jaccard(first: set[bytes], second: set[bytes]) -> float:
    return len(first & second) / len(first | second)
