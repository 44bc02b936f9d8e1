"""Deterministic text of a few words, files of text, and the passages of a kind."""

import itertools
import json
import random

WORDS = [
    "the",
    "a",
    "river",
    "stone",
    "light",
    "of",
    "under",
    "over",
    "house",
    "green",
    "walks",
    "sings",
]
WORDS += ["1984", "café"]
_SYLLABLES = [
    "".join(letters) for letters in itertools.product("bdfgklmnprst", "aeiou", "bdfgklmnprst")
]


def passage(seed, num_words):
    return f"{seed}: " + " ".join(
        WORDS[(seed * seed + i * (seed + 3) + i * i) % len(WORDS)] for i in range(num_words)
    )


def random_text(seed, num_words=200):
    """Random words of three letters, so that each takes four bytes."""
    return " ".join(random.Random(seed).choices(_SYLLABLES, k=num_words))


def changed(text, share, seed):
    """Replace a share of the words."""
    rng = random.Random(seed)
    words = text.split(" ")
    for index in range(len(words)):
        if rng.random() < share:
            words[index] = "other"
    return " ".join(words)


def write_rows(file, rows):
    """Write rows, or texts, as JSON lines; return the file's name."""
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            columns = row if isinstance(row, dict) else {"text": row}
            lines.write(json.dumps(columns) + "\n")
    return str(file)


def write_folder(folder, texts, num_files=3):
    """Write texts by turns into the files of a new folder; return its name."""
    folder.mkdir()
    rows = [{"n": number, "text": text} for number, text in enumerate(texts)]
    for part in range(num_files):
        write_rows(folder / f"{part}.jsonl", rows[part::num_files])
    return str(folder)


def targets_of(made):
    return [passage for passage in made.passages if passage.kind == "target"]


def controls_of(made):
    return [passage for passage in made.passages if passage.kind == "control"]
