"""The order and shape of the batches that a run is trained on."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_llama import TINY_LLAMA
from torchtune.models.llama2 import llama2

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.training import FinetuneConfig, Run, build_dataloader, build_dataset, check_config, train

TOKENIZER = SimpleNamespace(pad_id=0)


class Numbers(torch.utils.data.Dataset):
    """Item i is the sequence i, i, ... of a length that varies."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return {"tokens": [index] * (3 + index % 3), "labels": [index] * (3 + index % 3)}


def make_loader(recipe_config, *, seed=0, **overrides):
    cfg = check_config(recipe_config(**overrides), FinetuneConfig)
    run = Run(torch.device("cpu"), torch.float32, seed, Path("unused"))
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
            seen.append(batches[0]["tokens"][:, 0].tolist()) or SimpleNamespace(metrics={}, num_tokens=0)
        ),
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    progress = SimpleNamespace(step=lambda *_: None, restart_clock=lambda: None)

    train(
        cfg, torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), optimizer, None, loader,
        device=torch.device("cpu"), progress=progress, save=lambda name: None,
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


def test_a_tokenizer_that_allows_more_than_the_model_is_refused(recipe_config, tiny_checkpoint):
    cfg = check_config(recipe_config(), FinetuneConfig)
    with torch.device("meta"):
        model = llama2(**TINY_LLAMA)

    with pytest.raises(ValueError, match="tokenizer.max_seq_len is 65, the model takes at most 64 tokens: lower it"):
        build_dataset(cfg, hf_tokenizer(str(tiny_checkpoint), max_seq_len=65), model)
