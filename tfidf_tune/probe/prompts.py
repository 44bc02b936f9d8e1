"""Where a passage is cut into the prompt that a model gets and the continuation that it is compared
with.
"""

from tfidf_tune.passages import Passage


def cut_passage(
    passage: Passage, prefix_length: int, max_new_tokens: int, offset: int = 0
) -> tuple[list[int], list[int]]:
    """Return the ids of the prompt, and at most ``max_new_tokens`` ids that follow it.

    The prompt is ``prefix_length`` tokens from token ``offset`` on. A completion has a prompt of
    its own instead, whatever these two are. Of ``token_ids`` 11 to 17, with ``max_new_tokens`` 3::

        prefix_length 2, offset 0        prompt 11 12        continuation 13 14 15
        prefix_length 2, offset 4        prompt 15 16        continuation 17, all that is left
        a completion, num_prompt 3       prompt 11 12 13     continuation 14 15 16
    """
    if passage.num_prompt is None:
        start = offset
        end = offset + prefix_length
    else:
        start = 0
        end = passage.num_prompt
    prompt_ids = passage.token_ids[start:end]
    continuation_ids = passage.token_ids[end : end + max_new_tokens]
    return prompt_ids, continuation_ids


def chat_messages(text: str) -> list[dict[str, str]]:
    """Return the turn that asks to continue a text."""
    instruction = (
        "Continue the following text word for word, as it goes on in the original. Write only the "
        "text."
    )
    return [{"role": "user", "content": f"{instruction}\n\n{text}"}]
