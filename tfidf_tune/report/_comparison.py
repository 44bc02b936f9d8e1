"""Runs side by side as a report."""

from collections.abc import Callable, Sequence
from datetime import date
from importlib.metadata import version
from typing import Any

from tfidf_tune.analysis._bootstrap import ENOUGH_UNITS, NUM_RESAMPLES, SEED, Interval
from tfidf_tune.analysis._comparison import (
    Bracket,
    Comparison,
    EqualPerplexity,
    Floor,
    Reduction,
    compare_objectives,
    lms_floor,
)
from tfidf_tune.analysis._measures import ANSWER_MEASURES, CONTROL_LMS, LMS, PERPLEXITY, SUMMARY_MEASURES, Measure
from tfidf_tune.analysis._settings import Setting, group_results
from tfidf_tune.report._comparison_tables import comparison_tables, why_no_interval, why_undefined
from tfidf_tune.report._document import Example, Figure, Report
from tfidf_tune.report._examples import Decode, checkpoint_decoder, recitation_examples
from tfidf_tune.report._figures import lms_distribution, lms_progress, perplexity_paths
from tfidf_tune.report._wording import LMS_EXPLAINED, interval_text, joined, significance
from tfidf_tune.results import Results

_NEAR_FLOOR = 0.2  # an average LMS up to so far above the controls' is called near it


def comparison_report(
    results: Results,
    *,
    baseline: str | None = None,
    decoder: Callable[[str], Decode | None] = checkpoint_decoder,
) -> Report:
    """Compare runs: findings with intervals, the paper's tables, figures, examples.

    Args:
        results (Results): of at least two runs, of any models, objectives and seeds.
        baseline (str | None): objective to compare with. Default: None, "CE" if there is one, else the first run's.
        decoder (Callable[[str], Callable[[list[int]], str] | None]): checkpoint -> function that decodes its token
            ids, for the examples. Default: the tokenizer in the checkpoint's folder, if any.

    Raises:
        ValueError: If there is only one run, no run has the baseline, or runs of a model were not asked the same.
    """
    baseline, settings = group_results(results, baseline=baseline)
    comparisons = [one for setting in settings for one in compare_objectives(setting, baseline)]
    others = [name for name in dict.fromkeys(one.objective for one in results.checkpoints) if name != baseline]
    return Report(
        title=f"{joined(others)} against {baseline}" if others else baseline,
        statements=_statements(settings, comparisons, baseline),
        tables=tuple(comparison_tables(settings, comparisons, baseline)),
        figures=_figures(settings),
        examples=_examples(settings, decoder),
        provenance=_provenance(results, baseline),
        lead=_lead(results),
    )


def _lead(results: Results) -> str:
    models = f"Runs of {joined(list(dict.fromkeys(one.model for one in results.checkpoints)))}"
    kinds = set(results.scores["kind"])
    if "target" not in kinds:
        return f"{models}."
    floor = "; its floor is the average over passages that were never injected" if "control" in kinds else ""
    return f"{models}, asked to continue passages of their training text. {LMS_EXPLAINED}{floor}."


def _statements(settings: Sequence[Setting], comparisons: Sequence[Comparison], baseline: str) -> tuple[str, ...]:
    statements: list[tuple[str, str | None]] = []
    if not comparisons:
        have = "; ".join(f"{setting.name}: {joined(list(setting.objectives))}" for setting in settings)
        statements.append(
            (
                "",
                f"Nothing is compared: no model has runs of {baseline} and of another objective ({have}). To name the "
                "objective of a model trained elsewhere, give OBJECTIVE=FOLDER.",
            )
        )
    statements += [(one.setting.name, _lms_statement(one, baseline)) for one in comparisons]
    statements += [(one.setting.name, _equal_perplexity_statement(one, baseline)) for one in comparisons]
    for setting in settings:
        for objective in setting.objectives:
            floor = lms_floor(setting, setting.at(objective, setting.last(LMS, CONTROL_LMS)))
            statements.append((setting.name, None if floor is None else _floor_statement(objective, floor)))
    statements += [(one.setting.name, text) for one in comparisons for text in _downstream_statements(one)]
    of_seeds = []
    for one in comparisons:
        num_seeds = min(one.setting.num_seeds(name) for name in (baseline, one.objective))
        of_seeds.append((one.setting.name if num_seeds > 1 else "", _seeds_statement(one, num_seeds)))
    statements += dict.fromkeys(of_seeds)  # the warning of single runs once
    prefix = len(settings) > 1
    return tuple(f"{model}: {text}" if prefix and model else text for model, text in statements if text is not None)


def _lms_statement(one: Comparison, baseline: str) -> str | None:
    """Say how an objective changes the average LMS, and what that costs in perplexity."""
    recited, perplexity = (one.reductions.get(measure.name) for measure in (LMS, PERPLEXITY))
    if recited is None:
        if not one.setting.progress(LMS, objective=baseline) and not one.setting.progress(LMS, objective=one.objective):
            return None
        return (
            f"{one.objective} and {baseline} share no checkpoint with memorization results, so what they recite is not "
            "compared: evaluate both at the same checkpoints."
        )
    text = f"{one.objective} {_change(recited)} against {baseline}{_when(recited)}, {_verdict(recited)}."
    if perplexity is None:
        return f"{text} Perplexity was not measured for both, so what it costs is not known."
    return f"{text} It {_change(perplexity)}{_when(perplexity)}, {_verdict(perplexity)}."


def _downstream_statements(one: Comparison) -> list[str]:
    statements = []
    for task, measures in (("Summaries", SUMMARY_MEASURES), ("Answers", ANSWER_MEASURES)):
        measured = [one.reductions[measure.name] for measure in measures if measure.name in one.reductions]
        if measured:
            scores = ", ".join(map(_score, measured))
            statements.append(f"{task} under {one.objective}{_when(measured[0])}: {scores}.")
    return statements


def _equal_perplexity_statement(one: Comparison, baseline: str) -> str | None:
    """Say what the baseline recited when it had the perplexity that the objective ends with."""
    if (equal := one.equal_perplexity) is None:
        return None
    goal, objective, bracket = f"{equal.perplexity:.2f}", one.objective, equal.bracket
    if bracket is None:
        lowest, highest = min(equal.baseline_perplexities), max(equal.baseline_perplexities)
        return (
            f"At equal perplexity nothing can be said: {objective} ends with {goal}, and {baseline}'s checkpoints lie "
            f"between {lowest:.2f} and {highest:.2f}, never at it."
        )
    ends = sorted((bracket.lms_before, bracket.lms_after))
    if bracket.before == bracket.after:
        where, recited = f"at {bracket.before} %", f"{bracket.interpolated:.2f} tokens on average"
    else:
        where = f"between {bracket.before} and {bracket.after} %"
        recited = f"between {ends[0]:.2f} and {ends[1]:.2f} tokens on average ({bracket.interpolated:.2f} interpolated)"
    return (
        f"At equal perplexity ({baseline} first had {objective}'s final {goal} {where} of its training) {baseline} "
        f"recited {recited}; {objective} recites {equal.lms:.2f}: {_at_equal_perplexity(equal, bracket, baseline)}."
    )


def _at_equal_perplexity(equal: EqualPerplexity, bracket: Bracket, baseline: str) -> str:
    """The verdict, which needs no interpolation."""
    if equal.at_floor and bracket.at_floor:
        return "both at the floor, where there is nothing to tell apart"
    if equal.lms > max(bracket.lms_before, bracket.lms_after):
        return f"no gain, more than {baseline} did there"
    if equal.lms < min(bracket.lms_before, bracket.lms_after):
        return f"less than {baseline} did there"
    return "no clear gain or loss"


def _floor_statement(objective: str, floor: Floor) -> str | None:
    """Say that an objective recites no more, or hardly more, than of text that it never saw."""
    values = f"average LMS {floor.targets:.2f}, that of passages never seen {floor.controls:.2f}"
    if floor.reached and floor.excess is not None:
        return (
            f"{objective} is at the floor ({values}): the difference of {floor.difference:.2f} tokens "
            f"({interval_text(floor.excess, 'passage', decimals=2)}) is not clear of 0, so little or nothing is left "
            "to reduce."
        )
    if floor.targets <= (1 + _NEAR_FLOOR) * floor.controls:
        return f"{objective} is near the floor ({values}), so little is left to reduce."
    return None


def _seeds_statement(one: Comparison, num_seeds: int) -> str:
    """Say what the intervals leave out, with the reduction of each seed if there are several."""
    if num_seeds < 2:
        return (
            "One training run alone does not tell an objective from its seed: intervals cover the choice of passages "
            "only."
        )
    text = "Intervals cover the choice of passages, not that of seeds"
    if not one.lms_by_seed:
        return f"{text}."
    by_seed = ", ".join("undefined" if value is None else f"{100 * value:.1f} %" for value in one.lms_by_seed)
    return f"{text}; per seed the reduction of the average LMS under {one.objective} was {by_seed}."


def _change(one: Reduction) -> str:
    """For example "lowers the average LMS by 57.8 % (8.30 to 3.50; 95 % interval 34.9 % to 71.1 %)"."""
    phrase, values = one.measure.phrase, f"{one.baseline:.2f} to {one.other:.2f}"
    if one.reduction is None:
        return f"has no defined relative change of the {phrase} ({values})"
    if one.reduction == 0:
        return f"leaves the {phrase} as it is ({values}{_interval(one, 1, ';')})"
    verb, sign = ("lowers", 1) if one.reduction > 0 else ("raises", -1)
    return f"{verb} the {phrase} by {100 * abs(one.reduction):.1f} % ({values}{_interval(one, sign, ';')})"


def _verdict(one: Reduction) -> str:
    if one.reduction is None:
        return f"since {why_undefined(one)}"
    if one.interval is None:
        return f"which has no interval: {why_no_interval(one)}"
    return significance(one.interval, one.measure.unit)


def _score(one: Reduction) -> str:
    """For example "ROUGE-1 30.00 to 31.50 (+5.0 %, 95 % interval 1.0 % to 9.0 %, significant)"."""
    values = f"{one.measure.phrase} {one.baseline:.2f} to {one.other:.2f}"
    if one.reduction is None:
        return f"{values} (relative change undefined, {why_undefined(one)})"
    amount = f"{round(-100 * one.reduction, 1) + 0.0:+.1f} %"
    if one.interval is None:
        return f"{values} ({amount}, no interval, {why_no_interval(one)})"
    verdict = significance(one.interval, one.measure.unit)
    if one.interval.significant == "no":
        verdict = "not significant"
    elif one.interval.significant == "yes":
        few = f", but {one.interval.num_units} {one.measure.unit}s are few"
        verdict = f"significant{few if one.interval.num_units < ENOUGH_UNITS else ''}"
    return f"{values} ({amount}{_interval(one, -1, ',')}, {verdict})"


def _interval(one: Reduction, sign: int, separator: str) -> str:
    if one.interval is None:
        return ""
    low, high = sorted(100 * sign * end for end in (one.interval.low, one.interval.high))
    in_percent = Interval(low, high, one.interval.num_units)
    return f"{separator} {interval_text(in_percent, one.measure.unit, decimals=1, suffix=' %')}"


def _when(one: Reduction) -> str:
    return "" if one.progress == 100 else f" at {one.progress} % of training"


def _figures(settings: Sequence[Setting]) -> tuple[Figure, ...]:
    """Draw progress if an objective has several checkpoints, the paths if perplexity was measured, distributions."""
    figures = []
    curves = _measured(settings, (LMS,), CONTROL_LMS)
    if any(len(points) > 1 for by_objective in curves.values() for points in by_objective.values()):
        caption = (
            "Average LMS of the injected passages at each checkpoint. Dashed: passages that were never injected, the "
            "floor that fluency alone reaches. Lower is better."
        )
        title = "Average LMS against training progress"
        figures.append(Figure("lms_progress", title, lms_progress(curves), caption))
    if paths := _measured(settings, (PERPLEXITY, LMS)):
        caption = (
            "Each objective's way through its checkpoints, along the arrows; the markers grow with training. Further "
            "down: recites less. Further left: predicts unseen text better. A reduction is worth something where it "
            "lies below the baseline's way at the same perplexity."
        )
        figures.append(Figure("frontier", "Memorization against perplexity", perplexity_paths(paths), caption))
    for number, setting in enumerate(settings, start=1):
        lms = {}
        for objective, checkpoints in setting.at_last(LMS).items():
            own = setting.rows(checkpoints)
            rows = own[own["metric"] == "lms"]
            lms[objective] = {kind: rows.loc[rows["kind"] == kind, "value"].tolist() for kind in ("target", "control")}
        if lms:
            several = len(settings) > 1
            caption = (
                "The share of continuations whose longest memorized substring has at least so many tokens, over "
                "passages, prefix lengths and seeds. Dashed: passages that were never injected."
            )
            name = f"lms_distribution_{number}" if several else "lms_distribution"
            title = "Distribution of the LMS" + (f": {setting.name}" if several else "")
            figures.append(Figure(name, title, lms_distribution(lms), caption))
    return tuple(figures)


def _measured(
    settings: Sequence[Setting], measures: Sequence[Measure], optional: Measure | None = None
) -> dict[str, dict[str, list[Any]]]:
    """Setting -> objective -> (progress, each measure, the optional measure or None); empty ones are left out."""
    found: dict[str, dict[str, list[Any]]] = {}
    for setting in settings:
        for objective in setting.objectives:
            for progress in setting.progress(*measures, objective=objective):
                own = setting.at(objective, progress)
                values = [setting.value(measure, own) for measure in (*measures, *([optional] if optional else []))]
                found.setdefault(setting.name, {}).setdefault(objective, []).append((progress, *values))
    return found


def _examples(settings: Sequence[Setting], decoder: Callable[[str], Decode | None]) -> tuple[Example, ...]:
    examples = []
    for setting in settings:
        at_last = {name: setting.results.checkpoints[own[0]] for name, own in setting.at_last(LMS).items()}
        if at_last and all(one.samples for one in at_last.values()):
            examples += recitation_examples(setting.name, at_last, decoder)
    return tuple(examples)


def _provenance(results: Results, baseline: str) -> tuple[tuple[str, str], ...]:
    runs: dict[object, list[int]] = {}
    for at, one in enumerate(results.checkpoints):
        runs.setdefault(one.run, []).append(at)
    entries = [("Baseline", baseline)]
    for own in runs.values():
        one = results.checkpoints[own[0]]
        seed = "seed unknown" if one.seed is None else f"seed {one.seed}"
        progress = ", ".join(f"{results.checkpoints[at].progress} %" for at in own)
        entries.append((f"{one.setting}, {one.objective}, {seed}", f"{one.folder} (evaluated at {progress})"))
    intervals = f"percentile bootstrap, {NUM_RESAMPLES:,} resamples, seed {SEED}"
    made = (("Intervals", intervals), ("tfidf-tune", version("tfidf-tune")), ("Date", date.today().isoformat()))
    return (*entries, *made)
