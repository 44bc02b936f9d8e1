"""The tables of a comparison."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tfidf_tune.analysis.averages import average_scores
from tfidf_tune.analysis.evaluations import (
    ANSWER_MEASURES,
    COMPARED,
    LMS,
    OTHER_PERPLEXITY,
    PASSAGE_NLL,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Measure,
    having_at_last,
    unit_totals,
    value_of,
)
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, NUM_RESAMPLES, bootstrap_interval
from tfidf_tune.report._document import Table, tabulate
from tfidf_tune.report._membership import membership_table
from tfidf_tune.report._wording import (
    FEW_UNITS,
    NEAR_EXPLAINED,
    NEAR_VERBATIM,
    SIGNIFICANCE_NOTE,
    TEXT_PROMPTS,
    Footnotes,
    joined,
    prompt_length,
    span,
    why_no_interval,
)
from tfidf_tune.results import Checkpoint, Results

if TYPE_CHECKING:
    import pandas as pd

_Groups: TypeAlias = "list[tuple[str, str, pd.DataFrame]]"  # setting, objective and their evaluations that are compared
_KEYS = ["setting", "objective"]
# Columns: header, column of the data frame, format.
_WHO = (("Model", "setting", ""), ("Objective", "objective", ""))
_SEEDS = ("Seeds", "Seeds", "")
_RECITED = (
    ("Avg Prefix", "prefix_match", ".2f"),
    ("Max Prefix", "max_prefix_match", ""),
    ("Avg LMS", "lms", ".2f"),
    ("Max LMS", "max_lms", ""),
    ("ROUGE-L", "rouge_l", ".2f"),
    ("Verbatim %", "verbatim", ".1f"),
)
_CONTROLS = ("Control LMS", "control_lms", ".2f")
_NEARER: dict[str, Literal["lower", "higher"]] = {"Edit distance": "higher", "Common subsequence": "lower"}
# Name, title, measures, the better end, units and a note.
_SCORES: tuple[tuple[str, str, dict[str, Measure], Literal["lower", "higher"], str, str], ...] = (
    (
        *("perplexity", "Perplexity", {"Perplexity": PERPLEXITY}, "lower", "Blocks"),
        "Token-level perplexity on unseen text, over all predictions.",
    ),
    (
        *("other_perplexity", "Perplexity on other text", {"Other perplexity": OTHER_PERPLEXITY}, "lower", "Blocks"),
        "The same on a second text (task tfidf_other_ppl).",
    ),
    (
        *("summarization", "Summarization", {one.phrase: one for one in SUMMARY_MEASURES}, "higher", "Articles"),
        "CNN/DailyMail; means of F-measures in percent.",
    ),
    (
        *("qa", "Question answering", dict(zip(("Exact Match %", "F1 %"), ANSWER_MEASURES, strict=True))),
        *("higher", "Questions", "SQuAD v1.1, the best over each question's gold answers."),
    ),
)


def comparison_tables(
    results: Results,
    evaluations: "pd.DataFrame",
    reductions: "pd.DataFrame",
    at_equal_perplexity: "pd.DataFrame",
    baseline: str,
    footnotes: Footnotes,
) -> tuple[list[Table], dict[tuple[str, ...], str]]:
    """Make the tables of a comparison; those without rows are left out, and caveats are added to the footnotes.

    Returns:
        tuple[list[Table], dict[tuple[str, ...], str]]: the tables; and by setting and objective the AUC of membership
            inference, where it is detectable.
    """
    probed = list(having_at_last(evaluations, LMS))
    scored = [
        ({"Model": setting, "Objective": objective}, list(having.index))
        for setting, objective, having in having_at_last(evaluations, PASSAGE_NLL)
    ]
    rows = _rows_of(results, evaluations.loc[[at for *_, having in probed for at in having.index]])
    tables = [_memorization(results, probed, rows, footnotes)] if probed else []
    likelihoods, detectable = membership_table(results.scores, scored, footnotes)
    tables += [
        likelihoods,
        *(_scores(results, evaluations, footnotes, *content) for content in _SCORES),
        _reductions(reductions, baseline, footnotes),
        _equal_perplexity(at_equal_perplexity, baseline),
        *([_spread(results, probed, _averaged(probed, rows))] if probed else []),
    ]
    # With one prefix length, or one checkpoint, these would repeat the first table.
    if (rows.groupby(_KEYS)["prefix"].nunique() > 1).any():
        tables.append(_by_prefix_length(rows))
    if (evaluations.groupby(_KEYS)["progress"].nunique() > 1).any():
        tables.append(_progress(results, evaluations))
    return [table for table in tables if len(table.frame)], detectable


def _rows_of(results: Results, evaluations: "pd.DataFrame") -> "pd.DataFrame":
    """Return the scores of evaluations, with their columns "setting", "objective", "progress" and an "order"."""
    named = evaluations.assign(order=evaluations.groupby(_KEYS, sort=False).ngroup())
    rows = named[[*_KEYS, "progress", "order"]].join(results.scores.set_index("checkpoint"), how="inner")
    return rows.reset_index(names="checkpoint")


def _recited(rows: "pd.DataFrame", *by: str) -> "pd.DataFrame":
    """Average what is recited by setting, objective and more columns."""
    averages = average_scores(rows.sort_values(["order", *by], kind="stable"), [*_KEYS, *by])
    return averages.assign(verbatim=100 * averages["verbatim"]).reset_index()


def _memorization(results: Results, probed: _Groups, rows: "pd.DataFrame", footnotes: Footnotes) -> Table:
    single = rows[rows["unit"] != ""]
    lengths = [*map(prompt_length, sorted(set(single["prefix"].dropna())))]
    injections = single.loc[(single["metric"] == "num_injections") & (single["kind"] == "target"), "value"].astype(int)
    times = " or ".join(map(str, sorted(set(injections) - {0})))
    approximate, lost = [], []
    for name, own, made in _named(results, probed):
        approximate += [name] if any(one.text_prompts for one in made) else []
        if num_lost := sum(one.lost_prompts for one in made):
            asked = (single["checkpoint"].isin(own.index) & (single["metric"] == "lms")).sum()
            lost.append(f"{num_lost} of {asked} of {name}")
    caveats = _checkpoint_note(probed)
    caveats += [f"{'; '.join(approximate)}: {TEXT_PROMPTS}"] if approximate else []
    if lost:
        caveats.append(
            f"Prompts changed when converted to text ({'; '.join(lost)}), so the model saw tokens that differ from "
            "training; `tfidf-tune eval` is exact."
        )
    asked_by = ""
    if lengths:  # condensed records have averages over them
        of_tokens = "of their own lengths" if lengths == ["own"] else f"of {joined(map(str, lengths))} tokens"
        asked_by = f" (prompts {of_tokens})"
    explanation = (
        f"Means and maxima over {_averaged(probed, rows)}{asked_by}. Prefix match and LMS are in tokens; Verbatim is "
        "the share of continuations that reproduce the rest of the passage; Control LMS is the average LMS of "
        f"passages that were never injected: the floor.{footnotes.mark(*caveats)}"
    )
    frame = _recited(rows)
    near = _measured(frame, NEAR_VERBATIM)
    notes = [explanation, *([NEAR_EXPLAINED] if near else [])]
    notes += [f"Each target occurs {times} times in the training text."] if times else []
    passages = single[single["kind"] == "target"].groupby("order")["unit"].nunique()
    frame["Passages"] = passages.reindex(range(len(frame)), fill_value=0).tolist()
    frame["Seeds"] = [len(own) for *_, own in probed]
    columns = (*_WHO, *_RECITED, _CONTROLS, *near, ("Passages", "Passages", ""), _SEEDS)
    # Among rows of several checkpoints or prefix lengths, as below, the best would always be the first checkpoint.
    return tabulate("memorization", "Memorization", frame, columns, notes, _all_better("lower", _RECITED) | _NEARER)


def _measured(frame: "pd.DataFrame", columns: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Return those of the columns that have a value."""
    return [column for column in columns if frame[column[1]].notna().any()]


def _averaged(probed: _Groups, rows: "pd.DataFrame") -> str:
    """Name what the averages of the LMS are over: "passages, prefix lengths and seeds"."""
    lengths, seeds = rows["prefix"].nunique() > 1, any(len(own) > 1 for *_, own in probed)
    return joined(["passages", *["prefix lengths"] * lengths, *["seeds"] * seeds])


def _all_better(end: Literal["lower", "higher"], columns: Sequence[tuple[str, str, str]]) -> Any:
    return dict.fromkeys([header for header, *_ in columns], end)


def _named(results: Results, groups: _Groups) -> Iterator[tuple[str, "pd.DataFrame", list[Checkpoint]]]:
    """Yield for each setting and objective its name in notes, its evaluations and its checkpoints."""
    for setting, objective, own in groups:
        yield f"{setting}, {objective}", own, [results.checkpoints[at] for at in own.index]


def _by_prefix_length(rows: "pd.DataFrame") -> Table:
    frame = _recited(rows[rows["prefix"].notna()], "prefix")
    columns = (*_WHO, ("Prefix length", "prefix", ""), *_RECITED, _CONTROLS, *_measured(frame, NEAR_VERBATIM))
    frame["prefix"] = frame["prefix"].map(prompt_length)
    return tabulate("by_prefix_length", "Memorization by prefix length", frame, columns)


def _progress(results: Results, evaluations: "pd.DataFrame") -> Table:
    measures = [measure for measure in COMPARED if measure.kind != "target"]
    frame = _recited(_rows_of(results, evaluations), "progress")
    at = dict(list(evaluations.groupby([*_KEYS, "progress"])))
    own = [at[keys] for keys in frame[[*_KEYS, "progress"]].itertuples(index=False, name=None)]
    for measure in measures:
        frame[measure.name] = [value_of(one, measure) for one in own]
    frame["Seeds"] = list(map(len, own))
    columns = [*_WHO, ("Progress %", "progress", ""), *_RECITED, _CONTROLS, *NEAR_VERBATIM]
    columns += [*((measure.name, measure.name, ".2f") for measure in measures), _SEEDS]
    return tabulate("progress", "Every checkpoint", frame, columns).without_empty_columns()


def _spread(results: Results, probed: _Groups, averaged: str) -> Table:
    import pandas as pd

    lms = results.scores[(results.scores["metric"] == "lms") & (results.scores["kind"] == "target")]
    lms = lms[lms["unit"] != ""]
    rows: list[tuple[Any, ...]] = []
    for setting, objective, having in probed:
        own = lms[lms["checkpoint"].isin(having.index)]
        totals = unit_totals(having, LMS)
        low, high = (math.nan, math.nan) if totals is None else bootstrap_interval(LMS.value, *totals)[:2]
        seeds = [value_of(having.loc[[at]], LMS) for at in having.index]
        values = own["value"] if (own["count"] == 1).all() else own["value"].iloc[:0]  # means have no quantiles
        quantiles = values.quantile(0.5), values.quantile(0.9), values.max()
        ends = value_of(having, LMS), low, high
        rows.append((setting, objective, *ends, *quantiles, min(seeds), max(seeds), len(seeds)))
    formats = {**dict.fromkeys(("Avg LMS", "From", "To"), ".2f"), "Median": ".1f", "90th percentile": ".1f", "Max": ""}
    formats |= {"Lowest seed": ".2f", "Highest seed": ".2f", "Seeds": ""}
    frame = pd.DataFrame(rows, columns=["Model", "Objective", *formats])
    notes = [
        "From and To: 95 % interval of the average, from resampling passages. Median and percentile are over "
        f"{averaged}."
    ]
    if (frame["Seeds"] > 1).any():
        notes.append("Lowest and highest seed: the average LMS of a single run.")
    else:
        frame = frame.iloc[:, :-3]
    return Table("lms_spread", "How the LMS varies", frame, notes, formats)


def _scores(
    results: Results,
    evaluations: "pd.DataFrame",
    footnotes: Footnotes,
    name: str,
    title: str,
    measures: dict[str, Measure],
    better: Literal["lower", "higher"],
    units: str,
    note: str,
) -> Table:
    import pandas as pd

    first, *_ = measures.values()
    groups = list(having_at_last(evaluations, first))
    rows, caveats = [], _checkpoint_note(groups)
    for setting, objective, having in groups:
        _, counts = having[first.name].iloc[0]
        values = (value_of(having, measure) for measure in measures.values())
        rows.append((setting, objective, *values, len(counts), len(having)))
    for who, own, made in _named(results, groups):
        scores = results.scores[results.scores["checkpoint"].isin(own.index)]
        if first == PERPLEXITY and (lost := sum(one.lost_blocks for one in made)):
            changed = f"{lost} of {(scores['kind'] == 'block').sum()} blocks changed when converted to text"
            caveats.append(f"{who}: {changed}, so different tokens were predicted.")
        values = scores.loc[scores["metric"] == "bertscore_f1", "value"]
        if first.kind == "article" and (missing := int(values.isna().sum())):
            reasons = "; ".join(dict.fromkeys(reason.rstrip(".") for one in made for reason in one.bertscore_missing))
            caveats.append(f"{who}: BERTScore-F1 is missing for {missing} of {len(values)} summaries: {reasons}.")
    frame = pd.DataFrame(rows, columns=["Model", "Objective", *measures, units, "Seeds"])
    formats, ends = dict.fromkeys(measures, ".2f"), dict.fromkeys(measures, better)
    return Table(name, title, frame, [f"{note}{footnotes.mark(*caveats)}"] if rows else [], formats, ends)


def _checkpoint_note(groups: _Groups) -> list[str]:
    """Say where the last checkpoint is not the end of training."""
    last = {setting: having["progress"].iloc[0] for setting, _, having in groups}
    where = ", ".join(f"{name} at {progress} %" for name, progress in last.items() if progress < 100)
    note = f"Not the end of training, but the last checkpoint that all runs of the model share: {where}."
    return [note] if where else []


def _reductions(reductions: "pd.DataFrame", baseline: str, footnotes: Footnotes) -> Table:
    frame = reductions.assign(
        **{name: 100 * reductions[name] for name in ("reduction", "low", "high")},
    )
    columns = (
        *(*_WHO, ("Measure", "measure", ""), (baseline, "baseline", ".2f"), ("Value", "other", ".2f")),
        *(("Reduction %", "reduction", ".1f"), ("From %", "low", ".1f"), ("To %", "high", ".1f")),
        *(("p (Holm)", "p_value", ".4f"), ("Significant", "significant", ""), ("Progress %", "progress", "")),
    )
    caveats = [FEW_UNITS] if reductions["num_units"].between(MIN_UNITS, ENOUGH_UNITS - 1).any() else []
    explanation = (
        f"Reduction: ({baseline} - value) / {baseline}; negative where the objective is higher, which is better for "
        f"summaries and answers. From and To: 95 % percentile-bootstrap interval of {NUM_RESAMPLES:,} resamples, "
        "paired between the objectives: by passage (its prefix lengths and seeds stay together), by block for "
        f"perplexity, by article and by question. {SIGNIFICANCE_NOTE}{footnotes.mark(*caveats)}"
    )
    notes = [
        f"{one.setting}, {one.objective}, {one.measure}: no interval, {why_no_interval(one)}."
        for one in reductions[reductions["low"].isna()].itertuples()
    ]
    return tabulate("reductions", f"Relative reductions against {baseline}", frame, columns, (explanation, *notes))


def _equal_perplexity(at_equal_perplexity: "pd.DataFrame", baseline: str) -> Table:
    spans: list[str | None] = []
    notes = [
        f"{baseline} first had the objective's perplexity between these checkpoints. LMS before and after: its average "
        "LMS at them; Interpolated: linearly in log perplexity between the two. Perplexity and Avg LMS: the "
        "objective's, at Progress %."
    ]
    for one in at_equal_perplexity.itertuples():
        if math.isnan(one.before):
            spans.append(None)
            notes.append(
                f"{one.setting}, {one.objective}: out of range, {baseline} has "
                f"{span(one.lowest, one.highest, decimals=2)}."
            )
        else:
            spans.append(" to ".join(dict.fromkeys(f"{at:.0f}" for at in (one.before, one.after))))
    columns = (
        *(*_WHO, ("Perplexity", "perplexity", ".2f"), (f"{baseline} at %", "span", "")),
        *((f"{baseline} LMS before", "lms_before", ".2f"), (f"{baseline} LMS after", "lms_after", ".2f")),
        *(("Interpolated", "interpolated", ".2f"), ("Avg LMS", "lms", ".2f")),
        ("Progress %", "progress", ""),
    )
    frame = at_equal_perplexity.assign(span=spans)
    return tabulate("equal_perplexity", f"At equal perplexity, against {baseline}", frame, columns, notes)
