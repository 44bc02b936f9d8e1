"""What each process of a run holds when training begins: its shards, of the same weights as one process has."""

from functools import partial

import pytest
import torch
from process_hooks import save_loaded_weights
from recipe_processes import RecipeRun, run_to_the_end
from tiny_llama import make_tokenizer
from tiny_models import MODELS
from tiny_run import run_config

KINDS = {
    "tied": {"model": "qwen2-tied"},
    "nf4 and adapters": {"lora": True, "dim": 256, "quantize_base": True},
}


def load(kind, num_processes, tmp_path, text_file):
    settings = dict(KINDS[kind])
    model, dim, lora = settings.pop("model", "llama"), settings.pop("dim", 64), settings.pop("lora", False)
    base, folder = tmp_path / "base", tmp_path / str(num_processes)
    if not base.exists():
        MODELS[model].build_hf(dim).save_pretrained(base)
        make_tokenizer(base, text_file)
    section = MODELS[model].section(dim, lora=lora, **settings)
    cfg = run_config(folder, base, text_file, lora=lora, model=section, batch_size=1, max_steps=1)
    folder.mkdir()
    run_to_the_end(
        [RecipeRun(cfg, lora)],
        tmp_path / f"processes {num_processes}",
        num_processes=num_processes,
        before=partial(save_loaded_weights, folder),
    )
    return [torch.load(folder / f"loaded_{rank}.pt") for rank in range(num_processes)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_hold_half_of_each_weight_of_one(kind, tmp_path, text_file):
    (whole,), shards = (load(kind, number, tmp_path, text_file) for number in (1, 2))

    assert len(whole["values"]) > 10
    for name, value in whole["values"].items():
        assert torch.equal(torch.cat([shard["values"][name].view(-1, *value.shape[1:]) for shard in shards]), value)
    total, held = (sum(part["num_bytes"].values()) for part in (whole, shards[0]))
    assert held <= 0.51 * total
