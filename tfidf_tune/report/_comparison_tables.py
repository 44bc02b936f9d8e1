"""The tables of a comparison."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis._averages import average_scores
from tfidf_tune.analysis._bootstrap import NUM_RESAMPLES
from tfidf_tune.analysis._comparison import Comparison, Reduction, own_interval
from tfidf_tune.analysis._measures import (
    ANSWER_MEASURES,
    DOWNSTREAM_MEASURES,
    LMS,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Measure,
)
from tfidf_tune.analysis._settings import Setting
from tfidf_tune.report._document import Column, Table, tabulate
from tfidf_tune.report._wording import SIGNIFICANCE_NOTE, TEXT_PROMPTS

if TYPE_CHECKING:
    import pandas as pd

WHO = (Column("Model"), Column("Objective"))
CONTROLS, SEEDS = Column("Control LMS", ".2f"), Column("Seeds")
_RECITED = (
    Column("Avg Prefix", ".2f", "lower"),
    Column("Max Prefix", "", "lower"),
    Column("Avg LMS", ".2f", "lower"),
    Column("Max LMS", "", "lower"),
    Column("ROUGE-L", ".2f", "lower"),
    Column("Verbatim %", ".1f", "lower"),
)
# Among rows of several checkpoints or prefix lengths the best would always be the first checkpoint.
_RECITED_UNRANKED = (*(Column(column.name, column.format) for column in _RECITED), CONTROLS)
_RECITED_NAMES = {
    "prefix_match": "Avg Prefix",
    "max_prefix_match": "Max Prefix",
    "lms": "Avg LMS",
    "max_lms": "Max LMS",
    "rouge_l": "ROUGE-L",
    "verbatim": "Verbatim %",
    "control_lms": "Control LMS",
}


def comparison_tables(settings: Sequence[Setting], comparisons: Sequence[Comparison], baseline: str) -> list[Table]:
    """Make the tables of a comparison; those without rows are left out."""
    qa_notes = ["SQuAD v1.1, the best over each question's gold answers."]
    tables = [
        _memorization(settings),
        _perplexity(settings),
        _summarization(settings),
        _scores(
            "qa", "Question answering", settings, ANSWER_MEASURES, ("Exact Match %", "F1 %"), "Questions", qa_notes
        ),
        reductions_table(comparisons, baseline),
        _equal_perplexity(comparisons, baseline),
        _spread(settings),
    ]
    # With one prefix length, or one checkpoint, these would repeat the first table.
    repeated = [_by_prefix_length(settings), _progress(settings)]
    tables += [table for table in repeated if len({row[:2] for row in table.rows}) < len(table.rows)]
    return [table for table in tables if table.rows]


def _recited(settings: Sequence[Setting], by: Sequence[str], *, at_last: bool = True) -> "pd.DataFrame":
    """Average the recitation of each setting and objective, at the last shared checkpoint with LMS or at all."""
    import pandas as pd

    parts = []
    for setting in settings:
        for objective, checkpoints in (setting.at_last(LMS) if at_last else setting.objectives).items():
            progress = {at: setting.results.checkpoints[at].progress for at in checkpoints}
            rows = setting.results.scores[setting.results.scores["checkpoint"].isin(checkpoints)]
            rows = rows if "prefix" not in by else rows[rows["prefix"].notna()]
            own = {"Model": setting.name, "Objective": objective, "progress": rows["checkpoint"].map(progress)}
            parts.append(rows.assign(**own).sort_values(list(by), kind="stable") if by else rows.assign(**own))
    if not parts:
        return pd.DataFrame(columns=["Model", "Objective", *by, *_RECITED_NAMES.values()])
    averages = average_scores(pd.concat(parts), ["Model", "Objective", *by]).rename(columns=_RECITED_NAMES)
    averages["Verbatim %"] *= 100
    return averages.reset_index()


def _memorization(settings: Sequence[Setting]) -> Table:
    frame = _recited(settings, [])
    notes, lengths, injections = [], set(), set()
    seeds, passages = [], []
    for setting in settings:
        for objective, checkpoints in setting.at_last(LMS).items():
            rows = setting.rows(checkpoints)
            targets = rows[rows["kind"] == "target"]
            lengths |= set(rows["prefix"].dropna().astype(int))
            injections |= set(targets.loc[targets["metric"] == "num_injections", "value"].astype(int)) - {0}
            seeds.append(len(checkpoints))
            passages.append(targets["unit"].nunique())
            made = [setting.results.checkpoints[at] for at in checkpoints]
            name = f"{setting.name}, {objective}"
            notes += [f"{name}: {TEXT_PROMPTS}"] if any(one.text_prompts for one in made) else []
            if lost := sum(one.lost_prompts for one in made):
                asked = (rows["metric"] == "lms").sum()
                notes.append(
                    f"{name}: {lost} of {asked} prompts did not survive as text, so the model saw other tokens than in "
                    "training; `tfidf-tune eval` is exact."
                )
    notes.sort(key=lambda note: "did not survive" in note)
    times = " or ".join(map(str, sorted(injections)))
    tokens = f" ({', '.join(map(str, sorted(lengths)))} tokens)" if lengths else ""
    explanation = (
        f"Means and maxima over passages, prefix lengths{tokens} and seeds. Prefix match and LMS, the longest "
        "memorized substring, are in tokens; Verbatim is the share of continuations that are the passage's whole rest; "
        "Control LMS is the average LMS of passages that were never injected: the floor."
    )
    stood = [f"Each target stood {times} times in the training text."] if injections else []
    notes = [explanation, *_checkpoint_note(settings, LMS), *stood, *notes]
    columns = (*WHO, *_RECITED, CONTROLS, Column("Passages"), SEEDS)
    return tabulate("memorization", "Memorization", columns, frame.assign(Passages=passages, Seeds=seeds), notes)


def _by_prefix_length(settings: Sequence[Setting]) -> Table:
    columns = (*WHO, Column("Prefix length"), *_RECITED_UNRANKED)
    frame = _recited(settings, ["prefix"]).rename(columns={"prefix": "Prefix length"})
    return tabulate("by_prefix_length", "Memorization by prefix length", columns, frame)


def _progress(settings: Sequence[Setting]) -> Table:
    frame = _recited(settings, ["progress"], at_last=False).rename(columns={"progress": "Progress %"})
    measures = (PERPLEXITY, *DOWNSTREAM_MEASURES)
    values: list[list[Any]] = []
    for setting in settings:
        for objective, own in setting.objectives.items():
            for progress in sorted({setting.results.checkpoints[at].progress for at in own}):
                checkpoints = setting.at(objective, progress)
                values.append([*(setting.value(measure, checkpoints) for measure in measures), len(checkpoints)])
    columns = [Column(measure.name, ".2f") for measure in measures]
    frame[[*(column.name for column in columns), "Seeds"]] = values
    columns = [*WHO, Column("Progress %"), *_RECITED_UNRANKED, *columns, SEEDS]
    return tabulate("progress", "Every checkpoint", columns, frame).without_empty_columns()


def _spread(settings: Sequence[Setting]) -> Table:
    rows: list[tuple[Any, ...]] = []
    several_seeds = any(len(at) > 1 for setting in settings for at in setting.at_last(LMS).values())
    for setting in settings:
        for objective, checkpoints in setting.at_last(LMS).items():
            own = setting.rows(checkpoints)
            targets = own[(own["metric"] == "lms") & (own["kind"] == "target")]
            lms = targets["value"].where(targets["count"] == 1)  # a mean over prefix lengths has no place among them
            interval = own_interval(setting, LMS, checkpoints)
            ends = (None, None) if interval is None else (interval.low, interval.high)
            seeds = [setting.value(LMS, [at]) or 0.0 for at in checkpoints]
            quantiles = (
                (lms.quantile(0.5), lms.quantile(0.9), int(lms.max())) if lms.notna().all() else (None, None, None)
            )
            of_seeds = (min(seeds), max(seeds), len(seeds)) if several_seeds else ()
            rows.append((setting.name, objective, setting.value(LMS, checkpoints), *ends, *quantiles, *of_seeds))
    columns = [*WHO, Column("Avg LMS", ".2f"), Column("From", ".2f"), Column("To", ".2f")]
    columns += [Column("Median", ".1f"), Column("90th percentile", ".1f"), Column("Max")]
    columns += [Column("Lowest seed", ".2f"), Column("Highest seed", ".2f"), SEEDS] if several_seeds else []
    note = (
        "From and To: 95 % interval of the average, from resampling passages. Median and percentile are over passages, "
        "prefix lengths and seeds."
    )
    per_seed = ["Lowest and highest seed: the average LMS of one run alone."] if several_seeds else []
    return Table("lms_spread", "How the LMS varies", tuple(columns), tuple(rows), (note, *per_seed))


def _perplexity(settings: Sequence[Setting]) -> Table:
    notes = ["Token-level perplexity on unseen text, over all predictions of all seeds."]
    for setting in settings:
        for objective, checkpoints in setting.at_last(PERPLEXITY).items():
            if lost := sum(setting.results.checkpoints[at].lost_blocks for at in checkpoints):
                rows = setting.rows(checkpoints)
                notes.append(
                    f"{setting.name}, {objective}: {lost} of {(rows['kind'] == 'block').sum()} blocks did not survive "
                    "as text, so other tokens were predicted."
                )
    columns = ("Perplexity",)
    return _scores("perplexity", "Perplexity", settings, (PERPLEXITY,), columns, "Blocks", notes, better="lower")


def _summarization(settings: Sequence[Setting]) -> Table:
    notes = ["CNN/DailyMail; means of F-measures in percent."]
    for setting in settings:
        for objective, checkpoints in setting.at_last(SUMMARY_MEASURES[0]).items():
            rows = setting.rows(checkpoints)
            values = rows.loc[rows["metric"] == "bertscore_f1", "value"]
            if missing := int(values.isna().sum()):
                reasons = (reason for at in checkpoints for reason in setting.results.checkpoints[at].bertscore_missing)
                notes.append(
                    f"{setting.name}, {objective}: BERTScore-F1 is missing for {missing} of {len(values)} summaries: "
                    f"{'; '.join(dict.fromkeys(reason.rstrip('.') for reason in reasons))}."
                )
    names = ("ROUGE-1", "ROUGE-2", "ROUGE-L", "BERTScore-F1")
    return _scores("summarization", "Summarization", settings, SUMMARY_MEASURES, names, "Articles", notes)


def _scores(
    name: str,
    title: str,
    settings: Sequence[Setting],
    measures: Sequence[Measure],
    columns: Sequence[str],
    units: str,
    notes: Sequence[str],
    better: str = "higher",
) -> Table:
    rows = []
    for setting in settings:
        for objective, checkpoints in setting.at_last(measures[0]).items():
            totals = setting.totals(measures[0], checkpoints)
            values = (setting.value(measure, checkpoints) for measure in measures)
            rows.append((setting.name, objective, *values, 0 if totals is None else len(totals[0]), len(checkpoints)))
    of_measures = (Column(column, ".2f", better) for column in columns)  # type: ignore[arg-type]
    all_notes = (*notes, *_checkpoint_note(settings, measures[0]))
    return Table(name, title, (*WHO, *of_measures, Column(units), SEEDS), tuple(rows), all_notes)


def _checkpoint_note(settings: Sequence[Setting], measure: Measure) -> list[str]:
    """Say where the last checkpoint is not the end of training."""
    at = {setting.name: last for setting in settings if (last := setting.last(measure)) not in (None, 100)}
    where = ", ".join(f"{name} at {progress} %" for name, progress in at.items())
    return (
        [f"Not the end of training, but the last checkpoint that all runs of the model share: {where}."] if at else []
    )


def reductions_table(comparisons: Sequence[Comparison], baseline: str) -> Table:
    """Make the table of the relative reduction of every measure."""
    rows, notes = [], []
    for one in comparisons:
        for name, reduction in one.reductions.items():
            interval = reduction.interval
            percent = None if reduction.reduction is None else 100 * reduction.reduction
            ends = (100 * interval.low, 100 * interval.high, interval.significant) if interval else (None, None, None)
            values = (reduction.baseline, reduction.other, percent, *ends, reduction.progress)
            rows.append((one.setting.name, one.objective, name, *values))
            if interval is None:
                notes.append(f"{one.setting.name}, {one.objective}, {name}: no interval, {why_no_interval(reduction)}.")
    columns = (
        *WHO,
        Column("Measure"),
        Column(baseline, ".2f"),
        Column("Value", ".2f"),
        Column("Reduction %", ".1f"),
        Column("From %", ".1f"),
        Column("To %", ".1f"),
        Column("Significant"),
        Column("Progress %"),
    )
    explanation = (
        f"Reduction: ({baseline} - value) / {baseline}; negative where the objective is higher, which is better for "
        f"summaries and answers. From and To: 95 % percentile-bootstrap interval of {NUM_RESAMPLES:,} resamples, "
        "paired between the objectives: by passage (its prefix lengths and seeds stay together), by block for "
        f"perplexity, by article and by question. It covers the choice of these, not that of seeds. {SIGNIFICANCE_NOTE}"
    )
    title = f"Relative reductions against {baseline}"
    return Table("reductions", title, columns, tuple(rows), (explanation, *notes))


def _equal_perplexity(comparisons: Sequence[Comparison], baseline: str) -> Table:
    rows: list[tuple[Any, ...]] = []
    notes = [
        f"{baseline} first had the objective's final perplexity between these checkpoints. LMS before and after: its "
        "average LMS at them; Interpolated: linearly in log perplexity, a guess at what lies between. Avg LMS: the "
        "objective's."
    ]
    for one in comparisons:
        if (equal := one.equal_perplexity) is None:
            continue
        of_baseline: tuple[Any, ...] = (None, None, None, None)
        if (bracket := equal.bracket) is None:
            lowest, highest = min(equal.baseline_perplexities), max(equal.baseline_perplexities)
            notes.append(
                f"{one.setting.name}, {one.objective}: out of range, {baseline}'s checkpoints lie between {lowest:.2f} "
                f"and {highest:.2f}."
            )
        else:
            span = f"{bracket.before} to {bracket.after}" if bracket.before != bracket.after else str(bracket.before)
            of_baseline = (span, bracket.lms_before, bracket.lms_after, bracket.interpolated)
        rows.append((one.setting.name, one.objective, equal.perplexity, *of_baseline, equal.lms))
    columns = (
        *WHO,
        Column("Perplexity", ".2f"),
        Column(f"{baseline} at %"),
        Column(f"{baseline} LMS before", ".2f"),
        Column(f"{baseline} LMS after", ".2f"),
        Column("Interpolated", ".2f"),
        Column("Avg LMS", ".2f"),
    )
    return Table("equal_perplexity", f"At equal perplexity, against {baseline}", columns, tuple(rows), tuple(notes))


def why_undefined(reduction: Reduction) -> str:
    """Say why a relative change is undefined."""
    return "the baseline is 0" if reduction.baseline == 0 else "a value is not finite"


def why_no_interval(reduction: Reduction) -> str:
    """Say why a reduction has no interval."""
    if reduction.reduction is None:
        return why_undefined(reduction)
    if reduction.num_units < 2:
        return f"there is a single {reduction.measure.unit}"
    return (
        f"the baseline's {reduction.measure.phrase} is 0 in some resamples, so few {reduction.measure.unit}s have any"
    )
