"""A wrong config is refused before any work, in one message that says what to change."""

import pytest
from omegaconf import OmegaConf

from tfidf_tune.training import FinetuneConfig, LoRAFinetuneConfig, check_config, config_path, open_run


def test_a_good_config_gets_the_defaults(recipe_config):
    cfg = check_config(recipe_config(), FinetuneConfig)

    assert cfg.batch_size == 4
    assert cfg.save_at_percent == [10, 25, 50, 75, 100]
    assert cfg.clip_grad_norm == 1.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch_sise": 4}, "no key 'batch_sise'; did you mean 'batch_size'"),
        ({"zzz": 1}, "no key 'zzz'; possible are batch_size, "),
        ({"merge_adapter": True}, "no key 'merge_adapter'"),
        ({"batch_size": "many"}, "batch_size"),
        ({"batch_size": 0}, "batch_size is 0, it has to be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"epochs": -1}, "epochs is -1"),
        ({"max_steps": 0}, "max_steps is 0, it has to be at least 1, or null"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm is 0.0, it has to be positive, or null"),
        ({"dtype": "fp16"}, "dtype is 'fp16', possible are fp32, bf16"),
        ({"save_at_percent": []}, r"save_at_percent is \[\]"),
        ({"save_at_percent": [50, 101]}, r"save_at_percent is \[50, 101\]"),
        ({"output_dir": "${nothing}"}, "nothing"),
        ({"dataset.num_target": 3}, "has no argument 'num_target'; did you mean 'num_targets'"),
        ({"loss._component_": "tfidf_tune.loss.TFIDFLoss"}, "loss: no component 'tfidf_tune.loss.TFIDFLoss'"),
        ({"loss._component_": "no_such_package.Loss"}, "loss: no component 'no_such_package.Loss'"),
        ({"loss": "tfidf_tune.loss.CrossEntropyLoss"}, "loss has to be a section with `_component_`"),
        ({"optimizer.learning_rate": 1.0}, "optimizer: torch.optim.AdamW has no argument 'learning_rate'"),
        ({"lr_scheduler.num_warmup": 1}, "did you mean 'num_warmup_steps'"),
        ({"model": {"_component_": "torchtune.models.llama2.llama2", "vocab_size": 5}}, "needs num_layers, "),
        ({"checkpointer": {"_component_": "tfidf_tune.training.HFCheckpointer", "checkpoint_dir": "x"}}, "needs out"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_refused(recipe_config, overrides, message):
    with pytest.raises(ValueError, match=message):
        check_config(recipe_config(**overrides), FinetuneConfig)


def test_missing_keys_are_all_named(recipe_config):
    cfg = recipe_config()
    del cfg["loss"], cfg["batch_size"]

    with pytest.raises(ValueError, match="missing batch_size, loss"):
        check_config(cfg, FinetuneConfig)


def test_the_lora_recipe_knows_one_key_more(recipe_config):
    assert check_config(recipe_config(merge_adapter=True), LoRAFinetuneConfig).merge_adapter


def test_the_schedule_may_be_left_out(recipe_config):
    assert check_config(recipe_config(lr_scheduler=None), FinetuneConfig).lr_scheduler is None


def test_a_config_is_found_by_path_and_by_name(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("a: 1")

    assert config_path(str(file)) == str(file)
    assert OmegaConf.load(config_path("tinyllama/1.1B_lora_memorization")).batch_size == 8


def test_a_name_that_is_no_config_lists_those_there_are():
    with pytest.raises(FileNotFoundError, match=r"no config of that name; there are: .*tinyllama/1\.1B_full_mem"):
        config_path("tinyllama/2B")


def test_a_folder_with_checkpoints_is_not_written_to(recipe_config, tmp_path):
    (tmp_path / "run" / "checkpoint_10pct").mkdir(parents=True)

    with pytest.raises(ValueError, match="already holds checkpoint_10pct: choose another output_dir"):
        open_run(check_config(recipe_config(), FinetuneConfig))


def test_a_device_that_is_not_there_is_refused(recipe_config):
    with pytest.raises(ValueError, match="device 'cuda:99' with dtype 'fp32' cannot be had here"):
        open_run(check_config(recipe_config(device="cuda:99"), FinetuneConfig))


def test_several_processes_are_refused(recipe_config, monkeypatch):
    monkeypatch.setattr("tfidf_tune.training._run.utils.get_world_size_and_rank", lambda: (2, 0))

    with pytest.raises(ValueError, match="2 processes were started"):
        open_run(check_config(recipe_config(), FinetuneConfig))
