"""The LoRA settings of a config against the layers of the model."""

import pytest
import torch
from omegaconf import OmegaConf
from tiny_models import MODELS

from tfidf_tune.training import Run, SetupError, build_model


@pytest.mark.parametrize(
    ("name", "lora", "message"),
    [
        ("gpt_neox", {"lora_attn_modules": ["query_key_value", "q_proj"]},
         "names 'q_proj', .*possible are output_proj, query_key_value$"),
        ("gptj", {"lora_attn_modules": ["q_proj", "out_proj"]},
         "names 'out_proj', .*possible are k_proj, output_proj, q_proj, v_proj$"),
        ("llama3_2-tied", {"apply_lora_to_output": True}, "apply_lora_to_output is .*tied to the embeddings"),
        ("qwen2-tied", {"apply_lora_to_output": True}, "apply_lora_to_output is .*tie_word_embeddings"),
        ("gpt_neox", {"quantize_base": True}, "torchao's NF4 takes multiples of 16384 weights, not 64 x 192"),
        ("gptj", {"embed_dim": 256, "num_heads": 3, "quantize_base": True},  # not blamed on NF4
         r"embed_dim \(256\) must be divisible by num_heads \(3\)$"),
    ],
)  # fmt: skip
def test_settings_that_the_model_cannot_have_are_refused(name, lora, message, tmp_path):
    cfg = OmegaConf.create({"model": MODELS[name].section(lora=True, **lora)})

    with pytest.raises(SetupError, match=f"^config: model: .*{message}"):
        build_model(cfg, Run(torch.device("cpu"), torch.float32, 0, tmp_path))
