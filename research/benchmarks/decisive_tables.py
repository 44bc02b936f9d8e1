"""Tables and the figure of the registered experiment, from its records.

An arm stands in a table with the runs of its lowest perplexity, of each seed the best learning
rate. Values are means over seeds, with Student's t-interval at 95 %.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from measuring import markdown_table
from omegaconf import OmegaConf

from research.decisive.afterwards import MOST_STEPS, read_answers
from research.decisive.analysis import (
    LAST_CHECKPOINT,
    LEAST_COPIES,
    OFTEN,
    Choice,
    Record,
    above_chance,
    at_equal_perplexity,
    contrast,
    cost,
    curve,
    difference,
    differs,
    is_exact,
    lowest_near_chance,
    recited_at,
    registered,
    stopped_early,
)
from research.decisive.records import read_records
from research.files import read_json_lines
from research.seeds import SeedEstimate, over_seeds
from tfidf_tune.probe.membership_scores import extraction_probability, roc_auc
from tfidf_tune.probe.run_identity import MILESTONE
from tfidf_tune.results import wording

REGISTRATION: Any = OmegaConf.to_container(
    OmegaConf.load(Path(__file__).parents[1] / "decisive.yaml")
)
SMALL = REGISTRATION["primary"]["model"]
NATURAL = "Llama 0.65M, natural text"
_LARGER = ("Llama 10M", "SmolLM2-135M (LoRA)")
_BASELINE = "CE"
_OPPONENT = REGISTRATION["primary"]["theirs"]
_COPIES = (1, 4, 16, 64)
_CHANGES = ("replaced 5 %", "replaced 10 %", "replaced 20 %", "inserted 10 %", "dropped 10 %")
_SAMPLES = (1, 100, 10_000)
_EARLY_RATE = 4.0e-3  # of the runs that are evaluated five times
_MACHINE = ("date", "cpu", "torch", "torchtune", "transformers", "lm_eval", "tfidf-tune")
# The arms of the figure, and the labels of its axis of perplexity.
_COLORS = {
    "CE": "#000000",
    "CE MinHash": "#56B4E9",
    "CE MinHash best": "#0072B2",
    "Goldfish k=3": "#F0E442",
    "Goldfish k=4": "#E69F00",
    "TF-IDF": "#CC79A7",
    "Repetition": "#D55E00",
    "Repetition, slow": "#8B4513",
    "Repetition, 1 exposure": "0.6",
    "Repetition, 2 exposures": "#44AA99",
    "Repetition, 4 exposures": "#882255",
    "Repetition, MinHash best": "#009E73",
}
_MARKERS = "osDv^PXhp<*d"
# The arms of README's table: what they do, and the overrides of a config.
_METHODS = {
    "CE": ("plain cross-entropy", "loss=ce"),
    "CE MinHash": (
        "near copies removed before training",
        "loss=ce dataset.deduplicate=minhash",
    ),
    "CE MinHash best": (
        "documents that are alike removed, too",
        "loss=ce 'dataset.deduplicate={threshold: 0.11, ngram: 2}'",
    ),
    "Repetition, 1 exposure": (
        "repeated passages count less, from the second copy on",
        "loss=repetition",
    ),
    "Repetition, 4 exposures": (
        "the same, from the fifth copy on",
        "loss=repetition loss.weighting.exposures=4",
    ),
    "Repetition": (
        "the same, from the 17th copy on",
        "loss=repetition loss.weighting.exposures=16",
    ),
    "Goldfish k=4": (
        "Goldfish loss (Hans et al. 2024): drops one token in four",
        "loss=goldfish",
    ),
    "TF-IDF": ("TF-IDF weights, the method of the paper, raw counts", "loss=tfidf"),
}
_TICKS = (15, 16, 18, 20, 25)

Runs = Sequence[Record]
Cell = Callable[[Runs], str]  # the runs of an arm -> what stands in a column


def _number(value: float, decimals: int) -> str:
    return wording.cell(value, (math.nan, math.nan), decimals) or ""


def _text(estimate: SeedEstimate, decimals: int = 1) -> str:
    """Write a mean and its interval: "1.3 (0.9 to 1.7)"."""
    return wording.cell(estimate.mean, (estimate.low, estimate.high), decimals) or ""


def _changed(estimate: SeedEstimate, change: Callable[[float], float]) -> SeedEstimate:
    """Apply a monotonic function to a mean and the ends of its interval."""
    return estimate._replace(
        mean=change(estimate.mean), low=change(estimate.low), high=change(estimate.high)
    )


def _in_percent(ratio: SeedEstimate) -> SeedEstimate:
    """Turn the logarithm of a ratio into by how many percent it is above 1."""
    return _changed(ratio, lambda logarithm: 100 * math.expm1(logarithm))


def _mean(value: Callable[[Record], float], decimals: int) -> Cell:
    """Return a column of means over runs."""
    return lambda runs: _number(fmean(map(value, runs)), decimals)


def _interval(value: Callable[[Record], float], decimals: int = 1) -> Cell:
    """Return a column of means over runs, with intervals."""
    return lambda runs: _text(over_seeds([*map(value, runs)]), decimals)


def _recited(choice: Choice) -> Cell:
    """Return a column of what is recited above chance, with intervals."""
    return _interval(lambda run: above_chance(run, choice))


def _with_copies(number: int, *, exact: bool) -> Choice:
    """Choose the targets with so many copies."""
    return lambda target: target["copies"] == number and (target["change"] == "exact") == exact


def _with_change(change: str) -> Choice:
    return lambda target: target["copies"] >= LEAST_COPIES and target["change"] == change


_OFTEN_EXACT = _with_copies(64, exact=True)
_CHOICES = {"differ": ("copies that differ", differs), "exact": ("exact copies", is_exact)}
_facts_known = _mean(lambda run: 100 * run["facts_known"], 0)
_FACTS = {
    "facts known (%)": _facts_known,
    "of strangers": _mean(lambda run: 100 * run["facts_of_strangers"], 0),
    "margin (nats)": _interval(lambda run: run["facts_margin"], 2),
}
_PERPLEXITY = _interval(lambda run: run["perplexity"], 2)
_mean_perplexity = _mean(lambda run: run["perplexity"], 1)
_frame_perplexity = _mean(lambda run: run["frame_perplexity"], 1)
_WITHOUT_MODEL = _mean(lambda run: run["auc_without_model"][0], 2)
_RECITED = {
    "recited above chance, copies that differ": _recited(differs),
    "exact copies": _recited(is_exact),
}


@cache
def _read(file: Path) -> list[dict[str, Any]]:
    """Read the records once for all tables."""
    return read_records(file)


def _records(file: Path, model: str) -> list[dict[str, Any]]:
    """Read the records of a model at the end of training."""
    return [
        record
        for record in _read(file)
        if record["model"] == model and record["checkpoint"] == LAST_CHECKPOINT
    ]


def _arms(records: Iterable[Record]) -> list[str]:
    """Return the arms in the order of their records, the baseline first."""
    arms = dict.fromkeys([_BASELINE])
    arms |= dict.fromkeys(record["objective"] for record in records)
    return list(arms)


def _best_runs(records: Iterable[Record], arm: str) -> Runs:
    """Return of each seed the run of the arm with the lowest perplexity."""
    best: dict[int, Record] = {}
    own = [record for record in records if record["objective"] == arm]
    for record in sorted(own, key=lambda record: record["perplexity"], reverse=True):
        best[record["seed"]] = record
    return [best[seed] for seed in sorted(best)]


def _by_arm(records: Sequence[Record], columns: Mapping[str, Cell]) -> str:
    """Lay out a row for each arm, of its best runs."""
    best = {arm: _best_runs(records, arm) for arm in _arms(records)}
    return _by_group("arm", best, columns)


def _by_group(header: str, groups: Mapping[str, Runs], columns: Mapping[str, Cell]) -> str:
    """Lay out a row for each group of runs."""
    rows = []
    for name, runs in groups.items():
        rows.append([name, *(cell(runs) for cell in columns.values())])
    return markdown_table([header, *columns], rows)


def contrasts(file: Path) -> str:
    """Lay out the registered contrasts, the primary one first."""
    records = _records(file, SMALL)
    found = registered(records, REGISTRATION)
    primary = REGISTRATION["primary"] | {"what": "differ"}
    rows = []
    for comparison, estimate in [(primary, found["primary"]), *found["secondary"]]:
        arms = (comparison["ours"], comparison["theirs"])
        row = [f"{arms[0]} against {arms[1]}"]
        if comparison["what"] == "facts":
            estimate = _changed(estimate, lambda share: 100 * share)
            shares = [_facts_known(_best_runs(records, arm)) for arm in arms]
            row += ["right answers (%)", *shares, _text(estimate, 0), ""]
        else:
            kind, choice = _CHOICES[comparison["what"]]
            pairs = at_equal_perplexity(records, *arms, choice)
            of_ours = _number(fmean(pair.ours for pair in pairs), 1)
            of_theirs = _number(fmean(pair.theirs for pair in pairs), 1)
            num_beyond = sum(pair.is_beyond for pair in pairs)
            row += [kind, of_ours, of_theirs, _text(estimate), str(num_beyond)]
        row.append(f"{estimate.p_value:.3f}" if estimate.p_value >= 0.001 else "< 0.001")
        rows.append(row)
    header = ["arms", "what", "of the first", "of the second", "difference", "seeds beyond", "p"]
    return markdown_table(header, rows)


def not_worse(file: Path) -> str:
    """Lay out how the lowest perplexities differ, and whether they are within the margin."""
    rule = REGISTRATION["non_inferiority"]
    found = registered(_records(file, SMALL), REGISTRATION)
    rows = []
    for other, (estimate, is_below) in found["non_inferiority"].items():
        shown = _text(_in_percent(estimate))
        verdict = "not worse" if is_below else "not shown"
        rows.append([f"{rule['ours']} against {other}", shown, verdict])
    header = ["arms", "perplexity of the first, above (%)", f"within {rule['margin']:.0%}"]
    return markdown_table(header, rows)


def arms(file: Path) -> str:
    """Lay out all arms of the small model."""
    columns = {
        "perplexity": _PERPLEXITY,
        "at the rate": _rates,
        "of the frame": _frame_perplexity,
        **_RECITED,
        "64 exact copies": _recited(_OFTEN_EXACT),
    }
    return _by_arm(_records(file, SMALL), columns)


def methods(file: Path) -> str:
    """Lay out the main arms on documentation and on e-mail, with how to use them."""
    documentation = _records(file, SMALL)
    mail = _records(file, NATURAL)
    rows = []
    for arm, (method, overrides) in _METHODS.items():
        runs = _best_runs(documentation, arm)
        of_mail = _best_runs(mail, arm)
        row = [method, f"`{overrides}`", _mean_perplexity(runs), _frame_perplexity(runs)]
        row += [_recited(_OFTEN_EXACT)(runs), _recited(_with_copies(64, exact=False))(runs)]
        row += [_mean_perplexity(of_mail), _lms(_is_often)(of_mail)]
        rows.append(row)
    header = ["Method", "Use", "Perplexity", "of a frame", "Recited, 64 exact copies"]
    unseen = _number(fmean(map(_lms_of_controls, _best_runs(mail, _BASELINE))), 1)
    header += ["64 copies that differ", "Perplexity of e-mail", f"Recited (unseen: {unseen})"]
    return markdown_table(header, rows)


def _rates(runs: Runs) -> str:
    """Name the learning rates of the runs."""
    return ", ".join(f"{rate:g}" for rate in sorted({run["learning_rate"] for run in runs}))


def larger(file: Path) -> str:
    """Lay out the arms of the larger models."""
    columns = {
        "perplexity": _PERPLEXITY,
        "of the frame": _frame_perplexity,
        **_FACTS,
        **_RECITED,
        "64 exact copies": _recited(_OFTEN_EXACT),
        "AUC of the loss, 16 copies or more": _auc_of_loss(_is_often),
    }
    best = {}
    for model in _LARGER:
        records = _records(file, model)
        for arm in _arms(records):
            best[f"{model}: {arm}"] = _best_runs(records, arm)
    return _by_group("model: arm", best, columns)


def larger_contrasts(file: Path) -> str:
    """Lay out how the arms of the larger models differ from the baseline and from the opponent of
    the primary contrast, at their one learning rate.
    """
    rows = []
    for model in _LARGER:
        records = _records(file, model)
        for theirs in (_OPPONENT, _BASELINE):
            for ours in _arms(records):
                if ours not in (_BASELINE, theirs):
                    pair = f"{ours} against {theirs}"
                    rows.append([model, pair, *_differences(records, ours, theirs)])
    recited = ["copies that differ", "exact copies"]
    header = ["model", "arms", *recited, "perplexity above (%)", "margin of facts (nats)"]
    return markdown_table(header, rows)


def _differences(records: Runs, ours: str, theirs: str) -> list[str]:
    """Return the cells of what an arm recites more than another, of its perplexity above, and of
    how much better it knows facts.
    """
    recited = [contrast(records, ours, theirs, choice) for choice in (differs, is_exact)]
    perplexity = _in_percent(cost(records, ours, theirs))
    margin = difference(records, ours, theirs, "facts_margin")
    return [*map(_text, recited), _text(perplexity), _text(margin, 2)]


def counts(file: Path) -> str:
    """Lay out what MinHash removes, and what texts have in common."""
    columns = {
        "documents": _range(lambda one: [one["documents"]]),
        "removed by MinHash": _range(lambda one: [one["removed"]["usual"]]),
        "at its best threshold": _range(lambda one: [one["removed"]["best"]]),
        "targets shared with another seed": _range(lambda one: one["shared_targets"]),
        "held-out documents with a target (%)": _range(
            lambda one: [100 * one["held_out_with_targets"] / one["held_out"]]
        ),
        "held-out words in training (%)": _range(lambda one: [100 * one["words_of_training"]]),
    }
    texts: dict[str, list[Record]] = {}
    for record in read_json_lines(file):
        texts.setdefault(record["text"], []).append(record)
    return _by_group("text", texts, columns)


def _range(values_of: Callable[[Record], list[float]]) -> Cell:
    """Return a column of the least and the greatest value over seeds: "8 to 10"."""

    def cell(runs: Runs) -> str:
        values = [*chain.from_iterable(map(values_of, runs))]
        ends = [f"{end:,.0f}" for end in (min(values), max(values))]
        return " to ".join(dict.fromkeys(ends))

    return cell


def utility(file: Path) -> str:
    """Lay out what arms recite at the baseline's lowest perplexity, and the perplexity at which
    they recite by chance.
    """
    records = _records(file, SMALL)
    rows = []
    for arm in _arms(records):
        row = [arm]
        row += [_at_baseline(records, arm, choice) for choice in (differs, is_exact)]
        row += [_near_chance(records, arm, choice) for choice in (differs, is_exact)]
        rows.append(row)
    header = ["arm", "at CE's perplexity: copies that differ", "exact copies"]
    header += ["perplexity near chance: copies that differ", "exact copies"]
    return markdown_table(header, rows)


def _at_baseline(records: Sequence[Record], arm: str, choice: Choice) -> str:
    recited = []
    for seed in _seeds(records):
        reached = curve(records, _BASELINE, seed, choice)[-1].perplexity
        points = curve(records, arm, seed, choice)
        is_reached = points[-1].perplexity <= reached
        recited.append(recited_at(points, reached) if is_reached else None)
    return _where_reached(recited)


def _near_chance(records: Sequence[Record], arm: str, choice: Choice) -> str:
    curves = [curve(records, arm, seed, choice) for seed in _seeds(records)]
    return _where_reached([lowest_near_chance(points) for points in curves])


def _seeds(records: Sequence[Record]) -> list[int]:
    return sorted({record["seed"] for record in records})


def _where_reached(values: Sequence[float | None]) -> str:
    """Write the mean over seeds; if some have no value, only over the others, with their number."""
    reached = [value for value in values if value is not None]
    if not reached:
        return "not reached"
    text = _text(over_seeds(reached))
    return text if len(reached) == len(values) else f"{text}, {len(reached)} of {len(values)} seeds"


def copies(file: Path) -> str:
    """Lay out what is recited above chance by the number of copies."""
    columns = {}
    for kind, exact in (("exact", True), ("differ", False)):
        for number in _COPIES:
            columns[f"{kind}, {number}"] = _recited(_with_copies(number, exact=exact))
    return _by_arm(_records(file, SMALL), columns)


def changes(file: Path) -> str:
    """Lay out what is recited above chance by how copies differ, of 4 copies or more."""
    columns = {change: _recited(_with_change(change)) for change in _CHANGES}
    return _by_arm(_records(file, SMALL), columns)


def detection(file: Path) -> str:
    """Lay out how well the loss tells targets from controls, by their copies."""
    columns = {}
    for kind, exact in (("exact", True), ("differ", False)):
        for number in _COPIES:
            columns[f"AUC {kind}, {number}"] = _auc_of_loss(_with_copies(number, exact=exact))
    columns["without the model"] = _WITHOUT_MODEL
    return _by_arm(_records(file, SMALL), columns)


def _auc_of_loss(choice: Choice) -> Cell:
    """Return a column of the probability that a target has a lower loss than a control."""

    def auc(run: Record) -> float:
        targets = [target["nll"] for target in run["targets"] if choice(target)]
        controls = [control["nll"] for control in run["controls"]]
        return roc_auc(-np.array(targets), -np.array(controls))

    return _mean(auc, 2)


def membership(file: Path) -> str:
    """Lay out attacks of all targets against all controls, and near-verbatim answers."""
    records = _records(file, SMALL)
    columns = {}
    for attack in records[0]["auc"]:
        columns[f"AUC {attack.replace('_', ' ')}"] = _auc(attack)
    columns["without the model"] = _WITHOUT_MODEL
    columns["verbatim, 64 exact copies (%)"] = _mean(_verbatim, 0)
    columns["edit distance"] = _mean(_edit_distance, 2)
    columns["of controls"] = _mean(_edit_distance_of_controls, 2)
    return _by_arm(records, columns)


def _auc(attack: str) -> Cell:
    return _mean(lambda run: run["auc"][attack], 2)


def _verbatim(run: Record) -> float:
    return 100 * fmean(target["verbatim"] for target in run["targets"] if _OFTEN_EXACT(target))


def _edit_distance(run: Record) -> float:
    """Of the targets with several copies."""
    several = [target for target in run["targets"] if target["copies"] >= LEAST_COPIES]
    return fmean(target["edit_distance"] for target in several)


def _edit_distance_of_controls(run: Record) -> float:
    return fmean(control["edit_distance"] for control in run["controls"])


def early(file: Path) -> str:
    """Lay out plain cross-entropy that is stopped early, by two rules, and at its end."""
    of_runs: dict[int, list[Record]] = {}
    for record in _read(file):
        is_early = record["objective"] == _BASELINE and record["learning_rate"] == _EARLY_RATE
        if is_early and record["model"] == SMALL:
            of_runs.setdefault(record["seed"], []).append(record)
    limit = REGISTRATION["early_stopping"]["most_ngrams"]
    kept: dict[str, list[Record]] = {"n-gram score": [], "held-out loss": [], "end of training": []}
    for checkpoints in of_runs.values():
        checkpoints.sort(key=_percent)
        kept["n-gram score"].append(stopped_early(checkpoints, limit))
        kept["held-out loss"].append(min(checkpoints, key=lambda record: record["perplexity"]))
        kept["end of training"].append(checkpoints[-1])
    columns = {"at (%)": _mean(_percent, 0), "perplexity": _PERPLEXITY, **_RECITED}
    return _by_group("stopped by", kept, columns)


def _percent(record: Record) -> float:
    """Return how far training was: 20 of "checkpoint_20pct"."""
    milestone: Any = MILESTONE.fullmatch(record["checkpoint"])
    return float(milestone[1])


def afterwards(file: Path) -> str:
    """Lay out extraction by sampling, and relearning, of targets with 16 copies or more."""
    columns = {}
    for number in _SAMPLES:
        columns[f"extracted by {number:,} samples (%)"] = _extracted(number, _is_often)
    columns["controls"] = _extracted(_SAMPLES[-1], _is_control)
    columns["steps until recited, exact copies"] = _steps(_is_often_exact)
    columns["copies that differ"] = _steps(_is_often_changed)
    columns["of controls"] = _steps(_is_control)
    columns |= _FACTS
    by_arm: dict[str, list[Record]] = {}
    for record in read_answers(file):
        by_arm.setdefault(record["objective"], []).append(record)
    return _by_group("arm", by_arm, columns)


def _is_often(passage: Mapping[str, Any]) -> bool:
    return bool(passage["copies"] >= OFTEN)


def _is_often_exact(passage: Mapping[str, Any]) -> bool:
    return _is_often(passage) and is_exact(passage)


def _is_often_changed(passage: Mapping[str, Any]) -> bool:
    return _is_often(passage) and differs(passage)


def _is_control(passage: Mapping[str, Any]) -> bool:
    return bool(passage["copies"] == 0)


def _extracted(num_samples: int, choice: Choice) -> Cell:
    """Return a column of the percentage of passages whose continuation is among so many samples
    with a probability of a half or more.
    """

    def share(answers: Record) -> float:
        nll = [passage["nll"] for passage in answers["passages"] if choice(passage)]
        return 100 * float((extraction_probability(nll, num_samples) >= 0.5).mean())

    return _mean(share, 1)


def _steps(choice: Choice) -> Cell:
    """Return a column of the steps until passages are recited; a passage that is not counts as the
    most steps that were tried.
    """

    def mean_steps(answers: Record) -> float:
        steps = []
        for passage in answers["passages"]:
            if choice(passage):
                number = passage["steps"]
                steps.append(MOST_STEPS if number is None else number)
        return fmean(steps)

    return _interval(mean_steps)


def natural(file: Path) -> str:
    """Lay out the arms on natural text: what is recited (LMS) of the same stretches by each arm."""
    columns = {
        "perplexity of e-mail": _PERPLEXITY,
        "of country profiles": _interval(lambda run: run["frame_perplexity"], 2),
        "recited, 2 or 3 times": _lms(lambda target: 2 <= target["copies"] < 4),
        "4 to 15": _lms(lambda target: 4 <= target["copies"] < 16),
        "16 or more": _lms(_is_often),
        "controls": _interval(_lms_of_controls),
        "AUC of the loss": _auc("loss"),
        "without the model": _WITHOUT_MODEL,
    }
    return _by_arm(_records(file, NATURAL), columns)


def _lms_of_controls(run: Record) -> float:
    return fmean(control["lms"] for control in run["controls"])


def _lms(choice: Choice) -> Cell:
    """Return a column of what is recited of some targets, with intervals."""
    return _interval(lambda run: fmean(one["lms"] for one in run["targets"] if choice(one)))


def development(file: Path) -> str:
    """Lay out the arms on development text: one seed."""
    columns = {
        "perplexity": _PERPLEXITY,
        "at the rate": _rates,
        "of the frame": _frame_perplexity,
        "facts known (%)": _facts_known,
        **_RECITED,
        "64 exact copies": _recited(_OFTEN_EXACT),
        "AUC of the loss": _auc("loss"),
        "without the model": _WITHOUT_MODEL,
    }
    return _by_arm(_read(file), columns)


def machine(file: Path) -> str:
    """Lay out what the records were made with, and how long training took."""
    by_model: dict[str, list[Record]] = {}
    for record in _read(file):
        if record["checkpoint"] == LAST_CHECKPOINT:
            by_model.setdefault(record["model"], []).append(record)
    rows = []
    for model, records in by_model.items():
        hours = sum(record["seconds"] for record in records) / 3600
        values = [_values(records, name) for name in _MACHINE]
        rows.append([model, str(len(records)), f"{hours:.1f}", *values])
    return markdown_table(["model", "runs", "hours of training, of a core", *_MACHINE], rows)


def _values(records: Runs, name: str) -> str:
    return ", ".join(sorted({record["provenance"][name] for record in records}))


def draw_curves(file: Path, drawing: Path) -> None:
    """Draw what the main arms recite at each learning rate, against their perplexity."""
    records = _records(file, SMALL)
    figure = Figure(figsize=(8.4, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, title, choice in zip(
        panels, ("Copies that differ", "Exact copies"), (differs, is_exact), strict=True
    ):
        axes.set_title(title, loc="left", fontsize="medium")
        axes.axhline(0, color="0.4", linestyle="--", label="never seen: chance")
        for arm, marker in zip(_COLORS, _MARKERS, strict=True):
            _draw_arm(axes, records, arm, choice, marker)
        axes.set(xscale="log", xlabel="perplexity of unseen text")
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.minorticks_off()
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("tokens recited above chance (LMS)")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.savefig(drawing, metadata={"Date": None})


def _draw_arm(axes: Any, records: Runs, arm: str, choice: Choice, marker: str) -> None:
    """Draw the means over seeds at each learning rate, with intervals of what is recited."""
    by_rate: dict[float, list[Record]] = {}
    for record in records:
        if record["objective"] == arm:
            by_rate.setdefault(record["learning_rate"], []).append(record)
    perplexities = []
    recited = []
    for rate in sorted(by_rate):
        perplexities.append(fmean(run["perplexity"] for run in by_rate[rate]))
        recited.append(over_seeds([above_chance(run, choice) for run in by_rate[rate]]))
    means = [estimate.mean for estimate in recited]
    below = [estimate.mean - estimate.low for estimate in recited]
    above = [estimate.high - estimate.mean for estimate in recited]
    axes.errorbar(
        perplexities,
        means,
        yerr=[below, above],
        color=_COLORS[arm],
        marker=marker,
        markersize=5,
        label=arm,
    )
