"""The order and shape of the batches that a run is trained on."""

import json
import re
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_llama import TINY_LLAMA
from torchtune.datasets import PackedDataset
from torchtune.models.llama2 import llama2

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import (
    FinetuneConfig,
    Run,
    SetupError,
    build_dataloader,
    build_dataset,
    build_loss,
    build_tokenizer,
    check_config,
    set_special_tokens,
)
from tfidf_tune.training._batches import step_batches
from tfidf_tune.training._data import dataset_fingerprint, longest_sequence
from tfidf_tune.weighting import GoldfishWeighting, shift_labels

TOKENIZER = SimpleNamespace(pad_id=0)
CPU_RUN = Run(torch.device("cpu"), torch.float32, 0, Path("unused"))


class Numbers(torch.utils.data.Dataset):
    """Item i is the sequence i, i, ... of a length that varies."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return {"tokens": [index] * (3 + index % 3), "labels": [index] * (3 + index % 3)}


def make_loader(recipe_config, *, seed=0, **overrides):
    cfg = check_config(recipe_config(**overrides), FinetuneConfig)
    run = replace(CPU_RUN, seed=seed)
    return cfg, build_dataloader(cfg, Numbers(), TOKENIZER, run)


def order(loader, epoch=0):
    loader.sampler.set_epoch(epoch)
    return [batch["tokens"][:, 0].tolist() for batch in loader]


def test_the_order_follows_from_the_seed(recipe_config):
    orders = [order(make_loader(recipe_config, seed=seed)[1]) for seed in (0, 0, 1)]

    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_each_epoch_has_an_order_of_its_own(recipe_config):
    cfg, loader = make_loader(recipe_config, epochs=2)

    seen = [batch["tokens"][:, 0].tolist() for [batch] in step_batches(cfg, loader)]

    assert seen == order(loader, 0) + order(loader, 1)
    assert order(loader, 0) != order(loader, 1)


def test_without_shuffling_the_order_is_that_of_the_data_set(recipe_config):
    _, loader = make_loader(recipe_config, shuffle=False)

    assert order(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15], [16, 17, 18, 19]]


def test_a_last_batch_that_is_not_full_is_left_out(recipe_config):
    _, loader = make_loader(recipe_config)

    assert [len(batch["tokens"]) for batch in loader] == [4] * 5


def test_short_sequences_are_padded_and_their_padding_is_ignored(recipe_config):
    _, loader = make_loader(recipe_config, shuffle=False)

    batch = next(islice(loader, 1))

    assert batch["tokens"].tolist() == [[0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [2, 2, 2, 2, 2], [3, 3, 3, 0, 0]]
    assert batch["labels"].tolist()[3] == [3, 3, 3, -100, -100]


@pytest.fixture
def model():
    with torch.device("meta"):
        return llama2(**TINY_LLAMA)


def test_a_tokenizer_that_allows_more_than_the_model_is_refused(recipe_config, model):
    cfg = check_config(recipe_config(**{"tokenizer.max_seq_len": 65}), FinetuneConfig)

    with pytest.raises(SetupError, match="tokenizer.max_seq_len is 65, the model takes at most 64: lower it"):
        build_tokenizer(cfg, model)


def test_a_tokenizer_without_a_limit_gets_the_models(recipe_config, model):
    """Else torchtune's data sets would hand over longer texts, which the model refuses in the middle of the run."""
    assert build_tokenizer(check_config(recipe_config(), FinetuneConfig), model).max_seq_len == 64


def test_the_default_block_size_is_held_against_the_models_limit_too(recipe_config, model, text_file):
    dataset = {"_component_": "tfidf_tune.data.text_blocks_dataset", "source": str(text_file)}
    cfg = check_config(recipe_config(dataset=dataset), FinetuneConfig)

    with pytest.raises(SetupError, match="block_size is 256, above max_seq_len 64, the tokenizer's own or the model's"):
        build_dataset(cfg, build_tokenizer(cfg, model))


def text_section(text_file, **arguments):
    return {"_component_": "tfidf_tune.data.text_dataset", "source": str(text_file), **arguments}


def torchtune_section(text_file, cache, **arguments):
    return {
        "_component_": "torchtune.datasets.text_completion_dataset", "source": "text", "data_files": str(text_file),
        "cache_dir": str(cache), **arguments,
    }  # fmt: skip


@pytest.fixture
def build(recipe_config, model):
    """Build the data set of a config's `dataset`, and its loader."""

    def make(dataset, **overrides):
        cfg = check_config(recipe_config(dataset=dataset, **overrides), FinetuneConfig)
        tokenizer = build_tokenizer(cfg, model)
        built = build_dataset(cfg, tokenizer)
        return built, build_dataloader(cfg, built, tokenizer, CPU_RUN)

    return make


def documents_of(batch):
    """The documents of a packed batch with their shifted labels, padding left out."""
    shifted = shift_labels(batch["labels"])
    found = []
    for tokens, labels, ids in zip(batch["tokens"], shifted, batch["document_ids"], strict=True):
        for document in ids.unique():
            place = ids == document
            if (labels[place] != -100).any():
                found.append((tokens[place].tolist(), labels[place].tolist()))
    return found


@pytest.mark.parametrize("torchtunes", [False, True])
def test_a_packed_data_set_gives_batches_that_keep_documents_apart(build, text_file, tmp_path, torchtunes):
    """torchtune cuts each document at 63 tokens, splits it over rows, and leaves its last token to the next."""
    section = torchtune_section(text_file, tmp_path) if torchtunes else text_section(text_file, max_seq_len=20)

    dataset, loader = build(section | {"packed": True}, shuffle=False)

    batch = next(iter(loader))
    assert len(dataset) > 10
    assert batch["tokens"].shape == batch["document_ids"].shape == batch["input_pos"].shape == (4, 64)
    assert batch["mask"].shape == (4, 64, 64)
    for tokens, labels in documents_of(batch):
        assert labels == [*tokens[1:], -100]
    assert len(documents_of(batch)) > 4


QUESTION, ANSWER = "what did the sailor watch?", "the harbour"


@pytest.mark.parametrize(
    ("builder", "row"),
    [
        ({"_component_": "torchtune.datasets.instruct_dataset"}, {"input": QUESTION, "output": ANSWER}),
        ({"_component_": "torchtune.datasets.chat_dataset", "conversation_column": "turns",
          "conversation_style": "openai"},
         {"turns": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}),
    ],
)  # fmt: skip
def test_torchtunes_conversations_may_be_packed(build, tmp_path, builder, row):
    """Their prompts are masked; each answer is learnt as in a row of its own."""
    (tmp_path / "rows.json").write_text(json.dumps([row] * 40))
    files = {"source": "json", "data_files": str(tmp_path / "rows.json"), "cache_dir": str(tmp_path / "cache")}
    alone = build({**builder, **files, "train_on_input": False})[0][0]

    dataset, loader = build({**builder, **files, "train_on_input": False, "packed": True})

    documents = documents_of(next(iter(loader)))
    assert len(documents) > 4
    assert -100 in alone["labels"]
    for tokens, labels in documents:
        assert tokens == alone["tokens"]
        assert labels == [*alone["labels"][1:], -100]
    assert len(dataset) < 40


def test_what_is_longest_in_a_packed_data_set_is_a_row(build, text_file):
    assert longest_sequence(build(text_section(text_file, packed=True))[0]) == 64


@pytest.mark.parametrize("packed", [False, True])
def test_several_data_sets_are_mixed(build, text_file, tmp_path, packed):
    (tmp_path / "more.txt").write_text("\n".join(f"{number} zebras" for number in range(200)))
    sections = [
        text_section(tmp_path / "more.txt", packed=packed),
        torchtune_section(text_file, tmp_path, packed=packed),
    ]

    parts = [build(section)[0] for section in sections]
    mixed, loader = build(sections)

    assert len(mixed) == sum(map(len, parts))
    assert str(mixed[0]) == str(parts[0][0])
    assert str(mixed[len(parts[0])]) == str(parts[1][0])
    assert ("mask" in next(iter(loader))) == packed


def test_a_list_of_one_is_that_data_set(build, text_file):
    [alone, in_a_list] = [build(dataset)[0] for dataset in (text_section(text_file), [text_section(text_file)])]

    assert [*map(str, (in_a_list[i] for i in range(9)))] == [*map(str, (alone[i] for i in range(9)))]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (["x"], r"dataset\[0\] has to be a section with `_component_`$"),
        ("x", "dataset has to be a section with `_component_`, or a list of such"),
        ([{"_component_": "tfidf_tune.data.text_dataset", "source": "a", "sourc": 1}],
         r"dataset\[0\]: .*text_dataset has no argument 'sourc'; did you mean 'source'"),
        ([{"_component_": "tfidf_tune.data.text_dataset"}], r"dataset\[0\]: .*text_dataset needs source"),
        ({"_component_": "tfidf_tune.data.text_blocks_dataset", "source": "a", "packed": True},
         "text_blocks_dataset has no argument 'packed'"),
    ],
)  # fmt: skip
def test_data_sets_that_cannot_be_are_refused_by_the_config(recipe_config, dataset, message):
    with pytest.raises(SetupError, match=message):
        check_config(recipe_config(dataset=dataset), FinetuneConfig)


def packed_in_secret(tokenizer, *, max_seq_len):
    """A user's own builder, of whose packing the config says nothing."""
    return PackedDataset([Numbers()[index] for index in range(len(Numbers()))], max_seq_len=max_seq_len)


@pytest.mark.parametrize(
    ("dataset", "overrides", "message"),
    [
        (["rows of 16", "text"], {}, "config: dataset: .*mix of packed and non-packed"),
        (["rows of 16", "rows of 12"], {}, r"packed rows of \[12, 16\] tokens cannot be mixed: give them one length"),
        ("rows of 16", {"collate_fn": "torchtune.data.padded_collate_dpo"},
         "collate_fn is torchtune.data.padded_collate_dpo, but the data set is packed, .*: leave collate_fn out"),
        ("rows of 16", {"batch_size": 8}, r"the data set has 7 packed rows, one step takes .* = 8"),
        (["text", "missing"], {}, r"dataset\[1\]: no such file or folder"),
    ],
)  # fmt: skip
def test_data_sets_that_do_not_fit_are_refused_before_work_begins(
    build, monkeypatch, tmp_path, text_file, dataset, overrides, message
):
    monkeypatch.setitem(sys.modules, "users_data", SimpleNamespace(packed_in_secret=packed_in_secret))
    sections = {
        "rows of 12": {"_component_": "users_data.packed_in_secret", "max_seq_len": 12},
        "rows of 16": {"_component_": "users_data.packed_in_secret", "max_seq_len": 16},
        "text": text_section(text_file),
        "missing": text_section(tmp_path / "missing.txt"),
    }
    section = sections[dataset] if isinstance(dataset, str) else [sections[name] for name in dataset]

    with pytest.raises(SetupError, match=message):
        build(section, **overrides)


def test_a_loss_that_ignores_other_labels_than_data_sets_mark_is_refused(recipe_config):
    with pytest.raises(SetupError, match="ignore_index is 0: ignored labels are marked by -100"):
        build_loss(check_config(recipe_config(**{"loss.ignore_index": 0}), FinetuneConfig))


def items(number=22, **changes):
    """Items as :class:`Numbers` has them, some replaced: ``items(_3={...})``."""
    found = [Numbers()[index] for index in range(number)]
    for name, item in changes.items():
        found[int(name[1:])] = item
    return found


def test_a_data_set_is_known_by_its_contents():
    """The number of items is there to be read."""
    known = dataset_fingerprint(Numbers())
    one = items()[3]

    assert re.fullmatch(r"22 items \([0-9a-f]{16}\)", known)
    assert dataset_fingerprint(items()) == known
    assert (
        dataset_fingerprint([{name: torch.tensor(value) for name, value in item.items()} for item in items()]) == known
    )
    others = [
        items(21),
        items(_3=one | {"tokens": [*one["tokens"][:-1], 9]}),
        items(_21=items()[21] | {"tokens": [0] * len(items()[21]["tokens"])}),
        items(_3=one | {"labels": [-100, *one["labels"][1:]]}),
        items(_3=items()[4], _4=one),
    ]
    assert len({known, *map(dataset_fingerprint, others)}) == 6


@pytest.mark.parametrize("number", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_a_large_data_set_is_known_by_64_items_at_most_that_lie_evenly(number):
    asked = []

    class Asked(Numbers):
        def __len__(self):
            return number

        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    dataset_fingerprint(Asked())

    assert min(number, 32) <= len(asked) <= 64
    assert asked[0] == 0
    assert number - asked[-1] <= max(1, number // 32)


@pytest.mark.parametrize("torchtunes", [False, True])
def test_a_packed_data_set_is_known_by_its_contents_too(build, text_file, tmp_path, torchtunes):
    section = (
        torchtune_section(text_file, tmp_path, packed=True) if torchtunes else text_section(text_file, packed=True)
    )
    dataset, _ = build(section)
    rows = [dataset[index] for index in range(len(dataset))]
    known = dataset_fingerprint(dataset)
    assert isinstance(rows[0]["tokens"], torch.Tensor)
    assert dataset_fingerprint(rows) == known

    rows[0] = rows[0] | {"tokens": rows[0]["tokens"].flip(0)}

    assert dataset_fingerprint(rows) != known


def test_special_tokens_are_named_to_the_objective():
    loss = WeightedCrossEntropyLoss(GoldfishWeighting(k=2, h=1))
    tokenizer = SimpleNamespace(bos_id=None, eos_id=5, pad_id=-1, special_tokens={"<|a|>": 7})
    set_special_tokens(loss, tokenizer)
    labels = torch.randint(9, (8, 256), generator=torch.Generator().manual_seed(0))
    weights = loss.weighting(labels)
    assert set(labels[weights == 0].tolist()) == {0, 1, 2, 3, 4, 6, 8}


def test_a_tokenizer_without_special_tokens_makes_no_exception():
    loss = WeightedCrossEntropyLoss(GoldfishWeighting(k=2, h=1))
    set_special_tokens(loss, SimpleNamespace())
    assert not loss.weighting.special_tokens.among(torch.arange(-1, 9)).any()
