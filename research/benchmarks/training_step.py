"""A training step with torchtune's stock cross-entropy, with ours, and with TF-IDF: time and peak
memory.

    python research/benchmarks/training_step.py                                      # the demo's model on this CPU
    python research/benchmarks/training_step.py --objectives                         # every other objective as well
    python research/benchmarks/training_step.py --config tinyllama/1.1B_full_memorization --device cuda --dtype bf16

The steps run in one process on the same model and batches, taking turns in a rotating order, and
what is compared are ratios within a round, so that a machine that slows down for a while slows all.
Weights are random: a step's cost does not depend on them. Stock is the step of torchtune 0.6.1's
own recipes.
"""

import argparse
from collections.abc import Callable
from itertools import cycle
from typing import Any

import measuring
import torch
from torch import Tensor, nn
from torchtune import config, training
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tfidf_tune import weighting
from tfidf_tune.loss import CrossEntropyLoss, TFIDFCrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import LoRASettings, load_config, prepare_head, train_adapters_only
from tfidf_tune.weighting import shift_labels

Step = Callable[[Tensor], object]
STOCK = "stock CE"
CHUNKED = "our CE, chunked"
OURS = "our CE"
TFIDF = "TF-IDF"
WEIGHTS = "weights alone"
OTHERS = {
    "Goldfish": weighting.GoldfishWeighting,
    "MiLe": weighting.MiLeWeighting,
    "focal": weighting.FocalWeighting,
    "repetition": weighting.RepetitionWeighting,
}


def build_steps(options: argparse.Namespace) -> tuple[dict[str, Step], int, int]:
    """Build the steps on one model with random weights; also its vocabulary size and number of
    trained parameters.
    """
    cfg = load_config(options.config, options.overrides)
    device = torch.device(options.device)
    torch.manual_seed(0)
    with training.set_default_dtype(training.get_dtype(options.dtype, device=device)), device:
        model: nn.Module = config.instantiate(cfg.model)
    if LoRASettings.of(model) is not None:
        train_adapters_only(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = config.instantiate(cfg.optimizer, trained)
    stock = CEWithChunkedOutputLoss()
    losses: dict[str, WeightedCrossEntropyLoss] = {
        CHUNKED: CrossEntropyLoss(head="chunked", num_output_chunks=stock.num_output_chunks),
        OURS: CrossEntropyLoss(),
        TFIDF: TFIDFCrossEntropyLoss(),
    }
    if options.objectives:
        losses |= {name: WeightedCrossEntropyLoss(make()) for name, make in OTHERS.items()}
    if options.compile:
        training.compile_model(model, verbose=False)
        training.compile_loss(stock, verbose=False)
        for loss in losses.values():
            loss.compile_parts()

    def stock_step(tokens: Tensor) -> None:
        tokens = tokens.to(device, non_blocking=True)
        prepare_head(model, losses[CHUNKED])
        num_tokens = (tokens != stock.ignore_index).sum()
        loss = stock(model(tokens), shift_labels(tokens)) * num_tokens
        loss.backward()
        training.scale_grads(model, 1 / num_tokens)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def our_step(loss: WeightedCrossEntropyLoss) -> Step:
        loss.to(device)
        take_step = measuring.recipe_step(model, loss, optimizer, options.device, 1.0)

        def step(tokens: Tensor) -> None:
            prepare_head(model, loss)
            take_step(tokens)

        return step

    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    weights = weighting.TFIDFWeighting()
    steps: dict[str, Step] = {STOCK: stock_step} | {
        name: our_step(loss) for name, loss in losses.items()
    }
    steps[WEIGHTS] = lambda tokens: weights(
        shift_labels(tokens.to(device, non_blocking=True)), vocab_size=vocab_size
    )
    return steps, vocab_size, sum(parameter.numel() for parameter in trained)


def main() -> None:
    """Measure and print."""
    parser = measuring.make_parser(__doc__, rounds=30)
    parser.add_argument(
        "--config", default="demo/llama_3M_full_memorization", help="gives model and optimizer"
    )
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument(
        "overrides", nargs="*", help="of the config, for example model.num_layers=2"
    )
    parser.add_argument(
        "--objectives", action="store_true", help="also every objective other than TF-IDF"
    )
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile for the layers and all losses"
    )
    options = parser.parse_args()
    steps, vocab_size, num_trained = build_steps(options)
    shape = (measuring.WARMUP + options.rounds, options.batch_size, options.seq_len)
    batches = measuring.for_steps(torch.randint(vocab_size, shape), options.device)

    def turns(step: Step) -> Callable[[], object]:
        upcoming = cycle(batches)  # the same for every step, so that windows fill alike
        return lambda: step(next(upcoming))

    ways = {name: turns(step) for name, step in steps.items()}
    seconds = measuring.take_turns(ways, rounds=options.rounds, device=options.device)
    # Apart, because reading the memory takes time of its own.
    memory = {
        name: measuring.median_peak(turn, options.device) / 2**20 for name, turn in ways.items()
    }
    results = {
        name: {
            **measuring.against("stock", taken, seconds[STOCK]),
            **measuring.against("our_ce", taken, seconds[OURS]),
            "peak_mib": memory[name],
        }
        for name, taken in seconds.items()
    }
    packages = ("torch", "torchtune", "torchao", "tfidf-tune")
    measuring.finish(options, packages, report, trained_parameters=num_trained, steps=results)


def report(result: dict[str, Any]) -> str:
    """Lay out the result as Markdown."""
    columns = {
        "step": "{name}",
        "ms": "{median_ms:.2f}",
        "time / stock CE": "{median_ratio_to_stock:.4f}",
        "time / our CE": "{median_ratio_to_our_ce:.4f}",
        "extra peak memory, MiB": "{peak_mib:.1f}",
    }
    settings = (
        "{config} {overrides}: batch {batch_size} x {seq_len}, {dtype}, compile {compile}, "
        "{rounds} rounds"
    )
    trained = f"{result['trained_parameters']:,} trained parameters"
    table = measuring.tabulate(columns, measuring.named(result["steps"]))
    return f"{settings.format(**result['settings'])}, {trained}\n\n{table}"


if __name__ == "__main__":
    main()
