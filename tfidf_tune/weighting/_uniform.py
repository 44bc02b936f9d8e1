"""Weight 1 everywhere: plain cross-entropy on the path of the weighted losses."""

from torch import Tensor

from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import valid_labels
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
        predictions: Predictions | None = None,
    ) -> Tensor:
        """Return 1 at valid positions and 0 at ignored ones, float32 ``[b, s]``.

        Raises:
            ValueError: If ``labels`` is not 2-D, or, on CPU, an id is outside the vocabulary.
        """
        return valid_labels(labels, vocab_size, self.ignore_index).float()
