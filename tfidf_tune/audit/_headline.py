"""Which score membership inference is judged by: fixed before the first question, by the kind of
targets.

No attack is best everywhere (``research/results/memaudit.md``), so an audit has a score of each.
The best of them, chosen after the fact, is no evidence: of seven scores of text that no model has
seen, one is high by chance.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

if TYPE_CHECKING:
    from tfidf_tune.audit._plan import Plan
    from tfidf_tune.passages import Passage

# In the table of results.
_METRICS = {
    "passage_nll": "Loss",
    "min_k": "Min-K%",
    "min_k_plus_plus": "Min-K%++",
    "wbc": "WBC",
}
_WORDS = {
    "Loss": "its loss",
    "Min-K%": "the likelihood of its least likely tokens (Min-K%)",
    "Min-K%++": "the likelihood of its least likely tokens (Min-K%++)",
    "WBC": "its comparison with the reference (WBC)",
}


class Headline(NamedTuple):
    """The score that decides about membership.

    Attributes:
        score (str | None): as in tables: "Loss", "Min-K%", "Min-K%++" or "WBC"; None if nothing
            decides.
        reason (str): why it is this one, or why there is none, in a clause.
    """

    score: str | None
    reason: str

    @property
    def words(self) -> str:
        """What tells targets from controls, the subject of a sentence."""
        return _WORDS[self.score or "Loss"]


def choose_headline(*, is_random: bool, scores: Collection[str]) -> Headline:
    """Choose a headline by the kind of targets.

    =====================================  =========================================
    random canaries                        Min-K%++, or Min-K% where a model gives
                                           no probabilities of all tokens
    natural text, scored by a reference    WBC
    natural text                           the loss
    =====================================  =========================================

    Args:
        is_random (bool): whether all targets are drawn at random.
        scores (Collection[str]): the scores that are measured, whatever they are; none if the model
            gives no likelihoods.
    """
    if "Loss" not in scores:
        return Headline(None, "the model gives no likelihoods")
    if is_random:
        for score in ("Min-K%++", "Min-K%"):
            if score in scores:
                return Headline(score, "the targets are drawn at random")
        return Headline("Loss", "the model gives no likelihoods of single tokens")
    if "WBC" in scores:
        return Headline("WBC", "the targets are natural text, which a reference scores, too")
    return Headline("Loss", "the targets are natural text, which no reference scores")


def planned_headline(plan: "Plan", passages: "Sequence[Passage]") -> Headline:
    """Return the headline of an audit before its first question."""
    from tfidf_tune.tasks import MODEL_NAME
    from tfidf_tune.tasks.evaluation import likelihood_problem

    targets = [passage for passage in passages if passage.kind == "target"]
    if len(targets) == len(passages):
        return Headline(None, "there are no controls")
    scores = {"Loss", "Min-K%"}
    if likelihood_problem(plan.model_name, plan.model_args) is not None:
        scores = set()
    elif plan.model_name == MODEL_NAME:  # servers and vLLM give the likeliest tokens only
        scores.add("Min-K%++")
    if scores and "reference_model" in plan.settings:
        scores.add("WBC")
    headline = choose_headline(is_random=_are_random(targets), scores=scores)
    if plan.spec.server is not None:
        # Only its answer tells.
        reason = f"{headline.reason}; none if the server gives no likelihoods"
        headline = headline._replace(reason=reason)
    return headline


def headline_of_results(scores: pd.DataFrame, checkpoint: int) -> Headline:
    """Return the headline of answers without a plan, by which scores there are."""
    rows = scores[(scores["checkpoint"] == checkpoint) & (scores["kind"] == "target")]
    metrics = rows["metric"].astype(str)
    measured = {_METRICS[name] for name in metrics.unique() if name in _METRICS}
    units = rows["unit"].astype(str)
    num_random = units[metrics == "is_random"].nunique()
    num_scored = units[metrics == "passage_nll"].nunique()
    is_random = num_random > 0 and num_random == num_scored
    return choose_headline(is_random=is_random, scores=measured)


def headline_of_plan(planned: dict[str, Any]) -> Headline:
    """Return the headline that a plan has."""
    return Headline(**planned["headline"]["membership"])


def _are_random(targets: "Sequence[Passage]") -> bool:
    return all(target.is_random for target in targets)
