"""Documents as sequences: their tokens, how long ones are cut, and what is refused."""

import itertools

import pytest
from data_fakes import passage

from tfidf_tune.data import hf_tokenizer, text_dataset

SHORT, LONG, TINY = "the river sings", passage(1, 60), "a"


@pytest.fixture
def texts(tmp_path):
    """Build a data set of given documents: ``texts(tokenizer, [document, ...], max_seq_len=16)``."""

    def make(tokenizer, documents, **arguments):
        file = tmp_path / "documents.txt"
        file.write_text("\n".join(documents), encoding="utf-8")
        return text_dataset(tokenizer, source=str(file), cache_dir=str(tmp_path / "cache"), **arguments)

    return make


def items(dataset):
    return [sample["tokens"] for sample in dataset]


def test_a_document_is_a_sequence(tokenizer, sentencepiece_folder, texts):
    with_bos, found = hf_tokenizer(str(sentencepiece_folder)), []
    for add_bos, add_eos in itertools.product([False, True], repeat=2):
        dataset = texts(with_bos, [SHORT, LONG], max_seq_len=512, add_bos=add_bos, add_eos=add_eos)
        expected = [with_bos.encode(text, add_bos=add_bos, add_eos=add_eos) for text in (SHORT, LONG)]
        assert items(dataset) == [sample["labels"] for sample in dataset] == expected
        assert (expected[0][0] == with_bos.bos_id) == add_bos
        assert (len(dataset), dataset.num_documents, dataset.num_cut, dataset.num_left_out) == (2, 2, 0, 0)
        found.append(expected)  # and each setting has a cache of its own
    assert items(texts(with_bos, [SHORT, LONG], max_seq_len=16)) not in found
    assert tokenizer.bos_id is None
    assert items(texts(tokenizer, [SHORT], max_seq_len=64)) == [tokenizer.encode(SHORT, add_bos=False)]


def test_a_long_document_is_cut_into_pieces_that_lose_nothing(tokenizer, texts, monkeypatch):
    whole = tokenizer.encode(LONG)
    dataset = texts(tokenizer, [SHORT, LONG, SHORT], max_seq_len=16)
    _, *pieces, _ = in_order = items(dataset)
    assert [token for piece in pieces for token in piece] == whole
    assert {len(piece) for piece in pieces[:-1]} == {16}
    assert len(pieces) > 2
    assert (dataset.num_documents, dataset.num_cut, dataset.num_left_out) == (3, 1, 0)

    assert dataset[-1]["tokens"] == in_order[-1]
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    assert texts(tokenizer, [LONG], max_seq_len=len(whole)).num_cut == 0
    assert texts(tokenizer, [LONG], max_seq_len=len(whole) - 2).num_cut == 1
    monkeypatch.setattr(tokenizer, "max_seq_len", 16)
    assert items(texts(tokenizer, [SHORT, LONG, SHORT])) == in_order


def test_a_piece_of_one_token_is_left_out_and_counted(tokenizer, texts):
    length = len(tokenizer.encode(LONG))

    dataset = texts(tokenizer, [LONG, TINY], max_seq_len=length - 1, add_eos=True)
    without_eos = texts(tokenizer, [LONG, TINY], max_seq_len=length, add_eos=False)

    assert items(dataset) == [tokenizer.encode(LONG)[:-1], tokenizer.encode(TINY)]
    assert (dataset.num_cut, dataset.num_left_out) == (1, 1)
    assert items(without_eos) == [tokenizer.encode(LONG, add_eos=False)]
    assert (without_eos.num_cut, without_eos.num_left_out) == (0, 1)


def test_impossible_limits_and_sources_are_refused(tokenizer, texts, monkeypatch):
    for limit, own, message in (
        (None, None, "neither max_seq_len nor the tokenizer's is set"),
        (1, None, "max_seq_len must be a whole number of at least 2, got 1"),
        (17, 16, "max_seq_len is 17, above max_seq_len 16"),
    ):
        monkeypatch.setattr(tokenizer, "max_seq_len", own)
        with pytest.raises(ValueError, match=message):
            texts(tokenizer, [LONG], max_seq_len=limit)
    with pytest.raises(ValueError, match="has 2 documents, none of two tokens: name another"):
        texts(tokenizer, [TINY, TINY], max_seq_len=16, add_eos=False)
