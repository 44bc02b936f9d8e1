"""The results that the paper reports."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def paper_results() -> "pd.DataFrame":
    """Return Tables 1 to 4 of the paper: memorization, perplexity, summarization and question answering.

    From "Rebalancing Token Importance in Language Models with TF-IDF Weighted Cross-Entropy Loss". The paper gives no
    intervals for these values. Its table with a qualitative example is not counted.

    Returns:
        pandas.DataFrame: a row for each value, with the columns "table" (1 to 4), "model" (as in the experiments of
            this package: "Pythia 1.4B (QLoRA)"), "objective" ("CE" or "TF-IDF"), "measure" (the column in the tables
            of a comparison: "Avg LMS") and "value" (in tokens, in percent, or a perplexity).
    """
    import pandas as pd

    return pd.read_csv(Path(__file__).with_name("paper.csv"))
