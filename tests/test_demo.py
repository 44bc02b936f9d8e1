"""The demo, end to end, on a run cut down to seconds."""

import os
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from tfidf_tune import demo
from tfidf_tune.training import config_path


@pytest.fixture(scope="module")
def finished_demo(tmp_path_factory):
    """A demo of six steps on a smaller model, run twice: what the first and the second print, and its folder."""
    folder = tmp_path_factory.mktemp("demo")
    cfg = OmegaConf.load(config_path(demo.CONFIG))
    small = {
        "num_layers": 1,
        "embed_dim": 24,
        "intermediate_dim": 32,
        "vocab_size": 512,
        "num_heads": 2,
        "num_kv_heads": 2,
    }
    cfg.model.update(small)
    cfg.dataset.update({"num_base": 16, "num_targets": 2, "num_repeats": 4})
    cfg.update({"batch_size": 4, "save_at_percent": [50, 100], "log_every_n_steps": 1})
    OmegaConf.save(cfg, folder / "small.yaml")
    code = f"from pathlib import Path; from tfidf_tune import demo; demo.CONFIG = {str(folder / 'small.yaml')!r}; " \
           f"demo.run_demo(Path({str(folder / 'out')!r}), seed=3)"  # fmt: skip
    runs = [
        subprocess.run(
            [sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True, check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder,
        )
        for _ in range(2)
    ]  # fmt: skip
    for run in runs:
        assert run.returncode == 0, run.stderr
    return runs, next((folder / "out").iterdir())


def table_of(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][2:]


def test_the_table_shows_both_objectives_at_every_milestone(finished_demo):
    rows = table_of(finished_demo[0][0].stdout)

    assert [row[:2] for row in rows] == [["CE", "50%"], ["CE", "100%"], ["TF-IDF", "50%"], ["TF-IDF", "100%"]]
    assert all(float(row[-1]) > 1 for row in rows), "a perplexity"
    assert rows[1] != rows[3], "the objectives should lead to different models"


def test_it_ends_with_an_example_a_comparison_and_a_figure(finished_demo):
    (first, _), folder = finished_demo

    for words in ("Ground truth", "CE (LMS=", "TF-IDF (LMS=", "TF-IDF against CE: average LMS", "Done in"):
        assert words in first.stdout
    assert (folder / "memorization.png").read_bytes().startswith(b"\x89PNG")


def test_a_second_run_reuses_what_is_done_and_shows_the_same(finished_demo):
    first, second = (run.stdout for run in finished_demo[0])

    assert "training ..." in first
    assert "probing" in first
    assert "training ..." not in second
    assert "probing" not in second
    assert table_of(second) == table_of(first)


def test_each_objective_trained_from_the_common_start(finished_demo):
    folder = finished_demo[1]

    starts = {OmegaConf.load(folder / run / "config.yaml").checkpointer.checkpoint_dir for run in ("ce", "tfidf")}
    losses = {OmegaConf.load(folder / run / "config.yaml").loss._component_ for run in ("ce", "tfidf")}
    assert starts == {str(folder / "start")}
    assert losses == set(demo.OBJECTIVES.values())


def test_a_recipe_that_fails_ends_the_demo_with_its_message(tmp_path, monkeypatch, capfd):
    cfg = OmegaConf.load(config_path(demo.CONFIG))
    cfg.dataset.num_base = 10**6
    cfg.model.vocab_size = 512
    OmegaConf.save(cfg, tmp_path / "impossible.yaml")
    monkeypatch.setattr(demo, "CONFIG", str(tmp_path / "impossible.yaml"))

    with pytest.raises(SystemExit, match="the recipe ended with exit code 1; its message is above"):
        demo.run_demo(tmp_path / "out")

    assert "needed 1000000: lower num_base" in capfd.readouterr().err
