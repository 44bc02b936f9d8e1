"""Rows of conversations, prompts with completions, instructions or texts, and which of their tokens are learned."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import Any, Literal, NamedTuple

import numpy as np

from tfidf_tune.data._sequences import LabelMask, after_prompt, label_runs
from tfidf_tune.data._sources import check_length
from tfidf_tune.data._tokenizer import HFTokenizer, TextTokenizer, TokenArray, bos_ids, encode_texts, tokenizer_name

TrainOn = Literal["completions", "last", "all"]
Message = dict[str, Any]

# What a row holds -> its columns, the first format that a row has counts.
FORMATS: dict[str, list[str]] = {
    name: name.split(" and ")
    for name in ("messages", "conversations", "prompt and completion", "instruction and output", "text")
}
_ROLES = {"human": "user", "gpt": "assistant"}  # of rows with from/value
_WRITTEN = ("content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # by templates
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_BATCH_SIZE = 1024


class Text(NamedTuple):
    """Plain text: a prompt, which is empty for a text without one, and what follows it."""

    prompt: str
    completion: str
    place: str


class Chat(NamedTuple):
    """A conversation; the turns of the assistant before message ``first`` belong to the prompt."""

    messages: list[Message]
    first: int
    tools: Any
    place: str


class Formatting(NamedTuple):
    """How rows become text.

    ``template`` is the chat template, None if there is none; ``as_chat`` puts prompts, completions and instructions
    into it, None only instructions; ``system`` starts prompts and conversations without a system message.
    """

    template: str | None
    as_chat: bool | None
    system: str | None

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Put the system message before messages that have none."""
        if self.system is None or not messages or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def read_row(row: Mapping[str, Any], place: str, column: str | None, formatting: Formatting) -> tuple[str, Text | Chat]:
    """Return the format of a row, a name of FORMATS, and what it holds; "empty" and an empty text if it has no values.

    ``column`` is the only one that is read, besides tools.

    Raises:
        ValueError: If the row has the columns of no format, or a value has another type.
    """
    if column is not None:
        row = {"messages" if isinstance(row[column], list) else "text": row[column], "tools": row.get("tools")}
    possible = [name for name, columns in FORMATS.items() if row.keys() >= {*columns}]
    if not possible:
        raise ValueError(
            f"{place} has the columns {sorted(row)}, but fine-tuning needs one of these: {'; '.join(FORMATS)}. Rename "
            "columns, or name a column of conversations or texts by source_column"
        )
    name = next((name for name in possible if all(row[key] is not None for key in FORMATS[name])), "empty")
    if name == "empty":
        return name, Text("", "", place)
    if name in ("messages", "conversations"):
        return name, Chat(formatting.with_system(_messages(row[name], name, place)), 0, _tools(row, place), place)
    if name == "prompt and completion" and isinstance(row["prompt"], list):
        given, answer = (_messages(row[key], key, place) for key in FORMATS[name])
        given = formatting.with_system(given)
        return name, Chat(given + answer, len(given), _tools(row, place), place)
    return name, _read_texts(name, row, place, formatting)


def _read_texts(name: str, row: Mapping[str, Any], place: str, formatting: Formatting) -> Text | Chat:
    is_instruction = name == "instruction and output"
    columns = FORMATS[name] + ["input"] * is_instruction
    texts = [row.get(key) or "" for key in columns]
    for key, text in zip(columns, texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(f"{place}: column {key!r} holds {type(text).__name__}, not text: convert it")
        check_length(text, place)
    if name == "text":
        return Text("", texts[0].strip(), place)
    prompt, completion, *rest = texts
    extra = "".join(rest).strip()
    if not completion.strip():
        return Text("", "", place)
    is_chat = is_instruction and formatting.template is not None if formatting.as_chat is None else formatting.as_chat
    if is_chat:
        content = f"{prompt}\n\n{extra}" if extra else prompt
        asked = formatting.with_system([{"role": "user", "content": content}])
        return Chat([*asked, {"role": "assistant", "content": completion}], len(asked), _tools(row, place), place)
    if is_instruction:
        extra = f"### Input:\n{extra}\n\n" if extra else ""
        prompt = f"### Instruction:\n{prompt}\n\n{extra}### Response:\n"
    return Text(f"{formatting.system}\n\n{prompt}" if formatting.system else prompt, completion, place)


def _tools(row: Mapping[str, Any], place: str) -> Any:
    """Return the tools for the chat template; JSON text keeps schemas that differ between rows."""
    tools = row.get("tools")
    try:
        return json.loads(tools) if isinstance(tools, str) else _without_none(tools) or None
    except ValueError as error:
        raise ValueError(f"{place}: column 'tools' is not JSON ({error}): rename it if it holds no tools") from error


def _messages(value: Any, column: str, place: str) -> list[Message]:
    messages: list[Message] = []
    given: list[Any] = value if isinstance(value, list) else [None]
    for one in given:
        match one:
            case {"from": str(role), "value": str(content)}:
                message = {"role": _ROLES.get(role, role), "content": content}
            case {"role": str(), **others} if isinstance(others.get("content"), str | list | None):
                calls = {"tool_calls": _without_none(one["tool_calls"])} if "tool_calls" in one else {}
                message = {"content": None} | one | calls
            case _:
                raise ValueError(
                    f"{place}: column {column!r} is not a list of messages with role and content, or from and value: "
                    f"{str(value)[:80]}"
                )
        check_length(message["content"], place)
        messages.append(message)
    return messages


def _without_none(value: Any) -> Any:
    """Leave out the keys that other rows of a Parquet file have: a column has one type."""
    if isinstance(value, dict):
        return {key: _without_none(part) for key, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _is_empty(message: Message) -> bool:
    values = (message.get(key) for key in _WRITTEN)
    return not any(value.strip() if isinstance(value, str) else value for value in values)


def encode_rows(
    tokenizer: TextTokenizer, rows: Iterable[Text | Chat], template: str | None, train_on: TrainOn
) -> Iterator[tuple[TokenArray, LabelMask]]:
    """Yield the int32 ids of each row and whether each is learned; both are empty for an empty row.

    BOS and EOS are around a text; a conversation has those that its template writes.
    """
    bos = np.array(bos_ids(tokenizer), dtype=np.int32)
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    rows = iter(rows)
    while batch := list(islice(rows, _BATCH_SIZE)):
        texts = [row for row in batch if isinstance(row, Text) and row.completion]
        whole = encode_texts(tokenizer, (row.prompt + row.completion for row in texts))
        prompts = encode_texts(tokenizer, (row.prompt for row in texts))
        for row in batch:
            if isinstance(row, Chat):
                yield encode_chat(tokenizer, row, template, train_on)
            elif not row.completion:
                yield np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
            else:
                ids, prompt = next(whole), next(prompts)
                num_prompt = len(bos) + _num_common(prompt, ids) if row.prompt and train_on != "all" else 0
                ids = np.concatenate([bos, ids] if ids[-1] == tokenizer.eos_id else [bos, ids, eos])
                yield ids, after_prompt(len(ids), num_prompt)


def encode_chat(
    tokenizer: TextTokenizer, chat: Chat, template: str | None, train_on: TrainOn
) -> tuple[TokenArray, LabelMask]:
    """Apply a chat template to a conversation.

    Where the template marks the turns of the assistant by ``{% generation %}``, these are learned. Otherwise a turn is
    what the conversation up to its end adds to the conversation before it with the generation prompt.
    """
    if not isinstance(tokenizer, HFTokenizer) or template is None:
        raise ValueError(
            f"{chat.place} is a conversation, but the tokenizer {tokenizer_name(tokenizer)!r} has no chat template, as "
            "those of base models: name a Jinja file by chat_template, take the tokenizer of the chat model (by the "
            "component tfidf_tune.data.hf_tokenizer), or use rows with prompt and completion"
        )

    def render(messages: Sequence[Message], add_generation_prompt: bool = False, **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                chat_template=template,
                tools=chat.tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=bool(options),
                **options,
            )
        except Exception as error:  # a template is a program
            raise ValueError(
                f"{chat.place}: the chat template refuses this conversation ({type(error).__name__}: {error}): change "
                "the row or leave it out"
            ) from error

    of_assistant = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    turns = [i for i in of_assistant if i >= chat.first and not _is_empty(chat.messages[i])]
    if not turns:
        return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
    text = render(chat.messages)
    check_length(text, chat.place)
    ids, offsets = tokenizer.encode_with_offsets(text)
    if train_on == "all":
        return ids, np.ones(len(ids), dtype=np.bool_)
    if _GENERATION_TAG.search(template):
        marked = render(chat.messages, return_assistant_tokens_mask=True, return_dict=True)["assistant_masks"]
        is_label = np.array(marked, dtype=np.bool_)
        # A template that marks the text but not the end of a turn has no run for an empty one.
        if len(runs := label_runs(is_label)) == len(of_assistant):
            for turn, (start, end) in zip(of_assistant, runs, strict=True):
                is_label[start:end] &= not _is_empty(chat.messages[turn])
        if chat.first:
            is_label &= offsets[:, 1] > _start(render, text, chat, chat.first)
        if train_on == "last" and len(runs := label_runs(is_label)):
            is_label[: runs[-1, 0]] = False
        return ids, is_label
    is_label = np.zeros(len(ids), dtype=np.bool_)
    for turn in turns[-1:] if train_on == "last" else turns:
        start, end = _start(render, text, chat, turn), _end(render, text, chat, turn + 1)
        is_label |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    return ids, is_label


def learns_turn_ends(tokenizer: TextTokenizer, template: str) -> bool:
    """Return whether the turns found by a template without marks include what ends them.

    Some templates write nothing after an answer, such as GLM-4-MoE's: the next turn ends it.
    """
    if _GENERATION_TAG.search(template) or not isinstance(tokenizer, HFTokenizer):
        return True
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Welcome"}]
    try:
        text = str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except Exception:  # a template is a program, and can refuse a conversation that the rows do not have
        return True
    return bool(text.rpartition("Welcome")[2].strip())


def _end(render: Callable[..., str], text: str, chat: Chat, num_messages: int) -> int:
    """Return where in a rendered conversation its first messages end."""
    part = render(chat.messages[:num_messages]) if num_messages else ""
    if not text.startswith(part):
        raise ValueError(
            f"{chat.place}: the chat template writes the first {num_messages} messages differently when others follow, "
            "so that the tokens of an answer cannot be found: by chat_template name a file with {% generation %} "
            "around the turns of the assistant (trl/chat_templates has some), or set train_on to last or all"
        )
    return len(part)


def _start(render: Callable[..., str], text: str, chat: Chat, turn: int) -> int:
    """Return where in a rendered conversation a turn starts, after as much of the generation prompt as it contains."""
    if turn == 0:
        # No template writes an empty conversation, so the generation prompt is that after another one.
        other = [{"role": "user", "content": "Hello"}]
        prompt = render(other, add_generation_prompt=True)[len(render(other)) :]
        first = text[: _end(render, text, chat, 1)]
        return next((first.find(prompt[:n]) + n for n in range(len(prompt), 0, -1) if prompt[:n] in first), 0)
    prompt = render(chat.messages[:turn], add_generation_prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    # Reasoning models are prompted to think, but earlier thoughts are left out of a conversation.
    return max(_end(render, text, chat, turn), _num_common(prompt, text))


def _num_common(first: Iterable[Any], second: Iterable[Any]) -> int:
    """Count the leading ids or characters that two sequences have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
