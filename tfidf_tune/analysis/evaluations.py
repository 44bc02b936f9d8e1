"""Evaluated checkpoints, checked to be comparable, with what each measure is made of."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from tfidf_tune.analysis.averages import run_table
from tfidf_tune.results import Checkpoint, Results

if TYPE_CHECKING:
    import pandas as pd

_DEFAULT_BASELINE = "CE"
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """A mean over observations, or e to the power of it.

    Args:
        name (str): as in tables: "Avg LMS".
        phrase (str): as in sentences: "average LMS".
        metric (str): in the table of results.
        kind (str): of the units: "target", "control", "block", "article", "question".
        exponential (bool): whether the measure is e to the power of the mean. Default: False.
    """

    name: str
    phrase: str
    metric: str
    kind: Literal["target", "control", "block", "article", "question"]
    exponential: bool = False

    @property
    def unit(self) -> str:
        """What is resampled as a whole: "passage", "block", "article", "question"."""
        return "passage" if self.kind in ("target", "control") else self.kind

    def value(self, sums: Floats, counts: Floats, axis: int = -1) -> Any:
        """Return the measure of units ``[..., n]`` along an axis."""
        mean = sums.sum(axis) / counts.sum(axis)
        with np.errstate(over="ignore"):  # a diverged model has an infinite perplexity
            return np.exp(mean) if self.exponential else mean


LMS = Measure("Avg LMS", "average LMS", "lms", "target")
CONTROL_LMS = Measure("Control LMS", "average LMS of the controls", "lms", "control")
PASSAGE_NLL = Measure("NLL of targets", "NLL of the targets", "passage_nll", "target")
PERPLEXITY = Measure("Perplexity", "perplexity", "nll", "block", exponential=True)
OTHER_PERPLEXITY = Measure("Other perplexity", "perplexity on other text", "other_nll", "block", exponential=True)
SUMMARY_MEASURES = (
    Measure("Summary ROUGE-1", "ROUGE-1", "rouge1", "article"),
    Measure("Summary ROUGE-2", "ROUGE-2", "rouge2", "article"),
    Measure("Summary ROUGE-L", "ROUGE-L", "rouge_l", "article"),
    Measure("Summary BERTScore-F1", "BERTScore-F1", "bertscore_f1", "article"),
)
ANSWER_MEASURES = (
    Measure("Answer EM", "exact match", "exact_match", "question"),
    Measure("Answer F1", "F1", "f1", "question"),
)
COMPARED = (
    LMS,
    Measure("Avg Prefix", "average prefix match", "prefix_match", "target"),
    Measure("ROUGE-L", "ROUGE-L of the targets", "rouge_l", "target"),
    PERPLEXITY,
    OTHER_PERPLEXITY,
    *SUMMARY_MEASURES,
    *ANSWER_MEASURES,
)
BY_NAME = {measure.name: measure for measure in COMPARED}


def evaluation_table(results: Results, *, baseline: str | None = None) -> tuple[str, "pd.DataFrame"]:
    """Return the baseline, and a row for each checkpoint, by setting and objective in the order of the first runs.

    Args:
        results (Results): of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.

    Returns:
        tuple[str, pandas.DataFrame]: the baseline, which comes first in each setting; and a frame indexed as
            ``results.checkpoints`` with the columns of :func:`run_table`, and one for each measure by name: a tuple of
            float64 ``[n]`` sums and ``[n]`` counts by ascending unit (the prefix lengths of a passage stay together),
            or None if a value is missing.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    runs = results.checkpoints
    if len({one.run for one in runs}) < 2:
        found = f"only {runs[0].folder} ({runs[0].setting}, {runs[0].objective})" if runs else "no run"
        raise ValueError(
            f"nothing to compare: there is {found}. Give a second run, of the baseline or another objective; to look "
            "at a single model, use `tfidf-tune probe audit`"
        )
    objectives, table = comparable_runs(results, baseline)
    totals = dict(_unit_totals(results.scores))
    columns = {
        measure.name: [totals.get((at, measure.metric, measure.kind)) for at in table.index]
        for measure in (*COMPARED, CONTROL_LMS, PASSAGE_NLL)
    }
    table = table.assign(
        **columns, place=table.groupby("setting", sort=False).ngroup(), rank=table["objective"].map(objectives.index)
    )
    return objectives[0], table.sort_values(["place", "rank"], kind="stable").drop(columns=["place", "rank"])


def _unit_totals(scores: "pd.DataFrame") -> Iterator[tuple[tuple[int, str, str], tuple[Floats, Floats]]]:
    """Checkpoint, metric and kind -> sums and counts by unit; without aggregates, and those with a missing value."""
    rows = scores[scores["unit"] != ""]
    units = rows["unit"].astype(str)
    # Blocks are numbered.
    rows = rows.assign(
        sum=rows["value"] * rows["count"], unit=units.where(rows["kind"] != "block", units.str.zfill(20))
    )
    keys = ["checkpoint", "metric", "kind"]
    missing = set(rows.loc[rows["value"].isna(), keys].itertuples(index=False, name=None))
    totals = rows.groupby([*keys, "unit"], observed=True)[["sum", "count"]].sum()
    for key, own in totals.groupby(level=keys, observed=True):
        if key not in missing:
            yield key, (own["sum"].to_numpy(float), own["count"].to_numpy(float))


def passage_lms(results: Results, measure: Measure = LMS) -> dict[int, Floats]:
    """Return the LMS of each checkpoint by ascending passage, as its share of the mean: float64 ``[n]``, of that mean.

    A checkpoint whose passages were not kept one by one, or with a missing value, is left out. ``measure`` is LMS, of
    the targets, or CONTROL_LMS.
    """
    rows = results.scores[(results.scores["metric"] == measure.metric) & (results.scores["kind"] == measure.kind)]
    return {checkpoint: sums / counts.mean() for (checkpoint, *_), (sums, counts) in _unit_totals(rows)}


def shared_progress(evaluations: "pd.DataFrame", *measures: Measure) -> list[int]:
    """Return, ascending, the progress values at which every run with these measures has all of them."""
    having = evaluations.dropna(subset=[measure.name for measure in measures])
    num_runs = having.groupby("progress")["run"].nunique()
    return sorted(num_runs.index[num_runs == having["run"].nunique()])


def at_last(evaluations: "pd.DataFrame", *measures: Measure) -> "pd.DataFrame":
    """Return the evaluations of a setting at the last progress where all runs have the measures, or none."""
    return evaluations[evaluations["progress"] == max(shared_progress(evaluations, *measures), default=None)]


def having_at_last(evaluations: "pd.DataFrame", measure: Measure) -> Iterator[tuple[str, str, "pd.DataFrame"]]:
    """Yield setting, objective and those of its evaluations at the last shared progress that have a measure."""
    for setting, own in evaluations.groupby("setting", sort=False):
        for objective, having in at_last(own, measure).dropna(subset=[measure.name]).groupby("objective", sort=False):
            yield str(setting), str(objective), having


def unit_totals(evaluations: "pd.DataFrame", measure: Measure) -> tuple[Floats, Floats] | None:
    """Return sums (means over evaluations) and counts by unit; None if there is no evaluation, or one misses it."""
    totals = evaluations[measure.name]
    if totals.empty or totals.isna().any():
        return None
    return np.mean([sums for sums, _ in totals], axis=0), totals.iloc[0][1]


def value_of(evaluations: "pd.DataFrame", measure: Measure) -> float:
    """Return a measure over seeds, NaN if it is missing; perplexity is over all their predictions."""
    totals = unit_totals(evaluations, measure)
    return math.nan if totals is None else float(measure.value(*totals))


def comparable_runs(results: Results, baseline: str | None) -> tuple[list[str], "pd.DataFrame"]:
    """Choose the baseline and check that runs can be compared.

    Args:
        results (Results): of at least one run.
        baseline (str | None): objective to compare with; None chooses "CE" if there is one, else the first run's.

    Returns:
        tuple[list[str], pandas.DataFrame]: the objectives, the baseline first; and :func:`run_table`.

    Raises:
        ValueError: If no checkpoint has the baseline, a checkpoint occurs twice, a run has checkpoints of two
            trainings, or runs of a model were not asked the same.
    """
    objectives = list(dict.fromkeys(one.objective for one in results.checkpoints))
    if baseline is None:
        baseline = _DEFAULT_BASELINE if _DEFAULT_BASELINE in objectives else objectives[0]
    if baseline not in objectives:
        raise ValueError(f"no run has the baseline {baseline!r}: there are {', '.join(objectives)}")
    _require_comparable(results)
    return sorted(objectives, key=lambda name: name != baseline), run_table(results)


def _require_comparable(results: Results) -> None:
    """Check that runs are distinct, and that those of a model had the same prompts, blocks, articles and questions.

    Checkpoints of all learning rates are compared; a task that was not run is not a difference.
    """
    seen: dict[tuple[object, ...], dict[int, Checkpoint]] = {}
    first_asked: dict[tuple[str, str], int] = {}
    for at, one in enumerate(results.checkpoints):
        others = seen.setdefault(one.run, {})
        if one.progress in others or any(_training(one) != _training(other) for other in others.values()):
            raise ValueError(f"two runs are both {one.title}: leave out one of the files or folders that have them")
        others[one.progress] = one
        for what, digest in one.asked.items():
            first = first_asked.setdefault((one.model, what), at)
            if results.checkpoints[first].asked[what] != digest:
                raise ValueError(
                    f"{_where(results.checkpoints[first])} and {_where(one)} cannot be compared, their {what} differ: "
                    f"{_difference(_questions(results, first, what), _questions(results, at, what))}. Evaluate both "
                    "with one probe file, data set and settings"
                )


def _training(one: Checkpoint) -> tuple[object, ...]:
    return one.recipe, one.loss, one.training_seconds


def _where(one: Checkpoint) -> str:
    if not one.folder:
        return f"{one.title}, {one.progress} %"
    return f"{one.folder} ({one.setting}, {one.objective}, {one.progress} %)"


def _questions(results: Results, checkpoint: int, what: str) -> dict[str, Any]:
    """Return each question and what was expected; from a results file, the references are not known."""
    samples = results.checkpoints[checkpoint].samples
    if what == "prompts" and samples:
        return {sample.prompt_label: sample.reference_ids for sample, _ in samples}
    passages = ("target", "control")
    kinds = {"prompts": passages, "passages": passages, "perplexity blocks": ("block",)}.get(
        what, (what.removesuffix("s"),)
    )
    scores = results.scores
    if kinds == passages:
        scores = scores[scores["metric"] == ("lms" if what == "prompts" else PASSAGE_NLL.metric)]
    own = scores[(scores["checkpoint"] == checkpoint) & scores["kind"].isin(kinds)]
    if what == "perplexity blocks":
        return dict(zip(own["unit"], (f"{count:g} predictions" for count in own["count"]), strict=True))
    prefixes = (f", {prefix:g} tokens" if prefix > 0 else "" for prefix in own["prefix"])
    return {f"{unit}{prefix}": None for unit, prefix in zip(own["unit"], prefixes, strict=True)}


def _difference(first: dict[str, Any], second: dict[str, Any]) -> str:
    for key in first | second:
        if key not in second:
            return f"only the first has {key}"
        if key not in first:
            return f"only the second has {key}"
        if first[key] != second[key]:
            return f"{key} expects {_short(first[key])} in the first and {_short(second[key])} in the second"
    return "references, offsets, or the noise or sampling of the prompts are not the same"


def _short(value: Any) -> str:
    return f"{value[:5]}... ({len(value)} ids)" if isinstance(value, list) else str(value)
