"""TF-IDF weights over a rolling window of mini-batches.

Shape suffixes: B rows, S positions in a row, T terms.
"""

import functools
from contextlib import nullcontext
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from tfidf_tune._checks import require_bool, require_choice, require_number
from tfidf_tune.weighting._formula import (
    TERM_FREQUENCIES,
    Integers,
    TermFrequency,
    distinct_terms_on_device,
    distinct_terms_on_host,
    inverse_document_frequency,
    term_frequency,
    unit_mean,
)
from tfidf_tune.weighting._labels import (
    IGNORE_INDEX,
    NO_TOKEN,
    GatheredLabels,
    TokenBatch,
    has_other_ranks,
    known_labels,
    on_host,
)
from tfidf_tune.weighting._weighting import TokenWeighting
from tfidf_tune.weighting._window import DocumentWindow

Floats = npt.NDArray[np.float32]

Counted = Literal["labels", "tokens"]
COUNTED: tuple[Counted, ...] = get_args(Counted)
Normalization = Literal["rank", "global"]
NORMALIZATIONS: tuple[Normalization, ...] = get_args(Normalization)
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

    What is counted: a sequence :math:`d` is by default the list of its label tokens, without masked prompts and without
    the first token, which nothing predicts. With ``counted="tokens"`` it is the list of all its tokens, padding left
    out. In both cases

    .. math::
        \mathrm{tf}_i = \sum_{t \in d_i} [t = x_i], \qquad
        \mathrm{df}(v) = \sum_{d} [v \in d]

    with the sequence :math:`d_i` of token :math:`x_i`: tf and df have the same sequences, as in every TF-IDF. Only
    label tokens have weights, and the mean is over these. Counting all tokens, a word of most prompts has a low idf,
    and a word that an answer takes from its prompt a high tf; ``tf="binary"`` leaves only the idf. All tokens are
    passed as ``tokens``, see :class:`TokenBatch`.

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
        sync (bool): whether all ranks share one window. Default: False, each has its own.
        normalization (Normalization | None): over which valid tokens weights have mean 1 in training: those of the
            mini-batch of a ``rank``, or, ``global``, those of all ranks, which without ``sync`` takes a collective of
            two numbers. Default: None, ``global`` with ``sync`` and ``rank`` without.
        counted (Counted): what tf and df count: ``labels``, or all ``tokens`` of the sequences. Default: "labels".

    Raises:
        ValueError: If an argument is out of its range, or ``normalization`` is ``global`` with ``max_weight`` and
            without ``sync``.
    """

    def __init__(
        self,
        *,
        num_batches: int = 16,
        tf: TermFrequency = "count",
        max_weight: float | None = None,
        sync: bool = False,
        normalization: Normalization | None = None,
        counted: Counted = "labels",
    ) -> None:
        super().__init__()
        require_choice("tf", tf, TERM_FREQUENCIES)
        require_choice("counted", counted, COUNTED)
        if max_weight is not None:
            reason = "a larger one would cap nothing; null for none"
            require_number("max_weight", max_weight, 1, 1e9, "it caps weights of mean 1", reason=reason)
        require_bool("sync", sync)
        if normalization is None:
            normalization = "global" if sync else "rank"
        remark = " (null for global with sync and rank without)"
        require_choice("normalization", normalization, NORMALIZATIONS, remark)
        if max_weight is not None and normalization == "global" and not sync:
            raise ValueError(
                f"max_weight is {max_weight!r} and normalization 'global' without sync: a cap on the mean over all "
                "ranks needs the labels of all ranks, set sync to true or normalization to 'rank'"
            )
        self.tf: TermFrequency = tf
        self.max_weight = max_weight
        self.sync = sync
        self.normalization: Normalization = normalization
        self.counted: Counted = counted
        self.needs_tokens = counted == "tokens"
        self.window = DocumentWindow(num_batches)

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Return the bytes of the window, which with ``sync`` holds the tokens of all ranks."""
        num_positions = batch_size * seq_len * (num_ranks if self.sync else 1)
        return self.window.num_bytes(num_positions, vocab_size)

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights of a mini-batch and, in ``.train()`` mode, put it into the window.

        Raises:
            ValueError: If, on a CPU, a document id is out of its range.
        """
        gathered, vocab_size = batch.gathered, batch.vocab_size
        self._check_document_ids(batch.document_ids, vocab_size)
        self.window.follow(batch.labels)
        if gathered is None:
            raw, known = self._raw(batch, vocab_size)
            weights = self._scaled(raw, known)
        else:
            self._check_document_ids(gathered.document_ids, vocab_size)
            raw, known = self._raw(gathered, vocab_size)
            own, known_of_all = gathered.own, known
            known = known[own]
            of_rank = self.normalization == "rank"
            weights = self._scaled(raw[own], known) if of_rank else self._scaled(raw, known_of_all)[own]
        if on_host(batch.labels):
            return weights
        return weights.masked_fill((batch.labels != IGNORE_INDEX) & ~known, torch.nan)

    def _check_document_ids(self, document_ids: Tensor | None, vocab_size: int | None) -> None:
        if document_ids is None or not on_host(document_ids) or document_ids.numel() == 0:
            return
        limit = 2**63 // (vocab_size or 2**32)  # the pair of document and token is one int64
        limit = min(limit, _GATHERED_ID_LIMIT) if self.sync else limit
        smallest, largest = (int(bound) for bound in document_ids.aminmax())
        if smallest < 0 or largest >= limit:
            raise ValueError(
                f"document_ids contain {smallest if smallest < 0 else largest}: they have to be non-negative and below "
                f"{limit}"
            )

    def _scaled(self, raw_BS: Tensor, known_BS: Tensor) -> Tensor:
        if self.normalization == "global" and not self.sync and self.training and has_other_ranks():
            return _unit_mean_over_ranks(raw_BS, known_BS)
        return unit_mean(raw_BS, known_BS, self.max_weight)

    def _raw(self, batch: TokenBatch | GatheredLabels, vocab_size: int | None) -> tuple[Tensor, Tensor]:
        """Compute tf * idf, float32 ``[b, s]``, and where labels are in the vocabulary, bool ``[b, s]``."""
        if batch.tokens is not None:
            raw, known = self._raw(batch._replace(labels=batch.tokens, tokens=None), vocab_size)
            return raw, known & (batch.labels == batch.tokens)
        if batch.labels.numel() == 0:
            nowhere = torch.zeros_like(batch.labels, dtype=torch.bool)
            return nowhere.float(), nowhere
        document_ids = None if batch.document_ids is None else batch.document_ids.long()
        with self.window.in_one_thread() if self.training else nullcontext():
            if not on_host(batch.labels):
                return self._raw_on_device(batch.labels, document_ids, vocab_size)
            return self._raw_on_host(
                batch.labels.numpy(), None if document_ids is None else document_ids.numpy(), vocab_size
            )

    def _raw_on_host(
        self, labels_BS: Integers, document_ids_BS: Integers | None, vocab_size: int | None
    ) -> tuple[Tensor, Tensor]:
        window = self.window  # an attribute of a module takes a microsecond to find
        valid_BS = labels_BS != IGNORE_INDEX
        tokens_BS = np.maximum(labels_BS, NO_TOKEN)  # the only negative label is IGNORE_INDEX
        size = vocab_size or max(window.vocab_size, int(tokens_BS.max()) + 1, 1)
        tokens_T, counts_T, positions_BS, num_documents = _terms(
            tokens_BS, valid_BS, document_ids_BS, size, np, distinct_terms_on_host
        )
        if self.training:
            window.update_on_host(tokens_T, int(num_documents), num_positions=labels_BS.size, vocab_size=size)
        num_in_window = int(window.num_documents_K.numpy().sum())
        raw_T = _term_frequency_table(self.tf, 1 << labels_BS.shape[1].bit_length()).take(counts_T)
        raw_T *= _inverse_document_frequencies(window.document_frequency_on_host(tokens_T), num_in_window)
        return torch.from_numpy(raw_T.take(positions_BS)), torch.from_numpy(valid_BS)

    def _raw_on_device(
        self, labels_BS: Tensor, document_ids_BS: Tensor | None, vocab_size: int | None
    ) -> tuple[Tensor, Tensor]:
        known_BS = known_labels(labels_BS, vocab_size)
        tokens_BS = torch.where(known_BS, labels_BS, NO_TOKEN)
        size = vocab_size or max(self.window.vocab_size, int(tokens_BS.max()) + 1, 1)
        tokens_T, counts_T, positions_BS, num_documents = _terms(
            tokens_BS, known_BS, document_ids_BS, size, torch, distinct_terms_on_device
        )
        if self.training:
            self.window.update(tokens_T, num_documents, vocab_size=size)
        idf_T = inverse_document_frequency(self.window.document_frequency(tokens_T), self.window.num_documents)
        return (term_frequency(counts_T, self.tf) * idf_T).take(positions_BS), known_BS


def _terms(tokens_BS: Any, known_BS: Any, document_ids_BS: Any, size: int, xp: Any, distinct: Any) -> tuple[Any, ...]:
    """Tokens of the terms ``[t]``, their counts ``[t]``, the term at each position ``[b, s]``, the number of documents.

    Arrays of NumPy or tensors: ``xp`` is the module, ``distinct`` its function for distinct terms.
    """
    if document_ids_BS is None:
        return (*distinct(tokens_BS), xp.count_nonzero(known_BS.any(-1)))
    documents_BS = xp.where(known_BS, document_ids_BS, NO_TOKEN)
    keys_T, counts_T, positions_BS = distinct(xp.where(known_BS, documents_BS * size + tokens_BS, NO_TOKEN))
    tokens_T = xp.where(keys_T == NO_TOKEN, NO_TOKEN, keys_T % size)
    return tokens_T, counts_T, positions_BS, xp.count_nonzero(distinct(documents_BS)[0] != NO_TOKEN)


def _unit_mean_over_ranks(raw_weights: Tensor, valid: Tensor) -> Tensor:
    """:func:`unit_mean` over the valid tokens of all ranks, by a collective of two numbers on the device."""
    raw_weights = raw_weights * valid
    sums = torch.stack([valid.count_nonzero(), raw_weights.sum()])
    dist.all_reduce(sums)
    num_valid, total = sums
    return raw_weights.mul_(num_valid / total.clamp_min(torch.finfo(torch.float32).tiny))


def _inverse_document_frequencies(document_frequency: Integers, num_documents: int) -> Floats:
    """:func:`inverse_document_frequency` on a CPU, from a table where that is shorter than the terms."""
    if num_documents < len(document_frequency):
        return _inverse_document_frequency_table(num_documents).take(document_frequency)
    found = inverse_document_frequency(torch.from_numpy(document_frequency), torch.tensor(num_documents, device="cpu"))
    inverse: Floats = found.numpy()
    return inverse


# Looking numbers up takes a fifth of the time of computing them. The device is named because a default may be set.
@functools.lru_cache(maxsize=8)
def _term_frequency_table(form: TermFrequency, size: int) -> Floats:
    table: Floats = term_frequency(torch.arange(size, device="cpu"), form).numpy()
    return table


@functools.lru_cache(maxsize=2)
def _inverse_document_frequency_table(num_documents: int) -> Floats:
    documents = torch.arange(num_documents + 1, device="cpu")
    table: Floats = inverse_document_frequency(documents, documents[-1]).numpy()
    return table
