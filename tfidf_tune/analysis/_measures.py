"""What is compared: which rows of the table of results a measure is made of."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """A mean over observations, or e to the power of it.

    Args:
        name (str): as in tables: "Avg LMS".
        phrase (str): as in sentences: "average LMS".
        metric (str): in the table of results.
        kind (str): of the units: "target", "control", "block", "article", "question".
        exponential (bool): whether the measure is e to the power of the mean. Default: False.
    """

    name: str
    phrase: str
    metric: str
    kind: Literal["target", "control", "block", "article", "question"]
    exponential: bool = False

    @property
    def unit(self) -> str:
        """What is resampled as a whole: "passage", "block", "article", "question"."""
        return "passage" if self.kind in ("target", "control") else self.kind

    def value(self, sums: Floats, counts: Floats, axis: int = -1) -> Any:
        """Return the measure of units ``[..., n]`` along an axis."""
        mean = sums.sum(axis) / counts.sum(axis)
        with np.errstate(over="ignore"):  # a diverged model has an infinite perplexity
            return np.exp(mean) if self.exponential else mean


LMS = Measure("Avg LMS", "average LMS", "lms", "target")
CONTROL_LMS = Measure("Control LMS", "average LMS of the controls", "lms", "control")
PERPLEXITY = Measure("Perplexity", "perplexity", "nll", "block", exponential=True)
SUMMARY_MEASURES = (
    Measure("Summary ROUGE-1", "ROUGE-1", "rouge1", "article"),
    Measure("Summary ROUGE-2", "ROUGE-2", "rouge2", "article"),
    Measure("Summary ROUGE-L", "ROUGE-L", "rouge_l", "article"),
    Measure("Summary BERTScore-F1", "BERTScore-F1", "bertscore_f1", "article"),
)
ANSWER_MEASURES = (
    Measure("Answer EM", "exact match", "exact_match", "question"),
    Measure("Answer F1", "F1", "f1", "question"),
)
COMPARED = (
    LMS,
    Measure("Avg Prefix", "average prefix match", "prefix_match", "target"),
    Measure("ROUGE-L", "ROUGE-L of the targets", "rouge_l", "target"),
    PERPLEXITY,
    *SUMMARY_MEASURES,
    *ANSWER_MEASURES,
)
