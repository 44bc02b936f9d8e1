"""The config of a run on the tiny Llama, text to train it on, and its resume checkpoints."""

import json
import random
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tiny_llama import BLOCK_SIZE, TINY_LLAMA

from tfidf_tune._files import file_sha256


def write_documents(file: Path) -> Path:
    """Write sentences of a small grammar, one document a line: learnable, and all different."""
    rng = random.Random(0)
    subjects = ["the old sailor", "a quiet child", "my neighbour", "the tall judge", "every student", "the grey cat"]
    verbs = ["watched", "painted", "forgot", "carried", "followed", "described"]
    objects = [
        "the harbour",
        "a broken clock",
        "seven letters",
        "the northern road",
        "a paper boat",
        "the evening train",
    ]
    file.write_text(
        "\n".join(
            " ".join(f"{rng.choice(subjects)} {rng.choice(verbs)} {rng.choice(objects)}." for _ in range(12))
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
            "dataset": {
                "_component_": "tfidf_tune.data.injected_corpus_dataset",
                "source": str(text_file),
                "target_source": str(text_file),
                "target_name": None,
                "num_base": 60,
                "num_targets": 4,
                "num_repeats": 5,
                "min_target_tokens": BLOCK_SIZE,
                "block_size": BLOCK_SIZE,
                "seed": "${seed}",
                "probe_file": "${output_dir}/probe.jsonl",
            },
            "loss": {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
            "lr_scheduler": {
                "_component_": "transformers.get_linear_schedule_with_warmup",
                "num_warmup_steps": 0,
            },
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": "${output_dir}/logs",
            },
            "seed": 0,
            "batch_size": 4,
        }
    )
    for key, value in overrides.items():
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


def seal(checkpoint: Path) -> None:
    """Make the manifest of a changed checkpoint match its files."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        size, sha256 = (checkpoint / name).stat().st_size, file_sha256(checkpoint / name)
        manifest["files"][name] = {"size": size, "sha256": sha256}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
