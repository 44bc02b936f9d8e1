"""The recipe, Trainer and SFTTrainer count label tokens or all tokens of rows with masked prompts
alike.
"""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.processes.trainers import (
    LIKE_TRAINERS,
    logs_of,
    make_trainer,
    metrics_of,
    ragged_rows,
    run_recipe,
)
from helpers.references.tfidf import IGNORED, ReferenceTFIDF
from torch.utils.data import Subset
from transformers import DataCollatorWithFlattening

from tfidf_tune.integrations.transformers import TokenWeightingTrainer, token_batch, trainer_loss
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.loss import TFIDFCrossEntropyLoss
from tfidf_tune.weighting import TFIDFWeighting

STEPS = 4
ROWS_OF_A_BATCH = 4
WINDOW = 3
# Few different tokens, so that many repeat; id 0 is EOS and the id of padding, and the last prompt
# ends its row.
ROWS = [
    {"input_ids": [*row["input_ids"], 0], "labels": [*row["labels"], 0]}
    for row in ragged_rows(64, vocab_size=30)
]
ROWS[1] = {"input_ids": [5, 7, 0, 5], "labels": [IGNORED] * 4}


def prompts(tokenizer):
    """The rows as a recipe takes them."""
    return Subset(
        [{"tokens": row["input_ids"], "labels": row["labels"]} for row in ROWS], range(len(ROWS))
    )


def weight_statistics(counted):
    """Mean, standard deviation and largest weight of each step, of two mini-batches, by the slow
    reference.
    """
    reference = ReferenceTFIDF(WINDOW)
    found = []
    for step in range(STEPS):
        weights = []
        for number in (2 * step, 2 * step + 1):
            rows = ROWS[number * ROWS_OF_A_BATCH :][:ROWS_OF_A_BATCH]
            labels = [[*row["labels"][1:], IGNORED] for row in rows]
            tokens = [row["input_ids"] for row in rows]
            documents = [[0] * len(row) for row in tokens]
            of_batch = reference(
                labels, counted=(tokens, documents) if counted == "tokens" else None
            )
            for row, row_weights in zip(labels, of_batch, strict=True):
                for label, weight in zip(row, row_weights, strict=True):
                    if label != IGNORED:
                        weights.append(weight)
        mean = math.fsum(weights) / len(weights)
        deviation = math.sqrt(math.fsum((weight - mean) ** 2 for weight in weights) / len(weights))
        found.append([mean, deviation, max(weights)])
    return np.array(found)


def test_all_hosts_have_the_weights_of_the_reference(
    recipe_config, monkeypatch, tiny_checkpoint, tmp_path
):
    monkeypatch.setitem(sys.modules, "users_data", SimpleNamespace(prompts=prompts))
    loss = {"loss.num_batches": WINDOW, "loss.counted": "tokens"}
    cfg = recipe_config(
        dataset={"_component_": "users_data.prompts"}, max_steps=STEPS, **loss, **LIKE_TRAINERS
    )
    found = {"recipe": run_recipe(cfg)}
    hosts = {
        "Trainer": (TokenWeightingTrainer, {}),
        "Trainer, fused": (TokenWeightingTrainer, {"fused_head": True}),
        "Trainer, flattened": (
            TokenWeightingTrainer,
            {"data_collator": DataCollatorWithFlattening()},
        ),
        "TRL": (TokenWeightingSFTTrainer, {}),
        "TRL, padding-free": (TokenWeightingSFTTrainer, {"settings": {"padding_free": True}}),
    }
    for name, (host, options) in hosts.items():
        options = {"weighting": TFIDFWeighting(num_batches=WINDOW, counted="tokens")} | options
        options["settings"] = {"max_steps": STEPS, "gradient_accumulation_steps": 2} | options.get(
            "settings", {}
        )
        trainer = make_trainer(host, tiny_checkpoint, tmp_path / name, ROWS, **options)
        trainer.train()
        found[name] = logs_of(trainer)

    expected = weight_statistics("tokens")
    recipe = metrics_of(found["recipe"])
    np.testing.assert_allclose(recipe[:, 3:], expected, rtol=1e-5)
    assert np.abs(expected - weight_statistics("labels"))[:, 1:].min() > 1e-3, "prompts count"
    for name, logs in found.items():
        np.testing.assert_allclose(metrics_of(logs), recipe, rtol=1e-5, atol=1e-6, err_msg=name)


# ---- what cannot be counted is refused


def test_tokens_that_are_not_known_are_refused(tiny_checkpoint, tmp_path):
    weighting = TFIDFWeighting(counted="tokens")
    with pytest.raises(ValueError, match="pad_to_multiple_of is 8"):
        make_trainer(
            TokenWeightingSFTTrainer,
            tiny_checkpoint,
            tmp_path,
            ROWS,
            weighting=weighting,
            settings={"padding_free": True, "pad_to_multiple_of": 8},
        )
    other_labels = [{"input_ids": [1, 2, 3], "labels": [1, 2, 4]}] * 4
    trainer = make_trainer(
        TokenWeightingTrainer, tiny_checkpoint, tmp_path, other_labels, weighting=weighting
    )
    with pytest.raises(ValueError, match="labels differ from input_ids"):
        trainer.train()
    with pytest.raises(
        ValueError, match="counts all tokens, but the Trainer passes only the labels to a loss"
    ):
        trainer_loss(TFIDFCrossEntropyLoss(counted="tokens"))

    ids = torch.ones(1, 3, dtype=torch.int64)
    for inputs, message in (
        ({"inputs_embeds": torch.zeros(1, 3, 2)}, "input_ids are None"),
        (
            {"input_ids": ids, "attention_mask": torch.ones(1, 1, 3, 3)},
            r"attention_mask \(1, 1, 3, 3\)",
        ),
        ({"input_ids": ids, "attention_mask": {"full": None}}, "attention_mask .*'full'"),
    ):
        with pytest.raises(ValueError, match=message):
            token_batch(inputs | {"labels": ids}, 3, needs_tokens=True, first_pass=True)
