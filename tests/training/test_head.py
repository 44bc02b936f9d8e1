"""What a model returns to the loss: every family, every head, and the step that follows from it."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import training_steps
from tiny_llama import VOCAB_SIZE
from tiny_models import FAMILY_MODELS, MODELS
from torch import nn
from torchao.dtypes.nf4tensor import to_nf4
from training_steps import step_and_gradients

from tfidf_tune.loss import CrossEntropyLoss, HeadInput, TFIDFCrossEntropyLoss, token_cross_entropy
from tfidf_tune.training import prepare_head, prepare_model, train_adapters_only
from tfidf_tune.training._model import keep_adapters_in_fp32

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps
# torchtune's final norm of Gemma 2 caps hidden states, not logits, so that nothing comes after its output projection.
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
    """Relative, in the 2-norm: two layers round some dozens of times in a row, forward and backward."""
    (result, gradients), (expected_result, expected_gradients) = got, expected
    assert gradients.keys() == expected_gradients.keys()
    assert gradients
    for name, gradient in gradients.items():
        assert expected_gradients[name].any(), name
        assert float((gradient - expected_gradients[name]).norm() / expected_gradients[name].norm()) <= tolerance, name
    torch.testing.assert_close(result.metrics, expected_result.metrics, rtol=tolerance, atol=0.0)
    assert result.num_tokens == expected_result.num_tokens


# ---- every family


@pytest.mark.parametrize("name", TINY)
def test_the_head_input_gives_the_logits_of_the_model(name):
    model = make_model(name, lora=TINY[name] is MODELS.get(name))  # Gemma 2 only as a plain model
    tokens = make_batch()["tokens"]
    logits, before = model(tokens), dict(model.state_dict(keep_vars=True))

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
        ("qwen2-tied", "torch", True),
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


def test_under_autocast_and_a_scaled_loss_the_step_is_that_of_chunks():
    """A frozen base in fp16, whose norms give float32 under autocast, and adapters in float32."""
    steps = {}
    for head in ("fused", "chunked"):
        model = make_model("llama3_2-tied", lora=True)
        for parameter in model.parameters():
            parameter.data = parameter.data.half()
        keep_adapters_in_fp32(model)
        train_adapters_only(model)
        prepare_head(model, loss := TFIDFCrossEntropyLoss(head=head))
        steps[head] = step_and_gradients(
            model, loss, make_batch(), scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12)
        )
        assert not steps[head][0].skipped
    # What differs is where the gradients of logits and hidden states are rounded to fp16, to 2^-11 each.
    assert_same_step(steps["fused"], steps["chunked"], tolerance=8 * 2**-11)


# ---- heads that cannot be computed from weight and bias


def test_a_head_with_adapters_falls_back_to_chunks_with_one_line(recipe_config, capsys):
    cfg, head = recipe_config(compile=False, enable_activation_checkpointing=False), "fused"
    steps = {}
    for each in (head, "chunked"):
        model = make_model("gptj", lora=True, apply_lora_to_output=True)
        train_adapters_only(model)
        prepare_model(model, loss := TFIDFCrossEntropyLoss(head=each, num_output_chunks=5), cfg)
        steps[each] = step_and_gradients(model, loss, make_batch())
        report = (
            "head 'fused' cannot be used because the output projection is a LoRALinear; logits are computed in 5 chunks"
        )
        assert capsys.readouterr().err == (f"{report}\n" if each == head else "")
        assert len(model(make_batch()["tokens"])) == 5
    assert any(key.startswith("output.lora_") for key in steps[head][1])
    assert_same_step(steps[head], steps["chunked"])


class ScaledLinear(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


class NoDecoder(nn.Module):
    def set_num_output_chunks(self, num_chunks):
        self.num_chunks = num_chunks


def with_head(head):
    model = make_model("llama")
    model.output = head
    return model


def with_hook():
    model = make_model("llama")
    model.output.register_forward_hook(lambda *args: None)
    return model


def quantized_head():
    head = nn.Linear(256, VOCAB_SIZE, bias=False)
    head.weight = nn.Parameter(to_nf4(head.weight.detach()), requires_grad=False)
    return head


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: with_head(ScaledLinear(64, VOCAB_SIZE, bias=False)), "the output projection is a ScaledLinear"),
        (lambda: with_head(quantized_head()), "the output projection's weight is a NF4Tensor"),
        (with_hook, "the output projection has hooks"),
        (NoDecoder, "a NoDecoder computes its logits itself"),
    ],
)
def test_a_head_that_weight_and_bias_do_not_describe_falls_back_to_chunks(build, reason):
    model = build()
    assert prepare_head(model, CrossEntropyLoss(num_output_chunks=3)) == reason
    assert getattr(model, "num_chunks", None) == 3 or model.num_output_chunks == 3
    assert "chunked_output" not in vars(model)


# ---- what else happens to a model


# torch.compile reads .grad of activations while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_and_with_activation_checkpointing_the_step_is_the_same(recipe_config, monkeypatch):
    name = "llama3_2-tied"
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    torch._dynamo.reset()
    model, loss = make_model(name), TFIDFCrossEntropyLoss()
    prepare_model(model, loss, recipe_config(compile=True, enable_activation_checkpointing=True))
    assert loss.compute_cross_entropy is not token_cross_entropy
    got = step_and_gradients(model, loss, make_batch())  # the first call, which compiles
    torch._dynamo.reset()

    result, gradients = step_with("chunked", name)
    plain_names = {key.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): key for key in got[1]}
    assert plain_names.keys() == gradients.keys()
    assert_same_step((got[0], {key: got[1][wrapped] for key, wrapped in plain_names.items()}), (result, gradients))
