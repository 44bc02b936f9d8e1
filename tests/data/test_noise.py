"""Copies of targets with noise, in the corpus and in the probe file."""

import json
from difflib import SequenceMatcher

import numpy as np
import pytest

from tfidf_tune.data import injected_corpus_dataset, read_probe_file
from tfidf_tune.data._passages import noisy_copy

SIZES = {"num_base": 12, "num_targets": 3, "num_repeats": 4, "block_size": 32, "min_target_tokens": 40}


@pytest.fixture
def build(tokenizer, corpus_file, tmp_path):
    def build(**changes):
        sources = {"source": str(corpus_file), "target_source": str(corpus_file), "cache_dir": str(tmp_path / "cache")}
        return injected_corpus_dataset(tokenizer, **(sources | SIZES | changes))

    return build


def is_subsequence(short, long):
    rest = iter(long)
    return all(token in rest for token in short)


def longest_common_subsequence(first, second):
    row = [0] * (len(second) + 1)
    for one in first:
        before, row = row, [0]
        for index, other in enumerate(second):
            row.append(before[index] + 1 if one == other else max(row[-1], before[index + 1]))
    return row[-1]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_an_exact_share_of_the_tokens_is_changed_as_the_kind_says(share):
    ids = np.arange(400, dtype=np.int32)
    words = np.array([500, 501, 501, 501, *range(400)], dtype=np.int32)
    rng, number = np.random.default_rng(0), round(share * 400)
    replaced, inserted, dropped = (
        noisy_copy(ids, share, kind, words, 500, rng) for kind in ("replace", "insert", "drop")
    )
    assert (replaced.token_ids != ids).sum() == number
    assert len(inserted.token_ids) == 400 + number
    assert len(dropped.token_ids) == 400 - number
    assert is_subsequence(ids, inserted.token_ids)
    assert is_subsequence(dropped.token_ids, ids)
    assert [copy.changes for copy in (replaced, inserted, dropped)] == [[number, 0, 0], [0, number, 0], [0, 0, number]]
    mixed = noisy_copy(ids, share, "mixed", words, 500, rng)
    assert sum(mixed.changes) == number
    assert min(mixed.changes) > 0
    assert len(mixed.token_ids) == 400 + mixed.changes[1] - mixed.changes[2]
    kept = 400 - mixed.changes[0] - mixed.changes[2]
    assert kept <= longest_common_subsequence(ids.tolist(), mixed.token_ids.tolist()) <= kept + 3  # by chance
    measured = noisy_copy(ids, share, "replace", words, 100, np.random.default_rng(1))
    assert measured.changes[0] == (measured.token_ids[:100] != ids[:100]).sum() < number


@pytest.mark.parametrize("kind", ["insert", "mixed"])
def test_changes_that_are_cut_off_do_not_count(kind):
    ids, words = np.arange(400, dtype=np.int32), np.array([998, 999], dtype=np.int32)
    copies = [noisy_copy(ids, 0.2, kind, words, 100, np.random.default_rng(seed)) for seed in range(20)]
    # Of a longer copy, the cut removes the last tokens; a shorter one has further tokens of the passage.
    found = [
        (copy.changes[0] + copy.changes[1], (copy.token_ids[:100] > 900).sum())
        for copy in copies
        if copy.token_ids[100] < 100
    ]
    assert len(found) > 5
    assert all(counted == contained for counted, contained in found)


@pytest.mark.parametrize("kind", ["replace", "insert"])
def test_new_tokens_are_as_frequent_as_in_the_base(kind):
    ids = np.zeros(40_000, dtype=np.int32)
    words = np.repeat(np.arange(4, dtype=np.int32), [10, 60, 25, 5])
    copy = noisy_copy(ids, 0.5, kind, words, 1, np.random.default_rng(0))
    found = np.bincount(copy.token_ids[copy.token_ids > 0]) / (copy.token_ids > 0).sum()
    np.testing.assert_allclose(found, np.array([0, 60, 25, 5]) / 90, atol=0.01)  # 0 would be no change


@pytest.mark.parametrize("layout", ["aligned", "concatenated"])
@pytest.mark.parametrize("kind", ["replace", "insert", "drop", "mixed"])
def test_the_probe_file_has_the_clean_passage_and_the_changes_of_each_copy(build, tokenizer, layout, kind, tmp_path):
    clean = build(layout=layout)
    dataset = build(layout=layout, noise=0.2, noise_kind=kind, probe_file=str(tmp_path / "probe.jsonl"))
    stream = dataset.blocks.flatten()
    assert [p.token_ids for p in dataset.passages] == [p.token_ids for p in clean.passages]
    assert read_probe_file(tmp_path / "probe.jsonl") == dataset.passages
    assert all(passage.changes is None for passage in (*clean.passages, *dataset.passages[3:]))
    for passage in dataset.passages[:3]:
        assert len(passage.changes) == len(passage.positions) == passage.num_injections
        copies = [stream[32 * block + offset :][:32].tolist() for block, offset in passage.positions]
        assert len({tuple(copy) for copy in copies}) == len(copies) >= 3, "each copy has changes of its own"
        for copy, (replaced, inserted, dropped) in zip(copies, passage.changes, strict=True):
            assert tokenizer.eos_id not in copy or kind in ("drop", "mixed")
            assert 0 < replaced + inserted + dropped < 20
            common = sum(
                match.size for match in SequenceMatcher(None, passage.token_ids, copy, False).get_matching_blocks()
            )
            assert common >= 32 - replaced - inserted - dropped - 8
            if kind == "replace":
                different = sum(one != other for one, other in zip(copy, passage.token_ids, strict=True))
                assert (different, inserted, dropped) == (replaced, 0, 0)
    if layout == "aligned":
        assert [p.positions for p in dataset.passages] == [p.positions for p in clean.passages]
        injected = [block for passage in dataset.passages for block, _ in passage.positions]
        base = [np.delete(one.blocks, injected, axis=0) for one in (dataset, clean)]
        np.testing.assert_array_equal(*base)


def test_noise_follows_from_the_seed_and_without_it_the_corpus_and_its_cache_are_as_before(build, tmp_path):
    noisy = build(noise=0.1)
    again = build(noise=0.1, cache_dir=str(tmp_path / "other"))
    np.testing.assert_array_equal(noisy.blocks, again.blocks)
    assert noisy.passages == again.passages
    other = build(noise=0.1, seed=1)
    assert [p.changes for p in other.passages] != [p.changes for p in noisy.passages]
    folders = set((tmp_path / "cache").iterdir())
    for kind in ("replace", "drop"):
        build(noise=0.0, noise_kind=kind)
    assert len(set((tmp_path / "cache").iterdir()) - folders) == 1


def test_a_copy_that_dropped_tokens_is_filled_up_with_eos_and_base_text(build, tokenizer):
    """Targets of 32 tokens have no tokens of their own to fill up with."""
    own = {
        "source": "embedded",
        "source_split": "docstrings_validation",
        "target_source": None,
        "min_target_tokens": 32,
    }
    clean = build(**own)
    dataset = build(**own, noise=0.25, noise_kind="drop")
    injected = [block for passage in clean.passages for block, _ in passage.positions]
    starts = {tuple(block[:7]) for block in np.delete(clean.blocks, injected, axis=0).tolist()}
    for passage in dataset.passages[:3]:
        for block, _ in passage.positions:
            copy = dataset.blocks[block].tolist()
            assert is_subsequence(copy[:24], passage.token_ids)
            assert copy[24] == tokenizer.eos_id
            assert tuple(copy[25:]) in starts
        assert passage.changes == [[0, 0, 8]] * 4


def test_noise_that_is_out_of_range_is_refused(build):
    for noise in (-0.1, 1, "0.1", True, float("nan")):
        with pytest.raises(ValueError, match="noise is .*: the share of .* set it to a number from 0 to below 1"):
            build(noise=noise)
    with pytest.raises(ValueError, match="noise_kind is 'shuffle': possible are replace, insert, drop, mixed"):
        build(noise=0.1, noise_kind="shuffle")
    with pytest.raises(ValueError, match="fewer than two different"):
        noisy_copy(np.arange(9), 0.5, "replace", np.ones(9, dtype=np.int32), 9, np.random.default_rng(0))


@pytest.mark.parametrize("changes", [[[1, 2]], [[1, 2, 3]] * 2, [[1, 2, -1]], 5])
def test_a_probe_file_with_invalid_changes_is_refused(build, tmp_path, changes):
    file = tmp_path / "probe.jsonl"
    passage = build().passages[0]
    file.write_text(json.dumps(passage.values() | {"positions": [[0, 0]], "num_injections": 1, "changes": changes}))
    with pytest.raises(
        ValueError, match=r"changes must be a list of \[replaced, inserted, dropped\], one for each pos"
    ):
        read_probe_file(file)
