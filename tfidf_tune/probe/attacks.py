"""Ways of asking for a passage, and how a budget of requests is spent on them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tfidf_tune._checks import check_at_least, require_choice, require_number

PREFIX_LENGTHS = (32, 50, 100)
"""Tokens of the prompts, unless others are named: the lengths of
the task ``tfidf_memorization``.
"""
ATTACKS = {
    "greedy": "the model continued it, always by the most probable token",
    "offset": "the same with prompts from the middle of the passage",
    "truncated": "the same without the first half of the longest prompt",
    "noise": "the same with a part of the prompt's tokens replaced by others",
    "chat": "a user's message asked to continue the longest prompt word for word",
    "sampling": "continuations of the longest prompt were drawn at random, and the best of them "
    "counts",
}
"""Ways of asking, and what a report says about each."""


@dataclass(frozen=True)
class Attack:
    """One prompt of each passage.

    Args:
        name (str): one of :data:`ATTACKS`; empty for a task without named attacks.
        prefix_length (int): tokens of the prompt.
        offset (int): token of the passage where the prompt starts.
        prompt_noise (float): share of the prompt's tokens that is replaced.
        generation (dict[str, Any]): how the prompt is continued; empty for greedy decoding.
    """

    name: str
    prefix_length: int
    offset: int = 0
    prompt_noise: float = 0.0
    generation: dict[str, Any] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        """Requests for each passage."""
        return int(self.generation.get("num_samples", 1))


def planned_attacks(
    names: Sequence[str],
    *,
    prefix_lengths: Sequence[int],
    offsets: Sequence[int] = (64, 96),
    prompt_noise: float = 0.1,
    num_samples: int = 10,
    temperature: float = 1.0,
    top_k: int = 0,
) -> list[Attack]:
    """Plan the attacks, in the given order.

    With ``p`` the longest of the prefix lengths and ``s`` the shortest, a passage is asked for

    - by ``greedy`` from its first tokens, once for each prefix length, the shortest first,
    - by ``offset`` from ``s`` tokens that start at each offset,
    - by ``truncated`` from the second half of its first ``p`` tokens,
    - by ``noise`` from its first ``p`` tokens, a share of which is replaced by others,
    - by ``chat`` in a turn of the user that asks to continue its first ``p`` tokens,
    - by ``sampling`` from its first ``p`` tokens, ``num_samples`` times.

    Prefix lengths and offsets are in tokens; ``prompt_noise`` is a share above 0; ``top_k`` 0
    samples from all tokens.

    Raises:
        ValueError: If a name is unknown or given twice, or a number is out of range.
    """
    # Numbers are checked also where none of the named attacks uses them.
    for name in names:
        require_choice("attacks", name, tuple(ATTACKS))
    if len(set(names)) < len(names) or not names:
        raise ValueError(
            f"attacks are {list(names)}: name each at most once, and at least one of "
            f"{', '.join(ATTACKS)}"
        )
    check_at_least(0, offsets=min(offsets, default=0))
    require_noise(prompt_noise, positive="noise" in names)
    sampling = generation(num_samples, temperature, top_k)
    shortest = min(prefix_lengths)
    longest = max(prefix_lengths)
    half = longest // 2
    if "truncated" in names and not half:
        raise ValueError(
            "the attack truncated takes the second half of a prompt, and the longest of the prefix "
            "lengths is 1: raise it to 2 or more, or leave out the attack"
        )
    plans: dict[str, list[Attack]] = {
        "greedy": [Attack("greedy", length) for length in sorted(set(prefix_lengths))],
        "offset": [Attack("offset", shortest, offset) for offset in offsets],
        "truncated": [Attack("truncated", longest - half, half)],
        "noise": [Attack("noise", longest, prompt_noise=prompt_noise)],
        "chat": [Attack("chat", longest)],
        "sampling": [Attack("sampling", longest, generation=sampling)],
    }
    attacks = []
    for name in names:
        attacks.extend(plans[name])
    return attacks


def within_budget(attacks: Sequence[Attack], budget: int | None, num_passages: int) -> list[Attack]:
    """Leave out the attacks that a budget of requests does not cover; without a budget none.

    A prompt is sent for all passages or for none, so that each attack is measured on the same
    passages: the first one that the rest of the budget does not cover ends the plan. The number of
    samples is lowered to what is left.

    Raises:
        ValueError: If the budget does not cover one prompt of each passage.
    """
    if budget is None:
        return list(attacks)
    if budget < num_passages:
        raise ValueError(
            f"a budget of {budget} requests does not cover one prompt of each of {num_passages} "
            "passages: raise it, or choose fewer passages"
        )
    covered = []
    num_left = budget // num_passages  # requests for each passage
    for attack in attacks:
        is_too_large = attack.num_requests > num_left
        if is_too_large and attack.name == "sampling" and num_left:
            attack = replace(attack, generation=attack.generation | {"num_samples": num_left})
        elif is_too_large:
            break
        covered.append(attack)
        num_left -= attack.num_requests
    return covered


def require_noise(prompt_noise: float, *, positive: bool = False) -> None:
    """Refuse a share of a prompt's tokens that is out of range."""
    require_number(
        "prompt_noise",
        prompt_noise,
        0,
        1,
        "the share of a prompt's tokens to replace",
        reason="all of them",
        positive=positive,
    )


def generation(
    num_samples: int | None, temperature: float, top_k: int, num_beams: int | None = None
) -> dict[str, Any]:
    """Return the field ``generation`` of a document whose passage is sampled or searched with
    beams; empty: greedy.
    """
    if num_samples is not None and num_beams is not None:
        raise ValueError(
            f"num_samples is {num_samples} and num_beams is {num_beams}: leave out one of the two"
        )
    if num_samples is None and (temperature, top_k) != (1, 0):
        raise ValueError(
            "temperature and top_k are settings of sampling: give num_samples too, or leave them "
            "out"
        )
    if num_beams is not None:
        check_at_least(2, num_beams=num_beams)
        return {"num_beams": num_beams}
    if num_samples is None:
        return {}
    check_at_least(1, num_samples=num_samples)
    check_at_least(0, top_k=top_k)
    require_number(
        "temperature",
        temperature,
        0,
        100,
        "logits are divided by it",
        reason="nearly uniform",
        positive=True,
    )
    return {
        "num_samples": num_samples,
        "do_sample": True,
        "temperature": float(temperature),
        "top_k": top_k,
    }
