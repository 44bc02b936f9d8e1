"""Token ids written as a string, and a tokenizer that reads it: every number is the id that it names."""

import os
from collections.abc import Sequence
from pathlib import Path

_OPENING = "token_ids:"
_ORIGINAL = "original_tokenizer"
# The harness cuts a response at the text of EOS, which therefore must not be part of a number.
_EOS = "</s>"


def token_ids_request(ids: Sequence[int]) -> str:
    """Write ids as ``token_ids: 12 45 9``."""
    return " ".join([_OPENING, *map(str, ids)])


def is_token_ids_request(text: str) -> bool:
    """Return whether a request was written by :func:`token_ids_request`."""
    return text.startswith(_OPENING)


def parse_token_ids(text: str) -> list[int]:
    """Read the ids of a request, or of a response, which has no opening word; refuse anything else by a ValueError."""
    words = text.removeprefix(_OPENING).split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(
            f"expected token ids as numbers, got {text[:80]!r}: such prompts need `tfidf-tune eval`, or "
            "`lm_eval --model hf` with a tokenizer of `tfidf-tune tasks --token-ids-tokenizer`, and neither chat "
            "template nor system instruction"
        )
    return [int(word) for word in words]


def save_token_ids_tokenizer(name: str, folder: str | os.PathLike[str]) -> None:
    """Write a pass-through tokenizer, with which the harness's stock ``hf`` model takes prompts of token ids.

    Its vocabulary is the numbers of the model's embedding, so that ``12`` becomes the id 12; nothing is added to a
    text. The original tokenizer is saved in a subfolder, for the tasks.

    Args:
        name (str): folder or hub id of the model or its tokenizer.
        folder (str | os.PathLike[str]): output folder; must not exist or be empty.

    Raises:
        FileExistsError: If ``folder`` is not empty.
        FileNotFoundError: If ``name`` looks like a path and the folder does not exist.
        ValueError: If no tokenizer can be loaded from ``name``.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    from tfidf_tune._files import atomic_folder
    from tfidf_tune.data import hf_tokenizer

    folder = Path(folder).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{str(folder)!r} already exists and is not empty: name another folder")
    original = hf_tokenizer(name)
    try:
        num_embeddings = int(AutoConfig.from_pretrained(name).vocab_size)
    except (OSError, ValueError, AttributeError):  # only a tokenizer
        num_embeddings = 0
    size = max(original.vocab_size, num_embeddings)
    vocab = {(_EOS if i == original.eos_id else str(i)): i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocab))  # no token for unknown words: everything but numbers is refused
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(_OPENING, ""), normalizers.Replace(Regex(rf"(?<!\d){original.eos_id}(?!\d)"), _EOS)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS)
    with atomic_folder(folder) as temporary:
        fast.save_pretrained(str(temporary))
        original.save_pretrained(temporary / _ORIGINAL)


def original_tokenizer(name: str) -> str | None:
    """Return the folder of the original tokenizer if ``name`` is a pass-through tokenizer, else None."""
    folder = Path(name).expanduser() / _ORIGINAL
    return str(folder) if folder.is_dir() else None
