"""What the evaluation of runs gave: one record for each run, checkpoint and document."""

from dataclasses import dataclass, field

from tfidf_tune.analysis._samples import ProbeSample


@dataclass(frozen=True)
class BlockScore:
    """A block of ``tfidf_wikitext2_ppl``.

    Args:
        block (int): its number in the text.
        num_predictions (int): how many tokens were predicted.
        log_likelihood (float): sum of their log-probabilities, natural logarithm.
    """

    block: int
    num_predictions: int
    log_likelihood: float


@dataclass(frozen=True)
class SummaryScore:
    """An article of ``tfidf_cnn_dailymail``; scores × 100.

    Args:
        id (str): of the article.
        rouge1 (float): F-measure.
        rouge2 (float): F-measure.
        rouge_l (float): F-measure.
        bertscore_f1 (float | None): None where it is missing.
        bertscore_missing (str | None): why it is missing.
    """

    id: str
    rouge1: float
    rouge2: float
    rouge_l: float
    bertscore_f1: float | None
    bertscore_missing: str | None


@dataclass(frozen=True)
class AnswerScore:
    """A question of ``tfidf_squad``; scores × 100, the best over its gold answers.

    Args:
        id (str): of the question.
        exact_match (float): 0 or 100.
        f1 (float): of the words.
    """

    id: str
    exact_match: float
    f1: float


@dataclass(frozen=True)
class Evaluation:
    """What one checkpoint of a run scored; empty tuples where a task was not run.

    Args:
        progress (int): training progress in percent; 100 for a model that is no milestone.
        checkpoint (str): folder or hub id of the model or adapter.
        samples (tuple[ProbeSample, ...]): memorization, every prefix length.
        prompts (dict[tuple[str, int, int], str]): (passage id, offset, prefix length) -> text of the prompt.
        blocks (tuple[BlockScore, ...]): perplexity.
        summaries (tuple[SummaryScore, ...]): summarization.
        answers (tuple[AnswerScore, ...]): question answering.
        num_not_round_trip (int): samples whose ids did not survive as text (text prompts only).
        num_blocks_not_round_trip (int): blocks whose ids did not survive as text. Default: 0.
        num_injections (dict[str, int]): passage id -> how often it stood in the training text; empty where it is not
            known. Default: empty.
        text_prompts (bool): whether some samples are of text prompts, their responses tokenized again. Default: False.
    """

    progress: int
    checkpoint: str
    samples: tuple[ProbeSample, ...]
    prompts: dict[tuple[str, int, int], str]
    blocks: tuple[BlockScore, ...]
    summaries: tuple[SummaryScore, ...]
    answers: tuple[AnswerScore, ...]
    num_not_round_trip: int
    num_blocks_not_round_trip: int = 0
    num_injections: dict[str, int] = field(default_factory=dict)
    text_prompts: bool = False


@dataclass(frozen=True)
class Run:
    """One training run and its evaluations.

    Args:
        model (str): what was trained: "Pythia 1.4B (LoRA)".
        objective (str): "CE", "TF-IDF", ...
        seed (int | None): of the run; None where it is not known.
        folder (str): where it was read from.
        evaluations (tuple[Evaluation, ...]): by ascending progress.
        learning_rate (float | None): where its experiment sets several; None where it is what the config has.
            Default: None.
    """

    model: str
    objective: str
    seed: int | None
    folder: str
    evaluations: tuple[Evaluation, ...]
    learning_rate: float | None = None

    @property
    def setting(self) -> str:
        """What is the same for the runs that a comparison puts together: the model and, if any, the learning rate."""
        return self.model if self.learning_rate is None else f"{self.model}, lr {self.learning_rate:g}"
