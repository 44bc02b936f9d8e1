"""The two kinds of models behind one interface: torchtune's modules, and transformers' own classes."""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.modules import local_kv_cache
from torchtune.modules.peft import get_merged_lora_ckpt
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

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
from tfidf_tune.training._errors import SetupError, first_line, listed
from tfidf_tune.training._hf_files import WEIGHT_DTYPES, BaseCheckpoint, is_plain, read_weights, write_weights
from tfidf_tune.training._lora import LoRASettings, is_adapter

if TYPE_CHECKING:
    from peft import LoraConfig

_logger = logging.getLogger(__name__)
Shapes = Mapping[str, torch.Size]


class Implementation(ABC):
    """What recipes need of a model in a form that depends on its kind: files, checks, decoding with a KV cache."""

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

    @abstractmethod
    def check_causality(self) -> None:
        """Raise a ValueError if predictions depend on later tokens; the model has its weights and is in eval mode."""

    @abstractmethod
    def check_packing(self) -> None:
        """Raise a ValueError if the model cannot keep documents of a row apart; as :meth:`check_causality`."""

    @property
    @abstractmethod
    def has_caches(self) -> bool:
        """Return whether :meth:`cached` is possible."""

    @abstractmethod
    def cached(
        self, num_rows: int, num_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> AbstractContextManager[Callable[[Tensor], Any]]:
        """Open a KV cache; yield a function that runs the next tokens ``[num_rows, n]`` of the rows."""


def implementation_of(model: nn.Module) -> Implementation:
    """Return the implementation of a model that a builder of the config has made."""
    return _TransformersModel(model) if isinstance(model, HFCausalLM) else _TorchtuneModel(model)


@dataclass(frozen=True)
class _TorchtuneModel(Implementation):
    """A model of torchtune's modules, whose checkpoints a :class:`~tfidf_tune.models.ModelFamily` translates."""

    model: Any

    def check(self, base: BaseCheckpoint) -> None:
        family = _family_of(base)
        hf_weights: StateDict = {}
        files: dict[str, Path] = {}
        for file in base.weight_files:
            in_file = {name: value.to("meta") for name, value in read_weights(file).items()}
            hf_weights |= in_file
            files |= dict.fromkeys(in_file, file)
        try:
            weights = family.hf_to_tune(hf_weights, base.hf_config)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"weights and config.json of checkpoint {base.folder} do not match: {error}") from error
        expected = {name: value.shape for name, value in parameters_by_name(self.model).items() if not is_adapter(name)}
        found = {name: value.shape for name, value in weights.items()}
        problems = []
        if expected.keys() ^ found.keys() <= {"output.weight"}:  # otherwise the model may lack these settings
            problems += family.differing_settings(self.model, base.hf_config)
        limit = base.hf_config.get("max_position_embeddings", base.hf_config.get("n_positions"))
        if limit is not None and getattr(self.model, "max_seq_len", 0) > limit:
            problems.append(f"max_seq_len is {limit} in the checkpoint, {self.model.max_seq_len} in the model")
        problems += _differing(family, (found, "in the checkpoint"), (expected, "in the model"))
        if problems:
            raise ValueError(
                f"the model of the config does not fit the checkpoint {base.folder}, which is of the architecture "
                f"'{base.config.model_type}':\n{listed(problems)}\nmake `model` the same model, or change "
                "checkpointer.checkpoint_dir; if they are the same, download the checkpoint again"
            )
        if problems := _differing(family, (_shapes_by_config(base), "by config.json"), (found, "in the weights")):
            raise ValueError(
                f"{base.folder / 'config.json'} and the weights do not match, so transformers could not load the "
                f"checkpoints of the run:\n{listed(problems)}\ncorrect config.json, or download the checkpoint again"
            )
        _check_tied_head(base, files)

    def load(
        self, base: BaseCheckpoint, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device
    ) -> None:
        family = _family_of(base)
        quantized = {
            name for name, value in parameters_by_name(self.model).items() if isinstance(local_tensor(value), NF4Tensor)
        }

        def weights(file: Path) -> Iterator[tuple[str, Tensor]]:
            # A bar, because NF4 takes minutes on a CPU.
            bar = {"desc": f"loading {file.name}", "unit": "weight", "leave": False, "disable": not is_main_process()}
            for key, weight in tqdm(read_weights(file).items(), **bar):
                # A copy, because what was read may be a view of the file, and a .bin may hold transposed weights.
                hf_weight = {key: weight.to(device, dtype, copy=True, memory_format=torch.contiguous_format)}
                for name, value in family.hf_to_tune(hf_weight, base.hf_config).items():
                    _check_weight(f"{file}: weight {key}", weight.dtype, value)
                    yield name, to_nf4(value) if name in quantized else value

        for file in base.weight_files:
            assign_parameters(self.model, weights(file), storage_device)

    def parts(self, base: BaseCheckpoint, device: str) -> Iterator[StateDict]:
        lora = LoRASettings.of(self.model)
        for _, layer in groupby(parameters_by_name(self.model).items(), key=lambda item: _layer_of(item[0])):
            # Merging works in place, so it needs copies.
            part = {name: _plain_tensor(value, device, copy=lora is not None) for name, value in layer}
            if lora is not None:
                part = get_merged_lora_ckpt(part, rank=lora.rank, alpha=lora.alpha)
            yield _family_of(base).tune_to_hf(part, base.hf_config)

    def write(self, base: BaseCheckpoint, folder: Path, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
        meta = {name: value for part in self.parts(base, "meta") for name, value in part.items()}
        write_weights(folder, meta, parts, max_shard_size=max_shard_size)

    def adapter(self, base: BaseCheckpoint) -> "tuple[StateDict, LoraConfig]":
        from peft import LoraConfig  # slow to import, which would delay setup errors

        lora, family = LoRASettings.require(self.model), _family_of(base)
        return family.tune_to_peft(_adapter_weights(self.model), base.hf_config), LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=family.peft_target_modules(lora.module_names),
        )

    def check_causality(self) -> None:
        pass  # torchtune's decoders are causal

    def check_packing(self) -> None:
        pass  # they take the mask of a packed row

    @property
    def has_caches(self) -> bool:
        return hasattr(self.model, "setup_caches")

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


def _differing(family: ModelFamily, first: tuple[Shapes, str], second: tuple[Shapes, str]) -> list[str]:
    """Describe the weights, by torchtune's names, that two models do not have in the same shape; each has a place."""
    (shapes, place), (others, other_place) = first, second
    return [
        f"{family.hf_name(name)} is {_shown(shapes.get(name))} {place}, {_shown(others.get(name))} {other_place}"
        for name in sorted(shapes.keys() | others.keys())
        if shapes.get(name) != others.get(name)
    ]


def _shown(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(tuple(shape))


def _shapes_by_config(base: BaseCheckpoint) -> Shapes:
    """Return the shapes of the model that transformers builds from config.json, under torchtune's names."""
    try:
        with torch.device("meta"):
            # Other attention kernels may not be installed, and change neither names nor shapes.
            built = build_hf(base.config, attn_implementation="eager").state_dict()
        return {name: value.shape for name, value in _family_of(base).hf_to_tune(built, base.hf_config).items()}
    except Exception as error:  # transformers and torch raise anything here
        raise ValueError(
            f"{base.folder / 'config.json'}: transformers cannot build a model from it ({type(error).__name__}: "
            f"{first_line(error)}): correct it, or download the checkpoint again"
        ) from error


def _check_tied_head(base: BaseCheckpoint, files: Mapping[str, Path]) -> None:
    """Refuse files with a head that differs from the embeddings although config.json ties them.

    transformers then does not tie them: the run would train another model than it evaluates.
    """
    family = _family_of(base)
    embedding = family.hf_name("tok_embeddings.weight")
    heads = [name for name in family.hf_names("output.weight") if name in files]
    if not (base.hf_config["tie_word_embeddings"] and heads):
        return
    first, second = (read_weights(files[name])[name] for name in (embedding, heads[0]))
    if not torch.equal(first, second.to(first.dtype)):
        raise ValueError(
            f"{base.folder / 'config.json'}: tie_word_embeddings is True, but {heads[0]} and {embedding} differ, "
            "and transformers then uses both: set it to false, with a model that has a head of its own, or "
            "download the checkpoint again"
        )


def _layer_of(name: str) -> str:
    """``layers.3.attn.q_proj.weight`` -> ``layers.3``; ``norm.scale`` -> ``norm``."""
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


@dataclass(frozen=True)
class _TransformersModel(Implementation):
    """A model of transformers' own class, which transformers checks, loads and saves: whole in the host's memory."""

    model: HFCausalLM

    def check(self, base: BaseCheckpoint) -> None:
        dtypes = {name: value.dtype for file in base.weight_files for name, value in read_weights(file).items()}
        try:
            skeleton, info = _from_pretrained(base, device_map="meta")
            problems = [
                f"{name} is {tuple(found)} in the files, {tuple(needed)} by config.json"
                for name, found, needed in sorted(info["mismatched_keys"])
            ]
            problems += [f"no weight {name}" for name in sorted(info["missing_keys"])]
            problems += [
                f"{name} is of {dtypes[name]}, not {WEIGHT_DTYPES}" for name in _quantized_weights(skeleton, dtypes)
            ]
        except RuntimeError:
            problems = ["of the weights that transformers joins, such as the experts of a mixture, some are missing"]
        if problems:
            raise ValueError(
                f"the checkpoint {base.folder} does not have all weights of {base.config.model_type} with an output "
                f"layer:\n{listed(problems)}\nname a checkpoint of a causal language model, or download it again"
            )
        unused = sorted(info["unexpected_keys"])
        layers = [self.model.hf_name(name) for name in self.model.layer_names]
        if beyond := _layers_beyond(unused, layers, skeleton):
            raise ValueError(
                f"the checkpoint {base.folder} has weights of decoder layers that its config.json does not have "
                f"(layers {', '.join(map(str, beyond))}; the model has 0 to {len(layers) - 1}): correct "
                "num_hidden_layers, or download the checkpoint again"
            )
        if unused:
            _logger.warning(
                f"{base.folder}: {len(unused)} weights are not of the model and are not used, first {unused[0]}"
            )

    def load(
        self, base: BaseCheckpoint, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device
    ) -> None:
        loaded, _ = _from_pretrained(base, dtype=dtype)
        is_tied = loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        if is_tied != self.model.has_tied_head:
            raise SetupError(
                f"{base.folder / 'config.json'}: tie_word_embeddings is {self.model.has_tied_head}, but the files have "
                f"{'one weight' if is_tied else 'different weights'} for embedding and output layer: correct it, or "
                "download the checkpoint again"
            )

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in parameters_by_name(self.model).items():
                if not is_adapter(name):
                    hf_name = self.model.hf_name(name)
                    value = loaded.get_parameter(hf_name).detach().to(device, dtype)
                    _check_weight(f"{base.folder}: weight {hf_name}", dtype, value)
                    if is_4bit(parameter):
                        yield name, quantize_as_4bit(parameter, value)
                    else:
                        yield name, to_nf4(value) if isinstance(local_tensor(parameter), NF4Tensor) else value

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
        with torch.device("meta"), _quiet():
            build_hf(base.config).save_pretrained(folder, state_dict=weights, max_shard_size=max_shard_size)
        (folder / "generation_config.json").unlink(missing_ok=True)  # made up, where the checkpoint has none

    def adapter(self, base: BaseCheckpoint) -> "tuple[StateDict, LoraConfig]":
        LoRASettings.require(self.model)
        config: Any = self.model.peft_config
        return {self.model.peft_name(name): value for name, value in _adapter_weights(self.model).items()}, config

    def check_causality(self) -> None:
        self.model.check_causality()

    def check_packing(self) -> None:
        self.model.check_packing()

    @property
    def has_caches(self) -> bool:
        return True

    @contextmanager
    def cached(
        self, num_rows: int, num_positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> Iterator[Callable[[Tensor], Any]]:
        hf: Any = self.model.hf
        yield partial(self.model, past_key_values=DynamicCache(config=hf.config))


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


def _layers_beyond(unused: Iterable[str], layer_names: list[str], model: Any) -> list[int]:
    """List the decoder layers beyond those of the model that weights are of, except layers that predict more tokens."""
    num_layers = len(layer_names) + (getattr(model.config, "num_nextn_predict_layers", None) or 0)
    prefix = f"{model.base_model_prefix}."
    layers = layer_names[0].rpartition(".")[0].removeprefix(prefix)
    matches = (re.match(rf"{re.escape(layers)}\.(\d+)\.", name.removeprefix(prefix)) for name in unused)
    return sorted({index for match in matches if match and (index := int(match[1])) >= num_layers})


def _from_pretrained(base: BaseCheckpoint, **options: Any) -> tuple[Any, dict[str, Any]]:
    with _quiet(shows_bar=options.get("device_map") != "meta"):
        loaded: tuple[Any, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(
            base.folder,
            config=base.config,
            trust_remote_code=has_own_code(base.config),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **options,
        )
    return loaded


@contextmanager
def _quiet(*, shows_bar: bool = False) -> Iterator[None]:
    """Silence transformers' report about weights, which ``check`` has; a bar is of one process."""
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


def _adapter_weights(model: nn.Module) -> StateDict:
    return {name: whole_tensor(value).cpu() for name, value in parameters_by_name(model).items() if is_adapter(name)}


def _check_weight(name: str, stored: torch.dtype, value: Tensor) -> None:
    if not is_plain(stored):
        raise SetupError(f"{name} is of {stored}, not {WEIGHT_DTYPES}: use a checkpoint that is not quantized")
    if not value.isfinite().all():
        raise SetupError(f"{name} is not finite in {value.dtype}: download the checkpoint again, or set another dtype")


def _plain_tensor(value: Tensor, device: str, *, copy: bool) -> Tensor:
    value = dequantize_4bit(value, device)
    if device == "meta":
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    whole = whole_tensor(value)
    if isinstance(whole, NF4Tensor):
        original: Tensor = whole.get_original_weight()
        return original.to(device)
    return whole.to(device, copy=copy)
