"""Records of runs made by hand: no more of them than a frontier looks at."""

import math

from tfidf_tune.analysis import RunRecord


def record(objective="CE", lms=4.0, perplexity=20.0, *, seed=0, learning_rate=1e-3, model="Tiny", **fields):
    """A run over two targets; its log perplexity is that of ``perplexity`` unless it is given itself."""
    values = {
        "model": model,
        "objective": objective,
        "learning_rate": learning_rate,
        "seed": seed,
        "progress": 100,
        "recipe": "full_finetune",
        "loss": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
        "training_seconds": 12.5,
        "asked": "0123456789ab",
        "lms": lms,
        "max_lms": 9,
        "prefix_match": 1.5,
        "rouge_l": 30.25,
        "verbatim_rate": 0.25,
        "lms_by_prefix": {32: lms, 50: lms},
        "lms_by_passage": {"target-0": lms, "target-1": lms},
        "control_lms": 1.0,
        "log_perplexity": math.log(perplexity),
        "num_predictions": 1000,
        "num_injections": (10,),
    }
    return RunRecord(**(values | fields))


def seeds(objective, lms, log_perplexities, **fields):
    """A run for each pair of values, seeds from 0."""
    return [
        record(objective, one, seed=seed, log_perplexity=log, **fields)
        for seed, (one, log) in enumerate(zip(lms, log_perplexities, strict=True))
    ]


def grown_records(objectives=("CE", "TF-IDF", "Goldfish"), rates=(3e-4, 1e-3, 3e-3), num_seeds=3, model="Tiny"):
    """Objectives that recite less and less; the middle learning rate has the lowest perplexity."""
    return [
        record(
            objective,
            (1 + at) * 20 / (1 + rank) + seed / 10 * (1 + rank),
            model=model,
            seed=seed,
            learning_rate=rate,
            log_perplexity=3 + 0.1 * abs(at - 1) + 0.01 * rank + 0.002 * seed * (1 + rank),
        )
        for rank, objective in enumerate(objectives)
        for at, rate in enumerate(rates)
        for seed in range(num_seeds)
    ]
