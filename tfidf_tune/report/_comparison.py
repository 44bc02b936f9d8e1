"""Runs side by side as a report."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from tfidf_tune.analysis.comparison import (
    Floor,
    compare_at_equal_perplexity,
    compare_objectives,
    compare_seeds,
    lms_floor,
)
from tfidf_tune.analysis.evaluations import at_last, evaluation_table, having_at_last
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, NUM_RESAMPLES, SEED, Interval
from tfidf_tune.report._comparison_tables import comparison_tables, paper_table
from tfidf_tune.report._document import Example, Report
from tfidf_tune.report._examples import recitation_examples
from tfidf_tune.report._figures import comparison_figures
from tfidf_tune.report._verdict import Change, Outcome, floor_text, is_summed_up, not_compared, verdict, with_membership
from tfidf_tune.report._wording import (
    BOUND,
    FEW_UNITS,
    LMS_EXPLAINED,
    NOT_CORRECTED,
    SEVERAL_COMPARISONS,
    Footnotes,
    at_progress,
    interval_text,
    joined,
    span,
    too_few,
    why_no_interval,
)
from tfidf_tune.results import Checkpoint, Results
from tfidf_tune.results._measures import (
    ANSWER_MEASURES,
    BY_LABEL,
    LMS,
    PERPLEXITY,
    SUMMARY_MEASURES,
)

if TYPE_CHECKING:
    import pandas as pd

# In the order of preference: what a reduction costs, and how a sentence names it.
_UTILITIES = {"Perplexity": "perplexity", "Summary ROUGE-L": "ROUGE-L of summaries", "Answer F1": "F1 of answers"}
_SEEDS = "Intervals cover the choice of passages, blocks, articles and questions, not that of seeds."
_ONE_SEED = "A single training run cannot separate the effect of the objective from that of its seed."
_Pairs: TypeAlias = dict[tuple[str, str], dict[str, Any]]  # setting and objective -> measure -> row of reductions


def comparison_report(results: Results, *, baseline: str | None = None, paper: bool = False) -> Report:
    """Compare runs: a verdict, findings with intervals, the paper's tables, figures, examples.

    Args:
        results (Results): of at least two runs, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.
        paper (bool): whether to add a table with the paper's values of the same models. Default: False.

    Raises:
        ValueError: If there is only one run, no run has the baseline, runs of a model were not asked the same, or
            ``paper`` is set and the paper has no value of any of them.
    """
    baseline, evaluations = evaluation_table(results, baseline=baseline)
    reductions = compare_objectives(evaluations, baseline)
    at_equal_perplexity = compare_at_equal_perplexity(evaluations, baseline)
    others = [one.objective for one in results.checkpoints if one.objective != baseline]
    notes = Footnotes()
    pairs = _pairs(evaluations, reductions, baseline)
    gains = {(one.setting, one.objective, one.progress): _gain(one) or 0 for one in at_equal_perplexity.itertuples()}
    outcomes = [_outcome(*names, found, gains, evaluations, baseline, notes) for names, found in pairs.items()]
    if sum(isinstance(one.recited, Change) for one in outcomes) > 1:
        several = notes.mark(SEVERAL_COMPARISONS)
        outcomes = [replace(one, marks=one.marks + several) if one.marks else one for one in outcomes]
    tables, detectable = comparison_tables(results, evaluations, reductions, at_equal_perplexity, baseline, notes)
    outcomes = [with_membership(one, at, detectable) for (at, _), one in zip(pairs, outcomes, strict=True)]
    have = {str(name): own.tolist() for name, own in evaluations.groupby("setting", sort=False)["objective"]}
    if paper:
        tables.append(paper_table(tables, {one.setting: one.model for one in results.checkpoints}))
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        verdict=verdict(outcomes) + not_compared(have, baseline),
        statements=_statements(evaluations, pairs, outcomes, at_equal_perplexity, baseline, notes),
        tables=tables,
        figures=comparison_figures(results, evaluations),
        examples=_examples(results, evaluations),
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
    runs = evaluations.groupby(["setting", "objective"])["run"].nunique()
    limits = []
    if len(evaluations) == evaluations["run"].nunique():
        limits.append("one checkpoint of each run")
    if (runs == 1).all():
        limits.append("one seed, no interval over seeds")
    return f"{text}. {', '.join(limits).capitalize()}." if limits else f"{text}."


def _pairs(evaluations: "pd.DataFrame", reductions: "pd.DataFrame", baseline: str) -> _Pairs:
    pairs: _Pairs = {
        (setting, objective): {}
        for setting, own in evaluations.groupby("setting", sort=False)
        for objective in own["objective"].unique()
        if objective != baseline and baseline in set(own["objective"])
    }
    for one in reductions.itertuples():
        pairs[one.setting, one.objective][one.measure] = one
    return pairs


def _outcome(
    setting: str,
    objective: str,
    found: dict[str, Any],
    gains: Mapping[tuple[str, str, int], int],
    evaluations: "pd.DataFrame",
    baseline: str,
    notes: Footnotes,
) -> Outcome:
    own = evaluations[evaluations["setting"] == setting]
    both = own[own["objective"].isin([baseline, objective])]
    recited = found.get(LMS.label)
    last = at_last(own, LMS)
    utility, cost = _cost(found, last, objective, baseline, notes)
    floors = [lms_floor(last[last["objective"] == name]) for name in (objective, baseline)]
    reached = [floor.excess[:2] if floor and floor.reached else None for floor in floors]
    probed = [floor.excess.num_units for floor in floors if floor]
    outcome = Outcome(
        objective,
        baseline,
        _why_not_compared(both, objective, baseline),
        cost,
        utility,
        floor=reached[0],
        baseline_floor=reached[1],
        few_for_floor=min(probed) if probed and min(probed) < MIN_UNITS else None,
        setting=setting if evaluations["setting"].nunique() > 1 else "",
    )
    if recited is None:
        return outcome
    change = _change(recited, notes)  # its footnotes come first
    caveats = [BOUND] if any(reached) else []
    caveats.append(_SEEDS)
    if min(both.groupby("objective")["run"].nunique()) == 1:
        caveats.append(_ONE_SEED)
    return replace(
        outcome,
        recited=change,
        at_equal=gains.get((setting, objective, recited.progress), 0),
        few_passages=recited.num_units if recited.num_units < MIN_UNITS else None,
        few_for_floor=outcome.few_for_floor if probed else 0,
        marks=notes.mark(*caveats),
    )


def _why_not_compared(both: "pd.DataFrame", objective: str, baseline: str) -> str:
    measured = both.loc[both[LMS.label].notna(), "objective"].tolist()
    missing = [name for name in (objective, baseline) if name not in measured]
    if len(missing) == 2:
        return f"{objective} and {baseline} have no memorization results, so what they recite is not compared"
    if missing:
        return f"{missing[0]} has no memorization results, so what it recites is not compared"
    return (
        f"{objective} and {baseline} share no checkpoint with memorization results, so what they recite is not "
        "compared: evaluate both at the same checkpoints"
    )


def _change(one: Any, notes: Footnotes, *, signed: bool = False) -> Change:
    """Describe a row of reductions; the ends of an interval are amounts of the change unless they are signed."""
    percent, unit = -100 * one.reduction, BY_LABEL[one.measure].unit
    if math.isnan(percent):
        return Change(percent, None, why_no_interval(one))
    when = at_progress(one.progress, ",")
    if math.isnan(one.low):
        return Change(percent, None, f"no interval: {why_no_interval(one)}{when}", equal=not round(percent, 1))
    interval = Interval(one.low, one.high, one.num_units)
    direction = {"yes": 1 if percent > 0 else -1, "no": 0}.get(one.significant or "")
    sign = 1 if percent < 0 and direction != 0 and not signed else -1
    low, high = sorted(100 * sign * end for end in (one.low, one.high))
    text = interval_text(Interval(low, high, one.num_units), unit, decimals=1, suffix=" %") + when
    if direction is None:
        text += f"; {too_few(one.num_units, unit)}"
    elif interval.significant != one.significant:
        text += f"; {NOT_CORRECTED}"
    if direction is not None and one.num_units < ENOUGH_UNITS:
        text += notes.mark(FEW_UNITS)
    return Change(percent, direction, text, equal=not any(round(value, 1) for value in (percent, low, high)))


def _cost(
    found: dict[str, Any], last: "pd.DataFrame", objective: str, baseline: str, notes: Footnotes
) -> tuple[str, Change | str]:
    """Return the utility and its change at the checkpoints ``last`` of the LMS, or a clause that says why not."""
    progress, measured = last["progress"].max(), [name for name in _UTILITIES if name in found]
    for name in measured:
        if found[name].progress == progress:
            return _UTILITIES[name], _change(found[name], notes)
    means = last.groupby("objective")["log_perplexity"].mean()
    percent = 100 * math.expm1(means.get(objective, math.nan) - means.get(baseline, math.nan))
    if math.isfinite(percent):
        return _UTILITIES[PERPLEXITY.label], Change(percent, None, "no interval: only the mean over blocks was kept")
    utility = _UTILITIES[measured[0] if measured else PERPLEXITY.label]
    runs = f"all runs at {progress} % of training" if measured else "both"
    return utility, f"{utility} was not measured for {runs}, so the cost is unknown"


def _statements(
    evaluations: "pd.DataFrame",
    pairs: _Pairs,
    outcomes: Sequence[Outcome],
    at_equal_perplexity: "pd.DataFrame",
    baseline: str,
    notes: Footnotes,
) -> list[str]:
    of_setting = dict(list(evaluations.groupby("setting", sort=False)))
    summed_up = is_summed_up(outcomes)
    statements: list[tuple[str, str]] = []  # the setting, and the sentence if there is one
    if not summed_up:
        for (setting, objective), found in pairs.items():
            values = [
                f"{measure.phrase}{at_progress(one.progress)} {one.baseline:.2f} under {baseline}, "
                f"{one.other:.2f} under {objective}"
                for measure in (LMS, PERPLEXITY)
                if (one := found.get(measure.label))
            ]
            statements.append((setting, f"{_capitalized('; '.join(values))}." if values else ""))
    for setting, own in of_setting.items():
        for objective, last in at_last(own, LMS).groupby("objective", sort=False):
            floor = lms_floor(last)
            if floor and (floor.reached or not summed_up):
                statements.append((setting, _floor_statement(objective, floor)))
    statements += [
        (one.setting, _equal_perplexity_statement(one, baseline)) for one in at_equal_perplexity.itertuples()
    ]
    for (setting, objective), found in pairs.items():
        for task, measures in (("Summaries", SUMMARY_MEASURES), ("Answers", ANSWER_MEASURES)):
            if measured := [found[measure.label] for measure in measures if measure.label in found]:
                scores = ", ".join(_score(one, notes) for one in measured)
                statements.append((setting, f"{task} under {objective}: {scores}."))
    by_seed = compare_seeds(evaluations, baseline)
    for setting in of_setting:
        reductions = {name: by_seed.get((at, name), []) for at, name in pairs if at == setting}
        statements.append((setting, _seeds_statement(reductions)))
    prefix = len(of_setting) > 1
    told = [f"{model}: {text}" if prefix else text for model, text in statements if text]
    return [*(one.sentence for one in outcomes if summed_up), *told]


def _floor_statement(objective: str, floor: Floor) -> str:
    interval = interval_text(floor.excess, "passage", decimals=2)
    evidence = f"; {interval}" if not math.isnan(floor.excess.low) else ""
    return (
        f"{objective} recites {abs(floor.difference):.2f} tokens {'less' if floor.difference < 0 else 'more'} of the "
        f"targets than of the controls ({floor.targets:.2f} against {floor.controls:.2f}{evidence})."
    )


def _equal_perplexity_statement(one: Any, baseline: str) -> str:
    """Say what the baseline recited when it had the perplexity that the objective ends with."""
    goal = f"{one.perplexity:.2f}"
    if math.isnan(one.before):
        has = f"ends with {goal}" if one.progress == 100 else f"has {goal}{at_progress(one.progress)}"
        return (
            f"There is no comparison at equal perplexity: {one.objective} {has}, which {baseline}, at "
            f"{span(one.lowest, one.highest, decimals=2)}, never has."
        )
    least, most = sorted((one.lms_before, one.lms_after))
    between = "at" if one.before == one.after else "between"
    where = f"{between} {' and '.join(dict.fromkeys(f'{at:.0f}' for at in (one.before, one.after)))} %"
    recited = f"{span(least, most, decimals=2)} tokens on average"
    if one.before != one.after and f"{least:.2f}" != f"{most:.2f}":
        recited += f" ({one.interpolated:.2f} interpolated)"
    whose = f"{one.objective}'s {'final ' * (one.progress == 100)}{goal}{at_progress(one.progress)}"
    gain = _gain(one)
    if gain is None:
        clause = f"what both recite {floor_text(-math.inf, max(0.0, one.floor_bound, one.baseline_floor_bound))}"
    elif gain:
        clause = f"{'no gain, more' if gain > 0 else 'less'} than {baseline} did there"
    else:
        clause = "no clear gain or loss"
    return (
        f"At equal perplexity ({whose}, which {baseline} first had {where} of its training) {baseline} recited "
        f"{recited}; {one.objective} recites {one.lms:.2f}: {clause}."
    )


def _gain(one: Any) -> int | None:
    """Return -1 if less is recited than at both of the baseline's checkpoints, 1 if more, 0 between them.

    None if neither objective can be told from the floor. It needs no interpolation.
    """
    if not (math.isnan(one.floor_bound) or math.isnan(one.baseline_floor_bound)):
        return None
    ends = one.lms_before, one.lms_after
    return int(one.lms > max(ends)) - int(one.lms < min(ends))


def _seeds_statement(by_objective: Mapping[str, Sequence[float]]) -> str:
    """List the reduction of each seed, where there are several."""
    listed = [
        f"{name} {', '.join('undefined' if math.isnan(value) else f'{100 * value:.1f} %' for value in by_seed)}"
        for name, by_seed in by_objective.items()
        if len(by_seed) > 1
    ]
    return f"Reduction of the average LMS by seed: {'; '.join(listed)}." if listed else ""


def _score(one: Any, notes: Footnotes) -> str:
    """For example "ROUGE-1 30.00 to 31.50 (+5.0 %, 95 % interval 1.0 % to 9.0 %, significant)"."""
    values = (
        f"{BY_LABEL[one.measure].phrase} {' to '.join(dict.fromkeys(f'{x:.2f}' for x in (one.baseline, one.other)))}"
    )
    change = _change(one, notes, signed=True)
    if math.isnan(change.percent):
        return f"{values} (relative change undefined, {change.evidence})"
    significance = {None: "", 0: ", not significant"}.get(change.direction, ", significant")
    return f"{values} ({round(change.percent, 1) + 0.0:+.1f} %, {change.evidence}{significance})"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


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
