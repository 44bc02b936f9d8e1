"""LoRA and QLoRA of every family against peft's model, and NF4 against the weights that it stands
for.
"""

import inspect

import peft
import pytest
import torch
import torch.nn.functional as F
from helpers.fakes.tiny_llama import VOCAB_SIZE
from helpers.fakes.tiny_models import FAMILY_MODELS, MODELS
from torchtune.modules.peft import get_adapter_params

from tfidf_tune.models import FAMILIES
from tfidf_tune.models.gpt_neox import lora_pythia
from tfidf_tune.models.gptj import lora_gptj_6b
from tfidf_tune.training import LoRASettings, train_adapters_only


def everywhere(name):
    """Adapters on all layers that can have them; torchtune's builders of tied models take none on
    the head.
    """
    return {"apply_lora_to_mlp": True} | (
        {} if MODELS[name].tied else {"apply_lora_to_output": True}
    )


def randomize_adapters(model, dtype=torch.float32):
    """A and B both random: with the usual B of zeros the gradient of A is zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in get_adapter_params(model).values():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1


def to_peft_names(family, values, hf_config):
    return {
        key.replace(".weight", ".default.weight"): v
        for key, v in family.tune_to_peft(values, hf_config).items()
    }


@pytest.mark.parametrize(
    ("name", "flags"), [*((name, everywhere(name)) for name in FAMILY_MODELS), ("gpt_neox", {})]
)
def test_logits_and_adapter_gradients_are_those_of_peft(name, flags):
    tiny = MODELS[name]
    family = FAMILIES[MODELS[name].model_type]
    hf_model = tiny.build_hf()
    hf_config = hf_model.config
    model = tiny.build(lora=True, **flags)
    model.load_state_dict(family.hf_to_tune(hf_model.state_dict(), hf_config), strict=False)
    randomize_adapters(model)
    train_adapters_only(model)
    settings = LoRASettings.require(model)
    targets = [family.lora_targets[name] for name in settings.module_names]
    adapted = peft.get_peft_model(
        hf_model,
        peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=targets,
            task_type="CAUSAL_LM",
        ),
    )
    named = dict(adapted.named_parameters())
    adapters = to_peft_names(
        family, {k: v.detach() for k, v in get_adapter_params(model).items()}, hf_config
    )
    assert adapters.keys() == {key for key, value in named.items() if value.requires_grad}
    for key, value in adapters.items():
        named[key].data = value
    tokens = torch.randint(VOCAB_SIZE, (3, 17))

    logits = model(tokens)
    expected_logits = adapted(tokens).logits
    for output in (logits, expected_logits):
        F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    assert tuple(family.lora_targets[name] for name in tiny.attn_modules) == tiny.peft_targets
    torch.testing.assert_close(logits, expected_logits)
    gradients = {key: value.grad for key, value in get_adapter_params(model).items()}
    expected = {key: value.grad for key, value in named.items() if value.requires_grad}
    assert all(value.abs().max() > 0 for value in expected.values())
    torch.testing.assert_close(to_peft_names(family, gradients, hf_config), expected)


def test_the_form_with_lora_shows_its_arguments_and_the_sizes_that_exist():
    """A config is checked against signatures before anything is built."""
    for build, needed in (
        (lora_pythia, {"size", "lora_attn_modules"}),
        (lora_gptj_6b, {"lora_attn_modules"}),
    ):
        parameters = inspect.signature(build).parameters
        assert {key for key, value in parameters.items() if value.default is value.empty} == needed
        assert {
            "lora_rank",
            "lora_alpha",
            "lora_dropout",
            "apply_lora_to_mlp",
            "quantize_base",
        } < parameters.keys()
        assert "linear" not in parameters
    with pytest.raises(
        ValueError, match=r"no Pythia has the size '2b': possible are 70m, 160m, .*12b"
    ):
        lora_pythia(size="2b", lora_attn_modules=["query_key_value"])
