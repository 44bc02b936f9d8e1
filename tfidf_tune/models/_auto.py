"""The model of any checkpoint, built from its own ``config.json``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from tfidf_tune.models._blocks import PLAIN, LinearFactory
from tfidf_tune.models._causal_lm import NF4_MULTIPLE, HFCausalLM, build_hf, linear_layers, quantize
from tfidf_tune.models._family import ModelFamily
from tfidf_tune.models.gpt_neox import GPTNeoXFamily
from tfidf_tune.models.gptj import GPTJFamily
from tfidf_tune.models.llama import LlamaFamily

Implementation = Literal["auto", "torchtune", "transformers"]
_IMPLEMENTATIONS = ("auto", "torchtune", "transformers")
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


@dataclass(frozen=True)
class _LoRA:
    targets: str | Sequence[str]
    settings: LinearFactory  # which layers have adapters is not set yet


def auto(
    hf_config: PreTrainedConfig, *, implementation: Implementation = "auto", max_seq_len: int | None = None
) -> nn.Module:
    """Build the model of a checkpoint, randomly initialised.

    Recipes pass the config of ``checkpointer.checkpoint_dir``, so that another checkpoint needs no other change.

    Args:
        hf_config (PreTrainedConfig): the checkpoint's config.
        implementation (Implementation): ``torchtune`` for torchtune's modules, which load weights one by one, NF4
            included; ``transformers`` for transformers' own class; ``auto`` for torchtune's where they can
            represent the model exactly, else transformers'. Default: "auto".
        max_seq_len (int | None): longest sequence. Default: None, that of the checkpoint; with torchtune's modules,
            which have no sliding window, at most the window.

    Returns:
        nn.Module: a ``TransformerDecoder``, or a :class:`HFCausalLM`; its attribute ``implementation`` says which was
        chosen and why.

    Raises:
        ValueError: If ``max_seq_len`` exceeds the checkpoint's limit, or torchtune's modules are asked for and cannot
            represent the model.
    """
    return _build(hf_config, None, implementation, max_seq_len)


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
    """Build the model of a checkpoint with LoRA layers: torchtune's, or PEFT's in a model of transformers.

    Args:
        hf_config (PreTrainedConfig): as for :func:`auto`.
        lora_targets (str | Sequence[str]): the linear layers that get adapters: ``attention`` for all of the attention,
            ``all-linear`` for all but the output layer and the experts of a mixture, or names in the checkpoint, such
            as ``[q_proj, v_proj]``. Default: "attention".
        lora_rank (int): rank of the adapters. Default: 8.
        lora_alpha (float): the adapters' contribution is scaled by alpha / rank. Default: 16.
        lora_dropout (float): dropout before the adapters. Default: 0.0.
        quantize_base (bool): keep the weights of linear layers, except the output layer, as NF4: by torchao, or in
            transformers' class by bitsandbytes where torchao has no such layer. Default: False.
        implementation (Implementation): as for :func:`auto`. Default: "auto".
        max_seq_len (int | None): as for :func:`auto`. Default: None.

    Returns:
        nn.Module: as of :func:`auto`.

    Raises:
        ValueError: As of :func:`auto`; if the model has no layer of a given name, or a layer that has no NF4 form.
    """
    settings = LinearFactory(
        lora_rank=lora_rank, lora_alpha=lora_alpha, lora_dropout=lora_dropout, quantize_base=quantize_base
    )
    return _build(hf_config, _LoRA(lora_targets, settings), implementation, max_seq_len)


def _build(
    hf_config: PreTrainedConfig, lora: _LoRA | None, implementation: Implementation, max_seq_len: int | None
) -> nn.Module:
    if implementation not in _IMPLEMENTATIONS:
        raise ValueError(f"implementation is {implementation!r}: choose one of {', '.join(_IMPLEMENTATIONS)}")
    limit = getattr(hf_config, "max_position_embeddings", None)
    limit = limit if limit is not None and limit > 0 else None  # XLNet has -1
    if max_seq_len is not None and limit is not None and max_seq_len > limit:
        raise ValueError(f"max_seq_len is {max_seq_len}, the checkpoint's limit is {limit}: lower it")
    length = max_seq_len or limit or _DEFAULT_LENGTH
    reason = ""
    if implementation != "transformers":
        try:
            model = _build_torchtune(hf_config, lora, length if max_seq_len else _within_window(hf_config, length))
        except ValueError as error:
            reason = str(error)
        else:
            model.implementation = "torchtune's modules"  # type: ignore[assignment]
            return model
    if implementation == "torchtune":
        raise ValueError(
            f"torchtune's modules cannot represent this checkpoint: {reason}; set model.implementation to auto or "
            "transformers"
        )
    hf, peft_config, not_torchao = _build_transformers(hf_config, lora)
    wrapped = HFCausalLM(hf, length, peft_config)
    reasons = [f"not torchtune's modules: {reason}"] * bool(reason)
    reasons += [f"NF4 by bitsandbytes: {not_torchao}"] * bool(not_torchao)
    because = f" ({'; '.join(reasons)})" if reasons else ""
    wrapped.implementation = f"{type(hf).__name__} of transformers{because}"  # type: ignore[assignment]
    return wrapped


def _build_torchtune(hf_config: PreTrainedConfig, lora: _LoRA | None, max_seq_len: int) -> nn.Module:
    """Build torchtune's form of a model; a ValueError says why it has none."""
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ValueError(f"no family of the architecture '{hf_config.model_type}'")
    linear = PLAIN if lora is None else _linear_factory(family, lora)
    try:
        model: nn.Module = family.build(hf_config, max_seq_len, linear)
    except AssertionError as error:
        if "block size" not in str(error):  # torchao's words
            raise
        raise ValueError(f"torchao's NF4 takes linear layers of a multiple of {NF4_MULTIPLE} weights") from error
    if differing := family.differing_settings(model, hf_config.to_dict()):
        raise ValueError(differing[0])
    return model


def _linear_factory(family: ModelFamily, lora: _LoRA) -> LinearFactory:
    """Translate names of the checkpoint's layers into torchtune's."""
    possible = {name: theirs for name, theirs in family.lora_targets.items() if name != "output"}
    layers = _chosen({theirs: name not in _MLP for name, theirs in possible.items()}, lora.targets)
    chosen = {name for name, theirs in possible.items() if theirs in layers}
    mlp = chosen & {*_MLP}
    if mlp and mlp != possible.keys() & {*_MLP}:
        raise ValueError("adapters on some layers of the MLP, not on all")
    attention = tuple(name for name in possible if name in chosen - mlp)
    return replace(lora.settings, lora_attn_modules=attention, apply_lora_to_mlp=bool(mlp))


def _build_transformers(hf_config: PreTrainedConfig, lora: _LoRA | None) -> tuple[Any, Any, str]:
    """Return transformers' model, the config of its LoRA layers, if it has any, and why its NF4 is not torchao's."""
    hf = build_hf(hf_config, dtype=torch.get_default_dtype())
    if lora is None:
        return hf, None, ""
    from peft import LoraConfig, inject_adapter_in_model  # slow to import

    targets = _layers_with_lora(hf, lora)
    is_transposed = any(type(module) is Conv1D and name.endswith(tuple(targets)) for name, module in hf.named_modules())
    not_torchao = quantize(hf) if lora.settings.quantize_base else ""
    hf.is_loaded_in_4bit = bool(not_torchao)  # PEFT then has layers for those of bitsandbytes
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.settings.lora_rank,
        lora_alpha=lora.settings.lora_alpha,
        lora_dropout=lora.settings.lora_dropout,
        target_modules=targets,
        fan_in_fan_out=is_transposed,
        inference_mode=False,
    )
    return inject_adapter_in_model(config, hf), config, not_torchao


def _layers_with_lora(hf: Any, lora: _LoRA) -> list[str]:
    # PEFT refuses the output projection of Mamba's mixers.
    layers = {
        name: is_attention
        for name, is_attention in linear_layers(hf).items()
        if not ("mamba" in name + hf.config.model_type and name.endswith("out_proj"))
    }
    try:
        return _chosen(layers, lora.targets)
    except ValueError as error:
        raise ValueError(f"lora_targets: {type(hf).__name__} has {error}") from error


def _chosen(layers: Mapping[str, bool], targets: str | Sequence[str]) -> list[str]:
    """Return the layers that ``lora_targets`` means; ``layers`` says which are of an attention.

    Raises:
        ValueError: If there is no layer of a name; the message goes on after "has".
    """
    possible = f"possible are attention, all-linear, or a list of {', '.join(layers)}"
    if targets == "all-linear":
        return [*layers]
    if targets == "attention":
        if not any(layers.values()):
            raise ValueError(f"no linear layers of an attention: {possible}")
        return [name for name, is_attention in layers.items() if is_attention]
    names = [targets] if isinstance(targets, str) else targets
    for target in names:
        if not any(_is_named(name, target) for name in layers):
            raise ValueError(f"no linear layer {target!r}: {possible}")
    return [name for name in layers if any(_is_named(name, target) for target in names)]


def _is_named(name: str, target: str) -> bool:
    """Return whether a layer, ``self_attn.q_proj``, has a name, ``q_proj``."""
    return name == target or name.endswith(f".{target}")


def _within_window(hf_config: PreTrainedConfig, length: int) -> int:
    return min(length, getattr(hf_config, "sliding_window", None) or length)
