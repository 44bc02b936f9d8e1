"""``tfidf-tune data``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfidf_tune._checks import SetupError
from tfidf_tune._files import require_writable
from tfidf_tune._printing import counted, say, visible_record
from tfidf_tune.commands import add_tasks, add_text, require_extras, task_runner, whole_number


def main(arguments: list[str]) -> None:
    """Show what a training config makes of its data set, or remove copies from text."""
    parser = argparse.ArgumentParser(prog="tfidf-tune data", description="Look at the data of a config; remove copies.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    default = "default: %(default)s"
    preview = commands.add_parser(
        "preview",
        help="print examples with the tokens that are learned marked, and count tokens",
        description="Print examples of a training config with the tokens that are learned marked. No weights are read.",
        epilog="example: tfidf-tune data preview mine/lora_chat dataset.source=FILE checkpointer.checkpoint_dir=MODEL",
    )
    export = commands.add_parser(
        "export-weights",
        help="write the tokens of training with their weights, for trainers without a hook for a loss",
        description="Write token ids, labels and weights of a training config as Parquet, in the order of training.",
        epilog="example: tfidf-tune data export-weights mine/lora OUT.parquet dataset.source=FILE "
        "checkpointer.checkpoint_dir=MODEL",
    )
    for command, run in ((preview, _preview), (export, _export_weights)):
        command.set_defaults(run=run)
        command.add_argument("config", metavar="CONFIG", help="path of a config, or a name that `tfidf-tune ls` lists")
        if command is export:
            command.add_argument("output", type=Path, metavar="OUT.parquet", help="the file to write, which is new")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as of `tfidf-tune run`")
    preview.add_argument("--number", type=whole_number(0), default=3, metavar="N", help=f"examples to print; {default}")
    dedup = commands.add_parser("dedup", help="remove copies from text that may be larger than memory")
    dedup.set_defaults(run=_dedup)
    add = dedup.add_argument
    add("sources", nargs="+", metavar="IN", help=".txt, .jsonl, .parquet or folders")
    add("output", type=Path, metavar="OUT", help="the folder to write")
    add("--method", choices=("exact", "minhash"), default="minhash", help=default)
    add("--threshold", type=float, default=0.8, help=f"Jaccard similarity of copies, by minhash; {default}")
    add("--ngram", type=whole_number(1), default=5, help=f"words of an n-gram, by minhash; {default}")
    add_text(dedup)
    add_tasks(dedup)
    options = parser.parse_args(arguments)
    options.run(options)


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
        whole, kept = report[unit], report[f"kept_{unit}"]
        share = f" ({(whole - kept) / whole:.1%})" if whole else ""
        say(f"{unit.capitalize()}: {whole:,} read, {whole - kept:,} removed{share}, {kept:,} kept.")
    for cluster in report["largest_clusters"]:
        say(f"  {cluster['documents']:>7,} copies of: {' '.join(cluster['beginning'].split())} ...")
    say(f"Written: {options.output}, with report.json")


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
        raise SetupError(f"OUT.parquet is {str(options.output)!r}: name a file with the ending .parquet")
    for file in (output, output.with_suffix(".probe.jsonl")):
        if file.exists():
            raise SetupError(f"{file} exists: name another file, or move it away")
    require_writable("OUT.parquet", output.parent)
    cfg, tokenizer, dataset = _build(options.config, options.overrides)
    from tfidf_tune.training.export_weights import export_weights

    num_steps, num_sequences = export_weights(cfg, tokenizer, dataset, output)
    say(
        f"Written: {options.output}, {counted(num_sequences, 'sequence')} in {counted(num_steps, 'step')}, seed "
        f"{cfg.seed}"
    )


def _build(config: str, overrides: Sequence[str]) -> tuple[Any, Any, Any]:
    """Return a checked config, its tokenizer and its data set, whose messages are printed; no weights are read."""
    from tfidf_tune._config import LoRAFinetuneConfig, check_keys

    check_keys(config, overrides, LoRAFinetuneConfig)
    from tfidf_tune.training import build_dataset, check_config, instantiate, load_config

    cfg: Any = check_config(load_config(config, overrides), LoRAFinetuneConfig)
    tokenizer = instantiate(cfg, "tokenizer")
    if tokenizer.max_seq_len is None:
        tokenizer.max_seq_len = _model_max_seq_len(cfg)
    logger, handler = logging.getLogger("tfidf_tune.data"), logging.StreamHandler(sys.stdout)
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
    """Return the longest sequence of the model, which training gives to a tokenizer without a limit."""
    if limit := cfg.model.get("max_seq_len"):
        return int(limit)
    from transformers import AutoConfig

    folder, trusted = str(cfg.checkpointer.checkpoint_dir), bool(cfg.checkpointer.get("trust_remote_code"))
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    except (OSError, ValueError):  # unknown or no connection: the data set asks for a limit if it needs it
        return None
    return getattr(config.get_text_config(), "max_position_embeddings", None)
