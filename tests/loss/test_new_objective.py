"""The page that shows how to write an objective: its class, config and tests work as they are printed."""

import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from tfidf_tune.recipes.full_finetune import recipe_main
from tiny_run import run_config

from tfidf_tune.training import FinetuneConfig, SetupError, build_loss, check_config, load_config

PAGE = (Path(__file__).parents[2] / "docs" / "new_objective.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def my_weights(tmp_path, monkeypatch):
    """The module of the page, importable as from the folder of a run."""
    (tmp_path / "my_weights.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_weights", None)


@pytest.mark.usefixtures("my_weights")
def test_the_tests_of_the_page_pass():
    module = ModuleType("tests_of_the_page")
    exec(blocks("python")[1], vars(module))
    tests = [function for name, function in inspect.getmembers(module, inspect.isfunction) if name.startswith("test_")]
    assert len(tests) == 4
    for test in tests:
        test()


@pytest.mark.usefixtures("my_weights")
def test_the_config_of_the_page_trains(recipe_config):
    section = yaml.safe_load(blocks("yaml")[0])["loss"]
    cfg = recipe_config(loss=section, max_steps=2)
    recipe_main.__wrapped__(cfg)
    assert (Path(cfg.output_dir) / "checkpoint_100pct").is_dir()


@pytest.mark.usefixtures("my_weights")
def test_the_command_of_the_page_chooses_it():
    words = blocks("bash")[0].replace("\\\n", " ").split()
    assert words[:3] == ["tfidf-tune", "run", "full_finetune"]
    overrides = [word for word in words[5:] if "=" in word]
    loss = build_loss(check_config(load_config(words[4], overrides), FinetuneConfig))
    assert type(loss.weighting).__name__ == "FirstOccurrenceWeighting"
    assert loss.weighting.repeated == 0.2


@pytest.mark.usefixtures("my_weights")
def test_its_own_error_names_the_section():
    section = yaml.safe_load(blocks("yaml")[0])["loss"]
    section["weighting"]["repeated"] = 2.0
    nowhere = Path("nowhere")
    with pytest.raises(SetupError, match="^config: loss.weighting: repeated is 2.0: set it to a number above 0"):
        build_loss(check_config(run_config(nowhere, nowhere, nowhere, loss=section), FinetuneConfig))
