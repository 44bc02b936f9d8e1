"""A checkpoint trained by torchtune's modules and by transformers' own class: time of a step,
memory of loading.

    python research/benchmarks/implementations.py --checkpoint runs/smollm2_inputs/SmolLM2-135M-Instruct
    python research/benchmarks/implementations.py --dtypes bf16 --set model.quantize_base=true
    python research/benchmarks/implementations.py --device cuda

Both are built, loaded and trained as the recipes do it. The steps take turns in one process, in a
rotating order. On a CPU they are timed in seconds of the processor, which other programs on the
machine change little. Each model is loaded in a process of its own; memory is resident, and
includes the file of weights as far as it is mapped.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import (
    against,
    finish,
    for_steps,
    make_parser,
    median_peak,
    named,
    peak_memory,
    recipe_step,
    tabulate,
    take_turns,
)
from torch import nn
from torchtune.training import get_dtype
from transformers import AutoModelForCausalLM, LlamaConfig

from tfidf_tune import training
from tfidf_tune.training.components import signature_of

OURS = "torchtune"
THEIRS = "transformers"
CLOCKS = {"cpu": time.process_time, "cuda": time.perf_counter}
_MIB = 2**20


def load(
    options: argparse.Namespace, implementation: str, dtype: str
) -> tuple[training.FinetuneConfig, nn.Module]:
    """Build and load the model as a recipe does."""
    changes = {
        "checkpointer.checkpoint_dir": options.checkpoint,
        "model.implementation": implementation,
        "dataset.source": "unused",
        "device": options.device,
        "output_dir": "unused",
    }
    overrides = [*(f"{key}={value}" for key, value in changes.items()), *options.set]
    user_cfg = training.load_config(options.config, overrides)
    has_lora = "lora_rank" in signature_of("model", user_cfg.model["_component_"]).parameters
    cfg = training.check_config(
        user_cfg, training.LoRAFinetuneConfig if has_lora else training.FinetuneConfig
    )
    device = torch.device(options.device)
    run = training.Run(device, get_dtype(dtype, device=device), 0, Path("unused"))
    checkpointer = training.instantiate(cfg, "checkpointer")
    model = training.build_model(cfg, run, checkpointer)
    if has_lora:
        training.train_adapters_only(model)
    training.load_model(model, checkpointer, run)
    return cfg, model


def build_step(
    options: argparse.Namespace, implementation: str, dtype: str
) -> Callable[[], object]:
    """Build a training step on a model of its own."""
    cfg, model = load(options, implementation, dtype)
    loss = training.build_loss(cfg)
    training.prepare_model(model, loss, cfg)
    optimizer, _ = training.build_optimizer(cfg, model.parameters(), 100)
    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (options.batch_size, options.seq_len), generator=generator)
    step = recipe_step(model, loss, optimizer, options.device, cfg.clip_grad_norm)
    return partial(step, for_steps(tokens, options.device))


def measure_loading(
    options: argparse.Namespace, implementation: str, dtype: str, num_threads: int
) -> dict[str, float]:
    """Load the model in this process; return seconds of the processor, and peak memory above that
    before, in MiB.
    """
    torch.set_num_threads(num_threads)
    training.load_config(options.config)  # imports what the recipes need
    clock = CLOCKS[options.device]
    peaks = list[int]()
    start = clock()
    with peak_memory(options.device, peaks):
        model = load(options, implementation, dtype)[1]
    seconds = clock() - start
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {"loading_s": seconds, "loading_peak_mib": peaks[0] / _MIB, "weights_mib": size / _MIB}


def write_random_llama(folder: Path) -> str:
    """Write a model whose linear layers have multiples of 16,384 weights, as NF4 needs."""
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument(
        "--checkpoint", help="default: a random Llama of 273 million parameters in bf16"
    )
    parser.add_argument(
        "--config", default="injected/lora", help="whose model is a tfidf_tune.models.auto"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help="other keys of the config"
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        name = options.checkpoint or "a random Llama of 273 million parameters"
        options.checkpoint = options.checkpoint or write_random_llama(Path(folder))
        results = measure(options)
    options.checkpoint = name
    finish(
        options,
        ("torch", "torchtune", "transformers", "peft", "tfidf-tune"),
        report,
        implementations=results,
    )


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure loading and steps of both implementations in each dtype."""
    ways: dict[str, tuple[str, str]] = {}
    for dtype in options.dtypes:
        for name in (OURS, THEIRS):
            ways[f"{name}, {dtype}"] = (name, dtype)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1, maxtasksperchild=1) as pool:
        loading = [
            pool.apply(measure_loading, (options, *way, torch.get_num_threads()))
            for way in ways.values()
        ]
    steps = {name: build_step(options, *way) for name, way in ways.items()}
    clock = CLOCKS[options.device]
    spent = take_turns(steps, rounds=options.rounds, warmup=1, device=options.device, clock=clock)
    tokens = options.batch_size * options.seq_len
    results = {}
    for (name, (_, dtype)), loading_results in zip(ways.items(), loading, strict=True):
        peak = median_peak(steps[name], options.device, rounds=1)
        results[name] = {
            **against("stock", spent[name], spent[f"{THEIRS}, {dtype}"]),
            "tokens_per_second": tokens / statistics.median(spent[name]),
            "step_peak_mib": peak / _MIB,
            **loading_results,
        }
    return results


def report(result: dict[str, Any]) -> str:
    """Lay out the result as Markdown."""
    settings = result["settings"]
    unit = "seconds of the processor" if settings["device"] == "cpu" else "seconds"
    return (
        f"{Path(settings['checkpoint']).name}, {settings['config']}: batch "
        f"{settings['batch_size']} x "
        f"{settings['seq_len']}, median of {settings['rounds']} rounds, {unit}\n\n{table(result)}"
    )


def table(result: dict[str, Any]) -> str:
    """Lay out time and memory as Markdown."""
    columns = {
        "model": "{name}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "time / transformers": "{median_ratio_to_stock:.2f}",
        "step, MiB": "{step_peak_mib:,.0f}",
        "weights, MiB": "{weights_mib:,.0f}",
        "loading, MiB": "{loading_peak_mib:,.0f}",
        "loading, s": "{loading_s:.1f}",
    }
    return tabulate(columns, named(result["implementations"]))


if __name__ == "__main__":
    main()
