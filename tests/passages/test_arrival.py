"""Canaries are found in batches, against a search by brute force."""

import numpy as np
import pytest
import torch
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from tfidf_tune.passages import InjectedCanaries
from tfidf_tune.passages.arrival import CanarySearch
from tfidf_tune.passages.probe_file import Passage

TEXTS = [f"The secret of {name} is {name * 3}." for name in ("anna", "bert", "carla", "dora")]
END = 9


def make_passages(all_ids):
    return [
        Passage(f"target-{number:04d}", "target", "", ids, 1, [], "", "", "")
        for number, ids in enumerate(all_ids)
    ]


@pytest.fixture(scope="module")
def canaries(embedded_tokenizer_folder):
    """Two targets, inserted twice, and the rows of a data set of nothing else."""
    tokenizer = AutoTokenizer.from_pretrained(embedded_tokenizer_folder)
    made = InjectedCanaries(tokenizer, texts=TEXTS, num_targets=2, repeats=2)
    dataset = made.inject(Dataset.from_dict({"text": ["anna and bert"] * 3}))
    return made, [tokenizer(text)["input_ids"] for text in dataset["text"]]


@pytest.mark.parametrize("size", [2, 5, 8, 13])
def test_whole_canaries_are_counted_with_their_labels(size):
    """Rows of two tokens, in which canaries occur by chance and within one another."""
    rng = np.random.default_rng(size)
    passages = make_passages(rng.integers(1, 3, (6, size)).tolist())
    search = CanarySearch(passages, [END])
    expected = [[0, None] for _ in passages]
    for _ in range(20):
        ids = rng.integers(1, 3, (3, 60))
        for row in ids:
            for passage in passages:
                place = rng.integers(60 - size)
                row[place : place + size] = passage.token_ids
        labels = np.where(rng.random(ids.shape) < 0.3, -100, ids)
        search.add({"input_ids": torch.tensor(ids), "labels": labels}, may_be_shifted=False)
        for row, row_labels in zip(ids, labels, strict=True):
            row_labels[0] = -100
            for entry, passage in zip(expected, passages, strict=True):
                for place in range(61 - size):
                    if row[place : place + size].tolist() == passage.token_ids:
                        num_labels = int((row_labels[place : place + size] != -100).sum())
                        entry[0] += 1
                        entry[1] = num_labels if entry[1] is None else min(entry[1], num_labels)
    found = [[each.num_whole, each.fewest_with_loss] for each in search.seen.canaries]
    assert found == expected
    assert min(entry[0] for entry in expected) >= 4


@pytest.mark.parametrize(
    ("row", "num_tokens", "is_cut", "difference"),
    [
        ([1, 2, *range(20, 40)], 20, True, None),
        ([1, 2, *range(20, 40), END, 5, 6], 20, True, None),
        ([*range(30, 50), 1], 20, True, None),
        ([END, *range(30, 50), 1], 20, True, None),
        ([1, 2, 3, *range(21, 50), 1], 29, False, (0, 20, 3)),
        ([1, *range(20, 49), 3, 1], 29, False, (29, 49, 3)),
        ([1, *range(20, 33), 3, *range(34, 50)], 16, False, (13, 33, 3)),
    ],
    ids=["end", "EOS", "begin", "after BOS", "first", "last", "middle"],
)
@pytest.mark.parametrize("is_padded", [False, True])
def test_pieces_are_told_apart(row, num_tokens, is_cut, difference, is_padded):
    search = CanarySearch(make_passages([list(range(20, 50))]), [END])
    mask = [1] * len(row)
    if is_padded:
        row = [7, *row, 7]
        mask = [0, *mask, 0]
    search.add({"input_ids": row, "labels": row, "attention_mask": mask}, may_be_shifted=False)
    piece = search.seen.canaries[0].longest
    assert (piece.num_tokens, piece.is_cut) == (num_tokens, is_cut)
    if not is_cut:
        assert piece.first_difference == difference


def test_documents_of_a_packed_row_end_where_positions_start_again():
    search = CanarySearch(make_passages([list(range(20, 50))]), [])
    ids = [*range(20, 40), *range(60, 70), *range(20, 50)]
    batch = {"input_ids": ids, "labels": ids}
    batch["position_ids"] = [*range(20), *range(10), *range(30)]
    search.add(batch, may_be_shifted=False)
    sightings = search.seen.canaries[0]
    assert sightings.num_whole == sightings.num_heads == 1
    assert sightings.longest.is_cut


def test_batches_of_a_loop_of_ones_own(canaries):
    made, rows = canaries
    with pytest.raises(ValueError, match="list_iterator without a length.*set max_batches"):
        made.check_batches(iter([]))
    batches = [{"input_ids": [row], "labels": [row]} for row in rows]
    found = made.check_batches(iter(batches), max_batches=len(batches))
    assert (found.num_seen, found.num_batches, found.num_trainable) == (4, len(rows), None)
    assert "Gradients were not checked" in str(found)
    with pytest.raises(ValueError, match="arrives whole [01] of 2 times"):
        made.check_batches(batches, max_batches=2)
    for batch, message in (
        ({"input_ids": [rows[0]]}, r"has \['input_ids'\]: use a data collator"),
        ((1, 2), "a batch has tuple"),
        ({"input_ids": [rows[0]], "labels": [[1]]}, "labels .*a label for each token"),
    ):
        with pytest.raises(ValueError, match=message):
            made.check_batches([batch])
    for share in (0, 1.5):
        with pytest.raises(ValueError, match="loss_share"):
            made.check_batches(batches, loss_share=share)


@pytest.mark.parametrize("kind", ["torch", "generator", "accelerate"])
def test_the_order_of_a_loader_is_put_back(canaries, kind):
    """With the generator of torch, with one of its own, and with the number of the epoch."""
    made, rows = canaries

    def collate(batch):
        ids = torch.tensor(batch)
        return {"input_ids": ids, "labels": ids}

    orders = []
    for is_checked in (False, True):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3) if kind == "generator" else None
        loader = DataLoader(rows, shuffle=True, generator=generator, collate_fn=collate)
        if kind == "accelerate":
            loader = prepare_data_loader(
                loader,
                num_processes=1,
                process_index=0,
                put_on_device=False,
                use_seedable_sampler=True,
            )
        if is_checked:
            made.check_batches(loader)
        orders.append([[batch["input_ids"].tolist() for batch in loader] for _ in range(2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]


def test_shifted_labels_and_labels_that_are_left_out_on_purpose(canaries):
    made, rows = canaries
    shifted = [{"input_ids": [row], "labels": [[*row[1:], -100]]} for row in rows]
    named = [{"input_ids": [row], "shift_labels": [[*row[1:], -100]]} for row in rows]
    for batches in (shifted, named):
        found = made.check_batches(batches)
        for passage in made.passages[:2]:
            assert found.tokens_with_loss[passage.id] == len(passage.token_ids) - 1
    sparse = []
    for row in rows:
        labels = [-100 if place % 4 == 3 else token for place, token in enumerate(row)]
        sparse.append({"input_ids": [row], "labels": [labels]})
    with pytest.raises(ValueError, match="target-0000 arrives, but only .* loss_share below 1"):
        made.check_batches(sparse)
    assert made.check_batches(sparse, loss_share=0.7).num_seen == 4


def test_a_check_needs_canaries(embedded_tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(embedded_tokenizer_folder)
    with pytest.raises(ValueError, match=r"call inject\(\) before a check"):
        InjectedCanaries(tokenizer, texts=TEXTS, num_targets=2).check_batches([])
