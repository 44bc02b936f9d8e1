"""An audit of a tiny model that takes seconds: its texts and its specification."""

from pathlib import Path
from typing import Any

from helpers.fakes.tiny_run import write_documents
from tfidf_tune.audit import AuditSpec
from tfidf_tune.data import embedded_documents
from tfidf_tune.passages import ProbeSpec


def write_texts(folder: Path) -> None:
    """Write ``training.txt``, and ``unseen.txt`` with the controls."""
    write_documents(folder / "training.txt")
    unseen = embedded_documents("docstrings_validation")[:60]
    lines = [text.replace("\n", " ") for text in unseen]
    (folder / "unseen.txt").write_text("\n".join(lines))


def spec_of(folder: Path, **changes: Any) -> AuditSpec:
    """Ask for 12 targets and 12 controls of the texts of a folder; ``changes`` name the model."""
    passages = ProbeSpec(
        (str(folder / "training.txt"),),
        controls_source=str(folder / "unseen.txt"),
        num_targets=12,
        num_controls=12,
        block_size=24,
        sample_by="line",
    )
    arguments = {
        "passages": passages,
        "prefix_lengths": (6,),
        "max_new_tokens": 8,
        "output_dir": folder / "audit",
        "accept_unproven": True,
    }
    return AuditSpec(**arguments | changes)
