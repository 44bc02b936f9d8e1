import itertools

import numpy as np

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


def test_aligned_positions_are_all_equally_likely_and_the_base_keeps_its_order():
    """Each of 27 blocks is a target's in 15 of 27 draws: four standard errors of 400 draws allowed."""
    counts = np.zeros(27)
    for seed in range(400):
        blocks, positions = aligned(seed)
        injected = [block for places in positions for block, _ in places]
        np.testing.assert_array_equal(np.delete(blocks, injected, axis=0), BASE)
        np.testing.assert_array_equal(blocks[injected], TARGETS.repeat(5, axis=0))
        counts[injected] += 1
    share = 15 / 27
    np.testing.assert_allclose(counts / 400, share, rtol=0, atol=4 * np.sqrt(share * (1 - share) / 400))


def test_concatenated_positions_are_all_occurrences_before_the_dropped_end():
    lost, straddling = 0, 0
    for seed in range(30):
        _, targets, (blocks, positions) = concatenated(seed, block_size=7)
        stream = blocks.flatten().tolist()
        for target, places in zip(targets, positions, strict=True):
            # Separated by EOS: a part of another target is not an occurrence.
            ids = [*target.tolist(), EOS]
            ends_the_stream = stream[-len(target) :] == target.tolist()
            found = [start for start in range(len(stream)) if stream[start : start + len(ids)] == ids]
            starts = [block * 7 + offset for block, offset in places]
            assert starts == found + [len(stream) - len(target)] * ends_the_stream
            lost += 5 - len(starts)
            straddling += any(offset + len(target) > 7 for _, offset in places)
    assert lost > 0  # otherwise the loop has tested nothing
    assert straddling > 0


def test_passages_are_the_first_distinct_ones_that_are_long_enough(tokenizer):
    documents = [
        "short", "the river sings over the house", "a", "the river sings over the green stone",
        "a stone walks under the light", "green " * 9,
    ]  # fmt: skip
    chosen = choose_passages(tokenizer, documents, count=2, min_tokens=6, block_size=4)
    # The fourth begins as the second: a control must not be a copy of a target.
    assert [text for text, _ in chosen] == [documents[1], documents[4]]
    for text, ids in chosen:
        assert ids.tolist() == tokenizer.encode(text, add_bos=False, add_eos=False)

    length = len(chosen[0][1])
    assert len(choose_passages(tokenizer, documents[1:2], count=1, min_tokens=length, block_size=4)) == 1
    assert choose_passages(tokenizer, documents[1:2], count=1, min_tokens=length + 1, block_size=4) == []
    endless = (f"{number} river sings over the house" for number in itertools.count())
    assert len(choose_passages(tokenizer, endless, count=300, min_tokens=4, block_size=8)) == 300
