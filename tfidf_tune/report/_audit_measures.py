"""The numbers of an audit that a program acts on: measures with upper bounds, and limits that they must not exceed."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tfidf_tune.analysis.intervals import binomial_upper_bound, bootstrap_interval
from tfidf_tune.report._audit_tables import Found, extractable_targets

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = "1.0"
EXTRACTION_PAIRS = [(1, 0.01), (1, 0.5), (1000, 0.01), (1000, 0.5)]
_UPPER = ".upper"
_EXTRACTION = re.compile(r"extraction@(0?\.\d+|1(?:\.0*)?|\d+e-\d+)(?::(\d+))?")
_NAMES = ("lms", "excess", "verbatim", "auc")
_POSSIBLE = (
    f"{', '.join(_NAMES)}, extraction@P and extraction@P:N (with a probability P of at most 1 and N samples), each "
    f"also with {_UPPER} for its upper bound"
)


class Measure(NamedTuple):
    """A measured value with its upper 95 % bound; None if it was not measured."""

    value: float | None
    upper: float | None
    unit: str


_NOT_MEASURED = Measure(None, None, "")


class Bound(NamedTuple):
    """A measure's name, as in ``--fail-above``, and the value that it must not exceed."""

    name: str
    limit: float

    @property
    def pair(self) -> tuple[int, float] | None:
        """Samples and probability of an extraction; else None."""
        found = _EXTRACTION.fullmatch(self.name.removesuffix(_UPPER))
        return (int(found[2] or 1), float(found[1])) if found else None


class Check(NamedTuple):
    """A bound with the value that was measured; exceeded if that is above the limit or missing."""

    bound: Bound
    value: float | None

    @property
    def exceeded(self) -> bool:
        """Whether the audit fails."""
        return self.value is None or self.value > self.bound.limit

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.bound.name} was not measured, so the limit {self.bound.limit:g} counts as exceeded"
        relation = "above" if self.exceeded else "not above"
        return f"{self.bound.name} is {self.value:.4g}, {relation} {self.bound.limit:g}"


def parse_bounds(text: str) -> list[Bound]:
    """Read limits such as ``lms=20,extraction@0.01=0.02``.

    Raises:
        ValueError: If a measure is unknown or a limit is not a number.
    """
    bounds = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, limit = part.rpartition("=")
        measure = name.removesuffix(_UPPER)
        if not equals or (measure not in _NAMES and not _EXTRACTION.fullmatch(measure)):
            raise ValueError(
                f"--fail-above {part!r}: write MEASURE=LIMIT, for example lms=20; measures are {_POSSIBLE}"
            )
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"--fail-above {part!r}: the limit {limit!r} is not a number")
        bounds.append(Bound(name, value))
    if not bounds:
        raise ValueError(f"--fail-above {text!r} names no limit: write for example lms=20; measures are {_POSSIBLE}")
    return bounds


def audit_measures(
    found: Found,
    scores: "pd.DataFrame",
    checkpoint: int,
    membership: "pd.DataFrame",
    bounds: Iterable[Bound],
) -> dict[str, Measure]:
    """Measure what ``--fail-above`` can name.

    ====================  =============================================================================================
    ``lms``               average LMS of targets, in tokens, over the prompts of the first attack
    ``excess``            the same minus that of controls
    ``verbatim``          share of targets recited verbatim from at least one prompt of any attack
    ``extraction@P:N``    share of targets of which N samples hold the continuation with a probability of at least P;
                          from likelihoods, with N = 1 if it is left out
    ``auc``               of membership inference by the loss
    ====================  =============================================================================================

    Upper bounds are those of 95 % bootstrap intervals over passages; of shares one-sided ones of Clopper and Pearson.
    """
    lms = found.targets.groupby("passage_id")["lms"].mean().to_numpy(float)
    upper = bootstrap_interval(lambda values, axis=-1: values.mean(axis), lms).high
    floor, share = found.floor, found.num_verbatim / found.num_targets
    measures = {
        "lms": Measure(found.lms, _known(upper), "tokens"),
        "excess": _NOT_MEASURED if floor is None else Measure(floor.difference, _known(floor.excess.high), "tokens"),
        "verbatim": Measure(share, binomial_upper_bound(found.num_verbatim, found.num_targets), "share"),
    }
    pairs = list(dict.fromkeys([*EXTRACTION_PAIRS, *(bound.pair for bound in bounds if bound.pair)]))
    extractable = {
        (row.num_samples, row.probability): row for row in extractable_targets(scores, checkpoint, pairs).itertuples()
    }
    for pair in pairs:
        row = extractable.get(pair)
        measures[_extraction_name(*pair)] = _NOT_MEASURED if row is None else Measure(row.share, row.upper, "share")
    measures["auc"] = (
        Measure(_known(membership.iloc[0]["AUC"]), _known(membership.iloc[0].get("AUC to")), "probability")
        if len(membership)
        else _NOT_MEASURED
    )
    return measures


def check_bounds(measures: Mapping[str, Measure], bounds: Sequence[Bound]) -> list[Check]:
    """Compare measures with limits."""
    checks = []
    for bound in bounds:
        name = _extraction_name(*bound.pair) if bound.pair else bound.name.removesuffix(_UPPER)
        measure = measures[name]
        checks.append(Check(bound, measure.upper if bound.name.endswith(_UPPER) else measure.value))
    return checks


def _extraction_name(num_samples: int, probability: float) -> str:
    return f"extraction@{probability:g}:{num_samples}"


def _known(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
