"""TF-IDF weights over a rolling window of mini-batches.

Shape suffixes: B rows, S positions in a row.
"""

import torch
from torch import Tensor

from tfidf_tune.weighting._document_window import NO_TOKEN, DocumentWindow
from tfidf_tune.weighting._interface import TokenWeighting
from tfidf_tune.weighting._labels import known_labels
from tfidf_tune.weighting._term_statistics import (
    TERM_FREQUENCIES,
    TermFrequency,
    inverse_document_frequency,
    occurrences,
    term_frequency,
    unit_mean,
)


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

    Everything runs on the device of the labels without synchronising with the host, as long as ``vocab_size`` is
    given; without it the largest id has to be read, which on a GPU waits for the device.

    Args:
        num_batches (int): mini-batches in the window, the current one included (the paper's K). Default: 16.
        tf (TermFrequency): ``count`` (the paper), ``log`` for 1 + ln count, or ``binary``. Default: "count".
        max_weight (float | None): largest weight, at least 1; the mean stays 1. Default: None, no cap.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Raises:
        ValueError: If ``num_batches`` is less than 1, ``tf`` is not one of the three, or ``max_weight`` less than 1.
    """

    def __init__(
        self,
        *,
        num_batches: int = 16,
        tf: TermFrequency = "count",
        max_weight: float | None = None,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if tf not in TERM_FREQUENCIES:
            raise ValueError(f"tf is '{tf}': possible are {', '.join(TERM_FREQUENCIES)}")
        if max_weight is not None and not max_weight >= 1:
            raise ValueError(
                f"max_weight is {max_weight}: weights have mean 1, so a cap has to be at least 1 (null for none)"
            )
        self.tf: TermFrequency = tf
        self.max_weight = max_weight
        self.ignore_index = ignore_index
        self.window = DocumentWindow(num_batches)

    @torch.no_grad()
    def forward(self, labels: Tensor, *, vocab_size: int | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Compute the weights of a mini-batch and, in ``.train()`` mode, put it into the window.

        Args:
            labels (Tensor): integer ``[b, s]``, ``ignore_index`` at ignored positions.
            vocab_size (int | None): size of the vocabulary. Default: None, as large as the ids seen.
            document_ids (Tensor | None): integer ``[b, s]``, non-negative. Default: None, a row is one document.

        Returns:
            Tensor: float32 ``[b, s]``. On a GPU, where no check may wait for the device, ids outside the vocabulary
            leave the window alone and get NaN; in a loss, the cross-entropy's own device assertion stops the run.

        Raises:
            ValueError: If ``labels`` is not 2-D, ``document_ids`` has another shape, or, on CPU, an id is outside the
                vocabulary or a document id negative.
        """
        valid_BS, known_BS = known_labels(labels, vocab_size, self.ignore_index)
        if document_ids is not None:
            _check_document_ids(document_ids, labels)
        if labels.numel() == 0:
            return torch.zeros_like(labels, dtype=torch.float32)
        if vocab_size is None:
            vocab_size = max(self.window.vocab_size, int(labels.masked_fill(~valid_BS, 0).max()) + 1)

        if self.window.device != labels.device:  # torchtune's stock recipes do not move their loss
            self.window.to(labels.device)
        tokens_BS = torch.where(known_BS, labels, NO_TOKEN)
        counts_BS, is_representative_BS = occurrences(_document_keys(tokens_BS, document_ids, vocab_size))
        if self.training:
            distinct_BS = torch.where(is_representative_BS, tokens_BS, NO_TOKEN)
            num_documents = _num_documents(known_BS, document_ids)
            self.window.update(distinct_BS.flatten(), num_documents, vocab_size=vocab_size)
        idf_BS = inverse_document_frequency(self.window.document_frequency(tokens_BS), self.window.num_documents)
        weights_BS = unit_mean(term_frequency(counts_BS, self.tf) * idf_BS, known_BS, self.max_weight)
        return weights_BS.masked_fill(valid_BS & ~known_BS, torch.nan)


def _check_document_ids(document_ids: Tensor, labels: Tensor) -> None:
    if document_ids.shape != labels.shape:
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)}, expected that of labels, {tuple(labels.shape)}"
        )
    if document_ids.device.type == "cpu" and (document_ids < 0).any():
        raise ValueError(f"document_ids contain {document_ids.min().item()}: they have to be non-negative")


def _document_keys(tokens_BS: Tensor, document_ids_BS: Tensor | None, vocab_size: int) -> Tensor:
    """Keys that are equal within a row exactly where token and document are."""
    if document_ids_BS is None:
        return tokens_BS
    return torch.where(tokens_BS == NO_TOKEN, NO_TOKEN, document_ids_BS.long() * vocab_size + tokens_BS)


def _num_documents(valid_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor:
    """Number of documents of the mini-batch with at least one valid token, integer scalar."""
    if document_ids_BS is None:
        return valid_BS.any(dim=-1).sum()
    _, is_representative_BS = occurrences(torch.where(valid_BS, document_ids_BS, NO_TOKEN))
    # The one representative of a row's invalid positions is among the invalid ones: it does not count.
    return (is_representative_BS & valid_BS).sum()
