"""The loss from hidden states and head weight, forward and backward, in every way we know: time, memory and errors.

    python research/benchmarks/fused_head.py                                         # the demo's sizes on this CPU
    python research/benchmarks/fused_head.py --case llama3 --device cuda
    python research/benchmarks/fused_head.py --case tinyllama --tokens 4096 --frozen-head --ways chunked fused

All ways take turns in one process on the same random hidden states, head and labels, an eighth of them ignored. Tokens
count by given random weights of mean 1, which cost what any others do; stock and Liger know none. Memory is the peak
in addition to the inputs and the gradients that every way has to return. On a CPU it is measured twice: by the resident
size of the process, which includes the scratch space of the matrix kernels, and by the record of torch's allocator.
Errors are those of gradients against float64, ``||g - g64|| / ||g64||``, with sizes small enough for that.
"""

import argparse
import importlib
import importlib.util
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from measuring import (  # type: ignore[import-not-found]
    WARMUP,
    available_memory,
    heading,
    make_parser,
    markdown_table,
    median_ratio,
    peak_memory,
    record,
    take_turns,
    write_result,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tfidf_tune.loss import CrossEntropyLoss, HeadInput, WeightedCrossEntropyLoss
from tfidf_tune.training import format_bytes

BATCH_SIZE = 8
IGNORED = -100
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CUDA_ROUNDS = 30
MEMORY_ROUNDS = 5
FUSED = "fused"


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        name (str): what the command calls it.
        tokens (int): of the mini-batch, in 8 rows.
        hidden (int): width of the hidden states.
        vocab_size (int): rows of the head's weight.
        dtype (str): of hidden states and head, a key of ``DTYPES``.
        rounds (int): timed rounds on a CPU, unless the command says how many.
        is_frozen (bool): whether the head has no gradient.
    """

    name: str
    tokens: int
    hidden: int
    vocab_size: int
    dtype: str
    rounds: int
    is_frozen: bool = False

    @property
    def logits_bytes(self) -> int:
        """The size of all logits in their dtype."""
        return self.tokens * self.vocab_size * DTYPES[self.dtype].itemsize

    @property
    def largest_need(self) -> int:
        """Bytes that a way which has all logits may take in addition to inputs and gradients."""
        # The logits and their gradient, and in float32 the logits, their log-softmax and its gradient.
        return 2 * self.logits_bytes + 3 * self.tokens * self.vocab_size * torch.float32.itemsize


CASES = {
    "demo": [Case("demo", 2048, 192, 4096, dtype, rounds=20) for dtype in ("fp32", "bf16")],
    "tinyllama": [Case("tinyllama", 2048, 2048, 32_000, "bf16", rounds=3)],
    "llama3": [Case("llama3", 4096, 2048, 128_256, "bf16", rounds=1)],
}
# Enough tokens for 16 chunks of the fused loss, each of which may round.
LARGEST_FOR_FLOAT64 = {"tokens": 4096, "hidden": 128, "vocab_size": 4096}
QUICK = {"tokens": 128, "hidden": 16, "vocab_size": 64, "rounds": 2}


class Inputs(NamedTuple):
    """What the loss is computed from.

    Attributes:
        head (HeadInput): leaves of the graph, ``[b, s, d]`` and ``[v, d]``.
        labels (Tensor): int64 ``[b, s]``.
        weights (Tensor): float32 ``[b, s]``, 0 at ignored positions, of mean 1 at the others.
    """

    head: HeadInput
    labels: Tensor
    weights: Tensor

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get a gradient."""
        return {name: leaf for name in ("hidden", "weight") if (leaf := getattr(self.head, name)).requires_grad}

    def clear_gradients(self) -> None:
        """Free what an earlier turn left."""
        for leaf in self.leaves().values():
            leaf.grad = None


Compute = Callable[[HeadInput, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Way:
    """A way to compute the loss.

    Attributes:
        compute (Compute): the scalar from the head's input, labels and weights.
        is_weighted (bool): whether tokens count by their weights.
        has_logits (bool): whether it has the logits of all tokens at one time.
        package (str | None): a peer's module; it may not be installed, and runs only on CUDA.
    """

    compute: Compute
    is_weighted: bool = True
    has_logits: bool = False
    package: str | None = None


def output_chunks(head: HeadInput, num_chunks: int) -> list[Tensor]:
    """Chunks of logits along the sequence, as torchtune's models make them."""
    return [F.linear(chunk, head.weight) for chunk in head.hidden.chunk(num_chunks, dim=1)]


def ours(loss: WeightedCrossEntropyLoss) -> Compute:
    """Our loss with given weights, over chunks of logits or from hidden states."""

    def compute(head: HeadInput, labels: Tensor, weights: Tensor) -> Tensor:
        given = output_chunks(head, loss.num_output_chunks) if loss.head == "chunked" else head
        return loss.objective(given, labels, weights)[0]

    return compute


def stock(head: HeadInput, labels: Tensor, weights: Tensor) -> Tensor:
    """The loss of torchtune's own recipes over the same chunks; without weights."""
    loss = CEWithChunkedOutputLoss(ignore_index=IGNORED)
    total: Tensor = loss(output_chunks(head, loss.num_output_chunks), labels)
    return total


def plain(head: HeadInput, labels: Tensor, weights: Tensor) -> Tensor:
    """The definition, over all logits at once."""
    logits = F.linear(head.hidden, head.weight).flatten(0, 1)
    if logits.dtype.itemsize < torch.float32.itemsize:
        logits = logits.float()
    losses = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="none")
    return mean(losses, labels, weights)


def liger(head: HeadInput, labels: Tensor, weights: Tensor) -> Tensor:
    """Liger's fused linear cross-entropy; without weights."""
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED)
    total: Tensor = loss(head.weight, head.hidden.flatten(0, 1), labels.flatten())
    return total


def cut_cross_entropy(head: HeadInput, labels: Tensor, weights: Tensor) -> Tensor:
    """Apple's cut cross-entropy of each token."""
    linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    losses = linear_cross_entropy(head.hidden, head.weight, labels, ignore_index=IGNORED, reduction="none")
    return mean(losses, labels, weights)


def mean(losses: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over the tokens that count."""
    return (losses.flatten() * weights.flatten()).sum() / (labels != IGNORED).sum()


WAYS = {
    FUSED: Way(ours(CrossEntropyLoss())),
    "fused, fp32 sum": Way(ours(CrossEntropyLoss(accumulate_in_fp32=True))),
    "torch": Way(ours(CrossEntropyLoss(head="torch"))),
    "chunked": Way(ours(CrossEntropyLoss(head="chunked")), has_logits=True),
    "stock": Way(stock, is_weighted=False, has_logits=True),
    "plain": Way(plain, has_logits=True),
    "Liger": Way(liger, is_weighted=False, package="liger_kernel"),
    "cut-cross-entropy": Way(cut_cross_entropy, package="cut_cross_entropy"),
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser: argparse.ArgumentParser = make_parser(__doc__, rounds=None)
    parser.add_argument("--case", nargs="+", default=["demo"], choices=CASES, help="default: demo")
    parser.add_argument("--tokens", type=int, help="instead of the case's; a multiple of 64")
    parser.add_argument("--hidden", type=int, help="instead of the case's")
    parser.add_argument("--vocab-size", type=int, help="instead of the case's")
    parser.add_argument("--dtype", choices=DTYPES, help="instead of the case's")
    parser.add_argument("--frozen-head", action="store_true", help="no gradient for the head, as with LoRA")
    parser.add_argument(
        "--ways", nargs="+", default=list(WAYS), choices=WAYS, help=f"in addition to '{FUSED}'; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="sizes that only show that the script runs")
    options = parser.parse_args()
    if options.tokens and options.tokens % 64:
        parser.error(f"--tokens is {options.tokens}: give a multiple of 64, which is 8 rows in 8 chunks")
    return options


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """The named cases with what the command line sets."""
    changes: dict[str, Any] = {"is_frozen": options.frozen_head}
    if options.device == "cuda":
        changes["rounds"] = CUDA_ROUNDS
    if options.quick:
        changes |= QUICK
    for name in ("tokens", "hidden", "vocab_size", "dtype", "rounds"):
        if getattr(options, name) is not None:
            changes[name] = getattr(options, name)
    return list(dict.fromkeys(replace(case, **changes) for name in options.case for case in CASES[name]))


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    ways = {name: way for name, way in WAYS.items() if name in {FUSED, *options.ways}}
    peers = [way.package.replace("_", "-") for way in ways.values() if way.package and is_installed(way.package)]
    cases = [measure(case, ways, options.device) for case in chosen_cases(options)]
    result = record(options, options.device, ("torch", "torchtune", "tfidf-tune", *peers), cases=cases)
    report(result)
    write_result(result, options.output)


def is_installed(package: str) -> bool:
    """Whether a module can be imported."""
    return importlib.util.find_spec(package) is not None


def make_inputs(case: Case, device: str) -> Inputs:
    """Draw inputs whose logits have a standard deviation of 2; the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = partial(torch.randn, generator=generator, device=device, dtype=DTYPES[case.dtype])
    shape = (BATCH_SIZE, case.tokens // BATCH_SIZE)
    weight = drawn(case.vocab_size, case.hidden).mul_(2 * case.hidden**-0.5).requires_grad_(not case.is_frozen)
    labels = torch.randint(case.vocab_size, (case.tokens,), generator=generator, device=device)
    labels[torch.randperm(case.tokens, generator=generator, device=device)[: case.tokens // 8]] = IGNORED
    weights = torch.rand(case.tokens, generator=generator, device=device) * (labels != IGNORED)
    weights *= (labels != IGNORED).sum() / weights.sum()
    hidden = drawn(*shape, case.hidden).requires_grad_()
    return Inputs(HeadInput(hidden, weight), labels.view(shape), weights.view(shape))


def forward_and_backward(way: Way, inputs: Inputs) -> None:
    """Leave gradients in the inputs."""
    inputs.clear_gradients()
    way.compute(*inputs).backward()  # type: ignore[no-untyped-call]


def measure(case: Case, ways: Mapping[str, Way], device: str) -> dict[str, Any]:
    """Measure a case in all ways that can be.

    Args:
        case (Case): what is measured.
        ways (Mapping[str, Way]): by their names.
        device (str): ``cpu`` or ``cuda``.

    Returns:
        dict[str, Any]: the case, and of each way either ``not_measured``, the reason, or what was measured.
    """
    small = {name: min(getattr(case, name), largest) for name, largest in LARGEST_FOR_FLOAT64.items()}
    errors, reasons = gradient_errors(replace(case, **small), ways, device)
    inputs = make_inputs(case, device)
    for name in list(errors):
        available = available_memory(device)
        if ways[name].has_logits and case.largest_need > available:
            reasons[name] = f"may need {format_bytes(case.largest_need)} of {format_bytes(available)}"
    turns = {name: partial(forward_and_backward, ways[name], inputs) for name in errors if name not in reasons}
    # Before time, for which it is a warm-up where a turn takes long.
    memory = {name: extra_memory(turn, inputs, device, min(case.rounds, MEMORY_ROUNDS)) for name, turn in turns.items()}
    seconds = take_turns(turns, rounds=case.rounds, warmup=min(case.rounds - 1, WARMUP), device=device)

    def result(name: str) -> dict[str, Any]:
        if name in reasons:
            return {"not_measured": reasons[name]}
        return {
            "not_measured": None,
            "is_weighted": ways[name].is_weighted,
            "median_ms": 1e3 * statistics.median(seconds[name]),
            "median_ratio_to_fused": median_ratio(seconds[name], seconds[FUSED]),
            "median_ratio_of_fused": median_ratio(seconds[FUSED], seconds[name]),
            **{f"{kind}_extra_bytes": size for kind, size in memory[name].items()},
            **{f"{kind}_share_of_logits": size / case.logits_bytes for kind, size in memory[name].items()},
            "gradient_errors": errors[name],
        }

    return {
        **vars(case),
        "logits_bytes": case.logits_bytes,
        "returned_gradient_bytes": returned_gradient_bytes(inputs),
        "float64_sizes": small,
        "ways": {name: result(name) for name in ways},
    }


def gradient_errors(
    case: Case, ways: Mapping[str, Way], device: str
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Compare gradients with those in float64.

    Args:
        case (Case): with sizes for which float64 has the memory.
        ways (Mapping[str, Way]): by their names.
        device (str): ``cpu`` or ``cuda``.

    Returns:
        tuple[dict[str, dict[str, float]], dict[str, str]]: relative errors of each way, by the input that the gradient
        belongs to, and why other ways cannot run.
    """
    inputs = make_inputs(case, device)
    exact = Inputs(
        HeadInput(*(leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in inputs.head[:2])),
        inputs.labels,
        inputs.weights.double(),
    )
    errors, reasons = {}, {}
    for name, way in ways.items():
        if way.package and not is_installed(way.package):
            reasons[name] = "not installed"
            continue
        if way.package and device == "cpu":
            reasons[name] = "needs a GPU"
            continue
        try:
            forward_and_backward(way, inputs)
        except Exception as error:
            if not way.package:
                raise
            reasons[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"  # what it says of this case
            continue
        counted = exact if way.is_weighted else exact._replace(weights=(exact.labels != IGNORED).double())
        forward_and_backward(WAYS["plain"], counted)
        errors[name] = {key: relative_error(leaf, exact.leaves()[key]) for key, leaf in inputs.leaves().items()}
    return errors, reasons


def relative_error(leaf: Tensor, exact: Tensor) -> float:
    """The distance of a leaf's gradient from the exact one, in norms of that."""
    assert leaf.grad is not None
    assert exact.grad is not None
    return float((leaf.grad - exact.grad).norm() / exact.grad.norm())


def returned_gradient_bytes(inputs: Inputs) -> int:
    """What every way has to leave behind: each gradient is as large as the tensor it belongs to."""
    return sum(leaf.nbytes for leaf in inputs.leaves().values())


def extra_memory(turn: Callable[[], None], inputs: Inputs, device: str, rounds: int) -> dict[str, int]:
    """Measure the peak in addition to inputs and returned gradients.

    Args:
        turn (Callable[[], None]): a forward and backward pass.
        inputs (Inputs): that it leaves gradients in.
        device (str): ``cpu`` or ``cuda``.
        rounds (int): of which the median counts; the allocator's record has no noise.

    Returns:
        dict[str, int]: bytes by the kind of measurement, ``allocated`` and, on a CPU, ``resident``.
    """
    measured = []
    for _ in range(rounds):
        inputs.clear_gradients()
        with peak_memory(device) as peak:
            turn()
        measured.append(peak.num_bytes)
    extra = int(statistics.median(measured)) - returned_gradient_bytes(inputs)
    if device == "cuda":
        return {"allocated": extra}
    inputs.clear_gradients()
    return {"resident": extra, "allocated": peak_allocated(turn) - returned_gradient_bytes(inputs)}


def peak_allocated(turn: Callable[[], None]) -> int:
    """Most bytes at one time that torch's allocator for the CPU has handed out since the start, by its own record."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        turn()
    now = most = 0
    for event in sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def report(result: Mapping[str, Any]) -> None:
    """Print the result as Markdown, a table for each case."""
    print(heading(result))
    kinds = ("allocated",) if result["settings"]["device"] == "cuda" else ("resident", "allocated")
    memory_header = [text for kind in kinds for text in (f"extra {kind}, MiB", "of logits")]
    for case in result["cases"]:
        frozen = ", frozen head" if case["is_frozen"] else ""
        print(
            f"\n{case['name']}: {sizes(case)}, {case['dtype']}{frozen}; logits {format_bytes(case['logits_bytes'])}, "
            f"returned gradients {format_bytes(case['returned_gradient_bytes'])}; median of {case['rounds']} rounds; "
            f"errors with {sizes(case['float64_sizes'])}\n"
        )
        header = ["way", "weights", "ms", "time / fused", *memory_header, "error, hidden", "error, head"]
        rows = [way_row(name, way, kinds, len(header)) for name, way in case["ways"].items()]
        print(markdown_table(header, rows))


def sizes(case: Mapping[str, Any]) -> str:
    """Write the sizes of a case."""
    return f"{case['tokens']:,} tokens, hidden {case['hidden']:,}, V = {case['vocab_size']:,}"


def way_row(name: str, way: Mapping[str, Any], kinds: Sequence[str], num_columns: int) -> list[str]:
    """A row of a case's table."""
    if way["not_measured"]:
        return [name, f"not measured: {way['not_measured']}", *["-"] * (num_columns - 2)]
    memory = [
        text
        for kind in kinds
        for text in (f"{way[f'{kind}_extra_bytes'] / 2**20:.1f}", f"{way[f'{kind}_share_of_logits']:.1%}")
    ]
    errors = [
        f"{way['gradient_errors'][key]:.1e}" if key in way["gradient_errors"] else "-" for key in ("hidden", "weight")
    ]
    weighted = "yes" if way["is_weighted"] else "no"
    return [name, weighted, f"{way['median_ms']:.2f}", f"{way['median_ratio_to_fused']:.3f}", *memory, *errors]


if __name__ == "__main__":
    main()
