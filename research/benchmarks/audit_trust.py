"""Does an audit find passages that a model has seen, and nothing where there is nothing?

    python research/benchmarks/audit_trust.py

Trains small models on text with passages that occur a known number of times (audit_trust.yaml),
then audits each by `tfidf-tune audit` twice: with its passages, and with passages of the same kind
that no model has seen. Controls are other unseen passages. A passage is found if it is recited
further than any control. The record is read by docs/audit_evidence.md.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from measuring import add_output, finish, markdown_table, run_audit, share

from research.experiment.__main__ import main as experiment_command
from research.files import write_texts
from tfidf_tune.passages import read_probe_file

_EXPERIMENT = Path(__file__).with_name("audit_trust.yaml")
_LENGTH = 240  # tokens of an audited passage; those in the training text have 256
_NUM_PASSAGES = (
    16  # of 19 of each kind: some of those never injected share text with the training data
)


def main() -> None:
    """Train, audit and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/audit_trust"), help="of the experiment"
    )
    parser.add_argument("--jobs", default="2", help="trainings at once")
    add_output(parser)
    options = parser.parse_args()
    experiment_command([str(_EXPERIMENT), "--jobs", options.jobs, f"output_dir={options.runs}"])
    runs = sorted(options.runs.glob("*-copies-*/ce/seed0"))
    audits = []
    for run in runs:
        for asked in ("injected", "unseen"):
            model = run.parent.parent.name
            audits.append({"model": model, "asked": asked, **_audited(run, asked)})
    finish(
        options, ("torch", "transformers", "tfidf-tune"), table, block_size=_LENGTH, audits=audits
    )


def _audited(run: Path, asked: str) -> dict[str, Any]:
    """Audit a model with the passages that it has seen, or with half of those that it has not."""
    passages = read_probe_file(run / "probe.jsonl")
    # Of the same split, not injected.
    unseen = [one.text for one in passages if one.kind == "control"]
    texts = {
        "injected": [one.text for one in passages if one.kind == "target"],
        "unseen": unseen[::2],
        "controls": unseen[1::2],
    }
    folder = run / "trust"
    folder.mkdir(exist_ok=True)
    for name, own in texts.items():
        write_texts(folder / f"{name}.jsonl", own)
    made = run_audit(
        str(run / "checkpoint_100pct"),
        str(folder / f"{asked}.jsonl"),
        "--controls",
        str(folder / "controls.jsonl"),
        "--passages",
        "random",
        "--block-size",
        str(_LENGTH),
        "--num-targets",
        str(_NUM_PASSAGES),
        "--num-controls",
        str(_NUM_PASSAGES),
        "--output-dir",
        str(folder / asked),
        "--overwrite",
        "--held-out",
        "",  # it is what "unseen" asks for
    )
    lms = {
        kind: [one["lms"] for one in made["passages"] if one["kind"] == kind]
        for kind in ("target", "control")
    }
    return {
        "recites_targets_more": made["recites_targets_more"],
        "verbatim": made["measures"]["verbatim"],
        "lms": lms,
    }


def table(record: dict[str, Any]) -> str:
    """Lay out the record: a row for each number of copies, and one for text that no
    model has seen.
    """
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for one in record["audits"]:
        copies = int(one["model"].split("-")[0]) if one["asked"] == "injected" else 0
        groups.setdefault((copies, one["asked"]), []).append(one)
    rows = []
    for (copies, _), audits in sorted(groups.items(), reverse=True):
        # Which targets are recited further than all controls, and how each pair of a target and a
        # control is ranked: 1, 1/2 for equal numbers, or 0.
        recited: list[bool] = []
        ranks: list[float] = []
        for one in audits:
            controls = one["lms"]["control"]
            for lms in one["lms"]["target"]:
                recited.append(lms > max(controls))
                ranks.extend(np.where(lms == np.array(controls), 0.5, lms > np.array(controls)))
        positive = sum(one["recites_targets_more"] for one in audits)
        row = [
            str(copies) if copies else "none, unseen text",
            share(positive, len(audits)),
            share(sum(recited), len(recited)),
            f"{np.mean(ranks):.2f}",
        ]
        rows.append(row)
    columns = [
        "copies",
        "audits that say so",
        "passages recited further than any control",
        "AUC of the ranking",
    ]
    return markdown_table(columns, rows)


if __name__ == "__main__":
    main()
