"""An experiment of real trainings and evaluations: an adapter on the tiny Llama."""

import math

import pytest
from helpers.fakes.probe import token_perplexity
from helpers.processes.fork_jobs import ForkExecutor
from helpers.references.probe import probe

from research.experiment import _run, load_experiment, run_experiment
from tfidf_tune.data import hf_tokenizer, load_documents, text_blocks
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results


def test_it_measures_what_the_librarys_probe_measures(
    experiment_file, tmp_path, tiny_checkpoint, text_file, capsys, monkeypatch
):
    # Saves imports.
    monkeypatch.setattr(_run, "make_executor", lambda launcher, folder: ForkExecutor(folder))
    perplexity = {"wikitext2_source": str(text_file), "block_size": 32, "num_blocks": 5}
    file = experiment_file(
        lora=True,
        milestones=[100],
        tasks=["tfidf_memorization_prefixes", "tfidf_wikitext2_ppl"],
        eval={"metadata": {"prefix_lengths": [8], "max_new_tokens": 16, **perplexity}},
        overrides={"log_every_n_steps": 1, "optimizer": {"lr": 0.01}},
    )
    out = tmp_path / "out"
    assert run_experiment(load_experiment(file)) == []
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"The complete report, with figures: {out / 'report' / 'index.html'}"
    assert (out / "report" / "index.html").is_file()

    results = import_results([out])
    runs = results.checkpoints
    assert [(run.model, run.objective, run.seed) for run in runs] == [
        ("Tiny (LoRA)", "CE", 0),
        ("Tiny (LoRA)", "TF-IDF", 0),
    ]
    tokenizer = hf_tokenizer(str(tiny_checkpoint))
    blocks = text_blocks(tokenizer, load_documents(str(text_file)), block_size=32, num_blocks=5)
    losses = []
    for number, run in enumerate(runs):
        model = load_model(run.checkpoint)
        passages = read_probe_file(f"{run.folder}/probe.jsonl")
        samples = probe(model, tokenizer, passages, prefix_lengths=(8,), max_new_tokens=16)
        assert {one.prompt_label: one for one, _ in run.samples} == {
            one.prompt_label: one for one in samples
        }
        nll = results.scores[
            (results.scores["checkpoint"] == number) & (results.scores["metric"] == "nll")
        ]
        losses.append((nll["value"] * nll["count"]).sum() / nll["count"].sum())
        assert math.exp(losses[-1]) == pytest.approx(token_perplexity(model, blocks), rel=1e-4)
    assert losses[0] != losses[1], "different objectives, different models"
