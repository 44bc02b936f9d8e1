"""Tokenizer, data set and loader, checked against the model."""

from collections.abc import Mapping, Sized
from functools import partial
from typing import Any, cast

from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchtune import config
from torchtune.config._utils import _get_component_from_path

from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._run import Run

Batch = Mapping[str, Tensor]


def build_tokenizer(cfg: FinetuneConfig, model: nn.Module) -> Any:
    """Build the tokenizer of the config and compare its vocabulary with the model's.

    Args:
        cfg (FinetuneConfig): the checked config.
        model (nn.Module): torchtune model, perhaps on the meta device.

    Returns:
        Any: a torchtune tokenizer.

    Raises:
        ValueError: If the tokenizer has ids that the model has no embedding for.
    """
    tokenizer = config.instantiate(cfg.tokenizer)
    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model embeddings for {vocab_size}: "
            "take the tokenizer that belongs to the model"
        )
    return tokenizer


def build_dataset(cfg: FinetuneConfig, tokenizer: Any, model: nn.Module) -> Dataset[Any]:
    """Build the data set of the config.

    Args:
        cfg (FinetuneConfig): the checked config.
        tokenizer (Any): a torchtune tokenizer, the data set's first argument.
        model (nn.Module): gives the longest sequence allowed.

    Returns:
        Dataset[Any]: map-style data set of ``{"tokens": list[int], "labels": list[int]}``.

    Raises:
        ValueError: If sequences would be longer than the model takes, rows would hold several documents, or there
            are too few sequences for one step.
    """
    section = cast(DictConfig, cfg.dataset)
    limit = cast(int, model.max_seq_len)
    for name, length in (
        ("dataset.block_size", section.get("block_size")),
        ("tokenizer.max_seq_len", tokenizer.max_seq_len),
    ):
        if length is not None and length > limit:
            raise ValueError(f"{name} is {length}, the model takes at most {limit} tokens: lower it")
    if section.get("packed"):
        raise ValueError(
            "dataset.packed is true: a row of several documents would count as one sequence; set it to false"
        )
    dataset: Dataset[Any] = config.instantiate(section, tokenizer)
    found, needed = len(cast(Sized, dataset)), cfg.batch_size * cfg.gradient_accumulation_steps
    if found < needed:
        raise ValueError(
            f"the data set has {found} sequences, one step takes batch_size x gradient_accumulation_steps = {needed}"
        )
    return dataset


def build_dataloader(cfg: FinetuneConfig, dataset: Dataset[Any], tokenizer: Any, run: Run) -> DataLoader[Batch]:
    """Build the loader: batches in an order that follows from seed and epoch, the last partial one left out.

    Args:
        cfg (FinetuneConfig): the checked config.
        dataset (Dataset[Any]): map-style data set.
        tokenizer (Any): gives the padding id.
        run (Run): gives seed and device.

    Returns:
        DataLoader[Batch]: mini-batches of ``tokens`` and ``labels``, int64 ``[b, s]``, labels not yet shifted and
        -100 where ignored.
    """
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=1, rank=0, shuffle=cfg.shuffle, seed=run.seed, drop_last=True
    )
    collate = partial(_get_component_from_path(cfg.collate_fn), padding_idx=tokenizer.pad_id, ignore_idx=-100)
    return DataLoader(
        dataset,
        batch_size=cfg.batch_size,
        sampler=sampler,
        collate_fn=collate,
        drop_last=True,
        pin_memory=run.device.type == "cuda",
    )
