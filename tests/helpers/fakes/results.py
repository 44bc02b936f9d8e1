"""Results of runs made by hand: no more than a frontier looks at."""

import dataclasses
import math
from dataclasses import dataclass

from tfidf_tune.results import Checkpoint, Results
from tfidf_tune.results.table import scores_table


@dataclass(frozen=True)
class Record:
    """A checkpoint with its average scores."""

    checkpoint: Checkpoint
    lms: float | None
    log_perplexity: float | None
    control_lms: float | None = 1.0

    def rows(self):
        lms = self.lms
        nll = self.log_perplexity
        controls = self.control_lms
        values = [("lms", "target", passage, 32.0, lms, 2) for passage in ("target-0", "target-1")]
        values += [("max_lms", "target", "", math.nan, 9.0, 1)]
        values += [
            ("lms", "control", passage, 32.0, controls, 2) for passage in ("control-0", "control-1")
        ]
        values += [
            (name, "target", "", math.nan, value, 4)
            for name, value in (("rouge_l", 30.25), ("verbatim", 0.25))
        ]
        values += [("nll", "block", "", math.nan, nll, 1000)]
        missing = {"target"} if lms is None else set()
        return [value for value in values if value[4] is not None and value[1] not in missing]


def record(
    objective="CE", lms=4.0, perplexity=20.0, *, seed=0, learning_rate=1e-3, model="Tiny", **fields
):
    """A run over two targets; its log perplexity is that of ``perplexity`` unless it is given
    itself.
    """
    log_perplexity = fields.pop("log_perplexity", math.log(perplexity))
    scores = {name: fields.pop(name) for name in ("control_lms",) if name in fields}
    values = {
        "progress": 100,
        "recipe": "full_finetune",
        "loss": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
        "training_seconds": 12.5,
        "asked": {"prompts": "0123456789ab", "perplexity blocks": "0123456789ab"},
    }
    checkpoint = Checkpoint(model, objective, learning_rate, seed, **(values | fields))
    return Record(checkpoint, lms, log_perplexity, **scores)


def replace(one, **fields):
    """The same record with other scores or names."""
    scores = {
        name: fields.pop(name)
        for name in ("lms", "log_perplexity", "control_lms")
        if name in fields
    }
    return dataclasses.replace(
        one, checkpoint=dataclasses.replace(one.checkpoint, **fields), **scores
    )


def results_of(records, provenance=None):
    """The table of results of records."""
    rows = []
    for number, one in enumerate(records):
        rows += [(number, *row) for row in one.rows()]
    return Results(tuple(one.checkpoint for one in records), scores_table(rows), provenance or {})


def seeds(objective, lms, log_perplexities, **fields):
    """A run for each pair of values, seeds from 0."""
    return [
        record(objective, one, seed=seed, log_perplexity=log, **fields)
        for seed, (one, log) in enumerate(zip(lms, log_perplexities, strict=True))
    ]


def grown_records(
    objectives=("CE", "TF-IDF", "Goldfish"), rates=(3e-4, 1e-3, 3e-3), num_seeds=3, model="Tiny"
):
    """Objectives that recite less and less; the middle learning rate has the lowest perplexity."""
    records = []
    for rank, objective in enumerate(objectives):
        for number, rate in enumerate(rates):
            for seed in range(num_seeds):
                lms = (1 + number) * 20 / (1 + rank) + seed / 10 * (1 + rank)
                log_perplexity = 3 + 0.1 * abs(number - 1) + 0.01 * rank + 0.002 * seed * (1 + rank)
                made = record(
                    objective,
                    lms,
                    model=model,
                    seed=seed,
                    learning_rate=rate,
                    log_perplexity=log_perplexity,
                )
                records.append(made)
    return records
