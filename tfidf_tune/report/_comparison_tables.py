"""The tables of a comparison."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis.averages import average_scores
from tfidf_tune.analysis.evaluations import (
    ANSWER_MEASURES,
    BY_NAME,
    COMPARED,
    LMS,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Measure,
    at_last,
    having_at_last,
    unit_totals,
    value_of,
)
from tfidf_tune.analysis.intervals import NUM_RESAMPLES, Interval, bootstrap_interval
from tfidf_tune.report._document import Column, Table, tabulate
from tfidf_tune.report._wording import SIGNIFICANCE_NOTE, TEXT_PROMPTS
from tfidf_tune.results import Results

if TYPE_CHECKING:
    import pandas as pd

_KEYS = ["setting", "objective"]
_WHO = (Column("Model", source="setting"), Column("Objective", source="objective"))
_SEEDS = Column("Seeds")
_RECITED = (
    Column("Avg Prefix", ".2f", "lower", "prefix_match"),
    Column("Max Prefix", "", "lower", "max_prefix_match"),
    Column("Avg LMS", ".2f", "lower", "lms"),
    Column("Max LMS", "", "lower", "max_lms"),
    Column("ROUGE-L", ".2f", "lower", "rouge_l"),
    Column("Verbatim %", ".1f", "lower", "verbatim"),
)
_CONTROLS = Column("Control LMS", ".2f", source="control_lms")
# Among rows of several checkpoints or prefix lengths the best would always be the first checkpoint.
_RECITED_UNRANKED = (*(Column(one.name, one.format, source=one.source) for one in _RECITED), _CONTROLS)


def comparison_tables(
    results: Results,
    evaluations: "pd.DataFrame",
    reductions: "pd.DataFrame",
    at_equal_perplexity: "pd.DataFrame",
    baseline: str,
) -> list[Table]:
    """Make the tables of a comparison; those without rows are left out."""
    tables = [
        _memorization(results, evaluations),
        _perplexity(results, evaluations),
        _summarization(results, evaluations),
        _question_answering(evaluations),
        _reductions(reductions, baseline),
        _equal_perplexity(at_equal_perplexity, baseline),
        _spread(results, evaluations),
    ]
    # With one prefix length, or one checkpoint, these would repeat the first table.
    repeated = [_by_prefix_length(results, evaluations), _progress(results, evaluations)]
    tables += [table for table in repeated if len({row[:2] for row in table.rows}) < len(table.rows)]
    return [table for table in tables if table.rows]


def _at_last(evaluations: "pd.DataFrame", measure: Measure) -> "pd.DataFrame":
    """Return the evaluations of all settings at the last shared progress that have a measure."""
    chosen = [at for *_, having in having_at_last(evaluations, measure) for at in having.index]
    return evaluations.loc[chosen]


def _rows_of(results: Results, evaluations: "pd.DataFrame") -> "pd.DataFrame":
    """Return the scores of evaluations, with their columns "setting", "objective", "progress" and an "order"."""
    named = evaluations.assign(order=evaluations.groupby(_KEYS, sort=False).ngroup())
    scores = results.scores.set_index("checkpoint")
    rows = named[[*_KEYS, "progress", "order"]].join(scores, how="inner")
    return rows.reset_index(names="checkpoint")


def _recited(rows: "pd.DataFrame", *by: str) -> "pd.DataFrame":
    """Average what is recited by setting, objective and more columns."""
    import pandas as pd

    if rows.empty:
        return pd.DataFrame(columns=[*_KEYS, *by, *(one.source for one in _RECITED_UNRANKED)])
    averages = average_scores(rows.sort_values(["order", *by], kind="stable"), [*_KEYS, *by])
    return averages.assign(verbatim=100 * averages["verbatim"]).reset_index()


def _memorization(results: Results, evaluations: "pd.DataFrame") -> Table:
    chosen = _at_last(evaluations, LMS)
    rows = _rows_of(results, chosen)
    single = rows[rows["unit"] != ""]
    lengths = sorted(set(single["prefix"].dropna().astype(int)))
    injections = single.loc[(single["metric"] == "num_injections") & (single["kind"] == "target"), "value"].astype(int)
    times = " or ".join(map(str, sorted(set(injections) - {0})))
    approximate, lost = [], []
    for name, own, made in _named(results, chosen):
        approximate += [f"{name}: {TEXT_PROMPTS}"] if any(one.text_prompts for one in made) else []
        if num_lost := sum(one.lost_prompts for one in made):
            asked = (single["checkpoint"].isin(own.index) & (single["metric"] == "lms")).sum()
            lost.append(
                f"{name}: {num_lost} of {asked} prompts changed when converted to text, so the model saw tokens that "
                f"differ from training; `tfidf-tune eval` is exact."
            )
    tokens = f" ({', '.join(map(str, lengths))} tokens)" if lengths else ""
    explanation = (
        f"Means and maxima over passages, prefix lengths{tokens} and seeds. Prefix match and LMS, the longest "
        "memorized substring, are in tokens; Verbatim is the share of continuations that reproduce the rest of the "
        "passage; "
        "Control LMS is the average LMS of passages that were never injected: the floor."
    )
    stood = [f"Each target occurs {times} times in the training text."] if times else []
    notes = [explanation, *_checkpoint_note(evaluations, LMS), *stood, *approximate, *lost]
    frame = _recited(rows)
    passages = single[single["kind"] == "target"].groupby("order")["unit"].nunique()
    frame["Passages"] = passages.reindex(range(len(frame)), fill_value=0).tolist()
    frame["Seeds"] = chosen.groupby(_KEYS, sort=False).size().tolist()
    columns = (*_WHO, *_RECITED, _CONTROLS, Column("Passages"), _SEEDS)
    return tabulate("memorization", "Memorization", columns, frame, notes)


def _named(results: Results, evaluations: "pd.DataFrame") -> Iterator[tuple[str, "pd.DataFrame", list[Any]]]:
    """Yield for each setting and objective its name in notes, its evaluations and its checkpoints."""
    for (setting, objective), own in evaluations.groupby(_KEYS, sort=False):
        yield f"{setting}, {objective}", own, [results.checkpoints[at] for at in own.index]


def _by_prefix_length(results: Results, evaluations: "pd.DataFrame") -> Table:
    rows = _rows_of(results, _at_last(evaluations, LMS))
    columns = (*_WHO, Column("Prefix length", source="prefix"), *_RECITED_UNRANKED)
    frame = _recited(rows[rows["prefix"].notna()], "prefix")
    return tabulate("by_prefix_length", "Memorization by prefix length", columns, frame)


def _progress(results: Results, evaluations: "pd.DataFrame") -> Table:
    measures = [measure for measure in COMPARED if measure.kind != "target"]
    frame = _recited(_rows_of(results, evaluations), "progress")
    at = dict(list(evaluations.groupby([*_KEYS, "progress"])))
    own = [at[keys] for keys in frame[[*_KEYS, "progress"]].itertuples(index=False, name=None)]
    for measure in measures:
        frame[measure.name] = [value_of(one, measure) for one in own]
    frame["Seeds"] = list(map(len, own))
    columns = [*_WHO, Column("Progress %", source="progress"), *_RECITED_UNRANKED]
    columns += [*(Column(measure.name, ".2f") for measure in measures), _SEEDS]
    return tabulate("progress", "Every checkpoint", columns, frame).without_empty_columns()


def _spread(results: Results, evaluations: "pd.DataFrame") -> Table:
    import pandas as pd

    lms = results.scores[(results.scores["metric"] == "lms") & (results.scores["kind"] == "target")]
    lms = lms[lms["unit"] != ""]
    rows = []
    for setting, objective, having in having_at_last(evaluations, LMS):
        own = lms[lms["checkpoint"].isin(having.index)]
        totals = unit_totals(having, LMS)
        interval = Interval(math.nan, math.nan, 0) if totals is None else bootstrap_interval(LMS.value, *totals)
        seeds = [value_of(having.loc[[at]], LMS) for at in having.index]
        lms_values = own["value"] if (own["count"] == 1).all() else own["value"].iloc[:0]  # means have no quantiles
        quantiles = lms_values.quantile(0.5), lms_values.quantile(0.9), lms_values.max()
        ends = (value_of(having, LMS), interval.low, interval.high)
        rows.append((setting, objective, *ends, *quantiles, min(seeds), max(seeds), len(seeds)))
    columns = [*_WHO, Column("Avg LMS", ".2f"), Column("From", ".2f"), Column("To", ".2f")]
    columns += [Column("Median", ".1f"), Column("90th percentile", ".1f"), Column("Max")]
    columns += [Column("Lowest seed", ".2f"), Column("Highest seed", ".2f"), _SEEDS]
    frame = pd.DataFrame(rows, columns=[column.source or column.name for column in columns])
    note = (
        "From and To: 95 % interval of the average, from resampling passages. Median and percentile are over passages, "
        "prefix lengths and seeds."
    )
    if (frame["Seeds"] > 1).any():
        per_seed = "Lowest and highest seed: the average LMS of a single run."
        return tabulate("lms_spread", "How the LMS varies", columns, frame, (note, per_seed))
    return tabulate("lms_spread", "How the LMS varies", columns[:-3], frame, (note,))


def _perplexity(results: Results, evaluations: "pd.DataFrame") -> Table:
    notes = ["Token-level perplexity on unseen text, over all predictions of all seeds."]
    for name, own, made in _named(results, _at_last(evaluations, PERPLEXITY)):
        if lost := sum(one.lost_blocks for one in made):
            blocks = (results.scores["checkpoint"].isin(own.index) & (results.scores["kind"] == "block")).sum()
            changed = f"{lost} of {blocks} blocks changed when converted to text"
            notes.append(f"{name}: {changed}, so different tokens were predicted.")
    columns = (Column("Perplexity", ".2f", "lower"),)
    return _scores("perplexity", "Perplexity", evaluations, (PERPLEXITY,), columns, "Blocks", notes)


def _summarization(results: Results, evaluations: "pd.DataFrame") -> Table:
    notes = ["CNN/DailyMail; means of F-measures in percent."]
    for name, own, made in _named(results, _at_last(evaluations, SUMMARY_MEASURES[0])):
        scores = results.scores[results.scores["checkpoint"].isin(own.index)]
        values = scores.loc[scores["metric"] == "bertscore_f1", "value"]
        if missing := int(values.isna().sum()):
            reasons = dict.fromkeys(reason.rstrip(".") for one in made for reason in one.bertscore_missing)
            notes.append(
                f"{name}: BERTScore-F1 is missing for {missing} of {len(values)} summaries: {'; '.join(reasons)}."
            )
    columns = [Column(measure.phrase, ".2f", "higher", measure.name) for measure in SUMMARY_MEASURES]
    return _scores("summarization", "Summarization", evaluations, SUMMARY_MEASURES, columns, "Articles", notes)


def _question_answering(evaluations: "pd.DataFrame") -> Table:
    names = zip(("Exact Match %", "F1 %"), ANSWER_MEASURES, strict=True)
    columns = [Column(name, ".2f", "higher", measure.name) for name, measure in names]
    notes = ["SQuAD v1.1, the best over each question's gold answers."]
    return _scores("qa", "Question answering", evaluations, ANSWER_MEASURES, columns, "Questions", notes)


def _scores(
    name: str,
    title: str,
    evaluations: "pd.DataFrame",
    measures: Sequence[Measure],
    columns: Sequence[Column],
    units: str,
    notes: Sequence[str],
) -> Table:
    import pandas as pd

    rows = []
    for setting, objective, having in having_at_last(evaluations, measures[0]):
        values = {measure.name: value_of(having, measure) for measure in measures}
        _, counts = having[measures[0].name].iloc[0]
        rows.append({"setting": setting, "objective": objective, **values, units: len(counts), "Seeds": len(having)})
    all_columns = (*_WHO, *columns, Column(units), _SEEDS)
    frame = pd.DataFrame(rows, columns=[column.source or column.name for column in all_columns])
    return tabulate(name, title, all_columns, frame, (*notes, *_checkpoint_note(evaluations, measures[0])))


def _checkpoint_note(evaluations: "pd.DataFrame", measure: Measure) -> list[str]:
    """Say where the last checkpoint is not the end of training."""
    last = {name: at_last(own, measure)["progress"].max() for name, own in evaluations.groupby("setting", sort=False)}
    where = ", ".join(f"{name} at {progress} %" for name, progress in last.items() if progress < 100)
    note = f"Not the end of training, but the last checkpoint that all runs of the model share: {where}."
    return [note] if where else []


def _reductions(reductions: "pd.DataFrame", baseline: str) -> Table:
    frame = reductions.assign(
        **{name: 100 * reductions[name] for name in ("reduction", "low", "high")},
        significant=[Interval(one.low, one.high, one.num_units).significant for one in reductions.itertuples()],
    )
    columns = (
        *(*_WHO, Column("Measure", source="measure")),
        Column(baseline, ".2f", source="baseline"),
        Column("Value", ".2f", source="other"),
        Column("Reduction %", ".1f", source="reduction"),
        Column("From %", ".1f", source="low"),
        Column("To %", ".1f", source="high"),
        Column("Significant", source="significant"),
        Column("Progress %", source="progress"),
    )
    explanation = (
        f"Reduction: ({baseline} - value) / {baseline}; negative where the objective is higher, which is better for "
        f"summaries and answers. From and To: 95 % percentile-bootstrap interval of {NUM_RESAMPLES:,} resamples, "
        "paired between the objectives: by passage (its prefix lengths and seeds stay together), by block for "
        f"perplexity, by article and by question. It covers the choice of these, not that of seeds. {SIGNIFICANCE_NOTE}"
    )
    notes = [
        f"{one.setting}, {one.objective}, {one.measure}: no interval, {why_no_interval(one)}."
        for one in reductions[reductions["low"].isna()].itertuples()
    ]
    return tabulate("reductions", f"Relative reductions against {baseline}", columns, frame, (explanation, *notes))


def _equal_perplexity(at_equal_perplexity: "pd.DataFrame", baseline: str) -> Table:
    spans, notes = [], []
    for one in at_equal_perplexity.itertuples():
        known = not math.isnan(one.before)
        ends = dict.fromkeys(f"{at:.0f}" for at in (one.before, one.after)) if known else ()
        spans.append(" to ".join(ends) or None)
        if not known:
            notes.append(
                f"{one.setting}, {one.objective}: out of range, {baseline}'s checkpoints lie between {one.lowest:.2f} "
                f"and {one.highest:.2f}."
            )
    columns = (
        *(*_WHO, Column("Perplexity", ".2f", source="perplexity")),
        Column(f"{baseline} at %", source="span"),
        Column(f"{baseline} LMS before", ".2f", source="lms_before"),
        Column(f"{baseline} LMS after", ".2f", source="lms_after"),
        Column("Interpolated", ".2f", source="interpolated"),
        Column("Avg LMS", ".2f", source="lms"),
    )
    explanation = (
        f"{baseline} first had the objective's final perplexity between these checkpoints. LMS before and after: its "
        "average LMS at them; Interpolated: linearly in log perplexity between the two. Avg LMS: the objective's."
    )
    frame = at_equal_perplexity.assign(span=spans)
    title = f"At equal perplexity, against {baseline}"
    return tabulate("equal_perplexity", title, columns, frame, (explanation, *notes))


def why_undefined(one: Any) -> str:
    """Say why a relative change is undefined; for the row see :func:`compare_objectives`."""
    return "the baseline is 0" if one.baseline == 0 else "a value is not finite"


def why_no_interval(one: Any) -> str:
    """Say why a reduction has no interval; for the row see :func:`compare_objectives`."""
    if math.isnan(one.reduction):
        return why_undefined(one)
    measure = BY_NAME[one.measure]
    if one.num_units < 2:
        return f"there is a single {measure.unit}"
    return f"the baseline's {measure.phrase} is 0 in some resamples, because few {measure.unit}s have another value"
