import dataclasses
import json
import random

import numpy as np
import pytest
from helpers.fakes.data import WORDS, controls_of, targets_of, write_rows

from tfidf_tune.data import embedded_documents
from tfidf_tune.passages import Passage, ProbeSpec, write_probe_file
from tfidf_tune.passages.choosing import make_probe
from tfidf_tune.passages.stretches import SHARED_TOKENS, Start

BLOCK = 64


def ids_of(tokenizer, text):
    return tokenizer.encode(text, add_bos=False, add_eos=False)


@pytest.fixture(scope="module")
def texts():
    """Documents of at least 700 characters without a duplicate of any length that matters."""
    chosen = [text[:700] for text in embedded_documents("train") if len(text) >= 700]
    return chosen[::7][:60]


@pytest.fixture
def spec(tmp_path, texts):
    """Training text with three planted duplicates, and held-out text of the same kind."""
    training = texts[:40]
    held_out = texts[40:]
    inner = training[0][150:550]
    planted = [
        *training,
        # Five times with its own document.
        *(f"{text[:101]} {inner} {text[101:]}" for text in training[10:14]),
        *[training[20]] * 2,  # three times, a whole document
        f"Twice here: {training[30][33:500]}",
    ]
    return ProbeSpec(
        sources=(write_rows(tmp_path / "training.jsonl", planted),),
        controls_source=write_rows(tmp_path / "held_out.jsonl", held_out),
        num_targets=10,
        num_controls=6,
        block_size=BLOCK,
    )


def with_(spec, **changes):
    return dataclasses.replace(spec, **changes)


def documents_of(tokenizer, source):
    with open(source, encoding="utf-8") as file:
        return [ids_of(tokenizer, json.loads(line)["text"].strip()) for line in file]


def test_targets_occur_only_at_their_positions_the_most_frequent_first(tokenizer, spec, texts):
    documents = documents_of(tokenizer, spec.sources[0])
    taken = set()
    made = make_probe(tokenizer, with_(spec, num_targets=30))
    targets = targets_of(made)
    assert len(targets) == 30
    for passage in targets:
        assert len(passage.token_ids) == BLOCK
        assert passage.num_injections == len(passage.positions)
        found = []
        for document, ids in enumerate(documents):
            offsets = range(len(ids) - BLOCK + 1)
            found += [
                [document, offset]
                for offset in offsets
                if ids[offset : offset + BLOCK] == passage.token_ids
            ]
        assert passage.positions == found
        for document, offset in passage.positions:  # no two targets share a token
            places = {(document, offset + i) for i in range(BLOCK)}
            assert not places & taken
            taken |= places
    repeats = [passage.num_injections for passage in targets]
    assert repeats[:3] == [5, 3, 2]
    assert repeats == sorted(repeats, reverse=True)
    assert repeats[-1] == 1
    assert made.num_duplicates == sum(count > 1 for count in repeats)
    assert targets[0].text.strip() in texts[0]
    assert texts[20].startswith(targets[1].text)


def test_a_target_starts_at_the_start_of_its_document_a_line_or_a_word(
    tokenizer, spec, tmp_path, texts
):
    words = " ".join(texts[0].split())
    lines = "unlike the rest of it\n" + " ".join(texts[1].split())
    rows = [
        texts[2],
        texts[2],
        f"b{words}",
        f"c{words}",
        f"before this, {lines}",
        f"or that, {lines}",
    ]
    source = write_rows(tmp_path / "starts.jsonl", rows)
    made = make_probe(
        tokenizer, ProbeSpec((source,), num_targets=3, num_controls=0, block_size=BLOCK)
    )
    assert made.starts == {Start.DOCUMENT: 1, Start.LINE: 1, Start.WORD: 1}
    by_document = {passage.positions[0][0]: passage for passage in targets_of(made)}
    assert by_document[0].positions == [[0, 0], [1, 0]]
    assert by_document[4].text.startswith(lines.split("\n")[1][:20])
    assert by_document[2].text.startswith(" ")

    source = write_rows(tmp_path / "quoted.jsonl", [f"({texts[0]}", texts[0], f"[{texts[0]}"])
    made = make_probe(
        tokenizer, ProbeSpec((source,), num_targets=1, num_controls=0, block_size=BLOCK)
    )
    assert made.passages[0].positions == [[0, 1], [1, 0], [2, 1]]
    assert made.starts == {Start.DOCUMENT: 1}  # one of its places is the start of a document

    made = make_probe(tokenizer, with_(spec, passages="random", num_targets=25))
    assert (made.num_duplicates, made.starts[Start.INSIDE_WORD], sum(made.starts.values())) == (
        0,
        0,
        25,
    )


def test_sentencepiece_words_are_recognised_although_decoding_strips_their_space(
    sentencepiece_folder, tmp_path, texts
):
    from tfidf_tune.data import hf_tokenizer

    tokenizer = hf_tokenizer(str(sentencepiece_folder))
    source = write_rows(tmp_path / "words.jsonl", [" ".join(text.split()) for text in texts[:20]])
    spec = ProbeSpec((source,), num_targets=12, num_controls=0, block_size=BLOCK, passages="random")
    made = make_probe(tokenizer, spec)
    assert made.starts[Start.INSIDE_WORD] == 0
    pieces = [tokenizer._hf.convert_ids_to_tokens(ids) for ids in documents_of(tokenizer, source)]
    for passage in targets_of(made):
        document, offset = passage.positions[0]
        before, first = pieces[document][offset - 1 : offset + 1] if offset else ("", "▁")
        assert first.startswith("▁") != (before == "▁")
        assert first != "▁" or not offset


@pytest.mark.parametrize("passages", ["duplicates", "near-duplicates", "random"])
def test_no_passage_has_eos_inside_if_none_shall(tokenizer, spec, tmp_path, texts, passages):
    def with_eos(text):
        eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
        return f"{text[:80]}{eos}{text[80:]}"

    sources = (
        write_rows(
            tmp_path / "turns.jsonl", [with_eos(text) for text in [*texts[:20], *texts[:8]]]
        ),
    )
    unseen = write_rows(tmp_path / "unseen.jsonl", [with_eos(text) for text in texts[40:]])
    changes = {
        "sources": sources,
        "controls_source": unseen,
        "passages": passages,
        "allow_fewer": True,
    }
    changes |= {"num_targets": 40, "num_controls": 40}
    for without in (False, True):
        made = make_probe(tokenizer, with_(spec, **changes, without_eos=without))
        has_eos = [tokenizer.eos_id in passage.token_ids for passage in made.passages]
        assert any(has_eos) != without
        assert min(len(targets_of(made)), len(controls_of(made))) > 5


def test_random_passages_share_no_token_in_any_of_their_occurrences(tokenizer, tmp_path, texts):
    """Stretches that occur at several places, in other surroundings, so that repeats lie beside
    others.
    """
    rng = np.random.default_rng(0)
    parts = [" ".join(text.split())[:150] for text in texts[:12]]
    rows = [
        " ".join(parts[number] for number in rng.integers(0, len(parts), 12)) for _ in range(12)
    ]
    source = write_rows(tmp_path / "parts.jsonl", rows)
    documents = documents_of(tokenizer, source)
    for seed in range(5):
        spec = ProbeSpec(
            (source,), num_targets=60, num_controls=0, block_size=16, passages="random", seed=seed
        )
        made = make_probe(tokenizer, with_(spec, allow_fewer=True))
        assert len(targets_of(made)) > 10
        taken = {}
        for passage in targets_of(made):
            for document, ids in enumerate(documents):
                for start in range(len(ids) - 15):
                    if ids[start : start + 16] == passage.token_ids:
                        for token in range(start, start + 16):
                            assert taken.setdefault((document, token), passage.id) == passage.id


def test_random_passages_count_their_repeats_without_overlap(tokenizer, tmp_path, texts):
    rows = []
    for text in texts[:4]:
        rows += [text] * 3
    source = write_rows(tmp_path / "copies.jsonl", rows)
    spec = ProbeSpec((source,), num_targets=4, num_controls=0, block_size=BLOCK, passages="random")
    passages = targets_of(make_probe(tokenizer, spec))
    assert [passage.num_injections for passage in passages] == [3] * 4
    assert len({tuple(passage.token_ids) for passage in passages}) == 4

    period = "one of these words is like another when all are told over and over"
    source = write_rows(tmp_path / "period.jsonl", [f"{period} " * 30])
    (passage,) = make_probe(tokenizer, with_(spec, sources=(source,), num_targets=1)).passages
    offsets = [offset for _, offset in passage.positions]
    assert len(offsets) == passage.num_injections > 2
    assert min(np.diff(offsets)) >= BLOCK


def test_repeats_of_random_passages_are_counted_in_documents_that_were_not_drawn_too(
    tokenizer, tmp_path
):
    rng = random.Random(0)
    rows = [" ".join(rng.choices(WORDS, k=60)) for _ in range(200)]
    source = write_rows(tmp_path / "text.jsonl", rows + rows)
    spec = ProbeSpec((source,), num_targets=8, num_controls=0, block_size=32, passages="random")
    for target in targets_of(make_probe(tokenizer, spec)):
        assert target.num_injections == 2
        (first, start), (second, again) = target.positions
        assert (second - first, again) == (len(rows), start)


def test_held_out_text_is_known_in_another_tokenization_and_of_a_completion_by_its_answer(
    tokenizer, tmp_path, texts
):
    answer = texts[1][100:600]
    prompt = texts[2][:150]
    held_out = [
        ("control", texts[0][200:550], None),
        ("control", prompt + answer, 150),
        ("target", texts[3][:500], None),
    ]
    held_out.append(("control", "the", None))  # too short to tell a place
    passages = [
        Passage(
            f"{kind}-{number}", kind, text, [7] * len(text), 0, [], "", "another", "f", num_prompt
        )
        for number, (kind, text, num_prompt) in enumerate(held_out)
    ]
    write_probe_file(tmp_path / "probe.jsonl", passages)
    source = write_rows(tmp_path / "text.jsonl", texts[:4])
    spec = ProbeSpec(
        (source,),
        num_targets=99,
        num_controls=0,
        block_size=20,
        passages="random",
        allow_fewer=True,
    )
    for known, expected in (("", {0, 1, 2, 3}), (str(tmp_path / "probe.jsonl"), {2, 3})):
        found = set()
        for target in targets_of(make_probe(tokenizer, with_(spec, held_out=known))):
            number, start = next(
                (n, text.find(target.text)) for n, text in enumerate(texts) if target.text in text
            )
            first, end = ((200, 550), (100, 600), (0, 150), (0, 500))[number]
            found |= (
                {number} if min(end, start + len(target.text)) - max(first, start) > 8 else set()
            )
        assert found == expected


def test_controls_share_no_stretch_with_the_training_text(tokenizer, spec, tmp_path, texts):
    documents = documents_of(tokenizer, spec.sources[0])
    stretches = set()
    for ids in documents:
        starts = range(len(ids) - SHARED_TOKENS + 1)
        stretches.update(tuple(ids[start : start + SHARED_TOKENS]) for start in starts)
    # Half of each document is of the training text.
    mixed = [
        f"{seen[:350]}{unseen[:350]}" for seen, unseen in zip(texts[:20], texts[40:], strict=True)
    ]
    source = write_rows(tmp_path / "mixed.jsonl", mixed)
    made = make_probe(tokenizer, with_(spec, controls_source=source))
    assert len(controls_of(made)) == 6
    assert made.num_refused > 0
    for passage in controls_of(made):
        ids = passage.token_ids
        assert len(ids) == BLOCK
        assert not any(
            tuple(ids[i : i + SHARED_TOKENS]) in stretches for i in range(BLOCK - SHARED_TOKENS + 1)
        )
        assert (passage.num_injections, passage.positions, passage.source) == (0, [], source)


@pytest.mark.parametrize("passages", ["duplicates", "near-duplicates"])
def test_each_passage_names_its_document(tokenizer, spec, passages, tmp_path):
    # Some of the controls start where a document starts.
    rows = []
    for ids in documents_of(tokenizer, spec.controls_source):
        rows.append(tokenizer.decode(ids[: BLOCK + len(rows) % 4]))
    spec = with_(spec, controls_source=write_rows(tmp_path / "short.jsonl", rows))
    made = make_probe(tokenizer, with_(spec, passages=passages, without_eos=True)).passages
    documents = {
        source: documents_of(tokenizer, source)
        for source in (spec.sources[0], spec.controls_source)
    }
    numbers = {"target": set(), "control": set()}
    for passage in made:
        ids = documents[passage.source][passage.document]
        size = len(passage.token_ids)
        windows = [ids[start : start + size] for start in range(len(ids) + 1 - size)]
        assert passage.token_ids in windows
        numbers[passage.kind].add(passage.document)
    assert min(len(each) for each in numbers.values()) > 3


def test_without_a_source_the_controls_are_of_both_splits_of_the_embedded_corpus(
    tokenizer, spec, tmp_path, texts, monkeypatch
):
    splits = {"validation": [texts[45][:400]], "train": [texts[50][:400]]}
    monkeypatch.setattr("tfidf_tune.passages._unseen.embedded_documents", splits.__getitem__)
    controls = controls_of(
        make_probe(tokenizer, with_(spec, controls_source=None, num_controls=2, block_size=120))
    )
    assert [passage.source for passage in controls] == ["embedded"] * 2
    assert {passage.text[:20] in splits["train"][0] for passage in controls} == {True, False}

    assert (
        controls_of(
            make_probe(tokenizer, with_(spec, num_controls=0, controls_source="/gone.jsonl"))
        )
        == []
    )
    copies = write_rows(tmp_path / "copies.jsonl", [texts[45][:250]] * 30 + texts[50:56])
    controls = controls_of(make_probe(tokenizer, with_(spec, controls_source=copies)))
    assert len({tuple(passage.token_ids) for passage in controls}) == 6


def test_passages_of_a_few_repeated_tokens_are_left_out(tokenizer, tmp_path, texts):
    dashes = write_rows(tmp_path / "dashes.jsonl", ["- " * 300, "= " * 200, "- " * 300, *texts[:8]])
    for passages in ("duplicates", "random"):
        made = make_probe(tokenizer, ProbeSpec((dashes,), "text", None, 8, 0, BLOCK, passages))
        assert made.num_repetitive > 0
        assert all(len(set(passage.token_ids)) >= BLOCK / 8 for passage in made.passages)
    only_dashes = write_rows(tmp_path / "only.jsonl", ["- " * 300])
    with pytest.raises(ValueError, match=r"found 0 passages .* \d+ more repeat a few tokens"):
        make_probe(tokenizer, ProbeSpec((only_dashes,), "text", None, 8, 0, BLOCK, "random"))


def test_impossible_settings_and_sources_are_refused(tokenizer, spec, tmp_path, texts):
    for changes, message in (
        ({"sources": ()}, "no source is given"),
        ({"passages": "all"}, "passages is 'all'"),
        ({"block_size": 1}, "block_size .* got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            with_(spec, **changes)
    (tmp_path / "lines.txt").write_text("\n".join(text.replace("\n", " ")[:60] for text in texts))
    short = (
        "found 0 passages of 64 .*lines.txt .60 documents .* num_targets is 10.* another sample_by"
    )
    for changes, error, message in (
        ({"sources": ("/gone.txt",)}, FileNotFoundError, r"/gone\.txt"),
        ({"column": "body"}, ValueError, "no column 'body'"),
        ({"sources": (str(tmp_path / "lines.txt"),), "sample_by": "line"}, ValueError, short),
        ({"sources": (str(tmp_path / "lines.txt"),) * 2}, ValueError, "lines.txt is named twice"),
        (
            {"controls_source": spec.sources[0]},
            ValueError,
            r"num_controls is 6\. \d+ more have 50 tokens in a row",
        ),
    ):
        with pytest.raises(error, match=message):
            make_probe(tokenizer, with_(spec, **changes))
