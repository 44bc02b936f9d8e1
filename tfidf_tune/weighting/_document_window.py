"""The rolling window of document frequencies: the only state of the weighting.

Shape suffixes: K batches in the window, T tokens of a batch, V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NO_TOKEN = -1


class DocumentWindow(nn.Module):
    """Counts in how many documents of the last ``num_batches`` mini-batches each token occurs.

    A ring holds, for every batch, the distinct tokens of each of its documents. A new batch takes the place of the
    oldest one: its tokens are added to the table of document frequencies and those of the evicted batch are taken
    off. An update therefore costs the tokens of two batches, however long the window is, and never leaves the device:
    positions are tensors, and the only thing that the host decides on is shapes.

    Memory: 4 bytes for each token of the window (all batches at the width of the widest one seen) and 4 for each entry
    of the vocabulary. Batches may differ in shape; both tables grow when a larger batch or vocabulary comes.

    The state is in registered integer buffers: ``.to(device)`` moves it, ``.to(dtype)`` leaves it alone, and
    ``state_dict`` carries it. ``load_state_dict`` takes over the widths of the saved window.

    Args:
        num_batches (int): number of mini-batches in the window, the current one included.

    Raises:
        ValueError: If ``num_batches`` is less than 1.
    """

    tokens_KT: Tensor
    num_documents_K: Tensor
    document_frequency_V: Tensor
    num_updates: Tensor

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        if num_batches < 1:
            raise ValueError(
                f"num_batches is {num_batches}: the window holds at least the current batch, set it to 1 or more"
            )
        self.num_batches = num_batches
        self.register_buffer("tokens_KT", torch.empty(num_batches, 0, dtype=torch.int32))
        self.register_buffer("num_documents_K", torch.zeros(num_batches, dtype=torch.int32))
        self.register_buffer("document_frequency_V", torch.empty(0, dtype=torch.int32))
        self.register_buffer("num_updates", torch.zeros(1, dtype=torch.int64))

    @property
    def device(self) -> torch.device:
        """Where the window is; tokens have to be there too."""
        return self.document_frequency_V.device

    @property
    def num_documents(self) -> Tensor:
        """Number of documents in the window, an integer scalar on the device."""
        return self.num_documents_K.sum()

    @property
    def vocab_size(self) -> int:
        """Length of the table of document frequencies so far."""
        return len(self.document_frequency_V)

    def update(self, tokens: Tensor, num_documents: Tensor, *, vocab_size: int) -> None:
        """Put a batch into the window and let the oldest one fall out.

        A batch without documents changes nothing: it takes no place in the window.

        Args:
            tokens (Tensor): integer ``[t]``: every token once for each document that contains it, and ``NO_TOKEN`` at
                any position that counts for nothing. All others are in ``[0, vocab_size)``.
            num_documents (Tensor): integer scalar, the documents of the batch.
            vocab_size (int): V.
        """
        self._grow(len(tokens), vocab_size)
        slot = self.num_updates % self.num_batches
        evicted_T = self.tokens_KT.index_select(0, slot).squeeze(0)
        width = self.tokens_KT.shape[1]
        padded_T = F.pad(tokens.to(torch.int32), (0, width - len(tokens)), value=NO_TOKEN)
        # Without documents the evicted batch goes straight back in, so that nothing has to be decided on the host.
        has_documents = num_documents > 0
        entering_T = torch.where(has_documents, padded_T, evicted_T)
        self._count(entering_T, 1)
        self._count(evicted_T, -1)
        self.tokens_KT.index_copy_(0, slot, entering_T.unsqueeze(0))
        entering_documents = torch.where(
            has_documents, num_documents.to(torch.int32), self.num_documents_K.index_select(0, slot)
        )
        self.num_documents_K.index_copy_(0, slot, entering_documents)
        self.num_updates += has_documents

    def document_frequency(self, tokens: Tensor) -> Tensor:
        """Look up document frequencies.

        Args:
            tokens (Tensor): integer ids of any shape; negative ones stand for no token.

        Returns:
            Tensor: int32 of the same shape: 0 for tokens that the window has not seen and for no token.
        """
        if self.vocab_size == 0:
            return torch.zeros_like(tokens, dtype=torch.int32)
        known = (tokens >= 0) & (tokens < self.vocab_size)
        return self.document_frequency_V[tokens.masked_fill(~known, 0).long()] * known

    def _count(self, tokens_T: Tensor, sign: int) -> None:
        counted = tokens_T != NO_TOKEN
        self.document_frequency_V.scatter_add_(0, tokens_T.clamp_min(0).long(), counted.to(torch.int32) * sign)

    def _grow(self, num_tokens: int, vocab_size: int) -> None:
        if (missing := num_tokens - self.tokens_KT.shape[1]) > 0:
            self.tokens_KT = F.pad(self.tokens_KT, (0, missing), value=NO_TOKEN)
        if (missing := vocab_size - self.vocab_size) > 0:
            self.document_frequency_V = F.pad(self.document_frequency_V, (0, missing))

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
        for name in ("tokens_KT", "document_frequency_V"):
            saved = state_dict.get(prefix + name)
            if saved is not None:
                own = getattr(self, name)
                shape = (*own.shape[:-1], saved.shape[-1])
                setattr(self, name, torch.empty(shape, dtype=own.dtype, device=own.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
