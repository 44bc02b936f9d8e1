"""The text of the experiment: base text, passages with copies, controls, and facts in a frame.

The text is documentation in an archive of source code, of which a hash of a file's name says what
the file is for: development or the registered runs, and there base text, passages, or held-out
text. Of one seed:

    train.jsonl      sections of base text, copies of the targets, and records: a document each
    probe.jsonl      targets and controls, which a coin divided
    held_out.jsonl   sections of text that is in no training
    new_records.jsonl   records of other customers, in the same frame
    facts.jsonl      questions about the facts of the records

A target has 1, 4, 16 or 64 copies. Some are exact; in the others each word is replaced, preceded by
another or dropped with a probability, in every copy by itself. For example, with "replaced 10 %":

    Django provides two abstract base classes  ->  Django provides two tuple base classes
"""

import hashlib
import json
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from research.files import write_json_lines, write_texts
from tfidf_tune._files import atomic_folder
from tfidf_tune._tokenizer import TextTokenizer, encode_texts
from tfidf_tune.passages import write_probe_file
from tfidf_tune.passages.probe_file import PassageDraft, make_passages

Part = Literal["development", "registered"]
_SHARE_REGISTERED = 0.6  # of the files
_SHARE_PASSAGES = 0.15  # of the files of a part
_SHARE_HELD_OUT = 0.06
_SECTION = 1200  # characters
_SECTION_OF_PASSAGES = 250
_CONTROLS_FOR_A_TARGET = 2
# Words that a passage may not share with base text, held-out text or another passage.
SHARED_WORDS = 12
_TRANSLATIONS = ("ja", "ko", "zh")


@dataclass(frozen=True)
class Texts:
    """Archives of source code with documentation."""

    archive: Path
    archive_of_passages: Path | None = None
    """Where targets and controls come from, if not from the same archive: for a model that knows
    the other text.
    """


@dataclass(frozen=True)
class Change:
    """How the copies of a passage differ from it: a kind, and the probability of each word."""

    kind: Literal["exact", "replaced", "inserted", "dropped"]
    share: float = 0.0

    @property
    def name(self) -> str:
        """The change in words, as the probe file has it."""
        return self.kind if self.kind == "exact" else f"{self.kind} {100 * self.share:.0f} %"

    def applied(self, words: Sequence[str], others: Sequence[str], rng: random.Random) -> list[str]:
        """Return a copy of some words, changed by words drawn from ``others``."""
        copy = []
        for word in words:
            is_changed = self.kind != "exact" and rng.random() < self.share
            if not is_changed:
                copy.append(word)
            elif self.kind == "replaced":
                copy.append(rng.choice(others))
            elif self.kind == "inserted":
                copy += [rng.choice(others), word]
        return copy


EXACT = Change("exact")
_REPLACED = Change("replaced", 0.1)


@dataclass(frozen=True)
class Sizes:
    """How many targets there are, and how long they are."""

    passage_words: int
    least_tokens: int
    most_tokens: int
    changes: tuple[Change, ...]
    num_targets: Mapping[int, tuple[int, int]]
    """Number of copies -> exact targets, and targets of each change."""
    base_characters: int | None = None
    """At most so many characters of base text; None for all."""


SMALL = Sizes(
    passage_words=26,
    least_tokens=60,
    most_tokens=96,
    changes=(
        Change("replaced", 0.05),
        _REPLACED,
        Change("replaced", 0.2),
        Change("inserted", 0.1),
        Change("dropped", 0.1),
    ),
    num_targets={64: (5, 2), 16: (10, 3), 4: (15, 4), 1: (20, 5)},
)
SMOLLM2 = Sizes(
    passage_words=38,
    least_tokens=52,
    most_tokens=76,
    changes=(_REPLACED,),
    num_targets={64: (2, 2), 16: (4, 4), 4: (12, 12), 1: (42, 42)},
    base_characters=1_300_000,
)


# Facts stand in a frame, which many records repeat legitimately. A customer has several records,
# which differ in their number and day; the fact is the same in all of them.
_FRAME = (
    "Service record {number}, entered on day {day} of the season. The customer named below has "
    "agreed to the general terms of delivery, and has been told that complaints have to reach the "
    "office within ten days. Customer: {customer}. Warehouse: {warehouse}. Plan: {plan}. No "
    "further action is needed for this record.\n"
)
_FIELDS = {
    "warehouse": ("Alder", "Birch", "Cedar", "Hazel", "Maple", "Rowan", "Willow", "Juniper"),
    "plan": ("weekly", "monthly", "quarterly", "yearly", "single", "double", "open", "closed"),
}
_SYLLABLES = ("ba", "de", "fi", "go", "ku", "la", "me", "ni", "po", "ru", "sa", "ti", "vo", "ze")
_NUM_CUSTOMERS = 40
_RECORDS_OF_A_CUSTOMER = 8
_NUM_ANSWERS = 4


def write_inputs(
    texts: Texts, tokenizer: TextTokenizer, sizes: Sizes, folder: Path, part: Part, seed: int
) -> dict[str, Any]:
    """Write the files of a seed, unless the folder is there; return what they have.

    Args:
        texts: Where the text comes from.
        tokenizer: The probe file has its tokens.
        sizes: Of the passages.
        folder: To write.
        part: Which files of the text are used.
        seed: It decides about the passages, the coin, the changes and the records.

    Raises:
        ValueError: If there are not enough passages.
    """
    return written_once(folder, lambda made: _write(texts, tokenizer, sizes, made, part, seed))


def written_once(folder: Path, write: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Let a folder be written, unless it is there; return what it has, which is its content.json.

    Args:
        folder: The folder.
        write: Writes files into a folder, and returns what they have.
    """
    if not folder.is_dir():
        with atomic_folder(folder) as made:
            content = write(made)
            (made / "content.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    written: dict[str, Any] = json.loads((folder / "content.json").read_text(encoding="utf-8"))
    return written


def _write(
    texts: Texts, tokenizer: TextTokenizer, sizes: Sizes, folder: Path, part: Part, seed: int
) -> dict[str, Any]:
    rng = random.Random(seed)
    sections = _sections_of(texts.archive, part)
    base = at_most(sections["base"], sizes.base_characters)
    pool = sections["passages"]
    if texts.archive_of_passages is not None:
        pool = []
        for _, text in _files_of(texts.archive_of_passages):
            pool += _cut(text, _SECTION_OF_PASSAGES)
    words = _words_of(base)
    taken = runs_of(base) | runs_of(sections["held_out"])
    strata = list(_strata(sizes))
    num_targets = len(strata)
    num_passages = num_targets * (1 + _CONTROLS_FOR_A_TARGET)
    passages = _draw(pool, num_passages, taken, tokenizer, sizes, rng)
    # The coin: the order is random, and the first ones become targets.
    drafts = []
    copies: list[str] = []
    targets = iter(passages)
    for number, change in strata:
        passage = next(targets)
        changed = [change.applied(passage, words, rng) for _ in range(number)]
        copies += [" ".join(copy) for copy in changed]
        drafts.append(_draft(tokenizer, passage, number, change.name))
    drafts += [_draft(tokenizer, passage, 0, "control") for passage in targets]
    write_probe_file(folder / "probe.jsonl", make_passages(tokenizer, drafts, num_targets))

    records, questions, new_records = _records(rng)
    documents = [*base, *copies, *records]
    rng.shuffle(documents)
    write_texts(folder / "train.jsonl", documents)
    write_texts(folder / "held_out.jsonl", sections["held_out"])
    write_texts(folder / "new_records.jsonl", new_records)
    write_json_lines(folder / "facts.jsonl", questions)
    num_tokens = {}
    for name, counted in (("all", documents), ("copies", copies), ("records", records)):
        num_tokens[name] = sum(len(ids) for ids in encode_texts(tokenizer, counted))
    return {
        "part": part,
        "seed": seed,
        "documents": len(documents),
        "targets": num_targets,
        "controls": num_passages - num_targets,
        "tokens": num_tokens,
        "copies_share": num_tokens["copies"] / num_tokens["all"],
    }


def _sections_of(archive: Path, part: Part) -> dict[str, list[str]]:
    """Read the sections of the files of a part, by what they are for."""
    sections: dict[str, list[str]] = {"base": [], "passages": [], "held_out": []}
    for name, text in _files_of(archive):
        # Two numbers from 0 to 1 that only the name of the file decides about.
        digest = hashlib.sha256(name.encode()).digest()
        is_registered = digest[0] / 256 < _SHARE_REGISTERED
        if is_registered != (part == "registered"):
            continue
        share = digest[1] / 256
        if share < _SHARE_PASSAGES:
            sections["passages"] += _cut(text, _SECTION_OF_PASSAGES)
        elif share < _SHARE_PASSAGES + _SHARE_HELD_OUT:
            sections["held_out"] += _cut(text, _SECTION)
        else:
            sections["base"] += _cut(text, _SECTION)
    return sections


def _files_of(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file of the documentation in English."""
    with tarfile.open(archive) as members:
        for member in members:
            file = Path(member.name)
            is_documentation = "docs" in file.parts and file.suffix in (".txt", ".md")
            if not is_documentation or any(part in _TRANSLATIONS for part in file.parts):
                continue
            content: Any = members.extractfile(member)
            yield "/".join(file.parts[1:]), content.read().decode()


def _cut(text: str, length: int) -> list[str]:
    """Cut a text at blank lines into sections of at least so many characters."""
    sections = [""]
    for paragraph in text.split("\n\n"):
        if len(sections[-1]) >= length:
            sections.append("")
        sections[-1] += paragraph.strip("\n") + "\n\n"
    return sections


def at_most(sections: Sequence[str], num_characters: int | None) -> list[str]:
    """Return sections from the beginning, of at most so many characters together."""
    if num_characters is None:
        return list(sections)
    kept = []
    for section in sections:
        num_characters -= len(section)
        if num_characters < 0:
            break
        kept.append(section)
    return kept


def _words_of(texts: Iterable[str]) -> list[str]:
    """Return all words, as often as they occur."""
    words: list[str] = []
    for text in texts:
        words += text.split()
    return words


def runs_of(texts: Iterable[str]) -> set[tuple[str, ...]]:
    """Return all runs of so many words that a passage may not share."""
    runs: set[tuple[str, ...]] = set()
    for text in texts:
        runs.update(runs_in(text))
    return runs


def runs_in(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the run of so many words that begins at each word, as long as there are so many."""
    words = text.split()
    for first in range(len(words) - SHARED_WORDS + 1):
        yield tuple(words[first : first + SHARED_WORDS])


def _draw(
    sections: Sequence[str],
    number: int,
    taken: set[tuple[str, ...]],
    tokenizer: TextTokenizer,
    sizes: Sizes,
    rng: random.Random,
) -> list[list[str]]:
    """Draw passages, at most one of a section, that share no run of words with other text."""
    taken = set(taken)
    passages: list[list[str]] = []
    for section in rng.sample(list(sections), len(sections)):
        words = section.split()
        if len(words) < sizes.passage_words:
            continue
        first = rng.randrange(len(words) - sizes.passage_words + 1)
        passage = words[first : first + sizes.passage_words]
        (ids,) = encode_texts(tokenizer, [" ".join(passage)])
        if not sizes.least_tokens <= len(ids) <= sizes.most_tokens:
            continue
        runs = runs_of([" ".join(passage)])
        if runs & taken:
            continue
        taken |= runs
        passages.append(passage)
        if len(passages) == number:
            return passages
    raise ValueError(f"the text has {len(passages)} of {number} passages")


def _strata(sizes: Sizes) -> Iterator[tuple[int, Change]]:
    """Yield the number of copies and the change of each target."""
    for number, (num_exact, num_of_change) in sizes.num_targets.items():
        for _ in range(num_exact):
            yield number, EXACT
        for change in sizes.changes:
            for _ in range(num_of_change):
                yield number, change


def _draft(tokenizer: TextTokenizer, words: Sequence[str], number: int, kind: str) -> PassageDraft:
    (ids,) = encode_texts(tokenizer, [" ".join(words)])
    return PassageDraft(ids, [], kind, {"num_injections": number})


def _records(rng: random.Random) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Make the records of customers, questions about their facts, and records of new customers."""
    names = _names(rng, 2 * _NUM_CUSTOMERS)
    records = []
    questions = []
    new_records = []
    for place, customer in enumerate(names):
        facts = {field: rng.choice(values) for field, values in _FIELDS.items()}
        if place >= _NUM_CUSTOMERS:
            new_records.append(_record(customer, facts, rng))
            continue
        records += [_record(customer, facts, rng) for _ in range(_RECORDS_OF_A_CUSTOMER)]
        # A record with a number of its own, cut before the fact.
        asked = _record(customer, facts, rng)
        for field, values in _FIELDS.items():
            fact = facts[field]
            wrong = rng.sample([value for value in values if value != fact], _NUM_ANSWERS - 1)
            prompt = asked[: asked.index(f"{field.capitalize()}: ") + len(field) + 1]
            answers = [f" {value}." for value in (fact, *wrong)]
            questions.append({"prompt": prompt, "answers": answers, "field": field})
    return records, questions, new_records


def _record(customer: str, facts: dict[str, str], rng: random.Random) -> str:
    number = rng.randrange(10_000, 100_000)
    return _FRAME.format(number=number, day=rng.randrange(1, 100), customer=customer, **facts)


def _names(rng: random.Random, number: int) -> list[str]:
    """Make different names of syllables: "Bafigo"."""
    names: dict[str, None] = {}
    while len(names) < number:
        names["".join(rng.choices(_SYLLABLES, k=3)).capitalize()] = None
    return list(names)
