"""The weights the way the paper's authors compute them, as a baseline: written by us only from its
description.

All documents of the window are one padded tensor, a presence tensor compares each of its positions
with each distinct token of the window, and a Python loop goes over the rows of the batch.
Conventions are those of `TFIDFWeighting`.

Shape suffixes: B rows of a batch, S positions in a row, D documents of the window, U distinct
tokens of the window.
"""

from collections import deque

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tfidf_tune.weighting import IGNORE_INDEX


class AuthorsWay:
    """TF-IDF weights of a mini-batch, computed again from the full window at every call.

    Args:
        num_batches (int): mini-batches in the window, the current one included. Default: 16.
    """

    def __init__(self, *, num_batches: int = 16) -> None:
        self.window: deque[Tensor] = deque(maxlen=num_batches)

    def __call__(self, labels: Tensor) -> Tensor:
        """Weigh int64 ``[b, s]``, -100 at ignored positions; of mean 1 over the valid ones, 0 at
        the others.
        """
        self.window.append(labels)
        documents_DS = self._documents()
        terms_U = self._terms(documents_DS)
        presence_DSU = documents_DS.unsqueeze(-1) == terms_U
        document_frequency_U = presence_DSU.any(1).sum(0)
        num_documents = (documents_DS != IGNORE_INDEX).any(1).sum()
        idf_U = ((1 + num_documents) / (1 + document_frequency_U)).log() + 1

        valid_BS = labels != IGNORE_INDEX
        weights_BS = torch.zeros_like(labels, dtype=torch.float32)
        for row_S, valid_S, weights_S in zip(labels, valid_BS, weights_BS, strict=True):
            terms, positions, counts = torch.unique(
                row_S[valid_S], return_inverse=True, return_counts=True
            )
            weights_S[valid_S] = (counts * idf_U[torch.searchsorted(terms_U, terms)])[positions]
        return weights_BS * (valid_BS.sum() / weights_BS.sum())

    def presence_bytes(self) -> int:
        """Bytes of the presence tensor, one for each boolean of ``[D, S, U]``, for the window as it
        stands.
        """
        documents_DS = self._documents()
        return documents_DS.numel() * len(self._terms(documents_DS))

    def _documents(self) -> Tensor:
        rows: list[Tensor] = []
        for labels in self.window:
            rows.extend(labels)
        return pad_sequence(rows, batch_first=True, padding_value=IGNORE_INDEX)

    def _terms(self, documents_DS: Tensor) -> Tensor:
        terms_U: Tensor = torch.unique(documents_DS[documents_DS != IGNORE_INDEX])
        return terms_U
