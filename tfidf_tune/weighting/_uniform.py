"""Weight 1 everywhere: plain cross-entropy on the path of the weighted losses."""

import torch
from torch import Tensor

from tfidf_tune.weighting._interface import TokenWeighting
from tfidf_tune.weighting._labels import check_shape, checked_tokens, on_host
from tfidf_tune.weighting._ranks import LabelExchange


class UniformWeighting(TokenWeighting):
    """Weight 1 for every valid token.

    Args:
        ignore_index (int): label of the positions that do not count. Default: -100.
    """

    def __init__(self, *, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def forward(
        self,
        labels: Tensor,
        *,
        vocab_size: int | None = None,
        document_ids: Tensor | None = None,
        begun: LabelExchange | None = None,
    ) -> Tensor:
        """Return 1 at valid positions and 0 at ignored ones, float32 ``[b, s]``.

        Raises:
            ValueError: If ``labels`` is not 2-D, or, on CPU, an id is outside the vocabulary.
        """
        check_shape(labels)
        if on_host(labels):
            checked_tokens(labels.numpy(), vocab_size, self.ignore_index)
        valid = labels.long() != self.ignore_index
        return valid.to(torch.float32)
