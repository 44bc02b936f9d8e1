"""The memorization task through lm-evaluation-harness against the library's own batched probe: time.

    python benchmarks/probe.py                                  # 300 continuations of 128 tokens, the demo's model
    python benchmarks/probe.py --device cuda --checkpoint MODEL_FOLDER

Both take turns in one process, model and tokenizer loaded anew by each as their commands do, and what is compared
are ratios within a round. Without a checkpoint the weights are random: the cost of a token does not depend on them.
"""

import argparse
import contextlib
import io
import logging
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from measuring import median_ratio, record, take_turns, write_result  # type: ignore[import-not-found]

from tfidf_tune.analysis import load_model, probe
from tfidf_tune.data import (
    Passage,
    choose_passages,
    embedded_documents,
    hf_tokenizer,
    tokenizer_fingerprint,
    write_probe_file,
)
from tfidf_tune.experiment import random_llama
from tfidf_tune.tasks import evaluate
from tfidf_tune.training import load_config

PROBE, HARNESS = "probe", "harness"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="default: the demo's Llama of 3.4 million parameters, random weights")
    parser.add_argument("--num-passages", type=int, default=100, help="each continued from 3 prefix lengths")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, after one that is not")
    parser.add_argument("--output", type=Path, help="write the result as JSON too")
    return parser.parse_args()


def make_passages(checkpoint: str, num_passages: int) -> list[Passage]:
    """Passages of 256 tokens from the embedded corpus."""
    tokenizer = hf_tokenizer(checkpoint)
    chosen = choose_passages(tokenizer, embedded_documents("train"), count=num_passages, min_tokens=256, block_size=256)
    return [
        Passage(
            id=f"target-{index:04}",
            kind="target",
            text=candidate.text,
            token_ids=candidate.token_ids[:256].tolist(),
            num_injections=1,
            positions=[],
            source="embedded",
            tokenizer=checkpoint,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        )
        for index, candidate in enumerate(chosen)
    ]


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checkpoint = options.checkpoint
        if checkpoint is None:
            checkpoint = str(folder / "model")
            random_llama(folder / "model", load_config("demo/llama_3M_full_memorization").model, seed=0)
        passages = make_passages(checkpoint, options.num_passages)
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

        def quiet(way: Callable[[], None]) -> None:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                way()

        ways = {PROBE: partial(quiet, run_probe), HARNESS: partial(quiet, run_harness)}
        seconds = take_turns(ways, rounds=options.rounds, warmup=1, device=options.device)

    result = record(
        options,
        options.device,
        ("torch", "transformers", "lm-eval", "tfidf-tune"),
        continuations=3 * len(passages),
        median_s={name: statistics.median(taken) for name, taken in seconds.items()},
        median_ratio_to_probe=median_ratio(seconds[HARNESS], seconds[PROBE]),
    )
    print(
        f"{result['date']}, {result['hardware']}: {result['continuations']} continuations, probe "
        f"{result['median_s'][PROBE]:.2f} s, harness {result['median_s'][HARNESS]:.2f} s, ratio "
        f"{result['median_ratio_to_probe']:.3f} (medians of {options.rounds} rounds)"
    )
    write_result(result, options.output)


if __name__ == "__main__":
    main()
