"""Write the results of a report without what no table of the documentation reads, with six
significant digits.

    python research/benchmarks/condense.py frontier/results.jsonl research/results/evidence.jsonl

LMS is averaged over the prompts of a passage. The scores of passages that membership is inferred
from are kept, and the likelihoods of targets' continuations; all other scores become one average.
Paths of runs are left out.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tfidf_tune.results import Results, read_results, write_results
from tfidf_tune.results.membership_table import SCORES
from tfidf_tune.results.table import scores_table

_OF_PASSAGES = ("lms", *SCORES)
_WHOLE = ("continuation_nll",)


def condensed(results: Results) -> Results:
    """Average the scores that are not kept one by one."""
    scores = results.scores
    whole = scores[scores["metric"].isin(_WHOLE) & (scores["kind"] == "target")]
    others = scores[~scores["metric"].isin(_WHOLE) & (scores["unit"] != "")]
    of_targets = others[(others["metric"] == "lms") & (others["kind"] == "target")]
    largest = of_targets.groupby("checkpoint", as_index=False)["value"].max()
    units = others["unit"].astype(str).where(others["metric"].isin(_OF_PASSAGES), "")
    rows = others.assign(unit=units, sum=others["value"] * others["count"]).astype(
        {"metric": str, "kind": str}
    )
    means = rows.groupby(["checkpoint", "metric", "kind", "unit"], as_index=False, sort=False)[
        ["sum", "count"]
    ].sum()
    kept = pd.concat(
        [
            whole,
            means.assign(value=means["sum"] / means["count"], prefix=float("nan")),
            largest.assign(metric="max_lms", kind="target", unit="", prefix=float("nan"), count=1),
        ]
    )
    rounded = kept.assign(value=[float(f"{value:.6g}") for value in kept["value"]])
    table = rounded[scores.columns].sort_values("checkpoint", kind="stable", ignore_index=True)
    checkpoints = tuple(replace(one, folder="", checkpoint="") for one in results.checkpoints)
    return replace(results, checkpoints=checkpoints, scores=scores_table(table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="results.jsonl of a report")
    parser.add_argument("record", type=Path, help="file to be written")
    options = parser.parse_args()
    write_results(condensed(read_results(options.report)), options.record)
