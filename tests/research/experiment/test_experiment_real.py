"""An experiment with real processes: an adapter on the tiny Llama, trained and evaluated."""

import fcntl
import hashlib
import math
import time
from functools import partial

import pytest
from helpers.fakes.probe import token_perplexity
from helpers.processes.fork_jobs import ForkExecutor
from helpers.references.probe import probe

from research.experiment import _run, load_experiment, print_cells, run_experiment
from tfidf_tune.data import hf_tokenizer, load_documents, text_blocks
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results


@pytest.fixture
def adapter_experiment(experiment_file, text_file):
    """Make the file: ``adapter_experiment()``; keys of the experiment as arguments."""
    perplexity = {"wikitext2_source": str(text_file), "block_size": 32, "num_blocks": 5}
    return partial(
        experiment_file,
        lora=True,
        milestones=[100],
        tasks=["tfidf_memorization_prefixes", "tfidf_wikitext2_ppl"],
        eval={"metadata": {"prefix_lengths": [8], "max_new_tokens": 16, **perplexity}},
        overrides={"log_every_n_steps": 1, "optimizer": {"lr": 0.01}},
    )


def kill_when(condition, start_command, file, out):
    """Kill only the command when a condition holds; wait until its jobs have ended; return what it printed."""
    process, printed = start_command(file)
    while not condition():
        assert process.is_alive(), printed.read_text()
        time.sleep(0.005)
    process.kill()
    process.join()
    with (out / ".jobs.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    return printed.read_text()


def state(folder):
    """Return time and hash of every file."""
    return {
        path: (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_command_killed_in_training_and_in_evaluation_continues_and_measures_what_the_librarys_probe_measures(
    adapter_experiment, start_command, tmp_path, tiny_checkpoint, text_file, capsys, monkeypatch
):
    file = adapter_experiment()
    out = tmp_path / "out"
    first, second = (out / "tiny-lora" / objective / "seed0" for objective in ("ce", "tf-idf"))

    # At the first sign of the training, which takes a fraction of a second.
    kill_when(lambda: [*second.glob("logs/*.txt")], start_command, file, out)
    assert (second / "cell.json").is_file()
    assert not [*second.glob("trained.json"), *second.glob("checkpoint_*")]
    monkeypatch.setattr(_run, "make_executor", lambda launcher, folder: ForkExecutor(folder))  # saves imports
    done = state(first)
    assert {first / "trained.json", *first.glob("evaluation/*/part1/evaluated.json")} < done.keys()

    printed = kill_when(lambda: [*second.glob("evaluation/checkpoint_100pct/.part1.*")], start_command, file, out)
    assert "begun   Tiny (LoRA), TF-IDF, seed 0: training  (2 of 2 left, " in printed
    (unfinished,) = second.glob("evaluation/checkpoint_100pct/*")
    assert unfinished.name.startswith(".part1")
    done |= {path: at for path, at in state(second).items() if path.name == "trained.json" or "pct" in path.parts[-2]}
    assert second / "trained.json" in done

    # In this process; its jobs are forks.
    assert run_experiment(load_experiment(file)) == []
    shown = capsys.readouterr().out
    assert "begun   Tiny (LoRA), TF-IDF, seed 0: evaluating checkpoint_100pct" in shown
    assert shown.splitlines()[-1] == f"The complete report, with figures: {out / 'report' / 'index.html'}"
    assert (out / "report" / "index.html").is_file()
    after = state(out)
    assert {path: after[path] for path in done} == done
    assert state(first).keys() <= done.keys()
    assert [path.name for path in second.glob("evaluation/checkpoint_100pct/*")] == ["part1"]
    assert "Scoring token ids" in (first / "eval.log").read_text()
    assert "Scoring token ids" not in shown
    print_cells(load_experiment(file))
    assert "4 of 4 cells are done" in capsys.readouterr().out

    results = import_results([out])
    runs = results.checkpoints
    assert [(run.model, run.objective, run.seed) for run in runs] == [
        ("Tiny (LoRA)", "CE", 0), ("Tiny (LoRA)", "TF-IDF", 0),
    ]  # fmt: skip
    tokenizer = hf_tokenizer(str(tiny_checkpoint))
    blocks = text_blocks(tokenizer, load_documents(str(text_file)), block_size=32, num_blocks=5)
    losses = []
    for number, run in enumerate(runs):
        model, passages = load_model(run.checkpoint), read_probe_file(f"{run.folder}/probe.jsonl")
        samples = probe(model, tokenizer, passages, prefix_lengths=(8,), max_new_tokens=16)
        assert {one.prompt_label: one for one, _ in run.samples} == {one.prompt_label: one for one in samples}
        nll = results.scores[(results.scores["checkpoint"] == number) & (results.scores["metric"] == "nll")]
        losses.append((nll["value"] * nll["count"]).sum() / nll["count"].sum())
        assert math.exp(losses[-1]) == pytest.approx(token_perplexity(model, blocks), rel=1e-4)
    assert losses[0] != losses[1], "different objectives, different models"

    one_run = adapter_experiment(objectives={"CE": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"}})
    assert run_experiment(load_experiment(one_run)) == []
    assert "There is no comparison: nothing to compare: there is only" in capsys.readouterr().out
