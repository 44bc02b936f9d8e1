"""The passages of an audit: chosen from texts, or those that an earlier audit with the same options
has chosen.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tfidf_tune import _files
from tfidf_tune._checks import differences
from tfidf_tune.audit._plan import Plan

if TYPE_CHECKING:
    from tfidf_tune.corpus import TaskRunner
    from tfidf_tune.passages import MadeProbe, Passage, ProbeSpec

Note = Callable[[str], object]  # takes what a person who waits should know


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
    with _files.work_folder(file.with_suffix(".search"), arguments, replace=overwrite) as work:
        if file.exists() and not overwrite:
            if record is None or not record.is_file():
                raise ValueError(
                    f"{file} exists already: name another file, or replace it by --overwrite"
                )
            recorded = json.loads(record.read_text(encoding="utf-8"))
            now = {"probe_file": _files.file_sha256(file)}
            changed = differences(recorded, arguments | now)
            if changed:
                raise ValueError(
                    f"{file} was chosen with other options, or changed since: "
                    f"{'; '.join(changed)}. Name another --output-dir, or --overwrite"
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


def _chosen(made: "MadeProbe", spec: "ProbeSpec") -> str:
    """Describe the passages in a few lines."""
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
