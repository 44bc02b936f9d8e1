"""Every config that is shipped: found, checked as a recipe checks it, and built as far as weights are not needed."""

from pathlib import Path

import pytest
import tfidf_tune.configs
import torch
from omegaconf import OmegaConf

from tfidf_tune.training import (
    FinetuneConfig,
    LoRAFinetuneConfig,
    LoRASettings,
    Run,
    build_loss,
    build_model,
    check_config,
    check_optimizer,
    instantiate,
    require_no_lora,
    train_adapters_only,
)

FOLDER = Path(tfidf_tune.configs.__path__[0])
CONFIGS = sorted(FOLDER.rglob("*.yaml"))
NUM_CONFIGS = 3

# The paper's section 4.2 and appendix A: batch size, learning rate, block size, base, targets, repeats, dtype.
PAPER = {"batch_size": 8, "dataset.block_size": 256, "dataset.num_base": 20000, "dataset.num_targets": 100,
         "dataset.num_repeats": 10, "dataset.source": "monology/pile-uncopyrighted", "epochs": 1, "dtype": "bf16",
         "dataset.target_source": "Salesforce/wikitext", "dataset.target_name": "wikitext-2-v1",
         "optimizer._component_": "torch.optim.AdamW", "optimizer.weight_decay": 0.0, "clip_grad_norm": 1.0,
         "lr_scheduler._component_": "transformers.get_linear_schedule_with_warmup",
         "lr_scheduler.num_warmup_steps": 0, "save_at_percent": [10, 25, 50, 75, 100],
         "checkpointer.checkpoint_dir": "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
         "loss._component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}  # fmt: skip
PAPER_VALUES = {
    "tinyllama/1.1B_full_memorization": PAPER | {"optimizer.lr": 5e-5},
    "tinyllama/1.1B_lora_memorization": PAPER
    | {"optimizer.lr": 1e-4, "model.lora_rank": 8, "model.lora_alpha": 32,
       "model.lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"],
       "model.apply_lora_to_mlp": False, "model.apply_lora_to_output": False},
}  # fmt: skip


def test_all_configs_are_found():
    assert len(CONFIGS) == NUM_CONFIGS


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.relative_to(FOLDER).as_posix())
def test_a_config_is_right_as_far_as_can_be_seen_without_weights(file, tmp_path):
    is_lora = "_lora_" in file.stem
    assert is_lora != ("_full_" in file.stem)
    cfg = OmegaConf.load(file)
    cfg.output_dir = str(tmp_path)
    checked = check_config(cfg, LoRAFinetuneConfig if is_lora else FinetuneConfig)

    model = build_model(checked, Run(torch.device("cpu"), torch.float32, 0, tmp_path))
    (LoRASettings.require if is_lora else require_no_lora)(model)
    if is_lora:
        train_adapters_only(model)
    loss = build_loss(checked)
    check_optimizer(checked)
    instantiate(checked, "metric_logger").close()

    assert loss.ignore_index == -100
    assert checked.dataset.block_size <= model.max_seq_len


@pytest.mark.parametrize("name", PAPER_VALUES)
def test_a_config_has_the_papers_values(name):
    cfg = OmegaConf.load(FOLDER / f"{name}.yaml")

    for key, value in PAPER_VALUES[name].items():
        assert OmegaConf.select(cfg, key) == value, key
    loss = build_loss(cfg)
    assert (loss.weighting.window.num_batches, loss.weighting.tf, loss.weighting.max_weight) == (16, "count", None)
