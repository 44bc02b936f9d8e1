"""Every config that is shipped: found, checked as a recipe checks it, built as far as weights are not needed, and
compared with the table of the paper's values."""

import csv
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
    load_config,
    require_no_lora,
    train_adapters_only,
)

FOLDER = Path(tfidf_tune.configs.__path__[0])
FILES = sorted(file.relative_to(FOLDER).with_suffix("").as_posix() for file in FOLDER.rglob("*.yaml"))
NAMES = [name for name in FILES if not name.startswith("experiments/")]  # those are in tests/experiment
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

TABLE = {
    row["config"]: row
    for row in csv.DictReader(
        line for line in (Path(__file__).parent / "paper_values.csv").read_text().splitlines() if line[0] != "#"
    )
}
COMMON = {
    "epochs": 1, "gradient_accumulation_steps": 1, "max_steps": None, "save_at_percent": [10, 25, 50, 75, 100],
    "optimizer._component_": "torch.optim.AdamW", "optimizer.weight_decay": 0.0, "clip_grad_norm": 1.0,
    "lr_scheduler._component_": "transformers.get_linear_schedule_with_warmup", "lr_scheduler.num_warmup_steps": 0,
    "loss._component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss",
}  # fmt: skip
OF_TASK = {
    "memorization": {
        "dataset._component_": "tfidf_tune.data.injected_corpus_dataset", "dataset.block_size": 256,
        "dataset.source": "monology/pile-uncopyrighted", "dataset.num_base": 20000, "dataset.num_repeats": 10,
        "dataset.target_source": "Salesforce/wikitext", "dataset.target_name": "wikitext-2-v1",
        "dataset.num_targets": 100, "dataset.layout": "aligned",
    },
    "summarization": {
        "dataset._component_": "tfidf_tune.data.cnn_dailymail_dataset", "dataset.source": "abisee/cnn_dailymail",
        "dataset.name": "3.0.0", "dataset.split": "train", "dataset.max_source_tokens": 1024,
        "dataset.max_target_tokens": 128,
    },
    "qa": {
        "dataset._component_": "tfidf_tune.data.squad_dataset", "dataset.source": "rajpurkar/squad",
        "dataset.split": "train", "dataset.max_seq_len": 256,
    },
}  # fmt: skip


def test_every_config_of_the_paper_has_a_row_in_the_table():
    others = ("demo/", "any/", "mine/")
    assert {name for name in NAMES if not name.startswith(others)} == TABLE.keys()
    assert len(TABLE) == 5 * 3 + 3


@pytest.mark.parametrize("name", [name for name in NAMES if "memorization" in name and "any/" not in name])
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
            assert of_task.model | {"lora_alpha": 0} == checked.model | {"lora_alpha": 0}

    model = build_model(checked, Run(torch.device("cpu"), DTYPES[checked.dtype], 0, tmp_path))
    (LoRASettings.require if is_lora else require_no_lora)(model)
    if is_lora:
        train_adapters_only(model)
    check_optimizer(checked)
    instantiate(checked, "metric_logger").close()

    assert checked.dataset.block_size <= model.max_seq_len


def test_a_config_has_the_values_of_the_paper():
    for name, row in TABLE.items():
        cfg = load_config(name)
        expected = COMMON | OF_TASK[row["task"]]
        expected |= {
            "checkpointer.checkpoint_dir": row["checkpoint"], "model._component_": row["component"],
            "dtype": row["dtype"], "batch_size": int(row["batch_size"]), "optimizer.lr": float(row["lr"]),
            "output_dir": f"runs/{name.replace('/', '_')}",
        }  # fmt: skip
        if row["lora_rank"]:
            expected |= {
                "model.lora_attn_modules": row["lora_attn_modules"].split(), "model.lora_rank": int(row["lora_rank"]),
                "model.lora_alpha": int(row["lora_alpha"]), "model.quantize_base": row["quantize_base"] == "True",
                "model.apply_lora_to_mlp": False, "model.apply_lora_to_output": False, "merge_adapter": False,
            }  # fmt: skip

        assert {key: OmegaConf.select(cfg, key) for key in expected} == expected, name
        loss = build_loss(cfg)
        assert (loss.weighting.window.num_batches, loss.weighting.tf, loss.weighting.max_weight) == (16, "count", None)


def test_configs_of_a_task_change_only_what_the_task_needs():
    for name, row in TABLE.items():
        if row["task"] != "memorization":
            cfg = OmegaConf.load(FOLDER / f"{name}.yaml")
            assert cfg.keys() <= {"base", "output_dir", "model", "dataset", "optimizer", "batch_size"}
            assert cfg.base == name.replace(row["task"], "memorization")
