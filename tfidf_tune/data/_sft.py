"""Fine-tuning on conversations, prompts with completions, instructions or texts, found by the columns of the rows."""

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from tfidf_tune._checks import check_at_least, require_choice
from tfidf_tune._files import digest
from tfidf_tune._printing import counted
from tfidf_tune.data._conversations import (
    FORMATS,
    Chat,
    Formatting,
    Text,
    TrainOn,
    encode_rows,
    learns_turn_ends,
    read_row,
)
from tfidf_tune.data._deduplication import Deduplicate, Deduplication
from tfidf_tune.data._duplicates import Mask
from tfidf_tune.data._placing import Targets, choose_completions
from tfidf_tune.data._sequences import Counts, LabelMask, SequenceDataset, cached_folder, cached_sequences, pack
from tfidf_tune.data._sources import TextSource, load_rows, source_fingerprint
from tfidf_tune.data._tokenizer import (
    HFTokenizer,
    TextTokenizer,
    TokenArray,
    bos_ids,
    check_fits_model,
    tokenizer_fingerprint,
)

_MAX_SEQ_LEN = 1024

logger = logging.getLogger(__name__)


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
    r"""Build a data set for supervised fine-tuning of rows that are found by their columns. The ids are cached.

    A row is the first of these whose columns it has with values:

    - ``messages``, or ``conversations``: a list of ``{"role": ..., "content": ...}`` or ``{"from": ..., "value":
      ...}``; and ``tools``, if the chat template takes them;
    - ``prompt`` and ``completion``: two texts, which are joined as they are, or two lists of messages;
    - ``instruction``, ``output`` and perhaps ``input``: an instruction, with its input after an empty line;
    - ``text``: all of it is learned.

    Messages are written by the tokenizer's chat template, as are instructions if it has one; without one, an
    instruction has Alpaca's headings ``### Instruction:``, ``### Input:`` and ``### Response:``. A plain text starts
    with BOS, if the tokenizer has one, and ends with EOS; what a chat template writes is not changed.

    A row of more than ``max_seq_len`` tokens is cut at its end. Rows are left out if they are empty, have no
    answer, or have none of it left after the cut. A log line reports the formats and the counts.

    With ``targets``, passages for an evaluation of memorization are chosen from the last answers of the examples; the
    prompt is the conversation before. An occurrence of an answer is a run of at least 90 % of its tokens, in any turn
    that is learned.

    - ``duplicates``: the answers that occur most often, at least twice;
    - ``random``: random examples whose answer occurs once, put in at random places until it occurs ``num_repeats``
      times;
    - a file of further rows: random ones of it, put in ``num_repeats`` times.

    Controls are random examples whose answer occurs once, which are taken out of the data set; with a file, rows of it
    that are not put in. No example that is trained on learns a run of 90 % of the tokens of a control, or of half of
    them and at least 16. The same holds for a random target and all examples but its own. With ``deduplicate``, targets
    and controls are chosen before, and the occurrences of targets are those that are left.

    Args:
        tokenizer (TextTokenizer): the tokenizer; conversations need an :class:`HFTokenizer`.
        source (str): a local file or folder, ``embedded`` or a hub id, see :func:`load_documents`.
        source_name (str | None): configuration of a hub data set. Default: None
        source_split (str): its split. Default: "train"
        source_column (str | None): a column of messages or text under another name. Default: None, as listed above
        max_seq_len (int | None): tokens in an example. Default: None, 1024, or the tokenizer's own if that is less.
        train_on (TrainOn): "completions", all turns of the assistant, or what follows the prompt (TRL's
            ``assistant_only_loss`` and ``completion_only_loss``); "last", only the last of these turns; or "all" tokens
            (Axolotl's ``train_on_inputs``). Default: "completions"
        system (str | None): a system message for conversations without one, or text that starts a prompt. Default: None
        chat_template (str | None): a file with a Jinja template. Default: None, the tokenizer's own.
        apply_chat_template (bool | None): write prompts, completions and instructions as a turn of the user and one of
            the assistant. Default: None, only instructions, if there is a chat template.
        targets (str | None): "duplicates", "random" or a file, see above. Default: None, nothing is measured
        num_targets (int): completions that are measured. Default: 20
        num_controls (int | None): completions that are measured but not trained on. Default: None, as many as targets
        num_repeats (int): occurrences of each target that is random or from a file. Default: 1
        min_target_tokens (int): the least length of an answer that is measured. Default: 16
        seed (int): decides which targets and controls are drawn, and where targets are put. Default: 0
        probe_file (str | None): where to write targets and controls, see :func:`read_probe_file`. Default: None
        deduplicate (Deduplicate): which examples are removed as copies, see :class:`Deduplication`. Default: "none"
        packed (bool): put several examples into a row of the tokenizer's ``max_seq_len`` tokens. Default: False
        cache_dir (str | None): the cache. Default: ``$TFIDF_TUNE_CACHE`` or ``~/.cache/tfidf_tune``

    Returns:
        Dataset[dict[str, Any]]: a :class:`SequenceDataset`, with ``targets`` a :class:`CompletionsDataset`; if packed,
            a ``PackedDataset`` with it as ``ds``.

    Raises:
        FileNotFoundError: If there is no file ``chat_template``, ``source`` or ``targets``.
        ValueError: If ``max_seq_len`` is below 2 or above the tokenizer's; if the source cannot be read, has the
            columns of no format or gives no example; if there are too few targets or controls; if a conversation has no
            chat template, is refused by it, or is written so that its answers cannot be found.

    Example:
        >>> dataset = sft_dataset(tokenizer, source="chats.jsonl", max_seq_len=2048)
    """
    limit = min(_MAX_SEQ_LEN, tokenizer.max_seq_len or _MAX_SEQ_LEN) if max_seq_len is None else max_seq_len
    check_at_least(2, max_seq_len=limit)  # a token and one to predict
    check_fits_model(tokenizer, lower="it", max_seq_len=limit)
    require_choice("train_on", train_on, ("completions", "last", "all"))
    deduplication = Deduplication.of(deduplicate)
    template = tokenizer.get_chat_template() if isinstance(tokenizer, HFTokenizer) else None
    if chat_template is not None:
        template = Path(chat_template).expanduser().read_text(encoding="utf-8")
    formatting = Formatting(template, apply_chat_template, system)
    spec = None
    if targets is not None:
        if train_on == "all":
            raise ValueError("targets are answers, but train_on is all: set it to completions or last")
        num_controls = num_targets if num_controls is None else num_controls
        spec = Targets(targets, num_targets, num_controls, num_repeats, min_target_tokens, seed, probe_file)
    own = TextSource(source, source_name, source_split, source_column or "")
    places = [own] if spec is None or not spec.in_file else [own, TextSource(spec.kind, column=own.column)]
    settings = {
        "kind": "sft",
        "max_seq_len": limit,
        "train_on": train_on,
        "formatting": formatting,
        "special_ids": [bos_ids(tokenizer), tokenizer.eos_id],
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
        "source_fingerprints": [source_fingerprint(*place) for place in places],
    }

    def read(place: TextSource, counts: Counts) -> Iterator[Text | Chat]:
        columns = {} if source_column is None else {source_column: object}
        for number, row in enumerate(load_rows(place.source, columns, name=place.name, split=place.split), start=1):
            found, content = read_row(row, f"{place.source!r}, row {number}", source_column, formatting)
            counts["num_documents"] += 1
            counts[found] += 1
            if isinstance(content, Chat):
                counts["num_chats"] += 1
            yield content

    def make_examples(place: TextSource, counts: Counts) -> Iterator[tuple[TokenArray, LabelMask]]:
        for ids, is_label in encode_rows(tokenizer, read(place, counts), template, train_on):
            if is_label[1:limit].any():  # the shift of labels drops the first
                counts["num_examples"] += 1
                counts["num_cut"] += len(ids) > limit
                yield ids[:limit], is_label[:limit]
            else:
                counts["num_left_out"] += 1
                counts["num_unlabelled"] += bool(is_label[1:].any())
        if not counts["num_examples"]:
            raise ValueError(
                f"{place.source!r} gives no example: of {counts['num_documents']} rows {counts['num_unlabelled']} have "
                f"no answer within their first {limit} tokens, the others have none at all. Raise max_seq_len "
                "or name another source; the role of an answer is 'assistant', or 'gpt' in conversations"
            )

    def make_sequences(counts: Counts) -> Iterator[tuple[TokenArray, LabelMask]]:
        yield from make_examples(own, counts)
        for place in places[1:]:
            yield from make_examples(place, Counter())

    examples = dataset = cached_sequences(cache_dir, settings, make_sequences)

    def kept(order: TokenArray) -> Mask:
        def build(folder: Path) -> dict[str, int]:
            rows = [examples.sequence(index)[0] for index in order.tolist()]
            np.save(folder / "kept.npy", deduplication.kept(rows, source, tokenizer))
            return {}

        if deduplication.method == "none":
            return np.ones(len(order), dtype=np.bool_)
        key = settings | deduplication.settings | {"kind": "sft_kept", "order": digest(order.tolist())}
        mask: Mask = np.load(cached_folder(cache_dir, key, build)[0] / "kept.npy")
        return mask

    counts = dataset.counts
    found = ", ".join(f"{counted(counts[name], 'row')} with {name}" for name in FORMATS if counts[name])
    logger.log(
        logging.WARNING if dataset.num_cut + dataset.num_left_out else logging.INFO,
        f"{source}: {found}; {counted(counts['num_examples'], 'example')}, {dataset.num_cut:,} of them cut after "
        f"{limit:,} tokens; {counted(dataset.num_left_out, 'row')} left out, "
        f"{dataset.num_left_out - counts['num_unlabelled']:,} without an answer and {counts['num_unlabelled']:,} with "
        "none of it before the cut",
    )
    if counts["num_chats"] and train_on != "all" and not learns_turn_ends(tokenizer, template or ""):
        logger.warning(
            f"{source}: the chat template writes nothing after an answer, so that the end of a turn is not learned and "
            "the model may not stop: by chat_template name a file that writes the token at which generation stops"
        )
    if spec is not None:
        dataset = choose_completions(dataset, counts["num_examples"], spec, tokenizer, source, kept)
    elif deduplication.method != "none":
        every = np.arange(len(dataset), dtype=np.int32)
        dataset = SequenceDataset(*dataset.parts(every[kept(every)]))
    return pack(dataset, tokenizer) if packed else dataset
