"""What the intervals of two differences, in LMS and in log perplexity, allow to say of an objective."""

from tfidf_tune.analysis._seed_estimates import SeedEstimate

BETTER, WORSE, NO_DIFFERENCE = "better", "worse", "no difference shown"
# By the direction of LMS and that of perplexity: -1 lower, 0 not told apart, +1 higher.
_VERDICTS = {
    (-1, -1): BETTER,
    (-1, 0): "recites less, perplexity not told apart",
    (-1, 1): "recites less, perplexity higher",
    (0, -1): "LMS not told apart, perplexity lower",
    (0, 0): NO_DIFFERENCE,
    (0, 1): "LMS not told apart, perplexity higher",
    (1, -1): "recites more, perplexity lower",
    (1, 0): "recites more, perplexity not told apart",
    (1, 1): WORSE,
}
VERDICTS = (*_VERDICTS.values(), "no verdict: fewer than two pairs", "no verdict: a run diverged")
"""All that can be said, the best first."""


def verdict(lms: SeedEstimate | None, log_perplexity: SeedEstimate | None) -> str:
    """Say in words how an objective differs from a reference.

    Lower is an interval below 0, higher one above 0, and 0 itself is in neither. "Better" is a lower LMS at a
    perplexity that is not higher: one whose interval ends at or below 0, exactly equal perplexities included; "worse"
    the mirror image.

    Args:
        lms (SeedEstimate | None): objective minus reference; None where no pair of runs is there.
        log_perplexity (SeedEstimate | None): likewise.

    Returns:
        str: one of ``VERDICTS``.
    """
    if lms is None or log_perplexity is None or min(lms.num_seeds, log_perplexity.num_seeds) < 2:
        return VERDICTS[-2]
    if lms.low is None or lms.high is None or log_perplexity.low is None or log_perplexity.high is None:
        return VERDICTS[-1]
    recited, perplexity = _direction(lms.low, lms.high), _direction(log_perplexity.low, log_perplexity.high)
    if recited < 0 and log_perplexity.high <= 0:
        return BETTER
    if recited > 0 and log_perplexity.low >= 0:
        return WORSE
    return _VERDICTS[recited, perplexity]


def _direction(low: float, high: float) -> int:
    return (low > 0) - (high < 0)
