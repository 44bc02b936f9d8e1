"""Time, memory and errors of `tfidf-tune data dedup` and `probe make` on 1, 10 and 100 million
tokens.

    python research/benchmarks/corpus_scale.py --output scale.json

Documents are words of the embedded corpus in random order; one in twenty is copied exactly, and one
in twenty with 1 % of its words replaced. A token is counted as four characters. Each run is a
process of its own with one job; ways that keep all text in memory run up to 10 million tokens for
comparison. `probe make` uses a tokenizer of 8192 tokens.
"""

import argparse
import gzip
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import add_output, finish, markdown_table

from tfidf_tune.data import embedded_documents, train_embedded_tokenizer
from tfidf_tune.passages import read_probe_file

_NUM_WORDS = 300
_CHARACTERS_PER_TOKEN = 4
_FILE_DOCUMENTS = 20_000
_IN_MEMORY = """
import json, sys
from pathlib import Path
import numpy as np
from tfidf_tune.corpus.deduplication import Deduplication
class Words(list):  # a tokenizer whose tokens are words
    eos_id = -1
    decode = lambda self, token_ids: " ".join(self[number] for number in token_ids)
words = {}
rows = [
    np.array([words.setdefault(word, len(words)) for word in json.loads(line)["text"].split()], dtype=np.int32)
    for file in sorted(Path(sys.argv[1]).iterdir()) for line in file.open()
]
print(int(Deduplication().kept(rows, "text", Words(words)).sum()))
"""


def main() -> None:
    """Measure every size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--millions", type=int, nargs="+", default=[1, 10, 100], help="tokens; default: 1 10 100"
    )
    add_output(parser)
    options = parser.parse_args()
    runs = []
    for millions in options.millions:
        with tempfile.TemporaryDirectory() as folder:
            runs += _measured(millions, Path(folder), in_memory=millions <= 10)
            print(table({"runs": runs}), flush=True)
    finish(options, ("datatrove", "numpy", "tfidf-tune"), table, runs=runs)


def _measured(millions: int, folder: Path, *, in_memory: bool) -> list[dict[str, Any]]:
    kinds, num_characters = _write(folder / "in", millions)
    size = {"tokens": num_characters // _CHARACTERS_PER_TOKEN, "documents": len(kinds)}
    dedup = [sys.executable, "-m", "tfidf_tune.cli", "data", "dedup", str(folder / "in")]
    runs = []
    for method in ("exact", "minhash"):
        run = _run([*dedup, str(folder / method), "--method", method])
        files = sorted((folder / method).glob("*.jsonl.gz"))
        kept: set[int] = set()
        for file in files:
            lines = gzip.decompress(file.read_bytes()).splitlines()
            kept.update(json.loads(line)["n"] for line in lines)
        shares = {}
        for kind in ("", "exact", "near"):
            numbers = [number for number, made_as in enumerate(kinds) if made_as == kind]
            removed = [number not in kept for number in numbers]
            shares[kind or "other"] = sum(removed) / len(removed)
        runs.append({"way": f"data dedup, {method}", **size, **run, "removed": shares})
    if in_memory:
        command = [sys.executable, "-c", _IN_MEMORY, str(folder / "in")]
        runs.append({"way": "data sets, minhash in memory", **size, **_run(command)})
    tokenizer = train_embedded_tokenizer(folder / "tokenizer", vocab_size=8192)
    make = [sys.executable, "-m", "tfidf_tune.cli", "probe", "make", str(folder / "in")]
    make += ["--num-controls", "20", "--tokenizer", str(tokenizer), "--overwrite"]
    for passages in ("duplicates", "near-duplicates"):
        output = folder / "probe.jsonl"
        run = _run([*make, "--passages", passages, "--output", str(output)])
        repeated = sum(one.num_injections > 1 for one in read_probe_file(output))
        runs.append({"way": f"probe make, {passages}", **size, **run, "repeated_targets": repeated})
    return runs


def _write(folder: Path, millions: int) -> tuple[list[str], int]:
    """Write documents; return of each what it is a copy of: nothing, "exact" or "near"."""
    folder.mkdir()
    kinds: list[str] = []
    num_characters = 0
    for kind, text in _documents(millions):
        with (folder / f"{len(kinds) // _FILE_DOCUMENTS:05d}.jsonl").open("a") as file:
            file.write(json.dumps({"n": len(kinds), "text": text}) + "\n")
        kinds.append(kind)
        num_characters += len(text)
        if num_characters >= millions * 1e6 * _CHARACTERS_PER_TOKEN:
            break
    return kinds, num_characters


def _documents(seed: int) -> Iterator[tuple[str, str]]:
    """Draw kinds and texts without end."""
    words: list[str] = []
    for text in embedded_documents("train")[:200]:
        words.extend(text.split())
    rng = random.Random(seed)
    earlier: list[list[str]] = []
    while True:
        draw = rng.random()
        if draw < 0.1 and earlier:
            kind = "exact" if draw < 0.05 else "near"
            document = list(rng.choice(earlier))
            if kind == "near":
                for number in range(len(document)):
                    if rng.random() < 0.01:
                        document[number] = rng.choice(words)
        else:
            kind = ""
            document = rng.choices(words, k=_NUM_WORDS)
            if len(earlier) < 1000 or rng.random() < 0.01:
                earlier.append(document)
        yield kind, " ".join(document)


def _run(command: list[str]) -> dict[str, Any]:
    """Run a process with a parent of its own, which reports the largest memory of its children."""
    parent = (
        "import json, resource, subprocess, sys, time; start = time.perf_counter(); "
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, "
        "stderr=subprocess.DEVNULL); used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps([time.perf_counter() - start, used.ru_utime + used.ru_stime, "
        "used.ru_maxrss * 1024]))"
    )
    made = subprocess.run(
        [sys.executable, "-c", parent, *command], check=True, stdout=subprocess.PIPE, text=True
    )
    seconds, cpu_seconds, peak = json.loads(made.stdout)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak}


def table(record: dict[str, Any]) -> str:
    """Lay out the record."""
    rows = []
    for run in record["runs"]:
        removed = ["", "", ""]
        if "removed" in run:
            removed = [f"{100 * run['removed'][kind]:.2f}" for kind in ("exact", "near", "other")]
        row = [
            run["way"],
            f"{run['tokens'] / 1e6:.0f} M",
            f"{run['documents']:,}",
            f"{run['seconds']:,.0f}",
            f"{run['tokens'] / run['cpu_seconds'] / 1e6:.2f} M",
            f"{run['peak_bytes'] / 2**20:,.0f}",
            *removed,
            str(run.get("repeated_targets", "")),
        ]
        rows.append(row)
    columns = ["", "tokens", "documents", "seconds", "tokens/s of a core", "MiB"]
    columns += ["% removed: exact copies", "near copies", "others", "targets with copies, of 100"]
    return markdown_table(columns, rows)


if __name__ == "__main__":
    main()
