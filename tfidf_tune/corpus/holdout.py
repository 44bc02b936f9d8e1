"""Documents that ``tfidf-tune data holdout`` divided into two sides, to train on and held out: the
rule of the coin, and the manifest that says what is on each side.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tfidf_tune._checks import first_problem
from tfidf_tune._files import file_sha256
from tfidf_tune.corpus.sources import PlacedRow, TextSource, load_rows

MANIFEST = "holdout.json"
SIDES = ("train", "held_out")
Side = Literal["train", "held_out"]
SCHEMA_VERSION = 1
RULE = (
    "The hash of a document is BLAKE2b of its text in UTF-8 without surrounding white space, 16 "
    "bytes. The name of a group is the least hash of its documents. A group is held out if BLAKE2b "
    "of its name, 8 bytes, with the seed in decimal digits as the key and 'tfidf holdout' as the "
    "personalization, read as a number from 0 to 1, is below the share. Groups of more documents "
    "than largest_group, and documents without text, are trained on without a coin."
)
"""The rule in words, for the manifest."""

_PERSON = b"tfidf holdout"
_HASH_BYTES = 16


def text_hash(text: str) -> bytes:
    """Return the hash of a document's text, 16 bytes; surrounding white space does not count."""
    content = text.strip().encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()


def is_held_out(group: bytes, *, seed: int, share: float) -> bool:
    """Toss the coin of a group, given by the least hash of its documents.

    The result depends on these three alone: not on other groups, nor on the order of documents. A
    group that is held out with one share is held out with each larger one.
    """
    key = str(seed).encode()
    digest = hashlib.blake2b(group, digest_size=8, key=key, person=_PERSON).digest()
    return int.from_bytes(digest, "big") < share * 2**64


class GroupOfRow(NamedTuple):
    """The group of a row.

    Attributes:
        name (str | None): the least hash of its documents, in hexadecimal; None if the row has no
            text.
        documents (int): how many documents the group has. All of them are on one side.
        is_tossed (bool): whether a coin decided the side. If not, the row is trained on for another
            reason, and nothing that is held out is comparable: leave it out of an audit.
    """

    name: str | None
    documents: int
    is_tossed: bool

    def line(self) -> bytes:
        """Return the group as a line of a file of groups."""
        fields = {"group": self.name, "documents": self.documents, "coin": self.is_tossed}
        return json.dumps(fields).encode() + b"\n"


@dataclass(frozen=True)
class _FileOfManifest:
    sha256: str
    rows: int


@dataclass(frozen=True)
class _Manifest:
    """What is read of a manifest."""

    schema_version: Literal[1]
    seed: int
    share: float
    column: str | None
    largest_group: int
    files: dict[str, _FileOfManifest]


@dataclass(frozen=True)
class Holdout:
    """Documents that a coin divided into two sides, see :func:`read_holdout`.

    Attributes:
        manifest (Path): the file ``holdout.json``.
        sha256 (str): its SHA-256, in hexadecimal.
        seed (int): the seed of the coin.
        share (float): the probability that a group is held out.
        column (str | None): the column of the text; None if the texts are what the model has to
            write of conversations or prompts.
        largest_group (int): larger groups were trained on without a coin.
        train (tuple[Path, ...]): the files to train on.
        held_out (tuple[Path, ...]): the files that are held out.
        contents (Mapping[str, Any]): the whole manifest.
    """

    manifest: Path
    sha256: str
    seed: int
    share: float
    column: str | None
    largest_group: int
    train: tuple[Path, ...]
    held_out: tuple[Path, ...]
    contents: Mapping[str, Any]

    def rows(self, side: Side) -> Iterator[tuple[PlacedRow, GroupOfRow]]:
        """Yield each row of a side with its group.

        Raises:
            ValueError: If rows and groups do not fit each other, or a group is on the side on which
                the coin did not put it.
        """
        files = self.train if side == "train" else self.held_out
        for file in files:
            groups = load_rows(TextSource(str(groups_file(file))), {}, None)
            rows = load_rows(TextSource(str(file)), {}, None)
            for row, group in zip(rows, groups, strict=True):
                yield row, self._checked_group(group, side)

    def _checked_group(self, row: PlacedRow, side: Side) -> GroupOfRow:
        group = GroupOfRow(row.columns["group"], row.columns["documents"], row.columns["coin"])
        expected = False
        if group.is_tossed and group.name is not None:
            name = bytes.fromhex(group.name)
            expected = is_held_out(name, seed=self.seed, share=self.share)
        if expected != (side == "held_out"):
            raise ValueError(
                f"{row.place}: the group {group.name} is on the side {side}, where the coin of "
                f"{self.manifest} (seed {self.seed}, share {self.share:g}) does not put it: make "
                "the holdout again"
            )
        return group


def groups_file(file: Path) -> Path:
    """Return the file with the groups of the rows of a file: line n is of row n."""
    return file.parents[1] / "groups" / file.parent.name / file.name


def read_holdout(manifest: str | Path) -> Holdout:
    """Read the manifest that ``tfidf-tune data holdout`` wrote, and check the files of both sides.

    The folder may have been moved.

    Args:
        manifest (str | Path): the file ``holdout.json``, or its folder.

    Returns:
        Holdout: the files of both sides, and how they were divided.

    Raises:
        FileNotFoundError: If there is no manifest.
        ValueError: If it is no manifest, or a file of a side was changed, removed or added.
    """
    path = Path(manifest).expanduser()
    if path.is_dir():
        path = path / MANIFEST
    if not path.is_file():
        raise FileNotFoundError(
            f"no such file: {str(path)!r}; name the {MANIFEST} that `tfidf-tune data holdout` wrote"
        )
    content = path.read_bytes()
    try:
        contents = json.loads(content)
        read = TypeAdapter(_Manifest).validate_python(contents)
    except ValidationError as error:
        key, problem = first_problem(error)
        raise ValueError(
            f"{path} is not a manifest that this version of tfidf-tune reads: {key}: "
            f"{problem['msg']}; name the {MANIFEST} that `tfidf-tune data holdout` wrote"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} is not JSON ({error}): name the {MANIFEST} that `tfidf-tune data holdout` "
            "wrote"
        ) from error
    _check_files(path, read.files)
    files_of_side: dict[str, list[Path]] = {side: [] for side in SIDES}
    for name in sorted(read.files):
        folder = name.partition("/")[0]
        if folder in files_of_side:
            files_of_side[folder].append(path.parent / name)
    return Holdout(
        manifest=path,
        sha256=hashlib.sha256(content).hexdigest(),
        seed=read.seed,
        share=read.share,
        column=read.column,
        largest_group=read.largest_group,
        train=tuple(files_of_side["train"]),
        held_out=tuple(files_of_side["held_out"]),
        contents=contents,
    )


def _check_files(manifest: Path, files: Mapping[str, _FileOfManifest]) -> None:
    folder = manifest.parent
    for name, described in files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(
                f"{file} is missing, which {manifest} names: bring it back, or make the holdout "
                "again"
            )
        if file_sha256(file) != described.sha256:
            raise ValueError(
                f"{file} has changed since {manifest} was written: bring it back, or make the "
                "holdout again"
            )
    # What was added would be trained on, or measured, without a coin.
    for side in SIDES:
        for file in sorted((folder / side).rglob("*")):
            name = file.relative_to(folder).as_posix()
            if file.is_file() and name not in files:
                raise ValueError(f"{file} is not in {manifest}: move it away")
