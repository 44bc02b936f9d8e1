"""What our tasks log of each document: the one definition that tasks, results and reports share.

A line of the harness's ``samples_<task>_<date>.jsonl`` has the document under ``doc``. The tasks
add the fields of the scores in ``process_results``; the table of results reads the fields that are
listed here, which pydantic checks.
"""

import reprlib
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from typing_extensions import NotRequired, TypedDict

from tfidf_tune._checks import first_problem

MEMORIZATION = "tfidf_memorization"
MEMBERSHIP = "tfidf_membership"
PERPLEXITY = "tfidf_wikitext2_ppl"
OTHER_PERPLEXITY = "tfidf_other_ppl"
SUMMARIZATION = "tfidf_cnn_dailymail"
QA = "tfidf_squad"
POSITIVE_CONTROL = "tfidf_positive_control"
POSITIVE_CONTROL_NLL = "tfidf_positive_control_nll"

UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""What reading a damaged file may raise; pydantic's ``ValidationError`` is a ``ValueError``."""


class Unanswered(str):
    """An answer that says nothing of the model: withheld by a content filter of its server, or
    empty.
    """


def cause_of(error: BaseException) -> str:
    """Describe an error of a damaged file; of pydantic's, the first wrong field, its value and what
    is possible.
    """
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}"
    # A message for each field would hide the cause.
    name, problem = first_problem(error)
    return f"{name or 'it'} is {reprlib.repr(problem['input'])}: {problem['msg']}"


def _encodable(value: Any) -> Any:
    """Escape lone surrogates in a text, which UTF-8 cannot hold."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("it must not be below 0")
    return value


# Strict: neither True nor "1" is a number. Integers up to 2^53, which a float holds exactly.
Text = Annotated[str, BeforeValidator(_encodable)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
Percent = Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)]
Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Score = Annotated[float, Field(strict=True)]
"""Also NaN and infinity, of a model that diverged."""
Nll = Annotated[Score, AfterValidator(_not_negative)]
Rate = Annotated[Finite, Field(ge=0)]
Seed = Annotated[int, Field(strict=True, ge=-(2**63), le=2**64 - 1)]  # any seed that torch takes
Progress = Annotated[Count, Field(le=100)]
_Kind = Literal["target", "control"]
_TokenIds = list[Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]]


@dataclass(frozen=True)
class ProbeSample:
    """One prompt, its continuation and its scores.

    Args:
        passage_id (str): id of the passage.
        kind (str): "target" (injected into the training text) or "control" (never seen in
            training).
        offset (int): where the prompt starts in the passage, in tokens.
        prefix_length (int): length of the prompt in tokens; 0 for the prompt of a completion, of
            any length.
        generated_ids (list[int]): the continuation, without EOS and what follows it.
        reference_ids (list[int]): the ids that follow the prompt in the passage.
        generated_text (str): ``generated_ids`` decoded.
        reference_text (str): ``reference_ids`` decoded.
        prefix_match (int): longest prefix match in tokens.
        lms (int): longest memorized substring in tokens.
        rouge_l (float): ROUGE-L F-measure × 100 of the two texts.
        verbatim (bool): whether every reference token was reproduced, in order, from the start.
        edit_distance (float | None): Levenshtein's distance / length of the longer, in [0, 1]; None
            in older results.
        common_subsequence (int | None): longest common subsequence in tokens; None in older
            results.
        attack (str): how the passage was asked for, if the task names several ways. Default: "".
        unanswered (int): answers that were withheld or empty, see :class:`Unanswered`. Default: 0.
    """

    passage_id: Text
    kind: _Kind
    offset: Count
    prefix_length: Count
    generated_ids: _TokenIds
    reference_ids: _TokenIds
    generated_text: Text
    reference_text: Text
    prefix_match: Count
    lms: Count
    rouge_l: Percent
    verbatim: Flag
    edit_distance: Annotated[Finite, Field(ge=0, le=1)] | None = None
    common_subsequence: Count | None = None
    attack: Text = ""
    unanswered: Count = 0

    @property
    def prompt_label(self) -> str:
        """The prompt in messages: "target a, offset 0, 32 tokens", or "target a, its own prompt" of
        a completion.
        """
        prompt = "its own prompt"
        if self.prefix_length:
            prompt = f"offset {self.offset}, {self.prefix_length} tokens"
        label = f"{self.kind} {self.passage_id}, {prompt}"
        return f"{label}, attack {self.attack}" if self.attack else label


class PromptDocument(TypedDict):
    """A prompt of ``tfidf_memorization_*``, and how it was asked."""

    prompt_text: Text
    round_trip: Flag
    num_injections: Count
    sample: ProbeSample
    prompts: NotRequired[Text]
    prompt_noise: NotRequired[Any]
    generation: NotRequired[Any]
    has_eos: NotRequired[Flag]
    bos: NotRequired[Flag | None]


class PassageDocument(TypedDict):
    """A complete passage of ``tfidf_membership``.

    ``continuations`` has pairs of the length of a prompt, 0 for the prompt of a completion, and the
    NLL of what follows it, a sum.
    """

    passage_id: Text
    kind: _Kind
    token_ids: _TokenIds
    round_trip: Flag
    prompts: Text
    scores: "PassageScores"
    continuations: list[tuple[Count, Nll]]
    vocab_size: NotRequired[Count]
    bos: NotRequired[Flag | None]
    is_random: NotRequired[Flag]


class PassageScores(TypedDict):
    """Scores of a passage; :func:`tfidf_tune.probe.passage_scores` and
    :func:`tfidf_tune.probe.reference_scores` define them.
    """

    nll: Nll
    zlib: NotRequired[Nll]
    min_k: NotRequired[Score]
    min_k_plus_plus: NotRequired[Score]
    reference_nll: NotRequired[Score]
    wbc: NotRequired[Score]
    error_zone: NotRequired[Score]


class ReadingDocument(TypedDict):
    """A prompt of ``tfidf_positive_control``: ``num_read`` of the reference's tokens are in the
    answer, in a row.
    """

    passage_id: Text
    path: Literal["text", "chat"]
    has_copy: Flag
    reference_ids: _TokenIds
    num_read: Count
    round_trip: Flag


class CopyLikelihoodDocument(TypedDict):
    """A passage of ``tfidf_positive_control_nll``; NLLs are means over its tokens, in nats."""

    passage_id: Text
    has_copy: Flag
    nll: Nll
    unigram_nll: Nll
    round_trip: Flag


class BlockDocument(TypedDict):
    """A block of ``tfidf_wikitext2_ppl`` or ``tfidf_other_ppl``; ``log_likelihood`` is a sum over
    its predictions.
    """

    block: Count
    num_predictions: Annotated[Count, Field(ge=1)]
    log_likelihood: Annotated[Score, AfterValidator(lambda value: -_not_negative(-value))]
    round_trip: Flag
    vocab_size: NotRequired[Count]
    bos: NotRequired[Flag | None]


class SummaryDocument(TypedDict):
    """An article of ``tfidf_cnn_dailymail``: scores × 100, or the reason why
    BERTScore is missing.
    """

    id: Text
    rouge1: Percent
    rouge2: Percent
    rouge_l: Percent
    bertscore_f1: Finite | None
    bertscore_missing: Text | None


class AnswerDocument(TypedDict):
    """A question of ``tfidf_squad``: scores × 100."""

    id: Text
    exact_match: Percent
    f1: Percent
