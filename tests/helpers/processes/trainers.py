"""Runs of the recipe, of transformers' Trainer and of TRL's SFTTrainer, on the same rows in the
same order.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTConfig, SFTTrainer

from helpers.processes.recipes import RecipeRun

LEARNING_RATE = 3e-3
MAX_GRAD_NORM = 1.0
# Of a recipe that trains as the trainers below, with two mini-batches a step.
LIKE_TRAINERS = {
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": LEARNING_RATE, "weight_decay": 0.0},
    "lr_scheduler": None,
    "clip_grad_norm": MAX_GRAD_NORM,
    "shuffle": False,
    "gradient_accumulation_steps": 2,
    "save_at_percent": [100],
    "keep_last_n_checkpoints": 0,
}
# TRL's default is True; transformers renamed it.
_NEW_NAME = "activation_checkpointing"
CHECKPOINTING = _NEW_NAME if hasattr(SFTConfig, _NEW_NAME) else "gradient_checkpointing"
METRICS = ("loss", "cross_entropy", "grad_norm", "weight_mean", "weight_std", "weight_max")


def load(checkpoint: Path, **options: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **options)


def make_trainer(
    trainer_class: type[Trainer],
    checkpoint: Path | PreTrainedModel | None,
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    settings: dict[str, Any] | None = None,
    tokenizer: Path | None = None,
    **options: Any,
) -> Trainer:
    """Build a trainer of transformers or TRL, on a CPU, that logs each step and reads the rows in
    order.

    Rows have ``input_ids`` and ``labels``; packed rows with ``position_ids`` for transformers and
    ``seq_lengths`` for TRL. ``settings`` are fields of the arguments of the run, ``options``
    arguments of the class. The tokenizer is by default that of the model.
    """
    is_trl = issubclass(trainer_class, SFTTrainer)
    is_packed = "seq_lengths" in rows[0]
    common = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "max_grad_norm": MAX_GRAD_NORM,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 4,
        CHECKPOINTING: False,
        "bf16": False,
    }
    if is_trl:
        of_trl = {
            "loss_type": "nll",
            "max_length": None,
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "padding_free": is_packed,
        }
        args = SFTConfig(str(folder), **(common | of_trl | (settings or {})))
    else:
        args = TrainingArguments(str(folder), **(common | (settings or {})))
    dropped = "position_ids" if is_trl else "seq_lengths"
    rows = [{name: value for name, value in row.items() if name != dropped} for row in rows]
    model = load(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    processing_class = AutoTokenizer.from_pretrained(tokenizer or model.config.name_or_path)
    if not is_trl:
        # The Trainer's own adds an attention mask, with which models ignore the documents of a
        # packed row.
        collator = default_data_collator if is_packed else DataCollatorForSeq2Seq(processing_class)
        options = {"data_collator": collator} | options
    return trainer_class(
        model,
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=processing_class,
        **options,
    )


def logs_of(trainer: Trainer) -> list[dict[str, float]]:
    """Return what a trainer logged for its steps."""
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def metrics_of(logs: list[dict[str, float]]) -> np.ndarray:
    """Return ``[steps, METRICS]``."""
    return np.array([[entry[name] for name in METRICS] for entry in logs])


def run_recipe(cfg: Any) -> list[dict[str, float]]:
    """Run a recipe; return what it logged."""
    folder = RecipeRun(cfg).here()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ragged_rows(
    num_rows: int, *, seed: int = 0, vocab_size: int = 320
) -> list[dict[str, list[int]]]:
    """Rows of 3 to 40 random tokens, the first third of which is a prompt without labels."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in torch.randint(3, 41, (num_rows,), generator=generator).tolist():
        ids = torch.randint(1, vocab_size, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    return rows
