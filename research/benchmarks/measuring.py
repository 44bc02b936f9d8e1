"""What every benchmark measures by: turns in one process, medians of ratios, peak memory, and the
record of a run.
"""

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

import tfidf_tune._torchao

import torch
from scipy.stats import binomtest, quantile_test
from torch import Tensor, nn
from torch.optim import Optimizer

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import agree_on_step, train_step

sys.path.append(str(Path(__file__).parents[2]))  # for scripts of this folder that import research

WARMUP = 3
"""Rounds before the timed ones."""
_MEMORY_ROUNDS = 5
_PATHS = ("output", "runs")  # options that records leave out


def make_parser(description: str | None, *, rounds: int | None) -> argparse.ArgumentParser:
    """Make a parser with the options that every measurement has, and this default
    number of rounds.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", default="cpu", choices=["cpu", "cuda"], help="default: %(default)s"
    )
    parser.add_argument(
        "--rounds", type=int, default=rounds, help=f"timed; default: {rounds or 'of the case'}"
    )
    add_output(parser)
    return parser


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the option that :func:`finish` reads."""
    parser.add_argument("--output", type=Path, help="write the result as JSON too")


def take_turns(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = WARMUP,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time ways of doing one thing, so that a machine that slows down for a while slows all of
    them.

    After the warm-up, every way has its turn in each round, in a rotating order. Returns the
    seconds of each way by round; ``clock`` gives seconds, by default as time passes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    names = [*ways]
    for index in range(rounds + warmup):
        for turn in range(len(names)):
            name = names[(index + turn) % len(names)]
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


def median_ratio_interval(
    seconds: Sequence[float], reference: Sequence[float]
) -> list[float] | None:
    """The 95 % confidence interval of :func:`median_ratio`, between two of the ratios; None of less
    than 6 rounds.
    """
    interval = quantile_test(_ratios(seconds, reference), p=0.5).confidence_interval(0.95)
    return None if math.isnan(interval.low) else [float(interval.low), float(interval.high)]


def _ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    return [ours / theirs for ours, theirs in zip(seconds, reference, strict=True)]


def median_ms(seconds: Sequence[float]) -> float:
    """The median in milliseconds."""
    return 1e3 * statistics.median(seconds)


def against(name: str, seconds: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    """A way's time as records have it: the median, and its ratio to that of a reference with its
    interval.
    """
    return {
        "median_ms": median_ms(seconds),
        f"median_ratio_to_{name}": median_ratio(seconds, reference),
        f"ratio_to_{name}_interval": median_ratio_interval(seconds, reference),
    }


@contextmanager
def peak_memory(device: str, peaks: list[int]) -> Iterator[None]:
    """Append the peak of memory inside, in bytes above what was in use at its start.

    On CUDA it is what torch's allocator gave out, on a CPU the resident size of the process, which
    only Linux reports.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    else:
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but kept would hide what is needed
        # Sets the peak of the resident size back to its present value.
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        yield
        peaks.append(_resident("VmHWM") - before)


def _resident(name: str) -> int:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024


def median_peak(turn: Callable[[], object], device: str, rounds: int = _MEMORY_ROUNDS) -> int:
    """Return the median of the peaks of memory of so many turns, in bytes."""
    peaks: list[int] = []
    for _ in range(rounds):
        with peak_memory(device, peaks):
            turn()
    return int(statistics.median(peaks))


def for_steps(tokens: Tensor, device: str) -> Tensor:
    """Return tokens as a recipe's loader does: on the host, from where a step copies them without
    waiting.
    """
    return tokens.pin_memory() if device == "cuda" else tokens


def recipe_step(
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    optimizer: Optimizer,
    device: str,
    clip_grad_norm: float | None,
) -> Callable[[Tensor], None]:
    """A training step of the recipes on tokens of :func:`for_steps`, which are their own labels."""
    scaler = torch.amp.GradScaler(device, enabled=False)
    on = torch.device(device)

    def step(tokens: Tensor) -> None:
        batches = agree_on_step([{"tokens": tokens, "labels": tokens}])
        train_step(
            model, loss, optimizer, batches, scaler=scaler, device=on, clip_grad_norm=clip_grad_norm
        )

    return step


def synchronize(device: str) -> None:
    """Wait for what was launched; on a CPU nothing is."""
    if device == "cuda":
        torch.cuda.synchronize()


def finish(
    options: argparse.Namespace,
    packages: Sequence[str],
    show: Callable[[dict[str, Any]], str],
    **results: Any,
) -> None:
    """Add settings, hardware and versions to results, print them, and write them as JSON to
    ``options.output``, if any.

    ``packages`` are those whose versions matter, ``show`` makes the text of the record under the
    line of these.
    """
    from research.machine import describe_machine  # found by the path that is set above

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
    command = [
        sys.executable,
        "-m",
        "tfidf_tune.cli",
        "audit",
        *arguments,
        "--accept-unproven",
        "--json",
    ]
    made: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    )
    return made


def share(found: int, number: int, decimals: int = 0) -> str:
    """Lay out a number of a number with the 95 % interval of Clopper and Pearson: "3 of 96 (1 to 9
    %)".
    """
    ends = binomtest(found, number).proportion_ci(method="exact")
    return (
        f"{found:,} of {number:,} ({100 * ends.low:.{decimals}f} to {100 * ends.high:.{decimals}f} "
        "%)"
    )


def tabulate(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay out records as Markdown; columns are header -> what it shows of a row: ``{name}``,
    ``{median_ms:.2f}``.
    """
    return markdown_table(
        [*columns], [[shown.format(**row) for shown in columns.values()] for row in rows]
    )


def named(ways: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the records of ways with their names as ``name``."""
    return [{"name": name, **way} for name, way in ways.items()]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table, the first column to the left, numbers to the right."""
    lines = [header, *rows]
    columns = []
    for number, cells in enumerate(zip(*lines, strict=True)):
        width = max(map(len, cells))
        if number == 0:
            rule = "-" * (width + 2)
            head, *others = [f" {cell.ljust(width)} " for cell in cells]
        else:
            rule = "-" * (width + 1) + ":"
            head, *others = [f" {cell.rjust(width)} " for cell in cells]
        columns.append([head, rule, *others])
    return "\n".join(f"|{'|'.join(cells)}|" for cells in zip(*columns, strict=True))
