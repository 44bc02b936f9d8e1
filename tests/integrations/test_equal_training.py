"""The recipe, transformers' Trainer and TRL's SFTTrainer train the same model on the same batches alike."""

import numpy as np
import pytest
from hosts import LEARNING_RATE, MAX_GRAD_NORM, logs_of, make_trainer, run_recipe

from tfidf_tune.data import collate_packed, hf_tokenizer, text_blocks_dataset, text_dataset
from tfidf_tune.integrations.transformers import TokenWeightingTrainer
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.weighting import FocalWeighting, GoldfishWeighting, TFIDFWeighting, UniformWeighting

METRICS = ("loss", "cross_entropy", "grad_norm", "weight_mean", "weight_std", "weight_max")
# Weighting, its arguments, number of steps.
OBJECTIVES = {
    "CE": (UniformWeighting, {}, 12),
    "TF-IDF": (TFIDFWeighting, {"num_batches": 3}, 12),
    "Goldfish": (GoldfishWeighting, {"k": 3, "h": 4}, 12),
    "Focal": (FocalWeighting, {"gamma": 2.0}, 30),  # needs predictions, which differ only after some steps
}
BLOCKS = {"_component_": "tfidf_tune.data.text_blocks_dataset", "block_size": 32}
PACKED = {"_component_": "tfidf_tune.data.text_dataset", "packed": True}


def rows_of(section, checkpoint, text_file):
    """The rows of a recipe's data set as the other trainers take them."""
    tokenizer = hf_tokenizer(str(checkpoint), 64)
    if section is BLOCKS:
        dataset = text_blocks_dataset(tokenizer, source=str(text_file), block_size=32)
        return [{"input_ids": list(row["tokens"]), "labels": list(row["labels"])} for row in dataset]
    rows = []
    for row in text_dataset(tokenizer, source=str(text_file), packed=True):
        batch = collate_packed([row])
        rows.append(
            {
                "input_ids": batch["tokens"][0].tolist(),
                "labels": batch["labels"][0].tolist(),
                "position_ids": batch["input_pos"][0].tolist(),
                "seq_lengths": row["seq_lens"].tolist(),
            }
        )
    return rows


@pytest.mark.parametrize(
    ("objective", "section"),
    [("CE", BLOCKS), ("TF-IDF", BLOCKS), ("TF-IDF", PACKED), ("Goldfish", PACKED), ("Focal", BLOCKS)],
    ids=["CE", "TF-IDF", "packed-TF-IDF", "packed-Goldfish", "Focal"],
)
def test_steps_are_equal(objective, section, recipe_config, tiny_checkpoint, short_texts, tmp_path):
    """Rounding differs between the models of torchtune and transformers, and AdamW amplifies it.

    A standard deviation near 0 has the rounding of weights near 1.
    """
    weighting, arguments, num_steps = OBJECTIVES[objective]
    component = {"_component_": f"tfidf_tune.weighting.{weighting.__name__}", **arguments}
    cfg = recipe_config(
        dataset={**section, "source": str(short_texts)},
        loss={"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": component},
        optimizer={"_component_": "torch.optim.AdamW", "lr": LEARNING_RATE, "weight_decay": 0.0},
        lr_scheduler=None,
        clip_grad_norm=MAX_GRAD_NORM,
        shuffle=False,
        max_steps=num_steps,
        epochs=100,
        save_at_percent=[100],
        gradient_accumulation_steps=2,
        keep_last_n_checkpoints=0,
    )
    rows = rows_of(section, tiny_checkpoint, short_texts)
    steps = {"max_steps": num_steps, "gradient_accumulation_steps": 2, "dataloader_drop_last": True}

    logs = {"recipe": run_recipe(cfg)}
    for host in (TokenWeightingTrainer, TokenWeightingSFTTrainer):
        trainer = make_trainer(
            host, tiny_checkpoint, tmp_path / host.__name__, rows, weighting=weighting(**arguments), settings=steps
        )
        trainer.train()
        logs[host.__name__] = logs_of(trainer)

    values = {name: np.array([[entry[metric] for metric in METRICS] for entry in log]) for name, log in logs.items()}
    recipe = values["recipe"]
    assert recipe.shape == (num_steps, len(METRICS))
    assert recipe[0, 0] - recipe[-1, 0] > 0.2, "the model learns"
    if objective != "CE":
        assert recipe[:, 4].max() > 0.03, "weights differ"
    for name, found in values.items():
        np.testing.assert_allclose(found, recipe, rtol=1e-5, atol=1e-6, err_msg=name)
