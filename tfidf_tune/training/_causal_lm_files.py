"""Checkpoints of transformers' own model classes: checked, loaded and saved by transformers."""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

from tfidf_tune.models import HFCausalLM, StateDict, build_hf, has_own_code, is_4bit, quantize_as_4bit
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import SetupError, first_line, listed
from tfidf_tune.training._hf_files import WEIGHT_DTYPES, is_plain, read_weights
from tfidf_tune.training._lora import is_adapter
from tfidf_tune.training._sharding import assign_parameters, local_tensor, parameters_by_name, plain_name

_logger = logging.getLogger(__name__)


def check_weights(folder: Path, files: Iterable[Path], config: PreTrainedConfig, layer_names: Sequence[str]) -> None:
    """Compare names, shapes and dtypes of the files with those of the model, without reading a weight.

    Args:
        folder (Path): holds config.json.
        files (Iterable[Path]): the weight files.
        config (PreTrainedConfig): the checkpoint's config.
        layer_names (Sequence[str]): transformers' names of the model's decoder layers.

    Raises:
        ValueError: If a weight is missing, has another shape, is quantized, or is of a layer that the model lacks.
    """
    dtypes = {name: value.dtype for file in files for name, value in read_weights(file).items()}
    try:
        skeleton, info = _from_pretrained(folder, config, device_map="meta")
    except RuntimeError as error:
        missing = [f"no weight {name}" for name in _missing_parts(config, dtypes)]
        raise ValueError(_unfit(folder, config, missing or [first_line(error)])) from error
    problems = [
        f"{name} is {tuple(found)} in the files, {tuple(needed)} by config.json"
        for name, found, needed in sorted(info["mismatched_keys"])
    ]
    problems += [f"no weight {name}" for name in sorted(info["missing_keys"])]
    problems += [f"{name} is of {dtypes[name]}, not {WEIGHT_DTYPES}" for name in _quantized_weights(skeleton, dtypes)]
    if problems:
        raise ValueError(_unfit(folder, config, problems))
    unused = sorted(info["unexpected_keys"])
    if beyond := _layers_beyond(unused, layer_names, skeleton):
        raise ValueError(
            f"the checkpoint {folder} has weights of decoder layers that its config.json does not have (layers "
            f"{', '.join(map(str, beyond))}; the model has 0 to {len(layer_names) - 1}): correct num_hidden_layers, or "
            "download the checkpoint again"
        )
    if unused:
        _logger.warning(f"{folder}: {len(unused)} weights are not of the model and are not used, first {unused[0]}")


def _unfit(folder: Path, config: PreTrainedConfig, problems: Sequence[str]) -> str:
    return (
        f"the checkpoint {folder} does not have all weights of {config.model_type} with an output layer:\n"
        f"{listed(problems)}\nname a checkpoint of a causal language model, or download it again"
    )


def _missing_parts(config: PreTrainedConfig, found: Collection[str]) -> list[str]:
    """List weights that files lack, under the files' names: transformers' models have a mixture's experts as one."""
    with torch.device("meta"):
        model = build_hf(config)
    prefix = f"{model.base_model_prefix}."  # files may have it or not
    present = {name.removeprefix(prefix) for name in found}
    needed = revert_weight_conversion(model, model.state_dict()).keys() - model.all_tied_weights_keys.keys()
    return sorted(name for name in needed if name.removeprefix(prefix) not in present)


def _quantized_weights(model: Any, dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """List tensors of the files from which transformers would make weights, although they are not plain numbers."""
    needed = model.state_dict()
    conversions = get_model_conversion_mapping(model)
    renamings, converters = (
        [one for one in conversions if isinstance(one, kind)] for kind in (WeightRenaming, WeightConverter)
    )
    found = []
    for name in sorted(name for name, dtype in dtypes.items() if not is_plain(dtype)):
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, needed)
        used = needed.get(target, needed.get(name))
        if used is not None and used.is_floating_point():  # buffers may be whole numbers
            found.append(name)
    return found


def _layers_beyond(unused: Iterable[str], layer_names: Sequence[str], model: Any) -> list[int]:
    """List the decoder layers beyond those of the model that weights are of, except layers that predict more tokens."""
    num_layers = len(layer_names) + (getattr(model.config, "num_nextn_predict_layers", None) or 0)
    prefix = f"{model.base_model_prefix}."
    layers = layer_names[0].rpartition(".")[0].removeprefix(prefix)
    matches = (re.match(rf"{re.escape(layers)}\.(\d+)\.", name.removeprefix(prefix)) for name in unused)
    return sorted({index for match in matches if match and (index := int(match[1])) >= num_layers})


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
