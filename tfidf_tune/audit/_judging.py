"""The answers of an audit are judged: by the same function when they are given, and when somebody
else recomputes them.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from tfidf_tune import _files
from tfidf_tune.audit._headline import Headline
from tfidf_tune.audit._measures import Bound
from tfidf_tune.audit._report import audit_report
from tfidf_tune.passages import Passage
from tfidf_tune.report import Report, write_report
from tfidf_tune.results import import_results

_SHOWN_TEXTS = 3


def judge(
    evaluated: Path,
    report_folder: Path,
    bounds: Sequence[Bound],
    *,
    accept_unanswered: bool,
    accept_unproven: bool,
    show_passages: bool,
    inputs: dict[str, Any],
    recorded: dict[str, str],
    date: str,
    headline: Headline | None,
    passages: Sequence[Passage] = (),
) -> tuple[Report, dict[str, Any]]:
    """Write the report of answers, and ``audit.json``.

    Args:
        evaluated (Path): the folder of the answers.
        report_folder (Path): the folder to write.
        bounds (Sequence[Bound]): limits.
        accept_unanswered (bool): as of :class:`AuditSpec`.
        accept_unproven (bool): as of :class:`AuditSpec`.
        show_passages (bool): as of :class:`AuditSpec`.
        inputs (dict[str, Any]): hashes of texts, passages and weights, for ``audit.json``, and the
            manifest of a holdout, if a coin divided targets and controls.
        recorded (dict[str, str]): more for ``audit.json``: the hash of the plan, and the folder of
            the answers within the folder of the audit. Empty without a plan.
        date (str): when the answers were judged, in ISO format.
        headline (Headline | None): of the plan; None without one, then it follows from the answers
            by the same rule.
        passages (Sequence[Passage]): the probe file, which says where passages are. Default: none.

    Returns:
        tuple[Report, dict[str, Any]]: the report, and the content of ``audit.json``.

    Raises:
        ValueError: If the answers are those of several runs, or none are of a target.
    """
    results = import_results([evaluated])
    trained = [checkpoint for checkpoint in results.checkpoints if not checkpoint.is_start]
    folders = {checkpoint.run: checkpoint.folder for checkpoint in trained}
    if len(folders) > 1:
        raise ValueError(
            f"{evaluated} holds the results of several runs: name one of "
            f"{', '.join(folders.values())}"
        )
    made = audit_report(
        results,
        bounds=bounds,
        show_passages=show_passages,
        accept_unanswered=accept_unanswered,
        accept_unproven=accept_unproven,
        passages=passages,
        by_coin="holdout" in inputs,
        without_coin=inputs.get("without_coin"),
        headline=headline,
    )
    summary = {**made.summary, "date": date, **recorded, "inputs": inputs}
    made = replace(made, subject=_subject(results.checkpoints[-1].checkpoint, inputs, date))
    if recorded:
        # The folder may be moved, and is read by others.
        moved = {"Results": recorded["evaluation"], "Plan": f"SHA-256 {recorded['plan']}"}
        made = replace(made, provenance={**made.provenance, **moved})
    if "controls_source" in inputs:
        made = replace(
            made, provenance={**made.provenance, "Controls from": inputs["controls_source"]}
        )
    held_out = inputs.get("held_out")
    if held_out:
        left_out = f"{held_out['passages']} passages that training held out, by {held_out['file']}"
        made = replace(made, provenance={**made.provenance, "Left out": left_out})
    text = json.dumps(summary, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_report(
        made,
        report_folder,
        more={"audit.json": lambda path: path.write_text(text, encoding="utf-8")},
    )
    return made, summary


def _subject(checkpoint: str, inputs: dict[str, Any], date: str) -> str:
    """Name the model, the text and the controls, with eight digits of their hashes,
    and the date.
    """
    parts = [f"Model: {_hashed(checkpoint, inputs.get('model'))}"]
    texts = inputs.get("texts") or {}
    names = [_hashed(Path(file).name, sha256) for file, sha256 in texts.items()]
    if names:
        shown = ", ".join(names[:_SHOWN_TEXTS])
        if len(names) > _SHOWN_TEXTS:
            shown += f" and {len(names) - _SHOWN_TEXTS:,} more"
        parts.append(f"text: {shown}")
    if inputs.get("controls"):
        unseen = Path(inputs.get("controls_source", "unseen text")).name
        parts.append(f"controls: {_hashed(unseen, inputs['controls'])}")
    if inputs.get("probe_file"):
        parts.append(f"passages: {_hashed('probe file', inputs['probe_file'])}")
    return f"{'; '.join(parts)}; {datetime.fromisoformat(date).date().isoformat()}."


def _hashed(name: str, value: Any) -> str:
    """Write a name with the beginning of its hash, or of that of several hashes; without any, the
    name.
    """
    if not value:
        return name
    sha256 = value if isinstance(value, str) else _files.digest(sorted(value.values()))
    return f"{name} ({sha256[:8]})"
