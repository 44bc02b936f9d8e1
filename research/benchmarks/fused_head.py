"""The loss from hidden states and head weight, forward and backward, in every way we know: time,
memory and errors.

    python research/benchmarks/fused_head.py                                         # the demo's sizes on this CPU
    python research/benchmarks/fused_head.py --case llama3 --device cuda
    python research/benchmarks/fused_head.py --case tinyllama --tokens 4096 --frozen-head --ways chunked fused

All ways take turns in one process on the same random hidden states, head and labels, an eighth of
them ignored. Tokens count by given random weights of mean 1, which cost what any others do; stock
and Liger know none. Memory is the peak in addition to the inputs and the gradients that every way
has to return. On a CPU it is measured twice: by the resident size of the process, which includes
the scratch space of the matrix kernels, and by the record of torch's allocator. Errors are those of
gradients against float64, ``||g - g64|| / ||g64||``, with sizes small enough for that.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import measuring
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torchtune.modules.loss import CEWithChunkedOutputLoss

from tfidf_tune.loss import CrossEntropyLoss, HeadInput, WeightedCrossEntropyLoss
from tfidf_tune.training import format_bytes

BATCH_SIZE = 8
IGNORED = -100
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FUSED = "fused"


@dataclass(frozen=True)
class Case:
    """What is measured: a mini-batch of ``tokens`` in 8 rows, and its head."""

    name: str
    tokens: int
    hidden: int
    vocab_size: int
    dtype: str
    rounds: int  # on a CPU, unless the command says how many
    is_frozen: bool = False  # the head has no gradient

    @property
    def logits_bytes(self) -> int:
        """The size of all logits in their dtype."""
        return self.tokens * self.vocab_size * DTYPES[self.dtype].itemsize

    @property
    def largest_need(self) -> int:
        """Bytes that a way which has all logits may take in addition to inputs and gradients."""
        # The logits and their gradient, and in float32 the logits, their log-softmax and its
        # gradient.
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
    """What the loss is computed from; weights are 0 at ignored positions and of mean 1 at the
    others.
    """

    head: HeadInput  # leaves of the graph, [b, s, d] and [v, d]
    labels: Tensor  # int64 [b, s]
    weights: Tensor  # float32 [b, s]

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get a gradient."""
        inputs = {"hidden": self.head.hidden, "weight": self.head.weight}
        return {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}


Compute = Callable[[HeadInput, Tensor, Tensor], Tensor]  # from the head's input, labels and weights


@dataclass(frozen=True)
class Way:
    """A way to compute the loss."""

    compute: Compute
    is_weighted: bool = True
    has_logits: bool = False  # of all tokens at one time
    package: str | None = None  # a peer's module: it may not be installed, and runs only on CUDA

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        return self.package is None or importlib.util.find_spec(self.package) is not None


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
    loss = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED
    )
    total: Tensor = loss(head.weight, head.hidden.flatten(0, 1), labels.flatten())
    return total


def torch_head(head: HeadInput, labels: Tensor, weights: Tensor) -> Tensor:
    """PyTorch's chunked ``linear_cross_entropy`` of each token, from torch 2.13 on."""
    losses = F.linear_cross_entropy(
        head.hidden.flatten(0, 1),
        head.weight,
        labels.flatten(),
        linear_bias=head.bias,
        reduction="none",
        ignore_index=IGNORED,
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return mean(losses.float(), labels, weights)


def cut_cross_entropy(head: HeadInput, labels: Tensor, weights: Tensor) -> Tensor:
    """Apple's cut cross-entropy of each token."""
    linear_cross_entropy = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    losses = linear_cross_entropy(
        head.hidden, head.weight, labels, ignore_index=IGNORED, reduction="none"
    )
    return mean(losses, labels, weights)


def mean(losses: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over the tokens that count."""
    return (losses.flatten() * weights.flatten()).sum() / (labels != IGNORED).sum()


WAYS = {
    FUSED: Way(ours(CrossEntropyLoss())),
    "fused, fp32 sum": Way(ours(CrossEntropyLoss(accumulate_in_fp32=True))),
    **({"torch": Way(torch_head)} if hasattr(F, "linear_cross_entropy") else {}),
    "chunked": Way(ours(CrossEntropyLoss(head="chunked")), has_logits=True),
    "stock": Way(stock, is_weighted=False, has_logits=True),
    "plain": Way(plain, has_logits=True),
    "Liger": Way(liger, is_weighted=False, package="liger_kernel"),
    "cut-cross-entropy": Way(cut_cross_entropy, package="cut_cross_entropy"),
}


def main() -> None:
    """Measure the cases with what the command line sets, and print."""
    parser = measuring.make_parser(__doc__, rounds=None)
    parser.add_argument("--case", nargs="+", default=["demo"], choices=CASES, help="default: demo")
    parser.add_argument(
        "--tokens", type=int, help="instead of the case's; a multiple of 64: 8 rows in 8 chunks"
    )
    parser.add_argument("--hidden", type=int, help="instead of the case's")
    parser.add_argument("--vocab-size", type=int, help="instead of the case's")
    parser.add_argument("--dtype", choices=DTYPES, help="instead of the case's")
    parser.add_argument(
        "--frozen-head", action="store_true", help="no gradient for the head, as with LoRA"
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        default=list(WAYS),
        choices=WAYS,
        help=f"in addition to '{FUSED}'; default: all",
    )
    parser.add_argument(
        "--quick", action="store_true", help="sizes that only show that the script runs"
    )
    options = parser.parse_args()
    if options.tokens and options.tokens % 64:
        parser.error(f"--tokens is {options.tokens}, not a multiple of 64")
    given = {
        name: getattr(options, name)
        for name in ("tokens", "hidden", "vocab_size", "dtype", "rounds")
    }
    changes: dict[str, Any] = {"is_frozen": options.frozen_head}
    if options.device == "cuda":
        changes["rounds"] = 30
    if options.quick:
        changes |= QUICK
    changes |= {name: value for name, value in given.items() if value is not None}
    cases: list[Case] = []
    for name in options.case:
        for case in CASES[name]:
            changed = replace(case, **changes)
            if changed not in cases:
                cases.append(changed)
    ways = {name: way for name, way in WAYS.items() if name in {FUSED, *options.ways}}
    peers = [
        way.package.replace("_", "-") for way in ways.values() if way.package and way.is_installed
    ]
    measured = [measure(case, ways, options.device) for case in cases]
    measuring.finish(options, ("torch", "torchtune", "tfidf-tune", *peers), report, cases=measured)


def make_inputs(case: Case, device: str) -> Inputs:
    """Draw inputs whose logits have a standard deviation of 2; the same ones each time."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = partial(torch.randn, generator=generator, device=device, dtype=DTYPES[case.dtype])
    shape = (BATCH_SIZE, case.tokens // BATCH_SIZE)
    weight = drawn(case.vocab_size, case.hidden).mul_(2 * case.hidden**-0.5)
    weight.requires_grad_(not case.is_frozen)
    labels = torch.randint(case.vocab_size, (case.tokens,), generator=generator, device=device)
    shuffled = torch.randperm(case.tokens, generator=generator, device=device)
    labels[shuffled[: case.tokens // 8]] = IGNORED
    valid = labels != IGNORED
    weights = torch.rand(case.tokens, generator=generator, device=device) * valid
    weights *= valid.sum() / weights.sum()
    hidden = drawn(*shape, case.hidden).requires_grad_()
    return Inputs(HeadInput(hidden, weight), labels.view(shape), weights.view(shape))


def gradients(way: Way, inputs: Inputs) -> dict[str, Tensor]:
    """Compute the loss forward and backward, and return the gradients of the inputs."""
    leaves = inputs.leaves()
    loss = way.compute(*inputs)
    computed = torch.autograd.grad(loss, [*leaves.values()])
    return dict(zip(leaves, computed, strict=True))


def measure(case: Case, ways: Mapping[str, Way], device: str) -> dict[str, Any]:
    """Return the record of a case, with what was measured of each way, or the reason why it was
    ``not_measured``.
    """
    small = {
        name: min(getattr(case, name), largest) for name, largest in LARGEST_FOR_FLOAT64.items()
    }
    errors, reasons = gradient_errors(replace(case, **small), ways, device)
    inputs = make_inputs(case, device)
    for name in errors:
        if device == "cpu":
            available = psutil.virtual_memory().available
        else:
            available, _ = torch.cuda.mem_get_info(device)
        if ways[name].has_logits and case.largest_need > available:
            reasons[name] = (
                f"may need {format_bytes(case.largest_need)} of {format_bytes(available)}"
            )
    turns = {name: partial(gradients, ways[name], inputs) for name in errors if name not in reasons}
    # A gradient is as large as its tensor.
    returned = sum(leaf.nbytes for leaf in inputs.leaves().values())
    # Before time, for which it is a warm-up where a turn takes long. The allocator's record has no
    # noise.
    memory = {}
    for name, turn in turns.items():
        peak = measuring.median_peak(turn, device, min(case.rounds, 5)) - returned
        memory[name] = {"allocated": peak}
        if device == "cpu":
            memory[name] = {"resident": peak, "allocated": peak_allocated(turn) - returned}
    warmup = min(case.rounds - 1, measuring.WARMUP)
    seconds = measuring.take_turns(turns, rounds=case.rounds, warmup=warmup, device=device)
    results: dict[str, dict[str, Any]] = {
        name: {"not_measured": reasons.get(name)} for name in ways
    }
    for name, taken in seconds.items():
        row = results[name]
        row["is_weighted"] = ways[name].is_weighted
        row["median_ms"] = measuring.median_ms(taken)
        row["median_ratio_to_fused"] = measuring.median_ratio(taken, seconds[FUSED])
        row["median_ratio_of_fused"] = measuring.median_ratio(seconds[FUSED], taken)
        for kind, size in memory[name].items():
            row[f"{kind}_extra_bytes"] = size
        for kind, size in memory[name].items():
            row[f"{kind}_share_of_logits"] = size / case.logits_bytes
        row["gradient_errors"] = errors[name]
    sizes = {
        "logits_bytes": case.logits_bytes,
        "returned_gradient_bytes": returned,
        "float64_sizes": small,
    }
    return {**vars(case), **sizes, "ways": results}


def gradient_errors(
    case: Case, ways: Mapping[str, Way], device: str
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return relative errors of the gradients of each way by input, in float64, and why other ways
    cannot run.
    """
    inputs = make_inputs(case, device)
    leaves = (leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in inputs.head[:2])
    exact = Inputs(HeadInput(*leaves), inputs.labels, inputs.weights.double())
    errors = {}
    reasons = {}
    for name, way in ways.items():
        if way.package and (device == "cpu" or not way.is_installed):
            reasons[name] = "needs a GPU" if way.is_installed else "not installed"
            continue
        try:
            made = gradients(way, inputs)
        except Exception as error:
            if not way.package:
                raise
            reasons[name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0]}"  # what it says of this case
            )
            continue
        counted = (
            exact if way.is_weighted else exact._replace(weights=(exact.labels != IGNORED).double())
        )
        true = gradients(WAYS["plain"], counted)
        errors[name] = {
            key: float((made[key] - true[key]).norm() / true[key].norm()) for key in made
        }
    return errors, reasons


def peak_allocated(turn: Callable[[], object]) -> int:
    """Most bytes at one time that torch's allocator for the CPU has handed out since the start, by
    its own record.
    """
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        turn()
    now = most = 0
    for event in sorted(
        recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def report(result: Mapping[str, Any]) -> str:
    """Lay out the result as Markdown, a table for each case."""
    kinds = ("allocated",) if result["settings"]["device"] == "cuda" else ("resident", "allocated")
    memory: list[str] = []
    for kind in kinds:
        memory += [f"extra {kind}, MiB", "of logits"]
    header = ["way", "weights", "ms", "time / fused", *memory, "error, hidden", "error, head"]
    parts = []
    for case in result["cases"]:
        frozen = ", frozen head" if case["is_frozen"] else ""
        parts.append(
            "\n"
            f"{case['name']}: {sizes(case)}, {case['dtype']}{frozen}; logits "
            f"{format_bytes(case['logits_bytes'])}, returned gradients "
            f"{format_bytes(case['returned_gradient_bytes'])}; median of {case['rounds']} rounds; "
            f"errors with {sizes(case['float64_sizes'])}\n"
        )
        rows = []
        for name, way in case["ways"].items():
            row = [name, *cells(way, kinds)]
            missing = len(header) - len(row)
            rows.append(row + ["-"] * missing)
        parts.append(measuring.markdown_table(header, rows))
    return "\n".join(parts)


def cells(way: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """Write what was measured of a way, or why it was not."""
    if way["not_measured"]:
        return [f"not measured: {way['not_measured']}"]
    texts = [
        "yes" if way["is_weighted"] else "no",
        f"{way['median_ms']:.2f}",
        f"{way['median_ratio_to_fused']:.3f}",
    ]
    for kind in kinds:
        texts += [
            f"{way[f'{kind}_extra_bytes'] / 2**20:.1f}",
            f"{way[f'{kind}_share_of_logits']:.1%}",
        ]
    # A frozen head has none.
    return [
        *texts,
        *(f"{error:.1e}" for error in way["gradient_errors"].values()),
    ]


def sizes(case: Mapping[str, Any]) -> str:
    """Write the sizes of a case."""
    return f"{case['tokens']:,} tokens, hidden {case['hidden']:,}, V = {case['vocab_size']:,}"


if __name__ == "__main__":
    main()
