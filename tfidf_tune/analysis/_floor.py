"""How much of text that it never saw a model hits upon: the floor of what it recites."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfidf_tune.analysis._bootstrap import Interval, bootstrap_interval
from tfidf_tune.analysis._measures import CONTROL_LMS, LMS, Floats
from tfidf_tune.analysis._runs import Evaluation


@dataclass(frozen=True)
class Floor:
    """The average LMS of the targets and that of the controls.

    Args:
        targets (float): average LMS of the targets.
        controls (float): average LMS of the controls: what a model hits upon without having seen the text.
        excess (Interval | None): 95 % interval of ``targets - controls``, the passages of either drawn independently;
            None where either has a single passage.
    """

    targets: float
    controls: float
    excess: Interval | None

    @property
    def difference(self) -> float:
        """``targets - controls``."""
        return self.targets - self.controls

    @property
    def exceeded(self) -> bool:
        """Whether the interval lies above 0, and is from enough passages for a verdict."""
        return self.excess is not None and self.excess.significant == "yes" and self.excess.low > 0

    @property
    def reached(self) -> bool:
        """Whether the interval does not lie above 0, and is from enough passages for a verdict."""
        return self.excess is not None and self.excess.significant != "too few" and self.excess.low <= 0


def lms_floor(evaluations: Sequence[Evaluation]) -> Floor | None:
    """How far the targets' average LMS is from the controls'.

    Args:
        evaluations (Sequence[Evaluation]): of one checkpoint, one a seed.

    Returns:
        Floor | None: None where there are no targets or no controls.
    """
    targets, controls = LMS.mean_totals(evaluations), CONTROL_LMS.mean_totals(evaluations)
    if targets is None or controls is None:
        return None
    target_means, control_means = targets[0] / targets[1], controls[0] / controls[1]
    excess = bootstrap_interval(_difference_of_means, target_means, control_means, paired=False)
    return Floor(float(target_means.mean()), float(control_means.mean()), excess)


def _difference_of_means(targets: Floats, controls: Floats, axis: int = -1) -> Any:
    return targets.mean(axis) - controls.mean(axis)
