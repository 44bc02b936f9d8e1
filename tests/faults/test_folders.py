"""A folder that is worked in belongs to one run, and is complete or not there; what a user put
there stays.
"""

import gzip
import hashlib
import json
import os
import random
import re
import shutil
from importlib import import_module
from itertools import count

import pytest
from helpers.fakes.tiny_run import run_recipe
from helpers.processes.ranks import kill_when
from helpers.processes.recipes import ALL
from helpers.refusals import RUN, BadInput, assert_refused, each_row

from tfidf_tune._checks import SetupError
from tfidf_tune._files import locked_folder, work_folder
from tfidf_tune.commands import audit, data, probe
from tfidf_tune.corpus.minhash import word_ngrams
from tfidf_tune.training import load_config

pytestmark = pytest.mark.usefixtures("quick_reports")

# Events of sys.audit between which a killed process leaves another state.
CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
# What the commands import when they use it, and their table of characters: here once, not in each
# fork.
LATER = [
    "datasketch",
    "datatrove.pipeline.dedup",
    "lm_eval.evaluator",
    "matplotlib.figure",
    "rouge_score.rouge_scorer",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory, text_file):
    """Training text, of which some rows occur several times, and held-out text."""
    folder = tmp_path_factory.mktemp("texts")
    lines = text_file.read_text().splitlines()
    rows = ["\n".join(lines[start : start + 4]) for start in range(0, 160, 4)]
    for name, chosen in (
        ("a", rows[:20] + rows[:5] * 3),
        ("b", rows[10:30]),
        ("unseen", rows[30:]),
    ):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": row}) + "\n" for row in chosen)
        )
    return folder


@pytest.fixture(scope="module")
def commands(texts, tiny_checkpoint):
    for name in LATER:
        import_module(name)
    word_ngrams("", 1)
    return commands_of(texts, tiny_checkpoint)


def commands_of(texts, tiny_checkpoint):
    """The commands that work in a folder, by name: functions of their output."""
    sources = [str(texts / "a.jsonl"), str(texts / "b.jsonl")]
    few = [
        "--num-targets",
        "5",
        "--num-controls",
        "4",
        "--block-size",
        "24",
        "--passages",
        "random",
    ]
    few += ["--controls", str(texts / "unseen.jsonl")]
    asked = [
        "--prefix-lengths",
        "6",
        "--max-new-tokens",
        "4",
        "--batch-size",
        "9",
        "--accept-unproven",
    ]
    found = ["make", *sources, "--tokenizer", str(tiny_checkpoint), *few]
    return {
        "dedup": lambda out: data.main(["dedup", *sources, str(out)]),
        "make": lambda out: probe.main([*found, "--output", str(out / "probe.jsonl")]),
        "audit": lambda out, *more: audit.main(
            [str(tiny_checkpoint), *sources, *few, *asked, "--output-dir", str(out), *more]
        ),
    }


def state(folder):
    """All files by name; of an audit not the answers and reports, which have times, nor their
    hashes.
    """
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and not {"evaluation", "report", "SHA256SUMS"} & {*path.parts}
    )
    contents = {}
    for path in files:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        contents[path.relative_to(folder).as_posix()] = content
    return contents


@pytest.mark.parametrize("name", ["dedup", "make", "audit"])
def test_killed_between_any_two_changes_the_same_command_ends_like_one_that_was_not(
    tmp_path, commands, name
):
    command = commands[name]
    numbers = count()
    whole = tmp_path / "whole"

    def count_changes():
        command(whole)
        (tmp_path / "number").write_text(str(next(numbers)))

    assert not kill_when(lambda event, _: event in CHANGES and next(numbers) < 0, count_changes)
    number = int((tmp_path / "number").read_text())
    expected = state(whole)
    assert expected
    # The last changes move the results into place and remove the folder.
    rng = random.Random(0)
    for moment in (
        range(number)
        if ALL
        else [*rng.sample(range(number - 12), 2), *rng.sample(range(number - 12, number), 2)]
    ):
        out = tmp_path / "killed"
        numbers = count()
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
        pytest.raises(
            SetupError, match=f"another process is writing into {locked}: wait until it ends"
        ),
    ):
        commands[name](out)
    (out / "work").rmdir()
    commands[name](out)


@pytest.mark.parametrize("name", ["dedup", "make", "audit"])
def test_a_folder_that_a_user_filled_is_never_removed(tmp_path, commands, name):
    out = tmp_path / "out"
    mine = (
        out
        / {"dedup": "unfinished", "make": "probe.search", "audit": "probe.search"}[name]
        / "thesis.txt"
    )
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    message = f"{mine.parent} is not of an interrupted run: move it away, or name another output"
    with pytest.raises(SetupError, match=message):
        commands[name](out)
    assert state(out) == {mine.relative_to(out).as_posix(): b"mine"}
    mine.unlink()
    with pytest.raises(SetupError, match=message):
        commands[name](out)
    assert mine.parent.is_dir()


def test_a_file_of_the_user_with_the_name_of_a_result_is_kept(tmp_path, commands):
    out = tmp_path / "out"
    assert kill_when(
        lambda event, args: event == "os.rename" and "written" in str(args[0]),
        commands["dedup"],
        out,
    )
    (mine := out / "00001.jsonl.gz").write_text("mine")
    with pytest.raises(
        OSError, match=f"{mine} is not of this run: move it away, and run the same command again"
    ):
        commands["dedup"](out)
    assert mine.read_text() == "mine"
    mine.unlink()
    commands["dedup"](out)
    commands["dedup"](tmp_path / "whole")
    assert state(out) == state(tmp_path / "whole")


@pytest.mark.parametrize("changed", ["a.jsonl", "unseen.jsonl"])
def test_text_of_other_content_is_noticed_whatever_its_size_and_time(
    tmp_path, texts, tiny_checkpoint, changed
):
    folder = shutil.copytree(texts, tmp_path / "texts")
    command = commands_of(folder, tiny_checkpoint)["audit"]
    command(tmp_path / "out")
    before = state(tmp_path / "out")
    summary = json.loads((tmp_path / "out" / "report" / "audit.json").read_text())
    file = folder / changed
    times = (folder / changed).stat()
    if changed == "a.jsonl":
        assert (
            summary["inputs"]["texts"][str(file)] == hashlib.sha256(file.read_bytes()).hexdigest()
        )
        weights = tiny_checkpoint / "model.safetensors"
        assert (
            summary["inputs"]["model"][str(weights)]
            == hashlib.sha256(weights.read_bytes()).hexdigest()
        )
    file.write_text(file.read_text().replace("e", "a"))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    what = "the controls, " if changed == "unseen.jsonl" else ""
    with pytest.raises(
        ValueError,
        match=rf"has changed: the content of {what}{file}.* has changed\. Name another --output-dir",
    ):
        command(tmp_path / "out")
    assert state(tmp_path / "out") == before


def test_an_audit_uses_the_passages_that_its_options_chose(tmp_path, commands, texts, monkeypatch):
    """Whatever a killed --overwrite left, and whatever was put into the folder."""
    out = tmp_path / "out"
    seeds = {}

    def command(folder, *more):  # which asks no model
        commands["audit"](folder, "--dry-run", *more)

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
                if not re.search("has changed: |with other arguments", str(error)):
                    raise
                continue
            assert (out / "probe.jsonl").read_bytes() == seeds[seed]
        command(out, "--seed", "1", "--overwrite")
        assert (out / "probe.jsonl").read_bytes() == seeds["1"]
        shutil.rmtree(out)
    out.mkdir()
    (out / "probe.jsonl").write_bytes(seeds["1"])
    with pytest.raises(
        ValueError, match=f"{out}/probe.jsonl exists already: name another file, or .*--overwrite"
    ):
        command(out)
    assert state(out) == {"probe.jsonl": seeds["1"]}


def in_folder(*names, text="mine\n", is_new=True, **overrides):
    """A run into a folder in which files of the user are; one that is not new also has those of an
    earlier run.
    """

    def make(site):
        run = site.folder / RUN
        for file in list(run.iterdir()) if is_new else []:
            file.unlink()
        for name in names:
            (run / name).write_text(text)
        return site.config(**overrides)

    return make


def source_in(name, *, is_new=True):
    """A run that reads its text where it writes a file."""

    def make(site):
        rows = [
            json.dumps({"text": text}) + "\n" for text in site.text_file.read_text().splitlines()
        ]
        in_folder(name, text="".join(rows), is_new=is_new)(site)
        return site.config(**{"dataset.source": str(site.folder / RUN / name)})

    return make


def probe_file_is(name, text, **overrides):
    """A run whose probe file is there and holds something else."""

    def make(site):
        (site.folder / name).write_text(text or site.text_file.read_text())
        (site.folder / "linked").symlink_to(site.folder)
        values = {key: value.format(folder=site.folder) for key, value in overrides.items()}
        return site.config(**{"dataset.probe_file": str(site.folder / "linked" / name), **values})

    return make


PROBE_FILE = "dataset has the probe_file .*"
NOT_A_PROBE_FILE = ", which exists and is not a probe file: choose another name, or move it away"
REPLACED = r"dataset\.source is .*held_out\.jsonl, a file that the run would replace .*: choose another output_dir"
CONFIG_OF_USER = "base: mine/lora\n# do not lose this\n"
KEPT = [
    BadInput(
        "a probe file in place of the source",
        probe_file_is("texts.txt", "", **{"dataset.source": "{folder}/run/../texts.txt"}),
        r"dataset\.source is .*texts\.txt, a file that the run would replace .*: choose another dataset\.probe_file",
    ),
    BadInput(
        "a probe file in place of a text",
        probe_file_is("thesis.txt", "mine"),
        rf"{PROBE_FILE}thesis\.txt{NOT_A_PROBE_FILE}",
    ),
    BadInput(
        "a probe file in place of another's lines",
        probe_file_is("a.jsonl", '{"text": "mine"}'),
        rf"{PROBE_FILE}a\.jsonl{NOT_A_PROBE_FILE}",
    ),
    BadInput("a source in the run's folder", source_in("held_out.jsonl"), REPLACED),
    BadInput(
        "a source that an earlier run wrote",
        source_in("held_out.jsonl", is_new=False),
        REPLACED,
    ),
    BadInput(
        "a config of the user",
        in_folder("config.yaml", text=CONFIG_OF_USER),
        r"output_dir .*\(config\.yaml\): choose another output_dir, or move it away",
    ),
    BadInput(
        "files of the user",
        in_folder("metrics.jsonl", "held_out.jsonl", "probe.jsonl", "torchtune_config.yaml"),
        r"output_dir .*\(torchtune_config.yaml, metrics.jsonl, held_out.jsonl, probe.jsonl\): choose another output",
    ),
]


@each_row(KEPT)
def test_a_run_never_takes_the_place_of_a_file_of_the_user(row, site):
    assert_refused(row, site)


OWN_NAMES = [
    "config.yaml",
    "torchtune_config.yaml",
    "metrics.jsonl",
    "held_out.jsonl",
    "all_passages.jsonl",
    "logs",
    "resume",
    "evaluation/probe.jsonl",
    "below_threshold",
    "checkpoint_100pct/probe.jsonl",
    "x/../metrics.jsonl",
]


@pytest.mark.parametrize("name", OWN_NAMES)
def test_a_probe_file_has_none_of_the_names_of_a_run(recipe_config, name):
    cfg = recipe_config(**{"dataset.probe_file": f"${{output_dir}}/{name}"})
    with pytest.raises(
        SetupError,
        match=f"config: dataset has the probe_file .*{re.escape(name)}, a name of a file",
    ):
        run_recipe(cfg)
    assert not os.path.exists(cfg.output_dir)


def test_a_run_that_ended_early_is_started_again_in_its_folder(recipe_config, tmp_path):
    """Also from the config that it wrote, with its probe file elsewhere; but comments of the user
    are kept.
    """
    probe_file = tmp_path / "probes" / "mine.jsonl"
    once = {"max_steps": 1, "save_at_percent": [100], "keep_last_n_checkpoints": 0}
    folder = run_recipe(recipe_config(**once, **{"dataset.probe_file": str(probe_file)}))
    before = state(folder) | state(probe_file.parent)
    for _ in range(2):
        shutil.rmtree(folder / "checkpoint_100pct")
        (folder / "metrics.jsonl").write_text("")
        run_recipe(load_config(str(folder / "config.yaml")))
    after = state(folder) | state(probe_file.parent)
    same = ("config.yaml", "held_out.jsonl", "mine.jsonl", "checkpoint_100pct/model.safetensors")
    assert [before[name] for name in same] == [after[name] for name in same]

    shutil.rmtree(folder / "checkpoint_100pct")
    written = (folder / "config.yaml").read_text()
    for commented in (
        f"# mine\n{written}",
        f"{written}# mine\n",
        written.replace("\nseed:", " # mine\nseed:"),
    ):
        (folder / "config.yaml").write_text(commented)
        with pytest.raises(SetupError, match=r"this run would replace it \(config\.yaml\)"):
            run_recipe(load_config(str(folder / "config.yaml")))
        assert (folder / "config.yaml").read_text() == commented
