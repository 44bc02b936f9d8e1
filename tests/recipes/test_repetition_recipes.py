"""Repetition weights over several epochs: rows seen before are no repetitions, copies in the text are."""

import json
import random
from pathlib import Path

import pytest
from tfidf_tune.recipes import full_finetune, lora_finetune

LOSS = {
    "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
    "weighting": {
        "_component_": "tfidf_tune.weighting.RepetitionWeighting",
        "min_length": 1,
        "sample": 1,
        "num_buckets": 2**22,
    },
}


@pytest.mark.parametrize(("lora", "num_copies"), [(False, 1), (True, 2)])
def test_text_without_copies_keeps_its_weight_over_three_epochs(recipe_config, tmp_path, lora, num_copies):
    """Twelve rows in three steps an epoch."""
    letters = random.Random(0)
    texts = ["".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=50)) for _ in range(12 // num_copies)]
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(texts * num_copies))
    settings = {
        "dataset": {"_component_": "tfidf_tune.data.text_dataset", "source": str(file)},
        "loss": LOSS, "batch_size": 4, "epochs": 3, "save_at_percent": [100],
    }  # fmt: skip
    recipe = (lora_finetune if lora else full_finetune).recipe_main.__wrapped__
    recipe(recipe_config(lora=lora, **settings))

    lines = [json.loads(line) for line in (Path(tmp_path) / "run" / "metrics.jsonl").read_text().splitlines()]
    means = [line["weight_mean"] for line in lines]
    assert len(means) == 9
    if num_copies == 1:
        assert means == [1] * 9
    else:  # each row once before, but for itself; the first tokens have too little context
        assert 0.5 < sum(means[:3]) / 3 < 1
        assert all(mean == pytest.approx(0.25, abs=0.02) for mean in means[3:])
