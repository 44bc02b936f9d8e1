"""Packed rows in the recipes give the same run as each document in a row of its own."""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from tfidf_tune.recipes import full_finetune, lora_finetune

from tfidf_tune.analysis import load_model
from tfidf_tune.data import hf_tokenizer, text_dataset

ROW = 64


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Ten documents of 5 to 41 tokens."""
    file = tmp_path_factory.mktemp("documents") / "documents.txt"
    words = ("the old sailor watched a paper boat and the grey cat followed " * 3).split()
    file.write_text("\n".join(" ".join(words[number : number + 3 + 5 * (number % 4)]) for number in range(10)))
    return file


def run_recipe(cfg, *, lora):
    (lora_finetune if lora else full_finetune).recipe_main.__wrapped__(cfg)
    return Path(cfg.output_dir)


def read_metrics(run, *names):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in names] for line in lines]


def section(file, cache, *, torchtunes, packed):
    if not torchtunes:
        return {"_component_": "tfidf_tune.data.text_dataset", "source": str(file), "packed": packed}
    return {
        "_component_": "torchtune.datasets.text_completion_dataset", "source": "text", "data_files": str(file),
        "cache_dir": str(cache), "packed": packed, "split_across_pack": False,
    }  # fmt: skip


def run_both(recipe_config, documents, tmp_path, num_rows, *, lora=False, torchtunes=False, **overrides):
    """Run four steps of all documents each: in rows of their own, and packed."""
    runs = {}
    for packed, batch_size in ((False, 10), (True, num_rows)):
        cfg = recipe_config(
            lora=lora,
            dataset=section(documents, tmp_path / "cache", torchtunes=torchtunes, packed=packed),
            batch_size=batch_size,
            epochs=4,
            save_at_percent=[100],
            output_dir=str(tmp_path / str(packed)),
            **overrides,
        )
        runs[packed] = run_recipe(cfg, lora=lora)
    return runs


@pytest.fixture
def num_rows(documents, tiny_checkpoint):
    """Packed rows of all documents."""
    num_rows = len(text_dataset(hf_tokenizer(str(tiny_checkpoint), ROW), source=str(documents), packed=True))
    assert 1 < num_rows < 10
    return num_rows


METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm")


@pytest.mark.parametrize(("lora", "torchtunes"), [(False, True), (True, False)])
def test_a_packed_run_is_the_run_of_its_documents(recipe_config, documents, num_rows, tmp_path, lora, torchtunes):
    """Metrics and weights agree up to rounding in fp32, which AdamW amplifies."""
    runs = run_both(recipe_config, documents, tmp_path, num_rows, lora=lora, torchtunes=torchtunes)

    alone, packed = (read_metrics(runs[packed], *METRICS) for packed in (False, True))
    assert len(alone) == 4
    assert alone[0][3] > 0.1, "weights differ"
    torch.testing.assert_close(torch.tensor(packed), torch.tensor(alone), rtol=1e-4, atol=0)
    models = [load_model(runs[packed] / "checkpoint_100pct") for packed in (False, True)]
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        expected, logits = (model(tokens).logits for model in models)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "weighting",
    [
        {"_component_": "tfidf_tune.weighting.GoldfishWeighting", "h": 3},
        {
            "_component_": "tfidf_tune.weighting.RepetitionWeighting",
            "h": 2,
            "k": 1,
            "alpha": 1.0,
            "sample": 1,
            "span": 5,
        },
        {"_component_": "tfidf_tune.weighting.FocalWeighting"},
    ],
    ids=["goldfish", "repetition", "focal"],
)
def test_every_weighting_sees_the_documents_of_a_packed_row(recipe_config, documents, num_rows, tmp_path, weighting):
    loss = {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": weighting}
    runs = run_both(recipe_config, documents, tmp_path, num_rows, loss=loss)

    alone, packed = (torch.tensor(read_metrics(runs[packed], *METRICS)) for packed in (False, True))
    assert len(alone) == 4
    assert alone[-1, METRICS.index("weight_std")] > 1e-3, "weights differ"
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-7)


def test_several_packed_data_sets_are_one_run(recipe_config, documents, text_file, tmp_path):
    sections = [
        section(documents, tmp_path / "cache", torchtunes=True, packed=True),
        section(text_file, tmp_path / "cache", torchtunes=False, packed=True),
    ]
    cfg = recipe_config(dataset=sections, max_steps=3, enable_activation_checkpointing=True, save_at_percent=[100])

    run = run_recipe(cfg, lora=False)

    assert len(read_metrics(run, "loss")) == 3
    assert OmegaConf.load(run / "config.yaml").dataset == sections
