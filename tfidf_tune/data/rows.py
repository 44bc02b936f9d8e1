"""What the rows of a data set for fine-tuning hold: conversations, prompts with completions,
instructions or texts.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfidf_tune.corpus.sources import check_length

Message = dict[str, Any]

# What a row holds -> its columns, the first format that a row has counts.
FORMATS = {
    "messages": ["messages"],
    "conversations": ["conversations"],
    "prompt and completion": ["prompt", "completion"],
    "instruction and output": ["instruction", "output"],
    "text": ["text"],
}
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
WRITTEN = (
    "content",
    "tool_calls",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
)


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

    ``column`` is the only column that is read, besides tools.

    Example:
        >>> plain = Formatting(template=None, as_chat=None, system=None)
        >>> read_row({"prompt": "Who wrote Emma?", "completion": " Austen."}, "line 1", None, plain)
        ('prompt and completion', Text(prompt='Who wrote Emma?', completion=' Austen.'))
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
        if isinstance(parts, list) and len(texts_of(parts)) < len(parts):
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


def texts_of(parts: list[Any]) -> list[str]:
    """Return the texts of a content that is a list of parts, either texts or dictionaries."""
    texts = []
    for part in parts:
        if isinstance(part, dict) and part.get("type") == "text":
            part = part.get("text", part.get("value"))
        if isinstance(part, str):
            texts.append(part)
    return texts


def _joined(content: Any) -> Any:
    return "".join(texts_of(content)) if isinstance(content, list) else content


def answers(chat: Chat) -> list[str]:
    """Return the texts of the turns of the assistant that are learned."""
    learned = [
        message
        for message in chat.messages[chat.first :]
        if message["role"] == "assistant" and not is_switched_off(message)
    ]
    return [_joined(message["content"] or "") for message in learned]


def has_field(message: Message, field: str) -> bool:
    """Return whether a field of a message has a value other than white space."""
    value = message.get(field)
    if isinstance(value, str):
        value = value.strip()
    return bool(value)


def is_empty(message: Message) -> bool:
    """Return whether a message has nothing that a chat template could write."""
    return not any(has_field(message, field) for field in WRITTEN)


def is_switched_off(message: Message) -> bool:
    """Return whether a message says that it is not learned, as by ``weight: 0``."""
    return any(message.get(key) == 0 for key in _LEARNED)
