"""The first line of a report: what is recited, at which cost, and whether it can be told from the floor."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tfidf_tune.report._document import joined, percent_text, span

FEW_OUTCOMES = 2  # up to so many comparisons, the verdict has a sentence for each
_FEW_NAMES = 6  # more are counted
# By what is recited, and what is recited at equal perplexity, which has no interval of its own.
_AT_EQUAL: Mapping[tuple[int | None, str | None], str] = {
    (-1, "less"): "; at equal perplexity it recites less as well",
    (-1, "more"): "; at equal perplexity it recites more than {baseline}, no gain",
    (1, "less"): ", but less at equal perplexity",
    (1, "more"): "; at equal perplexity it recites more as well",
}


class Change(NamedTuple):
    """A relative change."""

    percent: float  # of the reference's value, finite
    direction: int | None  # -1 if its interval lies below 0, 1 above, 0 if it includes 0; None without a verdict
    evidence: str  # the interval in words, or why there is no verdict

    def told(self, lower: str, higher: str, unclear: str) -> str:
        """Fill the size into the text for its direction, or into ``unclear``, and add the evidence."""
        rounded = round(self.percent, 1)
        if self.direction == 0 or (self.direction is None and not rounded):
            return f"{unclear} ({percent_text(self.percent)}, {self.evidence})"
        size = f"{abs(rounded):.1f} %" if rounded else "less than 0.1 %"
        return f"{(lower if self.percent < 0 else higher).format(size=size)} ({self.evidence})"


@dataclass(frozen=True)
class Outcome:
    """An objective against the baseline, both at one checkpoint."""

    setting: str  # model and, in a comparison, learning rate
    objective: str
    baseline: str
    recited: Change | str  # of the average LMS; or a clause that says why it is not compared
    cost: Change | str = ""  # of the utility; or a clause that says why it is unknown; empty if it is of no interest
    kind: str = "without a verdict"  # how it came out, for a summary: "recites less, perplexity higher"
    utility: str = "perplexity"
    # Of both objectives those that do not recite more than the floor: interval of targets minus controls in tokens.
    floors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    unknown_floor: str = ""  # why the floor is unknown, if it is
    at_equal: str | None = None  # what is recited at equal perplexity, see :func:`compare_at_equal_perplexity`
    several: bool = False  # whether the report has several settings, so that this one is named
    marks: str = ""  # of footnotes
    # Setting and objective -> AUC of membership inference, of those whose passages are detected.
    detectable: Mapping[tuple[str, ...], str] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """For example "TF-IDF recites 81.7 % less than CE (95 % interval ...) at a 60.7 % higher perplexity (...)."."""
        floors = [f"what {name} recites {floor_text(*ends)}" for name, ends in self.floors.items()]
        at_equal, at = "", f"; {self.objective} at "
        if len(floors) == 2:  # a difference would be one of floors
            text, floors = "; ".join(floors), []
        elif isinstance(self.recited, str):
            text = self.recited
        else:
            text = f"{self.objective} " + self.recited.told(
                f"recites {{size}} less than {self.baseline}",
                f"recites {{size}} more than {self.baseline}",
                f"is not shown to recite less or more than {self.baseline}",
            )
            at_equal = _AT_EQUAL.get((self.recited.direction, self.at_equal), "").format(baseline=self.baseline)
            at = " at "
        if isinstance(self.cost, Change):
            lower, higher = (f"a {{size}} {end} {self.utility}" for end in ("lower", "higher"))
            text += at + self.cost.told(lower, higher, f"a {self.utility} that is not shown to differ") + at_equal
        elif self.cost:
            text += f"; {self.cost}"
        unknown = [f"the floor is unknown ({self.unknown_floor})"] if self.unknown_floor else []
        text = "; ".join([text, *floors, *unknown, *_detectable(self.detected)])
        return f"{f'{self.setting}: ' if self.several else ''}{text[0].upper()}{text[1:]}.{self.marks}"

    @property
    def brief(self) -> str:
        """For example "Goldfish (LMS -86.0 %, perplexity +1.2 %)"."""
        changes = {"LMS": self.recited, self.utility: self.cost}
        told = [f"{name} {percent_text(one.percent)}" for name, one in changes.items() if isinstance(one, Change)]
        changed = f" ({', '.join(told)})" if told else ""
        return f"{self.named(self.objective)}{changed}"

    @property
    def detected(self) -> dict[str, str]:
        """The objectives at the floor whose membership is detectable, with the AUC."""
        aucs = {name: self.detectable.get((self.setting, name), "") for name in self.floors}
        return {name: auc for name, auc in aucs.items() if auc}

    def named(self, objective: str) -> str:
        """Name an objective where a report may have several settings."""
        return f"{objective} of {self.setting}" if self.several else objective


def floor_text(low: float, high: float) -> str:
    """Say that what is recited is not above the floor, with a bound, from an interval that does not lie above 0."""
    if high < 0:
        return f"lies below the floor (by {span(-high, -low, decimals=2)} tokens, 95 %)"
    return f"cannot be told from the floor (at most {high:.2f} tokens above it, 95 %)"


def verdict(outcomes: Sequence[Outcome], objectives: Mapping[str, Sequence[str]], baseline: str) -> str:
    """Sum up comparisons, and name the settings (with the objectives of their runs) where nothing is compared."""
    alone = {name: joined(own) for name, own in objectives.items() if baseline not in own or {*own} == {baseline}}
    if len(alone) == len(objectives):
        have = "; ".join(f"{name}: {own}" for name, own in alone.items())
        return (
            f"Nothing is compared: no model has runs of {baseline} and of another objective ({have}). To name the "
            "objective of a model trained elsewhere, give OBJECTIVE=FOLDER."
        )
    if len(outcomes) > FEW_OUTCOMES:
        numbers = sorted({int(number) for one in outcomes for number in re.findall(r"\d+", one.marks)})
        marks = "".join(f"[{number}]" for number in numbers)
        told = [f"Of {len(outcomes)} comparisons with {baseline}: {summary(outcomes)}.{marks}"]
    else:
        told = [one.sentence for one in outcomes]
    left_out = [f"Not compared: {joined(f'{name} (only {own})' for name, own in alone.items())}."] if alone else []
    return " ".join([*told, *left_out]) or "Nothing is compared: the runs diverged."


def summary(outcomes: Sequence[Outcome]) -> str:
    """Say how comparisons came out: "better: B (LMS -54.2 %, perplexity -1.9 %); worse: ..."."""
    kinds: dict[str, list[str]] = {}
    for one in outcomes:
        kinds.setdefault("not above the floor" if len(one.floors) == 2 else one.kind, []).append(one.brief)
    clauses = [f"{kind.replace(':', ',')}: {_listed(names)}" for kind, names in kinds.items()]
    highs = {one.named(name): high for one in outcomes for name, (_, high) in one.floors.items()}
    if highs:
        bound = floor_text(0, max(0.0, *highs.values()))
        clauses.append(f"what {_listed(highs)} recite{'s' * (len(highs) == 1)} {bound}")
    unknown = [one.unknown_floor for one in outcomes if one.unknown_floor]
    if unknown:
        clauses.append(f"the floor is unknown for {len(unknown)} of {len(outcomes)} ({joined(unknown)})")
    detected = {one.named(name): auc for one in outcomes for name, auc in one.detected.items()}
    return "; ".join([*clauses, *_detectable(detected)])


def _detectable(aucs: Mapping[str, str]) -> list[str]:
    names = [f"{name} ({auc})" for name, auc in aucs.items()]
    return [f"membership stays detectable: {_listed(names)}"] if names else []


def _listed(names: Iterable[str]) -> str:
    """Name a few, count many."""
    different = list(dict.fromkeys(names))
    return joined(different) if len(different) <= _FEW_NAMES else f"{len(different)} of them"
