"""Repetition weights: the more often a token has followed the same context, the smaller its weight."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tfidf_tune._checks import require_bool, require_integer, require_number
from tfidf_tune.weighting._context_hash import LONGEST_CONTEXT, hash_contexts, hash_with, positions_in_document
from tfidf_tune.weighting._labels import IGNORE_INDEX, NO_TOKEN, GatheredLabels, TokenBatch, on_host
from tfidf_tune.weighting._weighting import TokenWeighting
from tfidf_tune.weighting._window import DocumentWindow

# Entries of the table of counts for a token of the window: at most 12 % of new n-grams then collide with old ones.
_BUCKETS_PER_TOKEN = 8
_MOST_BUCKETS = 2**30


class RepetitionWeighting(TokenWeighting):
    r"""Weights that fall with the number of times that a token has followed the same context.

    .. math::
        w_i = (1 + f_i)^{-\alpha}

    where :math:`f_i` is how often the n-gram of token i and the h tokens before it occurs in the last ``num_batches``
    mini-batches before the current one. New text keeps its full weight. A repeated passage, complete or in part and at
    any position, contributes less each time: with alpha = 1 and one copy in each mini-batch its n-th repetition counts
    1 / n, and n repetitions together about ln n. This applies the idea of idf to tokens in their context; the power law
    is that of :class:`PowerLawWeighting`. Not from a paper: chosen and measured as docs/results.md describes.

    Weights are not scaled to mean 1: repeated text loses weight, and nothing gains any. Tokens with fewer than h labels
    before them in their document keep weight 1 and are never counted. That includes short answers after masked prompts,
    which are similar without being copies. Copies within one mini-batch do not count for each other. In ``.eval()``
    mode the window is not updated.

    The state is the window: a ring of hashed n-grams, 4 bytes a token for each of ``num_batches`` mini-batches, and a
    table of their counts, 4 bytes for each of ``num_buckets``. Different n-grams may share a bucket: with n of them in
    the window, a new one is taken for an old one with probability 1 - exp(-n / num_buckets). With ``sync`` the ring and
    its table are for the tokens of all ranks. A weighting is not thread-safe, see :class:`TFIDFWeighting`.

    Args:
        h (int): tokens of context, 1 to 1024. Default: 4.
        alpha (float): exponent, above 0, up to 4. Default: 1.0.
        num_batches (int): mini-batches in the window, at least 1. Default: 1024.
        num_buckets (int | None): entries of the table of counts, at most 2**30. Default: None, set at the first
            mini-batch to the power of two not below 8 times the tokens of a full window.
        sync (bool): whether all ranks share one window, as in :class:`TFIDFWeighting`. Default: False.

    Raises:
        ValueError: If an argument is out of its range.
    """

    has_unit_mean = False
    context_length: Tensor

    def __init__(
        self,
        *,
        h: int = 4,
        alpha: float = 1.0,
        num_batches: int = 1024,
        num_buckets: int | None = None,
        sync: bool = False,
    ) -> None:
        super().__init__()
        require_integer("h", h, 1, "a token is looked up with the h tokens before it", LONGEST_CONTEXT)
        # Counts are below 2 ** 31, and (2 ** 31) ** -4 is a float32.
        reason = "a larger one can make weights 0 in float32"
        require_number("alpha", alpha, 0, 4, "weights fall by this power of the count", reason=reason, positive=True)
        if num_buckets is not None:
            require_integer("num_buckets", num_buckets, 1, "it is the length of the table of counts", _MOST_BUCKETS)
        require_bool("sync", sync)
        self.h = h
        self.alpha = alpha
        self.num_buckets = num_buckets
        self.sync = sync
        self.window = DocumentWindow(num_batches)
        self.register_buffer("context_length", torch.tensor([h]))  # that of the n-grams in the window

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Return the bytes of the window, which with ``sync`` holds the tokens of all ranks."""
        num_positions = batch_size * seq_len * (num_ranks if self.sync else 1)
        return self.context_length.nbytes + self.window.num_bytes(num_positions, self._num_buckets(num_positions))

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights of a mini-batch, at most 1, and, in ``.train()`` mode, put it into the window.

        Raises:
            ValueError: If the window that was loaded has a different number of buckets.
        """
        self.window.follow(batch.labels)
        with self.window.in_one_thread() if self.training else nullcontext():
            size = self._num_buckets((batch.gathered or batch).labels.numel())
            buckets = self._buckets(batch, size)
            counts = self.window.document_frequency(buckets)
            if self.training:
                self._put_in(buckets if batch.gathered is None else self._buckets(batch.gathered, size), size)
        return (1 + counts.float()).pow(-self.alpha) * (batch.labels != IGNORE_INDEX)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Raised immediately, before the window is loaded, so that after the error the present window is intact.
        saved = state_dict.get(prefix + "context_length")
        if saved is None and prefix + "window.entries_KT" in state_dict:
            raise ValueError(
                "the saved window does not say how many tokens of context its n-grams have: start a new one"
            )
        if saved is not None and int(saved) != self.h:
            raise ValueError(
                f"the saved window holds n-grams of {int(saved)} tokens of context, h is {self.h}: set h to "
                f"{int(saved)}, or start with a new window"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _num_buckets(self, num_positions: int) -> int:
        existing = self.window.vocab_size
        if existing and self.num_buckets not in (None, existing):
            raise ValueError(
                f"num_buckets is {self.num_buckets}, the window that was loaded has {existing}: set it to that, or to "
                "null"
            )
        tokens = _BUCKETS_PER_TOKEN * self.window.num_batches * num_positions
        return existing or self.num_buckets or min(1 << max(tokens - 1, 0).bit_length(), _MOST_BUCKETS)

    def _buckets(self, batch: TokenBatch | GatheredLabels, size: int) -> Tensor:
        valid = batch.labels != IGNORE_INDEX
        positions = positions_in_document(valid, batch.document_ids)
        hashes = hash_with(hash_contexts(batch.labels, positions, self.h), batch.labels)
        return torch.where(valid & (positions >= self.h), hashes % size, NO_TOKEN)

    def _put_in(self, buckets: Tensor, size: int) -> None:
        """Count n-grams as the window counts tokens for TF-IDF, each as often as it occurs."""
        entering = buckets.flatten()
        if on_host(buckets):
            known = entering[entering != NO_TOKEN].numpy()
            self.window.update_on_host(known, len(known), num_positions=buckets.numel(), vocab_size=size)
        else:
            self.window.update(entering, (entering != NO_TOKEN).count_nonzero(), vocab_size=size)
