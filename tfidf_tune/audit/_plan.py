"""How the model of an audit is asked: its arguments, the attacks, and what they cost. Nothing is
asked here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune._files import looks_like_path
from tfidf_tune.audit._reference import Reference, reference_of
from tfidf_tune.audit._spec import AuditSpec
from tfidf_tune.probe import Attack, planned_attacks, run_of, within_budget
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.probe.positive_control import MOST_READ, REQUESTS_PER_PATH
from tfidf_tune.probe.run_identity import ALL_PASSAGES, HELD_OUT, sample_by_of_run

if TYPE_CHECKING:
    from tfidf_tune.passages import Passage, ProbeSpec


@dataclass(frozen=True)
class Plan:
    """What follows from an :class:`AuditSpec` before the model is asked.

    ``chosen`` says which passages are chosen from texts; it is None if the spec names a probe file.
    """

    spec: AuditSpec
    model_name: str  # of the harness
    model_args: dict[str, Any]
    tokenizer: str
    attacks: list[Attack]
    settings: dict[str, Any]  # of the tasks
    probe_file: Path
    record: Path  # what the passages follow from
    chosen: "ProbeSpec | None"
    reference: Reference | None = None

    @property
    def has_controls_of_run(self) -> bool:
        """Whether the controls are text that the run of the model held out, because none were
        named.
        """
        named = self.spec.passages
        if self.chosen is None or isinstance(named, (str, Path)):
            return False
        return self.chosen.controls_source != named.controls_source

    def affordable(self, num_passages: int) -> list[Attack]:
        """Return the attacks that the budget covers for so many passages, beside the positive
        control.
        """
        budget = self.spec.budget
        if budget is None:
            return self.attacks
        num_others = self.num_other_requests(num_passages)
        if budget < num_others + num_passages:
            raise ValueError(
                f"a budget of {budget} requests does not cover one prompt of each of "
                f"{num_passages} passages and {num_others} others, of likelihoods, the positive "
                "control and tests of a server: raise it, or choose fewer passages"
            )
        return within_budget(self.attacks, budget - num_others, num_passages)

    def num_other_requests(self, num_passages: int) -> int:
        """Return the requests that are no attack: a likelihood of each passage, the positive
        control, tests.
        """
        num_tests = 0
        if self.spec.server is not None:
            from tfidf_tune.tasks.server import (
                REQUESTS_PER_LIKELIHOOD_TEST,
                REQUESTS_PER_PROMPT_TEST,
            )

            num_tests = REQUESTS_PER_LIKELIHOOD_TEST + REQUESTS_PER_PROMPT_TEST * self.num_ways
        return num_passages + self.num_control_requests + num_tests

    def num_reference_requests(self, num_passages: int) -> int:
        """Return the requests to the server of the reference, all but the positive control; 0
        without one.
        """
        if self.reference is None or self.reference.kind != "server":
            return 0
        num_prompts = sum(attack.num_requests for attack in self.affordable(num_passages))
        num_others = self.num_other_requests(num_passages) - self.num_control_requests
        return num_passages * num_prompts + num_others

    @property
    def num_ways(self) -> int:
        """Ways of sending prompts: as a text, as a chat, or both."""
        return len({attack.name == "chat" for attack in self.attacks})

    @property
    def num_control_requests(self) -> int:
        """Requests of the positive control, at most: by text, chat and likelihoods; without
        controls there is none.
        """
        if self.chosen is not None and not self.chosen.num_controls:
            return 0
        return REQUESTS_PER_PATH * (self.num_ways + 1)


def resolve(spec: AuditSpec) -> Plan:
    """Decide how the model is asked; nothing is read but the config of an adapter and what its run
    wrote.
    """
    from tfidf_tune.tasks import MODEL_NAME, SERVER_NAME, VLLM_NAME

    attacks = planned_attacks(
        spec.attacks or ["greedy"],
        prefix_lengths=spec.prefix_lengths,
        offsets=spec.offsets,
        prompt_noise=spec.prompt_noise,
        num_samples=spec.num_samples,
        temperature=spec.temperature,
        top_k=spec.top_k,
    )
    if not spec.is_named:
        attacks = [replace(attack, name="", offset=spec.offset) for attack in attacks]
    settings: dict[str, Any] = {
        "max_new_tokens": spec.max_new_tokens,
        "offset": spec.offset,
        "prefix_lengths": list(spec.prefix_lengths),
    }
    if spec.bos is not None:
        settings["bos"] = spec.bos
    if spec.server is None:
        model_name = {"transformers": MODEL_NAME, "vllm": VLLM_NAME}[spec.backend]
        model_args = _model_arguments(spec)
    else:
        model_name = SERVER_NAME
        server = asdict(spec.server)
        settings["prompts"] = {"text": "text", "ids": "ids_to_text"}[server.pop("send")]
        model_args = {"model": spec.model, "tokenizer": spec.tokenizer, **server}
    chosen = None
    probe_file = spec.folder / "probe.jsonl"
    if isinstance(spec.passages, (str, Path)):
        probe_file = Path(spec.passages).expanduser()
    else:
        chosen = _as_in_training(_with_held_out(spec.passages, model_args), model_args)
        if spec.server is not None:  # it ends its answers at EOS
            chosen = replace(chosen, without_eos=True)
    reference = reference_of(spec, model_name, model_args)
    if reference is not None and reference.kind != "server":
        settings["reference_model"] = reference.name
    plan = Plan(
        spec=spec,
        model_name=model_name,
        model_args=model_args,
        tokenizer=str(model_args.get("tokenizer") or model_args["pretrained"]),
        attacks=attacks,
        settings=settings,
        probe_file=probe_file,
        record=spec.folder / "passages.json",
        chosen=chosen,
        reference=reference,
    )
    if chosen is not None:
        _require_room_for_prompts(plan, chosen)
    return plan


def _with_held_out(chosen: "ProbeSpec", model_args: dict[str, Any]) -> "ProbeSpec":
    """Leave the passages that the run of the model has held out, if it has a run, out of the
    targets, and take them as controls unless others are named.
    """
    run = run_of(model_args)
    if chosen.held_out is not None or chosen.holdout is not None or not run:
        return chosen
    folder = Path(run["folder"])
    # The file of all data sets of a run, where it has several, else the file of the only one.
    for name in (ALL_PASSAGES, "probe.jsonl"):
        passages = folder / name
        if passages.is_file():
            return _with_controls_of_run(replace(chosen, held_out=str(passages)), folder)
    return chosen


def _with_controls_of_run(chosen: "ProbeSpec", folder: Path) -> "ProbeSpec":
    """Take the text that a run has held out as controls, if it has written it.

    Controls of another domain than the training text are recited more, or less, for that alone.
    """
    from tfidf_tune.passages.choosing import longest_control

    file = folder / HELD_OUT
    if chosen.controls_source is not None or not chosen.num_controls or not file.is_file():
        return chosen
    longest = longest_control(str(chosen.held_out))
    if longest < chosen.block_size:
        half = longest // 2
        lengths = [str(length) for length in PREFIX_LENGTHS if length <= half] or [str(half)]
        raise ValueError(
            f"{file}, the text that the run of the model held out, has passages of {longest} "
            f"tokens, and --block-size is {chosen.block_size}: give --block-size {longest} "
            f"--prefix-lengths {' '.join(lengths)}, or name other text that the model never saw by "
            "--controls"
        )
    return replace(chosen, controls_source=str(file), controls_column="text")


def _as_in_training(chosen: "ProbeSpec", model_args: dict[str, Any]) -> "ProbeSpec":
    """Read ``.txt`` files as the run of the model did, so that its duplicates are the same."""
    if chosen.sample_by is not None:
        return chosen
    return replace(chosen, sample_by=sample_by_of_run(model_args) or chosen.document_is)


def _require_room_for_prompts(plan: Plan, chosen: "ProbeSpec") -> None:
    """Raise a ValueError if the prompts leave nothing of a passage to recite."""
    affordable = plan.affordable(chosen.num_targets + chosen.num_controls)
    longest = max(attack.offset + attack.prefix_length for attack in affordable)
    if longest >= chosen.block_size:
        raise ValueError(
            f"--block-size is {chosen.block_size}, prompts take {longest} tokens "
            "(--prefix-lengths, --offset, --offsets): a passage needs one more"
        )


def _model_arguments(spec: AuditSpec) -> dict[str, Any]:
    """Return the arguments of the harness's model that is loaded here."""
    model = str(Path(spec.model).expanduser()) if looks_like_path(spec.model) else spec.model
    names = {"pretrained": model}
    if (Path(model) / "adapter_config.json").is_file():
        from tfidf_tune.probe import adapter_base

        names = {"pretrained": spec.base or "", "peft": model}
        if spec.base is None:
            names["pretrained"], revision = adapter_base(model, "name it by --base")
            if revision is not None:
                names["revision"] = revision
    elif spec.base is not None:
        raise ValueError(
            f"--base is for an adapter, and {model} has no adapter_config.json: leave out --base"
        )
    named = {name: getattr(spec, name) for name in ("tokenizer", "dtype") if getattr(spec, name)}
    return {**names, **named, **spec.model_args}


def describe_requests(
    plan: Plan, passages: "Sequence[Passage]", prices: Sequence[float] | None
) -> str:
    """Describe requests, tokens and the cost, likelihoods included.

    ``prices`` are of a million tokens of prompts and of continuations.
    """
    spec = plan.spec
    num_passages = len(passages)
    attacks = plan.affordable(num_passages)
    num_requests = sum(attack.num_requests for attack in attacks)
    in_prompts = sum(attack.num_requests * attack.prefix_length for attack in attacks)
    # The positive control: a copy, a blank line and the prompt, or the prompt alone, on each path.
    num_control = plan.num_control_requests
    given = num_passages * in_prompts + sum(len(passage.token_ids) for passage in passages)
    given += num_control * (2 * min(spec.prefix_lengths) + MOST_READ)
    made = num_passages * (1 + spec.max_new_tokens * num_requests) + num_control * MOST_READ
    number = num_passages * num_requests + plan.num_other_requests(num_passages)
    cost = ""
    if prices is not None:
        most = (given * prices[0] + made * prices[1]) / 1e6
        cost = (
            f"; at most about {most:,.2f} at {prices[0]:g} and {prices[1]:g} for a million tokens"
        )
    of_reference = ""
    num_of_reference = plan.num_reference_requests(num_passages)
    if num_of_reference:
        of_reference = f" The server of the reference gets {num_of_reference:,} of them, too"
        of_reference += "." if prices is None else ", which the cost does not include."
    return (
        f"{number:,} requests, about {given:,} tokens in prompts and at most {made:,} in "
        f"continuations{cost}.{of_reference}"
    )
