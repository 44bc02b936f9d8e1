"""Runs of the trainers that are made in one process and in two."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hosts import load, logs_of, make_trainer, ragged_rows, set_environment
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.distributed import DistributedConfig
from trl import SFTTrainer

from tfidf_tune.integrations.transformers import TokenWeightingTrainer
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.weighting import TFIDFWeighting, UniformWeighting
from tfidf_tune.weighting._tfidf import Counted

STEPS = 2
RESUMED_AT, TOTAL = 2, 4
WEIGHTED = {Trainer: TokenWeightingTrainer, SFTTrainer: TokenWeightingSFTTrainer}


def world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def stock_and_uniform(folder: Path) -> dict[str, Any]:
    """Losses and gradient norms of stock trainers, and of ours with uniform weights; and what they evaluate to."""
    found = {}
    settings = {"max_steps": STEPS, "gradient_accumulation_steps": 8, "eval_strategy": "steps", "eval_steps": 2}
    rows, eval_dataset = ragged_rows(200), Dataset.from_list(ragged_rows(10, seed=1))
    for stock, weighted in WEIGHTED.items():
        for name, options in ((stock, {}), (weighted, {"weighting": UniformWeighting()})):
            trainer = make_trainer(
                name, folder / "tiny", folder / "out", rows, settings=settings, eval_dataset=eval_dataset, **options
            )
            trainer.train()
            logs = [(entry["loss"], entry["grad_norm"]) for entry in logs_of(trainer)]
            evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
            found.setdefault(stock.__name__, []).append((logs, evaluated))
    return found


def resumed_runs(folder: Path) -> dict[str, Any]:
    """Logs, weights and windows of an uninterrupted run and of one that is resumed from its checkpoint."""
    found = {}
    for name, trainer_class in (("Trainer", TokenWeightingTrainer), ("SFTTrainer", TokenWeightingSFTTrainer)):
        runs = {}
        for is_resumed in (False, True):
            settings = {"max_steps": TOTAL, "gradient_accumulation_steps": 2}
            settings |= {"save_strategy": "steps", "save_steps": RESUMED_AT}
            trainer = make_trainer(
                trainer_class, folder / "tiny", folder / name, ragged_rows(100), settings=settings,
                weighting=TFIDFWeighting(num_batches=3, counted=_COUNTED[name]),
            )  # fmt: skip
            trainer.train(
                resume_from_checkpoint=str(folder / name / f"checkpoint-{RESUMED_AT}") if is_resumed else None
            )
            runs[is_resumed] = [
                [{key: value for key, value in entry.items() if key in _COMPARED} for entry in logs_of(trainer)],
                {key: value.clone() for key, value in trainer.model.state_dict().items()},
                {key: value.clone() for key, value in trainer.weighting.state_dict().items()},
            ]
        found[name] = runs
    return found


def shared_window(folder: Path, *, fused_head: bool = False, counted: Counted = "labels") -> list[list[float]]:
    """Metrics with a window of all processes, on eight rows a step however many processes there are."""
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 8 // world_size()}
    trainer = make_trainer(
        TokenWeightingTrainer, folder / "tiny", folder / "out", ragged_rows(100), settings=settings,
        weighting=TFIDFWeighting(num_batches=2, sync=True, counted=counted), fused_head=fused_head,
    )  # fmt: skip
    trainer.train()
    return [[entry[key] for key in _COMPARED] for entry in logs_of(trainer)]


def sharded(folder: Path) -> tuple[bool, list[list[float]]]:
    """Whether weights are sharded by FSDP2, and the metrics of such a run."""
    model = load(folder / "tiny", distributed_config=DistributedConfig(fsdp_size=world_size()))
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 8 // world_size()}
    trainer = make_trainer(
        TokenWeightingTrainer, model, folder / "out", ragged_rows(100), settings=settings,
        weighting=TFIDFWeighting(num_batches=2, sync=True),
    )  # fmt: skip
    trainer.train()
    weight: Tensor = model.get_output_embeddings().weight
    return isinstance(weight, DTensor), [[entry[key] for key in _COMPARED] for entry in logs_of(trainer)]


def all_on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """All of these, in one of two processes."""
    set_environment(rank, 2)
    return {
        "stock_and_uniform": stock_and_uniform(folder),
        "resumed_runs": resumed_runs(folder),
        "shared_window": shared_window(folder),
        # The head's weight is used outside of the wrapped model.
        "shared_window_fused": shared_window(folder, fused_head=True),
        "shared_window_of_tokens": shared_window(folder, counted="tokens"),
        "sharded": sharded(folder),
    }


_COUNTED: dict[str, Counted] = {"Trainer": "labels", "SFTTrainer": "tokens"}
_COMPARED = ("loss", "grad_norm", "cross_entropy", "weight_mean", "weight_std", "weight_max")
