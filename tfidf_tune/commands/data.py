"""``tfidf-tune data``."""

import argparse
import logging
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from tfidf_tune._checks import SetupError
from tfidf_tune._files import require_writable, work_folder
from tfidf_tune._printing import counted, say, visible_record
from tfidf_tune.commands import add_tasks, add_text, require_extras, task_runner, whole_number

_IS_CHAT = (
    "These are conversations or prompts: what the model has to write of each is its document."
)


def main(arguments: list[str]) -> None:
    """Show what a training config makes of its data set, remove copies from text, or hold a part of
    it out.
    """
    parser = argparse.ArgumentParser(
        prog="tfidf-tune data",
        description="Look at the data of a config; remove copies; hold documents out.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    default = "default: %(default)s"
    preview = commands.add_parser(
        "preview",
        help="print examples with the tokens that are learned marked, and count tokens",
        description="Print examples of a training config with the tokens that are learned marked. "
        "No weights are read.",
        epilog="example: tfidf-tune data preview mine/lora_chat dataset.source=FILE "
        "checkpointer.checkpoint_dir=MODEL",
    )
    export = commands.add_parser(
        "export-weights",
        help="write the tokens of training with their weights, for trainers without a hook for a "
        "loss",
        description="Write token ids, labels and weights of a training config as Parquet, in the "
        "order of training.",
        epilog="example: tfidf-tune data export-weights mine/lora OUT.parquet dataset.source=FILE "
        "checkpointer.checkpoint_dir=MODEL",
    )
    for command, run in ((preview, _preview), (export, _export_weights)):
        command.set_defaults(run=run)
        command.add_argument(
            "config",
            metavar="CONFIG",
            help="path of a config, or a name that `tfidf-tune ls` lists",
        )
        if command is export:
            command.add_argument(
                "output", type=Path, metavar="OUT.parquet", help="the file to write, which is new"
            )
        command.add_argument(
            "overrides", nargs="*", metavar="key=value", help="overrides, as of `tfidf-tune run`"
        )
    preview.add_argument(
        "--number",
        type=whole_number(0),
        default=3,
        metavar="N",
        help=f"examples to print; {default}",
    )
    copies = commands.add_parser(
        "copies",
        help="find what repeats in text that may be larger than memory, and which objective fits "
        "it",
        description="Find copies of documents, and stretches that occur again, in text that may be "
        "larger than memory; say which objective fits the text. Prints a table and writes a page "
        "with copies.json.",
        epilog="example: tfidf-tune data copies my_texts.jsonl",
    )
    copies.set_defaults(run=_copies)
    add = copies.add_argument
    add("texts", nargs="+", metavar="TEXT", help=".txt, .jsonl, .parquet or folders")
    add("--tokenizer", help="folder or hub id; counts tokens; default: a token is 4 bytes")
    add("--no-text", action="store_true", help="show and write no excerpts of the text")
    add(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="folder of the page; default: runs/copies/NAME",
    )
    add("--json", action="store_true", help="print copies.json instead of the table")
    add("--verbose", action="store_true", help="print all tables, not only the first")
    add_text(copies, "document")
    add_tasks(copies)
    dedup = commands.add_parser(
        "dedup", help="remove copies from text that may be larger than memory"
    )
    dedup.set_defaults(run=_dedup)
    _add_texts(dedup)
    _add_near_copies(dedup)
    add_text(dedup)
    add_tasks(dedup)
    holdout = commands.add_parser(
        "holdout",
        help="divide text by a coin into what to train on and what is held out",
        description="Divide the documents of text that may be larger than memory by a coin, before "
        "any trainer reads it: OUT/train is trained on, OUT/held_out never is. Near copies stay "
        "together. OUT/holdout.json says how; with it, an audit compares both sides.",
        epilog="example: tfidf-tune data holdout texts/ divided/ --share 0.05",
    )
    holdout.set_defaults(run=_holdout)
    _add_texts(holdout)
    add = holdout.add_argument
    add(
        "--share",
        type=float,
        default=0.05,
        help=f"probability that a document is held out with its near copies; {default}",
    )
    add("--seed", type=whole_number(0), default=0, help=f"of the coin; {default}")
    add(
        "--largest-group",
        type=whole_number(1),
        metavar="N",
        help="larger groups of near copies are trained on without a coin; default: 1%% of the "
        "documents, at least 10, at most 1000",
    )
    _add_near_copies(holdout)
    add_text(holdout)
    add_tasks(holdout)
    options = parser.parse_args(arguments)
    options.run(options)


def _add_texts(parser: argparse.ArgumentParser) -> None:
    """Add the texts to read and the folder to write."""
    add = parser.add_argument
    add("sources", nargs="+", metavar="IN", help=".txt, .jsonl, .parquet or folders")
    add("output", type=Path, metavar="OUT", help="the folder to write")


def _add_near_copies(parser: argparse.ArgumentParser) -> None:
    """Add the options of what a copy is."""
    add = parser.add_argument
    default = "default: %(default)s"
    add("--method", choices=("exact", "minhash"), default="minhash", help=default)
    add(
        "--threshold",
        type=float,
        default=0.8,
        help=f"Jaccard similarity of copies, by minhash; {default}",
    )
    add(
        "--ngram",
        type=whole_number(1),
        default=5,
        help=f"words of an n-gram, by minhash; {default}",
    )


def _copies(options: argparse.Namespace) -> None:
    require_extras("data", "scale", "report")
    from tfidf_tune.commands._copies import copies_report, json_files, json_text, without_text
    from tfidf_tune.corpus import sources
    from tfidf_tune.corpus.repeated_text import find_repeated_text, measured_bytes_of_token
    from tfidf_tune.data.learned_text import has_conversations, learned_texts
    from tfidf_tune.report import require_report_folder, terminal_text, write_report

    name = Path(options.texts[0]).expanduser().resolve().stem
    folder = (options.output_dir or Path("runs", "copies", name)).expanduser()
    require_writable("--output-dir", folder)
    require_report_folder(folder)
    runner = task_runner(options)
    files = sources.tasks_of(options.texts)
    fingerprints = {}
    for file in files:
        fingerprints[file] = sources.source_fingerprint(file, column=options.column)
    arguments = {
        "texts": fingerprints,
        "column": options.column,
        "sample_by": options.sample_by,
        "tokenizer": options.tokenizer,
    }
    read = partial(sources.texts_of_rows, column=options.column, sample_by=options.sample_by)
    is_chat = options.column == "text" and any(map(has_conversations, files))
    if is_chat:
        say(_IS_CHAT, file=sys.stderr)
        read = partial(learned_texts, sample_by=options.sample_by)
    tokenizer = None
    bytes_of_token = None
    if options.tokenizer:
        from tfidf_tune.data import hf_tokenizer

        tokenizer = hf_tokenizer(options.tokenizer)
        bytes_of_token = measured_bytes_of_token(tokenizer, files, read)
    with work_folder(folder.with_name(f"{folder.name}.search"), arguments, replace=True) as work:
        found = find_repeated_text(
            files,
            work,
            read=read,
            tokenizer=tokenizer,
            bytes_of_token=bytes_of_token,
            runner=runner,
        )
    if options.no_text:
        found = without_text(found)
    provenance = {
        "texts": ", ".join(options.texts),
        "documents": "what the model has to write" if is_chat else f"column {options.column}",
        "a document of a .txt file": options.sample_by,
        "tokenizer": options.tokenizer or "none: a token is taken to be 4 bytes",
        "date": date.today().isoformat(),
    }
    report = copies_report(found, options.texts, provenance)
    write_report(report, folder, more=json_files(found, options.texts))
    if options.json:
        say(json_text(found, options.texts))
        return
    say(f"The page: {folder / 'index.html'}\n")
    say(terminal_text(report, verbose=options.verbose).rstrip("\n"))


def _dedup(options: argparse.Namespace) -> None:
    require_extras("data", "scale")
    from tfidf_tune.corpus.deduplication import Deduplication
    from tfidf_tune.corpus.file_deduplication import deduplicate_corpus

    deduplication = Deduplication(options.method, options.threshold, options.ngram)
    report = deduplicate_corpus(
        options.sources,
        options.output.expanduser(),
        deduplication,
        column=options.column,
        sample_by=options.sample_by,
        runner=task_runner(options),
    )
    for unit in ("documents", "characters"):
        whole = report[unit]
        kept = report[f"kept_{unit}"]
        removed = whole - kept
        share = f" ({removed / whole:.1%})" if whole else ""
        say(f"{unit.capitalize()}: {whole:,} read, {removed:,} removed{share}, {kept:,} kept.")
    for cluster in report["largest_clusters"]:
        beginning = " ".join(cluster["beginning"].split())
        say(f"  {cluster['documents']:>7,} copies of: {beginning} ...")
    say(f"Written: {options.output}, with report.json")


def _holdout(options: argparse.Namespace) -> None:
    require_extras("data", "scale")
    from tfidf_tune.corpus.deduplication import Deduplication
    from tfidf_tune.corpus.file_deduplication import ReadTexts
    from tfidf_tune.corpus.file_holdout import FEWEST_HELD_OUT, hold_out_documents
    from tfidf_tune.corpus.sources import tasks_of
    from tfidf_tune.data.learned_text import has_conversations, learned_texts

    output = options.output.expanduser()
    read: ReadTexts | None = None
    if options.column == "text" and any(map(has_conversations, tasks_of(options.sources))):
        say(_IS_CHAT, file=sys.stderr)
        read = partial(learned_texts, sample_by=options.sample_by)
    holdout = hold_out_documents(
        options.sources,
        output,
        share=options.share,
        seed=options.seed,
        deduplication=Deduplication(options.method, options.threshold, options.ngram),
        largest_group=options.largest_group,
        column=options.column,
        sample_by=options.sample_by,
        read=read,
        runner=task_runner(options),
    )
    sides = holdout.contents["sides"]
    for name, side in (("To train on", "train"), ("Held out", "held_out")):
        counts = sides[side]
        say(
            f"{name}: {counted(counts['documents'], 'document')} in "
            f"{counted(counts['groups'], 'group')}, "
            f"{counted(counts['characters'], 'character')}: {output / side}"
        )
    if holdout.contents["without_text"]:
        say(f"Without text, and to train on: {counted(holdout.contents['without_text'], 'row')}")
    cuts = holdout.contents["cuts"]
    if cuts["groups"]:
        say(
            f"Cut: {counted(cuts['groups'], 'group')} of more than {holdout.largest_group:,} near "
            f"copies, with {counted(cuts['documents'], 'document')}: all of them are to train on, "
            "no coin was tossed"
        )
        for cut in cuts["largest"]:
            say(f"  {cut['documents']:>7,} near copies of row {cut['row']:,} of {cut['file']}")
    if sides["held_out"]["groups"] < FEWEST_HELD_OUT:
        say(
            f"Few groups are held out: an audit needs {FEWEST_HELD_OUT}. Set a higher --share, and "
            "write to another folder"
        )
    say(f"Written: {holdout.manifest}\n")
    say(f"Train on {output / 'train'} alone, with any trainer. Then audit the model:")
    say(f"  tfidf-tune audit MODEL --holdout {shlex.quote(str(holdout.manifest))}")


def _preview(options: argparse.Namespace) -> None:
    require_extras("data", "torchtune", "report")
    # A step of one example: the preview is also for a data set that is still too small.
    _, tokenizer, dataset = _build(
        options.config, [*options.overrides, "batch_size=1", "gradient_accumulation_steps=1"]
    )
    from tfidf_tune.commands._preview import print_preview

    print_preview(dataset, tokenizer, options.number)


def _export_weights(options: argparse.Namespace) -> None:
    require_extras("data", "torchtune")
    output = options.output.expanduser()
    if output.suffix != ".parquet":
        raise SetupError(
            f"OUT.parquet is {str(options.output)!r}: name a file with the ending .parquet"
        )
    for file in (output, output.with_suffix(".probe.jsonl")):
        if file.exists():
            raise SetupError(f"{file} exists: name another file, or move it away")
    require_writable("OUT.parquet", output.parent)
    cfg, tokenizer, dataset = _build(options.config, options.overrides)
    from tfidf_tune.training.export_weights import export_weights

    num_steps, num_sequences = export_weights(cfg, tokenizer, dataset, output)
    say(
        f"Written: {options.output}, {counted(num_sequences, 'sequence')} in "
        f"{counted(num_steps, 'step')}, seed {cfg.seed}"
    )


def _build(config: str, overrides: Sequence[str]) -> tuple[Any, Any, Any]:
    """Return a checked config, its tokenizer and its data set, whose messages are printed; no
    weights are read.
    """
    from tfidf_tune._config import LoRAFinetuneConfig, check_keys

    check_keys(config, overrides, LoRAFinetuneConfig)
    from tfidf_tune.training import build_dataset, check_config, instantiate, load_config

    cfg: Any = check_config(load_config(config, overrides), LoRAFinetuneConfig)
    tokenizer = instantiate(cfg, "tokenizer")
    if tokenizer.max_seq_len is None:
        tokenizer.max_seq_len = _model_max_seq_len(cfg)
    logger = logging.getLogger("tfidf_tune.data")
    handler = logging.StreamHandler(sys.stdout)
    level = logger.level
    handler.addFilter(visible_record)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        return cfg, tokenizer, build_dataset(cfg, tokenizer)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _model_max_seq_len(cfg: Any) -> int | None:
    """Return the longest sequence of the model, which training gives to a tokenizer without a
    limit.
    """
    limit = cfg.model.get("max_seq_len")
    if limit:
        return int(limit)
    from transformers import AutoConfig

    folder = str(cfg.checkpointer.checkpoint_dir)
    trusted = bool(cfg.checkpointer.get("trust_remote_code"))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    except (
        OSError,
        ValueError,
    ):  # unknown or no connection: the data set asks for a limit if it needs it
        return None
    return getattr(config.get_text_config(), "max_position_embeddings", None)
