"""A folder that is worked in belongs to one run, and is complete or not there; what a user put there stays."""

import gzip
import hashlib
import json
import os
import random
import re
import shutil
from itertools import count

import pytest
from processes import kill_when
from recipe_processes import ALL
from sentences import refused

from tfidf_tune._checks import SetupError
from tfidf_tune._files import locked_folder, work_folder
from tfidf_tune.commands import audit, data, probe

# Events of sys.audit between which a killed process leaves another state.
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory, text_file):
    """Training text, of which some rows occur several times, and held-out text."""
    folder = tmp_path_factory.mktemp("texts")
    lines = text_file.read_text().splitlines()
    rows = ["\n".join(lines[start : start + 4]) for start in range(0, 160, 4)]
    for name, chosen in (("a", rows[:20] + rows[:5] * 3), ("b", rows[10:30]), ("unseen", rows[30:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in chosen))
    return folder


@pytest.fixture(scope="module")
def commands(texts, tiny_checkpoint):
    return commands_of(texts, tiny_checkpoint)


def commands_of(texts, tiny_checkpoint):
    """The commands that work in a folder, by name: functions of their output."""
    sources = [str(texts / "a.jsonl"), str(texts / "b.jsonl")]
    few = ["--num-targets", "5", "--num-controls", "4", "--block-size", "24", "--passages", "random"]
    few += ["--controls", str(texts / "unseen.jsonl")]
    asked = ["--prefix-lengths", "6", "--max-new-tokens", "4", "--batch-size", "9", "--accept-unproven"]
    found = ["make", *sources, "--tokenizer", str(tiny_checkpoint), *few]
    return {
        "dedup": lambda out: data.main(["dedup", *sources, str(out)]),
        "make": lambda out: probe.main([*found, "--output", str(out / "probe.jsonl")]),
        "audit": lambda out, *more: audit.main(
            [str(tiny_checkpoint), *sources, *few, *asked, "--output-dir", str(out), *more]
        ),
    }


def state(folder):
    """All files by name; of an audit not the answers and reports, which have times."""
    files = (path for path in folder.rglob("*") if path.is_file() and not {"evaluation", "report"} & {*path.parts})
    contents = ((path, path.read_bytes()) for path in files)
    unpacked = {path: gzip.decompress(content) if path.suffix == ".gz" else content for path, content in contents}
    return {path.relative_to(folder).as_posix(): content for path, content in unpacked.items()}


@pytest.mark.parametrize("name", ["dedup", "make", "audit"])
def test_killed_between_any_two_changes_the_same_command_ends_like_one_that_was_not(tmp_path, commands, name):
    command, numbers, whole = commands[name], count(), tmp_path / "whole"

    def count_changes():
        command(whole)
        (tmp_path / "number").write_text(str(next(numbers)))

    assert not kill_when(lambda event, _: event in CHANGES and next(numbers) < 0, count_changes)
    number, expected = int((tmp_path / "number").read_text()), state(whole)
    assert expected
    # The last changes move the results into place and remove the folder.
    rng = random.Random(0)
    for moment in (
        range(number) if ALL else [*rng.sample(range(number - 12), 2), *rng.sample(range(number - 12, number), 2)]
    ):
        out, numbers = tmp_path / "killed", count()
        if kill_when(lambda event, _: event in CHANGES and next(numbers) == moment, command, out):  # noqa: B023
            try:
                command(out)
            except ValueError as error:  # it was killed at its end
                if not re.search("exists|is complete", str(error)):
                    raise
        assert state(out) == expected, moment
        assert not [path for path in tmp_path.rglob(".*") if "tfidf-tune" in path.name], moment
        shutil.rmtree(out)


@pytest.mark.parametrize("name", ["dedup", "make", "audit"])
def test_a_folder_of_another_process_is_left_alone(tmp_path, commands, name):
    out = tmp_path / "out"
    locked = {"dedup": out, "make": out / "probe.search", "audit": out}[name]
    (out / "work").mkdir(parents=True)
    with (
        work_folder(locked, {}) if name == "make" else locked_folder(locked),
        refused(SetupError, "another process is writing", f"two of {name}", out=out),
    ):
        commands[name](out)
    (out / "work").rmdir()
    commands[name](out)


@pytest.mark.parametrize("name", ["dedup", "make", "audit"])
def test_a_folder_that_a_user_filled_is_never_removed(tmp_path, commands, name):
    out = tmp_path / "out"
    mine = out / {"dedup": "unfinished", "make": "probe.search", "audit": "probe.search"}[name] / "thesis.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with refused(SetupError, "is not of an interrupted run", f"a folder of the user, {name}", out=out):
        commands[name](out)
    assert state(out) == {mine.relative_to(out).as_posix(): b"mine"}
    mine.unlink()
    with refused(SetupError, "is not of an interrupted run", f"a folder of the user, {name}", out=out):
        commands[name](out)
    assert mine.parent.is_dir()


def test_a_file_of_the_user_with_the_name_of_a_result_is_kept(tmp_path, commands):
    out = tmp_path / "out"
    assert kill_when(lambda event, args: event == "os.rename" and "written" in str(args[0]), commands["dedup"], out)
    (mine := out / "00001.jsonl.gz").write_text("mine")
    with refused(OSError, "is not of this run", "a result of the user", out=out):
        commands["dedup"](out)
    assert mine.read_text() == "mine"
    mine.unlink()
    commands["dedup"](out)
    commands["dedup"](tmp_path / "whole")
    assert state(out) == state(tmp_path / "whole")


@pytest.mark.parametrize("changed", ["a.jsonl", "unseen.jsonl"])
def test_text_of_other_content_is_noticed_whatever_its_size_and_time(tmp_path, texts, tiny_checkpoint, changed):
    folder = shutil.copytree(texts, tmp_path / "texts")
    command = commands_of(folder, tiny_checkpoint)["audit"]
    command(tmp_path / "out")
    before = state(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "report" / "audit.json").read_text())
    file, times = folder / changed, (folder / changed).stat()
    if changed == "a.jsonl":
        assert summary["inputs"]["texts"][str(file)] == hashlib.sha256(file.read_bytes()).hexdigest()
        weights = tiny_checkpoint / "model.safetensors"
        assert summary["inputs"]["model"][str(weights)] == hashlib.sha256(weights.read_bytes()).hexdigest()
    file.write_text(file.read_text().replace("e", "a"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with refused(ValueError, "changed since", f"{changed} changed after an audit", out=tmp_path / "out", texts=folder):
        command(tmp_path / "out")
    assert state(tmp_path / "out") == before


def test_an_audit_uses_the_passages_that_its_options_chose(tmp_path, commands, texts, monkeypatch):
    """Whatever a killed --overwrite left, and whatever was put into the folder."""
    command, out = commands["audit"], tmp_path / "out"
    seeds = {}
    for seed in ("0", "1"):
        command(tmp_path / seed, "--seed", seed)
        seeds[seed] = (tmp_path / seed / "probe.jsonl").read_bytes()
    for name in ("passages.json", "probe.jsonl"):
        command(out)

        def is_moment(event, given, name=name):
            return event == "os.rename" and str(given[1]) == str(out / name)

        assert kill_when(is_moment, command, out, "--seed", "1", "--overwrite")
        for seed in ("1", "0"):
            try:
                command(out, "--seed", seed)
            except ValueError as error:
                if not re.search("with other (options|arguments)", str(error)):
                    raise
                continue
            assert (out / "probe.jsonl").read_bytes() == seeds[seed]
        command(out, "--seed", "1", "--overwrite")
        assert (out / "probe.jsonl").read_bytes() == seeds["1"]
        shutil.rmtree(out)
    out.mkdir()
    (out / "probe.jsonl").write_bytes(seeds["1"])
    with refused(ValueError, "exists already", "a probe file of the user in the folder of an audit", out=out):
        command(out)
    assert state(out) == {"probe.jsonl": seeds["1"]}
