"""The spelling of token ids in a string, and a tokenizer that reads it: every number is the id that it names."""

import os
from collections.abc import Sequence
from pathlib import Path

from tfidf_tune._files import atomic_folder
from tfidf_tune.data import hf_tokenizer

_OPENING = "token_ids:"
_ORIGINAL = "original_tokenizer"
# The harness cuts a response at the text of EOS, which therefore must not be found in a number.
_EOS = "</s>"


def token_ids_request(ids: Sequence[int]) -> str:
    """Spell ids.

    Args:
        ids (Sequence[int]): token ids.

    Returns:
        str: ``token_ids: 12 45 9``.
    """
    return " ".join([_OPENING, *map(str, ids)])


def is_token_ids_request(text: str) -> bool:
    """Say whether a request spells ids.

    Args:
        text (str): a request.

    Returns:
        bool: True for what :func:`token_ids_request` wrote.
    """
    return text.startswith(_OPENING)


def parse_token_ids(text: str) -> list[int]:
    """Read ids.

    Args:
        text (str): a request, or a response, which is without the opening word.

    Returns:
        list[int]: the ids.

    Raises:
        ValueError: If there is anything else than ids.
    """
    words = text.removeprefix(_OPENING).split()
    if not all(word.isdecimal() for word in words):
        raise ValueError(
            f"expected token ids as numbers, got {text[:80]!r}: such prompts need `tfidf-tune eval`, or "
            "`lm_eval --model hf` with a tokenizer of `tfidf-tune tasks --token-ids-tokenizer`, and neither chat "
            "template nor system instruction"
        )
    return [int(word) for word in words]


def save_token_ids_tokenizer(name: str, folder: str | os.PathLike[str]) -> None:
    """Write a tokenizer folder with which the stock ``hf`` model of lm-eval is asked by token ids.

    Its vocabulary is the numbers of the model's embedding, so that ``12`` becomes the id 12; nothing is put around
    a text. The original tokenizer lies beside it, for the tasks.

    Args:
        name (str): folder or hub id of the model or its tokenizer.
        folder (str | os.PathLike[str]): where to write; must not exist or be empty.

    Raises:
        FileExistsError: If there is something in ``folder``.
        FileNotFoundError: If ``name`` looks like a path and there is no such folder.
        ValueError: If no tokenizer can be loaded from ``name``.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path(folder).expanduser()
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{str(folder)!r} is there already and not empty: name another folder")
    original = hf_tokenizer(name)
    eos_id = original.eos_id
    size = max(original.vocab_size, _vocab_size_of_model(name))
    vocab = {(_EOS if i == eos_id else str(i)): i for i in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocab))  # without a token for unknown words: all but numbers is refused
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace(_OPENING, ""), normalizers.Replace(Regex(rf"(?<!\d){eos_id}(?!\d)"), _EOS)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with atomic_folder(folder) as temporary:
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS).save_pretrained(
            str(temporary)
        )
        original.save_pretrained(temporary / _ORIGINAL)


def original_tokenizer(name: str) -> str | None:
    """Find the tokenizer behind a folder of :func:`save_token_ids_tokenizer`.

    Args:
        name (str): folder or hub id of a tokenizer.

    Returns:
        str | None: the original's folder; None for any other tokenizer.
    """
    folder = Path(name).expanduser() / _ORIGINAL
    return str(folder) if folder.is_dir() else None


def _vocab_size_of_model(name: str) -> int:
    """Rows of the model's embedding; 0 where only a tokenizer is there."""
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(name).vocab_size)
    except (OSError, ValueError, AttributeError):
        return 0
