"""The interface that every token weighting implements."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from tfidf_tune.weighting._ranks import LabelExchange, exchange_labels, has_other_ranks


class Predictions(NamedTuple):
    """What the model itself says of the label tokens, without gradient.

    Attributes:
        log_probability (Tensor): float32 ``[b, s]``, that of each label, natural logarithm; 0 at ignored positions.
        entropy (Tensor): float32 ``[b, s]``, of the distribution that each label is drawn from, in nats; 0 at ignored
            positions.
    """

    log_probability: Tensor
    entropy: Tensor


class TokenWeighting(nn.Module, ABC):
    """Gives each label token the weight of its term in a cross-entropy loss.

    In ``.train()`` mode a weighting may learn from the batch (a window of statistics, say); in ``.eval()`` mode it
    leaves its state untouched.

    Attributes:
        needs_predictions (bool): whether :meth:`forward` has to be given what the model predicts. Then the logits have
            to be computed before the weights are known.
        has_unit_mean (bool): whether weights are scaled to mean 1 over the valid tokens, as all here are but those of
            :class:`RepetitionWeighting`.
        sync (bool): whether in training the weights are those of the union of all ranks' mini-batches.
        ignore_index (int): label of the positions that do not count.
    """

    needs_predictions: bool = False
    has_unit_mean: bool = True
    sync: bool = False
    ignore_index: int = -100

    @property
    def communicates(self) -> bool:
        """Whether labels of other ranks are needed: with ``sync``, in ``.train()`` mode, with several processes."""
        return self.sync and self.training and has_other_ranks()

    def exempt(self, token_ids: Iterable[int]) -> None:
        """Name the special tokens of the tokenizer; a weighting that hides tokens from the loss never hides these.

        Args:
            token_ids (Iterable[int]): BOS, EOS and the like. They take the place of those named before.
        """

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Tell how large the state is once mini-batches of a shape have been seen, for a plan of memory.

        Args:
            batch_size (int): rows of a mini-batch.
            seq_len (int): positions of a row.
            vocab_size (int): of the model.
            num_ranks (int): processes, of which each has such a mini-batch. Default: 1.

        Returns:
            int: bytes on each rank.
        """
        return sum(buffer.nbytes for buffer in self.buffers())

    def begin(
        self, labels: Tensor, *, document_ids: Tensor | None = None, shape: tuple[int, int] | None = None
    ) -> LabelExchange | None:
        """Start to gather the labels of all ranks, if the weighting needs them now; a model's forward pass can follow.

        Args:
            labels (Tensor): those of :meth:`forward`.
            document_ids (Tensor | None): those of :meth:`forward`.
            shape (tuple[int, int] | None): most rows and most positions of a rank's labels, the same on every rank.
                Default: None, it is found out by another collective, which on a GPU waits for the device.

        Returns:
            LabelExchange | None: what :meth:`forward` takes as ``begun``. None: nothing is needed.

        Raises:
            ValueError: As in :meth:`forward` for types and shapes, or if the labels are larger than ``shape``.
        """
        if not self.communicates:
            return None
        return exchange_labels(labels, document_ids, shape=shape, ignore_index=self.ignore_index)

    @abstractmethod
    def forward(
        self,
        labels: Tensor,
        *,
        vocab_size: int | None = None,
        document_ids: Tensor | None = None,
        begun: LabelExchange | None = None,
        predictions: Predictions | None = None,
    ) -> Tensor:
        """Compute the weights of a mini-batch.

        Args:
            labels (Tensor): integer ``[b, s]``, ignored positions hold -100 (or the ``ignore_index`` of the weighting).
            vocab_size (int | None): size of the vocabulary, the last dimension of the logits.
            document_ids (Tensor | None): integer ``[b, s]``, non-negative: which document of its row each label
                belongs to, for rows that hold several. Default: None, a row is one document.
            begun (LabelExchange | None): what :meth:`begin` gave for these labels. Default: None, it is called now.
            predictions (Predictions | None): of these labels. Default: None, which will do unless the weighting
                ``needs_predictions``.

        Returns:
            Tensor: float32 ``[b, s]`` on the device of ``labels``, without gradient: 0 at ignored positions,
            mean 1 over the valid tokens where ``has_unit_mean`` (over those of all ranks, where the weighting says so);
            0 all over where nothing has a weight.
        """


def check_weighting(name: str, value: Any) -> None:
    """Refuse what is no weighting.

    Args:
        name (str): of the argument.
        value (Any): should be a :class:`TokenWeighting`.

    Raises:
        ValueError: If it is something else.
    """
    if not isinstance(value, TokenWeighting):
        found = f"a {type(value).__name__}" if isinstance(value, nn.Module) else repr(value)
        raise ValueError(
            f"{name} is {found}: it has to be a weighting, in a config a section with `_component_`, for example "
            "tfidf_tune.weighting.TFIDFWeighting"
        )
