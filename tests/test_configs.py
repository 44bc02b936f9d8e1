"""Every config that is shipped: found, checked as a recipe checks it, built as far as weights are
not needed, and compared with the table of the paper's values."""

import csv
from fnmatch import fnmatchcase
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
    build_optimizer,
    check_config,
    instantiate,
    load_config,
    require_no_lora,
    train_adapters_only,
)

FOLDER = Path(tfidf_tune.configs.__path__[0])
FILES = sorted(
    file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml")
)
# Those are in tests/experiment.
NAMES = [name for name in FILES if not name.startswith("experiments/")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

PAPER_CONFIGS = [name for name in NAMES if not name.startswith(("demo/", "injected/", "mine/"))]
TABLE = (Path(__file__).parent / "paper_values.csv").read_text().splitlines()
PAPER_VALUES = list(csv.DictReader(line for line in TABLE if line[0] != "#"))
# What the paper does not state, with the source of each; all other values are the paper's.
NOT_THE_PAPERS = {
    "optimizer.weight_decay": "Trainer",
    "clip_grad_norm": "Trainer",
    "lr_scheduler._component_": "Trainer",
    "lr_scheduler.num_warmup_steps": "Trainer",
    "gradient_accumulation_steps": "Trainer",
    "seed": "code",
    "checkpointer.checkpoint_dir": "code",
    "dataset.target_name": "code",
    "dataset.layout": "ours",
    "model.lora_dropout": "ours",
    "merge_adapter": "ours",
    "compile": "ours",
}


def test_every_value_has_a_source_and_is_that_of_a_config():
    assert len(PAPER_CONFIGS) == 5 * 3 + 3
    of_the_paper = ("3", "4.1", "4.2", "4.3", "A")  # its sections
    sources = {
        row["key"]: row["source"] for row in PAPER_VALUES if row["source"] not in of_the_paper
    }
    assert sources == NOT_THE_PAPERS
    for row in PAPER_VALUES:
        assert any(fnmatchcase(name, row["configs"]) for name in PAPER_CONFIGS), row


@pytest.mark.parametrize("name", [name for name in NAMES if "memorization" in name])
def test_a_config_builds_without_weights(name, tmp_path):
    is_lora = "lora_" in name
    assert is_lora != ("_full_" in name)
    schema = LoRAFinetuneConfig if is_lora else FinetuneConfig
    # Llama 2 without NF4, which takes most of the time to build; Pythia is built with it.
    overrides = ["model.quantize_base=false"] if name.startswith("llama2/") else []
    checked = check_config(load_config(name, [f"output_dir={tmp_path}", *overrides]), schema)
    for task in ("summarization", "qa"):  # on the same model
        if (other := name.replace("memorization", task)) in NAMES:
            of_task = check_config(load_config(other, overrides), schema)
            assert {**of_task.model, "lora_alpha": 0} == {**checked.model, "lora_alpha": 0}

    model = build_model(checked, Run(torch.device("cpu"), DTYPES[checked.dtype], 0, tmp_path))
    (LoRASettings.require if is_lora else require_no_lora)(model)
    if is_lora:
        train_adapters_only(model)
    build_optimizer(checked, model.parameters(), total_steps=1)
    instantiate(checked, "metric_logger").close()

    assert checked.dataset.block_size <= model.max_seq_len


@pytest.mark.parametrize("name", PAPER_CONFIGS)
def test_a_config_named_after_the_paper_has_the_values_of_the_table(name):
    cfg = load_config(name)
    own = [row for row in PAPER_VALUES if fnmatchcase(name, row["configs"])]
    # OmegaConf reads "1e-4" as a number, which YAML does not.
    expected = {row["key"]: OmegaConf.from_dotlist([f"value={row['value']}"]).value for row in own}
    assert len(expected) == len(own)
    of_lora = {
        "model.lora_attn_modules",
        "model.lora_rank",
        "model.lora_alpha",
        "model.quantize_base",
    }
    of_all = {
        "model._component_",
        "checkpointer.checkpoint_dir",
        "dtype",
        "batch_size",
        "optimizer.lr",
    }
    assert expected.keys() >= (of_all if "_full_" in name else of_all | of_lora)
    assert {key: OmegaConf.select(cfg, key) for key in expected} == expected
    assert cfg.output_dir == f"runs/{name.replace('/', '_')}"
    loss = build_loss(cfg)
    assert (loss.weighting.window.num_batches, loss.weighting.tf, loss.weighting.max_weight) == (
        16,
        "count",
        None,
    )
