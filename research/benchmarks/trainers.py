"""A training step in transformers' Trainer and in TRL's SFTTrainer, with and without token weights, and in the recipe.

    python research/benchmarks/trainers.py           # the demo's model on this CPU
    python research/benchmarks/trainers.py --device cuda

Each trainer has a copy of one model, and runs its own loop on the same batches. They take turns of a few steps in one
process, in a rotating order; what is compared are ratios within a round. A turn is timed from the start of its second
step to the end of its last one, without saving and evaluation.
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

import tfidf_tune  # noqa: F401  # isort: skip  (first, because it keeps torchao's import message quiet)

import torch
import transformers
from datasets import Dataset
from measuring import (  # type: ignore[import-not-found]
    Peak,
    against_stock,
    heading,
    in_turns,
    make_parser,
    markdown_table,
    peak_memory,
    record,
    synchronize,
    write_result,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torchtune import config
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tfidf_tune.integrations.transformers import TokenWeightingTrainer
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.loss import CrossEntropyLoss, TFIDFCrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import agree_on_step, load_config, prepare_head, train_step

TRAINER, SFT = "Trainer", "SFTTrainer"
WARMUP = 2
MEMORY_ROUNDS = 5
Turn = Callable[[bool], tuple[float, Peak | None]]  # called with whether to measure memory, returns seconds and peak


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser: argparse.ArgumentParser = make_parser(__doc__, rounds=30)
    parser.add_argument(
        "--config", default="demo/llama_3M_full_memorization", help="a Llama: gives sizes and optimizer"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4, help="of a turn; the first is not timed")
    return parser.parse_args()


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """Times the steps of a turn after the first, and measures the memory of these if asked."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds = 0.0
        self.measures_memory = False
        self.peak: Peak | None = None
        self._stack = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the second step."""
        if state.global_step == 1:
            self.peak = self._stack.enter_context(peak_memory(self.device)) if self.measures_memory else None
            synchronize(self.device)
            self.seconds = -time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End with the last step."""
        if state.global_step == state.max_steps:
            synchronize(self.device)
            self.seconds += time.perf_counter()
            self._stack.close()


def build_trainer(
    trainer_class: type[Trainer], options: argparse.Namespace, tokens: torch.Tensor, folder: Path, **arguments: Any
) -> tuple[Callable[[], object], Stopwatch]:
    """Build a trainer with a model of its own; return its loop and its watch."""
    cfg = load_config(options.config, [])
    sizes, optimizer = cfg.model, cfg.optimizer
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.embed_dim,
            intermediate_size=sizes.intermediate_dim,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            max_position_embeddings=sizes.max_seq_len,
        )
    )
    settings: dict[str, Any] = {
        "per_device_train_batch_size": options.batch_size,
        "max_steps": options.steps,
        "optim": "adamw_torch_fused",
        "learning_rate": optimizer.lr,
        "max_grad_norm": cfg.clip_grad_norm,
        "logging_steps": cfg.log_every_n_steps,
        "use_cpu": options.device == "cpu",
        "bf16": False,
        "activation_checkpointing": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if issubclass(trainer_class, SFTTrainer):
        prepared = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        arguments["args"] = SFTConfig(str(folder), **settings, **prepared)
        words = {f"word{number}": number for number in range(sizes.vocab_size)}
        arguments["processing_class"] = transformers.PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="word0")), pad_token="word0", eos_token="word0"
        )
    else:
        arguments["args"] = TrainingArguments(str(folder), **settings)
    rows = [{"input_ids": row, "labels": row} for row in tokens.flatten(0, 1).tolist()]
    trainer = trainer_class(model, train_dataset=Dataset.from_list(rows), **arguments)
    trainer.remove_callback(transformers.PrinterCallback)
    watch = Stopwatch(options.device)
    trainer.add_callback(watch)
    return trainer.train, watch


def trainer_turn(loop: Callable[[], object], watch: Stopwatch, *, measures_memory: bool) -> tuple[float, Peak | None]:
    """Run a trainer's loop; return the seconds and the memory of its steps after the first."""
    watch.measures_memory = measures_memory
    loop()
    return watch.seconds, watch.peak


def build_recipe(loss: WeightedCrossEntropyLoss, options: argparse.Namespace, tokens: torch.Tensor) -> Turn:
    """Build the recipe's model; return its turn."""
    cfg = load_config(options.config, [])
    torch.manual_seed(0)
    device = torch.device(options.device)
    with device:
        model = config.instantiate(cfg.model)
    loss.to(device)
    optimizer = config.instantiate(cfg.optimizer, model.parameters())
    prepare_head(model, loss)
    scaler = torch.amp.GradScaler(options.device, enabled=False)

    def turn(measures_memory: bool) -> tuple[float, Peak | None]:
        peak = None
        start = 0.0
        with ExitStack() as stack:
            for number, batch in enumerate(tokens):
                if number == 1:
                    peak = stack.enter_context(peak_memory(options.device)) if measures_memory else None
                    synchronize(options.device)
                    start = time.perf_counter()
                batch = batch.to(device)
                inputs = agree_on_step([{"tokens": batch, "labels": batch.clone()}])
                train_step(
                    model, loss, optimizer, inputs, scaler=scaler, device=device, clip_grad_norm=cfg.clip_grad_norm
                )
            synchronize(options.device)
            seconds = time.perf_counter() - start
        return seconds, peak

    return turn


def build_turns(options: argparse.Namespace, folder: Path) -> dict[str, Turn]:
    """Build all trainers on the same batches."""
    vocab_size = load_config(options.config, []).model.vocab_size
    tokens = torch.randint(1, vocab_size, (options.steps, options.batch_size, options.seq_len))
    trainers: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
        TRAINER: (Trainer, {}),
        f"{TRAINER}, again": (Trainer, {}),  # shows what the machine alone does to a ratio
        f"{TRAINER}, TF-IDF": (TokenWeightingTrainer, {}),
        f"{TRAINER}, TF-IDF, fused_head": (TokenWeightingTrainer, {"fused_head": True}),
        SFT: (SFTTrainer, {}),
        f"{SFT}, again": (SFTTrainer, {}),
        f"{SFT}, TF-IDF": (TokenWeightingSFTTrainer, {}),
    }
    turns: dict[str, Turn] = {}
    for name, (trainer_class, arguments) in trainers.items():
        loop, watch = build_trainer(trainer_class, options, tokens, folder, **arguments)
        turns[name] = lambda memory, loop=loop, watch=watch: trainer_turn(loop, watch, measures_memory=memory)  # type: ignore[misc]
    turns["recipe, CE"] = build_recipe(CrossEntropyLoss(), options, tokens)
    turns["recipe, TF-IDF"] = build_recipe(TFIDFCrossEntropyLoss(), options, tokens)
    return turns


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    transformers.utils.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        turns = build_turns(options, Path(folder))
        names = list(turns)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        memory: dict[str, list[float]] = {name: [] for name in names}
        for index, name in in_turns(names, WARMUP + options.rounds):
            took, _ = turns[name](False)
            if index >= WARMUP:
                seconds[name].append(took / (options.steps - 1))
        for _ in range(MEMORY_ROUNDS):  # apart, because reading the memory takes time of its own
            for name in names:
                peak = turns[name](True)[1]
                memory[name].append(0.0 if peak is None else peak.num_bytes / 2**20)
    num_tokens = options.batch_size * options.seq_len
    result = record(
        options,
        options.device,
        ("torch", "transformers", "trl", "torchtune", "tfidf-tune"),
        trainers={
            name: {
                "tokens_per_second": num_tokens / statistics.median(seconds[name]),
                **against_stock(seconds[name], seconds[stock]),
                "peak_mib": statistics.median(memory[name]),
            }
            for name in names
            for stock in [SFT if name.startswith(SFT) else TRAINER]
        },
    )
    report(result)
    write_result(result, options.output)


def report(result: dict[str, Any]) -> None:
    """Print the result as a Markdown table."""
    settings = result["settings"]
    print(heading(result))
    print(
        f"{settings['config']}: batch {settings['batch_size']} x {settings['seq_len']}, fp32, median of "
        f"{settings['rounds']} rounds with its 95 % interval; the recipe is compared with Trainer\n"
    )
    rows = []
    for name, row in result["trainers"].items():
        interval = row["ratio_to_stock_interval"]
        limits = "" if interval is None else f" ({interval[0]:.3f} to {interval[1]:.3f})"
        ratio = f"{row['median_ratio_to_stock']:.3f}{limits}"
        rows.append(
            [name, f"{row['tokens_per_second']:,.0f}", f"{row['median_ms']:.1f}", ratio, f"{row['peak_mib']:.0f}"]
        )
    print(markdown_table(["step", "tokens/s", "ms", "time / stock", "extra peak memory, MiB"], rows))


if __name__ == "__main__":
    main()
