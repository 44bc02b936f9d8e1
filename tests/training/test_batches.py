"""Which data a step sees, from any step of a run on."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import on_every_rank
from torch.utils.data import Dataset

from tfidf_tune.training import Run, agree_on_step, build_dataloader
from tfidf_tune.training._batches import step_batches, step_indices, steps_per_epoch, to_device


class Numbers(Dataset):
    """Item i is the number i, so that a batch tells which items it is made of."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        return {"tokens": [index], "labels": [index]}


SHAPES = [(size, accumulation, shuffle) for size in (1, 3) for accumulation in (1, 2) for shuffle in (False, True)]


def make(batch_size, accumulation, shuffle, *, length=20, seed=0, epochs=3):
    cfg = SimpleNamespace(
        batch_size=batch_size,
        gradient_accumulation_steps=accumulation,
        shuffle=shuffle,
        epochs=epochs,
        collate_fn="torchtune.data.padded_collate_sft",
    )
    dataset = Numbers(length)
    run = Run(torch.device("cpu"), torch.float32, seed, Path("unused"))
    return cfg, build_dataloader(cfg, dataset, SimpleNamespace(pad_id=0), run), dataset


def items(steps):
    """Items of each mini-batch of each step."""
    return [[batch["tokens"].flatten().tolist() for batch in step] for step in steps]


@pytest.mark.parametrize(("batch_size", "accumulation", "shuffle"), SHAPES)
def test_from_any_step_on_it_is_the_tail_of_the_whole(batch_size, accumulation, shuffle):
    cfg, loader, _ = make(batch_size, accumulation, shuffle)
    whole = items(step_batches(cfg, loader))
    per_epoch = 20 // (batch_size * accumulation)
    assert len(whole) == 3 * per_epoch == 3 * steps_per_epoch(cfg, loader)

    for first_step in range(1, len(whole) + 2):
        cfg, loader, _ = make(batch_size, accumulation, shuffle)
        assert items(step_batches(cfg, loader, first_step=first_step)) == whole[first_step - 1 :], first_step


@pytest.mark.parametrize(("batch_size", "accumulation", "shuffle"), SHAPES)
def test_a_step_is_so_many_batches_and_no_item_comes_twice_in_an_epoch(batch_size, accumulation, shuffle):
    cfg, loader, _ = make(batch_size, accumulation, shuffle)
    whole = items(step_batches(cfg, loader))
    per_epoch = steps_per_epoch(cfg, loader)
    epochs = [whole[start : start + per_epoch] for start in range(0, len(whole), per_epoch)]

    assert {(len(step), *map(len, step)) for step in whole} == {(accumulation, *[batch_size] * accumulation)}
    for epoch in epochs:
        seen = [item for step in epoch for batch in step for item in batch]
        assert len(seen) == len(set(seen)) == per_epoch * batch_size * accumulation
        assert (seen == sorted(seen)) == (not shuffle)
    assert (epochs[0] == epochs[1]) == (not shuffle), "each epoch has an order of its own"


def test_what_was_done_is_not_read_again():
    cfg, loader, dataset = make(2, 2, shuffle=True)
    dataset.read.clear()

    next(step_batches(cfg, loader, first_step=4))

    assert len(dataset.read) == 4


def test_a_loader_may_be_used_again():
    """A later epoch begins at its start, and so does another look at the same loader."""
    cfg, loader, _ = make(3, 1, shuffle=True)
    whole = items(step_batches(cfg, loader))

    assert items(step_batches(cfg, loader, first_step=5)) == whole[4:]
    assert items(step_batches(cfg, loader)) == whole


def test_the_order_of_data_draws_nothing_from_the_random_state():
    """Dropout goes on as if no epoch had begun."""
    cfg, loader, _ = make(2, 1, shuffle=True)
    before = torch.get_rng_state()

    list(step_batches(cfg, loader))

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(("batch_size", "accumulation", "shuffle"), SHAPES)
def test_the_items_of_a_step_are_those_that_it_was_given(batch_size, accumulation, shuffle, seed):
    cfg, loader, _ = make(batch_size, accumulation, shuffle, seed=seed)
    whole = items(step_batches(cfg, loader))

    for step, batches in enumerate(whole, start=1):
        assert step_indices(cfg, loader, step) == sorted(item for batch in batches for item in batch)


def test_telling_items_does_not_disturb_the_loader():
    cfg, loader, _ = make(3, 1, shuffle=True)
    expected = items(step_batches(cfg, loader))

    found = []
    for number, step in enumerate(step_batches(cfg, loader), start=1):
        found += items([step])
        step_indices(cfg, loader, number)
        step_indices(cfg, loader, 1)

    assert found == expected


def batch(labels):
    labels = torch.tensor(labels)
    return {"tokens": labels.clamp_min(0), "labels": labels}


def test_tokens_to_predict_are_counted_without_the_first_of_a_row():
    agreed = agree_on_step([batch([[1, 2, -100], [3, -100, -100]]), batch([[-100, 4, 5, 6]])], stop=15)

    assert agreed.num_valid == [1, 3]
    assert agreed.num_tokens == 4
    assert agreed.gathered == [None, None]
    assert agreed.stop == 15


def test_one_process_has_no_labels_to_gather():
    assert agree_on_step([batch([[7, 7, 0, 3]])], sync_labels=True).gathered == [None]


def steps_of_a_rank(rank):
    """Two mini-batches of different shapes on each rank, the second with documents."""
    first, second = batch([[9] * (3 + rank)] * (2 - rank)), batch([[rank, 5, 6]])
    second["document_ids"] = torch.tensor([[0, 0, 1 + rank]])
    assert agree_on_step([first, second]).gathered == [None, None]
    gathered = agree_on_step([first, second], sync_labels=True).gathered
    return [(each.labels, each.document_ids, str(each.own)) for each in gathered]


def test_the_labels_of_all_processes_are_gathered_shifted_and_padded(tmp_path):
    ranks = on_every_rank(2, tmp_path, steps_of_a_rank)
    for rank, ((labels, document_ids, own), second) in enumerate(ranks):
        assert labels.tolist() == [[9, 9, -100, -100]] * 2 + [[9, 9, 9, -100], [-100] * 4]
        assert document_ids is None
        assert own == str((slice(2 * rank, 2 * rank + 2 - rank), slice(3 + rank)))
        labels, document_ids, own = second
        assert labels.tolist() == [[5, 6, -100]] * 2
        assert document_ids.tolist() == [[0, 0, 1], [0, 0, 2]]
        assert own == str((slice(rank, rank + 1), slice(3)))


def test_nothing_but_a_wish_to_stop_is_agreed_on_behind_the_last_step():
    assert agree_on_step([], stop=2) == ([], [], 0, [], 2)


def test_a_batch_moves_with_its_mask_of_whatever_kind():
    class Mask:
        def to(self, device):
            return f"mask on {device}"

    moved = to_device({"tokens": torch.ones(2), "mask": Mask()}, torch.device("meta"))

    assert moved["tokens"].device.type == "meta"
    assert moved["mask"] == "mask on meta"
