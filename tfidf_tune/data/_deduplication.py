"""Remove rows of a data set that repeat others: exact copies, or near copies by MinHash."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tfidf_tune._checks import require_choice, require_integer, require_number
from tfidf_tune.data._duplicates import Mask
from tfidf_tune.data._tokenizer import TokenArray

logger = logging.getLogger(__name__)

DeduplicationMethod = Literal["none", "exact", "minhash"]
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
        method (Literal["none", "exact", "minhash"]): see above.
        threshold (float): the least Jaccard similarity of near copies, above 0. With ``minhash`` too high a one is
            refused: from 0.999 on with 256 hash functions, from 0.985 on with 16.
        num_perm (int): hash functions of MinHash.
        ngram (int): tokens of an n-gram; a shorter row is one n-gram.

    Raises:
        ValueError: If a value is out of range.
    """

    method: DeduplicationMethod
    threshold: float
    num_perm: int
    ngram: int

    def __post_init__(self) -> None:
        require_choice("deduplicate", self.method, ("none", "exact", "minhash"))
        require_number(
            "minhash_threshold", self.threshold, 0, 1, "the least Jaccard similarity of near copies",
            reason="1 is that of equal sets", positive=True,
        )  # fmt: skip
        require_integer("minhash_num_perm", self.num_perm, 2)
        require_integer("minhash_ngram", self.ngram, 1)
        if self.method == "minhash":
            self._make_index()

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
            signature = MinHash(self.num_perm)
            signature.update_batch(list(grams))
            if all(_jaccard(grams, grams_of(other)) < self.threshold for other in index.query(signature)):
                index.insert(number, signature)
                kept[number] = True
        return kept

    def _make_index(self) -> Any:
        from datasketch import MinHashLSH

        try:
            return MinHashLSH(self.threshold, self.num_perm, weights=_ERRORS)
        except ValueError as error:  # a single band
            raise ValueError(
                f"minhash_threshold {self.threshold} is too high for {self.num_perm} hash functions: lower "
                "minhash_threshold or raise minhash_num_perm, or set deduplicate to exact to remove only equal rows"
            ) from error

    def _grams(self, row: TokenArray) -> set[bytes]:
        return {row[start : start + self.ngram].tobytes() for start in range(max(1, len(row) - self.ngram + 1))}


def _jaccard(first: set[bytes], second: set[bytes]) -> float:
    return len(first & second) / len(first | second)
