"""``tfidf-tune probe``: make a probe file, audit one model with it, measure how fast a model relearns its passages."""

import argparse
import json
import math
import statistics
from pathlib import Path

from tfidf_tune._files import atomic_file, require_writable
from tfidf_tune._printing import say
from tfidf_tune.commands import audit, whole_number


def main(arguments: list[str]) -> None:
    """Make a probe file, audit a model, or let it relearn."""
    parser = argparse.ArgumentParser(prog="tfidf-tune probe", description="Ask a model for its training text.")
    commands = parser.add_subparsers(required=True, metavar="make|audit|relearn")
    _add_make(commands.add_parser("make", help="choose passages of your own training text, duplicates first"))
    _add_audit(commands.add_parser("audit", help="ask a model for the passages, and write a page about it"))
    _add_relearn(commands.add_parser("relearn", help="count the training steps that bring a passage back"))
    options = parser.parse_args(arguments)
    options.run(options)


def _add_make(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_make, allow_fewer=False, json=False)
    add = parser.add_argument
    add("sources", nargs="+", metavar="SOURCE", help="training text: .txt, .jsonl, .parquet, a folder")
    add("--tokenizer", required=True, help="of the model: a folder or hub id")
    add("--output", required=True, type=Path, help="the probe file to write, .jsonl")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    audit.add_choosing(parser)


def _add_audit(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_audit, base_url=None)
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a Hugging Face model or PEFT adapter: folder, hub id")
    add("--results", type=Path, help="instead of MODEL: results that lm_eval wrote of one model")
    add("--probe-file", type=Path, help="of `probe make`, or of a training run")
    add("--tokenizer", help="default: the model's")
    audit.add_asking(parser)


def _add_relearn(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_relearn, dtype=None, model_args={})
    add, default = parser.add_argument, "default: %(default)s"
    add("model", metavar="MODEL", help="folder of a Hugging Face model or PEFT adapter")
    add("--probe-file", type=Path, required=True, help="of `probe make`, or of a training run")
    add("--base", help="model under an adapter; default: what the adapter names")
    add("--tokenizer", help="default: the model's")
    add("--prefix-length", type=whole_number(1), default=32, help=f"tokens of a prompt; {default}")
    add("--max-new-tokens", type=whole_number(1), default=32, help=f"tokens to be recited; {default}")
    add("--max-steps", type=whole_number(0), default=50, help=f"after which a passage is given up; {default}")
    add("--learning-rate", type=float, default=1e-4, help=f"of AdamW; {default}")
    add("--device", help="default: a GPU if there is one")
    add("--output", type=Path, default=Path("relearning.json"), help=f"steps by passage; {default}")


def _make(options: argparse.Namespace) -> None:
    output = _new_file(options.output)
    if output.exists() and not options.overwrite:
        raise ValueError(f"{output} exists already: name another file, or replace it by --overwrite")
    audit.choose_passages(options, audit.probe_spec(options), options.tokenizer, output)
    say(f"Written: {output}. Next: tfidf-tune probe audit MODEL --probe-file {output}")


def _new_file(path: Path) -> Path:
    """Return the path of an output that can be written, before the work for it begins."""
    output = path.expanduser()
    if output.exists() and not output.is_file():  # a device would be replaced, not written to
        raise ValueError(f"{output} is a folder or a device: --output must name a file")
    require_writable("--output", output.parent)
    return output


def _audit(options: argparse.Namespace) -> None:
    if (options.model is None) == (options.results is None) or (options.model and options.probe_file is None):
        raise ValueError("name either a MODEL to evaluate and its --probe-file, or the --results of a model")
    if options.model is not None:
        audit.require_model(options.model)
    folder, bounds = audit.report_folder(options, options.model or options.results)
    if options.results is not None:
        results = options.results.expanduser()
    else:
        from tfidf_tune.data import read_probe_file

        asking, probe_file = audit.plan_asking(options, folder), options.probe_file.expanduser()
        results = audit.ask(asking, len(read_probe_file(probe_file)), probe_file, folder / "evaluation")
    audit.report(results, folder, bounds, show_passages=options.show_passages, as_json=options.json)


def _relearn(options: argparse.Namespace) -> None:
    output = _new_file(options.output)
    audit.require_model(options.model)
    import torch
    from tqdm import tqdm

    from tfidf_tune.analysis import check_passages, load_model, relearning_steps
    from tfidf_tune.data import hf_tokenizer, read_probe_file
    from tfidf_tune.tasks._evaluate import check_model_settings

    names, passages = audit.model_arguments(options), read_probe_file(options.probe_file.expanduser())
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_model_settings("float32", device, 1)
    check_passages(hf_tokenizer(names.get("tokenizer", names["pretrained"])), passages, options.prefix_length)
    base = names["pretrained"] if "peft" in names else None
    model = load_model(names.get("peft", names["pretrained"]), base=base, device=device, dtype=torch.float32)
    named = ("prefix_length", "max_new_tokens", "max_steps", "learning_rate")
    settings = {name: getattr(options, name) for name in named}
    with tqdm(total=len(passages), desc="Relearning passages") as bar:
        steps = relearning_steps(model, passages, **settings, progress=lambda _: bar.update())
    rows = [
        {"id": passage.id, "kind": passage.kind, "steps": number}
        for passage, number in zip(passages, steps, strict=True)
    ]
    content = {"model": options.model, **settings, "passages": rows}
    lines, counted = [], {}
    for kind in ("target", "control"):
        own = [number for number, passage in zip(steps, passages, strict=True) if passage.kind == kind]
        if own:
            num_back = sum(number is not None for number in own)
            half = statistics.median([options.max_steps + 1 if number is None else number for number in own])
            median = f"more than {options.max_steps}" if half > options.max_steps else f"{half:g}"
            recited = f"{num_back} of {len(own)} recited within {options.max_steps} steps, median {median}"
            lines.append(f"{kind.capitalize()}s: {recited}.")
            counted[kind] = [options.max_steps if number is None else number for number in own]
    if len(counted) == 2:
        content["controls_minus_targets"], line = _difference(counted["target"], counted["control"])
        lines.append(f"{line} A passage that is not recited counts {options.max_steps}.")
    with atomic_file(output) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    say("\n".join([*lines, f"Written: {output}"]))


def _difference(targets: list[int], controls: list[int]) -> tuple[dict[str, float | None], str]:
    """Return how many steps more controls take than targets, on average, in numbers and in words."""
    import numpy as np

    from tfidf_tune.analysis import bootstrap_interval
    from tfidf_tune.analysis.intervals import MIN_UNITS

    ours, theirs = (np.array(steps, dtype=np.float64) for steps in (targets, controls))
    mean = float(theirs.mean() - ours.mean())
    low, high, number, _ = bootstrap_interval(
        lambda x, y, axis=-1: y.mean(axis) - x.mean(axis), ours, theirs, paired=False
    )
    is_known = not math.isnan(low)
    interval = f"95 % interval over passages {low:+.2f} to {high:+.2f}" if is_known else "no interval"
    few = f"; too few for a verdict, it takes {MIN_UNITS} of each" if number < MIN_UNITS else ""
    return (
        {"mean": mean, "low": low if is_known else None, "high": high if is_known else None},
        f"Controls minus targets: {mean:+.2f} steps on average ({interval}{few}).",
    )
