"""What our tasks log of each document: the one definition that tasks, results and reports share.

A line of the harness's ``samples_<task>_<date>.jsonl`` has the document under ``doc``. The tasks add the fields of the
scores in ``process_results``; the table of results reads the fields that are listed here, and checks each by the
:class:`~tfidf_tune.results._fields.Field` in its annotation, see :func:`schema`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, TypedDict, get_type_hints

from tfidf_tune.results._fields import FLAG, OBJECT, TEXT, TOKEN_IDS, Field, integer, number, optional

MEMORIZATION, MEMBERSHIP = "tfidf_memorization", "tfidf_membership"
PERPLEXITY, OTHER_PERPLEXITY = "tfidf_wikitext2_ppl", "tfidf_other_ppl"
SUMMARIZATION, QA = "tfidf_cnn_dailymail", "tfidf_squad"

_Text = Annotated[str, TEXT]
_Flag = Annotated[bool, FLAG]
_Kind = Annotated[str, Field(lambda value: value in ("target", "control"), "one of target, control")]
_Count = Annotated[int, integer()]
_TokenIds = Annotated[list[int], TOKEN_IDS]
_Percent = Annotated[float, number(0, 100)]
_NLL = Annotated[float, number(0, finite=False)]
_Object = Annotated[dict[str, Any], OBJECT]


@dataclass(frozen=True)
class ProbeSample:
    """One prompt, its continuation and its scores.

    Args:
        passage_id (str): id of the passage.
        kind (str): "target" (injected into the training text) or "control" (never seen in training).
        offset (int): where the prompt starts in the passage, in tokens.
        prefix_length (int): length of the prompt in tokens; 0 for the prompt of a completion, of any length.
        generated_ids (list[int]): the continuation, without EOS and what follows it.
        reference_ids (list[int]): the ids that follow the prompt in the passage.
        generated_text (str): ``generated_ids`` decoded.
        reference_text (str): ``reference_ids`` decoded.
        prefix_match (int): longest prefix match in tokens.
        lms (int): longest memorized substring in tokens.
        rouge_l (float): ROUGE-L F-measure × 100 of the two texts.
        verbatim (bool): whether every reference token was reproduced, in order, from the start.
        edit_distance (float | None): Levenshtein's distance / length of the longer, in [0, 1]; None in older results.
        common_subsequence (int | None): longest common subsequence in tokens; None in older results.
        attack (str): how the passage was asked for, if the task names several ways. Default: "".
    """

    passage_id: _Text
    kind: _Kind
    offset: _Count
    prefix_length: _Count
    generated_ids: _TokenIds
    reference_ids: _TokenIds
    generated_text: _Text
    reference_text: _Text
    prefix_match: _Count
    lms: _Count
    rouge_l: _Percent
    verbatim: _Flag
    edit_distance: Annotated[float | None, optional(number(0, 1))] = None
    common_subsequence: Annotated[int | None, optional(integer())] = None
    attack: _Text = ""

    @property
    def prompt_label(self) -> str:
        """The prompt in messages: "target a, offset 0, 32 tokens", or "target a, its own prompt" of a completion."""
        by = f", attack {self.attack}" if self.attack else ""
        if not self.prefix_length:
            return f"{self.kind} {self.passage_id}, its own prompt{by}"
        return f"{self.kind} {self.passage_id}, offset {self.offset}, {self.prefix_length} tokens{by}"


class PromptDocument(TypedDict):
    """A prompt of ``tfidf_memorization_*``; ``sample`` has the fields of :class:`ProbeSample`."""

    prompt_text: _Text
    round_trip: _Flag
    num_injections: _Count
    sample: _Object


class PassageDocument(TypedDict):
    """A complete passage of ``tfidf_membership``.

    ``scores`` has fields of :class:`PassageScores`; ``continuations`` has pairs of the length of a prompt, 0 for the
    prompt of a completion, and the NLL of what follows it, a sum.
    """

    passage_id: _Text
    kind: _Kind
    token_ids: _TokenIds
    round_trip: _Flag
    prompts: _Text
    scores: _Object
    continuations: Annotated[list[tuple[int, float]], Field(lambda value: isinstance(value, list), "a list")]


class PassageScores(TypedDict, total=False):
    """Scores of a passage, ``nll`` always; :func:`tfidf_tune.analysis.passage_scores` defines them."""

    nll: _NLL
    zlib: _NLL
    min_k: Annotated[float, number(finite=False)]
    min_k_plus_plus: Annotated[float, number(finite=False)]
    reference_nll: Annotated[float, number(finite=False)]


class BlockDocument(TypedDict):
    """A block of ``tfidf_wikitext2_ppl`` or ``tfidf_other_ppl``; ``log_likelihood`` is a sum over its predictions."""

    block: _Count
    num_predictions: Annotated[int, integer(1)]
    log_likelihood: Annotated[float, number(most=0, finite=False)]
    round_trip: _Flag


class SummaryDocument(TypedDict):
    """An article of ``tfidf_cnn_dailymail``: scores × 100, or the reason why BERTScore is missing."""

    id: _Text
    rouge1: _Percent
    rouge2: _Percent
    rouge_l: _Percent
    bertscore_f1: Annotated[float | None, optional(number())]
    bertscore_missing: Annotated[str | None, optional(TEXT)]


class AnswerDocument(TypedDict):
    """A question of ``tfidf_squad``: scores × 100."""

    id: _Text
    exact_match: _Percent
    f1: _Percent


def schema(of: type) -> dict[str, Field]:
    """Return what each annotated field of a class must be, for :func:`~._fields.checked`."""
    hints = get_type_hints(of, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}
