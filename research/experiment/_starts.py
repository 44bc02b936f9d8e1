"""Components that make a checkpoint folder to start from, so that nothing has to be downloaded."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf
from torchtune.config._utils import _get_component_from_path

from tfidf_tune.training import milestone_name


def random_model(folder: Path, model: Mapping[str, Any], seed: int) -> None:
    """Write a model of random weights with a tokenizer trained on the embedded corpus.

    Args:
        folder (Path): an existing folder, where a complete Hugging Face model is written.
        model (Mapping[str, Any]): section ``model`` of a training config whose builder is
            ``torchtune.models.llama2.llama2``, ``tfidf_tune.models.gpt_neox.gpt_neox``,
            ``tfidf_tune.models.gptj.gptj``, or the ``lora_`` form of one of them: the sizes.
        seed (int): of the weights.

    Raises:
        ValueError: If the builder is a different one.
    """
    import torch
    import transformers
    from torchtune.models.llama2._model_utils import scale_hidden_dim_for_mlp

    from tfidf_tune.data import hf_tokenizer, train_embedded_tokenizer

    section = _base_section(model)
    builder = section.pop("_component_")
    given = inspect.signature(_get_component_from_path(builder)).bind(**section)
    given.apply_defaults()
    sizes = given.arguments
    model_type = _MODEL_TYPES[builder]
    known = transformers.AutoConfig.for_model(model_type)
    settings: dict[str, Any] = {}
    for ours, their_names in _NAMES.items():
        for theirs in their_names.split():
            if ours in sizes and hasattr(known, theirs):
                settings[theirs] = sizes[ours]
    if "rope_base" in sizes:
        rotation = {"rope_type": "default", "rope_theta": float(sizes["rope_base"])}
        share = {"partial_rotary_factor": sizes["rotary_pct"]} if "rotary_pct" in sizes else {}
        settings["rope_parameters"] = rotation | share
    if model_type == "llama" and not sizes["intermediate_dim"]:
        settings["intermediate_size"] = scale_hidden_dim_for_mlp(sizes["embed_dim"])
    train_embedded_tokenizer(folder, vocab_size=section["vocab_size"])
    eos_id = hf_tokenizer(str(folder)).eos_id
    config = transformers.AutoConfig.for_model(
        model_type, bos_token_id=None, eos_token_id=eos_id, **settings
    )
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        folder
    )


def trained_model(
    folder: Path,
    model: Mapping[str, Any],
    seed: int,
    *,
    source: str = "embedded",
    source_name: str | None = None,
    source_split: str = "train",
    source_column: str = "text",
    epochs: int = 4,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    num_warmup_steps: int = 20,
    block_size: int = 256,
    device: str = "cpu",
    dtype: str = "fp32",
) -> None:
    """Write a model of :func:`random_model` that the recipe ``full_finetune`` has trained by plain
    cross-entropy.

    AdamW without weight decay, the learning rate falling linearly to 0, on blocks of text.

    Args:
        folder (Path): an existing folder, where a complete Hugging Face model is written.
        model (Mapping[str, Any]): section ``model`` of a training config, see :func:`random_model`.
        seed (int): of the weights and the order of the blocks.
        source (str): text to train on, see :func:`tfidf_tune.data.load_documents`. Default:
            "embedded".
        source_name (str | None): configuration of a hub data set. Default: None.
        source_split (str): split of a hub data set or of ``embedded``. Default: "train".
        source_column (str): the column that holds the text. Default: "text".
        epochs (int): passes over the text. Default: 4.
        batch_size (int): blocks in a step. Default: 16.
        learning_rate (float): the maximum. Default: 3e-3.
        num_warmup_steps (int): steps until the learning rate reaches its maximum. Default: 20.
        block_size (int): tokens in a block. Default: 256.
        device (str): device of the training. Default: "cpu".
        dtype (str): ``fp32`` or ``bf16``, of weights and training. Default: "fp32".

    Raises:
        ValueError: If :func:`random_model` does not support the builder, or the recipe refuses its
            config.
    """
    text = {
        "source": source,
        "source_name": source_name,
        "source_split": source_split,
        "source_column": source_column,
    }
    settings = {
        "seed": seed,
        "batch_size": batch_size,
        "epochs": epochs,
        "device": device,
        "dtype": dtype,
    }
    settings |= {"save_at_percent": [100], "keep_last_n_checkpoints": 0, "log_every_n_steps": 10}
    schedule = "transformers.get_linear_schedule_with_warmup"
    with TemporaryDirectory(dir=folder) as scratch:
        start = Path(scratch, "start")
        run = Path(scratch, "run")
        random_model(start, model, seed)
        config = {
            "output_dir": str(run),
            "model": _base_section(model),
            "checkpointer": {
                "_component_": "tfidf_tune.training.HFCheckpointer",
                "checkpoint_dir": str(start),
            },
            "tokenizer": {"_component_": "tfidf_tune.data.hf_tokenizer", "path": str(start)},
            "dataset": {
                "_component_": "tfidf_tune.data.text_blocks_dataset",
                **text,
                "block_size": block_size,
            },
            "loss": {"_component_": "tfidf_tune.loss.CrossEntropyLoss"},
            "optimizer": {
                "_component_": "torch.optim.AdamW",
                "lr": learning_rate,
                "weight_decay": 0.0,
                "fused": True,
            },
            "lr_scheduler": {"_component_": schedule, "num_warmup_steps": num_warmup_steps},
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": f"{run}/logs",
            },
            **settings,
        }
        recipe = import_module("tfidf_tune.recipes.full_finetune").recipe_main.__wrapped__
        recipe(OmegaConf.create(config))
        for file in (run / milestone_name(100)).iterdir():
            file.rename(folder / file.name)


def _base_section(model: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the section ``model`` of a builder with LoRA to that of the plain builder."""
    builder = str(model["_component_"]).replace(".lora_", ".")
    if builder not in _MODEL_TYPES:
        raise ValueError(
            f"a start cannot be made for the model {model['_component_']}: use "
            f"{', '.join(_MODEL_TYPES)}, or the lora_ form of one of them"
        )
    sizes = inspect.signature(_get_component_from_path(builder)).parameters
    return {
        "_component_": builder,
        **{str(key): value for key, value in model.items() if key in sizes},
    }


_MODEL_TYPES = {
    "torchtune.models.llama2.llama2": "llama",
    "tfidf_tune.models.gpt_neox.gpt_neox": "gpt_neox",
    "tfidf_tune.models.gptj.gptj": "gptj",
}
# The builders' names -> settings of transformers' configs, of which an architecture has some.
_NAMES = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "embed_dim": "hidden_size",
    "max_seq_len": "max_position_embeddings",
    "intermediate_dim": "intermediate_size n_inner",
    "rotary_dim": "rotary_dim",
    "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "attn_dropout": "attention_dropout attn_pdrop",
    "attention_bias": "attention_bias",
    "use_parallel_residual": "use_parallel_residual",
}
