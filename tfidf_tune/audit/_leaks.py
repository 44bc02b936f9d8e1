"""The list to act on: a row for each passage, what of it is recited, and whether the passage's own
beginning and this training brought it out.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from tfidf_tune.passages import Passage
from tfidf_tune.probe.metrics import longest_memorized_substring
from tfidf_tune.report.document import Table, tabulate
from tfidf_tune.results.intervals import SEED
from tfidf_tune.results.wording import prompt_length

_EXCERPT_WORDS = 12
_NEXT = (
    "Next: remove these documents or their copies (tfidf-tune data dedup), or train with "
    "repetition weights (loss=repetition); audit the new model with another --output-dir; "
    "tfidf-tune compare of both folders of answers shows this list before and after."
)
_WORD = re.compile(r"\w+")
_COLUMNS = (
    ("Passage", "passage_id", ""),
    ("File", "file", ""),
    ("Document", "document", ""),
    ("From token", "token", ""),
    ("Copies", "copies", ""),
    ("Recited", "lms", ""),
    ("Of", "length", ""),
    ("Before", "before", ""),
    ("From another prefix", "mismatched", ""),
    ("Attributed", "attributed", ""),
    ("Likelier than % of controls", "likelier", ".0f"),
    ("Attack", "attack", ""),
    ("Prompt (tokens)", "prompt", ""),
    ("Answer, masked", "excerpt", ""),
)


def mismatched_lms(samples: pd.DataFrame) -> pd.Series:
    """Compare each passage with answers to the beginnings of other passages.

    What a model writes without the passage's own beginning was not brought out by it: a frame, a
    license, text that fits everywhere. Passages that were asked for in the same way are put in a
    circle by a fixed seed, and each is compared with the answer for the next one. No prompt is
    asked for that::

        circle      a, c, b
        compared    the rest of a with the answer for c, of c with that for b, of b with that for a

    Args:
        samples (pandas.DataFrame): a row for each prompt with the columns "passage_id", "kind",
            "attack", "prefix_length", "offset" and "sample".

    Returns:
        pandas.Series: float64, the longest LMS of each passage over all prompts, by passage;
            passages that are alone are missing.
    """
    longest: dict[str, float] = {}
    ways = ["kind", "attack", "prefix_length", "offset"]
    for _, asked in samples.groupby(ways, observed=True):
        by_passage = asked.drop_duplicates("passage_id").sort_values("passage_id")
        if len(by_passage) < 2:
            continue
        order = np.random.default_rng(SEED).permutation(len(by_passage))
        circle = [by_passage["sample"].iloc[number] for number in order]
        for sample, following in zip(circle, [*circle[1:], circle[0]], strict=True):
            lms = longest_memorized_substring(following.generated_ids, sample.reference_ids)
            longest[sample.passage_id] = max(lms, longest.get(sample.passage_id, 0.0))
    return pd.Series(longest, dtype=float)


def leaks(
    best: pd.DataFrame,
    *,
    threshold: float,
    mismatched: pd.Series,
    before: pd.Series | None,
    nlls: Mapping[str, pd.Series],
    passages: Sequence[Passage],
) -> pd.DataFrame:
    """Return a row for each target, those to act on first.

    A passage is attributed to the training if its LMS is above the threshold by its own beginning,
    and not by the beginning of another passage, and not under the reference.

    Args:
        best (pandas.DataFrame): the best sample of each target, with the columns "passage_id",
            "lms", "length", "repeats", "attack", "prefix_length" and "sample".
        threshold (float): LMS that hardly any control exceeds.
        mismatched (pandas.Series): of :func:`mismatched_lms`.
        before (pandas.Series | None): the longest LMS of each target under the reference; None
            without one.
        nlls (Mapping[str, pandas.Series]): of "target" and "control", the mean NLL of each passage;
            empty without likelihoods.
        passages (Sequence[Passage]): the probe file, which says where passages are; empty if it is
            not at hand.
    """
    frame = best.set_index("passage_id", drop=False)
    frame["mismatched"] = mismatched.reindex(frame.index)
    is_attributed = (frame["lms"] > threshold) & ~(frame["mismatched"] > threshold)
    frame["before"] = np.nan
    if before is not None:
        frame["before"] = before.reindex(frame.index)
        is_attributed &= ~(frame["before"] > threshold)
    frame["is_attributed"] = is_attributed
    frame["attributed"] = is_attributed.map({True: "yes", False: "no"})
    # How much more than controls a passage looks like training text, by the loss.
    frame["likelier"] = np.nan
    if nlls:
        of_controls = np.sort(nlls["control"].to_numpy(float))
        of_targets = nlls["target"].reindex(frame.index).to_numpy(float)
        num_less_likely = len(of_controls) - np.searchsorted(of_controls, of_targets, side="right")
        frame["likelier"] = 100 * num_less_likely / len(of_controls)
    # Where it is.
    places = {passage.id: passage for passage in passages}
    for passage_id in frame.index:
        place = places.get(passage_id)
        if place is None:
            continue
        frame.loc[passage_id, "file"] = place.source
        if place.positions:
            document, token = place.positions[0]
            frame.loc[passage_id, ["document", "token"]] = [document, token]
    frame["copies"] = frame["repeats"].astype("Int64")
    frame["prompt"] = frame["prefix_length"].map(prompt_length)
    frame["excerpt"] = [masked(sample.generated_text) for sample in frame["sample"]]
    rest = frame["lms"] - frame["before"].fillna(0)
    order = frame.assign(rest=rest).sort_values(
        ["is_attributed", "rest", "lms"], ascending=False, kind="stable"
    )
    columns = [name for _, name, _ in _COLUMNS if name in order.columns]
    return order[columns].reset_index(drop=True)


def leaks_table(rows: pd.DataFrame) -> Table:
    """Show the rows, and what to do next."""
    notes = [
        "Recited: the longest run of tokens of the passage in an answer, from its best prompt; of: "
        "tokens that the answer was compared with. Before: the same under the reference. From "
        "another prefix: the same from the beginning of another passage. Attributed: recited "
        "further than unseen text by its own beginning, but not by that of another passage, and "
        "not before. Likelier: the share of the controls that look less like training text by the "
        "loss. Of each word of the answer the first character is shown. Attributed passages come "
        "first, then those with the most tokens more than before.",
    ]
    if (rows["attributed"] == "yes").any():
        notes.append(_NEXT)
    present = [column for column in _COLUMNS if column[1] in rows.columns]
    return tabulate("leaks", "Passages to act on", rows, present, notes).without_empty_columns()


def masked(text: str) -> str:
    """Return the beginning of a text with the first character of each word, others as dots.

    Digits are all masked: "Call Jane, 555-1234" becomes "C··· J···, ···-····".
    """
    words = list(_WORD.finditer(text))[:_EXCERPT_WORDS]
    if not words:
        return ""
    beginning = text[: words[-1].end()]
    return " ".join(_WORD.sub(_mask, beginning).split())


def _mask(match: re.Match[str]) -> str:
    word = match[0]
    first = "·" if word[0].isdigit() else word[0]
    return first + "·" * (len(word) - 1)
