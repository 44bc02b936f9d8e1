"""What a weighting gets of a Trainer's batches, and which batches, settings and models are refused."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer

from tfidf_tune.weighting import IGNORE_INDEX, TokenBatch, shift_labels, shift_tokens


def has_labels(inputs: Mapping[str, Any]) -> bool:
    """Return whether a batch has labels, shifted or not."""
    return inputs.get("labels") is not None or inputs.get("shift_labels") is not None


def require_labels(inputs: Mapping[str, Any]) -> None:
    """Raise a ``ValueError`` if a training batch has no labels."""
    if not has_labels(inputs):
        found = ", ".join(name for name, value in inputs.items() if value is not None) or "nothing"
        raise ValueError(
            f"a training batch has no labels, only {found}: use a data collator that makes them, for example "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        )


def check_first_batch(inputs: Mapping[str, Any], *, needs_tokens: bool = False) -> None:
    """Raise a ``ValueError`` if the labels of a batch are the token that follows each token of the input.

    A causal language model of transformers shifts the labels itself: it would predict the token after the next one. If
    all tokens are counted, labels that are not the tokens at their positions are an error too.
    """
    ids, labels = inputs.get("input_ids"), inputs.get("labels")
    if ids is None or labels is None or ids.shape != labels.shape:
        return
    valid = labels != IGNORE_INDEX
    if (labels == ids)[valid].all():
        return
    pairs = valid[:, :-1] & valid[:, 1:]  # the token after the last label may be padding
    if pairs.any() and (labels[:, :-1] == ids[:, 1:])[pairs].all():
        raise ValueError(
            "the labels are shifted already: each is the token after that of input_ids at the same position. Pass "
            "labels that are not shifted, equal to input_ids where a token counts; the trainer shifts them"
        )
    if needs_tokens:
        raise ValueError(
            "the weighting counts all tokens, but labels that are not -100 differ from input_ids: make them equal, or "
            "set counted to 'labels'"
        )


def shifted_labels(inputs: Mapping[str, Any], num_positions: int) -> Tensor:
    """Return the labels of a batch, integer ``[b, num_positions]``, shifted as causal language models do.

    Prompt tuning puts virtual tokens in front of the ``s`` tokens of the inputs. They have no labels.
    """
    shifted = inputs.get("shift_labels")
    labels = _pad(inputs["labels"] if shifted is None else shifted, num_positions, IGNORE_INDEX)
    return shift_labels(labels) if shifted is None else labels


def token_batch(inputs: Mapping[str, Any], num_positions: int, *, needs_tokens: bool, first_pass: bool) -> TokenBatch:
    """Return what a weighting gets of a batch, ``[b, num_positions]``, with the :func:`shifted_labels`.

    A document begins wherever ``position_ids``, ``[b, s]`` or ``[1, s]``, do not go on by 1, as for the attention of
    transformers: some models count from 2. Tokens, if needed, are the ``input_ids`` that ``attention_mask`` does not
    hide.
    """
    labels, positions = shifted_labels(inputs, num_positions), inputs.get("position_ids")
    documents = all_tokens = None
    if positions is not None and positions.dim() == 2:  # not those of images too
        begins = F.pad(positions.diff(dim=1) != 1, (1, 0))
        documents = _pad(begins.cumsum(dim=1), num_positions, 0)
    if needs_tokens:
        all_tokens = shift_tokens(_pad(_unpadded_tokens(inputs), num_positions, IGNORE_INDEX))
    if documents is not None:
        # The label at position i is the token at i + 1; the last position has no label, or the first token.
        last = documents[:, :1] if needs_tokens else documents[:, -1:]
        documents = torch.cat([documents[:, 1:], last], dim=1).expand_as(labels)
    return TokenBatch(labels, documents, all_tokens, first_pass=first_pass)


def _unpadded_tokens(inputs: Mapping[str, Any]) -> Tensor:
    tokens: Tensor | None = inputs.get("input_ids")
    mask: Any = inputs.get("attention_mask")
    if tokens is None or (mask is not None and getattr(mask, "shape", None) != tokens.shape):
        ids = "no input_ids" if tokens is None else f"input_ids of shape {tuple(tokens.shape)}"
        found = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the weighting counts all tokens, but a training batch has {ids} and as attention_mask, which says what "
            f"is padding, {found}: pass both in one shape, or set counted to 'labels'"
        )
    return tokens if mask is None else tokens.masked_fill(mask == 0, IGNORE_INDEX)


def _pad(tensor: Tensor, num_positions: int, value: int) -> Tensor:
    return F.pad(tensor, (num_positions - tensor.shape[1], 0), value=value)


def check_before_building(trainer: type, args: Any) -> None:
    """Raise a ``ValueError`` for a trainer of TRL, or a setting, whose loss the weights would not reach."""
    is_for_trl = any(base.__module__ == "tfidf_tune.integrations.trl" for base in trainer.__mro__)
    for base in trainer.__mro__:
        is_allowed = base.__name__ == "_BaseTrainer" or (is_for_trl and base.__name__ == "SFTTrainer")
        if base.__module__.startswith("trl.") and not is_allowed:
            raise ValueError(
                f"{trainer.__name__} is derived from TRL's {base.__name__}, which computes its loss by itself: token "
                "weights work in transformers.Trainer and, by tfidf_tune.integrations.trl.TokenWeightingSFTTrainer in "
                "place of TokenWeightingMixin, in SFTTrainer"
            )
    for name, neutral in (("label_smoothing_factor", 0), ("loss_type", "nll")):
        value = getattr(args, name, neutral)
        if value != neutral:
            raise ValueError(f"{name} is {value!r}, which knows no weights: set it to {neutral!r}")


def check_trainer(trainer: Any, *, fused_head: bool) -> None:
    """Raise a ``ValueError`` if a Trainer, built already, has settings or a model that are not supported."""
    args, model, model_name = trainer.args, trainer.model, type(trainer.model).__name__
    liger = args.liger_kernel_config or {}
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    problem = None
    if trainer.compute_loss_func is not None:
        problem = "compute_loss_func is set, but the weighted loss takes its place: leave it out"
    elif args.use_liger_kernel and (liger.get("fused_linear_cross_entropy", True) or liger.get("cross_entropy")):
        problem = (
            "use_liger_kernel is set with Liger's own loss, which knows no weights: set liger_kernel_config to "
            '{"fused_linear_cross_entropy": False, "cross_entropy": False}'
        )
    elif parallelism is not None and (parallelism.cp_enabled or getattr(parallelism, "sp_enabled", False)):
        problem = (
            "context or sequence parallelism is on: a process has only a part of each sequence, but weights need whole "
            "ones; set cp_size and sp_size to 1"
        )
    elif args.n_gpu > 1:
        problem = (
            f"one process would use {args.n_gpu} GPUs by DataParallel, which is not supported: start a process for "
            "each GPU with torchrun or accelerate launch, or set CUDA_VISIBLE_DEVICES to one"
        )
    elif getattr(getattr(model, "config", None), "is_encoder_decoder", False) or _output_layer(model) is None:
        problem = (
            f"{model_name} is an encoder-decoder model or has no output layer over a vocabulary: token weights are for "
            "causal language models, see AutoModelForCausalLM"
        )
    elif fused_head and (reason := _why_not_fused(trainer, model)):
        problem = f"fused_head is True, but {reason}: set it to False"
    if problem is not None:
        raise ValueError(problem)


def _why_not_fused(trainer: Trainer, model: Any) -> str | None:
    base, head = base_model(model), _output_layer(model)
    if "logits_to_keep" not in inspect.signature(base.forward).parameters:
        return f"{type(base).__name__} has no argument logits_to_keep"
    if trainer.is_fsdp_enabled or isinstance(head.weight, DTensor):
        return "the output layer is sharded over processes"
    if type(head) is not nn.Linear:  # with an adapter, or quantized
        return f"the output layer is a {type(head).__module__}.{type(head).__name__}, not a torch.nn.Linear"
    if getattr(base.config.get_text_config(), "final_logit_softcapping", None) is not None:
        return f"{type(base).__name__} caps its logits"
    return None


def _output_layer(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def base_model(model: Any) -> Any:
    """Return the model without the adapters of PEFT."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
