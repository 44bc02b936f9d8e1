import numpy as np
import pytest

from tfidf_tune.data import load_documents, text_blocks, text_blocks_dataset, without_shared_text
from tfidf_tune.data._tokenizer import encode_texts


def test_documents_are_concatenated_and_cut(tokenizer):
    documents = ["the river sings", "a stone walks under the light"] * 3
    stream = [token for text in documents for token in tokenizer.encode(text, add_bos=False, add_eos=False)]
    blocks = text_blocks(tokenizer, documents, block_size=8)
    assert blocks.dtype == np.int32
    assert blocks.shape == (len(stream) // 8, 8)
    assert blocks.flatten().tolist() == stream[: blocks.size]


def test_eos_ends_each_document_on_request(tokenizer):
    stream = tokenizer.encode("the river") + tokenizer.encode("a stone")
    blocks = text_blocks(tokenizer, ["the river", "a stone"], block_size=1, add_eos=True)
    assert blocks.flatten().tolist() == stream


def test_no_more_blocks_than_asked_for(tokenizer):
    documents = ["the river sings over the house"] * 20
    all_blocks = text_blocks(tokenizer, documents, block_size=8)
    np.testing.assert_array_equal(text_blocks(tokenizer, documents, block_size=8, num_blocks=3), all_blocks[:3])


def test_reading_stops_when_there_are_enough_blocks(tokenizer):
    def endless():
        while True:
            yield "the river sings"

    assert text_blocks(tokenizer, endless(), block_size=4, num_blocks=5).shape == (5, 4)


def test_many_documents_are_encoded_in_order(tokenizer):
    """More documents than one batch of the tokenizer."""
    documents = [str(number) for number in range(700)]
    blocks = text_blocks(tokenizer, documents, block_size=1)
    assert tokenizer.decode(blocks.flatten().tolist()) == "".join(documents)


def test_no_batch_of_long_documents_is_larger_than_one_may_be():
    """Memory goes with the bytes in a batch, not with the number of its documents."""
    batches = []

    class Tokenizer:
        def encode_batch(self, texts):
            batches.append([len(text.encode()) for text in texts])
            return [[len(text)] for text in texts]

    megabytes = [4, 6, 1, 9, 0.5, 10, 3]
    texts = ["é" * int(500_000 * size) for size in megabytes]
    assert [int(ids[0]) for ids in encode_texts(Tokenizer(), texts)] == [len(text) for text in texts]
    assert [[size / 1e6 for size in batch] for batch in batches] == [[4, 6], [1, 9], [0.5], [10], [3]]


def test_too_little_text_gives_no_block(tokenizer):
    assert text_blocks(tokenizer, ["a"], block_size=256).shape == (0, 256)
    assert text_blocks(tokenizer, [], block_size=256).shape == (0, 256)


def test_an_item_has_labels_equal_to_its_tokens(tokenizer, corpus_file, tmp_path):
    dataset = text_blocks_dataset(tokenizer, source=str(corpus_file), block_size=16, cache_dir=str(tmp_path))
    expected = text_blocks(tokenizer, load_documents(str(corpus_file)), block_size=16, add_eos=True)
    assert len(dataset) == len(expected)
    assert dataset.block_size == 16
    for item, block in zip([dataset[index] for index in range(len(dataset))], expected.tolist(), strict=True):
        assert item == {"tokens": block, "labels": block}
    assert len(expected) > 1


def test_iteration_ends(tokenizer, corpus_file, tmp_path):
    dataset = text_blocks_dataset(tokenizer, source=str(corpus_file), num_blocks=3, cache_dir=str(tmp_path))
    assert len(list(dataset)) == 3


def test_a_second_run_does_not_tokenize(tokenizer, corpus_file, tmp_path, monkeypatch):
    arguments = {"source": str(corpus_file), "block_size": 16, "cache_dir": str(tmp_path)}
    first = text_blocks_dataset(tokenizer, **arguments)
    monkeypatch.setattr(type(tokenizer), "encode_batch", lambda self, texts: pytest.fail("tokenized again"))
    np.testing.assert_array_equal(text_blocks_dataset(tokenizer, **arguments).blocks, first.blocks)


@pytest.mark.parametrize("change", [{"block_size": 8}, {"num_blocks": 2}])
def test_other_settings_are_cached_apart(tokenizer, corpus_file, tmp_path, change):
    arguments = {"source": str(corpus_file), "block_size": 16, "cache_dir": str(tmp_path)}
    first = text_blocks_dataset(tokenizer, **arguments)
    assert text_blocks_dataset(tokenizer, **(arguments | change)).blocks.shape != first.blocks.shape


def test_a_changed_file_is_read_again(tokenizer, tmp_path):
    file = tmp_path / "a.txt"
    for text in ("the river", "a green house"):
        file.write_text(text)
        dataset = text_blocks_dataset(tokenizer, source=str(file), block_size=1, cache_dir=str(tmp_path / "cache"))
        assert tokenizer.decode(dataset.blocks.flatten().tolist()) == text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"num_blocks": 0}, "num_blocks must be a whole number of at least 1, got 0"),
        ({"num_blocks": 10_000}, r"found \d+ blocks of 256 tokens in .*corpus.txt', needed 10000: lower num_blocks"),
        ({"block_size": 100_000}, "found 0 blocks of 100000 tokens in .*corpus.txt', needed 1: lower"),
    ],
)
def test_impossible_settings_are_refused(tokenizer, corpus_file, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        text_blocks_dataset(tokenizer, **({"source": str(corpus_file), "cache_dir": str(tmp_path)} | change))
    assert list(tmp_path.iterdir()) == []


def test_which_blocks_share_text_is_found_out_once_for_each_question(tokenizer, corpus_file, tmp_path, monkeypatch):
    blocks = text_blocks(tokenizer, load_documents(str(corpus_file)), block_size=16)[:20]
    source, reads = tmp_path / "seen.txt", []

    def read(source, **names):
        reads.append(source)
        return load_documents(source, **names)

    def shares(block, length, trained):
        runs = {tuple(ids[at : at + length]) for ids in trained for at in range(len(ids) - length + 1)}
        return any(tuple(block[at : at + length]) in runs for at in range(17 - length))

    def check(blocks, length, num_reads):
        unseen = without_shared_text(tokenizer, blocks, length, source=str(source), cache_dir=str(tmp_path))
        trained = [tokenizer.encode(line, add_bos=False, add_eos=False) for line in source.read_text().splitlines()]
        assert unseen.tolist() == [block for block in blocks.tolist() if not shares(block, length, trained)]
        assert len(reads) == num_reads
        return len(unseen)

    monkeypatch.setattr("tfidf_tune.data._text.load_documents", read)
    source.write_text(tokenizer.decode(blocks[4].tolist()).strip())
    once = check(blocks, 12, num_reads=1)
    assert check(blocks, 12, num_reads=1) == once
    assert check(blocks, 5, num_reads=2) < once < 20
    assert check(blocks[5:], 12, num_reads=3) < once
    source.write_text("\n".join(tokenizer.decode(block.tolist()).strip() for block in blocks[:5]))
    assert check(blocks, 12, num_reads=4) < once
