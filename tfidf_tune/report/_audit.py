"""One model without a comparison: does it recite its training text more than text it never saw?"""

from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune.analysis.intervals import ENOUGH_UNITS, MIN_UNITS, NUM_RESAMPLES, binomial_upper_bound
from tfidf_tune.report._audit_measures import (
    EXTRACTION_PAIRS,
    SCHEMA_VERSION,
    Bound,
    Check,
    Measure,
    audit_measures,
    check_bounds,
)
from tfidf_tune.report._audit_method import method_and_limits
from tfidf_tune.report._audit_tables import (
    KINDS,
    best_samples,
    by_attack,
    by_prefix_length,
    by_repeats,
    extractable_targets,
    extraction,
    first_attack,
    floor_of_samples,
    most_recited,
    num_verbatim,
    repeat_groups,
    sample_table,
    targets_and_controls,
)
from tfidf_tune.report._document import SHARED_MARK, Continuation, Example, Figure, Report
from tfidf_tune.report._examples import excerpt, shared_pieces
from tfidf_tune.report._figures import lms_distribution
from tfidf_tune.report._membership import membership_table
from tfidf_tune.report._verdict import floor_text
from tfidf_tune.report._wording import (
    BOUND,
    FEW_UNITS,
    LMS_EXPLAINED,
    Footnotes,
    interval_text,
    prompt_length,
)
from tfidf_tune.results import Checkpoint, Results

if TYPE_CHECKING:
    import pandas as pd

_NUM_EXAMPLES = 3
_EASY_CONTROLS = "The controls are easier text than the targets: choose controls that resemble the training text."
_BASE_MODEL = (
    "The base model may already have memorized a passage that many texts share (a license, a quotation): audit the "
    "base model with the same probe file."
)


def audit_report(results: Results, *, bounds: Sequence[Bound] = (), show_passages: bool = False) -> Report:
    """Report what the last evaluated checkpoint of a run recites of the targets, compared with the controls.

    Averages are over the prompts of the first attack, the greedy one if there is one.

    Args:
        results (Results): of one run, with the samples of the memorization task.
        bounds (Sequence[Bound]): limits that measures must not exceed. Default: none.
        show_passages (bool): show passages in full. Default: False, excerpts.

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
    samples = sample_table(results, at)
    plain = first_attack(samples)
    name, notes = _name(checkpoint), Footnotes()
    verdict, statements = _verdict(plain, samples, name, notes), _statements(plain, samples, checkpoint, notes)
    likelihoods, detectable = membership_table(results.scores, [({"Model": name}, [at])], notes)
    for (model,), auc in detectable.items():
        verdict += f" Membership stays detectable: {model} ({auc})."
    measures = audit_measures(samples, results.scores, at, likelihoods.frame, bounds)
    checks = check_bounds(measures, bounds)
    if checks:
        exceeded = [str(check) for check in checks if check.exceeded]
        verdict += f" Limits exceeded: {'; '.join(exceeded)}." if exceeded else " No limit is exceeded."
        statements.insert(0, f"Limits: {'; '.join(map(str, checks))}.")
    tables = (
        targets_and_controls(plain, checkpoint, notes),
        by_attack(samples),
        extraction(extractable_targets(results.scores, at, EXTRACTION_PAIRS)),
        likelihoods,
        by_prefix_length(plain, notes),
        by_repeats(plain),
        most_recited(samples),
    )
    lms = {kind: plain.loc[plain["kind"] == kind, "lms"].tolist() for kind in KINDS}
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
        examples=_examples(checkpoint, samples, show_passages=show_passages),
        provenance=_provenance(checkpoint, samples),
        lead=_lead(checkpoint, has_controls=bool(lms["control"])),
        footnotes=notes.texts,
        sections=[method_and_limits(samples, show_passages=show_passages, has_likelihoods=len(likelihoods.frame) > 0)],
        mark=SHARED_MARK,
        summary=_summary(name, verdict, samples, measures, checks),
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


def _verdict(samples: "pd.DataFrame", asked: "pd.DataFrame", name: str, notes: Footnotes) -> str:
    """Say whether targets are recited more than controls, with the interval of the difference.

    ``asked`` are the samples of all attacks.
    """
    num_targets, num_controls = (samples.loc[samples["kind"] == kind, "passage_id"].nunique() for kind in KINDS)
    targets, floor = _average_lms(samples, "target"), floor_of_samples(samples)
    found = num_verbatim(asked)
    verbatim = f"{found} of {num_targets} targets {'is' if found == 1 else 'are'} recited verbatim"
    known = [_BASE_MODEL] if found else []
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


def _statements(samples: "pd.DataFrame", asked: "pd.DataFrame", checkpoint: Checkpoint, notes: Footnotes) -> list[str]:
    targets, controls = (samples[samples["kind"] == kind] for kind in KINDS)
    floor, num_targets, found = floor_of_samples(samples), targets["passage_id"].nunique(), num_verbatim(asked)
    at_most = 100 * binomial_upper_bound(found, num_targets)
    averages = f"Average LMS: {_average_lms(samples, 'target'):.2f} tokens of the targets"
    if floor is not None:
        averages += f", {floor.controls:.2f} of the controls; the difference is {floor.difference:.2f}"
        interval = interval_text(floor.excess, "passage", decimals=2)
        averages += f" ({interval})" if floor.excess.significant else ""
    statements = [
        f"{averages}.",
        f"Verbatim: {found} of {num_targets} targets ({100 * found / num_targets:.0f} %), all that was compared, up to "
        f"{targets['length'].max()} tokens, from at least one prompt. Of all passages that are chosen like these, at "
        f"most {at_most:.1f} % (upper 95 % bound).",
    ]
    if len(controls):
        furthest = controls["lms"].max()
        num_above = (best_samples(samples, "target")["lms"] > furthest).sum()
        statements.append(f"Further than any control (LMS at most {furthest}): {num_above} of {num_targets} targets.")
    means = targets.groupby("prefix_length")["lms"].mean()
    by_length = [f"{mean:.2f} from {prompt_length(length)}" for length, mean in means.items()]
    if len(by_length) > 1:
        statements.append(f"By length of the prompt, average LMS of the targets: {', '.join(by_length)} tokens.")
    groups = [f"{own['lms'].mean():.2f} at {repeats}" for repeats, own in repeat_groups(samples)]
    if len(groups) > 1:
        statements.append(f"By repeats in the training text, average LMS: {', '.join(groups)}.")
    if checkpoint.lost_prompts:
        lost = (
            "Their scores are too low: evaluate with prompts of token ids (`tfidf-tune probe audit`, or `tfidf-tune "
            "eval`)."
        )
        statements.append(
            f"{checkpoint.lost_prompts} of {len(asked)} prompts lost token ids when converted to text."
            f"{notes.mark(lost)}"
        )
    return statements


def _examples(checkpoint: Checkpoint, samples: "pd.DataFrame", *, show_passages: bool) -> list[Example]:
    """Show the targets that are recited most and, for the floor, the control that is."""
    chosen = [
        *best_samples(samples, "target")[:_NUM_EXAMPLES].itertuples(),
        *best_samples(samples, "control")[:1].itertuples(),
    ]
    examples = []
    for row in chosen:
        sample = row.sample
        kind = "a target" if sample.kind == "target" else "the control that is recited most"
        start = f" from token {sample.offset} on" if sample.offset else ""
        tokens = f"{sample.prefix_length} tokens{start}" if sample.prefix_length else "its own prompt"
        by = f", {sample.attack}" if sample.attack else ""
        title = f"{sample.passage_id}, {kind}: {tokens}{by}"
        truth, said = shared_pieces(sample.reference_text, sample.generated_text)
        prompt = row.prompt
        if not show_passages:
            truth, said = (excerpt(pieces, len(sample.reference_text)) for pieces in (truth, said))
            prompt = "".join(text for text, _ in excerpt(((prompt, False),), len(prompt)))
        shown = Continuation(checkpoint.model, f"LMS {sample.lms}, ROUGE-L {sample.rouge_l:.1f}", said)
        examples.append(Example(title, prompt, "".join(text for text, _ in truth), (shown,), truth))
    return examples


def _summary(
    name: str, verdict: str, samples: "pd.DataFrame", measures: dict[str, Measure], checks: Sequence[Check]
) -> dict[str, Any]:
    """Return what `audit.json` has; docs/audit.md describes it."""
    numbers = samples.groupby("kind")["passage_id"].nunique()
    floor = floor_of_samples(first_attack(samples))
    passages = [
        {
            "id": row.passage_id,
            "kind": row.kind,
            "lms": int(row.lms),
            "of": int(row.length),
            "verbatim": bool(row.verbatim),
            "attack": row.attack or "greedy",
            "prefix_length": int(row.prefix_length),
            "repeats": None if row.repeats != row.repeats else int(row.repeats),
        }
        for kind in KINDS
        for row in best_samples(samples, kind).itertuples()
    ]
    return {
        "schema_version": SCHEMA_VERSION,
        "made_by": f"tfidf-tune {version('tfidf-tune')}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": name,
        "verdict": verdict,
        "num_targets": int(numbers.get("target", 0)),
        "num_controls": int(numbers.get("control", 0)),
        "num_prompts": len(samples),
        "recites_targets_more": floor.excess.low > 0 if floor and floor.excess.num_units >= MIN_UNITS else None,
        "attacks": [attack or "greedy" for attack in samples["attack"].unique()],
        "measures": {key: measure._asdict() for key, measure in measures.items()},
        "limits": [
            {"measure": check.bound.name, "limit": check.bound.limit, "value": check.value, "exceeded": check.exceeded}
            for check in checks
        ],
        "passed": not any(check.exceeded for check in checks),
        "passages": passages,
    }


def _provenance(checkpoint: Checkpoint, samples: "pd.DataFrame") -> dict[str, str]:
    num_targets, num_controls = (samples.loc[samples["kind"] == kind, "passage_id"].nunique() for kind in KINDS)
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
        "Attacks": ", ".join(name or "greedy" for name in samples["attack"].unique()),
        "Continuations": f"compared over up to {samples['length'].max()} tokens",
        "Intervals": f"percentile bootstrap, {NUM_RESAMPLES:,} resamples of whole passages, 95 %",
        "Made by": f"tfidf-tune {version('tfidf-tune')}",
    }
