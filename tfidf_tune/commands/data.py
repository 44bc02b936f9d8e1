"""``tfidf-tune data``."""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from tfidf_tune._files import config_path
from tfidf_tune._printing import counted, say, visible
from tfidf_tune.commands import add_tasks, require_extras, task_runner, whole_number

_MOST_COUNTED = 10_000  # items that are read for the counts: torchtune's data sets tokenize when they are read

Document = tuple[list[int], list[bool]]  # token ids, and whether the loss counts each


def main(arguments: list[str]) -> None:
    """Show what a training config makes of its data set, or remove copies from text.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune data``.

    Raises:
        FileNotFoundError: If a file or folder is missing.
        ValueError: If the config is not valid, its data set cannot be built, or text cannot be read.
    """
    options = _parser().parse_args(arguments)
    options.run(options)


def _dedup(options: argparse.Namespace) -> None:
    require_extras("data", "scale")
    from tfidf_tune.data._corpus_deduplication import deduplicate_corpus
    from tfidf_tune.data._deduplication import Deduplication

    deduplication = Deduplication(options.method, options.threshold, options.ngram)
    *sources, output = options.paths
    if not sources:
        raise ValueError(f"name the text and a folder for the result, got only {output}")
    report = deduplicate_corpus(
        sources, Path(output).expanduser(), deduplication,
        column=options.column, sample_by=options.sample_by, runner=task_runner(options),
    )  # fmt: skip
    for unit in ("documents", "characters"):
        whole, kept = report[unit], report[f"kept_{unit}"]
        share = f" ({(whole - kept) / whole:.1%})" if whole else ""
        say(f"{unit.capitalize()}: {whole:,} read, {whole - kept:,} removed{share}, {kept:,} kept.")
    for cluster in report["largest_clusters"]:
        beginning = " ".join(cluster["beginning"].split())
        say(f"  {cluster['documents']:>7,} copies of: {beginning} ...")
    say(f"Written: {output}, with report.json")


def _preview(options: argparse.Namespace) -> None:
    require_extras("data", "torchtune", "report")
    config_path(options.config)
    from tfidf_tune.training import LoRAFinetuneConfig, build_dataset, check_config, instantiate, load_config

    # A step of one example: the preview is also for a data set that is still too small.
    overrides = [*options.overrides, "batch_size=1", "gradient_accumulation_steps=1"]
    cfg: Any = check_config(load_config(options.config, overrides), LoRAFinetuneConfig)
    tokenizer = instantiate(cfg, "tokenizer")
    if tokenizer.max_seq_len is None:
        tokenizer.max_seq_len = _model_max_seq_len(cfg)
    logger, handler = logging.getLogger("tfidf_tune.data"), logging.StreamHandler(sys.stdout)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        dataset: Any = build_dataset(cfg, tokenizer)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    for number, document in enumerate(islice(_documents(dataset, range(len(dataset))), options.number), start=1):
        _print_document(tokenizer, number, document)
    say(_counts(dataset))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tfidf-tune data", description="Look at the data of a config; remove copies.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    default = "default: %(default)s"
    preview = commands.add_parser(
        "preview",
        help="print examples with the tokens that are learned marked, and count tokens",
        description="Print examples of a training config with the tokens that are learned marked. No weights are read.",
        epilog="example: tfidf-tune data preview any/lora_sft dataset.source=FILE checkpointer.checkpoint_dir=MODEL",
    )
    preview.set_defaults(run=_preview)
    preview.add_argument("config", metavar="CONFIG", help="path of a config, or a name that `tfidf-tune ls` lists")
    preview.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as of `tfidf-tune run`")
    preview.add_argument("--number", type=whole_number(0), default=3, metavar="N", help=f"examples to print; {default}")
    dedup = commands.add_parser("dedup", help="remove copies from text that may be larger than memory")
    dedup.set_defaults(run=_dedup)
    add = dedup.add_argument
    add("paths", nargs="+", metavar="IN ... OUT", help=".txt, .jsonl, .parquet or folders; and the folder to write")
    add("--method", choices=("exact", "minhash"), default="minhash", help=default)
    add("--threshold", type=float, default=0.8, help=f"Jaccard similarity of copies, by minhash; {default}")
    add("--ngram", type=whole_number(1), default=5, help=f"words of an n-gram, by minhash; {default}")
    add("--column", default="text", help=f"column of the text; {default}")
    add("--sample-by", choices=("line", "paragraph", "document"), default="line",
        help=f"what a document of a .txt file is; {default}")  # fmt: skip
    add_tasks(dedup)
    return parser


def _model_max_seq_len(cfg: Any) -> int | None:
    """Return the longest sequence of the model, which training gives to a tokenizer without a limit of its own."""
    if limit := cfg.model.get("max_seq_len"):
        return int(limit)
    from transformers import AutoConfig

    folder, trusted = str(cfg.checkpointer.checkpoint_dir), bool(cfg.checkpointer.get("trust_remote_code"))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    except (OSError, ValueError):  # unknown or no connection: the data set asks for a limit if it needs it
        return None
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _documents(dataset: Any, indices: Sequence[int]) -> Iterator[Document]:
    """Yield the sequences of a data set, those of packed rows one by one."""
    for item in (dataset[index] for index in indices):
        tokens, labels = ([int(value) for value in item[name]] for name in ("tokens", "labels"))
        start = 0
        for length in map(int, item.get("seq_lens", [len(tokens)])):
            end = start + length
            # Labels are shifted by one: the first token of a document is never learned.
            is_learned = [False, *(label != -100 for label in labels[start + 1 : end])]
            if any(is_learned) or "seq_lens" not in item:  # otherwise padding
                yield tokens[start:end], is_learned[:length]
            start = end


def _print_document(tokenizer: Any, number: int, document: Document) -> None:
    from rich.console import Console
    from rich.text import Text

    from tfidf_tune.data import HFTokenizer

    tokens, is_learned = document
    console = Console(highlight=False)
    is_colored = console.color_system is not None and not console.no_color
    mark = "in green" if is_colored else "in [[ ]]"
    say(f"\nExample {number}: {counted(len(tokens), 'token')}, {sum(is_learned):,} learned, {mark}")
    shown = Text()
    options = {"skip_special_tokens": False} if isinstance(tokenizer, HFTokenizer) else {}
    end, before = 0, ""
    for learned, run in groupby(is_learned):
        end += len(list(run))
        # Decoded from the start, because a decoder drops the space before a first token.
        whole = tokenizer.decode(tokens[:end], **options)
        text = visible(whole[len(before) :])
        before = whole
        style = "bold green" if learned else "dim"
        shown.append(f"[[{text}]]" if learned and not is_colored else text, style if is_colored else None)
    console.print(shown, soft_wrap=True)


def _counts(dataset: Any) -> str:
    num_items = len(dataset)
    step = -(-num_items // _MOST_COUNTED)
    counts = [(len(tokens), sum(is_learned)) for tokens, is_learned in _documents(dataset, range(0, num_items, step))]
    lengths = sorted(length for length, _ in counts)
    num_tokens = sum(lengths)
    is_packed = "seq_lens" in dataset[0]
    sampled = f", of which every {step}th was counted" if step > 1 else ""
    of = f" in {counted(len(counts), 'example')}" if is_packed else ""
    return (
        f"\n{counted(num_items, 'packed row' if is_packed else 'example')}{sampled}: {num_tokens:,} tokens{of}, "
        f"{sum(learned for _, learned in counts) / num_tokens:.1%} of them learned; "
        f"{lengths[0]:,} to {lengths[-1]:,} tokens in an example, median {lengths[len(lengths) // 2]:,}"
    )
