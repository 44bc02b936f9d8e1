"""An audit from its specification to its report: choose passages, ask a model for them, judge what it recites."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tfidf_tune import _files
from tfidf_tune._checks import check_at_least, differences, require_base_url, require_choice
from tfidf_tune._printing import option_names
from tfidf_tune.audit._measures import Bound, parse_bounds, require_possible
from tfidf_tune.audit._report import audit_report
from tfidf_tune.probe import Attack, planned_attacks, run_of, within_budget
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.probe.positive_control import MOST_READ, REQUESTS_PER_PATH
from tfidf_tune.probe.run_identity import ALL_PASSAGES
from tfidf_tune.probe.sample_fields import MEMBERSHIP, POSITIVE_CONTROL, POSITIVE_CONTROL_NLL
from tfidf_tune.report import Report, require_report_folder, write_report
from tfidf_tune.results import import_results

if TYPE_CHECKING:
    from tfidf_tune.corpus.jobs import TaskRunner
    from tfidf_tune.passages import MadeProbe, Passage, ProbeSpec

Note = Callable[[str], object]  # takes what a person who waits should know

# Settings that have an effect on a single attack.
_ATTACK_OF_SETTING = {
    "offsets": "offset",
    "prompt_noise": "noise",
    "num_samples": "sampling",
    "temperature": "sampling",
    "top_k": "sampling",
}


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """An OpenAI-compatible server that answers for the model.

    Args:
        base_url (str): up to ``/v1``.
        send (Literal["text", "ids"]): prompts as text, or as token ids. Default: "text".
        api_key_variable (str): environment variable with the API key. Default: "OPENAI_API_KEY".
        num_concurrent (int): requests at once. Default: 1.
        requests_per_minute (float | None): most requests. Default: None, no limit.
        timeout (float): seconds to wait for an answer. Default: 600.
        max_retries (int): of a request that fails. Default: 8.
    """

    base_url: str
    send: Literal["text", "ids"] = "text"
    api_key_variable: str = "OPENAI_API_KEY"
    num_concurrent: int = 1
    requests_per_minute: float | None = None
    timeout: float = 600.0
    max_retries: int = 8

    def __post_init__(self) -> None:
        require_base_url(self.base_url)
        require_choice("send", self.send, ("text", "ids"))


@dataclass(frozen=True, kw_only=True)
class AuditSpec:
    """What to audit: a model, the passages that it is asked for, how it is asked, and which limits it must keep.

    Args:
        model (str): a Hugging Face model or PEFT adapter, a folder or hub id; behind a server its name there.
        passages (ProbeSpec | str | Path): texts to choose passages from, or a probe file.
        tokenizer (str | None): folder or hub id; a model behind a server needs it. Default: None, the model's.
        server (ServerSpec | None): answers for the model. Default: None, the model is loaded here.
        backend (Literal["transformers", "vllm"]): what runs a model that is loaded. Default: "transformers".
        base (str | None): model under an adapter. Default: None, what the adapter names.
        device (str | None): default: None, a GPU if there is one.
        dtype (str | None): "float32", "bfloat16", ... Default: None, the checkpoint's.
        model_args (dict[str, Any]): more arguments of the harness's model, ``hf`` or ``vllm``.
        reference (str | None): the model before training, whose likelihoods are compared. Default: None.
        attacks (Sequence[str] | None): ways of asking, see :func:`tfidf_tune.probe.planned_attacks`. Default: None,
            greedy ones, which the report then does not name.
        prefix_lengths (Sequence[int]): tokens of the prompts. Default: 32, 50, 100.
        max_new_tokens (int): tokens of a continuation. Default: 128.
        offset (int): token of a passage where greedy prompts start, without ``attacks``. Default: 0.
        offsets (Sequence[int]): of the attack "offset". Default: 64, 96.
        prompt_noise (float): replaced share of a prompt, of the attack "noise". Default: 0.1.
        num_samples (int): of the attack "sampling". Default: 10.
        temperature (float): of the attack "sampling". Default: 1.
        top_k (int): of the attack "sampling", 0 for all tokens. Default: 0.
        budget (int | None): most requests, likelihoods and the positive control among them; attacks beyond it are
            left out. Default: None, no limit.
        bos (bool | None): whether BOS is before each prompt and passage of token ids. Default: None, as the model was
            trained, see ``docs/audit.md``.
        batch_size (int): sequences in a forward pass. Default: 64.
        output_dir (str | Path | None): folder of passages, answers and report. Default: None, ``runs/audit/NAME``.
        limits (str | None): measures and what they must not exceed, ``recited=0,extraction@0.01=0.02``, see
            :func:`parse_bounds`. Default: None, no limits.
        accept_unanswered (bool): limits can pass although a server withheld answers. Default: False.
        accept_unproven (bool): limits can pass although the positive control showed nothing. Default: False.
        show_passages (bool): show passages in full. Default: False, excerpts.
        overwrite (bool): choose the passages again if the folder has some. Default: False.
        runner (TaskRunner | None): where tasks on files of text run. Default: None, this process.

    Raises:
        ValueError: If values are out of range, or do not fit the model or each other.
        FileNotFoundError: If the model looks like a folder and there is none.
    """

    model: str
    passages: "ProbeSpec | str | Path"
    tokenizer: str | None = None
    server: ServerSpec | None = None
    backend: Literal["transformers", "vllm"] = "transformers"
    base: str | None = None
    device: str | None = None
    dtype: str | None = None
    model_args: dict[str, Any] = field(default_factory=dict)
    reference: str | None = None
    attacks: Sequence[str] | None = None
    prefix_lengths: Sequence[int] = PREFIX_LENGTHS
    max_new_tokens: int = 128
    offset: int = 0
    offsets: Sequence[int] = (64, 96)
    prompt_noise: float = 0.1
    num_samples: int = 10
    temperature: float = 1.0
    top_k: int = 0
    budget: int | None = None
    bos: bool | None = None
    batch_size: int = 64
    output_dir: str | Path | None = None
    limits: str | None = None
    accept_unanswered: bool = False
    accept_unproven: bool = False
    show_passages: bool = False
    overwrite: bool = False
    runner: "TaskRunner | None" = None

    def __post_init__(self) -> None:
        require_choice("backend", self.backend, ("transformers", "vllm"))
        for length in self.prefix_lengths or [0]:
            check_at_least(1, prefix_lengths=length)
        budget = 1 if self.budget is None else self.budget
        check_at_least(1, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size, budget=budget)
        check_at_least(0, offset=self.offset)
        if self.server is not None:
            if self.tokenizer is None:
                raise ValueError("a model behind a server needs --tokenizer, in which tokens are counted")
            local = [name for name in ("base", "device", "dtype", "model_args") if getattr(self, name)]
            if self.backend != "transformers":
                local.append("backend")
            if local:
                raise ValueError(f"{option_names(local)}: for a model that is loaded here, not behind --base-url")
            if self.bos is not None and self.server.send == "text":
                raise ValueError("--bos is for token ids: before text the server adds BOS or not, see --send ids")
        elif _files.looks_like_path(self.model) and not (folder := Path(self.model).expanduser()).is_dir():
            raise FileNotFoundError(f"no folder {folder}: name a Hugging Face model or PEFT adapter, or a hub id")
        if self.offset and self.is_named:
            raise ValueError(f"--offset {self.offset} is without effect on --attacks: use --offsets {self.offset}")
        doubled = [name for name in ("batch_size", "device") if name in self.model_args]
        if doubled:
            raise ValueError(
                f"--model-args: {', '.join(doubled)} cannot be among them: use the options of the same name"
            )
        for name, attack in _ATTACK_OF_SETTING.items():
            is_set = getattr(self, name) != _DEFAULTS[name]
            if is_set and attack not in (self.attacks or ("greedy",)):
                raise ValueError(
                    f"{option_names([name])} is a setting of the attack {attack}, which is not asked: add {attack} "
                    "to --attacks, or leave it out"
                )
        if self.backend == "vllm" and find_spec("vllm") is None:
            raise ValueError("--backend vllm needs the package vllm: pip install vllm, or --backend transformers")
        if self.backend == "vllm" and self.device is not None:
            raise ValueError(f"vLLM takes no --device {self.device}: choose GPUs by CUDA_VISIBLE_DEVICES")

    @property
    def is_named(self) -> bool:
        """Whether the report names the attacks."""
        return self.attacks is not None or self.budget is not None

    @property
    def folder(self) -> Path:
        """The output folder: by default runs/audit/mine-checkpoint_100pct for runs/mine/checkpoint_100pct."""
        return output_folder(self.output_dir, self.model)


_DEFAULTS = {each.name: each.default for each in fields(AuditSpec)}


@dataclass(frozen=True)
class AuditResult:
    """What an audit gave: its report, written to ``page``, and the content of ``audit.json``, see ``docs/audit.md``."""

    report: Report
    summary: dict[str, Any]
    page: Path
    accept_unproven: bool = False

    @property
    def exceeded(self) -> list[str]:
        """Names of the measures that are above their limits."""
        return [limit["measure"] for limit in self.summary["limits"] if limit["outcome"] == "fail"]

    @property
    def unproven(self) -> str:
        """Why the audit is no all-clear although no limit is exceeded; "" if it is, or that was accepted."""
        control = self.summary["positive_control"]
        if control["state"] == "not shown" and not self.accept_unproven:
            return f"nothing is shown: {control['reason']}; --accept-unproven accepts that"
        undecided = [limit for limit in self.summary["limits"] if limit["outcome"] == "undecided"]
        return "; ".join(
            f"{limit['measure']}={limit['limit']:g} is undecided: {limit['reason']}" for limit in undecided
        )


def audit(spec: AuditSpec, note: Note = lambda text: None, prices: Sequence[float] | None = None) -> AuditResult:
    """Choose passages, ask a model for them, and write a report of what it recites.

    A second audit with the same output folder uses the passages of the first, and is refused if they were chosen from
    texts of other content or with other options, or while the first one runs. The answers of each audit are in another
    folder.

    Args:
        spec (AuditSpec): what to audit.
        note (Callable[[str], object]): takes what a person who waits should know. Default: nothing is said.
        prices (Sequence[float] | None): of a million tokens of prompts and of continuations, for the estimate of
            the cost. Default: None, none is given.

    Raises:
        ValueError: If the passages, options and limits do not fit each other; before the model is loaded.
        OSError: If a file cannot be read or written, or a server does not answer.
    """
    bounds = _bounds(
        spec.limits,
        spec.folder,
        spec.passages,
        max_new_tokens=spec.max_new_tokens,
        accept_unanswered=spec.accept_unanswered,
        accept_unproven=spec.accept_unproven,
    )
    with _files.locked_folder(spec.folder):
        return _asked(spec, bounds, note, prices)


def _asked(spec: AuditSpec, bounds: Sequence[Bound], note: Note, prices: Sequence[float] | None) -> AuditResult:
    from tfidf_tune.tasks import evaluate

    plan = _Plan(spec)
    passages = plan.passages(note)
    if spec.server is not None or prices is not None:
        note(plan.estimate(passages, prices))
    attacks = plan.affordable(len(passages))
    asked = {attack.name for attack in attacks}
    if left_out := [name for name in dict.fromkeys(attack.name for attack in plan.attacks) if name not in asked]:
        note(f"The budget of {spec.budget:,} requests leaves out: {', '.join(left_out)}.")
    obstacle = plan.prompt_obstacle(passages, note) if spec.server else None
    kinds = [passage.kind for passage in passages]
    tasks = ["tfidf_memorization_prefixes"]
    if "control" in kinds:
        tasks.append(POSITIVE_CONTROL)
    if problem := plan.likelihood_problem():
        note(f"Likelihoods are left out: {problem}.")
    else:
        tasks.append(MEMBERSHIP)
        if "control" in kinds:
            tasks.append(POSITIVE_CONTROL_NLL)
    longest = 0
    for passage in passages:
        for attack in attacks:
            _, reference = passage.divide(attack.prefix_length, spec.max_new_tokens, attack.offset)
            longest = max(longest, len(reference))
    require_possible(bounds, kinds.count("target"), kinds.count("control"), longest=longest, problem=problem)
    # A folder for each time that the model is asked: older answers stay as they are.
    evaluated = spec.folder / "evaluation" / datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
    _files.remove_leftovers(evaluated.parent)
    settings = {"probe_file": str(plan.probe_file), **plan.settings, "attacks": [*map(asdict, attacks)]}
    settings["prompt_obstacle"] = obstacle
    running: Any = {"batch_size": spec.batch_size, "device": spec.device, "model_name": plan.model_name}
    with plan.journal(note) if spec.server else nullcontext():
        # Tokenizer and passages are checked before the model is loaded.
        with _files.atomic_folder(evaluated) as unfinished:
            evaluate(plan.model_args, tasks, unfinished, metadata=settings, **running)
        return _judge(
            evaluated,
            spec.folder,
            bounds,
            accept_unproven=spec.accept_unproven,
            show_passages=spec.show_passages,
            inputs=plan.inputs(),
            accept_unanswered=spec.accept_unanswered,
        )


def estimate(spec: AuditSpec, prices: Sequence[float] | None = None, note: Note = lambda text: None) -> str:
    """Choose the passages of an audit, and describe the requests, tokens and cost of asking for them.

    ``prices`` are of a million tokens of prompts and of continuations.
    """
    _bounds(spec.limits, spec.folder, spec.passages, max_new_tokens=spec.max_new_tokens)
    with _files.locked_folder(spec.folder):
        plan = _Plan(spec)
        return plan.estimate(plan.passages(note), prices)


def audit_results(
    evaluated: str | Path,
    output_dir: str | Path | None = None,
    limits: str | None = None,
    *,
    accept_unanswered: bool = False,
    accept_unproven: bool = False,
    show_passages: bool = False,
) -> AuditResult:
    """Write the report of answers that lm-evaluation-harness has recorded of one model.

    Args:
        evaluated (str | Path): folder of the harness's output, with samples of the memorization task.
        output_dir (str | Path | None): folder of the report. Default: None, ``runs/audit/NAME``.
        limits (str | None): as of :class:`AuditSpec`.
        accept_unanswered (bool): as of :class:`AuditSpec`.
        accept_unproven (bool): as of :class:`AuditSpec`.
        show_passages (bool): show passages in full. Default: False, excerpts.

    Raises:
        ValueError: If the folder holds several runs, or none with samples.
    """
    folder = output_folder(output_dir, evaluated)
    bounds = _bounds(limits, folder, accept_unanswered=accept_unanswered, accept_unproven=accept_unproven)
    with _files.locked_folder(folder):
        return _judge(
            Path(evaluated).expanduser(),
            folder,
            bounds,
            accept_unproven=accept_unproven,
            show_passages=show_passages,
            inputs={},
            accept_unanswered=accept_unanswered,
        )


def choose_passages(
    spec: "ProbeSpec", tokenizer: str, file: Path, runner: "TaskRunner | None" = None, *, record: Path | None = None,
    overwrite: bool = False, note: Note = lambda text: None,
) -> "Sequence[Passage]":  # fmt: skip
    """Write a probe file, say what is in it, and return the passages.

    With ``record``, a file in which it is written what the passages follow from, an existing probe file is read instead
    if it still follows from the same. Else it is an error, unless ``overwrite`` replaces it.
    """
    from tfidf_tune.data import hf_tokenizer
    from tfidf_tune.passages import make_probe, read_probe_file, write_probe_file
    from tfidf_tune.passages.choosing import search_arguments

    loaded = hf_tokenizer(tokenizer)
    arguments = search_arguments(loaded, spec)
    if found := arguments["held_out"]:
        note(f"Left out of the targets: {found['passages']} passages that training held out, by {found['file']}.")
    with _files.work_folder(file.with_suffix(".search"), arguments, replace=overwrite) as work:
        if file.exists() and not overwrite:
            if record is None or not record.is_file():
                raise ValueError(f"{file} exists already: name another file, or replace it by --overwrite")
            recorded, now = json.loads(record.read_text(encoding="utf-8")), {"probe_file": _files.file_sha256(file)}
            if changed := differences(recorded, arguments | now):
                what = f"{file} was chosen with other options, or changed since: {'; '.join(changed)}"
                raise ValueError(f"{what}. Name another --output-dir, or --overwrite")
            note(f"Passages: from {file}.")
            return read_probe_file(file)
        made = make_probe(loaded, spec, work, runner)
        written = work / file.name
        write_probe_file(written, made.passages)
        if record is not None:  # first, so that it never stands beside passages of other arguments
            with _files.atomic_file(record) as temporary:
                text = json.dumps(arguments | {"probe_file": _files.file_sha256(written)}, indent=2)
                temporary.write_text(text + "\n", encoding="utf-8")
        written.replace(file)
    note(_chosen(made, spec))
    return made.passages


def output_folder(output_dir: str | Path | None, named: str | Path) -> Path:
    """Return the output folder, by default named after the end of a path."""
    name = "-".join(Path(named).expanduser().resolve().parts[-2:]).strip("/")
    return Path(output_dir or Path("runs/audit") / name).expanduser()


def _bounds(
    limits: str | None,
    folder: Path,
    passages: "ProbeSpec | str | Path" = "",
    *,
    max_new_tokens: float = math.inf,
    accept_unanswered: bool = False,
    accept_unproven: bool = False,
) -> list[Bound]:
    """Read limits, and check before any work that the report can be written."""
    bounds = []
    if limits is not None:
        bounds = parse_bounds(limits, accept_unanswered=accept_unanswered, accept_unproven=accept_unproven)
    if not isinstance(passages, (str, Path)):
        require_possible(bounds, passages.num_targets, passages.num_controls, longest=max_new_tokens)
    require_report_folder(folder / "report")
    _files.require_writable("--output-dir", folder)
    return bounds


class _Plan:
    """How a model is asked; nothing is read but the config of an adapter."""

    def __init__(self, spec: AuditSpec) -> None:
        from tfidf_tune.tasks import MODEL_NAME, SERVER_NAME, VLLM_NAME

        self.spec = spec
        names = ("prefix_lengths", "offsets", "prompt_noise", "num_samples", "temperature", "top_k")
        self.attacks = planned_attacks(spec.attacks or ["greedy"], **{name: getattr(spec, name) for name in names})
        if not spec.is_named:
            self.attacks = [replace(attack, name="", offset=spec.offset) for attack in self.attacks]
        self.settings: dict[str, Any] = {"max_new_tokens": spec.max_new_tokens, "offset": spec.offset}
        self.settings["prefix_lengths"] = list(spec.prefix_lengths)
        if spec.bos is not None:
            self.settings["bos"] = spec.bos
        if spec.reference is not None:
            self.settings["reference_model"] = spec.reference
        if spec.server is None:
            self.model_name = {"transformers": MODEL_NAME, "vllm": VLLM_NAME}[spec.backend]
            self.model_args = _model_arguments(spec)
        else:
            from tfidf_tune.tasks.server import ServerLM

            server = asdict(spec.server)
            self.settings["prompts"] = {"text": "text", "ids": "ids_to_text"}[server.pop("send")]
            self.model_name = SERVER_NAME
            self.model_args = {"model": spec.model, "tokenizer": spec.tokenizer, **server}
            self.server = ServerLM(**self.model_args)
        self.tokenizer = str(self.model_args.get("tokenizer") or self.model_args["pretrained"])
        self.probe_file, self.record = spec.folder / "probe.jsonl", spec.folder / "passages.json"
        if isinstance(spec.passages, (str, Path)):
            self.probe_file = Path(spec.passages).expanduser()
            return
        chosen = spec.passages
        if spec.server is not None:  # it ends its answers at EOS
            chosen = replace(chosen, without_eos=True)
        run = run_of(self.model_args)
        if chosen.held_out is None and run:
            # The file of all data sets of a run, where it has several, else the file of the only one.
            for name in (ALL_PASSAGES, "probe.jsonl"):
                held_out = Path(run["folder"]) / name
                if held_out.is_file():
                    chosen = replace(chosen, held_out=str(held_out))
                    break
        self.spec = replace(spec, passages=chosen)
        affordable = self.affordable(chosen.num_targets + chosen.num_controls)
        longest = max(attack.offset + attack.prefix_length for attack in affordable)
        if longest >= chosen.block_size:
            raise ValueError(
                f"--block-size is {chosen.block_size}, prompts take {longest} tokens (--prefix-lengths, --offset, "
                "--offsets): a passage needs one more"
            )

    def affordable(self, num_passages: int) -> list[Attack]:
        """Return the attacks that the budget covers for so many passages, beside the positive control."""
        if self.spec.budget is None:
            return self.attacks
        num_others = self.num_other_requests(num_passages)
        if self.spec.budget < num_others + num_passages:
            raise ValueError(
                f"a budget of {self.spec.budget} requests does not cover one prompt of each of {num_passages} passages "
                f"and {num_others} others, of likelihoods, the positive control and tests of a server: raise it, or "
                "choose fewer passages"
            )
        return within_budget(self.attacks, self.spec.budget - num_others, num_passages)

    def num_other_requests(self, num_passages: int) -> int:
        """Return the requests that are no attack: a likelihood of each passage, the positive control, tests."""
        num_tests = 0
        if self.spec.server is not None:
            from tfidf_tune.tasks.server import REQUESTS_PER_LIKELIHOOD_TEST, REQUESTS_PER_PROMPT_TEST

            num_tests = REQUESTS_PER_LIKELIHOOD_TEST + REQUESTS_PER_PROMPT_TEST * self.num_ways
        return num_passages + self.num_control_requests + num_tests

    @property
    def num_ways(self) -> int:
        """Ways of sending prompts: as a text, as a chat, or both."""
        return len({attack.name == "chat" for attack in self.attacks})

    @property
    def num_control_requests(self) -> int:
        """Requests of the positive control, at most: by text, chat and likelihoods; without controls there is none."""
        passages = self.spec.passages
        if not isinstance(passages, (str, Path)) and not passages.num_controls:
            return 0
        return REQUESTS_PER_PATH * (self.num_ways + 1)

    def passages(self, note: Note) -> "Sequence[Passage]":
        """Read the passages, or choose them unless an earlier audit with the same options has."""
        from tfidf_tune.passages import read_probe_file

        spec = self.spec
        if isinstance(spec.passages, (str, Path)):
            passages = read_probe_file(self.probe_file)
            if all(passage.kind != "target" for passage in passages):
                raise ValueError(
                    f"none of the {len(passages)} passages in {self.probe_file} is a target, so that there is nothing "
                    "to judge: name a probe file with passages of the training text"
                )
            return passages
        more: Any = {"runner": spec.runner, "record": self.record, "overwrite": spec.overwrite, "note": note}
        return choose_passages(spec.passages, self.tokenizer, self.probe_file, **more)

    def inputs(self) -> dict[str, Any]:
        """Return hashes of the passages, of what they were chosen from, and of the files of a model that is here."""
        found: dict[str, Any] = {"probe_file": _files.file_sha256(self.probe_file)}
        if self.probe_file.parent == self.record.parent and self.record.is_file():
            recorded = json.loads(self.record.read_text(encoding="utf-8"))
            found |= {key: recorded[key] for key in ("texts", "controls", "tokenizer", "held_out") if recorded.get(key)}
        folders = [Path(str(self.model_args[name])) for name in ("pretrained", "peft") if name in self.model_args]
        files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir()) if file.is_file()]
        return found | {"model": {str(file): _files.file_sha256(file) for file in files}}

    def estimate(self, passages: "Sequence[Passage]", prices: Sequence[float] | None) -> str:
        """Describe requests, tokens and the cost, likelihoods included."""
        num_passages = len(passages)
        attacks = self.affordable(num_passages)
        each = sum(attack.num_requests for attack in attacks)
        in_prompts = sum(attack.num_requests * attack.prefix_length for attack in attacks)
        # The positive control: a copy, a blank line and the prompt, or the prompt alone, on each path.
        num_control = self.num_control_requests
        shortest = min(self.spec.prefix_lengths)
        given = num_passages * in_prompts + sum(len(passage.token_ids) for passage in passages)
        given += num_control * (2 * shortest + MOST_READ)
        made = num_passages * (1 + self.spec.max_new_tokens * each) + num_control * MOST_READ
        number = num_passages * each + self.num_other_requests(num_passages)
        requests = f"{number:,} requests, about {given:,} tokens in prompts"
        cost = ""
        if prices is not None:
            most = (given * prices[0] + made * prices[1]) / 1e6
            cost = f"; at most about {most:,.2f} at {prices[0]:g} and {prices[1]:g} for a million tokens"
        return f"{requests} and at most {made:,} in continuations{cost}."

    def prompt_obstacle(self, passages: "Sequence[Passage]", note: Note) -> str | None:
        """Ask the server for a short and a long prompt; say what it does to them, "" if nothing, None if unknown."""
        from tfidf_tune.data import hf_tokenizer

        attacks = self.affordable(len(passages))
        longest = max(max(attack.prefix_length for attack in attacks), 2 * min(self.spec.prefix_lengths) + MOST_READ)
        tokenizer = hf_tokenizer(self.tokenizer)
        ids = max((passage.token_ids for passage in passages), key=len)
        ids = (ids * (1 + longest // len(ids)))[:longest]
        found: list[str | None] = []
        for is_chat in sorted({attack.name == "chat" for attack in attacks}):
            prompts: list[tuple[str | list[int], int]] = []
            for number in (max(1, len(ids) // 4), len(ids)):
                if self.settings["prompts"] == "text" or is_chat:
                    text = tokenizer.decode(ids[:number], skip_special_tokens=False)
                    prompts.append((text, len(tokenizer.encode(text, add_bos=False, add_eos=False))))
                else:
                    prompts.append((ids[:number], number))
            found.append(self.server.prompt_obstacle(prompts, is_chat=is_chat))
        if None in found:
            note("The server does not count the tokens of a prompt (usage): it is unknown if it changes prompts.")
        for obstacle in found:
            if obstacle:
                return obstacle
        return None if None in found else ""

    def likelihood_problem(self) -> str | None:
        """Say why the model gives no log-probabilities of prompts; a server is asked."""
        if self.spec.server is not None:
            problem = self.server.likelihood_problem()
            return problem and f"the server cannot be used for them, {problem}"
        if self.spec.backend == "vllm":
            os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the report
            from tfidf_tune.tasks._vllm import likelihood_problem

            return likelihood_problem(self.model_args)
        return None

    @contextmanager
    def journal(self, note: Note) -> Iterator[None]:
        """Keep the answers of a server until the audit is done: an interrupted audit of the same model goes on."""
        from tfidf_tune.tasks.server import ServerLM

        about = {"model": self.server.description()}
        with _files.work_folder(self.spec.folder / "unfinished", about, replace=self.spec.overwrite, keep=True) as work:
            file = work / "requests.jsonl"
            if self.spec.overwrite:
                file.unlink(missing_ok=True)
            self.model_args["journal"] = str(file)
            if known := ServerLM(**self.model_args).known:
                date = datetime.fromtimestamp(file.stat().st_mtime)
                note(f"Goes on: {len(known):,} answers of an audit that ended early on {date:%Y-%m-%d %H:%M} are used.")
            yield


def _model_arguments(spec: AuditSpec) -> dict[str, Any]:
    """Return the arguments of the harness's model that is loaded here."""
    model = str(Path(spec.model).expanduser()) if _files.looks_like_path(spec.model) else spec.model
    names = {"pretrained": model}
    if (Path(model) / "adapter_config.json").is_file():
        from tfidf_tune.probe import adapter_base

        names = {"pretrained": str(spec.base or adapter_base(model, "name it by --base")[0]), "peft": model}
    elif spec.base is not None:
        raise ValueError(f"--base is for an adapter, and {model} has no adapter_config.json: leave out --base")
    named = {name: getattr(spec, name) for name in ("tokenizer", "dtype") if getattr(spec, name)}
    return {**names, **named, **spec.model_args}


def _judge(
    evaluated: Path,
    folder: Path,
    bounds: Sequence[Bound],
    *,
    accept_unanswered: bool,
    accept_unproven: bool,
    show_passages: bool,
    inputs: dict[str, Any],
) -> AuditResult:
    """Write the report and ``audit.json``, which ``inputs`` are added to."""
    results = import_results([evaluated])
    folders = {checkpoint.run: checkpoint.folder for checkpoint in results.checkpoints}
    if len(folders) > 1:
        raise ValueError(f"{evaluated} holds the results of several runs: name one of {', '.join(folders.values())}")
    made = audit_report(
        results,
        bounds=bounds,
        show_passages=show_passages,
        accept_unanswered=accept_unanswered,
        accept_unproven=accept_unproven,
    )
    summary = {**made.summary, "inputs": inputs}
    if held_out := inputs.get("held_out"):
        left_out = f"{held_out['passages']} passages that training held out, by {held_out['file']}"
        made = replace(made, provenance={**made.provenance, "Left out": left_out})
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_report(made, folder / "report", more={"audit.json": lambda path: path.write_text(text, encoding="utf-8")})
    return AuditResult(made, summary, folder / "report" / "index.html", accept_unproven)


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
    if spec.without_eos:
        lines.append("No passage has EOS inside.")
    if made.unsearched_share:
        lines.append(
            f"Copies of {made.unsearched_share:.1%} of the passages in a sample of the text cannot be found: they have "
            "too few words, or too short tokens."
        )
    if made.num_repetitive:
        lines.append(f"Left out: {made.num_repetitive} passages that repeat a few tokens.")
    if spec.num_controls:
        refused = "candidates share text with the training data, or cannot be compared with it, and were rejected"
        lines.append(f"Controls: {num_controls}; {made.num_refused} {refused}.")
    if num_targets < spec.num_targets or num_controls < spec.num_controls:
        wanted = f"{spec.num_targets} targets and {spec.num_controls} controls were wanted"
        lines.append(f"There are no more passages of {spec.block_size} tokens without overlap: {wanted}.")
    if num_controls and spec.controls_source is None:
        known = "another domain than your text, and known to most pretrained models"
        lines.append(f"The controls are Python's documentation: {known}. Held-out text is better: --controls.")
    return "\n".join(lines)
