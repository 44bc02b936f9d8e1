"""Every target of speed and memory against what this machine does: runs the other scripts and judges their results.

    python benchmarks/targets.py
    python benchmarks/targets.py --output-dir FOLDER                        # keep results, plot and table
    python benchmarks/targets.py --from FOLDER                              # the table of results measured before
    python benchmarks/targets.py --only weights authors --device cpu

A line for each target and device. It is met or not as the medians say, with intervals beside them where they matter,
and not measured where there is no GPU, no result, or one of other sizes than the target's. In the folder,
``SCRIPT_DEVICE.json`` and ``.md`` are what a script wrote and printed, ``targets.json`` and ``.md`` the table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measuring import heading, write_result  # type: ignore[import-not-found]

Result = Mapping[str, Any]
Source = tuple[str, str]  # script and device
CPU, CUDA = "cpu", "cuda"
MET, NOT_MET, NOT_MEASURED = "met", "not met", "not measured"
DEMO, TINYLLAMA = "demo/llama_3M_full_memorization", "tinyllama/1.1B_full_memorization"
CASE = "llama3"  # of fused_head.py; in bf16
PEERS = ("Liger", "cut-cross-entropy")
# A sum over 16 chunks rounds by half an eps in each; a gradient without its tokens' weights is off by a fifth or more.
LARGEST_ERROR = 8 * torch.finfo(torch.bfloat16).eps


class Figure(NamedTuple):
    """What a result says of a target.

    Attributes:
        value (float | None): to be held against the limit, None if it was not measured.
        text (str): the value as it is printed, or why there is none.
    """

    value: float | None
    text: str


@dataclass(frozen=True)
class Target:
    """A figure and its limit.

    Attributes:
        wording (str): with the limit's place in braces.
        limit (float): which itself meets the target.
        figure (Callable[[Result], Figure]): reads the figure from the script's result.
        at_least (bool): whether the figure must not be smaller, rather than not larger, than the limit.
    """

    wording: str
    limit: float
    figure: Callable[[Result], Figure]
    at_least: bool = False

    def is_met_by(self, value: float) -> bool:
        """Hold a value against the limit."""
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        what (str): is measured.
        how (str): it is measured.
        script (str): that measures it.
        targets (Mapping[str, Sequence[Target]]): by device; a line each.
    """

    what: str
    how: str
    script: str
    targets: Mapping[str, Sequence[Target]]


@dataclass(frozen=True)
class Run:
    """How a script is called on a device, and what its result has to be of.

    Attributes:
        arguments (Sequence[str]): of the command, beside device and output; ``{stem}`` is the result's path without
            its suffix.
        quick (Sequence[str]): that follow them for sizes which only show that everything runs.
        settings (Mapping[str, str]): which a result must have been measured with.
        setup (str): what of this a line says. Default: "".
    """

    arguments: Sequence[str]
    quick: Sequence[str]
    settings: Mapping[str, str]
    setup: str = ""


def time_against_ours(result: Result) -> Figure:
    """TF-IDF's step over our cross-entropy's."""
    step = result["steps"]["TF-IDF"]
    return _time_ratio(step["median_ratio_to_our_ce"], step["ratio_to_our_ce_interval"])


def time_against_stock(result: Result) -> Figure:
    """Our cross-entropy's step over the stock one."""
    step = result["steps"]["our CE"]
    return _time_ratio(step["median_ratio_to_stock"], step["ratio_to_stock_interval"])


def memory_against_stock(result: Result) -> Figure:
    """The peak memory of our cross-entropy's step over that of the stock one."""
    ours, stock = (result["steps"][name]["peak_mib"] for name in ("our CE", "stock CE"))
    return Figure(ours / stock, f"memory {ours / stock:.4f} times ({ours:.1f} MiB of {stock:.1f} MiB)")


def weights_time(result: Result) -> Figure:
    """Microseconds of computing a batch's weights; of a GPU its own, which a CUDA graph shows."""
    case = result["base_case"]
    between_events, graph = 1e3 * case["median_ms"], case["cuda_graph"]
    if graph is None:
        return Figure(between_events, f"{between_events:.1f} µs")
    if graph["failure"]:
        return Figure(between_events, f"{between_events:.1f} µs between events; no CUDA graph: {graph['failure']}")
    value = 1e3 * graph["median_ms"]
    return Figure(value, f"{value:.1f} µs as a CUDA graph ({between_events:.1f} µs with launches)")


def growth_with_tokens(result: Result) -> Figure:
    """The power of b·s with which time grows, over the sweep or its three largest sizes, whichever is larger."""
    slope, last = result["slope"], result["last_slope"]
    return Figure(max(slope, last), f"power {slope:.3f}, over the three largest {last:.3f}")


def growth_with_window(result: Result) -> Figure:
    """The time with the longest window over that with the shortest, at the largest b·s."""
    value = result["window_ratio"]
    return Figure(value, f"longest window {value:.3f} times the shortest")


def window_bytes(result: Result) -> Figure:
    """Bytes of a window for each of its tokens."""
    value = result["bytes_per_token"]
    return Figure(value, f"{value:.3f} bytes a token")


def authors_ratio(result: Result) -> Figure:
    """The time of the authors' way over ours."""
    value = result["authors"]["ratio"]
    return Figure(value, f"{value:.1f} times")


def authors_out_of_memory(result: Result) -> Figure:
    """The number of large cases that ours computes and for which the authors' way has no memory."""
    cases = result["authors"]["large_cases"]
    texts = []
    for case in cases:
        theirs = "out of memory" if case["ms"] is None else f"{case['ms']:,.0f} ms"
        shape = f"{case['batch_size']} x {case['seq_len']:,}, V = {case['vocab_size']:,}"
        texts.append(f"{shape}: ours {case['our_median_ms']:.1f} ms, theirs {theirs}")
    failures = sum(case["ms"] is None for case in cases)
    # With enough memory theirs runs everywhere, which says nothing of ours.
    return Figure(failures or None, "; ".join(texts))


def extra_memory(result: Result) -> Figure:
    """The fused loss's peak beside inputs and returned gradients, as a share of the logits' size."""
    way = _ways(result)["fused"]
    if way["not_measured"]:
        return Figure(None, way["not_measured"])
    kind = "resident" if "resident_share_of_logits" in way else "allocated"
    value = way[f"{kind}_share_of_logits"]
    return Figure(value, f"{value:.1%} ({way[f'{kind}_extra_bytes'] / 2**20:.1f} MiB {kind})")


def time_against_peers(result: Result) -> Figure:
    """The fused loss's time over that of the fastest peer with right gradients."""
    ways = _ways(result)
    ratios, texts = [], []
    for name in PEERS:
        way = ways[name]
        if way["not_measured"]:
            texts.append(f"{name}: {way['not_measured']}")
        elif (error := max(way["gradient_errors"].values())) > LARGEST_ERROR:
            texts.append(f"{name}: wrong gradients, error {error:.1e}")
        else:
            ratios.append(way["median_ratio_of_fused"])
            texts.append(f"{ratios[-1]:.3f} times {name}")
    return Figure(max(ratios, default=None), ", ".join(texts))


def probe_ratio(result: Result) -> Figure:
    """The batched probe's throughput over that of one sequence at a time."""
    value = result["median_throughput_ratio"]
    return Figure(value, f"{value:.1f} times")


def _time_ratio(ratio: float, interval: Sequence[float] | None) -> Figure:
    known = "" if interval is None else " (95 % interval {:.4f} to {:.4f})".format(*interval)
    return Figure(ratio, f"time {ratio:.4f} times{known}")


def _ways(result: Result) -> Mapping[str, Any]:
    """What was measured of each way in the target's case."""
    measured = {case["name"]: case["ways"] for case in result["cases"]}.get(CASE, {})
    return defaultdict(lambda: {"not_measured": "not run"}, measured)


def on_both(*targets: Target) -> Mapping[str, Sequence[Target]]:
    """The same targets on either device."""
    return {CUDA: targets, CPU: targets}


ROWS = {
    "tfidf": Row(
        "TF-IDF step against our own CE step",
        "turns in one process, median of ratios",
        "training_step",
        {
            CUDA: [Target("time ≤ {:g} times", 1.002, time_against_ours)],
            CPU: [Target("time ≤ {:g} times", 1.005, time_against_ours)],
        },
    ),
    "stock": Row(
        "our CE step against stock torchtune's `CEWithChunkedOutputLoss` step",
        "turns in one process, median of ratios; peak memory",
        "training_step",
        on_both(
            Target("time ≤ {:g} times", 1, time_against_stock),
            Target("memory ≤ {:g} times", 1, memory_against_stock),
        ),
    ),
    "weights": Row(
        "computing weights, b·s = 2,048, V = 32,000",
        "median; on a GPU device events around a CUDA graph",
        "weights",
        {CUDA: [Target("≤ {:g} µs", 60, weights_time)], CPU: [Target("≤ {:g} µs", 200, weights_time)]},
    ),
    "sweep": Row(
        "the same to b·s = 65,536, V = 256,000, window 1,024 batches",
        "sweep of b·s and window",
        "weights",
        on_both(
            Target("time as b·s to the power of ≤ {:g}", 1.1, growth_with_tokens),
            Target("≤ {:g} times from window 16 to 1,024", 1.1, growth_with_window),
            Target("window ≤ {:g} bytes a token", 8, window_bytes),
        ),
    ),
    "authors": Row(
        "the paper's authors' way against ours, 8 x 256 and 8 x 4,096",
        "turns in one process, median of ratios; a process of its own that may run out of memory",
        "weights",
        on_both(
            Target("≥ {:g} times faster", 20, authors_ratio, at_least=True),
            Target("runs where theirs runs out of memory", 1, authors_out_of_memory, at_least=True),
        ),
    ),
    "memory": Row(
        "peak extra memory of the loss, 4,096 tokens, hidden 2,048, V = 128,256, bf16",
        "`max_memory_allocated`, on a CPU the resident size; beside inputs and returned gradients",
        "fused_head",
        on_both(Target("≤ {:.0%} of the logits", 0.1, extra_memory)),
    ),
    "peers": Row(
        "weighted fused loss against Liger's unweighted one and `cut-cross-entropy`",
        "turns in one process, median of ratios",
        "fused_head",
        {CUDA: [Target("≤ {:g} times the fastest with right gradients", 1.05, time_against_peers)]},
    ),
    "probe": Row(
        "the batched probe against one sequence at a time, 300 continuations of 128 tokens",
        "turns in one process, median of ratios of continuations per second",
        "probe",
        {
            CUDA: [Target("≥ {:g} times", 20, probe_ratio, at_least=True)],
            CPU: [Target("≥ {:g} times", 5, probe_ratio, at_least=True)],
        },
    ),
}

_STEP = {"batch_size": "8", "seq_len": "256", "overrides": "[]"}
_TINY_MODEL = ["model.num_layers=1", "model.embed_dim=24", "model.num_heads=2", "model.num_kv_heads=2"]
_TINY_MODEL += ["model.intermediate_dim=40", "model.vocab_size=128"]
_QUICK_STEP = ["--rounds", "6", "--batch-size", "2", "--seq-len", "32", *_TINY_MODEL]
_WEIGHTS = Run(["--plot", "{stem}.png"], ["--quick", "--rounds", "3"], {"quick": "False"})
_HEAD = dict.fromkeys(("tokens", "hidden", "vocab_size", "dtype"), "None") | {"quick": "False", "frozen_head": "False"}
_PROBE = Run([], ["--rounds", "1", "--num-passages", "3", "--one-in", "3"], {"num_passages": "100"})

RUNS: Mapping[Source, Run] = {
    # So many rounds that the median is known to some 0.2 %.
    ("training_step", CPU): Run(
        ["--config", DEMO, "--rounds", "300"],
        _QUICK_STEP,
        _STEP | {"config": DEMO, "dtype": "fp32"},
        "the demo's model, fp32, 8 x 256",
    ),
    ("training_step", CUDA): Run(
        ["--config", TINYLLAMA, "--dtype", "bf16", "--rounds", "100"],
        _QUICK_STEP,
        _STEP | {"config": TINYLLAMA, "dtype": "bf16"},
        "TinyLlama 1.1B full, bf16, 8 x 256",
    ),
    ("weights", CPU): _WEIGHTS,
    ("weights", CUDA): _WEIGHTS,
    ("fused_head", CPU): Run(["--case", CASE, "--ways", "fused"], ["--quick"], _HEAD),
    ("fused_head", CUDA): Run(["--case", CASE], ["--quick"], _HEAD),
    ("probe", CPU): _PROBE,
    ("probe", CUDA): _PROBE,
}


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=[CPU, CUDA], help="default: a CPU and, where there is one, a GPU")
    parser.add_argument("--only", nargs="+", default=list(ROWS), choices=ROWS, metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--quick", action="store_true", help="sizes that only show that every script runs")
    parser.add_argument("--output-dir", type=Path, help="keep every script's result and the table here")
    parser.add_argument("--from", dest="source", type=Path, help="run nothing, read the results in this folder")
    options = parser.parse_args()
    if options.source and not options.source.is_dir():
        parser.error(f"--from is {options.source}: there is no such folder")
    return options


def main() -> None:
    """Measure what can be measured, judge it, print and write the table."""
    options = parse_arguments()
    if options.output_dir:
        options.output_dir.mkdir(parents=True, exist_ok=True)
    rows = [row for name, row in ROWS.items() if name in options.only]
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.source or options.output_dir or Path(scratch)
        failed = set() if options.source else run_scripts(rows, options, folder)
        results = read_results(folder, {row.script for row in rows})
    lines = [line(row, device, results, failed) for row in rows for device in row.targets]
    table = markdown(lines, results)
    print(table)
    if options.output_dir:
        write_result(
            {"lines": lines, "results": {_stem(source): _origin(result) for source, result in results.items()}},
            options.output_dir / "targets.json",
        )
        (options.output_dir / "targets.md").write_text(table + "\n", encoding="utf-8")
    if failed:
        sys.exit(f"error: failed: {', '.join(map(_stem, sorted(failed)))}")


def run_scripts(rows: Collection[Row], options: argparse.Namespace, folder: Path) -> set[Source]:
    """Run the scripts that rows need on the devices asked for.

    Args:
        rows (Collection[Row]): of the table.
        options (argparse.Namespace): the command's settings.
        folder (Path): gets their results.

    Returns:
        set[Source]: those that failed.
    """
    failed = set()
    for source in dict.fromkeys((row.script, device) for row in rows for device in row.targets):
        script, device = source
        if options.device not in (None, device) or (device == CUDA and not torch.cuda.is_available()):
            continue
        run = RUNS[source]
        stem = folder / _stem(source)
        arguments = [argument.format(stem=stem) for argument in run.arguments]
        arguments += [*(run.quick if options.quick else []), "--device", device, "--output", f"{stem}.json"]
        command = [sys.executable, str(Path(__file__).with_name(f"{script}.py")), *arguments]
        print(f"{script}.py {' '.join(arguments)}", file=sys.stderr, flush=True)
        stem.with_suffix(".json").unlink(missing_ok=True)
        with stem.with_suffix(".md").open("w", encoding="utf-8") as printed:
            if subprocess.run(command, stdout=printed, check=False).returncode:
                failed.add(source)
    return failed


def read_results(folder: Path, scripts: Collection[str]) -> dict[Source, Result]:
    """Read what the scripts wrote into a folder, as far as they did."""
    files = {source: folder / f"{_stem(source)}.json" for source in RUNS if source[0] in scripts}
    return {source: json.loads(file.read_text(encoding="utf-8")) for source, file in files.items() if file.is_file()}


def line(row: Row, device: str, results: Mapping[Source, Result], failed: Collection[Source]) -> dict[str, Any]:
    """Judge a row on a device.

    Returns:
        dict[str, Any]: ``what``, ``device``, ``target``, ``how``, ``measured``, and ``verdict``: "met", "not met", or
        "not measured" with the ``reason``, which is None otherwise.
    """
    source = (row.script, device)
    targets = row.targets[device]
    figures = [target.figure(results[source]) for target in targets] if source in results else []
    reason = not_measured(source, results, failed)
    verdict, reason = (NOT_MEASURED, reason) if reason else judge(targets, figures)
    return {
        "what": row.what,
        "device": device,
        "target": "; ".join(target.wording.format(target.limit) for target in targets),
        "how": "; ".join(filter(None, (row.how, RUNS[source].setup))),
        "measured": "; ".join(figure.text for figure in figures) or "-",
        "verdict": verdict,
        "reason": reason,
    }


def judge(targets: Sequence[Target], figures: Sequence[Figure]) -> tuple[str, str | None]:
    """Hold figures against the targets of a line; one beyond its limit decides.

    Returns:
        tuple[str, str | None]: the verdict, and of "not measured" the reason.
    """
    pairs = zip(targets, figures, strict=True)
    met = [None if figure.value is None else target.is_met_by(figure.value) for target, figure in pairs]
    if False in met:
        return NOT_MET, None
    if None in met:
        return NOT_MEASURED, "; ".join(figure.text for figure in figures if figure.value is None)
    return MET, None


def not_measured(source: Source, results: Mapping[Source, Result], failed: Collection[Source]) -> str | None:
    """Why there is no result that the target speaks of; None if there is one."""
    if source in failed:
        return f"{source[0]}.py failed"
    if source not in results:
        return "no GPU" if source[1] == CUDA and not torch.cuda.is_available() else "not run"
    given, expected = results[source]["settings"], {"device": source[1], **RUNS[source].settings}
    others = [
        f"{key} is {given.get(key)} and not {value}" for key, value in expected.items() if given.get(key) != value
    ]
    return ", ".join(others) or None


def markdown(lines: Sequence[Mapping[str, Any]], results: Mapping[Source, Result]) -> str:
    """The table, and what its results were measured on."""
    header = ["what", "device", "target", "how it is measured", "measured here", "verdict"]
    rows = [header, ["---"] * len(header)]
    for entry in lines:
        verdict = entry["verdict"] + (f" ({entry['reason']})" if entry["reason"] else "")
        rows.append([*(entry[key] for key in ("what", "device", "target", "how")), entry["measured"], verdict])
    origins = [f"- {_stem(source)}: {heading(result)}" for source, result in results.items()]
    return "\n".join([*("| " + " | ".join(cells) + " |" for cells in rows), "", *origins])


def _stem(source: Source) -> str:
    return "_".join(source)


def _origin(result: Result) -> dict[str, Any]:
    return {key: result[key] for key in ("date", "hardware", "versions", "settings")}


if __name__ == "__main__":
    main()
