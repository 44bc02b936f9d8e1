"""What an experiment's processes leave when they fail, and when a cluster starts them again."""

from types import SimpleNamespace

import torch

from research.experiment import _job, load_experiment
from research.experiment._cells import TRAINING, Start
from research.experiment._expand import expand


def test_a_start_is_complete_or_missing_and_its_output_is_in_the_log(tmp_path):
    for seed, error in ((3, None), (4, "no luck")):
        arguments = {"content": "mine", "noise": "loud", "error": error}
        start = Start(
            "helpers.fakes.experiment_stubs.write_start",
            arguments,
            {"sizes": "S"},
            seed,
            tmp_path / "starts" / f"{seed}",
        )
        reason = _job._in_process("start", tmp_path / f"log{seed}", _job.make_start, start)
        assert reason == (error and "RuntimeError: no luck")

    assert [path.name for path in (tmp_path / "starts").iterdir()] == ["3"]
    assert (tmp_path / "starts" / "3" / "model").read_text() == "mine"
    assert (tmp_path / "log3").read_text().endswith("making S with seed 3\nloud 3\n")
    assert "Traceback" in (tmp_path / "log4").read_text()


def test_a_job_that_a_cluster_starts_again_continues_its_run(
    experiment_file, stubbed, tmp_path, monkeypatch
):
    run = expand(load_experiment(experiment_file()))[0]
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    journal = tmp_path / "0.jsonl"
    _job.record(journal, "claimed", job="7")
    for job_id in ("8", "7", "7"):
        monkeypatch.setenv("SUBMITIT_DEBUG_JOB_ID", job_id)
        _job.work({0: run}, tmp_path, 0)

    done = (stubbed.folder / "journal").read_text().splitlines()
    assert [line.split()[0] for line in done] == ["train", "evaluate", "evaluate"]


def test_only_the_training_has_the_precision_of_its_experiment(
    experiment_file, tmp_path, monkeypatch
):
    def print_precision():
        print("precision:", torch.get_float32_matmul_precision())

    recipe = SimpleNamespace(recipe_main=print_precision)
    monkeypatch.setattr(_job, "import_module", lambda name: recipe)
    run = expand(load_experiment(experiment_file(), ["matmul_precision=medium"]))[0]
    run.folder.mkdir(parents=True)

    assert _job._train(run, tmp_path / "journal", retries=0)

    assert "precision: medium" in run.log(TRAINING).read_text()
    assert torch.get_float32_matmul_precision() == "highest"
