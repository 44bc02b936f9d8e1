"""The config of a run: defaults, references, and what is refused before any work."""

import re

import pytest
import torch

from tfidf_tune.training import FinetuneConfig, LoRAFinetuneConfig, SetupError, check_config, open_run


def test_values_marked_as_missing_are_named_wherever_they_are(recipe_config):
    """A value that another one refers to as well."""
    dataset = [{"_component_": "x", "source": "???"}]
    cfg = recipe_config(epochs="???", dataset=dataset, **{"optimizer.lr": "???", "checkpointer.checkpoint_dir": "???"})

    message = r"^config: missing checkpointer\.checkpoint_dir, dataset\[0\]\.source, epochs, optimizer\.lr$"
    with pytest.raises(SetupError, match=message):
        check_config(cfg, FinetuneConfig)


def test_the_schedule_may_be_left_out(recipe_config):
    # The second is `lr_scheduler=null` on torchtune's command line.
    for overrides in ({"lr_scheduler": None}, {"lr_scheduler._component_": None}):
        assert check_config(recipe_config(**overrides), FinetuneConfig).lr_scheduler is None


def test_a_home_folder_is_written_out(recipe_config, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))

    cfg = check_config(recipe_config(output_dir="~/runs/mine"), FinetuneConfig)

    assert cfg.output_dir == str(tmp_path / "runs" / "mine")
    assert cfg.dataset.probe_file == str(tmp_path / "runs" / "mine" / "probe.jsonl")


def test_without_a_seed_one_is_drawn_that_all_references_share(recipe_config):
    drawn = [check_config(recipe_config(seed=None), FinetuneConfig) for _ in range(2)]

    assert drawn[0].seed == drawn[0].dataset.seed
    assert drawn[0].seed != drawn[1].seed


def test_a_file_instead_of_a_checkpoint_is_refused(recipe_config, tmp_path):
    (tmp_path / "run" / "resume" / "step_2").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint_100pct").touch()
    cfg = check_config(recipe_config(resume_from_checkpoint=True), FinetuneConfig)

    with pytest.raises(SetupError, match="holds checkpoint_100pct, which is not a folder: move it away"), open_run(cfg):
        pass


def test_device_and_dtype_are_those_of_the_machine(recipe_config, monkeypatch):
    auto = {"device": "auto", "dtype": "auto"}
    for lora, schema in ((False, FinetuneConfig), (True, LoRAFinetuneConfig)):
        cfg = check_config(recipe_config(lora=lora, **auto, **{"optimizer.fused": "${compile}"}), schema)
        on_gpu = torch.cuda.is_available()
        assert (cfg.device, cfg.dtype) == (("cuda", "bf16") if on_gpu else ("cpu", "fp32"))
    for capable, dtype in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, capable=capable: capable)
        found = check_config(recipe_config(**auto), FinetuneConfig)
        assert (found.device, found.dtype) == ("cuda", dtype)
        assert check_config(recipe_config(dtype="auto"), FinetuneConfig).dtype == "fp32", "a run on the CPU"


def test_a_key_of_a_section_is_suggested_with_its_section(recipe_config):
    for key, hint in (
        ("lr", "did you mean 'optimizer.lr'?"),
        ("max_seq_len", "did you mean 'model.max_seq_len'?"),
        ("epoch", "did you mean 'epochs'?"),
    ):
        with pytest.raises(SetupError, match=f"^config: no key '{key}'; {re.escape(hint)}$"):
            check_config(recipe_config(**{key: 1}), FinetuneConfig)
