"""Checkpoint folders to start from that nobody has to download: random weights."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtune.config._utils import _get_component_from_path

_Sizes = Mapping[str, Any]


def random_model(folder: Path, model: Mapping[str, Any], seed: int) -> None:
    """Write a model of random weights with a tokenizer trained on the embedded corpus.

    Args:
        folder (Path): an existing folder; gets a complete Hugging Face model.
        model (Mapping[str, Any]): section ``model`` of a training config whose builder is
            ``torchtune.models.llama2.llama2``, ``tfidf_tune.models.gpt_neox.gpt_neox``,
            ``tfidf_tune.models.gptj.gptj``, or the ``lora_`` form of one of them: the sizes.
        seed (int): of the weights.

    Raises:
        ValueError: If the builder is another.
    """
    import torch
    import transformers

    from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer

    section = base_section(model)
    builder = section.pop("_component_")
    given = inspect.signature(_get_component_from_path(builder)).bind(**section)
    given.apply_defaults()
    model_type, settings = _ARCHITECTURES[builder]
    train_embedded_tokenizer(folder, vocab_size=section["vocab_size"])
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=section["vocab_size"],
        bos_token_id=None,
        eos_token_id=hf_tokenizer(str(folder)).eos_id,
        **settings(given.arguments),
    )
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def base_section(model: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the section of a builder with LoRA into that of the model under it.

    Args:
        model (Mapping[str, Any]): section ``model`` of a training config.

    Returns:
        dict[str, Any]: the section of the plain builder, without the settings of LoRA.

    Raises:
        ValueError: If the builder is none that :func:`random_model` knows.
    """
    module, _, name = str(model["_component_"]).rpartition(".")
    builder = f"{module}.{name.removeprefix('lora_')}"
    if builder not in _ARCHITECTURES:
        raise ValueError(
            f"no start can be made for the model {model['_component_']}: take {', '.join(_ARCHITECTURES)}, or the "
            "lora_ form of one of them"
        )
    sizes = inspect.signature(_get_component_from_path(builder)).parameters
    return {"_component_": builder, **{str(key): value for key, value in model.items() if key in sizes}}


def _llama(sizes: _Sizes) -> dict[str, Any]:
    from torchtune.models.llama2._model_utils import scale_hidden_dim_for_mlp

    return {
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_heads"],
        "num_key_value_heads": sizes["num_kv_heads"] or sizes["num_heads"],
        "hidden_size": sizes["embed_dim"],
        "intermediate_size": sizes["intermediate_dim"] or scale_hidden_dim_for_mlp(sizes["embed_dim"]),
        "max_position_embeddings": sizes["max_seq_len"],
        "rms_norm_eps": sizes["norm_eps"],
        "attention_dropout": sizes["attn_dropout"],
        "rope_parameters": {"rope_type": "default", "rope_theta": float(sizes["rope_base"])},
    }


def _gpt_neox(sizes: _Sizes) -> dict[str, Any]:
    return {
        "num_hidden_layers": sizes["num_layers"],
        "num_attention_heads": sizes["num_heads"],
        "hidden_size": sizes["embed_dim"],
        "intermediate_size": sizes["intermediate_dim"],
        "max_position_embeddings": sizes["max_seq_len"],
        "layer_norm_eps": sizes["norm_eps"],
        "attention_dropout": sizes["attn_dropout"],
        "attention_bias": sizes["attention_bias"],
        "use_parallel_residual": sizes["use_parallel_residual"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(sizes["rope_base"]),
            "partial_rotary_factor": sizes["rotary_pct"],
        },
    }


def _gptj(sizes: _Sizes) -> dict[str, Any]:
    return {
        "n_layer": sizes["num_layers"],
        "n_head": sizes["num_heads"],
        "n_embd": sizes["embed_dim"],
        "n_inner": sizes["intermediate_dim"],
        "n_positions": sizes["max_seq_len"],
        "rotary_dim": sizes["rotary_dim"],
        "layer_norm_epsilon": sizes["norm_eps"],
        "attn_pdrop": sizes["attn_dropout"],
    }


# By builder: transformers' name of the architecture, and what its config calls the sizes.
_ARCHITECTURES: dict[str, tuple[str, Callable[[_Sizes], dict[str, Any]]]] = {
    "torchtune.models.llama2.llama2": ("llama", _llama),
    "tfidf_tune.models.gpt_neox.gpt_neox": ("gpt_neox", _gpt_neox),
    "tfidf_tune.models.gptj.gptj": ("gptj", _gptj),
}
