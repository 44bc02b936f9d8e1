"""Components of a config: arguments that fit, and what the recipes need of them."""

import sys
from types import SimpleNamespace

import pytest
from torch import nn

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import FinetuneConfig, SetupError, build_loss, check_config, check_loss

WEIGHTED = "tfidf_tune.loss.WeightedCrossEntropyLoss"


def component(tokenizer, count: int = 0): ...


def test_names_of_arguments_and_finite_numbers_are_checked_before_a_component_is_called(recipe_config):
    section = {"_component_": f"{__name__}.component"}
    for arguments, message in (
        ({"cuont": 1}, "unexpected keyword argument 'cuont'; its arguments are .*count"),
        ({"count": float("-inf")}, "count is -inf, it has to be a finite number"),
    ):
        with pytest.raises(SetupError, match=f"^config: dataset: .*{message}"):
            check_config(recipe_config(dataset=section | arguments), FinetuneConfig)


class Recording(WeightedCrossEntropyLoss):
    """A user's own loss, which is built for training, not for a check."""

    def __init__(self, k: int = 1) -> None:
        raise AssertionError("called")


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "users", SimpleNamespace(Recording=Recording))


@pytest.mark.parametrize(
    ("key", "component", "message"),
    [
        ("optimizer", "torch.nn.Flatten", r"has no step: take, for example, torch\.optim\.AdamW"),
        ("metric_logger", "builtins.object", r"has no log_config, log_dict, close: take, for exam"),
    ],
)
def test_components_that_lack_what_the_recipes_need_are_refused(recipe_config, key, component, message):
    with pytest.raises(SetupError, match=rf"^config: {key}: {component} {message}"):
        check_config(recipe_config(**{key: {"_component_": component}}), FinetuneConfig)


def makes_another_loss() -> WeightedCrossEntropyLoss:
    """A function that does not return what it declares."""
    return nn.CrossEntropyLoss()


def test_a_function_that_makes_another_loss_than_it_declares_is_refused(recipe_config):
    cfg = recipe_config(loss={"_component_": f"{__name__}.makes_another_loss"})
    with pytest.raises(SetupError, match=r"^config: loss: .*makes_another_loss has no terms, weighting"):
        build_loss(cfg)


def test_only_a_loss_of_this_package_is_built_to_be_checked(recipe_config):
    own = {"_component_": "users.Recording", "k": 3}
    for loss in (own, {"_component_": WEIGHTED, "weighting": {"_component_": "users.Recording"}}):
        check_loss(check_config(recipe_config(loss=loss), FinetuneConfig))

    with pytest.raises(SetupError, match="loss: tf is 'sqrt': possible are count, log, binary"):
        check_loss(check_config(recipe_config(**{"loss.tf": "sqrt"}), FinetuneConfig))
