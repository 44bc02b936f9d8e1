"""One model without a comparison: does it recite its training text more than text it never saw?"""

import textwrap
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tfidf_tune.analysis.comparison import Floor, floor_of
from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, NUM_RESAMPLES
from tfidf_tune.report._document import Example, Figure, Report, Table, tabulate
from tfidf_tune.report._examples import checkpoint_decoder, continuation_of
from tfidf_tune.report._figures import lms_distribution
from tfidf_tune.report._membership import membership_table
from tfidf_tune.report._verdict import floor_text
from tfidf_tune.report._wording import (
    BOUND,
    FEW_UNITS,
    LMS_EXPLAINED,
    NEAR_EXPLAINED,
    TEXT_PROMPTS,
    Footnotes,
    interval_text,
    prompt_length,
    span,
)
from tfidf_tune.results import Checkpoint, Results

if TYPE_CHECKING:
    import pandas as pd

_NUM_EXAMPLES = 3
_NUM_MOST_RECITED = 20
_PROMPT_WIDTH = 70
_REPEATS, _VERBATIM = "Times in the training text", "Targets verbatim (%)"
_NEAR = ("Edit distance", "Common subsequence")
_EASY_CONTROLS = "The controls are easier text than the targets: choose controls that resemble the training text."
_BASE_MODEL = (
    "The base model may already have memorized a passage that many texts share (a license, a quotation): audit the "
    "base model with the same probe file."
)
_KINDS = {"target": "targets (training text)", "control": "controls (never seen)"}


def audit_report(results: Results) -> Report:
    """Report what the last evaluated checkpoint of a run recites of the targets, compared with the controls.

    Args:
        results (Results): of one run, with the samples of the memorization task.

    Raises:
        ValueError: If no checkpoint has a sample of a target.
    """
    probed = [
        (at, one)
        for at, one in enumerate(results.checkpoints)
        if any(sample.kind == "target" for sample, _ in one.samples)
    ]
    if not probed:
        one = results.checkpoints[0]
        raise ValueError(
            f"the results of {one.model} in {one.folder} have no memorization sample of a target: evaluate the task "
            "tfidf_memorization with a probe file"
        )
    at, checkpoint = probed[-1]
    samples = _sample_table(results, at)
    name, notes = _name(checkpoint), Footnotes()
    verdict, statements = _verdict(samples, name, notes), _statements(samples, checkpoint, notes)
    likelihoods, detectable = membership_table(results.scores, [({"Model": name}, [at])], notes)
    for (model,), auc in detectable.items():
        verdict += f" Membership stays detectable: {model} ({auc})."
    tables = (
        _targets_and_controls(samples, checkpoint, notes),
        likelihoods,
        _by_prefix_length(samples, notes),
        _by_repeats(samples),
        _most_recited(samples),
    )
    lms = {kind: samples.loc[samples["kind"] == kind, "lms"].tolist() for kind in _KINDS}
    distribution = Figure(
        name="lms_distribution",
        title="Distribution of the longest memorized substring",
        figure=lms_distribution({checkpoint.model: lms}),
        caption="Share of continuations that recite at least so many tokens in a row"
        + (": targets solid, controls dashed." if lms["control"] else "."),
    )
    return Report(
        title=f"What {name} recites",
        verdict=verdict,
        statements=statements,
        tables=[table for table in tables if len(table.frame)],
        figures=[distribution],
        examples=_examples(checkpoint, samples),
        provenance=_provenance(checkpoint, samples),
        lead=_lead(checkpoint, has_controls=bool(lms["control"])),
        footnotes=notes.texts,
    )


def _name(checkpoint: Checkpoint) -> str:
    """Name the run by the end of its folder's path, or the model by that of its own, a hub id as it is."""
    path = Path(checkpoint.folder if checkpoint.is_identified else checkpoint.checkpoint)
    return "/".join(part for part in path.parts[-2:] if part != path.anchor) or checkpoint.model


def _lead(checkpoint: Checkpoint, *, has_controls: bool) -> str:
    trained = checkpoint.title if checkpoint.is_identified else checkpoint.model
    when = f", at {checkpoint.progress} % of training" if checkpoint.progress < 100 else ""
    controls = " and of text it never saw (controls)" if has_controls else ""
    return (
        f"One checkpoint, no interval over seeds: {trained}{when}. It was asked to continue passages of its training "
        f"text (targets){controls}. {LMS_EXPLAINED}."
    )


def _sample_table(results: Results, checkpoint: int) -> "pd.DataFrame":
    """Return a row for each sample, with the passage's repeats in the training text (NaN if unknown)."""
    import pandas as pd

    sampled = results.checkpoints[checkpoint].samples
    table = pd.DataFrame([vars(sample) for sample, _ in sampled])
    scores = results.scores
    known = scores[
        (scores["checkpoint"] == checkpoint) & (scores["metric"] == "num_injections") & (scores["value"] > 0)
    ]
    repeats = dict(zip(known["unit"], known["value"], strict=True))
    return table.assign(
        sample=[sample for sample, _ in sampled],
        prompt=[prompt for _, prompt in sampled],
        length=table["reference_ids"].map(len),
        repeats=table["passage_id"].map(repeats).astype(float),
    )


def _floor(samples: "pd.DataFrame") -> Floor | None:
    means = samples.groupby(["kind", "passage_id"])["lms"].mean()
    if not {"target", "control"} <= set(samples["kind"]):
        return None
    return floor_of(means["target"].to_numpy(float), means["control"].to_numpy(float))


def _best(samples: "pd.DataFrame", kind: str) -> "pd.DataFrame":
    """Return the sample with the highest LMS of each passage; ties go to the shortest prompt."""
    own = samples[samples["kind"] == kind]
    order = own.sort_values(["lms", "prefix_length"], ascending=[False, True], kind="stable")
    return order.drop_duplicates("passage_id")


def _repeat_groups(samples: "pd.DataFrame") -> list[tuple[str, "pd.DataFrame"]]:
    """Group the targets by how often they occurred in the training text: 1, 2, 3 to 4, 5 to 8, 9 to 16, ..."""
    known = samples[(samples["kind"] == "target") & samples["repeats"].notna()]
    groups = []
    for _, own in known.groupby([(int(repeats) - 1).bit_length() for repeats in known["repeats"]]):
        least, most = int(own["repeats"].min()), int(own["repeats"].max())
        groups.append((span(least, most, decimals=0), own))
    return groups


def _verbatim_share(samples: "pd.DataFrame") -> float:
    """Return the percentage of passages that were recited completely from at least one prompt."""
    return float(100 * samples.groupby("passage_id")["verbatim"].any().mean())


def _verdict(samples: "pd.DataFrame", name: str, notes: Footnotes) -> str:
    """Say whether targets are recited more than controls, with the interval of the difference."""
    num_targets, num_controls = (samples.loc[samples["kind"] == kind, "passage_id"].nunique() for kind in _KINDS)
    targets, floor = _average_lms(samples, "target"), _floor(samples)
    num_verbatim = _num_verbatim(samples)
    verbatim = f"{num_verbatim} of {num_targets} targets {'is' if num_verbatim == 1 else 'are'} recited verbatim"
    known = [_BASE_MODEL] if num_verbatim else []
    if floor is None:
        text = (
            f"There are no controls, so chance is unknown: {name} recites {targets:.2f} tokens of a target on average"
        )
    elif floor.excess.significant in (None, "too few"):
        text = (
            f"Too few passages to judge ({num_targets} targets, {num_controls} controls; at least {MIN_UNITS} of each "
            f"are needed): {name} recites {targets:.2f} tokens of a target and {floor.controls:.2f} of a control on "
            "average"
        )
    elif floor.excess.low > 0:
        few = [FEW_UNITS] if floor.excess.num_units < ENOUGH_UNITS else []
        text = (
            f"{name} recites {floor.difference:.2f} tokens more of a target than of a control on average "
            f"({interval_text(floor.excess, 'passage', decimals=2)}{notes.mark(*few)})"
        )
        known = [_BASE_MODEL]
    else:
        caveats = [BOUND] if floor.excess.high >= 0 else [_EASY_CONTROLS]
        text = f"What {name} recites on average {floor_text(*floor.excess[:2])}{notes.mark(*caveats)}"
    return f"{text}; {verbatim}.{notes.mark(*known)}"


def _average_lms(samples: "pd.DataFrame", kind: str) -> float:
    return float(samples[samples["kind"] == kind].groupby("passage_id")["lms"].mean().mean())


def _num_verbatim(samples: "pd.DataFrame") -> int:
    return int(samples.loc[(samples["kind"] == "target") & samples["verbatim"], "passage_id"].nunique())


def _statements(samples: "pd.DataFrame", checkpoint: Checkpoint, notes: Footnotes) -> list[str]:
    targets, controls = (samples[samples["kind"] == kind] for kind in _KINDS)
    floor, num_targets, num_verbatim = _floor(samples), targets["passage_id"].nunique(), _num_verbatim(samples)
    averages = f"Average LMS: {_average_lms(samples, 'target'):.2f} tokens of the targets"
    if floor is not None:
        averages += f", {floor.controls:.2f} of the controls; the difference is {floor.difference:.2f}"
        interval = interval_text(floor.excess, "passage", decimals=2)
        averages += f" ({interval})" if floor.excess.significant else ""
    statements = [
        f"{averages}.",
        f"Verbatim: {num_verbatim} of {num_targets} targets ({100 * num_verbatim / num_targets:.0f} %), all that was "
        f"compared, up to {targets['length'].max()} tokens, from at least one prompt.",
    ]
    if len(controls):
        furthest = controls["lms"].max()
        num_above = (_best(samples, "target")["lms"] > furthest).sum()
        statements.append(f"Further than any control (LMS at most {furthest}): {num_above} of {num_targets} targets.")
    means = targets.groupby("prefix_length")["lms"].mean()
    by_length = [f"{mean:.2f} from {prompt_length(length)}" for length, mean in means.items()]
    if len(by_length) > 1:
        statements.append(f"By length of the prompt, average LMS of the targets: {', '.join(by_length)} tokens.")
    groups = [f"{own['lms'].mean():.2f} at {repeats}" for repeats, own in _repeat_groups(samples)]
    if len(groups) > 1:
        statements.append(f"By repeats in the training text, average LMS: {', '.join(groups)}.")
    if checkpoint.lost_prompts:
        lost = (
            "Their scores are too low: evaluate with prompts of token ids (`tfidf-tune probe audit`, or `tfidf-tune "
            "eval`)."
        )
        statements.append(
            f"{checkpoint.lost_prompts} of {len(samples)} prompts lost token ids when converted to text."
            f"{notes.mark(lost)}"
        )
    return statements


def _targets_and_controls(samples: "pd.DataFrame", checkpoint: Checkpoint, footnotes: Footnotes) -> Table:
    frame = samples.assign(verbatim=100.0 * samples["verbatim"], label=samples["kind"].map(_KINDS))
    by_kind = frame.groupby("label", sort=False)
    scores = (
        by_kind[["prefix_match", "lms"]]
        .agg(["mean", "max"])
        .set_axis(["Avg Prefix", "Max Prefix", "Avg LMS", "Max LMS"], axis="columns")
    )
    scores.insert(0, "Number", by_kind["passage_id"].nunique())
    near = frame[["edit_distance", "common_subsequence"]].astype(float).groupby(frame["label"], sort=False).mean()
    scores[[*_NEAR]] = near
    scores[["ROUGE-L", "Verbatim (% of prompts)"]] = by_kind[["rouge_l", "verbatim"]].mean()
    scores = scores.dropna(axis="columns", how="all")  # older results have no near-verbatim measures
    scores = scores.reindex([label for label in _KINDS.values() if label in scores.index])
    several = " Each passage is asked for from every prefix length." if samples["prefix_length"].nunique() > 1 else ""
    caveats = [f"The {TEXT_PROMPTS}"] if checkpoint.text_prompts else []
    measured = f" {NEAR_EXPLAINED}" * bool(near.notna().to_numpy().any())
    notes = [f"Prefix: tokens that agree from the first on.{measured}{several}{footnotes.mark(*caveats)}"]
    formats = dict.fromkeys(("Avg Prefix", "Avg LMS", *_NEAR, "ROUGE-L"), ".2f") | {"Verbatim (% of prompts)": ".1f"}
    frame = scores.reset_index(names="Passages")
    return Table("targets_and_controls", "Targets against controls", frame, notes, formats)


def _by_prefix_length(samples: "pd.DataFrame", footnotes: Footnotes) -> Table:
    import pandas as pd

    names = ("LMS of targets", "LMS of controls", "Difference", "95 % from", "95 % to")
    rows = []
    for length, own in samples.groupby("prefix_length"):
        targets = own[own["kind"] == "target"]
        if len(targets):
            floor = _floor(own)
            against = (None,) * 4 if floor is None else (floor.controls, floor.difference, *floor.excess[:2])
            rows.append((prompt_length(length), targets["lms"].mean(), *against, _verbatim_share(targets)))
    fewest = min(samples.loc[samples["kind"] == kind, "passage_id"].nunique() for kind in _KINDS)
    caveats = [FEW_UNITS] if MIN_UNITS <= fewest < ENOUGH_UNITS else []
    if 0 < fewest < MIN_UNITS:
        caveats = [f"From fewer than {MIN_UNITS} passages, such an interval is too narrow."]
    about = (
        f"95 %: percentile bootstrap over passages of the difference, targets minus controls.{footnotes.mark(*caveats)}"
    )
    notes = [about] if fewest else []
    frame = pd.DataFrame(rows, columns=["Prompt (tokens)", *names, _VERBATIM])
    formats = dict.fromkeys(names, ".2f") | {_VERBATIM: ".1f"}
    return Table("by_prefix_length", "By length of the prompt", frame, notes, formats)


def _by_repeats(samples: "pd.DataFrame") -> Table:
    import pandas as pd

    rows = [
        (repeats, own["passage_id"].nunique(), own["lms"].mean(), own["lms"].max(), _verbatim_share(own))
        for repeats, own in _repeat_groups(samples)
    ]
    frame = pd.DataFrame(rows, columns=[_REPEATS, "Targets", "Avg LMS", "Max LMS", _VERBATIM])
    notes = ["Verbatim: recited completely from at least one of the prompts."]
    formats = {"Avg LMS": ".2f", _VERBATIM: ".1f"}
    return Table("by_repeats", "By repeats in the training text", frame, notes, formats)


def _most_recited(samples: "pd.DataFrame") -> Table:
    columns = (
        *(("Passage", "passage_id", ""), (_REPEATS, "repeats", ""), ("Prompt (tokens)", "prefix_length", "")),
        *(("LMS", "lms", ""), ("Of", "length", ""), ("ROUGE-L", "rouge_l", ".1f"), ("Verbatim", "verbatim", "")),
        ("Starts with", "prompt", ""),
    )
    best = _best(samples, "target")
    shown = best.iloc[:_NUM_MOST_RECITED]
    prompts = [textwrap.shorten(prompt, _PROMPT_WIDTH, placeholder=" …") for prompt in shown["prompt"]]
    frame = shown.assign(
        verbatim=shown["verbatim"].map({True: "yes", False: "no"}),
        prompt=prompts,
        prefix_length=shown["prefix_length"].map(prompt_length),
    )
    notes = ["Of: tokens of the passage that the continuation was compared with."]
    notes += [f"The first {len(shown)} of {len(best)} targets."] if len(best) > len(shown) else []
    return tabulate("most_recited", "Most recited passages", frame, columns, notes)


def _examples(checkpoint: Checkpoint, samples: "pd.DataFrame") -> list[Example]:
    """Show the targets that are recited most and, for the floor, the control that is."""
    decode = checkpoint_decoder(checkpoint.checkpoint)
    chosen = [*_best(samples, "target")[:_NUM_EXAMPLES].itertuples(), *_best(samples, "control")[:1].itertuples()]
    examples = []
    for row in chosen:
        sample = row.sample
        kind = "a target" if sample.kind == "target" else "the control that is recited most"
        start = f" from token {sample.offset} on" if sample.offset else ""
        tokens = f"{sample.prefix_length} tokens{start}" if sample.prefix_length else "its own prompt"
        title = f"{sample.passage_id}, {kind}: {tokens}"
        continuation = continuation_of(checkpoint.model, sample, decode)
        examples.append(Example(title, row.prompt, sample.reference_text, (continuation,)))
    return examples


def _provenance(checkpoint: Checkpoint, samples: "pd.DataFrame") -> dict[str, str]:
    num_targets, num_controls = (samples.loc[samples["kind"] == kind, "passage_id"].nunique() for kind in _KINDS)
    offsets = ", ".join(map(str, sorted(set(samples["offset"]))))
    return {
        "Checkpoint": checkpoint.checkpoint,
        **({"Training progress": f"{checkpoint.progress} %"} if checkpoint.progress < 100 else {}),
        "Objective": checkpoint.objective,
        "Seed": "unknown" if checkpoint.seed is None else str(checkpoint.seed),
        "Results": checkpoint.folder,
        "Passages": f"{num_targets} targets, {num_controls} controls",
        "Prompts (tokens)": ", ".join(str(prompt_length(length)) for length in sorted(set(samples["prefix_length"]))),
        "Prompts start at token": offsets,
        "Continuations": f"greedy, compared over up to {samples['length'].max()} tokens",
        "Intervals": f"percentile bootstrap, {NUM_RESAMPLES:,} resamples of whole passages, 95 %",
        "Made by": f"tfidf-tune {version('tfidf-tune')}",
    }
