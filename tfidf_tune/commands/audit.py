"""``tfidf-tune audit``: does a model recite these texts? From texts to a report, in one command."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tfidf_tune._checks import differences
from tfidf_tune._files import atomic_file
from tfidf_tune._printing import say
from tfidf_tune.commands import require_extras
from tfidf_tune.commands._auditing import (
    Asking,
    add_asking,
    add_choosing,
    add_server,
    ask,
    choose_passages,
    plan_asking,
    probe_spec,
    report,
    report_folder,
    require_model,
)

if TYPE_CHECKING:
    from tfidf_tune.data import Passage

_EXAMPLE = "tfidf-tune audit runs/mine/checkpoint_100pct training.jsonl --controls held_out.jsonl --fail-above lms=20"


def main(arguments: list[str]) -> None:
    """Choose passages of texts, ask a model for them and report what it recites.

    A second run with the same output folder uses the passages of the first, and is refused if they were chosen from
    other texts or with other options.
    """
    parser = argparse.ArgumentParser(
        prog="tfidf-tune audit",
        description="Choose passages of texts, ask a model for them, and report what it recites.",
        epilog=f"example: {_EXAMPLE}",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face model or PEFT adapter: folder, hub id")
    add("sources", nargs="+", metavar="TEXT", help="text that the model may recite: .txt, .jsonl, .parquet, a folder")
    add("--tokenizer", help="folder or hub id; default: the model's")
    add("--overwrite", action="store_true", help="choose the passages again if the output folder has some")
    add_choosing(parser)
    add_asking(parser)
    add_server(parser)
    parser.set_defaults(allow_fewer=True)
    options = parser.parse_args(arguments)
    if options.base_url is None:
        require_model(options.model)
    else:
        if options.tokenizer is None:
            raise ValueError("a model behind a server needs --tokenizer: its own, or another one to count tokens in")
        local = [name for name in ("base", "device", "dtype", "model_args") if getattr(options, name)]
        local += ["backend"] * (options.backend != "transformers")
        if local:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in local)
            raise ValueError(f"{named}: for a model that is loaded here, not for one behind --base-url; leave them out")
        require_extras("audit", "server")
    folder, bounds = report_folder(options, options.model)
    asking = plan_asking(options, folder)
    attacks = asking.affordable(options.num_targets + options.num_controls)
    longest = max(attack.offset + attack.prefix_length for attack in attacks)
    if longest >= options.block_size:
        raise ValueError(
            f"prompts take the first {longest} tokens of a passage, and a passage has {options.block_size}: raise "
            "--block-size, or lower --prefix-lengths or --offsets"
        )
    num_passages = len(_passages(options, asking.tokenizer, folder))
    if options.base_url is not None or options.dry_run:
        say(_estimate(asking, num_passages, options.block_size, options.price), file=sys.stderr)
    if not options.dry_run:
        results = ask(asking, num_passages, folder / "probe.jsonl", folder / "evaluation")
        report(results, folder, bounds, show_passages=options.show_passages, as_json=options.json)


def _passages(options: argparse.Namespace, tokenizer: str, folder: Path) -> "Sequence[Passage]":
    """Choose the passages, unless an earlier run with the same options has."""
    from tfidf_tune.data import read_probe_file

    probe_file, record = folder / "probe.jsonl", folder / "passages.json"
    spec = probe_spec(options)
    settings = asdict(spec) | {"tokenizer": tokenizer, "sizes": _sizes(spec.sources)}
    if probe_file.is_file() and record.is_file() and not options.overwrite:
        if changed := differences(json.loads(record.read_text(encoding="utf-8")), settings):
            raise ValueError(
                f"{probe_file} was chosen with other options: {'; '.join(changed)}. Name another --output-dir, or "
                "choose the passages again by --overwrite"
            )
        if not options.json:
            say(f"Passages: those of {probe_file}.")
        return read_probe_file(probe_file)
    passages = choose_passages(options, spec, tokenizer, probe_file)
    with atomic_file(record) as file:
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return passages


def _sizes(sources: Sequence[str]) -> dict[str, int]:
    """Return the bytes of each file of the sources that are local."""
    paths = [Path(source).expanduser() for source in sources]
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    return {str(file): file.stat().st_size for file in files if file.is_file()}


def _estimate(asking: Asking, num_passages: int, num_tokens: int, prices: Sequence[float] | None) -> str:
    """Describe the requests, tokens and, with prices, the cost of an audit; likelihoods and chat templates included.

    A passage has ``num_tokens``; ``prices`` are of a million tokens of prompts and of continuations.
    """
    attacks = asking.affordable(num_passages)
    each = sum(attack.num_requests for attack in attacks)
    given = num_passages * (num_tokens + sum(attack.num_requests * attack.prefix_length for attack in attacks))
    made = num_passages * (1 + asking.settings["max_new_tokens"] * each)
    text = (
        f"{num_passages * (1 + each):,} requests, about {given:,} tokens in prompts and at most {made:,} in "
        "continuations"
    )
    if prices is not None:
        cost = (given * prices[0] + made * prices[1]) / 1e6
        text += f"; at most about {cost:,.2f} at {prices[0]:g} and {prices[1]:g} for a million tokens"
    return f"{text}."
