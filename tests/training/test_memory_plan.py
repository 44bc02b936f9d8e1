"""The memory plan against the record of torch's allocator in a real training step."""

import copy
from functools import partial

import psutil
import pytest
import torch
from any_models import hf_config
from tiny_llama import TINY_LLAMA
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torchao.dtypes.nf4tensor import NF4Tensor
from torchao.optim import AdamW8bit
from torchtune import modules
from torchtune.models.llama2 import llama2, lora_llama2
from torchtune.training import set_activation_checkpointing, set_default_dtype

from tfidf_tune.loss import CrossEntropyLoss, TFIDFCrossEntropyLoss
from tfidf_tune.models import lora_auto
from tfidf_tune.models.gpt_neox import lora_gpt_neox
from tfidf_tune.training import SetupError, prepare_head, train_adapters_only, train_step
from tfidf_tune.training._memory_plan import MemoryPlan, plan_memory
from tfidf_tune.training._resources import _control_group_memory, available_memory, check_fits

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# Large enough that tensors and not their number decide; NF4 needs weights of a multiple of 64 x 256 elements.
SIZES = {
    **TINY_LLAMA,
    "vocab_size": 2048,
    "embed_dim": 256,
    "intermediate_dim": 512,
    "num_layers": 3,
    "max_seq_len": 128,
}
NUM_SEQUENCES, LENGTH = 2, 128
LORA = {"lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"], "lora_rank": 8, "lora_alpha": 16}
KINDS = {
    "full": partial(llama2, **SIZES),
    "lora": partial(lora_llama2, **SIZES, **LORA),
    "nf4": partial(lora_llama2, **SIZES, **LORA, quantize_base=True),
    "gpt_neox": partial(
        lora_gpt_neox,
        **{key: value for key, value in SIZES.items() if key != "num_kv_heads"},
        **{**LORA, "lora_attn_modules": ["query_key_value", "output_proj"]},
        quantize_base=True,
    ),
    "bitsandbytes": partial(
        lora_auto,
        hf_config("GPT-2", n_embd=SIZES["embed_dim"], n_layer=SIZES["num_layers"], n_positions=LENGTH, vocab_size=2048),
        lora_targets="all-linear",
        quantize_base=True,
    ),
}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def build(kind="full", dtype=torch.float32, device="meta", **overrides):
    torch.manual_seed(0)
    with set_default_dtype(dtype), torch.device(device):
        model = KINDS[kind](**overrides)
    if kind != "full":
        train_adapters_only(model)
    if dtype is torch.float16:  # as in the recipe: fp16 is for frozen weights
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model


def plan(model, build_optimizer=ADAMW, *, batch_size=NUM_SEQUENCES, seq_len=LENGTH, device=CPU, head="fused", **kwargs):
    return plan_memory(
        model,
        CrossEntropyLoss(head=head),
        build_optimizer,
        batch_size=batch_size,
        seq_len=seq_len,
        device=device,
        **kwargs,
    )


def make_batch():
    tokens = torch.randint(SIZES["vocab_size"], (NUM_SEQUENCES, LENGTH))
    return {"tokens": tokens, "labels": tokens.clone()}


def allocated(run):
    """Bytes still allocated at the end, and most at one time, by the allocator's own record; the result lives on."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = run()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return now, most, result


def stored_bytes(tensor):
    if hasattr(tensor, "quant_state"):  # the plan leaves out a codebook of 1 KiB
        parts = (tensor.data, tensor.quant_state.absmax, tensor.quant_state.state2.absmax)
        return sum(part.untyped_storage().nbytes() for part in parts)
    data = tensor.data
    if isinstance(data, NF4Tensor):
        names = ("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4")
        return sum(getattr(data, name).untyped_storage().nbytes() for name in names)
    return data.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("kind", "dtype", "is_checkpointed", "num_batches", "head"),
    [
        ("full", FP32, False, 2, "chunked"),
        ("full", BF16, True, 1, "fused"),
        ("lora", FP32, True, 2, "chunked"),
        ("lora", FP16, False, 1, "fused"),
        ("nf4", BF16, False, 2, "chunked"),
        ("gpt_neox", BF16, False, 1, "fused"),
    ],
    ids=str,
)
def test_the_plan_agrees_with_the_allocations_of_a_real_step(
    kind, dtype, is_checkpointed, num_batches, head, monkeypatch
):
    autocast_dtype = torch.float16 if dtype is torch.float16 else None
    found = plan(
        build(kind, dtype),
        enable_activation_checkpointing=is_checkpointed,
        accumulate_gradients=num_batches > 1,
        autocast_dtype=autocast_dtype,
        head=head,
    )
    assert not found.not_estimated
    assert found.total == found.weights + found.optimizer + found.step

    model, loss = build(kind, dtype, "cpu"), CrossEntropyLoss(head=head)
    trained = [parameter for name, parameter in model.named_parameters() if kind == "full" or "lora_" in name]
    frozen = [parameter for name, parameter in model.named_parameters() if kind != "full" and "lora_" not in name]
    assert found.num_trained == sum(parameter.numel() for parameter in trained)
    assert found.num_frozen == sum(parameter.numel() for parameter in frozen)
    assert found.weights == sum(stored_bytes(tensor) for tensor in (*trained, *frozen, *model.buffers()))

    assert prepare_head(model, loss) is None
    if is_checkpointed:
        set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    tokens = make_batch()["tokens"]

    def forward():
        with torch.autocast("cpu", torch.float16, enabled=autocast_dtype is not None):
            return model(tokens)

    activations, _, logits = allocated(forward)
    loss_bytes, _, _ = allocated(lambda: loss.terms(logits, tokens))
    logits = None
    # Checkpointed layers also keep the state of the random number generator.
    activations -= is_checkpointed * SIZES["num_layers"] * torch.get_rng_state().nbytes
    if kind == "gpt_neox":  # means and deviations of LayerNorm are bf16 on the CPU, fp32 elsewhere
        activations += (2 * SIZES["num_layers"] - 1) * NUM_SEQUENCES * LENGTH * 2 * (4 - 2)
    assert found.activations == pytest.approx(activations, rel=0.001)
    assert found.loss == pytest.approx(loss_bytes, rel=0.01)

    optimizer, gradients = ADAMW(trained), []
    optimizer.register_step_pre_hook(lambda *_: gradients.append(sum(p.grad.nbytes for p in trained)))
    step = partial(
        train_step,
        model,
        loss,
        optimizer,
        [make_batch() for _ in range(num_batches)],
        scaler=torch.amp.GradScaler("cpu", enabled=autocast_dtype is not None),
        device=CPU,
        clip_grad_norm=1.0,
    )
    step()  # from now on the optimizer has its state
    assert [found.gradients] == gradients
    assert found.optimizer == sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert found.saved_to_resume == sum(parameter.nbytes for parameter in trained) + found.optimizer
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # its scratch space depends on the processor
    _, most, _ = allocated(step)
    # Left out is the scratch space of CPU kernels; too much are 8 bytes of the 4 x 2048 of a token's loss.
    assert 0.96 * most < found.step <= 1.001 * most


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_weights_of_bitsandbytes_count_as_they_are_stored(dtype):
    found, plain = plan(build("bitsandbytes", dtype)), plan(build("bitsandbytes", dtype, quantize_base=False))
    real = build("bitsandbytes", dtype, "cpu")

    assert sum(hasattr(parameter, "quant_state") for parameter in real.parameters()) == 4 * SIZES["num_layers"]
    assert found.weights == sum(stored_bytes(tensor) for tensor in (*real.parameters(), *real.buffers()))
    names = ("num_trained", "num_frozen", "optimizer", "gradients", "activations", "loss", "not_estimated")
    assert [getattr(found, name) for name in names] == [getattr(plain, name) for name in names]


def test_cuda_keeps_less_where_its_kernels_do():
    """Fused norms keep no normalized values, but only for input and scale of one dtype; dropout keeps one byte."""
    tokens, width, num_layers = NUM_SEQUENCES * LENGTH, SIZES["embed_dim"], SIZES["num_layers"]
    saved = {}
    for dtype in (torch.float32, torch.bfloat16):
        on_cpu, on_cuda = (plan(build(dtype=dtype), device=device).activations for device in (CPU, CUDA))
        saved[dtype] = on_cpu - on_cuda
    assert saved == {
        torch.float32: (2 * num_layers + 1) * tokens * (width + 1) * 4,
        torch.bfloat16: 0,
    }

    on_cpu, on_cuda = (plan(build("lora", torch.bfloat16, lora_dropout=0.1), device=device) for device in (CPU, CUDA))
    num_dropouts = 4 * num_layers - 3  # queries, keys and values of the first layer come from what is frozen
    assert on_cpu.activations - on_cuda.activations == num_dropouts * tokens * width * (2 - 1)


def test_a_model_in_eval_mode_is_planned_for_training():
    models = build("lora", lora_dropout=0.1), build("lora", lora_dropout=0.1).eval(), build("lora")
    training, evaluating, without_dropout = map(plan, models)

    assert evaluating == training
    assert evaluating.activations > without_dropout.activations


def test_the_optimizer_state_is_measured():
    for optimizer, bytes_per_parameter in (
        (partial(torch.optim.AdamW, lr=1.0, amsgrad=True), 12), (partial(torch.optim.Adafactor, lr=1.0), 0)
    ):  # fmt: skip
        found = plan(build(), optimizer)
        real = build(device="cpu")
        state = optimizer(real.parameters())
        for parameter in real.parameters():
            parameter.grad = torch.ones_like(parameter)
        state.step()
        values = [value for entry in state.state.values() for value in entry.values() if value is not None]

        assert found.optimizer == pytest.approx(bytes_per_parameter * found.num_trained, abs=0.01 * found.gradients)
        assert found.optimizer == pytest.approx(sum(value.nbytes for value in values), abs=0.02 * found.gradients)


def test_parameters_of_several_dtypes_have_their_own_state():
    model = build("lora", torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "lora_a" in name:
            parameter.data = parameter.data.float()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    found = plan(model, autocast_dtype=torch.bfloat16)

    assert {parameter.dtype for parameter in trained} == {torch.float32, torch.bfloat16}
    assert found.gradients == sum(parameter.nbytes for parameter in trained)
    assert found.optimizer == 2 * found.gradients + 4 * len(trained)  # two moments, and a step in fp32
    assert not found.not_estimated


def test_planning_changes_neither_model_nor_loss_nor_random_state():
    model, loss = build("nf4").eval(), TFIDFCrossEntropyLoss()
    before = {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()}
    modules_before, loss_before, random_before = repr(model), copy.deepcopy(loss.state_dict()), torch.get_rng_state()
    settings = {"accumulate_gradients": True, "enable_activation_checkpointing": True}

    found = plan_memory(model, loss, ADAMW, batch_size=2, seq_len=16, device=CPU, **settings)

    assert not found.not_estimated
    assert {name: (id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()} == before
    assert all(parameter.grad is None and parameter.is_meta for parameter in model.parameters())
    assert (repr(model), model.training, model.num_output_chunks) == (modules_before, False, 0)
    torch.testing.assert_close(loss.state_dict(), loss_before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_before)


class ReadsValues(nn.Module):
    """A model that the meta device cannot run."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def set_num_output_chunks(self, num_output_chunks):
        self.inner.set_num_output_chunks(num_output_chunks)

    def forward(self, tokens):
        return self.inner(tokens) if tokens.sum().item() else None


def test_a_model_that_does_not_run_on_meta_is_planned_without_activations():
    expected = plan(build())

    found = plan(ReadsValues(build()))

    assert (found.activations, found.loss) == (None, None)
    assert found.step == found.gradients == expected.gradients
    assert found.total == expected.weights + expected.optimizer + expected.gradients
    assert "not estimated: activations and loss (RuntimeError: Tensor.item() cannot be called on meta" in found.table(0)
    check_fits(found, found.total)


def test_optimizer_state_of_several_tensors_is_named_and_left_out_if_there_is_no_step(monkeypatch):
    class Broken(torch.optim.SGD):
        def step(self):
            raise ValueError("no such kernel\nat all")

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    plain, quantized, broken = (
        plan(build(), each) for each in (ADAMW, partial(AdamW8bit, lr=1e-3), partial(Broken, lr=1.0))
    )

    assert plain.quantized_state is None
    assert quantized.quantized_state == "OptimState8bit"
    assert broken.optimizer is broken.quantized_state is None
    assert (broken.total, broken.activations) == (broken.weights + broken.step, plain.activations)
    assert "not estimated: optimizer state (ValueError: no such kernel)" in broken.table(0).splitlines()
    assert "optimizer state  " not in broken.table(0)


def test_the_state_of_the_objective_counts_in_memory_and_in_resume_checkpoints():
    num_shards = 2
    without = plan(build(), num_shards=num_shards)
    found = plan(build(), num_shards=num_shards, objective_state=3 * 2**20)

    assert found.total == without.total + 3 * 2**20
    assert found.saved_to_resume == without.saved_to_resume + num_shards * 3 * 2**20
    assert "objective state      3.00 MiB" in found.table(0).splitlines()
    assert "objective state" not in without.table(0)


PLAN = MemoryPlan(
    num_trained=1_500_000_000,
    num_frozen=1000,
    weights=3 * 2**30,
    optimizer=12 * 2**30,
    gradients=3 * 2**30,
    activations=5 * 2**30 // 2,
    loss=300 * 2**20,
    step=4 * 2**30,
    saved_to_resume=15 * 2**30,
)


def test_the_table():
    assert PLAN.table(available=24 * 2**30).splitlines() == [
        "parameters       1,500,000,000 trained, 1,000 frozen",
        "weights              3.00 GiB",
        "optimizer state     12.00 GiB",
        "gradients            3.00 GiB",
        "activations          2.50 GiB",
        "loss               300.00 MiB",
        "needed at least     19.00 GiB  at the peak: activations are freed as gradients are computed",
        "available           24.00 GiB",
    ]


def test_a_run_that_cannot_fit_is_refused_with_parts_and_remedies():
    check_fits(PLAN, 19 * 2**30)

    with pytest.raises(SetupError) as refusal:
        check_fits(PLAN, 19 * 2**30 - 1)

    message = str(refusal.value)
    assert message.startswith(
        "the run needs 19.00 GiB of memory or more, 19.00 GiB are available; the largest part is "
    )
    assert f"optimizer state:\n{PLAN.table(19 * 2**30 - 1)}\n" in message
    remedies = (
        "batch_size",
        "enable_activation_checkpointing=True",
        "LoRA",
        "quantize_base",
        "refuse_if_too_large=False",
    )
    assert all(remedy in message for remedy in remedies)


def test_the_memory_of_a_device_is_its_free_memory(monkeypatch):
    assert 0 < available_memory(CPU) <= psutil.virtual_memory().total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: {CUDA: (7, 80)}[device])

    assert available_memory(CUDA) == 7


def test_the_tightest_control_group_decides(tmp_path, monkeypatch):
    def limit(folder, most, used):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 30\nactive_file 20\nshmem 7\n")

    (membership := tmp_path / "cgroup").write_text("4:memory:/old\n0::/jobs/mine\n")
    root = tmp_path / "fs"
    limit(root / "jobs" / "mine", "max", 600)
    limit(root / "jobs", 1000, 600)
    limit(root, 5000, 600)

    assert sorted(_control_group_memory(root, membership)) == [1000 - 600 + 50, 5000 - 600 + 50]
    assert list(_control_group_memory(root, tmp_path / "absent")) == []
    monkeypatch.setattr("tfidf_tune.training._resources._control_group_memory", lambda: [450, 4450])
    assert available_memory(CPU) == 450
