r"""Of documents that a coin holds out, how many have a near copy that is trained on?

    python research/benchmarks/holdout_copies.py

Documents of Python's documentation, of which some are copied with a few words replaced, and three
are the start of a chain: each link has another 1 % of the words replaced. Near copies, documents
with a Jaccard similarity of 0.8 of 5-grams of words, are counted by comparing all pairs. The record
is read by docs/data.md.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import add_output, finish, markdown_table

from research.files import write_texts
from tfidf_tune.corpus.deduplication import COST_OF_MISSED, Deduplication
from tfidf_tune.corpus.file_deduplication import cluster_numbers_of_file, find_copies
from tfidf_tune.corpus.holdout import is_held_out, text_hash
from tfidf_tune.corpus.jobs import TaskRunner
from tfidf_tune.corpus.minhash import similarity, word_ngrams
from tfidf_tune.corpus.sources import texts_of_rows
from tfidf_tune.data import embedded_documents

_FEWEST_WORDS = 50
_NUM_COPIED = 300
_SHARES = (0.005, 0.01, 0.02)  # of the words that a copy has replaced
_NUM_CHAINS = 3
_NUM_LINKS = 60
_SHARE = 0.05
_SEEDS = 200
_LARGEST_GROUP = 12  # 1 % of the documents that are no copies
_MOST_WITH_NGRAM = 400  # documents; more frequent n-grams are no reason to compare
_REMOVAL = 0.5  # the cost of a missed pair of `data dedup`


def main() -> None:
    """Toss coins for each way of grouping, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_output(parser)
    options = parser.parse_args()
    texts, num_originals = _texts()
    pairs = _near_copies(texts)
    alone = list(range(len(texts)))
    of_removal = _groups(texts, _REMOVAL)
    of_holdout = _groups(texts, COST_OF_MISSED)
    cut = _divided(of_holdout)
    ways = [
        ("each document", alone, False),
        ("groups that `data dedup` finds", of_removal, True),
        ("groups that `data holdout` finds, large ones divided", cut, True),
        ("groups that `data holdout` finds, large ones trained on", of_holdout, True),
    ]
    results = [_tossed(name, texts, groups, pairs, keep) for name, groups, keep in ways]
    finish(
        options,
        ("tfidf-tune", "datatrove", "datasketch"),
        table,
        documents=len(texts),
        originals=num_originals,
        near_copies=len(pairs),
        ways=results,
    )


def _texts() -> tuple[list[str], int]:
    """Return the documents, and how many of them are no copies."""
    rng = random.Random(0)
    every = embedded_documents("train")
    words = sorted({word for document in every for word in document.split()})
    originals = [one for one in every if len(one.split(" ")) >= _FEWEST_WORDS]
    texts = list(originals)
    for document in originals[:_NUM_COPIED]:
        texts.extend(_changed(document, rng.choice(_SHARES), words, rng) for _ in range(2))
    for document in originals[_NUM_COPIED : _NUM_COPIED + _NUM_CHAINS]:
        link = document
        for _ in range(_NUM_LINKS):
            link = _changed(link, 0.01, words, rng)
            texts.append(link)
    return texts, len(originals)


def _changed(text: str, share: float, words: Sequence[str], rng: random.Random) -> str:
    """Replace a share of the words, at least one."""
    changed = text.split(" ")
    number = max(1, round(share * len(changed)))
    for place in rng.sample(range(len(changed)), number):
        changed[place] = rng.choice(words)
    return " ".join(changed)


def _near_copies(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Return the pairs of near copies, by comparing all pairs that share an n-gram."""
    near = Deduplication()
    ngrams = [word_ngrams(text, near.ngram) for text in texts]
    documents_with: dict[int, list[int]] = defaultdict(list)
    for number, of_text in enumerate(ngrams):
        for ngram in of_text.tolist():
            documents_with[ngram].append(number)
    candidates = set()
    for numbers in documents_with.values():
        if len(numbers) > _MOST_WITH_NGRAM:
            continue
        for position, second in enumerate(numbers):
            for first in numbers[:position]:
                candidates.add((first, second))
    pairs = []
    for first, second in sorted(candidates):
        if similarity(ngrams[first], ngrams[second]) >= near.threshold:
            pairs.append((first, second))
    return pairs


def _groups(texts: Sequence[str], cost_of_missed: float) -> list[int]:
    """Return the number of the group of each text."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "texts.jsonl"
        write_texts(file, texts)
        read = partial(texts_of_rows, column="text", sample_by="line")
        clusters = find_copies(
            [str(file)],
            Path(folder),
            Deduplication(),
            read,
            TaskRunner(),
            cost_of_missed=cost_of_missed,
        )
        cluster_of = cluster_numbers_of_file(clusters, 0)
    # Documents without copies have numbers of their own, below 0.
    return [cluster_of.get(number, -1 - number) for number in range(len(texts))]


def _members(groups: Sequence[int]) -> dict[int, list[int]]:
    members = defaultdict(list)
    for number, group in enumerate(groups):
        members[group].append(number)
    return members


def _divided(groups: Sequence[int]) -> list[int]:
    """Divide groups that are too large into parts, in the order of their documents."""
    divided = list(groups)
    next_group = max(groups) + 1
    for numbers in _members(groups).values():
        for start in range(_LARGEST_GROUP, len(numbers), _LARGEST_GROUP):
            for number in numbers[start : start + _LARGEST_GROUP]:
                divided[number] = next_group
            next_group += 1
    return divided


def _tossed(
    name: str,
    texts: Sequence[str],
    groups: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    has_limit: bool,
) -> dict[str, Any]:
    """Toss the coins of many seeds; count what is held out, and has a near copy on the other
    side.
    """
    hashes = [text_hash(text) for text in texts]
    members = _members(groups)
    num_held_out = 0
    num_with_copy = 0
    for seed in range(_SEEDS):
        held_out = set()
        for numbers in members.values():
            if has_limit and len(numbers) > _LARGEST_GROUP:
                continue
            least = min(hashes[number] for number in numbers)
            if is_held_out(least, seed=seed, share=_SHARE):
                held_out.update(numbers)
        with_copy = set()
        for first, second in pairs:
            if (first in held_out) != (second in held_out):
                with_copy.add(first if first in held_out else second)
        num_held_out += len(held_out)
        num_with_copy += len(with_copy)
    return {
        "way": name,
        "groups": len(members),
        "largest": max(len(numbers) for numbers in members.values()),
        "held_out": num_held_out / _SEEDS,
        "with_copy_in_training": num_with_copy / num_held_out,
    }


def table(record: dict[str, Any]) -> str:
    """Make the table of a record: how much of what is held out has a near copy in training."""
    names = [
        "A coin is tossed for",
        "Groups",
        "Documents of the largest",
        "Documents held out",
        "of these, with a near copy in training",
    ]
    return markdown_table(names, [_cells(way) for way in record["ways"]])


def _cells(way: dict[str, Any]) -> list[str]:
    return [
        way["way"],
        f"{way['groups']:,}",
        str(way["largest"]),
        f"{way['held_out']:.0f}",
        f"{100 * way['with_copy_in_training']:.1f} %",
    ]


if __name__ == "__main__":
    main()
