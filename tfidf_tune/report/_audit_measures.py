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
_EXTRACTION = r"extraction@(0?\.\d+|1(?:\.0*)?|\d+e-\d+)(?::(\d+))?"
_BOUNDED = re.compile(rf"(?:lms|excess|verbatim|auc|{_EXTRACTION})(?:\{_UPPER})?")


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
        found = re.fullmatch(_EXTRACTION, self.name.removesuffix(_UPPER))
        return (int(found[2] or 1), float(found[1])) if found else None


class Check(NamedTuple):
    """A limit with the value that was measured; exceeded if that is above the limit or missing."""

    measure: str
    limit: float
    value: float | None
    exceeded: bool

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.measure} was not measured, so the limit {self.limit:g} counts as exceeded"
        relation = "above" if self.exceeded else "not above"
        return f"{self.measure} is {self.value:.4g}, {relation} {self.limit:g}"


def parse_bounds(text: str) -> list[Bound]:
    """Read limits such as ``lms=20,extraction@0.01=0.02``.

    Raises:
        ValueError: If a measure is unknown or a limit is not a finite number.
    """
    bounds = []
    for part in text.rstrip(",").split(","):
        name, _, limit = part.strip().rpartition("=")
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not _BOUNDED.fullmatch(name):
            raise ValueError(
                f"--fail-above {part!r}: write MEASURE=LIMIT, for example lms=20; measures are lms, excess, verbatim, "
                f"auc, extraction@P and extraction@P:N (with a probability P of at most 1 and N samples), each also "
                f"with {_UPPER} for its upper bound"
            )
        bounds.append(Bound(name, value))
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
    upper = bootstrap_interval(lambda values, axis=-1: values.mean(axis), found.target_means).high
    floor, share = found.floor, found.num_verbatim / found.num_targets
    measures = {
        "lms": Measure(found.lms, _known(upper), "tokens"),
        "excess": _NOT_MEASURED if floor is None else Measure(floor.difference, _known(floor.excess.high), "tokens"),
        "verbatim": Measure(share, binomial_upper_bound(found.num_verbatim, found.num_targets), "share"),
    }
    pairs = list(dict.fromkeys([*EXTRACTION_PAIRS, *(bound.pair for bound in bounds if bound.pair)]))
    measures |= {_extraction_name(*pair): _NOT_MEASURED for pair in pairs}
    for row in extractable_targets(scores, checkpoint, pairs).itertuples():
        measures[_extraction_name(row.num_samples, row.probability)] = Measure(row.share, row.upper, "share")
    measures["auc"] = _NOT_MEASURED
    if len(membership):
        row = membership.iloc[0]
        measures["auc"] = Measure(_known(row["AUC"]), _known(row.get("AUC to")), "probability")
    return measures


def check_bounds(measures: Mapping[str, Measure], bounds: Sequence[Bound]) -> list[Check]:
    """Compare measures with limits."""
    checks = []
    for bound in bounds:
        measure = measures[_extraction_name(*bound.pair) if bound.pair else bound.name.removesuffix(_UPPER)]
        value = measure.upper if bound.name.endswith(_UPPER) else measure.value
        checks.append(Check(bound.name, bound.limit, value, exceeded=value is None or value > bound.limit))
    return checks


def _extraction_name(num_samples: int, probability: float) -> str:
    return f"extraction@{probability:g}:{num_samples}"


def _known(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
