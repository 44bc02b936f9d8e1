"""The tables of a comparison."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

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
from tfidf_tune.report.document import Column, Footnotes, Table, joined, tabulate
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
_WHO = (
    Column("Model", "setting"),
    Column("Objective", "objective"),
)
_SEEDS = Column("Seeds", "Seeds")


class _Task(NamedTuple):
    """The scores of another task, which have a table of their own."""

    title: str
    units: str  # header of their number
    measures: dict[str, Measure]  # by header
    note: str


# By the name of the table.
_TASKS = {
    "perplexity": _Task(
        title="Perplexity",
        units="Blocks",
        measures={PERPLEXITY.label: PERPLEXITY},
        note="Token-level perplexity on unseen text, over all predictions.",
    ),
    "other_perplexity": _Task(
        title="Perplexity on other text",
        units="Blocks",
        measures={OTHER_PERPLEXITY.label: OTHER_PERPLEXITY},
        note="The same on a second text (task tfidf_other_ppl).",
    ),
    "summarization": _Task(
        title="Summarization",
        units="Articles",
        measures={measure.label.split()[1]: measure for measure in SUMMARY_MEASURES},
        note="CNN/DailyMail; means of F-measures in percent.",
    ),
    "qa": _Task(
        title="Question answering",
        units="Questions",
        measures=dict(zip(("Exact Match %", "F1 %"), ANSWER_MEASURES, strict=True)),
        note="SQuAD v1.1, the best over each question's gold answers.",
    ),
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
    probed_checkpoints: list[int] = []
    for _, _, having in probed:
        probed_checkpoints.extend(having.index)
    rows = _rows_of(results, evaluations.loc[probed_checkpoints])
    scored = []
    for setting, objective, having in having_at_last(evaluations, PASSAGE_NLL):
        labels = {"Model": setting, "Objective": objective}
        scored.append((labels, list(having.index)))
    likelihoods = membership_table(results.scores, scored, footnotes)
    # Footnotes are numbered in the order in which the tables are made, the overview last.
    tables = []
    if probed:
        tables.append(_memorization(results, probed, rows, footnotes))
    tables.append(likelihoods)
    tables += [_scores(results, evaluations, footnotes, name) for name in _TASKS]
    tables.append(_reductions(reductions, baseline, footnotes))
    tables.append(_equal_perplexity(evaluations, baseline))
    if probed:
        tables.append(_spread(results, probed))
        tables.append(_by_passage(results, probed, baseline))
    # With one prefix length, or one checkpoint, these would repeat the first table.
    if (rows.groupby(_KEYS)["prefix"].nunique() > 1).any():
        tables.append(_by_prefix_length(rows))
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
    aucs = {}
    for likelihood in likelihoods.frame.to_dict("records"):
        aucs[likelihood["Model"], likelihood["Objective"]] = likelihood
    costs = {}
    for cost in reductions[reductions["measure"] == PERPLEXITY.label].itertuples():
        costs[cost.setting, cost.objective] = cost
    last_of_setting = {}
    for setting, of_setting in evaluations.groupby("setting", sort=False):
        last_of_setting[setting] = at_last(of_setting, LMS)
    # A row for each objective.
    rows = []
    nums_units = []
    for names, floor in floors.items():
        setting, objective = names
        last = last_of_setting[setting]
        own = last[last["objective"] == objective]
        excess = None
        if floor is not None:
            nums_units.append(floor.excess.num_units)
            excess = words.cell(floor.difference, floor.excess, sign="+")
        price: str | None = "baseline"
        if objective != baseline:
            price = _price(costs.get(names), last)
        rows.append(
            (
                setting,
                objective,
                recited.get(names),
                _shown(results, own.index),
                excess,
                _verbatim(own),
                _auc(aucs.get(names)),
                price,
            )
        )
    columns = (
        "Model",
        "Objective",
        "Recited further",
        "Shown the text",
        "Recited above chance",
        "Verbatim (%)",
        "Membership AUC",
        f"Perplexity against {baseline} (%)",
    )
    frame = pd.DataFrame(rows, columns=columns, dtype=object)
    if frame["Shown the text"].isna().all():  # older results
        frame = frame.drop(columns="Shown the text")
    # What the table means, and its limits.
    caveats = [words.BOUND, *words.few_units(min(nums_units, default=0))]
    if len(rows) > 1 + evaluations["setting"].nunique():
        caveats.append(
            "Verdicts are corrected for the number of comparisons of a model by Holm's method. "
            "Intervals are not: without any difference, one in twenty excludes 0."
        )
    over = "and one seed, which cannot separate an objective from its seed"
    if evaluations.groupby(_KEYS)["run"].nunique().max() > 1:
        over = "not over seeds"
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
    return Table("overview", "What each objective recites", frame, notes)


def _price(cost: Any, last: pd.DataFrame) -> str | None:
    """Write in a cell how much higher the perplexity of an objective is, by its row of reductions;
    None unless it is of the checkpoints that the table shows.
    """
    if cost is None or not last["progress"].isin((cost.progress, 0)).all():
        return None
    return words.cell(-100 * cost.reduction, (-100 * cost.high, -100 * cost.low), 1, "+")


def _verbatim(evaluations: pd.DataFrame) -> str | None:
    """Write the share of verbatim continuations in a cell."""
    totals = unit_totals(evaluations, VERBATIM)
    if totals is None:
        return None
    sums, counts = totals
    if sums.any():
        low, high, *_ = bootstrap_interval(VERBATIM.value, sums, counts)
    else:
        # With none of them, the interval is up to the binomial bound.
        low = 0.0
        high = binomial_upper_bound(0, len(sums))
    share = VERBATIM.value(sums, counts)
    return words.cell(100 * share, (100 * low, 100 * high), 1)


def _auc(likelihood: Mapping[str, Any] | None) -> str | None:
    """Write the AUC of a row of the table of likelihoods in a cell."""
    if likelihood is None:
        return None
    interval = (likelihood.get("AUC from", math.nan), likelihood.get("AUC to", math.nan))
    return words.cell(likelihood["AUC"], interval)


def _tokens_in_words(results: Results, floors: Mapping[tuple[str, str], Floor | None]) -> str:
    """Say in words what the largest LMS above chance is: "; 29.7 tokens are about 22 words"; "" if
    it is not known.
    """
    rates = results.scores.loc[results.scores["metric"] == "words_a_token", "value"]
    known = [floor.difference for floor in floors.values() if floor is not None]
    largest = max(known, default=0.0)
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
    texts = {}
    for setting, objective, having in having_at_last(evaluations, LMS):
        number = 0
        num_targets = 0
        is_known = len(having) > 0
        for checkpoint in having.index:
            recited = recited_of_checkpoint(scores, checkpoint)
            if recited is None:
                is_known = False
                break
            number += recited.number
            num_targets += recited.all.num_targets
        if is_known:
            texts[setting, objective] = f"{number} of {num_targets}"
    return texts


def _by_passage(
    results: Results, probed: Sequence[tuple[str, str, pd.DataFrame]], baseline: str
) -> Table:
    """Show the longest LMS of each target under each objective: which passages leak, before a fix
    and after it. Means over seeds; those that the baseline recites most come first.
    """
    scores = results.scores
    is_single = (scores["metric"] == "lms") & (scores["kind"] == "target") & (scores["count"] == 1)
    single = scores[is_single]
    columns: dict[str, dict[tuple[str, str], float]] = {}
    for setting, objective, having in probed:
        of_objective = single[single["checkpoint"].isin(list(having.index))]
        longest = of_objective.groupby(["checkpoint", "unit"], observed=True)["value"].max()
        means = longest.groupby(level="unit", observed=True).mean()
        for unit, value in means.items():
            columns.setdefault(objective, {})[setting, str(unit)] = float(value)
    frame = pd.DataFrame(columns)
    frame = frame[sorted(frame.columns, key=lambda name: (name == START, name != baseline))]
    copies = _copies_of_targets(scores)
    frame = frame.sort_values([*frame.columns], ascending=False, kind="stable")
    units = [str(unit) for _, unit in frame.index]
    frame.insert(0, "Copies", [copies.get(unit) for unit in units])
    frame.insert(0, "Passage", units)
    frame.insert(0, "Model", [setting for setting, _ in frame.index])
    formats = dict.fromkeys([*columns], ".1f") | {"Copies": ".0f"}
    notes = [
        "The longest run of tokens of each target in a continuation, over all prompts, on average "
        "over seeds, at the last checkpoint that all runs share."
    ]
    table = Table(
        "by_passage", "Recited of each passage", frame.reset_index(drop=True), notes, formats
    )
    return table.without_empty_columns()


def _copies_of_targets(scores: pd.DataFrame) -> dict[str, float]:
    """Return how often each target occurs in the training text of the first run that knows it."""
    rows = scores[(scores["metric"] == "num_injections") & (scores["kind"] == "target")]
    known = rows[rows["value"] > 0].drop_duplicates("unit")
    return dict(zip(known["unit"].astype(str), known["value"], strict=True))


def recited_of_checkpoint(scores: pd.DataFrame, checkpoint: int) -> Recited | None:
    """Count the passages of a checkpoint that are recited further than unseen text; None if that is
    not known.
    """
    rows = scores[(scores["checkpoint"] == checkpoint) & (scores["unit"] != "")]
    # The longest LMS of each passage, over all of its prompts.
    single_lms = rows[(rows["metric"] == "lms") & (rows["count"] == 1)]
    longest = single_lms.groupby(["kind", "unit"], observed=True)["value"].max()
    kinds = set(longest.index.get_level_values("kind"))
    if not {"target", "control"} <= kinds:
        return None
    lms = longest["target"]
    # How often each is in the training text, and with how many tokens its answers were compared;
    # older results do not have the latter.
    of_targets = rows[rows["kind"] == "target"]
    injections = of_targets[of_targets["metric"] == "num_injections"].set_index("unit")["value"]
    compared = of_targets[of_targets["metric"] == "num_compared"]
    lengths = compared.groupby(compared["unit"].astype(str))["value"].max()
    table = pd.DataFrame({"lms": lms, "repeats": injections.reindex(lms.index)})
    table["length"] = lengths.reindex(lms.index.astype(str)).fillna(np.inf).to_numpy()
    return recited_further(table, longest["control"])


def unshown_objectives(results: Results, evaluations: pd.DataFrame) -> set[tuple[str, str]]:
    """Return setting and objective of evaluations in which nothing was shown: what they do not
    recite says nothing.
    """
    unshown = set()
    for setting, objective, having in having_at_last(evaluations, LMS):
        for checkpoint in having.index:
            if positive_control_of(results, checkpoint).problem:
                unshown.add((setting, objective))
    return unshown


def _shown(results: Results, checkpoints: Any) -> str | None:
    """Return what the positive controls of checkpoints read, as "22.1 of 48 tokens"; None if there
    are none.
    """
    texts = []
    was_asked = False
    for checkpoint in checkpoints:
        control = positive_control_of(results, checkpoint)
        was_asked = was_asked or bool(control.answers)
        texts.append(control.text if control.state == "shown" else control.state)
    if not was_asked:
        return None
    return ", ".join(dict.fromkeys(texts))


def _rows_of(results: Results, evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of evaluations, with their columns "setting", "objective", "progress" and
    an "order".
    """
    numbers = evaluations.groupby(_KEYS, sort=False).ngroup()
    named = evaluations.assign(order=numbers)[[*_KEYS, "progress", "order"]]
    scores = results.scores.set_index("checkpoint")
    return named.join(scores, how="inner").reset_index(names="checkpoint")


def _recited(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Average what is recited by setting, objective and more columns."""
    in_order = rows.sort_values(["order", *by], kind="stable")
    averages = average_scores(in_order, [*_KEYS, *by])
    averages["verbatim_percent"] = 100 * averages["verbatim"]
    return averages.reset_index()


def _by_prefix_length(rows: pd.DataFrame) -> Table:
    frame = _recited(rows[rows["prefix"].notna()], "prefix")
    frame["prefix"] = frame["prefix"].map(words.prompt_length)
    columns = (*_WHO, Column("Prefix length", "prefix"), *RECITED, CONTROLS, *NEAR_VERBATIM)
    table = tabulate("by_prefix_length", "Memorization by prefix length", frame, columns)
    return table.without_empty_columns()


def _memorization(
    results: Results, probed: _Groups, rows: pd.DataFrame, footnotes: Footnotes
) -> Table:
    frame = _recited(rows)
    single = rows[rows["unit"] != ""]
    targets = single[single["kind"] == "target"]
    passages = targets.groupby("order")["unit"].nunique()
    frame["Passages"] = passages.reindex(range(len(frame)), fill_value=0).tolist()
    frame["Seeds"] = [len(having) for *_, having in probed]
    caveats = _checkpoint_note(probed) + _prompt_caveats(results, probed, single)
    asked_by = ""
    lengths = sorted(set(single["prefix"].dropna()))
    if lengths:  # condensed records have averages over them
        shown = [str(words.prompt_length(length)) for length in lengths]
        asked_by = f" (prompts of {joined(shown)} tokens)"
        if shown == ["own"]:
            asked_by = " (prompts of their own lengths)"
    notes = [
        f"Means and maxima over passages, prefix lengths and seeds{asked_by}. Prefix match and LMS "
        "are in tokens; Verbatim is the share of continuations that reproduce the rest of the "
        "passage; Control LMS is the average LMS of held-out passages, which is "
        f"chance.{footnotes.mark(*caveats)}"
    ]
    if frame["edit_distance"].notna().any():
        notes.append(words.NEAR_EXPLAINED)
    injections = targets["value"][targets["metric"] == "num_injections"]
    repeats = sorted(set(injections.astype(int)) - {0})
    if repeats:
        times = words.number_of_times(repeats)
        notes.append(f"Each target occurs {times} in the training text.")
    columns = (
        *_WHO,
        *RECITED,
        CONTROLS,
        *NEAR_VERBATIM,
        Column("Passages", "Passages"),
        _SEEDS,
    )
    # Among rows of several checkpoints or prefix lengths, the best would always be the first
    # checkpoint.
    distance, subsequence, *_ = NEAR_VERBATIM
    better: dict[str, Literal["lower", "higher"]] = {}
    for column in (*RECITED, subsequence):
        better[column.header] = "lower"
    better[distance.header] = "higher"
    table = tabulate("memorization", "Memorization", frame, columns, notes, better)
    return table.without_empty_columns()


def _prompt_caveats(results: Results, probed: _Groups, single: pd.DataFrame) -> list[str]:
    """Say of which objectives prompts were sent as text, and how many changed by that."""
    approximate = []
    lost = []
    for setting, objective, having in probed:
        is_approximate = False
        num_lost = 0
        for number in having.index:
            checkpoint = results.checkpoints[number]
            is_approximate = is_approximate or checkpoint.text_prompts
            num_lost += checkpoint.lost_prompts
        if is_approximate:
            approximate.append(f"{setting}, {objective}")
        if num_lost:
            is_asked = single["checkpoint"].isin(having.index) & (single["metric"] == "lms")
            lost.append(f"{num_lost} of {is_asked.sum()} of {setting}, {objective}")
    caveats = []
    if approximate:
        caveats.append(f"{'; '.join(approximate)}: {words.TEXT_PROMPTS}")
    if lost:
        caveats.append(
            f"Prompts changed when converted to text ({'; '.join(lost)}), so the model saw tokens "
            "that differ from training; `tfidf-tune eval` is exact."
        )
    return caveats


def _progress(results: Results, evaluations: pd.DataFrame) -> Table:
    frame = _recited(_rows_of(results, evaluations), "progress")
    columns = [
        *_WHO,
        Column("Progress %", "progress"),
        *RECITED,
        CONTROLS,
        *NEAR_VERBATIM,
    ]
    # The measures of other tasks, over the evaluations of each row.
    by_row = dict(list(evaluations.groupby([*_KEYS, "progress"])))
    keys = frame[[*_KEYS, "progress"]].itertuples(index=False, name=None)
    groups = [by_row[key] for key in keys]
    for measure in COMPARED:
        if measure.kind != "target":
            frame[measure.label] = [value_of(group, measure) for group in groups]
            columns.append(Column(measure.label, measure.label, ".2f"))
    frame["Seeds"] = [len(group) for group in groups]
    columns.append(_SEEDS)
    return tabulate("progress", "Every checkpoint", frame, columns).without_empty_columns()


def _spread(results: Results, probed: _Groups) -> Table:
    scores = results.scores
    is_of_target = (scores["kind"] == "target") & (scores["unit"] != "")
    lms = scores[is_of_target & (scores["metric"] == "lms")]
    rows = []
    for setting, objective, having in probed:
        low = math.nan
        high = math.nan
        totals = unit_totals(having, LMS)
        if totals is not None:
            low, high, *_ = bootstrap_interval(LMS.value, *totals)
        seeds = [value_of(having.loc[[number]], LMS) for number in having.index]
        rows_of_objective = lms[lms["checkpoint"].isin(having.index)]
        values = rows_of_objective["value"]
        if not (rows_of_objective["count"] == 1).all():
            values = values.iloc[:0]  # means have no quantiles
        rows.append(
            {
                "Model": setting,
                "Objective": objective,
                LMS.label: value_of(having, LMS),
                "From": low,
                "To": high,
                "Median": values.quantile(0.5),
                "90th percentile": values.quantile(0.9),
                "Max": values.max(),
                "Lowest seed": min(seeds),
                "Highest seed": max(seeds),
                "Seeds": len(seeds),
            }
        )
    formats = {
        LMS.label: ".2f",
        "From": ".2f",
        "To": ".2f",
        "Median": ".1f",
        "90th percentile": ".1f",
        "Lowest seed": ".2f",
        "Highest seed": ".2f",
    }
    frame = pd.DataFrame(rows)
    notes = [
        "From and To: 95 % interval of the average, from resampling passages. Median and "
        "percentile are over passages, prefix lengths and seeds."
    ]
    if (frame["Seeds"] > 1).any():
        notes.append("Lowest and highest seed: the average LMS of a single run.")
    else:
        frame = frame.drop(columns=["Lowest seed", "Highest seed", "Seeds"])
    return Table("lms_spread", "How the LMS varies", frame, notes, formats)


def _scores(results: Results, evaluations: pd.DataFrame, footnotes: Footnotes, name: str) -> Table:
    task = _TASKS[name]
    headers = list(task.measures)
    first = task.measures[headers[0]]
    groups = list(having_at_last(evaluations, first))
    rows = []
    caveats = _checkpoint_note(groups)
    for setting, objective, having in groups:
        _, counts = having[first.label].iloc[0]
        row: dict[str, Any] = {"Model": setting, "Objective": objective}
        for header, measure in task.measures.items():
            row[header] = value_of(having, measure)
        row[task.units] = len(counts)
        row["Seeds"] = len(having)
        rows.append(row)
        caveats += _score_caveats(results, f"{setting}, {objective}", having.index, first)
    frame = pd.DataFrame(rows, columns=["Model", "Objective", *headers, task.units, "Seeds"])
    notes = []
    if rows:
        notes.append(f"{task.note}{footnotes.mark(*caveats)}")
    end: Literal["lower", "higher"] = "lower" if first.exponential else "higher"
    better = dict.fromkeys(headers, end)
    return Table(name, task.title, frame, notes, dict.fromkeys(headers, ".2f"), better)


def _score_caveats(
    results: Results, name: str, numbers: Sequence[int], measure: Measure
) -> list[str]:
    """Say what is missing of a measure of checkpoints: blocks that changed, and BERTScores."""
    checkpoints = [results.checkpoints[number] for number in numbers]
    scores = results.scores[results.scores["checkpoint"].isin(numbers)]
    caveats = []
    num_lost = sum(checkpoint.lost_blocks for checkpoint in checkpoints)
    if measure == PERPLEXITY and num_lost:
        num_blocks = (scores["kind"] == "block").sum()
        caveats.append(
            f"{name}: {num_lost} of {num_blocks} blocks changed when converted to text, so "
            "different tokens were predicted."
        )
    summaries = scores["value"][scores["metric"] == "bertscore_f1"]
    num_missing = int(summaries.isna().sum())
    if measure.kind == "article" and num_missing:
        reasons: dict[str, None] = {}
        for checkpoint in checkpoints:
            for reason in checkpoint.bertscore_missing:
                reasons[reason.rstrip(".")] = None
        caveats.append(
            f"{name}: BERTScore-F1 is missing for {num_missing} of {len(summaries)} summaries: "
            f"{'; '.join(reasons)}."
        )
    return caveats


def _checkpoint_note(groups: _Groups) -> list[str]:
    """Say where the last checkpoint is not the end of training."""
    last = {}
    for setting, objective, having in groups:
        if objective != START:
            last[setting] = having["progress"].iloc[0]
    early = [f"{setting} at {progress} %" for setting, progress in last.items() if progress < 100]
    if not early:
        return []
    return [
        "Not the end of training, but the last checkpoint that all runs of the model share: "
        f"{', '.join(early)}."
    ]


def _reductions(reductions: pd.DataFrame, baseline: str, footnotes: Footnotes) -> Table:
    frame = reductions.copy()
    for name in ("reduction", "low", "high"):
        frame[name] = 100 * reductions[name]
    columns = (
        *_WHO,
        Column("Measure", "measure"),
        Column(baseline, "baseline", ".2f"),
        Column("Value", "other", ".2f"),
        Column("Reduction %", "reduction", ".1f"),
        Column("From %", "low", ".1f"),
        Column("To %", "high", ".1f"),
        Column("p (Holm)", "p_value", ".4f"),
        Column("Significant", "significant"),
        Column("Progress %", "progress"),
    )
    caveats = []
    for num_units in reductions["num_units"].unique():
        caveats += words.few_units(num_units)
    notes = [
        f"Reduction: ({baseline} - value) / {baseline}; negative where the objective is higher, "
        "which is better for summaries and answers. From and To: 95 % percentile-bootstrap "
        f"interval of {NUM_RESAMPLES:,} resamples, paired between the objectives: by passage (its "
        "prefix lengths and seeds stay together), by block for perplexity, by article and by "
        "question. p (Holm): two-sided, from the same resamples, corrected for the number of "
        "comparisons of the model by Holm's method. Significant: the interval excludes 0 and p is "
        f"below 0.05. With fewer than {MIN_UNITS} units there is no "
        f"verdict.{footnotes.mark(*caveats)}"
    ]
    without_interval = reductions[reductions["low"].isna()]
    notes += [
        f"{row.setting}, {row.objective}, {row.measure}: no interval, {words.why_no_interval(row)}."
        for row in without_interval.itertuples()
    ]
    title = f"Relative reductions against {baseline}"
    return tabulate("reductions", title, frame, columns, notes)


def _equal_perplexity(evaluations: pd.DataFrame, baseline: str) -> Table:
    frame = compare_at_equal_perplexity(evaluations, baseline)
    notes = []
    if frame["before"].notna().any():
        notes.append(
            f"{baseline} first had the objective's perplexity between these checkpoints. LMS "
            "before and after: its average LMS at them; Interpolated: linearly in log perplexity "
            "between the two. Perplexity and Avg LMS: the objective's, at Progress %. Recites: "
            "less than at both, more, or between them, without an interval."
        )
    if frame["floor_bound"].notna().any():
        notes.append(
            "Not above controls: neither LMS can be told from theirs; the bounds are the upper "
            "ends of the intervals of the differences."
        )
    spans: list[str | None] = []
    for row in frame.itertuples():
        if math.isnan(row.before):
            ends = words.span(row.lowest, row.highest, decimals=2)
            notes.append(
                f"{row.setting}: {baseline} has no two checkpoints between which its perplexity "
                f"passes the {row.perplexity:.2f} of {row.objective} (it has {ends}), so that they "
                "cannot be compared at equal perplexity."
            )
            spans.append(None)
        else:
            spans.append(words.span(row.before, row.after, decimals=0))
    frame["span"] = spans
    columns = (
        *_WHO,
        Column("Perplexity", "perplexity", ".2f"),
        Column(f"{baseline} at %", "span"),
        Column(f"{baseline} LMS before", "lms_before", ".2f"),
        Column(f"{baseline} LMS after", "lms_after", ".2f"),
        Column("Interpolated", "interpolated", ".2f"),
        Column(LMS.label, "lms", ".2f"),
        Column("Recites", "recited"),
        Column("Bound", "floor_bound", ".2f"),
        Column(f"{baseline} bound", "baseline_floor_bound", ".2f"),
        Column("Progress %", "progress"),
    )
    title = f"At equal perplexity, against {baseline}"
    table = tabulate("equal_perplexity", title, frame, columns, notes)
    return table.without_empty_columns()
