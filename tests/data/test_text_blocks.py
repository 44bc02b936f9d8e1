import itertools

import numpy as np
import pytest

from tfidf_tune.data import load_documents, text_blocks, text_blocks_dataset
from tfidf_tune.data._tokenizer import encode_texts


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


def test_impossible_settings_are_refused(tokenizer, corpus_file, tmp_path):
    for change, message in (
        ({"block_size": 0}, "block_size must be"),
        ({"num_blocks": 0}, "num_blocks must be"),
        ({"num_blocks": 10_000}, r"found \d+ blocks of 256 tokens in .*corpus.txt', needed 10000"),
    ):
        with pytest.raises(ValueError, match=message):
            text_blocks_dataset(tokenizer, **({"source": str(corpus_file), "cache_dir": str(tmp_path)} | change))
        assert list(tmp_path.iterdir()) == []
