"""Tokenizer, data set, loader and the mini-batches of a step; the tokenizer is checked against the
model.
"""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchtune.datasets import ConcatDataset, PackedDataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._config import DEFAULT_COLLATE, FinetuneConfig
from tfidf_tune._files import atomic_file, require_writable
from tfidf_tune._printing import counted
from tfidf_tune.data import CompletionsDataset, TextBlocksDataset, collate_packed, is_packed
from tfidf_tune.data.sequences import packed_mask, unpacked, unpadded_tokens
from tfidf_tune.data.trained_passages import Trained, trained_passages
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.passages import Passage, read_probe_file, write_probe_file
from tfidf_tune.probe.run_identity import ALL_PASSAGES, HELD_OUT
from tfidf_tune.training._distributed import (
    gather_tensors,
    is_main_process,
    main_process_first,
    print_once,
)
from tfidf_tune.training._errors import SetupError, cause_of, setup_errors
from tfidf_tune.training._folder import named_probe_files
from tfidf_tune.training._run import Run
from tfidf_tune.training.components import find_component, instantiate, sections
from tfidf_tune.weighting import IGNORE_INDEX, shift_labels, shift_tokens

_NUM_SAMPLES = 64
Batch = Mapping[str, Any]
UNPADDED_TOKENS = "unpadded_tokens"  # of a batch, for a weighting that counts all tokens


def build_tokenizer(cfg: FinetuneConfig, model: nn.Module) -> Any:
    """Build the tokenizer of the config; without ``max_seq_len`` it gets the limit of the model.

    Raises:
        SetupError: If the tokenizer has ids that the model has no embedding for, or allows longer
            sequences.
    """
    tokenizer = instantiate(cfg, "tokenizer")
    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    # torchtune's tokenizers do not list their vocabulary, only its size and their special tokens.
    largest_token = getattr(tokenizer, "max_token_id", tokenizer.vocab_size - 1)
    largest = max([largest_token, *_special_ids(tokenizer)])
    if largest >= vocab_size:
        raise SetupError(
            f"the tokenizer has a token with the id {largest}, the model embeddings for the ids 0 "
            f"to {vocab_size - 1}: use the tokenizer that belongs to the model"
        )
    limit = cast(int, model.max_seq_len)
    if tokenizer.max_seq_len is None:
        tokenizer.max_seq_len = limit  # what torchtune's data sets cut longer texts to
    elif tokenizer.max_seq_len > limit:
        raise SetupError(
            f"tokenizer.max_seq_len is {tokenizer.max_seq_len}, the model takes at most {limit}: "
            "lower it"
        )
    return tokenizer


def set_special_tokens(loss: WeightedCrossEntropyLoss, tokenizer: Any) -> None:
    """Pass the ids of the tokenizer's special tokens to the objective, which then never hides
    these.
    """
    loss.weighting.set_special_tokens(_special_ids(tokenizer))


def _special_ids(tokenizer: Any) -> list[int]:
    ids = [getattr(tokenizer, name, None) for name in ("bos_id", "eos_id", "pad_id")]
    ids += (getattr(tokenizer, "special_tokens", None) or {}).values()
    return [token_id for token_id in ids if token_id is not None and token_id >= 0]


def build_dataset(cfg: FinetuneConfig, tokenizer: Any) -> Dataset[Any]:
    """Build the data set of the config; its probe file is not written before
    :func:`write_probe_files`.

    It is a map-style data set of ``{"tokens": list[int], "labels": list[int]}``, or a packed one,
    see :func:`~tfidf_tune.data.is_packed`; of several sections a ``ConcatDataset``.

    Raises:
        SetupError: If it cannot be built, several cannot be mixed, packed rows need another
            ``collate_fn``, there are too few sequences for the processes, every label is masked, or
            the probe file cannot be written.
    """
    # Each data set is built without its probe file, which belongs to a run that begins.
    without_probe_files = copy.deepcopy(cfg)
    written_by: dict[Path, str] = {}
    for where, section, file in named_probe_files(without_probe_files):
        require_writable(f"{where}.probe_file", file.parent)
        first = written_by.setdefault(file, where)
        if first != where:
            raise SetupError(
                f"config: {first} and {where} both have the probe_file {file}: name two files"
            )
        section.probe_file = None
    with main_process_first():
        built = instantiate(without_probe_files, "dataset", tokenizer)

    # Several are mixed.
    if isinstance(built, list):
        lengths = sorted({part.max_seq_len for part in built if isinstance(part, PackedDataset)})
        if len(lengths) > 1:
            raise SetupError(
                f"config: dataset: packed rows of {lengths} tokens cannot be mixed: give them one "
                "length"
            )
        with setup_errors("config: dataset"):  # packed and unpacked cannot be mixed
            built = ConcatDataset(built)
    dataset: Dataset[Any] = built

    # What is measured, how rows are collated, and whether there is anything to learn.
    _look_for_passages(cfg, dataset)
    if cfg.evaluate and not probe_files(cfg, dataset):
        raise SetupError(
            "config: evaluate is true, but the data set has no passages of a probe_file that could "
            "be evaluated: hold some out (dataset.holdout, dataset.targets), name more text, or "
            "leave out evaluate"
        )
    if is_packed(dataset) and cfg.collate_fn != DEFAULT_COLLATE:
        raise SetupError(
            f"config: collate_fn is {cfg.collate_fn}, but the data set is packed, which needs one "
            "that keeps the documents of a row apart: leave collate_fn out, or set dataset.packed "
            "to false"
        )
    world_size, _ = get_world_size_and_rank()
    num_sequences = len(cast(Sized, dataset))
    if num_sequences < world_size:
        raise SetupError(
            f"the data set has {num_sequences} sequences, the run {world_size} process(es): add "
            "data"
        )
    # Usually the first sequence has a label.
    if not any(_has_label(dataset[index]) for index in range(num_sequences)):
        raise SetupError(
            f"none of the {num_sequences} sequences has a label to learn from: all are masked, or "
            "cut off behind a long prompt; raise the limit of tokens, or unmask some"
        )
    return dataset


def _has_label(item: Mapping[str, Any]) -> bool:
    """Return whether a sequence has a token to predict; the shift of labels drops the first."""
    return any(label != IGNORE_INDEX for label in item["labels"][1:])


def _look_for_passages(cfg: FinetuneConfig, dataset: Any) -> None:
    """Count the targets in all that is trained on, and leave out controls that are; a SetupError if
    all of them are.

    A data set has held its controls out of its own text, but another one of the run may have them.
    """
    parts = _parts_of_config(cfg, dataset)
    sections_and_parts = zip(sections("dataset", cfg.dataset), parts, strict=True)
    for number, ((section, _), part) in enumerate(sections_and_parts):
        measured = _measured(part)
        if measured is None or not measured.passages:
            continue
        trained = trained_passages(measured.passages, number, parts)
        if trained.controls_in:
            what = _trained_controls(cfg, section, trained)
            if not _num_controls(trained):
                raise SetupError(
                    f"config: {what}, so that nothing was held out: remove the copies there, or "
                    f"measure nothing with {section} (holdout: 0, targets: null)"
                )
            print_once(f"{what} and are not measured")
        measured.passages = trained.passages


def _num_controls(trained: Trained) -> int:
    return len([passage for passage in trained.passages if passage.kind == "control"])


def _trained_controls(cfg: FinetuneConfig, source: str, trained: Trained) -> str:
    """Say how many controls of a data set or a file are trained on, and in which sections."""
    names = [name for name, _ in sections("dataset", cfg.dataset)]
    trained_in = ", ".join(names[number] for number in sorted(set(trained.controls_in)))
    num_trained = len(trained.controls_in)
    return (
        f"{num_trained} of {num_trained + _num_controls(trained)} controls of {source} are in the "
        f"training text of {trained_in}"
    )


def keep_chat_template(cfg: FinetuneConfig, checkpointer: Any) -> None:
    """Let the checkpoints have the chat template that data sets of the config name; a SetupError if
    they differ.
    """
    templates = set()
    for _, section in sections("dataset", cfg.dataset):
        file = section.get("chat_template")
        if file is not None:
            templates.add(Path(file).expanduser().read_text(encoding="utf-8"))
    if len(templates) > 1:
        raise SetupError(
            "config: dataset: the data sets have different chat templates: name the same file for "
            "all"
        )
    if templates:
        checkpointer.chat_template = templates.pop()


def write_probe_files(cfg: FinetuneConfig, dataset: Any) -> None:
    """Write the passages of a data set of :func:`build_dataset` to the files of
    :func:`probe_files`.

    The texts that are held out are also written to ``held_out.jsonl``, as text on which the cost
    can be measured.
    """
    if not is_main_process():
        return
    for path, passages in probe_files(cfg, dataset).items():
        write_probe_file(path, passages)
    texts = held_out_texts(all_passages(cfg, dataset))
    if texts:
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        with atomic_file(Path(cfg.output_dir).expanduser() / HELD_OUT) as file:
            file.write_text("".join(lines), encoding="utf-8")


def held_out_texts(passages: Sequence[Passage]) -> list[str]:
    """Return the texts of controls, without those that are answers to prompts."""
    return [
        passage.text
        for passage in passages
        if passage.kind == "control" and passage.num_prompt is None
    ]


def read_passages(cfg: FinetuneConfig, dataset: Any, probe_file: str) -> Sequence[Passage]:
    """Return the passages of a probe file for the monitor, also if :func:`write_probe_files` has
    yet to write it.

    Controls that the run trains on are left out of a file that it does not write, as they are of
    its own.

    Raises:
        SetupError: If all controls are trained on, or the file is one of the run and the run has no
            passages for it.
    """
    # A file that the run writes.
    path = Path(probe_file).expanduser().resolve()
    written = {file.resolve(): passages for file, passages in probe_files(cfg, dataset).items()}
    if path in written:
        return written[path]
    named = [file for _, _, file in named_probe_files(cfg)]
    if path in (*named, Path(cfg.output_dir).resolve() / ALL_PASSAGES):
        raise SetupError(
            "config: memorization_monitor: the run has no passages to write to the probe_file "
            f"{probe_file}: hold some out (dataset.holdout, dataset.targets), or name another file"
        )

    # Another file, whose passages were chosen for another run.
    passages = read_probe_file(probe_file)
    trained = trained_passages(passages, None, _parts_of_config(cfg, dataset))
    if trained.controls_in:
        what = _trained_controls(cfg, probe_file, trained)
        if not _num_controls(trained):
            raise SetupError(
                f"config: memorization_monitor: {what}, so that nothing was held out: name a "
                "probe_file whose controls are in no text of the run"
            )
        print_once(f"{what} and are not measured")
    targets = [passage for passage in trained.passages if passage.kind == "target"]
    absent = [passage for passage in targets if passage.num_injections == 0]
    if absent:
        print_once(
            f"{len(absent)} of {counted(len(targets), 'target')} of {probe_file} are not in the "
            "training text"
        )
    return trained.passages


def probe_files(cfg: FinetuneConfig, dataset: Any) -> dict[Path, Sequence[Passage]]:
    """Return the files that the run writes, and the passages that belong into them; the last file
    has all passages.

    Each data set counts its passages from 0. Where several data sets have a file, a further one,
    :data:`~tfidf_tune.probe.run_identity.ALL_PASSAGES` in the folder of the run, has the passages
    of all, and the name of the data set is in front of their ids: ``dataset[1]/target-0000``.
    """
    files: dict[Path, Sequence[Passage]] = {}
    joined: list[Passage] = []
    parts = _parts_of_config(cfg, dataset)
    for (name, section), part in zip(sections("dataset", cfg.dataset), parts, strict=True):
        passages = passages_of(part)
        if section.get("probe_file") and passages:
            files[Path(section.probe_file).expanduser()] = passages
            joined += [replace(passage, id=f"{name}/{passage.id}") for passage in passages]
    if len(files) > 1:
        files[Path(cfg.output_dir).expanduser() / ALL_PASSAGES] = joined
    return files


def all_passages(cfg: FinetuneConfig, dataset: Any) -> Sequence[Passage]:
    """Return the passages of all files that the run writes, none of them twice."""
    files = probe_files(cfg, dataset)
    return list(files.values())[-1] if files else ()


def _parts_of_config(cfg: FinetuneConfig, dataset: Any) -> list[Any]:
    """Return the data set of each section of the config; a data set of the user may be a mixture by
    itself.
    """
    return parts_of(dataset) if OmegaConf.is_list(cfg.dataset) else [dataset]


def parts_of(dataset: Any) -> list[Any]:
    """Return the data sets that are mixed, or the only one."""
    return dataset._datasets if isinstance(dataset, ConcatDataset) else [dataset]


def passages_of(dataset: Any) -> Sequence[Passage]:
    """Return the targets and controls of a data set, none if it measures nothing."""
    measured = _measured(dataset)
    return () if measured is None else measured.passages


def _measured(dataset: Any) -> TextBlocksDataset | CompletionsDataset | None:
    """Return the data set that has passages; a data set of the user may have an attribute of that
    name.
    """
    inner = unpacked(dataset)
    return inner if isinstance(inner, (TextBlocksDataset, CompletionsDataset)) else None


def dataset_fingerprint(dataset: Dataset[Any]) -> str:
    """Identify a data set by length, injected passages, and up to 64 items: ``80 items
    (3f786850e387550f)``.
    """
    digest = hashlib.sha256()
    length = len(cast(Sized, dataset))
    for index in range(0, length, -(-length // _NUM_SAMPLES)):
        item = dataset[index]
        for name in ("tokens", "labels"):
            digest.update(np.asarray(item[name], dtype=np.int64).tobytes())
    for part in parts_of(dataset):
        passages = passages_of(part)
        if passages:
            digest.update(json.dumps([passage.values() for passage in passages]).encode())
    return f"{length} items ({digest.hexdigest()[:16]})"


def build_dataloader(
    cfg: FinetuneConfig,
    dataset: Dataset[Any],
    tokenizer: Any,
    run: Run,
    *,
    counts_tokens: bool = False,
) -> DataLoader[Batch]:
    """Build the loader: its order follows from the run's seed and epoch, and processes have equally
    many sequences.

    Mini-batches have ``tokens`` and ``labels``, int64 ``[b, s]``, labels not yet shifted and -100
    where ignored; those of a packed data set are of :func:`~tfidf_tune.data.collate_packed`.
    ``counts_tokens`` adds ``unpadded_tokens``, the tokens with -100 in place of padding, for a
    weighting that ``needs_tokens``.

    Raises:
        SetupError: If ``collate_fn`` does not fit the data set.
    """
    world_size, rank = get_world_size_and_rank()
    sampler = StatefulDistributedSampler(
        dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=cfg.shuffle,
        seed=run.seed,
        drop_last=True,
    )
    collate: Callable[..., Any] = partial(collate_packed, device=run.device)
    if not is_packed(dataset):
        component = find_component("collate_fn", cfg.collate_fn)
        collate = partial(component, padding_idx=tokenizer.pad_id, ignore_idx=IGNORE_INDEX)
    if counts_tokens:
        collate = partial(_with_unpadded_tokens, collate=collate, packed=is_packed(dataset))
    # One item is collated now: a data set or a `collate_fn` of the user may raise anything.
    try:
        batch = collate([dataset[0]])
        tokens = tuple(batch["tokens"].shape)
        labels = tuple(batch["labels"].shape)
        if tokens != labels or len(tokens) != 2:
            raise ValueError(
                f"tokens have the shape {tokens} and labels {labels}, it has to be [b, s] of both"
            )
    except Exception as error:
        raise SetupError(
            f"config: collate_fn: {cfg.collate_fn} makes no batch of tokens and labels from the "
            f"data set's items ({cause_of(error)}): use one that belongs to the data set"
        ) from error
    return DataLoader(
        dataset,
        batch_size=cfg.batch_size,
        sampler=sampler,
        collate_fn=collate,
        # Its own: an epoch's start must not change the random states of training.
        generator=torch.Generator(),
        pin_memory=run.device.type == "cuda",
    )


def _with_unpadded_tokens(
    batch: Sequence[Any], *, collate: Callable[..., Any], packed: bool
) -> dict[str, Any]:
    if packed:
        tokens = torch.stack([unpadded_tokens(row) for row in batch])
    else:
        # The id of padding may be the id of a token, EOS for example; labels are padded with -100.
        all_learned = [{**item, "labels": item["tokens"]} for item in batch]
        tokens = collate(all_learned)["labels"]
    return {**collate(batch), UNPADDED_TOKENS: tokens}


class StepBatches(NamedTuple):
    """The mini-batches of one optimizer step on this process.

    Attributes:
        batches (Sequence[Batch]): with ``tokens`` and shifted ``labels``, int64 ``[b, s]``; shifted
            as well are ``unpadded_tokens``, where the batches have them, and then ``document_ids``.
        num_valid (list[int]): tokens to predict in each.
        num_tokens (int): tokens to predict in the whole step, on all processes.
        num_sequences (int): rows of the whole step, on all processes.
        largest_shapes (list[tuple[int, int]]): most rows and most positions of each mini-batch on
            any process.
        stop (int): number of the signal by which any process was asked to stop, or 0.
    """

    batches: Sequence[Batch]
    num_valid: list[int]
    num_tokens: int
    num_sequences: int
    largest_shapes: list[tuple[int, int]]
    stop: int


def agree_on_step(batches: Sequence[Batch], *, stop: int = 0) -> StepBatches:
    """Shift a step's labels, and agree on its tokens and largest shapes over all processes, on the
    host alone.

    Every process has as many ``batches``, labels not shifted; ``stop`` is a signal that this one
    received, or 0.
    """
    # Two processes with two mini-batches each, the first of which was asked to stop by signal 15:
    #
    #   process 0   [[15, 0, 0], [700, 4, 256], [650, 4, 240]]
    #   process 1   [[ 0, 0, 0], [690, 4, 250], [300, 2, 256]]
    #
    # In the step are 700 + 650 + 690 + 300 tokens to predict and 4 + 4 + 4 + 2 rows; the largest
    # shapes are (4, 256) and (4, 256), and all processes stop.
    batches = [_shifted(batch) for batch in batches]
    numbers = [[stop, 0, 0]]
    for batch in batches:
        labels = batch["labels"]
        numbers.append([int((labels != IGNORE_INDEX).sum()), *labels.shape])
    agreed = gather_tensors(torch.tensor(numbers, device="cpu"))
    largest = agreed.amax(0)[1:].tolist()
    return StepBatches(
        batches=batches,
        num_valid=[valid for valid, _, _ in numbers[1:]],
        num_tokens=int(agreed[:, 1:, 0].sum()),
        num_sequences=int(agreed[:, 1:, 1].sum()),
        largest_shapes=[(int(rows), int(positions)) for _, rows, positions in largest],
        stop=int(agreed[:, 0, 0].max()),
    )


def _shifted(batch: Batch) -> Batch:
    shifted = {"labels": shift_labels(batch["labels"])}
    if UNPADDED_TOKENS in batch:
        shifted[UNPADDED_TOKENS] = shift_tokens(batch[UNPADDED_TOKENS])
        if "document_ids" in batch:
            shifted["document_ids"] = shift_tokens(batch["document_ids"])
    # Pinned where the batch is: from there the copy to a GPU is asynchronous.
    for name, tensor in shifted.items():
        if batch[name].is_pinned():
            shifted[name] = tensor.pin_memory()
    return {**batch, **shifted}


def steps_per_epoch(cfg: FinetuneConfig, dataloader: DataLoader[Batch]) -> int:
    """Return the optimizer steps of an epoch; the last may have fewer sequences."""
    return math.ceil(len(dataloader) / cfg.gradient_accumulation_steps)


def step_batches(
    cfg: FinetuneConfig, dataloader: DataLoader[Batch], *, first_step: int = 1
) -> Iterator[list[Batch]]:
    """Iterate over the mini-batches of each step, epoch after epoch; data before ``first_step`` is
    not read.
    """
    # A run of 10 steps an epoch that resumes at step 14 begins with epoch 1, in which 3 steps are
    # done. With two mini-batches of 4 sequences a step, this process has seen 24 of the epoch, and
    # the sampler passes over them without reading them.
    size = cfg.gradient_accumulation_steps
    first_epoch, done = divmod(first_step - 1, steps_per_epoch(cfg, dataloader))
    sampler = cast(StatefulDistributedSampler, dataloader.sampler)
    for epoch in range(first_epoch, cfg.epochs):
        sampler.set_epoch(epoch)
        if epoch == first_epoch:
            sampler.load_state_dict({"yielded": done * size * cfg.batch_size})
        batches = iter(dataloader)
        while step := list(islice(batches, size)):
            yield step


def step_indices(cfg: FinetuneConfig, dataloader: DataLoader[Batch], step: int) -> list[int]:
    """Return the items of the data set that a step (from 1) was trained on, on all processes,
    ascending.
    """
    epoch, done = divmod(step - 1, steps_per_epoch(cfg, dataloader))
    sampler = cast(StatefulDistributedSampler, dataloader.sampler)
    # Ranks take turns in one order, so that a step is a run of it; what cannot be shared out
    # equally at its end is left out. Nine items on two processes, in mini-batches of 2:
    #
    #   order       5 2 7 0   3 6 1 4   8
    #   process 0   5   7     3   1
    #   process 1     2   0     6   4
    #   step        1         2         left out
    order: DistributedSampler[Any] = DistributedSampler(
        dataloader.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    order.set_epoch(epoch)
    size = cfg.gradient_accumulation_steps * cfg.batch_size * sampler.num_replicas
    num_shared_out = len(sampler) * sampler.num_replicas
    end = min((done + 1) * size, num_shared_out)
    return sorted(islice(order, done * size, end))


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """Copy a mini-batch to the model's device asynchronously, and make the mask of packed rows
    there.
    """
    there = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    if "input_pos" in there and "mask" not in there:
        there["mask"] = packed_mask(there["input_pos"])
    return there
