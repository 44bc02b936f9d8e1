"""Tokenizer, data set and loader of a run: which data a step sees, and what the
processes agree on.
"""

import math
import random
import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.fakes.data import write_rows
from helpers.fakes.tiny_llama import TINY_LLAMA
from helpers.processes.ranks import on_every_rank
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.models.llama2 import llama2

from tfidf_tune.data import embedded_documents
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import (
    FinetuneConfig,
    Run,
    SetupError,
    _data,
    _messages,
    build_dataloader,
    build_dataset,
    build_tokenizer,
    check_config,
    print_data,
    set_special_tokens,
)
from tfidf_tune.training._data import (
    agree_on_step,
    dataset_fingerprint,
    step_batches,
    step_indices,
    steps_per_epoch,
)
from tfidf_tune.weighting import GoldfishWeighting

CPU_RUN = Run(torch.device("cpu"), torch.float32, 0, Path("unused"))


class Numbers(Dataset):
    """Item i is the sequence i, i, ... of a length that varies, so that a batch shows which items
    it is made of.
    """

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return {"tokens": [index] * (3 + index % 3), "labels": [index] * (3 + index % 3)}


@pytest.fixture
def model():
    with torch.device("meta"):
        return llama2(**TINY_LLAMA)


def text_section(text_file, **arguments):
    return {"_component_": "tfidf_tune.data.text_dataset", "source": str(text_file), **arguments}


def torchtune_section(text_file, cache, **arguments):
    return {
        "_component_": "torchtune.datasets.text_completion_dataset",
        "source": "text",
        "data_files": str(text_file),
        "cache_dir": str(cache),
        **arguments,
    }


@pytest.fixture
def build(recipe_config, model):
    """Build the data set of a config's `dataset`, and its loader."""

    def make(dataset, **overrides):
        cfg = check_config(recipe_config(dataset=dataset, **overrides), FinetuneConfig)
        tokenizer = build_tokenizer(cfg, model)
        built = build_dataset(cfg, tokenizer)
        return built, build_dataloader(cfg, built, tokenizer, CPU_RUN)

    return make


def test_several_data_sets_are_mixed(build, text_file, tmp_path):
    (tmp_path / "more.txt").write_text("\n".join(f"{number} zebras" for number in range(200)))
    sections = [
        text_section(tmp_path / "more.txt", packed=True),
        torchtune_section(text_file, tmp_path, packed=True),
    ]

    parts = [build(section)[0] for section in sections]
    mixed, loader = build(sections)

    assert len(mixed) == sum(map(len, parts))
    assert str(mixed[0]) == str(parts[0][0])
    assert str(mixed[len(parts[0])]) == str(parts[1][0])
    assert "mask" in next(iter(loader))
    assert len(build(sections[:1])[0]) == len(parts[0]), "a list of one is that data set"


def test_controls_that_another_data_set_trains_on_are_not_measured(build, tmp_path, capsys):
    cache = {"cache_dir": str(tmp_path)}
    source = write_rows(
        tmp_path / "text.jsonl", [text[:700] for text in embedded_documents("train")[:200]]
    )
    blocks = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": source,
        "block_size": 32,
        **cache,
    }
    held_out, _ = build(blocks | {"holdout": 0.05})
    controls = [passage for passage in held_out.passages if passage.kind == "control"]
    targets = [passage for passage in held_out.passages if passage.kind == "target"]
    with pytest.raises(
        SetupError,
        match=rf"{len(controls)} of {len(controls)} controls of dataset\[0\] .*dataset\[1\]",
    ):
        build([blocks | {"holdout": 0.05}, text_section(source, **cache)])

    some = write_rows(
        tmp_path / "some.jsonl", [passage.text for passage in controls[:3] + targets[:2]]
    )
    mixed, _ = build([blocks | {"holdout": 0.05}, text_section(some, **cache)])
    assert (
        f"3 of {len(controls)} controls of dataset[0] are in the training text of dataset[1]"
        in capsys.readouterr().err
    )
    left = {passage.id: passage for passage in _data.passages_of(mixed._datasets[0])}
    assert {passage.id for passage in controls[:3]}.isdisjoint(left)
    assert len(left) == len(controls) + len(targets) - 3
    for target in targets[:2]:
        assert left[target.id].num_injections == target.num_injections + 1
    for target in targets[2:]:
        assert left[target.id].num_injections == target.num_injections


def test_an_evaluation_of_nothing_and_two_data_sets_of_one_probe_file_are_refused(build, tmp_path):
    source = write_rows(
        tmp_path / "text.jsonl", [text[:700] for text in embedded_documents("train")[:100]]
    )
    blocks = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": source,
        "block_size": 32,
    }
    blocks |= {"cache_dir": str(tmp_path), "probe_file": str(tmp_path / "probe.jsonl")}
    with pytest.raises(SetupError, match="evaluate is true, but the data set has no passages"):
        build(blocks | {"holdout": 0.0}, evaluate=True)
    build(blocks | {"holdout": 0.05}, evaluate=True)
    other = blocks | {
        "source": write_rows(tmp_path / "other.jsonl", embedded_documents("validation")[:50])
    }
    with pytest.raises(
        SetupError,
        match=r"dataset\[0\] and dataset\[1\] both have the probe_file .*: name two files",
    ):
        build([blocks | {"holdout": 0.05}, other | {"holdout": 0.05}])


def test_a_data_set_of_controls_alone_is_described(build, tmp_path, capsys):
    """What is left of the text repeats a few tokens: it has no targets."""
    words = " ".join(embedded_documents("train")[:50]).split()
    rows = [" ".join(random.Random(seed).sample(words, 10)) for seed in range(12)]
    source = write_rows(tmp_path / "text.jsonl", [*rows, *["0 " * 200] * 60])
    section = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": source,
        "block_size": 32,
    }
    section |= {
        "holdout": 0.4,
        "cache_dir": str(tmp_path),
        "probe_file": str(tmp_path / "probe.jsonl"),
    }
    dataset, _ = build(section, evaluate=True)
    kinds = {passage.kind for passage in dataset.passages}
    assert kinds == {"control"}
    print_data(SimpleNamespace(epochs=1, max_steps=None), dataset, total_steps=1)
    number = len(dataset.passages)
    assert (
        f"; no targets, so that recitation is not measured; {number} controls of 32 tokens, held "
        "out" in capsys.readouterr().err
    )


def packed_without_a_key(tokenizer, *, max_seq_len):
    """A user's own builder, of whose packing the config says nothing."""
    return PackedDataset(
        [Numbers()[index] for index in range(len(Numbers()))], max_seq_len=max_seq_len
    )


@pytest.mark.parametrize(
    ("dataset", "overrides", "message"),
    [
        (["text", "no source"], {}, r"dataset\[1\]: .*'source'"),
        (["rows of 16", "text"], {}, "config: dataset: .*mix of packed and non-packed"),
        (["rows of 16", "rows of 12"], {}, r"packed rows of \[12, 16\] tokens"),
    ],
)
def test_data_sets_that_do_not_fit_are_refused_before_work_begins(
    build, monkeypatch, text_file, dataset, overrides, message
):
    monkeypatch.setitem(sys.modules, "users_data", SimpleNamespace(packed=packed_without_a_key))
    sections = {
        "rows of 12": {"_component_": "users_data.packed", "max_seq_len": 12},
        "rows of 16": {"_component_": "users_data.packed", "max_seq_len": 16},
        "text": text_section(text_file),
        "no source": {"_component_": "tfidf_tune.data.text_dataset"},
    }
    section = (
        sections[dataset] if isinstance(dataset, str) else [sections[name] for name in dataset]
    )

    with pytest.raises(SetupError, match=message):
        build(section, **overrides)


def test_a_data_set_is_identified_by_its_contents():
    def changed(index, **values):
        found = [Numbers()[i] for i in range(22)]
        found[index] = found[index] | values
        return found

    known = dataset_fingerprint(Numbers())
    assert re.fullmatch(r"22 items \([0-9a-f]{16}\)", known), "the number of items is readable"
    assert dataset_fingerprint(changed(0, tokens=torch.tensor([0, 0, 0]))) == known, (
        "tensors as lists"
    )
    others = [
        changed(0)[:21],
        changed(3, tokens=[3, 3, 9]),
        changed(21, tokens=[21] * 2 + [0]),
        changed(3, labels=[-100, 3, 3]),
        [*changed(0)[:3], Numbers()[4], Numbers()[3], *changed(0)[5:]],
    ]
    assert len({known, *map(dataset_fingerprint, others)}) == 6


def test_special_tokens_are_passed_to_the_objective():
    loss = WeightedCrossEntropyLoss(GoldfishWeighting(k=2, h=1))
    labels = torch.randint(9, (8, 256), generator=torch.Generator().manual_seed(0))
    set_special_tokens(loss, SimpleNamespace())
    assert set(labels[loss.weighting(labels) == 0].tolist()) == set(range(9))

    set_special_tokens(
        loss, SimpleNamespace(bos_id=None, eos_id=5, pad_id=-1, special_tokens={"<|a|>": 7})
    )
    assert set(labels[loss.weighting(labels) == 0].tolist()) == {0, 1, 2, 3, 4, 6, 8}


# ---- the mini-batches of a step


def make(batch_size, accumulation, shuffle, *, seed=0):
    """A config, and a loader of Numbers."""
    cfg = SimpleNamespace(
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        shuffle=shuffle,
        epochs=3,
        collate_fn="torchtune.data.padded_collate_sft",
    )
    tokenizer = SimpleNamespace(pad_id=0)
    run = replace(CPU_RUN, seed=seed)
    return cfg, build_dataloader(cfg, Numbers(), tokenizer, run)


def items(steps):
    """Items of each mini-batch of each step."""
    return [[batch["tokens"][:, 0].tolist() for batch in step] for step in steps]


def joined(lists):
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "shuffle", "seed"),
    [(1, 1, False, 0), (3, 1, True, 5), (3, 2, True, 0)],
)
def test_steps_from_any_step_on_are_the_rest_of_the_run(batch_size, accumulation, shuffle, seed):
    cfg, loader = make(batch_size, accumulation, shuffle, seed=seed)
    random_state = torch.get_rng_state()
    every = items(step_batches(cfg, loader))
    per_epoch = math.ceil(22 / (batch_size * accumulation))
    assert len(every) == 3 * per_epoch == 3 * steps_per_epoch(cfg, loader)

    for first_step in range(1, len(every) + 2):  # of a loader that was used before
        assert items(step_batches(cfg, loader, first_step=first_step)) == every[first_step - 1 :], (
            first_step
        )
    assert torch.equal(torch.get_rng_state(), random_state), (
        "the order of data must not change dropout"
    )

    # 22 = 3 x (3 + 3) + (3 + 1) = 7 x 3 + 1: the last step of an epoch has what is over.
    complete = [batch_size] * accumulation
    last = {1: [1], 3: [1], 6: [3, 1]}[batch_size * accumulation]
    assert [[len(batch) for batch in step] for step in every] == (
        [complete] * (per_epoch - 1) + [last]
    ) * 3
    epochs = [every[start : start + per_epoch] for start in range(0, len(every), per_epoch)]
    for epoch in epochs:
        seen = joined(joined(epoch))
        assert sorted(seen) == list(range(22))
        assert (seen == sorted(seen)) == (not shuffle)
    assert (epochs[0] == epochs[1]) == (not shuffle), "each epoch has its own order"


@pytest.mark.parametrize("num_processes", [2, 4, 5])
def test_processes_train_on_equally_many_items_and_a_line_says_what_is_left_out(
    num_processes, monkeypatch, capsys
):
    steps = []
    for rank in range(num_processes):
        monkeypatch.setattr(
            _data, "get_world_size_and_rank", lambda rank=rank: (num_processes, rank)
        )
        cfg, loader = make(2, 2, shuffle=False)
        steps.append(items(step_batches(cfg, loader)))
    assert len({str([list(map(len, step)) for step in of_rank]) for of_rank in steps}) == 1
    for number in range(1, len(steps[0]) + 1):
        seen = joined(joined(of_rank[number - 1] for of_rank in steps))
        assert step_indices(cfg, loader, number) == sorted(seen)
    per_epoch = steps_per_epoch(cfg, loader)
    left_out = 22 % num_processes
    first_epoch = joined(of_rank[:per_epoch] for of_rank in steps)
    assert len(joined(joined(first_epoch))) == 22 - left_out

    monkeypatch.setattr(_messages, "get_world_size_and_rank", lambda: (num_processes, 0))
    print_data(SimpleNamespace(epochs=3, max_steps=None), Numbers(), 3 * per_epoch)
    assert (f"; {left_out} left out of each epoch" in capsys.readouterr().err) == (left_out > 0)


@pytest.mark.parametrize(("accumulation", "shuffle", "seed"), [(1, False, 0), (2, True, 5)])
def test_the_items_of_a_step_are_found_without_disturbing_the_loader(accumulation, shuffle, seed):
    cfg, loader = make(3, accumulation, shuffle, seed=seed)
    expected = items(step_batches(cfg, loader))

    found = []
    for number, step in enumerate(step_batches(cfg, loader), start=1):
        found += items([step])
        assert step_indices(cfg, loader, number) == sorted(joined(found[-1]))
        step_indices(cfg, loader, 1)

    assert found == expected


def batch(labels):
    labels = torch.tensor(labels)
    return {"tokens": labels.clamp_min(0), "labels": labels}


def steps_of_a_rank(rank):
    """Two mini-batches of different shapes on each rank."""
    first = batch([[9] * (3 + rank)] * (2 - rank))
    second = batch([[rank, 5, 6]])
    agreed = agree_on_step([first, second], stop=15 * rank)
    assert (agreed.num_tokens, agreed.stop) == (4 + 3 + 2 + 2, 15)
    return agreed.largest_shapes


def test_the_processes_agree_on_the_largest_shapes(tmp_path):
    assert on_every_rank(2, tmp_path, steps_of_a_rank) == [[(2, 4), (1, 3)]] * 2
