"""One training step part by part: where its time goes, and the floor that its matrix products set.

    python benchmarks/step_profile.py                                       # the demo's model on this CPU
    python benchmarks/step_profile.py --config tinyllama/1.1B_full_memorization --device cuda --dtype bf16

The step is that of the recipes with the config's loss, on random weights and tokens. How its parts are told apart:

1. The step's functions (the model, its embedding and head, loss, weighting, clipping, optimizer) run in named ranges;
   an operation belongs to the innermost range around it.
2. In the layers, what attention's kernel does is attention, what a linear map does is a matrix product, and the rest is
   the rest: norms, rotary embedding, activations, residual sums, copies.
3. An operation of the backward pass belongs to the part of the forward operation whose gradient it computes; autograd
   numbers both alike. What a fused head computes ahead of it is forward.
4. Each operation counts with its own time, without that of operations inside it. On a CPU what remains is Python's time
   between operations, on a GPU the time in which no kernel runs.

The floor is the operations of the step's matrix products and attention, forward and backward, over the rate at which
this machine takes the same products alone, each as often as in the step. Attention counts as if nothing were masked.
"""

import argparse
import math
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, cycle, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from measuring import (  # type: ignore[import-not-found]
    heading,
    markdown_table,
    record,
    synchronize,
    take_turns,
    write_result,
)
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torchtune import config
from training_step import build_model, step_options  # type: ignore[import-not-found]

from tfidf_tune.data import TextBlocksDataset
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import FinetuneConfig, Run, build_dataloader, load_config, prepare_model, train_step

aten = torch.ops.aten

PRODUCTS, ATTENTION, REST = "layers: matrix products", "layers: attention", "layers: the rest"
EMBEDDING, HEAD, WEIGHTS = "embedding", "head and cross-entropy", "weights"
CLIPPING, OPTIMIZER = "clipping", "optimizer"
OTHER, BETWEEN = "other operations", "between operations"
PARTS = (PRODUCTS, ATTENTION, REST, EMBEDDING, HEAD, WEIGHTS, CLIPPING, OPTIMIZER, OTHER, BETWEEN)
FORWARD, BACKWARD, NEITHER = "forward", "backward", "neither"

STEP, LAYERS = "step", "layers"  # ranges whose operations are sorted further
DIRECTIONS = dict.fromkeys((EMBEDDING, HEAD, WEIGHTS), FORWARD) | dict.fromkeys((CLIPPING, OPTIMIZER), NEITHER)
LINEAR_MAPS = {"aten::linear", "aten::matmul", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
GRADIENT = "autograd::engine::evaluate_function"  # the range that autograd puts around each node of the graph

FIRST_FACTOR = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1}  # its place in the arguments

WARMUP = 3
PROFILED_STEPS = 5
SQUARE = {"cpu": 2048, "cuda": 8192}  # large enough for the machine's best rate
PRODUCTS_A_TURN = {"cpu": 1, "cuda": 50}  # so that waiting for a GPU costs nothing beside them
BATCH, ITEMS, COLLATE = "next batch", "items", "collate"


class Factor(NamedTuple):
    """A factor of a matrix product.

    Attributes:
        shape (tuple[int, ...]): its shape.
        transposed (bool): whether it lies in memory column by column.
        dtype (torch.dtype): its dtype.
    """

    shape: tuple[int, ...]
    transposed: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Factor":
        """Describe a tensor of two or more dimensions."""
        return cls(tuple(tensor.shape), tensor.stride(-2) < tensor.stride(-1), tensor.dtype)

    def random(self, device: str) -> Tensor:
        """Make a tensor of this description."""
        *batch, rows, columns = self.shape
        if self.transposed:
            return torch.randn(*batch, columns, rows, dtype=self.dtype, device=device).mT
        return torch.randn(self.shape, dtype=self.dtype, device=device)


Product = tuple[Factor, Factor]
Shape = Sequence[int]


class ProductCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the matrix products that run inside, by their factors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[Product] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and note its factors if it is a product."""
        first = FIRST_FACTOR.get(func.overloadpacket)
        if first is not None:
            self.counts[Factor.of(args[first]), Factor.of(args[first + 1])] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Measure and print."""
    options = step_options(__doc__).parse_args()
    model, optimizer = build_model(options)
    cfg = load_config(options.config, options.overrides)
    loss: WeightedCrossEntropyLoss = config.instantiate(cfg.loss).to(options.device)
    prepare_model(model, loss, FinetuneConfig())
    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    shape = (WARMUP + options.rounds, options.batch_size, options.seq_len)
    upcoming = cycle(torch.randint(vocab_size, shape, device=options.device))
    device = torch.device(options.device)
    no_scaler = torch.amp.GradScaler(device.type, enabled=False)

    def step() -> None:
        tokens = next(upcoming)
        batch = {"tokens": tokens, "labels": tokens.clone()}
        train_step(model, loss, optimizer, [batch], scaler=no_scaler, device=device, clip_grad_norm=1.0)

    with tempfile.TemporaryDirectory() as folder:
        ways = {STEP: step} | data_ways(options, vocab_size, Path(folder))
        seconds = take_turns(ways, rounds=options.rounds, warmup=WARMUP, device=options.device)
    median_ms = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
    with in_ranges(model, loss, optimizer):
        parts, profiled_ms = profile_step(step, options.device)
    flops, products = count_operations(step)
    product_s = time_products(products, options)
    square = Factor((SQUARE[options.device],) * 2, False, next(model.parameters()).dtype)
    [square_s] = time_products([(square, square)], options).values()
    rate = sum(count * product_flops(product) for product, count in products.items()) / sum(
        count * product_s[product] for product, count in products.items()
    )
    floor_ms = 1e3 * sum(flops.values()) / rate
    result = record(
        options,
        options.device,
        ("torch", "torchtune", "torchao", "tfidf-tune"),
        step_ms=median_ms[STEP],
        profiled_ms=profiled_ms,
        parts=parts,
        flops=flops,
        products=[
            {
                "factors": [list(factor.shape) for factor in product],
                "transposed": [factor.transposed for factor in product],
                "count": count,
                "flops_per_s": product_flops(product) / product_s[product],
            }
            for product, count in products.items()
        ],
        flops_per_s=rate,
        square={"size": SQUARE[options.device], "flops_per_s": product_flops((square, square)) / square_s},
        floor_ms=floor_ms,
        step_over_floor=median_ms[STEP] / floor_ms,
        next_batch_ms={name: median_ms[name] for name in (BATCH, ITEMS, COLLATE)},
        next_batch_over_step=median_ms[BATCH] / median_ms[STEP],
    )
    report(result)
    write_result(result, options.output)


@contextmanager
def in_ranges(model: nn.Module, loss: WeightedCrossEntropyLoss, optimizer: Optimizer) -> Iterator[None]:
    """Let the functions that a step is made of run in the ranges of their parts."""
    functions: list[tuple[object, str, str]] = [
        (model, "forward", LAYERS),
        (model.get_submodule("tok_embeddings"), "forward", EMBEDDING),
        (model.get_submodule("output"), "forward", HEAD),
        (loss, "terms", HEAD),
        (loss.weighting, "forward", WEIGHTS),
        (nn.utils, "clip_grad_norm_", CLIPPING),
        (optimizer, "step", OPTIMIZER),
        (optimizer, "zero_grad", OPTIMIZER),
    ]
    with ExitStack() as stack:
        for owner, name, part in functions:
            stack.enter_context(patch.object(owner, name, record_function(part)(getattr(owner, name))))
        yield


def profile_step(step: Callable[[], None], device: str) -> tuple[dict[str, dict[str, float]], float]:
    """Profile some steps.

    Args:
        step (Callable[[], None]): one step, whose functions run in ranges.
        device (str): ``cpu`` or ``cuda``: whose time counts.

    Returns:
        tuple[dict[str, dict[str, float]], float]: the parts by name, each with ``forward_ms``, ``backward_ms``, ``ms``
            (these two and what is neither) and ``share``; and the milliseconds of a profiled step. Means of 5 steps.
    """
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    synchronize(device)
    with profile(activities=activities) as profiler:
        for _ in range(PROFILED_STEPS):
            with record_function(STEP):
                step()
                synchronize(device)
    events = [event for event in profiler.events() if event.device_type == DeviceType.CPU]
    total = sum(event.cpu_time_total for event in events if event.name == STEP)
    microseconds = sort_events(events, device)
    if device == "cuda":
        microseconds[BETWEEN, NEITHER] = total - sum(microseconds.values())
    parts = {}
    for part in PARTS:
        times = {direction: microseconds[part, direction] for direction in (FORWARD, BACKWARD, NEITHER)}
        parts[part] = {
            "forward_ms": times[FORWARD] / PROFILED_STEPS / 1e3,
            "backward_ms": times[BACKWARD] / PROFILED_STEPS / 1e3,
            "ms": sum(times.values()) / PROFILED_STEPS / 1e3,
            "share": sum(times.values()) / total,
        }
    return parts, total / PROFILED_STEPS / 1e3


def sort_events(events: Sequence[FunctionEvent], device: str) -> defaultdict[tuple[str, str], float]:
    """Sum up the events' own time by part and direction, in microseconds."""
    forward_parts: dict[int, str] = {}
    for event in sorted(events, key=lambda event: event.time_range.start):
        # Operations that need no gradient show the number of the next that does: the last is the one that got it.
        part, direction = part_of(event, forward_parts)
        if direction == FORWARD and event.sequence_nr >= 0:
            forward_parts[event.sequence_nr] = part
    microseconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        microseconds[part_of(event, forward_parts)] += own_time(event, device)
    return microseconds


def own_time(event: FunctionEvent, device: str) -> float:
    """Microseconds of the event without the events inside it: of the CPU, or of the kernels that it launched."""
    if device == "cpu":
        return float(event.self_cpu_time_total)
    # A range shows up as if it were a kernel over all the kernels inside it.
    return 0.0 if event.is_user_annotation else float(sum(kernel.duration for kernel in event.kernels))


def part_of(event: FunctionEvent, forward_parts: dict[int, str]) -> tuple[str, str]:
    """Find part and direction of an event; the module's docstring has the rules.

    Args:
        event (FunctionEvent): an operation or a range.
        forward_parts (dict[int, str]): autograd's number of a forward operation -> its part.

    Returns:
        tuple[str, str]: the part, and ``forward``, ``backward`` or ``neither``.
    """
    if event.name in (STEP, LAYERS):
        return BETWEEN, NEITHER
    kind = REST
    for around in lineage(event):
        if around.name.startswith(GRADIENT):
            return forward_parts.get(around.sequence_nr, OTHER), BACKWARD
        if around.name in DIRECTIONS:
            return around.name, DIRECTIONS[around.name]
        if around.name == LAYERS:
            return kind, FORWARD
        if "scaled_dot_product" in around.name:
            kind = ATTENTION
        elif around.name in LINEAR_MAPS and kind is not ATTENTION:
            kind = PRODUCTS
    return OTHER, NEITHER


def lineage(event: FunctionEvent) -> Iterator[FunctionEvent]:
    """The event and what it runs in, from the inside out."""
    around: FunctionEvent | None = event
    while around is not None:
        yield around
        around = around.cpu_parent


def count_operations(step: Callable[[], None]) -> tuple[dict[str, int], Counter[Product]]:
    """Count what a step multiplies.

    Returns:
        tuple[dict[str, int], Counter[Product]]: floating-point operations by the name of the operator, forward and
            backward, and how often each matrix product runs (attention left out).
    """
    # What torch's own counter does not know: attention on a CPU, and the product that adds in place.
    more: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
        aten.addmm_: lambda _, first, second, **__: 2 * math.prod(first) * second[-1],
    }
    with FlopCounterMode(display=False, custom_mapping=more) as flop_counter, ProductCounter() as product_counter:
        step()
    by_operator = flop_counter.get_flop_counts()["Global"]
    return {str(operator): count for operator, count in by_operator.items()}, product_counter.counts


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """Operations of attention from the shapes of what it takes, by torch's own formula."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def attention_backward_flops(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    """The same of its backward pass."""
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


def product_flops(product: Product) -> int:
    """Floating-point operations of a product, an addition and a multiplication for each pair of elements."""
    first, second = product
    return 2 * math.prod(first.shape) * second.shape[-1]


def time_products(products: Iterable[Product], options: argparse.Namespace) -> dict[Product, float]:
    """Take matrix products alone.

    Returns:
        dict[Product, float]: median seconds of one.
    """

    def turn(first: Tensor, second: Tensor) -> None:
        for _ in range(PRODUCTS_A_TURN[options.device]):
            torch.matmul(first, second)

    turns = {product: partial(turn, *(factor.random(options.device) for factor in product)) for product in products}
    seconds = take_turns(turns, rounds=options.rounds, warmup=WARMUP, device=options.device)
    return {product: statistics.median(taken) / PRODUCTS_A_TURN[options.device] for product, taken in seconds.items()}


def data_ways(options: argparse.Namespace, vocab_size: int, folder: Path) -> dict[str, Callable[[], object]]:
    """Ways to time what the recipes do before a step: the next batch of memory-mapped blocks, and two pieces of it."""
    random = np.random.default_rng(0)
    num_batches = WARMUP + options.rounds
    blocks = random.integers(vocab_size, size=(num_batches * options.batch_size, options.seq_len), dtype=np.int32)
    np.save(folder / "blocks.npy", blocks)
    dataset = TextBlocksDataset(np.load(folder / "blocks.npy", mmap_mode="r"))
    loader = build_dataloader(
        FinetuneConfig(batch_size=options.batch_size),
        dataset,
        SimpleNamespace(pad_id=0),
        Run(torch.device(options.device), torch.float32, seed=0, output_dir=folder),
    )
    batches = chain.from_iterable(repeat(loader))
    orders = cycle(random.permutation(len(blocks)).reshape(num_batches, options.batch_size).tolist())

    def items() -> list[dict[str, list[int]]]:
        return [dataset[index] for index in next(orders)]

    return {BATCH: lambda: next(batches), ITEMS: items, COLLATE: partial(loader.collate_fn, items())}


def report(result: dict[str, Any]) -> None:
    """Print the result as a Markdown table and what it means."""
    settings, batch = result["settings"], result["next_batch_ms"]
    print(heading(result))
    print(
        f"{settings['config']} {settings['overrides']}: batch {settings['batch_size']} x {settings['seq_len']}, "
        f"{settings['dtype']}, mean of {PROFILED_STEPS} profiled steps\n"
    )
    rows = [
        [part, f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}", f"{row['ms']:.2f}", f"{row['share']:.1%}"]
        for part, row in result["parts"].items()
    ]
    rows.append(["profiled step", "", "", f"{result['profiled_ms']:.2f}", "100.0%"])
    print(markdown_table(["part", "forward, ms", "backward, ms", "ms", "share"], rows))
    print(
        f"\nstep without the profiler: {result['step_ms']:.2f} ms, median of {settings['rounds']}\n"
        f"floor: {sum(result['flops'].values()) / 1e9:.3f} GFLOP at {result['flops_per_s'] / 1e9:.1f} GFLOP/s = "
        f"{result['floor_ms']:.2f} ms; the step takes {result['step_over_floor']:.2f} times that\n"
        f"rate of a product of {result['square']['size']} x {result['square']['size']} matrices: "
        f"{result['square']['flops_per_s'] / 1e9:.1f} GFLOP/s\n"
        f"next batch, before the step: {batch[BATCH]:.3f} ms ({result['next_batch_over_step']:.2%} of a step), of it "
        f"items {batch[ITEMS]:.3f} ms, collate {batch[COLLATE]:.3f} ms"
    )


if __name__ == "__main__":
    main()
