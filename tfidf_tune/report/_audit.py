"""One model without a comparison: does it recite its training text more than text it never saw?"""

from collections.abc import Sequence
from importlib.metadata import version

from tfidf_tune.analysis import LMS, MIN_UNITS, NUM_RESAMPLES, Evaluation, Floor, ProbeSample, Run, lms_floor
from tfidf_tune.report._audit_numbers import best_samples, of_kind, repeat_groups, verbatim_passages
from tfidf_tune.report._audit_tables import by_prefix_length, by_repeats, most_recited, targets_and_controls
from tfidf_tune.report._document import Continuation, Example, Figure, Report
from tfidf_tune.report._examples import Decode, checkpoint_decoder, recited_pieces
from tfidf_tune.report._explanations import LMS_EXPLAINED
from tfidf_tune.report._figures import lms_distribution
from tfidf_tune.report._intervals import interval_text, significance

_NUM_EXAMPLES = 3


def audit_report(run: Run) -> Report:
    """Say what the last evaluated checkpoint of a run recites of the targets, held against the controls.

    Args:
        run (Run): with an evaluation that has memorization samples of targets; the last such is taken.

    Returns:
        Report: findings, tables, the distribution of LMS, examples, provenance.

    Raises:
        ValueError: If no evaluation has a sample of a target.
    """
    probed = [evaluation for evaluation in run.evaluations if of_kind(evaluation, "target")]
    if not probed:
        raise ValueError(
            f"the results of {run.model} in {run.folder} have no memorization sample of a target: evaluate the task "
            "tfidf_memorization with a probe file"
        )
    evaluation = probed[-1]
    tables = (
        targets_and_controls(evaluation),
        by_prefix_length(evaluation),
        by_repeats(evaluation),
        most_recited(evaluation),
    )
    distribution = Figure(
        name="lms_distribution",
        title="Distribution of the longest memorized substring",
        figure=lms_distribution({run.model: evaluation.samples}),
        caption="Share of continuations that recite at least so many tokens in a row: targets solid, controls dashed.",
    )
    return Report(
        title=f"What {run.model} recites",
        statements=_statements(evaluation),
        tables=tuple(table for table in tables if table is not None),
        figures=(distribution,),
        examples=_examples(run.model, evaluation),
        provenance=_provenance(run, evaluation),
        lead=_lead(evaluation),
    )


def _lead(evaluation: Evaluation) -> str:
    controls = " and of text it never saw (controls)" if of_kind(evaluation, "control") else ""
    return f"The model was asked to continue passages of its training text (targets){controls}. {LMS_EXPLAINED}."


def _statements(evaluation: Evaluation) -> tuple[str, ...]:
    targets, controls = of_kind(evaluation, "target"), of_kind(evaluation, "control")
    floor = lms_floor([evaluation])
    num_targets, num_controls = (len({sample.passage_id for sample in samples}) for samples in (targets, controls))
    num_verbatim = len(verbatim_passages(targets))
    num_tokens = max(len(sample.reference_ids) for sample in targets)
    by_heart = f" {num_verbatim} of the targets it knows by heart all the same." if num_verbatim else ""
    verdict = _verdict(floor, num_targets, num_controls)
    statements = [
        verdict if floor is not None and floor.exceeded else verdict + by_heart,
        f"It recites {num_verbatim} of the {num_targets} targets ({100 * num_verbatim / num_targets:.0f} %) verbatim: "
        f"all that was compared, up to {num_tokens} tokens, from at least one prompt.",
        _averages(evaluation, floor),
    ]
    if controls:
        furthest = max(sample.lms for sample in controls)
        num_above = sum(sample.lms > furthest for sample in best_samples(targets))
        statements.append(
            f"{num_above} of the {num_targets} targets are recited further than any control (LMS at most {furthest})."
        )
    statements += _by_prefix(targets) + _by_repeats(evaluation)
    if evaluation.num_not_round_trip:
        statements.append(
            f"{evaluation.num_not_round_trip} of {len(evaluation.samples)} prompts lost token ids on the way as text, "
            "so that their scores are too low: evaluate with prompts of token ids (tfidf-tune probe audit, or eval)."
        )
    if num_verbatim or (floor is not None and floor.excess is not None and floor.excess.low > 0):
        statements.append(
            "A passage that many texts share (a licence, a quotation) may have been known before this training: audit "
            "the base model with the same probe file, and see what it recites."
        )
    return tuple(statements)


def _verdict(floor: Floor | None, num_targets: int, num_controls: int) -> str:
    if floor is None:
        return (
            "The probe file has no controls, so the floor is unknown: how much of text it never saw the model would "
            "hit upon by fluency alone."
        )
    if floor.excess is None or floor.excess.significant == "too few":
        return (
            f"Too few passages for a verdict ({num_targets} targets, {num_controls} controls): it takes at least "
            f"{MIN_UNITS} of each."
        )
    clause = significance(floor.excess, "target" if num_targets <= num_controls else "control")
    if floor.excess.low > 0:
        return f"The model recites more of the targets than of text it never saw, {clause}."
    if floor.excess.high < 0:
        return (
            f"The model recites less of the targets than of the controls, {clause}. The controls are easier text: take "
            "some that are like the training text."
        )
    return (
        "There is no sign that, on average, the model recites more of the targets than of text it never saw: 0 lies in "
        "the 95 % interval of the difference."
    )


def _averages(evaluation: Evaluation, floor: Floor | None) -> str:
    if floor is None:
        return f"Average LMS: {LMS.of([evaluation]):.2f} tokens of the targets."
    interval = f" ({interval_text(floor.excess, 'passage', decimals=2)})" if floor.excess else ""
    return (
        f"Average LMS: {floor.targets:.2f} tokens of the targets, {floor.controls:.2f} of the controls; the difference "
        f"is {floor.difference:.2f}{interval}."
    )


def _by_prefix(targets: Sequence[ProbeSample]) -> list[str]:
    by_length: dict[int, list[int]] = {}
    for sample in targets:
        by_length.setdefault(sample.prefix_length, []).append(sample.lms)
    if len(by_length) < 2:
        return []
    averages = [f"{sum(lms) / len(lms):.2f} from {length}" for length, lms in sorted(by_length.items())]
    return [f"By length of the prompt, average LMS of the targets: {', '.join(averages)} tokens."]


def _by_repeats(evaluation: Evaluation) -> list[str]:
    groups = repeat_groups(evaluation)
    if len(groups) < 2:
        return []
    averages = [
        f"{sum(sample.lms for sample in group.samples) / len(group.samples):.2f} at {group.repeats}" for group in groups
    ]
    return [f"By repeats in the training text, average LMS: {', '.join(averages)}."]


def _examples(model: str, evaluation: Evaluation) -> tuple[Example, ...]:
    """The targets that are recited most and, for the floor, the control that is."""
    decode = checkpoint_decoder(evaluation.checkpoint)
    chosen = best_samples(of_kind(evaluation, "target"))[:_NUM_EXAMPLES]
    chosen += best_samples(of_kind(evaluation, "control"))[:1]
    return tuple(_example(model, evaluation, sample, decode) for sample in chosen)


def _example(model: str, evaluation: Evaluation, sample: ProbeSample, decode: Decode | None) -> Example:
    kind = "a target" if sample.kind == "target" else "the control that is recited most"
    start = f" from token {sample.offset} on" if sample.offset else ""
    return Example(
        title=f"{sample.passage_id}, {kind}: {sample.prefix_length} tokens{start}",
        prompt=evaluation.prompts.get((sample.passage_id, sample.offset, sample.prefix_length), ""),
        truth=sample.reference_text,
        continuations=(
            Continuation(model, f"LMS {sample.lms}, ROUGE-L {sample.rouge_l:.1f}", recited_pieces(sample, decode)),
        ),
    )


def _provenance(run: Run, evaluation: Evaluation) -> tuple[tuple[str, str], ...]:
    samples = evaluation.samples
    passages = {
        kind: len({sample.passage_id for sample in of_kind(evaluation, kind)}) for kind in ("target", "control")
    }
    milestone = [("Training progress", f"{evaluation.progress} %")] if evaluation.progress < 100 else []
    return (
        ("Checkpoint", evaluation.checkpoint),
        *milestone,
        ("Objective", run.objective),
        ("Seed", "unknown" if run.seed is None else str(run.seed)),
        ("Results", run.folder),
        ("Passages", f"{passages['target']} targets, {passages['control']} controls"),
        ("Prompts (tokens)", ", ".join(map(str, sorted({sample.prefix_length for sample in samples})))),
        ("Prompts start at token", ", ".join(map(str, sorted({sample.offset for sample in samples})))),
        ("Continuations", f"greedy, compared over up to {max(len(sample.reference_ids) for sample in samples)} tokens"),
        ("Intervals", f"percentile bootstrap, {NUM_RESAMPLES:,} resamples of whole passages, 95 %"),
        ("Made by", f"tfidf-tune {version('tfidf-tune')}"),
    )
