"""Remove rows of a data set that repeat others: exact copies, or near copies by MinHash."""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from tfidf_tune._checks import require_choice, require_integer, require_number, suggestion
from tfidf_tune._tokenizer import TextTokenizer, TokenArray
from tfidf_tune.corpus.minhash import Hashes, bands, signature, similarity, word_ngrams

logger = logging.getLogger(__name__)

DeduplicationMethod = Literal["none", "exact", "minhash"]
Deduplicate = DeduplicationMethod | Mapping[str, Any]
"""The section ``deduplicate`` of a data set: a method, or a mapping of the arguments of
:class:`Deduplication`.
"""
COST_OF_MISSED = 0.98  # a candidate that is no near copy costs little: its similarity is computed
_Rows = TokenArray | Sequence[TokenArray]
_NUM_CACHED = 1024  # rows: a candidate comes again with each of its copies
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Deduplication:
    """What a copy is; of several copies one stays.

    - ``none``: nothing.
    - ``exact``: what is equal: tokens of rows, texts of documents.
    - ``minhash``: equal ones, and near copies: texts whose sets of n-grams of words, in lower case,
      have a Jaccard similarity of ``threshold`` or more. MinHash finds them.

    Threshold and n-gram have the defaults of "Deduplicating Training Data Makes Language Models
    Better" (Lee et al. 2022), who compare tokens, by 9,000 hash functions.

    Args:
        method (Literal["none", "exact", "minhash"]): see above. Default: "minhash"
        threshold (float): the least Jaccard similarity of near copies, above 0. Default: 0.8
        ngram (int): words of an n-gram; a text with fewer words is one n-gram. Default: 5

    Raises:
        ValueError: If a value is out of range.
    """

    method: DeduplicationMethod = "minhash"
    threshold: float = 0.8
    ngram: int = 5

    def __post_init__(self) -> None:
        require_choice("deduplicate.method", self.method, get_args(DeduplicationMethod))
        require_number(
            "threshold",
            self.threshold,
            0,
            1,
            "the least Jaccard similarity of near copies",
            reason="that of equal sets",
            positive=True,
        )
        require_integer("ngram", self.ngram, 1)

    @classmethod
    def of(cls, given: Deduplicate) -> "Deduplication":
        """Read the section ``deduplicate`` of a data set; raises a ``ValueError`` if a key or value
        is wrong.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):
            require_choice("deduplicate", given, get_args(DeduplicationMethod))
            given = {"method": given}
        for name in given:
            if name not in names:
                raise ValueError(f"deduplicate has no key '{name}'{suggestion(str(name), names)}")
        read = cls(**given)
        if read.method == "minhash":
            bands(read.threshold, COST_OF_MISSED)
        return read

    @property
    def settings(self) -> dict[str, Any]:
        """Return the part of a cache key, empty if nothing is removed."""
        if self.method == "none":
            return {}
        if self.method == "exact":
            return {"method": "exact"}
        return asdict(self) | {"of": "words"}

    def kept(self, rows: _Rows, source: str, tokenizer: TextTokenizer) -> Mask:
        """Return which rows of a data set stay, bool ``[num_rows]``: the first of several copies;
        log the numbers.

        With ``minhash``, nothing less similar to an earlier row that stays is removed. With the
        defaults, a copy with a similarity of 0.8 to one other row is missed in 2 % of cases, one of
        0.9 in fewer than 0.1 %.
        """
        if self.method == "none":
            return np.ones(len(rows), dtype=np.bool_)
        # Equal rows go first, by their bytes.
        kept = np.ones(len(rows), np.bool_)
        seen: set[bytes] = set()
        for number, row in enumerate(rows):
            content = row.tobytes()
            kept[number] = content not in seen
            seen.add(content)
        means = "equal tokens"
        if self.method == "minhash":
            means = f"{self.ngram}-gram Jaccard similarity of {self.threshold} or more"
            self._leave_out_near_copies(kept, rows, tokenizer)
        num_removed = len(rows) - kept.sum()
        logger.info(
            f"{source}: {num_removed:,} of {len(rows):,} rows removed as copies of earlier rows "
            f"({means})"
        )
        return kept

    def _leave_out_near_copies(self, kept: Mask, rows: _Rows, tokenizer: TextTokenizer) -> None:
        @lru_cache(_NUM_CACHED)
        def ngrams_of(number: int) -> Hashes:
            # The documents of a row one by one, because torchtune's tokenizers decode no further
            # than EOS.
            eos_id = tokenizer.eos_id
            row = rows[number]
            parts = np.split(row, np.flatnonzero(row == eos_id))
            texts = [tokenizer.decode(part[part != eos_id].tolist()) for part in parts]
            return word_ngrams("\n".join(texts), self.ngram)

        # Only rows that stay are in the bands: a copy of a row that was removed is compared with
        # what is left.
        num_bands, num_functions = bands(self.threshold, COST_OF_MISSED)
        rows_with: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        for number in np.flatnonzero(kept).tolist():
            ngrams = ngrams_of(number)
            if not len(ngrams):
                continue
            # Candidates agree in a band; whether they are near copies is computed from all n-grams.
            parts = np.split(signature(ngrams)[: num_bands * num_functions], num_bands)
            buckets = [rows_with[band, part.tobytes()] for band, part in enumerate(parts)]
            candidates = {*chain(*buckets)}
            is_near_copy = any(
                similarity(ngrams, ngrams_of(other)) >= self.threshold for other in candidates
            )
            if is_near_copy:
                kept[number] = False
            else:
                for bucket in buckets:
                    bucket.append(number)
