"""The first line of a report: what is recited, at which cost, and whether it can be told from the floor."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
        equal (bool): whether it and its interval, if it has one, are 0.0 % when rounded. Default: False.
    """

    percent: float
    direction: int | None
    evidence: str
    equal: bool = False

    @property
    def size(self) -> str:
        """The amount: "25.0 %"."""
        return f"{abs(self.percent):.1f} %" if round(self.percent, 1) else "less than 0.1 %"


@dataclass(frozen=True)
class Outcome:
    """An objective against the baseline, both at one checkpoint.

    Args:
        objective (str): the objective.
        baseline (str): the baseline.
        recited (Change | str): of the average LMS; or a clause that says why it is not compared.
        cost (Change | str): of the utility; or a clause that says why it is unknown.
        utility (str): the measure of the cost: "perplexity".
        floor (tuple[float, float] | None): interval of targets minus controls in tokens, if it includes 0 or lies
            below.
        baseline_floor (tuple[float, float] | None): the same of the baseline.
        at_equal (int): -1 if less is recited than the baseline did at equal perplexity, 1 if more. Default: 0, neither
            is known.
        few_passages (int | None): number of targets, if they are too few for a verdict on what is recited. Default:
            None.
        few_for_floor (int | None): number of targets or of controls, the fewer, if they are too few to tell either
            objective from the floor; 0 without controls. Default: None.
        setting (str): model and learning rate, where the report has several. Default: none.
        marks (str): of footnotes. Default: none.
        detectable (Mapping[str, str]): objective -> AUC of membership inference, of those that are not above the floor
            but whose passages are detected: "AUC 0.98, 95 % interval 0.96 to 0.99". Default: none.
    """

    objective: str
    baseline: str
    recited: Change | str
    cost: Change | str
    utility: str = "perplexity"
    floor: tuple[float, float] | None = None
    baseline_floor: tuple[float, float] | None = None
    at_equal: int = 0
    few_passages: int | None = None
    few_for_floor: int | None = None
    setting: str = ""
    marks: str = ""
    detectable: Mapping[str, str] = field(default_factory=dict)

    @property
    def direction(self) -> int | None:
        """-1 if less is recited, 1 if more, 0 if neither is shown; None without a verdict, as between two floors."""
        if isinstance(self.recited, str) or (self.floor and self.baseline_floor):
            return None
        return self.recited.direction

    @property
    def sentence(self) -> str:
        """For example "TF-IDF recites 81.7 % less than CE (95 % interval ...) at a 60.7 % higher perplexity (...)."."""
        start = f"{self.setting}: " if self.setting else ""
        found = self.recited if isinstance(self.recited, str) else self._found(self.recited)
        own = None if self.baseline_floor else self.objective
        return f"{start}{found}{_detectable(self.detectable, own)}.{self.marks}"

    def _found(self, recited: Change) -> str:
        if self.floor and self.baseline_floor:
            return f"{self._both_floors(self.floor, self.baseline_floor)}{self._cost(f'; {self.objective} at ')}"
        if self.few_passages is not None:
            few = f"Too few passages ({self.few_passages}; it takes {MIN_UNITS}) to judge whether {self.objective}"
            return f"{few} recites less or more than {self.baseline}{self._cost(', at ')}{self._floors()}"
        if math.isnan(recited.percent):
            text = f"{self.objective} is not compared with {self.baseline}: {recited.evidence}"
            return f"{text}{self._cost(f'; {self.objective} at ')}{self._floors()}"
        return f"{self.objective} {self._recites(recited)}{self._cost(' at ')}{self._at_equal()}{self._floors()}"

    def _both_floors(self, own: tuple[float, float], of_baseline: tuple[float, float]) -> str:
        """Say that a difference would be one of floors."""
        if min(own[1], of_baseline[1]) >= 0:
            return f"Neither {self.baseline} nor {self.objective} can be {_bound(own[1], of_baseline[1])}"
        return (
            f"What {self.objective} recites {floor_text(*own)}; what {self.baseline} recites {floor_text(*of_baseline)}"
        )

    def _recites(self, change: Change) -> str:
        if change.equal:
            return f"recites as much as {self.baseline} ({change.evidence})"
        if change.direction == 0:
            return f"is not shown to recite less or more than {self.baseline} ({_signed(change)})"
        end = "more" if change.percent > 0 else "less"
        return f"recites {change.size} {end} than {self.baseline} ({change.evidence})"

    def _cost(self, at: str) -> str:
        if isinstance(self.cost, str):
            return f"; {self.cost}"
        if math.isnan(self.cost.percent):
            return f"; the change of the {self.utility} is undefined, since {self.cost.evidence}"
        if self.cost.equal:
            return f"{at}an equal {self.utility} ({self.cost.evidence})"
        if self.cost.direction == 0:
            return f"{at}a {self.utility} that is not shown to differ ({_signed(self.cost)})"
        end = "higher" if self.cost.percent > 0 else "lower"
        return f"{at}a {self.cost.size} {end} {self.utility} ({self.cost.evidence})"

    def _at_equal(self) -> str:
        """Add what is recited at equal perplexity to a difference that is shown; it has no interval of its own."""
        clauses = {
            (-1, -1): "; at equal perplexity it recites less as well",
            (-1, 1): f"; at equal perplexity it recites more than {self.baseline}, no gain",
            (1, -1): ", but less at equal perplexity",
            (1, 1): "; at equal perplexity it recites more as well",
        }
        return clauses.get((self.direction or 0, self.at_equal), "")

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
    return f"cannot be {_bound(high)}"


def _bound(*highs: float) -> str:
    return f"told from the floor (at most {max(0.0, *highs):.2f} tokens above it, 95 %)"


def _few_probed(number: int) -> str:
    return f"{number} targets or controls; it takes {MIN_UNITS}"


def with_membership(outcome: Outcome, setting: str, aucs: Mapping[tuple[str, ...], str]) -> Outcome:
    """Return an outcome that names its objectives at the floor whose membership is detectable.

    Args:
        outcome (Outcome): without them.
        setting (str): its setting, also where the report has a single one.
        aucs (Mapping[tuple[str, ...], str]): setting and objective -> AUC, as in :attr:`Outcome.detectable`.
    """
    floors = {outcome.baseline: outcome.baseline_floor, outcome.objective: outcome.floor}
    found = {name: aucs.get((setting, name), "") for name, floor in floors.items() if floor}
    return replace(outcome, detectable={name: auc for name, auc in found.items() if auc})


def _detectable(aucs: Mapping[str, str], told: str | None = None) -> str:
    """Name the objectives whose membership is detectable, unless it is only that which the sentence is about."""
    if not aucs:
        return ""
    if len(aucs) > _FEW_NAMES:
        return f"; membership stays detectable for {len(aucs)} of them"
    if told is not None and [*aucs] == [told]:
        return f"; membership stays detectable ({aucs[told]})"
    return f"; membership stays detectable: {joined(f'{name} ({auc})' for name, auc in aucs.items())}"


def is_summed_up(outcomes: Sequence[Outcome]) -> bool:
    """Return whether there are so many comparisons that the verdict has no sentence for each."""
    return len(outcomes) > _FEW


def not_compared(objectives: Mapping[str, Sequence[str]], baseline: str) -> str:
    """Name the settings without a run of the baseline or of another objective; else "".

    Args:
        objectives (Mapping[str, Sequence[str]]): those of the runs of each setting.
        baseline (str): the baseline.
    """
    found = {name: joined(own) for name, own in objectives.items() if baseline not in own or {*own} == {baseline}}
    if len(found) == len(objectives):
        have = "; ".join(f"{name}: {own}" for name, own in found.items())
        return (
            f"Nothing is compared: no model has runs of {baseline} and of another objective ({have}). To name the "
            "objective of a model trained elsewhere, give OBJECTIVE=FOLDER."
        )
    return f" Not compared: {joined(f'{name} (only {own})' for name, own in found.items())}." if found else ""


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Sum up comparisons with one baseline: a sentence for each of a few; of more, how many came out how."""
    if not is_summed_up(outcomes):
        return " ".join(one.sentence for one in outcomes)
    groups: dict[tuple[int | None, str], list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(_kind(one), []).append(one)
    found = "; ".join(_counted(*kind, own) for kind, own in groups.items())
    aucs = {
        f"{name} ({one.setting})" if one.setting else name: auc
        for one in outcomes
        for name, auc in one.detectable.items()
    }
    marks = "".join(
        f"[{mark}]" for mark in sorted({int(mark) for one in outcomes for mark in _MARKS.findall(one.marks)})
    )
    floors = f"{_many_floors(outcomes)}{_detectable(aucs)}"
    return f"Of {len(outcomes)} comparisons with {outcomes[0].baseline}: {found}{floors}.{marks}"


def _kind(one: Outcome) -> tuple[int | None, str]:
    """What outcomes that are counted together have in common: what is recited, and if it differs, its cost."""
    return one.direction, _cost_kind(one.cost, one.utility) if one.direction else ""


def _cost_kind(cost: Change | str, utility: str) -> str:
    if isinstance(cost, str):
        return "an unknown cost"
    if cost.direction is None:
        return f"a {utility} without a verdict"
    if cost.equal:
        return f"an equal {utility}"
    if cost.direction == 0:
        return f"a {utility} that is not shown to differ"
    return f"a {'higher' if cost.direction > 0 else 'lower'} {utility}"


def _counted(direction: int | None, cost: str, outcomes: Sequence[Outcome]) -> str:
    number = f"{len(outcomes)}{_named(outcomes)}"
    if not direction:
        return f"{number} {'without a verdict' if direction is None else 'not shown to recite less or more'}"
    verb = f"recite{'s' * (len(outcomes) == 1)} {'less' if direction < 0 else 'more'}"
    text = f"{number} {verb} ({_range(one.recited for one in outcomes)}) at {cost}"
    shown = [one.cost for one in outcomes if isinstance(one.cost, Change) and one.cost.direction and not one.cost.equal]
    return f"{text} ({_range(shown)})" if shown else text


def _named(outcomes: Sequence[Outcome]) -> str:
    """Name a few objectives of one setting."""
    few = len(outcomes) <= _FEW_NAMES and not outcomes[0].setting
    return f" ({joined(one.objective for one in outcomes)})" if few else ""


def _range(changes: Iterable[Change | str]) -> str:
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
    return f"; what {names} recite{'s' * (len(ends) == 1)} cannot be {_bound(*ends.values())}{text}"


def _signed(change: Change) -> str:
    return f"{round(change.percent, 1) + 0.0:+.1f} %, {change.evidence}"
