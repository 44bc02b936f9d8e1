"""``tfidf-tune audit``: does a model recite these texts? From texts to a report, in one command.

The options that ``tfidf-tune probe`` shares are here too.
"""

import argparse
import json
import os
import re
import reprlib
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune._printing import option_names, say
from tfidf_tune._signals import AboveLimit
from tfidf_tune.commands import (
    add_tasks,
    add_text,
    key_values,
    require_extras,
    task_runner,
    whole_number,
)

if TYPE_CHECKING:
    from tfidf_tune.audit import AuditResult, AuditSpec
    from tfidf_tune.passages import ProbeSpec

_EXAMPLE = (
    "tfidf-tune audit runs/mine/checkpoint_100pct training.jsonl --controls held_out.jsonl "
    "--fail-above recited=0"
)


def main(arguments: list[str]) -> None:
    """Choose passages of texts, ask a model for them and report what it recites; or verify an
    audit.
    """
    if arguments[:1] == ["verify"]:
        _verify(arguments[1:])
        return
    parser = argparse.ArgumentParser(
        prog="tfidf-tune audit",
        description="Choose passages of texts, ask a model for them, and report what it recites.",
        epilog="exit codes: 0, done and within all limits; 1, a measure is above its limit; 2, an "
        "error, or no all-clear: nothing is shown, or a limit is undecided; 128 + n, ended by "
        f"signal n. Example: {_EXAMPLE}. `tfidf-tune audit verify FOLDER` recomputes an audit "
        "from its folder",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face model or PEFT adapter: folder, hub id")
    add(
        "sources",
        nargs="*",
        metavar="TEXT",
        help="text that the model may recite: .txt, .jsonl, .parquet, a folder",
    )
    add(
        "--holdout",
        metavar="MANIFEST",
        help="in place of TEXT: holdout.json of `tfidf-tune data holdout`, whose sides have "
        "targets and controls",
    )
    add("--tokenizer", help="folder or hub id; default: the model's")
    add(
        "--overwrite",
        action="store_true",
        help="choose the passages again if the output folder has some",
    )
    add_choosing(parser)
    add_asking(parser)
    # The fields of ServerSpec, and the estimate of the cost.
    group = parser.add_argument_group("a model behind an OpenAI-compatible server")
    add = _adder(group)
    add("--base-url", metavar="URL", help="of the server, up to /v1; MODEL is then its name there")
    add("--send", choices=("text", "ids"), help="prompts as text, or as token ids; default: text")
    add("--api-key-variable", metavar="NAME", help="environment variable; default: OPENAI_API_KEY")
    add("--num-concurrent", type=whole_number(1), help="requests at once; default: 1")
    add("--requests-per-minute", type=float, help="most requests; default: no limit")
    add("--timeout", type=float, help="seconds to wait for an answer; default: 600")
    add("--max-retries", type=whole_number(0), help="of a request that fails; default: 8")
    add = group.add_argument
    add(
        "--price",
        type=float,
        nargs=2,
        metavar=("IN", "OUT"),
        help="of a million tokens, for the estimate of the cost",
    )
    add(
        "--dry-run",
        action="store_true",
        help="choose the passages, print the number of requests, tokens and the cost",
    )
    options = parser.parse_args(arguments)
    if "base_url" in options:
        require_extras("audit", "server")
    from tfidf_tune.audit import audit, estimate

    spec = audit_spec(options, passages=probe_spec(options), runner=task_runner(options))
    note = progress(options)
    if options.dry_run:
        say(estimate(spec, options.price, note), file=sys.stderr)
    else:
        show(audit(spec, note, options.price), options)


def _verify(arguments: list[str]) -> None:
    """Recompute an audit, and print what is the same and what could not be checked; end with code
    2 if anything changed, or if it is not the audit of a given root hash.
    """
    parser = argparse.ArgumentParser(
        prog="tfidf-tune audit verify",
        description="Recompute an audit from its folder: all hashes, scores and figures.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output folder of an audit")
    parser.add_argument(
        "--root",
        type=_sha256,
        metavar="HASH",
        help="the root hash that you were given; that of the folder has to be the same",
    )
    options = parser.parse_args(arguments)
    from tfidf_tune.audit import verify

    verification = verify(options.folder)
    for check in verification.checks:
        detail = f" ({check.detail})" if check.detail else ""
        say(f"{check.state:>11}  {check.what}{detail}")
    is_given = options.root == verification.root
    say(f"Root hash, of all files: {verification.root}{', as given' if is_given else ''}")
    problems = []
    if verification.changed:
        problems.append(f"not as the audit left it: {', '.join(verification.changed)}")
    if options.root is not None and not is_given:
        problems.append(
            f"the root hash of {options.folder} is {verification.root}, and you were given "
            f"{options.root}: this is another audit, or it was made again"
        )
    if problems:
        sys.exit(f"error: {'; '.join(problems)}")


def _sha256(text: str) -> str:
    """Read an argparse option that is a SHA-256, in small letters."""
    if re.fullmatch("[0-9a-fA-F]{64}", text) is None:
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(text)} is not a SHA-256, which has 64 digits from 0 to 9 and a to f"
        )
    return text.lower()


def add_choosing(parser: argparse.ArgumentParser) -> None:
    """Add the options of the passages: the fields of :class:`~tfidf_tune.passages.ProbeSpec` but
    its sources.
    """
    add = _adder(parser)
    add(
        "--controls-source",
        "--controls",
        help="text that the model never saw; default: in an audit of a run's checkpoint what the "
        "run held out, else Python's documentation",
    )
    add_text(parser, None)
    add("--num-targets", type=whole_number(1), help="default: 100")
    add("--num-controls", type=whole_number(0), help="default: 100")
    add("--block-size", type=whole_number(2), help="tokens in a passage; default: 256")
    add(
        "--passages",
        choices=("duplicates", "near-duplicates", "random"),
        help="most frequent ones first, then random ones, or only random ones; default: duplicates",
    )
    add("--min-repeats", type=whole_number(2), help="least occurrences of a duplicate; default: 2")
    add(
        "--held-out",
        metavar="FILE",
        help="probe file of the training, whose controls are no targets",
    )
    add(
        "--without-eos",
        action="store_true",
        help="no passages with the tokenizer's EOS inside; always so for a server",
    )
    add("--seed", type=whole_number(0, 2**63 - 1), help="default: 0")
    add_tasks(parser)


def add_asking(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, of how it is asked, and of the report:
    fields of ``AuditSpec``.
    """
    add = _adder(parser)
    add(
        "--backend",
        choices=("transformers", "vllm"),
        help="what runs the model; default: transformers",
    )
    add("--base", help="model under an adapter; default: what the adapter names")
    add(
        "--reference",
        metavar="MODEL",
        help="the model before the training, which is asked the same: a folder, hub id, or base "
        "for the base of an adapter, which is switched off",
    )
    add("--reference-url", metavar="URL", help="server of the reference, MODEL is its name there")
    add(
        "--model-args",
        type=key_values,
        metavar="KEY=VALUE,...",
        help="more arguments of the harness's model, hf or vllm: load_in_4bit=True, "
        "parallelize=True, max_model_len=2048",
    )
    add("--prefix-lengths", type=whole_number(1), nargs="+", help="default: 32 50 100")
    add("--max-new-tokens", type=whole_number(1), help="default: 128")
    add(
        "--attacks",
        nargs="+",
        metavar="ATTACK",
        help="ways of asking, in this order: greedy, offset, truncated, noise, chat, sampling; "
        "default: greedy",
    )
    add(
        "--offset",
        type=whole_number(0),
        help="token of a passage where greedy prompts start; default: 0",
    )
    add("--offsets", type=whole_number(0), nargs="+", help="of the attack offset; default: 64 96")
    add(
        "--prompt-noise",
        type=float,
        help="replaced share of a prompt, of the attack noise; default: 0.1",
    )
    add("--num-samples", type=whole_number(1), help="of the attack sampling; default: 10")
    add("--temperature", type=float, help="of the attack sampling; default: 1")
    add(
        "--top-k", type=whole_number(0), help="of the attack sampling, 0 for all tokens; default: 0"
    )
    add(
        "--budget",
        type=whole_number(1),
        metavar="REQUESTS",
        help="most requests; attacks beyond it are left out",
    )
    add(
        "--bos",
        choices=("auto", "true", "false"),
        help="BOS before each prompt and passage; default: auto, as the model was trained",
    )
    add("--batch-size", type=whole_number(1), help="default: 64")
    add("--device", help="default: a GPU if there is one")
    add("--dtype", help="float32, bfloat16, ...; default: the checkpoint's")
    add("--output-dir", type=Path, help="default: runs/audit/NAME")
    add(
        "--fail-above",
        dest="limits",
        metavar="MEASURE=LIMIT,...",
        help="end with exit code 1 if a measure is above its limit: recited=0,extraction@0.01=0.02",
    )
    add(
        "--accept-unanswered",
        action="store_true",
        help="limits can pass although a server withheld answers",
    )
    add(
        "--accept-unproven",
        action="store_true",
        help="end with exit code 0 although the positive control showed nothing",
    )
    add("--show-passages", action="store_true", help="show passages in full, not as excerpts")
    parser.add_argument(
        "--json", action="store_true", help="print audit.json instead of the report"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="print all tables, not only the first"
    )


def _adder(parser: Any) -> Any:
    """Return an ``add_argument`` whose options are missing unless they are given: the defaults are
    the dataclasses'.
    """
    return lambda *names, **settings: parser.add_argument(
        *names, default=argparse.SUPPRESS, **settings
    )


def given(options: argparse.Namespace, kind: type) -> dict[str, Any]:
    """Return the options that are fields of a dataclass."""
    values = vars(options)
    return {
        field.name: values[field.name]
        for field in fields(kind)
        if values.get(field.name) is not None
    }


def progress(options: argparse.Namespace) -> Callable[[str], None]:
    """Return what prints the progress: to stderr if stdout gets JSON."""
    return partial(say, file=sys.stderr if options.json else None)


def probe_spec(options: argparse.Namespace) -> "ProbeSpec":
    """Return the passages that the options of :func:`add_choosing` ask for."""
    from tfidf_tune.passages import ProbeSpec

    spec = ProbeSpec(
        **given(options, ProbeSpec) | {"sources": tuple(options.sources)}, allow_fewer=True
    )
    if task_runner(options).executor != "local" or spec.passages == "near-duplicates":
        require_extras("with Slurm or --passages near-duplicates", "scale")
    return spec


def audit_spec(options: argparse.Namespace, **more: Any) -> "AuditSpec":
    """Return the audit that the options ask for."""
    from tfidf_tune.audit import AuditSpec, ServerSpec

    of_server = given(options, ServerSpec)
    if of_server and "base_url" not in of_server:
        raise ValueError(
            f"{option_names(of_server)}: for a model behind a server, which --base-url names"
        )
    server = ServerSpec(**of_server) if of_server else None
    bos = {"auto": None, "true": True, "false": False}[getattr(options, "bos", "auto")]
    spec = AuditSpec(**given(options, AuditSpec) | more | {"bos": bos}, server=server)
    if (
        spec.backend == "vllm"
    ):  # which reads it when it is imported: standard output is for the report
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    return spec


def show(result: "AuditResult", options: argparse.Namespace) -> None:
    """Print the report or ``audit.json``; end with code 1 if a limit is exceeded, 2 if nothing is
    shown.
    """
    from tfidf_tune.report import terminal_text

    if options.json:
        print(json.dumps(result.summary, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        say(f"The page: {result.page}\n")
        say(terminal_text(result.report, verbose=options.verbose).rstrip("\n"))
        if result.root is not None:
            say(f"\nRoot hash, of all files: {result.root}")
    if result.exceeded:
        raise AboveLimit(f"limit exceeded: {', '.join(result.exceeded)}")
    if result.unproven:
        sys.exit(f"error: no all-clear: {result.unproven}")
