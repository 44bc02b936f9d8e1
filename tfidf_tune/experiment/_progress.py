"""What is being done, how much there is still to do, and about how long it will take: lines for a terminal or a log."""

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from tfidf_tune._printing import say


@dataclass(frozen=True)
class Step:
    """A cell as it is shown.

    Args:
        kind (str): "training" or "evaluation".
        model (str): its model: cells of one kind and model are taken to need the same time.
        run (str): its run, whose cells come one after the other.
        title (str): one line.
    """

    kind: str
    model: str
    run: str
    title: str


class Progress:
    """Prints a line when a cell begins and one when it ends; several threads may tell it at once.

    Args:
        to_do (Sequence[Step]): the cells to do.
        earlier (Sequence[tuple[Step, float]]): cells that are done, and the seconds they took.
        jobs (int): how many runs are done at once; above 1, each line says which cell it is about. Default: 1.
    """

    def __init__(self, to_do: Sequence[Step], earlier: Sequence[tuple[Step, float]], jobs: int = 1) -> None:
        self._to_do = list(to_do)
        self._total = len(to_do)
        self._jobs = jobs
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
        for step, seconds in earlier:
            self._seconds[step.kind, step.model].append(seconds)
        self._start = time.monotonic()
        self._begun: dict[str, float] = {}  # by run, of which at most one cell is being done
        self._guard = threading.RLock()

    def begin(self, step: Step) -> None:
        """Say what comes now and what is known of the rest."""
        with self._guard:
            self._begun[step.run] = time.monotonic()
            if self._jobs == 1:
                say(f"[{self._total - len(self._to_do) + 1}/{self._total}] {step.title}  ({self._so_far()})")
            else:
                self._tell("begun", step)

    def note(self, step: Step, text: str) -> None:
        """Say more about a cell that is being done."""
        say(f"    {text}" if self._jobs == 1 else f"        {step.title}: {text}")

    def end(self, step: Step) -> None:
        """Say that it is done."""
        with self._guard:
            seconds = time.monotonic() - self._begun.pop(step.run)
            self._remove(step)
            self._seconds[step.kind, step.model].append(seconds)
            if self._jobs == 1:
                say(f"    done in {duration(seconds)}")
            else:
                self._tell("done", step, f" in {duration(seconds)}")

    def fail(self, step: Step, reason: str, told: Sequence[str], given_up: Sequence[Step]) -> None:
        """Say that it failed.

        Args:
            step (Step): the cell.
            reason (str): one line.
            told (Sequence[str]): more lines.
            given_up (Sequence[Step]): the cells that are no longer to do; none if it is done once more.
        """
        with self._guard:
            del self._begun[step.run]
            for lost in given_up:
                self._remove(lost)
            more = "".join(f"\n    {line}" for line in told)
            if self._jobs == 1:
                say(f"    failed: {reason}{more}")
            else:
                self._tell("failed", step, f": {reason}", more)

    def _tell(self, what: str, step: Step, how: str = "", more: str = "") -> None:
        say(f"{what:<7} {step.title}{how}  ({len(self._to_do)} of {self._total} left, {self._so_far()}){more}")

    def _remove(self, step: Step) -> None:
        self._to_do.remove(next(other for other in self._to_do if (other.kind, other.run) == (step.kind, step.run)))

    def _so_far(self) -> str:
        rest = self._rest() if self._to_do else None
        estimate = "" if rest is None else f", about {duration(rest)} to go"
        return f"{duration(time.monotonic() - self._start)} so far{estimate}"

    def _rest(self) -> float | None:
        """Seconds for what is to do; None while there is nothing to tell them from."""
        runs: dict[str, float] = defaultdict(float)
        for step in self._to_do:
            estimate = self._estimate(step)
            if estimate is None:
                return None
            runs[step.run] += estimate
        for run, begun in self._begun.items():
            runs[run] = max(0.0, runs[run] - (time.monotonic() - begun))
        # Each run, those at work first, goes to the job that is free first.
        free = [0.0] * self._jobs
        for run in sorted(runs, key=lambda name: name not in self._begun):
            heapq.heapreplace(free, free[0] + runs[run])
        return max(free)

    def _estimate(self, step: Step) -> float | None:
        own = self._seconds.get((step.kind, step.model), [])
        others = [value for (kind, _), values in self._seconds.items() if kind == step.kind for value in values]
        return mean(own or others) if own or others else None


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
