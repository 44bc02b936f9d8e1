"""Hugging Face checkpoints: the base that a run begins from, and the folders that it writes.

Models are of two kinds, torchtune's modules and transformers' own classes. A class for each does
what depends on it.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.modules.peft import get_merged_lora_ckpt
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from tfidf_tune._checks import require_bool
from tfidf_tune._files import atomic_folder
from tfidf_tune.models import FAMILIES, HFCausalLM, LoRASettings, dequantize_4bit, is_adapter
from tfidf_tune.models.causal_lm import build_hf, has_own_code
from tfidf_tune.models.family import StateDict
from tfidf_tune.models.linear import is_4bit, quantize_as_4bit
from tfidf_tune.training import _distributed as distributed
from tfidf_tune.training import _hf_files as hf
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of, listed

_logger = logging.getLogger(__name__)

# Weights of an existing folder are always replaced: transformers might load them.
_WHOLE = ("model.safetensors", "adapter_model.safetensors")
_REPLACED = (*_WHOLE, "model.safetensors.index.json", "model-?????-of-?????.safetensors")
_SAMPLE_BYTES = 2**20


class HFCheckpointer:
    """Reads a Hugging Face checkpoint folder and writes folders of the same kind.

    Weights are loaded one by one, from safetensors or, if there are none, from PyTorch's ``.bin``
    files, of which only tensors are unpickled. Checkpoints have the names and layout of
    transformers (full models) or PEFT (adapters), with config and tokenizer files, and are written
    atomically. Config and tokenizer files are read by the constructor, weights by
    :meth:`load_weights`: after that, the folder may change.

    A model of :class:`~tfidf_tune.models.HFCausalLM` is loaded and saved by transformers, as a
    whole.

    Args:
        checkpoint_dir (str): local folder, or a model id of the Hugging Face hub, which is
            downloaded.
        revision (str | None): branch, tag or commit of a hub id. Default: None, its main branch.
        max_shard_size (str): largest weight file that is written. Default: "5GB".
        trust_remote_code (bool): run the Python files of a checkpoint whose architecture
            transformers lacks, and copy them into checkpoints. Default: False.

    Attributes:
        chat_template (str | None): written into checkpoints instead of the templates of the
            tokenizer. Default: None.
        companion_bytes (int): size of the files of a checkpoint that are not weights.
        folder (Path): the checkpoint's folder.
        transformers_config (PreTrainedConfig): the checkpoint's config.
        weight_files (list[Path]): the checkpoint's weight files.

    Raises:
        FileNotFoundError: If ``checkpoint_dir`` is not a folder and cannot be downloaded, or a file
            is missing.
        ValueError: If it is not a causal language model of plain weights, it has code that is not
            trusted, a file cannot be copied into checkpoints, or ``max_shard_size`` is not a size.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str,
        revision: str | None = None,
        max_shard_size: str = "5GB",
        trust_remote_code: bool = False,
    ) -> None:
        require_bool("trust_remote_code", trust_remote_code)
        # Refuses what is not a size.
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
        files = hf.find_checkpoint(checkpoint_dir, revision, trust_remote_code=trust_remote_code)
        self.folder, self.transformers_config, self.weight_files = files
        self._max_shard_size = max_shard_size
        self._revision = revision
        # An id of the hub is kept, because the folder of its snapshot exists only on this machine.
        self._base_name = checkpoint_dir
        if Path(checkpoint_dir).expanduser().is_dir():
            self._base_name = str(self.folder.resolve())
        self._config_file = hf.read_json(self.folder / "config.json")
        self._companions = hf.read_companions(self.folder, has_code=trust_remote_code)
        self.chat_template: str | None = None
        self.companion_bytes = sum(len(content) for content in self._companions.values())

    def fingerprint(self) -> str:
        """Identify the weights by 16 hexadecimal digits: the files' sizes, first and last MiB."""
        digest = hashlib.sha256()
        for path in self.weight_files:
            size = path.stat().st_size
            digest.update(str(size).encode())
            with path.open("rb") as file:
                for start in (0, max(0, size - _SAMPLE_BYTES)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
        return digest.hexdigest()[:16]

    def check_model(self, model: nn.Module) -> None:
        """Compare a model, perhaps on the meta device, with the checkpoint; weights stay on disk.

        Raises:
            ValueError: If settings, names or shapes differ, or a file is damaged; the message names
                them.
        """
        self._implementation_of(model).check()

    def load_weights(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        dtype: torch.dtype,
        storage_device: torch.device | None = None,
    ) -> None:
        """Load the base weights, file by file, into a model that :meth:`check_model` accepts.

        The model may be on the meta device or sharded; where it has NF4 tensors, weights are
        quantized, to be computed in ``dtype``. Shards are kept on ``storage_device``, by default
        ``device``. Adapter weights are not changed.

        Raises:
            SetupError: If a weight is not finite in this dtype.
        """
        self._implementation_of(model).load(
            device=device, dtype=dtype, storage_device=storage_device or device
        )

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write all weights as a complete folder that ``transformers`` loads; LoRA adapters are
        merged.

        NF4 weights are dequantized. Files of a model in an existing folder are replaced, all others
        kept. Every process has to call; rank 0 writes.

        Raises:
            TrainingError: If it cannot be written.
        """
        implementation = self._implementation_of(model)
        dtype = str(model.get_parameter("tok_embeddings.weight").dtype).removeprefix("torch.")
        keys = [key for key in ("torch_dtype", "dtype") if key in self._config_file] or ["dtype"]

        def write(temporary: Path, parts: Iterator[StateDict]) -> None:
            implementation.write(temporary, parts, max_shard_size=self._max_shard_size)
            hf.write_json(temporary / "config.json", self._config_file | dict.fromkeys(keys, dtype))

        self._write(folder, implementation.parts("cpu"), write)

    def save_adapter(self, model: nn.Module, folder: Path) -> None:
        """Write the LoRA adapters as a folder that ``peft`` loads onto the unchanged base model, as
        :meth:`save_model`.

        Raises:
            TrainingError: If it cannot be written.
        """
        weights, config = self._implementation_of(model).adapter()
        config = replace(
            config,
            base_model_name_or_path=self._base_name,
            revision=self._revision,
            inference_mode=True,
        )
        # peft makes it a set, whose order differs between runs.
        config.target_modules = sorted(config.target_modules or ())

        def write(temporary: Path, _: Iterator[StateDict]) -> None:
            config.save_pretrained(temporary)
            contiguous = {name: value.contiguous() for name, value in weights.items()}
            save_file(contiguous, temporary / "adapter_model.safetensors")

        self._write(folder, iter(()), write)

    def _implementation_of(self, model: nn.Module) -> "_TorchtuneModel | _TransformersModel":
        """Return what depends on the kind of a model that a builder of the config has made."""
        if isinstance(model, HFCausalLM):
            return _TransformersModel(model, self)
        return _TorchtuneModel(model, self)

    def _write(
        self,
        folder: Path,
        parts: Iterator[StateDict],
        write: Callable[[Path, Iterator[StateDict]], None],
    ) -> None:
        """Write parts that all processes gather; a failure of the writing process raises on all."""
        failure = None
        if distributed.is_main_process():
            try:
                # The folder gets its name when it is complete; what an earlier run left in it is
                # kept, but for weights.
                with atomic_folder(folder, replace=_REPLACED) as temporary:
                    write(temporary, parts)
                    for name, content in self._companions.items():
                        if self.chat_template is not None and "chat_template" in name:
                            continue
                        (temporary / name).parent.mkdir(exist_ok=True)
                        (temporary / name).write_bytes(content)
                    if self.chat_template is not None:
                        (temporary / "chat_template.jinja").write_text(
                            self.chat_template, encoding="utf-8"
                        )
            except Exception as error:
                failure = error
        # Every process takes part in every gathering, also in those that a failed write left out.
        for _ in parts:
            pass
        cause = distributed.gather_objects(None if failure is None else cause_of(failure))[0]
        if cause is not None:
            raise TrainingError(f"checkpoint {folder} could not be written: {cause}") from failure


class _TorchtuneModel:
    """A model of torchtune's modules, whose checkpoints a :class:`~tfidf_tune.models.ModelFamily`
    translates.
    """

    def __init__(self, model: Any, base: HFCheckpointer) -> None:
        self._model = model
        self._base = base
        self._config = base.transformers_config
        if self._config.model_type not in FAMILIES:
            raise ValueError(
                f"torchtune's modules have no architecture '{self._config.model_type}', set "
                "model._component_ to tfidf_tune.models.auto or tfidf_tune.models.lora_auto"
            )
        self._family = FAMILIES[self._config.model_type]

    def check(self) -> None:
        """Compare the model with the checkpoint, see :meth:`HFCheckpointer.check_model`."""
        # Both models on the meta device, by torchtune's names: transformers' as config.json
        # describes it, and ours.
        skeleton, unused = hf.check_files(self._base.folder, self._config, self._base.weight_files)
        converted = self._family.hf_to_tune(skeleton.state_dict(), self._config)
        theirs = _shapes_of_base(converted)
        ours = _shapes_of_base(distributed.parameters_by_name(self._model))
        problems = [
            f"{name} is in the files, but not in the model of config.json"
            for name in unused
            if not name.endswith(self._family.ignored)
        ]
        # A model with other layers may lack these settings.
        has_same_layers = theirs.keys() ^ ours.keys() <= {"output.weight"}
        if has_same_layers:
            problems += self._family.differing_settings(self._model, self._config)
        for name in sorted(theirs.keys() | ours.keys()):
            their_shape = theirs.get(name, "missing")
            our_shape = ours.get(name, "missing")
            if their_shape != our_shape:
                problems.append(
                    f"{self._family.hf_name(name)} is {their_shape} in the checkpoint, {our_shape} "
                    "in the model"
                )
        if problems:
            folder = self._base.folder
            model_type = self._config.model_type
            raise ValueError(
                f"the model of the config does not fit the checkpoint {folder} of the architecture "
                f"'{model_type}':\n"
                f"{listed(problems)}\nchange `model` or checkpointer.checkpoint_dir"
            )

    def load(
        self, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device
    ) -> None:
        """Load the base weights of the checkpoint, see :meth:`HFCheckpointer.load_weights`."""
        parameters = distributed.parameters_by_name(self._model)

        def weights(file: Path) -> Iterator[tuple[str, Tensor]]:
            # A bar, because NF4 takes minutes on a CPU.
            bar = tqdm(
                hf.read_weights(file).items(),
                desc=f"loading {file.name}",
                unit="weight",
                leave=False,
                disable=not distributed.is_main_process(),
            )
            for key, weight in bar:
                # A copy, because what was read may be a view of the file, and a .bin may hold
                # transposed weights.
                copy = weight.to(device, dtype, copy=True, memory_format=torch.contiguous_format)
                for name, value in self._family.hf_to_tune({key: copy}, self._config).items():
                    yield name, _in_the_form_of(parameters[name], value, f"{file}: weight {key}")

        for file in self._base.weight_files:
            distributed.assign_parameters(self._model, weights(file), storage_device)

    def parts(self, device: str) -> Iterator[StateDict]:
        """Yield the merged model under Hugging Face's names; every process has to read all. On meta
        without values.
        """
        lora = LoRASettings.of(self._model)
        parameters = distributed.parameters_by_name(self._model)
        # A layer is what has the same start: "layers.0" of "layers.0.attn.q_proj.weight", "output".
        layers = groupby(
            parameters.items(), key=lambda item: re.findall(r"^(?:layers\.\d+|\w+)", item[0])
        )
        for _, layer in layers:
            # Merging works in place, so it needs copies.
            part = {
                name: _plain_tensor(value, device, copy=lora is not None) for name, value in layer
            }
            if lora is not None:
                part = get_merged_lora_ckpt(part, rank=lora.rank, alpha=lora.alpha)
            yield self._family.tune_to_hf(part, self._config)

    def write(self, folder: Path, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
        """Write :meth:`parts` as weight files of transformers."""
        meta: StateDict = {}
        for part in self.parts("meta"):
            meta |= part
        hf.write_weights(folder, meta, parts, max_shard_size=max_shard_size)

    def adapter(self) -> tuple[StateDict, Any]:
        """Return the LoRA weights under PEFT's names, and PEFT's config; every process
        has to call.
        """
        from peft import LoraConfig  # slow to import, which would delay setup errors

        lora = LoRASettings.require(self._model)
        weights = self._family.tune_to_peft(_adapter_weights(self._model), self._config)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=[self._family.lora_targets[name] for name in lora.module_names],
        )
        return weights, config


class _TransformersModel:
    """A model of transformers' own class, which transformers checks, loads and saves: whole in the
    host's memory.
    """

    def __init__(self, model: HFCausalLM, base: HFCheckpointer) -> None:
        self._model = model
        self._base = base
        self._config = base.transformers_config

    def check(self) -> None:
        _, unused = hf.check_files(self._base.folder, self._config, self._base.weight_files)
        if unused:
            _logger.warning(
                f"{self._base.folder}: {len(unused)} weights are not of the model and are not "
                f"used, first {unused[0]}"
            )

    def load(
        self, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device
    ) -> None:
        folder = self._base.folder
        model = self._model
        with hf.quiet(shows_bar=True):
            loaded = AutoModelForCausalLM.from_pretrained(
                folder,
                config=self._config,
                trust_remote_code=has_own_code(self._config),
                dtype=dtype,
            )

        def weights() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in distributed.parameters_by_name(model).items():
                if not is_adapter(name):
                    hf_name = model.hf_name(name)
                    value = loaded.get_parameter(hf_name).detach().to(device, dtype)
                    yield name, _in_the_form_of(parameter, value, f"{folder}: weight {hf_name}")

        distributed.assign_parameters(model, weights(), storage_device)
        # No checkpoint has the tables of rotary embeddings; transformers has computed them.
        for name, _ in list(model.named_buffers()):
            module, _, buffer = name.rpartition(".")
            value = loaded.get_buffer(model.hf_name(distributed.plain_name(name)))
            model.get_submodule(module)._buffers[buffer] = value.to(device)

    def parts(self, device: str) -> Iterator[StateDict]:
        model = self._model
        parameters = distributed.parameters_by_name(self._model)
        plain = partial(_plain_tensor, device=device, copy=False)
        for name, parameter in parameters.items():
            if is_adapter(name):
                continue
            value = plain(parameter)
            # Merged as PEFT does, W + BA alpha / r, in float32; layers of GPT-2 hold W transposed.
            name_a = name.replace(".base_layer.", ".lora_A.default.")
            name_b = name.replace(".base_layer.", ".lora_B.default.")
            if name_a != name and name_a in parameters:
                config: Any = model.peft_config
                matrix_a = plain(parameters[name_a]).float()
                matrix_b = plain(parameters[name_b]).float()
                update = matrix_b @ matrix_a * (config.lora_alpha / config.r)
                if config.fan_in_fan_out:
                    update = update.T
                value = (value.float() + update).to(value.dtype)
            yield {model.hf_name(name): value}
        for name, module in model.named_modules():  # buffers that checkpoints have
            for buffer in module._buffers.keys() - module._non_persistent_buffers_set:
                hf_name = model.hf_name(distributed.plain_name(f"{name}.{buffer}"))
                yield {hf_name: plain(module.get_buffer(buffer))}

    def write(self, folder: Path, parts: Iterator[StateDict], *, max_shard_size: str) -> None:
        weights: StateDict = {}
        for part in parts:
            weights |= part
        with torch.device("meta"), hf.quiet():
            build_hf(self._config).save_pretrained(
                folder, state_dict=weights, max_shard_size=max_shard_size
            )
        # Made up, where the checkpoint has none.
        (folder / "generation_config.json").unlink(missing_ok=True)

    def adapter(self) -> tuple[StateDict, Any]:
        model = self._model
        weights: StateDict = {}
        for name, value in _adapter_weights(model).items():
            hf_name = model.hf_name(name).replace(".default.", ".")
            weights[f"base_model.model.{hf_name}"] = value
        return weights, model.peft_config


def _shapes_of_base(weights: StateDict) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights that are not adapters."""
    return {name: tuple(value.shape) for name, value in weights.items() if not is_adapter(name)}


def _adapter_weights(model: nn.Module) -> StateDict:
    return {
        name: distributed.whole_tensor(value).cpu()
        for name, value in distributed.parameters_by_name(model).items()
        if is_adapter(name)
    }


def _in_the_form_of(parameter: Tensor, value: Tensor, name: str) -> Tensor:
    """Quantize a weight that was read if the parameter is; ``name`` is shown if the weight cannot
    be trained.
    """
    if not value.isfinite().all():
        raise SetupError(
            f"{name} is not finite in {value.dtype}: download the checkpoint again, or set another "
            "dtype"
        )
    if is_4bit(parameter):
        is_transposed = cast(Any, parameter).is_transposed
        return cast(Tensor, quantize_as_4bit(value, is_transposed=is_transposed))
    return to_nf4(value) if isinstance(distributed.local_tensor(parameter), NF4Tensor) else value


def _plain_tensor(value: Tensor, device: str, *, copy: bool) -> Tensor:
    value = dequantize_4bit(value, device)
    if device == "meta":
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    whole = distributed.whole_tensor(value)
    if isinstance(whole, NF4Tensor):
        original: Tensor = whole.get_original_weight()
        return original.to(device)
    return whole.to(device, copy=copy)
