"""Repetition weights: the more often a token has followed the same context, the less it counts."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tfidf_tune.weighting._arguments import require_number, require_whole
from tfidf_tune.weighting._context_hash import LONGEST_CONTEXT, hash_contexts, hash_with, positions_in_document
from tfidf_tune.weighting._document_window import DocumentWindow
from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import NO_TOKEN, check_document_ids, on_host, valid_labels
from tfidf_tune.weighting._ranks import LabelExchange

# Entries of the table of counts for a token of the window: at most 12 % of new n-grams are then taken for old ones.
_BUCKETS_PER_TOKEN = 8
_MOST_BUCKETS = 2**30


class RepetitionWeighting(TokenWeighting):
    r"""Weights that fall with the number of times that a token has followed the same context.

    .. math::
        w_i = (1 + f_i)^{-\alpha}

    where :math:`f_i` is how often the n-gram of token i and the h tokens before it stands in the last ``num_batches``
    mini-batches before the current one. Text that is new keeps its full weight. A passage that comes again, whole or in
    parts and at whatever place, adds less each time: with alpha = 1 and one copy a mini-batch its n-th repetition
    counts 1 / n, and all of n together about ln n. It is what the paper's idf does for tokens, done for tokens in their
    context; the power law is that of :class:`PowerLawWeighting`. Not from a paper: chosen and measured as
    docs/results.md says.

    Weights are not scaled to mean 1: what is held back is not given to others. Tokens with fewer than h labels before
    them in their document keep weight 1, and are never counted: so do short answers after masked prompts, which are
    alike without being copies. Copies within one mini-batch do not count for each other. In ``.eval()`` mode the window
    is read only.

    The state is the window: a ring of hashed n-grams, 4 bytes a token for each of ``num_batches`` mini-batches, and a
    table of their counts, 4 bytes for each of ``num_buckets``. Different n-grams may share a bucket: with n of them in
    the window, a new one is taken for an old one with probability 1 - exp(-n / num_buckets). With ``sync`` the ring and
    its table are for the tokens of all ranks.

    A weighting is not thread-safe: give each thread its own. Two that train with one at the same time get a
    ``RuntimeError``, unless it is compiled.

    Args:
        h (int): tokens of context, 1 to 1024. Default: 4.
        alpha (float): exponent, above 0, up to 4. Default: 1.0.
        num_batches (int): mini-batches in the window, at least 1. Default: 1024.
        num_buckets (int | None): entries of the table of counts, at most 2**30. Default: None, with the first
            mini-batch the power of two from 8 times the tokens of a full window on.
        ignore_index (int): label of the positions that do not count. Default: -100.
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
        ignore_index: int = -100,
        sync: bool = False,
    ) -> None:
        super().__init__()
        require_whole("h", h, 1, "a token is looked up with the h tokens before it", LONGEST_CONTEXT)
        require_number(
            "alpha",
            alpha,
            0,
            4,  # counts are below 2 ** 31, and (2 ** 31) ** -4 is a float32
            "weights fall by this power of the count",
            reason="a larger one can make weights 0 in float32",
            positive=True,
        )
        if num_buckets is not None:
            require_whole("num_buckets", num_buckets, 1, "it is the length of the table of counts", _MOST_BUCKETS)
        if not isinstance(sync, bool):
            raise ValueError(f"sync is {sync!r}: set it to true or false")
        self.h = h
        self.alpha = alpha
        self.num_buckets = num_buckets
        self.ignore_index = ignore_index
        self.sync = sync
        self.window = DocumentWindow(num_batches)
        self.register_buffer("context_length", torch.tensor([h]))  # that of the n-grams in the window

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Tell the bytes of the window, which with ``sync`` holds the tokens of all ranks."""
        num_positions = batch_size * seq_len * (num_ranks if self.sync else 1)
        return self.context_length.nbytes + self.window.num_bytes(num_positions, self._size_of_table(num_positions))

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
        """Compute the weights of a mini-batch and, in ``.train()`` mode, put it into the window.

        Returns:
            Tensor: float32 ``[b, s]``, at most 1.

        Raises:
            ValueError: If ``labels`` is not 2-D, ``document_ids`` has another shape, the window that was loaded has
                another number of buckets, or, on CPU, an id is outside the vocabulary.
            RuntimeError: If another thread is updating the window.
        """
        if begun is None:
            begun = self.begin(labels, document_ids=document_ids)
        valid = valid_labels(labels, vocab_size, self.ignore_index)
        if document_ids is not None:
            check_document_ids(document_ids, labels)
        if self.window.device != labels.device:
            self.window.to(labels.device)
        union = None if begun is None else begun.wait()
        with self.window.in_one_thread() if self.training else nullcontext():
            size = self._size_of_table((labels if union is None else union.labels).numel())
            buckets = self._buckets(labels, valid, document_ids, size)
            weights = (1 + self.window.document_frequency(buckets).float()).pow(-self.alpha) * valid
            if self.training:
                if union is not None:
                    of_all = valid_labels(union.labels, vocab_size, self.ignore_index)
                    buckets = self._buckets(union.labels, of_all, union.document_ids, size)
                self._put_in(buckets, size)
        return weights

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Raised at once, before the window is loaded, so that whoever catches it keeps one that fits.
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

    def _size_of_table(self, num_positions: int) -> int:
        made = self.window.vocab_size
        if made and self.num_buckets not in (None, made):
            raise ValueError(
                f"num_buckets is {self.num_buckets}, the window that was loaded has {made}: set it to that, or to null"
            )
        tokens = _BUCKETS_PER_TOKEN * self.window.num_batches * num_positions
        return made or self.num_buckets or min(1 << max(tokens - 1, 0).bit_length(), _MOST_BUCKETS)

    def _buckets(self, labels: Tensor, valid: Tensor, document_ids: Tensor | None, size: int) -> Tensor:
        positions = positions_in_document(valid, document_ids)
        hashes = hash_with(hash_contexts(labels, positions, self.h), labels.long())
        return torch.where(valid & (positions >= self.h), hashes % size, NO_TOKEN)

    def _put_in(self, buckets: Tensor, size: int) -> None:
        """The window counts n-grams as it counts tokens for TF-IDF: each as often as it stands there."""
        entering = buckets.flatten()
        if on_host(buckets):
            known = entering[entering != NO_TOKEN].numpy()
            self.window.update_on_host(known, len(known), num_positions=buckets.numel(), vocab_size=size)
        else:
            self.window.update(entering, (entering != NO_TOKEN).count_nonzero(), vocab_size=size)
