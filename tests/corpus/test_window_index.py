"""The search for repeated passages, against slow references on all token ids, and after an
interruption.
"""

import dataclasses
import json
import random
import string
from itertools import chain, product

import numpy as np
import pytest
from helpers.fakes.data import changed, controls_of, targets_of, write_folder
from helpers.processes.ranks import kill_when_opening

from tfidf_tune._tokenizer import encode_texts
from tfidf_tune.audit._choosing import _chosen
from tfidf_tune.commands.probe import main
from tfidf_tune.corpus import window_index
from tfidf_tune.data import embedded_documents
from tfidf_tune.passages import ProbeSpec, _targets, read_probe_file
from tfidf_tune.passages.choosing import make_probe
from tfidf_tune.passages.stretches import (
    SHARED_TOKENS,
    WindowChooser,
    duplicated_stretches,
    join_documents,
    name_repeated_windows,
)

BLOCK = 64


@pytest.fixture(scope="module")
def originals():
    return [text[:1500].strip() for text in embedded_documents("train") if len(text) >= 1500][::3][
        :60
    ]


@pytest.fixture(scope="module")
def texts(originals):
    """Forty documents; of the first five whole copies, of the next five long
    parts within others.
    """
    copies = []
    for number, text in enumerate(originals[:5]):
        copies += [text] * (number + 2)
    parts = []
    for number, text in enumerate(originals[5:10]):
        parts += [f"{originals[30 + number]} {text[200:1200]} and so on."] * 3
    made = [*originals[:40], *copies, *parts, "short", "", " \n "]
    random.Random(0).shuffle(made)
    return made


@pytest.fixture
def spec(tmp_path, texts, originals):
    return ProbeSpec(
        sources=(write_folder(tmp_path / "in", texts),),
        controls_source=write_folder(tmp_path / "held_out", [*originals[40:], *originals[:3]], 1),
        num_targets=15,
        num_controls=10,
        block_size=BLOCK,
    )


def encoded(tokenizer, texts):
    return [*encode_texts(tokenizer, (text.strip() for text in texts if text.strip()))]


def occurrences(passage, documents):
    """How often the ids of a passage occur, without overlap, by comparing them at each token."""
    ids = np.array(passage.token_ids, np.int32)
    count = 0
    for tokens in documents:
        end = 0
        for start in np.flatnonzero(
            tokens[: max(0, len(tokens) - len(ids) + 1)] == ids[0]
        ).tolist():
            if start >= end and (tokens[start : start + len(ids)] == ids).all():
                count = count + 1
                end = start + len(ids)
    return count


def most_frequent(tokenizer, documents, length, number):
    """The counts of the most frequent stretches without overlap, by naming all windows of all
    tokens.
    """
    corpus = join_documents(documents)
    stretches = duplicated_stretches(name_repeated_windows(corpus, length), length)
    chooser = WindowChooser(tokenizer, corpus, length, np.random.default_rng(0))
    found = chooser.duplicates(sorted(stretches, key=lambda stretch: -len(stretch[0])))
    return [len(starts) for starts in found][:number]


def planted(texts, parts, seed=0):
    """Copies of parts at random places in texts."""
    rng = random.Random(seed)
    texts = list(texts)
    for part in parts:
        for _ in range(rng.choice([1, 2, 3, 5, 8])):
            number = rng.randrange(len(texts))
            place = rng.randrange(len(texts[number]) + 1)
            texts[number] = texts[number][:place] + part + texts[number][place:]
    return texts


def corpus_of(kind):
    """Text with repeated parts: of any length and offset, in short and long documents, overlapping,
    without spaces.
    """
    rng = random.Random(1)
    base = embedded_documents("train")
    long = [text for text in base if len(text) > 3000]
    parts = []
    for length in (300, 600, 1000, 1500):
        parts += [rng.choice(long)[1000:][:length] for _ in range(4)]
    if kind == "prose":
        return planted([text[:4000] for text in base[:100]], parts)
    if kind == "long":
        return planted(
            ["\n\n".join(base[first : first + 20]) for first in range(0, 120, 20)], parts
        )
    if kind == "frequent":
        return planted([text[:4000] for text in base[:150]], parts[-1:] * 40)
    if kind == "periodic":
        line = base[3][:230].replace("\n", " ") + ".\n"
        return [line * 40, line * 13, *(text[:2000] for text in base[:40])]
    words = ["日本語", "東京", "дом", "мир", "straße", "naïve", "🙂", "中文字", "ab", "x"]
    made = [
        "".join(rng.choice(words) + rng.choice(["", "", " ", "。"]) for _ in range(400))
        for _ in range(60)
    ]
    return planted(made, [text[:300] for text in made[:6]])


def in_order_of_files(texts):
    """As the three files that a folder is written in hold them."""
    return list(chain.from_iterable(texts[part::3] for part in range(3)))


@pytest.mark.parametrize("kind", ["prose", "long", "frequent", "periodic", "characters"])
def test_the_most_frequent_passages_are_found_and_counted_as_by_slow_references(
    tokenizer, tmp_path, kind
):
    texts = corpus_of(kind)
    spec = ProbeSpec(
        (write_folder(tmp_path / "in", texts),), num_targets=40, num_controls=0, block_size=BLOCK
    )
    made = make_probe(tokenizer, dataclasses.replace(spec, allow_fewer=True))
    documents = encoded(tokenizer, in_order_of_files(texts))
    counts = [passage.num_injections for passage in made.passages]
    assert counts == [occurrences(passage, documents) for passage in made.passages]
    expected = most_frequent(tokenizer, documents, BLOCK, 40)
    # Passages of a window with more than 64 copies are chosen by 64 of them.
    assert counts[: made.num_duplicates] == expected or (
        kind == "frequent" and counts[0] == expected[0] > 64
    )
    assert made.num_duplicates > 0
    assert set(counts[made.num_duplicates :]) <= {1}
    for passage in made.passages:
        assert len(passage.token_ids) == BLOCK
        for document, offset in passage.positions:
            assert documents[document][offset : offset + BLOCK].tolist() == passage.token_ids
        if kind != "long":
            assert len(passage.positions) == passage.num_injections


SIGNS = {
    "emoji": [chr(code) for code in range(0x1F600, 0x1F640)],
    "base64": [*string.ascii_letters, *string.digits, "+", "/"],
    "han": [chr(code) for code in range(0x4E00, 0xA000)],
}


def signs(kind, number, seed):
    return "".join(random.Random(seed).choices(SIGNS[kind], k=number))


@pytest.mark.parametrize(
    ("kind", "block_size"),
    [("emoji", BLOCK), ("emoji", 32), ("base64", BLOCK), ("base64", 32), ("han", 8)],
)
def test_copies_of_text_without_words_are_found_at_any_offset(
    tokenizer, tmp_path, kind, block_size
):
    made = [signs(kind, 60 + 4 * number, number) for number in range(40)]
    texts = planted(made, [text[: 40 + 5 * number] for number, text in enumerate(made[:8])])
    source = write_folder(tmp_path / "in", texts)
    spec = ProbeSpec(
        (source,), num_targets=40, num_controls=0, block_size=block_size, allow_fewer=True
    )
    found = make_probe(tokenizer, spec)
    documents = encoded(tokenizer, in_order_of_files(texts))
    names = name_repeated_windows(join_documents(documents), block_size)
    expected = [len(starts) for starts, _ in duplicated_stretches(names, block_size)]
    assert sorted(found.stretch_repeats) == sorted(expected)
    assert max(expected) > 5
    assert found.num_duplicates > 1
    for passage in found.passages:
        assert passage.num_injections == occurrences(passage, documents)
    assert found.unsearched_share == 0


def test_a_document_of_emoji_among_prose_is_found(tokenizer, originals, tmp_path):
    texts = [*originals, *[signs("emoji", 25, 0)] * 30]
    sizes = {"num_targets": 5, "num_controls": 0, "block_size": BLOCK}
    made = make_probe(tokenizer, ProbeSpec((write_folder(tmp_path / "in", texts),), **sizes))
    assert made.passages[0].num_injections == 30
    assert signs("emoji", 25, 0).startswith(made.passages[0].text)


def test_near_copies_of_text_without_words_are_told_from_other_such_text(
    tokenizer, originals, tmp_path
):
    copies = []
    for seed in range(4):
        text = [*signs("emoji", 60, 0)]
        for place in random.Random(seed).sample(range(60), 4):
            text[place] = "\U0001f4a9"
        copies.append("".join(text))
    texts = [*originals[:20], *copies, *(signs("emoji", 60, number) for number in range(1, 5))]
    sizes = {"num_targets": 20, "num_controls": 0, "block_size": BLOCK, "allow_fewer": True}
    source = write_folder(tmp_path / "in", texts)
    made = make_probe(tokenizer, ProbeSpec((source,), passages="near-duplicates", **sizes))
    counts = {True: [], False: []}
    for passage in made.passages:
        text = passage.text.strip("\ufffd")
        if text[0] in SIGNS["emoji"]:
            counts[any(text in copy for copy in copies)].append(passage.num_injections)
    assert max(counts[True]) >= 3
    assert set(counts[False]) == {1}


def test_the_share_of_passages_whose_copies_cannot_be_found_is_said(tokenizer, originals, tmp_path):
    """Among much prose, windows have more bytes than a passage of digits, whose
    tokens are short.
    """
    prose = [text[:300] for text in originals] * 2
    digits = ["".join(random.Random(seed).choices("0123456789", k=128)) for seed in range(4)]
    source = write_folder(
        tmp_path / "in", [*(f"{text}{number}" for number, text in enumerate(prose)), *digits], 1
    )
    made = make_probe(
        tokenizer, ProbeSpec((source,), num_targets=5, num_controls=0, block_size=BLOCK, seed=1)
    )
    assert 0 < made.unsearched_share < 0.05
    assert f"Copies of {made.unsearched_share:.1%} of the passages" in _chosen(
        made, ProbeSpec((source,))
    )


def test_passages_of_documents_that_were_not_compared_are_counted_too(
    tokenizer, spec, tmp_path, monkeypatch, texts
):
    monkeypatch.setattr(_targets, "_COPIES", 2)
    monkeypatch.setattr(window_index, "_WHOLE_BYTES", 1200)
    made = make_probe(tokenizer, spec, tmp_path / "cut")
    assert (tmp_path / "cut" / "copies-4096").is_dir()
    targets = targets_of(made)
    documents = encoded(tokenizer, texts)
    repeats = [passage.num_injections for passage in targets]
    assert repeats == [occurrences(passage, documents) for passage in targets]
    assert repeats[: made.num_duplicates] == most_frequent(
        tokenizer, documents, BLOCK, spec.num_targets
    )
    for passage in targets:
        with open(passage.source) as file:
            assert occurrences(
                passage, encoded(tokenizer, (json.loads(line)["text"] for line in file))
            )


def test_many_small_runs_and_parts_give_the_same(tokenizer, spec, tmp_path, monkeypatch):
    whole = make_probe(tokenizer, spec, tmp_path / "whole")
    monkeypatch.setattr(window_index, "_BATCH_BYTES", 3000)
    monkeypatch.setattr(window_index, "_RUN_RECORDS", 40)
    monkeypatch.setattr(window_index, "_PART_RECORDS", 100)
    small = make_probe(tokenizer, dataclasses.replace(spec, num_targets=10), tmp_path / "small")
    assert len(list((tmp_path / "small" / "runs").glob("*.npy"))) > 6
    assert len(list((tmp_path / "small" / "parts").glob("*.npy"))) > 2
    assert [one.num_injections for one in targets_of(small)] == [
        one.num_injections for one in targets_of(whole)
    ][:10]


def test_copies_with_changed_words_are_found_as_near_ones_only(tokenizer, originals, tmp_path):
    near = [changed(text, 0.04, seed) for text, seed in product(originals[:6], range(4))]
    source = write_folder(tmp_path / "in", [*originals, *near])
    spec = ProbeSpec(
        (source,), num_targets=8, num_controls=0, block_size=200, passages="near-duplicates"
    )
    made = make_probe(tokenizer, spec, tmp_path / "near")
    own = [one for one in targets_of(made) if one.num_injections > 1]
    assert made.num_duplicates == len(own) >= 6
    starts = {text[:40] for text in originals[:6]}
    for passage in own:
        assert 2 <= passage.num_injections <= 5
        words = set(passage.text.split())
        assert max(len(words & set(text.split())) / len(words) for text in originals[:6]) > 0.8
    assert {one.num_injections for one in own} & {4, 5}
    assert len(starts) == 6
    exact = make_probe(
        tokenizer, dataclasses.replace(spec, passages="duplicates"), tmp_path / "exact"
    )
    assert sum(one.num_injections > 1 for one in targets_of(exact)) < len(own)


@pytest.mark.parametrize("passages", ["duplicates", "near-duplicates"])
def test_copies_at_the_same_place_of_different_files_are_copies(
    tokenizer, originals, tmp_path, passages
):
    """Documents are numbered in each file, so that a number alone names no document."""
    # Three files, with the same first document; the first two have the second one twice. Places
    # differ by some bytes.
    order = [0, 0, 0, 1, 2, 3, 1, 2, 4]
    documents = [f"{'-' * place} {originals[number]}" for place, number in enumerate(order)]
    source = write_folder(tmp_path / "in", documents)
    spec = ProbeSpec(
        (source,),
        num_targets=20,
        num_controls=0,
        block_size=200,
        passages=passages,
        allow_fewer=True,
    )
    targets = targets_of(make_probe(tokenizer, spec, tmp_path / "work"))
    found = {
        (number, passage.num_injections)
        for passage, (number, text) in product(targets, enumerate(originals))
        if passage.text[:100].strip() in text
    }
    assert found == {(0, 3), (1, 2), (2, 2), (3, 1), (4, 1)}


def test_controls_of_another_kind_that_are_in_the_text_are_refused(tokenizer, originals, tmp_path):
    rng = random.Random(0)
    digits = [" ".join(str(rng.randrange(10)) for _ in range(300)) for _ in range(8)]
    source = write_folder(tmp_path / "in", [*originals[:30], *digits])
    for name, controls in (("digits", digits), ("both", [*digits, *originals[30:]])):
        sizes = {"num_targets": 3, "num_controls": 20, "block_size": BLOCK, "allow_fewer": True}
        spec = ProbeSpec(
            (source,), controls_source=write_folder(tmp_path / name, controls), **sizes
        )
        made = make_probe(tokenizer, spec, tmp_path / f"work-{name}")
        texts = [one.text for one in made.passages if one.kind == "control"]
        assert bool(texts) == (name == "both")
        assert not [text for text in texts if any(text.strip() in one for one in digits)]


@pytest.mark.parametrize(
    "kind", ["ends in one sign", "one sign", "after a word", "a run after a word"]
)
def test_controls_with_few_words_that_are_in_the_text_are_refused(
    tokenizer, originals, tmp_path, kind
):
    """What a control shares with the text has no word, or only one that is at another place."""
    block_size = {"one sign": 8, "a run after a word": 256}.get(kind, BLOCK)
    (tilde,) = tokenizer.encode("~", add_bos=False, add_eos=False)
    held_out = []
    training = [*originals[:30]]
    for seed in range(60):
        emoji = signs("emoji", 14, seed)
        if kind == "one sign":
            held_out.append("~" * 8)
            training.append(f"see {'~' * 12}")
        elif kind == "ends in one sign":
            held_out.append(f"{originals[seed % len(originals)][:40]}{'~' * 56}")
            training.append(f"see {'~' * 56}")
        elif kind == "after a word":
            held_out.append(f"{signs('emoji', 2, seed + 1)}{emoji}")
            training.append(f"see x{emoji}x")
        else:
            shared = f"{emoji[:5]}{'~' * 20}{emoji[5:9]}"
            held_out.append(f"{signs('emoji', 25, seed + 1)}{shared}{signs('emoji', 25, seed + 2)}")
            training.append(f"x{shared}x")
    assert tokenizer.decode([tilde]) == "~"
    spec = ProbeSpec(
        (write_folder(tmp_path / "in", training),),
        controls_source=write_folder(tmp_path / "held_out", held_out),
        num_targets=1,
        num_controls=40,
        block_size=block_size,
        allow_fewer=True,
    )
    made = make_probe(tokenizer, spec)
    num_shared = min(SHARED_TOKENS, block_size)
    trained = set()
    for ids in encoded(tokenizer, training):
        trained |= {
            tuple(ids[first : first + num_shared]) for first in range(len(ids) - num_shared + 1)
        }
    assert made.num_refused > 0
    for control in controls_of(made):
        ids = control.token_ids
        assert (
            not {
                tuple(ids[first : first + num_shared]) for first in range(len(ids) - num_shared + 1)
            }
            & trained
        )


def test_an_interrupted_search_goes_on(embedded_tokenizer_folder, texts, tmp_path, capfd):
    source = write_folder(
        tmp_path / "in",
        [f"{text[:400]} {number}" for number, text in enumerate(texts * 6)],
        num_files=4,
    )
    arguments = [
        "make",
        source,
        "--tokenizer",
        str(embedded_tokenizer_folder),
        "--num-targets",
        "10",
        "--num-controls",
        "0",
        "--block-size",
        str(BLOCK),
    ]
    main([*arguments, "--output", str(tmp_path / "whole.jsonl")])
    command = [*arguments, "--output", str(tmp_path / "cut.jsonl")]
    kill_when_opening(tmp_path / "cut.search" / "1" / "completions" / "00002", main, command)
    with pytest.raises(
        ValueError, match=r"interrupted run with other arguments: --seed was 0, is 1"
    ):
        main([*command, "--seed", "1"])
    capfd.readouterr()
    main(command)
    out, err = capfd.readouterr()
    assert "Reading 0.jsonl" not in err
    assert "Reading 3.jsonl (4 of 4)" in err
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "cut.search").exists()
    main([*command, "--overwrite"])
    assert "about" in out
    assert read_probe_file(tmp_path / "cut.jsonl")[0].num_injections > 10
