"""What results depend on: whatever of this changes, what is done was made with other settings."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from tfidf_tune._files import looks_like_path
from tfidf_tune.data import source_fingerprint
from tfidf_tune.experiment._cells import Settings, Start
from tfidf_tune.experiment._config import EvalSettings
from tfidf_tune.training import (
    FinetuneConfig,
    LoRAFinetuneConfig,
    SetupError,
    build_loss,
    check_config,
    setup_errors,
)

_SCHEMAS = {"full_finetune": FinetuneConfig, "lora_finetune": LoRAFinetuneConfig}
# Keys of a training config that say nothing about the trained model.
_IMMATERIAL = (
    "output_dir",
    "save_at_percent",
    "save_every_n_steps",
    "keep_last_n_checkpoints",
    "resume_from_checkpoint",
    "metric_logger",
    "log_every_n_steps",
    "log_peak_memory_stats",
    "refuse_if_too_large",
)
# Settings of the tasks, by what their names begin with.
TASK_SETTINGS = {
    "tfidf_memorization": ("probe_file", "prefix_lengths", "max_new_tokens", "offset"),
    "tfidf_wikitext2_ppl": (
        "wikitext2_source",
        "wikitext2_name",
        "wikitext2_split",
        "wikitext2_column",
        "block_size",
        "num_blocks",
        "train_source",
        "train_name",
        "train_split",
        "train_column",
        "shared_tokens",
    ),
    "tfidf_cnn_dailymail": (
        "cnn_dailymail_source",
        "cnn_dailymail_name",
        "cnn_dailymail_split",
        "cnn_dailymail_max_source_tokens",
        "cnn_dailymail_max_new_tokens",
        "bertscore_model",
        "bertscore_num_layers",
    ),
    "tfidf_squad": ("squad_source", "squad_name", "squad_split", "squad_max_seq_len", "squad_max_new_tokens"),
}


def training_settings(cfg: DictConfig, recipe: str, start: Start | None) -> Settings:
    """Check a training config as its recipe will, and take what the trained model depends on.

    Args:
        cfg (DictConfig): the config; where it is trained and from which folder of the experiment's does not count.
        recipe (str): "full_finetune" or "lora_finetune".
        start (Start | None): what it starts from, if that is made.

    Returns:
        Settings: references resolved, local sources of text as hashes of their contents.

    Raises:
        SetupError: If something in the config is not right, or a local source cannot be read.
    """
    # References to the two folders are resolved to these words.
    cfg = cast(DictConfig, OmegaConf.merge(cfg, {"output_dir": "RUN"}))
    if start is not None:
        OmegaConf.update(cfg, "checkpointer.checkpoint_dir", "START", force_add=True)
    checked = check_config(cfg, _SCHEMAS[recipe])
    build_loss(checked)
    if ("lora_attn_modules" in checked.model) != (recipe == "lora_finetune"):
        raise SetupError(
            f"recipe is {recipe}, but the model {'has no' if recipe == 'lora_finetune' else 'has'} lora_attn_modules: "
            "adapters are trained by lora_finetune, all weights by full_finetune"
        )
    content = cast(dict[str, Any], OmegaConf.to_container(cast(DictConfig, checked)))
    settings = {key: value for key, value in content.items() if key not in _IMMATERIAL}
    settings["dataset"] = _dataset_settings(settings["dataset"])
    if start is not None:
        arguments = with_fingerprints(start.arguments, "start")
        settings["start"] = {"component": start.component, "arguments": arguments, "seed": start.seed}
    return {"recipe": recipe, **settings}


def with_fingerprints(section: Mapping[str, Any], where: str) -> Settings:
    """Put the hash of its contents in the place of a local source's name, which may be written in many ways.

    Args:
        section (Mapping[str, Any]): arguments of a component, or settings of tasks.
        where (str): the section's name, for errors.

    Returns:
        Settings: the section otherwise as it is.

    Raises:
        SetupError: If a local source cannot be read.
    """
    return dict(_fingerprints(section, where))


def task_settings(task: str, own: EvalSettings, dtype: str) -> Settings:
    """Take what the result of a task depends on; batch size and device are not among it.

    Args:
        task (str): its name.
        own (EvalSettings): of the experiment.
        dtype (str): of the weights.

    Returns:
        Settings: local sources as hashes of their contents.

    Raises:
        SetupError: If a local source cannot be read.
    """
    known = [key for kind, keys in TASK_SETTINGS.items() if task.startswith(kind) for key in keys]
    metadata = {key: value for key, value in own.metadata.items() if key in known}
    return {
        "dtype": dtype,
        "limit": own.limit,
        "model_args": own.model_args,
        "metadata": with_fingerprints(metadata, "eval.metadata"),
    }


def _dataset_settings(dataset: dict[str, Any] | list[dict[str, Any]]) -> Settings | list[Settings]:
    if isinstance(dataset, list):
        return [_section_settings(section, f"dataset[{index}]") for index, section in enumerate(dataset)]
    return _section_settings(dataset, "dataset")


def _section_settings(section: dict[str, Any], where: str) -> Settings:
    # A probe file is where passages are written, not which.
    return with_fingerprints({key: value for key, value in section.items() if key != "probe_file"}, where)


def _fingerprints(section: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, str) and key.endswith(("source", "probe_file")) and _is_file(value):
            with config_errors(f"{where}.{key}"):
                yield key, f"contents {fingerprint(value)}"
        else:
            yield key, value


def _is_file(source: str) -> bool:
    return source == "embedded" or looks_like_path(source) or Path(source).exists()


@lru_cache
def fingerprint(source: str) -> str:
    """Hash the contents of a source, once for all cells that read it: forget the hashes before a new plan."""
    return source_fingerprint(source)


@contextmanager
def config_errors(where: str) -> Iterator[None]:
    """Say in front of what is wrong with a training config where it is."""
    try:
        with setup_errors():
            yield
    except SetupError as error:
        raise SetupError(f"{where}: {error}") from error
