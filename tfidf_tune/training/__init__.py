"""The steps that recipes are made of, in the order in which a recipe takes them."""

import tfidf_tune._torchao

from tfidf_tune._config import FinetuneConfig, LoRAFinetuneConfig
from tfidf_tune.models import LoRASettings
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._config import check_config, load_config
from tfidf_tune.training._data import (
    StepBatches,
    agree_on_step,
    build_dataloader,
    build_dataset,
    build_tokenizer,
    keep_chat_template,
    set_special_tokens,
    write_probe_files,
)
from tfidf_tune.training._entry import recipe
from tfidf_tune.training._errors import SetupError, TrainingError, setup_errors
from tfidf_tune.training._hf_files import is_complete_folder
from tfidf_tune.training._messages import print_advice, print_data
from tfidf_tune.training._metrics import open_progress
from tfidf_tune.training._model import (
    build_model,
    load_model,
    prepare_head,
    prepare_model,
    require_no_lora,
    shard_model,
    train_adapters_only,
)
from tfidf_tune.training._monitor import build_monitor
from tfidf_tune.training._next_steps import NextSteps, next_steps
from tfidf_tune.training._resources import check_resources, format_bytes, print_least_time
from tfidf_tune.training._resume import TrainState, open_resume
from tfidf_tune.training._run import Run, milestone_name, open_run
from tfidf_tune.training._train import StepResult, build_grad_scaler, count_steps, train, train_step
from tfidf_tune.training.components import build_loss, build_optimizer, check_loss, instantiate

__all__ = [
    "FinetuneConfig",
    "HFCheckpointer",
    "LoRAFinetuneConfig",
    "LoRASettings",
    "NextSteps",
    "Run",
    "SetupError",
    "StepBatches",
    "StepResult",
    "TrainState",
    "TrainingError",
    "agree_on_step",
    "build_dataloader",
    "build_dataset",
    "build_grad_scaler",
    "build_loss",
    "build_model",
    "build_monitor",
    "build_optimizer",
    "build_tokenizer",
    "check_config",
    "check_loss",
    "check_resources",
    "count_steps",
    "format_bytes",
    "instantiate",
    "is_complete_folder",
    "keep_chat_template",
    "load_config",
    "load_model",
    "milestone_name",
    "next_steps",
    "open_progress",
    "open_resume",
    "open_run",
    "prepare_head",
    "prepare_model",
    "print_advice",
    "print_data",
    "print_least_time",
    "recipe",
    "require_no_lora",
    "set_special_tokens",
    "setup_errors",
    "shard_model",
    "train",
    "train_adapters_only",
    "train_step",
    "write_probe_files",
]
