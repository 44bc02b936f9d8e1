"""Remove rows of a data set that repeat others: exact copies, or near copies by MinHash."""

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from tfidf_tune._checks import require_choice, require_integer, require_number, suggestion
from tfidf_tune.data._duplicates import Mask
from tfidf_tune.data._near_copies import bands, signature, similarity, word_ngrams
from tfidf_tune.data._tokenizer import TextTokenizer, TokenArray

logger = logging.getLogger(__name__)

DeduplicationMethod = Literal["none", "exact", "minhash"]
Deduplicate = DeduplicationMethod | Mapping[str, Any]
"""The section ``deduplicate`` of a data set: a method, or a mapping of the arguments of :class:`Deduplication`."""
_COST_OF_MISSED = 0.98  # a candidate that is no near copy costs little: its similarity is computed
_NUM_CACHED = 1024  # rows: a candidate comes again with each of its copies


@dataclass(frozen=True)
class Deduplication:
    """What a copy is; of several copies one stays.

    - ``none``: nothing.
    - ``exact``: what is equal: tokens of rows, texts of documents.
    - ``minhash``: equal ones, and near copies: texts whose sets of n-grams of words, in lower case, have a Jaccard
      similarity of ``threshold`` or more. MinHash finds them.

    Threshold and n-gram have the defaults of "Deduplicating Training Data Makes Language Models Better" (Lee et al.
    2022), who compare tokens, by 9,000 hash functions.

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
        require_choice("deduplicate.method", self.method, ("none", "exact", "minhash"))
        require_number("threshold", self.threshold, 0, 1, "the least Jaccard similarity of near copies",
                       reason="that of equal sets", positive=True)  # fmt: skip
        require_integer("ngram", self.ngram, 1)

    @classmethod
    def of(cls, given: Deduplicate) -> "Deduplication":
        """Read the section ``deduplicate`` of a data set; raises a ``ValueError`` if a key or value is wrong."""
        names = [field.name for field in fields(cls)]
        section = given if isinstance(given, Mapping) else {"method": given}
        for name in section:
            if name not in names:
                raise ValueError(f"deduplicate has no key '{name}'{suggestion(str(name), names)}")
        read = cls(**section)
        if read.method == "minhash":
            bands(read.threshold, _COST_OF_MISSED)
        return read

    @property
    def settings(self) -> dict[str, Any]:
        """Return the part of a cache key, empty if nothing is removed."""
        used = {"none": {}, "exact": {"method": "exact"}, "minhash": asdict(self) | {"of": "words"}}[self.method]
        return {"deduplicate": used} if used else {}

    def kept(self, rows: TokenArray | Sequence[TokenArray], source: str, tokenizer: TextTokenizer) -> Mask:
        """Return which rows of a data set stay, bool ``[num_rows]``: the first of several copies; log the numbers.

        With ``minhash``, a row is removed if it is a near copy of an earlier one that stays. The similarity of the
        candidates is computed, so nothing less similar is removed. With the defaults, a copy with a similarity of 0.8
        to one other row is missed in 2 % of cases, one of 0.9 in fewer than 0.1 %.

        Args:
            rows (TokenArray | Sequence[TokenArray]): int32 token ids, ``[num_tokens]`` each.
            source (str): name of the text, for the log.
            tokenizer (TextTokenizer): makes text of the rows.
        """
        if self.method == "none":
            return np.ones(len(rows), dtype=np.bool_)
        first = {row.tobytes(): number for number, row in reversed(list(enumerate(rows)))}
        kept = np.isin(np.arange(len(rows)), list(first.values()))
        if self.method == "minhash":
            self._leave_out_near_copies(kept, rows, tokenizer)
        near = f"{self.ngram}-gram Jaccard similarity of {self.threshold} or more"
        logger.info(
            f"{source}: {len(rows) - kept.sum():,} of {len(rows):,} rows removed as copies of earlier rows "
            f"({'equal tokens' if self.method == 'exact' else near})"
        )
        return kept

    def _leave_out_near_copies(
        self, kept: Mask, rows: TokenArray | Sequence[TokenArray], tokenizer: TextTokenizer
    ) -> None:
        num_bands, num_functions = bands(self.threshold, _COST_OF_MISSED)
        rows_with: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        ngrams_of = lru_cache(_NUM_CACHED)(lambda number: word_ngrams(_text(tokenizer, rows[number]), self.ngram))
        for number in np.flatnonzero(kept).tolist():
            ngrams = ngrams_of(number)
            if not len(ngrams):
                continue
            parts = signature(ngrams)[: num_bands * num_functions].reshape(num_bands, num_functions)
            keys = [(band, part.tobytes()) for band, part in enumerate(parts)]
            candidates = {other for key in keys for other in rows_with[key]}
            if any(similarity(ngrams, ngrams_of(other)) >= self.threshold for other in candidates):
                kept[number] = False
                continue
            for key in keys:
                rows_with[key].append(number)


def _text(tokenizer: TextTokenizer, row: TokenArray) -> str:
    """Decode the documents of a row one by one, because torchtune's tokenizers decode no further than EOS."""
    ends = np.flatnonzero(row == tokenizer.eos_id)
    return "\n".join(tokenizer.decode(part[part != tokenizer.eos_id].tolist()) for part in np.split(row, ends))
