"""Only the computation of weights: time and memory of TF-IDF, how they grow, the authors' way; repetition weights.

    python research/benchmarks/weights.py                                            # one core of this CPU
    python research/benchmarks/weights.py --device cuda
    python research/benchmarks/weights.py --output weights.json

On a CPU torch has one thread. Windows are full before anything is timed, and every timed call gets a new batch.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from authors_way import AuthorsWay  # type: ignore[import-not-found]
from measuring import (  # type: ignore[import-not-found]
    WARMUP,
    heading,
    make_parser,
    markdown_table,
    median_peak,
    median_ratio,
    record,
    take_turns,
    write_result,
)
from torch import Tensor

from tfidf_tune.training import format_bytes
from tfidf_tune.weighting import RepetitionWeighting, TFIDFWeighting, TokenWeighting

Shape = tuple[int, int]
Turn = Callable[[], object]
BYTES_PER_VOCABULARY_ENTRY = 4
OURS, THEIRS = "TFIDFWeighting", "authors' way"


@dataclass(frozen=True)
class Sizes:
    """What is measured: shapes are rows x positions, windows are numbers of batches."""

    base_shape: Shape
    base_vocab_size: int
    base_window: int
    base_rounds: int
    sweep_shapes: tuple[Shape, ...]
    sweep_vocab_size: int
    sweep_windows: tuple[int, ...]
    repetition_shapes: tuple[Shape, ...]


FULL = Sizes(
    base_shape=(8, 256),
    base_vocab_size=32_000,
    base_window=16,
    base_rounds=300,
    sweep_shapes=((8, 256), (8, 512), (8, 1024), (16, 1024), (32, 1024), (64, 1024)),
    sweep_vocab_size=256_000,
    sweep_windows=(16, 128, 1024),
    repetition_shapes=((8, 256), (2, 2048)),
)
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


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser: argparse.ArgumentParser = make_parser(__doc__, rounds=30)
    parser.add_argument("--quick", action="store_true", help="sizes that only show that the script runs")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    sizes = QUICK if options.quick else FULL
    with one_thread():
        base_case = measure_base_case(sizes, options.device)
        authors = measure_authors(sizes, options.rounds, options.device)
        sweep = [row for shape in sizes.sweep_shapes for row in sweep_windows(shape, sizes, options)]
        repetition = [row for shape in sizes.repetition_shapes for row in repetition_rows(shape, sizes, options)]
        longest = [row for row in sweep if row["num_batches"] == sizes.sweep_windows[-1]]
        result = record(
            options,
            options.device,
            ("torch", "tfidf-tune"),
            base_case=base_case,
            sweep=sweep,
            slope=log_log_slope(longest),
            last_slope=log_log_slope(longest[-3:]),
            window_ratio=longest[-1]["ratio_to_smallest_window"],
            bytes_per_token=max(row["window_bytes_per_token"] for row in sweep),
            authors=authors,
            repetition=repetition,
        )
    report(result)
    write_result(result, options.output)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one core of the CPU inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def label_batches(shape: Shape, vocab_size: int, device: str) -> Iterator[Tensor]:
    """Draw int64 ``[b, s]`` without end, the same ones each time: log-uniform ids, about Zipf's law of a language."""
    generator = torch.Generator(device).manual_seed(0)
    while True:
        yield (vocab_size ** torch.rand(shape, generator=generator, device=device)).long() - 1


def full_window(num_batches: int, batches: Iterable[Tensor], vocab_size: int) -> TFIDFWeighting:
    """Make a weighting whose window of so many batches is full."""
    weighting = TFIDFWeighting(num_batches=num_batches)
    for labels in islice(batches, num_batches):
        weighting(labels, vocab_size=vocab_size)
    return weighting


def turns(weigh: Callable[[Tensor], object], batches: Sequence[Tensor]) -> Turn:
    """A way for ``take_turns``, with the next of the batches at each turn."""
    upcoming = iter(batches)
    return lambda: weigh(next(upcoming))


def measure_base_case(sizes: Sizes, device: str) -> dict[str, Any]:
    """The time of a call at the paper's size, in the steady state."""
    rounds = sizes.base_rounds
    upcoming = label_batches(sizes.base_shape, sizes.base_vocab_size, device)
    weighting = full_window(sizes.base_window, upcoming, sizes.base_vocab_size)
    weigh = partial(weighting, vocab_size=sizes.base_vocab_size)
    batches = list(islice(upcoming, WARMUP + rounds))
    seconds = take_turns({OURS: turns(weigh, batches)}, rounds=rounds, device=device)
    return {
        "batch_size": sizes.base_shape[0],
        "seq_len": sizes.base_shape[1],
        "vocab_size": sizes.base_vocab_size,
        "num_batches": sizes.base_window,
        "rounds": rounds,
        "median_ms": 1e3 * statistics.median(seconds[OURS]),
    }


def measure_authors(sizes: Sizes, rounds: int, device: str) -> dict[str, Any]:
    """Our time and theirs at the paper's size, taking turns."""
    upcoming = label_batches(sizes.base_shape, sizes.base_vocab_size, device)
    filling = list(islice(upcoming, sizes.base_window))
    batches = list(islice(upcoming, WARMUP + rounds))
    ours = partial(full_window(sizes.base_window, filling, sizes.base_vocab_size), vocab_size=sizes.base_vocab_size)
    theirs = AuthorsWay(num_batches=sizes.base_window)
    theirs.window.extend(filling)
    ways = {OURS: turns(ours, batches), THEIRS: turns(theirs, batches)}
    seconds = take_turns(ways, rounds=rounds, device=device)
    expected = theirs(filling[0])
    return {
        "median_ms": 1e3 * statistics.median(seconds[THEIRS]),
        "our_median_ms": 1e3 * statistics.median(seconds[OURS]),
        "ratio": median_ratio(seconds[THEIRS], seconds[OURS]),
        "presence_bytes": theirs.presence_bytes(),
        "largest_relative_difference": float(((ours(filling[0]) - expected).abs() / expected).max()),
    }


def sweep_windows(shape: Shape, sizes: Sizes, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time and memory of a shape of batches with each length of window, the windows taking turns."""
    device, vocab_size = options.device, sizes.sweep_vocab_size
    upcoming = label_batches(shape, vocab_size, device)
    weightings = {window: full_window(window, upcoming, vocab_size) for window in sizes.sweep_windows}
    weigh = {window: partial(weighting, vocab_size=vocab_size) for window, weighting in weightings.items()}
    batches = list(islice(upcoming, WARMUP + options.rounds))
    ways = {str(window): turns(weigh[window], batches) for window in weigh}
    seconds = list(take_turns(ways, rounds=options.rounds, device=device).values())
    num_tokens = math.prod(shape)
    rows = []
    for (window, weighting), taken in zip(weightings.items(), seconds, strict=True):
        state_bytes = sum(tensor.nbytes for tensor in weighting.state_dict().values())
        vocabulary_bytes = BYTES_PER_VOCABULARY_ENTRY * vocab_size
        rows.append(
            {
                "batch_size": shape[0],
                "seq_len": shape[1],
                "tokens": num_tokens,
                "num_batches": window,
                "median_ms": 1e3 * statistics.median(taken),
                "ns_per_token": 1e9 * statistics.median(taken) / num_tokens,
                "ratio_to_smallest_window": median_ratio(taken, seconds[0]),
                "vocabulary_bytes": vocabulary_bytes,
                "window_bytes_per_token": (state_bytes - vocabulary_bytes) / (window * num_tokens),
                "transient_bytes": median_peak(partial(weigh[window], batches[0]), device),
            }
        )
    return rows


def repetition_rows(shape: Shape, sizes: Sizes, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time and memory of repetition weights, and of TF-IDF, on one shape of batches, taking turns."""
    weightings: dict[str, TokenWeighting] = {
        OURS: TFIDFWeighting(),
        "RepetitionWeighting()": RepetitionWeighting(),
        "RepetitionWeighting(h=4, k=4, span=1, sample=1)": RepetitionWeighting(h=4, k=4, span=1, sample=1),
    }
    batches = list(islice(label_batches(shape, sizes.base_vocab_size, options.device), WARMUP + options.rounds))
    weigh = {name: partial(one, vocab_size=sizes.base_vocab_size) for name, one in weightings.items()}
    ways = {name: turns(one, batches) for name, one in weigh.items()}
    seconds = take_turns(ways, rounds=options.rounds, device=options.device)
    return [
        {
            "weighting": name,
            "batch_size": shape[0],
            "seq_len": shape[1],
            "median_ms": 1e3 * statistics.median(seconds[name]),
            "state_bytes": sum(tensor.nbytes for tensor in weighting.state_dict().values()),
            "transient_bytes": median_peak(partial(weigh[name], batches[0]), options.device),
        }
        for name, weighting in weightings.items()
    ]


def log_log_slope(rows: Sequence[Mapping[str, Any]]) -> float:
    """The power of b*s with which time grows, by least squares between logarithms: 1 is linear."""
    tokens, times = ([math.log(row[key]) for row in rows] for key in ("tokens", "median_ms"))
    return statistics.linear_regression(tokens, times).slope


def report(result: Mapping[str, Any]) -> None:
    """Print the result as Markdown."""
    base, authors, sweep = result["base_case"], result["authors"], result["sweep"]
    windows = sorted({row["num_batches"] for row in sweep})
    print(f"{heading(result)}; medians of {result['settings']['rounds']} rounds\n")
    print(
        f"{base['batch_size']} x {base['seq_len']}, V = {base['vocab_size']:,}, window of {base['num_batches']} "
        f"batches: {base['median_ms']:.3f} ms a batch, median of {base['rounds']}\n"
    )
    rows = [
        [
            f"{row['batch_size']} x {row['seq_len']}",
            f"{row['tokens']:,}",
            f"{row['num_batches']:,}",
            f"{row['median_ms']:.3f}",
            f"{row['ns_per_token']:.1f}",
            f"{row['ratio_to_smallest_window']:.3f}",
            f"{row['window_bytes_per_token']:.3f}",
            f"{row['transient_bytes'] / 2**20:.2f}",
        ]
        for row in sweep
    ]
    small = f"time / window {windows[0]}"
    header = ["batch", "b*s", "window", "ms", "ns a token", small, "window, bytes a token", "peak, MiB"]
    print(markdown_table(header, rows))
    print(
        f"\nWith {windows[-1]:,} batches in the window time grows as b*s to the power of {result['slope']:.3f}, of "
        f"{result['last_slope']:.3f} over the three largest; at the largest it is {result['window_ratio']:.3f} times "
        f"that with {windows[0]}. The window needs at most {result['bytes_per_token']:.3f} bytes a token, and "
        f"{format_bytes(sweep[0]['vocabulary_bytes'])} for the vocabulary.\n"
    )
    print(
        f"The authors' way takes {authors['median_ms']:.1f} ms, {authors['ratio']:.1f} times as long as ours, and "
        f"{format_bytes(authors['presence_bytes'])}. The two ways' weights differ by "
        f"{authors['largest_relative_difference']:.1e} of a weight at most.\n"
    )
    rows = [
        [
            row["weighting"],
            f"{row['batch_size']} x {row['seq_len']}",
            f"{row['median_ms']:.3f}",
            format_bytes(row["state_bytes"]),
            f"{row['transient_bytes'] / 2**20:.2f}",
        ]
        for row in result["repetition"]
    ]
    print(markdown_table(["", "batch", "ms", "state", "peak, MiB"], rows))


if __name__ == "__main__":
    main()
