"""Relearning: how few steps of plain training on a passage alone bring it back."""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from tfidf_tune._checks import check_at_least
from tfidf_tune._files import atomic_file, require_writable
from tfidf_tune._printing import say
from tfidf_tune.commands import whole_number
from tfidf_tune.compare._evaluations import Floats
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import Passage, read_probe_file
from tfidf_tune.probe import adapter_base, check_passages, load_model
from tfidf_tune.probe.loading import require_known_ids
from tfidf_tune.probe.prompts import cut_passage
from tfidf_tune.results import bootstrap_interval
from tfidf_tune.results.intervals import MIN_UNITS


def relearning_steps(
    model: PreTrainedModel,
    passages: Sequence[Passage],
    *,
    prefix_length: int = 32,
    max_new_tokens: int = 32,
    max_steps: int = 50,
    learning_rate: float = 1e-4,
    progress: Callable[[int], None] | None = None,
) -> list[int | None]:
    """Count the steps of training on each passage alone until it is recited.

    Each passage starts from the model's own weights. A step is one of AdamW (without weight decay)
    on the mean cross-entropy of the prompt and its continuation, of a completion only on the
    continuation; all floating-point weights are trained, without dropout. A passage is recited when
    greedy decoding from the prompt gives the whole continuation, which the forward pass of the next
    step shows. Afterwards the model is as before.

    Args:
        model (PreTrainedModel): causal language model; half-precision weights round small steps
            away.
        passages (Sequence[Passage]): targets and controls.
        prefix_length (int): tokens of the prompt; a completion has its own.
        max_new_tokens (int): most tokens of the continuation that are to be recited.
        max_steps (int): after which a passage is given up; 0 only looks whether it is recited
            already.
        learning_rate (float): of AdamW, constant.
        progress (Callable[[int], None] | None): called after each passage with the number done.

    Returns:
        list[int | None]: steps by passage, 0 if it is recited without any; None if it is not after
        ``max_steps``.

    Raises:
        ValueError: If a number is out of range, or a passage is too short or too long or not of
            this vocabulary.
    """
    check_at_least(1, prefix_length=prefix_length, max_new_tokens=max_new_tokens)
    check_at_least(0, max_steps=max_steps)
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be above 0, got {learning_rate!r}")
    positions = getattr(model.config, "max_position_embeddings", None)
    divided = [cut_passage(passage, prefix_length, max_new_tokens) for passage in passages]
    for passage, (prompt, continuation) in zip(passages, divided, strict=True):
        require_known_ids(model, np.asarray(passage.token_ids))
        if not continuation or (
            positions is not None and len(prompt) + len(continuation) > positions
        ):
            raise ValueError(
                f"Passage {passage.id!r} has {len(prompt)} tokens of prompt and "
                f"{len(continuation)} to recite, not 1 or more within the model's {positions} "
                "positions: lower prefix_length or max_new_tokens."
            )
    weights = [weight for weight in model.parameters() if weight.is_floating_point()]
    own = [(weight.detach().clone(), weight.requires_grad) for weight in weights]
    was_training = model.training
    model.eval()
    steps: list[int | None] = []
    try:
        for passage, (prompt, continuation) in zip(passages, divided, strict=True):
            for weight, (before, _) in zip(weights, own, strict=True):
                weight.data.copy_(before)
                weight.requires_grad_(True)
            ids = torch.tensor(prompt + continuation, device=weights[0].device)
            num_given = 1 if passage.num_prompt is None else len(prompt)
            optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
            steps.append(
                _steps_until_recited(model, optimizer, ids, len(prompt), num_given, max_steps)
            )
            if progress is not None:
                progress(len(steps))
    finally:
        for weight, (before, was_trained) in zip(weights, own, strict=True):
            weight.data.copy_(before)
            weight.requires_grad_(was_trained).grad = None
        model.train(was_training)
    return steps


def _steps_until_recited(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    ids_s: Tensor,
    num_prompt: int,
    num_given: int,
    max_steps: int,
) -> int | None:
    for step in range(max_steps + 1):
        logits_sv = model(input_ids=ids_s[None], use_cache=False).logits[0, :-1].float()
        if torch.equal(logits_sv[num_prompt - 1 :].argmax(dim=-1), ids_s[num_prompt:]):
            return step
        if step < max_steps:
            optimizer.zero_grad()
            loss = F.cross_entropy(logits_sv[num_given - 1 :], ids_s[num_given:])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return None


def main(arguments: Sequence[str]) -> None:
    """Count the training steps that bring each passage back, and write them."""
    parser = argparse.ArgumentParser(prog="python -m research.relearning", description=main.__doc__)
    add = parser.add_argument
    default = "default: %(default)s"
    add("model", metavar="MODEL", help="folder of a Hugging Face model or PEFT adapter")
    add("--probe-file", type=Path, required=True, help="of `probe make`, or of a training run")
    add("--base", help="model under an adapter; default: what the adapter names")
    add("--tokenizer", help="default: the model's")
    add("--prefix-length", type=whole_number(1), default=32, help=f"tokens of a prompt; {default}")
    add(
        "--max-new-tokens",
        type=whole_number(1),
        default=32,
        help=f"tokens to be recited; {default}",
    )
    add(
        "--max-steps",
        type=whole_number(0),
        default=50,
        help=f"after which a passage is given up; {default}",
    )
    add("--learning-rate", type=float, default=1e-4, help=f"of AdamW; {default}")
    add("--device", help="default: a GPU if there is one")
    add("--output", type=Path, default=Path("relearning.json"), help=f"steps by passage; {default}")
    options = parser.parse_args(arguments)
    require_writable("--output", options.output.parent)
    passages = read_probe_file(options.probe_file)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_adapter = (Path(options.model) / "adapter_config.json").is_file()
    base = options.base or (
        adapter_base(options.model, "name it by --base")[0] if is_adapter else None
    )
    check_passages(
        hf_tokenizer(options.tokenizer or base or options.model), passages, options.prefix_length
    )
    model = load_model(options.model, base=base, device=device, dtype=torch.float32)
    names = ("prefix_length", "max_new_tokens", "max_steps", "learning_rate")
    settings = {name: getattr(options, name) for name in names}
    with tqdm(total=len(passages), desc="Relearning passages") as bar:
        steps = relearning_steps(model, passages, **settings, progress=lambda _: bar.update())
    rows: list[dict[str, Any]] = [
        {"id": one.id, "kind": one.kind, "steps": number}
        for one, number in zip(passages, steps, strict=True)
    ]
    content: dict[str, object] = {"model": options.model, **settings, "passages": rows}
    lines = []
    counted = []
    for kind in ("target", "control"):
        own: list[float] = []
        for row in rows:
            if row["kind"] != kind:
                continue
            own.append(math.inf if row["steps"] is None else row["steps"])
        if own:
            half = statistics.median(own)
            num_back = sum(map(math.isfinite, own))
            median = f"{half:g}" if half <= options.max_steps else f"more than {options.max_steps}"
            lines.append(
                f"{kind.capitalize()}s: {num_back} of {len(own)} recited within "
                f"{options.max_steps} steps, median {median}."
            )
            counted.append(np.minimum(own, options.max_steps))
    if len(counted) == 2:
        content["controls_minus_targets"], line = _difference(*counted)
        lines.append(f"{line} A passage that is not recited counts {options.max_steps}.")
    with atomic_file(options.output) as file:
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    say("\n".join([*lines, f"Written: {options.output}"]))


def _difference(targets: Floats, controls: Floats) -> tuple[dict[str, float | None], str]:
    """Return how many steps more controls take than targets, on average, in numbers
    and in words.
    """
    mean = float(controls.mean() - targets.mean())
    low, high, number, _ = bootstrap_interval(
        lambda ours, theirs, axis=-1: theirs.mean(axis) - ours.mean(axis),
        targets,
        controls,
        paired=False,
    )
    is_known = not math.isnan(low)
    interval = (
        f"95 % interval over passages {low:+.2f} to {high:+.2f}" if is_known else "no interval"
    )
    few = f"; too few for a verdict, it takes {MIN_UNITS} of each" if number < MIN_UNITS else ""
    ends = {"low": low if is_known else None, "high": high if is_known else None}
    return {
        "mean": mean,
        **ends,
    }, f"Controls minus targets: {mean:+.2f} steps on average ({interval}{few})."


if __name__ == "__main__":
    main(sys.argv[1:])
