"""The table of results: one row for every measured value of every evaluated checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from tfidf_tune.results._documents import ProbeSample

if TYPE_CHECKING:
    import pandas as pd

_SCORE_COLUMNS = {
    "checkpoint": "int64",
    **dict.fromkeys(("metric", "kind", "unit"), "category"),
    **dict.fromkeys(("prefix", "value", "count"), "float64"),
}


UNKNOWN_OBJECTIVE = "unknown"


@dataclass(frozen=True)
class Checkpoint:
    """One evaluated checkpoint of a run; together with its scores, what the results file has a line for.

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
        asked (dict[str, str]): kind of question ("prompts", "passages", "perplexity blocks", "articles", "questions")
            -> digest of all that was asked: checkpoints of one digest can be compared.
        lost_prompts (int): prompts whose token ids did not survive as text.
        lost_blocks (int): perplexity blocks whose token ids did not.
        text_prompts (bool): whether prompts were text, so that continuations were tokenized again.
        bertscore_missing (tuple[str, ...]): distinct reasons why summaries have no BERTScore.
        samples (tuple[tuple[ProbeSample, str], ...]): continuations, each with the text of its prompt. Read from the
            harness's own files only; a results file does not have them.
    """

    model: str
    objective: str
    learning_rate: float | None
    seed: int | None
    progress: int
    folder: str = ""
    checkpoint: str = ""
    recipe: str | None = None
    loss: dict[str, Any] | None = None
    training_seconds: float | None = None
    asked: dict[str, str] = field(default_factory=dict)
    lost_prompts: int = 0
    lost_blocks: int = 0
    text_prompts: bool = False
    bertscore_missing: tuple[str, ...] = ()
    samples: tuple[tuple[ProbeSample, str], ...] = field(default=(), repr=False)

    @property
    def run(self) -> tuple[str, str, float | None, int | None]:
        """The run: model, objective, learning rate, seed."""
        return self.model, self.objective, self.learning_rate, self.seed

    @property
    def is_identified(self) -> bool:
        """Whether it is known under which objective the model was trained."""
        return self.objective != UNKNOWN_OBJECTIVE

    @property
    def setting(self) -> str:
        """Model and, if set, learning rate: what runs that are compared with each other have in common."""
        return self.model if self.learning_rate is None else f"{self.model}, lr {self.learning_rate:g}"

    @property
    def title(self) -> str:
        """The run in words: "Tiny, TF-IDF, lr 0.001, seed 0"."""
        rate = "" if self.learning_rate is None else f", lr {self.learning_rate:g}"
        return f"{self.model}, {self.objective}{rate}, {'seed unknown' if self.seed is None else f'seed {self.seed}'}"


WRITTEN_FIELDS = tuple(one.name for one in fields(Checkpoint) if one.name != "samples")


@dataclass(frozen=True)
class Results:
    """Checkpoints of any runs and their scores.

    Args:
        checkpoints (tuple[Checkpoint, ...]): by run, then by ascending progress.
        scores (pandas.DataFrame): a row for each value, with the columns

            - ``checkpoint`` (int): index into ``checkpoints``,
            - ``metric`` (str): "lms", "prefix_match", "common_subsequence" (tokens), "edit_distance" (0 to 1),
              "rouge_l" (× 100), "verbatim" (0 or 1) and "num_injections" of passages; "passage_nll", "min_k",
              "min_k_plus_plus", "zlib" and "reference_nll" of complete passages, "continuation_nll" (a sum) of what
              follows a prompt; "nll" (natural logarithm, mean over tokens, infinite if the model diverged) of
              perplexity blocks, "other_nll" of those of other text; "rouge1", "rouge2", "rouge_l", "bertscore_f1"
              (× 100) of articles; "exact_match", "f1" (× 100) of questions,
            - ``kind`` (str): of the unit: "target" or "control" (passages), "block", "article", "question",
            - ``unit`` (str): its id; empty for an aggregate over units that were not kept,
            - ``prefix`` (float): length of the prompt in tokens, 0 for that of a completion, NaN if there is none,
            - ``value`` (float): mean over ``count`` observations, NaN if it is missing,
            - ``count`` (float): for example the predicted tokens of a block.
        provenance (dict[str, str]): when, on what and with which versions the runs were trained.
    """

    checkpoints: tuple[Checkpoint, ...]
    scores: "pd.DataFrame"
    provenance: dict[str, str]


def scores_table(rows: "Sequence[tuple[Any, ...]] | pd.DataFrame") -> "pd.DataFrame":
    """Make the table of :class:`Results` from its rows."""
    import pandas as pd

    return pd.DataFrame(rows, columns=list(_SCORE_COLUMNS)).astype(_SCORE_COLUMNS)


def join_results(parts: Sequence[Results]) -> Results:
    """Put results together in the given order."""
    import pandas as pd

    if len(parts) == 1:
        return parts[0]
    tables: list[pd.DataFrame] = []
    checkpoints: list[Checkpoint] = []
    for part in parts:
        tables.append(part.scores.assign(checkpoint=part.scores["checkpoint"] + len(checkpoints)))
        checkpoints += part.checkpoints
    scores = scores_table(pd.concat(tables, ignore_index=True))
    return Results(tuple(checkpoints), scores, merge_provenance([part.provenance for part in parts]))


def merge_provenance(entries: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return under each name the distinct values, in order, separated by semicolons."""
    names = dict.fromkeys(name for one in entries for name in one)
    return {name: "; ".join(dict.fromkeys(one[name] for one in entries if name in one)) for name in names}
