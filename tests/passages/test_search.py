"""Documents that are read again for their windows, and where a passage occurs in them."""

from types import SimpleNamespace

import numpy as np
from helpers.fakes.probe import WordTokenizer

from tfidf_tune.corpus import window_index
from tfidf_tune.corpus.window_index import Piece
from tfidf_tune.passages._search import occurrences, read_documents
from tfidf_tune.passages.stretches import CUT


def test_tokens_next_to_a_cut_are_not_taken_for_those_of_the_document(monkeypatch):
    text = " ".join(f"w{number}" for number in range(100))
    pieces = [
        Piece(0, number, *at, text)
        for number, at in enumerate([(0, True), (0, False), (9, False), (9, True)])
    ]
    monkeypatch.setattr(window_index, "read_pieces", lambda *_: iter(pieces))

    search = SimpleNamespace(index=None, runner=None, tokenizer=WordTokenizer())
    documents = [ids.tolist() for _, ids in read_documents(search, None, "step")]

    ids = [*range(100)]
    cut = [CUT] * 32
    assert documents == [ids, ids[:68] + cut, cut + ids[32:68] + cut, cut + ids[32:]]


def test_a_passage_occurs_where_its_tokens_are_and_not_where_its_bytes_are():
    ids = np.array([256, 0, 1, 1, 256, 1], dtype=np.int32)

    assert [*occurrences(np.array([1], dtype=np.int32), ids)] == [2, 3, 5]
    assert [*occurrences(np.array([1, 1], dtype=np.int32), np.ones(5, dtype=np.int32))] == [0, 2]
