"""The model of an audit is asked, by the tasks of the harness."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune import _files
from tfidf_tune.audit._choosing import Note
from tfidf_tune.audit._measures import Bound, require_possible
from tfidf_tune.audit._model_files import folder_of
from tfidf_tune.audit._plan import Plan
from tfidf_tune.audit._reference import Reference, described, switched_off, token_nlls
from tfidf_tune.probe import Attack
from tfidf_tune.probe.positive_control import MOST_READ
from tfidf_tune.probe.prompts import cut_passage
from tfidf_tune.probe.sample_fields import MEMBERSHIP, POSITIVE_CONTROL, POSITIVE_CONTROL_NLL

if TYPE_CHECKING:
    from lm_eval.api.model import LM

    from tfidf_tune.passages import Passage
    from tfidf_tune.tasks.server import ServerLM

REFERENCE = "reference"
"""In the folder of the answers, the answers of the reference."""


def connect(plan: Plan) -> "ServerLM | None":
    """Make the client of the server that answers for the model; None if the model is loaded here.

    Raises:
        ValueError: If a setting of the server is wrong, or there is no API key where one is named.
    """
    if plan.spec.server is None:
        return None
    from tfidf_tune.tasks.server import ServerLM

    return ServerLM(**plan.model_args)


def _connect_reference(plan: Plan) -> "ServerLM | None":
    """Make the client of the server that answers for the reference; None if there is none."""
    if plan.reference is None or plan.reference.kind != "server":
        return None
    from tfidf_tune.tasks.server import ServerLM

    return ServerLM(**plan.reference.model_args)


def require_limits_possible(
    plan: Plan, passages: "Sequence[Passage]", bounds: Sequence[Bound], problem: str | None = None
) -> None:
    """Raise a ValueError if no answer could make a limit pass; ``problem`` is why there are no
    likelihoods, if that is known.
    """
    kinds = [passage.kind for passage in passages]
    attacks = plan.affordable(len(passages))
    longest = _longest_reference(passages, attacks, plan.spec.max_new_tokens)
    require_possible(
        bounds, kinds.count("target"), kinds.count("control"), longest=longest, problem=problem
    )


@contextmanager
def ask(
    plan: Plan,
    server: "ServerLM | None",
    passages: "Sequence[Passage]",
    bounds: Sequence[Bound],
    note: Note,
) -> Iterator[Path]:
    """Ask the model for the passages; yield the folder of its answers.

    Answers of servers are also recorded in journals until the block ends, so that an interrupted
    audit can be continued.

    Raises:
        ValueError: If no answer could make a limit pass, before the model is loaded; or if the
            server of the reference changes prompts, or is that of the model.
        OSError: If a file cannot be written, or a server does not answer.
    """
    from tfidf_tune.tasks.evaluation import likelihood_problem

    spec = plan.spec
    reference_server = _connect_reference(plan)
    attacks = plan.affordable(len(passages))
    asked = {attack.name for attack in attacks}
    left_out = [
        name for name in dict.fromkeys(attack.name for attack in plan.attacks) if name not in asked
    ]
    if left_out:
        note(f"The budget of {spec.budget:,} requests leaves out: {', '.join(left_out)}.")
    obstacle = None
    if server is not None:
        obstacle = _prompt_obstacle(plan, server, "The server", passages, attacks, note)
        _say_who_answers(server, note)
        problem = server.likelihood_problem()
        if problem is not None:
            problem = f"the server cannot be used for them, {problem}"
    else:
        problem = likelihood_problem(plan.model_name, plan.model_args)
    kinds = [passage.kind for passage in passages]
    tasks = ["tfidf_memorization_prefixes"]
    if "control" in kinds:
        tasks.append(POSITIVE_CONTROL)
    if problem is not None:
        note(f"Likelihoods are left out: {problem}.")
    else:
        tasks.append(MEMBERSHIP)
        if "control" in kinds:
            tasks.append(POSITIVE_CONTROL_NLL)
    require_limits_possible(plan, passages, bounds, problem)
    # Only the audited model has to show that it reads.
    reference_tasks = [
        task for task in tasks if task not in (POSITIVE_CONTROL, POSITIVE_CONTROL_NLL)
    ]
    if server is not None and reference_server is not None:
        # Tested now, because it is asked last: after hours, and answers that were paid for.
        _require_comparable(plan, server, reference_server, passages, attacks, note)
        if MEMBERSHIP in reference_tasks:
            problem = reference_server.likelihood_problem()
            if problem is not None:
                reference_tasks.remove(MEMBERSHIP)
                note(
                    "Likelihoods of the reference are left out: its server cannot be used for "
                    f"them, {problem}."
                )
    settings = {
        "probe_file": str(plan.probe_file),
        **plan.settings,
        "attacks": [asdict(attack) for attack in attacks],
        "prompt_obstacle": obstacle,
    }
    if plan.reference is not None and plan.reference.kind == "model":
        settings["reference_model"] = folder_of(plan.reference.model_args)
    # A folder for each time that the model is asked: older answers stay as they are.
    evaluated = (
        spec.folder / "evaluation" / datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%S.%f")
    )
    _files.remove_leftovers(evaluated.parent)
    with _journal(plan, server, reference_server, note):
        # Tokenizer and passages are checked before the model is loaded.
        with _files.atomic_folder(evaluated) as unfinished:
            if plan.reference is None:
                _evaluate(plan, server, tasks, unfinished, settings)
            else:
                _evaluate_both(
                    plan,
                    plan.reference,
                    server,
                    reference_server,
                    tasks,
                    reference_tasks,
                    unfinished,
                    settings,
                )
        yield evaluated


def _evaluate(
    plan: Plan, model: "LM | None", tasks: list[str], output: Path, settings: dict[str, Any]
) -> None:
    from tfidf_tune.tasks.evaluation import evaluate

    evaluate(
        plan.model_args,
        tasks,
        output,
        metadata=settings,
        batch_size=plan.spec.batch_size,
        device=plan.spec.device,
        model_name=plan.model_name,
        model=model,
    )


def _evaluate_both(
    plan: Plan,
    reference: Reference,
    server: "ServerLM | None",
    reference_server: "ServerLM | None",
    tasks: list[str],
    reference_tasks: list[str],
    output: Path,
    settings: dict[str, Any],
) -> None:
    """Ask the model, and then its reference, into a folder beside the answers of the model.

    An adapter is loaded once, and switched off for its reference.
    """
    from tfidf_tune.tasks.evaluation import evaluate, loaded_model
    from tfidf_tune.tasks.membership import reference_nlls_by

    spec = plan.spec
    model: LM | None = server
    if reference.kind == "base":
        model = loaded_model(plan.model_name, plan.model_args, spec.batch_size, spec.device)
        with reference_nlls_by(partial(token_nlls, model, reference)):
            _evaluate(plan, model, tasks, output, settings)
    else:
        _evaluate(plan, model, tasks, output, settings)

    # The reference is asked for the same.
    asked_of_reference = {**settings, "run": described(reference, plan.model_args)}
    asked_of_reference.pop("reference_model", None)
    other: LM | None = reference_server
    if reference.kind == "base":
        other = model
    elif reference.kind == "model" and server is not None:
        asked_of_reference["prompts"] = "token_ids"
    with switched_off(model, reference) if reference.kind == "base" else nullcontext():
        evaluate(
            reference.model_args,
            reference_tasks,
            output / REFERENCE,
            metadata=asked_of_reference,
            batch_size=spec.batch_size,
            device=spec.device,
            model_name=reference.model_name,
            model=other,
        )


def _longest_reference(
    passages: "Sequence[Passage]", attacks: Sequence[Attack], max_new_tokens: int
) -> int:
    """Return the most tokens that an answer is compared with."""
    longest = 0
    for passage in passages:
        for attack in attacks:
            _, reference = cut_passage(passage, attack.prefix_length, max_new_tokens, attack.offset)
            longest = max(longest, len(reference))
    return longest


def _require_comparable(
    plan: Plan,
    server: "ServerLM",
    reference_server: "ServerLM",
    passages: "Sequence[Passage]",
    attacks: Sequence[Attack],
    note: Note,
) -> None:
    """Test the server of the reference as that of the model was.

    Raises:
        ValueError: If it changes prompts, so that the reference would recite less for that alone,
            or if the audited model itself answers.
        ConnectionError: If it does not answer.
    """
    obstacle = _prompt_obstacle(
        plan, reference_server, "The server of the reference", passages, attacks, note
    )
    _say_who_answers(reference_server, note)
    if obstacle and not plan.spec.accept_unproven:
        raise ValueError(
            f"{reference_server.base_url} cannot answer for the reference: {obstacle}, so that the "
            "reference would recite less for that alone. Serve it without, or give "
            "--accept-unproven"
        )
    # llama.cpp answers for each name by the model that it has.
    is_same_address = reference_server.base_url == server.base_url
    answered_as = reference_server.answered_as
    if is_same_address and answered_as is not None and answered_as == server.answered_as:
        raise ValueError(
            f"{server.base_url} answers for {server.model} and for the reference "
            f"{reference_server.model} by one model ({answered_as}): serve the "
            "model before training at another address, and name that by --reference-url"
        )


def _say_who_answers(server: "ServerLM", note: Note) -> None:
    """Say so if a server calls the model by another name: some servers take any name for the only
    model that they have.
    """
    if server.answered_as not in (None, server.model):
        note(f"{server.base_url} answers for {server.model} as {server.answered_as}.")


def _prompt_obstacle(
    plan: Plan,
    server: "ServerLM",
    subject: str,
    passages: "Sequence[Passage]",
    attacks: Sequence[Attack],
    note: Note,
) -> str | None:
    """Ask the server for a short and a long prompt; say what it does to them, "" if nothing, None
    if unknown.
    """
    from tfidf_tune.data import hf_tokenizer

    tokenizer = hf_tokenizer(plan.tokenizer)
    # As long as the longest prompt: of an attack, or of the positive control, which has a copy of
    # the passage in front.
    longest_attack = max(attack.prefix_length for attack in attacks)
    longest_control = 2 * min(plan.spec.prefix_lengths) + MOST_READ
    longest = max(longest_attack, longest_control)
    ids = max((passage.token_ids for passage in passages), key=len)
    num_times = 1 + longest // len(ids)
    ids = (ids * num_times)[:longest]
    found: list[str | None] = []
    for is_chat in sorted({attack.name == "chat" for attack in attacks}):
        prompts: list[tuple[str | list[int], int]] = []
        for number in (max(1, len(ids) // 4), len(ids)):
            if plan.settings["prompts"] == "text" or is_chat:
                text = tokenizer.decode(ids[:number], skip_special_tokens=False)
                prompts.append((text, len(tokenizer.encode(text, add_bos=False, add_eos=False))))
            else:
                prompts.append((ids[:number], number))
        found.append(server.prompt_obstacle(prompts, is_chat=is_chat))
    if None in found:
        note(
            f"{subject} does not count the tokens of a prompt (usage): it is unknown if it changes "
            "prompts."
        )
    for obstacle in found:
        if obstacle:
            return obstacle
    return None if None in found else ""


@contextmanager
def _journal(
    plan: Plan, server: "ServerLM | None", reference_server: "ServerLM | None", note: Note
) -> Iterator[None]:
    """Keep the answers of servers until the block ends: an interrupted audit of the same models
    goes on.
    """
    if server is None:
        yield
        return
    overwrite = plan.spec.overwrite
    servers = {"requests.jsonl": server}
    about = {"model": server.description()}
    if reference_server is not None:
        servers["reference.jsonl"] = reference_server
        about["reference"] = reference_server.description()
    with _files.work_folder(
        plan.spec.folder / "unfinished", about, replace=overwrite, keep=True
    ) as work:
        number = 0
        seconds = 0.0
        for name, one_server in servers.items():
            file = work / name
            if overwrite:
                file.unlink(missing_ok=True)
            num_answers = one_server.open_journal(file)
            if num_answers:
                number += num_answers
                seconds = max(seconds, file.stat().st_mtime)
        if number:
            date = datetime.fromtimestamp(seconds)
            note(
                f"Goes on: {number:,} answers of an audit that ended early on "
                f"{date:%Y-%m-%d %H:%M} are used."
            )
        yield
