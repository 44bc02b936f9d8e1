"""Any causal language model by config alone: built, trained, saved, loaded by transformers and PEFT, probed."""

import json
from functools import cache

import peft
import pytest
import torch
import transformers
from any_models import ARCHITECTURES, make_checkpoint
from recipe_processes import RecipeRun
from safetensors.torch import load_file
from torch.nn import functional as F

from tfidf_tune import training
from tfidf_tune.analysis import load_model, probe
from tfidf_tune.data import HFTokenizer, read_probe_file
from tfidf_tune.loss import HeadInput
from tfidf_tune.training import HFCheckpointer, load_config

TOKENS = torch.arange(1, 33)[None]
DATA = {
    "source": "embedded", "target_source": "embedded", "target_name": "null", "num_base": 40, "num_targets": 3,
    "num_repeats": 4, "block_size": 32, "min_target_tokens": 32,
}  # fmt: skip
PACKED = [
    *(f"~dataset.{key}" for key in (*DATA, "layout", "seed", "probe_file") if key != "source"),
    "dataset=tfidf_tune.data.text_dataset", "dataset.packed=true", "dataset.max_seq_len=20", "tokenizer.max_seq_len=48",
]  # fmt: skip
NF4_WIDTH = {"hidden_size": 256, "intermediate_size": 512}


@pytest.fixture(scope="module")
def base(tmp_path_factory, text_file):
    """A tiny random checkpoint of an architecture, with a tokenizer."""

    @cache
    def make(name, **overrides):
        return make_checkpoint(name, tmp_path_factory.mktemp("base"), text_file, **overrides)

    return make


@pytest.fixture
def logits_in_training(monkeypatch):
    """What the model in training returns for TOKENS, as "start", and for each checkpoint by its folder."""
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
    """The config `any/...` with another checkpoint, and a small corpus."""
    corpus = [f"dataset.{key}={value}" for key, value in (DATA | data).items()]
    fixed = ["device=cpu", "dtype=fp32", "optimizer.lr=1e-2", "max_steps=3", "save_at_percent=[100]", "batch_size=4"]
    paths = [f"checkpointer.checkpoint_dir={checkpoint}", f"output_dir={folder}"]
    cfg = load_config(f"any/{recipe}_memorization", [*paths, *corpus, *fixed, *overrides])
    return RecipeRun(cfg, lora=recipe == "lora")


def metrics_of(folder, *names):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return torch.tensor([[line[name] for name in names] for line in lines if "loss" in line], dtype=torch.float64)


def hf_logits(checkpoint, adapter=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model = model if adapter is None else peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("recipe", ["full", "lora"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_trained_by_its_path_alone(name, recipe, base, tmp_path, logits_in_training, capsys):
    """Logits are transformers' before training, and those of training in the checkpoint, which is probed."""
    loss = "CrossEntropyLoss" if recipe == "lora" else "TFIDFCrossEntropyLoss"
    run = configured(recipe, tmp_path / "run", base(name), f"loss=tfidf_tune.loss.{loss}")

    checkpoint = run.here() / "checkpoint_100pct"

    assert f"model: {ARCHITECTURES[name][2]}" in capsys.readouterr().err
    untouched = hf_logits(base(name))
    trained = hf_logits(base(name), checkpoint) if recipe == "lora" else hf_logits(checkpoint)
    torch.testing.assert_close(logits_in_training["start"], untouched)
    torch.testing.assert_close(trained, logits_in_training[checkpoint])
    assert (trained - untouched).abs().max() > 0.01
    tokenizer = HFTokenizer(str(checkpoint))
    passages = read_probe_file(run.folder / "probe.jsonl")
    samples = probe(load_model(checkpoint), tokenizer, passages, prefix_lengths=[8], max_new_tokens=8)
    assert len(samples) == 6


METRICS = ("loss", "cross_entropy", "weight_std")
SGD = ["optimizer=torch.optim.SGD", "optimizer.lr=0.05"]  # AdamW would divide differences of rounding by values near 0
# Recipe, overrides of both runs, overrides of the one with transformers' class.
FEATURES = {
    "full": ("full", [], []),
    "chunked head": ("full", [], ["loss.head=chunked"]),
    "activation checkpointing": ("full", [], ["enable_activation_checkpointing=true"]),
    "accumulation": ("full", ["batch_size=2", "gradient_accumulation_steps=2"], []),
    "packed": ("full", PACKED, []),
    "bf16": ("full", ["dtype=bf16"], []),
    "lora": ("lora", [], []),
    "compiled": ("lora", [], ["compile=true"]),
    "two layers": ("lora", ["model.lora_targets=[q_proj, v_proj]", "model.lora_rank=4"], []),
    "merged": ("lora", ["merge_adapter=true"], []),
    "fp16": ("lora", ["dtype=fp16"], []),
    "NF4": ("lora", ["model.quantize_base=true"], []),
}


@pytest.fixture(scope="module")
def torchtunes_run(base, tmp_path_factory):
    """A run of a Llama with a tied head by torchtune's modules."""

    @cache
    def run(recipe, overrides, width):
        folder = tmp_path_factory.mktemp("torchtune") / "run"
        checkpoint = base("SmolLM2", **dict(width))
        return configured(recipe, folder, checkpoint, "model.implementation=torchtune", *SGD, *overrides).here()

    return run


# torch.compile warns where it looks at the gradient of hidden states.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("feature", FEATURES)
def test_both_implementations_train_the_same(feature, base, torchtunes_run, tmp_path, monkeypatch):
    """Objective, gradients and checkpoints agree; adapters begin with the same values."""
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    recipe, overrides, of_theirs = FEATURES[feature]
    width = NF4_WIDTH if feature == "NF4" else {}
    theirs = configured(
        recipe, tmp_path, base("SmolLM2", **width), "model.implementation=transformers", *SGD, *overrides, *of_theirs
    ).here()
    ours = torchtunes_run(recipe, tuple(overrides), tuple(width.items()))

    tolerance = {"bf16": 2e-2, "fp16": 5e-3}.get(feature, 1e-5)
    torch.testing.assert_close(metrics_of(ours, *METRICS), metrics_of(theirs, *METRICS), rtol=tolerance, atol=tolerance)
    first, second = (load_file(next((run / "checkpoint_100pct").glob("*.safetensors"))) for run in (ours, theirs))
    assert first.keys() == second.keys()
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)
