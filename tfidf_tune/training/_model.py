"""Models: built without memory first, then given weights, then made ready for training."""

from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import config, modules, training
from torchtune.training import set_default_dtype

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._lora import initialize_adapters
from tfidf_tune.training._run import Run


def build_model(section: DictConfig, run: Run) -> nn.Module:
    """Build the model of the config on the meta device, where it takes neither memory nor time.

    Args:
        section (DictConfig): the config's ``model``.
        run (Run): gives the dtype.

    Returns:
        nn.Module: torchtune model without weights.
    """
    with set_default_dtype(run.dtype), torch.device("meta"):
        model: nn.Module = config.instantiate(section)
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
