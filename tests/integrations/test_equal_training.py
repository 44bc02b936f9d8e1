"""The recipe, transformers' Trainer and TRL's SFTTrainer train the same model on the same batches
alike.
"""

import dataclasses
import re

import numpy as np
import pytest
from helpers.docs_snippets import DOCS
from helpers.processes.trainers import LIKE_TRAINERS, logs_of, make_trainer, metrics_of, run_recipe
from omegaconf import OmegaConf
from peft import LoraConfig
from trl import SFTConfig

from tfidf_tune._config import FinetuneConfig
from tfidf_tune.data import collate_packed, hf_tokenizer, text_blocks_dataset, text_dataset
from tfidf_tune.integrations.transformers import TokenWeightingTrainer
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.weighting import FocalWeighting, TFIDFWeighting, UniformWeighting

BLOCKS = {"_component_": "tfidf_tune.data.text_blocks_dataset", "block_size": 32}
PACKED = {"_component_": "tfidf_tune.data.text_dataset", "packed": True}


def rows_of(section, checkpoint, text_file):
    """The rows of a recipe's data set as the other trainers take them."""
    tokenizer = hf_tokenizer(str(checkpoint), 64)
    if section is BLOCKS:
        dataset = text_blocks_dataset(tokenizer, source=str(text_file), block_size=32)
        return [
            {"input_ids": list(row["tokens"]), "labels": list(row["labels"])} for row in dataset
        ]
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


# Focal weights need predictions, which differ only after some steps.
@pytest.mark.parametrize(
    ("weighting", "arguments", "section", "num_steps"),
    [
        (TFIDFWeighting, {"num_batches": 3}, PACKED, 12),
        (FocalWeighting, {"gamma": 2.0}, BLOCKS, 30),
    ],
)
def test_steps_are_equal(
    weighting, arguments, section, num_steps, recipe_config, tiny_checkpoint, short_texts, tmp_path
):
    """Rounding differs between the models of torchtune and transformers, and AdamW amplifies it.

    A standard deviation near 0 has the rounding of weights near 1.
    """
    component = {"_component_": f"tfidf_tune.weighting.{weighting.__name__}", **arguments}
    cfg = recipe_config(
        dataset={**section, "source": str(short_texts)},
        loss={"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": component},
        max_steps=num_steps,
        epochs=100,
        **LIKE_TRAINERS,
    )
    rows = rows_of(section, tiny_checkpoint, short_texts)
    steps = {"max_steps": num_steps, "gradient_accumulation_steps": 2, "dataloader_drop_last": True}

    recipe = metrics_of(run_recipe(cfg))
    assert recipe.shape == (num_steps, 6)
    assert recipe[0, 0] - recipe[-1, 0] > 0.2, "the model learns"
    assert recipe[:, 4].max() > 0.03, "weights differ"
    for host in (TokenWeightingTrainer, TokenWeightingSFTTrainer):
        trainer = make_trainer(
            host,
            tiny_checkpoint,
            tmp_path / host.__name__,
            rows,
            weighting=weighting(**arguments),
            settings=steps,
        )
        trainer.train()
        np.testing.assert_allclose(
            metrics_of(logs_of(trainer)), recipe, rtol=1e-5, atol=1e-6, err_msg=str(host)
        )


def test_the_keys_of_trainers_md_are_those_of_both_and_train_alike(
    recipe_config, tiny_checkpoint, short_texts, tmp_path
):
    """A config is translated by the table of the page, and trained by TRL."""
    section = (
        (DOCS / "trainers.md")
        .read_text()
        .partition("## From a config to another trainer")[2]
        .partition("\n## ")[0]
    )
    pairs = re.findall(r"^\| `([\w.]+)(?:: [\w-]+)?` \| `(\w+)(?:=[^`]*)?`", section, re.MULTILINE)
    names = dict(pairs)
    fields = dataclasses.fields(SFTConfig) + dataclasses.fields(LoraConfig)
    of_trl = {field.name for field in fields}
    assert len(names) == 19
    assert set(names.values()) - of_trl == {"load_in_4bit", "weighting"}
    keys = [key for key in names if "." not in key and key != "loss"]
    assert set(keys) <= FinetuneConfig.model_fields.keys()

    cfg = recipe_config(
        dataset={**BLOCKS, "source": str(short_texts)},
        loss={"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
        max_steps=6,
        epochs=100,
        **LIKE_TRAINERS,
    )
    chosen = (
        "optimizer.lr",
        "optimizer.weight_decay",
        "clip_grad_norm",
        "batch_size",
        "gradient_accumulation_steps",
    )
    settings = {names[key]: OmegaConf.select(cfg, key) for key in (*chosen, "epochs", "max_steps")}
    rows = rows_of(BLOCKS, tiny_checkpoint, short_texts)
    trainer = make_trainer(
        TokenWeightingSFTTrainer,
        tiny_checkpoint,
        tmp_path,
        rows,
        weighting=UniformWeighting(),
        settings=settings,
    )
    trainer.train()
    np.testing.assert_allclose(
        metrics_of(logs_of(trainer)), metrics_of(run_recipe(cfg)), rtol=1e-5, atol=1e-6
    )
