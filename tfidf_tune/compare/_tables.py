"""The tables of a comparison."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from tfidf_tune.compare._evaluations import (
    at_last,
    average_scores,
    compare_at_equal_perplexity,
    having_at_last,
    unit_totals,
    value_of,
)
from tfidf_tune.report.document import Footnotes, Table, joined, tabulate
from tfidf_tune.results import wording as words
from tfidf_tune.results.floor import Floor
from tfidf_tune.results.intervals import (
    MIN_UNITS,
    NUM_RESAMPLES,
    binomial_upper_bound,
    bootstrap_interval,
)
from tfidf_tune.results.membership_table import membership_table
from tfidf_tune.results.positive_control import positive_control_of
from tfidf_tune.results.recited import Recited, recited_further
from tfidf_tune.results.table import (
    ANSWER_MEASURES,
    COMPARED,
    CONTROLS,
    LMS,
    NEAR_VERBATIM,
    OTHER_PERPLEXITY,
    PASSAGE_NLL,
    PERPLEXITY,
    RECITED,
    START,
    SUMMARY_MEASURES,
    VERBATIM,
    Measure,
    Results,
)

# Setting, objective and their evaluations that are compared.
_Groups: TypeAlias = list[tuple[str, str, pd.DataFrame]]
_KEYS = ["setting", "objective"]
# Columns: header, column of the data frame, format.
_WHO = (("Model", "setting", ""), ("Objective", "objective", ""))
_SEEDS = ("Seeds", "Seeds", "")
# Scores of other tasks: name -> title, units, header -> measure.
_SCORED: dict[str, tuple[str, str, dict[str, Measure]]] = {
    "perplexity": ("Perplexity", "Blocks", {PERPLEXITY.label: PERPLEXITY}),
    "other_perplexity": (
        "Perplexity on other text",
        "Blocks",
        {OTHER_PERPLEXITY.label: OTHER_PERPLEXITY},
    ),
    "summarization": (
        "Summarization",
        "Articles",
        {one.label.split()[1]: one for one in SUMMARY_MEASURES},
    ),
    "qa": (
        "Question answering",
        "Questions",
        dict(zip(("Exact Match %", "F1 %"), ANSWER_MEASURES, strict=True)),
    ),
}
_SCORED_NOTES = {
    "perplexity": "Token-level perplexity on unseen text, over all predictions.",
    "other_perplexity": "The same on a second text (task tfidf_other_ppl).",
    "summarization": "CNN/DailyMail; means of F-measures in percent.",
    "qa": "SQuAD v1.1, the best over each question's gold answers.",
}


def comparison_tables(
    results: Results,
    evaluations: pd.DataFrame,
    reductions: pd.DataFrame,
    floors: Mapping[tuple[str, str], Floor | None],
    recited: Mapping[tuple[str, str], str],
    baseline: str,
    footnotes: Footnotes,
) -> list[Table]:
    """Make the tables of a comparison, the overview first; those without rows are left out."""
    probed = list(having_at_last(evaluations, LMS))
    numbers: list[int] = []
    for _, _, having in probed:
        numbers += list(having.index)
    rows = _rows_of(results, evaluations.loc[numbers])
    tables = [_memorization(results, probed, rows, footnotes)] if probed else []
    scored = [
        ({"Model": setting, "Objective": objective}, list(having.index))
        for setting, objective, having in having_at_last(evaluations, PASSAGE_NLL)
    ]
    likelihoods = membership_table(results.scores, scored, footnotes)
    tables += [likelihoods, *(_scores(results, evaluations, footnotes, name) for name in _SCORED)]
    tables += [
        _reductions(reductions, baseline, footnotes),
        _equal_perplexity(evaluations, baseline),
    ]
    tables += [_spread(results, probed)] if probed else []
    # With one prefix length, or one checkpoint, these would repeat the first table.
    if (rows.groupby(_KEYS)["prefix"].nunique() > 1).any():
        frame = _recited(rows[rows["prefix"].notna()], "prefix")
        frame["prefix"] = frame["prefix"].map(words.prompt_length)
        columns = (*_WHO, ("Prefix length", "prefix", ""), *RECITED, CONTROLS, *NEAR_VERBATIM)
        by_length = tabulate("by_prefix_length", "Memorization by prefix length", frame, columns)
        tables.append(by_length.without_empty_columns())
    if (evaluations.groupby(_KEYS)["progress"].nunique() > 1).any():
        tables.append(_progress(results, evaluations))
    overview = _overview(
        results, evaluations, reductions, floors, recited, likelihoods, baseline, footnotes
    )
    return [overview, *(table for table in tables if len(table.frame))]


def _overview(
    results: Results,
    evaluations: pd.DataFrame,
    reductions: pd.DataFrame,
    floors: Mapping[tuple[str, str], Floor | None],
    recited: Mapping[tuple[str, str], str],
    likelihoods: Table,
    baseline: str,
    footnotes: Footnotes,
) -> Table:
    """Show what each objective recites, and what it costs, each value with its interval in one
    cell.
    """
    aucs = {(row["Model"], row["Objective"]): row for row in likelihoods.frame.to_dict("records")}
    costs = {
        row[:2]: row
        for row in reductions[reductions["measure"] == PERPLEXITY.label].itertuples(index=False)
    }
    last = {
        setting: at_last(own, LMS) for setting, own in evaluations.groupby("setting", sort=False)
    }
    rows = []
    for (setting, objective), floor in floors.items():
        shared = last[setting]
        totals = unit_totals(shared[shared["objective"] == objective], VERBATIM)
        excess = verbatim = cost = None
        if floor is not None:
            excess = words.cell(floor.difference, floor.excess, sign="+")
        if totals is not None:
            # With none of them, the interval is up to the binomial bound.
            bound = (0.0, binomial_upper_bound(0, len(totals[0])))
            ends = bootstrap_interval(VERBATIM.value, *totals)[:2] if totals[0].any() else bound
            verbatim = words.cell(100 * VERBATIM.value(*totals), (100 * ends[0], 100 * ends[1]), 1)
        one = costs.get((setting, objective))
        if (
            one is not None and (shared["progress"].isin((one.progress, 0))).all()
        ):  # the price at the same checkpoint
            cost = words.cell(-100 * one.reduction, (-100 * one.high, -100 * one.low), 1, "+")
        auc = aucs.get((setting, objective))
        detected = auc and words.cell(
            auc["AUC"], (auc.get("AUC from", math.nan), auc.get("AUC to", math.nan))
        )
        shown = _shown(results, shared[shared["objective"] == objective].index)
        further = recited.get((setting, objective))
        rows.append(
            (
                setting,
                objective,
                further,
                shown,
                excess,
                verbatim,
                detected,
                "baseline" if objective == baseline else cost,
            )
        )
    fewest = min(
        (floor.excess.num_units for floor in floors.values() if floor is not None), default=0
    )
    num_seeds = evaluations.groupby(_KEYS)["run"].nunique().max()
    headers = (
        "Recited further",
        "Shown the text",
        "Recited above chance",
        "Verbatim (%)",
        "Membership AUC",
        f"Perplexity against {baseline} (%)",
    )
    caveats = [words.BOUND, *words.few_units(fewest)]
    if len(rows) > 1 + evaluations["setting"].nunique():
        caveats.append(
            "Verdicts are corrected for the number of comparisons of a model by Holm's method. "
            "Intervals are not: without any difference, one in twenty excludes 0."
        )
    over = (
        "not over seeds"
        if num_seeds > 1
        else "and one seed, which cannot separate an objective from its seed"
    )
    notes = [
        "Recited further: training passages that are recited further than unseen text, if their "
        "number is not chance (hypergeometric tests, corrected by Holm's method), summed over "
        "seeds. Shown the text: what a model reads of held-out passages that stand in front of the "
        "prompt; where it reads nothing, a clean result says nothing.",
        "Recited above chance: LMS of training passages minus LMS of held-out passages, in tokens, "
        f"on average. {words.LMS_EXPLAINED}{_tokens_in_words(results, floors)}. Verbatim: "
        "continuations that are exactly the passage. Membership AUC: how often a training passage "
        "looks more like training text by its loss than a held-out one; 0.5 is chance.",
        f"In brackets: 95 % intervals over passages and blocks, {over}.{footnotes.mark(*caveats)}",
    ]
    frame = pd.DataFrame(rows, columns=["Model", "Objective", *headers], dtype=object)
    table = Table("overview", "What each objective recites", frame, notes)
    if frame["Shown the text"].isna().all():  # older results
        table = replace(table, frame=frame.drop(columns="Shown the text"))
    return table


def _tokens_in_words(results: Results, floors: Mapping[tuple[str, str], Floor | None]) -> str:
    """Say in words what the largest LMS above chance is: "; 29.7 tokens are about 22 words"; "" if
    it is not known.
    """
    rates = results.scores.loc[results.scores["metric"] == "words_a_token", "value"]
    largest = max((floor.difference for floor in floors.values() if floor is not None), default=0.0)
    shown = words.about_words(largest, rates.mean()).removeprefix(", ")
    if largest < 1 or not shown:
        return ""
    return f"; {largest:.1f} tokens are {shown}"


def recited_by_objective(
    scores: pd.DataFrame, evaluations: pd.DataFrame
) -> dict[tuple[str, str], str]:
    """Setting and objective -> at the last shared checkpoint "23 of 24", over seeds; without those
    that are unknown.
    """
    found = {}
    for setting, objective, having in having_at_last(evaluations, LMS):
        counted = [recited_of_checkpoint(scores, at) for at in having.index]
        known = [each for each in counted if each is not None]
        if known and len(known) == len(counted):
            number = sum(each.number for each in known)
            found[setting, objective] = f"{number} of {sum(each.all.num_targets for each in known)}"
    return found


def recited_of_checkpoint(scores: pd.DataFrame, checkpoint: int) -> Recited | None:
    """Count the passages of a checkpoint that are recited further than unseen text; None if that is
    not known.
    """
    rows = scores[(scores["checkpoint"] == checkpoint) & (scores["unit"] != "")]
    longest = rows[(rows["metric"] == "lms") & (rows["count"] == 1)].groupby(
        ["kind", "unit"], observed=True
    )["value"]
    highest = longest.max()
    if not {"target", "control"} <= set(highest.index.get_level_values("kind")):
        return None
    injections = rows[(rows["metric"] == "num_injections") & (rows["kind"] == "target")].set_index(
        "unit"
    )["value"]
    targets = highest["target"]
    compared = rows[(rows["metric"] == "num_compared") & (rows["kind"] == "target")]
    lengths = compared.groupby(compared["unit"].astype(str))["value"].max()
    table = pd.DataFrame({"lms": targets, "repeats": injections.reindex(targets.index)})
    # Older results have none.
    table["length"] = lengths.reindex(targets.index.astype(str)).fillna(np.inf).to_numpy()
    return recited_further(table, highest["control"])


def unshown_objectives(results: Results, evaluations: pd.DataFrame) -> set[tuple[str, str]]:
    """Return setting and objective of evaluations in which nothing was shown: what they do not
    recite says nothing.
    """
    unshown = set()
    for setting, objective, having in having_at_last(evaluations, LMS):
        if any(positive_control_of(results, at).problem for at in having.index):
            unshown.add((setting, objective))
    return unshown


def _shown(results: Results, checkpoints: Any) -> str | None:
    """Return what the positive controls of checkpoints read, as "22.1 of 48 tokens"; None if there
    are none.
    """
    controls = [positive_control_of(results, at) for at in checkpoints]
    if not controls or not any(each.answers for each in controls):
        return None
    texts = []
    for control in controls:
        text = control.text if control.state == "shown" else control.state
        if text not in texts:
            texts.append(text)
    return ", ".join(texts)


def _rows_of(results: Results, evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of evaluations, with their columns "setting", "objective", "progress" and
    an "order".
    """
    named = evaluations.assign(order=evaluations.groupby(_KEYS, sort=False).ngroup())
    rows = named[[*_KEYS, "progress", "order"]].join(
        results.scores.set_index("checkpoint"), how="inner"
    )
    return rows.reset_index(names="checkpoint")


def _recited(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Average what is recited by setting, objective and more columns."""
    averages = average_scores(rows.sort_values(["order", *by], kind="stable"), [*_KEYS, *by])
    return averages.assign(verbatim_percent=100 * averages["verbatim"]).reset_index()


def _memorization(
    results: Results, probed: _Groups, rows: pd.DataFrame, footnotes: Footnotes
) -> Table:
    single = rows[rows["unit"] != ""]
    caveats = _checkpoint_note(probed)
    approximate = []
    lost = []
    for setting, objective, own in probed:
        made = [results.checkpoints[at] for at in own.index]
        approximate += [f"{setting}, {objective}"] if any(one.text_prompts for one in made) else []
        num_lost = sum(one.lost_prompts for one in made)
        if num_lost:
            asked = (single["checkpoint"].isin(own.index) & (single["metric"] == "lms")).sum()
            lost.append(f"{num_lost} of {asked} of {setting}, {objective}")
    if approximate:
        caveats.append(f"{'; '.join(approximate)}: {words.TEXT_PROMPTS}")
    if lost:
        caveats.append(
            f"Prompts changed when converted to text ({'; '.join(lost)}), so the model saw tokens "
            "that differ from training; `tfidf-tune eval` is exact."
        )
    lengths = [
        str(words.prompt_length(length)) for length in sorted(set(single["prefix"].dropna()))
    ]
    asked_by = ""
    if lengths:  # condensed records have averages over them
        asked_by = (
            " (prompts of "
            f"{'their own lengths' if lengths == ['own'] else f'{joined(lengths)} tokens'})"
        )
    frame = _recited(rows)
    notes = [
        f"Means and maxima over passages, prefix lengths and seeds{asked_by}. Prefix match and LMS "
        "are in tokens; Verbatim is the share of continuations that reproduce the rest of the "
        "passage; Control LMS is the average LMS of held-out passages, which is "
        f"chance.{footnotes.mark(*caveats)}"
    ]
    notes += [words.NEAR_EXPLAINED] if frame["edit_distance"].notna().any() else []
    targets = single[single["kind"] == "target"]
    times = sorted(
        set(targets.loc[targets["metric"] == "num_injections", "value"].astype(int)) - {0}
    )
    notes += (
        [f"Each target occurs {' or '.join(map(str, times))} times in the training text."]
        if times
        else []
    )
    passages = targets.groupby("order")["unit"].nunique()
    frame["Passages"] = passages.reindex(range(len(frame)), fill_value=0).tolist()
    frame["Seeds"] = [len(own) for *_, own in probed]
    columns = (*_WHO, *RECITED, CONTROLS, *NEAR_VERBATIM, ("Passages", "Passages", ""), _SEEDS)
    # Among rows of several checkpoints or prefix lengths, the best would always be the first
    # checkpoint.
    better: dict[str, Any] = {header: "lower" for header, *_ in (*RECITED, NEAR_VERBATIM[1])}
    better[NEAR_VERBATIM[0][0]] = "higher"  # the distance
    return tabulate(
        "memorization", "Memorization", frame, columns, notes, better
    ).without_empty_columns()


def _progress(results: Results, evaluations: pd.DataFrame) -> Table:
    measures = [measure for measure in COMPARED if measure.kind != "target"]
    frame = _recited(_rows_of(results, evaluations), "progress")
    at = dict(list(evaluations.groupby([*_KEYS, "progress"])))
    own = [at[keys] for keys in frame[[*_KEYS, "progress"]].itertuples(index=False, name=None)]
    for measure in measures:
        frame[measure.label] = [value_of(one, measure) for one in own]
    frame["Seeds"] = list(map(len, own))
    columns = [*_WHO, ("Progress %", "progress", ""), *RECITED, CONTROLS, *NEAR_VERBATIM]
    columns += [*((measure.label, measure.label, ".2f") for measure in measures), _SEEDS]
    return tabulate("progress", "Every checkpoint", frame, columns).without_empty_columns()


def _spread(results: Results, probed: _Groups) -> Table:
    scores = results.scores
    lms = scores[
        (scores["metric"] == "lms") & (scores["kind"] == "target") & (scores["unit"] != "")
    ]
    rows: list[tuple[Any, ...]] = []
    for setting, objective, having in probed:
        own = lms[lms["checkpoint"].isin(having.index)]
        totals = unit_totals(having, LMS)
        ends = (
            (math.nan, math.nan) if totals is None else bootstrap_interval(LMS.value, *totals)[:2]
        )
        seeds = [value_of(having.loc[[at]], LMS) for at in having.index]
        # Means have no quantiles.
        values = own["value"] if (own["count"] == 1).all() else own["value"].iloc[:0]
        quantiles = values.quantile(0.5), values.quantile(0.9), values.max()
        rows.append(
            (
                setting,
                objective,
                value_of(having, LMS),
                *ends,
                *quantiles,
                min(seeds),
                max(seeds),
                len(seeds),
            )
        )
    formats = {
        **dict.fromkeys((LMS.label, "From", "To"), ".2f"),
        "Median": ".1f",
        "90th percentile": ".1f",
        "Max": "",
    }
    formats |= {"Lowest seed": ".2f", "Highest seed": ".2f", "Seeds": ""}
    frame = pd.DataFrame(rows, columns=["Model", "Objective", *formats])
    notes = [
        "From and To: 95 % interval of the average, from resampling passages. Median and "
        "percentile are over passages, prefix lengths and seeds."
    ]
    if (frame["Seeds"] > 1).any():
        notes.append("Lowest and highest seed: the average LMS of a single run.")
    else:
        frame = frame.iloc[:, :-3]
    return Table("lms_spread", "How the LMS varies", frame, notes, formats)


def _scores(results: Results, evaluations: pd.DataFrame, footnotes: Footnotes, name: str) -> Table:
    title, units, measures = _SCORED[name]
    first, *_ = measures.values()
    groups = list(having_at_last(evaluations, first))
    rows = []
    caveats = _checkpoint_note(groups)
    for setting, objective, having in groups:
        values = (value_of(having, measure) for measure in measures.values())
        rows.append((setting, objective, *values, len(having[first.label].iloc[0][1]), len(having)))
        made = [results.checkpoints[at] for at in having.index]
        scores = results.scores[results.scores["checkpoint"].isin(having.index)]
        if first == PERPLEXITY and (lost := sum(one.lost_blocks for one in made)):
            caveats.append(
                f"{setting}, {objective}: {lost} of {(scores['kind'] == 'block').sum()} blocks "
                "changed when converted to text, so different tokens were predicted."
            )
        summaries = scores.loc[scores["metric"] == "bertscore_f1", "value"]
        if first.kind == "article" and (missing := int(summaries.isna().sum())):
            causes: dict[str, None] = {}
            for checkpoint in made:
                causes |= dict.fromkeys(text.rstrip(".") for text in checkpoint.bertscore_missing)
            reasons = "; ".join(causes)
            caveats.append(
                f"{setting}, {objective}: BERTScore-F1 is missing for {missing} of "
                f"{len(summaries)} summaries: {reasons}."
            )
    frame = pd.DataFrame(rows, columns=["Model", "Objective", *measures, units, "Seeds"])
    better: dict[str, Any] = dict.fromkeys(measures, "lower" if first.exponential else "higher")
    notes = [f"{_SCORED_NOTES[name]}{footnotes.mark(*caveats)}"] if rows else []
    return Table(name, title, frame, notes, dict.fromkeys(measures, ".2f"), better)


def _checkpoint_note(groups: _Groups) -> list[str]:
    """Say where the last checkpoint is not the end of training."""
    last = {
        setting: having["progress"].iloc[0]
        for setting, objective, having in groups
        if objective != START
    }
    where = ", ".join(
        f"{name} at {progress} %" for name, progress in last.items() if progress < 100
    )
    shared = (
        "Not the end of training, but the last checkpoint that all runs of the model share: "
        f"{where}."
    )
    return [shared] if where else []


def _reductions(reductions: pd.DataFrame, baseline: str, footnotes: Footnotes) -> Table:
    frame = reductions.assign(
        **{name: 100 * reductions[name] for name in ("reduction", "low", "high")}
    )
    columns = (
        *_WHO,
        ("Measure", "measure", ""),
        (baseline, "baseline", ".2f"),
        ("Value", "other", ".2f"),
        ("Reduction %", "reduction", ".1f"),
        ("From %", "low", ".1f"),
        ("To %", "high", ".1f"),
        ("p (Holm)", "p_value", ".4f"),
        ("Significant", "significant", ""),
        ("Progress %", "progress", ""),
    )
    caveats = []
    for number in reductions["num_units"].unique():
        caveats += words.few_units(number)
    explanation = (
        f"Reduction: ({baseline} - value) / {baseline}; negative where the objective is higher, "
        "which is better for summaries and answers. From and To: 95 % percentile-bootstrap "
        f"interval of {NUM_RESAMPLES:,} resamples, paired between the objectives: by passage (its "
        "prefix lengths and seeds stay together), by block for perplexity, by article and by "
        "question. p (Holm): two-sided, from the same resamples, corrected for the number of "
        "comparisons of the model by Holm's method. Significant: the interval excludes 0 and p is "
        f"below 0.05. With fewer than {MIN_UNITS} units there is no "
        f"verdict.{footnotes.mark(*caveats)}"
    )
    notes = [
        f"{one.setting}, {one.objective}, {one.measure}: no interval, {words.why_no_interval(one)}."
        for one in reductions[reductions["low"].isna()].itertuples()
    ]
    return tabulate(
        "reductions",
        f"Relative reductions against {baseline}",
        frame,
        columns,
        (explanation, *notes),
    )


def _equal_perplexity(evaluations: pd.DataFrame, baseline: str) -> Table:
    frame = compare_at_equal_perplexity(evaluations, baseline)
    notes = [
        f"{baseline} first had the objective's perplexity between these checkpoints. LMS before "
        "and after: its average LMS at them; Interpolated: linearly in log perplexity between the "
        "two. Perplexity and Avg LMS: the objective's, at Progress %. Recites: less than at both, "
        "more, or between them, without an interval; not above controls, if neither LMS can be "
        "told from theirs, with the upper ends of the intervals of the differences."
    ]
    spans: list[str | None] = []
    for one in frame.itertuples():
        if math.isnan(one.before):
            ends = words.span(one.lowest, one.highest, decimals=2)
            notes.append(f"{one.setting}, {one.objective}: out of range, {baseline} has {ends}.")
        spans.append(
            None if math.isnan(one.before) else words.span(one.before, one.after, decimals=0)
        )
    columns = (
        *_WHO,
        ("Perplexity", "perplexity", ".2f"),
        (f"{baseline} at %", "span", ""),
        *((f"{baseline} LMS {end}", f"lms_{end}", ".2f") for end in ("before", "after")),
        ("Interpolated", "interpolated", ".2f"),
        (LMS.label, "lms", ".2f"),
        ("Recites", "recited", ""),
        ("Bound", "floor_bound", ".2f"),
        (f"{baseline} bound", "baseline_floor_bound", ".2f"),
        ("Progress %", "progress", ""),
    )
    return tabulate(
        "equal_perplexity",
        f"At equal perplexity, against {baseline}",
        frame.assign(span=spans),
        columns,
        notes,
    ).without_empty_columns()
