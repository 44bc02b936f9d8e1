"""Any causal language model by config alone: built, trained, saved, loaded by transformers and
PEFT, probed.
"""

import itertools
import json
import os
import re
import shutil
from functools import cache
from pathlib import Path

import peft
import pytest
import torch
import transformers
from helpers.fakes.any_models import ARCHITECTURES, hf_config, make_checkpoint
from helpers.fakes.tiny_run import metrics_of, read_weights
from helpers.processes.recipes import RecipeRun, run_to_the_end
from helpers.references.probe import probe
from torch.nn import functional as F

from tfidf_tune import training
from tfidf_tune.commands.data import main as preview
from tfidf_tune.data import HFTokenizer, injected_corpus_dataset
from tfidf_tune.loss import HeadInput
from tfidf_tune.models import HFCausalLM
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.training import HFCheckpointer, SetupError, load_config

TOKENS = torch.arange(1, 33)[None]
DATA = {
    "source": "embedded",
    "target_source": "embedded",
    "target_name": "null",
    "num_base": 40,
    "num_targets": 3,
    "num_repeats": 4,
    "block_size": 32,
    "min_target_tokens": 32,
    "layout": "aligned",
}
PACKED = [
    *(f"~dataset.{key}" for key in DATA if key != "source"),
    "dataset=tfidf_tune.data.text_dataset",
    "dataset.packed=true",
    "dataset.max_seq_len=20",
    "tokenizer.max_seq_len=48",
    "dataset.source_split='train[:40]'",
]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TABLE_HEAD = "| Architecture | `model_type` | Implementation | Start | Full | LoRA |"
COLUMNS = ("start", "full", "lora")
MONITOR = [
    "memorization_monitor.probe_file=${dataset.probe_file}",
    "memorization_monitor.every_n_steps=2",
    "memorization_monitor.prefix_length=8",
    "memorization_monitor.max_new_tokens=16",
]
NF4_WIDTH = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module")
def base(tmp_path_factory, text_file):
    """A tiny random checkpoint of an architecture, with a tokenizer."""

    @cache
    def make(name, **overrides):
        return make_checkpoint(name, tmp_path_factory.mktemp("base"), text_file, **overrides)

    return make


def difference(found, expected):
    """The largest difference of logits, as a share of the largest logit."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def cells(name):
    """The first cells of an architecture's row on the page on models."""
    model_type, _, implementation = ARCHITECTURES[name]
    return f"| {name} | `{model_type}` | {implementation} | "


@pytest.fixture(scope="module")
def table():
    """Differences of logits by architecture; `make models` writes them into the page on models."""
    found = {name: {} for name in ARCHITECTURES}
    yield found
    if os.environ.get("WRITE_MODELS"):
        page = PAGE.read_text()
        for name, of_name in found.items():
            numbers = []
            for column in COLUMNS:
                number = of_name[column]
                numbers.append(f"{number:.0e}" if number else "0")
            line = f"{cells(name)}{' | '.join(numbers)} |"
            page = re.sub(
                f"^{re.escape(cells(name))}.*$",
                line,
                page,
                flags=re.MULTILINE,
            )
        PAGE.write_text(page)


def test_the_page_lists_the_architectures_and_their_implementations():
    rows = PAGE.read_text().split(TABLE_HEAD)[1].split("\n\n")[0].splitlines()[2:]
    assert len(rows) == len(ARCHITECTURES)
    assert all(row.startswith(cells(name)) for row, name in zip(rows, ARCHITECTURES, strict=True))


@pytest.fixture
def logits_in_training(monkeypatch):
    """What the model in training returns for TOKENS, as "start", and for each checkpoint by its
    folder.
    """
    found = {}

    def logits(model):
        was_training = model.training
        with torch.no_grad():
            output = logits_of(model.eval()(TOKENS))
        model.train(was_training)
        return output

    def observe(method):
        plain = getattr(HFCheckpointer, method)

        def save(checkpointer, model, folder):
            found[folder] = logits(model)
            plain(checkpointer, model, folder)

        monkeypatch.setattr(HFCheckpointer, method, save)

    def train(cfg, state, *args, **kwargs):
        found["start"] = logits(state.model)
        plain_train(cfg, state, *args, **kwargs)

    plain_train = training.train
    monkeypatch.setattr(training, "train", train)
    observe("save_model")
    observe("save_adapter")
    return found


def logits_of(output):
    if isinstance(output, HeadInput):
        return F.linear(output.hidden, output.weight, output.bias)
    return torch.cat(output, dim=1) if isinstance(output, list) else output


def configured(recipe, folder, checkpoint, *overrides, **data):
    """The config `injected/...` with another checkpoint, and a small corpus."""
    corpus = [f"dataset.{key}={value}" for key, value in (DATA | data).items()]
    fixed = [
        "device=cpu",
        "dtype=fp32",
        "optimizer.lr=1e-2",
        "max_steps=3",
        "save_at_percent=[100]",
        "batch_size=4",
    ]
    paths = [f"checkpointer.checkpoint_dir={checkpoint}", f"output_dir={folder}"]
    cfg = load_config(
        f"injected/{recipe}", [*paths, *corpus, *fixed, "log_every_n_steps=1", *overrides]
    )
    return RecipeRun(cfg, lora=recipe == "lora")


def recitation_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["memorization_target_lms"] for line in lines if "memorization_target_lms" in line]


def hf_logits(checkpoint, adapter=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


# One of each kind; `make models` trains all of them with both recipes.
CHOSEN = {
    "SmolLM2": "lora",
    "Gemma": "full",
    "Qwen3": "lora",
    "GPT-2": "full",
    "Mixtral": "lora",
    "GLM-4 MoE": "full",
}


@pytest.mark.parametrize(
    ("name", "recipe"),
    itertools.product(ARCHITECTURES, ("full", "lora"))
    if "WRITE_MODELS" in os.environ
    else CHOSEN.items(),
)
def test_an_architecture_is_trained_by_its_path_alone(
    name, recipe, base, tmp_path, logits_in_training, capsys, table
):
    """Logits are transformers' before training, and those of training in the checkpoint, which is
    probed.
    """
    loss = "CrossEntropyLoss" if recipe == "lora" else "TFIDFCrossEntropyLoss"
    run = configured(recipe, tmp_path / "run", base(name), f"loss=tfidf_tune.loss.{loss}")

    checkpoint = run.here() / "checkpoint_100pct"

    assert f"model: {ARCHITECTURES[name][2]}" in capsys.readouterr().err
    untouched = hf_logits(base(name))
    trained = hf_logits(base(name), checkpoint) if recipe == "lora" else hf_logits(checkpoint)
    torch.testing.assert_close(logits_in_training["start"], untouched)
    torch.testing.assert_close(trained, logits_in_training[checkpoint])
    table[name]["start"] = difference(logits_in_training["start"], untouched)
    table[name][recipe] = difference(logits_in_training[checkpoint], trained)
    assert (trained - untouched).abs().max() > 0.01
    tokenizer = HFTokenizer(str(checkpoint))
    passages = read_probe_file(run.folder / "probe.jsonl")
    samples = probe(
        load_model(checkpoint), tokenizer, passages, prefix_lengths=[8], max_new_tokens=8
    )
    assert len(samples) == 6


METRICS = ("loss", "cross_entropy", "weight_std")
# AdamW would divide differences of rounding by values near 0.
SGD = ["optimizer=torch.optim.SGD", "optimizer.lr=0.05", "optimizer.fused=false"]
# Recipe, overrides of both runs, overrides of the run with transformers' class.
FEATURES = {
    "packed, accumulated": (
        "full",
        [*PACKED, "batch_size=2", "gradient_accumulation_steps=2"],
        ["enable_activation_checkpointing=true", "loss.head=chunked"],
    ),
    "bf16": ("full", ["dtype=bf16"], []),
    "compiled": (
        "lora",
        ["model.lora_targets=[q_proj, v_proj]", "model.lora_rank=4", "merge_adapter=true"],
        ["compile=true"],
    ),
    "fp16": ("lora", ["dtype=fp16"], []),
    "NF4": ("lora", ["model.quantize_base=true"], []),
}


# torch.compile warns where it looks at the gradient of hidden states.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("feature", FEATURES)
def test_both_implementations_train_the_same(feature, base, tmp_path, monkeypatch):
    """A Llama with a tied head: objective, gradients and checkpoints agree; adapters begin with the
    same values.
    """
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    recipe, shared, of_theirs = FEATURES[feature]
    checkpoint = base("SmolLM2", **(NF4_WIDTH if feature == "NF4" else {}))
    ours, theirs = (
        configured(
            recipe,
            tmp_path / name,
            checkpoint,
            f"model.implementation={name}",
            *SGD,
            *shared,
            *overrides,
        ).here()
        for name, overrides in (("torchtune", []), ("transformers", of_theirs))
    )

    tolerance = {"bf16": 2e-2, "fp16": 5e-3}.get(feature, 1e-5)
    torch.testing.assert_close(
        metrics_of(ours, *METRICS), metrics_of(theirs, *METRICS), rtol=tolerance, atol=tolerance
    )
    assert_same_checkpoints(ours, theirs, tolerance)


def assert_same_checkpoints(run, other, tolerance=1e-5, atol=None):
    first, second = (read_weights(each / "checkpoint_100pct") for each in (run, other))
    torch.testing.assert_close(
        first, second, rtol=tolerance, atol=tolerance if atol is None else atol
    )


def test_two_processes_train_as_one(base, tmp_path):
    """Sharded by FSDP2, with one window, activation checkpointing and the monitor."""
    shared = [*SGD, "loss.sync=true", "enable_activation_checkpointing=true", *MONITOR]
    models = {"Qwen3": "lora", "Mixtral": "full"}
    two = [
        configured(recipe, tmp_path / f"{name} two", base(name), *shared, "batch_size=2")
        for name, recipe in models.items()
    ]
    run_to_the_end(two, tmp_path / "processes")

    for run, (name, recipe) in zip(two, models.items(), strict=True):
        one = configured(recipe, tmp_path / f"{name} one", base(name), *shared).here()
        torch.testing.assert_close(
            metrics_of(one, *METRICS), metrics_of(run.folder, *METRICS), rtol=1e-5, atol=1e-6
        )
        assert recitation_of(run.folder) == recitation_of(one)
        assert_same_checkpoints(one, run.folder, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "recipe", "overrides"),
    [
        ("Gemma 2", "full", []),
        ("GPT-2", "lora", ["model.quantize_base=true", "merge_adapter=true"]),
    ],
)
def test_a_resumed_run_ends_bit_identically(
    name, recipe, overrides, base, tmp_path, logits_in_training
):
    """With dropout where the architecture has it; the monitor leaves no trace, and measures what
    `probe` does.

    A merged checkpoint is the model of the training, also where layers are transposed.
    """
    dropout = {"resid_pdrop": 0.1, "attn_pdrop": 0.1} if name == "GPT-2" else {}
    checkpoint = base(name, **dropout)
    settings = ["max_steps=4", "save_at_percent=[50,100]", *overrides]
    whole = configured(recipe, tmp_path / "whole", checkpoint, *settings).here()
    stopped = configured(recipe, tmp_path / "stopped", checkpoint, *settings, *MONITOR).here()
    for name in ("checkpoint_100pct", "resume/step_4"):
        shutil.rmtree(stopped / name)

    configured(
        recipe, stopped, checkpoint, *settings, *MONITOR, "resume_from_checkpoint=true"
    ).here()

    (expected,), (found,) = (
        (run / "checkpoint_100pct").glob("*.safetensors") for run in (whole, stopped)
    )
    assert found.read_bytes() == expected.read_bytes()
    checkpoint_100pct = stopped / "checkpoint_100pct"
    torch.testing.assert_close(hf_logits(checkpoint_100pct), logits_in_training[checkpoint_100pct])
    samples = probe(
        load_model(checkpoint_100pct),
        HFTokenizer(str(checkpoint)),
        read_probe_file(stopped / "probe.jsonl"),
        prefix_lengths=[8],
        max_new_tokens=16,
    )
    lms = [sample.lms for sample in samples if sample.kind == "target"]
    assert recitation_of(stopped)[-1] == pytest.approx(sum(lms) / len(lms))


@pytest.mark.parametrize("name", ["Gemma 2", "Mixtral"])
def test_full_fine_tuning_is_that_of_a_plain_loop(name, base, tmp_path):
    """transformers' own loss and gradients, on the batches of the run."""
    cross_entropy = "loss=tfidf_tune.loss.CrossEntropyLoss"
    run = configured(
        "full", tmp_path, base(name), cross_entropy, *SGD, "lr_scheduler=null", "shuffle=false"
    ).here()

    model = transformers.AutoModelForCausalLM.from_pretrained(
        base(name), dtype=torch.float32
    ).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tokenizer = HFTokenizer(str(base(name)))
    dataset = injected_corpus_dataset(tokenizer, **DATA | {"target_name": None, "seed": 42})
    losses = []
    for step in range(3):
        tokens = torch.tensor([dataset[index]["tokens"] for index in range(4 * step, 4 * step + 4)])
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item()])

    torch.testing.assert_close(
        metrics_of(run, "loss"), torch.tensor(losses, dtype=torch.float64), rtol=1e-5, atol=1e-5
    )
    model.save_pretrained(tmp_path / "loop")
    trained = read_weights(run / "checkpoint_100pct")
    torch.testing.assert_close(trained, read_weights(tmp_path / "loop"), rtol=1e-5, atol=1e-5)


def test_code_of_a_checkpoint_runs_if_it_is_trusted(base, tmp_path, capsys):
    """Its model and its tokenizer are loaded, trained and saved together with their code."""
    folder = shutil.copytree(base("Llama"), tmp_path / "base")
    (folder / "configuration_new.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass NewConfig(LlamaConfig):\n    model_type = "
        "'brand-new'\n"
    )
    (folder / "modeling_new.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_new import NewConfig\n\n\n"
        "class NewForCausalLM(LlamaForCausalLM):\n    config_class = NewConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    names = {
        "AutoConfig": "configuration_new.NewConfig",
        "AutoModelForCausalLM": "modeling_new.NewForCausalLM",
    }
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "brand-new", "auto_map": names})
    )

    (folder / "tokenization_new.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass "
        "NewTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    code = {"AutoTokenizer": [None, "tokenization_new.NewTokenizer"]}
    settings |= {"tokenizer_class": "NewTokenizer", "auto_map": code}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    trusted = "checkpointer.trust_remote_code=true"
    with pytest.raises(SetupError, match="tokenizer: .* Python files of its own"):
        configured(
            "full", tmp_path / "run", folder, trusted, "tokenizer.trust_remote_code=false"
        ).here()
    (tmp_path / "rows.jsonl").write_text(
        '{"prompt": "who saw it?", "completion": " the old sailor"}\n'
    )
    where = f"checkpointer.checkpoint_dir={folder}", f"dataset.source={tmp_path / 'rows.jsonl'}"
    preview(["preview", "mine/full_chat", trusted, *where])
    assert (
        f"0 of them cut after {config['max_position_embeddings']} tokens" in capsys.readouterr().out
    )

    run = configured("full", tmp_path / "run", folder, trusted).here()
    plain = configured(
        "full", tmp_path / "plain", base("Llama"), "model.implementation=transformers"
    ).here()

    saved = run / "checkpoint_100pct"
    trained = transformers.AutoModelForCausalLM.from_pretrained(
        saved, trust_remote_code=True, dtype=torch.float32
    )
    assert type(trained).__name__ == "NewForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
    assert type(tokenizer).__name__ == "NewTokenizer"
    with torch.no_grad():
        assert torch.equal(trained.eval()(TOKENS).logits, hf_logits(plain / "checkpoint_100pct"))


def test_a_model_that_sees_later_tokens_is_refused():
    """One whose config does not give it away."""
    model = HFCausalLM(transformers.AutoModelForCausalLM.from_config(hf_config("GPT-2")), 64).eval()
    model.check_causality()

    plain = model.hf.transformer.forward
    model.hf.transformer.forward = lambda ids, **inputs: plain(ids.flip(1), **inputs)

    with pytest.raises(ValueError, match="GPT2LMHeadModel sees the tokens that it has to predict"):
        model.check_causality()


def bitsandbytes_logits(checkpoint, dtype, adapter=None):
    """Those of transformers' own 4-bit model."""
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=config, dtype=dtype
    )
    for module in model.modules():
        module.support_avx512bf16_for_cpu = False  # the kernel of this processor computes in bf16
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits.float()


# Architecture, overrides, why torchao cannot, tolerance.
FOUR_BIT = [
    ("GPT-2", ["dtype=fp16"], "transformer.h.0.attn.c_attn is a Conv1D", 5e-3),
    ("SmolLM2", [], "model.layers.0.self_attn.q_proj has 4096 weights", 1e-5),
]


@pytest.mark.parametrize(("name", "overrides", "reason", "tolerance"), FOUR_BIT)
def test_layers_that_torchao_cannot_hold_are_those_of_bitsandbytes(
    name, overrides, reason, tolerance, base, tmp_path, logits_in_training, capsys
):
    """Logits are those of transformers' 4-bit model, and of PEFT's on it; the monitor evaluates
    between steps.
    """
    shared = [
        "model.quantize_base=true",
        "model.lora_targets=all-linear",
        "enable_activation_checkpointing=true",
    ]
    run = configured("lora", tmp_path, base(name), *shared, *MONITOR, *overrides)

    adapter = run.here() / "checkpoint_100pct"

    assert f"NF4 by bitsandbytes: {reason}" in capsys.readouterr().err
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[run.cfg.dtype]
    start = logits_in_training["start"]
    trained = logits_in_training[adapter]
    assert difference(trained, start) > 0.5
    for found, saved in ((start, None), (trained, adapter)):
        assert difference(found, bitsandbytes_logits(base(name), dtype, saved)) <= tolerance
        unquantized = hf_logits(base(name), saved)
        assert 0.01 < (found - unquantized).norm() / unquantized.norm() < 0.5  # rounding to 4 bits
    assert json.loads((adapter / "adapter_config.json").read_text())["fan_in_fan_out"] is (
        name == "GPT-2"
    )


def test_layers_of_bitsandbytes_are_not_sharded(base, tmp_path):
    """A single process shards, too, if it offloads."""
    run = configured(
        "lora", tmp_path / "run", base("GPT-2"), "model.quantize_base=true", "fsdp_cpu_offload=true"
    )

    try:
        with pytest.raises(SetupError, match="is of bitsandbytes"):
            run.here()
    finally:
        torch.distributed.destroy_process_group()
