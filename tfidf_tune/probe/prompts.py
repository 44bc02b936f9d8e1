"""Where a passage is cut into the prompt that a model gets and the continuation that it is compared
with.
"""

from tfidf_tune.passages import Passage


def cut_passage(
    passage: Passage, prefix_length: int, max_new_tokens: int, offset: int = 0
) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and at most ``max_new_tokens`` ids that follow it.

    The prompt is ``prefix_length`` tokens from token ``offset`` on. A completion has a prompt of
    its own instead::

        token_ids   a b c d e f    prefix_length 2, offset 1:   prompt b c    continuation d e f
        num_prompt  3              whatever they are:           prompt a b c  continuation d e f
    """
    if passage.num_prompt is None:
        start = offset
        end = offset + prefix_length
    else:
        start = 0
        end = passage.num_prompt
    return passage.token_ids[start:end], passage.token_ids[end : end + max_new_tokens]


def chat_messages(text: str) -> list[dict[str, str]]:
    """Return the turn that asks to continue a text."""
    instruction = (
        "Continue the following text word for word, as it goes on in the original. Write only the "
        "text."
    )
    return [{"role": "user", "content": f"{instruction}\n\n{text}"}]
