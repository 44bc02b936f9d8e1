"""Documents as sequences and as blocks: their tokens, how long ones are cut, and what is refused."""

import itertools

import numpy as np
import pytest
from data_fakes import passage

from tfidf_tune.data import hf_tokenizer, load_documents, text_blocks, text_blocks_dataset, text_dataset
from tfidf_tune.data._tokenizer import encode_texts

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


# ---- blocks


def test_documents_are_concatenated_and_cut(tokenizer):
    documents = [f"{number} the river sings" for number in range(700)]  # more than one batch of the tokenizer
    for add_eos in (False, True):
        stream = [token for text in documents for token in tokenizer.encode(text, add_eos=add_eos)]
        blocks = text_blocks(tokenizer, documents, block_size=8, add_eos=add_eos)
        assert (blocks.dtype, blocks.shape) == (np.int32, (len(stream) // 8, 8))
        assert blocks.flatten().tolist() == stream[: blocks.size]
        endless = itertools.cycle(documents)
        for num_blocks in (1, 3):
            first = text_blocks(tokenizer, endless, block_size=8, num_blocks=num_blocks, add_eos=add_eos)
            assert first.shape == (num_blocks, 8)
        np.testing.assert_array_equal(
            text_blocks(tokenizer, documents, block_size=8, num_blocks=3, add_eos=add_eos), blocks[:3]
        )
    assert text_blocks(tokenizer, ["a"], block_size=256).shape == (0, 256)
    assert text_blocks(tokenizer, [], block_size=256).shape == (0, 256)


def test_batches_of_long_documents_are_limited_in_bytes():
    """Memory depends on the bytes in a batch, not on the number of documents."""
    batches = []

    class Tokenizer:
        def encode_batch(self, texts):
            batches.append([len(text.encode()) for text in texts])
            return [[len(text)] for text in texts]

    megabytes = [4, 6, 1, 9, 0.5, 10, 3]
    texts = ["é" * int(500_000 * size) for size in megabytes]
    assert [int(ids[0]) for ids in encode_texts(Tokenizer(), texts)] == [len(text) for text in texts]
    assert [[size / 1e6 for size in batch] for batch in batches] == [[4, 6], [1, 9], [0.5], [10], [3]]


def test_an_item_has_labels_equal_to_its_tokens_and_is_cached(tokenizer, tmp_path, corpus_file, monkeypatch):
    file = tmp_path / "a.txt"

    def build(**changes):
        arguments = {"source": str(file), "block_size": 16, "cache_dir": str(tmp_path / "cache")}
        return text_blocks_dataset(tokenizer, **(arguments | changes))

    for text in (corpus_file.read_text(), corpus_file.read_text()[:1500]):  # a changed file is read again
        file.write_text(text)
        dataset = build()
        expected = text_blocks(tokenizer, load_documents(str(file)), block_size=16, add_eos=True)
        assert dataset.block_size == 16
        assert list(dataset) == [{"tokens": block, "labels": block} for block in expected.tolist()]
        assert len(dataset) == len(expected) > 3
    assert build(block_size=8).blocks.shape[1] == 8
    assert len(build(num_blocks=2)) == 2
    monkeypatch.setattr("tfidf_tune.data._text.encode_texts", lambda *given: pytest.fail("tokenized again"))
    np.testing.assert_array_equal(build().blocks, expected)


def test_impossible_settings_of_blocks_are_refused(tokenizer, corpus_file, tmp_path):
    for change, message in (
        ({"block_size": 0}, "block_size must be"),
        ({"num_blocks": 0}, "num_blocks must be"),
        ({"num_blocks": 10_000}, r"found \d+ blocks of 256 tokens in .*corpus.txt', needed 10000"),
    ):
        with pytest.raises(ValueError, match=message):
            text_blocks_dataset(tokenizer, **({"source": str(corpus_file), "cache_dir": str(tmp_path)} | change))
        assert list(tmp_path.iterdir()) == []
