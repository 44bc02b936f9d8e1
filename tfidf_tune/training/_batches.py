"""The mini-batches of each optimizer step, from any step of the run on, and what the processes agree on about them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._distributed import gather_tensors
from tfidf_tune.weighting import IGNORE_INDEX, shift_labels, shift_tokens

Batch = Mapping[str, Any]
UNPADDED_TOKENS = "unpadded_tokens"  # of a batch, for a weighting that counts all tokens


class StepBatches(NamedTuple):
    """The mini-batches of one optimizer step on this process.

    Attributes:
        batches (Sequence[Batch]): with ``tokens`` and shifted ``labels``, int64 ``[b, s]``; shifted as well are
            ``unpadded_tokens``, where the batches have them, and then ``document_ids``.
        num_valid (list[int]): tokens to predict in each.
        num_tokens (int): tokens to predict in the whole step, on all processes.
        largest_shapes (list[tuple[int, int]]): most rows and most positions of each mini-batch on any process.
        stop (int): number of the signal by which any process was asked to stop, or 0.
    """

    batches: Sequence[Batch]
    num_valid: list[int]
    num_tokens: int
    largest_shapes: list[tuple[int, int]]
    stop: int


def agree_on_step(batches: Sequence[Batch], *, stop: int = 0) -> StepBatches:
    """Shift a step's labels, and agree on its tokens and largest shapes over all processes, on the host alone.

    Every process has as many ``batches``, labels not shifted; ``stop`` is a signal that this one received, or 0.
    """
    batches = [_shifted(batch) for batch in batches]
    num_valid = [int((batch["labels"] != IGNORE_INDEX).sum()) for batch in batches]
    numbers = [[valid, *batch["labels"].shape] for valid, batch in zip(num_valid, batches, strict=True)]
    agreed = gather_tensors(torch.tensor([[stop, 0, 0], *numbers], device="cpu"))
    shapes = [(int(rows), int(positions)) for _, rows, positions in agreed.amax(0)[1:].tolist()]
    return StepBatches(batches, num_valid, int(agreed[:, 1:, 0].sum()), shapes, int(agreed[:, 0, 0].max()))


def _shifted(batch: Batch) -> Batch:
    shifted = {"labels": shift_labels(batch["labels"])}
    if UNPADDED_TOKENS in batch:
        shifted |= {name: shift_tokens(batch[name]) for name in (UNPADDED_TOKENS, "document_ids") if name in batch}
    # Pinned where the batch is: from there the copy to a GPU is asynchronous.
    pinned = {name: tensor.pin_memory() for name, tensor in shifted.items() if batch[name].is_pinned()}
    return {**batch, **shifted, **pinned}


def steps_per_epoch(cfg: FinetuneConfig, dataloader: DataLoader[Batch]) -> int:
    """Return the optimizer steps of an epoch; an incomplete step at its end is left out."""
    return len(dataloader) // cfg.gradient_accumulation_steps


def step_batches(cfg: FinetuneConfig, dataloader: DataLoader[Batch], *, first_step: int = 1) -> Iterator[list[Batch]]:
    """Iterate over the mini-batches of each step, epoch after epoch; data before ``first_step`` is not read."""
    size = cfg.gradient_accumulation_steps
    first_epoch, done = divmod(first_step - 1, steps_per_epoch(cfg, dataloader))
    sampler = cast(StatefulDistributedSampler, dataloader.sampler)
    for epoch in range(first_epoch, cfg.epochs):
        sampler.set_epoch(epoch)
        if epoch == first_epoch:
            sampler.load_state_dict({"yielded": done * size * cfg.batch_size})
        batches = iter(dataloader)
        while len(step := list(islice(batches, size))) == size:
            yield step


def step_indices(cfg: FinetuneConfig, dataloader: DataLoader[Batch], step: int) -> list[int]:
    """Return the items of the data set that a step (from 1) was trained on, on all processes, ascending."""
    epoch, done = divmod(step - 1, steps_per_epoch(cfg, dataloader))
    sampler = cast(StatefulDistributedSampler, dataloader.sampler)
    # Ranks take turns in one order: what they see in a step is one run of it.
    order: DistributedSampler[Any] = DistributedSampler(
        dataloader.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    order.set_epoch(epoch)
    size = cfg.gradient_accumulation_steps * cfg.batch_size * sampler.num_replicas
    return sorted(islice(order, done * size, (done + 1) * size))


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Copy a mini-batch to the model's device asynchronously."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value.to(device)
        for name, value in batch.items()
    }
