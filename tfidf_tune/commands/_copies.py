"""What ``tfidf-tune data copies`` prints and writes: what repeats in a text, and which objective
fits it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from tfidf_tune.corpus.advice import advice_for
from tfidf_tune.corpus.repeated_text import (
    BYTES_OF_TOKEN,
    DIFFERING,
    LEAST_TOKENS,
    TUNED,
    USUAL,
    RepeatedText,
    Stretch,
)
from tfidf_tune.report import Report
from tfidf_tune.report.document import Table, tabulate


def without_text(found: RepeatedText) -> RepeatedText:
    """Leave out the excerpts."""

    def bare(stretches: Sequence[Stretch]) -> list[Stretch]:
        return [stretch._replace(excerpt="") for stretch in stretches]

    return replace(
        found,
        largest_documents=bare(found.largest_documents),
        largest_stretches=bare(found.largest_stretches),
        frames=bare(found.frames),
    )


def copies_report(
    found: RepeatedText, sources: Sequence[str], provenance: dict[str, str]
) -> Report:
    """Make the page; the advice is its verdict."""
    tables = [_overview(found)]
    if found.by_copies:
        tables.append(_by_copies(found))
    for name, title, stretches in (
        ("frames", "Stretches in more than a tenth of the documents that stay", found.frames),
        ("largest_stretches", "Stretches that take the most text", found.largest_stretches),
        ("largest_documents", "Documents with the most copies", found.largest_documents),
    ):
        if stretches:
            tables.append(_largest(name, title, stretches))
    names = [Path(source).name for source in sources]
    advice = [str(each) for each in advice_for(found.repeats)]
    return Report(
        title=f"What repeats in {', '.join(names)}",
        verdict=" ".join(advice),
        tables=tables,
        provenance=provenance,
    )


def _overview(found: RepeatedText) -> Table:
    rows: list[tuple[str, int, float | None]] = [
        ("Documents", found.documents, None),
        ("Words", found.words, None),
    ]
    if found.tokens is not None:
        rows.append(("Tokens", found.tokens, None))
    for what, number in (
        ("Documents equal to an earlier one", found.exact_copies),
        ("Near copies, the equal ones included", found.near_copies),
        ("Copies that differ, too", found.differing_copies),
        ("What the tuned threshold would remove", found.tuned_copies),
    ):
        rows.append((what, number, 100 * number / max(1, found.documents)))
    inside = 100 * found.copied_bytes_inside / max(1, found.num_bytes)
    num_stretches = sum(group.stretches for group in found.by_copies)
    what = f"Stretches of {LEAST_TOKENS} tokens or more that occur again"
    rows.append((what, num_stretches, inside))
    what = "Bytes that are a copy, of documents or stretches"
    rows.append((what, found.copied_bytes, 100 * found.copied_share))
    frame = pd.DataFrame(rows, columns=["what", "number", "share"])
    notes = [
        f"A near copy has a Jaccard similarity of {USUAL.threshold:g} or more of "
        f"{USUAL.ngram}-grams of words to another document, a copy that differs one of "
        f"{DIFFERING.threshold:g}; the tuned threshold is {TUNED.threshold:g} of "
        f"{TUNED.ngram}-grams, and removes texts of one kind, too. Documents that others connect "
        "are one group, of which one stays.",
        "Stretches are those of the documents that stay without near copies, each counted once.",
        "Shares of copies of documents are of the documents; shares of stretches and bytes are of "
        "the bytes of the text, without the first occurrence of a stretch.",
    ]
    columns = [("What", "what", ""), ("Number", "number", ","), ("Share, %", "share", ".1f")]
    return tabulate("copies", "Copies in the text", frame, columns, notes)


def _by_copies(found: RepeatedText) -> Table:
    rows = []
    for group in found.by_copies:
        copies = f"{group.least:,}"
        if group.most != group.least:
            copies = f"{group.least:,} to {group.most:,}"
        share = 100 * group.copied_bytes / max(1, found.num_bytes)
        rows.append((copies, group.stretches, share))
    frame = pd.DataFrame(rows, columns=["copies", "number", "share"])
    columns = [
        ("Copies", "copies", ""),
        ("Stretches", "number", ","),
        ("% of the text", "share", ".1f"),
    ]
    return tabulate("by_copies", "Stretches by number of copies", frame, columns)


def _largest(name: str, title: str, stretches: Sequence[Stretch]) -> Table:
    frame = pd.DataFrame([stretch._asdict() for stretch in stretches])
    frame["tokens"] = (frame["num_bytes"] / BYTES_OF_TOKEN).round().astype(int)
    columns = [
        ("Copies", "copies", ","),
        ("Documents", "documents", ",.0f"),
        ("Tokens, about", "tokens", ","),
        ("First at", "place", ""),
    ]
    if any(frame["excerpt"]):
        columns.append(("Begins", "excerpt", ""))
    notes = []
    if frame["documents"].isna().any() and frame["documents"].notna().any():
        notes.append("Documents are counted only of stretches that may be in a tenth of them.")
    return tabulate(name, title, frame, columns, notes).without_empty_columns()


def json_text(found: RepeatedText, sources: Sequence[str]) -> str:
    """Return what was found, and the advice, as JSON."""
    content = {
        "texts": list(sources),
        **found.as_json(),
        "advice": [advice._asdict() for advice in advice_for(found.repeats)],
    }
    return json.dumps(content, indent=1, ensure_ascii=False)


def json_files(found: RepeatedText, sources: Sequence[str]) -> dict[str, Callable[[Path], object]]:
    """Return the file beside the page, for :func:`~tfidf_tune.report.write_report`."""

    def write(path: Path) -> None:
        path.write_text(
            json_text(found, sources) + "\n", encoding="utf-8", errors="backslashreplace"
        )

    return {"copies.json": write}
