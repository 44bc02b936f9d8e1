"""Checkpoints of transformers' own model classes: checked, loaded and saved by transformers."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from transformers import AutoModelForCausalLM, PreTrainedConfig

from tfidf_tune.models import HFCausalLM, StateDict, build_hf, has_own_code, is_4bit, quantize_as_4bit
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import SetupError, listed
from tfidf_tune.training._hf_files import read_weights
from tfidf_tune.training._lora import is_adapter
from tfidf_tune.training._sharding import assign_parameters, local_tensor, parameters_by_name, plain_name

_logger = logging.getLogger(__name__)


def check_weights(folder: Path, files: Iterable[Path], config: PreTrainedConfig) -> None:
    """Compare names, shapes and dtypes of the files with those of the model, without reading a weight.

    Raises:
        ValueError: If a weight is missing, has another shape, or is not floating point.
    """
    skeleton, info = _from_pretrained(folder, config, device_map="meta")
    problems = [
        f"{name} is {tuple(found)} in the files, {tuple(needed)} by config.json"
        for name, found, needed in sorted(info["mismatched_keys"])
    ]
    problems += [f"no weight {name}" for name in sorted(info["missing_keys"])]
    dtypes = {name: value.dtype for file in files for name, value in read_weights(file).items()}
    problems += [
        f"{name} is of {dtypes[name]}, not floating point"
        for name, _ in skeleton.named_parameters()
        if not dtypes.get(name, torch.float32).is_floating_point
    ]
    if problems:
        raise ValueError(
            f"the checkpoint {folder} does not have all weights of {config.model_type} with an output layer:\n"
            f"{listed(problems)}\nname a checkpoint of a causal language model, or download it again"
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

    ``check`` gets name, dtype and value of each weight.

    Raises:
        SetupError: If config.json ties the output layer to the embedding, but the files have different weights.
    """
    loaded, _ = _from_pretrained(folder, config, dtype=dtype)
    is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    if is_tied != model.has_tied_head:
        raise SetupError(
            f"{folder / 'config.json'}: tie_word_embeddings is {model.has_tied_head}, but the files have "
            f"{'one weight' if is_tied else 'different weights'} for embedding and output layer: correct it, or "
            "download the checkpoint again"
        )
    parameters = parameters_by_name(model)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            if not is_adapter(name):
                hf_name = model.hf_name(name)
                value = loaded.get_parameter(hf_name).detach().to(device, dtype)
                check(f"{folder}: weight {hf_name}", dtype, value)
                if is_4bit(parameter):
                    yield name, quantize_as_4bit(parameter, value)
                else:
                    yield name, to_nf4(value) if isinstance(local_tensor(parameter), NF4Tensor) else value

    assign_parameters(model, weights(), storage_device)
    # No checkpoint has the tables of rotary embeddings; transformers has computed them.
    for name, _ in list(model.named_buffers()):
        module, _, buffer = name.rpartition(".")
        value = loaded.get_buffer(model.hf_name(plain_name(name)))
        model.get_submodule(module)._buffers[buffer] = value.to(device)


def whole_parts(model: HFCausalLM, plain: Callable[[Tensor], Tensor]) -> Iterator[StateDict]:
    """Yield the merged model under transformers' names, weight by weight; every process has to read all.

    ``plain`` makes a complete weight of a parameter. Buffers that checkpoints have follow the parameters.
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
    for name, module in model.named_modules():
        for buffer in module._buffers.keys() - module._non_persistent_buffers_set:
            yield {model.hf_name(plain_name(f"{name}.{buffer}")): plain(module.get_buffer(buffer))}


def write_causal_lm(folder: Path, config: PreTrainedConfig, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
    """Write the weights of :func:`whole_parts` as ``save_pretrained`` does; the whole model is in memory."""
    weights = {name: value for part in parts for name, value in part.items()}
    with torch.device("meta"), _quiet():
        build_hf(config).save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)  # made up, where the checkpoint has none


def _from_pretrained(folder: Path, config: PreTrainedConfig, **options: Any) -> tuple[Any, dict[str, Any]]:
    with _quiet(shows_bar=options.get("device_map") != "meta"):
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
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
