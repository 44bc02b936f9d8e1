"""Random token dropping: the control for everything that hides tokens from the loss."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tfidf_tune.weighting._arguments import require_number
from tfidf_tune.weighting._context_hash import HASH_RANGE, hash_with, mix_bits
from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import SpecialTokens, valid_labels
from tfidf_tune.weighting._ranks import LabelExchange, own_rank
from tfidf_tune.weighting._term_statistics import unit_mean


class TokenDropWeighting(TokenWeighting):
    r"""Leaves tokens out of the loss at random, others at every repetition of a passage.

    .. math::
        w_i = \frac{M}{|G|} G_i, \qquad G_i \sim \mathrm{Bernoulli}(1 - p)

    with M valid tokens, of which :math:`|G|` are kept. It is the control of :class:`GoldfishWeighting`: Hans et al.,
    "Be like a Goldfish, Don't Memorize! Mitigating Memorization in Generative LLMs" (2024), section 3, argue that a
    model learns a passage all the same when every repetition hides other tokens of it.

    What is dropped follows from a hash of seed, rank, position and the number of mini-batches seen, which is the state:
    on every device the same, and exactly so after a resume. Special tokens, see :meth:`exempt`, are always kept. In
    ``.eval()`` mode nothing is dropped.

    Args:
        p (float): share of the tokens that is dropped, from 0 to 0.99. Default: 0.25.
        seed (int): another drops other tokens. Default: 0.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Raises:
        ValueError: If ``p`` is out of its range.
    """

    num_batches_seen: Tensor

    def __init__(self, *, p: float = 0.25, seed: int = 0, ignore_index: int = -100) -> None:
        super().__init__()
        require_number(
            "p",
            p,
            0,
            0.99,
            "it is the share of tokens that is dropped",
            reason="a larger one can leave no token of a mini-batch to learn from",
        )
        self.p = p
        self.seed = seed
        self.ignore_index = ignore_index
        self.special_tokens = SpecialTokens()
        self.register_buffer("num_batches_seen", torch.zeros(1, dtype=torch.int64))

    def exempt(self, token_ids: Iterable[int]) -> None:
        """Never drop these tokens.

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
            ValueError: If ``labels`` is not 2-D, or, on CPU, an id is outside the vocabulary.
        """
        valid = valid_labels(labels, vocab_size, self.ignore_index)
        if not self.training:
            return valid.float()
        if self.num_batches_seen.device != labels.device:
            self.num_batches_seen = self.num_batches_seen.to(labels.device)
        batch = hash_with(hash_with(mix_bits(self.num_batches_seen), self.seed), own_rank())
        hashes = hash_with(batch, torch.arange(labels.numel(), device=labels.device)).view(labels.shape)
        self.num_batches_seen += valid.any()
        kept = (hashes >= self.p * HASH_RANGE) | self.special_tokens.among(labels)
        return unit_mean((valid & kept).float(), valid)
