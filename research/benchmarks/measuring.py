"""What every benchmark measures by: turns in one process, medians of ratios, peak memory, and the record of a run."""

import argparse
import ctypes
import datetime
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tfidf_tune  # noqa: F401  # isort: skip  (first, because it keeps torchao's import message quiet)

import psutil
import torch
from scipy.stats import quantile_test

from tfidf_tune.compare import describe_machine

sys.path.append(str(Path(__file__).parents[2]))  # for scripts of this folder that import research

WARMUP = 3
"""Rounds before the timed ones."""
_MEMORY_ROUNDS = 5
_PATHS = ("output", "runs")  # options that records leave out


class Peak:
    """Largest memory while measured, in bytes above what there was before: allocated (CUDA) or resident (CPU)."""

    num_bytes = 0


def make_parser(description: str | None, *, rounds: int | None) -> argparse.ArgumentParser:
    """Make a parser with the options that every measurement has, and this default number of rounds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed; default: {rounds or 'of the case'}")
    add_output(parser)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option that :func:`finish` reads."""
    parser.add_argument("--output", type=Path, help="write the result as JSON too")


def in_turns(names: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Yield the number of the round and a name, in each round every name, in a rotating order."""
    for index in range(rounds):
        for turn in range(len(names)):
            yield index, names[(index + turn) % len(names)]


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = WARMUP,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time several ways of doing one thing, so that a machine that slows down for a while slows all of them.

    Args:
        ways (Mapping[str, Callable[[], object]]): each way by its name.
        rounds (int): timed rounds; in each, every way has its turn, in a rotating order.
        warmup (int): rounds before, not timed. Default: 3.
        device (str): waited for at both ends of a turn if it is CUDA. Default: "cpu".
        clock (Callable[[], float]): gives seconds. Default: time as it passes.

    Returns:
        dict[str, list[float]]: seconds of each way, one for each round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for index, name in in_turns([*ways], rounds + warmup):
        synchronize(device)
        start = clock()
        ways[name]()
        synchronize(device)
        if index >= warmup:
            seconds[name].append(clock() - start)
    return seconds


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """The median over rounds of a way's time over the reference's."""
    return statistics.median(_ratios(seconds, reference))


def median_ratio_interval(seconds: Sequence[float], reference: Sequence[float]) -> list[float] | None:
    """The 95 % confidence interval of :func:`median_ratio`, between two of the ratios; None of less than 6 rounds."""
    interval = quantile_test(_ratios(seconds, reference), p=0.5).confidence_interval(0.95)
    return None if math.isnan(interval.low) else [float(interval.low), float(interval.high)]


def _ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(seconds, reference, strict=True)]


def median_ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds."""
    return 1e3 * statistics.median(seconds)


def against_stock(seconds: Sequence[float], stock: Sequence[float]) -> dict[str, Any]:
    """The median of a way's time, and its ratio to that of the stock way with its interval, as records have them."""
    return {
        "median_ms": median_ms(seconds),
        "median_ratio_to_stock": median_ratio(seconds, stock),
        "ratio_to_stock_interval": median_ratio_interval(seconds, stock),
    }


@contextmanager
def peak_memory(device: str) -> Iterator[Peak]:
    """Measure the peak of memory inside, above what was in use at its start.

    Args:
        device (str): ``cuda``: what torch's allocator had given out; ``cpu``: the resident size of the process,
            which only Linux reports.

    Yields:
        Peak: filled in at the end.
    """
    peak = Peak()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.num_bytes = torch.cuda.max_memory_allocated() - before
    else:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what is needed
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak of the resident size back to its present value
        before = _resident("VmRSS")
        yield peak
        peak.num_bytes = _resident("VmHWM") - before


def _resident(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def median_peak(turn: Callable[[], object], device: str, rounds: int = _MEMORY_ROUNDS) -> int:
    """Return the median of the peaks of memory of so many turns, in bytes."""
    peaks = []
    for _ in range(rounds):
        with peak_memory(device) as peak:
            turn()
        peaks.append(peak.num_bytes)
    return int(statistics.median(peaks))


def available_memory(device: str) -> int:
    """The free bytes of a CUDA device, or of the host."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else int(psutil.virtual_memory().available)


def synchronize(device: str) -> None:
    """Wait for what was launched; on a CPU nothing is."""
    if device == "cuda":
        torch.cuda.synchronize()


def finish(
    options: argparse.Namespace, packages: Sequence[str], show: Callable[[dict[str, Any]], str], **results: Any
) -> None:
    """Add settings, hardware and versions to results, print them, and write them as JSON to ``options.output``, if any.

    Args:
        options (argparse.Namespace): the command's settings.
        packages (Sequence[str]): whose versions matter.
        show (Callable[[dict[str, Any]], str]): what is printed of the record, under a line that says when, on what and
            with which versions.
        **results (Any): what was measured.
    """
    record = {
        "date": datetime.date.today().isoformat(),
        "hardware": f"{describe_machine()['cpu']}, {torch.get_num_threads()} threads",
        "versions": {name: version(name) for name in packages},
        "settings": {key: str(value) for key, value in vars(options).items() if key not in _PATHS},
        **results,
    }
    if getattr(options, "device", "cpu") == "cuda":
        record["hardware"] = torch.cuda.get_device_name()
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    print(f"{record['date']}, {record['hardware']}, {versions}\n{show(record)}")
    if options.output:
        options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def run_audit(*arguments: str) -> dict[str, Any]:
    """Run ``tfidf-tune audit`` in a process of its own, and return what it prints as JSON."""
    command = [sys.executable, "-m", "tfidf_tune.cli", "audit", *arguments, "--json"]
    made: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return made


def tabulate(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay out records as Markdown; columns are header -> what it shows of a row: ``{name}``, ``{median_ms:.2f}``."""
    return markdown_table([*columns], [[shown.format(**row) for shown in columns.values()] for row in rows])


def named(ways: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of ways with their names as ``name``."""
    return [{"name": name, **way} for name, way in ways.items()]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table, the first column to the left, numbers to the right."""
    lines = [header, *rows]
    columns = []
    for number, cells in enumerate(zip(*lines, strict=True)):
        width = max(map(len, cells))
        head, *others = (cell.rjust(width) if number else cell.ljust(width) for cell in cells)
        columns.append([f" {head} ", "-" * (width + 1) + (":" if number else "-"), *(f" {cell} " for cell in others)])
    return "\n".join(f"|{'|'.join(cells)}|" for cells in zip(*columns, strict=True))
