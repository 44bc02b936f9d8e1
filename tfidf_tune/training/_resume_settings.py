"""Which settings a run that goes on has to share with the run that it goes on from."""

from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torchtune.utils import get_world_size_and_rank

from tfidf_tune.training._config import FinetuneConfig

_MINI_BATCH = "batch_size x processes"

# Keys that may change between a run and its continuation: what is shown and kept, and how the same is computed.
_FREE_KEYS = (
    "compile",
    "enable_activation_checkpointing",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "keep_last_n_checkpoints",
    "log_every_n_steps",
    "log_peak_memory_stats",
    "metric_logger",
    "on_non_finite",
    "output_dir",
    "refuse_if_too_large",
    "resume_from_checkpoint",
    "save_at_percent",
    "save_every_n_steps",
)


def lasting_settings(cfg: FinetuneConfig) -> dict[str, Any]:
    """Take from a config what decides what is computed; the run's folder may have moved.

    Args:
        cfg (FinetuneConfig): the checked config.

    Returns:
        dict[str, Any]: plain values, equal for a run and its continuation.
    """
    resolved: dict[str, Any] = OmegaConf.to_container(cast(DictConfig, cfg), resolve=True)  # type: ignore[assignment]
    settings = {key: value for key, value in resolved.items() if key not in (*_FREE_KEYS, "batch_size")}
    world_size, _ = get_world_size_and_rank()
    return {
        **_relocated(settings, cfg.output_dir),
        # A change of the number of processes is none of the data, if a mini-batch of all stays the same sequences.
        _MINI_BATCH: cfg.batch_size * world_size,
    }


def _relocated(value: Any, output_dir: str) -> Any:
    if isinstance(value, dict):
        return {key: _relocated(inner, output_dir) for key, inner in value.items()}
    if isinstance(value, list):
        return [_relocated(inner, output_dir) for inner in value]
    if isinstance(value, str) and (value == output_dir or value.startswith(f"{output_dir}/")):
        return f"output_dir{value.removeprefix(output_dir)}"
    return value
