"""Fine-tuning on conversations, prompts with completions, instructions or texts, found by the
columns of the rows.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, tee
from pathlib import Path
from typing import Any, get_args

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
from tfidf_tune.corpus.sources import TextSource, load_rows
from tfidf_tune.data import sequences
from tfidf_tune.data.chat_template import (
    NOTHING,
    TrainOn,
    encode_chat,
    learns_turn_ends,
    num_common,
    unwritten,
)
from tfidf_tune.data.rows import FORMATS, Chat, Formatting, Text, read_row, without_none
from tfidf_tune.passages.completions import Targets, choose_completions
from tfidf_tune.passages.stretches import Mask

logger = logging.getLogger(__name__)

# The columns that are read from a row of a format; a log line names all others.
_USED = {
    "messages": {"messages", "tools", "system"},
    "conversations": {"conversations", "tools", "system"},
    "prompt and completion": {"prompt", "completion", "tools", "system"},
    "instruction and output": {"instruction", "input", "history", "output", "tools", "system"},
    "text": {"text"},
    "empty": set(chain.from_iterable(FORMATS.values())),
}
_MAX_SEQ_LEN = 1024


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
            yield NOTHING
            continue
        before, after = sequences.missing_ends(ids, bos, eos)
        num_prompt = 0
        if row.prompt and train_on != "all":
            # The prompt ends where its ids differ from those of the whole text: a token can reach
            # into the completion.
            num_prompt = len(before) + num_common(prompt_ids, ids)
        ids = np.concatenate([before, ids, after])
        yield ids, np.arange(len(ids)) >= num_prompt


def _whole_text(row: Text | Chat) -> str:
    return row.prompt + row.completion if isinstance(row, Text) else ""


def _prompt_text(row: Text | Chat) -> str:
    return row.prompt if isinstance(row, Text) else ""


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
            missing = unwritten(counts)
            hint = f"; {missing}" if missing else ""
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
    missing = unwritten(counts)
    if missing:
        logger.warning(f"{source}: {missing}")


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
