"""What the positive control showed: whether a clean result of a checkpoint could have been another
one.

:mod:`tfidf_tune.probe.positive_control` says how the controls are asked.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from tfidf_tune.probe.positive_control import (
    MOST_P_VALUE,
    NUM_CONTROLS,
    is_read,
    is_too_small_to_read,
    sign_flip_p_value,
)
from tfidf_tune.results.importer import COPY
from tfidf_tune.results.table import Results

POSSIBLE_REASONS = (
    "a chat template around the prompt, a filter, a penalty on repetition, reasoning that used up "
    "the tokens, or training against copying"
)
# Share of a passage that is read without its copy, before the model is taken to know it.
_MOST_KNOWN = 0.25


class Reading(NamedTuple):
    """How much of the ten controls was read from their copies, on one path.

    Attributes:
        path (str): "text", "chat" or "likelihoods".
        is_shown (bool): whether the copy was read: p ≤ 0.01, and, but for likelihoods, a quarter of
            the tokens.
        num_controls (int): passages that were asked for with and without their copy.
        p_value (float): of the exact one-sided sign-flip test of the differences.
        with_copy, without_copy (float): means: tokens that were read; for likelihoods NLL in nats a
            token.
        num_to_read (float): tokens that could be read, on average; NaN for likelihoods.
        highest_share (float): the most that was read of a passage, 0 to 1; NaN for likelihoods.
        num_in_full (int): passages whose copy was read in full.
        median_fall (float): of the NLL by the copy, in nats a token; NaN for other paths.
    """

    path: str
    is_shown: bool
    num_controls: int
    p_value: float
    with_copy: float
    without_copy: float
    num_to_read: float = math.nan
    highest_share: float = math.nan
    num_in_full: int = 0
    median_fall: float = math.nan

    @property
    def text(self) -> str:
        """The reading in words: "22.1 of 48 tokens"."""
        if self.path == "likelihoods":
            return f"NLL {self.with_copy:.2f} instead of {self.without_copy:.2f}"
        return f"{self.with_copy:.1f} of {self.num_to_read:.0f} tokens"


class PositiveControl(NamedTuple):
    """The readings of a checkpoint.

    Attributes:
        readings (tuple[Reading, ...]): a reading of each path that was asked.
        not_applicable (str): why the model cannot be expected to read a copy; "" if it can.
        obstacle (str): why answers show nothing whatever was read: what a server does to prompts or
            answers, or that a model predicts no text; "" if nothing is known.
    """

    readings: tuple[Reading, ...]
    not_applicable: str = ""
    obstacle: str = ""

    @property
    def answers(self) -> tuple[Reading, ...]:
        """The readings from answers, not from likelihoods."""
        return tuple(reading for reading in self.readings if reading.path != "likelihoods")

    @property
    def likelihoods(self) -> Reading | None:
        """The reading from likelihoods, if there is one."""
        return next((reading for reading in self.readings if reading.path == "likelihoods"), None)

    @property
    def problem(self) -> str:
        """Why answers of this model show nothing, in a clause; "" if they do, or cannot be expected
        to.
        """
        if self.obstacle:
            return self.obstacle
        if self.not_applicable:
            return ""
        if not self.answers:
            return (
                "there was no positive control, in which the model is shown passages that it has "
                "to read"
            )
        for reading in self.answers:
            if reading.num_controls == 0:
                return (
                    "the model's context is too small for a copy of a passage, which it would have "
                    "to read"
                )
            if reading.num_controls < NUM_CONTROLS:
                return (
                    f"the positive control takes {NUM_CONTROLS} controls, there are "
                    f"{reading.num_controls}"
                )
            if not reading.is_shown:
                by = ", asked in a chat" if reading.path == "chat" else ""
                cause = f"the cause may be {POSSIBLE_REASONS}"
                if reading.without_copy > _MOST_KNOWN * reading.num_to_read:
                    cause = "it knows the controls: choose others"
                return (
                    f"shown the text{by}, it reads {reading.text}, and {reading.without_copy:.1f} "
                    f"without; {cause}"
                )
        return ""

    @property
    def likelihood_problem(self) -> str:
        """Why likelihoods show nothing; "" if they do, or cannot be expected to."""
        reading = self.likelihoods
        if self.not_applicable:
            return ""
        if reading is None:
            return "the likelihoods have no positive control"
        if reading.num_controls < NUM_CONTROLS:
            return (
                f"the positive control takes {NUM_CONTROLS} controls, there are "
                f"{reading.num_controls}"
            )
        if not reading.is_shown:
            return (
                f"shown the text, its NLL does not fall: {reading.with_copy:.2f}, "
                f"{reading.without_copy:.2f} without"
            )
        return ""

    @property
    def state(self) -> str:
        """The state: "shown", "not shown" or "not applicable"."""
        if self.problem:
            return "not shown"
        return "not applicable" if self.not_applicable else "shown"

    @property
    def text(self) -> str:
        """The readings in words, for a cell of a table; "" if nothing was asked."""
        texts = []
        for reading in self.answers:
            by = " (chat)" if reading.path == "chat" else ""
            texts.append(f"{reading.text}{by}")
        return ", ".join(texts)


def positive_control_of(results: Results, checkpoint: int) -> PositiveControl:
    """Return what the positive control of a checkpoint showed; nothing, if its server changes
    prompts.
    """
    control = positive_control(results.scores, checkpoint)
    obstacle = results.checkpoints[checkpoint].prompt_obstacle
    return control._replace(obstacle=obstacle) if obstacle else control


def positive_control(scores: pd.DataFrame, checkpoint: int) -> PositiveControl:
    """Return what the answers of a positive control showed, from the table of results."""
    rows_of_checkpoint = scores[scores["checkpoint"] == checkpoint]
    kinds = rows_of_checkpoint["kind"].astype(str)
    readings = []
    num_scored = 0
    unigram = math.nan
    for path in ("text", "chat", "likelihoods"):
        rows = rows_of_checkpoint[kinds == f"{COPY} {path}"]
        if rows.empty:
            continue
        by_passage = rows.pivot_table(
            index="unit", columns="metric", values="value", observed=True, dropna=False
        )
        if path == "likelihoods":
            readings.append(_of_likelihoods(by_passage))
            unigram = float(by_passage["unigram_nll"].mean())
            num_scored = len(by_passage)
        else:
            readings.append(_of_answers(path, by_passage))
    control = PositiveControl(tuple(readings))
    if is_served(scores, checkpoint) or num_scored < NUM_CONTROLS:
        return control  # nothing is known of the model but its answers
    return control._replace(
        not_applicable=_why_not_applicable(control, unigram),
        obstacle=_why_below_chance(control, scores, checkpoint),
    )


def _of_answers(path: str, by_passage: pd.DataFrame) -> Reading:
    table = by_passage.reindex(
        columns=["num_read_with_copy", "num_read_without_copy", "num_to_read"]
    )
    pairs = table.dropna()
    if pairs.empty:
        return _not_shown(path, table["num_read_without_copy"])
    read = pairs["num_read_with_copy"]
    differences = (read - pairs["num_read_without_copy"]).to_numpy(float)
    shares = read / pairs["num_to_read"]
    return Reading(
        path=path,
        is_shown=is_read(differences.tolist(), shares.tolist()),
        num_controls=len(pairs),
        p_value=sign_flip_p_value(differences),
        with_copy=float(read.mean()),
        without_copy=float(pairs["num_read_without_copy"].mean()),
        num_to_read=float(pairs["num_to_read"].mean()),
        highest_share=float(shares.max()),
        num_in_full=int((shares >= 1).sum()),
    )


def _of_likelihoods(by_passage: pd.DataFrame) -> Reading:
    table = by_passage.reindex(columns=["nll_with_copy", "nll_without_copy"])
    pairs = table[np.isfinite(table.to_numpy(float)).all(axis=1)]
    if pairs.empty:
        return _not_shown("likelihoods", table["nll_without_copy"])
    falls = (pairs["nll_without_copy"] - pairs["nll_with_copy"]).to_numpy(float)
    p_value = sign_flip_p_value(falls)
    return Reading(
        path="likelihoods",
        is_shown=bool(len(pairs) >= NUM_CONTROLS and p_value <= MOST_P_VALUE),
        num_controls=len(pairs),
        p_value=p_value,
        with_copy=float(pairs["nll_with_copy"].mean()),
        without_copy=float(pairs["nll_without_copy"].mean()),
        median_fall=float(np.median(falls)),
    )


def _not_shown(path: str, without_copy: pd.Series) -> Reading:
    """Return the reading of a path on which no passage was asked for with its copy."""
    return Reading(
        path=path,
        is_shown=False,
        num_controls=0,
        p_value=1.0,
        with_copy=math.nan,
        without_copy=float(without_copy.mean()),
    )


def _why_not_applicable(made: PositiveControl, unigram: float) -> str:
    """Say why a model that was loaded here cannot be expected to read a copy."""
    reading = made.likelihoods
    asked = made.answers
    if reading is None:
        return ""
    predicts_text = reading.without_copy < unigram
    if asked and all(each.num_controls == 0 for each in asked) and predicts_text:
        return "the model's context is too small for a copy of a passage"
    if reading.num_controls < NUM_CONTROLS:
        return ""
    if is_too_small_to_read(reading.median_fall, reading.without_copy, unigram):
        return (
            "the model is too small to read a copy, which lowers its NLL by "
            f"{reading.median_fall:.2f} nats a token in the median ({reading.without_copy:.2f} "
            f"without it, {unigram:.2f} by token frequencies)"
        )
    return ""


def _why_below_chance(made: PositiveControl, scores: pd.DataFrame, checkpoint: int) -> str:
    """Say that a model predicts unseen text worse than an equal probability of all tokens, if it
    does.

    Its tokenizer may be another model's: then it never sees the text that it knows, and still
    copies what it is shown.
    """
    reading = made.likelihoods
    own = scores[scores["checkpoint"] == checkpoint]
    sizes = own.loc[own["metric"] == "vocab_size", "value"]
    if reading is None or sizes.empty:
        return ""
    # Tokens that were drawn at random are less probable than that under every model that knows
    # text.
    if ((own["metric"] == "is_random") & (own["kind"] == "control")).any():
        return ""
    chance = math.log(sizes.max())
    if not reading.without_copy > chance:  # NaN: not measured
        return ""
    return (
        f"its NLL of unseen text is {reading.without_copy:.2f} nats a token, and {chance:.2f} if "
        "all tokens were equally probable: its tokenizer may be of another model, or it knows "
        "nothing but its training text"
    )


def is_served(scores: pd.DataFrame, checkpoint: int) -> bool:
    """Return whether a server answered for the model of a checkpoint."""
    rows = scores[(scores["checkpoint"] == checkpoint) & (scores["metric"] == "is_served")]
    return bool(rows["value"].max() == 1)
