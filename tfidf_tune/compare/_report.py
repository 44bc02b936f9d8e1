"""Runs side by side as a report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from tfidf_tune.compare._evaluations import (
    at_last,
    compare_at_equal_perplexity,
    compare_objectives,
    compare_seeds,
    evaluation_table,
    having_at_last,
    lms_floor,
)
from tfidf_tune.compare._examples import recitation_examples
from tfidf_tune.compare._figures import comparison_figures
from tfidf_tune.compare._intervals import ENOUGH_UNITS, MIN_UNITS, NUM_RESAMPLES, SEED, Interval
from tfidf_tune.compare._table import ANSWER_MEASURES, BY_LABEL, LMS, PERPLEXITY, SUMMARY_MEASURES, Checkpoint, Results
from tfidf_tune.compare._tables import comparison_tables
from tfidf_tune.compare._verdict import (
    BOUND,
    FEW_OUTCOMES,
    FEW_UNITS,
    LMS_EXPLAINED,
    NOT_CORRECTED,
    RECITED_MARK,
    SEVERAL_COMPARISONS,
    Change,
    Outcome,
    at_progress,
    interval_text,
    verdict,
    why_no_interval,
)
from tfidf_tune.report._document import Example, Footnotes, Report, joined

if TYPE_CHECKING:
    import pandas as pd

# In the order of preference: what a reduction costs.
_UTILITIES = [PERPLEXITY, SUMMARY_MEASURES[2], ANSWER_MEASURES[1]]
_SEEDS = "Intervals cover the choice of passages, blocks, articles and questions, not that of seeds."
_ONE_SEED = "A single training run cannot separate the effect of the objective from that of its seed."


def comparison_report(results: Results, *, baseline: str | None = None) -> Report:
    """Compare runs: a verdict, findings with intervals, the paper's tables, figures, examples.

    Args:
        results (Results): of at least two runs, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    baseline, evaluations = evaluation_table(results, baseline=baseline)
    reductions = compare_objectives(evaluations, baseline)
    at_equal_perplexity = compare_at_equal_perplexity(evaluations, baseline)
    have = {str(name): own["objective"].tolist() for name, own in evaluations.groupby("setting", sort=False)}
    compared = {setting: objectives for setting, objectives in have.items() if baseline in objectives}
    found: dict[tuple[str, str], dict[str, Any]] = {  # setting and objective -> measure -> row of reductions
        (setting, other): {} for setting, objectives in compared.items() for other in objectives if other != baseline
    }
    for one in reductions.itertuples():
        found[one.setting, one.objective][one.measure] = one
    notes = Footnotes()
    at_equal = at_equal_perplexity.set_index(["setting", "objective", "progress"])["recited"].to_dict()
    outcomes = [_outcome(*pair, rows, at_equal, evaluations, baseline, notes) for pair, rows in found.items()]
    if sum(isinstance(one.recited, Change) for one in outcomes) > 1:
        several = notes.mark(SEVERAL_COMPARISONS)
        outcomes = [replace(one, marks=one.marks + several) if one.marks else one for one in outcomes]
    tables, detectable = comparison_tables(results, evaluations, reductions, at_equal_perplexity, baseline, notes)
    outcomes = [replace(one, detectable=detectable) for one in outcomes]
    others = [one.objective for one in results.checkpoints if one.objective != baseline]
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        verdict=verdict(outcomes, have, baseline),
        statements=_statements(evaluations, outcomes, baseline),
        tables=tables,
        figures=comparison_figures(results, evaluations),
        examples=_examples(results, evaluations),
        mark=RECITED_MARK,
        provenance=_provenance(results, baseline),
        lead=_lead(results, evaluations),
        footnotes=notes.texts,
    )


def _lead(results: Results, evaluations: "pd.DataFrame") -> str:
    text = f"Runs of {joined(one.model for one in results.checkpoints)}"
    kinds = set(results.scores["kind"])
    if "target" in kinds:
        floor = "; its floor is the average over passages that were never injected" if "control" in kinds else ""
        text += f", asked to continue passages of their training text. {LMS_EXPLAINED}{floor}"
    one_seed = (evaluations.groupby(["setting", "objective"])["run"].nunique() == 1).all()
    return f"{text}. One seed, no interval over seeds." if one_seed else f"{text}."


def _outcome(
    setting: str,
    objective: str,
    found: dict[str, Any],
    at_equal: Mapping[Any, str | None],
    evaluations: "pd.DataFrame",
    baseline: str,
    notes: Footnotes,
) -> Outcome:
    own = evaluations[evaluations["setting"] == setting]
    several = evaluations["setting"].nunique() > 1
    last, change = at_last(own, LMS), found.get(LMS.label)
    if change is None:
        why = f"{objective} and {baseline} share no checkpoint with memorization results"
        return Outcome(
            setting, objective, baseline, f"what {objective} recites is not compared: {why}", several=several
        )
    if change.num_units < MIN_UNITS:
        few = f"too few passages ({change.num_units}; it takes {MIN_UNITS})"
        recited: Change | str = f"{few} to judge whether {objective} recites less or more than {baseline}"
    elif math.isnan(change.reduction):
        recited = f"{objective} is not compared with {baseline}: {why_no_interval(change)}"
    else:
        recited = _change(change, notes)
    utility, cost = _cost(found, last, objective, baseline, notes)
    floors = {name: lms_floor(last[last["objective"] == name]) for name in (objective, baseline)}
    known = {name: floor for name, floor in floors.items() if floor}
    fewest = min((floor.excess.num_units for floor in known.values()), default=0)
    unknown = "no controls" if not fewest else f"{fewest} targets or controls; it takes {MIN_UNITS}"
    reached = {name: floor.excess[:2] for name, floor in known.items() if floor.reached}
    runs = own[own["objective"].isin([baseline, objective])].groupby("objective")["run"].nunique()
    return Outcome(
        setting,
        objective,
        baseline,
        recited,
        cost,
        kind=_kind(recited, utility, cost),
        utility=utility,
        floors=reached,
        unknown_floor=unknown if fewest < MIN_UNITS else "",
        at_equal=at_equal.get((setting, objective, change.progress)),
        several=several,
        marks=notes.mark(*([BOUND] if reached else []), _SEEDS, *([_ONE_SEED] if min(runs) == 1 else [])),
    )


def _kind(recited: Change | str, utility: str, cost: Change | str) -> str:
    """Say what comparisons that a summary names together have in common."""
    direction = recited.direction if isinstance(recited, Change) else None
    if not direction:
        return "without a verdict" if direction is None else "not shown to recite less or more"
    said = {-1: "lower", 0: "not shown to differ", 1: "higher", None: "without a verdict"}
    of_cost = f"{utility} {said[cost.direction]}" if isinstance(cost, Change) else "cost unknown"
    return f"recites {'less' if direction < 0 else 'more'}, {of_cost}"


def _change(one: Any, notes: Footnotes) -> Change:
    """Describe a row of reductions that is not NaN; the ends of an interval without 0 are amounts of the change."""
    percent, unit, when = -100 * one.reduction, BY_LABEL[one.measure].unit, at_progress(one.progress, ",")
    if math.isnan(one.low):
        return Change(percent, None, f"no interval: {why_no_interval(one)}{when}")
    interval = Interval(one.low, one.high, one.num_units)
    direction = {"yes": 1 if percent > 0 else -1, "no": 0}.get(one.significant or "")
    sign = 1 if percent < 0 and direction != 0 else -1
    low, high = sorted(100 * sign * end for end in (one.low, one.high))
    text = interval_text(Interval(low, high, one.num_units), unit, decimals=1, suffix=" %") + when
    if direction is None:
        text += f"; too few {unit}s to judge: {one.num_units} instead of {MIN_UNITS}"
    elif interval.significant != one.significant:
        text += f"; {NOT_CORRECTED}"
    if direction is not None and one.num_units < ENOUGH_UNITS:
        text += notes.mark(FEW_UNITS)
    return Change(percent, direction, text)


def _cost(
    found: dict[str, Any], last: "pd.DataFrame", objective: str, baseline: str, notes: Footnotes
) -> tuple[str, Change | str]:
    """Return the utility and its change at the checkpoints ``last`` of the LMS, or a clause that says why not."""
    progress, measured = last["progress"].max(), [one for one in _UTILITIES if one.label in found]
    for utility in measured:
        change = found[utility.label]
        if change.progress == progress and math.isnan(change.reduction):
            return utility.phrase, f"the change of the {utility.phrase} is undefined, since {why_no_interval(change)}"
        if change.progress == progress:
            return utility.phrase, _change(change, notes)
    means = last.groupby("objective")["log_perplexity"].mean()
    percent = 100 * math.expm1(means.get(objective, math.nan) - means.get(baseline, math.nan))
    if math.isfinite(percent):
        return PERPLEXITY.phrase, Change(percent, None, "no interval: only the mean over blocks was kept")
    name = measured[0].phrase if measured else PERPLEXITY.phrase
    runs = f"all runs at {progress} % of training" if measured else "both"
    return name, f"{name} was not measured for {runs}, so the cost is unknown"


def _statements(evaluations: "pd.DataFrame", outcomes: Sequence[Outcome], baseline: str) -> list[str]:
    summed_up = len(outcomes) > FEW_OUTCOMES
    told: list[tuple[str, str]] = []  # setting and sentence
    for setting, objective, last in having_at_last(evaluations, LMS):
        floor = lms_floor(last)
        if floor and (floor.reached or not summed_up):
            known = not math.isnan(floor.excess.low)
            evidence = f"; {interval_text(floor.excess, 'passage', decimals=2)}" if known else ""
            more = f"{abs(floor.difference):.2f} tokens {'less' if floor.difference < 0 else 'more'}"
            text = f"{objective} recites {more} of the targets than of the controls"
            told.append((setting, f"{text} ({floor.targets:.2f} against {floor.controls:.2f}{evidence})."))
    for (setting, objective), by_seed in compare_seeds(evaluations, baseline).items():
        if len(by_seed) > 1:
            listed = ", ".join("undefined" if math.isnan(one) else f"{100 * one:.1f} %" for one in by_seed)
            told.append((setting, f"Reduction of the average LMS by seed under {objective}: {listed}."))
    several = evaluations["setting"].nunique() > 1
    statements = [f"{setting}: {text}" if several else text for setting, text in told]
    return [*(one.sentence for one in outcomes), *statements] if summed_up else statements


def _examples(results: Results, evaluations: "pd.DataFrame") -> list[Example]:
    examples = []
    for setting, own in evaluations.groupby("setting", sort=False):
        shown = {objective: results.checkpoints[one.index[0]] for _, objective, one in having_at_last(own, LMS)}
        if shown and all(one.samples for one in shown.values()):
            examples += recitation_examples(str(setting), shown)
    return examples


def _provenance(results: Results, baseline: str) -> dict[str, str]:
    runs: dict[object, list[Checkpoint]] = {}
    for one in results.checkpoints:
        runs.setdefault(one.run, []).append(one)
    entries = {"Baseline": baseline}
    for first, *later in runs.values():
        seed = "seed unknown" if first.seed is None else f"seed {first.seed}"
        progress = ", ".join(f"{one.progress} %" for one in (first, *later))
        entries[f"{first.setting}, {first.objective}, {seed}"] = f"{first.folder} (evaluated at {progress})"
    return entries | {
        "Intervals": f"percentile bootstrap, {NUM_RESAMPLES:,} resamples, seed {SEED}",
        "tfidf-tune": version("tfidf-tune"),
        "Date": date.today().isoformat(),
    }
