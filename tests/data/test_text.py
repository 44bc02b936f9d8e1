"""Documents as sequences and as blocks: their tokens, how long ones are cut, and
what is refused.
"""

import itertools
import random

import numpy as np
import pytest
from helpers.fakes.data import passage, write_rows

from tfidf_tune._tokenizer import encode_texts
from tfidf_tune.data import (
    hf_tokenizer,
    load_documents,
    text_blocks,
    text_blocks_dataset,
    text_dataset,
)
from tfidf_tune.passages import read_probe_file

SHORT = "the river sings"
LONG = passage(1, 60)
TINY = "a"


@pytest.fixture
def texts(tmp_path):
    """Build a data set of given documents: ``texts(tokenizer,
    [document, ...], max_seq_len=16)``.
    """

    def make(tokenizer, documents, **arguments):
        file = tmp_path / "documents.txt"
        file.write_text("\n".join(documents), encoding="utf-8")
        return text_dataset(
            tokenizer, source=str(file), cache_dir=str(tmp_path / "cache"), **arguments
        )

    return make


def items(dataset):
    return [sample["tokens"] for sample in dataset]


def test_a_document_is_a_sequence(tokenizer, sentencepiece_folder, texts):
    with_bos = hf_tokenizer(str(sentencepiece_folder))
    found = []
    for add_bos, add_eos in itertools.product([False, True], repeat=2):
        dataset = texts(with_bos, [SHORT, LONG], max_seq_len=512, add_bos=add_bos, add_eos=add_eos)
        expected = [
            with_bos.encode(text, add_bos=add_bos, add_eos=add_eos) for text in (SHORT, LONG)
        ]
        assert items(dataset) == [sample["labels"] for sample in dataset] == expected
        assert (expected[0][0] == with_bos.bos_id) == add_bos
        assert (len(dataset), dataset.num_documents, dataset.num_cut, dataset.num_left_out) == (
            2,
            2,
            0,
            0,
        )
        found.append(expected)  # and each setting has a cache of its own
    assert items(texts(with_bos, [SHORT, LONG], max_seq_len=16)) not in found
    assert tokenizer.bos_id is None
    assert items(texts(tokenizer, [SHORT], max_seq_len=64)) == [
        tokenizer.encode(SHORT, add_bos=False)
    ]


def test_a_long_document_is_cut_into_pieces_that_lose_nothing(tokenizer, texts, monkeypatch):
    whole = tokenizer.encode(LONG)
    dataset = texts(tokenizer, [SHORT, LONG, SHORT], max_seq_len=16)
    _, *pieces, _ = in_order = items(dataset)
    assert list(itertools.chain.from_iterable(pieces)) == whole
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
    # More than one batch of the tokenizer.
    documents = [f"{number} the river sings" for number in range(700)]
    for add_eos in (False, True):
        stream = []
        for text in documents:
            stream += tokenizer.encode(text, add_eos=add_eos)
        blocks = text_blocks(tokenizer, documents, block_size=8, add_eos=add_eos)
        assert (blocks.dtype, blocks.shape) == (np.int32, (len(stream) // 8, 8))
        assert blocks.flatten().tolist() == stream[: blocks.size]
        endless = itertools.cycle(documents)
        for num_blocks in (1, 3):
            first = text_blocks(
                tokenizer, endless, block_size=8, num_blocks=num_blocks, add_eos=add_eos
            )
            assert first.shape == (num_blocks, 8)
        np.testing.assert_array_equal(
            text_blocks(tokenizer, documents, block_size=8, num_blocks=3, add_eos=add_eos),
            blocks[:3],
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
    assert [int(ids[0]) for ids in encode_texts(Tokenizer(), texts)] == [
        len(text) for text in texts
    ]
    assert [[size / 1e6 for size in batch] for batch in batches] == [
        [4, 6],
        [1, 9],
        [0.5],
        [10],
        [3],
    ]


def test_an_item_has_labels_equal_to_its_tokens_and_is_cached(
    tokenizer, tmp_path, corpus_file, monkeypatch
):
    file = tmp_path / "a.txt"

    def build(**changes):
        arguments = {"source": str(file), "block_size": 16, "cache_dir": str(tmp_path / "cache")}
        return text_blocks_dataset(tokenizer, **(arguments | changes))

    for text in (
        corpus_file.read_text(),
        corpus_file.read_text()[:1500],
    ):  # a changed file is read again
        file.write_text(text)
        dataset = build()
        expected = text_blocks(tokenizer, load_documents(str(file)), block_size=16, add_eos=True)
        assert dataset.block_size == 16
        assert list(dataset) == [{"tokens": block, "labels": block} for block in expected.tolist()]
        assert len(dataset) == len(expected) > 3
    assert build(block_size=8).blocks.shape[1] == 8
    assert len(build(num_blocks=2)) == 2
    monkeypatch.setattr(
        "tfidf_tune.data.text.encode_texts", lambda *given: pytest.fail("tokenized again")
    )
    np.testing.assert_array_equal(build().blocks, expected)


def words(rng, number):
    return " ".join("".join(rng.choices("bcdfgklmnprst", k=4)) for _ in range(number))


@pytest.fixture
def repetitive_file(tmp_path):
    """Documents of random words; one passage is in five of them, another in three, and one document
    is there twice.
    """
    rng = random.Random(0)
    rows = []
    often = words(rng, 40)
    less = words(rng, 40)
    for number in range(60):
        inserted = []
        if number % 12 == 0:
            inserted = [often]
        elif number % 20 == 5:
            inserted = [less]
        rows.append(
            " ".join([words(rng, 60), *inserted, words(rng, 30)])
            + ("<|endoftext|>" if number % 7 == 0 else "")
        )
    near_copy = rows[2].split()
    near_copy[len(near_copy) // 2] = "another"
    rows += [rows[1], " ".join(near_copy)]
    return write_rows(tmp_path / "repetitive.jsonl", rows), often, less


def occurrences(stream, ids):
    """Count from the left without overlap."""
    found = []
    start = 0
    while start + len(ids) <= len(stream):
        is_here = stream[start : start + len(ids)] == ids
        found += [start] if is_here else []
        start += len(ids) if is_here else 1
    return found


@pytest.mark.parametrize(
    ("deduplicate", "copies"), [("none", []), ("exact", [60]), ("minhash", [60, 61])]
)
def test_held_out_windows_are_all_that_training_lacks_and_targets_have_their_natural_counts(
    tokenizer, repetitive_file, tmp_path, deduplicate, copies
):
    file, often, less = repetitive_file
    arguments = {
        "source": file,
        "block_size": 32,
        "cache_dir": str(tmp_path / "cache"),
        "deduplicate": deduplicate,
    }
    as_it_is = text_blocks_dataset(tokenizer, **arguments)
    with_copies = text_blocks_dataset(
        tokenizer, holdout=0.05, **{**arguments, "deduplicate": "none"}
    )
    probe = tmp_path / "probe.jsonl"
    dataset = text_blocks_dataset(tokenizer, holdout=0.05, probe_file=str(probe), **arguments)

    assert as_it_is.passages == []
    assert read_probe_file(probe) == dataset.passages
    assert (dataset.num_documents, dataset.num_removed) == (62, len(copies))
    targets = [passage for passage in dataset.passages if passage.kind == "target"]
    controls = [passage for passage in dataset.passages if passage.kind == "control"]
    assert len(targets) == len(controls) >= 10
    documents = [*encode_texts(tokenizer, load_documents(file))]
    assert 0.04 < sum(len(one.token_ids) for one in controls) / sum(map(len, documents)) <= 0.05

    for one in dataset.passages:
        assert occurrences(documents[one.document].tolist(), one.token_ids)

    # What is trained on is the text without the controls, each a run of one document, and without
    # documents that are copies.
    rest = [(ids.tolist(), number) for number, ids in enumerate(documents)]
    for control in controls:
        found = []
        for place, (ids, _) in enumerate(rest):
            found += [(place, start) for start in occurrences(ids, control.token_ids)]
        [(place, start)] = found
        ids, number = rest[place]
        parts = [ids[:start], ids[start + 32 :]]
        rest[place : place + 1] = [(part, number) for part in parts if part]
    stream = []
    for ids, number in rest:
        if number in copies:
            continue
        stream += ids
        if ids[-1] != tokenizer.eos_id:
            stream.append(tokenizer.eos_id)
    blocks = np.array(stream[: len(stream) // 32 * 32]).reshape(-1, 32)
    assert tokenizer.eos_id not in {
        *np.array(stream)[np.flatnonzero(np.diff(stream) == 0)].tolist()
    }
    np.testing.assert_array_equal(dataset.blocks, blocks)

    # Where targets are, and how often; the most frequent is in five documents.
    trained = dataset.blocks.flatten().tolist()
    for target in targets:
        assert [32 * block + offset for block, offset in target.positions] == occurrences(
            trained, target.token_ids
        )
        assert target.num_injections == len(target.positions)
    counts = [target.num_injections for target in targets]
    if not copies:
        assert counts[:2] == [5, 3]
        assert counts == sorted(counts, reverse=True)
        assert counts[-1] == 1
    # The same questions with and without copies.
    assert [passage.token_ids for passage in dataset.passages] == [
        passage.token_ids for passage in with_copies.passages
    ]
    for target, text in zip(targets, (often, less), strict=False):
        assert target.text.strip() in text
    assert text_blocks_dataset(tokenizer, holdout=0.05, **arguments).passages == dataset.passages, (
        "from the cache"
    )


@pytest.mark.parametrize(("lines", "length"), [(4000, 256), (400, 64), (100, 16)])
def test_passages_get_shorter_where_the_text_is_short_and_one_document_is_enough(
    tokenizer, tmp_path, lines, length
):
    file = tmp_path / "book.txt"
    file.write_text(words(random.Random(1), 5 * lines))
    arguments = {"source": str(file), "sample_by": "document", "cache_dir": str(tmp_path / "cache")}
    dataset = text_blocks_dataset(tokenizer, holdout=0.1, block_size=None, **arguments)
    assert {len(passage.token_ids) for passage in dataset.passages} == {length}
    assert dataset.block_size == 256


def test_a_text_too_short_to_hold_out_a_part_is_trained_on_as_it_is(tokenizer, tmp_path, caplog):
    file = tmp_path / "short.txt"
    cache = str(tmp_path / "cache")
    for text in (words(random.Random(2), 70), "the same again " * 2000):
        file.write_text(text)
        plain, held = (
            text_blocks_dataset(
                tokenizer, source=str(file), holdout=share, block_size=64, cache_dir=cache
            )
            for share in (0, 0.05)
        )
        np.testing.assert_array_equal(held.blocks, plain.blocks)
        assert held.passages == []
        assert "recitation is not measured" in caplog.text
        caplog.clear()


def test_impossible_settings_of_blocks_are_refused(tokenizer, corpus_file, tmp_path):
    for change, message in (
        ({"block_size": 0}, "block_size must be"),
        ({"num_blocks": 0}, "num_blocks must be"),
        ({"holdout": 0.6}, "holdout is 0.6: .* from 0 to 0.5"),
        (
            {"holdout": 0.1, "num_blocks": 9},
            "holdout 0.1 takes all of the text: leave out num_blocks 9",
        ),
        ({"holdout": 0.1, "block_size": 15}, "block_size must be"),
        ({"num_blocks": 10_000}, r"found \d+ blocks of 256 tokens in .*corpus.txt', needed 10000"),
    ):
        with pytest.raises(ValueError, match=message):
            text_blocks_dataset(
                tokenizer, **({"source": str(corpus_file), "cache_dir": str(tmp_path)} | change)
            )
        assert list(tmp_path.iterdir()) == []
