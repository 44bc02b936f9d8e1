"""A wrong config is refused before any work, in one message that says what to change."""

import pytest
import torch
from omegaconf import OmegaConf

from tfidf_tune.training import (
    FinetuneConfig,
    LoRAFinetuneConfig,
    SetupError,
    check_config,
    config_path,
    open_run,
)


def test_a_good_config_gets_the_defaults(recipe_config):
    cfg = check_config(recipe_config(), FinetuneConfig)

    assert cfg.batch_size == 4
    assert cfg.save_at_percent == [10, 25, 50, 75, 100]
    assert cfg.clip_grad_norm == 1.0


def test_what_is_marked_as_missing_is_named_wherever_it_stands(recipe_config):
    cfg = recipe_config(epochs="???", **{"optimizer.lr": "???"}, dataset=[{"_component_": "x", "source": "???"}])

    with pytest.raises(SetupError, match=r"^config: missing dataset\[0\]\.source, epochs, optimizer\.lr$"):
        check_config(cfg, FinetuneConfig)


def test_the_lora_recipe_knows_one_key_more(recipe_config):
    assert check_config(recipe_config(merge_adapter=True), LoRAFinetuneConfig).merge_adapter


def test_the_schedule_may_be_left_out(recipe_config):
    assert check_config(recipe_config(lr_scheduler=None), FinetuneConfig).lr_scheduler is None
    # `lr_scheduler=null` on torchtune's command line
    assert check_config(recipe_config(**{"lr_scheduler._component_": None}), FinetuneConfig).lr_scheduler is None


def test_a_config_is_found_by_path_and_by_name(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("a: 1")

    assert config_path(str(file)) == str(file)
    assert OmegaConf.load(config_path("tinyllama/1.1B_lora_memorization")).batch_size == 8


def start(cfg):
    with open_run(check_config(cfg, FinetuneConfig)):
        pass


def test_a_folder_with_checkpoints_is_not_written_to(recipe_config, tmp_path):
    (tmp_path / "run" / "checkpoint_10pct").mkdir(parents=True)

    with pytest.raises(ValueError, match="already holds checkpoint_10pct: choose another output_dir"):
        start(recipe_config())


def test_a_file_in_the_place_of_a_checkpoint_is_refused(recipe_config, tmp_path):
    (tmp_path / "run" / "resume" / "step_2").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint_100pct").touch()

    with pytest.raises(SetupError, match="holds checkpoint_100pct, which is not a folder: move it away"):
        start(recipe_config(resume_from_checkpoint=True))


@pytest.mark.parametrize("device", ["cuda", "cuda:99", "meta", "tpu"])
def test_a_device_that_is_not_there_is_refused_and_never_replaced_by_another(recipe_config, monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(SetupError, match=f"device '{device}' is not available, possible are cpu, cuda where present"):
        start(recipe_config(device=device))


def test_an_output_dir_that_cannot_be_a_folder_is_refused(recipe_config, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(SetupError, match="cannot be written: .*/file is not a writable folder"):
        start(recipe_config(output_dir=str(tmp_path / "file" / "run")))


def test_a_home_folder_is_written_out(recipe_config, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    cfg = check_config(recipe_config(output_dir="~/runs/mine"), FinetuneConfig)

    assert cfg.output_dir == str(tmp_path / "runs" / "mine")
    assert cfg.dataset.probe_file == str(tmp_path / "runs" / "mine" / "probe.jsonl")


def test_without_a_seed_one_is_drawn_and_kept_for_all_who_refer_to_it(recipe_config):
    drawn = [check_config(recipe_config(seed=None), FinetuneConfig) for _ in range(2)]

    assert drawn[0].seed == drawn[0].dataset.seed
    assert drawn[0].seed != drawn[1].seed
