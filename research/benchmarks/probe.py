"""Time of the library's batched probe, compared with one sequence at a time and with lm-evaluation-harness.

    python research/benchmarks/probe.py    # 300 continuations of 128 tokens, the demo's model
    python research/benchmarks/probe.py --device cuda --checkpoint MODEL_FOLDER

Two comparisons of functions that take turns in one process, by ratios within a round. Batched and one at a time are
the same function on a model that is loaded once; one at a time continues only a part of the passages, so continuations
per second are compared, including scores. Probe and harness each load model and tokenizer, as their commands do.
Without a checkpoint the weights are random: the cost of a token does not depend on them.
"""

import contextlib
import io
import logging
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from measuring import finish, make_parser, median_ratio, take_turns

from research.experiment import random_model
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import ProbeSpec, make_probe, write_probe_file
from tfidf_tune.probe import load_model, probe
from tfidf_tune.tasks import evaluate
from tfidf_tune.training import load_config

PROBE, HARNESS = "probe", "harness"
BATCHED, ONE_AT_A_TIME = "batched", "one at a time"
NUM_PREFIXES = 3  # the probe's default lengths


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument("--checkpoint", help="default: the demo's Llama of 3.4 million parameters, random weights")
    parser.add_argument("--num-passages", type=int, default=100, help="each continued from 3 prefix lengths")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--one-in", type=int, default=10, help="one at a time, continue only every N-th passage")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    turns = {"rounds": options.rounds, "warmup": 1, "device": options.device}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint = options.checkpoint or str(folder / "model")
        if options.checkpoint is None:
            random_model(folder / "model", load_config("demo/llama_3M_full_memorization").model, seed=0)
        spec = ProbeSpec(("embedded",), num_targets=options.num_passages, num_controls=0, passages="random")
        passages = make_probe(hf_tokenizer(checkpoint), spec).passages
        write_probe_file(folder / "probe.jsonl", passages)

        def run_probe() -> None:
            model = load_model(checkpoint, device=options.device)
            probe(model, hf_tokenizer(checkpoint), passages, batch_size=options.batch_size)

        def run_harness() -> None:
            evaluate(
                {"pretrained": checkpoint},
                ["tfidf_memorization"],
                folder / "evaluation",
                metadata={"probe_file": str(folder / "probe.jsonl")},
                batch_size=options.batch_size,
                device=options.device,
            )

        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            seconds = take_turns({PROBE: run_probe, HARNESS: run_harness}, **turns)
        model, tokenizer = load_model(checkpoint, device=options.device), hf_tokenizer(checkpoint)
        fewer = passages[:: options.one_in]
        batched = partial(probe, model, tokenizer, passages, batch_size=options.batch_size)
        one_at_a_time = partial(probe, model, tokenizer, fewer, batch_size=1)
        loaded_seconds = take_turns({BATCHED: batched, ONE_AT_A_TIME: one_at_a_time}, **turns)
    numbers = {BATCHED: NUM_PREFIXES * len(passages), ONE_AT_A_TIME: NUM_PREFIXES * len(fewer)}
    each = {name: [taken / numbers[name] for taken in loaded_seconds[name]] for name in loaded_seconds}
    finish(
        options,
        ("torch", "transformers", "lm-eval", "tfidf-tune"),
        report,
        continuations=numbers[BATCHED],
        median_s={name: statistics.median(taken) for name, taken in seconds.items()},
        median_ratio_to_probe=median_ratio(seconds[HARNESS], seconds[PROBE]),
        continuations_one_at_a_time=numbers[ONE_AT_A_TIME],
        continuations_per_s={name: 1 / statistics.median(taken) for name, taken in each.items()},
        median_throughput_ratio=median_ratio(each[ONE_AT_A_TIME], each[BATCHED]),
    )


def report(result: dict[str, Any]) -> str:
    """Write both comparisons."""
    seconds, per_second = result["median_s"], result["continuations_per_s"]
    return (
        f"medians of {result['settings']['rounds']} rounds\n\n"
        f"{result['continuations']} continuations, loading included: probe {seconds[PROBE]:.2f} s, harness "
        f"{seconds[HARNESS]:.2f} s, ratio {result['median_ratio_to_probe']:.3f}\n"
        f"continuations per second, without loading: batched {per_second[BATCHED]:.2f}, one at a time "
        f"{per_second[ONE_AT_A_TIME]:.2f} ({result['continuations_one_at_a_time']} continuations), ratio "
        f"{result['median_throughput_ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
