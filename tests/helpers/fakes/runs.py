"""Fake runs: the files that lm-evaluation-harness writes of them, and the table of results that is
read from these.
"""

import dataclasses
import json
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tfidf_tune.probe import ProbeSample
from tfidf_tune.results import import_results

DATE = "2026-11-21T10-00-00.000001"


@dataclass(frozen=True)
class Evaluation:
    """What one checkpoint of a run scored: samples, and the documents of the other tasks."""

    progress: int
    samples: tuple[ProbeSample, ...]
    checkpoint: str
    prompts: dict[str, str] = field(default_factory=dict)  # texts by passage
    blocks: tuple[dict, ...] = ()
    summaries: tuple[dict, ...] = ()
    answers: tuple[dict, ...] = ()
    passages: tuple[dict, ...] = ()  # of the membership task
    num_not_round_trip: int = 0
    num_blocks_not_round_trip: int = 0
    num_injections: dict[str, int] = field(default_factory=dict)
    text_prompts: bool = False
    num_read: tuple[int, ...] = ()  # tokens of 48 that are read of the controls that are shown

    def documents(self):
        """Task -> what the harness logs of it."""
        docs = {}
        for number, one in enumerate(self.samples):
            docs.setdefault(f"tfidf_memorization_p{one.prefix_length}", []).append(
                {
                    "sample": dataclasses.asdict(one),
                    "prompt_text": self.prompts.get(one.passage_id, f"prompt of {one.passage_id}"),
                    "round_trip": number >= self.num_not_round_trip,
                    "num_injections": self.num_injections.get(one.passage_id, 10),
                    "source": "s",
                    "prompts": "text" if self.text_prompts else "token_ids",
                }
            )
        docs["tfidf_wikitext2_ppl"] = [
            one | {"round_trip": number >= self.num_blocks_not_round_trip}
            for number, one in enumerate(self.blocks)
        ]
        of_others = {
            "cnn_dailymail": self.summaries,
            "squad": self.answers,
            "membership": self.passages,
        }
        for number, read in enumerate(self.num_read):
            for has_copy in (True, False):
                docs.setdefault("tfidf_positive_control", []).append(
                    {
                        "passage_id": f"control-{number}",
                        "path": "text",
                        "has_copy": has_copy,
                        "reference_ids": list(range(48)),
                        "num_read": read if has_copy else 1,
                        "round_trip": True,
                    }
                )
        return docs | {f"tfidf_{task}": made for task, made in of_others.items()}


@dataclass(frozen=True)
class Run:
    model: str
    objective: str
    seed: int | None
    folder: str
    evaluations: tuple[Evaluation, ...]
    learning_rate: float | None = None

    @property
    def names(self):
        names = ("model", "objective", "seed", "learning_rate")
        return {name: getattr(self, name) for name in names}


def decode(ids):
    return " ".join(f"w{i}" for i in ids)


def sample(passage_id="t0", lms=0, *, kind="target", prefix_length=32, length=8, **fields):
    """A continuation that recites the first ``lms`` ids of its reference."""
    reference = list(range(100, 100 + length))
    generated = reference[:lms] + [7] * (length - lms)
    lms = min(lms, length)
    values = {
        "offset": 0,
        "generated_ids": generated,
        "reference_ids": reference,
        "generated_text": decode(generated),
        "reference_text": decode(reference),
        "prefix_match": lms,
        "lms": lms,
        "rouge_l": 100.0 * lms / length,
        "verbatim": lms == length,
    }
    return ProbeSample(
        passage_id=passage_id, kind=kind, prefix_length=prefix_length, **(values | fields)
    )


def evaluation(progress=100, samples=(), **fields):
    return Evaluation(
        progress, tuple(samples), **({"checkpoint": f"checkpoint_{progress}pct"} | fields)
    )


def run(objective="CE", evaluations=(), *, model="Tiny", seed=0, folder=None, learning_rate=None):
    folder = folder or f"runs/{model} {learning_rate}/{objective}-{seed}"
    return Run(model, objective, seed, folder, tuple(evaluations), learning_rate)


def targets(*lms, prefix_length=32, kind="target"):
    return [
        sample(f"{kind}-{i}", value, kind=kind, prefix_length=prefix_length)
        for i, value in enumerate(lms)
    ]


def controls(*lms, **fields):
    return targets(*lms, kind="control", **fields)


def likelihoods(passage_id, kind, nll=1.0, *, continuations=(), **scores):
    """What the membership task logs of a passage."""
    return {
        "passage_id": passage_id,
        "kind": kind,
        "token_ids": [1],
        "round_trip": True,
        "prompts": "token_ids",
        "scores": {"nll": nll, **scores},
        "continuations": [*continuations],
    }


def block(number, num_predictions, log_likelihood):
    return {"block": number, "num_predictions": num_predictions, "log_likelihood": log_likelihood}


def blocks(perplexity, num_blocks=4, num_predictions=10):
    """Blocks of one perplexity each."""
    return tuple(
        block(i, num_predictions, -num_predictions * math.log(perplexity))
        for i in range(num_blocks)
    )


def summaries(*rouge, bertscore=88.0, missing=None):
    of_bertscore = {"bertscore_f1": bertscore, "bertscore_missing": missing}
    return tuple(
        {"id": f"a{i}", "rouge1": float(r), "rouge2": r / 2, "rouge_l": r * 0.8, **of_bertscore}
        for i, r in enumerate(rouge)
    )


def answers(*f1):
    rows = []
    for i, value in enumerate(f1):
        exact_match = 100.0 if value == 100 else 0.0
        rows.append({"id": f"q{i}", "exact_match": exact_match, "f1": float(value)})
    return tuple(rows)


def write_evaluation(folder, evaluated, *, model_args=None, date=DATE, recorded=None):
    """Write an evaluation as the harness does, in a folder that it names after the model;
    ``recorded`` is its run.
    """
    folder = folder / "model__name"
    folder.mkdir(parents=True, exist_ok=True)
    model_args = {"pretrained": evaluated.checkpoint} if model_args is None else model_args
    content = {
        "config": {"model": "tfidf-hf", "model_args": model_args},
        "results": {},
        "date": 1.0,
    }
    content["configs"] = {"tfidf_squad": {"metadata": {"version": 1.0, "run": recorded or {}}}}
    (folder / f"results_{date}.json").write_text(json.dumps(content))
    for task, docs in evaluated.documents().items():
        if docs:
            lines = "".join(
                json.dumps({"doc_id": i, "doc": doc}) + "\n" for i, doc in enumerate(docs)
            )
            (folder / f"samples_{task}_{date}.jsonl").write_text(lines)


def write_run(folder, made, *, cell=True):
    """A run's folder with its evaluations; the checkpoints are empty folders."""
    folder.mkdir(parents=True, exist_ok=True)
    if cell:
        (folder / "cell.json").write_text(json.dumps(made.names))
    for one in made.evaluations:
        checkpoint = folder / f"checkpoint_{one.progress}pct"
        checkpoint.mkdir(exist_ok=True)
        evaluated = dataclasses.replace(one, checkpoint=str(checkpoint))
        write_evaluation(folder / "evaluation" / checkpoint.name, evaluated)
    return folder


def results(*runs):
    """The table of results of fake runs."""
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name) / str(number) for number, _ in enumerate(runs)]
        for made, folder in zip(runs, folders, strict=True):
            known = {**made.names, "folder": made.folder, "provenance": {}}
            known |= dict.fromkeys(("recipe", "loss", "training_seconds"))
            for one in made.evaluations:
                write_evaluation(
                    folder / str(one.progress), one, recorded=known | {"progress": one.progress}
                )
        return import_results(folders)


def _probed(rng, means, num_passages):
    """Samples at two prefix lengths, of passages with random LMS of the mean of their kind."""
    probed = []
    for prefix_length in (32, 50):
        for kind, mean in means.items():
            for i in range(num_passages):
                lms = int(rng.exponential(mean))
                probed.append(
                    sample(f"{kind}-{i}", lms, kind=kind, prefix_length=prefix_length, length=128)
                )
    return probed


def grown_runs(
    objectives=("CE", "TF-IDF"), *, model="Tiny", seeds=(0,), num_passages=20, downstream=True
):
    """Runs whose LMS grows and whose perplexity falls with training, every later objective reciting
    less.
    """
    made = []
    for rank, objective in enumerate(objectives):
        for seed in seeds:
            rng = np.random.default_rng([rank, seed, len(model)])
            evaluations = []
            for progress in (10, 25, 50, 75, 100):
                means = {"target": 1 + 30 * (progress / 100) ** 2 / (1 + 2 * rank), "control": 2.0}
                probed = _probed(rng, means, num_passages)
                fields = {
                    "blocks": blocks(
                        (20 + 5 * rank) * (1 + 8 * (1 - progress / 100) ** 2), num_blocks=6
                    )
                }
                if downstream and progress == 100:
                    fields["summaries"] = summaries(*rng.uniform(20, 40, 15))
                    fields["answers"] = answers(*rng.choice([0, 50, 100], 30))
                evaluations.append(evaluation(progress, probed, **fields))
            made.append(run(objective, evaluations, model=model, seed=seed))
    return made
