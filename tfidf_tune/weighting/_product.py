"""The product of two weightings."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tfidf_tune.weighting._interface import Predictions, TokenWeighting, check_weighting
from tfidf_tune.weighting._labels import valid_labels
from tfidf_tune.weighting._ranks import LabelExchange
from tfidf_tune.weighting._term_statistics import unit_mean


class ProductWeighting(TokenWeighting):
    r"""The weights of two weightings, multiplied.

    .. math::
        w_i = \frac{u_i v_i}{\frac{1}{M}\sum_j u_j v_j}

    with the weights u and v of the factors and M valid tokens: Goldfish times TF-IDF, for instance, hides some tokens
    of every passage and weighs the others. The mean is 1 over the mini-batch of a rank, whatever ranks the factors look
    at. With a factor that is not scaled to mean 1 itself, :class:`RepetitionWeighting`, the product is not either:
    :math:`w_i = u_i v_i`, and what that one holds back stays held back. State and mode are those of the factors.

    Args:
        first (TokenWeighting): a factor.
        second (TokenWeighting): the other one.
        ignore_index (int): label of the positions that do not count, the same as that of the factors. Default: -100.

    Raises:
        ValueError: If a factor is no weighting, or has another ``ignore_index``.
    """

    def __init__(self, first: TokenWeighting, second: TokenWeighting, *, ignore_index: int = -100) -> None:
        super().__init__()
        for name, factor in (("first", first), ("second", second)):
            check_weighting(name, factor)
            if factor.ignore_index != ignore_index:
                raise ValueError(
                    f"{name} has ignore_index {factor.ignore_index}, the product {ignore_index}: set both to the same"
                )
        self.first = first
        self.second = second
        self.ignore_index = ignore_index
        self.needs_predictions = first.needs_predictions or second.needs_predictions
        self.has_unit_mean = first.has_unit_mean and second.has_unit_mean

    @property
    def communicates(self) -> bool:
        """Whether a factor does."""
        return self.first.communicates or self.second.communicates

    def exempt(self, token_ids: Iterable[int]) -> None:
        """Name the special tokens to both factors.

        Args:
            token_ids (Iterable[int]): special tokens.
        """
        token_ids = list(token_ids)
        self.first.exempt(token_ids)
        self.second.exempt(token_ids)

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Tell the bytes of both factors' states."""
        return sum(
            factor.num_state_bytes(batch_size, seq_len, vocab_size=vocab_size, num_ranks=num_ranks)
            for factor in (self.first, self.second)
        )

    def begin(
        self, labels: Tensor, *, document_ids: Tensor | None = None, shape: tuple[int, int] | None = None
    ) -> LabelExchange | None:
        """Start what the factors need from other processes: the labels, which one exchange brings to both.

        Args:
            labels (Tensor): those of :meth:`forward`.
            document_ids (Tensor | None): those of :meth:`forward`.
            shape (tuple[int, int] | None): most rows and most positions of a rank's labels. Default: None, not known.

        Returns:
            LabelExchange | None: what :meth:`forward` takes as ``begun``.
        """
        asking = self.first if self.first.communicates else self.second
        return asking.begin(labels, document_ids=document_ids, shape=shape)

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
        """Compute the weights of a mini-batch, float32 ``[b, s]``.

        Raises:
            ValueError: As the factors do.
        """
        if begun is None:
            begun = self.begin(labels, document_ids=document_ids)
        first, second = (
            factor(
                labels,
                vocab_size=vocab_size,
                document_ids=document_ids,
                begun=begun if factor.communicates else None,
                predictions=predictions,
            )
            for factor in (self.first, self.second)
        )
        product: Tensor = first * second
        if not self.has_unit_mean:
            return product
        return unit_mean(product, valid_labels(labels, vocab_size, self.ignore_index))
