"""The recipe, Trainer and SFTTrainer count label tokens or all tokens of rows with masked prompts alike."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hosts import LEARNING_RATE, MAX_GRAD_NORM, logs_of, make_trainer, ragged_rows, run_recipe
from tfidf_reference import IGNORED, ReferenceTFIDF
from torch.utils.data import Subset
from transformers import DataCollatorWithFlattening

from tfidf_tune.data import pack
from tfidf_tune.integrations.transformers import TokenWeightingTrainer, token_batch, trainer_loss
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.loss import TFIDFCrossEntropyLoss
from tfidf_tune.weighting import TFIDFWeighting

STEPS, ROWS_OF_A_BATCH, WINDOW = 4, 4, 3
METRICS = ("loss", "cross_entropy", "grad_norm", "weight_mean", "weight_std", "weight_max")
# Few different tokens, so that many repeat; id 0 is EOS and the id of padding, and the last prompt ends its row.
ROWS = [{"input_ids": [*row["input_ids"], 0], "labels": [*row["labels"], 0]} for row in ragged_rows(64, vocab_size=30)]
ROWS[1] = {"input_ids": [5, 7, 0, 5], "labels": [IGNORED] * 4}


def prompts(tokenizer, *, packed=False):
    rows = Subset([{"tokens": row["input_ids"], "labels": row["labels"]} for row in ROWS], range(len(ROWS)))
    return pack(rows, tokenizer) if packed else rows


@pytest.fixture
def run_prompts(recipe_config, monkeypatch):
    """Run the recipe on these rows; return its metrics."""
    monkeypatch.setitem(sys.modules, "users_data", SimpleNamespace(prompts=prompts))

    def run(counted, packed=False, lora=False, **overrides):
        settings = {
            "dataset": {"_component_": "users_data.prompts", "packed": packed},
            "loss.num_batches": WINDOW,
            "loss.counted": counted,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": LEARNING_RATE, "weight_decay": 0.0},
            "lr_scheduler": None,
            "clip_grad_norm": MAX_GRAD_NORM,
            "shuffle": False,
            "max_steps": STEPS,
            "save_at_percent": [100],
            "keep_last_n_checkpoints": 0,
        }
        return run_recipe(recipe_config(lora=lora, **(settings | overrides)), lora=lora)

    return run


def values(logs):
    return np.array([[entry[metric] for metric in METRICS] for entry in logs])


def weight_statistics(counted):
    """Mean, standard deviation and largest weight of each step, of two mini-batches, by the slow reference."""
    reference, found = ReferenceTFIDF(WINDOW), []
    for step in range(STEPS):
        weights = []
        for number in (2 * step, 2 * step + 1):
            rows = ROWS[number * ROWS_OF_A_BATCH :][:ROWS_OF_A_BATCH]
            labels = [[*row["labels"][1:], IGNORED] for row in rows]
            tokens = [row["input_ids"] for row in rows]
            documents = [[0] * len(row) for row in tokens]
            of_batch = reference(labels, counted=(tokens, documents) if counted == "tokens" else None)
            weights += [
                weight
                for pairs in zip(labels, of_batch, strict=True)
                for label, weight in zip(*pairs, strict=True)
                if label != IGNORED
            ]
        mean = math.fsum(weights) / len(weights)
        deviation = math.sqrt(math.fsum((weight - mean) ** 2 for weight in weights) / len(weights))
        found.append([mean, deviation, max(weights)])
    return np.array(found)


def test_all_hosts_have_the_weights_of_the_reference(run_prompts, tiny_checkpoint, tmp_path):
    found = {"recipe": run_prompts("tokens", gradient_accumulation_steps=2)}
    hosts = {
        "Trainer": (TokenWeightingTrainer, {}),
        "Trainer, fused": (TokenWeightingTrainer, {"fused_head": True}),
        "Trainer, flattened": (TokenWeightingTrainer, {"data_collator": DataCollatorWithFlattening()}),
        "TRL": (TokenWeightingSFTTrainer, {}),
        "TRL, padding-free": (TokenWeightingSFTTrainer, {"settings": {"padding_free": True}}),
    }
    for name, (host, options) in hosts.items():
        options = {"weighting": TFIDFWeighting(num_batches=WINDOW, counted="tokens")} | options
        options["settings"] = {"max_steps": STEPS, "gradient_accumulation_steps": 2} | options.get("settings", {})
        trainer = make_trainer(host, tiny_checkpoint, tmp_path / name, ROWS, **options)
        trainer.train()
        found[name] = logs_of(trainer)

    expected, recipe = weight_statistics("tokens"), values(found["recipe"])
    np.testing.assert_allclose(recipe[:, 3:], expected, rtol=1e-5)
    assert np.abs(expected - weight_statistics("labels"))[:, 1:].min() > 1e-3, "prompts count"
    for name, logs in found.items():
        np.testing.assert_allclose(values(logs), recipe, rtol=1e-5, atol=1e-6, err_msg=name)


def test_packed_rows_of_a_recipe_count_each_document_and_no_padding(run_prompts, tmp_path):
    """Each step has all documents, in rows of their own and packed."""
    num_packed = len(prompts(SimpleNamespace(max_seq_len=64), packed=True))
    assert num_packed < len(ROWS) / 2
    sizes = {False: len(ROWS), True: num_packed}
    alone, packed = (
        values(run_prompts("tokens", packed, True, batch_size=size, epochs=STEPS, output_dir=str(tmp_path / str(size))))
        for packed, size in sizes.items()
    )
    np.testing.assert_allclose(packed, alone, rtol=1e-4, atol=1e-7)
    assert alone[:, 4].min() > 0.1, "weights differ"


# ---- what cannot be counted is refused


def test_tokens_that_are_not_known_are_refused(tiny_checkpoint, tmp_path):
    weighting = TFIDFWeighting(counted="tokens")
    with pytest.raises(ValueError, match="pad_to_multiple_of is 8 without an attention mask"):
        make_trainer(
            TokenWeightingSFTTrainer, tiny_checkpoint, tmp_path, ROWS, weighting=weighting,
            settings={"padding_free": True, "pad_to_multiple_of": 8},
        )  # fmt: skip
    other_labels = [{"input_ids": [1, 2, 3], "labels": [1, 2, 4]}] * 4
    trainer = make_trainer(TokenWeightingTrainer, tiny_checkpoint, tmp_path, other_labels, weighting=weighting)
    with pytest.raises(ValueError, match="labels that are not -100 differ from input_ids"):
        trainer.train()
    with pytest.raises(ValueError, match="counts all tokens, but the Trainer passes only the labels to a loss"):
        trainer_loss(TFIDFCrossEntropyLoss(counted="tokens"))

    ids = torch.ones(1, 3, dtype=torch.int64)
    for inputs, message in (
        ({"inputs_embeds": torch.zeros(1, 3, 2)}, "input_ids of a batch are None .* or set counted to 'labels'"),
        ({"input_ids": ids, "attention_mask": torch.ones(1, 1, 3, 3)}, r"attention_mask, .*, \(1, 1, 3, 3\): pass"),
        ({"input_ids": ids, "attention_mask": {"full": None}}, "attention_mask, .* {'full': None}: pass both"),
    ):
        with pytest.raises(ValueError, match=message):
            token_batch(inputs | {"labels": ids}, 3, needs_tokens=True, first_pass=True)
