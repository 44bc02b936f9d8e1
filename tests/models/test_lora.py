"""LoRA and QLoRA of every family: peft's model is the truth, and for NF4 the weights that it stands for."""

import inspect
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from tiny_llama import VOCAB_SIZE
from tiny_models import FAMILY_MODELS, MODELS
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.modules.peft import LoRALinear, get_adapter_params
from torchtune.training import set_default_dtype

from tfidf_tune.models import FAMILIES
from tfidf_tune.models.gpt_neox import lora_pythia
from tfidf_tune.models.gptj import lora_gptj_6b
from tfidf_tune.models.llama import lora_tinyllama_1_1b
from tfidf_tune.training import LoRASettings, train_adapters_only

# torchtune's builders of tied models take no LoRA on the head.
EVERYWHERE = {"apply_lora_to_mlp": True, "apply_lora_to_output": True}


def lora_flags(name, everywhere):
    return {key: everywhere for key in EVERYWHERE if not (MODELS[name].tied and key == "apply_lora_to_output")}


def assert_close_up_to_a_rounding(actual, expected, dtype):
    """NF4 layers add their bias in a step of its own: a rounding more for 2 x 4 layers, forward and backward."""
    if dtype is torch.float32:
        torch.testing.assert_close(actual, expected)
    else:
        atol = 2 * 8 * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def randomize_adapters(model, dtype=torch.float32):
    """A and B both random: with the usual B of zeros the gradient of A is zero."""
    generator = torch.Generator().manual_seed(1)
    for parameter in get_adapter_params(model).values():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) * 0.1


def to_peft_names(family, values, hf_config):
    return {key.replace(".weight", ".default.weight"): v for key, v in family.tune_to_peft(values, hf_config).items()}


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_logits_and_adapter_gradients_are_those_of_peft(name, everywhere):
    tiny, family = MODELS[name], FAMILIES[MODELS[name].model_type]
    hf_model = tiny.build_hf()
    hf_config = hf_model.config.to_dict()
    model = tiny.build(lora=True, **lora_flags(name, everywhere))
    model.load_state_dict(family.hf_to_tune(hf_model.state_dict(), hf_config), strict=False)
    randomize_adapters(model)
    train_adapters_only(model)
    settings = LoRASettings.require(model)
    adapted = peft.get_peft_model(
        hf_model,
        peft.LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=family.peft_target_modules(settings.module_names),
            task_type="CAUSAL_LM",
        ),
    )
    named = dict(adapted.named_parameters())
    adapters = to_peft_names(family, {k: v.detach() for k, v in get_adapter_params(model).items()}, hf_config)
    assert adapters.keys() == {key for key, value in named.items() if value.requires_grad}
    for key, value in adapters.items():
        named[key].data = value
    tokens = torch.randint(VOCAB_SIZE, (3, 17))

    logits, expected_logits = model(tokens), adapted(tokens).logits
    for output in (logits, expected_logits):
        F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    torch.testing.assert_close(logits, expected_logits)
    gradients = {key: value.grad for key, value in get_adapter_params(model).items()}
    expected = {key: value.grad for key, value in named.items() if value.requires_grad}
    assert all(value.abs().max() > 0 for value in expected.values())
    torch.testing.assert_close(to_peft_names(family, gradients, hf_config), expected)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_the_papers_target_modules_are_those_of_the_attention(name):
    family = FAMILIES[MODELS[name].model_type]

    targets = family.peft_target_modules(MODELS[name].attn_modules)

    assert tuple(targets) == MODELS[name].peft_targets


def test_the_fused_projection_has_one_a_for_queries_keys_and_values():
    model = MODELS["gpt_neox"].build(lora=True)

    assert {key.split("attn.")[1]: tuple(v.shape) for key, v in get_adapter_params(model).items()} == {
        "query_key_value.lora_a.weight": (4, 64),
        "query_key_value.lora_b.weight": (192, 4),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_nf4_is_the_model_of_the_weights_that_it_stands_for(name, dtype):
    """Logits and the adapters' gradients against a plain base that has the dequantized weights."""
    tiny, family = MODELS[name], FAMILIES[MODELS[name].model_type]
    hf_model = tiny.build_hf(256)
    weights = family.hf_to_tune(hf_model.state_dict(), hf_model.config.to_dict())
    flags = lora_flags(name, True)
    with set_default_dtype(dtype):
        quantized, plain = tiny.build(256, lora=True, quantize_base=True, **flags), tiny.build(256, lora=True, **flags)
    for key, value in quantized.named_parameters():
        if key in weights:
            new = to_nf4(weights[key].to(dtype)) if isinstance(value, NF4Tensor) else weights[key].to(dtype)
            quantized.load_state_dict({key: new}, strict=False, assign=True)
    randomize_adapters(quantized, dtype)
    plain.load_state_dict(
        {
            key: value.detach().get_original_weight() if isinstance(value, NF4Tensor) else value.detach()
            for key, value in quantized.named_parameters()
        }
    )
    tokens = torch.randint(VOCAB_SIZE, (2, 9))
    for model in (quantized, plain):
        train_adapters_only(model)
        model(tokens).float().logsumexp(-1).sum().backward()

    num_quantized = sum(isinstance(value, NF4Tensor) for value in quantized.parameters())
    linear = [m for key, m in quantized.named_modules() if isinstance(getattr(m, "weight", None), torch.Tensor)
              and m.weight.dim() == 2 and key.startswith("layers") and "lora" not in key]  # fmt: skip
    assert num_quantized == len(linear) > 0
    with torch.no_grad():
        assert_close_up_to_a_rounding(quantized(tokens), plain(tokens), dtype)
    expected = get_adapter_params(plain)
    for key, value in get_adapter_params(quantized).items():
        assert_close_up_to_a_rounding(value.grad, expected[key].grad, dtype)


def test_nf4_rounds_as_bitsandbytes_paper_says():
    """The 16 levels of appendix E of https://arxiv.org/abs/2305.14314, in a block whose largest weight is 1."""
    levels = [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    weight = torch.tensor(levels).repeat(1024).reshape(64, 256)

    torch.testing.assert_close(to_nf4(weight).get_original_weight(), weight, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("build", "adapted"),
    [
        (lambda **kw: lora_pythia(size="1.4b", lora_attn_modules=["query_key_value"], **kw), {"query_key_value"}),
        (
            lambda **kw: lora_pythia(size="70m", lora_attn_modules=["query_key_value", "output_proj"], **kw),
            {"query_key_value", "output_proj"},
        ),
        (lambda **kw: lora_gptj_6b(lora_attn_modules=["q_proj", "output_proj"], **kw), {"q_proj", "output_proj"}),
        (
            lambda **kw: lora_tinyllama_1_1b(lora_attn_modules=["q_proj", "output_proj"], **kw),
            {"q_proj", "output_proj"},
        ),
    ],
)
@pytest.mark.parametrize("quantize_base", [False, True])
def test_the_lora_builders_adapt_the_named_layers_alone(build, adapted, quantize_base):
    with torch.device("meta"):
        model = build(lora_rank=8, lora_alpha=32, lora_dropout=0.1, quantize_base=quantize_base)

    layers = {key.rsplit(".", 1)[1]: layer for key, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    assert layers.keys() == adapted
    assert {(m.rank, m.alpha, m.dropout.p) for m in layers.values()} == {(8, 32, 0.1)}
    assert isinstance(model.layers[0].mlp.w1.weight, NF4Tensor) is quantize_base
    assert isinstance(next(iter(layers.values())).weight, NF4Tensor) is quantize_base
    assert not isinstance(model.output.weight, NF4Tensor)


@pytest.mark.parametrize(
    "build",
    [
        lambda **kw: lora_pythia(size="70m", lora_attn_modules=[], **kw),
        lambda **kw: lora_gptj_6b(lora_attn_modules=[], **kw),
    ],
)
def test_mlps_and_head_can_have_adapters_too(build):
    with torch.device("meta"), warnings.catch_warnings():
        model = build(apply_lora_to_mlp=True, apply_lora_to_output=True)

    adapted = {key.rsplit(".", 1)[-1] for key, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    assert adapted == {"w1", "w2", "output"}
    assert model.layers[0].mlp.w1.bias is not None


def test_a_size_that_there_is_not_is_named():
    with pytest.raises(ValueError, match=r"no Pythia has the size '2b': possible are 70m, 160m, .*12b"):
        lora_pythia(size="2b", lora_attn_modules=["query_key_value"])


@pytest.mark.parametrize("build", [lora_pythia, lora_gptj_6b])
def test_the_form_with_lora_shows_its_arguments(build):
    """A config is checked against signatures before anything is built."""
    parameters = inspect.signature(build).parameters

    needed = {"lora_attn_modules", *(["size"] if build is lora_pythia else [])}
    assert {key for key, value in parameters.items() if value.default is value.empty} == needed
    assert {"lora_rank", "lora_alpha", "lora_dropout", "apply_lora_to_mlp", "quantize_base"} < parameters.keys()
    assert "linear" not in parameters
