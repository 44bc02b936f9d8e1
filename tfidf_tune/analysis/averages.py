"""Averages of the table of results over passages and blocks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfidf_tune.results import Results

if TYPE_CHECKING:
    import pandas as pd

_CONTINUATION = ("lms", "edit_distance", "common_subsequence")
_OF_CONTROLS = [f"control_{name}" for name in _CONTINUATION]


def average_scores(scores: "pd.DataFrame", by: Sequence[str]) -> "pd.DataFrame":
    """Average the scores of passages and blocks in groups.

    Args:
        scores (pandas.DataFrame): rows of the table of results, with the columns ``by``. Aggregates count only where
            a checkpoint has no rows of single units.
        by (Sequence[str]): columns that make the groups.

    Returns:
        pandas.DataFrame: a row a group, in order of appearance, with the columns "lms", "prefix_match", "rouge_l",
            "verbatim", "edit_distance" and "common_subsequence" (targets), "control_lms", "control_edit_distance",
            "control_common_subsequence", "nll", "max_lms", "max_prefix_match", and "num_predictions"; NaN if missing.
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
    averages = averages.reindex(columns=[*_CONTINUATION, "prefix_match", "rouge_l", "verbatim", *_OF_CONTROLS, "nll"])
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
            (NaN if unset), "seed" (None if unknown), "progress", "folder", "setting", "run" and "title", see
            :class:`~tfidf_tune.results.Checkpoint`; those of :func:`average_scores`; and "log_perplexity", which is
            its "nll".
    """
    import pandas as pd

    names = ["model", "objective", "learning_rate", "seed", "progress", "folder", "setting", "run", "title"]
    rows = [[getattr(one, name) for name in names] for one in results.checkpoints]
    table = pd.DataFrame(rows, columns=names, dtype=object).astype({"learning_rate": float, "progress": int})
    averages = average_scores(results.scores, ["checkpoint"])
    return table.join(averages.rename(columns={"nll": "log_perplexity"}))
