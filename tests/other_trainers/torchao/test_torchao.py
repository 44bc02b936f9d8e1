"""torchtune's recipes under the torchao and peft of today; the project's own environment has
torchao 0.15.
"""

import json
import subprocess
import sys

import tfidf_tune._torchao

import peft
import pytest
import torch
import torchao
from helpers.fakes.tiny_llama import make_tokenizer
from packaging.version import Version
from safetensors.torch import load_file
from torchtune.modules.low_precision.nf4_linear import to_nf4
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tfidf_tune.data import hf_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama whose layers are multiples of NF4's blocks, and texts."""
    folder = tmp_path_factory.mktemp("runs")
    texts = [f"{number} the river sings " * 9 for number in range(60)]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (folder / "texts.txt").write_text("\n".join(texts))
    make_tokenizer(folder / "base", folder / "texts.txt")
    size = hf_tokenizer(str(folder / "base")).vocab_size
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(
        LlamaConfig(vocab_size=size, max_position_embeddings=64, **sizes)
    ).save_pretrained(folder / "base")
    return folder


def losses(folder, recipe, *overrides):
    command = [
        sys.executable,
        "-m",
        "tfidf_tune.cli",
        "run",
        recipe,
        "--config",
        f"mine/{recipe.split('_')[0]}",
        "checkpointer.checkpoint_dir=base",
        "dataset.source=texts.jsonl",
        "epochs=2",
        "optimizer.lr=1e-2",
        "dataset.holdout=0",
        "device=cpu",
        "dtype=fp32",
        *overrides,
    ]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (output,) = (
        override.split("=")[1] for override in overrides if override.startswith("output_dir=")
    )
    return [
        json.loads(line)["loss"]
        for line in (folder / output / "metrics.jsonl").read_text().splitlines()
    ]


def test_the_versions_are_those_that_the_projects_environment_does_not_have():
    assert Version(torchao.__version__) >= Version("0.16")
    assert Version(peft.__version__) >= Version("0.19")


@pytest.mark.parametrize(
    ("recipe", "quantize"),
    [("full_finetune", False), ("lora_finetune", False), ("lora_finetune", True)],
)
def test_a_run_learns_and_its_checkpoint_is_loaded_by_transformers_and_peft(
    folder, recipe, quantize
):
    output = f"{recipe}_{quantize}"
    more = [f"model.quantize_base={quantize}"] if recipe == "lora_finetune" else []
    found = losses(folder, recipe, f"output_dir={output}", *more)
    assert found[0] - found[-1] > 0.5
    saved = folder / output / "checkpoint_100pct"
    if recipe == "full_finetune":
        model = AutoModelForCausalLM.from_pretrained(saved)
    else:
        model = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(folder / "base"), saved
        )
        assert load_file(saved / "adapter_model.safetensors")
    ids = torch.tensor(
        [
            hf_tokenizer(str(folder / "base")).encode(
                "7 the river sings 7 the river sings", add_eos=False
            )
        ]
    )
    assert model(input_ids=ids, labels=ids).loss < found[0] - 0.5


def test_weights_in_nf4_are_levels_of_their_block():
    """Every weight is one of 16 levels times the largest magnitude of its 64 weights (Dettmers et
    al. 2023).
    """
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    tensor = to_nf4(weight)
    blocks = tensor.get_original_weight().reshape(-1, 64)
    original = weight.reshape(-1, 64)
    assert all(len(block.unique()) <= 16 for block in blocks)
    scale = original.abs().amax(1, keepdim=True)
    assert (
        (blocks - original).abs() / scale
    ).max() < 0.17  # half of the widest gap between levels, and the scale's own
