import pickle
import shutil

import numpy as np
import pytest
from helpers.fakes.data import write_rows
from rouge_score.rouge_scorer import _lcs_table
from torchtune.models.llama2 import llama2_tokenizer

from tfidf_tune.data import hf_tokenizer, injected_corpus_dataset, load_documents, text_blocks
from tfidf_tune.passages import read_probe_file, write_probe_file
from tfidf_tune.passages.copies import noisy_copy
from tfidf_tune.results.intervals import MIN_UNITS

SIZES = {
    "num_base": 12,
    "num_targets": 3,
    "num_repeats": 4,
    "block_size": 32,
    "min_target_tokens": 40,
}


@pytest.fixture
def build(tokenizer, corpus_file, tmp_path):
    def build(**changes):
        arguments = {"source": str(corpus_file), "target_source": str(corpus_file)}
        arguments["cache_dir"] = str(tmp_path / "cache")
        return injected_corpus_dataset(
            changes.pop("tokenizer", tokenizer), **(arguments | SIZES | changes)
        )

    return build


def occurrences(stream, ids):
    windows = np.lib.stride_tricks.sliding_window_view(stream, len(ids))
    return np.flatnonzero((windows == np.asarray(ids)).all(axis=1)).tolist()


def injected_blocks(dataset):
    """The blocks that hold a copy."""
    blocks = []
    for passage in dataset.passages:
        blocks += [block for block, _ in passage.positions]
    return blocks


def long_lines(tokenizer, corpus_file):
    encoded = [
        tokenizer.encode(text, add_bos=False, add_eos=False)
        for text in load_documents(str(corpus_file))
    ]
    return [ids for ids in encoded if len(ids) >= 40]


@pytest.mark.parametrize("layout", ["aligned", "concatenated"])
def test_targets_occur_num_repeats_times_at_the_recorded_positions_and_controls_never(
    build, layout, tmp_path
):
    # No length is a multiple of 16, so concatenated targets straddle.
    dataset = build(layout=layout, block_size=16)
    stream = np.array([item["tokens"] for item in dataset]).flatten()
    assert all(
        item["labels"] == item["tokens"] and type(item["tokens"][0]) is int for item in dataset
    )
    assert [passage.kind for passage in dataset.passages] == ["target"] * 3 + ["control"] * 3
    for passage in dataset.passages:
        starts = [block * 16 + offset for block, offset in passage.positions]
        assert starts == occurrences(stream, passage.token_ids)
        assert passage.num_injections == len(starts) == (4 if passage.kind == "target" else 0)
    assert (stream.dtype, dataset.blocks.dtype, dataset.block_size) == (np.int64, np.int32, 16)

    again = build(layout=layout, block_size=16, cache_dir=str(tmp_path / "other cache"))
    np.testing.assert_array_equal(dataset.blocks, again.blocks)
    assert dataset.passages == again.passages
    other = build(layout=layout, block_size=16, seed=1)
    assert [p.token_ids for p in dataset.passages] == [p.token_ids for p in other.passages]
    assert [p.positions for p in dataset.passages] != [p.positions for p in other.passages]


@pytest.mark.parametrize("layout", ["aligned", "concatenated"])
def test_an_eos_that_a_text_has_is_not_doubled(layout, build, tokenizer, corpus_file, tmp_path):
    file = tmp_path / "ended.jsonl"
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    write_rows(file, [{"text": text + eos} for text in load_documents(str(corpus_file))])
    sources = {"source": str(file), "target_source": str(file)}
    stream = build(
        layout=layout, num_repeats=40, noise=0.5, noise_kind="drop", **sources
    ).blocks.flatten()
    assert tokenizer.eos_id in stream
    assert occurrences(stream, [tokenizer.eos_id] * 2) == []


def test_passages_with_the_same_measured_start_count_once(build, tokenizer, tmp_path):
    """A control must not be a copy of a target, nor a target be injected twice as often as the
    others.
    """
    lines = ["short"]
    for start in ("a river", "light", "it"):
        lines += [f"{start} sings over the house", f"{start} sings over the x"]
    file = tmp_path / "copies.txt"
    file.write_text("\n".join(lines))
    sizes = {
        "block_size": 4,
        "min_target_tokens": 4,
        "num_base": 1,
        "num_targets": 2,
        "num_controls": 1,
    }
    passages = build(target_source=str(file), **sizes).passages
    expected = [tokenizer.encode(line, add_bos=False)[:4] for line in lines[1::2]]
    assert [passage.token_ids for passage in passages] == expected


def test_targets_are_anywhere_and_one_that_loses_its_end_is_not_counted(build):
    places = set()
    num_lost = 0
    for seed in range(20):
        dataset = build(layout="concatenated", seed=seed, block_size=256, num_base=3, num_repeats=2)
        stream = dataset.blocks.flatten()
        for passage in dataset.passages[:3]:
            starts = [block * 256 + offset for block, offset in passage.positions]
            assert starts == occurrences(stream, passage.token_ids)
            num_lost += 2 - len(starts)
        places.update(injected_blocks(build(seed=seed)))
    assert num_lost > 0
    assert places == set(range(24))


def test_the_text_of_a_passage_keeps_special_tokens_and_torchtune_tokenizers_are_supported(
    build, sentencepiece_folder, tmp_path
):
    tokenizer = hf_tokenizer(str(sentencepiece_folder))
    file = tmp_path / "unknown.txt"
    file.write_text(
        "\n".join(f"{number} the river <unk> sings over the house" for number in range(9))
    )
    sizes = {"block_size": 8, "min_target_tokens": 8, "num_base": 1, "num_targets": 1}
    passage = build(tokenizer=tokenizer, target_source=str(file), **sizes).passages[0]
    assert tokenizer.special_tokens["<unk>"] in passage.token_ids
    assert "<unk>" in passage.text
    stock = llama2_tokenizer(str(sentencepiece_folder / "tokenizer.model"))
    of_stock = build(tokenizer=stock).passages[0]
    assert of_stock.tokenizer == "Llama2Tokenizer"
    for own, one in ((tokenizer, passage), (stock, of_stock)):
        assert own.encode(one.text, add_bos=False, add_eos=False) == one.token_ids


def test_the_aligned_base_is_the_text_without_targets_and_controls(build, tokenizer, corpus_file):
    dataset = build(num_base=-1)
    injected = injected_blocks(dataset)
    chosen = long_lines(tokenizer, corpus_file)[:6]
    documents = [
        text
        for text in load_documents(str(corpus_file))
        if tokenizer.encode(text, add_bos=False, add_eos=False) not in chosen
    ]
    assert (len(documents), dataset.num_left_out) == (34, 6)
    expected = text_blocks(tokenizer, documents, block_size=32, add_eos=True)
    np.testing.assert_array_equal(np.delete(dataset.blocks, injected, axis=0), expected)
    np.testing.assert_array_equal(dataset.blocks[injected[:4]], [dataset.passages[0].token_ids] * 4)
    assert len(build()) == 12 + 3 * 4


def test_a_second_run_does_not_tokenize_and_maps_the_blocks(build, tmp_path, monkeypatch):
    files = [tmp_path / name / "probe.jsonl" for name in ("first run", "second run")]
    first = build(probe_file=str(files[0]))
    monkeypatch.setattr(
        "tfidf_tune.data._injected_corpus.encode_texts",
        lambda *given: pytest.fail("tokenized again"),
    )
    again = build(probe_file=str(files[1]))
    np.testing.assert_array_equal(first.blocks, again.blocks)
    assert (first.passages, first.num_left_out) == (again.passages, again.num_left_out)
    assert isinstance(again.blocks, np.memmap)
    assert pickle.loads(pickle.dumps(again))[3] == first[3]  # as for a worker process
    for dataset, file in zip((first, again), files, strict=True):
        assert dataset.probe_file == file
        assert read_probe_file(file) == first.passages
        assert list(file.parent.iterdir()) == [file]


def test_what_changed_under_the_same_name_is_read_again(
    build, corpus_file, embedded_tokenizer_folder, sentencepiece_folder, tmp_path
):
    file = tmp_path / "changing.txt"
    lines = corpus_file.read_text(encoding="utf-8").splitlines()
    for changed in ("source", "target_source"):
        file.write_text("\n".join(lines), encoding="utf-8")
        first = build(**{changed: str(file)})
        file.write_text("\n".join(reversed(lines)), encoding="utf-8")
        assert not np.array_equal(build(**{changed: str(file)}).blocks, first.blocks)
    for folder in (embedded_tokenizer_folder, sentencepiece_folder):
        shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "tokenizer")
        tokenizer = hf_tokenizer(str(tmp_path / "tokenizer"))
        assert build(tokenizer=tokenizer).passages[0].tokenizer_fingerprint == tokenizer.fingerprint


def test_the_slower_of_two_writers_uses_the_corpus_of_the_faster_one(build, tmp_path, monkeypatch):
    def overtaken(path, passages):
        monkeypatch.setattr("tfidf_tune.data._injected_corpus.write_probe_file", write_probe_file)
        build()
        write_probe_file(path, passages)

    monkeypatch.setattr("tfidf_tune.data._injected_corpus.write_probe_file", overtaken)
    assert len(build()) == 24
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_impossible_settings_are_refused(build, embedded_tokenizer_folder, tmp_path):
    for changes, message in (
        ({"layout": "diagonal"}, "layout is 'diagonal'"),
        ({"num_base": -2}, "num_base .* got -2"),
        *(({"noise": noise}, "noise is ") for noise in (-0.1, 1, "0.1", float("nan"))),
        ({"noise_kind": "shuffle"}, "noise_kind is 'shuffle'"),
        ({"min_target_tokens": 31}, "min_target_tokens 31 is below block_size 32"),
        (
            {"tokenizer": hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=31)},
            "block_size is 32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build(**changes)
        assert not list(tmp_path.glob("cache/*"))


OWN = {
    "target_source": None,
    "num_base": -1,
    "num_targets": None,
    "min_target_tokens": None,
    "block_size": None,
}


def words(seed, number):
    letters = np.random.default_rng(seed).integers(ord("A"), ord("z"), (number, 4))
    return " ".join("".join(map(chr, row)) for row in letters)


@pytest.fixture(scope="module")
def own_texts(tmp_path_factory):
    """Short documents, one long one, documents of several blocks of which some occur twice,
    documents of 99 tokens.
    """
    folder = tmp_path_factory.mktemp("own")
    several = [words(seed, 150) for seed in range(30)]
    return {
        "short": write_rows(folder / "short.jsonl", [words(seed, 22) for seed in range(30)]),
        "one": write_rows(folder / "one.jsonl", [words(99, 3000)]),
        "several": write_rows(folder / "several.jsonl", [*several, *several[:8]]),
        "equal": write_rows(folder / "equal.jsonl", [words(seed, 22) for seed in (2, 4, 6, 10)]),
        "tiny": write_rows(folder / "tiny.jsonl", ["one two", "three four five"]),
    }


@pytest.mark.parametrize(
    ("name", "layout", "num_tokens", "num_targets"),
    [
        ("short", "concatenated", 64, 7),
        ("one", "concatenated", 256, 10),
        ("one", "aligned", 256, 10),
        ("several", "aligned", 256, 10),
    ],
)
def test_targets_of_the_text_itself_are_taken_out_of_it(
    build, own_texts, tokenizer, name, layout, num_tokens, num_targets
):
    assert num_targets in (7, MIN_UNITS), "a report judges the targets where the text has enough"
    dataset = build(source=own_texts[name], layout=layout, **OWN)
    stream = dataset.blocks.flatten()
    documents = [
        tokenizer.encode(text, add_bos=False, add_eos=False)
        for text in load_documents(own_texts[name])
    ]

    kinds = [passage.kind for passage in dataset.passages]
    assert kinds == ["target"] * num_targets + ["control"] * num_targets
    assert {len(passage.token_ids) for passage in dataset.passages} == {num_tokens}
    assert (dataset.block_size, dataset.num_documents, dataset.num_left_out) == (
        256,
        len(documents),
        2 * num_targets,
    )
    rest = [list(ids) for ids in documents]
    for passage in dataset.passages:
        found = []
        for number, ids in enumerate(documents):
            found += [(number, start) for start in occurrences(ids, passage.token_ids)]
        assert len(found) == 1, "a copy would stay in the base"
        [(number, start)] = found
        rest[number][start : start + num_tokens] = [-1] * num_tokens
        starts = [block * 256 + offset for block, offset in passage.positions]
        assert starts == occurrences(stream, passage.token_ids)
        most = 4 if passage.kind == "target" else 0
        assert passage.num_injections == len(starts) <= most
    # The tail is dropped.
    assert sum(passage.num_injections for passage in dataset.passages) >= 4 * num_targets - 1
    left = []
    for ids in rest:
        left += split_at_gaps(ids)
    assert sum(map(len, left)) == sum(map(len, documents)) - 2 * num_targets * num_tokens
    if layout == "aligned":
        injected = injected_blocks(dataset)
        base = np.delete(dataset.blocks, injected, axis=0).flatten()
        expected = []
        for part in left:
            expected += [*part, tokenizer.eos_id]
        assert base.tolist() == expected[: len(base)]
        assert len(expected) - len(base) < 256
    else:
        # The tail is dropped.
        assert sum(len(part) for part in left if not occurrences(stream, part)) < 2 * 256

    other = build(source=own_texts[name], layout=layout, seed=1, **OWN)
    assert [p.token_ids for p in other.passages] == [p.token_ids for p in dataset.passages]
    assert not np.array_equal(other.blocks, dataset.blocks)


@pytest.mark.parametrize("layout", ["aligned", "concatenated"])
@pytest.mark.parametrize("target_source", ["short", None])
def test_num_base_is_the_most_text_that_is_read(
    build, own_texts, tokenizer, tmp_path, layout, target_source
):
    sizes = {
        "num_base": 30,
        "layout": layout,
        "target_source": target_source and own_texts[target_source],
    }
    dataset = build(source=own_texts["several"], **sizes)
    documents = [*load_documents(own_texts["several"])]
    ends = np.cumsum([len(tokenizer.encode(text, add_bos=False)) for text in documents])  # with EOS
    num_read = 30 if layout == "concatenated" else int(np.searchsorted(ends, 30 * 32)) + 1
    assert dataset.num_documents == num_read < len(documents)
    # The same text without the rest of the file.
    first = write_rows(tmp_path / "first.jsonl", documents[:num_read])
    np.testing.assert_array_equal(dataset.blocks, build(source=first, **sizes).blocks)
    if layout == "aligned":
        num_blocks = len(dataset) - sum(passage.num_injections for passage in dataset.passages)
        # Three targets and three controls of the text itself, of 40 tokens each, are taken out of
        # the 30 blocks.
        assert num_blocks == (30 if target_source else (30 * 32 - 6 * 40) // 32)
    with pytest.raises(
        ValueError, match=r"found \d+ base (blocks of 32 tokens|documents) in .*, needed 1000000\."
    ):
        build(source=own_texts["several"], **sizes | {"num_base": 1_000_000})


def split_at_gaps(ids):
    parts = [[]]
    for token in ids:
        if token == -1 and parts[-1]:
            parts.append([])
        elif token != -1:
            parts[-1].append(token)
    return [part for part in parts if part]


def test_sizes_follow_from_the_text_and_from_the_model(build, own_texts, embedded_tokenizer_folder):
    small = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=48)
    dataset = build(source=own_texts["several"], tokenizer=small, **OWN)
    # A tenth of the 48-token windows that fit.
    documents = load_documents(own_texts["several"])
    num_windows = sum(
        len(small.encode(text, add_bos=False, add_eos=False)) // 48 for text in documents
    )
    assert dataset.block_size == 48
    assert len(dataset.passages) == 2 * (num_windows // 10)
    two_sources = build(
        source=own_texts["short"], target_source=own_texts["several"], num_base=-1, num_targets=None
    )
    assert [passage.kind for passage in two_sources.passages] == ["target"] * 15 + ["control"] * 15


def is_subsequence(short, long):
    rest = iter(long)
    return all(token in rest for token in short)


def test_an_exact_share_of_the_tokens_is_changed_as_the_kind_says():
    share = 0.1
    ids = np.arange(400, dtype=np.int32)
    words = np.array([500, 501, 501, 501, *range(400)], dtype=np.int32)
    rng = np.random.default_rng(0)
    number = round(share * 400)
    replaced, inserted, dropped = (
        noisy_copy(ids, share, kind, words, 500, rng) for kind in ("replace", "insert", "drop")
    )
    assert (replaced.token_ids != ids).sum() == number
    assert len(inserted.token_ids) == 400 + number
    assert len(dropped.token_ids) == 400 - number
    assert is_subsequence(ids, inserted.token_ids)
    assert is_subsequence(dropped.token_ids, ids)
    assert [copy.changes for copy in (replaced, inserted, dropped)] == [
        [number, 0, 0],
        [0, number, 0],
        [0, 0, number],
    ]
    mixed = noisy_copy(ids, share, "mixed", words, 500, rng)
    assert sum(mixed.changes) == number
    assert min(mixed.changes) > 0
    assert len(mixed.token_ids) == 400 + mixed.changes[1] - mixed.changes[2]
    kept = 400 - mixed.changes[0] - mixed.changes[2]
    # By chance.
    assert kept <= _lcs_table(ids.tolist(), mixed.token_ids.tolist())[-1][-1] <= kept + 3
    measured = noisy_copy(ids, share, "replace", words, 100, np.random.default_rng(1))
    assert measured.changes[0] == (measured.token_ids[:100] != ids[:100]).sum() < number
    # Tokens that move behind or before the last measured token count where they are in passage and
    # copy.
    new = np.array([500, 501], dtype=np.int32)
    inserted = noisy_copy(ids, share, "insert", new, 100, np.random.default_rng(1))
    assert inserted.changes[1] == (inserted.token_ids[:100] >= 500).sum() < number
    dropped = noisy_copy(ids, share, "drop", new, 100, np.random.default_rng(1))
    assert dropped.changes[2] == len(np.setdiff1d(ids[:100], dropped.token_ids)) < number
    with pytest.raises(ValueError, match="fewer than two different"):
        noisy_copy(ids, 0.5, "replace", np.ones(9, dtype=np.int32), 9, rng)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("aligned", "replace"),
        ("aligned", "drop"),
        ("concatenated", "insert"),
        ("concatenated", "mixed"),
    ],
)
def test_the_probe_file_has_the_clean_passage_and_the_changes_of_each_copy(
    build, tokenizer, layout, kind, tmp_path
):
    clean = build(layout=layout)
    dataset = build(
        layout=layout, noise=0.2, noise_kind=kind, probe_file=str(tmp_path / "probe.jsonl")
    )
    stream = dataset.blocks.flatten()
    assert [p.token_ids for p in dataset.passages] == [p.token_ids for p in clean.passages]
    assert read_probe_file(tmp_path / "probe.jsonl") == dataset.passages
    assert all(passage.changes is None for passage in (*clean.passages, *dataset.passages[3:]))
    for passage in dataset.passages[:3]:
        assert len(passage.changes) == len(passage.positions) == passage.num_injections
        copies = [
            stream[32 * block + offset :][:32].tolist() for block, offset in passage.positions
        ]
        assert len({tuple(copy) for copy in copies}) == len(copies) >= 3, (
            "each copy has changes of its own"
        )
        for copy, (replaced, inserted, dropped) in zip(copies, passage.changes, strict=True):
            assert tokenizer.eos_id not in copy or kind in ("drop", "mixed")
            assert 0 < replaced + inserted + dropped < 20
            if kind == "replace":
                different = sum(
                    one != other for one, other in zip(copy, passage.token_ids, strict=True)
                )
                assert (different, inserted, dropped) == (replaced, 0, 0)
    if layout == "aligned":
        assert [p.positions for p in dataset.passages] == [p.positions for p in clean.passages]
        injected = injected_blocks(dataset)
        base = [np.delete(one.blocks, injected, axis=0) for one in (dataset, clean)]
        np.testing.assert_array_equal(*base)


def test_noise_follows_from_the_seed_and_without_it_the_cache_is_as_before(build, tmp_path):
    noisy, again = (build(noise=0.1, cache_dir=str(tmp_path / name)) for name in ("cache", "other"))
    np.testing.assert_array_equal(noisy.blocks, again.blocks)
    assert [p.changes for p in build(noise=0.1, seed=1).passages] != [
        p.changes for p in noisy.passages
    ]
    folders = set((tmp_path / "cache").iterdir())
    for kind in ("replace", "drop"):
        build(noise=0.0, noise_kind=kind)
    assert len(set((tmp_path / "cache").iterdir()) - folders) == 1


def test_a_copy_that_dropped_tokens_is_filled_up_with_eos_and_base_text(build, tokenizer):
    """Targets of 32 tokens have no tokens of their own to fill up with."""
    own = {"source": "embedded", "source_split": "docstrings_validation", "target_source": None}
    own["min_target_tokens"] = 32
    clean = build(**own)
    dataset = build(**own, noise=0.25, noise_kind="drop")
    injected = injected_blocks(clean)
    starts = {tuple(block[:7]) for block in np.delete(clean.blocks, injected, axis=0).tolist()}
    for passage in dataset.passages[:3]:
        for block, _ in passage.positions:
            copy = dataset.blocks[block].tolist()
            assert is_subsequence(copy[:24], passage.token_ids)
            assert copy[24] == tokenizer.eos_id
            assert tuple(copy[25:]) in starts
        assert passage.changes == [[0, 0, 8]] * 4
