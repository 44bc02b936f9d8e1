"""The embedded corpus: English that every Python carries, for demos and tests without a network.

It consists of two kinds of text: the language reference behind ``help()`` (``pydoc_data.topics``) and the docstrings
of the standard library, read from its source files without importing them. It differs a little from one
Python version to the next, and is the same wherever the version is the same.
"""

import ast
import gc
import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from datasets import ReadInstruction
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tfidf_tune._files import atomic_folder
from tfidf_tune.data._cache import cached_folder, digest

END_OF_TEXT = "<|endoftext|>"

_MIN_CHARACTERS = 200
_VALIDATION_SHARE = 0.1
# Tests, generated tables, bundled and installed packages: no prose of the standard library.
_SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_REFERENCE, _DOCSTRINGS = "reference", "docstrings"
_FORMAT_VERSION = 1  # of the cached docstrings: another one where other docstrings are taken from the same files
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def embedded_documents(split: str) -> list[str]:
    """Return the documents of the embedded corpus, distinct and in a fixed order.

    A document's split follows from a hash of its text, about 10 % being validation, so no document is in both. Each
    kind of text has splits of its own too, parts of the others, for what needs text of two kinds. The docstrings are
    kept in the cache, ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``.

    Args:
        split (str): ``"train"`` or ``"validation"``; ``"reference_train"``, ``"reference_validation"``,
            ``"docstrings_train"`` or ``"docstrings_validation"``; or a slice as ``datasets`` has them:
            ``"train[:60%]"``, ``"train[60%:]"``, ``"validation[:20]"``.

    Returns:
        list[str]: texts of at least 200 characters.

    Raises:
        ValueError: If there is no such split, or no document in the slice.
    """
    splits = _splits()
    try:
        slices = ReadInstruction.from_spec(split).to_absolute({name: len(texts) for name, texts in splits.items()})
    except ValueError as error:
        names = ", ".join(map(repr, splits))
        raise ValueError(
            f"the embedded corpus has the splits {names}, not {split!r}; "
            f"a slice of one is written 'train[:60%]' or 'validation[10:20]' ({error})"
        ) from error
    documents = [text for part in slices for text in splits[part.splitname][part.from_ : part.to]]
    if not documents:
        sizes = ", ".join(f"{name!r} has {len(texts)}" for name, texts in splits.items())
        raise ValueError(f"no document of the embedded corpus is in {split!r}: {sizes}; take a wider slice")
    return documents


def train_embedded_tokenizer(folder: str | Path, vocab_size: int = 4096) -> Path:
    """Train a byte-level BPE tokenizer on the embedded corpus and save it for ``transformers``.

    ``<|endoftext|>`` is its EOS and padding token; it has no BOS token. A folder that already holds
    such a tokenizer is kept as it is.

    Args:
        folder (str | Path): where to save; it appears only when it is whole.
        vocab_size (int): number of tokens. Default: 4096

    Returns:
        Path: the folder.

    Raises:
        ValueError: If ``folder`` holds something else than a tokenizer of ``vocab_size`` tokens.
    """
    folder = Path(folder).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        _check_same(folder, vocab_size)
        return folder
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(embedded_documents("train"), trainer)
    with atomic_folder(folder) as temporary:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
        ).save_pretrained(str(temporary))
    return folder


def _check_same(folder: Path, vocab_size: int) -> None:
    file = folder / "tokenizer.json"
    found = f"{Tokenizer.from_file(str(file)).get_vocab_size()} tokens" if file.is_file() else "no tokenizer.json"
    if found != f"{vocab_size} tokens":
        raise ValueError(
            f"{str(folder)!r} is there already and holds {found}, not a tokenizer of {vocab_size} tokens: "
            "name another folder or empty this one"
        )


@cache
def _splits() -> dict[str, list[str]]:
    kinds = {_REFERENCE: _long_enough(topics.values()), _DOCSTRINGS: _cached_docstrings()}
    kind_of: dict[str, str] = {}
    for kind, texts in kinds.items():
        for text in texts:
            kind_of.setdefault(text, kind)
    names = (
        f"{prefix}{part}" for prefix in ("", f"{_REFERENCE}_", f"{_DOCSTRINGS}_") for part in ("train", "validation")
    )
    splits: dict[str, list[str]] = {name: [] for name in names}
    for text, kind in kind_of.items():
        part = "validation" if _is_validation(text) else "train"
        splits[part].append(text)
        splits[f"{kind}_{part}"].append(text)
    return splits


def _long_enough(texts: Iterable[str]) -> list[str]:
    return [text for text in map(str.strip, texts) if len(text) >= _MIN_CHARACTERS]


def _cached_docstrings() -> list[str]:
    """Read the docstrings from the cache: to parse the standard library takes every process a second or more."""

    def build(folder: Path) -> dict[str, int]:
        texts = _docstrings_of(files)
        (folder / "docstrings.json").write_text(json.dumps(texts), encoding="utf-8")
        return {"num_docstrings": len(texts)}

    files = list(_standard_library_files())
    states = [(str(file), state.st_size, state.st_mtime_ns) for file in files for state in [file.stat()]]
    settings = {
        "kind": "embedded_docstrings",
        "format_version": _FORMAT_VERSION,
        "min_characters": _MIN_CHARACTERS,
        "python": sys.version,
        "files": digest(states),
    }
    try:
        cached = cached_folder(None, settings, build) / "docstrings.json"
        texts: list[str] = json.loads(cached.read_text(encoding="utf-8"))
    except (OSError, RuntimeError, ValueError):  # nowhere to write to, no home, a damaged file: it is a second's work
        return _docstrings_of(files)
    return texts


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    # Syntax trees are many small objects without cycles: looking for cycles took three quarters of the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_validation(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < _VALIDATION_SHARE * 256


def _standard_library_files() -> Iterator[Path]:
    for folder, subfolders, files in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - _SKIPPED_FOLDERS)
        yield from (Path(folder, file) for file in sorted(files) if file.endswith(".py"))


def _docstrings_of(files: Iterable[Path]) -> list[str]:
    with _garbage_collection_paused(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd escapes in the standard library's own strings
        return _long_enough(text for file in files for text in _docstrings([ast.parse(file.read_bytes())]))


def _docstrings(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, _Documented):
            yield ast.get_docstring(node) or ""
            yield from _docstrings(node.body)
