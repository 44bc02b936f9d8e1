"""Which data a step sees, from any step of a run on, and what the processes agree on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import on_every_rank
from torch.utils.data import Dataset

from tfidf_tune.training import Run, build_dataloader
from tfidf_tune.training._data import agree_on_step, step_batches, step_indices, steps_per_epoch, to_device


class Numbers(Dataset):
    """Item i is the number i, so that a batch shows which items it is made of."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 20

    def __getitem__(self, index):
        self.read.append(index)
        return {"tokens": [index], "labels": [index]}


def make(batch_size, accumulation, shuffle, *, seed=0):
    cfg = SimpleNamespace(
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        shuffle=shuffle,
        epochs=3,
        collate_fn="torchtune.data.padded_collate_sft",
    )
    dataset = Numbers()
    run = Run(torch.device("cpu"), torch.float32, seed, Path("unused"))
    return cfg, build_dataloader(cfg, dataset, SimpleNamespace(pad_id=0), run), dataset


def items(steps):
    """Items of each mini-batch of each step."""
    return [[batch["tokens"].flatten().tolist() for batch in step] for step in steps]


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "shuffle", "seed"), [(1, 1, False, 0), (3, 1, True, 5), (3, 2, True, 0)]
)
def test_steps_from_any_step_on_are_the_rest_of_the_run(batch_size, accumulation, shuffle, seed):
    cfg, loader, _ = make(batch_size, accumulation, shuffle, seed=seed)
    random_state = torch.get_rng_state()
    every = items(step_batches(cfg, loader))
    per_epoch = 20 // (batch_size * accumulation)
    assert len(every) == 3 * per_epoch == 3 * steps_per_epoch(cfg, loader)

    for first_step in range(1, len(every) + 2):  # of a loader that was used before
        assert items(step_batches(cfg, loader, first_step=first_step)) == every[first_step - 1 :], first_step
    assert torch.equal(torch.get_rng_state(), random_state), "the order of data must not change dropout"

    assert {(len(step), *map(len, step)) for step in every} == {(accumulation, *[batch_size] * accumulation)}
    epochs = [every[start : start + per_epoch] for start in range(0, len(every), per_epoch)]
    for epoch in epochs:
        seen = [item for step in epoch for batch in step for item in batch]
        assert len(seen) == len(set(seen)) == per_epoch * batch_size * accumulation
        assert (seen == sorted(seen)) == (not shuffle)
    assert (epochs[0] == epochs[1]) == (not shuffle), "each epoch has its own order"


def test_items_of_skipped_steps_are_not_read():
    cfg, loader, dataset = make(2, 2, shuffle=True)
    dataset.read.clear()

    next(step_batches(cfg, loader, first_step=4))

    assert len(dataset.read) == 4


@pytest.mark.parametrize(("accumulation", "shuffle", "seed"), [(1, False, 0), (2, True, 5)])
def test_the_items_of_a_step_are_found_without_disturbing_the_loader(accumulation, shuffle, seed):
    cfg, loader, _ = make(3, accumulation, shuffle, seed=seed)
    expected = items(step_batches(cfg, loader))

    found = []
    for number, step in enumerate(step_batches(cfg, loader), start=1):
        found += items([step])
        assert step_indices(cfg, loader, number) == sorted(item for batch in found[-1] for item in batch)
        step_indices(cfg, loader, 1)

    assert found == expected


def batch(labels):
    labels = torch.tensor(labels)
    return {"tokens": labels.clamp_min(0), "labels": labels}


def test_tokens_to_predict_are_counted_without_the_first_of_a_row():
    agreed = agree_on_step([batch([[1, 2, -100], [3, -100, -100]]), batch([[-100, 4, 5, 6]])], stop=15)

    assert (agreed.num_valid, agreed.num_tokens, agreed.stop) == ([1, 3], 4, 15)
    assert agreed.largest_shapes == [(2, 3), (1, 4)]
    assert agree_on_step([], stop=2) == ([], [], 0, [], 2), "after the last step only the signal is agreed on"


def test_all_tokens_are_shifted_with_their_documents():
    counted = batch([[-100, 2, -100, 4]]) | {"unpadded_tokens": torch.tensor([[1, 2, 3, 4]])}
    packed = counted | {"document_ids": torch.tensor([[0, 0, 1, 1]])}

    alone, packed = agree_on_step([counted, packed]).batches

    for shifted in (alone, packed):
        assert shifted["tokens"].tolist() == [[0, 2, 0, 4]], "what the model reads"
        assert shifted["labels"].tolist() == [[2, -100, 4, -100]]
        assert shifted["unpadded_tokens"].tolist() == [[2, 3, 4, 1]]
    assert packed["document_ids"].tolist() == [[0, 1, 1, 0]]


def steps_of_a_rank(rank):
    """Two mini-batches of different shapes on each rank."""
    first, second = batch([[9] * (3 + rank)] * (2 - rank)), batch([[rank, 5, 6]])
    agreed = agree_on_step([first, second], stop=15 * rank)
    assert (agreed.num_tokens, agreed.stop) == (4 + 3 + 2 + 2, 15)
    return agreed.largest_shapes


def test_the_processes_agree_on_the_largest_shapes(tmp_path):
    assert on_every_rank(2, tmp_path, steps_of_a_rank) == [[(2, 4), (1, 3)]] * 2


def test_a_batch_moves_with_its_mask_of_any_kind():
    class Mask:
        def to(self, device):
            return f"mask on {device}"

    moved = to_device({"tokens": torch.ones(2), "mask": Mask()}, torch.device("meta"))

    assert moved["tokens"].device.type == "meta"
    assert moved["mask"] == "mask on meta"
