"""Components of a config: arguments that fit, and what the recipes need of them."""

import sys
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from tiny_models import MODELS
from torch import nn

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import FinetuneConfig, Run, SetupError, build_loss, build_model, check_config, check_loss

WEIGHTED = "tfidf_tune.loss.WeightedCrossEntropyLoss"


class Recording(WeightedCrossEntropyLoss):
    """A user's own loss, which is built for training, not for a check."""

    def __init__(self, k: int = 1) -> None:
        raise AssertionError("called")


@pytest.fixture(autouse=True)
def users_module(monkeypatch):
    monkeypatch.setitem(sys.modules, "users", SimpleNamespace(Recording=Recording))


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


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        ("gpt_neox", {"lora_attn_modules": ["q_proj"]}, "names 'q_proj', .*possible are output_proj, query_key_value$"),
        ("gptj", {"lora_attn_modules": ["out_proj"]}, "names 'out_proj', .*possible are k_proj, output_proj, q_proj"),
        ("llama3_2-tied", {"apply_lora_to_output": True}, "apply_lora_to_output is .*tied to the embeddings"),
        ("qwen2-tied", {"apply_lora_to_output": True}, "apply_lora_to_output is .*tie_word_embeddings"),
        ("gpt_neox", {"quantize_base": True}, "torchao's NF4 takes multiples of 16384 weights, not 64 x 192"),
        (
            "gptj",
            {"embed_dim": 256, "num_heads": 3, "quantize_base": True},
            r"embed_dim \(256\) must be divisible by",
        ),
    ],
)
def test_lora_settings_that_the_model_cannot_have_are_refused(name, lora, message, tmp_path):
    cfg = OmegaConf.create({"model": MODELS[name].section(lora=True, **lora)})

    with pytest.raises(SetupError, match=f"^config: model: .*{message}"):
        build_model(cfg, Run(torch.device("cpu"), torch.float32, 0, tmp_path))
