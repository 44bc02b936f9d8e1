"""Fine-tuning on conversations, prompts with completions, instructions or texts, found by the
columns of the rows.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, tee
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from torch.utils.data import Dataset

from tfidf_tune._checks import check_at_least, require_choice
from tfidf_tune._files import digest
from tfidf_tune._printing import counted
from tfidf_tune._tokenizer import (
    HFTokenizer,
    TextTokenizer,
    TokenArray,
    bos_ids,
    check_fits_model,
    encode_texts,
)
from tfidf_tune.corpus.deduplication import Deduplicate, Deduplication
from tfidf_tune.corpus.sources import TextSource, check_length, load_rows
from tfidf_tune.data import sequences
from tfidf_tune.passages.completions import Targets, choose_completions
from tfidf_tune.passages.stretches import Mask, label_runs

logger = logging.getLogger(__name__)

TrainOn = Literal["completions", "last", "all"]
Message = dict[str, Any]

# What a row holds -> its columns, the first format that a row has counts.
FORMATS = {
    "messages": ["messages"],
    "conversations": ["conversations"],
    "prompt and completion": ["prompt", "completion"],
    "instruction and output": ["instruction", "output"],
    "text": ["text"],
}
# The columns that are read from a row of a format; a log line names all others.
_USED = {
    "messages": {"messages", "tools", "system"},
    "conversations": {"conversations", "tools", "system"},
    "prompt and completion": {"prompt", "completion", "tools", "system"},
    "instruction and output": {"instruction", "input", "history", "output", "tools", "system"},
    "text": {"text"},
    "empty": set(chain.from_iterable(FORMATS.values())),
}
_NOTHING = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
# With from/value.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
# Of a message: 0 or false if it is not learned.
_LEARNED = (
    "weight",
    "train",
    "training",
    "loss",
    "loss_weight",
)
# By templates.
_WRITTEN = (
    "content",
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
)
_MAX_SEQ_LEN = 1024
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Text(NamedTuple):
    """Plain text: a prompt, which is empty for a text without one, and what follows it."""

    prompt: str
    completion: str


class Chat(NamedTuple):
    """A conversation; the turns of the assistant before message ``first`` belong to the prompt."""

    messages: list[Message]
    first: int
    tools: Any
    place: str

    def with_joined_contents(self) -> "Chat":
        """Return the conversation with the parts of each content joined to a text."""
        messages = [message | {"content": _joined(message["content"])} for message in self.messages]
        return self._replace(messages=messages)


class Formatting(NamedTuple):
    """How rows become text."""

    template: str | None  # for chats
    # Whether prompts, completions and instructions are put into it; None: only instructions.
    as_chat: bool | None
    system: str | None  # starts prompts and conversations without a system message

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Put the system message before messages that have none."""
        if self.system is None or not messages:
            return messages
        if any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def writes_as_chat(self, format_name: str) -> bool:
        """Return whether the texts of a format are written as turns of a conversation."""
        if self.as_chat is not None:
            return self.as_chat
        return format_name == "instruction and output" and self.template is not None


def read_row(
    row: Mapping[str, Any], place: str, column: str | None, formatting: Formatting
) -> tuple[str, Text | Chat]:
    """Return the format of a row, a name of FORMATS, and what it holds; "empty" and an empty text
    if it has no values.

    ``column`` is the only one that is read, besides tools.
    """
    if column is not None:
        format_name = "messages" if isinstance(row[column], list) else "text"
        row = {format_name: row[column], "tools": row.get("tools")}
    elif row.get("system"):
        system = row["system"]
        if not isinstance(system, str):
            raise ValueError(
                f"{place}: column 'system' holds {type(system).__name__}, not text: convert it"
            )
        formatting = formatting._replace(system=system)
    name = _format_name(row)
    if name == "empty":
        return name, Text("", "")
    if name in ("messages", "conversations"):
        messages = formatting.with_system(_messages(row[name], name, place))
        return name, Chat(messages, 0, _tools(row, place), place)
    if name == "prompt and completion" and isinstance(row["prompt"], list):
        prompt = formatting.with_system(_messages(row["prompt"], "prompt", place))
        completion = _messages(row["completion"], "completion", place)
        return name, Chat(prompt + completion, len(prompt), _tools(row, place), place)
    return name, _read_texts(name, row, place, formatting)


def _format_name(row: Mapping[str, Any]) -> str:
    """Return the first format of which a row has all values.

    Files of mixed rows can have all columns in each row, with None where a row has no value.
    """
    for name, columns in FORMATS.items():
        if all(row.get(column) is not None for column in columns):
            return name
    return "empty"


def _read_texts(
    name: str, row: Mapping[str, Any], place: str, formatting: Formatting
) -> Text | Chat:
    is_instruction = name == "instruction and output"
    texts = {}
    for column in [*FORMATS[name], "input"] if is_instruction else FORMATS[name]:
        text = row.get(column) or ""
        if not isinstance(text, str):
            raise ValueError(
                f"{place}: column {column!r} holds {type(text).__name__}, not text: convert it"
            )
        check_length(text, place)
        texts[column] = text
    if name == "text":
        return Text("", texts["text"].strip())
    prompt, completion = (texts[column] for column in FORMATS[name])
    if not completion.strip():
        return Text("", "")
    extra = texts.get("input", "").strip()
    history = _history(row, place) if is_instruction else []

    # As a conversation: the earlier turns, the prompt and the answer.
    if formatting.writes_as_chat(name):
        instruction = f"{prompt}\n\n{extra}" if extra else prompt
        messages = []
        for question, answer in [*history, [instruction, completion]]:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        messages = formatting.with_system(messages)
        # All answers of an instruction's history are learned, but only the completion of a prompt.
        first = 0 if is_instruction else len(messages) - 1
        return Chat(messages, first, _tools(row, place), place)

    # As a text: without a template, an instruction has Alpaca's headings.
    if history:
        raise ValueError(
            f"{place}: column 'history' needs a chat template: name one by dataset.chat_template"
        )
    if is_instruction:
        heading = f"### Input:\n{extra}\n\n" if extra else ""
        prompt = f"### Instruction:\n{prompt}\n\n{heading}### Response:\n"
    if formatting.system:
        prompt = f"{formatting.system}\n\n{prompt}"
    return Text(prompt, completion)


def _history(row: Mapping[str, Any], place: str) -> list[list[str]]:
    """Return the earlier turns of an instruction, each a question and its answer."""
    history: list[list[str]] = row.get("history") or []
    for turn in history:
        if not isinstance(turn, list) or [type(text) for text in turn] != [str, str]:
            raise ValueError(
                f"{place}: column 'history' is not a list of pairs of texts: {str(history)[:80]}"
            )
    return history


def _tools(row: Mapping[str, Any], place: str) -> Any:
    """Return the tools for the chat template; JSON text keeps schemas that differ between rows."""
    tools = row.get("tools")
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{place}: column 'tools' is not JSON ({error}): rename it if it holds no tools"
        ) from error


def _messages(value: Any, column: str, place: str) -> list[Message]:
    messages: list[Message] = []
    message: Message
    # Both ways of writing a message become role and content; other keys of the second are kept for
    # the template.
    every: list[Any] = value if isinstance(value, list) else [None]
    for given in every:
        match given:
            case {"from": str(role), "value": str(content)}:
                message = dict(given) | {"role": _ROLES.get(role, role), "content": content}
            case {"role": str(), **others} if isinstance(others.get("content"), str | list | None):
                message = {"content": None} | given
            case _:
                raise ValueError(
                    f"{place}: column {column!r} is not a list of messages with role and content, "
                    f"or from and value: {str(value)[:80]}"
                )
        # True and False are equal to 1 and 0.
        if any(message.get(key) not in (0, 1, None) for key in _LEARNED):
            raise ValueError(
                f"{place}: {str(message)[:80]}: {', '.join(_LEARNED)} of a message is 0 or 1, true "
                "or false"
            )
        parts = message["content"]
        if isinstance(parts, list) and len(_texts(parts)) < len(parts):
            raise ValueError(f"{place}: only text is learned, but a content is {str(parts)[:80]}")
        check_length(message["content"], place)
        messages.append(message)
    return messages


def without_none(row: dict[str, Any]) -> dict[str, Any]:
    """Leave out None in the dictionaries of a row: they are keys of other rows, because a column
    has one type.
    """

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(part) for key, part in value.items() if part is not None}
        if isinstance(value, list):
            return [cleaned(part) for part in value]
        return value

    return {column: cleaned(value) for column, value in row.items()}


def _texts(parts: list[Any]) -> list[str]:
    """Return the texts of a content that is a list of parts, either texts or dictionaries."""
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "text":
            part = part.get("text", part.get("value"))
        if isinstance(part, str):
            texts.append(part)
    return texts


def _joined(content: Any) -> Any:
    return "".join(_texts(content)) if isinstance(content, list) else content


def answers(chat: Chat) -> list[str]:
    """Return the texts of the turns of the assistant that are learned."""
    learned = [
        message
        for message in chat.messages[chat.first :]
        if message["role"] == "assistant" and not _is_switched_off(message)
    ]
    return [_joined(message["content"] or "") for message in learned]


def _has(message: Message, field: str) -> bool:
    value = message.get(field)
    if isinstance(value, str):
        value = value.strip()
    return bool(value)


def _is_empty(message: Message) -> bool:
    return not any(_has(message, field) for field in _WRITTEN)


def _is_switched_off(message: Message) -> bool:
    return any(message.get(key) == 0 for key in _LEARNED)


def encode_rows(
    tokenizer: TextTokenizer,
    rows: Iterable[Text | Chat],
    template: str | None,
    train_on: TrainOn,
    counts: sequences.Counts,
) -> Iterator[tuple[TokenArray, sequences.LabelMask]]:
    """Yield the int32 ids of each row, a text between BOS and EOS, and whether each is learned;
    both may be empty.

    What the chat template does not write is counted, see :func:`encode_chat`.
    """
    bos = np.array(bos_ids(tokenizer), dtype=np.int32)
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    # Texts are encoded in batches, conversations one by one, because a template is applied to each.
    rows, rows_of_texts, rows_of_prompts = tee(rows, 3)
    all_ids = encode_texts(tokenizer, (_whole_text(row) for row in rows_of_texts))
    all_prompt_ids = encode_texts(tokenizer, (_prompt_text(row) for row in rows_of_prompts))
    for row, ids, prompt_ids in zip(rows, all_ids, all_prompt_ids, strict=True):
        if isinstance(row, Chat):
            yield encode_chat(tokenizer, row, template, train_on, counts)
            continue
        if not row.completion:
            yield _NOTHING
            continue
        before, after = sequences.missing_ends(ids, bos, eos)
        num_prompt = 0
        if row.prompt and train_on != "all":
            # The prompt ends where its ids differ from those of the whole text: a token can reach
            # into the completion.
            num_prompt = len(before) + _num_common(prompt_ids, ids)
        ids = np.concatenate([before, ids, after])
        yield ids, np.arange(len(ids)) >= num_prompt


def _whole_text(row: Text | Chat) -> str:
    return row.prompt + row.completion if isinstance(row, Text) else ""


def _prompt_text(row: Text | Chat) -> str:
    return row.prompt if isinstance(row, Text) else ""


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
    """
    if not isinstance(tokenizer, HFTokenizer) or template is None:
        raise ValueError(
            f"{chat.place} is a conversation, but the tokenizer has no chat template: name a Jinja "
            "file by dataset.chat_template, or take the chat model's by "
            "tfidf_tune.data.hf_tokenizer"
        )
    if not _learned_turns(chat.messages, chat.first, train_on):
        return _NOTHING
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
        if _is_empty(written[turn]):
            counts["num_unwritten_answers"] += 1
    turns = _learned_turns(written, chat.first, train_on)
    if not turns:
        return _NOTHING

    # Their tokens.
    ids, offsets = tokenizer.encode_with_offsets(text)
    if train_on == "all":
        if any(_is_switched_off(message) for message in chat.messages):
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
        if turn >= first and not _is_empty(messages[turn])
    ]
    if train_on == "last":
        turns = turns[-1:]
    return [turn for turn in turns if not _is_switched_off(messages[turn])]


def _count_unwritten(
    messages: Sequence[Message], written: Sequence[Message], counts: sequences.Counts
) -> None:
    """Count the fields of messages that the template does not write."""
    for message, kept in zip(messages, written, strict=True):
        for field in _WRITTEN:
            if _has(message, field) and not _has(kept, field):
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
    elif any(_is_switched_off(message) for message in chat.messages):
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
        for field in _WRITTEN:
            if not _has(message, field):
                continue
            kept = {name: value for name, value in messages[turn].items() if name != field}
            if field == "content":
                content = message["content"]
                parts = _texts(content) if isinstance(content, list) else [content]
                if all(part.strip() in text for part in parts):
                    continue
                kept["content"] = type(content)()  # templates expect one
            shorter = [*messages[:turn], kept, *messages[turn + 1 :]]
            if renderer.text_or_none(shorter) == text:
                messages = shorter
    return messages


def _unwritten(counts: sequences.Counts) -> str:
    """Say what of the conversations the chat template does not write; an empty text if it writes
    all.
    """
    fields = []
    for field in _WRITTEN:
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
    return max(_end(renderer, text, chat, turn), _num_common(prompt, text))


def _num_common(first: Iterable[Any], second: Iterable[Any]) -> int:
    """Count the leading ids or characters that two sequences have in common."""
    number = 0
    for left, right in zip(first, second, strict=False):
        if left != right:
            break
        number += 1
    return number


class _ExampleReader:
    """How the rows of a source become examples."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        column: str | None,
        formatting: Formatting,
        train_on: TrainOn,
        max_seq_len: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._column = column
        self._formatting = formatting
        self._train_on = train_on
        self._max_seq_len = max_seq_len
        self._last_columns: list[str] | None = None

    def examples(
        self, source: TextSource, counts: sequences.Counts
    ) -> Iterator[sequences.TokenizedSequence]:
        """Yield the rows that have an answer, cut; count all of them, and what they have.

        Raises:
            ValueError: If no row gives an example.
        """
        limit = self._max_seq_len
        self._last_columns = None
        rows = self._rows(source, counts)
        template = self._formatting.template
        for ids, is_label in encode_rows(self._tokenizer, rows, template, self._train_on, counts):
            if is_label[1:limit].any():  # the shift of labels drops the first
                counts["num_examples"] += 1
                if len(ids) > limit:
                    counts["num_cut"] += 1
                yield sequences.TokenizedSequence(ids[:limit], is_label[:limit])
            else:
                counts["num_left_out"] += 1
                if is_label[1:].any():
                    counts["num_unlabelled"] += 1
        if counts["empty"] == counts["num_documents"] and self._column is None:
            raise ValueError(
                f"{source.source!r} has the columns {self._last_columns}, but fine-tuning needs "
                f"one of these: {'; '.join(FORMATS)}, or a column named by source_column"
            )
        if not counts["num_examples"]:
            unwritten = _unwritten(counts)
            hint = f"; {unwritten}" if unwritten else ""
            raise ValueError(
                f"{source.source!r} gives no example: {counts['num_unlabelled']} of "
                f"{counts['num_documents']} rows have no answer in {limit} tokens, the others none "
                "at all: raise max_seq_len, or see to the roles: an answer's is 'assistant', or "
                f"'gpt' in conversations{hint}"
            )

    def _rows(self, source: TextSource, counts: sequences.Counts) -> Iterator[Text | Chat]:
        """Read the rows of a source; count their formats, unused columns and roles."""
        required = {} if self._column is None else {self._column: object}
        for row in load_rows(source, required, None):
            values = row.columns if row.line else without_none(row.columns)
            self._last_columns = sorted(values)
            format_name, content = read_row(values, row.place, self._column, self._formatting)
            counts["num_documents"] += 1
            counts[format_name] += 1
            used = _USED[format_name] if self._column is None else {self._column, "tools"}
            for column, value in values.items():
                if value is not None and column not in used:
                    counts[f"column {column}"] += 1
            if isinstance(content, Chat):
                counts["num_chats"] += 1
                for role in {message["role"] for message in content.messages}:
                    is_learned = role == "assistant" and self._train_on != "all"
                    counts[f"role {role} (learned)" if is_learned else f"role {role}"] += 1
            yield content


def _log_counts(source: str, dataset: sequences.SequenceDataset, max_seq_len: int) -> None:
    """Log the formats, roles and unused columns of rows, and what became of them."""
    counts = dataset.counts
    formats = ", ".join(
        f"{counted(counts[name], 'row')} with {name}" for name in FORMATS if counts[name]
    )
    for kind, title in (("role ", "roles"), ("column ", "not used:")):
        names = [key.removeprefix(kind) for key in sorted(counts) if key.startswith(kind)]
        if names:
            formats += f"; {title} {', '.join(names)}"
    num_without_answer = dataset.num_left_out - counts["num_unlabelled"]
    logger.log(
        logging.WARNING if dataset.num_cut + dataset.num_left_out else logging.INFO,
        f"{source}: {formats}; {counted(counts['num_examples'], 'example')}, {dataset.num_cut:,} "
        f"of them cut after {max_seq_len:,} tokens; {counted(dataset.num_left_out, 'row')} left "
        f"out, {num_without_answer:,} without an answer and {counts['num_unlabelled']:,} with none "
        "of it before the cut",
    )
    unwritten = _unwritten(counts)
    if unwritten:
        logger.warning(f"{source}: {unwritten}")


def sft_dataset(
    tokenizer: TextTokenizer,
    *,
    source: str,
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str | None = None,
    max_seq_len: int | None = None,
    train_on: TrainOn = "completions",
    system: str | None = None,
    chat_template: str | None = None,
    apply_chat_template: bool | None = None,
    targets: str | None = None,
    num_targets: int = 20,
    num_controls: int | None = None,
    num_repeats: int = 1,
    min_target_tokens: int = 16,
    seed: int = 0,
    probe_file: str | None = None,
    deduplicate: Deduplicate = "none",
    packed: bool = False,
    cache_dir: str | None = None,
) -> Dataset[dict[str, Any]]:
    r"""Build a data set for supervised fine-tuning of rows that are found by their columns. The ids
    are cached.

    A row is the first of these whose columns it has with values:

    - ``messages``, or ``conversations``: a list of ``{"role": ..., "content": ...}`` or ``{"from":
      ..., "value": ...}``; and ``tools``, if the chat template takes them;
    - ``prompt`` and ``completion``: two texts, which are joined as they are, or two lists of
      messages;
    - ``instruction``, ``output`` and perhaps ``input``: an instruction, with its input after an
      empty line, after the pairs of ``history``, of which the answers are learned, too;
    - ``text``: all of it is learned.

    Messages are written by the tokenizer's chat template, as are instructions if it has one;
    without one, an instruction has Alpaca's headings ``### Instruction:``, ``### Input:`` and ``###
    Response:``. A plain text starts with BOS, if the tokenizer has one, and ends with EOS; what a
    chat template writes is not changed.

    A text ``system`` starts a conversation without a system message. A message with ``weight`` 0 or
    ``train`` false is not learned. Contents of text parts are joined where the template does not
    write them. BOS and EOS that a text has are not put there again. Of a message all fields are
    passed to the template; a log line counts ``tools``, ``tool_calls`` and other fields that it
    does not write, and an answer of which it writes nothing is not learned.

    A row of more than ``max_seq_len`` tokens is cut at its end. Rows are left out if they are
    empty, have no answer, or have none of it left after the cut. A log line reports the formats and
    the counts.

    With ``targets``, passages for an evaluation of memorization are chosen from the last answers of
    the examples; the prompt is the conversation before. An occurrence of an answer is a run of at
    least 90 % of its tokens, in any turn that is learned.

    - ``duplicates``: the answers that occur most often, at least twice;
    - ``random``: random examples whose answer occurs once, put in at random places until it occurs
      ``num_repeats`` times;
    - a file of further rows: random ones of it, put in ``num_repeats`` times.

    Controls are random examples whose answer occurs once, which are taken out of the data set; with
    a file, rows of it that are not put in. No example that is trained on learns a run of 90 % of
    the tokens of a control, or of half of them and at least 16. The same holds for a random target
    and all examples but its own. With ``deduplicate``, targets and controls are chosen before, and
    the occurrences of targets are those that are left.

    Args:
        tokenizer (TextTokenizer): the tokenizer; conversations need an :class:`HFTokenizer`.
        source (str): a local file or folder, ``embedded`` or a hub id, see :func:`load_documents`.
        source_name (str | None): configuration of a hub data set. Default: None
        source_split (str): its split. Default: "train"
        source_column (str | None): a column of messages or text under another name. Default: None,
            as listed above
        max_seq_len (int | None): tokens in an example. Default: None, 1024, or the tokenizer's own
            if that is less.
        train_on (TrainOn): "completions", all turns of the assistant, or what follows the prompt
            (TRL's ``assistant_only_loss`` and ``completion_only_loss``); "last", only the last of
            these turns; or "all" tokens (Axolotl's ``train_on_inputs``). Default: "completions"
        system (str | None): a system message for conversations without one, or text that starts a
            prompt. Default: None
        chat_template (str | None): a file with a Jinja template. Default: None, the tokenizer's
            own.
        apply_chat_template (bool | None): write prompts, completions and instructions as a turn of
            the user and one of the assistant. Default: None, only instructions, if there is a chat
            template.
        targets (str | None): "duplicates", "random" or a file, see above. Default: None, nothing is
            measured
        num_targets (int): completions that are measured. Default: 20
        num_controls (int | None): completions that are measured but not trained on. Default: None,
            as many as targets
        num_repeats (int): occurrences of each target that is random or from a file. Default: 1
        min_target_tokens (int): the least length of an answer that is measured. Default: 16
        seed (int): decides which targets and controls are drawn, and where targets are put.
            Default: 0
        probe_file (str | None): where to write targets and controls, see :func:`read_probe_file`.
            Default: None
        deduplicate (Deduplicate): which examples are removed as copies, see :class:`Deduplication`.
            Default: "none"
        packed (bool): put several examples into a row of the tokenizer's ``max_seq_len`` tokens.
            Default: False
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        Dataset[dict[str, Any]]: a :class:`SequenceDataset`, with ``targets`` a
            :class:`CompletionsDataset`; if packed, a ``PackedDataset`` with it as ``ds``.

    Raises:
        FileNotFoundError: If there is no file ``chat_template``, ``source`` or ``targets``.
        ValueError: If ``max_seq_len`` is below 2 or above the tokenizer's; if the source cannot be
            read, has the columns of no format or gives no example; if there are too few targets or
            controls; if a conversation has no chat template, is refused by it, or is written so
            that its answers cannot be found.

    Example:
        >>> dataset = sft_dataset(tokenizer, source="chats.jsonl", max_seq_len=2048)
    """
    # The arguments, before a source is read.
    if max_seq_len is None:
        max_seq_len = min(_MAX_SEQ_LEN, tokenizer.max_seq_len or _MAX_SEQ_LEN)
    check_at_least(2, max_seq_len=max_seq_len)  # a token and one to predict
    check_fits_model(tokenizer, lower="it", max_seq_len=max_seq_len)
    require_choice("train_on", train_on, get_args(TrainOn))
    deduplication = Deduplication.of(deduplicate)
    template = tokenizer.get_chat_template() if isinstance(tokenizer, HFTokenizer) else None
    if chat_template is not None:
        template = Path(chat_template).expanduser().read_text(encoding="utf-8")
    formatting = Formatting(template, apply_chat_template, system)
    spec = None
    if targets is not None:
        if train_on == "all":
            raise ValueError(
                "targets are answers, but train_on is all: set it to completions or last"
            )
        if num_controls is None:
            num_controls = num_targets
        spec = Targets(
            targets, num_targets, num_controls, num_repeats, min_target_tokens, seed, probe_file
        )

    # The examples, tokenized or read from the cache. A file of targets is read like the source, and
    # its examples follow those of the source; its rows are not among the counts.
    text_source = TextSource(source, source_name, source_split, source_column or "")
    text_sources = [text_source]
    if spec is not None and spec.in_file:
        text_sources.append(TextSource(spec.kind, column=text_source.column))
    reader = _ExampleReader(tokenizer, source_column, formatting, train_on, max_seq_len)

    def make_sequences(counts: sequences.Counts) -> Iterator[sequences.TokenizedSequence]:
        yield from reader.examples(text_source, counts)
        for file in text_sources[1:]:
            yield from reader.examples(file, sequences.Counts())

    # Copies are removed from what is read from the cache.
    key = sequences.cache_key(
        "sft",
        tokenizer,
        text_sources,
        deduplication=None,
        passages_of=None,
        max_seq_len=max_seq_len,
        train_on=train_on,
        formatting=formatting,
    )
    examples = sequences.cached_sequences(cache_dir, key, make_sequences)

    # What there was in the rows, and what the model will not learn.
    _log_counts(source, examples, max_seq_len)
    has_learned_chats = examples.counts["num_chats"] and train_on != "all"
    if has_learned_chats and not learns_turn_ends(tokenizer, template or ""):
        logger.warning(
            f"{source}: the chat template writes nothing after an answer, so that the model does "
            "not learn to stop: by dataset.chat_template name a file that writes the token at "
            "which generation stops"
        )

    # The examples that are trained on, without copies, and with targets instead of controls.
    def kept(order: TokenArray) -> Mask:
        """Return which examples of an order deduplication leaves; this is cached, too."""
        if deduplication.method == "none":
            return np.ones(len(order), dtype=np.bool_)

        def build(folder: Path) -> dict[str, int]:
            rows = [examples.sequence(index)[0] for index in order.tolist()]
            np.save(folder / "kept.npy", deduplication.kept(rows, source, tokenizer))
            return {}

        key_of_kept = sequences.cache_key(
            "sft_kept",
            tokenizer,
            text_sources,
            deduplication=deduplication,
            passages_of=None,
            order=digest(order.tolist()),
            max_seq_len=max_seq_len,
            train_on=train_on,
            formatting=formatting,
        )
        folder, _ = sequences.cached_folder(cache_dir, key_of_kept, build)
        mask: Mask = np.load(folder / "kept.npy")
        return mask

    dataset = examples
    if spec is not None:
        order, passages = choose_completions(
            examples, examples.counts["num_examples"], spec, tokenizer, source, kept
        )
        dataset = sequences.CompletionsDataset(
            examples.tokens,
            examples.is_label,
            examples.spans[order],
            examples.counts,
            passages=passages,
        )
    elif deduplication.method != "none":
        # Each row is a separate document, so that no row continues another.
        is_kept = kept(np.arange(len(examples), dtype=np.int32))
        dataset = replace(examples, spans=examples.spans[is_kept], continues=None)
    return sequences.pack(dataset, tokenizer) if packed else dataset
