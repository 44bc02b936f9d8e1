"""The two kinds of models behind one interface: torchtune's modules, and transformers' own classes."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.modules import local_kv_cache
from torchtune.modules.peft import get_merged_lora_ckpt
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from tfidf_tune.models import (
    FAMILIES,
    HFCausalLM,
    ModelFamily,
    StateDict,
    build_hf,
    dequantize_4bit,
    has_own_code,
    is_4bit,
    quantize_as_4bit,
)
from tfidf_tune.training._distributed import (
    assign_parameters,
    is_main_process,
    local_tensor,
    parameters_by_name,
    plain_name,
    whole_tensor,
)
from tfidf_tune.training._errors import SetupError, listed
from tfidf_tune.training._hf_files import BaseCheckpoint, check_files, quiet, read_weights, write_weights
from tfidf_tune.training._lora import LoRASettings, is_adapter

if TYPE_CHECKING:
    from peft import LoraConfig

_logger = logging.getLogger(__name__)


class Implementation(ABC):
    """What recipes need of a model in a form that depends on its kind: files, checks, decoding with a KV cache."""

    has_caches = True
    """Whether :meth:`cached` is possible."""

    @abstractmethod
    def check(self, base: BaseCheckpoint) -> None:
        """Compare the model with a checkpoint, see :meth:`HFCheckpointer.check_model`."""

    @abstractmethod
    def load(
        self, base: BaseCheckpoint, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device
    ) -> None:
        """Load the base weights of a checkpoint, see :meth:`HFCheckpointer.load_weights`."""

    @abstractmethod
    def parts(self, base: BaseCheckpoint, device: str) -> Iterator[StateDict]:
        """Yield the merged model under Hugging Face's names; every process has to read all. On meta without values."""

    @abstractmethod
    def write(self, base: BaseCheckpoint, folder: Path, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
        """Write :meth:`parts` as weight files of transformers."""

    @abstractmethod
    def adapter(self, base: BaseCheckpoint) -> "tuple[StateDict, LoraConfig]":
        """Return the LoRA weights under PEFT's names, and PEFT's config; every process has to call."""

    def check_causality(self) -> None:  # noqa: B027, torchtune's decoders are causal
        """Raise a ValueError if predictions depend on later tokens; the model has its weights and is in eval mode."""

    def check_packing(self) -> None:  # noqa: B027, torchtune's decoders take the mask of a packed row
        """Raise a ValueError if the model cannot keep documents of a row apart; as :meth:`check_causality`."""

    @abstractmethod
    def cached(
        self, num_rows: int, num_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> AbstractContextManager[Callable[[Tensor], Any]]:
        """Open a KV cache; yield a function that runs the next tokens ``[num_rows, n]`` of the rows."""


def implementation_of(model: nn.Module) -> Implementation:
    """Return the implementation of a model that a builder of the config has made."""
    return _TransformersModel(model) if isinstance(model, HFCausalLM) else _TorchtuneModel(model)


class _TorchtuneModel(Implementation):
    """A model of torchtune's modules, whose checkpoints a :class:`~tfidf_tune.models.ModelFamily` translates."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.has_caches = hasattr(model, "setup_caches")

    def check(self, base: BaseCheckpoint) -> None:
        family = _family_of(base)
        skeleton, unused = check_files(base)
        converted = family.hf_to_tune(skeleton.state_dict(), base.config)
        theirs = {name: tuple(value.shape) for name, value in converted.items()}
        ours = {name: tuple(value.shape) for name, value in parameters_by_name(self.model).items()}
        names = sorted(name for name in theirs.keys() | ours.keys() if not is_adapter(name))
        problems = [
            f"{name} is in the files, but not in the model of config.json"
            for name in unused
            if not name.endswith(family.ignored)
        ]
        if {name for name in names if name not in theirs or name not in ours} <= {"output.weight"}:
            # A model with other layers may lack these settings.
            problems += family.differing_settings(self.model, base.config)
        limit = getattr(base.config, "max_position_embeddings", None)
        if limit is not None and getattr(self.model, "max_seq_len", 0) > limit:
            problems.append(f"max_seq_len is {limit} in the checkpoint, {self.model.max_seq_len} in the model")
        problems += [
            f"{family.hf_name(name)} is {theirs.get(name, 'missing')} in the checkpoint, "
            f"{ours.get(name, 'missing')} in the model"
            for name in names
            if theirs.get(name) != ours.get(name)
        ]
        if problems:
            raise ValueError(
                f"the model of the config does not fit the checkpoint {base.folder}, which is of the architecture "
                f"'{base.config.model_type}':\n{listed(problems)}\nmake `model` the same model, or change "
                "checkpointer.checkpoint_dir"
            )

    def load(
        self, base: BaseCheckpoint, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device
    ) -> None:
        family, parameters = _family_of(base), parameters_by_name(self.model)

        def weights(file: Path) -> Iterator[tuple[str, Tensor]]:
            # A bar, because NF4 takes minutes on a CPU.
            bar = {"desc": f"loading {file.name}", "unit": "weight", "leave": False, "disable": not is_main_process()}
            for key, weight in tqdm(read_weights(file).items(), **bar):
                # A copy, because what was read may be a view of the file, and a .bin may hold transposed weights.
                hf_weight = {key: weight.to(device, dtype, copy=True, memory_format=torch.contiguous_format)}
                for name, value in family.hf_to_tune(hf_weight, base.config).items():
                    yield name, _in_the_form_of(parameters[name], value, f"{file}: weight {key}")

        for file in base.weight_files:
            assign_parameters(self.model, weights(file), storage_device)

    def parts(self, base: BaseCheckpoint, device: str) -> Iterator[StateDict]:
        lora = LoRASettings.of(self.model)
        parameters = parameters_by_name(self.model)
        for _, layer in groupby(parameters.items(), key=lambda item: re.findall(r"^(?:layers\.\d+|\w+)", item[0])):
            # Merging works in place, so it needs copies.
            part = {name: _plain_tensor(value, device, copy=lora is not None) for name, value in layer}
            if lora is not None:
                part = get_merged_lora_ckpt(part, rank=lora.rank, alpha=lora.alpha)
            yield _family_of(base).tune_to_hf(part, base.config)

    def write(self, base: BaseCheckpoint, folder: Path, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
        meta = {name: value for part in self.parts(base, "meta") for name, value in part.items()}
        write_weights(folder, meta, parts, max_shard_size=max_shard_size)

    def adapter(self, base: BaseCheckpoint) -> "tuple[StateDict, LoraConfig]":
        from peft import LoraConfig  # slow to import, which would delay setup errors

        lora, family = LoRASettings.require(self.model), _family_of(base)
        return family.tune_to_peft(_adapter_weights(self.model), base.config), LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=[family.lora_targets[name] for name in lora.module_names],
        )

    @contextmanager
    def cached(
        self, num_rows: int, num_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> Iterator[Callable[[Tensor], Any]]:
        may_attend = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device).tril()
        positions = torch.arange(num_positions, device=device)
        start = 0

        def run(tokens: Tensor) -> Any:
            nonlocal start
            new = slice(start, start := start + tokens.shape[1])
            mask, input_pos = may_attend[new].expand(num_rows, -1, -1), positions[new].expand(num_rows, -1)
            return self.model(tokens, mask=mask, input_pos=input_pos)

        sizes = {"batch_size": num_rows, "decoder_max_seq_len": num_positions}
        with local_kv_cache(self.model, device=device, dtype=dtype, **sizes):
            yield run


def _family_of(base: BaseCheckpoint) -> ModelFamily:
    model_type = base.config.model_type
    if model_type not in FAMILIES:
        raise ValueError(
            f"the checkpoint {base.folder} is of the architecture '{model_type}', which torchtune's modules do not "
            f"have (only {', '.join(sorted(FAMILIES))}): set model._component_ to tfidf_tune.models.auto, or for "
            "LoRA tfidf_tune.models.lora_auto"
        )
    return FAMILIES[model_type]


class _TransformersModel(Implementation):
    """A model of transformers' own class, which transformers checks, loads and saves: whole in the host's memory."""

    def __init__(self, model: HFCausalLM) -> None:
        self.model = model

    def check(self, base: BaseCheckpoint) -> None:
        _, unused = check_files(base)
        if unused:
            _logger.warning(
                f"{base.folder}: {len(unused)} weights are not of the model and are not used, first {unused[0]}"
            )

    def load(
        self, base: BaseCheckpoint, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device
    ) -> None:
        with quiet(shows_bar=True):
            loaded = AutoModelForCausalLM.from_pretrained(
                base.folder, config=base.config, trust_remote_code=has_own_code(base.config), dtype=dtype
            )

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in parameters_by_name(self.model).items():
                if not is_adapter(name):
                    hf_name = self.model.hf_name(name)
                    value = loaded.get_parameter(hf_name).detach().to(device, dtype)
                    yield name, _in_the_form_of(parameter, value, f"{base.folder}: weight {hf_name}")

        assign_parameters(self.model, weights(), storage_device)
        # No checkpoint has the tables of rotary embeddings; transformers has computed them.
        for name, _ in list(self.model.named_buffers()):
            module, _, buffer = name.rpartition(".")
            value = loaded.get_buffer(self.model.hf_name(plain_name(name)))
            self.model.get_submodule(module)._buffers[buffer] = value.to(device)

    def parts(self, base: BaseCheckpoint, device: str) -> Iterator[StateDict]:
        model, parameters = self.model, parameters_by_name(self.model)
        plain = partial(_plain_tensor, device=device, copy=False)
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
        for name, module in model.named_modules():  # buffers that checkpoints have
            for buffer in module._buffers.keys() - module._non_persistent_buffers_set:
                yield {model.hf_name(plain_name(f"{name}.{buffer}")): plain(module.get_buffer(buffer))}

    def write(self, base: BaseCheckpoint, folder: Path, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
        weights = {name: value for part in parts for name, value in part.items()}
        with torch.device("meta"), quiet():
            build_hf(base.config).save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
        (folder / "generation_config.json").unlink(missing_ok=True)  # made up, where the checkpoint has none

    def adapter(self, base: BaseCheckpoint) -> "tuple[StateDict, LoraConfig]":
        config: Any = self.model.peft_config
        names = {name: self.model.hf_name(name).replace(".default.", ".") for name in parameters_by_name(self.model)}
        weights = _adapter_weights(self.model)
        return {f"base_model.model.{names[name]}": value for name, value in weights.items()}, config

    def check_causality(self) -> None:
        self.model.check_causality()

    def check_packing(self) -> None:
        self.model.check_packing()

    @contextmanager
    def cached(
        self, num_rows: int, num_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> Iterator[Callable[[Tensor], Any]]:
        hf: Any = self.model.hf
        yield partial(self.model, past_key_values=DynamicCache(config=hf.config))


def _adapter_weights(model: nn.Module) -> StateDict:
    return {name: whole_tensor(value).cpu() for name, value in parameters_by_name(model).items() if is_adapter(name)}


def _in_the_form_of(parameter: Tensor, value: Tensor, name: str) -> Tensor:
    """Quantize a weight that was read if the parameter is; ``name`` is shown if the weight cannot be trained."""
    if not value.isfinite().all():
        raise SetupError(f"{name} is not finite in {value.dtype}: download the checkpoint again, or set another dtype")
    if is_4bit(parameter):
        return quantize_as_4bit(parameter, value)
    return to_nf4(value) if isinstance(local_tensor(parameter), NF4Tensor) else value


def _plain_tensor(value: Tensor, device: str, *, copy: bool) -> Tensor:
    value = dequantize_4bit(value, device)
    if device == "meta":
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    whole = whole_tensor(value)
    if isinstance(whole, NF4Tensor):
        original: Tensor = whole.get_original_weight()
        return original.to(device)
    return whole.to(device, copy=copy)
