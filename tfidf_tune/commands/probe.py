"""``tfidf-tune probe``: make a probe file, audit one model with it, measure how fast a model relearns its passages."""

import argparse
import json
import math
import statistics
from dataclasses import fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune._files import atomic_file, looks_like_path, require_writable
from tfidf_tune._printing import say
from tfidf_tune.commands import whole_number

if TYPE_CHECKING:
    from tfidf_tune.data import MadeProbe, ProbeSpec

_PREFIX_LENGTHS = (32, 50, 100)


def main(arguments: list[str]) -> None:
    """Make a probe file, audit a model, or let it relearn.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune probe``.

    Raises:
        FileNotFoundError: If a file or folder does not exist.
        ValueError: If arguments, text, model and probe file do not fit each other.
    """
    parser = argparse.ArgumentParser(prog="tfidf-tune probe", description="Ask a model for its training text.")
    commands = parser.add_subparsers(required=True, metavar="make|audit|relearn")
    _add_make(commands.add_parser("make", help="choose passages of your own training text, duplicates first"))
    _add_audit(commands.add_parser("audit", help="ask a model for the passages, and write a page about it"))
    _add_relearn(commands.add_parser("relearn", help="count the training steps that bring a passage back"))
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
    add("--reference", metavar="FOLDER", help="model before the training: compare likelihoods with those under it")
    add("--prefix-lengths", type=whole_number(1), nargs="+", default=_PREFIX_LENGTHS, help="default: 32 50 100")
    add("--max-new-tokens", type=whole_number(1), default=128, help=default)
    add("--offset", type=whole_number(0), default=0, help=f"token of a passage where prompts start; {default}")
    add("--batch-size", type=whole_number(1), default=64, help=default)
    add("--device", help="default: a GPU if there is one")
    add("--dtype", help="float32, bfloat16, ...; default: the checkpoint's")
    add("--output-dir", type=Path, help="default: runs/audit/NAME")


def _add_relearn(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_relearn, dtype=None)
    add, default = parser.add_argument, "default: %(default)s"
    add("model", metavar="MODEL", help="folder of a Hugging Face model or PEFT adapter")
    add("--probe-file", type=Path, help="of `probe make`, or of a training run")
    add("--base", help="model under an adapter; default: what the adapter names")
    add("--tokenizer", help="default: the model's")
    add("--prefix-length", type=whole_number(1), default=32, help=f"tokens of a prompt; {default}")
    add("--max-new-tokens", type=whole_number(1), default=32, help=f"tokens to be recited; {default}")
    add("--max-steps", type=whole_number(0), default=50, help=f"after which a passage is given up; {default}")
    add("--learning-rate", type=float, default=1e-4, help=f"of AdamW; {default}")
    add("--device", help="default: a GPU if there is one")
    add("--output", type=Path, default=Path("relearning.json"), help=f"steps by passage; {default}")


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
    if options.reference is not None:
        metadata["reference_model"] = options.reference
    are_completions = all(passage.num_prompt is not None for passage in passages)  # asked for once
    if are_completions or tuple(options.prefix_lengths) != _PREFIX_LENGTHS:
        task, metadata["prefix_lengths"] = "tfidf_memorization_prefixes", list(options.prefix_lengths)
    results = folder / datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
    evaluate(
        model_args,
        [task, "tfidf_membership"],
        results,
        metadata=metadata,
        batch_size=options.batch_size,
        device=options.device,
    )
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


def _relearn(options: argparse.Namespace) -> None:
    _check_files(options)
    output = options.output.expanduser()
    if output.is_dir():
        raise ValueError(f"{output} is a folder: --output must name a file")
    require_writable("--output", output.parent)
    import torch
    from tqdm import tqdm

    from tfidf_tune.analysis import check_passages, load_model, relearning_steps
    from tfidf_tune.data import hf_tokenizer, read_probe_file
    from tfidf_tune.tasks._evaluate import check_model_settings

    names = _model_args(options)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_model_settings("float32", device, 1)
    passages = read_probe_file(options.probe_file.expanduser())
    check_passages(hf_tokenizer(names.get("tokenizer", names["pretrained"])), passages, options.prefix_length)
    base = names["pretrained"] if "peft" in names else None
    model = load_model(names.get("peft", names["pretrained"]), base=base, device=device, dtype=torch.float32)
    named = ("prefix_length", "max_new_tokens", "max_steps", "learning_rate")
    settings = {name: getattr(options, name) for name in named}
    with tqdm(total=len(passages), desc="Relearning passages") as bar:
        steps = relearning_steps(model, passages, **settings, progress=lambda _: bar.update())
    by_kind = {
        kind: [number for number, passage in zip(steps, passages, strict=True) if passage.kind == kind]
        for kind in ("target", "control")
    }
    lines = [_relearned(kind, own, options.max_steps) for kind, own in by_kind.items() if own]
    content = {"model": options.model, **settings, "passages": []}
    content["passages"] = [
        {"id": passage.id, "kind": passage.kind, "steps": number}
        for passage, number in zip(passages, steps, strict=True)
    ]
    if all(by_kind.values()):
        content["controls_minus_targets"], line = _difference(by_kind["target"], by_kind["control"], options.max_steps)
        lines.append(line)
    with atomic_file(output) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    say("\n".join([*lines, f"Written: {output}"]))


def _relearned(kind: str, steps: list[int | None], max_steps: int) -> str:
    num_back = sum(number is not None for number in steps)
    half = statistics.median([max_steps + 1 if number is None else number for number in steps])
    median = f"more than {max_steps}" if half > max_steps else f"{half:g}"
    return f"{kind.capitalize()}s: {num_back} of {len(steps)} recited within {max_steps} steps, median {median}."


def _difference(
    targets: list[int | None], controls: list[int | None], max_steps: int
) -> tuple[dict[str, float | None], str]:
    """Return how many steps more controls take than targets, on average, in numbers and in words."""
    import numpy as np

    from tfidf_tune.analysis import bootstrap_interval
    from tfidf_tune.analysis.intervals import MIN_UNITS

    ours, theirs = (
        np.array([max_steps if number is None else number for number in steps], dtype=np.float64)
        for steps in (targets, controls)
    )
    mean = float(theirs.mean() - ours.mean())
    low, high, number, _ = bootstrap_interval(
        lambda x, y, axis=-1: y.mean(axis) - x.mean(axis), ours, theirs, paired=False
    )
    found = {
        name: None if math.isnan(value) else value for name, value in (("mean", mean), ("low", low), ("high", high))
    }
    interval = "no interval" if math.isnan(low) else f"95 % interval over passages {low:+.2f} to {high:+.2f}"
    few = f"; too few for a verdict, it takes {MIN_UNITS} of each" if number < MIN_UNITS else ""
    return found, (
        f"Controls minus targets: {mean:+.2f} steps on average ({interval}{few}). A passage that is not recited counts "
        f"{max_steps}."
    )
