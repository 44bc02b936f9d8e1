"""Check, time and use the package on a GPU, in steps that continue where they were stopped; docs/gpu.md.

    make gpu                                          # or: python benchmarks/gpu.py; again, until nothing is left
    python benchmarks/gpu.py --device cpu --tiny      # shows that the steps run

Rung 0 checks on the GPU what the tests check on a CPU, rung 1 measures time and memory, rung 2 trains. Each step has a
process and a JSON record of its own. The command ends after the given minutes. Then the same command continues: steps
that passed are not repeated, those that failed or were not possible are tried again after all others.
"""

import argparse
import datetime
import importlib.metadata
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_steps import FAILED, PASSED, Setting, Step, run_step, write_record  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parent.parent
RUNGS = {0: "Correctness", 1: "Time and memory", 2: "Experiments"}
_ENDING_SECONDS = 20  # that a step has to end itself
_LEAST_SECONDS = 30  # in which a step that resumes gets something done
_OPTIONAL = {"liger-kernel": "peers of the loss", "cut-cross-entropy": "peers of the loss", "bitsandbytes": "NF4"}
_RECIPES = (
    "full fp32", "full bf16", "LoRA fp32", "LoRA bf16", "LoRA fp16", "LoRA NF4", "LoRA bitsandbytes", "packed rows",
    "compile", "activation checkpointing",
)  # fmt: skip

STEPS = (
    Step("weights", 0, "gpu_checks:weights"),
    *(Step(f"loss {dtype}", 0, "gpu_checks:losses", dtype) for dtype in ("fp32", "bf16", "fp16")),
    Step("cuda graph", 0, "gpu_checks:cuda_graph"),
    Step("compiled weights", 0, "gpu_checks:compiled", seconds=480),
    *(Step(f"recipe {name}", 0, "gpu_recipes:against_cpu", name, seconds=240) for name in _RECIPES),
    Step("resume", 0, "gpu_recipes:resume"),
    Step("monitor", 0, "gpu_recipes:monitor"),
    Step("probe", 0, "gpu_recipes:probe_on_device"),
    Step("two GPUs", 0, "gpu_recipes:two_gpus", seconds=240),
    Step("training step, TinyLlama", 1, "gpu_timings:training_step", "full", seconds=300),
    Step("training step, TinyLlama LoRA", 1, "gpu_timings:training_step", "lora", seconds=300),
    Step("weights alone", 1, "gpu_timings:weights", seconds=300),
    Step("loss, V 32,000", 1, "gpu_timings:fused_head", "tinyllama", seconds=240),
    Step("loss, V 128,256", 1, "gpu_timings:fused_head", "llama3", seconds=300),
    Step("experiment, 34 M parameters", 2, "gpu_experiments:own_model", seconds=0, resumes=True),
    Step("experiment, SmolLM2-135M", 2, "gpu_experiments:smollm2", seconds=0, resumes=True),
)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that the steps run")
    parser.add_argument("--minutes", type=float, default=9.0, help="after which the command ends; default: 9")
    parser.add_argument("--text", help="documents for the experiments (.jsonl, .txt); default: installed docstrings")
    parser.add_argument("--output", type=Path, help="folder of the records; default: the latest results/DATE_gpu")
    return parser.parse_args()


def main() -> int:
    """Run what there is time for; return the exit code: 1 if a step has failed, otherwise 0."""
    deadline = time.monotonic()
    options = parse_arguments()
    deadline += 60 * options.minutes - _ENDING_SECONDS
    require_packages()
    require_device(options.device)
    folder = options.output or latest_folder(options.device)
    folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.device, options.tiny, Path("runs", folder.name).absolute(), options.text)
    setting.work.mkdir(parents=True, exist_ok=True)
    refuse_other_settings(folder, setting)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: ended by SIGTERM; the same command continues"))
    tried = set()
    for step in in_order(folder):
        left = deadline - time.monotonic()
        if left >= (_LEAST_SECONDS if step.resumes else step.seconds):
            print(f"{step.name}: running", flush=True)
            run(step, setting, folder, left if step.resumes else step.seconds)
            tried.add(step.name)
            record = read_records(folder).get(step.name)
            print(f"{step.name}: {summary(record)}", flush=True)
        write_page(folder)
    return conclude(folder, tried, options.minutes)


def require_packages() -> None:
    """End the command if a package is missing, with the way to carry packages to a machine without network."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    keys = "dependencies|torchtune|eval|report|all"
    lists = re.findall(rf"^(?:{keys}) = \[(.*?)\]$", text, re.M | re.S)
    names = {"tfidf-tune"}.union(*(re.findall(r'"([\w-]+)[\[<>=]', found) for found in lists))
    missing = sorted(name for name in names if not is_installed(name))
    if missing:
        sys.exit(
            f"error: {sys.executable} lacks {', '.join(missing)}. With a package index: pip install --constraint "
            "constraints.txt --editable '.[all]'. Without one, on a machine that has an index and the same Python and "
            "platform:\n  pip download --dest wheels --constraint constraints.txt '.[all]' setuptools wheel\n"
            "then carry the folder wheels here:\n  pip install --no-index --find-links wheels --constraint "
            "constraints.txt --editable '.[all]'"
        )
    if absent := [f"{name} ({use})" for name, use in _OPTIONAL.items() if not is_installed(name)]:
        print(f"Not installed, so left out: {', '.join(absent)}. Carry their wheels along as well, if you want them.")


def is_installed(package: str) -> bool:
    """Whether a distribution is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require_device(device: str) -> None:
    """End the command if there is no GPU."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"error: torch {torch.__version__} finds no GPU: check nvidia-smi, and that torch is a build for CUDA. "
            "--device cpu --tiny shows that the steps run"
        )


def latest_folder(device: str) -> Path:
    """The folder of the latest records, or today's."""
    results = ROOT / "benchmarks" / "results"
    name = "gpu" if device == "cuda" else "gpu_dry_run"
    return max(results.glob(f"*-*-*_{name}"), default=results / f"{datetime.date.today().isoformat()}_{name}")


def record_file(folder: Path, step: Step) -> Path:
    """Where the record of a step is."""
    return folder / f"{re.sub(r'[^a-z0-9]+', '_', step.name.lower())}.json"


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of all steps that have one, by name."""
    files = {step.name: record_file(folder, step) for step in STEPS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}


def refuse_other_settings(folder: Path, setting: Setting) -> None:
    """End the command if the folder has records of another device or size."""
    for record in read_records(folder).values():
        if (record["device"], record["tiny"]) != (setting.device, setting.tiny):
            sys.exit(
                f"error: {folder} has records of device {record['device']}, tiny {record['tiny']}: use another --output"
            )


def in_order(folder: Path) -> list[Step]:
    """Steps to run: those without a record, then those that have not passed."""
    records = read_records(folder)
    again = [step for step in STEPS if records.get(step.name, {}).get("status") not in (None, PASSED)]
    return [step for step in STEPS if step.name not in records] + again


def run(step: Step, setting: Setting, folder: Path, seconds: float) -> None:
    """Run a step in a process of its own, so that an error of the GPU ends with it, and see to a record.

    A step that resumes and runs out of time leaves no record.
    """
    file = record_file(folder, step)
    log = setting.work / file.with_suffix(".log").name
    file.unlink(missing_ok=True)
    process = context().Process(target=run_step, args=(step, setting, file, log))
    process.start()
    try:
        process.join(seconds)
        is_late = process.is_alive()
    finally:
        end(process)
    if not file.is_file() and not (is_late and step.resumes):
        reason = f"did not end within {seconds:.0f} s" if is_late else f"ended with exit code {process.exitcode}"
        write_record(file, step, setting, {"status": FAILED, "reason": f"{reason}; log: {log}"})


def context() -> Any:
    """New processes instead of forks: an import may ask for the GPU, and CUDA does not work in a fork after that."""
    return multiprocessing.get_context("spawn")


def end(process: Any) -> None:
    """End a process and all that it started."""
    for number, seconds in ((signal.SIGTERM, _ENDING_SECONDS), (signal.SIGKILL, None)):
        if process.is_alive():
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:  # it has not made its group yet
                process.kill()
            process.join(seconds)


def summary(record: Mapping[str, Any] | None) -> str:
    """What came of a step, in a line."""
    if record is None:
        return "continues next time"
    return f"{record['status']}{': ' if record['reason'] else ''}{record['reason']}"


def conclude(folder: Path, tried: Sequence[str] | set[str], minutes: float) -> int:
    """Print what is left and how to go on; return the exit code."""
    records = read_records(folder)
    left = [step for step in STEPS if step.name not in records]
    if left:
        print(f"Left: {', '.join(step.name for step in left)}. The same command continues.")
        if not tried:
            most = max(step.seconds for step in left) + 2 * _ENDING_SECONDS
            print(f"{minutes:g} minutes are too few for any of them: give --minutes {most / 60:.1f} or more.")
    failed = [name for name, record in records.items() if record["status"] == FAILED]
    for name in failed:
        print(f"failed: {name}: {records[name]['reason']}")
    print(f"{sum(record['status'] == PASSED for record in records.values())} passed; page: {folder / 'page.md'}")
    return 1 if failed else 0


def write_page(folder: Path) -> None:
    """Write the page from the records."""
    records = read_records(folder)
    lines = ["# Checks, times and experiments on a GPU", "", "Written by `make gpu` from the records beside it.", ""]
    for rung, title in RUNGS.items():
        lines += [f"## {title}", "", "| step | result | date | s | |", "|---|---|---|---:|---|"]
        of_rung = [step for step in STEPS if step.rung == rung]
        for step in of_rung:
            record = records.get(step.name)
            cells = ["not run", "", "", ""] if record is None else page_cells(record)
            lines.append(f"| {step.name} | {' | '.join(cells)} |")
        lines.append("")
        for step in of_rung:
            if text := records.get(step.name, {}).get("markdown"):
                lines += [f"### {step.name}", "", text.strip(), ""]
    found = {(record["hardware"], *record["versions"].items()) for record in records.values() if "hardware" in record}
    lines += [
        "## Machines",
        "",
        *(f"- {name}: {', '.join(map(' '.join, versions))}" for name, *versions in sorted(found)),
    ]
    (folder / "page.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def page_cells(record: Mapping[str, Any]) -> list[str]:
    """The cells of a step in the page's table; the last has the check that is nearest to its limit."""
    checks = record.get("checks") or []
    nearest = max(
        checks, key=lambda check: check["value"] / check["limit"] if check["limit"] else check["value"], default=None
    )
    text = record["reason"]
    if nearest and not text:
        numbers = f"{nearest['value']:.2g} of {nearest['limit']:.2g}"
        text = f"{len(checks)} checks; nearest to its limit: {nearest['name']}, {numbers}"
    return [record["status"], record["date"], f"{record.get('seconds', 0):.0f}", text.replace("|", "\\|")]


if __name__ == "__main__":
    sys.exit(main())
