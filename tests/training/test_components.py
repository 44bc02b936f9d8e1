"""Components of a config: of the right kind, with arguments that fit, and never called to find that out."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Optional

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from torchtune.modules.transforms.tokenizers import ModelTokenizer
from torchtune.training.metric_logging import MetricLoggerInterface

from tfidf_tune.loss import CrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import FinetuneConfig, SetupError, build_loss, check_config, check_loss
from tfidf_tune.training._components import _LOSS_PART, COMPONENTS, check_kind

WEIGHTED = "tfidf_tune.loss.WeightedCrossEntropyLoss"


# ---- arguments against annotations


def component(
    tokenizer,
    plain=None,
    count: int = 0,
    rate: float = 0.1,
    name: str = "",
    flag: bool = False,
    limit: Optional[int] = None,  # noqa: UP045  (as in torchtune)
    implicit: int = None,  # noqa: RUF013  (as in torchtune)
    mode: Literal["a", "b"] = "a",
    path: str | Path = "",
    lr: float | torch.Tensor = 0.1,
    betas: tuple[float, float] = (0.9, 0.99),
    **others: int,
): ...


def with_text_annotation(tokenizer, count: "int" = 0): ...
def with_unknown_annotation(tokenizer, count: "int" = 0, other: "OnlyForTypeCheckers" = 0): ...  # noqa: F821


@pytest.fixture
def check(recipe_config):
    def check(arguments, function=component):
        section = {"_component_": f"{__name__}.{function.__name__}", **arguments}
        check_config(recipe_config(dataset=section), FinetuneConfig)

    return check


def test_arguments_that_annotations_allow_are_accepted(check):
    check({"count": 3.0, "rate": 3, "name": "x", "flag": True, "limit": None, "implicit": None, "path": "/x"})
    check({"lr": 1e-3, "plain": [1], "unknown": "x"})
    check({"mode": 3, "betas": 0.9, "lr": "x", "path": 0})  # left to the component
    check({"count": "x"}, with_unknown_annotation)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": "3"}, "count is '3', it has to be a whole number"),
        ({"count": 2.5}, "count is 2.5, it has to be a whole number"),
        ({"count": True}, "count is True, it has to be a whole number"),
        ({"rate": False}, "rate is False, it has to be a number"),
        ({"unknown": float("-inf")}, "unknown is -inf, it has to be a finite number"),
        ({"flag": "false"}, "flag is 'false', it has to be true or false"),
        ({"limit": "x"}, "limit is 'x', it has to be a whole number or null"),
        ({"name": None}, "name is None, it has to be a text"),
    ],
)
def test_arguments_that_annotations_exclude_are_refused(check, arguments, message):
    with pytest.raises(SetupError, match=f"^config: dataset: {message}$"):
        check(arguments)
    if "count" in arguments:
        with pytest.raises(SetupError, match=f"^config: dataset: {message}$"):
            check(arguments, with_text_annotation)


# ---- kinds


def dangerous(command="", path="", **arguments):
    """A function of a user's module without a return annotation, which must not be called."""
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


def test_components_of_the_kind_are_accepted():
    for key, found in (
        ("model", nn.Linear), ("loss", CrossEntropyLoss), ("loss", Recording), (None, nn.Identity),
        ("lr_scheduler", schedule), ("lr_scheduler", schedule_of), ("lr_scheduler", Schedule),
        ("lr_scheduler", torch.optim.lr_scheduler.StepLR), ("dataset", untyped_dataset), ("dataset", dataset),
        ("tokenizer", tokenizer), ("metric_logger", logger), ("optimizer", torch.optim.AdamW),
    ):  # fmt: skip
        check_kind("here", "its.path", found, COMPONENTS.get(key, _LOSS_PART))


@pytest.mark.parametrize(
    ("key", "component", "message"),
    [
        ("model", for_type_checkers, "does not declare what it returns, which has to be a model: annotate its return"),
        ("lr_scheduler", undeclared_schedule, "does not declare what it returns, which has to be a learning-rate sch"),
        ("optimizer", parameters, "makes int, not an optimizer: take, for example, torch.optim.AdamW"),
        ("dataset", nothing, "makes nothing, not a map-style data set"),
        (None, subprocess.Popen, "makes Popen, not a module"),
    ],
)
def test_components_of_another_kind_are_refused(key, component, message):
    with pytest.raises(SetupError, match=rf"^config: here: its\.path {message}"):
        check_kind("here", "its.path", component, COMPONENTS.get(key, _LOSS_PART))


SYSTEM = {"_component_": "os.system", "command": "touch FOLDER/harm"}
CALL = {"_component_": "subprocess.call", "args": ["touch", "FOLDER/harm"]}
RMTREE = {"_component_": "shutil.rmtree", "path": "FOLDER/precious"}
POPEN = {"_component_": "subprocess.Popen", "args": ["touch", "FOLDER/harm"]}
OWN = {"_component_": "users.dangerous", "command": "x"}


@pytest.mark.parametrize(
    ("key", "harmful"),
    [
        ("model", SYSTEM), ("checkpointer", CALL), ("tokenizer", OWN), ("dataset", RMTREE), ("loss", POPEN),
        ("optimizer", OWN), ("lr_scheduler", SYSTEM), ("metric_logger", RMTREE), ("loss.weighting", CALL),
    ],
)  # fmt: skip
def test_functions_that_make_no_component_are_refused_and_not_called(recipe_config, tmp_path, key, harmful):
    (tmp_path / "precious").mkdir()
    section = json.loads(json.dumps(harmful).replace("FOLDER", str(tmp_path)))
    changes = {"tokenizer.path": "x", key: section}  # it refers to the checkpointer
    if key == "loss.weighting":
        changes = {"loss": {"_component_": WEIGHTED, "weighting": section}}

    with pytest.raises(SetupError, match=rf"^config: {key}: {section['_component_']} (makes|does not declare)"):
        check_config(recipe_config(**changes), FinetuneConfig)

    assert (tmp_path / "precious").is_dir()
    assert not (tmp_path / "harm").exists()


def makes_another_loss() -> WeightedCrossEntropyLoss:
    """A function that does not return what it declares."""
    return nn.CrossEntropyLoss()


def test_a_function_that_makes_another_loss_than_it_declares_is_refused(recipe_config):
    cfg = recipe_config(loss={"_component_": f"{__name__}.makes_another_loss"})
    with pytest.raises(SetupError, match=r"^config: loss: .*makes_another_loss makes CrossEntropyLoss, not an obj"):
        build_loss(cfg)


def test_only_a_loss_of_this_package_is_built_to_be_checked(recipe_config):
    own = {"_component_": "users.Recording", "k": 3}
    for loss in (own, {"_component_": WEIGHTED, "weighting": {"_component_": "users.Recording"}}):
        check_loss(check_config(recipe_config(loss=loss), FinetuneConfig))

    with pytest.raises(SetupError, match="loss: k is 'x', it has to be a whole number"):
        check_config(recipe_config(loss=own | {"k": "x"}), FinetuneConfig)
    with pytest.raises(SetupError, match="loss: tf is 'sqrt': possible are count, log, binary"):
        check_loss(check_config(recipe_config(**{"loss.tf": "sqrt"}), FinetuneConfig))
