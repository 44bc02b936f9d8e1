"""Repetition weights: the more often a token has followed the same context, the less it counts."""

import torch
from torch import Tensor

from tfidf_tune.weighting._context_hash import hash_contexts, hash_with, positions_in_document
from tfidf_tune.weighting._document_window import DocumentWindow
from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import NO_TOKEN, check_document_ids, on_host, valid_labels
from tfidf_tune.weighting._ranks import LabelExchange, exchange_labels, has_other_ranks


class RepetitionWeighting(TokenWeighting):
    r"""Weights that fall with the number of times that a token has followed the same context.

    .. math::
        w_i = (1 + f_i)^{-\alpha}

    where :math:`f_i` is how often the n-gram of token i and the h tokens before it stands in the mini-batches of the
    window, the current one left out. Text that is new keeps its full weight. A passage that comes again, whole or in
    parts and at whatever place, adds less each time: with alpha = 1 its n-th repetition counts 1 / n, and all of n
    together about ln n. It is what the paper's idf does for tokens, done for tokens in their context; the power law is
    that of :class:`PowerLawWeighting`. Not from a paper: chosen and measured as docs/results.md says.

    Weights are not scaled to mean 1: what is held back is not given to others. Beginnings of documents, with fewer than
    h tokens before them, are looked up with those that there are. In ``.eval()`` mode the window is read only.

    The state is the window: a ring of hashed n-grams, 4 bytes a token for each of ``num_batches`` mini-batches, and a
    table of their counts, 4 bytes for each of ``num_buckets``. Different n-grams may share a bucket: with n of them in
    the window, a new one is taken for an old one with probability 1 - exp(-n / num_buckets).

    Args:
        h (int): tokens of context, at least 1. Default: 8.
        alpha (float): exponent, positive. Default: 1.0.
        num_batches (int): mini-batches in the window, the current one included. Default: 1024.
        num_buckets (int): entries of the table of counts. Default: 2**24.
        ignore_index (int): label of the positions that do not count. Default: -100.
        sync (bool): whether all ranks share one window, as in :class:`TFIDFWeighting`. Default: False.

    Raises:
        ValueError: If a number is out of its range.
    """

    def __init__(
        self,
        *,
        h: int = 8,
        alpha: float = 1.0,
        num_batches: int = 1024,
        num_buckets: int = 2**24,
        ignore_index: int = -100,
        sync: bool = False,
    ) -> None:
        super().__init__()
        if h < 1:
            raise ValueError(f"h is {h}: a token is looked up with the h tokens before it, set it to 1 or more")
        if not alpha > 0:
            raise ValueError(f"alpha is {alpha}: weights fall by this power of the count, set it to more than 0")
        if num_buckets < 1:
            raise ValueError(f"num_buckets is {num_buckets}: it is the length of the table of counts, at least 1")
        if not isinstance(sync, bool):
            raise ValueError(f"sync is {sync!r}: set it to true or false")
        self.h = h
        self.alpha = alpha
        self.num_buckets = num_buckets
        self.ignore_index = ignore_index
        self.sync = sync
        self.window = DocumentWindow(num_batches)

    @property
    def communicates(self) -> bool:
        """Whether labels of other ranks are needed: with ``sync``, in ``.train()`` mode, with several processes."""
        return self.sync and self.training and has_other_ranks()

    def begin(
        self, labels: Tensor, *, document_ids: Tensor | None = None, shape: tuple[int, int] | None = None
    ) -> LabelExchange | None:
        """Start to gather the labels of all ranks, if this is what ``sync`` asks for now.

        Args:
            labels (Tensor): those of :meth:`forward`.
            document_ids (Tensor | None): those of :meth:`forward`.
            shape (tuple[int, int] | None): most rows and most positions of a rank's labels. Default: None, not known.

        Returns:
            LabelExchange | None: what :meth:`forward` takes as ``begun``.
        """
        if not self.communicates:
            return None
        return exchange_labels(labels, document_ids, shape=shape, ignore_index=self.ignore_index)

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
            ValueError: If ``labels`` is not 2-D, ``document_ids`` has another shape, or, on CPU, an id is
                outside the vocabulary.
        """
        if begun is None:
            begun = self.begin(labels, document_ids=document_ids)
        valid = valid_labels(labels, vocab_size, self.ignore_index)
        if document_ids is not None:
            check_document_ids(document_ids, labels)
        if self.window.device != labels.device:
            self.window.to(labels.device)
        buckets = self._buckets(labels, valid, document_ids)
        weights = (1 + self.window.document_frequency(buckets).float()).pow(-self.alpha)
        if self.training:
            if begun is not None:
                union = begun.wait()
                union_valid = valid_labels(union.labels, vocab_size, self.ignore_index)
                buckets = self._buckets(union.labels, union_valid, union.document_ids)
            self._put_in(buckets)
        return weights * valid

    def _buckets(self, labels: Tensor, valid: Tensor, document_ids: Tensor | None) -> Tensor:
        positions = positions_in_document(valid, document_ids)
        contexts = hash_contexts(labels, positions, self.h)
        return torch.where(valid, hash_with(contexts, labels.long()) % self.num_buckets, NO_TOKEN)

    def _put_in(self, buckets: Tensor) -> None:
        seen = buckets.flatten()
        if on_host(buckets):
            known = seen[seen != NO_TOKEN].numpy()
            self.window.update_on_host(known, len(known), num_positions=buckets.numel(), vocab_size=self.num_buckets)
        else:
            num_known = (seen != NO_TOKEN).count_nonzero()
            self.window.update(seen, num_known, vocab_size=self.num_buckets)
