"""``tfidf-tune data holdout``: a coin puts documents on two sides, near copies on one."""

import gzip
import hashlib
import itertools
import json
import os
import random
from collections import Counter, defaultdict
from fractions import Fraction
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.fakes.data import changed, random_text, write_folder, write_rows
from helpers.processes.commands import resumed, run_in_forks
from helpers.processes.ranks import kill_when, kill_when_opening
from helpers.references.near_copies import near_copy_groups

from tfidf_tune.commands.data import main
from tfidf_tune.corpus import Deduplication, read_holdout
from tfidf_tune.corpus.file_holdout import hold_out_documents
from tfidf_tune.corpus.holdout import is_held_out, text_hash
from tfidf_tune.corpus.sources import load_documents, texts_of_rows


@pytest.fixture(scope="module")
def texts():
    """30 texts; the first five have three equal copies, the next five two near ones, the next five
    two distant ones; and five without words or text.
    """
    originals = [random_text(seed, 120) for seed in range(30)]
    near = [changed(text, 0.01, seed) for text, seed in itertools.product(originals[5:10], (1, 2))]
    distant = [
        changed(text, 0.5, seed) for text, seed in itertools.product(originals[10:15], (1, 2))
    ]
    made = [*originals, *originals[:5] * 3, *near, *distant, "...", "...", "", " \n", None]
    random.Random(0).shuffle(made)
    return made


def chain(length, seed=0):
    """Texts of which each has one word of the text before it replaced: the first and the last have
    little in common.
    """
    text = random_text(seed, 150)
    links = [text]
    for number in range(length - 1):
        words = text.split()
        words[number * 150 // length] = f"new{number}"
        text = " ".join(words)
        links.append(text)
    return links


def lines(folder):
    found = []
    for file in sorted(folder.glob("*.jsonl.gz")):
        found += gzip.decompress(file.read_bytes()).splitlines()
    return found


def side_of(output):
    """The side of each text; every text is on one."""
    sides = defaultdict(set)
    for side in ("train", "held_out"):
        for line in lines(output / side):
            sides[json.loads(line)["text"]].add(side)
    assert all(len(on) == 1 for on in sides.values())
    return {text: on.pop() for text, on in sides.items()}


def coin(group_hashes, seed, share):
    """The rule of the manifest, in other words."""
    value = hashlib.blake2b(
        min(group_hashes), digest_size=8, key=b"%d" % seed, person=b"tfidf holdout"
    )
    return Fraction(int(value.hexdigest(), 16), 2**64) < Fraction(share)


def hash_of(text):
    return hashlib.blake2b(text.strip().encode(), digest_size=16).digest()


@pytest.mark.parametrize(("method", "num_jobs"), [("exact", 1), ("minhash", 2)])
def test_each_group_is_on_the_side_of_its_coin(tmp_path, texts, method, num_jobs):
    source = Path(write_folder(tmp_path / "in", texts))
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    output = tmp_path / "out"
    options = ["--method", method, "--threshold", "0.7", "--ngram", "3", "--share", "0.3"]
    options += ["--seed", "5", "--jobs", str(num_jobs)]
    command = ["data", "holdout", str(source), str(output), *options]
    if num_jobs == 1:
        main(command[1:])
    else:
        (ended,) = run_in_forks([command])
        assert ended.code == 0, ended.err

    with_text = [text for text in texts if text and text.strip()]
    if method == "minhash":
        groups = near_copy_groups(with_text, 0.7, 3)
    else:
        groups = [
            [number for number, text in enumerate(with_text) if text == one]
            for one in set(with_text)
        ]
    expected = {}
    for group in groups:
        hashes = [hash_of(with_text[number]) for number in group]
        side = "held_out" if coin(hashes, 5, 0.3) else "train"
        for number in group:
            expected[with_text[number]] = (side, min(hashes).hex(), len(group))
    assert {side for side, _, _ in expected.values()} == {"train", "held_out"}

    holdout = read_holdout(output)
    rows = Counter()
    for side in ("train", "held_out"):
        for row, group in holdout.rows(side):
            rows[row.line.rstrip()] += 1
            text = row.columns["text"]
            if text and text.strip():
                assert (side, group.name, group.documents) == expected[text]
                assert group.is_tossed
            else:
                assert (side, *group) == ("train", None, 1, False)
    # Each line is on one side, byte for byte, and the input is as it was.
    assert rows == Counter(b"".join(before.values()).splitlines())
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before

    manifest = holdout.contents
    assert manifest["without_text"] == 3
    assert manifest["cuts"] == {"groups": 0, "documents": 0, "largest": []}
    by_copies = defaultdict(Counter)
    for group in groups:
        side, _, size = expected[with_text[group[0]]]
        counts = manifest["sides"][side]
        name = {1: "1", 2: "2", 3: "3-4", 4: "3-4"}[size]
        by_copies[name][f"{side} groups"] += 1
        by_copies[name][f"{side} documents"] += size
        counts["groups"] -= 1
        counts["documents"] -= size
        counts["characters"] -= sum(len(with_text[number].strip()) for number in group)
    zero = {"documents": 0, "groups": 0, "characters": 0}
    assert manifest["sides"] == {"train": zero, "held_out": zero}
    for row in manifest["by_copies"]:
        for side, unit in itertools.product(("train", "held_out"), ("groups", "documents")):
            assert row[side][unit] == by_copies[row["copies"]][f"{side} {unit}"]
    assert [row["copies"] for row in manifest["by_copies"]] == sorted(by_copies)
    for source_file in manifest["sources"]:
        content = Path(source_file["file"]).read_bytes()
        assert source_file["sha256"] == hashlib.sha256(content).hexdigest()
    # The folder serves as it is, also to a run.
    assert len([*load_documents(str(output / "train"))]) == manifest_rows(manifest, "train") - 3


def manifest_rows(manifest, side):
    return sum(
        file["rows"] for name, file in manifest["files"].items() if name.startswith(f"{side}/")
    )


def test_the_coin_is_fair_for_each_seed_and_for_each_group():
    groups = [text_hash(f"document {number}") for number in range(400)]
    for share in (0.05, 0.5):
        tossed = [
            [is_held_out(group, seed=seed, share=share) for group in groups] for seed in range(400)
        ]
        # 800 sums of 400 coins: each is within 4.5 standard deviations.
        limit = 4.5 * (400 * share * (1 - share)) ** 0.5
        for coins in (*tossed, *zip(*tossed, strict=True)):
            assert abs(sum(coins) - 400 * share) < limit
        # Seeds, and groups, are independent: so often two coins are both heads.
        both = sum(
            first and second
            for row, next_row in itertools.pairwise(tossed)
            for first, second in zip(row, next_row, strict=True)
        )
        number = 399 * 400
        assert abs(both - number * share**2) < 4.5 * (number * share**2) ** 0.5
    # A larger share holds out the same groups, and more.
    for group in groups:
        sides = [is_held_out(group, seed=3, share=share) for share in (0.01, 0.05, 0.2, 0.5)]
        assert sides == sorted(sides)
    # The same on all machines and in all versions.
    heads = [
        number for number, group in enumerate(groups) if is_held_out(group, seed=0, share=0.02)
    ]
    assert heads == [66, 94, 110, 142, 177, 190, 234, 271, 306]


def test_order_and_files_do_not_matter_and_texts_that_come_later_move_nothing(tmp_path, texts):
    rows = [{"text": text} for text in texts if text]
    find = partial(hold_out_documents, share=0.4, seed=1)
    find([write_rows(tmp_path / "a.jsonl", rows)], tmp_path / "a")
    random.Random(1).shuffle(rows)
    write_rows(tmp_path / "b1.jsonl", rows[:20])
    write_rows(tmp_path / "b2.jsonl", rows[20:])
    find([str(tmp_path / "b2.jsonl"), str(tmp_path / "b1.jsonl")], tmp_path / "b")
    assert side_of(tmp_path / "a") == side_of(tmp_path / "b")
    assert Counter(lines(tmp_path / "a" / "held_out")) == Counter(
        lines(tmp_path / "b" / "held_out")
    )

    # Other texts, and equal copies of what is there.
    more = [random_text(seed, 120) for seed in range(100, 160)] + [row["text"] for row in rows[:5]]
    find([str(tmp_path / "a.jsonl"), write_rows(tmp_path / "more.jsonl", more)], tmp_path / "c")
    before = side_of(tmp_path / "a")
    after = side_of(tmp_path / "c")
    assert {text: after[text] for text in before} == before
    # Another seed is another coin.
    hold_out_documents([str(tmp_path / "a.jsonl")], tmp_path / "d", share=0.4, seed=2)
    assert side_of(tmp_path / "d") != before


def test_a_group_that_is_too_large_is_trained_on_without_a_coin(tmp_path, capsys):
    others = [random_text(seed, 120) for seed in range(100, 140)]
    source = write_rows(tmp_path / "in.jsonl", [*others, *chain(30)])
    for seed in range(3):  # by default the limit is 10 of these few documents
        output = tmp_path / str(seed)
        main(["holdout", source, str(output), "--share", "0.5", "--seed", str(seed)])
        assert {side_of(output)[text] for text in chain(30)} == {"train"}
        holdout = read_holdout(output)
        assert holdout.largest_group == 10
        (cut,) = holdout.contents["cuts"]["largest"]
        assert (cut["documents"], cut["file"]) == (30, source)
        assert chain(30)[cut["row"] - 1 - 40] == min(chain(30), key=hash_of)
        untossed = [group for _, group in holdout.rows("train") if not group.is_tossed]
        assert [group.documents for group in untossed] == [30] * 30
        assert {group.name for group in untossed} == {cut["group"]}
        assert len(holdout.contents["by_copies"]) == 1
        sides = holdout.contents["sides"]
        assert sum(side["documents"] for side in sides.values()) == 70
        printed = capsys.readouterr().out
        assert "Cut: 1 group of more than 10 near copies, with 30 documents" in printed
        assert f"30 near copies of row {cut['row']} of {source}" in printed
        assert f"tfidf-tune audit MODEL --holdout {output}/holdout.json\n" in printed
    # With a higher limit, the coin decides, for all of them at once.
    sides = set()
    for seed in range(8):
        output = tmp_path / f"tossed {seed}"
        hold_out_documents([source], output, share=0.5, seed=seed, largest_group=30)
        found = side_of(output)
        (side,) = {found[text] for text in chain(30)}
        sides.add(side)
        assert read_holdout(output).contents["cuts"]["groups"] == 0
    assert sides == {"train", "held_out"}


def test_the_limit_of_a_group_follows_from_the_number_of_documents(tmp_path):
    texts = [random_text(seed, 20) for seed in range(1500)]
    texts += [*[random_text(5000)] * 15, *[random_text(5001)] * 16]
    hold_out_documents([write_rows(tmp_path / "in.jsonl", texts)], tmp_path / "out", share=0.1)
    holdout = read_holdout(tmp_path / "out")
    assert holdout.largest_group == 15
    assert [cut["documents"] for cut in holdout.contents["cuts"]["largest"]] == [16]


def files_of(output):
    """The content of all files, without the date."""
    found = {}
    for file in output.rglob("*"):
        if file.is_file():
            found[file.relative_to(output).as_posix()] = file.read_bytes()
    manifest = json.loads(found["holdout.json"])
    manifest.pop("date")
    return found | {"holdout.json": manifest}


@pytest.mark.parametrize("moment", ["hashing", "dividing", "moving", "the last file"])
def test_an_interrupted_run_goes_on_and_gives_the_same(tmp_path, texts, capfd, moment):
    source = Path(write_folder(tmp_path / "in", texts, num_files=4))
    hold_out_documents([str(source)], tmp_path / "whole", share=0.3)
    command = ["holdout", str(source), str(tmp_path / "cut"), "--share", "0.3"]
    unfinished = tmp_path / "cut" / "unfinished"
    if moment in ("hashing", "dividing"):
        step = "4" if moment == "hashing" else "5"
        kill_when_opening(unfinished / step / "completions" / "00002", main, command)
    else:
        name = "train/00001.jsonl.gz" if moment == "moving" else "holdout.json"
        target = str(tmp_path / "cut" / name)
        assert kill_when(
            lambda event, given: event == "os.rename" and str(given[1]) == target, main, command
        )
    err = resumed(
        main,
        command,
        capfd,
        other=["--seed", "1"],
        difference="seed was 0, is 1",
        file=source / "3.jsonl",
    )
    assert "Finding copies 0.jsonl" not in err
    assert ("Dividing 3.jsonl" in err) == (moment in ("hashing", "dividing"))
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "whole")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, texts):
    source = write_rows(tmp_path / "in.jsonl", [text for text in texts if text])
    calls = []

    def read_and_write(file):
        calls.append(file)
        yield from texts_of_rows(file, column="text", sample_by="line")
        if len(calls) == 3:  # the first looks whether there are enough documents
            with Path(file).open("a") as end:
                end.write('{"text": "new"}\n')

    with pytest.raises(ValueError, match=r"in\.jsonl has changed while it was read"):
        hold_out_documents([source], tmp_path / "out", share=0.3, read=read_and_write)
    assert len(calls) == 3
    assert not (tmp_path / "out").exists()


def test_rows_stay_as_they_are_in_all_formats(tmp_path):
    rows = [
        '{"id": 18446744073709551615, "text": "one", "x": 1e400}',
        '{"id": 3, "text": "two",  "when": "1912-04-15", "x": 1.50}',
        '{"text": "three \\u00e9", "tools": {"limit": null}}\r',
        '{"text": "轮船中午离开了港口"}',
        '{"text": "Слово полку"}',
        '{"other": 1}',
    ]
    rows += [json.dumps({"text": random_text(seed, 20)}) for seed in range(30)]
    half = ["--share", "0.5", "--column", "text"]

    def divided(source, *options):
        output = tmp_path / f"out of {source.name}"
        main(["holdout", str(source), str(output), *half, *options])
        assert {path.name for path in output.iterdir()} == {
            *("groups", "held_out", "holdout.json", "train")
        }
        return sorted(lines(output / "train") + lines(output / "held_out"))

    expected = sorted(row.rstrip("\r").encode() for row in rows)
    (tmp_path / "a.jsonl").write_bytes("\ufeff".encode() + "\n".join(rows).encode())
    assert divided(tmp_path / "a.jsonl") == expected
    with gzip.open(tmp_path / "b.json.gz", "wb") as file:
        file.write(("[" + " ,\n".join(rows) + "]").encode())
    assert divided(tmp_path / "b.json.gz") == expected
    values = [{"text": random_text(seed, 20), "n": seed, "tool": None} for seed in range(30)]
    pq.write_table(pa.Table.from_pylist(values), tmp_path / "c.parquet")
    assert sorted(map(json.loads, divided(tmp_path / "c.parquet")), key=lambda row: row["n"]) == (
        values
    )
    # Folders with files of one name; a file is a document.
    for seed in range(30):
        folder = tmp_path / "books" / str(seed)
        folder.mkdir(parents=True)
        (folder / "book.txt").write_text(f"{random_text(seed, 20)}\n\nThe end.\n", newline="")
    expected = sorted(f"{random_text(seed, 20)}\n\nThe end." for seed in range(30))
    written = divided(tmp_path / "books", "--sample-by", "document")
    assert sorted(json.loads(line)["text"] for line in written) == expected


def test_conversations_are_grouped_by_what_the_model_has_to_write(tmp_path, capsys):
    rows = []
    for seed in range(40):
        for copy in range(2):
            prompt = {"role": "user", "content": f"{random_text(1000 + 2 * seed + copy, 5)}?"}
            answer = {"role": "assistant", "content": random_text(seed, 30)}
            rows.append({"messages": [prompt, answer]})
    source = write_rows(tmp_path / "chats.jsonl", rows)
    main(["holdout", source, str(tmp_path / "out"), "--share", "0.3"])
    assert "what the model has to write" in capsys.readouterr().err
    holdout = read_holdout(tmp_path / "out" / "holdout.json")
    assert holdout.column is None
    answers = {}
    for side in ("train", "held_out"):
        of_side = [row.columns["messages"][1]["content"] for row, _ in holdout.rows(side)]
        assert set(Counter(of_side).values()) == {2}
        answers[side] = {*of_side}
    assert not answers["train"] & answers["held_out"]


def test_what_was_changed_after_the_coin_is_refused(tmp_path, texts):
    source = write_folder(tmp_path / "in", texts)
    output = tmp_path / "out"
    holdout = hold_out_documents([source], output, share=0.3)
    assert holdout == read_holdout(output) == read_holdout(str(output / "holdout.json"))
    assert holdout.sha256 == hashlib.sha256((output / "holdout.json").read_bytes()).hexdigest()
    assert (holdout.seed, holdout.share, holdout.column) == (0, 0.3, "text")
    assert [file.name for file in holdout.train] == [f"0000{part}.jsonl.gz" for part in range(3)]
    output.rename(tmp_path / "moved")  # it may be
    output = tmp_path / "moved"
    read_holdout(output)

    for name in ("held_out/00001.jsonl.gz", "groups/train/00000.jsonl.gz"):
        content = (output / name).read_bytes()
        (output / name).write_bytes(content + b"\n")
        with pytest.raises(ValueError, match=rf"{name} has changed since .*holdout\.json"):
            read_holdout(output)
        (output / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} is missing, which .*holdout\.json names"):
            read_holdout(output)
        (output / name).write_bytes(content)
    (output / "train" / "more.txt").write_text("more")
    with pytest.raises(ValueError, match=r"train/more\.txt is not in .*holdout\.json"):
        read_holdout(output)
    (output / "train" / "more.txt").unlink()

    manifest = json.loads((output / "holdout.json").read_text())
    for wrong, message in (
        (manifest | {"schema_version": 2}, "schema_version"),
        ({"a": 1}, "not a manifest"),
        ([], "not a manifest"),
    ):
        (output / "holdout.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=message):
            read_holdout(output)
    (output / "holdout.json").write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        read_holdout(output)
    # Another seed in the manifest is noticed where rows are read.
    (output / "holdout.json").write_text(json.dumps(manifest | {"seed": 7}))
    with pytest.raises(ValueError, match=r"the side train, where the coin .*\(seed 7"):
        [*read_holdout(output).rows("train")]
    (output / "holdout.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holdout\.json"):
        read_holdout(output)


def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, texts):
    source = Path(write_folder(tmp_path / "in", texts))
    few = write_rows(tmp_path / "few.jsonl", [random_text(seed, 9) for seed in range(19)])
    copies = write_rows(tmp_path / "copies.jsonl", [random_text(0)] * 40)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    out = tmp_path / "out"
    for arguments, error, message in (
        ([tmp_path / "gone", out], FileNotFoundError, "gone"),
        ([source, tmp_path / "mine"], ValueError, "mine exists and is not empty"),
        ([source, few], ValueError, r"few\.jsonl is a file"),
        ([source, source / "out"], ValueError, "out is in .*in, whose files are read"),
        ([source / "0.jsonl", source], ValueError, r"0\.jsonl is in .*in, the folder to write"),
        ([source, out, "--share", "0"], ValueError, "share is 0.*above 0, up to 0.5"),
        ([source, out, "--share", "0.6"], ValueError, "share is 0.6"),
        ([source, out, "--threshold", "0.9999"], ValueError, "threshold 0.9999"),
        ([source, out, "--column", "prose"], ValueError, "no column 'prose'"),
        ([source, out], ValueError, r"67 documents with text.*set share \(--share\) to 0.15"),
        ([few, out, "--share", "0.5"], ValueError, "19 documents with text.*at most half"),
        ([copies, out, "--share", "0.5"], ValueError, "no document on the side held_out: 40"),
    ):
        with pytest.raises(error, match=message):
            main(["holdout", *map(str, arguments)])
    with pytest.raises(ValueError, match="method is none"):
        hold_out_documents([str(source)], out, deduplication=Deduplication("none"), share=0.3)
    for wrong in ({"seed": -1}, {"largest_group": 0}):
        with pytest.raises(ValueError, match=min(wrong)):
            hold_out_documents([str(source)], out, share=0.3, **wrong)
    assert os.listdir(tmp_path / "mine") == ["thesis.txt"]
    assert not out.exists()
    assert {file.name for file in source.iterdir()} == {"0.jsonl", "1.jsonl", "2.jsonl"}
    # A complete folder is not written to again.
    hold_out_documents([str(source)], out, share=0.3)
    with pytest.raises(ValueError, match="out is complete: name a new folder"):
        hold_out_documents([str(source)], out, share=0.3)
