"""One model without a comparison: does it recite its training text more than text it never saw?"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from tfidf_tune._printing import counted
from tfidf_tune.audit import _measures as audit
from tfidf_tune.audit._before_after import before_and_after, paired_likelihoods
from tfidf_tune.audit._blind import Blind, blind_baseline, blind_texts
from tfidf_tune.audit._choosing import about_documents_without_coin
from tfidf_tune.audit._headline import Headline, headline_of_results
from tfidf_tune.audit._leaks import leaks, leaks_table, mismatched_lms
from tfidf_tune.audit._likelihoods import likelihood_tables
from tfidf_tune.audit._true_positives import true_positives
from tfidf_tune.passages import Passage
from tfidf_tune.probe.attacks import ATTACKS
from tfidf_tune.report.document import (
    Continuation,
    Example,
    Figure,
    Footnotes,
    Report,
    Section,
    Table,
    finite,
    joined,
)
from tfidf_tune.results import Checkpoint, Results
from tfidf_tune.results.examples import excerpt, shared_pieces
from tfidf_tune.results.figures import lms_distribution
from tfidf_tune.results.intervals import (
    ENOUGH_UNITS,
    MIN_UNITS,
    NUM_RESAMPLES,
    binomial_upper_bound,
)
from tfidf_tune.results.membership_table import auc_header, is_detectable, membership_table
from tfidf_tune.results.positive_control import PositiveControl, Reading, positive_control_of
from tfidf_tune.results.recited import Recited
from tfidf_tune.results.wording import (
    AT_CHANCE,
    BOUND,
    FEW_UNITS,
    LMS_EXPLAINED,
    SHARED_MARK,
    about_words,
    cell,
    hardly_learned,
    still_detectable,
)

_SCHEMA_VERSION = "1.2"
_NUM_EXAMPLES = 3
_EASY_CONTROLS = (
    "The controls are easier text than the targets: choose controls that resemble the training "
    "text."
)
_BOS = {
    True: "before each prompt and passage",
    False: "before none",
    None: "added by the tokenizer or the server, or not",
}
_BASE_MODEL = (
    "The base model may already have memorized a passage that many texts share (a license, a "
    "quotation): audit the base model with the same probe file."
)

_TEXTS_DIFFER = (
    "The texts of targets and controls can be told apart without the model, so the membership AUC "
    "is no finding about it: choose controls from the same text by chance (`tfidf-tune data "
    "holdout`)."
)
_BY_COIN = (
    "By a coin. Targets and controls were divided by a coin before training, so that they differ "
    "by the coin alone. What a classifier without the model tells apart is then chance, and does "
    "not take the finding of membership inference away."
)

_COMPARED = (
    "Compared. The longest run of tokens that an answer shares with its passage (LMS) and whether "
    "the answer is the passage word for word. Controls show what fluent text shares by chance."
)
_LIKELIHOODS = (
    " From the likelihood of the passages: how probable it is that a sample is the passage word "
    "for word, and whether the model finds targets more likely than controls (membership "
    "inference)."
)
_LIMITS = (
    "What a finding says. A passage that is recited word for word, and that no common source "
    "explains, can be obtained from the model by anybody who can prompt it. The audit does not "
    "decide whether a text is personal, confidential or protected, and not how it came into the "
    "training data.",
    "What it does not say. Nothing recited is not proof that nothing is memorized: other prompts, "
    "more samples, other passages, further training of the model, or access to its weights can "
    "reveal more. An upper bound holds for passages that were chosen in the same way, from the "
    "same text. If the most repeated passages were chosen, it is a bound for those; rare passages "
    "are recited less often as a rule.",
    "Controls. A difference between targets and controls can also come from a difference between "
    "the texts. Controls should have the same authors, subjects and time as the targets.",
)
_EXCERPTS = (
    "Text. Passages are shown as short excerpts. The probe file and the folder of the evaluation "
    "have them in full: protect those files like the text itself."
)


def audit_report(
    results: Results,
    *,
    bounds: Sequence[audit.Bound] = (),
    show_passages: bool = False,
    accept_unanswered: bool = False,
    accept_unproven: bool = False,
    passages: Sequence[Passage] = (),
    by_coin: bool = False,
    headline: Headline | None = None,
    without_coin: dict[str, int] | None = None,
) -> Report:
    """Report what the last evaluated checkpoint of a run recites of the targets, compared with the
    controls.

    Averages are over the prompts of the first attack, the greedy one if there is one.

    Args:
        results (Results): of one run, with the samples of the memorization task.
        bounds (Sequence[Bound]): limits that measures must not exceed. Default: none.
        show_passages (bool): show passages in full. Default: False, excerpts.
        accept_unanswered (bool): answers for targets that are missing count as not recited.
            Default: False, then the audit shows nothing.
        accept_unproven (bool): the audit can pass although the positive control showed nothing.
            Default: False.
        passages (Sequence[Passage]): the probe file, which says where passages are in the text.
            Default: none.
        by_coin (bool): targets and controls were divided by a coin before training, so that
            membership inference is a finding even if their texts can be told apart without the
            model. Default: False.
        headline (Headline | None): the score that decides about membership, as the plan of the
            audit names it. Default: None, it follows from the kind of targets, see
            :class:`Headline`.
        without_coin (dict[str, int] | None): documents of a holdout for which no coin was tossed,
            and which are in no passage: how many "documents" in how many "groups" of more than
            "largest_group". Default: None, there are none.

    Raises:
        ValueError: If no checkpoint has a sample of a target, or no model can pass a limit with so
            many passages.
    """
    probed = []
    for number, checkpoint in enumerate(results.checkpoints):
        kinds = {sample.kind for sample, _ in checkpoint.samples}
        if "target" in kinds:
            probed.append(number)
    if not probed:
        first = results.checkpoints[0]
        raise ValueError(
            f"the results of {first.model} in {first.folder} have no memorization sample of a "
            "target: evaluate tfidf_memorization with a probe file that has targets"
        )
    # The start of a run, which is evaluated beside its milestones, is audited by itself.
    trained = [number for number in probed if not results.checkpoints[number].is_start]
    at = (trained or probed)[-1]
    notes = Footnotes()
    facts = audit.Facts(results, at)
    audit.require_possible(bounds, facts.num_targets, facts.num_controls, longest=facts.longest)
    name = _name(facts.checkpoint)
    if headline is None:
        headline = headline_of_results(results.scores, at)
    likelihoods = membership_table(results.scores, [({"Model": name}, [at])], notes)
    if headline.score and not len(likelihoods.frame):
        headline = Headline(None, "no likelihoods of targets and controls were measured")
    # Membership inference is no finding if the texts alone give the targets away.
    blind = None
    if len(likelihoods.frame):
        blind = blind_baseline(blind_texts(facts.plain, passages))
    no_finding = ""
    if blind is not None and blind.tells_apart and not by_coin:
        no_finding = (
            "a classifier that never saw the model tells targets and controls apart, too (AUC "
            f"{blind.auc:.2f}), so the texts differ"
        )
    control = positive_control_of(results, at)
    if facts.num_unanswered_targets and not (accept_unanswered or facts.checkpoint.prompt_obstacle):
        missing = (
            f"{facts.num_unanswered_targets:,} answers were withheld by the server or are empty"
        )
        control = control._replace(obstacle=missing)
    measures, checks = audit.measures_and_checks(
        facts,
        results.scores,
        at,
        likelihoods.frame,
        bounds,
        control,
        headline.score,
        no_finding,
    )
    detected = ""
    if headline.score is not None:
        (row,) = likelihoods.frame.to_dict("records")
        if is_detectable(row, headline.score):
            detected = still_detectable(headline.words)
            if blind is not None and no_finding:
                auc = row[auc_header(headline.score)]
                detected = _not_by_the_model(headline, auc, blind)
    verdict = _verdict(facts, name, checks, control, detected=detected)
    verdict += hardly_learned(results.scores, {at: name})
    # The model before training, if it was asked for the same: the reference, or a run's start.
    before = None
    compared = []
    starts = [number for number in probed if results.checkpoints[number].is_start]
    if trained and starts:
        before = audit.Facts(results, starts[-1])
        nlls = paired_likelihoods(results.scores, starts[-1], at)
        compared.append(before_and_after(before, facts, nlls, is_finding=not no_finding))
    listed = _leaks(facts, before, results.scores, at, passages)
    verdict += _because(facts, before, listed)
    repeats = facts.targets.drop_duplicates("passage_id").set_index("passage_id")["repeats"]
    overview = _overview(
        facts, likelihoods, control, notes, headline, blind=blind, is_finding=not no_finding
    )
    if without_coin is not None:
        about = f"Left out: {about_documents_without_coin(without_coin)}."
        overview = replace(overview, notes=[*overview.notes, about])
    tables = (
        overview,
        *compared,
        audit.limits(checks),
        audit.recited(facts),
        _readings(control),
        audit.targets_and_controls(facts, notes),
        audit.by_attack(facts.samples),
        audit.extraction(results.scores, at),
        *likelihood_tables(likelihoods, headline, facts.num_controls),
        true_positives(results.scores, at, repeats, headline.score),
        audit.by_prefix_length(facts.plain, notes),
        audit.by_repeats(facts.targets),
        leaks_table(listed),
    )
    lms = {"target": facts.targets["lms"].tolist(), "control": facts.controls["lms"].tolist()}
    lines = ": targets solid, controls dashed." if lms["control"] else "."
    distribution = Figure(
        name="lms_distribution",
        title="Distribution of the longest memorized substring",
        figure=lms_distribution({facts.checkpoint.model: lms}),
        caption=f"Share of continuations that recite at least so many tokens in a row{lines}",
    )
    has_likelihoods = len(likelihoods.frame) > 0
    method = _method_and_limits(
        facts, show_passages=show_passages, has_likelihoods=has_likelihoods, by_coin=by_coin
    )
    summary = _summary(
        facts,
        name,
        verdict,
        measures,
        checks,
        control,
        blind,
        headline,
        accept_unproven=accept_unproven,
    )
    return Report(
        title=f"What {name} recites",
        verdict=verdict,
        tables=[table.without_empty_columns() for table in tables if len(table.frame)],
        figures=[distribution],
        examples=_examples(facts, show_passages=show_passages),
        provenance=_provenance(facts, before),
        footnotes=notes.texts,
        sections=[method],
        mark=SHARED_MARK,
        summary=summary,
        num_leading=1 + len(compared),
    )


def _not_by_the_model(headline: Headline, auc: float, blind: Blind) -> str:
    """Say that the headline tells targets and controls apart, and that this says nothing about the
    model.
    """
    words = headline.words[0].upper() + headline.words[1:]
    return (
        f" {words} tells these passages from unseen text (AUC {auc:.2f}), but so does a "
        f"classifier that never saw the model (AUC {blind.auc:.2f}): the texts differ, so this is "
        "no finding about the model."
    )


def _because(facts: audit.Facts, before: audit.Facts | None, listed: pd.DataFrame) -> str:
    """Say how many passages this training and their own beginnings brought out."""
    if facts.recited is None or not facts.recited.number:
        return ""
    number = int((listed["attributed"] == "yes").sum())
    if before is None and not number:
        return " None of them needs its own beginning: that of another passage brings it out, too."
    if before is None:
        return (
            f" {number} of {facts.num_targets} passages are brought out by their own beginning and "
            "not by that of another passage."
        )
    recited_before = 0 if before.recited is None else before.recited.number
    return (
        f" Before this training, {recited_before} were; {number} are attributed to it: their own "
        "beginning brings them out, the beginning of another passage does not, and the model "
        "before training does not write them."
    )


def _leaks(
    facts: audit.Facts,
    reference: audit.Facts | None,
    scores: pd.DataFrame,
    at: int,
    passages: Sequence[Passage],
) -> pd.DataFrame:
    """Return the list of passages to act on."""
    before = None
    if reference is not None:
        best = audit.best_samples(reference.samples, "target")
        before = best.set_index("passage_id")["lms"].astype(float)
    nlls = {}
    own = scores[(scores["checkpoint"] == at) & (scores["metric"] == "passage_nll")]
    for kind, of_kind in own.groupby("kind", observed=True):
        nlls[str(kind)] = of_kind.set_index(of_kind["unit"].astype(str))["value"]
    return leaks(
        audit.best_samples(facts.samples, "target"),
        threshold=math.inf if facts.recited is None else facts.recited.threshold,
        mismatched=mismatched_lms(facts.samples),
        before=before,
        nlls=nlls if {"target", "control"} <= nlls.keys() else {},
        passages=passages,
    )


def _name(checkpoint: Checkpoint) -> str:
    """Name the run by the end of its folder's path, or the model by the end of its path, a hub id
    as it is.
    """
    path = Path(checkpoint.folder if checkpoint.is_identified else checkpoint.checkpoint)
    ends = [part for part in path.parts[-2:] if part != path.anchor]
    return "/".join(ends) or checkpoint.model


def _verdict(
    facts: audit.Facts,
    name: str,
    checks: Sequence[audit.Check],
    control: PositiveControl,
    *,
    detected: str,
) -> str:
    """Say how many targets are recited further than controls, whether that could have been seen,
    and which limits hold.

    What was not shown is never called clean: then the sentence about recitation is left out.
    ``detected`` is what to say of membership inference after a result at chance: a clause, which
    begins with a comma, or a sentence of its own, which begins with a space.
    """
    floor = facts.floor
    recited = facts.recited
    is_clause = detected.startswith(",")
    is_at_chance = False
    if recited is not None and recited.number:
        number = f"{recited.number} of {facts.num_targets} passages"
        text = f"{name}: {number} are recited further than unseen text{_recited_tiers(recited)}"
    elif control.problem:
        text = f"Nothing is shown about what {name} recites: {control.problem}"
    elif floor is None:
        text = (
            f"There is no held-out text, so chance is unknown: {name} recites {facts.lms:.2f} "
            "tokens of a passage"
        )
    elif floor.excess.significant in (None, "too few"):
        text = (
            f"Too few passages to judge what {name} recites ({facts.num_targets} targets, "
            f"{facts.num_controls} controls; at least {MIN_UNITS} of each are needed)"
        )
    elif floor.excess.low > 0:
        more = (
            f"{floor.difference:.2f} tokens{about_words(floor.difference, facts.words_a_token)} "
            "more"
        )
        text = f"{name} recites {more} of its training text than of text it never saw"
    else:
        text = f"{name} {AT_CHANCE}"
        is_at_chance = True
        if is_clause:
            text += detected
    if (
        recited is not None
        and not recited.number
        and not control.problem
        and floor
        and floor.excess.num_units >= MIN_UNITS
    ):
        text += _noticeable(recited)
    length = f"{counted(facts.longest, 'token')}{about_words(facts.longest, facts.words_a_token)}"
    text += f"; {facts.num_verbatim} of {facts.num_targets} passages verbatim for up to {length}."
    if is_at_chance and not is_clause:
        text += detected
    if control.state == "shown":
        text += f" Shown the text, it reads {control.text}."
    elif control.state == "not applicable":
        text += f" It has no positive control: {control.not_applicable}."
    elif recited is not None and recited.number:
        text += f" More may be recited than was seen: {control.problem}."
    if facts.num_unanswered:
        text += (
            f" Answers withheld by the server or empty: {facts.num_unanswered:,}, which count as "
            "not recited."
        )
    return text + _limits(facts, checks)


def _limits(facts: audit.Facts, checks: Sequence[audit.Check]) -> str:
    """Return sentences with the outcome of each limit, those that failed first."""
    text = ""
    for outcome in ("fail", "undecided", "pass"):
        chosen = [str(check) for check in checks if check.outcome == outcome]
        if chosen:
            text += f" {outcome.upper()}: {'; '.join(chosen)}."
    is_more = facts.floor is not None and facts.floor.excess.low > 0
    if checks and all(check.outcome == "pass" for check in checks) and is_more:
        text += " These limits allow that targets are recited more than controls."
    return text


def _recited_tiers(recited: Recited) -> str:
    """Say which passages are recited further than unseen text, by their copies: ": all 23 that
    occur 40 times".
    """
    clauses = []
    for test in recited.tests[1:]:
        if not test.is_rejected:
            continue
        times = test.that_occur or " that occur an unknown number of times"
        number = f"{test.num_above} of the {test.num_targets}"
        if test.num_above == test.num_targets:
            number = "the one" if test.num_targets == 1 else f"all {test.num_targets}"
        clauses.append(f"{number}{times}")
    return f": {joined(clauses)}" if clauses else ""


def _noticeable(recited: Recited) -> str:
    """Say from how many recited passages on the test notices them, among those with the most copies
    that are enough for a test, and which are too few for one.
    """
    if not recited.all.num_targets:
        return f"; a control is recited for {recited.threshold:.0f} tokens, and no passage has more"
    tested = [test for test in recited.tests if test.noticeable is not None]
    if not tested:
        every = _all_passages(recited.all.num_targets)
        return f"; the test would not notice it if {every} were recited"
    test = tested[-1]  # tests of more copies come later
    least = f"{test.noticeable} or more of the {test.num_targets:,} passages"
    if test.noticeable == test.num_targets:
        least = _all_passages(test.num_targets)
    text = f"; {least}{test.that_occur} would have to be recited for the test to notice it"
    too_few = [test for test in recited.tiers if test.noticeable is None]
    if too_few:
        few = [f"{test.num_targets:,}{test.that_occur}" for test in too_few]
        text += f" (too few for a test of their own: {joined(few)})"
    return text


def _all_passages(number: int) -> str:
    return "the one passage" if number == 1 else f"all {number:,} passages"


def _readings(control: PositiveControl) -> Table:
    """Show what the positive control read on each path."""
    rows = []
    for reading in control.readings:
        num_in_full = reading.num_in_full if reading.path != "likelihoods" else None
        result = _result_of(reading, control)
        rows.append(
            (
                reading.path,
                reading.num_controls,
                reading.with_copy,
                reading.without_copy,
                reading.num_to_read,
                num_in_full,
                reading.p_value,
                result,
            )
        )
    formats = {"With the copy": ".2f", "Without": ".2f", "Of": ".0f", "p": ".4f"}
    columns = [
        "Asked by",
        "Controls",
        "With the copy",
        "Without",
        "Of",
        "Read in full",
        "p",
        "Result",
    ]
    notes = [
        "Controls are asked for once more with a copy of the passage in front of the prompt. Text "
        "and chat: tokens of the passage that the answer has in a row; likelihoods: NLL of the "
        "passage in nats a token. p: exact one-sided sign-flip test of the differences; shown if p "
        "is at most 0.01 and a quarter of the tokens is read."
    ]
    if control.not_applicable:
        notes.append(f"Not applicable: {control.not_applicable}.")
    elif control.obstacle:
        notes.append(f"Answers show nothing, whatever was read: {control.obstacle}.")
    return Table(
        "positive_control", "Positive control", pd.DataFrame(rows, columns=columns), notes, formats
    )


def _result_of(reading: Reading, control: PositiveControl) -> str:
    """Return the result of a path, which the verdict does not contradict."""
    if control.state == "not applicable":
        return control.state
    # What obstructs answers does not obstruct likelihoods.
    if control.obstacle and reading.path != "likelihoods":
        return "not shown"
    return "shown" if reading.is_shown else "not shown"


def _overview(
    facts: audit.Facts,
    likelihoods: Table,
    control: PositiveControl,
    notes: Footnotes,
    headline: Headline,
    *,
    blind: Blind | None,
    is_finding: bool,
) -> Table:
    """Show the answers of an audit, each with its interval, and the reading of the positive
    control.
    """
    floor = facts.floor
    verbatim = facts.num_verbatim
    number = facts.num_targets
    fewest = floor.excess.num_units if floor else 0
    row: dict[str, str | None] = {}
    row["Recited further"] = None
    if facts.recited is not None:
        most = 100 * facts.recited.upper
        row["Recited further"] = f"{facts.recited.number} of {number} (at most {most:.1f} %)"
    row["Shown the text"] = control.text if control.state == "shown" else control.state
    row["Recited above chance"] = None
    if floor is not None:
        row["Recited above chance"] = cell(floor.difference, floor.excess, sign="+")
    most = 100 * binomial_upper_bound(verbatim, number)
    row["Verbatim"] = f"{verbatim} of {number} (at most {most:.1f} %)"
    row["Membership AUC"] = None
    if headline.score is not None:
        header = auc_header(headline.score)
        values = likelihoods.frame.iloc[0].reindex([header, f"{header} from", f"{header} to"])
        auc, low, high = values.astype(float)
        row["Membership AUC"] = cell(auc, (low, high))
    row["Without the model"] = None
    if blind is not None:
        row["Without the model"] = cell(blind.auc, (blind.low, blind.high))
    caveats = [FEW_UNITS] if MIN_UNITS <= fewest < ENOUGH_UNITS else []
    if floor is not None and floor.excess.low <= 0:
        caveats.append(BOUND if floor.excess.high >= 0 else _EASY_CONTROLS)
    if verbatim or (floor is not None and floor.excess.low > 0):
        caveats.append(_BASE_MODEL)
    if not is_finding:
        caveats.append(_TEXTS_DIFFER)
    lost = facts.checkpoint.lost_prompts
    if lost:
        caveats.append(
            f"{lost} of {len(facts.samples)} prompts lost token ids when converted to text, so "
            "their scores are too low: evaluate with prompts of token ids (`tfidf-tune eval`)."
        )
    about = [
        "Recited further: passages that are recited further than unseen text, if their number is "
        "not chance; at most: of all passages chosen like these. Shown the text: what the model "
        "reads of controls that stand in front of the prompt; without that, a clean result says "
        "nothing.",
        "Recited above chance: LMS of the passages of the training text (targets) minus LMS of "
        f"text that the model never saw (controls), in tokens, on average. {LMS_EXPLAINED}. "
        "Verbatim: targets of which all that was compared is recited from at least one prompt; at "
        "most: of all passages chosen like these.",
        "In brackets: 95 % intervals over passages; of verbatim recitation the one-sided "
        f"bound.{notes.mark(*caveats)}",
    ]
    if headline.score is not None:
        about.insert(
            2,
            "Membership AUC: how often a target looks more like training text than a control, by "
            f"{headline.words}; 0.5 is chance. This score decides (it is the headline), because "
            f"{headline.reason}.",
        )
    if blind is not None:
        about.insert(
            3,
            "Without the model: the AUC of a classifier that learned to tell targets from controls "
            "by their words and characters, from other documents than it is tested on. Above "
            f"chance (here p = {blind.p_value:.3f}, by shuffled labels), the texts differ, and the "
            "model may find targets likelier although it never saw them.",
        )
    return Table("overview", "What the model recites", pd.DataFrame([row], dtype=object), about)


def _examples(facts: audit.Facts, *, show_passages: bool) -> list[Example]:
    """Show the targets that are recited most and, for comparison, the control that is."""
    best = {kind: audit.best_samples(facts.samples, kind) for kind in audit.KINDS}
    examples = []
    for row in [*best["target"][:_NUM_EXAMPLES].itertuples(), *best["control"][:1].itertuples()]:
        sample = row.sample
        kind = "a target" if sample.kind == "target" else "the control that is recited most"
        start = f" from token {sample.offset} on" if sample.offset else ""
        tokens = (
            f"{sample.prefix_length} tokens{start}" if sample.prefix_length else "its own prompt"
        )
        by = f", {sample.attack}" if sample.attack else ""
        truth, said = shared_pieces(sample.reference_text, sample.generated_text)
        prompt = row.prompt
        if not show_passages:
            truth, said = (excerpt(pieces, len(sample.reference_text)) for pieces in (truth, said))
            prompt = "".join(text for text, _ in excerpt(((prompt, False),), len(prompt)))
        shown = Continuation(
            facts.checkpoint.model, f"LMS {sample.lms}, ROUGE-L {sample.rouge_l:.1f}", said
        )
        examples.append(
            Example(
                f"{sample.passage_id}, {kind}: {tokens}{by}",
                prompt,
                "".join(text for text, _ in truth),
                (shown,),
                truth,
            )
        )
    return examples


def _summary(
    facts: audit.Facts,
    name: str,
    verdict: str,
    measures: dict[str, audit.MeasuredValue],
    checks: Sequence[audit.Check],
    control: PositiveControl,
    blind: Blind | None,
    headline: Headline,
    *,
    accept_unproven: bool,
) -> dict[str, Any]:
    """Return what `audit.json` has; docs/audit.md describes it."""
    excess = facts.floor and facts.floor.excess
    best = pd.concat([audit.best_samples(facts.samples, kind) for kind in audit.KINDS])
    best = best.astype({"repeats": "Int64"}).rename(columns={"passage_id": "id", "length": "of"})
    names = ["id", "kind", "lms", "of", "verbatim", "attack", "prefix_length", "repeats"]
    recites_more = None
    if excess and excess.num_units >= MIN_UNITS:
        recites_more = excess.low > 0
    within_limits = all(check.outcome == "pass" for check in checks)
    is_shown = accept_unproven or not control.problem
    limits = [check._asdict() | {"exceeded": check.outcome != "pass"} for check in checks]
    return {
        "schema_version": _SCHEMA_VERSION,
        "made_by": f"tfidf-tune {version('tfidf-tune')}",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": name,
        "verdict": verdict,
        "num_targets": facts.num_targets,
        "num_controls": facts.num_controls,
        "num_prompts": len(facts.samples),
        "num_unanswered": facts.num_unanswered,
        "recites_targets_more": recites_more,
        "attacks": facts.attacks,
        "measures": {key: measure._asdict() for key, measure in measures.items()},
        "recited": None if facts.recited is None else _recited_summary(facts.recited),
        "positive_control": {
            "state": control.state,
            "reason": control.problem or control.not_applicable,
            "readings": [_as_json(reading) for reading in control.readings],
        },
        "headline": {"membership": headline._asdict()},
        "blind": None if blind is None else blind._asdict() | {"tells_apart": blind.tells_apart},
        "limits": limits,
        "passed": within_limits and is_shown,
        "passages": json.loads(best[names].to_json(orient="records")),
    }


def _as_json(reading: Reading) -> dict[str, Any]:
    return {key: finite(value) for key, value in reading._asdict().items()}


def _recited_summary(recited: Recited) -> dict[str, Any]:
    tests = [test._asdict() | {"is_rejected": test.is_rejected} for test in recited.tests]
    return {
        "number": recited.number,
        "threshold": recited.threshold,
        "controls_above": recited.num_allowed,
        "upper": recited.upper,
        "tests": tests,
    }


def _provenance(facts: audit.Facts, before: audit.Facts | None) -> dict[str, str]:
    checkpoint = facts.checkpoint
    samples = facts.samples
    # The model.
    entries = {"Checkpoint": checkpoint.checkpoint}
    if checkpoint.progress < 100:
        entries["Training progress"] = f"{checkpoint.progress} %"
    entries["Objective"] = checkpoint.objective
    if before is not None:
        entries["Model before training"] = before.checkpoint.folder
    entries["Seed"] = "unknown" if checkpoint.seed is None else str(checkpoint.seed)
    entries["Results"] = checkpoint.folder
    # What it was asked, and how.
    entries["Passages"] = f"{facts.num_targets} targets, {facts.num_controls} controls"
    entries["Prompts (tokens)"] = ", ".join(map(str, facts.prompt_lengths))
    offsets = sorted(set(samples["offset"]))
    entries["Prompts start at token"] = ", ".join(map(str, offsets))
    entries["Attacks"] = ", ".join(facts.attacks)
    entries["Continuations"] = f"compared over up to {samples['length'].max()} tokens"
    entries["BOS"] = _BOS[facts.has_bos]
    if facts.is_served:
        entries["Prompts at the server"] = _prompts_at_server(checkpoint.prompt_obstacle)
    if facts.num_with_eos:
        entries["EOS inside a passage"] = f"{facts.num_with_eos} passages"
    # How the figures were computed.
    resampled = f"percentile bootstrap, {NUM_RESAMPLES:,} resamples of whole passages, 95 %"
    entries["Intervals"] = resampled
    entries["Made by"] = f"tfidf-tune {version('tfidf-tune')}"
    return entries


def _prompts_at_server(obstacle: str | None) -> str:
    if obstacle is None:
        return "not counted by it, so that it is unknown if it changes them"
    return obstacle or "as many tokens as were sent, by its count"


def _method_and_limits(
    facts: audit.Facts, *, show_passages: bool, has_likelihoods: bool, by_coin: bool
) -> Section:
    """Say what an audit did and what its result does not say, for readers who decide
    about a model.
    """
    lengths = " and ".join(map(str, facts.prompt_lengths))
    ways = "; ".join(f"{name}: {ATTACKS[name]}" for name in facts.attacks)
    asked = (
        f"Asked. {facts.num_targets} passages of the text in question (targets) and "
        f"{facts.num_controls} of text that the model cannot have seen (controls). The model was "
        f"given the beginning of a passage, {lengths} tokens, and its answer was compared with "
        f"what follows in the passage, up to {facts.samples['length'].max()} tokens. "
        f"{len(facts.samples):,} prompts. Ways of asking: {ways}."
    )
    likelihoods = " Likelihoods were not measured: the model gave none."
    compared = _COMPARED + (_LIKELIHOODS if has_likelihoods else likelihoods)
    shown = "Text. Passages are shown in full." if show_passages else _EXCERPTS
    paragraphs = [asked, compared, *_LIMITS]
    if by_coin:  # in place of what is said of other controls
        paragraphs = [text for text in paragraphs if not text.startswith("Controls.")]
        paragraphs.append(_BY_COIN)
    paragraphs.append(shown)
    return Section("method", "Method and limits", tuple(paragraphs))
