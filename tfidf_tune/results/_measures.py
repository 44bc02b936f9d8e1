"""The measures of checkpoints: what the table of results calls them, and what tables and sentences do."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Measure:
    """A mean over observations, or e to the power of it."""

    metric: str  # in the table of results: "lms"
    kind: Literal["target", "control", "block", "article", "question"]  # of the units
    label: str  # in tables: "Avg LMS"
    phrase: str  # in sentences: "average LMS"
    exponential: bool = False

    @property
    def unit(self) -> str:
        """What is resampled as a whole: "passage", "block", "article", "question"."""
        return "passage" if self.kind in ("target", "control") else self.kind

    def value(self, sums: Any, counts: Any, axis: int = -1) -> Any:
        """Return the measure of units: arrays ``[..., n]`` of sums and counts, reduced along an axis."""
        import numpy as np

        mean = sums.sum(axis) / counts.sum(axis)
        with np.errstate(over="ignore"):  # a diverged model has an infinite perplexity
            return np.exp(mean) if self.exponential else mean


LMS = Measure("lms", "target", "Avg LMS", "average LMS")
CONTROL_LMS = Measure("lms", "control", "Control LMS", "average LMS of the controls")
PREFIX_MATCH = Measure("prefix_match", "target", "Avg Prefix", "average prefix match")
ROUGE_L = Measure("rouge_l", "target", "ROUGE-L", "ROUGE-L of the targets")
PASSAGE_NLL = Measure("passage_nll", "target", "NLL of targets", "NLL of the targets")
PERPLEXITY = Measure("nll", "block", "Perplexity", "perplexity", exponential=True)
OTHER_PERPLEXITY = Measure("other_nll", "block", "Other perplexity", "perplexity on other text", exponential=True)
SUMMARY_MEASURES = (
    Measure("rouge1", "article", "Summary ROUGE-1", "ROUGE-1 of summaries"),
    Measure("rouge2", "article", "Summary ROUGE-2", "ROUGE-2 of summaries"),
    Measure("rouge_l", "article", "Summary ROUGE-L", "ROUGE-L of summaries"),
    Measure("bertscore_f1", "article", "Summary BERTScore-F1", "BERTScore-F1 of summaries"),
)
ANSWER_MEASURES = (
    Measure("exact_match", "question", "Answer EM", "exact match of answers"),
    Measure("f1", "question", "Answer F1", "F1 of answers"),
)
COMPARED = (LMS, PREFIX_MATCH, ROUGE_L, PERPLEXITY, OTHER_PERPLEXITY, *SUMMARY_MEASURES, *ANSWER_MEASURES)
BY_LABEL = {measure.label: measure for measure in COMPARED}

# Columns of tables: header, column of averages, format of the numbers.
RECITED = (
    (PREFIX_MATCH.label, "prefix_match", ".2f"),
    ("Max Prefix", "max_prefix_match", ""),
    (LMS.label, "lms", ".2f"),
    ("Max LMS", "max_lms", ""),
    (ROUGE_L.label, "rouge_l", ".2f"),
    ("Verbatim %", "verbatim_percent", ".1f"),
)
CONTROLS = (CONTROL_LMS.label, "control_lms", ".2f")
NEAR_VERBATIM = (
    ("Edit distance", "edit_distance", ".2f"),
    ("Common subsequence", "common_subsequence", ".2f"),
    ("Control distance", "control_edit_distance", ".2f"),
    ("Control subsequence", "control_common_subsequence", ".2f"),
)
