import numpy as np
import pytest

from tfidf_tune.data._injected_corpus import choose_passages, inject_aligned, inject_concatenated

BASE = np.arange(1000, 1000 + 12 * 4, dtype=np.int32).reshape(12, 4)
TARGETS = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], dtype=np.int32)
EOS = 0


def aligned(seed=0):
    return inject_aligned(BASE, TARGETS, num_repeats=5, seed=seed)


def concatenated(seed=0, block_size=4, targets=None):
    base = [np.arange(1000 + 10 * i, 1000 + 10 * i + i % 7 + 1, dtype=np.int32) for i in range(12)]
    targets = [np.array(ids, dtype=np.int32) for ids in targets or ([1, 2, 3, 4, 11], [5, 6], [9, 9, 9, 9])]
    injection = inject_concatenated(base, targets, num_repeats=5, block_size=block_size, eos_id=EOS, seed=seed)
    return base, targets, injection


def documents_of(stream):
    """The stream split at EOS, the last piece (cut off by the block size) included."""
    text = " ".join(map(str, stream))
    return [tuple(map(int, part.split())) for part in f" {text} ".replace(" 0 ", " | ").split("|")]


def test_aligned_targets_stand_at_their_positions_and_nowhere_else():
    blocks, positions = aligned()
    for target, places in zip(TARGETS, positions, strict=True):
        assert [offset for _, offset in places] == [0] * 5
        assert [block for block, _ in places] == np.flatnonzero((blocks == target).all(axis=1)).tolist()


def test_aligned_base_blocks_are_all_there_in_order():
    blocks, positions = aligned()
    assert len(blocks) == 12 + 3 * 5
    injected = [block for places in positions for block, _ in places]
    np.testing.assert_array_equal(np.delete(blocks, injected, axis=0), BASE)


def test_aligned_positions_are_all_equally_likely():
    """Each of 27 blocks is a target's in 15 of 27 draws: four standard errors of 400 draws allowed."""
    shares = np.mean([np.isin(aligned(seed).blocks[:, 0], TARGETS[:, 0]) for seed in range(400)], axis=0)
    share = 15 / 27
    np.testing.assert_allclose(shares, share, rtol=0, atol=4 * np.sqrt(share * (1 - share) / 400))


@pytest.mark.parametrize("inject", [aligned, lambda seed=0: concatenated(seed)[2]])
def test_the_same_seed_gives_the_same_corpus_and_another_seed_another(inject):
    first, again, other = inject(seed=3), inject(seed=3), inject(seed=4)
    np.testing.assert_array_equal(first.blocks, again.blocks)
    assert first.positions == again.positions != other.positions


def test_concatenated_documents_and_targets_are_whole_and_end_in_eos():
    base, targets, (blocks, _) = concatenated(block_size=1)
    expected = [tuple(ids.tolist()) for ids in [*base, *targets * 5]]
    *documents, rest = documents_of(blocks.flatten())
    assert rest == ()
    assert sorted(documents) == sorted(expected)
    assert documents != expected


@pytest.mark.parametrize("seed", range(20))
def test_concatenated_targets_stand_at_their_positions(seed):
    _, targets, (blocks, positions) = concatenated(seed)
    stream = blocks.flatten()
    for target, places in zip(targets, positions, strict=True):
        assert places == sorted(places)
        for block, offset in places:
            start = block * 4 + offset
            np.testing.assert_array_equal(stream[start : start + len(target[:4])], target[:4])
    assert sum(map(len, positions)) >= 14


def test_concatenated_targets_straddle_block_borders():
    _, _, (_, positions) = concatenated()
    assert any(offset != 0 for places in positions for _, offset in places)


def test_an_injection_in_the_dropped_tail_is_not_counted():
    lost = 0
    for seed in range(30):
        _, _, (blocks, positions) = concatenated(seed, block_size=7, targets=([1, 2, 3, 4],))
        stream = blocks.flatten().tolist()
        found = sum(stream[start : start + 4] == [1, 2, 3, 4] for start in range(len(stream)))
        assert len(positions[0]) == found
        lost += 5 - found
    assert lost > 0  # or the loop has shown nothing


def test_passages_are_the_first_that_are_long_enough(tokenizer):
    documents = ["short", "the river sings over the house", "a", "a stone walks under the light", "green " * 9]
    chosen = choose_passages(tokenizer, documents, count=2, min_tokens=6, block_size=4)
    assert [passage.text for passage in chosen] == [documents[1], documents[3]]
    for passage in chosen:
        assert passage.token_ids.tolist() == tokenizer.encode(passage.text, add_bos=False, add_eos=False)


def test_the_least_length_is_met_exactly(tokenizer):
    text = "the river sings over the house"
    length = len(tokenizer.encode_batch([text])[0])
    assert len(choose_passages(tokenizer, [text], count=1, min_tokens=length, block_size=4)) == 1
    assert choose_passages(tokenizer, [text], count=1, min_tokens=length + 1, block_size=4) == []


def test_passages_that_begin_alike_count_once(tokenizer):
    """Or a control could be a copy of a target."""
    documents = ["the river sings over the house", "the river sings over the green stone", "a stone walks under"]
    chosen = choose_passages(tokenizer, documents, count=3, min_tokens=4, block_size=4)
    assert [passage.text for passage in chosen] == [documents[0], documents[2]]


def test_choosing_reads_no_further_than_needed(tokenizer):
    def endless():
        number = 0
        while True:
            number += 1
            yield f"{number} river sings over the house"

    assert len(choose_passages(tokenizer, endless(), count=300, min_tokens=4, block_size=8)) == 300
