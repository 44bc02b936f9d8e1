"""What each config needs of a device's memory, by the plan that the recipes print: without weights, in seconds.

    python benchmarks/memory_plan.py
    python benchmarks/memory_plan.py --configs llama2/7B_qlora_memorization mine.yaml --output plan.json

The length of sequences is that of the config's data set: its blocks, or the longest that prompt and target may become.
"""

import argparse
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from measuring import heading, markdown_table, record, write_result  # type: ignore[import-not-found]
from torchtune.training import get_dtype

from tfidf_tune.training import (
    FinetuneConfig,
    LoRAFinetuneConfig,
    LoRASettings,
    Run,
    build_loss,
    build_model,
    check_config,
    instantiate,
    load_config,
    plan_memory,
    train_adapters_only,
)

_CPU = torch.device("cpu")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    folder = Path(str(files("tfidf_tune.configs")))
    # Configs for any checkpoint, whose sizes are those of the checkpoint, are left out.
    files_of_configs = (
        file for file in folder.rglob("*.yaml") if file.parent.name != "experiments" and "???" not in file.read_text()
    )
    names = sorted(file.relative_to(folder).with_suffix("").as_posix() for file in files_of_configs)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", default=names, help="names or files; default: all of the package")
    parser.add_argument("--output", type=Path, help="write the result as JSON too")
    return parser.parse_args()


def plan(name: str) -> dict[str, Any]:
    """The plan of a config, with and without activation checkpointing, in bytes."""
    overrides = ["device=cpu", "output_dir=unused"]  # a plan does not need the device
    cfg = check_config(load_config(name, overrides), LoRAFinetuneConfig if "lora_" in name else FinetuneConfig)
    dtype = get_dtype(cfg.dtype, device=_CPU)
    model = build_model(cfg, Run(_CPU, dtype, 0, Path("unused")))
    if LoRASettings.of(model) is not None:
        train_adapters_only(model)
    data = cfg.dataset
    seq_len = data.get("block_size") or data.get("max_seq_len") or data.max_source_tokens + data.max_target_tokens
    loss = build_loss(cfg)
    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    make_plan = partial(
        plan_memory,
        model,
        loss,
        partial(instantiate, cfg, "optimizer"),
        batch_size=cfg.batch_size,
        seq_len=seq_len,
        device=_CPU,
        autocast_dtype=dtype if dtype is torch.float16 else None,
        objective_state=loss.weighting.num_state_bytes(cfg.batch_size, seq_len, vocab_size=vocab_size),
    )
    whole = make_plan()
    return {
        "batch": f"{cfg.batch_size} x {seq_len}",
        **asdict(whole),
        "total": whole.total,
        "total_with_activation_checkpointing": make_plan(enable_activation_checkpointing=True).total,
    }


def main() -> None:
    """Plan and print."""
    options = parse_arguments()
    result = record(
        options,
        "cpu",
        ("torch", "torchtune", "torchao", "tfidf-tune"),
        plans={name: plan(name) for name in options.configs},
    )
    print(f"{heading(result)}, GiB\n")
    parts = ("weights", "optimizer", "gradients", "activations", "loss", "total")
    rows = [
        [f"`{name}`", row["batch"]]
        + [f"{row[part] / 2**30:.2f}" for part in (*parts, "total_with_activation_checkpointing")]
        for name, row in result["plans"].items()
    ]
    print(markdown_table(["config", "batch", *parts[:-1], "least", "least, checkpointing"], rows))
    write_result(result, options.output)


if __name__ == "__main__":
    main()
