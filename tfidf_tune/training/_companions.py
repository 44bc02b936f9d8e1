"""Files that stand beside the weights of a checkpoint and belong to the model: tokenizer, chat template, generation."""

import os
import stat
from contextlib import suppress
from pathlib import Path

from huggingface_hub.constants import HF_HUB_CACHE
from transformers import GenerationConfig

from tfidf_tune.training._errors import first_line

_GENERATION = "generation_config.json"

# Nothing else is copied, whatever the folder holds. Tokenizer files are those that transformers' classes declare in
# `vocab_files_names`, and the constants of its `tokenization_utils_base`.
COMPANIONS = (
    _GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_MAX_BYTES = 2**28  # the largest tokenizers have about 30 MB


def read_companions(folder: Path) -> dict[str, bytes]:
    """Read the files that every checkpoint of a run gets a copy of.

    Links are followed within the folder and within the cache of the Hugging Face hub, whose snapshots consist of links.
    A link to anywhere else is refused: whoever passes a checkpoint on would also pass on that file.

    Args:
        folder (Path): a Hugging Face model folder.

    Returns:
        dict[str, bytes]: content by the name relative to the folder.

    Raises:
        ValueError: If one of them is not a regular file, leads out of the folder, or is too large to be what its name
            says; or if transformers fails on the settings of generation.
        OSError: If one cannot be read.
    """
    roots = [folder.resolve(), Path(HF_HUB_CACHE).resolve()]
    if folder.resolve().parent.name == "snapshots":  # of a cache elsewhere: <repository>/snapshots/<commit>
        roots.append(folder.resolve().parents[1])
    paths = sorted(path for pattern in COMPANIONS for path in _matching(folder, pattern))
    companions = {path.relative_to(folder).as_posix(): _read(path, roots) for path in paths}
    if _GENERATION in companions:
        _check_generation(folder)
    return companions


def _check_generation(folder: Path) -> None:
    try:
        with suppress(OSError):  # what is not JSON, transformers passes over when it loads a model
            GenerationConfig.from_pretrained(folder)
    except Exception as error:
        raise ValueError(
            f"{folder / _GENERATION}: transformers cannot load a model with it ({type(error).__name__}: "
            f"{first_line(error)}): correct it, or remove it"
        ) from error


def _matching(folder: Path, pattern: str) -> list[Path]:
    """What is there under a name, be it a dangling link, which ``glob`` passes over."""
    if "*" in pattern:
        return list(folder.glob(pattern))
    return [folder / pattern] if os.path.lexists(folder / pattern) else []


def _read(path: Path, roots: list[Path]) -> bytes:
    target = path.resolve()
    if not target.exists():
        raise ValueError(f"{path} is a link to {target}, which does not exist: fetch or remove the file")
    if not any(target.is_relative_to(root) for root in roots):
        raise ValueError(
            f"{path} is a link to {target}, outside of the checkpoint folder; a copy of it would go into every "
            "checkpoint of the run: replace the link with the file itself, or remove it"
        )
    status = target.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
        raise ValueError(f"{path} is not a regular file: replace it with the file of the model, or remove it")
    if status.st_size > _MAX_BYTES:
        raise ValueError(
            f"{path} has {status.st_size / 2**20:,.0f} MiB, and at most {_MAX_BYTES // 2**20} MiB are copied into each "
            "checkpoint: replace it with the file of the model, or remove it"
        )
    return target.read_bytes()
