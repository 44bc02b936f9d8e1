"""Probe files from text on disk: copies are counted as plain Python counts them, also after an interruption."""

import dataclasses
import json
import random
import sys
from collections import Counter

import pytest
from processes import kill_when

from tfidf_tune.commands.probe import main
from tfidf_tune.data import ProbeSpec, embedded_documents, read_probe_file
from tfidf_tune.data import _disk_search as disk_search
from tfidf_tune.data._disk_tasks import TaskRunner
from tfidf_tune.data._probe_making import Start, make_probe
from tfidf_tune.data._probe_on_disk import make_probe_on_disk

BLOCK = 64


def write(folder, texts, num_files=3):
    folder.mkdir()
    for part in range(num_files):
        rows = [{"text": text} for number, text in enumerate(texts) if number % num_files == part]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def changed(text, share, seed):
    rng = random.Random(seed)
    return " ".join("other" if rng.random() < share else word for word in text.split(" "))


@pytest.fixture(scope="module")
def originals():
    return [text[:1500].strip() for text in embedded_documents("train") if len(text) >= 1500][::3][:60]


@pytest.fixture(scope="module")
def texts(originals):
    """Forty documents; of the first five whole copies, of the next five long parts within others."""
    copies = [text for number, text in enumerate(originals[:5]) for _ in range(number + 2)]
    parts = [
        f"{originals[30 + number]} {text[200:1200]} and so on."
        for number, text in enumerate(originals[5:10])
        for _ in range(3)
    ]
    made = [*originals[:40], *copies, *parts, "short", "", " \n "]
    random.Random(0).shuffle(made)
    return made


@pytest.fixture
def spec(tmp_path, texts, originals):
    return ProbeSpec(
        sources=(write(tmp_path / "in", texts),),
        controls_source=write(tmp_path / "held_out", [*originals[40:], *originals[:3]], 1),
        num_targets=15,
        num_controls=10,
        block_size=BLOCK,
    )


def occurrences(passage, texts):
    """How often a passage occurs; it may end within a character."""
    return sum(text.count(passage.text.strip().rstrip("\ufffd")) for text in texts)


def targets_of(made):
    return [passage for passage in made.passages if passage.kind == "target"]


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_the_copies_of_each_target_are_those_in_the_text(tokenizer, spec, texts, tmp_path, num_jobs):
    made = make_probe_on_disk(tokenizer, spec, tmp_path / "work", TaskRunner(num_jobs=num_jobs))
    targets = targets_of(made)
    assert len(targets) == spec.num_targets
    found = [occurrences(passage, texts) for passage in targets]
    # A lower bound: near the end of a stretch, a window may be chosen in some of its copies only.
    assert all(one.num_injections <= number for one, number in zip(targets, found, strict=True))
    assert sum(one.num_injections == number for one, number in zip(targets, found, strict=True)) >= 14
    for passage in targets:
        assert len(passage.token_ids) == BLOCK
        assert passage.positions == []
        with open(passage.source) as file:
            assert any(occurrences(passage, [json.loads(line)["text"]]) for line in file)
    repeats = [passage.num_injections for passage in targets]
    assert repeats[: made.num_duplicates] == sorted(repeats[: made.num_duplicates], reverse=True)
    assert set(repeats[made.num_duplicates :]) <= {1}
    # Each planted stretch is there: copies with 3 to 7 occurrences, parts with 4 each, two of which share no document.
    assert Counter(repeats[: made.num_duplicates]) >= Counter([7, 6, 5, 4, 3, 4, 4, 4, 4, 4])
    grams = [{tuple(one.token_ids[at : at + 16]) for at in range(BLOCK - 15)} for one in targets]
    assert sum(map(len, grams)) == len(set().union(*grams))
    assert made.num_documents == sum(bool(text.strip()) for text in texts)
    exact = sum(len(tokenizer.encode(text.strip(), add_bos=False, add_eos=False)) for text in texts)
    assert abs(made.num_tokens - exact) < 0.05 * exact
    assert made.is_estimate


def test_passages_have_the_tokens_of_their_documents(tokenizer, spec, texts, tmp_path):
    documents = [tokenizer.encode(text.strip(), add_bos=False, add_eos=False) for text in texts if text.strip()]
    made = make_probe_on_disk(tokenizer, dataclasses.replace(spec, num_targets=25), tmp_path / "work")
    strings = ["".join(f"{token}," for token in ids) for ids in documents]
    found = 0
    for passage in targets_of(made):
        string = "".join(f"{token}," for token in passage.token_ids)
        found += any(f",{string}" in f",{one}" for one in strings)
    assert found == 25
    assert sum(made.starts.values()) == 25
    assert made.starts[Start.LINE] > 0


def test_controls_have_no_long_stretch_of_the_text(tokenizer, spec, texts, tmp_path):
    made = make_probe_on_disk(tokenizer, spec, tmp_path / "work")
    controls = [passage for passage in made.passages if passage.kind == "control"]
    documents = [tokenizer.encode(text.strip(), add_bos=False, add_eos=False) for text in texts]
    seen = {tuple(ids[at : at + 50]) for ids in documents for at in range(len(ids) - 49)}
    assert len(controls) == spec.num_controls
    for passage in controls:
        assert not {tuple(passage.token_ids[at : at + 50]) for at in range(BLOCK - 49)} & seen
    assert made.num_refused > 0
    only_copies = dataclasses.replace(spec, controls_source=spec.sources[0])
    with pytest.raises(ValueError, match=r"but num_controls is 10. \d+ more share text with the training text"):
        make_probe_on_disk(tokenizer, only_copies, tmp_path / "other")


def test_many_small_runs_and_parts_give_the_same(tokenizer, spec, tmp_path, monkeypatch):
    whole = make_probe_on_disk(tokenizer, spec, tmp_path / "whole")
    monkeypatch.setattr(disk_search, "_BATCH_BYTES", 3000)
    monkeypatch.setattr(disk_search, "_RUN_RECORDS", 40)
    monkeypatch.setattr(disk_search, "_PART_RECORDS", 100)
    small = make_probe_on_disk(tokenizer, dataclasses.replace(spec, num_targets=10), tmp_path / "small")
    assert len(list((tmp_path / "small" / "runs").glob("*.npy"))) > 6
    assert len(list((tmp_path / "small" / "parts").glob("*.npy"))) > 2
    assert [one.num_injections for one in targets_of(small)] == [one.num_injections for one in targets_of(whole)][:10]


def test_copies_with_changed_words_are_found_as_near_ones_only(tokenizer, originals, tmp_path):
    near = [changed(text, 0.04, seed) for text in originals[:6] for seed in range(4)]
    source = write(tmp_path / "in", [*originals, *near])
    spec = ProbeSpec((source,), num_targets=8, num_controls=0, block_size=200, passages="near-duplicates")
    made = make_probe_on_disk(tokenizer, spec, tmp_path / "near")
    own = [one for one in targets_of(made) if one.num_injections > 1]
    assert made.num_duplicates == len(own) >= 6
    starts = {text[:40] for text in originals[:6]}
    for passage in own:
        assert 2 <= passage.num_injections <= 5
        words = set(passage.text.split())
        assert max(len(words & set(text.split())) / len(words) for text in originals[:6]) > 0.8
    assert {one.num_injections for one in own} & {4, 5}
    assert len(starts) == 6
    exact = make_probe_on_disk(tokenizer, dataclasses.replace(spec, passages="duplicates"), tmp_path / "exact")
    assert sum(one.num_injections > 1 for one in targets_of(exact)) < len(own)
    with pytest.raises(ValueError, match="found by the search on disk only"):
        make_probe(tokenizer, spec)


def test_copies_of_a_line_are_counted_without_overlap(tokenizer, originals, tmp_path):
    line = originals[0][:230].replace("\n", " ") + ".\n"
    periodic = line * 60
    source = write(tmp_path / "in", [periodic, *originals[1:30], periodic[: 30 * len(line)]], 2)
    spec = ProbeSpec((source,), num_targets=1, num_controls=0, block_size=BLOCK)
    for passages in ("duplicates", "random"):
        chosen = dataclasses.replace(spec, passages=passages, num_targets=1 if passages == "duplicates" else 25)
        made = make_probe_on_disk(tokenizer, chosen, tmp_path / passages)
        own = [one for one in targets_of(made) if one.num_injections > 1]
        assert own
        for passage in own:
            assert passage.num_injections <= occurrences(passage, [periodic, periodic[: 30 * len(line)]])
            assert passage.num_injections > 40


def test_controls_of_another_kind_that_are_in_the_text_are_refused(tokenizer, originals, tmp_path):
    rng = random.Random(0)
    digits = [" ".join(str(rng.randrange(10)) for _ in range(300)) for _ in range(8)]
    source = write(tmp_path / "in", [*originals[:30], *digits])
    for name, controls in (("digits", digits), ("both", [*digits, *originals[30:]])):
        spec = ProbeSpec((source,), controls_source=write(tmp_path / name, controls), num_targets=3, num_controls=20,
                         block_size=BLOCK, allow_fewer=True)  # fmt: skip
        made = make_probe_on_disk(tokenizer, spec, tmp_path / f"work-{name}")
        texts = [one.text for one in made.passages if one.kind == "control"]
        assert bool(texts) == (name == "both")
        assert not [text for text in texts if any(text.strip() in one for one in digits)]


def test_unique_passages_are_found_among_many_copies(tokenizer, originals, tmp_path):
    source = write(tmp_path / "in", [*[originals[0]] * 400, *originals[1:40]])
    spec = ProbeSpec((source,), num_targets=60, num_controls=0, block_size=BLOCK)
    assert len(targets_of(make_probe_on_disk(tokenizer, spec, tmp_path / "work"))) == 60


def test_random_passages_count_their_copies(tokenizer, spec, texts, tmp_path):
    random_only = dataclasses.replace(spec, passages="random", num_targets=40)
    made = make_probe_on_disk(tokenizer, random_only, tmp_path / "work")
    assert made.num_duplicates == 0
    # Windows are a little longer than passages, so that a copy that ends there is not counted.
    repeats = [occurrences(one, texts) for one in targets_of(made)]
    own = [one.num_injections for one in targets_of(made)]
    assert all(ours <= number for ours, number in zip(own, repeats, strict=True))
    assert sum(ours == number for ours, number in zip(own, repeats, strict=True)) >= 38
    assert {one.num_injections > 1 for one in targets_of(made)} == {True, False}


def test_an_interrupted_search_goes_on(embedded_tokenizer_folder, texts, tmp_path, capfd):
    source = write(tmp_path / "in", [f"{text} {number}" for number, text in enumerate(texts * 100)], num_files=6)
    arguments = ["probe", "make", source, "--tokenizer", str(embedded_tokenizer_folder), "--search", "disk",
                 "--num-targets", "10", "--num-controls", "5", "--block-size", str(BLOCK)]  # fmt: skip
    main([*arguments[1:], "--output", str(tmp_path / "whole.jsonl")])
    command = [sys.executable, "-m", "tfidf_tune.cli", *arguments, "--output", str(tmp_path / "cut.jsonl")]
    kill_when(tmp_path / "cut.search" / "1" / "completions" / "00002", command)
    with pytest.raises(ValueError, match=r"interrupted run with other arguments: seed was 0, is 1"):
        main([*arguments[1:], "--output", str(tmp_path / "cut.jsonl"), "--seed", "1"])
    capfd.readouterr()
    main([*arguments[1:], "--output", str(tmp_path / "cut.jsonl")])
    out, err = capfd.readouterr()
    assert "Reading 0.jsonl" not in err
    assert "Reading 5.jsonl (6 of 6)" in err
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / "cut.search").exists()
    (tmp_path / "cut.search").mkdir()  # of a run that was killed at its beginning
    main([*arguments[1:], "--output", str(tmp_path / "cut.jsonl"), "--overwrite"])
    assert "about" in out
    assert read_probe_file(tmp_path / "cut.jsonl")[0].num_injections > 100


def test_large_text_is_searched_on_disk(embedded_tokenizer_folder, texts, tmp_path, monkeypatch, capsys):
    source = write(tmp_path / "in", texts)
    arguments = ["make", source, "--tokenizer", str(embedded_tokenizer_folder), "--num-targets", "3",
                 "--num-controls", "0", "--block-size", str(BLOCK), "--output"]  # fmt: skip
    main([*arguments, str(tmp_path / "memory.jsonl")])
    assert "about" not in capsys.readouterr().out
    assert read_probe_file(tmp_path / "memory.jsonl")[0].positions
    monkeypatch.setattr("tfidf_tune.commands._auditing._LARGE", 1000)
    main([*arguments, str(tmp_path / "disk.jsonl")])
    assert "about" in capsys.readouterr().out
    assert not read_probe_file(tmp_path / "disk.jsonl")[0].positions


def test_what_cannot_work_is_refused(tokenizer, tmp_path):
    short = write(tmp_path / "short", ["a few words"] * 10, 1)
    with pytest.raises(
        ValueError, match=r"found 0 passages of 64 tokens .*\(10 documents\), but num_targets is 2\. On disk, only d"
    ):
        make_probe_on_disk(tokenizer, ProbeSpec((short,), num_targets=2, block_size=64), tmp_path / "work")
    with pytest.raises(FileNotFoundError, match="'someone/data'; the search on disk reads local files only"):
        make_probe_on_disk(tokenizer, ProbeSpec(("someone/data",)), tmp_path / "hub")
    with pytest.raises(ValueError, match=r"0\.jsonl is named twice"):
        make_probe_on_disk(tokenizer, ProbeSpec((short, f"{short}/0.jsonl")), tmp_path / "twice")
    for arguments, message in (
        ({"executor": "cluster"}, "executor is 'cluster'"),
        ({"executor": "slurm"}, "slurm needs executor_args partition and time"),
        ({"options": {"partition": "cpu"}}, "are for slurm and ray"),
        ({"num_jobs": 0}, "num_jobs"),
    ):
        with pytest.raises(ValueError, match=message):
            TaskRunner(**arguments)
