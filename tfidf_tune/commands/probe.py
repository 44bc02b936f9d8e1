"""``tfidf-tune probe``: make a probe file, audit one model with it."""

import argparse
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
        FileNotFoundError: If a file or folder that is named is not there.
        ValueError: If arguments, text, model and probe file do not go together.
    """
    parser = argparse.ArgumentParser(prog="tfidf-tune probe", description="Ask a model for its training text.")
    commands = parser.add_subparsers(required=True, metavar="make|audit")
    _add_make(commands.add_parser("make", help="choose passages of your own training text, duplicates first"))
    _add_audit(commands.add_parser("audit", help="ask a model for the passages, and write a page about it"))
    options = parser.parse_args(arguments)
    options.run(options)


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_make)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="training text: .txt, .jsonl, .parquet, a folder")
    parser.add_argument("--tokenizer", required=True, help="of the model: a folder or hub id")
    parser.add_argument("--output", required=True, type=Path, help="the probe file to write, .jsonl")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it is there")
    parser.add_argument("--controls-source", help="text that the model never saw; default: Python's documentation")
    parser.add_argument("--column", default="text", help="column of the text; default: %(default)s")
    parser.add_argument("--num-targets", type=whole_number(1), default=100, help="default: %(default)s")
    parser.add_argument("--num-controls", type=whole_number(0), default=100, help="default: %(default)s")
    parser.add_argument(
        "--block-size", type=whole_number(2), default=256, help="tokens in a passage; default: %(default)s"
    )
    parser.add_argument(
        "--passages",
        choices=("duplicates", "random"),
        default="duplicates",
        help="what occurs most often, filled up at random; or all at random; default: %(default)s",
    )
    parser.add_argument("--min-repeats", type=whole_number(2), default=2, help="of a duplicate; default: %(default)s")
    parser.add_argument("--seed", type=whole_number(0, 2**63 - 1), default=0, help="default: %(default)s")


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_audit)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a Hugging Face model or PEFT adapter: folder, hub id"
    )
    parser.add_argument("--results", type=Path, help="instead of MODEL: results that lm_eval wrote of one model")
    parser.add_argument("--probe-file", type=Path, help="of `probe make`, or of a training run")
    parser.add_argument("--base", help="model under an adapter; default: what the adapter names")
    parser.add_argument("--tokenizer", help="default: the model's")
    parser.add_argument(
        "--prefix-lengths", type=whole_number(1), nargs="+", default=_PREFIX_LENGTHS, help="default: 32 50 100"
    )
    parser.add_argument("--max-new-tokens", type=whole_number(1), default=128, help="default: %(default)s")
    parser.add_argument(
        "--offset", type=whole_number(0), default=0, help="token of a passage where prompts start; default: 0"
    )
    parser.add_argument("--batch-size", type=whole_number(1), default=64, help="default: %(default)s")
    parser.add_argument("--device", help="default: a GPU where there is one")
    parser.add_argument("--dtype", help="float32, bfloat16, ...; default: the checkpoint's")
    parser.add_argument("--output-dir", type=Path, help="default: runs/audit/NAME")


def _make(options: argparse.Namespace) -> None:
    output = options.output.expanduser()
    if output.exists() and not output.is_file():  # a device would be replaced, not written to
        raise ValueError(f"{output} is a folder or a device: --output must name a file")
    if output.exists() and not options.overwrite:
        raise ValueError(f"{output} is there already: name another file, or replace it by --overwrite")
    require_writable("--output", output.parent)
    from tfidf_tune.data import ProbeSpec, hf_tokenizer, make_probe, write_probe_file

    spec = ProbeSpec(
        sources=tuple(options.sources),
        column=options.column,
        controls_source=options.controls_source,
        num_targets=options.num_targets,
        num_controls=options.num_controls,
        block_size=options.block_size,
        passages=options.passages,
        min_repeats=options.min_repeats,
        seed=options.seed,
    )
    made = make_probe(hf_tokenizer(options.tokenizer), spec)
    write_probe_file(output, made.passages)
    say(_found(made, spec))
    say(f"Written: {output}. Next: tfidf-tune probe audit MODEL --probe-file {output}")


def _found(made: "MadeProbe", spec: "ProbeSpec") -> str:
    """What was found, in a few lines."""
    num_controls = len(made.passages) - spec.num_targets
    repeats = sorted(passage.num_injections for passage in made.passages[: made.num_duplicates])
    times = f", which stand {repeats[0]} to {repeats[-1]} times" if repeats else ""
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
        lines.append(f"Left out: {made.num_repetitive} passages of a few tokens over and over.")
    if num_controls:
        lines.append(
            f"Controls: {num_controls}; {made.num_refused} were refused for a stretch that stands in the training text."
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
    folder = (options.output_dir or Path("runs/audit") / _short_name(options.model or options.results)).expanduser()
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
    """Run the harness; returns the folder of the results, a new one each time."""
    if options.probe_file is None:
        raise ValueError("a MODEL needs a --probe-file: the one of its training run, or one of `tfidf-tune probe make`")
    from tfidf_tune.analysis import check_passages
    from tfidf_tune.data import hf_tokenizer, read_probe_file
    from tfidf_tune.tasks import evaluate

    probe_file = options.probe_file.expanduser()
    model_args = _model_args(options)
    # Before a model of gigabytes is loaded.
    tokenizer = hf_tokenizer(model_args.get("tokenizer", model_args["pretrained"]))
    check_passages(tokenizer, read_probe_file(probe_file), options.offset + max(options.prefix_lengths))
    metadata: dict[str, Any] = {
        "probe_file": str(probe_file),
        "max_new_tokens": options.max_new_tokens,
        "offset": options.offset,
    }
    if tuple(options.prefix_lengths) == _PREFIX_LENGTHS:
        task = "tfidf_memorization"
    else:
        task, metadata["prefix_lengths"] = "tfidf_memorization_prefixes", options.prefix_lengths
    results = folder / datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
    evaluate(model_args, [task], results, metadata=metadata, batch_size=options.batch_size, device=options.device)
    return results


def _model_args(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the harness's model."""
    model = str(Path(options.model).expanduser()) if looks_like_path(options.model) else options.model
    if looks_like_path(options.model) and not Path(model).is_dir():
        raise FileNotFoundError(f"there is no folder {model}: name a Hugging Face model or PEFT adapter, or a hub id")
    if (Path(model) / "adapter_config.json").is_file():
        names = {"pretrained": options.base or _base_of(model), "peft": model}
    elif options.base is not None:
        raise ValueError(f"--base is for an adapter, and {model} has no adapter_config.json: leave out --base")
    else:
        names = {"pretrained": model}
    return names | {name: getattr(options, name) for name in ("tokenizer", "dtype") if getattr(options, name)}


def _base_of(adapter: str) -> str:
    from peft import PeftConfig

    base = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if not base:
        raise ValueError(f"the adapter {adapter} names no base model: name it by --base")
    return str(base)


def _short_name(path: str | Path) -> str:
    """The last two parts: ``runs/mine/checkpoint_100pct`` is ``mine-checkpoint_100pct``."""
    return "-".join(Path(path).expanduser().resolve().parts[-2:]).strip("/")
