"""The rolling window of counts: of the documents that hold a token, or of n-grams, whose buckets stand for tokens.

Shape suffixes: K batches in the window, T tokens of a batch, E entries: of the vocabulary and two more.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tfidf_tune._checks import require_integer


class OneThread:
    """A lock that never waits: entering it while another thread holds it is an error. Copies are not locked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def locked(self, is_needed: bool) -> AbstractContextManager[None]:
        """Return this lock if it is needed; never in compiled graphs, which have no locks."""
        return self if is_needed and not torch.compiler.is_compiling() else nullcontext()

    def __enter__(self) -> None:
        if not self._lock.acquire(False):
            raise RuntimeError(
                "two threads update one window of token counts at the same time: give each thread its own loss, for "
                "example copy.deepcopy(loss)"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["OneThread"], tuple[()]]:
        return type(self), ()


class DocumentWindow(nn.Module):
    """Counts in how many documents of the last ``num_batches`` mini-batches each token occurs.

    A ring holds, for every batch, the distinct tokens of each of its documents. A new batch replaces the oldest one:
    its tokens are added to the table of document frequencies and those of the evicted batch are subtracted. An update
    costs the tokens of two batches of the widest shape seen, however long the window is, and never leaves the device.

    Memory: 4 bytes for each token of the window (all batches at the width of the widest one seen) and 4 for each entry
    of the vocabulary. Both tables grow when needed, that of the tokens by half at least. A table that grows is a new
    tensor: a CUDA graph has to be captured again. Tables hold token id + 1, so that ``NO_TOKEN`` needs no mask: its
    entry stays 0, as does a last one for all ids that were never seen.

    ``.to(dtype)`` does not change the buffers, which are integers; ``load_state_dict`` takes over the widths of the
    saved window. A window is not thread-safe, see :meth:`in_one_thread`.

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
        require_integer("num_batches", num_batches, 1, "the window holds at least the current batch")
        self.num_batches = num_batches
        self.register_buffer("entries_KT", torch.empty(num_batches, 0, dtype=torch.int32))
        self.register_buffer("num_documents_K", torch.zeros(num_batches, dtype=torch.int32))
        self.register_buffer("document_frequency_E", torch.zeros(2, dtype=torch.int32))
        self.register_buffer("num_updates", torch.zeros(1, dtype=torch.int64))
        self._one_thread = OneThread()

    @property
    def num_documents(self) -> Tensor:
        """Number of documents in the window, an integer scalar on the device."""
        return self.num_documents_K.sum()

    @property
    def vocab_size(self) -> int:
        """Current length of the table of document frequencies."""
        return self.document_frequency_E.shape[0] - 2

    def in_one_thread(self, is_updated: bool) -> AbstractContextManager[None]:
        """Raise a ``RuntimeError`` in other threads that enter this context to update the window.

        Updates by two threads at the same time would leave a table that does not count what the ring holds.
        """
        return self._one_thread.locked(is_updated)

    def update(self, tokens: Tensor, num_documents: Tensor, *, vocab_size: int) -> None:
        """Put a batch into the window and evict the oldest one; a batch without documents changes nothing.

        Args:
            tokens (Tensor): integer ``[t]``: every token once for each document that contains it, and ``NO_TOKEN`` at
                any position that does not count. All others are in ``[0, vocab_size)``.
            num_documents (Tensor): integer scalar, the documents of the batch.
            vocab_size (int): V.
        """
        self._grow(tokens.shape[0], vocab_size)
        entries_KT, num_documents_K = self.entries_KT, self.num_documents_K
        entering_T = F.pad((tokens + 1).to(torch.int32), (0, entries_KT.shape[1] - tokens.shape[0]))
        # The slot of the oldest batch, a tensor: its number is not read.
        slot = self.num_updates % self.num_batches
        evicted_T = entries_KT.index_select(0, slot).squeeze(0)
        evicted_documents = num_documents_K.index_select(0, slot)
        # Without documents the evicted batch goes straight back in, so that the host has nothing to decide.
        has_documents = num_documents > 0
        entering_T = torch.where(has_documents, entering_T, evicted_T)
        entering_documents = torch.where(has_documents, num_documents.to(torch.int32), evicted_documents)
        self._count(entering_T, 1)
        self._count(evicted_T, -1)
        entries_KT.index_copy_(0, slot, entering_T.unsqueeze(0))
        num_documents_K.index_copy_(0, slot, entering_documents)
        self.num_updates.add_(has_documents)

    def document_frequency(self, tokens: Tensor) -> Tensor:
        """Look up document frequencies of ids of any shape, int32; 0 for ids not seen, and for ``NO_TOKEN``."""
        entries = (tokens + 1).clamp_(0, self.vocab_size + 1)
        return self.document_frequency_E.index_select(0, entries.flatten()).view(tokens.shape)

    def _count(self, entries_T: Tensor, sign: int) -> None:
        self.document_frequency_E.index_add_(0, entries_T, entries_T.clamp(max=1), alpha=sign)

    def _grow(self, num_tokens: int, vocab_size: int) -> None:
        width = self.entries_KT.shape[1]
        if num_tokens > width:
            self.entries_KT = F.pad(self.entries_KT, (0, max(num_tokens - width, width // 2)))
        if (missing := vocab_size - self.vocab_size) > 0:
            self.document_frequency_E = F.pad(self.document_frequency_E, (0, missing))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved_documents = state_dict.get(prefix + "num_documents_K")
        if saved_documents is not None and len(saved_documents) != self.num_batches:
            error_msgs: list[str] = args[-1]
            error_msgs.append(
                f"the saved window holds {len(saved_documents)} batches, this one {self.num_batches}: "
                f"set num_batches to {len(saved_documents)}, or start with a new window"
            )
            return
        # The widths come with the data, not with the constructor, so a fresh window has to take them from the state.
        for name in ("entries_KT", "document_frequency_E"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                own = getattr(self, name)
                shape = (*own.shape[:-1], saved.shape[-1])
                setattr(self, name, torch.empty(shape, dtype=own.dtype, device=own.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
