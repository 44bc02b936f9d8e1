"""Models: built without memory first, then given weights, then made ready for training."""

from typing import Any

import torch
from torch import nn
from torchtune import modules, training
from torchtune.training import set_default_dtype

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._config import FinetuneConfig, instantiate
from tfidf_tune.training._errors import SetupError
from tfidf_tune.training._lora import initialize_adapters
from tfidf_tune.training._run import Run


def build_model(cfg: FinetuneConfig, run: Run) -> nn.Module:
    """Build the model of the config on the meta device, where it takes neither memory nor time.

    Args:
        cfg (FinetuneConfig): the checked config.
        run (Run): gives the dtype.

    Returns:
        nn.Module: torchtune model without weights.

    Raises:
        SetupError: If it cannot be built from the settings given, or shall have quantized weights.
    """
    if cfg.model.get("quantize_base"):
        raise SetupError("config: model: quantize_base is true; the recipes train on fp32 and bf16 base weights so far")
    with set_default_dtype(run.dtype), torch.device("meta"):
        model: nn.Module = instantiate(cfg, "model")
    return model


def load_model(model: nn.Module, checkpointer: HFCheckpointer, run: Run) -> None:
    """Give a model of :func:`build_model` the checkpoint's weights, fresh adapters and its constants.

    Args:
        model (nn.Module): torchtune model on the meta device; changed in place.
        checkpointer (HFCheckpointer): reads the checkpoint.
        run (Run): gives device and dtype.
    """
    checkpointer.load_weights(model, device=run.device, dtype=run.dtype)
    initialize_adapters(model, run.device)
    module: Any
    with run.device:
        for module in model.modules():
            if hasattr(module, "rope_init"):  # tables that follow from the sizes and are in no checkpoint
                module.rope_init()
    training.validate_no_params_on_meta_device(model)


def prepare_model(model: nn.Module, loss: WeightedCrossEntropyLoss, cfg: FinetuneConfig) -> None:
    """Switch on what the config asks of the training step: activation checkpointing, chunked logits, ``torch.compile``.

    Args:
        model (nn.Module): torchtune model with weights; changed in place.
        loss (WeightedCrossEntropyLoss): the objective; changed in place.
        cfg (FinetuneConfig): the checked config.
    """
    model.set_num_output_chunks(loss.num_output_chunks)  # type: ignore[operator]
    if cfg.compile:
        training.compile_model(model, verbose=False)
        loss.compile_chunks()
    if cfg.enable_activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
