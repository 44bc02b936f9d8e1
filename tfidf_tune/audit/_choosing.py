"""The passages of an audit: chosen from texts, or those that an earlier audit with the same options
has chosen.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfidf_tune import _files
from tfidf_tune._checks import differences
from tfidf_tune._printing import counted, option_names
from tfidf_tune.audit._plan import Plan

if TYPE_CHECKING:
    from tfidf_tune.corpus import TaskRunner
    from tfidf_tune.passages import MadeProbe, Passage, ProbeSpec

DEFAULT_CONTROLS = "Python's documentation"
# What :func:`_what_changed` has words for; other arguments are options.
_DESCRIBED = (
    "controls",
    "controls_source",
    "controls_column",
    "held_out",
    "tokenizer",
    "format",
    "probe_file",
    "texts",
    "sources",
    "without_coin",
)

Note = Callable[[str], object]  # takes what a person who waits should know


def about_documents_without_coin(without_coin: dict[str, int]) -> str:
    """Say which documents of a holdout no coin was tossed for, and what follows for an audit.

    Args:
        without_coin (dict[str, int]): how many "documents" in how many "groups", each with more
            near copies than "largest_group".
    """
    documents = counted(without_coin["documents"], "document")
    groups = counted(without_coin["groups"], "group")
    return (
        f"{documents} in {groups} of more than {without_coin['largest_group']:,} near copies were "
        "trained on without a coin, because near copies must not stand on both sides. None of "
        "their passages is asked for, so this audit says nothing about them, although text with "
        "many copies is recited first"
    )


def choose(plan: Plan, note: Note) -> "Sequence[Passage]":
    """Read the passages of a probe file, or choose them unless an earlier audit with the same
    options has.
    """
    from tfidf_tune.passages import read_probe_file

    if plan.chosen is not None:
        if plan.has_controls_of_run:
            note(
                "Controls: the text that the run of the model held out, "
                f"{plan.chosen.controls_source}; --controls names another."
            )
        return choose_passages(
            plan.chosen,
            plan.tokenizer,
            plan.probe_file,
            plan.spec.runner,
            record=plan.record,
            overwrite=plan.spec.overwrite,
            note=note,
        )
    passages = read_probe_file(plan.probe_file)
    if all(passage.kind != "target" for passage in passages):
        raise ValueError(
            f"none of the {len(passages)} passages in {plan.probe_file} is a target, so that there "
            "is nothing to judge: name a probe file with passages of the training text"
        )
    return passages


def choose_passages(
    spec: "ProbeSpec",
    tokenizer: str,
    file: Path,
    runner: "TaskRunner | None" = None,
    *,
    record: Path | None = None,
    overwrite: bool = False,
    note: Note = lambda text: None,
) -> "Sequence[Passage]":
    """Write a probe file, say what is in it, and return the passages.

    With ``record``, a file in which it is written what the passages follow from, an existing probe
    file is read instead if it still follows from the same. Else it is an error, unless
    ``overwrite`` replaces it.
    """
    from tfidf_tune.data import hf_tokenizer
    from tfidf_tune.passages import make_probe, read_probe_file, write_probe_file
    from tfidf_tune.passages.choosing import search_arguments

    loaded = hf_tokenizer(tokenizer)
    arguments = search_arguments(loaded, spec)
    found = arguments["held_out"]
    if found:
        note(
            f"Left out of the targets: {found['passages']} passages that training held out, by "
            f"{found['file']}."
        )
    if "without_coin" in arguments:
        note(
            f"Left out: {about_documents_without_coin(arguments['without_coin'])}. To ask for "
            "them, too, audit the text itself: tfidf-tune audit MODEL TEXTS --controls UNSEEN"
        )
    with _files.work_folder(
        file.with_suffix(".search"), arguments, replace=overwrite, describe=_what_changed
    ) as work:
        if file.exists() and not overwrite:
            if record is None or not record.is_file():
                raise ValueError(
                    f"{file} exists already: name another file, or replace it by --overwrite"
                )
            recorded = json.loads(record.read_text(encoding="utf-8"))
            now = {"probe_file": _files.file_sha256(file)}
            changed = _what_changed(recorded, arguments | now)
            if changed:
                raise ValueError(
                    f"{file} has the passages of an earlier audit, and what they follow from has "
                    f"changed: {'; '.join(changed)}. Name another --output-dir to keep them, or "
                    "choose others by --overwrite"
                )
            note(f"Passages: from {file}.")
            return read_probe_file(file)
        made = make_probe(loaded, spec, work, runner)
        written = work / file.name
        write_probe_file(written, made.passages)
        if record is not None:  # first, so that it never stands beside passages of other arguments
            with _files.atomic_file(record) as temporary:
                text = json.dumps(arguments | {"probe_file": _files.file_sha256(written)}, indent=2)
                temporary.write_text(text + "\n", encoding="utf-8")
        written.replace(file)
    note(_chosen(made, spec))
    return made.passages


def _what_changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say in words what is different in what passages follow from, see :func:`search_arguments`."""
    phrases = []
    # The controls: from which text, and what is in it.
    source_before = before.get("controls_source") or DEFAULT_CONTROLS
    source = now.get("controls_source") or DEFAULT_CONTROLS
    had_controls = "controls" in before and "controls" in now
    if had_controls and source_before != source:
        phrases.append(f"the controls were from {source_before}, are from {source}")
    elif had_controls and before["controls"] != now["controls"]:
        phrases.append(f"the content of the controls, {source}, has changed")
    # What training held out.
    held_out = [arguments.get("held_out") or {} for arguments in (before, now)]
    files = [each.get("file", "no file") for each in held_out]
    if files[0] != files[1]:
        phrases.append(f"what training held out was from {files[0]}, is from {files[1]}")
    elif held_out[0] != held_out[1]:
        numbers = [each.get("passages", 0) for each in held_out]
        phrases.append(
            f"the content of {files[1]}, which has what training held out, has changed: it had "
            f"{counted(numbers[0], 'passage')}, has {numbers[1]}"
        )
    if before.get("tokenizer") != now.get("tokenizer"):
        phrases.append("the tokenizer is another")
    if before.get("format") != now.get("format"):
        phrases.append("another version of tfidf-tune chose them")
    if before.get("probe_file") != now.get("probe_file"):
        phrases.append("the file itself has changed")
    # The texts, by their complete paths, and the options.
    phrases += differences(before.get("texts") or {}, now.get("texts") or {})
    phrases += differences(_options(before), _options(now))
    return phrases or differences(before, now)


def _options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that are options, under the names of the command line."""
    return {option_names([key]): value for key, value in arguments.items() if key not in _DESCRIBED}


def _chosen_by_coin(made: "MadeProbe", spec: "ProbeSpec") -> str:
    """Describe the passages of a holdout."""
    copies = Counter(
        passage.num_injections for passage in made.passages if passage.kind == "target"
    )
    by_copies = [f"{number} of {each}" for each, number in sorted(copies.items())]
    num_targets = sum(copies.values())
    lines = [
        f"Text: {made.num_documents:,} documents, {made.num_tokens:,} tokens, divided by a coin "
        f"before training ({spec.holdout}).",
        f"Targets: {num_targets} of what was trained on, by the documents of their groups: "
        f"{', '.join(by_copies)} (passages of documents).",
        f"Controls: {num_targets} of what was held out, as many of each number of documents.",
        f"Refused: {made.num_refused} candidates with text of another document, "
        f"{made.num_repetitive} that repeat a few tokens.",
    ]
    if num_targets < min(spec.num_targets, spec.num_controls):
        lines.append(
            f"There are no more passages of {spec.block_size} tokens on both sides: "
            f"{spec.num_targets} targets and {spec.num_controls} controls were wanted."
        )
    return "\n".join(lines)


def _chosen(made: "MadeProbe", spec: "ProbeSpec") -> str:
    """Describe the passages in a few lines."""
    if spec.holdout is not None:
        return _chosen_by_coin(made, spec)
    num_targets = sum(passage.kind == "target" for passage in made.passages)
    num_controls = len(made.passages) - num_targets
    repeats = sorted(passage.num_injections for passage in made.passages[: made.num_duplicates])
    times = ""
    if repeats:
        least = f"{repeats[0]:,}"
        most = f"{repeats[-1]:,}"
        times = f", which occur {least} times"
        if most != least:
            times = f", which occur {least} to {most} times"
    starts = [f"{start.phrase} {count}" for start, count in sorted(made.starts.items())]
    about = "about " if made.is_estimate else ""
    lines = [
        f"Text: {made.num_documents:,} documents, {about}{made.num_tokens:,} tokens.",
        f"Duplicated stretches of at least {spec.block_size} tokens: "
        f"{len(made.stretch_repeats):,}, with {sum(made.stretch_repeats):,} occurrences.",
        f"Targets: {num_targets}; {made.num_duplicates} are duplicates{times}, "
        f"{num_targets - made.num_duplicates} were drawn at random.",
        f"Targets by where they start: {', '.join(starts)}.",
    ]
    if spec.without_eos:
        lines.append("No passage has EOS inside.")
    if made.unsearched_share:
        lines.append(
            f"Copies of {made.unsearched_share:.1%} of the passages in a sample of the text cannot "
            "be found: they have too few words, or too short tokens."
        )
    if made.num_repetitive:
        lines.append(f"Left out: {made.num_repetitive} passages that repeat a few tokens.")
    if spec.num_controls:
        lines.append(
            f"Controls: {num_controls}; {made.num_refused} candidates share text with the training "
            "data, or cannot be compared with it, and were rejected."
        )
    if spec.controls_source and not num_controls and spec.num_controls and not spec.held_out:
        lines.append(
            "If a run held the controls out of this text, name its passages, too: --held-out "
            "RUN/probe.jsonl."
        )
    if num_targets < spec.num_targets or num_controls < spec.num_controls:
        lines.append(
            f"There are no more passages of {spec.block_size} tokens without overlap: "
            f"{spec.num_targets} targets and {spec.num_controls} controls were wanted."
        )
    if num_controls and spec.controls_source is None:
        lines.append(
            "The controls are Python's documentation: another domain than your text, and known to "
            "most pretrained models. Held-out text is better: --controls."
        )
    return "\n".join(lines)
