"""The table of results, a row for every measured value of every evaluated checkpoint, and the
measures that it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
from pydantic import ConfigDict

from tfidf_tune.probe.run_identity import START as START  # for readers of results
from tfidf_tune.probe.sample_fields import Count, Flag, ProbeSample, Progress, Rate, Seed, Text
from tfidf_tune.report.document import Column


@dataclass(frozen=True)
class Measure:
    """A mean over observations, or e to the power of it."""

    metric: str  # in the table of results: "lms"
    kind: Literal["target", "control", "block", "article", "question"]  # of the units
    label: str  # in tables: "Avg LMS"
    phrase: str  # in sentences: "average LMS"
    exponential: bool = False

    def value(self, sums: Any, counts: Any, axis: int = -1) -> Any:
        """Return the measure of units: arrays ``[..., n]`` of sums and counts, reduced along an
        axis.
        """
        mean = sums.sum(axis) / counts.sum(axis)
        with np.errstate(over="ignore"):  # a diverged model has an infinite perplexity
            if self.exponential:
                return np.exp(mean)
            return mean


LMS = Measure("lms", "target", "Avg LMS", "average LMS")
CONTROL_LMS = Measure("lms", "control", "Control LMS", "average LMS of the controls")
PREFIX_MATCH = Measure("prefix_match", "target", "Avg Prefix", "average prefix match")
VERBATIM = Measure("verbatim", "target", "Verbatim", "share of verbatim continuations")
ROUGE_L = Measure("rouge_l", "target", "ROUGE-L", "ROUGE-L of the targets")
PASSAGE_NLL = Measure("passage_nll", "target", "NLL of targets", "NLL of the targets")
PERPLEXITY = Measure("nll", "block", "Perplexity", "perplexity", exponential=True)
OTHER_PERPLEXITY = Measure(
    "other_nll", "block", "Other perplexity", "perplexity on other text", exponential=True
)
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
COMPARED = (
    LMS,
    PREFIX_MATCH,
    ROUGE_L,
    PERPLEXITY,
    OTHER_PERPLEXITY,
    *SUMMARY_MEASURES,
    *ANSWER_MEASURES,
)
BY_LABEL = {measure.label: measure for measure in COMPARED}

# Columns of tables that show averages.
RECITED = (
    Column(PREFIX_MATCH.label, "prefix_match", ".2f"),
    Column("Max Prefix", "max_prefix_match"),
    Column(LMS.label, "lms", ".2f"),
    Column("Max LMS", "max_lms"),
    Column(ROUGE_L.label, "rouge_l", ".2f"),
    Column("Verbatim %", "verbatim_percent", ".1f"),
)
CONTROLS = Column(CONTROL_LMS.label, "control_lms", ".2f")
NEAR_VERBATIM = (
    Column("Edit distance", "edit_distance", ".2f"),
    Column("Common subsequence", "common_subsequence", ".2f"),
    Column("Control distance", "control_edit_distance", ".2f"),
    Column("Control subsequence", "control_common_subsequence", ".2f"),
)

_SCORE_COLUMNS = {
    "checkpoint": "int64",
    "metric": "category",
    "kind": "category",
    "unit": "category",
    "prefix": "float64",
    "value": "float64",
    "count": "float64",
}
UNKNOWN_OBJECTIVE = "unknown"
LONGEST_WORD = 20  # characters; text whose words are longer on average has no spaces between words
PACKAGES = ("torch", "torchtune", "transformers", "lm_eval", "tfidf-tune")
_PROVENANCE = ("date", "cpu", "cores", "platform", "python", *PACKAGES)


@dataclass(frozen=True)
class Checkpoint:
    """One evaluated checkpoint of a run; together with its scores, what the results file has a line
    for.

    Args:
        model (str): what was trained: "Pythia 1.4B (LoRA)".
        objective (str): "CE", "TF-IDF", ...
        learning_rate (float | None): set where an experiment compares learning rates.
        seed (int | None): None if it is not known.
        progress (int): training progress in percent; 100 for a model that is not a milestone.
        folder (str): the run's folder, or the folder of the results of a model without one.
        checkpoint (str): folder or hub id of the model or adapter.
        recipe (str | None): "full_finetune" or "lora_finetune".
        loss (dict[str, Any] | None): section ``loss`` of the resolved training config.
        training_seconds (float | None): duration of the training.
        num_sequences (int | None): sequences of a training step, on all processes.
        asked (dict[str, str]): kind of question ("prompts", "passages", "perplexity blocks",
            "articles", "questions") -> digest of all that was asked: checkpoints of one digest can
            be compared.
        lost_prompts (int): prompts whose token ids did not survive as text.
        lost_blocks (int): perplexity blocks whose token ids did not.
        text_prompts (bool): whether prompts were text, so that continuations were tokenized again.
        prompt_obstacle (str | None): what a server does to prompts, by its counts of tokens, "" if
            nothing; None if it does not count, was not asked, or there is no server.
        bertscore_missing (tuple[str, ...]): distinct reasons why summaries have no BERTScore.
        samples (tuple[tuple[ProbeSample, str], ...]): continuations, each with the text of its
            prompt. Read from the harness's own files only; a results file does not have them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: Text
    objective: Text
    learning_rate: Rate | None
    seed: Seed | None
    progress: Progress
    folder: Text = ""
    checkpoint: Text = ""
    recipe: Text | None = None
    loss: dict[str, Any] | None = None
    training_seconds: Rate | None = None
    num_sequences: Count | None = None
    asked: dict[str, Text] = field(default_factory=dict)
    lost_prompts: Count = 0
    lost_blocks: Count = 0
    text_prompts: Flag = False
    prompt_obstacle: Text | None = None
    bertscore_missing: tuple[Text, ...] = ()
    samples: tuple[tuple[ProbeSample, str], ...] = field(default=(), repr=False)

    @property
    def run(self) -> tuple[str, str, float | None, int | None]:
        """The run: model, objective, learning rate, seed."""
        return self.model, self.objective, self.learning_rate, self.seed

    @property
    def is_start(self) -> bool:
        """Whether it is the model that runs were started from, which no objective has trained."""
        return self.objective == START

    @property
    def is_identified(self) -> bool:
        """Whether it is known under which objective the model was trained."""
        return self.objective != UNKNOWN_OBJECTIVE

    @property
    def setting(self) -> str:
        """Model and, if set, learning rate: what runs that are compared with each other have in
        common.
        """
        if self.learning_rate is None:
            return self.model
        return f"{self.model}, lr {self.learning_rate:g}"

    @property
    def title(self) -> str:
        """The run in words: "Tiny, TF-IDF, lr 0.001, seed 0"."""
        parts = [self.model, self.objective]
        if self.learning_rate is not None:
            parts.append(f"lr {self.learning_rate:g}")
        parts.append("seed unknown" if self.seed is None else f"seed {self.seed}")
        return ", ".join(parts)


@dataclass(frozen=True)
class Results:
    """Checkpoints of any runs and their scores.

    Args:
        checkpoints (tuple[Checkpoint, ...]): by run, then by ascending progress.
        scores (pandas.DataFrame): a row for each value, with the columns

            - ``checkpoint`` (int): index into ``checkpoints``,
            - ``metric`` (str): "lms", "prefix_match", "common_subsequence" (tokens),
              "edit_distance" (0 to 1), "rouge_l" (× 100), "verbatim" (0 or 1) and "num_injections"
              of passages; "passage_nll", "min_k", "min_k_plus_plus", "zlib", "reference_nll", "wbc"
              and "error_zone" of complete passages, "continuation_nll" (a sum) of what follows a
              prompt; "nll" (natural logarithm, mean over tokens, infinite if the model diverged) of
              perplexity blocks, "other_nll" of those of other text; "rouge1", "rouge2", "rouge_l",
              "bertscore_f1" (× 100) of articles; "exact_match", "f1" (× 100) of questions;
              "vocab_size" of the model's tokenizer and "words_a_token" of its passages; "is_served"
              of a model behind a server, "has_bos" (0 or 1) of a model that got ids after BOS or
              without; "has_eos" (1) of passages with EOS inside; of the positive control
              "num_read_with_copy", "num_read_without_copy" and "num_to_read" (tokens),
              "nll_with_copy", "nll_without_copy" and "unigram_nll",
            - ``kind`` (str): of the unit: "target" or "control" (passages), "block", "article",
              "question", "model", "copy text", "copy chat" and "copy likelihoods" (controls that
              were shown),
            - ``unit`` (str): its id; empty for an aggregate over units that were not kept,
            - ``prefix`` (float): length of the prompt in tokens, 0 for that of a completion, NaN if
              there is none,
            - ``value`` (float): mean over ``count`` observations, NaN if it is missing,
            - ``count`` (float): for example the predicted tokens of a block.
        provenance (dict[str, str]): when, on what and with which versions the runs were trained.
    """

    checkpoints: tuple[Checkpoint, ...]
    scores: pd.DataFrame
    provenance: dict[str, str]


def scores_table(rows: Sequence[tuple[Any, ...]] | pd.DataFrame) -> pd.DataFrame:
    """Make the table of :class:`Results` from its rows."""
    return pd.DataFrame(rows, columns=list(_SCORE_COLUMNS)).astype(_SCORE_COLUMNS)


def merge_provenance(entries: Sequence[dict[str, str] | None]) -> dict[str, str]:
    """Return under each name the distinct values, in order, separated by semicolons; None is an
    unknown machine.
    """
    merged: dict[str, dict[str, None]] = {}  # under each name its values, without repetitions
    for entry in entries:
        if entry is None:
            entry = dict.fromkeys(_PROVENANCE, "unknown")
        for name, value in entry.items():
            merged.setdefault(name, {})[value] = None
    return {name: "; ".join(values) for name, values in merged.items()}
