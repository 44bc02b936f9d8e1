"""The first line of a report: what is recited, at which cost, and whether it can be told from the floor."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tfidf_tune.analysis.intervals import MIN_UNITS
from tfidf_tune.report._wording import joined, span

_FEW = 2  # up to so many comparisons, the verdict has a sentence for each
_FEW_NAMES = 6
_UNKNOWN_FLOOR = "the floor is unknown (no controls)"
_MARKS = re.compile(r"\[(\d+)\]")


class Change(NamedTuple):
    """A relative change.

    Attributes:
        percent (float): of the reference's value; NaN if it is undefined.
        direction (int | None): -1 if its interval lies below 0, 1 above, 0 if it includes 0; None without a verdict.
        evidence (str): the interval in words, or why there is no verdict.
    """

    percent: float
    direction: int | None
    evidence: str


@dataclass(frozen=True)
class Outcome:
    """An objective against the baseline.

    Args:
        objective (str): the objective.
        baseline (str): the baseline.
        recited (Change | str): of the average LMS; or a clause that says why it is not compared.
        cost (Change | None): of the utility; None if it was not measured for both.
        utility (str): the measure of the cost: "perplexity".
        floor (tuple[float, float] | None): interval of targets minus controls in tokens, if it includes 0 or lies
            below.
        baseline_floor (tuple[float, float] | None): the same of the baseline.
        at_equal (str): a clause on what the baseline recited at equal perplexity. Default: none.
        few_passages (int | None): number of targets, if they are too few for a verdict on what is recited. Default:
            None.
        few_for_floor (int | None): number of targets or of controls, the fewer, if they are too few to tell either
            objective from the floor; 0 without controls. Default: None.
        setting (str): model and learning rate, where the report has several. Default: none.
        marks (str): of footnotes. Default: none.
    """

    objective: str
    baseline: str
    recited: Change | str
    cost: Change | None
    utility: str = "perplexity"
    floor: tuple[float, float] | None = None
    baseline_floor: tuple[float, float] | None = None
    at_equal: str = ""
    few_passages: int | None = None
    few_for_floor: int | None = None
    setting: str = ""
    marks: str = ""

    @property
    def sentence(self) -> str:
        """For example "TF-IDF recites 81.7 % less than CE (95 % interval ...) at a 60.7 % higher perplexity (...)."."""
        start = f"{self.setting}: " if self.setting else ""
        if isinstance(self.recited, str):
            return f"{start}{self.recited}.{self.marks}"
        if self.few_passages is None:
            recited, at_equal = f"{self.objective} {self._recites(self.recited)}", self.at_equal
        else:
            few = f"too few passages ({self.few_passages}; it takes {MIN_UNITS}) to judge whether"
            few = few if self.setting else few.capitalize()
            recited, at_equal = f"{few} {self.objective} recites less or more than {self.baseline}", ""
            recited += "," * (self._costs().startswith(" "))
        return f"{start}{recited}{self._costs()}{at_equal}{self._floors()}.{self.marks}"

    def _recites(self, change: Change) -> str:
        if math.isnan(change.percent):
            return f"is not compared with {self.baseline}: {change.evidence}"
        if change.direction == 0:
            return f"is not shown to recite less or more than {self.baseline} ({_signed(change)})"
        if change.percent == 0:
            return f"recites as much as {self.baseline} ({change.evidence})"
        than = f"recites {abs(change.percent):.1f} % {'more' if change.percent > 0 else 'less'} than {self.baseline}"
        return f"{than} ({change.evidence})"

    def _costs(self) -> str:
        if self.cost is None:
            return "; perplexity was not measured for both, so the cost is unknown"
        if math.isnan(self.cost.percent):
            return f"; the change of its {self.utility} is undefined, since {self.cost.evidence}"
        if self.cost.direction == 0:
            return f" at a {self.utility} that is not shown to differ ({_signed(self.cost)})"
        if self.cost.percent == 0:
            return f" at an equal {self.utility} ({self.cost.evidence})"
        end = "higher" if self.cost.percent > 0 else "lower"
        return f" at a {abs(self.cost.percent):.1f} % {end} {self.utility} ({self.cost.evidence})"

    def _floors(self) -> str:
        text = f"; what it recites {floor_text(*self.floor)}" if self.floor else ""
        if self.baseline_floor:
            text += f"; what {self.baseline} recites {floor_text(*self.baseline_floor)}"
        if self.few_for_floor == 0:
            text += f"; {_UNKNOWN_FLOOR}"
        elif self.few_for_floor is not None:
            text += f"; it cannot be excluded that both recite only the floor ({_few_probed(self.few_for_floor)})"
        return text


def floor_text(low: float, high: float) -> str:
    """Say that what is recited is not above the floor, with a bound, from an interval that does not lie above 0."""
    if high < 0:
        return f"lies below the floor (by {span(-high, -low, decimals=2)} tokens, 95 %)"
    return f"cannot be told from the floor (at most {high + 0.0:.2f} tokens above it, 95 %)"


def _few_probed(number: int) -> str:
    return f"{number} targets or controls; it takes {MIN_UNITS}"


def is_summed_up(outcomes: Sequence[Outcome]) -> bool:
    """Return whether there are so many comparisons that the verdict has no sentence for each."""
    return len(outcomes) > _FEW


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Sum up comparisons with one baseline: a sentence for each of a few; of more, how many came out how."""
    if not is_summed_up(outcomes):
        return " ".join(one.sentence for one in outcomes)
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(_kind(one), []).append(one)
    found = "; ".join(_counted(own) for own in groups.values())
    marks = "".join(
        f"[{mark}]" for mark in sorted({int(mark) for one in outcomes for mark in _MARKS.findall(one.marks)})
    )
    return f"Of {len(outcomes)} comparisons with {outcomes[0].baseline}: {found}{_many_floors(outcomes)}.{marks}"


def _kind(one: Outcome) -> tuple[object, ...]:
    """What outcomes that are counted together have in common."""
    if isinstance(one.recited, str) or not one.recited.direction:
        return (None if isinstance(one.recited, str) else one.recited.direction,)
    return one.recited.direction, one.utility, one.cost and (one.cost.direction, math.isnan(one.cost.percent))


def _counted(outcomes: Sequence[Outcome]) -> str:
    number, first = f"{len(outcomes)}{_named(outcomes)}", outcomes[0]
    direction = None if isinstance(first.recited, str) else first.recited.direction
    if not direction:
        return f"{number} without a verdict" if direction is None else f"{number} not shown to recite less or more"
    recited = _range(one.recited for one in outcomes)
    text = f"{number} recite{'s' * (len(outcomes) == 1)} {'less' if direction < 0 else 'more'} ({recited}) at "
    if first.cost is None:
        return f"{text}an unknown cost"
    if first.cost.direction is None:
        return f"{text}a {first.utility} without a verdict"
    if first.cost.direction == 0:
        return f"{text}a {first.utility} that is not shown to differ"
    end = "higher" if first.cost.direction > 0 else "lower"
    return f"{text}a {end} {first.utility} ({_range(one.cost for one in outcomes)})"


def _named(outcomes: Sequence[Outcome]) -> str:
    """Name a few objectives of one setting."""
    few = len(outcomes) <= _FEW_NAMES and not outcomes[0].setting
    return f" ({joined(one.objective for one in outcomes)})" if few else ""


def _range(changes: Iterable[Change | str | None]) -> str:
    amounts = [abs(one.percent) for one in changes if isinstance(one, Change)]
    return span(min(amounts), max(amounts), decimals=1, suffix=" %")


def _many_floors(outcomes: Sequence[Outcome]) -> str:
    """Name the objectives, baseline included, that are not above the floor, with the highest bound among them."""
    ends: dict[str, float] = {}
    for one in outcomes:
        where = f" ({one.setting})" if one.setting else ""
        for name, floor in ((one.objective, one.floor), (one.baseline, one.baseline_floor)):
            if floor:
                ends[f"{name}{where}"] = floor[1]
    few = [one.few_for_floor for one in outcomes if one.few_for_floor]
    text = f"; {len(few)} may recite only the floor ({_few_probed(min(few))})" if few else ""
    if num_unknown := sum(one.few_for_floor == 0 for one in outcomes):
        text += f"; {_UNKNOWN_FLOOR}" + f" for {num_unknown} of {len(outcomes)}" * (num_unknown < len(outcomes))
    if not ends:
        return text
    names = joined(ends) if len(ends) <= _FEW_NAMES else f"{len(ends)} of them"
    return f"; what {names} recite{'s' * (len(ends) == 1)} {floor_text(-math.inf, max(0.0, *ends.values()))}{text}"


def _signed(change: Change) -> str:
    return f"{round(change.percent, 1) + 0.0:+.1f} %, {change.evidence}"
