"""The model of any checkpoint, built from its own ``config.json``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from tfidf_tune._checks import require_choice
from tfidf_tune.models.causal_lm import HFCausalLM, build_hf, linear_layers
from tfidf_tune.models.family import ModelFamily
from tfidf_tune.models.gpt_neox import GPTNeoXFamily
from tfidf_tune.models.gptj import GPTJFamily
from tfidf_tune.models.linear import PLAIN, LinearFactory, quantize
from tfidf_tune.models.llama import LlamaFamily

Implementation = Literal["auto", "torchtune", "transformers"]
FAMILIES: dict[str, ModelFamily] = {
    "gemma": LlamaFamily(is_gemma=True),
    "gpt_neox": GPTNeoXFamily(),
    "gptj": GPTJFamily(),
    "llama": LlamaFamily(),
    "mistral": LlamaFamily(),
    "qwen2": LlamaFamily(rotates_halves=True, qkv_bias=True),
}
"""The families that torchtune's modules can represent, by the ``model_type`` of config.json."""
_MLP = ("w1", "w2", "w3")
_DEFAULT_LENGTH = 2048  # of models without a limit, such as those with ALiBi


def auto(
    hf_config: PreTrainedConfig,
    *,
    implementation: Implementation = "auto",
    max_seq_len: int | None = None,
) -> nn.Module:
    """Build the model of a checkpoint, randomly initialised.

    Recipes pass the config of ``checkpointer.checkpoint_dir``, so that another checkpoint needs no
    other change.

    Args:
        hf_config (PreTrainedConfig): the checkpoint's config.
        implementation (Implementation): ``torchtune`` for torchtune's modules, which load weights
            one by one, NF4 included; ``transformers`` for transformers' own class; ``auto`` for
            torchtune's where they can represent the model exactly, else transformers'. Default:
            "auto".
        max_seq_len (int | None): longest sequence. Default: None, that of the checkpoint; with
            torchtune's modules, which have no sliding window, at most the window.

    Returns:
        nn.Module: a ``TransformerDecoder``, or a :class:`HFCausalLM`; its attribute
        ``implementation`` says which was chosen and why.

    Raises:
        ValueError: If ``max_seq_len`` exceeds the checkpoint's limit, or torchtune's modules are
            asked for and cannot represent the model.
    """
    return _build(hf_config, implementation, max_seq_len)


def lora_auto(
    hf_config: PreTrainedConfig,
    *,
    lora_targets: str | Sequence[str] = "attention",
    lora_rank: int = 8,
    lora_alpha: float = 16,
    lora_dropout: float = 0.0,
    quantize_base: bool = False,
    implementation: Implementation = "auto",
    max_seq_len: int | None = None,
) -> nn.Module:
    """Build the model of a checkpoint with LoRA layers: torchtune's, or PEFT's in a model of
    transformers.

    Args:
        hf_config (PreTrainedConfig): as for :func:`auto`.
        lora_targets (str | Sequence[str]): the linear layers that get adapters: ``attention`` for
            all of the attention, ``all-linear`` for all but the output layer and the experts of a
            mixture, or names in the checkpoint, such as ``[q_proj, v_proj]``. Default: "attention".
        lora_rank (int): rank of the adapters. Default: 8.
        lora_alpha (float): the adapters' contribution is scaled by alpha / rank. Default: 16.
        lora_dropout (float): dropout before the adapters. Default: 0.0.
        quantize_base (bool): keep the weights of linear layers, except the output layer, as NF4: by
            torchao, or in transformers' class by bitsandbytes where torchao has no such layer.
            Default: False.
        implementation (Implementation): as for :func:`auto`. Default: "auto".
        max_seq_len (int | None): as for :func:`auto`. Default: None.

    Returns:
        nn.Module: as of :func:`auto`.

    Raises:
        ValueError: As of :func:`auto`; if the model has no layer of a given name, or a layer that
            has no NF4 form.
    """
    linear = LinearFactory(
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        lora_dropout=lora_dropout,
        quantize_base=quantize_base,
    )
    return _build(hf_config, implementation, max_seq_len, lora_targets, linear)


def _build(
    hf_config: PreTrainedConfig,
    implementation: Implementation,
    max_seq_len: int | None,
    targets: str | Sequence[str] = (),
    linear: LinearFactory = PLAIN,
) -> nn.Module:
    require_choice("implementation", implementation, get_args(Implementation))
    limit = getattr(hf_config, "max_position_embeddings", None) or 0  # XLNet has -1
    if max_seq_len is not None and 0 < limit < max_seq_len:
        raise ValueError(
            f"max_seq_len is {max_seq_len}, the checkpoint's limit is {limit}: lower it"
        )
    # torchtune's modules if they can, else transformers' class, with the reason in the model's
    # description.
    default_length = limit if limit > 0 else _DEFAULT_LENGTH
    length = max_seq_len or default_length
    reasons = []
    if implementation != "transformers":
        window = None
        if not max_seq_len:
            window = getattr(hf_config, "sliding_window", None)
        length_within_window = min(length, window or length)
        try:
            return _build_torchtune(hf_config, length_within_window, targets, linear)
        except ValueError as error:
            if implementation == "torchtune":
                raise ValueError(
                    f"torchtune's modules cannot represent this checkpoint: {error}"
                ) from error
            reasons.append(f"not torchtune's modules: {error}")
    model = _build_transformers(hf_config, length, targets, linear, reasons)
    description = f"{type(model.hf).__name__} of transformers"
    if reasons:
        description += f" ({'; '.join(reasons)})"
    model.implementation = description  # type: ignore[assignment]
    return model


def _build_torchtune(
    hf_config: PreTrainedConfig,
    max_seq_len: int,
    targets: str | Sequence[str],
    linear: LinearFactory,
) -> nn.Module:
    """Build torchtune's form of a model; a ValueError says why it has none."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ValueError(f"no family of the architecture '{hf_config.model_type}'")
    # Layers of the checkpoint by torchtune's names; a builder has adapters on all layers of the
    # MLPs or on none.
    names = {theirs: name for name, theirs in family.lora_targets.items() if name != "output"}
    is_attention = {layer: name not in _MLP for layer, name in names.items()}
    chosen = [names[layer] for layer in _chosen(is_attention, targets)]
    attention = tuple(name for name in chosen if name not in _MLP)
    mlp = {name for name in chosen if name in _MLP}
    if mlp and mlp != set(_MLP).intersection(names.values()):
        raise ValueError("adapters on some layers of the MLP, not on all")
    linear = replace(linear, lora_attn_modules=attention, apply_lora_to_mlp=bool(mlp))
    # What shapes do not show, activations and scales of rotary embeddings say, is compared after
    # building.
    model: Any = family.build(hf_config, max_seq_len, linear)
    differing = family.differing_settings(model, hf_config)
    if differing:
        raise ValueError(differing[0])
    model.implementation = "torchtune's modules"
    return cast(nn.Module, model)


def _build_transformers(
    hf_config: PreTrainedConfig,
    max_seq_len: int,
    targets: str | Sequence[str],
    linear: LinearFactory,
    reasons: list[str],
) -> HFCausalLM:
    """Build transformers' own model; why its NF4 is not torchao's is added to the reasons."""
    hf: Any = build_hf(hf_config, dtype=torch.get_default_dtype())
    if not targets:
        return HFCausalLM(hf, max_seq_len)
    from peft import LoraConfig, inject_adapter_in_model  # slow to import

    kinds, names = linear_layers(hf)
    for name in list(kinds):
        is_mixer = "mamba" in name + hf_config.model_type
        if is_mixer and name.endswith("out_proj"):
            del kinds[name]  # PEFT refuses these layers
    chosen = _chosen(kinds, targets, f"lora_targets: {type(hf).__name__} has ")
    endings = tuple(chosen)
    is_transposed = any(
        type(module) is Conv1D and name.endswith(endings) for name, module in hf.named_modules()
    )
    if linear.quantize_base:
        obstacle = quantize(hf, names)
        if obstacle:
            reasons.append(f"NF4 by bitsandbytes: {obstacle}")
            hf.is_loaded_in_4bit = True  # PEFT then has layers for those of bitsandbytes
    config = LoraConfig(
        task_type="CAUSAL_LM",
        inference_mode=False,
        r=linear.lora_rank,
        lora_alpha=linear.lora_alpha,
        lora_dropout=linear.lora_dropout,
        target_modules=chosen,
        fan_in_fan_out=is_transposed,
    )
    return HFCausalLM(inject_adapter_in_model(config, hf), max_seq_len, config)


def _chosen(layers: Mapping[str, bool], targets: str | Sequence[str], whose: str = "") -> list[str]:
    """Return the layers that ``lora_targets`` means; ``layers`` says which are of an attention."""
    chosen: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        if target == "all-linear":
            meant = set(layers)
        elif target == "attention":
            meant = {name for name, is_attention in layers.items() if is_attention}
        else:
            meant = set()
        # `q_proj` is a name of `self_attn.q_proj`.
        meant |= {name for name in layers if f".{name}".endswith(f".{target}")}
        if not meant:
            raise ValueError(
                f"{whose}no linear layer {target!r}: possible are attention, all-linear, or a list "
                f"of {', '.join(layers)}"
            )
        chosen |= meant
    return [name for name in layers if name in chosen]
