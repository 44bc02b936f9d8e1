"""``tfidf-tune audit``: does a model recite these texts? From texts to a report, in one command.

The options and steps that ``tfidf-tune probe`` shares are here too.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune._checks import differences
from tfidf_tune._files import atomic_file, looks_like_path, require_writable
from tfidf_tune._printing import say
from tfidf_tune.commands import add_tasks, key_values, require_extras, task_runner, whole_number

if TYPE_CHECKING:
    from tfidf_tune.audit import Bound
    from tfidf_tune.data import MadeProbe, Passage, ProbeSpec
    from tfidf_tune.probe import Attack

_EXAMPLE = "tfidf-tune audit runs/mine/checkpoint_100pct training.jsonl --controls held_out.jsonl --fail-above lms=20"
_DEFAULT = "default: %(default)s"


@dataclass(frozen=True)
class Asking:
    """A model and how it is asked for passages."""

    model_name: str  # of the harness
    model_args: dict[str, Any]
    attacks: "list[Attack]"  # without a budget
    budget: int | None
    settings: dict[str, Any]  # of the tasks
    batch_size: int
    device: str | None

    @property
    def tokenizer(self) -> str:
        """Folder or hub id of the tokenizer that passages are counted in."""
        return str(self.model_args.get("tokenizer") or self.model_args["pretrained"])

    def affordable(self, num_passages: int) -> "list[Attack]":
        """Return the attacks that the budget covers for so many passages."""
        from tfidf_tune.probe import within_budget

        return within_budget(self.attacks, self.budget, num_passages)

    def estimate(self, num_passages: int, num_tokens: int, prices: Sequence[float] | None) -> str:
        """Describe requests, tokens and the cost, likelihoods included, for passages of so many tokens.

        ``prices`` are of a million tokens of prompts and of continuations.
        """
        attacks = self.affordable(num_passages)
        each = sum(attack.num_requests for attack in attacks)
        given = num_passages * (num_tokens + sum(attack.num_requests * attack.prefix_length for attack in attacks))
        made = num_passages * (1 + self.settings["max_new_tokens"] * each)
        text = (
            f"{num_passages * (1 + each):,} requests, about {given:,} tokens in prompts and at most {made:,} in "
            "continuations"
        )
        if prices is not None:
            cost = (given * prices[0] + made * prices[1]) / 1e6
            text += f"; at most about {cost:,.2f} at {prices[0]:g} and {prices[1]:g} for a million tokens"
        return f"{text}."


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
        local = ["base", "device", "dtype", "model_args"]
        given = [f"--{name.replace('_', '-')}" for name in local if getattr(options, name)]
        given += ["--backend"] if options.backend != "transformers" else []
        if named := ", ".join(given):
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
        say(asking.estimate(num_passages, options.block_size, options.price), file=sys.stderr)
    if not options.dry_run:
        results = ask(asking, num_passages, folder / "probe.jsonl", folder / "evaluation")
        report(results, folder, bounds, options)


def _passages(options: argparse.Namespace, tokenizer: str, folder: Path) -> "Sequence[Passage]":
    """Choose the passages, unless an earlier run with the same options has."""
    from tfidf_tune.data import read_probe_file

    probe_file, record = folder / "probe.jsonl", folder / "passages.json"
    spec = probe_spec(options)
    paths = [Path(source).expanduser() for source in spec.sources]
    local = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path]) if file.is_file()]
    settings = asdict(spec) | {"tokenizer": tokenizer, "sizes": {str(file): file.stat().st_size for file in local}}
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


def add_choosing(parser: argparse.ArgumentParser) -> None:
    """Add the options of the passages: the fields of :class:`~tfidf_tune.data.ProbeSpec` but its sources."""
    add = parser.add_argument
    add("--controls-source", "--controls", help="text that the model never saw; default: Python's documentation")
    add("--column", default="text", help=f"column of the text; {_DEFAULT}")
    sample_help = f"what a document of a .txt file is; {_DEFAULT}"
    add("--sample-by", choices=("line", "paragraph", "document"), default="line", help=sample_help)
    add("--num-targets", type=whole_number(1), default=100, help=_DEFAULT)
    add("--num-controls", type=whole_number(0), default=100, help=_DEFAULT)
    add("--block-size", type=whole_number(2), default=256, help=f"tokens in a passage; {_DEFAULT}")
    passages_help = f"most frequent ones first, then random ones, or only random ones; {_DEFAULT}"
    add("--passages", choices=("duplicates", "near-duplicates", "random"), default="duplicates", help=passages_help)
    add("--min-repeats", type=whole_number(2), default=2, help=f"least occurrences of a duplicate; {_DEFAULT}")
    add("--seed", type=whole_number(0, 2**63 - 1), default=0, help=_DEFAULT)
    add_tasks(parser)


def add_asking(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model, of how it is asked, and of the report."""
    add = parser.add_argument
    add("--backend", choices=("transformers", "vllm"), default="transformers", help=f"what runs the model; {_DEFAULT}")
    add("--base", help="model under an adapter; default: what the adapter names")
    add("--reference", metavar="FOLDER", help="model before the training: compare likelihoods with those under it")
    add("--model-args", type=key_values, default={}, metavar="KEY=VALUE,...", help=(
        "more arguments of the harness's model, hf or vllm: load_in_4bit=True, parallelize=True, max_model_len=2048"
    ))  # fmt: skip
    add("--prefix-lengths", type=whole_number(1), nargs="+", default=(32, 50, 100), help="default: 32 50 100")
    add("--max-new-tokens", type=whole_number(1), default=128, help=_DEFAULT)
    add("--attacks", nargs="+", metavar="ATTACK", help=(
        "ways of asking, in this order: greedy, offset, truncated, noise, chat, sampling; default: greedy"
    ))  # fmt: skip
    add("--offset", type=whole_number(0), default=0, help=f"token of a passage where greedy prompts start; {_DEFAULT}")
    add("--offsets", type=whole_number(0), nargs="+", default=(64, 96), help="of the attack offset; default: 64 96")
    add("--prompt-noise", type=float, default=0.1, help=f"replaced share of a prompt, of the attack noise; {_DEFAULT}")
    add("--num-samples", type=whole_number(1), default=10, help=f"of the attack sampling; {_DEFAULT}")
    add("--temperature", type=float, default=1.0, help=f"of the attack sampling; {_DEFAULT}")
    add("--top-k", type=whole_number(0), default=0, help=f"of the attack sampling, 0 for all tokens; {_DEFAULT}")
    add("--budget", type=whole_number(1), metavar="REQUESTS", help="most requests; attacks beyond it are left out")
    add("--batch-size", type=whole_number(1), default=64, help=_DEFAULT)
    add("--device", help="default: a GPU if there is one")
    add("--dtype", help="float32, bfloat16, ...; default: the checkpoint's")
    add("--output-dir", type=Path, help="default: runs/audit/NAME")
    add("--fail-above", metavar="MEASURE=LIMIT,...", help=(
        "end with exit code 1 if a measure is above its limit: lms=20,extraction@0.01=0.02"
    ))  # fmt: skip
    add("--verbose", action="store_true", help="print all tables, not only the first")
    add("--json", action="store_true", help="print audit.json instead of the report")
    add("--show-passages", action="store_true", help="show passages in full, not as excerpts")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model behind a server."""
    add = parser.add_argument_group("a model behind an OpenAI-compatible server").add_argument
    add("--base-url", metavar="URL", help="of the server, up to /v1; MODEL is then its name there")
    add("--send", choices=("text", "ids"), default="text", help=f"prompts as text, or as token ids; {_DEFAULT}")
    add("--api-key-variable", metavar="NAME", default="OPENAI_API_KEY", help=f"environment variable; {_DEFAULT}")
    add("--num-concurrent", type=whole_number(1), default=1, help=f"requests at once; {_DEFAULT}")
    add("--requests-per-minute", type=float, help="most requests; default: no limit")
    add("--timeout", type=float, default=600.0, help=f"seconds to wait for an answer; {_DEFAULT}")
    add("--max-retries", type=whole_number(0), default=8, help=f"of a request that fails; {_DEFAULT}")
    add("--price", type=float, nargs=2, metavar=("IN", "OUT"), help="of a million tokens, for the estimate of the cost")
    add("--dry-run", action="store_true", help="choose the passages, print the number of requests, tokens and the cost")


def probe_spec(options: argparse.Namespace) -> "ProbeSpec":
    """Return the passages that the options of :func:`add_choosing` ask for."""
    from tfidf_tune.data import ProbeSpec

    return ProbeSpec(**{field.name: getattr(options, field.name) for field in fields(ProbeSpec)})


def choose_passages(options: argparse.Namespace, spec: "ProbeSpec", tokenizer: str, file: Path) -> "Sequence[Passage]":
    """Write a probe file, say what is in it, and return the passages."""
    from tfidf_tune.data import hf_tokenizer, make_probe, write_probe_file

    runner = task_runner(options)
    if runner.needs_datatrove or spec.passages == "near-duplicates":
        require_extras("with several jobs or --passages near-duplicates", "scale")
    work = file.with_suffix(".search").expanduser()
    made = make_probe(hf_tokenizer(tokenizer), spec, work, runner, replace_work=options.overwrite)
    write_probe_file(file, made.passages)
    shutil.rmtree(work)
    say(_chosen(made, spec), file=sys.stderr if options.json else None)
    return made.passages


def _chosen(made: "MadeProbe", spec: "ProbeSpec") -> str:
    """Describe the passages in a few lines."""
    num_targets = sum(passage.kind == "target" for passage in made.passages)
    num_controls = len(made.passages) - num_targets
    repeats = sorted(passage.num_injections for passage in made.passages[: made.num_duplicates])
    counts = dict.fromkeys(f"{count:,}" for count in (repeats[:1] + repeats[-1:]))
    times = f", which occur {' to '.join(counts)} times" if counts else ""
    starts = ", ".join(f"{start.phrase} {count}" for start, count in sorted(made.starts.items()))
    lines = [
        f"Text: {made.num_documents:,} documents, {'about ' * made.is_estimate}{made.num_tokens:,} tokens.",
        f"Duplicated stretches of at least {spec.block_size} tokens: {len(made.stretch_repeats):,}, with "
        f"{sum(made.stretch_repeats):,} occurrences.",
        f"Targets: {num_targets}; {made.num_duplicates} are duplicates{times}, "
        f"{num_targets - made.num_duplicates} were drawn at random.",
        f"Targets by where they start: {starts}.",
    ]
    repetitive = f"Left out: {made.num_repetitive} passages that repeat a few tokens."
    refused = f"{made.num_refused} candidates share text with the training data and were rejected."
    fewer = (
        f"No more passages of {spec.block_size} tokens without overlap were found: {spec.num_targets} targets and "
        f"{spec.num_controls} controls were wanted."
    )
    other_domain = (
        "The controls are Python's documentation: another domain than your text, and known to most pretrained models. "
        "Held-out text of your own is better: --controls-source."
    )
    lines += [repetitive] if made.num_repetitive else []
    lines += [f"Controls: {num_controls}; {refused}"] if spec.num_controls else []
    lines += [fewer] if num_targets < spec.num_targets or num_controls < spec.num_controls else []
    lines += [other_domain] if num_controls and spec.controls_source is None else []
    return "\n".join(lines)


def report_folder(options: argparse.Namespace, named: str | Path) -> "tuple[Path, list[Bound]]":
    """Return the output folder, below which a report can be written, and the limits of the measures.

    By default it is named after a path: runs/audit/mine-checkpoint_100pct for runs/mine/checkpoint_100pct.
    """
    from tfidf_tune.audit import parse_bounds
    from tfidf_tune.report import require_report_folder

    bounds = [] if options.fail_above is None else parse_bounds(options.fail_above)
    name = "-".join(Path(named).expanduser().resolve().parts[-2:]).strip("/")
    folder = Path(options.output_dir or Path("runs/audit") / name).expanduser()
    require_report_folder(folder / "report")
    require_writable("--output-dir", folder)
    return folder, bounds


def plan_asking(options: argparse.Namespace, folder: Path) -> Asking:
    """Plan what a model is asked; nothing is read but the config of an adapter.

    Raises:
        ValueError: If options are out of range, or do not fit the model or each other.
    """
    from tfidf_tune.probe import planned_attacks
    from tfidf_tune.tasks import MODEL_NAME, SERVER_NAME, VLLM_NAME

    named = options.attacks is not None or options.budget is not None  # else the report names no attack
    if options.offset and named:
        raise ValueError(
            f"--offset is {options.offset}, but the attacks have their own starts: use --attacks offset --offsets "
            f"{options.offset}"
        )
    if options.backend == "vllm" and find_spec("vllm") is None:
        raise ValueError("--backend vllm needs the package vllm: pip install vllm, or --backend transformers")
    if options.backend == "vllm" and options.device is not None:
        raise ValueError(f"vLLM takes no --device {options.device}: choose GPUs by CUDA_VISIBLE_DEVICES")
    names = ("prefix_lengths", "offsets", "prompt_noise", "num_samples", "temperature", "top_k")
    attacks = planned_attacks(options.attacks or ["greedy"], **{name: getattr(options, name) for name in names})
    if not named:
        attacks = [replace(attack, name="", offset=options.offset) for attack in attacks]
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("max_new_tokens", "offset")}
    settings["prefix_lengths"] = list(options.prefix_lengths)
    if options.reference is not None:
        settings["reference_model"] = options.reference
    if options.base_url is None:
        model_name = {"transformers": MODEL_NAME, "vllm": VLLM_NAME}[options.backend]
        model_args = model_arguments(options)
    else:
        settings["prompts"] = {"text": "text", "ids": "ids_to_text"}[options.send]
        model_name = SERVER_NAME
        of_server = ("num_concurrent", "requests_per_minute", "timeout", "max_retries", "api_key_variable")
        model_args = {name: getattr(options, name) for name in ("model", "base_url", "tokenizer", *of_server)}
        model_args["journal"] = str(folder / "requests.jsonl")  # outlives a crash
    return Asking(model_name, model_args, attacks, options.budget, settings, options.batch_size, options.device)


def model_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the harness's model that is loaded here."""
    model = str(Path(options.model).expanduser()) if looks_like_path(options.model) else options.model
    names = {"pretrained": model}
    if (Path(model) / "adapter_config.json").is_file():
        from tfidf_tune.probe import adapter_base

        names = {"pretrained": str(options.base or adapter_base(model, "name it by --base")[0]), "peft": model}
    elif options.base is not None:
        raise ValueError(f"--base is for an adapter, and {model} has no adapter_config.json: leave out --base")
    named = {name: getattr(options, name) for name in ("tokenizer", "dtype") if getattr(options, name)}
    return {**names, **named, **options.model_args}


def require_model(model: str) -> None:
    """Raise a ``FileNotFoundError`` if a model that looks like a folder is none; called before anything is imported."""
    if looks_like_path(model) and not (folder := Path(model).expanduser()).is_dir():
        raise FileNotFoundError(f"no folder {folder}: name a Hugging Face model or PEFT adapter, or a hub id")


def ask(asking: Asking, num_passages: int, probe_file: Path, folder: Path) -> Path:
    """Run the harness; return the folder of the results, a new one each time."""
    from tfidf_tune.tasks import evaluate

    attacks = asking.affordable(num_passages)
    asked = {attack.name for attack in attacks}
    if left_out := [name for name in dict.fromkeys(attack.name for attack in asking.attacks) if name not in asked]:
        say(f"The budget of {asking.budget:,} requests leaves out: {', '.join(left_out)}.", file=sys.stderr)
    tasks = ["tfidf_memorization_prefixes"]
    if problem := _likelihood_problem(asking):
        say(f"Likelihoods are left out: {problem}.", file=sys.stderr)
    else:
        tasks.append("tfidf_membership")
    results = folder / datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
    evaluate(  # it checks tokenizer and passages before it loads the model
        asking.model_args,
        tasks,
        results,
        metadata={"probe_file": str(probe_file), **asking.settings, "attacks": [*map(asdict, attacks)]},
        batch_size=asking.batch_size,
        device=asking.device,
        model_name=asking.model_name,
    )
    return results


def _likelihood_problem(asking: Asking) -> str | None:
    """Say why a model gives no log-probabilities of prompts; a server is asked."""
    from tfidf_tune.tasks import SERVER_NAME, VLLM_NAME

    if asking.model_name == SERVER_NAME:
        from tfidf_tune.tasks._server import ServerLM

        problem = ServerLM(**asking.model_args).likelihood_problem()
        return problem and f"the server cannot be used for them, {problem}"
    if asking.model_name == VLLM_NAME:
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the report
        from tfidf_tune.tasks._vllm import likelihood_problem

        return likelihood_problem(asking.model_args)
    return None


def report(evaluated: Path, folder: Path, bounds: "Sequence[Bound]", options: argparse.Namespace) -> None:
    """Write the report and ``audit.json``, and print one of them; end with code 1 if a limit is exceeded."""
    from tfidf_tune.audit import audit_report
    from tfidf_tune.compare import import_results
    from tfidf_tune.report import terminal_text, write_report

    results = import_results([evaluated])
    folders = {one.run: one.folder for one in results.checkpoints}
    if len(folders) > 1:
        raise ValueError(
            f"{evaluated} holds the results of {len(folders)} runs, {', '.join(folders.values())}: name one of them, "
            "or compare them by `tfidf-tune compare`"
        )
    made = audit_report(results, bounds=bounds, show_passages=options.show_passages)
    text = json.dumps(made.summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_report(made, folder / "report", more={"audit.json": lambda path: path.write_text(text, encoding="utf-8")})
    if options.json:
        print(text, end="")
    else:
        say(terminal_text(made, verbose=options.verbose))
        say(f"The page: {folder / 'report' / 'index.html'}")
    if exceeded := [one["measure"] for one in made.summary["limits"] if one["exceeded"]]:
        sys.exit(f"limit exceeded: {', '.join(exceeded)}")
