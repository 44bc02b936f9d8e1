"""The interface that every token weighting implements."""

from abc import ABC, abstractmethod

from torch import Tensor, nn


class TokenWeighting(nn.Module, ABC):
    """Gives each label token the weight of its term in a cross-entropy loss.

    In ``.train()`` mode a weighting may learn from the batch (a window of statistics, say); in ``.eval()`` mode it
    leaves its state untouched.
    """

    @abstractmethod
    def forward(self, labels: Tensor, *, vocab_size: int | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Compute the weights of a mini-batch.

        Args:
            labels (Tensor): integer ``[b, s]``, ignored positions hold -100 (or the ``ignore_index`` of the weighting).
            vocab_size (int | None): size of the vocabulary, the last dimension of the logits.
            document_ids (Tensor | None): integer ``[b, s]``, non-negative: which document of its row each label
                belongs to, for rows that hold several. Default: None, a row is one document.

        Returns:
            Tensor: float32 ``[b, s]`` on the device of ``labels``, without gradient: mean 1 over the valid tokens,
            0 at ignored positions.
        """
