"""TF-IDF weights over a rolling window of mini-batches.

Shape suffixes: B rows, S positions in a row, T terms.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from tfidf_tune._checks import require_bool, require_choice, require_number
from tfidf_tune.weighting._formula import (
    TermFrequency,
    distinct_terms,
    inverse_document_frequency,
    term_frequency,
    unit_mean,
)
from tfidf_tune.weighting._labels import IGNORE_INDEX, NO_TOKEN, TokenBatch
from tfidf_tune.weighting._weighting import TokenWeighting
from tfidf_tune.weighting._window import DocumentWindow

Counted = Literal["labels", "tokens"]
# Document ids are gathered as int32; clamped, those out of its range are refused too.
_GATHERED_ID_LIMIT = 2**31 - 1


class TFIDFWeighting(TokenWeighting):
    r"""TF-IDF weights of the label tokens, document frequencies taken from the last ``num_batches`` mini-batches.

    .. math::
        w'_i = \mathrm{tf}_i \cdot \mathrm{idf}(x_i), \qquad
        \mathrm{idf}(v) = \ln\frac{1 + N}{1 + \mathrm{df}(v)} + 1, \qquad
        w_i = \frac{w'_i}{\frac{1}{M}\sum_{j=1}^{M} w'_j}

    where :math:`\mathrm{tf}_i` is the number of times that token :math:`x_i` occurs in its sequence,
    :math:`\mathrm{df}(v)` the number of the window's N sequences that contain v, and M the number of valid tokens of
    the mini-batch. Source: "Rebalancing Token Importance in Language Models with TF-IDF Weighted Cross-Entropy
    Loss", section 3.1.

    What is counted: a sequence is by default the list of its label tokens, without masked prompts and without the first
    token, which nothing predicts. With ``counted="tokens"`` it is the list of all its tokens, padding left out, which
    are passed as ``all_tokens``, see :class:`TokenBatch`. In both cases tf and df have the same sequences, as in every
    TF-IDF; only label tokens have weights, and the mean is over these. Counting all tokens, a word of most prompts has
    a low idf, and a word that an answer takes from its prompt a high tf; ``tf="binary"`` leaves only the idf.

    Conventions: the window includes the current mini-batch; N counts sequences with at least one counted token; a batch
    without any leaves the window as it is; a batch without labels gets weights of 0. In ``.eval()`` mode the weights
    use the window as it is and the current batch is not added. Where a row holds several documents, ``document_ids``
    makes each of them a sequence of its own; ids are at least 0 and less than 2**63 / vocab_size, with ``sync``
    2**31 - 1.

    Everything runs on the device of the labels without synchronizing with the host, as long as ``vocab_size`` is given;
    without it the largest id has to be read. On a GPU, where no check may wait for the device, ids outside the
    vocabulary do not enter the window and get NaN; the device assertion of the cross-entropy then stops the run. A
    weighting is not thread-safe: two threads that train with one at the same time get a ``RuntimeError``, unless it is
    compiled.

    With several processes a mini-batch is by default that of a rank, and nothing is shared. With ``sync`` it is the
    union of those of all ranks in ``.train()`` mode: every rank computes the weights of the union, puts it into its
    window, which is thereby the same on every rank, and keeps the weights of its own rows. They are those of one
    process that sees the union. The window and the work therefore grow with the number of ranks. All ranks have to call
    the weighting equally often, with document ids and tokens on all of them or on none.

    Args:
        num_batches (int): mini-batches in the window, the current one included (the paper's K). Default: 16.
        tf (TermFrequency): ``count`` (the paper), ``log`` for 1 + ln count, or ``binary``. Default: "count".
        max_weight (float | None): largest weight, from 1 to 1e9; the mean stays 1. Default: None, no cap.
        sync (bool): whether all ranks share one window, and weights have mean 1 over the valid tokens of all ranks.
            Default: False, each rank has its own window and its own mean.
        counted (Counted): what tf and df count: ``labels``, or all ``tokens`` of the sequences. Default: "labels".

    Raises:
        ValueError: If an argument is out of its range.
    """

    def __init__(
        self,
        *,
        num_batches: int = 16,
        tf: TermFrequency = "count",
        max_weight: float | None = None,
        sync: bool = False,
        counted: Counted = "labels",
    ) -> None:
        super().__init__()
        require_choice("tf", tf, get_args(TermFrequency))
        require_choice("counted", counted, get_args(Counted))
        if max_weight is not None:
            require_number("max_weight", max_weight, 1, 1e9, "it caps weights of mean 1, or null for no cap")
        require_bool("sync", sync)
        self.tf: TermFrequency = tf
        self.max_weight = max_weight
        self.sync = sync
        self.counted: Counted = counted
        self.needs_tokens = counted == "tokens"
        self.window = DocumentWindow(num_batches)

    def check(self, batch: TokenBatch) -> None:
        """Raise a ``ValueError`` for an id outside the vocabulary or the range of document ids."""
        super().check(batch)
        if batch.document_ids is None or batch.document_ids.numel() == 0:
            return
        limit = 2**63 // (batch.vocab_size or 2**32)  # the pair of document and token is one int64
        limit = min(limit, _GATHERED_ID_LIMIT) if self.sync else limit
        smallest, largest = (int(bound) for bound in batch.document_ids.aminmax())
        if smallest < 0 or largest >= limit:
            raise ValueError(
                f"document_ids contain {smallest if smallest < 0 else largest}: they have to be non-negative and below "
                f"{limit}"
            )

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights of a mini-batch and, in ``.train()`` mode, put it into the window."""
        if self.window.document_frequency_E.device != batch.labels.device:  # stock recipes do not move their loss
            self.to(batch.labels.device)
        ids_BS = batch.labels if batch.all_tokens is None else batch.all_tokens
        known_BS = ids_BS >= 0 if batch.vocab_size is None else (ids_BS >= 0) & (ids_BS < batch.vocab_size)
        tokens_BS = torch.where(known_BS, ids_BS, NO_TOKEN)
        size = batch.vocab_size or max(self.window.vocab_size, int(tokens_BS.max()) + 1, 1)
        # The terms of each document, and the number of documents.
        if batch.document_ids is None:
            tokens_T, counts_T, terms_BS = distinct_terms(tokens_BS)
            num_documents = known_BS.any(-1).count_nonzero()
        else:
            documents_BS = torch.where(known_BS, batch.document_ids, NO_TOKEN)
            pairs_BS = torch.where(known_BS, documents_BS * size + tokens_BS, NO_TOKEN)
            pairs_T, counts_T, terms_BS = distinct_terms(pairs_BS)
            tokens_T = torch.where(pairs_T == NO_TOKEN, NO_TOKEN, pairs_T % size)
            num_documents = (distinct_terms(documents_BS).keys != NO_TOKEN).count_nonzero()
        with self.window.in_one_thread(self.training):
            if self.training:
                self.window.update(tokens_T, num_documents, vocab_size=size)
            idf_T = inverse_document_frequency(self.window.document_frequency(tokens_T), self.window.num_documents)
        raw_BS = (term_frequency(counts_T, self.tf) * idf_T).take(terms_BS)
        # Only label tokens have weights. Labels outside the vocabulary, which a GPU cannot report, become NaN.
        weighed_BS = known_BS & (batch.labels == ids_BS)
        weights_BS = unit_mean(raw_BS, weighed_BS, self.max_weight)
        return weights_BS.masked_fill((batch.labels != IGNORE_INDEX) & ~weighed_BS, torch.nan)
