"""``python -m research.decisive.counts``: what MinHash removes, and what texts have in common.

The command reads the texts that ``python -m research.decisive small`` and ``natural`` have written,
and writes research/results/decisive_counts.jsonl, a line for each seed of a text.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.decisive.analysis import OFTEN
from research.decisive.parts import HERE, INPUTS, PARTS, RECORDS
from research.decisive.texts import SHARED_WORDS, runs_in, runs_of
from research.experiment import load_experiment
from research.files import read_json_lines, write_json_lines
from tfidf_tune._tokenizer import TextTokenizer, encode_texts
from tfidf_tune.corpus.deduplication import Deduplication
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file

FILE = RECORDS / "decisive_counts.jsonl"
_DEDUPLICATIONS = {"usual": Deduplication(), "best": Deduplication(threshold=0.11, ngram=2)}


def main() -> None:
    """Count in the texts of all seeds."""
    tokenizer = hf_tokenizer(str(INPUTS / "tokenizer"))
    rows = []
    for part in ("small", "natural"):
        seeds = load_experiment(str(HERE / f"{part}.yaml")).seeds
        folders = [INPUTS / PARTS[part].inputs / f"seed{seed}" for seed in seeds]
        for folder in folders:
            if not folder.is_dir():
                sys.exit(f"error: no folder {folder}: python -m research.decisive {part} writes it")
        for seed, folder in zip(seeds, folders, strict=True):
            others = [other for other in folders if other != folder]
            counts = counts_of(folder, others, tokenizer)
            rows.append({"text": part, "seed": seed, **counts})
    write_json_lines(FILE, rows)


def counts_of(folder: Path, others: Sequence[Path], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the counts of a seed's text.

    Args:
        folder: The folder of the seed.
        others: The folders of the other seeds.
        tokenizer: The tokenizer of the models.

    Returns:
        ``documents`` of the training text, and how many of them are ``removed`` by MinHash with its
        usual and its best threshold; ``targets``, and how many of them share 12 words in a row with
        a target of each other seed (``shared_targets``); documents that are ``held_out``, and how
        many of them have a target of 16 copies or more (``held_out_with_targets``); the share of
        the held-out words that stand in 12 words in a row of training (``words_of_training``).
    """
    training = _texts_in(folder / "train.jsonl")
    held_out = _texts_in(folder / "held_out.jsonl")
    documents = [np.asarray(ids) for ids in encode_texts(tokenizer, training)]
    removed = {}
    for name, deduplication in _DEDUPLICATIONS.items():
        kept = deduplication.kept(documents, str(folder), tokenizer)
        removed[name] = len(documents) - int(kept.sum())
    copies = _copies_of_targets(folder)
    often = [text for text, number in copies.items() if number >= OFTEN]
    quoting = [document for document in held_out if any(text in document for text in often)]
    shared = [_num_with(runs_of(_copies_of_targets(other)), copies) for other in others]
    return {
        "documents": len(documents),
        "removed": removed,
        "targets": len(copies),
        "shared_targets": shared,
        "held_out": len(held_out),
        "held_out_with_targets": len(quoting),
        "words_of_training": _share_of_words(runs_of(training), held_out),
    }


def _texts_in(file: Path) -> list[str]:
    return [document["text"] for document in read_json_lines(file)]


def _copies_of_targets(folder: Path) -> dict[str, int]:
    """Return the number of copies of each target, by its text."""
    passages = read_probe_file(folder / "probe.jsonl")
    return {one.text: one.num_injections for one in passages if one.kind == "target"}


def _num_with(runs: set[tuple[str, ...]], texts: Iterable[str]) -> int:
    """Return how many texts have one of the runs of words."""
    return sum(not runs.isdisjoint(runs_of([text])) for text in texts)


def _share_of_words(runs: set[tuple[str, ...]], texts: Iterable[str]) -> float:
    """Return the share of the words that are in one of the runs."""
    are_within = []
    for text in texts:
        within = np.zeros(len(text.split()), dtype=np.bool_)
        for first, run in enumerate(runs_in(text)):
            within[first : first + SHARED_WORDS] |= run in runs
        are_within.append(within)
    return float(np.concatenate(are_within).mean())


if __name__ == "__main__":
    main()
