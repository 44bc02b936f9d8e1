"""The floor of recitation: the LMS that held-out passages reach by chance."""

from typing import Any, NamedTuple

from tfidf_tune.probe.membership_scores import Floats
from tfidf_tune.results.intervals import Interval, bootstrap_interval


class Floor(NamedTuple):
    """The average LMS of the targets, and of the controls: what is recited of text that was never
    seen.
    """

    targets: float
    controls: float
    excess: Interval  # of targets - controls, drawn independently

    @property
    def difference(self) -> float:
        """``targets - controls``."""
        return self.targets - self.controls

    @property
    def reached(self) -> bool:
        """Whether the interval does not lie above 0 and is from enough passages for a verdict."""
        return self.excess.significant in ("yes", "no") and self.excess.low <= 0


def floor_of(targets: Floats, controls: Floats) -> Floor:
    """Compare the average LMS of passages: targets ``[n]`` and controls ``[m]``."""

    def difference(targets: Floats, controls: Floats, axis: int = -1) -> Any:
        return targets.mean(axis) - controls.mean(axis)

    excess = bootstrap_interval(difference, targets, controls, paired=False)
    return Floor(float(targets.mean()), float(controls.mean()), excess)
