"""What every weighting asks of its labels."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_TOKEN = -1
_LABEL_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


def on_host(labels: Tensor) -> bool:
    """Tell whether values may decide what is done next: on a CPU, where reading one waits for nothing."""
    return labels.device.type == "cpu" and not torch.compiler.is_compiling()


def check_label_type(labels: Tensor) -> None:
    """Refuse labels that are not signed integers.

    Unsigned integers cannot hold -100, and torch takes indices of type uint8 and bool for masks.

    Args:
        labels (Tensor): should be int8, int16, int32 or int64, of any shape.

    Raises:
        ValueError: If they are of another type.
    """
    if labels.dtype not in _LABEL_TYPES:
        raise ValueError(f"labels are {labels.dtype}, expected signed integers: convert token ids with labels.long()")


def check_shape(labels: Tensor) -> None:
    """Refuse what is no batch of token ids.

    Args:
        labels (Tensor): should be a signed integer ``[b, s]``.

    Raises:
        ValueError: If ``labels`` is not 2-D or not of signed integers.
    """
    check_label_type(labels)
    if labels.dim() != 2:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}, expected [b, s]: term frequencies need the sequences apart"
        )


def known_labels(labels: Tensor, vocab_size: int | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Tell valid positions from ignored ones, and ids of the vocabulary from others, without waiting for a GPU.

    Args:
        labels (Tensor): integer ``[b, s]``.
        vocab_size (int | None): size of the vocabulary. None: not known, every id that is not negative will do.
        ignore_index (int): label of the positions that do not count.

    Returns:
        tuple[Tensor, Tensor]: ``valid`` and ``known``, bool ``[b, s]``: not ignored; not ignored and in the vocabulary.
    """
    valid = labels != ignore_index
    known = valid & (labels >= 0)
    return valid, known if vocab_size is None else known & (labels < vocab_size)


def checked_tokens(
    labels: npt.NDArray[np.integer], vocab_size: int | None, ignore_index: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.bool_]]:
    """Tell valid positions from ignored ones where values may be looked at, and refuse ids outside the vocabulary.

    Args:
        labels (npt.NDArray[np.integer]): ``[b, s]``.
        vocab_size (int | None): size of the vocabulary. None: not known, every id that is not negative will do.
        ignore_index (int): label of the positions that do not count.

    Returns:
        tuple[npt.NDArray[np.integer], npt.NDArray[np.bool_]]: ``tokens``, the labels with ``NO_TOKEN`` at ignored
        positions, and ``valid``, where they are not ignored, both ``[b, s]``.

    Raises:
        ValueError: If a valid id is outside the vocabulary.
    """
    valid = labels != ignore_index
    tokens = np.where(valid, labels, np.int64(0))
    smallest, largest = (tokens.min(), tokens.max()) if tokens.size else (0, 0)
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        raise ValueError(
            f"labels contain the id {min(smallest, 0) or largest}, outside the vocabulary of "
            f"{vocab_size or 'ids from 0'}; ignored positions are marked by {ignore_index}"
        )
    tokens += valid
    tokens += NO_TOKEN
    return tokens, valid


def valid_labels(labels: Tensor, vocab_size: int | None, ignore_index: int) -> Tensor:
    """Refuse what is no batch of token ids of the vocabulary, and tell valid positions from ignored ones.

    Args:
        labels (Tensor): should be integer ``[b, s]``.
        vocab_size (int | None): size of the vocabulary. None: not known, every id that is not negative will do.
        ignore_index (int): label of the positions that do not count.

    Returns:
        Tensor: bool ``[b, s]``: not ignored.

    Raises:
        ValueError: If ``labels`` is not 2-D or not of signed integers, or, on CPU, a valid id is outside the
            vocabulary.
    """
    check_shape(labels)
    if on_host(labels):
        checked_tokens(labels.numpy(), vocab_size, ignore_index)
    return labels.long() != ignore_index


def check_document_ids(document_ids: Tensor, labels: Tensor) -> None:
    """Refuse document ids that are none for these labels.

    Args:
        document_ids (Tensor): should be integer ``[b, s]``.
        labels (Tensor): ``[b, s]``.

    Raises:
        ValueError: If they are not integers or of another shape.
    """
    if document_ids.is_floating_point():
        raise ValueError(f"document_ids are {document_ids.dtype}, expected integers")
    if document_ids.shape != labels.shape:
        raise ValueError(
            f"document_ids has shape {tuple(document_ids.shape)}, expected that of labels, {tuple(labels.shape)}"
        )


class SpecialTokens:
    """Token ids that are exceptions.

    Args:
        token_ids (Iterable[int]): the ids. Default: none.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        ids = sorted({token_id for token_id in token_ids if token_id >= 0})
        # A table, because torch.isin sorts where there are many ids, for which a GPU has to be waited for.
        self._is_special = torch.zeros(ids[-1] + 2 if ids else 1, dtype=torch.bool)  # the last entry: all ids above
        self._is_special[ids] = True

    def among(self, labels: Tensor) -> Tensor:
        """Tell where they are.

        Args:
            labels (Tensor): integer, any shape.

        Returns:
            Tensor: bool, same shape.
        """
        self._is_special = self._is_special.to(labels.device)
        entries = labels.long().clamp(0, len(self._is_special) - 1)
        return self._is_special.take(entries) & (labels >= 0)
