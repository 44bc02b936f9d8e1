"""A packed batch against its documents in rows of their own: labels, positions, weights, loss."""

from itertools import groupby

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from label_batches import EPS
from tfidf_reference import IGNORED, ReferenceTFIDF
from torchtune.datasets import PackedDataset

from tfidf_tune.data import collate_packed
from tfidf_tune.loss import CrossEntropyLoss, TFIDFCrossEntropyLoss
from tfidf_tune.weighting import TokenBatch, shift_labels

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
    """Random tokens, every third document with a masked prompt, those in ``masked`` without any label."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
        num_prompt = length if index in masked else length // 2 if index % 3 == 0 else 0
        documents.append((tokens, [IGNORED] * num_prompt + tokens[num_prompt:]))
    return documents


def packed_batch(documents, *, split=False):
    return collate_packed([*PackedDataset(Documents(documents), max_seq_len=ROW, split_across_pack=split)])


def pieces_of(documents, *, split):
    """The documents, or if they may be split, their pieces between borders every ROW tokens."""
    if not split:
        return documents
    pieces, position = [], 0
    for tokens, labels in documents:
        places = range(position, position + len(tokens))
        for _, group in groupby(zip(places, tokens, labels, strict=True), lambda item: item[0] // ROW):
            _, *columns = zip(*group, strict=True)
            pieces.append(tuple(list(column) for column in columns))
        position += len(tokens)
    return pieces


def own_rows(pieces):
    """Tokens and shifted labels of each piece in a row of its own, padded to ROW."""
    tokens = torch.zeros(len(pieces), ROW, dtype=torch.int64)
    labels = torch.full((len(pieces), ROW), IGNORED)
    for row, (piece, label) in enumerate(pieces):
        tokens[row, : len(piece)] = torch.tensor(piece)
        labels[row, : len(piece) - 1] = torch.tensor(label[1:])
    return tokens, labels


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


# A prompt of its own, a row filled by one document, one token, a document without a label, a full row of three.
LENGTHS = (5, 4, ROW, 1, 7, 3, 2, 6, 4, 2, 11)
MASKED = (4, 7)
DOCUMENTS = make_documents(LENGTHS, MASKED)


def test_a_batch_in_full():
    rows = PackedDataset(
        Documents([([1, 2, 3], [1, 2, 3]), ([4, 5], [IGNORED, 5]), ([6], [6]), ([7, 8, 9, 9], [7, 8, 9, 9])]),
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


@pytest.mark.parametrize(("objective", "split"), [(CrossEntropyLoss, False), (TFIDFCrossEntropyLoss, True)])
def test_loss_and_gradient_are_those_of_the_documents_in_rows_of_their_own(objective, split):
    """Logits alike, so that only the loss is judged; weights and cross-entropy are computed slowly, in float64."""
    batch, pieces = packed_batch(DOCUMENTS, split=split), pieces_of(DOCUMENTS, split=split)
    _, labels = own_rows(pieces)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(*batch["tokens"].shape, VOCAB_SIZE, generator=generator, requires_grad=True)
    weights = ReferenceTFIDF()(labels.tolist())
    if objective is CrossEntropyLoss:
        weights = [[1.0] * ROW] * len(weights)
    expected, num_valid = torch.zeros((), dtype=torch.float64), int((labels != IGNORED).sum())
    for index, (row, place) in enumerate(places_in(batch, pieces)):
        log_probs = logits[row, place].double().log_softmax(-1)
        for position, label in enumerate(labels[index, : place.stop - place.start].tolist()):
            if label != IGNORED:
                expected = expected - weights[index][position] * log_probs[position, label] / num_valid
    (expected_gradient,) = torch.autograd.grad(expected, logits)

    loss = objective()(logits, TokenBatch(shift_labels(batch["labels"]), batch["document_ids"]))
    (gradient,) = torch.autograd.grad(loss, logits)

    torch.testing.assert_close(loss.double(), expected, rtol=64 * EPS, atol=0)
    largest = float(expected_gradient.abs().max())
    torch.testing.assert_close(gradient, expected_gradient, rtol=64 * EPS, atol=64 * EPS * largest)
    assert largest > 0
