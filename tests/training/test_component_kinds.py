"""What a config names is of the kind that its section needs; nothing else is ever called."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.training.metric_logging import MetricLoggerInterface

from tfidf_tune.loss import CrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import FinetuneConfig, SetupError, check_config, check_loss
from tfidf_tune.training._components import _LOSS_PART, COMPONENTS, check_kind

PRODUCT = "tfidf_tune.weighting.ProductWeighting"
TFIDF = {"_component_": "tfidf_tune.weighting.TFIDFWeighting"}


def dangerous(command="", path="", **arguments):
    """A function of a user's module that says nothing of what it returns, and must not be called."""
    raise AssertionError("called")


class Recording(WeightedCrossEntropyLoss):
    """A user's own loss, which is built for training, not for a check."""

    def __init__(self, k: int = 1) -> None:
        raise AssertionError("called")


class Schedule:
    def step(self): ...


def schedule(optimizer, num_training_steps): ...
def schedule_of(opt, num_training_steps) -> Schedule: ...
def undeclared_schedule(opt, num_training_steps): ...
def untyped_dataset(tokenizer, size=1): ...
def dataset(tokenizer) -> "Dataset[int] | None": ...
def tokenizer(path) -> ModelTokenizer: ...
def logger() -> MetricLoggerInterface: ...
def for_type_checkers() -> "NotImportedHere": ...  # noqa: F821
def parameters(params) -> int: ...
def nothing(tokenizer) -> None: ...


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "users", SimpleNamespace(dangerous=dangerous, Recording=Recording))


@pytest.mark.parametrize(
    ("key", "component"),
    [
        ("model", nn.Linear), ("loss", CrossEntropyLoss), ("loss", Recording), (None, nn.Identity),
        ("lr_scheduler", schedule), ("lr_scheduler", schedule_of), ("lr_scheduler", Schedule),
        ("lr_scheduler", torch.optim.lr_scheduler.StepLR), ("dataset", untyped_dataset), ("dataset", dataset),
        ("tokenizer", tokenizer), ("metric_logger", logger), ("optimizer", torch.optim.AdamW),
    ],
)  # fmt: skip
def test_components_of_the_kind_are_accepted(key, component):
    check_kind("here", "its.path", component, COMPONENTS.get(key, _LOSS_PART))


@pytest.mark.parametrize(
    ("key", "component", "message"),
    [
        ("model", for_type_checkers, "does not declare what it returns, which has to be a model: annotate its return"),
        ("lr_scheduler", undeclared_schedule, "does not declare what it returns, which has to be a learning-rate sch"),
        ("optimizer", parameters, "makes int, not an optimizer: take, for example, torch.optim.AdamW"),
        ("dataset", nothing, "makes nothing, not a map-style data set"),
        ("loss", nn.CrossEntropyLoss, "makes CrossEntropyLoss, not one of tfidf_tune's objectives"),
        (None, subprocess.Popen, "makes Popen, not a module"),
    ],
)
def test_components_of_another_kind_are_refused(key, component, message):
    with pytest.raises(SetupError, match=rf"^config: here: its\.path {message}"):
        check_kind("here", "its.path", component, COMPONENTS.get(key, _LOSS_PART))


SECTIONS = ("model", "checkpointer", "tokenizer", "dataset", "loss", "optimizer", "lr_scheduler", "metric_logger")
HARMFUL = (
    {"_component_": "os.system", "command": "touch FOLDER/harm"},
    {"_component_": "shutil.rmtree", "path": "FOLDER/precious"},
    {"_component_": "subprocess.call", "args": ["touch", "FOLDER/harm"]},
    {"_component_": "subprocess.Popen", "args": ["touch", "FOLDER/harm"]},
    {"_component_": "users.dangerous", "command": "x"},
)


@pytest.mark.parametrize("key", [*SECTIONS, "loss.weighting.first"])
@pytest.mark.parametrize("harmful", HARMFUL, ids=lambda section: section["_component_"])
def test_what_is_no_component_is_refused_in_every_section_and_not_called(recipe_config, tmp_path, key, harmful):
    (tmp_path / "precious").mkdir()
    section = json.loads(json.dumps(harmful).replace("FOLDER", str(tmp_path)))
    changes = {"tokenizer.path": "x", key: section}  # it refers to the checkpointer
    if key == "loss.weighting.first":
        weighting = {"_component_": PRODUCT, "first": section, "second": TFIDF}
        changes = {"loss": {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": weighting}}

    with pytest.raises(SetupError, match=rf"^config: {key}: {section['_component_']} (makes|does not declare)"):
        check_config(recipe_config(**changes), FinetuneConfig)

    assert (tmp_path / "precious").is_dir()
    assert not (tmp_path / "harm").exists()


def test_a_loss_of_the_users_own_is_not_built_to_be_checked(recipe_config):
    for loss in (
        {"_component_": "users.Recording", "k": 3},
        {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": {"_component_": "users.Recording"}},
    ):
        check_loss(check_config(recipe_config(loss=loss), FinetuneConfig))

    with pytest.raises(SetupError, match="loss: k is 'x', it has to be a whole number"):
        check_config(recipe_config(loss={"_component_": "users.Recording", "k": "x"}), FinetuneConfig)


def test_a_loss_of_this_package_is_built_to_be_checked(recipe_config):
    with pytest.raises(SetupError, match="loss: tf is 'sqrt': possible are count, log, binary"):
        check_loss(check_config(recipe_config(**{"loss.tf": "sqrt"}), FinetuneConfig))
