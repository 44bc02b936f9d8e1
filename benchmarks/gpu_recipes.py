"""Rung 0 of ``gpu.py``: recipes, resuming, monitor and probe on the device against the CPU, with tiny models."""

import importlib.util
import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import tfidf_tune  # noqa: F401  # isort: skip  (first, because it keeps torchao's import message quiet)

import torch
from gpu_steps import Check, NotPossible, Outcome, Setting  # type: ignore[import-not-found]
from omegaconf import DictConfig, OmegaConf

from tfidf_tune._files import atomic_folder
from tfidf_tune.analysis import load_model, probe
from tfidf_tune.data import hf_tokenizer, read_probe_file
from tfidf_tune.experiment import random_model
from tfidf_tune.training import load_config

_STEPS = 12
# Relative, for losses and weights: some eps of each product, amplified by AdamW steps, as the tests' golden
# losses have it; in 16 bits four roundings, since the mean over tokens cancels most.
_LIMITS = {"fp32": 1e-4, "bf16": 4 * 2**-8, "fp16": 4 * 2**-11}
_COMPARED = ("loss", "cross_entropy", "weight_mean", "weight_std")
_RUNS: dict[str, dict[str, Any]] = {
    "full fp32": {},
    "full bf16": {"dtype": "bf16"},
    "LoRA fp32": {"lora": True},
    "LoRA bf16": {"lora": True, "dtype": "bf16"},
    "LoRA fp16": {"lora": True, "dtype": "fp16"},
    "LoRA NF4": {"lora": True, "model.quantize_base": True},
    "packed rows": {
        "dataset": {"_component_": "tfidf_tune.data.text_dataset", "source": "embedded", "packed": True},
        "batch_size": 2,
    },
    "compile": {"compile": True},
    "activation checkpointing": {"enable_activation_checkpointing": True},
}


def start(setting: Setting) -> Path:
    """A model of random weights with its tokenizer; made once."""
    folder: Path = setting.work / "start"
    if not folder.is_dir():
        with atomic_folder(folder) as temporary:
            random_model(temporary, OmegaConf.to_container(_base(setting).model), seed=0)  # type: ignore[arg-type]
    return folder


def _base(setting: Setting, *, lora: bool = False) -> DictConfig:
    method = "lora" if lora else "full"
    sizes = {"num_layers": 1 if setting.tiny else 4, "intermediate_dim": 384}  # a multiple of what NF4 needs
    return load_config(
        f"demo/llama_650K_{method}_memorization", [f"model.{name}={size}" for name, size in sizes.items()]
    )


def make_config(setting: Setting, name: str, device: str, *, lora: bool = False, **overrides: Any) -> DictConfig:
    """The config of a short run on the embedded text."""
    cfg = _base(setting, lora=lora)
    settings = {
        "output_dir": str(setting.work / f"{name} on {device}".replace(" ", "_")),
        "checkpointer.checkpoint_dir": str(start(setting)),
        "dataset.num_base": 80,
        "dataset.num_targets": 4,
        "dataset.num_repeats": 5,
        "lr_scheduler.num_warmup_steps": 2,
        "max_steps": 4 if setting.tiny else _STEPS,
        "save_at_percent": [100],
        "log_every_n_steps": 1,
        "device": device,
    }
    for key, value in (settings | overrides).items():
        OmegaConf.update(cfg, key, value, merge=False)
    return cfg


def train(cfg: DictConfig) -> list[dict[str, Any]]:
    """Run the recipe in this process, anew unless it resumes; return its metrics, a line for each step."""
    folder = Path(cfg.output_dir)
    if not cfg.get("resume_from_checkpoint"):
        shutil.rmtree(folder, ignore_errors=True)
    recipe = "lora_finetune" if "lora_" in cfg.model._component_ else "full_finetune"
    import_module(f"tfidf_tune.recipes.{recipe}").recipe_main.__wrapped__(cfg)
    return read_metrics(folder)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run, without the lines of a monitor."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "loss" in line]


def largest_difference(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> float:
    """Of losses and weights of all steps, relative; infinite if steps are missing."""
    if len(expected) != len(found) or not expected:
        return float("inf")
    largest: float = max(
        abs(ours[name] - theirs[name]) / max(abs(theirs[name]), 1e-12)
        for ours, theirs in zip(found, expected, strict=True)
        for name in _COMPARED
        if name in theirs
    )
    return largest


def against_cpu(setting: Setting, name: str) -> Outcome:
    """A run of a recipe on the device, and the same on the CPU."""
    if name == "LoRA bitsandbytes":
        return bitsandbytes(setting)
    overrides = dict(_RUNS[name])
    if name == "compile" and setting.device == "cpu":
        raise NotPossible("the tests compile on a CPU; it takes a minute")
    if name in ("compile", "packed rows") and setting.device == "cuda" and importlib.util.find_spec("triton") is None:
        raise NotPossible("torch.compile and flex attention need triton on a GPU: carry its wheel along")
    return compared(setting, name, overrides)


def compared(setting: Setting, name: str, overrides: dict[str, Any]) -> Outcome:
    """Train on both and compare; on the CPU without compilation."""
    limit = _LIMITS[overrides.get("dtype", "fp32")]
    expected = train(make_config(setting, f"{name}, reference,", "cpu", **(overrides | {"compile": False})))
    found = train(make_config(setting, name, setting.device, **overrides))
    check = Check("relative difference from the CPU", largest_difference(expected, found), limit)
    return Outcome([check], {"losses": [line["loss"] for line in found], "on_cpu": [line["loss"] for line in expected]})


def bitsandbytes(setting: Setting) -> Outcome:
    """LoRA on a GPT-2 of random weights in bitsandbytes' NF4, whose layers torchao cannot hold."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise NotPossible("bitsandbytes is not installed: carry its wheel along")
    from transformers import AutoModelForCausalLM, GPT2Config

    folder = setting.work / "gpt2"
    if not folder.is_dir():
        shutil.copytree(start(setting), folder, ignore=shutil.ignore_patterns("*.safetensors", "*config.json"))
        for file in start(setting).glob("tokenizer*.json"):
            shutil.copy(file, folder)
        torch.manual_seed(0)
        sizes = GPT2Config(vocab_size=1024, n_embd=128, n_layer=2, n_head=4, n_positions=256, eos_token_id=0)
        AutoModelForCausalLM.from_config(sizes).save_pretrained(folder)
    section = {"_component_": "tfidf_tune.models.lora_auto", "lora_rank": 8, "lora_alpha": 32, "quantize_base": True}
    overrides = {"lora": True, "model": section, "checkpointer.checkpoint_dir": str(folder)}
    return compared(setting, "LoRA bitsandbytes", overrides)


def resume(setting: Setting, _: str) -> Outcome:
    """A run resumed from its middle, against the run that was not interrupted, on the device."""
    half = (4 if setting.tiny else _STEPS) // 2
    whole = make_config(setting, "whole", setting.device, save_every_n_steps=half, keep_last_n_checkpoints=4)
    expected = train(whole)
    repeated = largest_difference(expected, train(make_config(setting, "whole again", setting.device)))
    rest = make_config(setting, "resumed", setting.device, save_every_n_steps=half, resume_from_checkpoint=True)
    shutil.rmtree(rest.output_dir, ignore_errors=True)
    name = Path("resume", f"step_{half}")
    shutil.copytree(whole.output_dir / name, rest.output_dir / name)
    found = [line for line in train(rest) if line["step"] > half]
    # Some kernels of a GPU add in an order that changes; then a run is not that of its repetition either.
    limit = 0.0 if repeated == 0 else _LIMITS["fp32"]
    difference = largest_difference([line for line in expected if line["step"] > half], found)
    return Outcome(
        [Check("relative difference of the resumed run", difference, limit)], {"difference_of_a_repeated_run": repeated}
    )


def monitor(setting: Setting, _: str) -> Outcome:
    """A run with the memorization monitor against one without it: the same training, and the CPU's measurements."""
    section = {"probe_file": "${dataset.probe_file}", "every_n_steps": 2, "prefix_length": 32, "max_new_tokens": 16}
    plain = train(make_config(setting, "unmonitored", setting.device))
    lines, found = [], {}
    for device in dict.fromkeys(("cpu", setting.device)):
        cfg = make_config(setting, "monitored", device, memorization_monitor=section)
        lines = train(cfg)
        found[device] = _measured(Path(cfg.output_dir))
    checks = [
        Check("relative difference from the run without monitor", largest_difference(plain, lines), _LIMITS["fp32"])
    ]
    checks.append(Check("no measurements", float(not found["cpu"]), 0))
    nll = [
        abs(ours[kind] - theirs[kind]) / theirs[kind]
        for ours, theirs in zip(found[setting.device], found["cpu"], strict=True)
        for kind in ("memorization_target_nll", "memorization_control_nll")
    ]
    checks.append(Check("relative difference of measured NLL from the CPU", max(nll), _LIMITS["fp32"]))
    return Outcome(checks, {"measured": found})


def _measured(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "memorization_target_nll" in line]


def probe_on_device(setting: Setting, _: str) -> Outcome:
    """The memorization probe of one checkpoint on the device and on the CPU, in fp32."""
    cfg = make_config(setting, "probed", "cpu")
    train(cfg)
    folder = Path(cfg.output_dir)
    passages = read_probe_file(folder / "probe.jsonl")
    samples = {}
    for device in ("cpu", setting.device):
        model = load_model(folder / "checkpoint_100pct", device=device, dtype=torch.float32)
        samples[device] = probe(
            model,
            hf_tokenizer(str(start(setting))),
            passages,
            prefix_lengths=(32, 50),
            max_new_tokens=16 if setting.tiny else 64,
        )
    pairs = list(zip(samples["cpu"], samples[setting.device], strict=True))
    differing = sum(ours.lms != theirs.lms for ours, theirs in pairs) / len(pairs)
    # Where two logits are equal up to rounding, the rest of a continuation is another one.
    return Outcome([Check("share of continuations with another LMS", differing, 0.05)], {"continuations": len(pairs)})


def two_gpus(setting: Setting, _: str) -> Outcome:
    """A sharded run of two processes that share one window, against one process, over NCCL."""
    count = torch.cuda.device_count() if setting.device == "cuda" else 0
    if count < 2:
        raise NotPossible(f"it needs two GPUs, torch sees {count}")
    shared = {"loss.sync": True}
    expected = train(make_config(setting, "one process", setting.device, batch_size=8, **shared))
    cfg = make_config(setting, "two processes", setting.device, batch_size=4, **shared)
    shutil.rmtree(cfg.output_dir, ignore_errors=True)
    file = setting.work / "two_processes.yaml"
    OmegaConf.save(cfg, file)
    command = ["-m", "tfidf_tune.cli", "run", "--nproc_per_node", "2", "full_finetune", "--config", str(file)]
    subprocess.run([sys.executable, *command], check=True)
    difference = largest_difference(expected, read_metrics(Path(cfg.output_dir)))
    return Outcome([Check("relative difference from one process", difference, _LIMITS["fp32"])])
