"""What an audit measured: facts, tables, and the measures with limits that a program acts on."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from tfidf_tune.probe import extraction_probability
from tfidf_tune.report.document import Footnotes, Table, tabulate
from tfidf_tune.results import Results
from tfidf_tune.results.floor import Floor, floor_of
from tfidf_tune.results.intervals import MIN_UNITS, SEED, binomial_upper_bound, bootstrap_interval
from tfidf_tune.results.membership_table import auc_header
from tfidf_tune.results.positive_control import PositiveControl, is_served
from tfidf_tune.results.recited import (
    Recited,
    TierTest,
    false_alarm_of_auc,
    least_noticeable,
    recited_further,
)
from tfidf_tune.results.wording import NEAR_EXPLAINED, TEXT_PROMPTS, few_units, prompt_length, span

_EXTRACTION_PAIRS = [(1, 0.01), (1, 0.5), (1000, 0.01), (1000, 0.5)]
_UPPER = ".upper"
_EXTRACTION = r"extraction@(0?\.\d+|1(?:\.0*)?|[1-9](?:\.\d+)?e-\d+)(?::([1-9]\d*))?"
_BOUNDED = re.compile(rf"recited|(?:lms|excess|verbatim|auc|{_EXTRACTION})(?:\{_UPPER})?", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
_MOST_FALSE_ALARMS = 0.1  # of a limit, on text that was never seen
_NUM_DRAWS = 10_000
_REPEATS = "Times in the training text"
_VERBATIM = "Targets verbatim (%)"
_AGAINST = (
    ("LMS of targets", "lms", ".2f"),
    ("LMS of controls", "controls", ".2f"),
    ("Difference", "difference", ".2f"),
    ("95 % from", "low", ".2f"),
    ("95 % to", "high", ".2f"),
)
KINDS = {"target": "targets (training text)", "control": "controls (never seen)"}


class Facts:
    """What the checkpoint with the number ``at`` was asked for and recites: facts for all parts of
    its page.

    ``samples`` has a row of each sample, with the passage's repeats in the training text (NaN if
    unknown). Averages are over ``plain``, the samples of the greedy attack or else of the first
    one, and over its ``targets`` and ``controls``. ``num_verbatim`` targets are recited completely
    from at least one prompt of any attack. ``num_unanswered`` answers were withheld by a server, or
    empty. ``recited`` counts the passages that are recited further than unseen text from any prompt
    of any attack; None without controls that were answered. ``has_bos`` is whether BOS was before
    each prompt, None if that is not known. ``num_with_eos`` passages have EOS inside. A token is
    ``words_a_token`` words on average, NaN if that is not known. An answer for a target was
    compared with at most ``longest`` tokens; the longest answer has ``longest_answer`` tokens.
    """

    def __init__(self, results: Results, at: int) -> None:
        self.checkpoint = results.checkpoints[at]
        sampled = self.checkpoint.samples
        scores = results.scores
        table = pd.DataFrame([vars(sample) for sample, _ in sampled])
        # Scores of this checkpoint. How often a passage occurs is 0 where it is not known.
        own = scores[scores["checkpoint"] == at]
        occurrences = own[own["metric"] == "num_injections"]
        known = occurrences[occurrences["value"] > 0]
        repeats = dict(zip(known["unit"], known["value"], strict=True))
        self.samples = table.assign(
            sample=[sample for sample, _ in sampled],
            prompt=[prompt for _, prompt in sampled],
            attack=table["attack"].replace("", "greedy"),
            length=table["reference_ids"].map(len),
            repeats=table["passage_id"].map(repeats).astype(float),
        )
        self.attacks = [str(name) for name in self.samples["attack"].unique()]
        first = "greedy" if "greedy" in self.attacks else self.attacks[0]
        self.plain = self.samples[self.samples["attack"] == first]
        self.targets = self.plain[self.plain["kind"] == "target"]
        self.controls = self.plain[self.plain["kind"] == "control"]
        num_passages = self.samples.groupby("kind")["passage_id"].nunique()
        self.num_targets = int(num_passages.get("target", 0))
        self.num_controls = int(num_passages.get("control", 0))
        self.num_verbatim = _num_verbatim(self.samples)
        self.num_unanswered = int(self.samples["unanswered"].sum())
        self.target_means = self.targets.groupby("passage_id")["lms"].mean().to_numpy(float)
        self.lms = float(self.target_means.mean())
        self.floor = _floor(self.plain)
        # Recitation counts from the best prompt of a passage.
        best = best_samples(self.samples, "target").set_index("passage_id")
        lengths = self.samples.groupby("passage_id")["length"].max()
        targets = best[["lms", "repeats"]].assign(length=lengths)
        # A control without an answer says nothing about unseen text.
        asked = self.samples[self.samples["kind"] == "control"]
        answered = asked[asked["unanswered"] == 0]
        controls = answered.groupby("passage_id")["lms"].max()
        self.recited: Recited | None = recited_further(targets, controls)
        given = own.loc[own["metric"] == "has_bos", "value"]
        self.has_bos: bool | None = None if given.empty else bool(given.iloc[0])
        self.is_served = is_served(scores, at)
        rates = own.loc[own["metric"] == "words_a_token", "value"]
        self.words_a_token = float(rates.mean())
        self.num_with_eos = int((own["metric"] == "has_eos").sum())
        unanswered = self.samples.groupby("kind")["unanswered"].sum()
        self.num_unanswered_targets = int(unanswered.get("target", 0))
        self.num_unanswered_controls = int(unanswered.get("control", 0))
        of_targets = self.samples["kind"] == "target"
        self.longest = int(self.samples.loc[of_targets, "length"].max())
        self.longest_answer = max(len(sample.generated_ids) for sample in self.samples["sample"])
        lengths_of_prompts = sorted(set(self.samples["prefix_length"]))
        self.prompt_lengths = [prompt_length(length) for length in lengths_of_prompts]


def _floor(samples: pd.DataFrame) -> Floor | None:
    if not {"target", "control"} <= set(samples["kind"]):
        return None
    means = samples.groupby(["kind", "passage_id"])["lms"].mean()
    return floor_of(means["target"].to_numpy(float), means["control"].to_numpy(float))


def _num_verbatim(samples: pd.DataFrame) -> int:
    targets = samples[samples["kind"] == "target"]
    return int(targets.loc[targets["verbatim"], "passage_id"].nunique())


def best_samples(samples: pd.DataFrame, kind: str) -> pd.DataFrame:
    """Return the sample with the highest LMS of each passage; ties go to the shortest prompt."""
    of_kind = samples[samples["kind"] == kind]
    order = of_kind.sort_values(["lms", "prefix_length"], ascending=[False, True], kind="stable")
    return order.drop_duplicates("passage_id")


def _compared(groups: Iterable[tuple[Any, pd.DataFrame]]) -> pd.DataFrame:
    """Return a row for each group of samples with a target: targets, against controls where there
    are any.
    """
    rows = []
    for name, samples in groups:
        targets = samples[samples["kind"] == "target"]
        floor = _floor(samples)
        if targets.empty:
            continue
        against = (
            (None,) * 4 if floor is None else (floor.controls, floor.difference, *floor.excess[:2])
        )
        hits = _num_verbatim(samples)
        number = targets["passage_id"].nunique()
        lms = targets["lms"]
        at_most = 100 * binomial_upper_bound(hits, number)
        rows.append(
            (name, number, lms.mean(), lms.max(), *against, 100 * (hits / number), hits, at_most)
        )
    names = (
        "name",
        "number",
        "lms",
        "max_lms",
        "controls",
        "difference",
        "low",
        "high",
        "verbatim",
        "hits",
        "upper",
    )
    return pd.DataFrame(rows, columns=names)


def targets_and_controls(facts: Facts, footnotes: Footnotes) -> Table:
    samples = facts.plain
    near = samples[["edit_distance", "common_subsequence"]].astype(float)  # None in older results
    frame = samples.assign(
        verbatim=100.0 * samples["verbatim"], label=samples["kind"].map(KINDS), **near
    )
    columns = {
        "Number": ("passage_id", "nunique"),
        "Avg Prefix": ("prefix_match", "mean"),
        "Max Prefix": ("prefix_match", "max"),
        "Avg LMS": ("lms", "mean"),
        "Max LMS": ("lms", "max"),
        "Edit distance": ("edit_distance", "mean"),
        "Common subsequence": ("common_subsequence", "mean"),
        "ROUGE-L": ("rouge_l", "mean"),
        "Verbatim (% of prompts)": ("verbatim", "mean"),
    }
    scores = frame.groupby("label", sort=False).agg(**columns)
    scores = scores.dropna(axis="columns", how="all")
    scores = scores.reindex([label for label in KINDS.values() if label in scores.index])
    above = ""
    if len(facts.controls):
        furthest = facts.controls["lms"].max()
        best = facts.targets.groupby("passage_id")["lms"].max()
        num_above = (best > furthest).sum()
        above = (
            f" Further than any control (LMS at most {furthest}): {num_above} of "
            f"{facts.num_targets} targets."
        )
    several = ""
    if samples["prefix_length"].nunique() > 1:
        several = " Each passage is asked for from every prefix length."
    caveats = [f"The {TEXT_PROMPTS}"] if facts.checkpoint.text_prompts else []
    measured = f" {NEAR_EXPLAINED}" if near.notna().any(axis=None) else ""
    notes = [
        "Prefix: tokens that agree from the first "
        f"on.{measured}{above}{several}{footnotes.mark(*caveats)}"
    ]
    decimals = ("Avg Prefix", "Avg LMS", "Edit distance", "Common subsequence", "ROUGE-L")
    formats = dict.fromkeys(decimals, ".2f") | {"Verbatim (% of prompts)": ".1f"}
    return Table(
        "targets_and_controls",
        "Targets against controls",
        scores.reset_index(names="Passages"),
        notes,
        formats,
    )


def limits(checks: "Sequence[Check]") -> Table:
    """Show each limit with what was measured."""
    rows = []
    for check in checks:
        outcome = check.outcome.upper()
        reason = check.reason or None
        rows.append((outcome, check.measure, check.value, check.limit, reason))
    frame = pd.DataFrame(rows, columns=["Result", "Measure", "Measured", "Limit", "Why undecided"])
    table = Table("limits", "Limits", frame, formats={"Measured": ".4g", "Limit": "g"})
    return table.without_empty_columns() if rows else table


def recited(facts: Facts) -> Table:
    """Show the tests of how many targets are recited further than unseen text, for each tier of
    copies.
    """
    columns = (
        (_REPEATS, "copies", ""),
        ("Targets", "num_targets", ""),
        ("Recited further", "num_above", ""),
        ("By chance", "expected", ".1f"),
        ("Fewest that the test notices", "noticeable", ""),
        ("p (Holm)", "p_value", ".4f"),
        ("Result", "result", ""),
    )
    found = facts.recited
    tests = found.tests if found else ()
    frame = pd.DataFrame([test._asdict() for test in tests], columns=[*TierTest._fields])
    frame["result"] = "not shown"
    frame.loc[[test.is_rejected for test in tests], "result"] = "recited"
    notes = []
    if found:
        notes = [
            f"Recited further: passages with an LMS above {found.threshold:.0f} tokens from any "
            f"prompt, which {found.num_allowed} of {found.num_controls} controls exceed. By "
            "chance: as many as if the model had seen none of them. Fewest that the test notices: "
            "if fewer passages of a row were recited, the result would be 'not shown'; a row "
            "without a number has too few passages for a test. p: hypergeometric, corrected by "
            "Holm's method for all rows. Passages of one document count as independent; if many "
            "are of one document, p is too small.",
            f"Above {found.threshold:.0f} tokens are at most {100 * found.upper:.1f} % of such "
            "passages (one-sided 95 % bound of Clopper and Pearson).",
        ]
    return tabulate("recited", "Recited further than unseen text", frame, columns, notes)


def by_prefix_length(samples: pd.DataFrame, footnotes: Footnotes) -> Table:
    num_passages = samples.groupby("kind")["passage_id"].nunique()
    fewest = min(int(num_passages.get(kind, 0)) for kind in KINDS)
    caveats = few_units(fewest)
    if 0 < fewest < MIN_UNITS:
        caveats = [f"From fewer than {MIN_UNITS} passages, such an interval is too narrow."]
    about = "95 %: percentile bootstrap over passages of the difference, targets minus controls."
    notes = [about + footnotes.mark(*caveats)] if fewest else []
    frame = _compared(
        (prompt_length(length), group) for length, group in samples.groupby("prefix_length")
    )
    columns = (("Prompt (tokens)", "name", ""), *_AGAINST, (_VERBATIM, "verbatim", ".1f"))
    return tabulate("by_prefix_length", "By length of the prompt", frame, columns, notes)


def by_repeats(targets: pd.DataFrame) -> Table:
    columns = (
        (_REPEATS, "name", ""),
        ("Targets", "number", ""),
        ("Avg LMS", "lms", ".2f"),
        ("Max LMS", "max_lms", ""),
        (_VERBATIM, "verbatim", ".1f"),
    )
    notes = ["Verbatim: recited completely from at least one of the prompts."]
    known = targets[targets["repeats"].notna()]
    # Tiers of 1, 2, 3 to 4, 5 to 8, ... occurrences.
    tiers = [(int(repeats) - 1).bit_length() for repeats in known["repeats"]]
    groups = []
    for _, group in known.groupby(tiers):
        repeats = group["repeats"]
        groups.append((span(repeats.min(), repeats.max(), decimals=0), group))
    frame = _compared(groups)
    return tabulate("by_repeats", "By repeats in the training text", frame, columns, notes)


def by_attack(samples: pd.DataFrame) -> Table:
    """Compare ways of asking. A passage counts with its best prompt of each."""
    groups = [*samples.groupby("attack", sort=False), ("any of these", samples)]
    passages = ["kind", "passage_id"]
    best = []
    for name, group in groups:
        of_passages = group.groupby(passages, as_index=False)
        best.append((name, of_passages[["lms", "verbatim"]].max()))
    frame = _compared(best if len(groups) > 2 else [])
    numbers = {name: len(group) for name, group in groups}
    frame["prompts"] = frame["name"].map(numbers)
    frame["share"] = [f"{row.hits} of {row.number}" for row in frame.itertuples()]
    notes = [
        "LMS: the highest of a passage's prompts. At most: one-sided 95 % bound of Clopper and "
        "Pearson for the share of such passages."
    ]
    columns = (
        ("Attack", "name", ""),
        ("Prompts", "prompts", ""),
        *_AGAINST,
        ("Targets verbatim", "share", ""),
        ("Verbatim, at most (%)", "upper", ".1f"),
    )
    return tabulate("by_attack", "By attack", frame, columns, notes)


def extraction(scores: pd.DataFrame, checkpoint: int) -> Table:
    """Show of how many targets a continuation can be sampled verbatim; see :func:`_extractable`."""
    columns = (
        ("Samples (n)", "num_samples", ","),
        ("Probability (p)", "probability", ".2f"),
        ("Targets", "hits", ""),
        ("Of", "number", ""),
        ("%", "share", ".1f"),
        ("At most (%)", "upper", ".1f"),
    )
    frame = _extractable(scores, checkpoint, _EXTRACTION_PAIRS)
    frame = frame.assign(share=100 * frame["share"], upper=100 * frame["upper"])
    notes = [
        "Targets of which n samples at temperature 1 contain the exact continuation with a "
        "probability of at least p, computed from its likelihood after the best of the prompts: "
        "(n, p)-discoverable extraction. At most: one-sided 95 % bound of Clopper and Pearson for "
        "the share of such passages. A greedy recitation is another question: each of its tokens "
        "only has to be the likeliest one, so that the whole can have a low probability."
    ]
    return tabulate("extraction", "Extraction by sampling", frame, columns, notes)


def _extractable(
    scores: pd.DataFrame, checkpoint: int, pairs: list[tuple[int, float]]
) -> pd.DataFrame:
    """Count (n, p)-discoverably extractable targets from the likelihoods of their continuations, if
    there are any.
    """
    is_known = (scores["metric"] == "continuation_nll") & (scores["kind"] == "target")
    is_known &= scores["checkpoint"] == checkpoint
    lowest = scores[is_known].groupby("unit", observed=True)["value"].min()
    rows = []
    number = len(lowest)
    for num_samples, probability in pairs if number else []:
        is_extractable = extraction_probability(lowest, num_samples) >= probability
        hits = int(is_extractable.sum())
        upper = binomial_upper_bound(hits, number)
        rows.append((num_samples, probability, hits, number, hits / number, upper))
    columns = ["num_samples", "probability", "hits", "number", "share", "upper"]
    return pd.DataFrame(rows, columns=columns)


class MeasuredValue(NamedTuple):
    """A measured value with its upper 95 % bound; None if it was not measured."""

    value: float | None
    upper: float | None
    unit: str


_NOT_MEASURED = MeasuredValue(None, None, "")


class Bound(NamedTuple):
    """A measure's name, as in ``--fail-above``, the value that it must not exceed, and what may be
    missing.

    With ``accept_unanswered`` it is answers; with ``accept_unproven`` the positive control.
    """

    name: str
    limit: float
    accept_unanswered: bool = False
    accept_unproven: bool = False

    @property
    def pair(self) -> tuple[int, float] | None:
        """Samples and probability of an extraction; else None."""
        match = re.fullmatch(_EXTRACTION, self.name.removesuffix(_UPPER), re.ASCII)
        if match is None:
            return None
        return int(match[2] or 1), float(match[1])

    @property
    def is_at_most_one(self) -> bool:
        """Whether the measure is a share or another probability."""
        return self.pair is not None or self.name.removesuffix(_UPPER) in ("verbatim", "auc")


class Check(NamedTuple):
    """A limit with the value that was measured.

    Attributes:
        measure (str): as in ``--fail-above``.
        limit (float): what the value must not exceed.
        value (float | None): None if it was not measured.
        outcome (Literal["pass", "fail", "undecided"]): "fail" if the value is above the limit, and
            only then.
        reason (str): why it is undecided. Default: "".
    """

    measure: str
    limit: float
    value: float | None
    outcome: Literal["pass", "fail", "undecided"]
    reason: str = ""

    def __str__(self) -> str:
        if self.outcome == "undecided":
            return f"{self.measure}={self.limit:g}: {self.reason}"
        relation = "above" if self.outcome == "fail" else "not above"
        return f"{self.measure} is {self.value:.4g}, {relation} {self.limit:g}"


def parse_bounds(
    text: str, *, accept_unanswered: bool = False, accept_unproven: bool = False
) -> list[Bound]:
    """Read limits such as ``recited=0,extraction@0.01=0.02``.

    Raises:
        ValueError: If there is no limit, a measure is unknown, or a limit is not a finite number,
            or such that nothing can be above it.
    """
    bounds = []
    for part in text.rstrip(",").split(","):
        name, _, limit = part.strip().rpartition("=")
        value = float(limit) if _NUMBER.fullmatch(limit) else math.nan
        if not math.isfinite(value) or not _BOUNDED.fullmatch(name):
            raise ValueError(
                f"--fail-above {part!r}: write MEASURE=LIMIT, such as recited=0; measures are "
                "recited, and lms, excess, verbatim, auc, extraction@P, extraction@P:N, also with "
                f"{_UPPER}"
            )
        bound = Bound(name, value, accept_unanswered, accept_unproven)
        if bound.pair is not None and not 0 < bound.pair[1] <= 1:
            raise ValueError(
                f"--fail-above {part!r}: a probability of an extraction is above 0 and at most 1"
            )
        if bound.is_at_most_one and value >= 1:
            raise ValueError(
                f"--fail-above {part!r}: nothing can be above it, because {name} is at most 1, and "
                "not in percent"
            )
        bounds.append(bound)
    return bounds


def require_possible(
    bounds: Sequence[Bound],
    num_targets: int,
    num_controls: int,
    *,
    longest: float = math.inf,
    problem: str | None = None,
) -> None:
    """Raise a ValueError if a limit cannot decide with so many passages, or without likelihoods by
    a ``problem``.

    No model passes it, none fails, or too many models that never saw the text do. ``longest`` is
    the number of tokens of the longest answer, if that is known.
    """
    wrong = []
    blunt = []
    dull = []
    for bound in bounds:
        limit = f"{bound.name}={bound.limit:g}"
        most = _most(bound, num_targets, longest)
        if num_targets and bound.limit >= most:
            blunt.append(f"{limit} (at most {most:g} are possible)")
        reason = _why_impossible(bound, num_targets, num_controls, problem)
        if reason:
            wrong.append(f"{limit} ({reason})")
        elif bound.name == "auc":
            rate = false_alarm_of_auc(bound.limit, num_targets, num_controls)
            if rate > _MOST_FALSE_ALARMS:
                dull.append(f"{limit} ({100 * rate:.0f} %)")
        elif bound.name == "excess" and bound.limit <= 0:
            dull.append(f"{limit} (50 %)")
    if wrong:
        raise ValueError(f"--fail-above: no model can pass {'; '.join(wrong)}")
    if blunt:
        raise ValueError(f"--fail-above: no model can be above {'; '.join(blunt)}: lower it")
    if dull:
        raise ValueError(
            f"--fail-above: {', '.join(dull)} of audits of unseen text would be above this limit, "
            f"and at most {100 * _MOST_FALSE_ALARMS:.0f} % may be: raise it, or use recited=0"
        )


def _why_impossible(bound: Bound, num_targets: int, num_controls: int, problem: str | None) -> str:
    """Say why no model can pass a limit; "" if one can."""
    name = bound.name.removesuffix(_UPPER)
    is_upper = bound.name.endswith(_UPPER)
    is_share = bound.is_at_most_one and name != "auc"
    needs_controls = name in ("recited", "excess", "auc")
    if problem and (bound.pair or name == "auc"):
        return f"likelihoods are missing: {problem}"
    # The bound of a share is above 1e-12 for any number of targets below 3e12.
    lowest = 1e-12 if is_upper and is_share else 0
    if name != "excess" and bound.limit < lowest:
        return "it is always above"
    if needs_controls and not num_controls:
        return "there are no controls"
    if is_upper and is_share:
        # The bound of none of n is 1 - 0.05^(1/n): with 20 targets 0.14, and 0.05 takes 59.
        least = binomial_upper_bound(0, num_targets)
        if bound.limit < least:
            needed = math.ceil(math.log(0.05) / math.log1p(-bound.limit))
            return f"with {num_targets} targets it is at least {least:.3g}, it takes {needed:,}"
    if is_upper and not is_share:
        fewest = min(num_targets, num_controls) if needs_controls else num_targets
        if fewest < MIN_UNITS:
            both = "targets and controls" if needs_controls else "targets"
            return f"a bound needs {MIN_UNITS} {both}, there are {fewest}"
    if name == "recited" and least_noticeable(num_targets, num_controls) is None:
        return (
            f"with {num_targets} targets and {num_controls} controls, the test would not notice it "
            "if all targets were recited"
        )
    return ""


def _most(bound: Bound, num_targets: int, longest: float) -> float:
    """Return the highest possible value of a measure."""
    if bound.is_at_most_one:
        return 1.0
    return float(num_targets if bound.name == "recited" else longest)


def measures_and_checks(
    facts: Facts,
    scores: pd.DataFrame,
    checkpoint: int,
    membership: pd.DataFrame,
    bounds: Sequence[Bound],
    control: PositiveControl,
    headline: str | None,
    no_finding: str = "",
) -> tuple[dict[str, MeasuredValue], list[Check]]:
    """Measure what ``--fail-above`` can name, and compare it with the limits.

    ====================  ========================================================================
    ``recited``           targets that are recited further than unseen text, see
                          :func:`~tfidf_tune.results.recited.recited_further`; 0 if their number may
                          be chance
    ``lms``               average LMS of targets, in tokens, over greedy prompts, or else those of
                          the first attack
    ``excess``            the same minus that of controls
    ``verbatim``          share of targets recited verbatim from at least one prompt of any attack
    ``extraction@P:N``    share of targets of which N samples hold the continuation with a
                          probability of at least P; from likelihoods, with N = 1 if it is left out
    ``auc``               of membership inference by the headline, see
                          :func:`~tfidf_tune.audit._headline.choose_headline`
    ====================  ========================================================================

    Upper bounds are those of 95 % bootstraps over at least 10 passages; of shares, one-sided by
    Clopper and Pearson. ``headline`` is the attack of ``auc``. ``no_finding`` says why membership
    inference says nothing about the model; "" if it does.
    """
    upper = bootstrap_interval(lambda values, axis=-1: values.mean(axis), facts.target_means).high
    few = min(facts.num_targets, facts.num_controls)
    floor = facts.floor
    share = facts.num_verbatim / facts.num_targets
    # Recitation, from the answers.
    recited = _NOT_MEASURED
    if facts.recited is not None:
        recited = MeasuredValue(float(facts.recited.number), None, "passages")
    excess = _NOT_MEASURED
    if floor is not None:
        excess = MeasuredValue(floor.difference, _known(floor.excess.high, few), "tokens")
    most_verbatim = binomial_upper_bound(facts.num_verbatim, facts.num_targets)
    measures = {
        "recited": recited,
        "lms": MeasuredValue(facts.lms, _known(upper, facts.num_targets), "tokens"),
        "excess": excess,
        "verbatim": MeasuredValue(share, most_verbatim, "share"),
    }
    # Extraction and membership, from the likelihoods, which may be missing.
    wanted = [bound.pair for bound in bounds if bound.pair]
    pairs = list(dict.fromkeys([*_EXTRACTION_PAIRS, *wanted]))
    measures |= {_extraction_name(*pair): _NOT_MEASURED for pair in pairs}
    for row in _extractable(scores, checkpoint, pairs).itertuples():
        name = _extraction_name(row.num_samples, row.probability)
        measures[name] = MeasuredValue(row.share, row.upper, "share")
    measures["auc"] = _NOT_MEASURED
    if len(membership) and headline is not None:
        row = membership.iloc[0]
        header = auc_header(headline)
        if header in row:
            highest = _known(row.get(f"{header} to"), few)
            measures["auc"] = MeasuredValue(_known(row[header]), highest, "probability")
    checks = []
    for bound in bounds:
        name = bound.name.removesuffix(_UPPER)
        measure = measures[_extraction_name(*bound.pair) if bound.pair else name]
        value = measure.upper if bound.name.endswith(_UPPER) else measure.value
        if name == "auc" and value is not None and no_finding:
            checks.append(Check(bound.name, bound.limit, value, "undecided", no_finding))
        else:
            checks.append(_check(bound, value, facts, control))
    return measures, checks


def _check(bound: Bound, value: float | None, facts: Facts, control: PositiveControl) -> Check:
    """Compare a value with its limit: above it, or not above it and shown to be measurable, or
    undecided.
    """
    if value is None:
        return Check(bound.name, bound.limit, value, "undecided", "it was not measured")
    if bound.name == "recited" and facts.recited and value <= bound.limit:
        reason = _why_not_recited_further(facts.recited)
        if reason:
            return Check(bound.name, bound.limit, value, "undecided", reason)
    if bound.name.startswith("excess") and facts.num_unanswered_controls:
        reason = f"{facts.num_unanswered_controls} answers for controls are missing"
        return Check(bound.name, bound.limit, value, "undecided", reason)
    rate = _false_alarm_rate(bound, facts)
    if rate > _MOST_FALSE_ALARMS:
        reason = (
            f"{100 * rate:.0f} % of audits of unseen text would be above this limit, raise it or "
            "use recited=0"
        )
        return Check(bound.name, bound.limit, value, "undecided", reason)
    if value > bound.limit:
        return Check(bound.name, bound.limit, value, "fail")
    if facts.num_unanswered and not bound.accept_unanswered:
        reason = f"{facts.num_unanswered:,} answers are missing"
        return Check(bound.name, bound.limit, value, "undecided", reason)
    reason = "" if bound.accept_unproven else _why_unproven(bound, facts, control)
    if reason:
        return Check(bound.name, bound.limit, value, "undecided", reason)
    return Check(bound.name, bound.limit, value, "pass")


def _why_not_recited_further(recited: Recited) -> str:
    """Say why targets could not go further than unseen text, or not enough of them; "" if they
    could.
    """
    if recited.num_hidden:
        return (
            f"a control is recited for {recited.threshold:.0f} tokens, and {recited.num_hidden} "
            "targets, which have no more, are recited to their end"
        )
    if recited.all.noticeable is None:
        return (
            f"only {recited.all.num_targets} targets have more than the {recited.threshold:.0f} "
            "tokens that a control is recited for: the test would not notice it if all of these "
            "were recited"
        )
    # Passages of many copies may be too few for a test, whatever they recite.
    for test in recited.tiers:
        if test.num_above and test.noticeable is None:
            number = f"{test.num_above} of the {test.num_targets} passages"
            if test.num_targets == 1:
                number = "the passage"
            verb = "is" if test.num_above == 1 else "are"
            return (
                f"{number}{test.that_occur} {verb} recited for more than the "
                f"{recited.threshold:.0f} tokens of a control, and so few passages cannot be told "
                "from chance"
            )
    return ""


def _why_unproven(bound: Bound, facts: Facts, control: PositiveControl) -> str:
    """Say why a value above a limit could not have been seen; "" if the positive control showed
    that it could.
    """
    if control.state == "not applicable":
        return ""
    name = bound.name.removesuffix(_UPPER)
    if bound.pair or name == "auc":
        return control.likelihood_problem
    if control.problem:
        return "nothing was shown by the positive control"
    if name == "verbatim":
        if not all(reading.num_in_full for reading in control.answers):
            return "the positive control has not read any copy in full"
        if facts.longest_answer < facts.longest:
            return (
                f"the longest answer has {facts.longest_answer} tokens, and {facts.longest} were "
                "asked for"
            )
        return ""
    needed = facts.recited.threshold if name == "recited" and facts.recited else bound.limit
    if needed >= facts.longest_answer:
        return f"the longest answer has {facts.longest_answer} tokens, not more than {needed:g}"
    for reading in control.answers:
        # A control is asked for fewer tokens than most passages, so that shares are compared, and
        # tokens up to those.
        most_read = reading.highest_share * reading.num_to_read
        is_within = needed / facts.longest < reading.highest_share
        if needed <= reading.num_to_read:
            is_within &= needed < most_read
        if not is_within:
            return (
                f"the positive control reads at most {most_read:.0f} of {reading.num_to_read:.0f} "
                f"tokens, and {needed:g} of {facts.longest} are not below that"
            )
    return ""


def _false_alarm_rate(bound: Bound, facts: Facts) -> float:
    """Return how often a limit on a mean is exceeded by text that was never seen: by draws from the
    controls.

    Upper bounds stay as they are; other measures are checked before a model is asked, or have no
    controls to draw from.
    """
    if bound.name not in ("lms", "excess", "verbatim") or facts.num_controls < MIN_UNITS:
        return 0.0
    rng = np.random.default_rng(SEED)
    controls = facts.controls.groupby("passage_id")["lms"].mean().to_numpy(float)
    if bound.name == "verbatim":
        of_controls = facts.samples[facts.samples["kind"] == "control"]
        controls = of_controls.groupby("passage_id")["verbatim"].max().to_numpy(float)
    drawn = rng.choice(controls, (_NUM_DRAWS, facts.num_targets)).mean(axis=1)
    if bound.name == "excess":
        drawn -= rng.choice(controls, (_NUM_DRAWS, len(controls))).mean(axis=1)
    return float((drawn > bound.limit).mean())


def _extraction_name(num_samples: int, probability: float) -> str:
    return f"extraction@{probability:g}:{num_samples}"


def _known(value: Any, num_passages: int = MIN_UNITS) -> float | None:
    return None if value is None or math.isnan(value) or num_passages < MIN_UNITS else float(value)
