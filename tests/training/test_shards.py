"""What each process of a run holds when training begins: its shards, of the same weights as one process has."""

from functools import partial

import torch
from process_hooks import save_loaded_weights
from recipe_processes import RecipeRun, run_to_the_end
from tiny_llama import make_tokenizer
from tiny_models import MODELS
from tiny_run import run_config


def load(num_processes, tmp_path, text_file):
    base, folder = tmp_path / "base", tmp_path / str(num_processes)
    if not base.exists():
        MODELS["qwen2-tied"].build_hf(256).save_pretrained(base)
        make_tokenizer(base, text_file)
    section = MODELS["qwen2-tied"].section(256, lora=True, quantize_base=True)
    cfg = run_config(folder, base, text_file, lora=True, model=section, batch_size=1, max_steps=1)
    folder.mkdir()
    run_to_the_end(
        [RecipeRun(cfg, True)],
        tmp_path / f"processes {num_processes}",
        num_processes=num_processes,
        before=partial(save_loaded_weights, folder),
    )
    return [torch.load(folder / f"loaded_{rank}.pt") for rank in range(num_processes)]


def test_two_processes_hold_half_of_each_weight_of_one(tmp_path, text_file):
    """Embeddings that are tied to the head, NF4 weights and adapters."""
    (whole,), shards = (load(number, tmp_path, text_file) for number in (1, 2))

    assert len(whole["values"]) > 10
    for name, value in whole["values"].items():
        assert torch.equal(torch.cat([shard["values"][name].view(-1, *value.shape[1:]) for shard in shards]), value)
    total, held = (sum(part["num_bytes"].values()) for part in (whole, shards[0]))
    assert held <= 0.51 * total
