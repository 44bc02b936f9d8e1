import json
import pickle
import shutil

import numpy as np
import pytest
from torchtune import config as torchtune_config
from torchtune.models.llama2 import llama2_tokenizer

from tfidf_tune.data import (
    hf_tokenizer,
    injected_corpus_dataset,
    load_documents,
    read_probe_file,
    text_blocks,
    train_embedded_tokenizer,
    write_probe_file,
)

SIZES = {"num_base": 12, "num_targets": 3, "num_repeats": 4, "block_size": 32, "min_target_tokens": 40}
LAYOUTS = pytest.mark.parametrize("layout", ["aligned", "concatenated"])


@pytest.fixture
def build(tokenizer, corpus_file, tmp_path):
    def build(**changes):
        arguments = {
            "source": str(corpus_file),
            "target_source": str(corpus_file),
            "cache_dir": str(tmp_path / "cache"),
        }
        return injected_corpus_dataset(changes.pop("tokenizer", tokenizer), **(arguments | SIZES | changes))

    return build


def occurrences(stream, ids):
    windows = np.lib.stride_tricks.sliding_window_view(stream, len(ids))
    return np.flatnonzero((windows == np.asarray(ids)).all(axis=1)).tolist()


def long_lines(tokenizer, corpus_file):
    encoded = [tokenizer.encode(text, add_bos=False, add_eos=False) for text in load_documents(str(corpus_file))]
    return [ids for ids in encoded if len(ids) >= 40]


@LAYOUTS
def test_each_target_stands_num_repeats_times_at_the_recorded_positions(build, layout):
    dataset = build(layout=layout, block_size=16)  # 16 divides nothing here, so targets straddle
    stream = np.array([dataset[index]["tokens"] for index in range(len(dataset))]).flatten()
    targets = [passage for passage in dataset.passages if passage.kind == "target"]
    assert len(targets) == 3
    for target in targets:
        starts = [block * 16 + offset for block, offset in target.positions]
        assert starts == occurrences(stream, target.token_ids)
        assert target.num_injections == len(starts) == 4


@LAYOUTS
def test_no_block_holds_a_control(build, layout):
    dataset = build(layout=layout)
    controls = [passage for passage in dataset.passages if passage.kind == "control"]
    assert len(controls) == 3
    for control in controls:
        assert (control.num_injections, control.positions) == (0, [])
        assert occurrences(dataset.blocks.flatten(), control.token_ids) == []


def test_aligned_targets_fill_exactly_one_block(build):
    dataset = build()
    for passage in dataset.passages[:3]:
        for block, offset in passage.positions:
            assert offset == 0
            assert dataset[block]["tokens"] == passage.token_ids


def test_concatenated_targets_are_whole_and_straddle_blocks(build, tokenizer, corpus_file):
    dataset = build(layout="concatenated", seed=2)  # a seed that puts no target last, where the tail is dropped
    stream = dataset.blocks.flatten()
    whole = [[*ids, tokenizer.eos_id] for ids in long_lines(tokenizer, corpus_file)[:3]]
    assert [len(occurrences(stream, ids)) for ids in whole] == [4, 4, 4]
    assert any(offset for passage in dataset.passages for _, offset in passage.positions)


@LAYOUTS
def test_targets_are_the_first_long_passages_and_controls_the_next(build, layout, tokenizer, corpus_file):
    passages = build(layout=layout, num_controls=2).passages
    assert [passage.id for passage in passages] == [
        "target-0000",
        "target-0001",
        "target-0002",
        "control-0000",
        "control-0001",
    ]
    expected = [ids[:32] for ids in long_lines(tokenizer, corpus_file)[:5]]
    assert [passage.token_ids for passage in passages] == expected


def test_passages_name_their_source_and_tokenizer(build, tokenizer, corpus_file):
    passage = build().passages[0]
    assert passage.text == tokenizer.decode(passage.token_ids)
    assert passage.source == str(corpus_file)
    assert passage.tokenizer == tokenizer.name
    assert passage.tokenizer_fingerprint == tokenizer.fingerprint


def test_the_text_of_a_passage_keeps_what_a_special_token_spells(build, sentencepiece_folder, tmp_path):
    tokenizer = hf_tokenizer(str(sentencepiece_folder))
    file = tmp_path / "unknown.txt"
    file.write_text("\n".join(f"{number} the river <unk> sings over the house" for number in range(9)))
    sizes = {"block_size": 8, "min_target_tokens": 8, "num_base": 1, "num_targets": 1}
    passage = build(tokenizer=tokenizer, target_source=str(file), **sizes).passages[0]
    assert tokenizer.special_tokens["<unk>"] in passage.token_ids
    assert "<unk>" in passage.text
    assert tokenizer.encode(passage.text, add_bos=False, add_eos=False) == passage.token_ids


@LAYOUTS
def test_targets_and_controls_are_left_out_of_the_base(build, layout):
    """Base and targets are one file here, so 3 + 3 of its 40 documents must go."""
    assert build(layout=layout, num_base=-1).num_left_out == 6


def test_the_aligned_base_is_the_text_without_targets_and_controls(build, tokenizer, corpus_file):
    dataset = build(num_base=-1)
    injected = [block for passage in dataset.passages for block, _ in passage.positions]
    chosen = long_lines(tokenizer, corpus_file)[:6]
    documents = [
        text
        for text in load_documents(str(corpus_file))
        if tokenizer.encode(text, add_bos=False, add_eos=False) not in chosen
    ]
    assert len(documents) == 34
    expected = text_blocks(tokenizer, documents, block_size=32, add_eos=True)
    np.testing.assert_array_equal(np.delete(dataset.blocks, injected, axis=0), expected)


@LAYOUTS
def test_the_same_settings_give_the_same_corpus(build, layout, tmp_path):
    first = build(layout=layout)
    again = build(layout=layout, cache_dir=str(tmp_path / "other cache"))
    np.testing.assert_array_equal(first.blocks, again.blocks)
    assert first.passages == again.passages


@LAYOUTS
def test_another_seed_gives_other_positions_of_the_same_targets(build, layout):
    first, other = build(layout=layout), build(layout=layout, seed=1)
    assert [p.token_ids for p in first.passages] == [p.token_ids for p in other.passages]
    assert [p.positions for p in first.passages] != [p.positions for p in other.passages]


def test_the_number_of_blocks_is_base_plus_injections(build):
    dataset = build()
    assert len(dataset) == 12 + 3 * 4
    assert dataset.blocks.dtype == np.int32
    assert dataset.block_size == 32


def test_concatenated_takes_num_base_documents(build, tokenizer):
    blocks = build(layout="concatenated", block_size=1).blocks
    assert np.count_nonzero(blocks == tokenizer.eos_id) == 12 + 3 * 4


def test_an_item_has_labels_equal_to_its_tokens(build):
    item = build()[0]
    assert item["tokens"] == item["labels"]
    assert len(item["tokens"]) == 32
    assert all(type(token) is int for token in item["tokens"])


def test_iteration_ends(build):
    assert len(list(build())) == 24


def test_no_controls_can_be_asked_for(build):
    assert {passage.kind for passage in build(num_controls=0).passages} == {"target"}


def test_torchtune_tokenizers_are_taken(build, sentencepiece_folder):
    tokenizer = llama2_tokenizer(str(sentencepiece_folder / "tokenizer.model"))
    passage = build(tokenizer=tokenizer).passages[0]
    assert passage.token_ids == tokenizer.encode(passage.text, add_bos=False, add_eos=False)
    assert passage.tokenizer == "Llama2Tokenizer"


def test_a_config_can_name_it(tokenizer, corpus_file, tmp_path):
    from omegaconf import OmegaConf

    component = {"_component_": "tfidf_tune.data.injected_corpus_dataset", "cache_dir": str(tmp_path)}
    sources = {"source": str(corpus_file), "target_source": str(corpus_file)}
    assert len(torchtune_config.instantiate(OmegaConf.create(component | sources | SIZES), tokenizer)) == 24


def test_the_embedded_corpus_is_enough_for_targets_and_base(build):
    dataset = build(source="embedded", target_source="embedded", num_base=200, num_targets=60, min_target_tokens=256)
    assert len(dataset) == 200 + 60 * 4


def test_a_second_run_does_not_tokenize(build, tokenizer, monkeypatch):
    first = build()
    batches = []
    monkeypatch.setattr(type(tokenizer), "encode_batch", lambda self, texts: batches.append(texts))
    again = build()
    assert batches == []
    np.testing.assert_array_equal(first.blocks, again.blocks)
    assert first.passages == again.passages
    assert first.num_left_out == again.num_left_out


@pytest.mark.parametrize("changed", ["source", "target_source"])
def test_a_changed_file_is_read_again(build, corpus_file, tmp_path, changed):
    file = tmp_path / "changing.txt"
    lines = corpus_file.read_text(encoding="utf-8").splitlines()
    file.write_text("\n".join(lines), encoding="utf-8")
    first = build(**{changed: str(file)})
    file.write_text("\n".join(reversed(lines)), encoding="utf-8")
    assert not np.array_equal(build(**{changed: str(file)}).blocks, first.blocks)


def test_a_tokenizer_that_changed_under_its_name_is_used_anew(build, tmp_path):
    folder = tmp_path / "tokenizer"
    for vocab_size in (300, 400):
        shutil.rmtree(folder, ignore_errors=True)
        tokenizer = hf_tokenizer(str(train_embedded_tokenizer(folder, vocab_size=vocab_size)))
        assert build(tokenizer=tokenizer).passages[0].tokenizer_fingerprint == tokenizer.fingerprint


def test_a_cached_corpus_is_memory_mapped(build):
    assert isinstance(build().blocks, np.memmap)


def test_the_cache_tells_what_it_holds(build, tmp_path):
    build()
    [folder] = (tmp_path / "cache").iterdir()
    assert {file.name for file in folder.iterdir()} == {"blocks.npy", "probe.jsonl", "settings.json"}
    contents = json.loads((folder / "settings.json").read_text())
    assert contents["settings"]["num_repeats"] == 4
    assert contents["counts"] == {"num_blocks": 24, "num_left_out": 6}


def test_the_cache_is_where_the_environment_says(build, tmp_path, monkeypatch):
    monkeypatch.setenv("TFIDF_TUNE_CACHE", str(tmp_path / "from environment"))
    assert build(cache_dir=None).probe_file.is_relative_to(tmp_path / "from environment")


def test_the_cache_is_in_the_home_folder_otherwise(build, tmp_path, monkeypatch):
    monkeypatch.delenv("TFIDF_TUNE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert build(cache_dir=None).probe_file.is_relative_to(tmp_path / ".cache" / "tfidf_tune")


@pytest.mark.parametrize("failing", ["numpy.save", "tfidf_tune.data._injected_corpus.write_probe_file"])
def test_a_failed_write_leaves_nothing_and_the_next_run_builds(build, tmp_path, monkeypatch, failing):
    def full_disk(*args, **kwargs):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(failing, full_disk)
        with pytest.raises(OSError, match="no space left"):
            build()
    assert list((tmp_path / "cache").iterdir()) == []
    assert len(build()) == 24


def test_a_writer_that_lost_the_race_takes_the_winners_corpus(build, tmp_path, monkeypatch):
    def overtaken(path, passages):
        monkeypatch.setattr("tfidf_tune.data._injected_corpus.write_probe_file", write_probe_file)
        build()
        write_probe_file(path, passages)

    monkeypatch.setattr("tfidf_tune.data._injected_corpus.write_probe_file", overtaken)
    assert len(build()) == 24
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_probe_file_is_written_where_asked_also_from_the_cache(build, tmp_path):
    for name in ("first run", "second run"):
        probe_file = tmp_path / name / "probe.jsonl"
        dataset = build(probe_file=str(probe_file))
        assert dataset.probe_file == probe_file
        assert read_probe_file(probe_file) == dataset.passages
        assert list(probe_file.parent.iterdir()) == [probe_file]


def test_without_a_probe_file_the_cached_one_is_named(build):
    dataset = build()
    assert read_probe_file(dataset.probe_file) == dataset.passages


def test_worker_processes_read_the_same_blocks(build):
    dataset = build()
    assert pickle.loads(pickle.dumps(dataset))[3] == dataset[3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "diagonal"}, "layout must be 'aligned' or 'concatenated', got 'diagonal'"),
        ({"num_base": 0}, r"num_base \(or -1 for all\) must be a whole number of at least 1, got 0"),
        ({"num_base": -2}, r"num_base \(or -1 for all\) must be .* got -2"),
        ({"num_targets": 0}, "num_targets must be a whole number of at least 1, got 0"),
        ({"num_repeats": 0}, "num_repeats must be a whole number of at least 1, got 0"),
        ({"min_target_tokens": 0}, "min_target_tokens must be a whole number of at least 1, got 0"),
        ({"num_controls": -1}, "num_controls must be a whole number of at least 0, got -1"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1, got 0"),
        ({"min_target_tokens": 31}, "min_target_tokens 31 is below block_size 32.*raise min_target_tokens or use"),
        (
            {"num_targets": 15, "num_controls": 9},
            r"found 20 distinct passages of at least 40 tokens in '.*corpus\.txt', needed 15 targets \+ 9 controls: "
            "lower num_targets / num_controls or min_target_tokens, or name a larger target_source",
        ),
        (
            {"num_base": 10_000},
            r"found \d+ base blocks of 32 tokens in '.*corpus\.txt', needed 10000: lower num_base.*larger source",
        ),
        (
            {"num_base": 35, "layout": "concatenated"},
            r"found 34 base documents in '.*corpus\.txt', needed 35: lower num_base",
        ),
    ],
)
def test_impossible_settings_are_refused(build, changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        build(**changes)
    assert not list(tmp_path.glob("cache/*"))


def test_short_targets_are_fine_when_concatenated(build):
    dataset = build(layout="concatenated", min_target_tokens=8, block_size=256, num_base=-1)
    assert all(8 <= len(passage.token_ids) < 256 for passage in dataset.passages)


def test_blocks_longer_than_the_model_takes_are_refused(build, embedded_tokenizer_folder):
    tokenizer = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=31)
    with pytest.raises(ValueError, match="block_size is 32, above max_seq_len 31"):
        build(tokenizer=tokenizer)
