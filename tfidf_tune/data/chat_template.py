"""Which tokens of a conversation are learned, as its chat template writes it."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from tfidf_tune._printing import counted
from tfidf_tune._tokenizer import HFTokenizer, TextTokenizer, TokenArray
from tfidf_tune.corpus.sources import check_length
from tfidf_tune.data import sequences
from tfidf_tune.data.rows import (
    WRITTEN,
    Chat,
    Message,
    has_field,
    is_empty,
    is_switched_off,
    texts_of,
)
from tfidf_tune.passages.stretches import label_runs

TrainOn = Literal["completions", "last", "all"]

NOTHING = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def encode_chat(
    tokenizer: TextTokenizer,
    chat: Chat,
    template: str | None,
    train_on: TrainOn,
    counts: sequences.Counts,
) -> tuple[TokenArray, sequences.LabelMask]:
    """Apply a chat template to a conversation.

    Where the template marks the turns of the assistant by ``{% generation %}``, these are learned.
    Otherwise a turn is what the conversation up to its end adds to the conversation before it with
    the generation prompt. A turn of which the template writes nothing is not learned; the fields
    that it does not write are counted, as in "unwritten tools".

    For example, of two turns that ChatML's template writes, what is learned is in brackets::

        <|im_start|>user
        Who wrote Emma?<|im_end|>
        <|im_start|>assistant
        [[Jane Austen.<|im_end|>
        ]]
    """
    if not isinstance(tokenizer, HFTokenizer) or template is None:
        raise ValueError(
            f"{chat.place} is a conversation, but the tokenizer has no chat template: name a Jinja "
            "file by dataset.chat_template, or take the chat model's by "
            "tfidf_tune.data.hf_tokenizer"
        )
    if not _learned_turns(chat.messages, chat.first, train_on):
        return NOTHING
    renderer = _Renderer(tokenizer, template, chat)

    # Contents as the template expects them. Few templates take only lists of parts; those for plain
    # text print, refuse or leave them out.
    has_parts = any(isinstance(message["content"], list) for message in chat.messages)
    if has_parts and "Welcome" in _sample(tokenizer, template):
        chat = chat.with_joined_contents()
    text = renderer.text(chat.messages)
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    if eos * 2 in text:
        chat = chat._replace(messages=_without_doubled(eos, chat.messages, text, renderer))
        text = renderer.text(chat.messages)
    check_length(text, chat.place)

    # The turns that are learned: what the template does not write can be no answer.
    written = _as_written(chat.messages, text, renderer)
    _count_unwritten(chat.messages, written, counts)
    if chat.tools:
        without_tools = _Renderer(tokenizer, template, chat._replace(tools=None))
        if without_tools.text_or_none(chat.messages) == text:
            counts["unwritten tools"] += 1
    for turn in _learned_turns(chat.messages, chat.first, train_on):
        if is_empty(written[turn]):
            counts["num_unwritten_answers"] += 1
    turns = _learned_turns(written, chat.first, train_on)
    if not turns:
        return NOTHING

    # Their tokens.
    ids, offsets = tokenizer.encode_with_offsets(text)
    if train_on == "all":
        if any(is_switched_off(message) for message in chat.messages):
            raise ValueError(
                f"{chat.place}: a message has weight 0, but train_on is all: set it to completions"
            )
        return ids, np.ones(len(ids), dtype=np.bool_)
    if _GENERATION_TAG.search(template):
        is_label = _marked_labels(renderer, chat, turns, train_on)
        if chat.first:
            is_label &= offsets[:, 1] > _start(renderer, text, chat, chat.first)
        return ids, is_label
    # The characters of a turn are found by rendering the conversation before and after it; a token
    # that reaches into them is learned.
    is_label = np.zeros(len(ids), dtype=np.bool_)
    for turn in turns:
        start = _start(renderer, text, chat, turn)
        end = _end(renderer, text, chat, turn + 1)
        is_label |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    return ids, is_label


class _Renderer:
    """A chat template, applied to one conversation and to changed copies of its messages."""

    def __init__(self, tokenizer: HFTokenizer, template: str, chat: Chat) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._tools = chat.tools
        self._place = chat.place

    def text(self, messages: Sequence[Message], **options: Any) -> str:
        """Render messages.

        Raises:
            ValueError: If the template refuses them.
        """
        return str(self._render(messages, tokenize=False, **options))

    def text_or_none(self, messages: Sequence[Message]) -> str | None:
        """Render messages that were changed; None if the template refuses them."""
        try:
            return self.text(messages)
        except ValueError:
            return None

    def is_marked(self, messages: Sequence[Message]) -> sequences.LabelMask:
        """Return which tokens of messages the template marks by ``{% generation %}``."""
        if not messages:
            return np.zeros(0, dtype=np.bool_)
        rendered = self._render(
            messages, tokenize=True, return_assistant_tokens_mask=True, return_dict=True
        )
        return np.array(rendered["assistant_masks"], dtype=np.bool_)

    def _render(self, messages: Sequence[Message], **options: Any) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), chat_template=self._template, tools=self._tools, **options
            )
        except Exception as error:  # a template is a program
            raise ValueError(
                f"{self._place}: the chat template refuses this conversation "
                f"({type(error).__name__}: {error}): change the row or leave it out"
            ) from error


def _turns_of_assistant(messages: Sequence[Message]) -> list[int]:
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _learned_turns(messages: Sequence[Message], first: int, train_on: TrainOn) -> list[int]:
    """Return the numbers of the messages from ``first`` on that are learned."""
    turns = [
        turn
        for turn in _turns_of_assistant(messages)
        if turn >= first and not is_empty(messages[turn])
    ]
    if train_on == "last":
        turns = turns[-1:]
    return [turn for turn in turns if not is_switched_off(messages[turn])]


def _count_unwritten(
    messages: Sequence[Message], written: Sequence[Message], counts: sequences.Counts
) -> None:
    """Count the fields of messages that the template does not write."""
    for message, kept in zip(messages, written, strict=True):
        for field in WRITTEN:
            if has_field(message, field) and not has_field(kept, field):
                counts[f"unwritten {field}"] += 1


def _marked_labels(
    renderer: _Renderer, chat: Chat, turns: list[int], train_on: TrainOn
) -> sequences.LabelMask:
    """Return which tokens of a conversation are learned, by a template that marks what the
    assistant generates, and so decides by itself.
    """
    is_label = renderer.is_marked(chat.messages)
    # A template that marks the text but not the end of a turn has no run for an empty one. A
    # template that marks a thought, an answer and a call by themselves has several runs for a turn.
    runs = label_runs(is_label)
    turns_of_assistant = _turns_of_assistant(chat.messages)
    if len(runs) == len(turns_of_assistant):
        for turn, (start, end) in zip(turns_of_assistant, runs, strict=True):
            if turn not in turns:
                is_label[start:end] = False
    elif train_on == "last":
        # The runs of the last turn are those that the conversation before it does not have.
        last = turns[-1]
        num_before = len(label_runs(renderer.is_marked(chat.messages[:last])))
        num_after = len(label_runs(renderer.is_marked(chat.messages[: last + 1])))
        is_label[:] = False
        for start, end in runs[num_before:num_after]:
            is_label[start:end] = True
    elif any(is_switched_off(message) for message in chat.messages):
        raise ValueError(
            f"{chat.place}: the chat template does not tell a message of weight 0 from the others"
        )
    return is_label


def _without_doubled(
    eos: str, messages: list[Message], text: str, renderer: _Renderer
) -> list[Message]:
    """Leave out an EOS at the end of a content where the template writes it again.

    Of the content "four</s>" a template may make "four</s></s>". Without its own EOS it becomes
    "four</s>", and the content is still in the text. Where the template ends a turn by another
    token, it would not be.
    """
    for turn, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str) or not content.endswith(eos):
            continue
        shortened = message | {"content": content.removesuffix(eos)}
        shorter = [*messages[:turn], shortened, *messages[turn + 1 :]]
        shorter_text = renderer.text_or_none(shorter)
        # Counted, because another message can have the same content; stripped, as by some
        # templates.
        content = content.strip()
        if shorter_text is not None and shorter_text.count(content) >= max(text.count(content), 1):
            messages = shorter
            text = shorter_text
    return messages


def _as_written(messages: Sequence[Message], text: str, renderer: _Renderer) -> Sequence[Message]:
    """Leave out the fields of messages that the template does not write: without them the text is
    the same.

    Llama 3's template writes no calls of tools, for example: of the answer ``{"content": "",
    "tool_calls": [...]}`` remains ``{"content": ""}``. Fields are left out one after the other, so
    that one of two that say the same remains.
    """
    for turn, message in enumerate(messages):
        for field in WRITTEN:
            if not has_field(message, field):
                continue
            kept = {name: value for name, value in messages[turn].items() if name != field}
            if field == "content":
                content = message["content"]
                parts = texts_of(content) if isinstance(content, list) else [content]
                if all(part.strip() in text for part in parts):
                    continue
                kept["content"] = type(content)()  # templates expect one
            shorter = [*messages[:turn], kept, *messages[turn + 1 :]]
            if renderer.text_or_none(shorter) == text:
                messages = shorter
    return messages


def unwritten(counts: sequences.Counts) -> str:
    """Say what of the conversations the chat template does not write; an empty text if it writes
    all.
    """
    fields = []
    for field in WRITTEN:
        number = counts[f"unwritten {field}"]
        if number:
            fields.append(f"{field} of {counted(number, 'message')}")
    if counts["unwritten tools"]:
        fields.append(f"tools of {counted(counts['unwritten tools'], 'row')}")
    if not fields:
        return ""
    number = counts["num_unwritten_answers"]
    left_out = f"; it writes nothing of {counted(number, 'answer')} (not learned)" if number else ""
    return (
        f"the chat template does not write {', '.join(fields)}{left_out}: by dataset.chat_template "
        "name a file that writes them"
    )


def learns_turn_ends(tokenizer: TextTokenizer, template: str) -> bool:
    """Return whether turns include what ends them. GLM-4-MoE's template writes nothing after an
    answer, for example.
    """
    if _GENERATION_TAG.search(template) or not isinstance(tokenizer, HFTokenizer):
        return True
    _, _, turn_end = _sample(tokenizer, template).rpartition("Welcome")
    return bool(turn_end.strip())


def _sample(tokenizer: HFTokenizer, template: str) -> str:
    """Return how a template writes "Hello" and the answer "Welcome"."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Welcome"}]
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception:
        # A template is a program, and can refuse a conversation that the rows do not have.
        return "Welcome, which ends"


def _end(renderer: _Renderer, text: str, chat: Chat, num_messages: int) -> int:
    """Return where in a rendered conversation its first messages end."""
    part = renderer.text(chat.messages[:num_messages]) if num_messages else ""
    if not text.startswith(part):
        raise ValueError(
            f"{chat.place}: the chat template writes the first {num_messages} messages differently "
            "when others follow: name one with {% generation %} (trl/chat_templates has some), or "
            "set train_on to last or all"
        )
    return len(part)


def _start(renderer: _Renderer, text: str, chat: Chat, turn: int) -> int:
    """Return where in a rendered conversation a turn starts, after as much of the generation prompt
    as it contains.
    """
    if turn == 0:
        # No template writes an empty conversation, so the generation prompt is that after another
        # one.
        other = [{"role": "user", "content": "Hello"}]
        before = renderer.text(other)
        prompt = renderer.text(other, add_generation_prompt=True)[len(before) :]
        first_turn = text[: _end(renderer, text, chat, 1)]
        # The longest start of the prompt that the turn contains.
        for length in range(len(prompt), 0, -1):
            position = first_turn.find(prompt[:length])
            if position >= 0:
                return position + length
        return 0
    prompt = renderer.text(chat.messages[:turn], add_generation_prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    # Reasoning models are prompted to think, but earlier thoughts are left out of a conversation.
    return max(_end(renderer, text, chat, turn), num_common(prompt, text))


def num_common(first: Iterable[Any], second: Iterable[Any]) -> int:
    """Count the leading ids or characters that two sequences have in common."""
    number = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        number += 1
    return number
