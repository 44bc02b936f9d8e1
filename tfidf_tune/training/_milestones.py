"""The steps of a run at which checkpoints are written."""

from collections.abc import Sequence


def milestone_steps(percents: Sequence[int], total_steps: int) -> dict[int, list[int]]:
    """Find after which step each share of the run is done: the first at which at least that share is.

    Args:
        percents (Sequence[int]): shares, 1 to 100.
        total_steps (int): optimizer steps of the run.

    Returns:
        dict[int, list[int]]: percents by step, both ascending. In a short run a step may have several.
    """
    steps: dict[int, list[int]] = {}
    for percent in sorted(set(percents)):
        steps.setdefault(-(-total_steps * percent // 100), []).append(percent)
    return steps


def milestone_name(percent: int) -> str:
    """Name of a milestone's folder, ``checkpoint_25pct``."""
    return f"checkpoint_{percent}pct"
