"""TF-IDF weights over a rolling window of mini-batches.

Shape suffixes: B rows, S positions in a row, T terms.
"""

import functools
from contextlib import nullcontext
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tfidf_tune.weighting._arguments import require_number
from tfidf_tune.weighting._document_window import DocumentWindow
from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import (
    NO_TOKEN,
    check_document_ids,
    check_shape,
    checked_tokens,
    known_labels,
    on_host,
)
from tfidf_tune.weighting._ranks import LabelExchange, has_other_ranks, unit_mean_over_ranks
from tfidf_tune.weighting._term_statistics import (
    TERM_FREQUENCIES,
    TermFrequency,
    inverse_document_frequency,
    term_frequency,
    unit_mean,
)
from tfidf_tune.weighting._terms import Integers, distinct_terms_on_device, distinct_terms_on_host

Floats = npt.NDArray[np.float32]

Normalization = Literal["rank", "global"]
NORMALIZATIONS: tuple[Normalization, ...] = get_args(Normalization)
# Among ranks document ids are int32; what is out of its range arrives as a number that is refused.
_SHARED_ID_LIMIT = 2**31 - 1


class _RawWeights(NamedTuple):
    """tf * idf, and where it counts; on a GPU also where a valid token is outside the vocabulary, refused on a CPU."""

    raw_BS: Tensor
    known_BS: Tensor
    unknown_BS: Tensor | None

    def at(self, positions: tuple[slice, slice]) -> "_RawWeights":
        unknown_BS = None if self.unknown_BS is None else self.unknown_BS[positions]
        return _RawWeights(self.raw_BS[positions], self.known_BS[positions], unknown_BS)


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

    Conventions: the window includes the current mini-batch; N counts sequences with at least one valid token; a batch
    without a valid token leaves the window as it is and gets weights of 0. In ``.eval()`` mode the weights use the
    window as it stands and the current batch is not added. Where a row holds several documents, ``document_ids`` makes
    each of them a sequence of its own.

    A weighting is not thread-safe: give each thread its own. Two that train with one at the same time get a
    ``RuntimeError``, unless it is compiled.

    Everything runs on the device of the labels without synchronising with the host, as long as ``vocab_size`` is
    given; without it the largest id has to be read, which on a GPU waits for the device.

    With several processes a mini-batch is by default that of a rank, and nothing is shared. With ``sync`` it is the
    union of those of all ranks of the default process group, in ``.train()`` mode:

    1. :meth:`begin` starts to gather the labels of all ranks: 4 bytes a token, 8 with document ids. Called before the
       forward pass of the model, it overlaps with it.
    2. Every rank computes the weights of the union, the rows of rank 0 first, and puts it into its window, which is
       thereby the same on every rank, and in every rank's ``state_dict``.
    3. It keeps the weights of its own rows. They are those of one process that sees the union.

    So the window and the work of the weights grow with the number of ranks: 4 bytes x ranks x b x s x ``num_batches``
    on each of them. All ranks have to call it equally often, those without a valid token too, and all with document
    ids or all without. In ``.eval()`` mode nothing is communicated: the window as it stands, the mean of the rank.

    Args:
        num_batches (int): mini-batches in the window, the current one included (the paper's K). Default: 16.
        tf (TermFrequency): ``count`` (the paper), ``log`` for 1 + ln count, or ``binary``. Default: "count".
        max_weight (float | None): largest weight, from 1 to 1e9; the mean stays 1. Default: None, no cap.
        ignore_index (int): label of the positions that do not count. Default: -100.
        sync (bool): whether all ranks share one window. Default: False, each has its own.
        normalization (Normalization | None): over which valid tokens weights have mean 1 in training: those of the
            mini-batch of a ``rank``, or, ``global``, those of all ranks, which without ``sync`` takes a collective of
            two numbers. Default: None, ``global`` with ``sync`` and ``rank`` without.

    Raises:
        ValueError: If ``num_batches`` is less than 1, ``tf`` is not one of the three, ``max_weight`` out of its range,
            ``sync`` no bool, ``normalization`` not one of the two, or ``global`` with ``max_weight`` and no ``sync``.
    """

    def __init__(
        self,
        *,
        num_batches: int = 16,
        tf: TermFrequency = "count",
        max_weight: float | None = None,
        ignore_index: int = -100,
        sync: bool = False,
        normalization: Normalization | None = None,
    ) -> None:
        super().__init__()
        if tf not in TERM_FREQUENCIES:
            raise ValueError(f"tf is '{tf}': possible are {', '.join(TERM_FREQUENCIES)}")
        if max_weight is not None:
            require_number(
                "max_weight",
                max_weight,
                1,
                1e9,
                "it caps weights of mean 1",
                reason="a larger one would cap nothing; null for none",
            )
        if not isinstance(sync, bool):
            raise ValueError(f"sync is {sync!r}: set it to true or false")
        if normalization is None:
            normalization = "global" if sync else "rank"
        if normalization not in NORMALIZATIONS:
            raise ValueError(
                f"normalization is '{normalization}': possible are {', '.join(NORMALIZATIONS)} (null for global with "
                "sync and rank without)"
            )
        if max_weight is not None and normalization == "global" and not sync:
            raise ValueError(
                f"max_weight is {max_weight!r} and normalization 'global' without sync: a cap on the mean over all "
                "ranks needs the labels of all ranks, set sync to true or normalization to 'rank'"
            )
        self.tf: TermFrequency = tf
        self.max_weight = max_weight
        self.ignore_index = ignore_index
        self.sync = sync
        self.normalization: Normalization = normalization
        self.window = DocumentWindow(num_batches)

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Tell the bytes of the window, which with ``sync`` holds the tokens of all ranks."""
        num_positions = batch_size * seq_len * (num_ranks if self.sync else 1)
        return self.window.num_bytes(num_positions, vocab_size)

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

        Args:
            labels (Tensor): integer ``[b, s]``, ``ignore_index`` at ignored positions.
            vocab_size (int | None): size of the vocabulary. Default: None, as large as the ids seen.
            document_ids (Tensor | None): integer ``[b, s]``, at least 0 and less than 2**63 / vocab_size, with ``sync``
                less than 2**31 - 1. Default: None, a row is one document.
            begun (LabelExchange | None): what :meth:`begin` gave for these labels. Default: None, where something has
                to begin it does so now.
            predictions (Predictions | None): not needed.

        Returns:
            Tensor: float32 ``[b, s]``. On a GPU, where no check may wait for the device, ids outside the vocabulary
            leave the window alone and get NaN; in a loss, the cross-entropy's own device assertion stops the run.

        Raises:
            ValueError: If ``labels`` is not 2-D, ``document_ids`` has another shape, or, on CPU, an id is outside the
                vocabulary or a document id negative. With ``sync`` every rank raises it, so that none waits forever.
            RuntimeError: If another thread is updating the window.
        """
        if begun is None:
            begun = self.begin(labels, document_ids=document_ids)
        self._check(labels, document_ids, vocab_size)
        if self.window.device != labels.device:  # torchtune's stock recipes do not move their loss
            self.window.to(labels.device)
        if begun is None:
            return self._scaled(self._weigh(labels, document_ids, vocab_size))
        if on_host(labels):  # the ids as they are, before others may be named
            checked_tokens(labels.numpy(), vocab_size, self.ignore_index)
        union = begun.wait()
        self._check(union.labels, union.document_ids, vocab_size)
        weights = self._weigh(union.labels, union.document_ids, vocab_size)
        if self.normalization == "rank":
            return self._scaled(weights.at(union.own))
        return self._scaled(weights)[union.own]

    def _check(self, labels: Tensor, document_ids: Tensor | None, vocab_size: int | None) -> None:
        check_shape(labels)
        if document_ids is not None:
            check_document_ids(document_ids, labels)
            limit = 2**63 // (vocab_size or 2**32)  # the pair of document and token is one int64
            _check_range_of_document_ids(document_ids, min(limit, _SHARED_ID_LIMIT) if self.sync else limit)

    def _weigh(self, labels: Tensor, document_ids: Tensor | None, vocab_size: int | None) -> _RawWeights:
        if labels.numel() == 0:
            nowhere = torch.zeros_like(labels, dtype=torch.bool)
            return _RawWeights(nowhere.float(), nowhere, None)
        weigh = self._weigh_on_host if on_host(labels) else self._weigh_on_device
        with self.window.in_one_thread() if self.training else nullcontext():
            return weigh(labels, document_ids, vocab_size)

    def _scaled(self, weights: _RawWeights) -> Tensor:
        raw_BS, known_BS, unknown_BS = weights
        if self.normalization == "global" and not self.sync and self.training and has_other_ranks():
            weights_BS = unit_mean_over_ranks(raw_BS, known_BS)
        else:
            weights_BS = unit_mean(raw_BS, known_BS, self.max_weight)
        return weights_BS if unknown_BS is None else weights_BS.masked_fill(unknown_BS, torch.nan)

    def _weigh_on_host(self, labels: Tensor, document_ids: Tensor | None, vocab_size: int | None) -> _RawWeights:
        tokens_BS, valid_BS = checked_tokens(labels.numpy(), vocab_size, self.ignore_index)
        size = vocab_size or max(self.window.vocab_size, int(tokens_BS.max(initial=0)) + 1)
        if document_ids is None:
            tokens_T, counts_T, positions_BS = distinct_terms_on_host(tokens_BS)
            num_documents = np.count_nonzero(valid_BS.any(axis=1))
        else:
            documents_BS = np.where(valid_BS, document_ids.numpy(), np.int64(NO_TOKEN))
            keys_BS = np.where(valid_BS, documents_BS * size + tokens_BS, NO_TOKEN)
            keys_T, counts_T, positions_BS = distinct_terms_on_host(keys_BS)
            tokens_T = np.where(keys_T == NO_TOKEN, NO_TOKEN, keys_T % size)
            num_documents = np.count_nonzero(distinct_terms_on_host(documents_BS)[0] != NO_TOKEN)
        window = self.window  # an attribute of a module takes a microsecond to find
        if self.training:
            window.update_on_host(tokens_T, int(num_documents), num_positions=labels.numel(), vocab_size=size)
        document_frequency_T = window.document_frequency_on_host(tokens_T)
        num_in_window = int(window.num_documents_K.numpy().sum())
        idf_T = _inverse_document_frequencies_on_host(document_frequency_T, num_in_window)
        raw_T = np.multiply(_term_frequencies_on_host(counts_T, self.tf, labels.shape[1]), idf_T)
        return _RawWeights(torch.from_numpy(raw_T.take(positions_BS)), torch.from_numpy(valid_BS), None)

    def _weigh_on_device(self, labels: Tensor, document_ids: Tensor | None, vocab_size: int | None) -> _RawWeights:
        labels = labels.long()  # narrower integers may not hold vocab_size
        valid_BS, known_BS = known_labels(labels, vocab_size, self.ignore_index)
        tokens_BS = torch.where(known_BS, labels, NO_TOKEN)
        size = vocab_size or max(self.window.vocab_size, int(tokens_BS.max()) + 1, 1)
        if document_ids is None:
            tokens_T, counts_T, positions_BS = distinct_terms_on_device(tokens_BS)
            num_documents = known_BS.any(dim=-1).count_nonzero()
        else:
            documents_BS = torch.where(known_BS, document_ids.long(), NO_TOKEN)
            keys_BS = torch.where(known_BS, documents_BS * size + tokens_BS, NO_TOKEN)
            keys_T, counts_T, positions_BS = distinct_terms_on_device(keys_BS)
            tokens_T = torch.where(keys_T == NO_TOKEN, NO_TOKEN, keys_T % size)
            num_documents = (distinct_terms_on_device(documents_BS).keys != NO_TOKEN).count_nonzero()
        if self.training:
            self.window.update(tokens_T, num_documents, vocab_size=size)
        idf_T = inverse_document_frequency(self.window.document_frequency(tokens_T), self.window.num_documents)
        raw_T = term_frequency(counts_T, self.tf) * idf_T
        return _RawWeights(raw_T.take(positions_BS), known_BS, valid_BS & ~known_BS)


def _term_frequencies_on_host(counts: Integers, form: TermFrequency, length: int) -> Floats:
    """:func:`term_frequency` of counts in rows of ``length``, looked up, which takes a fifth of the time."""
    return _term_frequency_table(form, 1 << length.bit_length()).take(counts)


def _inverse_document_frequencies_on_host(document_frequency: Integers, num_documents: int) -> Floats:
    """:func:`inverse_document_frequency`, looked up where there are fewer document frequencies than terms."""
    if num_documents < len(document_frequency):
        return _inverse_document_frequency_table(num_documents).take(document_frequency)
    found = inverse_document_frequency(torch.from_numpy(document_frequency), torch.tensor(num_documents, device="cpu"))
    inverse: Floats = found.numpy()
    return inverse


@functools.lru_cache(maxsize=8)
def _term_frequency_table(form: TermFrequency, size: int) -> Floats:
    table: Floats = term_frequency(torch.arange(size, device="cpu"), form).numpy()
    return table


@functools.lru_cache(maxsize=2)
def _inverse_document_frequency_table(num_documents: int) -> Floats:
    documents = torch.arange(num_documents + 1, device="cpu")
    table: Floats = inverse_document_frequency(documents, documents[-1]).numpy()
    return table


def _check_range_of_document_ids(document_ids: Tensor, limit: int) -> None:
    if not on_host(document_ids) or document_ids.numel() == 0:
        return
    smallest, largest = (int(bound) for bound in document_ids.aminmax())
    if smallest < 0 or largest >= limit:
        raise ValueError(
            f"document_ids contain {smallest if smallest < 0 else largest}: they have to be non-negative and below "
            f"{limit}"
        )
