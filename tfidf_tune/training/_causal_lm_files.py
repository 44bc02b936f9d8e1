"""Checkpoints of transformers' own model classes: checked, loaded and saved by transformers."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tfidf_tune.models import HFCausalLM, StateDict, build_hf, has_own_code
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._lora import is_adapter
from tfidf_tune.training._sharding import assign_parameters, local_tensor, parameters_by_name, plain_name

_logger = logging.getLogger(__name__)


def check_weights(folder: Path, config: PreTrainedConfig) -> None:
    """Compare names and shapes of the files with those of the model, without reading a weight.

    Raises:
        ValueError: If a weight is missing or has another shape.
    """
    _, info = _from_pretrained(folder, config, device_map="meta")
    problems = [
        f"{name} is {tuple(found)} in the files, {tuple(needed)} by config.json"
        for name, found, needed in sorted(info["mismatched_keys"])
    ]
    problems += [f"no weight {name}" for name in sorted(info["missing_keys"])]
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:5])
        more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"the checkpoint {folder} does not have all weights of {config.model_type} with an output layer:\n"
            f"{shown}{more}\nname a checkpoint of a causal language model, or download it again"
        )
    if unused := sorted(info["unexpected_keys"]):
        _logger.warning(f"{folder}: {len(unused)} weights are not of the model and are not used, first {unused[0]}")


def load_causal_lm(
    model: HFCausalLM,
    folder: Path,
    config: PreTrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    storage_device: torch.device,
    check: Callable[[str, torch.dtype, Tensor], None],
) -> None:
    """Load base weights and buffers; the whole model is in the host's memory once.

    ``check`` gets name, stored dtype and value of each weight.
    """
    loaded, _ = _from_pretrained(folder, config, dtype=dtype)
    parameters = parameters_by_name(model)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            if not is_adapter(name):
                hf_name = model.hf_name(name)
                value = loaded.get_parameter(hf_name).detach().to(device, dtype)
                check(f"{folder}: weight {hf_name}", dtype, value)
                yield name, to_nf4(value) if isinstance(local_tensor(parameter), NF4Tensor) else value

    assign_parameters(model, weights(), storage_device)
    # No checkpoint has the tables of rotary embeddings; transformers has computed them.
    for name, _ in list(model.named_buffers()):
        module, _, buffer = name.rpartition(".")
        value = loaded.get_buffer(model.hf_name(plain_name(name)))
        model.get_submodule(module)._buffers[buffer] = value.to(device)


def whole_parts(model: HFCausalLM, plain: Callable[[Tensor], Tensor]) -> Iterator[StateDict]:
    """Yield the merged model under transformers' names, weight by weight; every process has to read all.

    ``plain`` makes a complete weight of a parameter.
    """
    parameters = parameters_by_name(model)
    for name, parameter in parameters.items():
        if is_adapter(name):
            continue
        value = plain(parameter)
        a, b = (name.replace(".base_layer.", f".lora_{one}.default.") for one in "AB")
        if a != name and a in parameters:
            config: Any = model.peft_config
            update = plain(parameters[b]).float() @ plain(parameters[a]).float() * (config.lora_alpha / config.r)
            update = update.T if config.fan_in_fan_out else update
            value = (value.float() + update).to(value.dtype)
        yield {model.hf_name(name): value}


def write_causal_lm(folder: Path, config: PreTrainedConfig, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
    """Write the weights of :func:`whole_parts` as ``save_pretrained`` does; the whole model is in memory."""
    weights = {name: value for part in parts for name, value in part.items()}
    with torch.device("meta"), _quiet():
        build_hf(config).save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)  # made up, where the checkpoint has none


def _from_pretrained(folder: Path, config: PreTrainedConfig, **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    with _quiet(shows_bar=options.get("device_map") != "meta"):
        loaded: tuple[nn.Module, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            trust_remote_code=has_own_code(config),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    return loaded


@contextmanager
def _quiet(*, shows_bar: bool = False) -> Iterator[None]:
    """Silence transformers' report about weights, which :func:`check_weights` has; a bar is of one process."""
    verbosity = transformers.logging.get_verbosity()
    bar = transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    if not (shows_bar and is_main_process()):
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bar:
            transformers.logging.enable_progress_bar()
