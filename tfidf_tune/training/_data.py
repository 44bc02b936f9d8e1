"""Tokenizer, data set and loader; the tokenizer is checked against the model."""

from collections.abc import Mapping, Sized
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchtune.config._utils import _get_component_from_path

from tfidf_tune.training._config import FinetuneConfig, instantiate
from tfidf_tune.training._errors import SetupError
from tfidf_tune.training._run import Run

Batch = Mapping[str, Tensor]


def build_tokenizer(cfg: FinetuneConfig, model: nn.Module) -> Any:
    """Build the tokenizer of the config and compare its vocabulary with the model's.

    Args:
        cfg (FinetuneConfig): the checked config.
        model (nn.Module): torchtune model, perhaps on the meta device.

    Returns:
        Any: a torchtune tokenizer; without a ``max_seq_len`` of its own it gets the model's.

    Raises:
        SetupError: If the tokenizer has ids that the model has no embedding for, or allows longer sequences.
    """
    tokenizer = instantiate(cfg, "tokenizer")
    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    if tokenizer.vocab_size > vocab_size:
        raise SetupError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model embeddings for {vocab_size}: "
            "take the tokenizer that belongs to the model"
        )
    limit = cast(int, model.max_seq_len)
    if tokenizer.max_seq_len is None:
        tokenizer.max_seq_len = limit  # what torchtune's data sets cut longer texts to
    elif tokenizer.max_seq_len > limit:
        raise SetupError(f"tokenizer.max_seq_len is {tokenizer.max_seq_len}, the model takes at most {limit}: lower it")
    return tokenizer


def build_dataset(cfg: FinetuneConfig, tokenizer: Any) -> Dataset[Any]:
    """Build the data set of the config.

    Args:
        cfg (FinetuneConfig): the checked config.
        tokenizer (Any): a torchtune tokenizer, the data set's first argument.

    Returns:
        Dataset[Any]: map-style data set of ``{"tokens": list[int], "labels": list[int]}``.

    Raises:
        SetupError: If it cannot be built from the settings given, rows would hold several documents, or there are too
            few sequences for one step.
    """
    if cfg.dataset.get("packed"):
        raise SetupError(
            "config: dataset: packed is true; a row of several documents would count as one sequence, set it to false"
        )
    dataset: Dataset[Any] = instantiate(cfg, "dataset", tokenizer)
    found, needed = len(cast(Sized, dataset)), cfg.batch_size * cfg.gradient_accumulation_steps
    if found < needed:
        raise SetupError(
            f"the data set has {found} sequences, one step takes batch_size x gradient_accumulation_steps = {needed}"
        )
    return dataset


def longest_sequence(dataset: Dataset[Any]) -> int:
    """Find the length of the longest sequence, in tokens, among up to 64 that lie evenly over the data set.

    Args:
        dataset (Dataset[Any]): map-style data set.

    Returns:
        int: tokens; a data set of blocks has but one length.
    """
    length = len(cast(Sized, dataset))
    return max(len(dataset[index]["tokens"]) for index in range(0, length, -(-length // 64)))


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
