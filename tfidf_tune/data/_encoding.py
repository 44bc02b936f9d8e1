"""What the data sets ask of a tokenizer, torchtune's own ones included."""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tfidf_tune.data._cache import digest

TokenArray = npt.NDArray[np.int32]

MAX_TEXT_BYTES = 10_000_000
"""The longest text that is tokenized, in UTF-8: a tokenizer takes 100 to 350 times as much memory for it, and ends the
process where it does not get that. Cut into pieces it could have other ids."""

# Enough to keep a fast tokenizer's threads busy. A batch has no more bytes than one text may have.
_BATCH_SIZE = 256

# Words, cases, digits, spaces, line ends, accents, other scripts and an emoji: two tokenizers that
# agree on all this are the same for our purposes.
_SAMPLE_TEXT = (
    "The quick brown fox, aged 27, jumped over 3.14 lazy dogs' tails!  (Don't ask why.)\n\n"
    "\tdef f(x):\n        return x ** 2  # naïve café, straße\n"
    "Information-theoretic weighting; дюйм, 東京, مرحبا, 🙂 <unk> </s> @-@ §12"
)


class TextTokenizer(Protocol):
    """The part of a torchtune tokenizer that plain text needs."""

    eos_id: int
    vocab_size: int
    max_seq_len: int | None

    def encode(self, text: str, add_bos: bool = True, add_eos: bool = True) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``."""
        ...


def encode_texts(tokenizer: TextTokenizer, texts: Iterable[str]) -> Iterator[tuple[str, TokenArray]]:
    """Encode texts one by one in order, without BOS and EOS.

    Args:
        tokenizer (TextTokenizer): where it has a method ``encode_batch(texts)``, that is used for speed.
        texts (Iterable[str]): read lazily, a batch ahead.

    Yields:
        tuple[str, TokenArray]: a text and its ids, int32 of shape ``[num_tokens]``.
    """
    for batch in _batches(texts):
        if hasattr(tokenizer, "encode_batch"):
            encoded = tokenizer.encode_batch(batch)
        else:
            encoded = [tokenizer.encode(text, add_bos=False, add_eos=False) for text in batch]
        for text, ids in zip(batch, encoded, strict=True):
            yield text, np.asarray(ids, dtype=np.int32)


def num_bytes(text: str) -> int:
    """Count the bytes of a text in UTF-8.

    Args:
        text (str): the text.

    Returns:
        int: the number of bytes.
    """
    return len(text.encode(errors="replace"))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        size += num_bytes(text)
        if batch and size > MAX_TEXT_BYTES:
            yield batch
            batch, size = [], num_bytes(text)
        batch.append(text)
        if len(batch) == _BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def cut_blocks(pieces: list[TokenArray], block_size: int) -> TokenArray:
    """Concatenate token ids and cut them into blocks; the tail that does not fill one is dropped.

    Args:
        pieces (list[TokenArray]): int32 arrays of shape ``[num_tokens]``.
        block_size (int): tokens in a block.

    Returns:
        TokenArray: int32 of shape ``[num_blocks, block_size]``.
    """
    stream = np.concatenate([np.empty(0, dtype=np.int32), *pieces])
    num_blocks = len(stream) // block_size
    return stream[: num_blocks * block_size].reshape(num_blocks, block_size)


def tokenizer_name(tokenizer: TextTokenizer) -> str:
    """Return the name to show for a tokenizer: its ``name``, or its class where it has none.

    Args:
        tokenizer (TextTokenizer): any tokenizer.

    Returns:
        str: the name.
    """
    return str(getattr(tokenizer, "name", type(tokenizer).__name__))


def tokenizer_fingerprint(tokenizer: TextTokenizer) -> str:
    """Return a short hash by which training and evaluation see that they use the same tokenizer.

    Args:
        tokenizer (TextTokenizer): where it has a ``fingerprint``, that is returned.

    Returns:
        str: 16 hexadecimal digits; for tokenizers without a ``fingerprint`` a hash of their
            ``vocab_size`` and of the ids of a fixed sample text.
    """
    if hasattr(tokenizer, "fingerprint"):
        return str(tokenizer.fingerprint)
    return fingerprint_of(tokenizer, tokenizer.vocab_size)


def fingerprint_of(tokenizer: TextTokenizer, vocabulary: Any) -> str:
    """Hash a vocabulary together with the ids of a fixed sample text.

    Args:
        tokenizer (TextTokenizer): encodes the sample text.
        vocabulary (Any): plain data that stands for the vocabulary.

    Returns:
        str: 16 hexadecimal digits.
    """
    return digest([vocabulary, tokenizer.encode(_SAMPLE_TEXT, add_bos=False, add_eos=False)])
