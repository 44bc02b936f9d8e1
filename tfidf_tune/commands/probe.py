"""``tfidf-tune probe``: make a probe file, audit one model with it."""

import argparse
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune._files import looks_like_path, require_writable
from tfidf_tune._printing import say
from tfidf_tune.commands import whole_number

if TYPE_CHECKING:
    from tfidf_tune.data import MadeProbe, ProbeSpec

_PREFIX_LENGTHS = (32, 50, 100)


def main(arguments: list[str]) -> None:
    """Make a probe file or audit a model.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune probe``.

    Raises:
        FileNotFoundError: If a file or folder does not exist.
        ValueError: If arguments, text, model and probe file do not fit each other.
    """
    parser = argparse.ArgumentParser(prog="tfidf-tune probe", description="Ask a model for its training text.")
    commands = parser.add_subparsers(required=True, metavar="make|audit")
    _add_make(commands.add_parser("make", help="choose passages of your own training text, duplicates first"))
    _add_audit(commands.add_parser("audit", help="ask a model for the passages, and write a page about it"))
    options = parser.parse_args(arguments)
    options.run(options)


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_make)
    add, default = parser.add_argument, "default: %(default)s"
    add("sources", nargs="+", metavar="SOURCE", help="training text: .txt, .jsonl, .parquet, a folder")
    add("--tokenizer", required=True, help="of the model: a folder or hub id")
    add("--output", required=True, type=Path, help="the probe file to write, .jsonl")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    add("--controls-source", help="text that the model never saw; default: Python's documentation")
    add("--column", default="text", help=f"column of the text; {default}")
    sample_help = f"what a document of a .txt file is; {default}"
    add("--sample-by", choices=("line", "paragraph", "document"), default="line", help=sample_help)
    add("--num-targets", type=whole_number(1), default=100, help=default)
    add("--num-controls", type=whole_number(0), default=100, help=default)
    add("--block-size", type=whole_number(2), default=256, help=f"tokens in a passage; {default}")
    passages_help = f"most frequent passages first, then random ones; or only random ones; {default}"
    add("--passages", choices=("duplicates", "random"), default="duplicates", help=passages_help)
    add("--min-repeats", type=whole_number(2), default=2, help=f"least occurrences of a duplicate; {default}")
    add("--seed", type=whole_number(0, 2**63 - 1), default=0, help=default)


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_audit)
    add, default = parser.add_argument, "default: %(default)s"
    add("model", nargs="?", metavar="MODEL", help="a Hugging Face model or PEFT adapter: folder, hub id")
    add("--results", type=Path, help="instead of MODEL: results that lm_eval wrote of one model")
    add("--probe-file", type=Path, help="of `probe make`, or of a training run")
    add("--base", help="model under an adapter; default: what the adapter names")
    add("--tokenizer", help="default: the model's")
    add("--prefix-lengths", type=whole_number(1), nargs="+", default=_PREFIX_LENGTHS, help="default: 32 50 100")
    add("--max-new-tokens", type=whole_number(1), default=128, help=default)
    add("--offset", type=whole_number(0), default=0, help=f"token of a passage where prompts start; {default}")
    add("--batch-size", type=whole_number(1), default=64, help=default)
    add("--device", help="default: a GPU if there is one")
    add("--dtype", help="float32, bfloat16, ...; default: the checkpoint's")
    add("--output-dir", type=Path, help="default: runs/audit/NAME")


def _make(options: argparse.Namespace) -> None:
    output = options.output.expanduser()
    if output.exists() and not output.is_file():  # a device would be replaced, not written to
        raise ValueError(f"{output} is a folder or a device: --output must name a file")
    if output.exists() and not options.overwrite:
        raise ValueError(f"{output} exists already: name another file, or replace it by --overwrite")
    require_writable("--output", output.parent)
    from tfidf_tune.data import ProbeSpec, hf_tokenizer, make_probe, write_probe_file

    spec = ProbeSpec(**{field.name: getattr(options, field.name) for field in fields(ProbeSpec)})
    made = make_probe(hf_tokenizer(options.tokenizer), spec)
    write_probe_file(output, made.passages)
    say(_found(made, spec))
    say(f"Written: {output}. Next: tfidf-tune probe audit MODEL --probe-file {output}")


def _found(made: "MadeProbe", spec: "ProbeSpec") -> str:
    """Describe what was found, in a few lines."""
    num_controls = len(made.passages) - spec.num_targets
    repeats = sorted(passage.num_injections for passage in made.passages[: made.num_duplicates])
    counts = " to ".join(dict.fromkeys(f"{count:,}" for count in (repeats[0], repeats[-1]))) if repeats else ""
    times = f", which occur {counts} times" if repeats else ""
    starts = ", ".join(f"{start.phrase} {count}" for start, count in sorted(made.starts.items()))
    lines = [
        f"Text: {made.num_documents:,} documents, {made.num_tokens:,} tokens.",
        f"Duplicated stretches of at least {spec.block_size} tokens: {len(made.stretch_repeats):,}, with "
        f"{sum(made.stretch_repeats):,} occurrences.",
        f"Targets: {spec.num_targets}; {made.num_duplicates} are duplicates{times}, "
        f"{spec.num_targets - made.num_duplicates} were drawn at random.",
        f"Targets by where they start: {starts}.",
    ]
    if made.num_repetitive:
        lines.append(f"Left out: {made.num_repetitive} passages that repeat a few tokens.")
    if num_controls:
        lines.append(
            f"Controls: {num_controls}; {made.num_refused} candidates share text with the training data and were "
            "rejected."
        )
    if num_controls and spec.controls_source is None:
        lines.append(
            "The controls are Python's documentation: another domain than your text, and known to most pretrained "
            "models. Held-out text of your own is better: --controls-source."
        )
    return "\n".join(lines)


def _audit(options: argparse.Namespace) -> None:
    if (options.model is None) == (options.results is None):
        raise ValueError("name either a MODEL to evaluate or the --results of one")
    # For example mine-checkpoint_100pct for runs/mine/checkpoint_100pct.
    name = "-".join(Path(options.model or options.results).expanduser().resolve().parts[-2:]).strip("/")
    folder = (options.output_dir or Path("runs/audit") / name).expanduser()
    if options.model is not None:
        _check_files(options)
    from tfidf_tune.report import audit_report, require_report_folder, terminal_text, write_report
    from tfidf_tune.results import import_results

    require_report_folder(folder / "report")
    require_writable("--output-dir", folder)
    evaluated = options.results.expanduser() if options.results else _evaluate(options, folder / "evaluation")
    results = import_results([evaluated])
    folders = {one.run: one.folder for one in results.checkpoints}
    if len(folders) > 1:
        raise ValueError(
            f"{evaluated} holds the results of {len(folders)} runs, {', '.join(folders.values())}: name one of them, "
            "or compare them by `tfidf-tune compare`"
        )
    report = audit_report(results)
    write_report(report, folder / "report")
    say(terminal_text(report))
    say(f"The page: {folder / 'report' / 'index.html'}")


def _evaluate(options: argparse.Namespace, folder: Path) -> Path:
    """Run the harness; return the folder of the results, a new one each time."""
    from tfidf_tune.analysis import check_passages
    from tfidf_tune.data import hf_tokenizer, read_probe_file
    from tfidf_tune.tasks import evaluate

    probe_file = options.probe_file.expanduser()
    model_args = _model_args(options)
    # Check before a model of gigabytes is loaded.
    tokenizer = hf_tokenizer(model_args.get("tokenizer", model_args["pretrained"]))
    passages = read_probe_file(probe_file)
    check_passages(tokenizer, passages, options.offset + max(options.prefix_lengths))
    metadata = {
        "probe_file": str(probe_file),
        "max_new_tokens": options.max_new_tokens,
        "offset": options.offset,
    }
    task = "tfidf_memorization"
    are_completions = all(passage.num_prompt is not None for passage in passages)  # asked for once
    if are_completions or tuple(options.prefix_lengths) != _PREFIX_LENGTHS:
        task, metadata["prefix_lengths"] = "tfidf_memorization_prefixes", options.prefix_lengths
    results = folder / datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
    evaluate(model_args, [task], results, metadata=metadata, batch_size=options.batch_size, device=options.device)
    return results


def _check_files(options: argparse.Namespace) -> None:
    """Check that model and probe file exist, before torch is imported."""
    if options.probe_file is None:
        raise ValueError("a MODEL needs a --probe-file: the one of its training run, or one of `tfidf-tune probe make`")
    model = Path(options.model).expanduser()
    if looks_like_path(options.model) and not model.is_dir():
        raise FileNotFoundError(f"no folder {model}: name a Hugging Face model or PEFT adapter, or a hub id")
    if not options.probe_file.expanduser().is_file():
        raise FileNotFoundError(f"no probe file {options.probe_file}: `tfidf-tune probe make` writes one")


def _model_args(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the harness's model."""
    model = options.model
    if looks_like_path(model):
        model = str(Path(model).expanduser())
    names = {"pretrained": model}
    if (Path(model) / "adapter_config.json").is_file():
        from tfidf_tune.analysis import adapter_base

        base = options.base or adapter_base(model, "name it by --base")[0]
        names = {"pretrained": str(base), "peft": model}
    elif options.base is not None:
        raise ValueError(f"--base is for an adapter, and {model} has no adapter_config.json: leave out --base")
    return names | {name: getattr(options, name) for name in ("tokenizer", "dtype") if getattr(options, name)}
