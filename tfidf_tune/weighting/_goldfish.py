"""Goldfish weights: one token in k is left out of the loss, chosen by a hash of the tokens before
it.
"""

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from tfidf_tune._checks import require_choice, require_integer
from tfidf_tune.weighting._context_hashes import (
    BASE,
    HASH_RANGE,
    LONGEST_CONTEXT,
    descending_powers,
    hash_contexts,
    positions_in_document,
)
from tfidf_tune.weighting.token_weighting import IGNORE_INDEX, TokenBatch, TokenWeighting, unit_mean

GoldfishStrategy = Literal["hash", "static"]


class GoldfishWeighting(TokenWeighting):
    r"""Goldfish weights: one token in k is left out of the loss, all others have equal weights.

    .. math::
        \mathcal{L} = -\frac{1}{|G|} \sum_i G_i \log P(x_i | x_{<i}), \qquad
        w_i = \frac{M}{|G|} G_i

    where :math:`G_i` is 0 for tokens that are left out and 1 otherwise, :math:`|G|` is the number
    of ones and M that of the valid tokens. Source: Hans et al., "Be like a Goldfish, Don't
    Memorize! Mitigating Memorization in Generative LLMs" (2024), section 3: k = 4 and h = 13 there.

    - ``hash``: whether a token is left out follows from a hash of the h tokens before it, so that a
      passage always loses the same tokens, wherever it occurs. The hash depends on the order of
      these tokens, does not include the target, and is the same on every device. A token with fewer
      than h labels before it in its document is kept.
    - ``static``: every k-th label of a document is left out, counted from the last ignored label.

    Special tokens, see :meth:`set_special_tokens`, are always kept. In ``.eval()`` mode nothing is
    left out. There is no state.

    Args:
        strategy (GoldfishStrategy): ``hash`` or ``static``. Default: "hash".
        k (int): one token in k is left out, 2 to 2**31. Default: 4.
        h (int): tokens of context that are hashed, 1 to 1024. Default: 13.
        seed (int): of the hash. Default: 0.

    Raises:
        ValueError: If an argument is out of its range.
    """

    powers: Tensor
    _is_special: Tensor

    def __init__(
        self, *, strategy: GoldfishStrategy = "hash", k: int = 4, h: int = 13, seed: int = 0
    ) -> None:
        super().__init__()
        require_choice("strategy", strategy, get_args(GoldfishStrategy))
        # K times a hash is an int64.
        require_integer("k", k, 2, "one token in k is left out of the loss", 2**31)
        require_integer("h", h, 1, "the hash is of the h tokens before a token", LONGEST_CONTEXT)
        self.strategy: GoldfishStrategy = strategy
        self.k = k
        self.h = h
        self.seed = seed
        self.register_buffer("powers", descending_powers([BASE], h + 1), persistent=False)
        self.set_special_tokens(())

    def set_special_tokens(self, token_ids: Iterable[int]) -> None:
        """Set the tokens that are never left out. They replace those set before."""
        ids = sorted({token_id for token_id in token_ids if token_id >= 0})
        # A table, because torch.isin sorts many ids, which waits for a GPU. The last entry stands
        # for all ids above.
        size = ids[-1] + 2 if ids else 1
        is_special = torch.zeros(size, dtype=torch.bool)
        self.register_buffer("_is_special", is_special, persistent=False)
        self._is_special[ids] = True

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Return M / |G| where a token is kept and 0 elsewhere, float32 ``[b, s]``."""
        valid = batch.labels != IGNORE_INDEX
        if not self.training:
            return valid.float()
        # Special tokens are kept; labels above the table read its last entry, which is False.
        is_special = self._is_special.take(batch.labels.clamp(0, len(self._is_special) - 1))
        positions = positions_in_document(valid, batch.document_ids)
        # One token in k: by its place in the document, or by a hash of the tokens before it that is
        # small enough.
        if self.strategy == "static":
            left_out = positions % self.k == self.k - 1
        else:
            hashes = hash_contexts(batch.labels, self.powers[0], seed=self.seed)
            left_out = (hashes * self.k < HASH_RANGE) & (positions >= self.h)
        kept = valid & (is_special | ~left_out)
        return unit_mean(kept.float(), valid)
