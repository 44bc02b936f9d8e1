"""``tfidf-tune data dedup``: copies are removed from files on disk, also after an interruption."""

import gzip
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.fakes.data import changed, write_folder
from helpers.processes.commands import resumed, run_in_forks
from helpers.processes.ranks import kill_when_opening
from helpers.references.near_copies import near_copy_groups

from tfidf_tune.commands.data import main
from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.corpus.file_deduplication import deduplicate_corpus

WORDS = [
    f"{first}{second}" for first, second in itertools.product("bdfgklm", ("a", "eli", "o", "uté"))
]


def document(seed, length=120):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(length))


def kept(output):
    rows = []
    for file in sorted(output.glob("*.jsonl.gz")):
        text = gzip.decompress(file.read_bytes()).decode()
        rows += [json.loads(line) for line in text.splitlines()]
    return rows


@pytest.fixture(scope="module")
def texts():
    """40 texts; the first ten have three equal copies, the next five two near ones, the next five
    two distant ones.
    """
    originals = [document(seed) for seed in range(40)]
    near = [changed(text, 0.01, seed) for text, seed in itertools.product(originals[10:15], (1, 2))]
    distant = [
        changed(text, 0.5, seed) for text, seed in itertools.product(originals[15:20], (1, 2))
    ]
    made = [*originals, *originals[:10] * 3, *near, *distant, "", *["..."] * 3, "--", "--"]
    random.Random(0).shuffle(made)
    return made


@pytest.mark.parametrize(("method", "num_jobs"), [("exact", 1), ("minhash", 2)])
def test_one_document_of_each_cluster_stays_with_all_its_columns(tmp_path, texts, method, num_jobs):
    source = Path(write_folder(tmp_path / "in", texts))
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    find = Deduplication(method, threshold=0.7, ngram=3)
    if num_jobs == 1:
        report = deduplicate_corpus([str(source)], tmp_path / "out", find)
    else:  # by the command, because its jobs are forks, and this process has threads
        options = [
            "--method",
            method,
            "--threshold",
            "0.7",
            "--ngram",
            "3",
            "--jobs",
            str(num_jobs),
        ]
        (ended,) = run_in_forks([["data", "dedup", *options, str(source), str(tmp_path / "out")]])
        assert ended.code == 0, ended.err
        report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = kept(tmp_path / "out")
    assert all(texts[row["n"]] == row["text"] for row in rows)
    if method == "exact":
        assert sorted(row["text"] for row in rows) == sorted(set(texts))
    else:
        clusters = near_copy_groups(texts, 0.7, 3)
        staying = {row["n"] for row in rows}
        assert [len(staying & set(cluster)) for cluster in clusters] == [1] * len(clusters)
    assert (report["documents"], report["kept_documents"]) == (len(texts), len(rows))
    assert report["characters"] == sum(map(len, texts))
    assert report["kept_characters"] == sum(len(row["text"]) for row in rows)
    assert report["largest_clusters"][0]["documents"] == 4
    assert all(len(one["beginning"]) <= 60 for one in report["largest_clusters"])
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".gz", ".json"}


def test_an_interrupted_run_goes_on_and_gives_the_same(tmp_path, texts, capfd):
    source = Path(
        write_folder(
            tmp_path / "in",
            [f"{text} {number // 4}" for number, text in enumerate(texts * 4)],
            num_files=6,
        )
    )
    main(["dedup", str(source), str(tmp_path / "whole")])
    command = ["dedup", str(source), str(tmp_path / "cut")]
    kill_when_opening(
        tmp_path / "cut" / "unfinished" / "1" / "completions" / "00003", main, command
    )
    err = resumed(
        main,
        command,
        capfd,
        other=["--ngram", "4"],
        difference="ngram was 5, is 4",
        file=source / "5.jsonl",
    )
    assert "Finding copies 0.jsonl" not in err
    assert "Finding copies 5.jsonl" in err
    assert kept(tmp_path / "cut") == kept(tmp_path / "whole")
    assert (tmp_path / "cut" / "report.json").read_bytes() == (
        tmp_path / "whole" / "report.json"
    ).read_bytes()


def test_processes_end_with_a_killed_command_or_worker_and_the_next_one_goes_on(tmp_path):
    source = write_folder(
        tmp_path / "in", [document(seed % 500, 400) for seed in range(1000)], num_files=16
    )
    command = [
        sys.executable,
        "-m",
        "tfidf_tune.cli",
        "data",
        "dedup",
        "--jobs",
        "2",
        source,
        str(tmp_path / "out"),
    ]
    short = "Finding copies: one of 2 processes was killed, perhaps because memory was short."
    for number, victim, code, message in (
        (signal.SIGKILL, "command", -signal.SIGKILL, ""),
        (signal.SIGINT, "command", 128 + signal.SIGINT, ""),
        (
            signal.SIGKILL,
            "worker",
            2,
            f"error: {short} Run the same command again, with fewer jobs, to go on\n",
        ),
    ):
        with (tmp_path / "err").open("w") as err:
            # The session of all its processes.
            process = subprocess.Popen(command, stderr=err, start_new_session=True)
        workers: list[psutil.Process] = []
        while len(workers) < 2:
            assert process.poll() is None
            workers = psutil.Process(process.pid).children(recursive=True)
        (process if victim == "command" else workers[0]).send_signal(number)
        assert process.wait() == code
        while any(running(pid, process.pid) for pid in psutil.pids()):
            time.sleep(0.01)
        assert (tmp_path / "err").read_text().endswith(message)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "1,000 read, 500 removed (50.0%), 500 kept" in done.stdout
    assert not (tmp_path / "out" / "unfinished").exists()


def running(pid, session):
    try:
        return os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_rows_that_are_kept_are_the_same_bytes_and_the_output_can_be_read(tmp_path):
    lines = [
        '{"id": 18446744073709551615, "text": "one", "x": 1e400}',
        '{"id": 3, "text": "two",  "when": "1912-04-15", "x": 1.50}',
        '{"text": "one", "id": 10000000000000000000000000000000}',
        '{"text": "three \\u00e9", "tools": {"limit": null}}\r',
        '{"other": 1}',
    ]
    (tmp_path / "in.jsonl").write_bytes("\ufeff".encode() + "\n".join(lines).encode())
    main(["dedup", str(tmp_path / "in.jsonl"), str(tmp_path / "out"), "--method", "exact"])
    (file,) = (tmp_path / "out").glob("*.gz")
    expected = [line.rstrip("\r") for number, line in enumerate(lines) if number != 2]
    assert gzip.decompress(file.read_bytes()).decode().split("\n") == [*expected, ""]
    main(["dedup", str(tmp_path / "out"), str(tmp_path / "again"), "--method", "exact"])
    assert [path.read_bytes() for path in (tmp_path / "again").glob("*.gz")] == [file.read_bytes()]
    # Of a list only the line ends change, of Parquet nothing is left out.
    (tmp_path / "b.json").write_text("[" + " ,\n".join(lines[:2]).replace("  ", "\n ") + "]")
    pq.write_table(
        pa.Table.from_pylist([{"text": "one", "tool": {"a": None, "b": 1}}]), tmp_path / "b.parquet"
    )
    for name, expected in (
        ("b.json", lines[:2]),
        ("b.parquet", ['{"text":"one","tool":{"a":null,"b":1}}']),
    ):
        main(["dedup", str(tmp_path / name), str(tmp_path / f"out of {name}"), "--method", "exact"])
        (file,) = (tmp_path / f"out of {name}").glob("*.gz")
        assert gzip.decompress(file.read_bytes()).decode().split("\n") == [*expected, ""]


def test_copies_in_scripts_without_spaces_are_found(tmp_path):
    """Three of 600 characters differ: that is no near copy if the whole text is one word."""
    rng = random.Random(0)
    texts = [
        "".join(rng.choices("轮船中午离开了港口今天没有风海很平静人们在岸上看", k=600))
        for _ in range(30)
    ]
    copies = []
    for text in texts:
        characters = list(text)
        for place in rng.sample(range(600), 3):
            characters[place] = "新"
        copies.append("".join(characters))
    rows = [{"text": text} for text in [*texts, *copies]]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    )
    main(["dedup", str(tmp_path / "in.jsonl"), str(tmp_path / "out")])
    assert [row["text"] for row in kept(tmp_path / "out")] == texts


def test_rows_without_text_are_no_copies_and_columns_that_json_has_not_are_refused(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        '{"n": 1, "text": ""}\n{"n": 2, "text": null}\n{"n": 3, "text": "a"}\n'
    )
    for method in ("exact", "minhash"):
        main(["dedup", str(tmp_path / "in.jsonl"), str(tmp_path / method), "--method", method])
        assert [row["n"] for row in kept(tmp_path / method)] == [1, 2, 3]
    pq.write_table(pa.table({"text": ["a"], "price": [Decimal("1.5")]}), tmp_path / "in.parquet")
    with pytest.raises(
        ValueError,
        match=r"in\.parquet', row 1 has a column that cannot be written as JSON .*decimal",
    ):
        main(["dedup", str(tmp_path / "in.parquet"), str(tmp_path / "out")])


def test_what_cannot_work_is_refused(tmp_path):
    source = Path(write_folder(tmp_path / "in", ["one two"], num_files=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("mine")
    for arguments, error, message in (
        ([tmp_path / "gone", tmp_path / "out"], FileNotFoundError, "gone"),
        ([source, tmp_path / "mine"], ValueError, "mine exists and is not empty"),
        ([source, tmp_path / "out", "--threshold", "0.9999"], ValueError, "threshold 0.9999"),
        ([source, tmp_path / "other", "--column", "prose"], ValueError, "no column 'prose'"),
    ):
        with pytest.raises(error, match=message):
            main(["dedup", *map(str, arguments)])
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "out").exists()
