"""A check of lengths that data sets share."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfidf_tune.data._tokenizer import TextTokenizer


def check_fits_model(tokenizer: "TextTokenizer", *, lower: str, **lengths: int) -> None:
    """Refuse sequences that are longer than the tokenizer's ``max_seq_len``.

    Args:
        tokenizer (TextTokenizer): None as ``max_seq_len`` means no limit.
        lower (str): the setting to lower.
        **lengths (int): the settings, in tokens, whose sum is the length of the longest sequence.

    Raises:
        ValueError: If the sum is larger than the limit.
    """
    num_tokens = sum(lengths.values())
    if tokenizer.max_seq_len is not None and num_tokens > tokenizer.max_seq_len:
        raise ValueError(
            f"{' + '.join(lengths)} is {num_tokens}, above max_seq_len {tokenizer.max_seq_len}, the tokenizer's own or "
            f"the model's limit: lower {lower}"
        )
