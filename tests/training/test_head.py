"""What a model returns to the loss: every family, every head, and the step that follows from it."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers.fakes import training_steps
from helpers.fakes.tiny_llama import VOCAB_SIZE
from helpers.fakes.tiny_models import FAMILY_MODELS, MODELS
from helpers.fakes.training_steps import step_and_gradients
from torch import nn

from tfidf_tune.loss import CrossEntropyLoss, HeadInput, TFIDFCrossEntropyLoss
from tfidf_tune.training import prepare_head, prepare_model, train_adapters_only

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps
# torchtune's final norm of Gemma 2 caps hidden states, not logits, so that nothing comes after its
# output projection.
GEMMA2 = dataclasses.replace(MODELS["gemma-tied"], builder="torchtune.models.gemma2.gemma2")
TINY = {**{name: MODELS[name] for name in FAMILY_MODELS}, "gemma2-tied": GEMMA2}


def make_model(name, **kwargs):
    """Random weights of which none is neutral: biases, norms and adapters too."""
    torch.manual_seed(0)
    model = TINY[name].build(**kwargs)
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.0 if key.endswith("bias") or "gemma" in name else 1.0, 0.2)
        elif "lora_" in key or "tok_embeddings" in key:
            nn.init.normal_(parameter, 0.0, 0.2)
    return model


# By default 360 positions, two chunks of the fused head.
make_batch = partial(training_steps.make_batch, 9, 40, ignored=3)


def step_with(head, name, *batches, loss_class=TFIDFCrossEntropyLoss, model=None):
    model = model or make_model(name)
    loss = loss_class(head=head)
    assert prepare_head(model, loss) is None
    return step_and_gradients(model, loss, *(batches or [make_batch()]))


def assert_same_step(got, expected, tolerance=64 * EPS):
    """Relative, in the 2-norm: two layers round some dozens of times in a row, forward and
    backward.
    """
    result, gradients = got
    expected_result, expected_gradients = expected
    assert gradients.keys() == expected_gradients.keys()
    assert gradients
    for name, gradient in gradients.items():
        assert expected_gradients[name].any(), name
        assert (
            float((gradient - expected_gradients[name]).norm() / expected_gradients[name].norm())
            <= tolerance
        ), name
    torch.testing.assert_close(result.metrics, expected_result.metrics, rtol=tolerance, atol=0.0)
    assert result.num_tokens == expected_result.num_tokens


# ---- every family


@pytest.mark.parametrize("name", TINY)
def test_the_head_input_gives_the_logits_of_the_model(name):
    model = make_model(name, lora=TINY[name] is MODELS.get(name))  # Gemma 2 only as a plain model
    tokens = make_batch()["tokens"]
    logits = model(tokens)
    before = dict(model.state_dict(keep_vars=True))

    assert prepare_head(model, CrossEntropyLoss()) is None
    head = model(tokens)

    assert isinstance(head, HeadInput)
    assert torch.equal(F.linear(*head), logits)
    assert (head.bias is not None) == (name == "gptj")
    assert (head.weight is model.tok_embeddings.weight) == TINY[name].tied
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(before)
    assert all(after[key] is value for key, value in before.items())


@pytest.mark.parametrize(
    ("name", "head", "lora"),
    [
        ("gemma2-tied", "fused", False),
        ("gptj", "fused", False),
        ("llama", "fused", True),
        ("qwen2-tied", "fused", True),
    ],
)
def test_the_step_is_that_of_chunks_of_logits(name, head, lora):
    """Under LoRA a frozen head gets no gradient."""
    steps = {}
    for each in (head, "chunked"):
        model = make_model(name, lora=lora)
        if lora:
            train_adapters_only(model)
        steps[each] = step_with(each, name, model=model)
        assert all("lora_" in key for key in steps[each][1]) == lora
    assert_same_step(steps[head], steps["chunked"])


def test_accumulated_gradients_are_those_of_one_large_batch():
    """Also when the mini-batches have different numbers of valid tokens."""
    parts = [
        training_steps.make_batch(number, 40, seed=seed, ignored=ignored)
        for number, seed, ignored in ((2, 0, 3), (7, 1, 25), (3, 2, 40))
    ]
    whole = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    assert_same_step(
        step_with("fused", "gptj", *parts, loss_class=CrossEntropyLoss),
        step_with("chunked", "gptj", whole, loss_class=CrossEntropyLoss),
    )


# ---- heads that cannot be computed from weight and bias


def test_a_head_with_adapters_falls_back_to_chunks_with_one_line(recipe_config, capsys):
    cfg = recipe_config(compile=False, enable_activation_checkpointing=False)
    head = "fused"
    steps = {}
    for each in (head, "chunked"):
        model = make_model("gptj", lora=True, apply_lora_to_output=True)
        train_adapters_only(model)
        prepare_model(model, loss := TFIDFCrossEntropyLoss(head=each, num_output_chunks=5), cfg)
        steps[each] = step_and_gradients(model, loss, make_batch())
        printed = capsys.readouterr().err
        assert (
            printed.count("\n")
            == printed.count("the output projection is a LoRALinear")
            == (each == head)
        )
        assert len(model(make_batch()["tokens"])) == 5
    assert any(key.startswith("output.lora_") for key in steps[head][1])
    assert_same_step(steps[head], steps["chunked"])


class ScaledLinear(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


def with_head(head):
    model = make_model("llama")
    model.output = head
    return model


def with_hook():
    model = make_model("llama")
    model.output.register_forward_hook(lambda *args: None)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (
            lambda: with_head(ScaledLinear(64, VOCAB_SIZE, bias=False)),
            "the output projection is a ScaledLinear",
        ),
        (with_hook, "the output projection has hooks"),
    ],
)
def test_a_head_that_weight_and_bias_do_not_describe_falls_back_to_chunks(build, reason):
    model = build()
    assert prepare_head(model, CrossEntropyLoss(num_output_chunks=3)) == reason
    assert model.num_output_chunks == 3
