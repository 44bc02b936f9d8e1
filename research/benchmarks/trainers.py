"""A training step in transformers' Trainer and in TRL's SFTTrainer, with and without token weights,
and in the recipe.

    python research/benchmarks/trainers.py           # the demo's model on this CPU
    python research/benchmarks/trainers.py --device cuda

Each trainer has a copy of one model, and runs its own loop on the same batches. They take turns of
a few steps in one process, in a rotating order; what is compared are ratios within a round. A turn
is timed from the start of its second step to the end of its last one, without saving and
evaluation.
"""

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import measuring
import torch
import transformers
from datasets import Dataset
from measuring import (
    against,
    finish,
    for_steps,
    make_parser,
    named,
    peak_memory,
    recipe_step,
    tabulate,
    take_turns,
)
from torchtune import config
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from research.experiment import random_model
from tfidf_tune.integrations.transformers import TokenWeightingTrainer
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.loss import CrossEntropyLoss, TFIDFCrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import load_config, prepare_head

# TRL's default is True; transformers renamed it.
_NEW_NAME = "activation_checkpointing"
CHECKPOINTING = _NEW_NAME if hasattr(SFTConfig, _NEW_NAME) else "gradient_checkpointing"

TRAINER = "Trainer"
SFT = "SFTTrainer"
TRAINERS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    TRAINER: (Trainer, {}),
    f"{TRAINER}, again": (Trainer, {}),  # shows what the machine alone does to a ratio
    f"{TRAINER}, TF-IDF": (TokenWeightingTrainer, {}),
    f"{TRAINER}, TF-IDF, fused_head": (TokenWeightingTrainer, {"fused_head": True}),
    SFT: (SFTTrainer, {}),
    f"{SFT}, again": (SFTTrainer, {}),
    f"{SFT}, TF-IDF": (TokenWeightingSFTTrainer, {}),
}
WARMUP = 2
MEMORY_ROUNDS = 5


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Adds up the seconds of the steps of turns after the first, and measures the memory of these
    if asked.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds = 0.0
        self.measures_memory = False
        self.peaks: list[int] = []
        self._stack = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the second step."""
        if state.global_step == 1:
            self.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with the last step."""
        if state.global_step == state.max_steps:
            self.end()

    def begin(self) -> None:
        """Start the clock."""
        if self.measures_memory:
            self._stack.enter_context(peak_memory(self.device, self.peaks))
        measuring.synchronize(self.device)
        self.seconds -= time.perf_counter()

    def end(self) -> None:
        """Stop the clock."""
        measuring.synchronize(self.device)
        self.seconds += time.perf_counter()
        self._stack.close()


def build_trainer(
    trainer_class: type[Trainer],
    options: argparse.Namespace,
    tokens: torch.Tensor,
    folder: Path,
    watch: Stopwatch,
    **arguments: Any,
) -> Callable[[], object]:
    """Build a trainer with a copy of the model in ``folder``; return its loop."""
    cfg = load_config(options.config, [])
    settings: dict[str, Any] = {
        "per_device_train_batch_size": options.batch_size,
        "max_steps": options.steps,
        "optim": "adamw_torch_fused",
        "learning_rate": cfg.optimizer.lr,
        "max_grad_norm": cfg.clip_grad_norm,
        "logging_steps": cfg.log_every_n_steps,
        "use_cpu": options.device == "cpu",
        "bf16": False,
        CHECKPOINTING: False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if issubclass(trainer_class, SFTTrainer):
        prepared = {
            "max_length": None,
            "loss_type": "nll",
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }
        arguments["args"] = SFTConfig(str(folder), **settings, **prepared)
        arguments["processing_class"] = AutoTokenizer.from_pretrained(folder / "model")
    else:
        arguments["args"] = TrainingArguments(str(folder), **settings)
    rows = [{"input_ids": row, "labels": row} for row in tokens.flatten(0, 1).tolist()]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    trainer = trainer_class(model, train_dataset=Dataset.from_list(rows), **arguments)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(watch)
    loop: Callable[[], object] = trainer.train
    return loop


def build_recipe(
    loss: WeightedCrossEntropyLoss,
    options: argparse.Namespace,
    tokens: torch.Tensor,
    watch: Stopwatch,
) -> Callable[[], object]:
    """Build the recipe's model; return its loop."""
    cfg = load_config(options.config, [])
    torch.manual_seed(0)
    device = torch.device(options.device)
    with device:
        model = config.instantiate(cfg.model)
    loss.to(device)
    prepare_head(model, loss)
    optimizer = config.instantiate(cfg.optimizer, model.parameters())
    step = recipe_step(model, loss, optimizer, options.device, cfg.clip_grad_norm)

    tokens = for_steps(tokens, options.device)

    def loop() -> None:
        for number, batch in enumerate(tokens):
            if number == 1:
                watch.begin()
            step(batch)
        watch.end()

    return loop


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, rounds=30)
    parser.add_argument(
        "--config",
        default="demo/llama_3M_full_memorization",
        help="a Llama: gives sizes and optimizer",
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="of a turn; the first is not timed")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.manual_seed(1)
    section = load_config(options.config, []).model
    tokens = torch.randint(
        1, section.vocab_size, (options.steps, options.batch_size, options.seq_len)
    )
    watch = Stopwatch(options.device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        random_model(folder / "model", section, seed=0)
        loops = {
            name: build_trainer(trainer, options, tokens, folder, watch, **arguments)
            for name, (trainer, arguments) in TRAINERS.items()
        }
        loops["recipe, CE"] = build_recipe(CrossEntropyLoss(), options, tokens, watch)
        loops["recipe, TF-IDF"] = build_recipe(TFIDFCrossEntropyLoss(), options, tokens, watch)
        seconds = take_turns(
            loops, rounds=options.rounds, warmup=WARMUP, clock=lambda: watch.seconds
        )
        seconds = {
            name: [taken / (options.steps - 1) for taken in own] for name, own in seconds.items()
        }
        watch.measures_memory = True  # apart, because reading the memory takes time of its own
        memory: dict[str, list[float]] = {name: [] for name in loops}
        for name in list(loops) * MEMORY_ROUNDS:
            loops[name]()
            memory[name].append(watch.peaks[-1] / 2**20)
    tokens_of_a_step = options.batch_size * options.seq_len
    results = {}
    for name, taken in seconds.items():
        stock = SFT if name.startswith(SFT) else TRAINER
        results[name] = {
            "tokens_per_second": tokens_of_a_step / statistics.median(taken),
            **against("stock", taken, seconds[stock]),
            "peak_mib": statistics.median(memory[name]),
        }
    finish(
        options,
        ("torch", "transformers", "trl", "torchtune", "tfidf-tune"),
        report,
        trainers=results,
    )


def report(result: dict[str, Any]) -> str:
    """Lay out the result as Markdown."""
    text = (
        "{config}: batch {batch_size} x {seq_len}, fp32, median of {rounds} rounds with its 95 % "
        "interval; the recipe is compared with Trainer\n\n"
    ).format(**result["settings"])
    rows = named(result["trainers"])
    for row in rows:
        low, high = row["ratio_to_stock_interval"] or (None, None)
        row["interval"] = "" if low is None else f" ({low:.3f} to {high:.3f})"
    columns = {
        "step": "{name}",
        "tokens/s": "{tokens_per_second:,.0f}",
        "ms": "{median_ms:.1f}",
        "time / stock": "{median_ratio_to_stock:.3f}{interval}",
        "extra peak memory, MiB": "{peak_mib:.0f}",
    }
    return text + tabulate(columns, rows)


if __name__ == "__main__":
    main()
