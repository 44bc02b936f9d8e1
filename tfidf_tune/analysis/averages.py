"""Averages over passages and blocks: of the table of results, and of the samples of one checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tfidf_tune.results import ProbeSample, Results

if TYPE_CHECKING:
    import pandas as pd


def average_scores(scores: "pd.DataFrame", by: Sequence[str]) -> "pd.DataFrame":
    """Average the scores of passages and blocks in groups.

    Args:
        scores (pandas.DataFrame): rows of the table of results, with the columns ``by``. Aggregates count only where
            a checkpoint has no rows of single units.
        by (Sequence[str]): columns that make the groups.

    Returns:
        pandas.DataFrame: a row a group, in order of appearance, with the columns "lms", "prefix_match", "rouge_l" and
            "verbatim" (targets), "control_lms", "nll", "max_lms", "max_prefix_match", and "num_predictions"; NaN if
            missing.
    """
    single = scores["unit"] != ""
    has_units = single.groupby([scores[name] for name in ("checkpoint", "metric", "kind")], observed=True).transform(
        "any"
    )
    rows = scores[single | ~has_units].assign(
        sum=lambda table: table["value"] * table["count"],
        largest=lambda table: table["value"].where(table["count"] == 1),  # a mean is not a maximum
    )
    names = rows["metric"].astype(str).where(rows["kind"] != "control", "control_" + rows["metric"].astype(str))
    groups = rows[~rows["kind"].isin(("article", "question"))].groupby(
        [*by, names], sort=False, dropna=False, observed=True
    )
    sums = groups[["sum", "count"]].sum()
    averages = (sums["sum"] / sums["count"]).unstack()
    averages = averages.reindex(columns=["lms", "prefix_match", "rouge_l", "verbatim", "control_lms", "nll"])
    largest = groups["largest"].max().unstack().reindex(columns=["lms", "max_lms", "prefix_match"])
    averages["max_lms"] = largest[["lms", "max_lms"]].max(axis=1)
    averages["max_prefix_match"] = largest["prefix_match"]
    averages["num_predictions"] = sums["count"].unstack().get("nll", 0.0)
    order = rows.drop_duplicates(list(by))[list(by)]
    return averages.reindex(order.set_index(list(by)).index)


def run_table(results: Results) -> "pd.DataFrame":
    """Return a row for each checkpoint.

    Returns:
        pandas.DataFrame: indexed as ``results.checkpoints``, with the columns "model", "objective", "learning_rate"
            (NaN if unset), "seed" (None if unknown), "progress", "title", those of :func:`average_scores`, and
            "log_perplexity", which is its "nll".
    """
    import pandas as pd

    names = ["model", "objective", "learning_rate", "seed", "progress", "title"]
    rows = [[getattr(one, name) for name in names] for one in results.checkpoints]
    table = pd.DataFrame(rows, columns=names, dtype=object).astype({"learning_rate": float})
    averages = average_scores(results.scores, ["checkpoint"])
    return table.join(averages.rename(columns={"nll": "log_perplexity"}))


@dataclass(frozen=True)
class MemorizationSummary:
    """Means and maxima over passages and prefix lengths, each (passage, prefix length) counting once.

    Args:
        num_passages (int): number of different passages.
        avg_prefix (float): mean longest prefix match, in tokens.
        max_prefix (int): largest longest prefix match, in tokens.
        avg_lms (float): mean longest memorized substring, in tokens.
        max_lms (int): largest longest memorized substring, in tokens.
        rouge_l (float): mean ROUGE-L F-measure × 100.
        verbatim_rate (float): share of samples, in [0, 1], whose whole reference was reproduced.
    """

    num_passages: int
    avg_prefix: float
    max_prefix: int
    avg_lms: float
    max_lms: int
    rouge_l: float
    verbatim_rate: float


def summarize(samples: Sequence[ProbeSample]) -> dict[str, MemorizationSummary]:
    """Summarize samples by kind, "target" or "control"; kinds without samples are left out."""
    summaries = {}
    for kind in dict.fromkeys(sample.kind for sample in samples):
        own = [sample for sample in samples if sample.kind == kind]
        summaries[kind] = MemorizationSummary(
            num_passages=len({sample.passage_id for sample in own}),
            avg_prefix=float(np.mean([sample.prefix_match for sample in own])),
            max_prefix=max(sample.prefix_match for sample in own),
            avg_lms=float(np.mean([sample.lms for sample in own])),
            max_lms=max(sample.lms for sample in own),
            rouge_l=float(np.mean([sample.rouge_l for sample in own])),
            verbatim_rate=float(np.mean([sample.verbatim for sample in own])),
        )
    return summaries
