"""The order and shape of the batches that a run is trained on."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_llama import TINY_LLAMA
from torchtune.models.llama2 import llama2

from tfidf_tune.training import (
    FinetuneConfig,
    Run,
    SetupError,
    build_dataloader,
    build_dataset,
    build_loss,
    build_tokenizer,
    check_config,
    train,
)

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


def test_each_epoch_has_an_order_of_its_own(recipe_config, monkeypatch):
    cfg, loader = make_loader(recipe_config, epochs=2)
    seen = []
    monkeypatch.setattr(
        "tfidf_tune.training._train.train_step",
        lambda model, loss, optimizer, batches, **_: (
            seen.append(batches[0]["tokens"][:, 0].tolist()) or SimpleNamespace(metrics={}, num_tokens=0, skipped=False)
        ),
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    progress = SimpleNamespace(start=lambda: None, step=lambda *_: None, restart_clock=lambda: None)

    train(
        cfg, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), optimizer, None, None, loader,
        total_steps=10, run=CPU_RUN, progress=progress, save=lambda folder: None,
    )  # fmt: skip

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


def test_packing_is_refused(recipe_config, model, text_file):
    dataset = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "text", "packed": True}
    cfg = check_config(recipe_config(dataset=dataset), FinetuneConfig)

    with pytest.raises(SetupError, match="packed is true; a row of several documents would count as one sequence"):
        build_dataset(cfg, build_tokenizer(cfg, model))


def test_a_loss_that_ignores_other_labels_than_data_sets_mark_is_refused(recipe_config):
    with pytest.raises(SetupError, match="ignore_index is 0; data sets mark ignored labels by -100"):
        build_loss(check_config(recipe_config(**{"loss.ignore_index": 0}), FinetuneConfig))
