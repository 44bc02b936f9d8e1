"""Removal of copies from a corpus, against a slow exact search, and where the passages then are."""

import itertools
import json
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.fakes.data import write_rows
from omegaconf import OmegaConf

from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.data import (
    embedded_documents,
    injected_corpus_dataset,
    text_blocks_dataset,
    text_dataset,
)

SIZES = {
    "num_base": 12,
    "num_targets": 3,
    "num_repeats": 4,
    "block_size": 32,
    "min_target_tokens": 40,
}


class OneWordPerToken:
    """A tokenizer that decodes no further than EOS, as torchtune's do."""

    eos_id = 3000

    def decode(self, token_ids):
        return " ".join(
            f"Word{number},"
            for number in itertools.takewhile(lambda one: one != self.eos_id, token_ids)
        )


WORDS = OneWordPerToken()


def slow_kept(rows, threshold, ngram):
    """Compare every row with every earlier one that stays."""
    sets = [
        {tuple(row[at : at + ngram]) for at in range(len(row) - ngram + 1)} for row in rows.tolist()
    ]
    kept = []
    for index, one in enumerate(sets):
        if all(len(one & sets[other]) / len(one | sets[other]) < threshold for other in kept):
            kept.append(index)
    return kept


@pytest.fixture(scope="module")
def near_copies():
    """Forty rows, each followed by copies with 0, 1, 4, 16 and 64 of 128 tokens replaced."""
    rng = np.random.default_rng(0)
    rows = []
    for original in rng.integers(0, 1000, (40, 128), dtype=np.int32):
        for number in (None, 0, 1, 4, 16, 64):
            copy = original.copy()
            if number:
                copy[rng.choice(128, number, replace=False)] = rng.integers(1000, 2000, number)
            rows.append(copy)
    return np.array(rows)


@pytest.mark.parametrize(("threshold", "ngram"), [(0.8, 5), (0.6, 5), (0.9, 3)])
def test_minhash_removes_what_a_comparison_of_all_pairs_removes(near_copies, threshold, ngram):
    order = np.random.default_rng(1).permutation(len(near_copies))
    rows = near_copies[order]
    kept = np.flatnonzero(
        Deduplication("minhash", threshold, ngram).kept(rows, "rows", WORDS)
    ).tolist()
    assert kept == slow_kept(rows, threshold, ngram)
    assert 40 < len(kept) < len(rows) - 40


def test_a_row_that_is_near_removed_ones_alone_stays():
    """Each row is near the next one, which starts 8 tokens later: 116 of 132 5-grams are in both,
    108 of 140 two on.
    """
    tokens = np.arange(400, dtype=np.int32)
    rows = np.array([tokens[start : start + 128] for start in range(0, 256, 8)])
    kept = np.flatnonzero(
        Deduplication("minhash", threshold=0.8, ngram=5).kept(rows, "rows", WORDS)
    ).tolist()
    assert kept == slow_kept(rows, 0.8, 5) == [*range(0, len(rows), 2)]


def test_exact_keeps_the_first_of_equal_rows(near_copies, caplog):
    order = np.random.default_rng(2).permutation(len(near_copies))
    rows = near_copies[order]
    with caplog.at_level(logging.INFO):
        kept = np.flatnonzero(Deduplication("exact").kept(rows, "mine.txt", WORDS)).tolist()
    assert kept == sorted(np.unique(rows, axis=0, return_index=True)[1])
    assert (
        "mine.txt: 40 of 240 rows removed as copies of earlier rows (equal tokens)" in caplog.text
    )
    short = [np.array(ids, dtype=np.int32) for ids in ([1], [1, 2], [1], [2, 1], [1, 2])]
    for method in ("exact", "minhash"):
        assert Deduplication(method).kept(short, "x", WORDS).tolist() == [
            True,
            True,
            False,
            True,
            False,
        ]
    assert Deduplication("none").kept(rows, "x", WORDS).all()


def test_rows_are_compared_by_their_words_also_after_the_end_of_a_document(tokenizer):
    texts = [
        "One two, three four.",
        "one two three FOUR",
        "one two three five",
        "one two",
        "?!",
        "?!",
        "--",
    ]
    rows = [np.array(tokenizer.encode(text, add_bos=False), dtype=np.int32) for text in texts]
    find = Deduplication("minhash", threshold=0.9, ngram=2)
    assert find.kept(rows, "x", tokenizer).tolist() == [True, False, True, True, True, False, True]
    same_start = [
        np.array([1, WORDS.eos_id, *rest], dtype=np.int32)
        for rest in ([4, 5, 6], [7, 8, 9], [4, 5, 6, 3000])
    ]
    assert find.kept(same_start, "x", WORDS).tolist() == [True, True, False]
    # Other tokens of the same text without words; empty texts are no copies.
    marks = SimpleNamespace(eos_id=0, decode=lambda ids: "!" * sum(ids))
    rows = [np.array(ids, dtype=np.int32) for ids in ([1, 2], [3], [2], [-1], [-2])]
    assert find.kept(rows, "x", marks).tolist() == [True, False, True, True, True]


@pytest.mark.parametrize("layout", ["aligned", "concatenated"])
@pytest.mark.parametrize(("method", "noise"), [("exact", 0.0), ("minhash", 0.0), ("exact", 0.3)])
def test_the_passages_of_a_corpus_are_where_the_probe_file_says(
    tokenizer, corpus_file, tmp_path, layout, method, noise
):
    sources = {
        "source": str(corpus_file),
        "target_source": str(corpus_file),
        "cache_dir": str(tmp_path),
    }
    arguments = SIZES | {"num_repeats": 12, "layout": layout, "noise": noise, **sources}
    full = injected_corpus_dataset(tokenizer, **arguments)
    dataset = injected_corpus_dataset(
        tokenizer, deduplicate={"method": method, "ngram": 3}, **arguments
    )
    assert dataset.num_removed == len(full) - len(dataset)
    assert (dataset.num_removed > 0) == (noise == 0)
    assert (full.num_removed, dataset.probe_file != full.probe_file) == (0, True)
    stream = dataset.blocks.flatten()
    for passage in dataset.passages[:3]:
        assert passage.num_injections == len(passage.positions)
        for block, offset in passage.positions:
            copy = stream[32 * block + offset :][:32]
            different = (copy != passage.token_ids).sum()
            assert different == (
                0 if not noise else passage.changes[passage.positions.index([block, offset])][0]
            )
        if layout == "aligned":
            assert passage.num_injections == (12 if noise else 1)
    if layout == "concatenated" and not noise:
        # A passage that lost the block that it starts or ends in is not counted.
        windows = np.lib.stride_tricks.sliding_window_view(stream, 32)
        for passage in dataset.passages[:3]:
            found = np.flatnonzero((windows == passage.token_ids).all(axis=1))
            assert {32 * block + offset for block, offset in passage.positions} <= set(
                found.tolist()
            )
            assert passage.num_injections < 12


def test_text_data_sets_remove_copies_too(tokenizer, tmp_path):
    texts = embedded_documents("docstrings_validation")[:30]
    near = max(texts, key=len) + " Almost equal."
    file = tmp_path / "copies.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, texts[3], near]))
    cache = {"source": str(file), "cache_dir": str(tmp_path / "cache"), "max_seq_len": 100_000}
    plain = text_dataset(tokenizer, **cache)
    assert (len(plain), plain.num_removed) == (32, 0)
    for method, number in (("exact", 1), ("minhash", 2)):
        dataset = text_dataset(tokenizer, deduplicate=method, **cache)
        assert dataset.num_removed == number
        expected = [*plain][:30]
        if number == 1:
            expected.append(plain[31])
        assert [*dataset] == expected
    # Blocks are cut from the documents that stay, so that copies are found wherever they are.
    kept = write_rows(tmp_path / "kept.jsonl", texts)
    arguments = {"block_size": 32, "cache_dir": str(tmp_path / "cache")}
    expected = text_blocks_dataset(tokenizer, source=kept, **arguments)
    dataset = text_blocks_dataset(tokenizer, source=str(file), deduplicate="minhash", **arguments)
    assert (dataset.num_documents, dataset.num_removed) == (32, 2)
    np.testing.assert_array_equal(dataset.blocks, expected.blocks)
    few = text_blocks_dataset(
        tokenizer, source=str(file), deduplicate="minhash", num_blocks=3, **arguments
    )
    np.testing.assert_array_equal(few.blocks, expected.blocks[:3])


def test_the_section_is_a_method_or_a_mapping():
    config = OmegaConf.merge(
        {"deduplicate": "exact"}, OmegaConf.from_dotlist(["deduplicate.threshold=0.5"])
    )
    assert (
        Deduplication.of(config.deduplicate)
        == Deduplication.of({"threshold": 0.5})
        == Deduplication("minhash", 0.5)
    )
    assert Deduplication.of("minhash") == Deduplication.of({}) == Deduplication("minhash", 0.8, 5)
    for section, message in (
        ("fuzzy", "deduplicate is 'fuzzy': possible are none, exact, minhash"),
        (True, "deduplicate is 'true': possible are none, exact, minhash"),
        ({"method": "fuzzy"}, "deduplicate.method is 'fuzzy': possible are none, exact, minhash"),
        ({"treshold": 0.5}, "no key 'treshold'; did you mean 'threshold'"),
        ({"threshold": 0}, "threshold is 0"),
        ({"threshold": 1}, "threshold 1 is too high"),
    ):
        with pytest.raises(ValueError, match=message):
            Deduplication.of(section)
