"""TF-IDF weights over a rolling window of mini-batches.

Shape suffixes: B rows, S positions in a row, T terms.
"""

from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune._checks import require_bool, require_choice, require_integer, require_number
from tfidf_tune.weighting.token_weighting import (
    IGNORE_INDEX,
    NO_TOKEN,
    OneThread,
    RankLocalModule,
    TokenBatch,
    TokenWeighting,
    differs_from_previous,
    require_ids,
    unit_mean,
)

TermFrequency = Literal["count", "log", "binary"]
Counted = Literal["labels", "tokens"]


class Terms(NamedTuple):
    """The distinct keys of each row."""

    keys: Tensor  # [b * s], each once for each row that holds it, and -1 in what remains
    counts: Tensor  # [b * s], the positions of the row that hold the key; 0 in what remains
    positions: Tensor  # [b, s], the term at each position: an index of the other two
    sorted: Tensor  # [b, s], the keys of each row in ascending order


def distinct_terms(keys_BS: Tensor) -> Terms:
    """Find the distinct integer keys of each row and count them, by one sort of ``[b, s]``."""
    sorted_BS, order_BS = keys_BS.sort(dim=-1)
    # Equal keys are neighbours now. A term begins at each row, and where a key differs from the one
    # before it.
    term_N = differs_from_previous(sorted_BS).flatten().cumsum(0) - 1
    # All results have the length of the batch, whatever it holds, so that no size has to be read
    # from a GPU.
    sorted_N = sorted_BS.flatten()
    keys_N = torch.full_like(sorted_N, -1).scatter_(0, term_N, sorted_N)
    counts_N = torch.zeros_like(term_N).scatter_add_(0, term_N, torch.ones_like(term_N))
    term_BS = term_N.view_as(order_BS)
    positions_BS = torch.empty_like(order_BS).scatter_(-1, order_BS, term_BS)
    return Terms(keys=keys_N, counts=counts_N, positions=positions_BS, sorted=sorted_BS)


def inverse_document_frequency(document_frequency: Tensor, num_documents: Tensor) -> Tensor:
    """Return the smoothed IDF of integers of any shape: float32, 1 as long as nothing has been
    counted.
    """
    ratio = (1 + num_documents) / (1 + document_frequency)
    return ratio.log_().add_(1)


# A window of two mini-batches, and three mini-batches of the tokens a, b, c and d, ids 0 to 3. The
# third takes the slot of the first, whose entries are subtracted from the table:
#
#   documents      slot   entries: id + 1    evicted          df of a, b, c, d    N
#   "aba", "bc"     0     1 2 0 2 3 0                             1  2  1  0      2
#   "aa"            1     1 0                                     2  2  1  0      3
#   "cd"            0     3 4                1 2 0 2 3 0          1  0  1  1      2
#
# In the third mini-batch the idf of c is ln((1 + 2) / (1 + 1)) + 1 = 1.41.
class DocumentWindow(RankLocalModule):
    """Counts in how many documents of the last ``num_batches`` mini-batches each token occurs.

    A ring holds, for every batch, the distinct tokens of each of its documents. A new batch
    replaces the oldest one: its tokens are added to the table of document frequencies and those of
    the evicted batch are subtracted. An update costs the tokens of two batches of the widest shape
    seen, however long the window is, and never leaves the device.

    Memory: 4 bytes for each token of the window (all batches at the width of the widest one seen)
    and 4 for each entry of the vocabulary. Both tables grow when needed, that of the tokens by half
    at least. A table that grows is a new
    tensor: a CUDA graph has to be captured again. Tables hold token id + 1, so that ``NO_TOKEN``
    needs no mask: its entry stays 0, as does a last one for all ids that were never seen.

    ``.to(dtype)`` does not change the buffers, which are integers; ``load_state_dict`` takes over
    the widths of the saved window. A window is not thread-safe: updates by two threads at the same
    time would leave a table that does not count what the ring holds.

    Args:
        num_batches (int): number of mini-batches in the window, the current one included.

    Raises:
        ValueError: If ``num_batches`` is not an integer of at least 1.
    """

    entries_KT: Tensor
    num_documents_K: Tensor
    document_frequency_E: Tensor
    num_updates: Tensor

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        require_integer(
            "num_batches", num_batches, 1, "the window holds at least the current batch"
        )
        self.num_batches = num_batches
        self.register_buffer("entries_KT", torch.empty(num_batches, 0, dtype=torch.int32))
        self.register_buffer("num_documents_K", torch.zeros(num_batches, dtype=torch.int32))
        self.register_buffer("document_frequency_E", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("num_updates", torch.zeros(1, dtype=torch.int64))

    @property
    def num_documents(self) -> Tensor:
        """Number of documents in the window, an integer scalar on the device."""
        return self.num_documents_K.sum()

    @property
    def vocab_size(self) -> int:
        """Current length of the table of document frequencies."""
        return self.document_frequency_E.shape[0] - 2

    def update(self, tokens: Tensor, num_documents: Tensor, *, vocab_size: int) -> None:
        """Put a batch into the window and evict the oldest one; a batch without documents changes
        nothing.

        Args:
            tokens (Tensor): integer ``[t]``: every token once for each document that contains it,
                and ``NO_TOKEN`` at any position that does not count. All others are in ``[0,
                vocab_size)``.
            num_documents (Tensor): integer scalar, the documents of the batch.
            vocab_size (int): V.
        """
        # Lay out the entering batch as a row of the ring: token id + 1, and 0 where nothing counts.
        num_tokens = tokens.shape[0]
        self._grow(num_tokens, vocab_size)
        num_unused = self.entries_KT.shape[1] - num_tokens
        entering_T = F.pad((tokens + 1).to(torch.int32), (0, num_unused))
        # The slot of the oldest batch, a tensor: its number is not read.
        slot = self.num_updates % self.num_batches
        evicted_T = self.entries_KT.index_select(0, slot).squeeze(0)
        evicted_documents = self.num_documents_K.index_select(0, slot)
        # Without documents the evicted batch goes straight back in, so that the host has nothing to
        # decide.
        has_documents = num_documents > 0
        entering_T = torch.where(has_documents, entering_T, evicted_T)
        entering_documents = torch.where(
            has_documents, num_documents.to(torch.int32), evicted_documents
        )
        # The table follows: it always counts what the ring holds.
        self._count(entering_T, 1)
        self._count(evicted_T, -1)
        self.entries_KT.index_copy_(0, slot, entering_T.unsqueeze(0))
        self.num_documents_K.index_copy_(0, slot, entering_documents)
        self.num_updates.add_(has_documents)

    def document_frequency(self, tokens: Tensor) -> Tensor:
        """Look up document frequencies of ids of any shape, int32; 0 for ids not seen, and for
        ``NO_TOKEN``.
        """
        entries = (tokens + 1).clamp_(0, self.vocab_size + 1)
        return self.document_frequency_E.index_select(0, entries.flatten()).view(tokens.shape)

    def _count(self, entries_T: Tensor, sign: int) -> None:
        # Entry 0, of positions that do not count, adds 0, so that it needs no mask.
        self.document_frequency_E.index_add_(0, entries_T, entries_T.clamp(max=1), alpha=sign)

    def _grow(self, num_tokens: int, vocab_size: int) -> None:
        width = self.entries_KT.shape[1]
        if num_tokens > width:
            added = max(num_tokens - width, width // 2)
            self.entries_KT = F.pad(self.entries_KT, (0, added))
        missing = vocab_size - self.vocab_size
        if missing > 0:
            self.document_frequency_E = F.pad(self.document_frequency_E, (0, missing))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved_batches = len(state_dict.get(prefix + "num_documents_K", self.num_documents_K))
        if saved_batches != self.num_batches:
            error_msgs: list[str] = args[-1]
            error_msgs.append(
                f"the saved window holds {saved_batches} batches, this one {self.num_batches}: set "
                f"num_batches to {saved_batches}, or start with a new window"
            )
            return
        # The widths come with the data, not with the constructor, so a fresh window has to take
        # them from the state.
        for name in ("entries_KT", "document_frequency_E"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                buffer = getattr(self, name)
                setattr(self, name, buffer.new_empty((*buffer.shape[:-1], saved.shape[-1])))
        super()._load_from_state_dict(state_dict, prefix, *args)


class TFIDFWeighting(TokenWeighting):
    r"""TF-IDF weights of the label tokens, document frequencies taken from the last ``num_batches``
    mini-batches.

    .. math::
        w'_i = \mathrm{tf}_i \cdot \mathrm{idf}(x_i), \qquad
        \mathrm{idf}(v) = \ln\frac{1 + N}{1 + \mathrm{df}(v)} + 1, \qquad
        w_i = \frac{w'_i}{\frac{1}{M}\sum_{j=1}^{M} w'_j}

    where :math:`\mathrm{tf}_i` is the number of times that token :math:`x_i` occurs in its
    sequence, :math:`\mathrm{df}(v)` the number of the window's N sequences that contain v, and M
    the number of valid tokens of the mini-batch. Source: "Rebalancing Token Importance in Language
    Models with TF-IDF Weighted Cross-Entropy Loss", section 3.1.

    What is counted: a sequence is by default the list of its label tokens, without masked prompts
    and without the first token, which nothing predicts. With ``counted="tokens"`` it is the list of
    all its tokens, padding left out, which are passed as ``all_tokens``, see :class:`TokenBatch`.
    In both cases tf and df have the same sequences, as in every TF-IDF; only label tokens have
    weights, and the mean is over these. Counting all tokens, a word of most prompts has a low idf,
    and a word that an answer takes from its prompt a high tf; ``tf="binary"`` leaves only the idf.

    Conventions: the window includes the current mini-batch; N counts sequences with at least one
    counted token; a batch without any leaves the window as it is; a batch without labels gets
    weights of 0. In ``.eval()`` mode the weights use the window as it is and the current batch is
    not added. Where a row holds several documents, ``document_ids`` makes each of them a sequence
    of its own; ids are at least 0 and less than 2**63 / vocab_size, with ``sync`` 2**31 - 1.

    Everything runs on the device of the labels without synchronizing with the host, as long as
    ``vocab_size`` is given; without it the largest id has to be read. On a GPU, where no check may
    wait for the device, ids outside the vocabulary do not enter the window and get NaN; the device
    assertion of the cross-entropy then stops the run. A weighting is not thread-safe: two threads
    that train with one at the same time get a ``RuntimeError``, unless it is compiled.

    With several processes a mini-batch is by default that of a rank, and nothing is shared. With
    ``sync`` it is the union of those of all ranks in ``.train()`` mode: every rank computes the
    weights of the union, puts it into its window, which is thereby the same on every rank, and
    keeps the weights of its own rows. They are those of one process that sees the union. The window
    and the work therefore grow with the number of ranks. All ranks have to call the weighting
    equally often, with document ids and tokens on all of them or on none.

    Args:
        num_batches (int): mini-batches in the window, the current one included (the paper's K).
            Default: 16.
        tf (TermFrequency): ``count`` (the paper), ``log`` for 1 + ln count, or ``binary``. Default:
            "count".
        max_weight (float | None): largest weight, from 1 to 1e9; the mean stays 1. Default: None,
            no cap.
        sync (bool): whether all ranks share one window, and weights have mean 1 over the valid
            tokens of all ranks. Default: False, each rank has its own window and its own mean.
        counted (Counted): what tf and df count: ``labels``, or all ``tokens`` of the sequences.
            Default: "labels".

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
            require_number(
                "max_weight", max_weight, 1, 1e9, "it caps weights of mean 1, or null for no cap"
            )
        require_bool("sync", sync)
        self.tf: TermFrequency = tf
        self.max_weight = max_weight
        self.sync = sync
        self.counted: Counted = counted
        self.needs_tokens = counted == "tokens"
        self.window = DocumentWindow(num_batches)
        self._one_thread = OneThread()

    def check(self, batch: TokenBatch) -> None:
        """Raise a ``ValueError`` for an id outside the vocabulary or the range of document ids."""
        super().check(batch)
        if batch.document_ids is not None:
            # The pair of document and token is one int64.
            limit = 2**63 // (batch.vocab_size or 2**32)
            # Gathered ids are clamped to the range of int32: those out of it are refused too.
            if self.sync:
                limit = min(limit, 2**31 - 1)
            require_ids("document_ids", batch.document_ids, limit, f"0 to {limit - 1}")

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights of a mini-batch and, in ``.train()`` mode, put it into the window."""
        # What is counted: labels or all tokens, without padding and ids outside the vocabulary.
        ids_BS = batch.labels if batch.all_tokens is None else batch.all_tokens
        known_BS = ids_BS >= 0
        if batch.vocab_size is not None:
            known_BS = known_BS & (ids_BS < batch.vocab_size)
        tokens_BS = torch.where(known_BS, ids_BS, NO_TOKEN)
        size = batch.vocab_size or max(self.window.vocab_size, int(tokens_BS.max()) + 1, 1)
        # The terms of each document, and the number of documents. A document of a packed row is
        # told by the pair of its id and the token, in one integer.
        if batch.document_ids is None:
            tokens_T, counts_T, terms_BS, sorted_BS = distinct_terms(tokens_BS)
            num_documents = (sorted_BS[:, -1] != NO_TOKEN).count_nonzero()
        else:
            pairs_BS = torch.where(known_BS, batch.document_ids * size + tokens_BS, NO_TOKEN)
            pairs_T, counts_T, terms_BS, sorted_BS = distinct_terms(pairs_BS)
            tokens_T = torch.where(pairs_T == NO_TOKEN, NO_TOKEN, pairs_T % size)
            # In ascending order the pairs of a document are neighbours.
            begins_BS = differs_from_previous(sorted_BS.div(size, rounding_mode="floor"))
            num_documents = (begins_BS & (sorted_BS != NO_TOKEN)).count_nonzero()
        # The batch is in the window before its weights are computed, so that no df of a training
        # batch is 0.
        with self._one_thread.locked(self.training):
            if self.training:
                self.window.update(tokens_T, num_documents, vocab_size=size)
            df_T = self.window.document_frequency(tokens_T)
            idf_T = inverse_document_frequency(df_T, self.window.num_documents)
        # Each term is weighed once, and its weight goes to all positions of the term.
        tf_T = counts_T.float()
        if self.tf == "log":
            tf_T = 1 + tf_T.log()
        elif self.tf == "binary":
            tf_T = torch.ones_like(tf_T)
        raw_BS = (tf_T * idf_T).take(terms_BS)
        # Only label tokens have weights. Labels outside the vocabulary, which a GPU cannot report,
        # become NaN.
        weighed_BS = known_BS & (batch.labels == ids_BS)
        weights_BS = unit_mean(raw_BS, weighed_BS, self.max_weight)
        outside_BS = (batch.labels != IGNORE_INDEX) ^ weighed_BS
        return weights_BS.masked_fill(outside_BS, torch.nan)
