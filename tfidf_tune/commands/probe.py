"""``tfidf-tune probe``: make a probe file, audit a model with it."""

import argparse
from pathlib import Path

from tfidf_tune._files import require_writable
from tfidf_tune._printing import option_names, say
from tfidf_tune.commands import audit, task_runner

_OF_RESULTS = ("output_dir", "limits", "accept_unanswered", "accept_unproven", "show_passages")
"""Options of an audit of recorded answers."""


def main(arguments: list[str]) -> None:
    """Make a probe file, or audit a model."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune probe", description="Ask a model for its training text."
    )
    commands = parser.add_subparsers(required=True, metavar="make|audit")
    make = commands.add_parser(
        "make", help="choose passages of your own training text, duplicates first"
    )
    make.set_defaults(run=_make)
    add = make.add_argument
    add(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="training text: .txt, .jsonl, .parquet, a folder",
    )
    add("--tokenizer", required=True, help="of the model: a folder or hub id")
    add("--output", required=True, type=Path, help="the probe file to write, .jsonl")
    add("--overwrite", action="store_true", help="replace the output if it exists")
    audit.add_choosing(make)
    ask = commands.add_parser(
        "audit", help="ask a model for the passages, and write a page about it"
    )
    ask.set_defaults(run=_audit)
    add = ask.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a Hugging Face model or PEFT adapter: folder, hub id",
    )
    add("--results", type=Path, help="instead of MODEL: results that lm_eval wrote of one model")
    add("--probe-file", type=Path, help="of `probe make`, or of a training run")
    add("--tokenizer", help="default: the model's")
    audit.add_asking(ask)
    options = parser.parse_args(arguments)
    options.run(options)


def _make(options: argparse.Namespace) -> None:
    output = options.output.expanduser()
    if output.exists() and not output.is_file():  # a device would be replaced, not written to
        raise ValueError(f"{output} is a folder or a device: --output must name a file")
    require_writable("--output", output.parent)
    spec = audit.probe_spec(options)
    runner = task_runner(options)
    from tfidf_tune.audit import choose_passages

    choose_passages(spec, options.tokenizer, output, runner, overwrite=options.overwrite, note=say)
    say(f"Written: {output}. Next: tfidf-tune probe audit MODEL --probe-file {output}")


def _audit(options: argparse.Namespace) -> None:
    if (options.model is None) == (options.results is None) or (
        options.model and options.probe_file is None
    ):
        raise ValueError(
            "name either a MODEL to evaluate and its --probe-file, or the --results of a model"
        )
    from tfidf_tune.audit import AuditSpec, audit_results
    from tfidf_tune.audit import audit as audit_model

    if options.results is None:
        result = audit_model(
            audit.audit_spec(options, passages=options.probe_file), audit.progress(options)
        )
    else:
        chosen = audit.given(options, AuditSpec)
        ignored = [name for name in chosen if name not in _OF_RESULTS]
        if options.probe_file is not None:
            ignored.append("probe_file")
        if ignored:
            raise ValueError(
                f"{option_names(ignored)}: for a MODEL that is asked, not for --results, whose "
                "answers are recorded"
            )
        result = audit_results(options.results, **chosen)
    audit.show(result, options)
