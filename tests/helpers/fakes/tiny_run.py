"""The config of a run on the tiny Llama, text to train it on, and what a run has written."""

import json
import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from helpers.fakes.tiny_llama import BLOCK_SIZE, TINY_LLAMA
from tfidf_tune._files import file_sha256


def write_documents(file: Path) -> Path:
    """Write sentences of a small grammar, one document a line: learnable, and all different."""
    rng = random.Random(0)
    subjects = [
        "the old sailor",
        "a quiet child",
        "my neighbour",
        "the tall judge",
        "every student",
        "the grey cat",
    ]
    verbs = ["watched", "painted", "forgot", "carried", "followed", "described"]
    objects = [
        "the harbour",
        "a broken clock",
        "seven letters",
        "the northern road",
        "a paper boat",
    ]
    objects += ["the evening train"]
    file.write_text(
        "\n".join(
            " ".join(
                f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)}."
                for _ in range(12)
            )
            for _ in range(300)
        )
    )
    return file


def run_config(
    output_dir: Path, checkpoint: Path, text_file: Path, /, *, lora: bool = False, **overrides: Any
) -> DictConfig:
    """Make a recipe's config: ``run_config(..., lora=True, **{"optimizer.lr": 1e-2})``."""
    model: dict[str, Any] = {"_component_": "torchtune.models.llama2.llama2", **TINY_LLAMA}
    if lora:
        model |= {
            "_component_": "torchtune.models.llama2.lora_llama2",
            "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
            "lora_rank": 4,
            "lora_alpha": 16,
        }
    dataset = {"_component_": "tfidf_tune.data.injected_corpus_dataset", "source": str(text_file)}
    dataset |= {
        "target_source": str(text_file),
        "target_name": None,
        "num_base": 60,
        "num_targets": 4,
    }
    dataset |= {"num_repeats": 5, "min_target_tokens": BLOCK_SIZE, "block_size": BLOCK_SIZE}
    schedule = {
        "_component_": "transformers.get_linear_schedule_with_warmup",
        "num_warmup_steps": 0,
    }
    logger = {
        "_component_": "torchtune.training.metric_logging.DiskLogger",
        "log_dir": "${output_dir}/logs",
    }
    cfg = OmegaConf.create(
        {
            "output_dir": str(output_dir),
            "model": model,
            "checkpointer": {
                "_component_": "tfidf_tune.training.HFCheckpointer",
                "checkpoint_dir": str(checkpoint),
            },
            "tokenizer": {
                "_component_": "tfidf_tune.data.hf_tokenizer",
                "path": "${checkpointer.checkpoint_dir}",
            },
            "dataset": dataset | {"seed": "${seed}", "probe_file": "${output_dir}/probe.jsonl"},
            "loss": {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
            "lr_scheduler": schedule,
            "metric_logger": logger,
            "seed": 0,
            "batch_size": 4,
        }
    )
    for key, value in overrides.items():
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


def run_recipe(cfg: DictConfig, *, lora: bool = False) -> Path:
    """Run lora_finetune or full_finetune in this process; return the folder of the run."""
    module = import_module(f"tfidf_tune.recipes.{'lora' if lora else 'full'}_finetune")
    module.recipe_main.__wrapped__(cfg)
    return Path(cfg.output_dir)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the entries of steps, without those of the monitor and without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if "per_second" not in key}
        for line in lines
        if "loss" in line
    ]


def metrics_of(folder: Path, *names: str) -> torch.Tensor:
    """Read metrics of all steps as a tensor ``[steps, names]``."""
    return torch.tensor(
        [[line[name] for name in names] for line in read_metrics(folder)], dtype=torch.float64
    )


def means_by_kind(samples: list[Any]) -> dict[str, float]:
    """Return mean LMS and prefix match of samples of targets and controls, by the names of the
    monitor.
    """
    means = {}
    for kind in ("target", "control"):
        kept = [sample for sample in samples if sample.kind == kind]
        for name in ("lms", "prefix_match"):
            means[f"memorization_{kind}_{name}"] = np.mean([getattr(one, name) for one in kept])
    return means


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read all weights of a checkpoint, however many files they are in."""
    parts = [load_file(file) for file in folder.glob("*.safetensors")]
    weights: dict[str, torch.Tensor] = {}
    for part in parts:
        weights |= part
    assert len(weights) == sum(map(len, parts)) > 0
    return weights


def assert_close_weights(found: Path, expected: Path, tolerance: float) -> None:
    """Compare two checkpoints: each weight up to a share of its largest value."""
    weights = read_weights(found)
    expected_weights = read_weights(expected)
    assert weights.keys() == expected_weights.keys()
    for name, value in expected_weights.items():
        limit = tolerance * float(value.abs().max())
        torch.testing.assert_close(
            weights[name], value, rtol=0, atol=limit, msg=lambda text, at=name: f"{at}: {text}"
        )


def seal(checkpoint: Path) -> None:
    """Make the manifest of a changed checkpoint match its files."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        size = (checkpoint / name).stat().st_size
        sha256 = file_sha256(checkpoint / name)
        manifest["files"][name] = {"size": size, "sha256": sha256}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


class Payload:
    """Leaves a folder behind when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)
