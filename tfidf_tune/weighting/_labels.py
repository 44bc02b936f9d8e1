"""What every weighting asks of its labels."""

import torch
from torch import Tensor


def known_labels(labels: Tensor, vocab_size: int | None, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Tell valid positions from ignored ones, and ids of the vocabulary from others.

    Ids are checked here on CPU alone: on a GPU the check would wait for the device.

    Args:
        labels (Tensor): integer ``[b, s]``.
        vocab_size (int | None): size of the vocabulary. None: not known, every id that is not negative will do.
        ignore_index (int): label of the positions that do not count.

    Returns:
        tuple[Tensor, Tensor]: ``valid`` and ``known``, bool ``[b, s]``: not ignored; not ignored and in the vocabulary.

    Raises:
        ValueError: If ``labels`` is not 2-D or not of integers, or, on CPU, a valid id is outside the vocabulary.
    """
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are {labels.dtype}, expected integer token ids")
    if labels.dim() != 2:
        raise ValueError(
            f"labels has shape {tuple(labels.shape)}, expected [b, s]: term frequencies need the sequences apart"
        )
    valid = labels != ignore_index
    known = valid & (labels >= 0)
    if vocab_size is not None:
        known &= labels < vocab_size
    if labels.device.type == "cpu" and not known.equal(valid):
        outside = labels[valid & ~known][0].item()
        raise ValueError(
            f"labels contain the id {outside}, outside the vocabulary of {vocab_size or 'ids from 0'}; "
            f"ignored positions are marked by {ignore_index}"
        )
    return valid, known
