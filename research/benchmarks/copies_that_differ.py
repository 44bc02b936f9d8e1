r"""Which copies does `tfidf-tune data copies` find, and what does it take for a copy that is none?

    python research/benchmarks/copies_that_differ.py --text wikitext-2/valid.txt

Of 40 documents of Python's documentation, each is copied four times, with some of its words
replaced by others of the documentation; 400 documents without such copies say how many copies they
have by themselves. Paragraphs of another text, of more than 30 words, have no copies. The record is
read by docs/data.md.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from measuring import add_output, finish, markdown_table

from research.files import write_texts
from tfidf_tune.corpus.repeated_text import DIFFERING, TUNED, USUAL, find_repeated_text
from tfidf_tune.data import embedded_documents

_NUM_DOCUMENTS = 400
_NUM_COPIED = 40
_NUM_COPIES = 4
_SHARES = (0.05, 0.1, 0.2)
_FEWEST_WORDS = 100
_MOST_WORDS = 400
_FEWEST_OF_PARAGRAPH = 30


def main() -> None:
    """Search the texts, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, required=True, help="a text file with a paragraph in a line"
    )
    add_output(parser)
    options = parser.parse_args()
    rng = random.Random(1)
    every = embedded_documents("train")
    words: list[str] = []
    for document in every:
        words.extend(document.split())
    fitting = [one for one in every if _FEWEST_WORDS < len(one.split()) < _MOST_WORDS]
    documents = fitting[:_NUM_DOCUMENTS]
    searched = [_searched("documentation", documents, 0)]
    for share in _SHARES:
        copies: list[str] = []
        for document in documents[:_NUM_COPIED]:
            copies.extend(_changed(document, share, words, rng) for _ in range(_NUM_COPIES))
        name = f"the same and copies with {100 * share:.0f} % of the words replaced"
        searched.append(_searched(name, [*documents, *copies], len(copies)))
    lines = options.text.read_text(encoding="utf-8").splitlines()
    paragraphs = [line.strip() for line in lines if len(line.split()) > _FEWEST_OF_PARAGRAPH]
    searched.append(_searched("paragraphs of Wikipedia", paragraphs, 0))
    options = argparse.Namespace(output=options.output)  # the text is at another place elsewhere
    finish(options, ("tfidf-tune", "datatrove", "datasketch"), table, searched=searched)


def _changed(text: str, share: float, words: Sequence[str], rng: random.Random) -> str:
    changed = text.split()
    for number in range(len(changed)):
        if rng.random() < share:
            changed[number] = rng.choice(words)
    return " ".join(changed)


def _searched(name: str, texts: Sequence[str], num_copies: int) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "texts.jsonl"
        write_texts(file, texts)
        found = find_repeated_text([str(file)], Path(folder) / "work")
    return {
        "text": name,
        "documents": len(texts),
        "made_copies": num_copies,
        "near_copies": found.near_copies,
        "differing_copies": found.differing_copies,
        "tuned_copies": found.tuned_copies,
    }


def table(record: dict[str, Any]) -> str:
    """Make the table of a record: of each text, what each definition removes."""
    names = ["Text", "Documents", "Copies made"]
    names += [f"{one.threshold:g} of {one.ngram}-grams" for one in (USUAL, DIFFERING, TUNED)]
    keys = ("text", "documents", "made_copies", "near_copies", "differing_copies", "tuned_copies")
    return markdown_table(names, [[str(row[key]) for key in keys] for row in record["searched"]])


if __name__ == "__main__":
    main()
