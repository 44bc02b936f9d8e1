"""An experiment whose processes are the real ones: an adapter on the tiny Llama, trained and evaluated."""

import math
import os
import subprocess
import sys

import pytest

from tfidf_tune.analysis import load_model, probe, read_runs, summarize, token_perplexity
from tfidf_tune.data import hf_tokenizer, load_documents, read_probe_file, text_blocks


def test_an_adapter_is_trained_and_evaluated_as_the_librarys_own_probe_does(
    experiment_file, tmp_path, tiny_checkpoint, text_file
):
    file = experiment_file(
        lora=True,
        objectives={"CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}},
        milestones=[100],
        tasks=["tfidf_memorization_prefixes", "tfidf_wikitext2_ppl"],
        eval={
            "metadata": {
                "prefix_lengths": [8],
                "max_new_tokens": 16,
                "wikitext2_source": str(text_file),
                "block_size": 32,
                "num_blocks": 5,
            }
        },
        overrides={"max_steps": 3, "optimizer": {"lr": 0.1}},
    )
    finished = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-m", "tfidf_tune.cli", "experiment", file],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=tmp_path,
    )  # fmt: skip

    assert finished.returncode == 0, finished.stderr
    assert "There is no comparison: nothing to compare: there is only" in finished.stdout
    assert "[2/2] Tiny (LoRA), CE, seed 0: evaluating checkpoint_100pct" in finished.stdout
    (run,) = read_runs([tmp_path / "out"])
    assert "loglikelihood" in (tmp_path / "out" / "tiny-lora" / "ce" / "seed0" / "eval.log").read_text()
    assert "loglikelihood" not in finished.stdout + finished.stderr
    (evaluation,) = run.evaluations
    assert (run.model, run.objective, run.seed) == ("Tiny (LoRA)", "CE", 0)
    model, tokenizer = load_model(evaluation.checkpoint), hf_tokenizer(str(tiny_checkpoint))
    passages = read_probe_file(f"{run.folder}/probe.jsonl")
    samples = probe(model, tokenizer, passages, prefix_lengths=(8,), max_new_tokens=16)
    assert summarize(evaluation.samples) == summarize(samples)
    blocks = text_blocks(tokenizer, load_documents(str(text_file)), block_size=32, num_blocks=5)
    loss = -sum(block.log_likelihood for block in evaluation.blocks)
    loss /= sum(block.num_predictions for block in evaluation.blocks)
    assert math.exp(loss) == pytest.approx(token_perplexity(model, blocks), rel=1e-4)
