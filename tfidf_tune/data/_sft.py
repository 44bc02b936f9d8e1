"""Fine-tuning on conversations, prompts with completions, instructions or texts, found by the
columns of the rows.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, takewhile, tee
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
FORMATS: dict[str, list[str]] = {
    name: name.split(" and ")
    for name in (
        "messages",
        "conversations",
        "prompt and completion",
        "instruction and output",
        "text",
    )
}
_NOTHING = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_)
# With from/value.
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
# The columns that count in a row of a format.
_USED = {name: {"tools", "system", *columns} for name, columns in FORMATS.items()}
_USED |= {"text": {"text"}, "empty": {*chain(*FORMATS.values())}}
_USED["instruction and output"] |= {"input", "history"}
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

    def with_contents(self, contents: Iterable[Any]) -> "Chat":
        """Return a conversation with other contents."""
        pairs = zip(self.messages, contents, strict=True)
        return self._replace(
            messages=[message | {"content": content} for message, content in pairs]
        )


class Formatting(NamedTuple):
    """How rows become text."""

    template: str | None  # for chats
    # Whether prompts, completions and instructions are put into it; None: only instructions.
    as_chat: bool | None
    system: str | None  # starts prompts and conversations without a system message

    def with_system(self, messages: list[Message]) -> list[Message]:
        """Put the system message before messages that have none."""
        if (
            self.system is None
            or not messages
            or any(message["role"] == "system" for message in messages)
        ):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def read_row(
    row: Mapping[str, Any], place: str, column: str | None, formatting: Formatting
) -> tuple[str, Text | Chat]:
    """Return the format of a row, a name of FORMATS, and what it holds; "empty" and an empty text
    if it has no values.

    ``column`` is the only one that is read, besides tools.
    """
    if column is not None:
        row = {
            "messages" if isinstance(row[column], list) else "text": row[column],
            "tools": row.get("tools"),
        }
    if column is None and row.get("system"):
        if not isinstance(row["system"], str):
            raise ValueError(
                f"{place}: column 'system' holds {type(row['system']).__name__}, not text: convert "
                f"it"
            )
        formatting = formatting._replace(system=row["system"])
    # Files of mixed rows can have all columns in each row, so the first format with values counts.
    name = next(
        (name for name in FORMATS if all(row.get(key) is not None for key in FORMATS[name])),
        "empty",
    )
    if name == "empty":
        return name, Text("", "")
    if name in ("messages", "conversations") or (
        name == "prompt and completion" and isinstance(row["prompt"], list)
    ):
        given, *answers = (_messages(row[key], key, place) for key in FORMATS[name])
        given = formatting.with_system(given)
        return name, Chat(
            sum(answers, given), len(given) if answers else 0, _tools(row, place), place
        )
    return name, _read_texts(name, row, place, formatting)


def _read_texts(
    name: str, row: Mapping[str, Any], place: str, formatting: Formatting
) -> Text | Chat:
    is_instruction = name == "instruction and output"
    columns = FORMATS[name] + (["input"] if is_instruction else [])
    texts = [row.get(key) or "" for key in columns]
    for key, text in zip(columns, texts, strict=True):
        if not isinstance(text, str):
            raise ValueError(
                f"{place}: column {key!r} holds {type(text).__name__}, not text: convert it"
            )
        check_length(text, place)
    if name == "text":
        return Text("", texts[0].strip())
    prompt, completion, *rest = texts
    extra = "".join(rest).strip()
    if not completion.strip():
        return Text("", "")
    is_chat = (
        is_instruction and formatting.template is not None
        if formatting.as_chat is None
        else formatting.as_chat
    )
    history = (row.get("history") or []) if is_instruction else []
    if not all(isinstance(turn, list) and list(map(type, turn)) == [str, str] for turn in history):
        raise ValueError(
            f"{place}: column 'history' is not a list of pairs of texts: {str(history)[:80]}"
        )
    if is_chat:
        content = f"{prompt}\n\n{extra}" if extra else prompt
        turns = zip(
            cycle(("user", "assistant")), [*chain(*history), content, completion], strict=False
        )
        messages = formatting.with_system([{"role": role, "content": text} for role, text in turns])
        return Chat(messages, 0 if is_instruction else len(messages) - 1, _tools(row, place), place)
    if history:
        raise ValueError(
            f"{place}: column 'history' needs a chat template: name one by dataset.chat_template"
        )
    # Without a template, Alpaca's headings.
    if is_instruction:
        extra = f"### Input:\n{extra}\n\n" if extra else ""
        prompt = f"### Instruction:\n{prompt}\n\n{extra}### Response:\n"
    return Text(f"{formatting.system}\n\n{prompt}" if formatting.system else prompt, completion)


def _tools(row: Mapping[str, Any], place: str) -> Any:
    """Return the tools for the chat template; JSON text keeps schemas that differ between rows."""
    tools = row.get("tools")
    try:
        return json.loads(tools) if isinstance(tools, str) else tools or None
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
                    f"or from and value: "
                    f"{str(value)[:80]}"
                )
        if any(
            message.get(key) not in (0, 1, None) for key in _LEARNED
        ):  # True and False are equal to these
            raise ValueError(
                f"{place}: {str(message)[:80]}: {', '.join(_LEARNED)} of a message is 0 or 1, true "
                f"or false"
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
        return [cleaned(part) for part in value] if isinstance(value, list) else value

    return {column: cleaned(value) for column, value in row.items()}


def _texts(parts: list[Any]) -> list[str]:
    texts = (
        part.get("text", part.get("value"))
        if isinstance(part, dict) and part.get("type") == "text"
        else part
        for part in parts
    )
    return [text for text in texts if isinstance(text, str)]


def answers(chat: Chat) -> list[str]:
    """Return the texts of the turns of the assistant that are learned."""
    texts = []
    for message in chat.messages[chat.first :]:
        if message["role"] == "assistant" and not _is_switched_off(message):
            content = message["content"] or ""
            texts.append("".join(_texts(content)) if isinstance(content, list) else content)
    return texts


def _has(message: Message, field: str) -> bool:
    value = message.get(field)
    return bool(value.strip() if isinstance(value, str) else value)


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
    rows, of_whole, of_prompts = tee(rows, 3)
    wholes = encode_texts(
        tokenizer,
        (row.prompt + row.completion if isinstance(row, Text) else "" for row in of_whole),
    )
    prompts = encode_texts(
        tokenizer, (row.prompt if isinstance(row, Text) else "" for row in of_prompts)
    )
    for row, ids, prompt in zip(rows, wholes, prompts, strict=True):
        if isinstance(row, Chat):
            yield encode_chat(tokenizer, row, template, train_on, counts)
        elif not row.completion:
            yield _NOTHING
        else:
            # The prompt ends where its ids differ from those of the whole: a token can reach into
            # the completion.
            before, after = sequences.missing_ends(ids, bos, eos)
            num_prompt = (
                len(before) + _num_common(prompt, ids) if row.prompt and train_on != "all" else 0
            )
            ids = np.concatenate([before, ids, after])
            yield ids, np.arange(len(ids)) >= num_prompt


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
            f"file by "
            "dataset.chat_template, or take the chat model's by tfidf_tune.data.hf_tokenizer"
        )

    def render(messages: Sequence[Message], **options: Any) -> Any:
        given = {
            "chat_template": template,
            "tools": chat.tools,
            "tokenize": "return_dict" in options,
        }
        try:
            return tokenizer.apply_chat_template(list(messages), **(given | options))
        except Exception as error:  # a template is a program
            raise ValueError(
                f"{chat.place}: the chat template refuses this conversation "
                f"({type(error).__name__}: {error}): "
                "change the row or leave it out"
            ) from error

    def changed_text(messages: Sequence[Message], **options: Any) -> str | None:
        """Render a conversation that was changed; None if the template refuses it."""
        try:
            return str(render(messages, **options))
        except ValueError:
            return None

    of_assistant = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]

    def learned(messages: Sequence[Message]) -> list[int]:
        answers = [i for i in of_assistant if i >= chat.first and not _is_empty(messages[i])]
        chosen = answers[-1:] if train_on == "last" else answers
        return [i for i in chosen if not _is_switched_off(messages[i])]

    if not learned(chat.messages):
        return _NOTHING
    # Few templates take only lists of parts; those for plain text print, refuse or leave them out.
    contents = [message["content"] for message in chat.messages]
    if any(isinstance(one, list) for one in contents) and "Welcome" in _sample(tokenizer, template):
        chat = chat.with_contents(
            "".join(_texts(one)) if isinstance(one, list) else one for one in contents
        )
    text = render(chat.messages)
    eos = tokenizer.decode([tokenizer.eos_id], skip_special_tokens=False)
    if eos * 2 in text:
        chat = chat._replace(messages=_without_doubled(eos, chat.messages, text, changed_text))
        text = render(chat.messages)
    check_length(text, chat.place)
    # What the template does not write can be no answer.
    written = _as_written(chat.messages, text, changed_text)
    for message, kept in zip(chat.messages, written, strict=True):
        counts.update(
            f"unwritten {field}"
            for field in _WRITTEN
            if _has(message, field) and not _has(kept, field)
        )
    if chat.tools and changed_text(chat.messages, tools=None) == text:
        counts["unwritten tools"] += 1
    turns = learned(written)
    answers = learned(chat.messages)
    counts["num_unwritten_answers"] += len([i for i in answers if _is_empty(written[i])])
    if not turns:
        return _NOTHING
    ids, offsets = tokenizer.encode_with_offsets(text)
    has_left_out = any(map(_is_switched_off, chat.messages))
    if train_on == "all":
        if has_left_out:
            raise ValueError(
                f"{chat.place}: a message has weight 0, but train_on is all: set it to completions"
            )
        return ids, np.ones(len(ids), dtype=np.bool_)
    # A template that marks what the assistant generates decides by itself what is learned.
    if _GENERATION_TAG.search(template):
        is_label = _marked(render, chat.messages)
        # A template that marks the text but not the end of a turn has no run for an empty one. A
        # template that marks a thought, an answer and a call by themselves has several runs for a
        # turn.
        runs = label_runs(is_label)
        if len(runs) == len(of_assistant):
            for turn, (start, end) in zip(of_assistant, runs, strict=True):
                is_label[start:end] &= turn in turns
        elif train_on == "last":
            # The runs of the last turn are those that the conversation before it does not have.
            last = turns[-1]
            num_before = len(label_runs(_marked(render, chat.messages[:last])))
            num_after = len(label_runs(_marked(render, chat.messages[: last + 1])))
            is_label[:] = False
            for start, end in runs[num_before:num_after]:
                is_label[start:end] = True
        elif has_left_out:
            raise ValueError(
                f"{chat.place}: the chat template does not tell a message of weight 0 from the "
                f"others"
            )
        if chat.first:
            is_label &= offsets[:, 1] > _start(render, text, chat, chat.first)
        return ids, is_label
    # Otherwise the characters of a turn are found by rendering the conversation before and after
    # it.
    is_label = np.zeros(len(ids), dtype=np.bool_)
    for turn in turns:
        start = _start(render, text, chat, turn)
        end = _end(render, text, chat, turn + 1)
        is_label |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    return ids, is_label


def _without_doubled(
    eos: str, messages: list[Message], text: str, changed_text: Callable[..., str | None]
) -> list[Message]:
    """Leave out an EOS at the end of a content where the template writes it again.

    Of the content "four</s>" a template may make "four</s></s>". Without its own EOS it becomes
    "four</s>", and the content is still in the text. Where the template ends a turn by another
    token, it would not be.
    """
    for i, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str) or not content.endswith(eos):
            continue
        shorter = [
            *messages[:i],
            message | {"content": content.removesuffix(eos)},
            *messages[i + 1 :],
        ]
        shorter_text = changed_text(shorter)
        # Counted, because another message can have the same content; stripped, as by some
        # templates.
        content = content.strip()
        if shorter_text is not None and shorter_text.count(content) >= max(text.count(content), 1):
            messages = shorter
            text = shorter_text
    return messages


def _as_written(
    messages: Sequence[Message], text: str, changed_text: Callable[..., str | None]
) -> Sequence[Message]:
    """Leave out the fields of messages that the template does not write: without them the text is
    the same.

    Llama 3's template writes no calls of tools, for example: of the answer ``{"content": "",
    "tool_calls": [...]}`` remains ``{"content": ""}``. Fields are left out one after the other, so
    that one of two that say the same remains.
    """
    for i, message in enumerate(messages):
        for field in _WRITTEN:
            if not _has(message, field):
                continue
            kept = {name: value for name, value in messages[i].items() if name != field}
            if field == "content":
                content = message["content"]
                parts = _texts(content) if isinstance(content, list) else [content]
                if all(part.strip() in text for part in parts):
                    continue
                kept["content"] = type(content)()  # templates expect one
            shorter = [*messages[:i], kept, *messages[i + 1 :]]
            if changed_text(shorter) == text:
                messages = shorter
    return messages


def _unwritten(counts: sequences.Counts) -> str:
    """Say what of the conversations the chat template does not write; an empty text if it writes
    all.
    """
    numbers = {field: counts[f"unwritten {field}"] for field in _WRITTEN}
    fields = [
        f"{field} of {counted(number, 'message')}" for field, number in numbers.items() if number
    ]
    if counts["unwritten tools"]:
        fields.append(f"tools of {counted(counts['unwritten tools'], 'row')}")
    if not fields:
        return ""
    number = counts["num_unwritten_answers"]
    left_out = f"; it writes nothing of {counted(number, 'answer')} (not learned)" if number else ""
    return (
        f"the chat template does not write {', '.join(fields)}{left_out}: by dataset.chat_template "
        f"name a file that "
        "writes them"
    )


def _marked(render: Callable[..., Any], messages: Sequence[Message]) -> sequences.LabelMask:
    """Return which tokens of a conversation its template marks by ``{% generation %}``."""
    if not messages:
        return np.zeros(0, dtype=np.bool_)
    rendered = render(messages, return_assistant_tokens_mask=True, return_dict=True)
    return np.array(rendered["assistant_masks"], dtype=np.bool_)


def learns_turn_ends(tokenizer: TextTokenizer, template: str) -> bool:
    """Return whether turns include what ends them. GLM-4-MoE's template writes nothing after an
    answer, for example.
    """
    if _GENERATION_TAG.search(template) or not isinstance(tokenizer, HFTokenizer):
        return True
    return bool(_sample(tokenizer, template).rpartition("Welcome")[2].strip())


def _sample(tokenizer: HFTokenizer, template: str) -> str:
    """Return how a template writes "Hello" and the answer "Welcome"."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Welcome"}]
    try:
        return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False))
    except (
        Exception
    ):  # a template is a program, and can refuse a conversation that the rows do not have
        return "Welcome, which ends"


def _end(render: Callable[..., str], text: str, chat: Chat, num_messages: int) -> int:
    """Return where in a rendered conversation its first messages end."""
    part = render(chat.messages[:num_messages]) if num_messages else ""
    if not text.startswith(part):
        raise ValueError(
            f"{chat.place}: the chat template writes the first {num_messages} messages differently "
            f"when others "
            "follow: name one with {% generation %} (trl/chat_templates has some), or set train_on "
            "to last or all"
        )
    return len(part)


def _start(render: Callable[..., str], text: str, chat: Chat, turn: int) -> int:
    """Return where in a rendered conversation a turn starts, after as much of the generation prompt
    as it contains.
    """
    if turn == 0:
        # No template writes an empty conversation, so the generation prompt is that after another
        # one.
        other = [{"role": "user", "content": "Hello"}]
        prompt = render(other, add_generation_prompt=True)[len(render(other)) :]
        first = text[: _end(render, text, chat, 1)]
        return next(
            (first.find(prompt[:n]) + n for n in range(len(prompt), 0, -1) if prompt[:n] in first),
            0,
        )
    prompt = render(chat.messages[:turn], add_generation_prompt=True)
    if text.startswith(prompt):
        return len(prompt)
    # Reasoning models are prompted to think, but earlier thoughts are left out of a conversation.
    return max(_end(render, text, chat, turn), _num_common(prompt, text))


def _num_common(first: Iterable[Any], second: Iterable[Any]) -> int:
    """Count the leading ids or characters that two sequences have in common."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )


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
    limit = (
        min(_MAX_SEQ_LEN, tokenizer.max_seq_len or _MAX_SEQ_LEN)
        if max_seq_len is None
        else max_seq_len
    )
    check_at_least(2, max_seq_len=limit)  # a token and one to predict
    check_fits_model(tokenizer, lower="it", max_seq_len=limit)
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
        num_controls = num_targets if num_controls is None else num_controls
        spec = Targets(
            targets, num_targets, num_controls, num_repeats, min_target_tokens, seed, probe_file
        )
    # A file of targets is read like the source, and its examples follow those of the source.
    named = TextSource(source, source_name, source_split, source_column or "")
    places = (
        [named]
        if spec is None or not spec.in_file
        else [named, TextSource(spec.kind, column=named.column)]
    )
    written = {"max_seq_len": limit, "train_on": train_on, "formatting": formatting}
    # Copies are removed from what is read from the cache.
    key = sequences.cache_key(
        "sft", tokenizer, places, deduplication=None, passages_of=None, **written
    )
    last_columns: dict[str, list[str]] = {}

    def read(place: TextSource, counts: sequences.Counts) -> Iterator[Text | Chat]:
        columns = {} if source_column is None else {source_column: object}
        for row in load_rows(place, columns, None):
            values = row.columns if row.line else without_none(row.columns)
            last_columns[place.source] = sorted(values)
            format_name, content = read_row(values, row.place, source_column, formatting)
            counts.update(
                ["num_documents", format_name, *["num_chats"] * isinstance(content, Chat)]
            )
            used = _USED[format_name] if source_column is None else {source_column, "tools"}
            counts.update(
                f"column {name}"
                for name, value in values.items()
                if value is not None and name not in used
            )
            roles = {message["role"] for message in getattr(content, "messages", ())}
            learned = " (learned)" if train_on != "all" else ""
            counts.update(f"role {role}{learned if role == 'assistant' else ''}" for role in roles)
            yield content

    def make_sequences(counts_of_source: sequences.Counts) -> Iterator[sequences.TokenizedSequence]:
        for place, counts in zip(places, (counts_of_source, sequences.Counts()), strict=False):
            for ids, is_label in encode_rows(
                tokenizer, read(place, counts), template, train_on, counts
            ):
                if is_label[1:limit].any():  # the shift of labels drops the first
                    counts["num_examples"] += 1
                    counts["num_cut"] += len(ids) > limit
                    yield sequences.TokenizedSequence(ids[:limit], is_label[:limit])
                else:
                    counts["num_left_out"] += 1
                    counts["num_unlabelled"] += bool(is_label[1:].any())
            if counts["empty"] == counts["num_documents"] and source_column is None:
                raise ValueError(
                    f"{place.source!r} has the columns {last_columns.get(place.source)}, but "
                    f"fine-tuning needs one "
                    f"of these: {'; '.join(FORMATS)}, or a column named by source_column"
                )
            if not counts["num_examples"]:
                cut = (
                    f"{counts['num_unlabelled']} of {counts['num_documents']} rows have no answer "
                    f"in {limit} tokens"
                )
                remedy = (
                    "raise max_seq_len, or see to the roles: an answer's is 'assistant', or 'gpt' "
                    "in conversations"
                )
                unwritten = _unwritten(counts)
                remedy += f"; {unwritten}" if unwritten else ""
                raise ValueError(
                    f"{place.source!r} gives no example: {cut}, the others none at all: {remedy}"
                )

    examples = dataset = sequences.cached_sequences(cache_dir, key, make_sequences)

    def kept(order: TokenArray) -> Mask:
        def build(folder: Path) -> dict[str, int]:
            rows = [examples.sequence(index)[0] for index in order.tolist()]
            np.save(folder / "kept.npy", deduplication.kept(rows, source, tokenizer))
            return {}

        if deduplication.method == "none":
            return np.ones(len(order), dtype=np.bool_)
        key_of_kept = sequences.cache_key(
            "sft_kept",
            tokenizer,
            places,
            deduplication=deduplication,
            passages_of=None,
            order=digest(order.tolist()),
            **written,
        )
        folder, _ = sequences.cached_folder(cache_dir, key_of_kept, build)
        mask: Mask = np.load(folder / "kept.npy")
        return mask

    counts = dataset.counts
    formats = ", ".join(
        f"{counted(counts[name], 'row')} with {name}" for name in FORMATS if counts[name]
    )
    for kind, title in (("role ", "roles"), ("column ", "not used:")):
        names = [key.removeprefix(kind) for key in sorted(counts) if key.startswith(kind)]
        if names:
            formats += f"; {title} {', '.join(names)}"
    logger.log(
        logging.WARNING if dataset.num_cut + dataset.num_left_out else logging.INFO,
        f"{source}: {formats}; {counted(counts['num_examples'], 'example')}, {dataset.num_cut:,} "
        f"of them cut after "
        f"{limit:,} tokens; {counted(dataset.num_left_out, 'row')} left out, "
        f"{dataset.num_left_out - counts['num_unlabelled']:,} without an answer and "
        f"{counts['num_unlabelled']:,} with "
        "none of it before the cut",
    )
    unwritten = _unwritten(counts)
    if unwritten:
        logger.warning(f"{source}: {unwritten}")
    if (
        counts["num_chats"]
        and train_on != "all"
        and not learns_turn_ends(tokenizer, template or "")
    ):
        remedy = (
            "by dataset.chat_template name a file that writes the token at which generation stops"
        )
        logger.warning(
            f"{source}: the chat template writes nothing after an answer, so that the model does "
            f"not learn to stop: "
            f"{remedy}"
        )
    if spec is not None:
        order, passages = choose_completions(
            dataset, counts["num_examples"], spec, tokenizer, source, kept
        )
        dataset = sequences.CompletionsDataset(
            dataset.tokens,
            dataset.is_label,
            dataset.spans[order],
            dataset.counts,
            passages=passages,
        )
    elif deduplication.method != "none":
        # Each row is a separate document, so that no row continues another.
        is_kept = kept(np.arange(len(dataset), dtype=np.int32))
        dataset = replace(dataset, spans=dataset.spans[is_kept], continues=None)
    return sequences.pack(dataset, tokenizer) if packed else dataset
