"""Models: built without memory first, then given weights, then made ready for training."""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor
from torchtune import modules, training
from torchtune.training import set_default_dtype

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._components import instantiate
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, setup_errors
from tfidf_tune.training._head import prepare_head
from tfidf_tune.training._lora import check_lora_targets, initial_adapters, keep_adapters_in_fp32
from tfidf_tune.training._parameters import assign_parameters
from tfidf_tune.training._rope import build_rope_tables
from tfidf_tune.training._run import Run

_NF4_MULTIPLE = 64 * 256  # weights of a block, blocks that share a scaler: torchao's defaults


def build_model(cfg: FinetuneConfig, run: Run) -> nn.Module:
    """Build the model of the config on the meta device, where it takes neither memory nor time.

    Args:
        cfg (FinetuneConfig): the checked config.
        run (Run): gives the dtype.

    Returns:
        nn.Module: torchtune model without weights.

    Raises:
        SetupError: If it cannot be built from the settings given.
    """
    with set_default_dtype(run.dtype), torch.device("meta"):
        try:
            model: nn.Module = instantiate(cfg, "model")
        except SetupError as error:
            if "block size" not in str(error):  # torchao's words
                raise
            raise SetupError(
                f"{error}. model.quantize_base is True: NF4 takes linear layers of a multiple of {_NF4_MULTIPLE} "
                "weights (64 x 256); set it to False for a model of this size"
            ) from error
    build_rope_tables(model, torch.device("meta"))
    if "lora_attn_modules" in cfg.model:
        with setup_errors("config: model"):
            check_lora_targets(model, cfg.model.lora_attn_modules)
    if run.dtype is torch.float16:
        if any(isinstance(parameter, NF4Tensor) for parameter in model.parameters()):
            raise SetupError(
                "config: model: quantize_base is True with dtype 'fp16'; NF4 weights are computed in bf16 or fp32: "
                "set dtype=bf16 or model.quantize_base=False"
            )
        keep_adapters_in_fp32(model)
    return model


def load_model(model: nn.Module, checkpointer: HFCheckpointer, run: Run) -> None:
    """Give a model of :func:`build_model` the checkpoint's weights, fresh adapters and its constants.

    Args:
        model (nn.Module): torchtune model on the meta device, perhaps sharded; changed in place.
        checkpointer (HFCheckpointer): reads the checkpoint.
        run (Run): gives device, dtype and seed.
    """
    checkpointer.load_weights(model, device=run.device, dtype=run.dtype, storage_device=run.storage_device)
    # A function of the seed alone, the same on every process, whatever was drawn before.
    with torch.random.fork_rng([run.device] if run.device.type == "cuda" else []):
        torch.manual_seed(run.seed)
        assign_parameters(model, initial_adapters(model, run.device), run.storage_device)
    build_rope_tables(model, run.device)
    training.validate_no_params_on_meta_device(model)


def prepare_model(model: nn.Module, loss: WeightedCrossEntropyLoss, cfg: FinetuneConfig) -> None:
    """Switch on what the config asks of the training step: the head, ``torch.compile``, activation checkpointing.

    Args:
        model (nn.Module): torchtune model, perhaps on the meta device; changed in place.
        loss (WeightedCrossEntropyLoss): the objective; changed in place.
        cfg (FinetuneConfig): the checked config.
    """
    if (refusal := prepare_head(model, loss)) and is_main_process():
        print(
            f"{refusal}, which head '{loss.head}' cannot compute: logits are made in {loss.num_output_chunks} chunks",
            file=sys.stderr,
        )
    model.get_submodule("tok_embeddings").register_forward_pre_hook(_check_token_ids)
    if cfg.compile:
        training.compile_model(model, verbose=False)
        loss.compile_chunks()
    if cfg.enable_activation_checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})


def _check_token_ids(embeddings: Any, inputs: tuple[Tensor]) -> None:
    """Name an id that has no embedding; on a GPU, which would have to be waited for, its own error has to do."""
    (tokens,) = inputs
    if tokens.device.type != "cpu":
        return
    for token_id in torch.stack(tokens.aminmax()).tolist():
        if not 0 <= token_id < embeddings.num_embeddings:
            raise TrainingError(
                f"the data set has the token id {token_id}, the model embeddings for the ids 0 to "
                f"{embeddings.num_embeddings - 1}: make the data set with the tokenizer of the model"
            )
