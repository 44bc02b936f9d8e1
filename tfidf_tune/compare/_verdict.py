"""The first line of a report: what is recited, at which cost, and whether it can be told from the floor."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tfidf_tune.compare._intervals import ENOUGH_UNITS, MIN_UNITS, Interval
from tfidf_tune.compare._table import BY_LABEL
from tfidf_tune.report._document import joined

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


RECITED_MARK = "what a model recites, the longest run of tokens that its continuation shares with the true one"
SHARED_MARK = "runs of words that the continuation shares with the true one, in order; all else differs"


LMS_EXPLAINED = (
    "LMS, the longest memorized substring, is the longest run of tokens that a continuation shares with the passage"
)
NEAR_EXPLAINED = (
    "Edit distance: tokens to replace, insert and delete, as a share of the longer text. Common subsequence: tokens "
    "that occur in both in one order."
)
TEXT_PROMPTS = (
    "prompts were sent as text, so the responses were tokenized again: LMS and prefix match are approximate, even "
    "where no token id was lost. `tfidf-tune eval` is exact."
)
SIGNIFICANCE_NOTE = (
    "p (Holm): two-sided, from the same resamples, corrected for the number of comparisons of the model by Holm's "
    f"method. Significant: the interval excludes 0 and p is below 0.05. With fewer than {MIN_UNITS} units there is no "
    "verdict."
)
NOT_CORRECTED = "not after Holm's correction"
FEW_UNITS = (
    f"From {MIN_UNITS} to {ENOUGH_UNITS - 1} units, such an interval excludes 0 in 7 to 11 % of cases without any "
    "difference, instead of 5 %."
)
SEVERAL_COMPARISONS = (
    "Verdicts are corrected for the number of comparisons of a model by Holm's method. Intervals are not: without any "
    "difference, one in twenty excludes 0."
)
BOUND = (
    "The bound is the upper end of the 95 % interval of targets minus controls. It holds for these passages and "
    "prompts, and does not show that nothing is memorized."
)


def percent_text(percent: float) -> str:
    """Write a change: "+5.0 %"; never "-0.0 %"."""
    return f"{round(percent, 1) + 0.0:+.1f} %"


def span(low: float, high: float, *, decimals: int, suffix: str = "") -> str:
    """Write a range: "34.9 % to 71.1 %"; ends that look alike once."""
    ends = (round(end, decimals) + 0.0 for end in (low, high))  # no "-0.0"
    return " to ".join(dict.fromkeys(f"{end:.{decimals}f}{suffix}" for end in ends))


def prompt_length(length: float) -> int | str:
    """Return the length of a prompt for tables; completions have prompts of any length, recorded as 0."""
    return int(length) or "own"


def interval_text(interval: Interval, unit: str, *, decimals: int, suffix: str = "") -> str:
    """Write an interval of a unit ("passage"): "95 % interval 34.9 % to 71.1 %", or "equal for all passages"."""
    if math.isclose(interval.low, interval.high, rel_tol=1e-9, abs_tol=1e-12):
        return f"equal for all {unit}s"
    return f"95 % interval {span(interval.low, interval.high, decimals=decimals, suffix=suffix)}"


def at_progress(progress: int, comma: str = "") -> str:
    """Name a checkpoint: " at 50 % of training", with a comma before it or not; nothing at the end of training."""
    return "" if progress == 100 else f"{comma} at {progress} % of training"


def why_no_interval(one: Any) -> str:
    """Say why a reduction is undefined or has no interval; for the row see :func:`compare_objectives`."""
    if math.isnan(one.reduction):
        return "the baseline is 0" if one.baseline == 0 else "a value is not finite"
    measure = BY_LABEL[one.measure]
    if one.num_units < 2:
        return f"there is a single {measure.unit}"
    return f"the baseline's {measure.phrase} is 0 in some resamples, because few {measure.unit}s have another value"
