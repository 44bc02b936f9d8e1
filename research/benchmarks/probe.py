"""Time of batched greedy decoding of the probe's prompts, compared with one sequence at a time.

    python research/benchmarks/probe.py    # 300 continuations of 128 tokens, the demo's model
    python research/benchmarks/probe.py --device cuda --checkpoint MODEL_FOLDER

The two take turns in one process, with a model that is loaded once, and are compared by ratios
within a round. One at a time continues only a part of the passages, so continuations per second are
compared. Without a checkpoint the weights are random: the cost of a token does not depend on them.
"""

import logging
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from measuring import finish, make_parser, median_ratio, take_turns

from research.experiment import random_model
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import Passage, ProbeSpec, make_probe
from tfidf_tune.probe import greedy_continuations, load_model
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.probe.decoding import continue_prompts
from tfidf_tune.probe.prompts import cut_passage
from tfidf_tune.training import load_config

BATCHED = "batched"
ONE_AT_A_TIME = "one at a time"
MAX_NEW_TOKENS = 128


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__, rounds=5)
    parser.add_argument(
        "--checkpoint", help="default: the demo's Llama of 3.4 million parameters, random weights"
    )
    parser.add_argument(
        "--num-passages", type=int, default=100, help="each continued from 3 prefix lengths"
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--one-in", type=int, default=10, help="one at a time, continue only every N-th passage"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    turns = {"rounds": options.rounds, "warmup": 1, "device": options.device}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint = options.checkpoint or str(folder / "model")
        if options.checkpoint is None:
            random_model(
                folder / "model", load_config("demo/llama_3M_full_memorization").model, seed=0
            )
        spec = ProbeSpec(
            ("embedded",), num_targets=options.num_passages, num_controls=0, passages="random"
        )
        passages = make_probe(hf_tokenizer(checkpoint), spec).passages
        model = load_model(checkpoint, device=options.device).eval()
        fewer = passages[:: options.one_in]
        batched = partial(continue_passages, model, passages, options.batch_size)
        one_at_a_time = partial(continue_passages, model, fewer, 1)
        loaded_seconds = take_turns({BATCHED: batched, ONE_AT_A_TIME: one_at_a_time}, **turns)
    numbers = {
        BATCHED: len(PREFIX_LENGTHS) * len(passages),
        ONE_AT_A_TIME: len(PREFIX_LENGTHS) * len(fewer),
    }
    each = {
        name: [taken / numbers[name] for taken in loaded_seconds[name]] for name in loaded_seconds
    }
    finish(
        options,
        ("torch", "transformers", "tfidf-tune"),
        report,
        continuations=numbers[BATCHED],
        continuations_one_at_a_time=numbers[ONE_AT_A_TIME],
        continuations_per_s={name: 1 / statistics.median(taken) for name, taken in each.items()},
        median_throughput_ratio=median_ratio(each[ONE_AT_A_TIME], each[BATCHED]),
    )


def continue_passages(model: Any, passages: Sequence[Passage], batch_size: int) -> None:
    """Continue the prompts of all prefix lengths, without an end token."""
    prompts = []
    numbers = []
    for length in PREFIX_LENGTHS:
        for passage in passages:
            prompt, reference = cut_passage(passage, length, MAX_NEW_TOKENS)
            prompts.append(prompt)
            numbers.append(len(reference))
    continue_prompts(
        partial(greedy_continuations, model, eos_id=None), prompts, numbers, batch_size=batch_size
    )


def report(result: dict[str, Any]) -> str:
    """Write the comparison."""
    per_second = result["continuations_per_s"]
    return (
        f"medians of {result['settings']['rounds']} rounds\n\n"
        f"continuations per second, without loading: batched {per_second[BATCHED]:.2f}, one at a "
        f"time {per_second[ONE_AT_A_TIME]:.2f} ({result['continuations_one_at_a_time']} "
        f"continuations), ratio {result['median_throughput_ratio']:.2f}"
    )


if __name__ == "__main__":
    main()
