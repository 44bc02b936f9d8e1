"""What is kept of a run: a line of the records, from which all figures of the page are computed."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from research.decisive.facts import facts_of
from research.files import read_json_lines
from tfidf_tune.audit._blind import BlindText, blind_baseline
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages.probe_file import Passage, read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results

_NGRAMS = (4, 5, 6)
_ATTACKS = "auc_"


def record_of(run: Path, checkpoint: str, inputs: Path) -> dict[str, Any]:
    """Return the record of a checkpoint that was evaluated.

    Args:
        run: The folder of a run.
        checkpoint: The name of the checkpoint, such as "checkpoint_100pct".
        inputs: The folder of its seed, by :func:`research.decisive.texts.write_inputs`.
    """
    evaluation = run / "evaluation" / checkpoint
    passages = {one.id: one for one in read_probe_file(inputs / "probe.jsonl")}
    scores = import_results([evaluation]).scores
    of_passages = scores[scores["unit"].isin(list(passages))]
    means = of_passages.groupby(["metric", "unit"], observed=True)["value"].mean()
    ngrams = _ngram_scores(evaluation)
    targets = []
    controls = []
    for name, passage in passages.items():
        values = {
            "lms": float(means["lms"][name]),
            "edit_distance": float(means["edit_distance"][name]),
            "verbatim": float(means["verbatim"][name]),
            "nll": float(means["passage_nll"][name]),
            "ngrams": ngrams[name],
        }
        if passage.kind == "target":
            targets.append({"copies": passage.num_injections, "change": passage.source, **values})
        else:
            controls.append(values)
    results = _results(evaluation)
    membership = results["tfidf_membership"]
    aucs = {}
    for key, value in membership.items():
        name = key.removesuffix(",none")
        if name.startswith(_ATTACKS) and isinstance(value, float):
            aucs[name.removeprefix(_ATTACKS)] = value
    record = {
        **json.loads((run / "cell.json").read_text(encoding="utf-8")),
        "checkpoint": checkpoint,
        "content": json.loads((inputs / "content.json").read_text(encoding="utf-8")),
        "perplexity": results["tfidf_wikitext2_ppl"]["token_perplexity,none"],
        "frame_perplexity": results["tfidf_other_ppl"]["token_perplexity,none"],
        "auc": aucs,
        "auc_without_model": _auc_without_model([*passages.values()]),
        "targets": _columns(targets),
        "controls": _columns(controls),
    }
    if (inputs / "facts.jsonl").is_file():  # natural text has none
        model = load_model(run / checkpoint, dtype=torch.float32)
        record |= facts_of(model, hf_tokenizer(str(run / checkpoint)), inputs)
    trained = json.loads((run / "trained.json").read_text(encoding="utf-8"))
    record["seconds"] = trained["seconds"]
    record["provenance"] = trained["provenance"]
    return record


def read_records(file: Path) -> list[dict[str, Any]]:
    """Read records, with their targets and controls as rows."""
    records = read_json_lines(file)
    for record in records:
        record.setdefault("learning_rate", None)  # of a part with the rate of its config
        for kind in ("targets", "controls"):
            record[kind] = rows_of(record[kind])
    return records


def rows_of(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Turn columns into rows."""
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns, with numbers of three digits after the point: a third of the size."""
    columns: dict[str, list[Any]] = {name: [] for name in rows[0]}
    for row in rows:
        for name, value in row.items():
            columns[name].append(round(value, 3) if isinstance(value, float) else value)
    return columns


def _results(evaluation: Path) -> dict[str, Any]:
    """Return the results of all tasks of an evaluation, by task."""
    found: dict[str, Any] = {}
    for file in sorted(evaluation.rglob("results_*.json")):
        found |= json.loads(file.read_text(encoding="utf-8"))["results"]
    return found


def _ngram_scores(evaluation: Path) -> dict[str, float]:
    """Return by passage how much of its continuation the model's own contains: the mean share of
    the n-grams of 4 to 6 tokens, over prompts (Slack and Al Moubayed, TACL 2025).
    """
    shares: dict[str, list[float]] = {}
    for file in sorted(evaluation.rglob("samples_tfidf_memorization*.jsonl")):
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line:
                sample = json.loads(line)["doc"]["sample"]
                share = _share_of_ngrams(sample["reference_ids"], sample["generated_ids"])
                shares.setdefault(sample["passage_id"], []).append(share)
    return {name: math.fsum(of_name) / len(of_name) for name, of_name in shares.items()}


def _share_of_ngrams(reference: list[int], generated: list[int]) -> float:
    shares = []
    for n in _NGRAMS:
        wanted = list(_ngrams(reference, n))
        given = set(_ngrams(generated, n))
        if wanted:
            shares.append(sum(ngram in given for ngram in wanted) / len(wanted))
    return math.fsum(shares) / len(shares) if shares else 0.0


def _ngrams(ids: list[int], n: int) -> Iterator[tuple[int, ...]]:
    for first in range(len(ids) - n + 1):
        yield tuple(ids[first : first + n])


def _auc_without_model(passages: list[Passage]) -> list[float]:
    """Return the AUC of a classifier that sees only the texts, with the ends of its interval."""
    texts = [
        BlindText(text=one.text, is_target=one.kind == "target", document=one.id)
        for one in passages
    ]
    blind = blind_baseline(texts)
    if blind is None:
        raise ValueError("there are too few passages for a classifier")
    return [round(value, 4) for value in (blind.auc, blind.low, blind.high)]
