"""What is being done, how much there is still to do, and about how long it will take: lines for a terminal or a log."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean


@dataclass(frozen=True)
class Step:
    """A cell as it is shown.

    Args:
        kind (str): "training" or "evaluation".
        model (str): its model: cells of one kind and model are taken to need the same time.
        title (str): one line.
    """

    kind: str
    model: str
    title: str


class Progress:
    """Prints a line when a cell begins and one when it ends.

    Args:
        to_do (Sequence[Step]): the cells to do.
        earlier (Sequence[tuple[Step, float]]): cells that are done, and the seconds they took.
    """

    def __init__(self, to_do: Sequence[Step], earlier: Sequence[tuple[Step, float]]) -> None:
        self._to_do = [(step.kind, step.model) for step in to_do]
        self._total = len(to_do)
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for step, seconds in earlier:
            self._seconds[step.kind, step.model].append(seconds)
        self._start = self._begun = time.monotonic()

    def begin(self, step: Step) -> None:
        """Say what comes now and what is known of the rest."""
        self._begun = time.monotonic()
        number = self._total - len(self._to_do) + 1
        rest = self._rest()
        estimate = "" if rest is None else f", about {duration(rest)} to go"
        say(f"[{number}/{self._total}] {step.title}  ({duration(self._begun - self._start)} so far{estimate})")

    def end(self, step: Step) -> None:
        """Say that it is done."""
        seconds = time.monotonic() - self._begun
        self._to_do.remove((step.kind, step.model))
        self._seconds[step.kind, step.model].append(seconds)
        say(f"    done in {duration(seconds)}")

    def drop(self, step: Step) -> None:
        """Count a cell that is given up, or cannot be done, as none that is still to do."""
        self._to_do.remove((step.kind, step.model))

    def _rest(self) -> float | None:
        """Seconds for what is to do; None while there is nothing to tell them from."""
        estimates = [self._estimate(*key) for key in self._to_do]
        return None if None in estimates else sum(estimate for estimate in estimates if estimate is not None)

    def _estimate(self, kind: str, model: str) -> float | None:
        own = self._seconds.get((kind, model), [])
        others = [value for (other, _), values in self._seconds.items() if other == kind for value in values]
        return mean(own or others) if own or others else None


def say(text: str) -> None:
    """Print at once, so that a log has it when it happens."""
    print(text, flush=True)


def duration(seconds: float) -> str:
    """Write seconds for people.

    Args:
        seconds (float): a duration.

    Returns:
        str: "42 s", "3 min 05 s" or "2 h 07 min".
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
