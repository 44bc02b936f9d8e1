"""A packed batch against its documents: tokens, labels, positions."""

from itertools import groupby

import torch
from helpers.references.tfidf import IGNORED
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torchtune.datasets import PackedDataset
from torchtune.modules import attention_utils

from tfidf_tune.data import collate_packed
from tfidf_tune.data.sequences import packed_mask, unpadded_tokens
from tfidf_tune.weighting import shift_labels

ROW = 12
VOCAB_SIZE = 40


class Documents(torch.utils.data.Dataset):
    """Documents in order, given as pairs of tokens and labels."""

    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, index):
        tokens, labels = self.documents[index]
        return {"tokens": list(tokens), "labels": list(labels)}


def make_documents(lengths, masked=(), seed=0):
    """Random tokens, every third document with a masked prompt, those in ``masked`` without any
    label.
    """
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        num_prompt = 0
        if index in masked:
            num_prompt = length
        elif index % 3 == 0:
            num_prompt = length // 2
        documents.append((tokens, [IGNORED] * num_prompt + tokens[num_prompt:]))
    return documents


def packed_batch(documents, *, split=False):
    return collate_packed(
        [*PackedDataset(Documents(documents), max_seq_len=ROW, split_across_pack=split)]
    )


def pieces_of(documents, *, split):
    """The documents, or if they may be split, their pieces between borders every ROW tokens."""
    if not split:
        return documents
    pieces = []
    position = 0
    for tokens, labels in documents:
        places = range(position, position + len(tokens))
        for _, group in groupby(
            zip(places, tokens, labels, strict=True), lambda item: item[0] // ROW
        ):
            _, *columns = zip(*group, strict=True)
            pieces.append(tuple(list(column) for column in columns))
        position += len(tokens)
    return pieces


def places_in(batch, pieces):
    """Return row and positions of each piece; everything else must be padding."""
    places = []
    for row, ids in enumerate(batch["document_ids"].tolist()):
        position = 0
        for _, group in groupby(ids):
            length = len(list(group))
            if len(places) < len(pieces) and len(pieces[len(places)][0]) == length:
                places.append((row, slice(position, position + length)))
            else:
                assert (batch["labels"][row, position:] == IGNORED).all(), "the rest is padding"
                assert position + length == ROW
            position += length
    assert len(places) == len(pieces)
    return places


def test_a_batch_in_full(monkeypatch):
    rows = PackedDataset(
        Documents(
            [
                ([1, 2, 3], [1, 2, 3]),
                ([4, 5], [IGNORED, 5]),
                ([6], [6]),
                ([7, 8, 9, 9], [7, 8, 9, 9]),
            ]
        ),
        max_seq_len=7,
    )

    batch = collate_packed([rows[0], rows[1]])

    assert batch["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 0], [7, 8, 9, 9, 0, 0, 0]]
    no = IGNORED
    assert batch["labels"].tolist() == [[no, 2, 3, no, 5, no, no], [no, 8, 9, 9, no, no, no]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1]]
    assert batch["input_pos"].tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 0, 1, 2]]
    same = batch["document_ids"][:, :, None] == batch["document_ids"][:, None, :]
    assert torch.equal(batch["mask"], same.tril())
    on_a_gpu = collate_packed([rows[0], rows[1]], device="cuda")
    assert "mask" not in on_a_gpu
    assert torch.equal(packed_mask(on_a_gpu["input_pos"]), batch["mask"])
    monkeypatch.setattr(attention_utils, "_SUPPORTS_FLEX_ATTENTION", True)
    mask = packed_mask(batch["input_pos"])
    assert torch.equal(create_mask(mask.mask_mod, 2, 1, 7, 7, device="cpu")[:, 0], batch["mask"])
    assert {value.dtype for key, value in batch.items() if key != "mask"} == {torch.int64}


@given(
    lengths=st.lists(st.integers(1, 3 * ROW), min_size=1, max_size=8),
    split=st.booleans(),
    masked=st.sets(st.integers(0, 7)),
)
def test_every_document_is_complete_and_predicts_no_token_of_another(lengths, split, masked):
    """Also where a document is longer than a row: torchtune's own positions are wrong there."""
    if not split:
        lengths = [min(length, ROW) for length in lengths]
    documents = make_documents(lengths, masked)
    pieces = pieces_of(documents, split=split)

    batch = packed_batch(documents, split=split)
    shifted = shift_labels(batch["labels"])

    for (tokens, labels), (row, place) in zip(pieces, places_in(batch, pieces), strict=True):
        assert batch["tokens"][row, place].tolist() == tokens
        assert shifted[row, place].tolist() == [*labels[1:], IGNORED]
        assert batch["input_pos"][row, place].tolist() == list(range(len(tokens)))


@given(lengths=st.lists(st.integers(1, ROW), min_size=1, max_size=8))
def test_only_padding_is_left_out_of_the_tokens_of_a_row(lengths):
    """Also of a row that its last document fills."""
    documents = make_documents(lengths)
    expected = torch.full_like(packed_batch(documents)["tokens"], IGNORED)
    for (tokens, _), (row, place) in zip(
        documents, places_in(packed_batch(documents), documents), strict=True
    ):
        expected[row, place] = torch.tensor(tokens)

    rows = [*PackedDataset(Documents(documents), max_seq_len=ROW)]

    assert torch.equal(torch.stack([unpadded_tokens(row) for row in rows]), expected)
