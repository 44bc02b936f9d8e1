"""The positive control: a model that is shown a passage has to read it, else its silence says
nothing.

A clean audit may come from a model that recites nothing, or from an instrument that cannot see: a
server that puts a chat template around each prompt, filters its answers or cuts them. So each of
ten controls, passages that the model never saw, is asked for twice, in the very way of the audit.
With ``p`` tokens of a prompt and ``r`` tokens that follow them in the passage ``ids``, the prompts
are::

    with the copy       ids[: p + r], a blank line, ids[: p]
    without the copy    ids[: p]

A model that can continue text copies the ``r`` tokens from the first prompt, and cannot know them
from the second.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_CONTROLS = 10
MOST_READ = 48
"""Tokens of a passage that are read from its copy, at most."""
LEAST_READ = 16
"""Where the model's context is too small for more; if it is too small for these, there is no
positive control.
"""
MOST_P_VALUE = 0.01
LEAST_SHARE_READ = 0.25
LEAST_FALL = 0.1
"""Nats a token by which the copy lowers the NLL of a model that can use it, in the median."""
REQUESTS_PER_PATH = 2 * NUM_CONTROLS


@dataclass(frozen=True)
class ControlPrompt:
    """How a control is asked for.

    Args:
        passage_id (str): of the control.
        has_copy (bool): whether the prompt begins with the copy of prompt and reference.
        prompt_ids (list[int]): what the model continues.
        reference_ids (list[int]): what follows in the passage: ``r`` tokens.
    """

    passage_id: str
    has_copy: bool
    prompt_ids: list[int]
    reference_ids: list[int]


def control_prompts(
    passages: Sequence[tuple[str, list[int], int]], blank_line: list[int], num_positions: int | None
) -> list[ControlPrompt]:
    """Return the prompts of ten passages, or of all if there are fewer, each with and without its
    copy.

    ``r`` is 48, or what the passage has left after the prompt, or what the context has room for. If
    that is less than 16 tokens, no prompt has a copy.

    Args:
        passages (Sequence[tuple[str, list[int], int]]): id, token ids and ``p``, the tokens of its
            prompt.
        blank_line (list[int]): token ids of an empty line.
        num_positions (int | None): of the model's context, as far as it is known.
    """
    longest_first = sorted(
        passages, key=lambda passage: -min(len(passage[1]) - passage[2], MOST_READ)
    )
    prompts = []
    for passage_id, ids, num_prompt in longest_first[:NUM_CONTROLS]:
        num_left = len(ids) - num_prompt
        num_read = min(num_left, MOST_READ)
        fits = True
        if num_positions is not None:
            # The tokens are in the context twice: in the copy, and in the answer.
            num_free = num_positions - 2 * num_prompt - len(blank_line)
            num_room = num_free // 2
            fits = num_room >= min(LEAST_READ, num_left)
            num_read = min(num_read, max(num_room, 1))
        given = ids[:num_prompt]
        reference = ids[num_prompt : num_prompt + num_read]
        if fits:
            with_copy = [*given, *reference, *blank_line, *given]
            prompts.append(ControlPrompt(passage_id, True, with_copy, reference))
        prompts.append(ControlPrompt(passage_id, False, given, reference))
    return prompts


def sign_flip_p_value(differences: Sequence[float]) -> float:
    """Return the exact one-sided p-value of a positive mean of n paired differences, at most 20.

    Without an effect, the sign of each difference is a coin. The p-value is the share of the
    ``2^n`` choices of signs whose sum is at least the sum that was observed. Ten positive
    differences have 1/1024::

        differences 3, 2, 1     sum 6     of the 8 choices only + + + reaches it     p = 1/8
    """
    choices = list(itertools.product((1, -1), repeat=len(differences)))
    sums = np.array(choices, dtype=np.float64) @ np.asarray(differences, dtype=np.float64)
    # The first choice has every sign as it was observed. Sums that are equal to it may be rounded.
    rounding = 1e-9 * max(1.0, float(np.abs(differences).sum())) if len(differences) else 0.0
    least = sums[0] - rounding
    return float((sums >= least).mean())


def is_read(differences: Sequence[float], shares: Sequence[float]) -> bool:
    """Return whether ten passages were read from their copies: p ≤ 0.01, and a quarter of their
    tokens on average.

    ``differences`` are tokens that were read with the copy minus without it, ``shares`` of the
    tokens that could be.
    """
    if len(differences) < NUM_CONTROLS:
        return False
    return (
        sign_flip_p_value(differences) <= MOST_P_VALUE
        and float(np.mean(shares)) >= LEAST_SHARE_READ
    )


def is_too_small_to_read(median_fall: float, nll_without_copy: float, unigram: float) -> bool:
    """Return whether a model has learned to predict text, and its likelihood does not use a copy.

    ``median_fall`` is of the NLL of a passage by its copy; all are in nats a token. A model whose
    NLL rises by the copy does use it, and may be trained against copying.
    """
    return nll_without_copy < unigram and abs(median_fall) < LEAST_FALL


def unigram_nll(ids: npt.NDArray[np.int32], frequencies: dict[int, int]) -> float:
    """Return the NLL a token of ids under a model that knows how often each token occurs, and
    nothing of its context.

    ``frequencies`` are counts of tokens, of a text that has all of the ids.
    """
    total = sum(frequencies.values())
    return float(np.mean([-np.log(frequencies[int(token)] / total) for token in ids]))
