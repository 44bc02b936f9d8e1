"""Goldfish weights: some tokens never count, the same ones at every repetition of a passage."""

from collections.abc import Iterable
from typing import Literal, get_args

import torch
from torch import Tensor

from tfidf_tune.weighting._arguments import require_whole
from tfidf_tune.weighting._context_hash import HASH_RANGE, LONGEST_CONTEXT, hash_contexts, positions_in_document
from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import SpecialTokens, check_document_ids, valid_labels
from tfidf_tune.weighting._ranks import LabelExchange
from tfidf_tune.weighting._term_statistics import unit_mean

GoldfishStrategy = Literal["hash", "static"]
GOLDFISH_STRATEGIES: tuple[GoldfishStrategy, ...] = get_args(GoldfishStrategy)
_MOST_K = 2**63 // HASH_RANGE  # a product of k and a hash is one int64


class GoldfishWeighting(TokenWeighting):
    r"""Goldfish weights: one token in k is left out of the loss, the others count alike.

    .. math::
        \mathcal{L} = -\frac{1}{|G|} \sum_i G_i \log P(x_i | x_{<i}), \qquad
        w_i = \frac{M}{|G|} G_i

    with :math:`G_i` 0 for what is left out and 1 otherwise, :math:`|G|` the number of ones and M that of the valid
    tokens. Source: Hans et al., "Be like a Goldfish, Don't Memorize! Mitigating Memorization in Generative LLMs"
    (2024), section 3: k = 4 and h = 13 there.

    - ``hash``: whether a token is left out follows from a hash of the h tokens before it, so that a passage always
      loses the same tokens, wherever it stands. The hash is of the tokens in their order, the target is not among
      them, and the same on every device. A token with fewer than h labels before it in its document is kept.
    - ``static``: every k-th label of a document is left out, counted anew after ignored labels.

    Special tokens, see :meth:`exempt`, are always kept. In ``.eval()`` mode nothing is left out. There is no state.

    Args:
        strategy (GoldfishStrategy): ``hash`` or ``static``. Default: "hash".
        k (int): one token in k is left out, 2 to 2**31. Default: 4.
        h (int): tokens of context that are hashed, 1 to 1024. Default: 13.
        seed (int): of the hash. Default: 0.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Raises:
        ValueError: If ``strategy`` is not one of the two, or ``k`` or ``h`` out of its range.
    """

    def __init__(
        self,
        *,
        strategy: GoldfishStrategy = "hash",
        k: int = 4,
        h: int = 13,
        seed: int = 0,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if strategy not in GOLDFISH_STRATEGIES:
            raise ValueError(f"strategy is '{strategy}': possible are {', '.join(GOLDFISH_STRATEGIES)}")
        require_whole("k", k, 2, "one token in k is left out of the loss", _MOST_K)
        require_whole("h", h, 1, "the hash is of the h tokens before a token", LONGEST_CONTEXT)
        self.strategy: GoldfishStrategy = strategy
        self.k = k
        self.h = h
        self.seed = seed
        self.ignore_index = ignore_index
        self.special_tokens = SpecialTokens()

    def exempt(self, token_ids: Iterable[int]) -> None:
        """Never leave these tokens out.

        Args:
            token_ids (Iterable[int]): special tokens; they take the place of those named before.
        """
        self.special_tokens = SpecialTokens(token_ids)

    @torch.no_grad()
    def forward(
        self,
        labels: Tensor,
        *,
        vocab_size: int | None = None,
        document_ids: Tensor | None = None,
        begun: LabelExchange | None = None,
        predictions: Predictions | None = None,
    ) -> Tensor:
        """Compute the weights of a mini-batch: M / |G| where a token is kept, 0 where not, float32 ``[b, s]``.

        Raises:
            ValueError: If ``labels`` is not 2-D, ``document_ids`` has another shape, or, on CPU, an id is outside the
                vocabulary.
        """
        valid = valid_labels(labels, vocab_size, self.ignore_index)
        if document_ids is not None:
            check_document_ids(document_ids, labels)
        if not self.training:
            return valid.float()
        kept = ~self._is_left_out(labels, valid, document_ids) | self.special_tokens.among(labels)
        return unit_mean((valid & kept).float(), valid)

    def _is_left_out(self, labels: Tensor, valid: Tensor, document_ids: Tensor | None) -> Tensor:
        positions = positions_in_document(valid, document_ids)
        if self.strategy == "static":
            return positions % self.k == self.k - 1
        hashes = hash_contexts(labels, positions, self.h, seed=self.seed)
        return (hashes * self.k < HASH_RANGE) & (positions >= self.h)
