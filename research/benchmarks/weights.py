"""Only the computation of weights: time and memory of TF-IDF, how they grow, the authors' way;
repetition weights.

    python research/benchmarks/weights.py                                            # one core of this CPU
    python research/benchmarks/weights.py --device cuda --compile
    python research/benchmarks/weights.py --output weights.json

On a CPU torch has one thread. Windows are full before anything is timed, and every timed call gets
a new batch. --compile also times the base case compiled, as recipes with compile: true have it on a
GPU.
"""

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from authors_way import AuthorsWay
from measuring import (
    WARMUP,
    against,
    finish,
    make_parser,
    median_ms,
    median_peak,
    median_ratio,
    tabulate,
    take_turns,
)
from torch import Tensor

from tfidf_tune.training import format_bytes
from tfidf_tune.weighting import RepetitionWeighting, TFIDFWeighting, TokenWeighting

Shape = tuple[int, int]  # rows x positions
Weigh = Callable[[Tensor], Tensor]
BYTES_PER_VOCABULARY_ENTRY = 4
OURS = "TFIDFWeighting"
COMPILED = "compiled"
THEIRS = "authors' way"


@dataclass(frozen=True)
class Sizes:
    """What is measured; windows are numbers of batches. The defaults of the base case are the
    paper's.
    """

    base_shape: Shape = (8, 256)
    base_vocab_size: int = 32_000
    base_window: int = 16
    base_rounds: int = 300
    sweep_shapes: tuple[Shape, ...] = (
        (8, 256),
        (8, 512),
        (8, 1024),
        (16, 1024),
        (32, 1024),
        (64, 1024),
    )
    sweep_vocab_size: int = 256_000
    sweep_windows: tuple[int, ...] = (16, 128, 1024)
    repetition_shapes: tuple[Shape, ...] = ((8, 256), (2, 2048))


QUICK = Sizes(
    base_shape=(2, 32),
    base_vocab_size=100,
    base_window=4,
    base_rounds=3,
    sweep_shapes=((2, 16), (2, 32), (4, 32), (8, 32)),
    sweep_vocab_size=1000,
    sweep_windows=(2, 8),
    repetition_shapes=((2, 32),),
)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, rounds=30)
    parser.add_argument(
        "--quick", action="store_true", help="sizes that only show that the script runs"
    )
    parser.add_argument("--compile", action="store_true", help="compile the base case too")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        given = (sizes, options.rounds, options.device)
        base_case, authors = measure_base_case(*given, compiled=options.compile)
        sweep: list[dict[str, Any]] = []
        for shape in sizes.sweep_shapes:
            sweep += sweep_windows(shape, *given)
        repetition: list[dict[str, Any]] = []
        for shape in sizes.repetition_shapes:
            repetition += repetition_rows(shape, *given)
        longest = [row for row in sweep if row["num_batches"] == sizes.sweep_windows[-1]]
        finish(
            options,
            ("torch", "tfidf-tune"),
            report,
            base_case=base_case,
            sweep=sweep,
            slope=log_log_slope(longest),
            last_slope=log_log_slope(longest[-3:]),
            window_ratio=longest[-1]["ratio_to_smallest_window"],
            bytes_per_token=max(row["window_bytes_per_token"] for row in sweep),
            authors=authors,
            repetition=repetition,
        )
    finally:
        torch.set_num_threads(before)


def label_batches(shape: Shape, vocab_size: int, device: str) -> Iterator[Tensor]:
    """Draw int64 ``[b, s]`` without end, the same ones each time: log-uniform ids, about Zipf's law
    of a language.
    """
    generator = torch.Generator(device).manual_seed(0)
    while True:
        yield (vocab_size ** torch.rand(shape, generator=generator, device=device)).long() - 1


def with_full_window(
    num_batches: int, batches: Iterator[Tensor], vocab_size: int
) -> TFIDFWeighting:
    """Make a weighting whose window of so many batches is full."""
    weighting = TFIDFWeighting(num_batches=num_batches)
    for labels in islice(batches, num_batches):
        weighting(labels, vocab_size=vocab_size)
    return weighting


def time_turns(
    ways: Mapping[str, Weigh], batches: Sequence[Tensor], device: str
) -> dict[str, list[float]]:
    """Time ways that take turns, each with the next of the batches at each turn."""

    def turns(weigh: Weigh) -> Callable[[], object]:
        upcoming = iter(batches)
        return lambda: weigh(next(upcoming))

    each = {name: turns(weigh) for name, weigh in ways.items()}
    return take_turns(each, rounds=len(batches) - WARMUP, device=device)


def measure_base_case(
    sizes: Sizes, rounds: int, device: str, *, compiled: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The time of a call at the paper's size, in the steady state; and ours and the authors' way,
    taking turns.
    """
    upcoming = label_batches(sizes.base_shape, sizes.base_vocab_size, device)
    weighting = with_full_window(sizes.base_window, upcoming, sizes.base_vocab_size)
    ours = partial(weighting, vocab_size=sizes.base_vocab_size)
    theirs = AuthorsWay(num_batches=sizes.base_window)
    ways: dict[str, Weigh] = {OURS: ours}
    if compiled:
        other = copy.deepcopy(weighting)
        other.compile()
        ways[COMPILED] = partial(other, vocab_size=sizes.base_vocab_size)
    alone = time_turns(ways, list(islice(upcoming, WARMUP + sizes.base_rounds)), device)
    base_case = {
        "batch_size": sizes.base_shape[0],
        "seq_len": sizes.base_shape[1],
        "vocab_size": sizes.base_vocab_size,
        "num_batches": sizes.base_window,
        "rounds": sizes.base_rounds,
        "median_ms": median_ms(alone[OURS]),
    }
    if compiled:
        base_case |= {
            f"compiled_{key}": value
            for key, value in against("plain", alone[COMPILED], alone[OURS]).items()
        }
    for labels in islice(upcoming, sizes.base_window):  # the same window for both
        ours(labels)
        theirs.window.append(labels)
    seconds = time_turns(
        {OURS: ours, THEIRS: theirs}, list(islice(upcoming, WARMUP + rounds)), device
    )
    labels = next(upcoming)
    expected = theirs(labels)
    return base_case, {
        "median_ms": median_ms(seconds[THEIRS]),
        "our_median_ms": median_ms(seconds[OURS]),
        "ratio": median_ratio(seconds[THEIRS], seconds[OURS]),
        "presence_bytes": theirs.presence_bytes(),
        "largest_relative_difference": float(((ours(labels) - expected).abs() / expected).max()),
    }


def sweep_windows(shape: Shape, sizes: Sizes, rounds: int, device: str) -> list[dict[str, Any]]:
    """Time and memory of a shape of batches with each length of window, the
    windows taking turns.
    """
    vocab_size = sizes.sweep_vocab_size
    num_tokens = math.prod(shape)
    upcoming = label_batches(shape, vocab_size, device)
    weightings = {
        window: with_full_window(window, upcoming, vocab_size) for window in sizes.sweep_windows
    }
    ways = {
        str(window): partial(weighting, vocab_size=vocab_size)
        for window, weighting in weightings.items()
    }
    batches = list(islice(upcoming, WARMUP + rounds))
    seconds = time_turns(ways, batches, device)
    vocabulary_bytes = BYTES_PER_VOCABULARY_ENTRY * vocab_size
    smallest = seconds[str(sizes.sweep_windows[0])]
    rows = []
    for window, weighting in weightings.items():
        taken = seconds[str(window)]
        window_bytes = state_bytes(weighting) - vocabulary_bytes
        call = partial(ways[str(window)], batches[0])
        row = {
            "batch_size": shape[0],
            "seq_len": shape[1],
            "tokens": num_tokens,
            "num_batches": window,
            "median_ms": median_ms(taken),
            "ns_per_token": 1e6 * median_ms(taken) / num_tokens,
            "ratio_to_smallest_window": median_ratio(taken, smallest),
            "vocabulary_bytes": vocabulary_bytes,
            "window_bytes_per_token": window_bytes / (window * num_tokens),
            "transient_bytes": median_peak(call, device),
        }
        rows.append(row)
    return rows


def repetition_rows(shape: Shape, sizes: Sizes, rounds: int, device: str) -> list[dict[str, Any]]:
    """Time and memory of repetition weights, and of TF-IDF, on one shape of
    batches, taking turns.
    """
    weightings: dict[str, TokenWeighting] = {
        OURS: TFIDFWeighting(),
        "RepetitionWeighting()": RepetitionWeighting(),
        "RepetitionWeighting(h=4, k=4, span=1, sample=1)": RepetitionWeighting(
            h=4, k=4, span=1, sample=1
        ),
    }
    batches = list(islice(label_batches(shape, sizes.base_vocab_size, device), WARMUP + rounds))
    ways = {
        name: partial(one, vocab_size=sizes.base_vocab_size) for name, one in weightings.items()
    }
    seconds = time_turns(ways, batches, device)
    return [
        {
            "weighting": name,
            "batch_size": shape[0],
            "seq_len": shape[1],
            "median_ms": median_ms(seconds[name]),
            "state_bytes": state_bytes(weighting),
            "transient_bytes": median_peak(partial(ways[name], batches[0]), device),
        }
        for name, weighting in weightings.items()
    ]


def state_bytes(weighting: TokenWeighting) -> int:
    """Bytes of what a weighting remembers."""
    return sum(tensor.nbytes for tensor in weighting.state_dict().values())


def log_log_slope(rows: Sequence[Mapping[str, Any]]) -> float:
    """The power of b*s with which time grows, by least squares between logarithms: 1 is linear."""
    tokens, times = ([math.log(row[key]) for row in rows] for key in ("tokens", "median_ms"))
    return statistics.linear_regression(tokens, times).slope


def report(result: Mapping[str, Any]) -> str:
    """Lay out the result as Markdown."""
    base = result["base_case"]
    authors = result["authors"]
    sweep, repetition = (
        [row | {"mib": row["transient_bytes"] / 2**20} for row in result[name]]
        for name in ("sweep", "repetition")
    )
    windows = sorted({row["num_batches"] for row in sweep})
    columns = {
        "batch": "{batch_size} x {seq_len}",
        "b*s": "{tokens:,}",
        "window": "{num_batches:,}",
        "ms": "{median_ms:.3f}",
        "ns a token": "{ns_per_token:.1f}",
        f"time / window {windows[0]}": "{ratio_to_smallest_window:.3f}",
        "window, bytes a token": "{window_bytes_per_token:.3f}",
        "peak, MiB": "{mib:.2f}",
    }
    of_repetition = {
        "": "{weighting}",
        "batch": "{batch_size} x {seq_len}",
        "ms": "{median_ms:.3f}",
        "state": "{state}",
        "peak, MiB": "{mib:.2f}",
    }
    compiled = (
        f"; compiled {base['compiled_median_ms']:.3f} ms" if "compiled_median_ms" in base else ""
    )
    return (
        f"medians of {result['settings']['rounds']} rounds\n\n"
        f"{base['batch_size']} x {base['seq_len']}, V = {base['vocab_size']:,}, window of "
        f"{base['num_batches']} batches: {base['median_ms']:.3f} ms a batch, median of "
        f"{base['rounds']}{compiled}\n\n"
        f"{tabulate(columns, sweep)}\n\n"
        f"With {windows[-1]:,} batches in the window time grows as b*s to the power of "
        f"{result['slope']:.3f}, of {result['last_slope']:.3f} over the three largest; at the "
        f"largest it is {result['window_ratio']:.3f} times that with {windows[0]}. The window "
        f"needs at most {result['bytes_per_token']:.3f} bytes a token, and "
        f"{format_bytes(sweep[0]['vocabulary_bytes'])} for the vocabulary.\n\n"
        f"The authors' way takes {authors['median_ms']:.1f} ms, {authors['ratio']:.1f} times as "
        f"long as ours, and {format_bytes(authors['presence_bytes'])}. The two ways' weights "
        f"differ by {authors['largest_relative_difference']:.1e} of a weight at most.\n\n"
        f"{tabulate(of_repetition, [row | {'state': format_bytes(row['state_bytes'])} for row in repetition])}"
    )


if __name__ == "__main__":
    main()
