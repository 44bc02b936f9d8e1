"""What is held out is in no sequence that is trained on, and targets are counted there."""

import random
from collections import Counter
from dataclasses import replace
from itertools import chain, cycle, pairwise, product
from textwrap import wrap
from unittest.mock import patch

import numpy as np
import pytest
from helpers.fakes.data import WORDS, write_rows
from hypothesis import given
from hypothesis import strategies as st
from torchtune.datasets import ConcatDataset

from tfidf_tune.data import (
    embedded_documents,
    hf_tokenizer,
    injected_corpus_dataset,
    text_blocks_dataset,
    text_dataset,
)
from tfidf_tune.data import trained_passages as _trained_passages
from tfidf_tune.data.sequences import SequenceDataset, TextBlocksDataset
from tfidf_tune.data.trained_passages import trained_passages
from tfidf_tune.passages import Passage
from tfidf_tune.weighting import IGNORE_INDEX


def passage(kind, ids, number=0, **fields):
    values = {
        "num_injections": 0,
        "positions": [],
        "source": "s",
        "tokenizer": "t",
        "tokenizer_fingerprint": "f",
    }
    return Passage(f"{kind}-{number}", kind, "", list(ids), **values | fields)


def occurrences(ids, sequence):
    """Count from the left without overlap."""
    number = start = 0
    while start + len(ids) <= len(sequence):
        is_here = list(sequence[start : start + len(ids)]) == list(ids)
        number += is_here
        start += len(ids) if is_here else 1
    return number


def sequences(rows, learned=None):
    """A data set of rows of token ids, of which those of ``learned`` have labels."""
    tokens = np.concatenate([np.array(row, dtype=np.int32) for row in rows])
    ends = np.cumsum([len(row) for row in rows])
    spans = np.stack([np.append(0, ends[:-1]), ends], axis=1)
    is_label = np.ones(len(tokens), dtype=np.bool_) if learned is None else np.concatenate(learned)
    return SequenceDataset(tokens, is_label, spans, Counter())


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=70)


def targets_and_controls(wanted):
    """A target and a control for each of the lists of tokens."""
    kinds = ("target", "control")
    return [passage(kind, ids, number) for (number, ids), kind in product(enumerate(wanted), kinds)]


def are_in_any(runs, streams):
    return any(occurrences(run, stream) for run, stream in product(runs, streams))


@given(
    st.lists(TOKENS, min_size=1, max_size=4),
    TOKENS,
    st.lists(TOKENS, min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 99),
)
def test_targets_are_counted_and_controls_found_as_by_a_slow_search(
    rows, others, wanted, block_size, num_together
):
    blocks = np.array(
        (others * block_size)[: len(others) // block_size * block_size or block_size],
        dtype=np.int32,
    )
    blocks = blocks.reshape(-1, block_size)
    own_items = [{"tokens": row, "labels": row} for row in rows]  # a user's data set
    datasets = [sequences(rows), TextBlocksDataset(blocks), own_items]
    streams = [*rows, blocks.ravel().tolist(), *rows]
    passages = targets_and_controls(wanted)
    with patch.object(_trained_passages, "_CHUNK", num_together):
        found = trained_passages(passages, 0, datasets)
    expected = []
    num_controls = 0
    for one in passages:
        ids = one.token_ids
        if one.kind == "target":
            expected.append((one.id, sum(occurrences(ids, stream) for stream in streams)))
            continue
        length = min(50, max(16, len(ids) // 2), len(ids))
        runs = [ids[start : start + length] for start in range(len(ids) - length + 1)]
        is_trained = are_in_any(runs, streams)
        num_controls += is_trained
        expected += [] if is_trained else [(one.id, 0)]
    assert [(one.id, one.num_injections) for one in found.passages] == expected
    assert len(found.controls_in) == num_controls


def cut(documents, limit, is_kept):
    """The kept pieces of at most ``limit`` tokens, whether each continues the previous piece, and
    the joined pieces.
    """
    pieces = []
    continues = []
    stretches = []
    for document in documents:
        goes_on = False
        for start in range(0, len(document), limit):
            piece = document[start : start + limit]
            if next(is_kept):
                pieces.append(piece)
                continues.append(goes_on)
                if goes_on:
                    stretches[-1] = stretches[-1] + piece
                else:
                    stretches.append(piece)
                goes_on = True
            else:
                goes_on = False
    return pieces, np.array(continues, dtype=np.bool_), stretches


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=4),
    st.integers(1, 9),
    st.lists(st.booleans(), min_size=1, max_size=40),
    st.lists(TOKENS, min_size=1, max_size=4),
    st.integers(1, 99),
)
def test_rows_that_were_cut_from_one_text_are_searched_as_one_where_they_are_neighbours(
    documents, limit, kept, wanted, num_together
):
    pieces, continues, stretches = cut(documents, limit, cycle([*kept, True]))
    # Of blocks, too: one text, which is filled up to whole blocks.
    text = list(chain.from_iterable(documents))
    text += [2] * (-len(text) % limit)
    blocks, of_blocks, block_stretches = cut([text], limit, cycle([*kept, True]))
    if not (pieces and blocks):
        return
    datasets = [
        ConcatDataset([replace(sequences(pieces), continues=continues)]),
        TextBlocksDataset(np.array(blocks, dtype=np.int32), continues=of_blocks),
    ]
    passages = targets_and_controls(wanted)
    with patch.object(_trained_passages, "_CHUNK", num_together):
        found = trained_passages(passages, 0, datasets)
    counts = {
        one.id: sum(occurrences(one.token_ids, stretch) for stretch in stretches + block_stretches)
        for one in passages
        if one.kind == "target"
    }
    assert {one.id: one.num_injections for one in found.passages if one.kind == "target"} == counts
    num_trained = 0
    for one in passages:
        length = min(50, max(16, len(one.token_ids) // 2), len(one.token_ids))
        runs = [
            one.token_ids[start : start + length]
            for start in range(len(one.token_ids) - length + 1)
        ]
        is_trained = are_in_any(runs, stretches + block_stretches)
        num_trained += one.kind == "control" and is_trained
    assert len(found.controls_in) == num_trained


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [7, 30, 40])
def test_a_data_set_that_cuts_its_documents_short_trains_on_the_controls_of_another(
    tokenizer, embedded_tokenizer_folder, tmp_path, limit, packed
):
    texts = [text[:1500] for text in embedded_documents("train") if len(text) > 1500][:100]
    file = write_rows(tmp_path / "text.jsonl", texts)
    cache = str(tmp_path / "cache")
    own = text_blocks_dataset(tokenizer, source=file, holdout=0.1, block_size=64, cache_dir=cache)
    controls = {one.id for one in own.passages if one.kind == "control"}
    short = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=64)
    other = text_dataset(
        short,
        source=file,
        max_seq_len=limit,
        packed=packed,
        cache_dir=cache,
    )
    found = trained_passages(own.passages, 0, [own, other])
    held_out = {one.id for one in found.passages if one.kind == "control"}
    # The slow search: the runs of the documents, which are the same in pieces. A last piece of one
    # token is left out.
    runs = set()
    for text in texts:
        ids = short.encode(text)
        end = len(ids) - (len(ids) % limit == 1)
        runs.update(tuple(ids[start : start + 32]) for start in range(end - 31))
    expected = {
        one.id
        for one in own.passages
        if one.kind == "control"
        and runs.isdisjoint(tuple(one.token_ids[at : at + 32]) for at in range(33))
    }
    assert held_out == expected
    assert not expected
    assert controls


def test_a_passage_stands_in_no_two_blocks_between_which_the_text_has_another_one(
    tokenizer, tmp_path
):
    """In the layout "aligned" the copy of a target, or a block that was removed as a copy."""
    words = [
        word
        for word in WORDS
        if len(tokenizer.encode(f" {word}", add_bos=False, add_eos=False)) == 1
    ]
    rng = random.Random(0)
    first, second, third, target = (" ".join(["a", *rng.choices(words, k=14)]) for _ in range(4))
    arguments = {"block_size": 16, "cache_dir": str(tmp_path / "cache")}  # 15 words and EOS
    file = write_rows(tmp_path / "rows.jsonl", [first, second, first, third])
    arguments |= {
        "source": file,
        "target_source": write_rows(tmp_path / "targets.jsonl", [f"{target} {target}"]),
        "num_base": -1,
        "num_targets": 1,
        "num_controls": 0,
        "num_repeats": 2,
        "min_target_tokens": 16,
    }
    injected = injected_corpus_dataset(tokenizer, **arguments)
    injected_blocks = {block for block, _ in injected.passages[0].positions}
    expected = []
    for block in range(len(injected) - 1):
        is_seam = block in injected_blocks or block + 1 in injected_blocks
        expected.append(0 if is_seam else 1)
    assert {0, 1} == {*expected}
    assert seams(injected) == expected
    # Without the second copy of the target and of "first": what followed them goes on from nothing.
    blocks = [tuple(block) for block in injected.blocks.tolist()]
    kept = [number for number, block in enumerate(blocks) if block not in blocks[:number]]
    removed = injected_corpus_dataset(tokenizer, deduplicate="exact", **arguments)
    assert len(removed) == len(kept) == len(blocks) - 2
    expected = [expected[first] if second == first + 1 else 0 for first, second in pairwise(kept)]
    assert seams(removed) == expected


def seams(dataset):
    """How often each two blocks that are neighbours are found as one passage."""
    pairs = pairwise(dataset.blocks.tolist())
    passages = [
        passage("target", before + after, number) for number, (before, after) in enumerate(pairs)
    ]
    return [one.num_injections for one in trained_passages(passages, 0, [dataset]).passages]


def test_what_is_not_learned_is_not_trained_on_and_an_answer_is_found_without_its_prompt():
    prompt = [*range(100, 110)]
    answer = [*range(200, 240)]
    rows = [prompt + answer, [7, 7, *answer], [*answer, 5]]
    learned = [np.array([token >= 200 for token in row]) for row in rows[:2]] + [
        np.zeros(41, dtype=np.bool_)
    ]
    own = sequences(rows[:1], learned[:1])
    other = sequences(rows[1:], learned[1:])
    completion = {"num_prompt": len(prompt)}
    # Near copies count in its own data set.
    target = passage("target", rows[0], num_injections=3, **completion)
    controls = [
        # 21 of 41 would be half.
        passage("control", prompt + answer[:20] + [9] * 21, 1, **completion),
        passage("control", prompt + answer[:21] + [9] * 20, 2, **completion),
    ]
    found = trained_passages([target, *controls], 0, [own, other])
    assert [(one.id, one.num_injections) for one in found.passages] == [
        ("target-0", 4),
        ("control-1", 0),
    ]
    assert found.controls_in == [0]


def test_a_short_answer_is_a_copy_where_90_percent_of_it_are_learned():
    """As where the controls are chosen: of 10 tokens, 9 in a row."""
    answer = [*range(200, 210)]
    control = passage("control", [100, *answer], num_prompt=1)
    for shared, controls_in in ((9, [1]), (8, [])):
        other = sequences([[5, *answer[:shared], 6]])
        found = trained_passages([control], 0, [sequences([[1, 2, 3]]), other])
        assert found.controls_in == controls_in


def test_noisy_copies_keep_their_number_and_items_of_a_user_are_read_by_their_labels():
    ids = [*range(30)]
    noisy = passage(
        "target", ids, num_injections=5, positions=[[0, 0]] * 5, changes=[[1, 0, 0]] * 5
    )
    control = passage("control", [*range(60, 90)], 1)
    items = [
        {"tokens": [*range(60, 90)], "labels": [IGNORE_INDEX] * 30},
        {"tokens": ids, "labels": ids},
    ]
    found = trained_passages([noisy, control], 0, [sequences([[1, 2, 3]]), items])
    assert [(one.id, one.num_injections) for one in found.passages] == [
        ("target-0", 6),
        ("control-1", 0),
    ]


def test_eos_in_the_text_separates_documents(tokenizer, tmp_path):
    """Documents that hold EOS: their parts stand in the blocks as documents do."""
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    documents = [text for text in embedded_documents("train") if len(text) > 1200]
    # A document with EOS after every 40 characters, and its parts as documents.
    turns = [wrap(" ".join(text[:1200].split()), 40) for text in documents[:60]]
    rows = [*(eos.join(parts) for parts in turns), *chain.from_iterable(turns)]
    rows += [f"{text[:1200]}{eos}" for text in documents[60:160]]
    file = write_rows(tmp_path / "turns.jsonl", rows)
    dataset = text_blocks_dataset(
        tokenizer, source=file, holdout=0.2, block_size=32, cache_dir=str(tmp_path / "cache")
    )
    trained = dataset.blocks.ravel().tolist()
    controls = [one for one in dataset.passages if one.kind == "control"]
    targets = [one for one in dataset.passages if one.kind == "target"]
    assert len(controls) >= 10
    trained_runs = {tuple(trained[start : start + 16]) for start in range(len(trained))}
    for control in controls:
        assert trained_runs.isdisjoint(
            tuple(control.token_ids[start : start + 16]) for start in range(17)
        )
    for target in targets[:20]:
        assert target.num_injections == occurrences(target.token_ids, trained)
    assert trained_passages(dataset.passages, 0, [dataset]).passages == dataset.passages
