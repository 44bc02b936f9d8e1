"""Fake runs, in memory and as lm-evaluation-harness writes them."""

import dataclasses
import json
from dataclasses import dataclass, field

import numpy as np

from tfidf_tune.compare import Checkpoint, Results
from tfidf_tune.compare._importer import parse_document, with_scores
from tfidf_tune.compare._table import scores_table
from tfidf_tune.probe import ProbeSample

DATE = "2026-11-21T10-00-00.000001"


@dataclass(frozen=True)
class BlockScore:
    block: int
    num_predictions: int
    log_likelihood: float


@dataclass(frozen=True)
class SummaryScore:
    id: str
    rouge1: float
    rouge2: float
    rouge_l: float
    bertscore_f1: float | None
    bertscore_missing: str | None


@dataclass(frozen=True)
class AnswerScore:
    id: str
    exact_match: float
    f1: float


@dataclass(frozen=True)
class Evaluation:
    """What one checkpoint of a run scored."""

    progress: int
    checkpoint: str
    samples: tuple[ProbeSample, ...]
    prompts: dict[tuple[str, int, int], str]
    blocks: tuple[BlockScore, ...] = ()
    summaries: tuple[SummaryScore, ...] = ()
    answers: tuple[AnswerScore, ...] = ()
    num_not_round_trip: int = 0
    num_blocks_not_round_trip: int = 0
    num_injections: dict[str, int] = field(default_factory=dict)
    text_prompts: bool = False


@dataclass(frozen=True)
class Run:
    model: str
    objective: str
    seed: int | None
    folder: str
    evaluations: tuple[Evaluation, ...]
    learning_rate: float | None = None


def decode(ids):
    return " ".join(f"w{i}" for i in ids)


def sample(passage_id="t0", lms=0, *, kind="target", prefix_length=32, length=8, **fields):
    """A continuation that recites the first ``lms`` ids of its reference."""
    reference = list(range(100, 100 + length))
    generated = reference[:lms] + [7] * (length - lms)
    values = {
        "passage_id": passage_id,
        "kind": kind,
        "offset": 0,
        "prefix_length": prefix_length,
        "generated_ids": generated,
        "reference_ids": reference,
        "generated_text": decode(generated),
        "reference_text": decode(reference),
        "prefix_match": min(lms, length),
        "lms": min(lms, length),
        "rouge_l": min(100.0, 100.0 * lms / length),
        "verbatim": lms == length,
    }
    return ProbeSample(**(values | fields))


def evaluation(progress=100, samples=(), **fields):
    samples = tuple(samples)
    prompts = {(s.passage_id, s.offset, s.prefix_length): f"prompt of {s.passage_id}" for s in samples}
    named = {"checkpoint": f"checkpoint_{progress}pct", "prompts": prompts}
    return Evaluation(progress, samples=samples, **(named | fields))


def run(objective="CE", evaluations=(), *, model="Tiny", seed=0, folder=None, learning_rate=None):
    return Run(model, objective, seed, folder or f"runs/{objective}-{seed}", tuple(evaluations), learning_rate)


def targets(*lms, prefix_length=32, kind="target"):
    return [sample(f"{kind}-{i}", value, kind=kind, prefix_length=prefix_length) for i, value in enumerate(lms)]


def controls(*lms, **fields):
    return targets(*lms, kind="control", **fields)


def blocks(perplexity, num_blocks=4, num_predictions=10):
    """Blocks of one perplexity each."""
    return tuple(
        BlockScore(i, num_predictions, -num_predictions * float(np.log(perplexity))) for i in range(num_blocks)
    )


def summaries(*rouge, bertscore=88.0, missing=None):
    return tuple(SummaryScore(f"a{i}", float(r), r / 2, r * 0.8, bertscore, missing) for i, r in enumerate(rouge))


def answers(*f1):
    return tuple(AnswerScore(f"q{i}", 100.0 * (value == 100), float(value)) for i, value in enumerate(f1))


def documents(evaluated):
    """Task -> the documents that the harness has of it."""
    docs = {}
    for number, one in enumerate(evaluated.samples):
        docs.setdefault(f"tfidf_memorization_p{one.prefix_length}", []).append(
            {
                "sample": dataclasses.asdict(one),
                "prompt_text": evaluated.prompts.get((one.passage_id, one.offset, one.prefix_length), ""),
                "round_trip": number >= evaluated.num_not_round_trip,
                "num_injections": evaluated.num_injections.get(one.passage_id, 0),
                "source": "s",
                **({"prompts": "text"} if evaluated.text_prompts else {}),
            }
        )
    docs["tfidf_wikitext2_ppl"] = [
        dataclasses.asdict(one) | {"round_trip": number >= evaluated.num_blocks_not_round_trip}
        for number, one in enumerate(evaluated.blocks)
    ]
    docs["tfidf_cnn_dailymail"] = [dataclasses.asdict(one) | {"highlights": "h"} for one in evaluated.summaries]
    docs["tfidf_squad"] = [dataclasses.asdict(one) | {"question": "?"} for one in evaluated.answers]
    return docs


def results(*runs):
    """The table of results of fake runs."""
    checkpoints, rows = [], []
    for one in runs:
        for evaluated in one.evaluations:
            named = Checkpoint(
                *(one.model, one.objective, one.learning_rate, one.seed, evaluated.progress),
                folder=one.folder,
                checkpoint=evaluated.checkpoint,
            )
            parsed = [parse_document(task, doc) for task, docs in documents(evaluated).items() for doc in docs]
            completed, scores = with_scores(named, parsed)
            rows += [(len(checkpoints), *score) for score in scores]
            checkpoints.append(completed)
    return Results(tuple(checkpoints), scores_table(rows), {})


def write_evaluation(folder, evaluated, *, model_args=None, date=DATE, recorded=None):
    """Write an evaluation as the harness does, in a folder that it names after the model; ``recorded`` is its run."""
    folder = folder / "model__name"
    folder.mkdir(parents=True, exist_ok=True)
    model_args = {"pretrained": evaluated.checkpoint} if model_args is None else model_args
    content = {"config": {"model": "tfidf-hf", "model_args": model_args}, "results": {}, "date": 1.0}
    content["configs"] = {"tfidf_squad": {"metadata": {"version": 1.0, "run": recorded or {}}}}
    (folder / f"results_{date}.json").write_text(json.dumps(content))
    for task, of_task in documents(evaluated).items():
        for doc in of_task:
            doc |= {"num_injections": 10} if "num_injections" in doc else {}
        if of_task:
            lines = "".join(json.dumps({"doc_id": i, "doc": doc}) + "\n" for i, doc in enumerate(of_task))
            (folder / f"samples_{task}_{date}.jsonl").write_text(lines)


def write_run(folder, made, *, cell=True):
    """A run's folder with its evaluations; the checkpoints are empty folders."""
    folder.mkdir(parents=True, exist_ok=True)
    if cell:
        names = {"model": made.model, "objective": made.objective, "seed": made.seed}
        names |= {} if made.learning_rate is None else {"learning_rate": made.learning_rate}
        (folder / "cell.json").write_text(json.dumps(names))
    for one in made.evaluations:
        checkpoint = folder / f"checkpoint_{one.progress}pct"
        checkpoint.mkdir(exist_ok=True)
        evaluated = dataclasses.replace(one, checkpoint=str(checkpoint))
        write_evaluation(folder / "evaluation" / checkpoint.name, evaluated)
    return folder


def grown_runs(objectives=("CE", "TF-IDF"), *, model="Tiny", seeds=(0,), num_passages=20, downstream=True):
    """Runs whose LMS grows and whose perplexity falls with training, every later objective reciting less."""
    made = []
    for rank, objective in enumerate(objectives):
        for seed in seeds:
            rng = np.random.default_rng([rank, seed, len(model)])
            evaluations = []
            for progress in (10, 25, 50, 75, 100):
                mean = 1 + 30 * (progress / 100) ** 2 / (1 + 2 * rank)
                probed = [
                    sample(
                        f"{kind}-{i}",
                        min(128, int(rng.exponential(mean if kind == "target" else 2.0))),
                        kind=kind,
                        prefix_length=p,
                        length=128,
                    )
                    for p in (32, 50)
                    for kind in ("target", "control")
                    for i in range(num_passages)
                ]
                fields = {"blocks": blocks((20 + 5 * rank) * (1 + 8 * (1 - progress / 100) ** 2), num_blocks=6)}
                if downstream and progress == 100:
                    fields["summaries"] = summaries(*rng.uniform(20, 40, 15))
                    fields["answers"] = answers(*rng.choice([0, 50, 100], 30))
                evaluations.append(evaluation(progress, probed, **fields))
            made.append(run(objective, evaluations, model=model, seed=seed))
    return made
