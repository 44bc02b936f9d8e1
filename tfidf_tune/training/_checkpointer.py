"""Hugging Face checkpoints: compared with the model, loaded and saved part by part."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchao.dtypes.nf4tensor import NF4Tensor, to_nf4
from torchtune.modules.peft import get_merged_lora_ckpt
from tqdm import tqdm

from tfidf_tune._files import atomic_folder
from tfidf_tune.models import (
    FAMILIES,
    HFCausalLM,
    HFConfig,
    ModelFamily,
    StateDict,
    build_hf,
    dequantize_4bit,
)
from tfidf_tune.training._base_models import find_checkpoint
from tfidf_tune.training._causal_lm_files import check_weights, load_causal_lm, whole_parts, write_causal_lm
from tfidf_tune.training._distributed import gather_objects, is_main_process
from tfidf_tune.training._errors import SetupError, TrainingError, cause_of, first_line, listed
from tfidf_tune.training._hf_files import (
    WEIGHT_DTYPES,
    check_shard_size,
    find_weight_files,
    is_plain,
    read_companions,
    read_json,
    read_weights,
    write_json,
    write_weights,
)
from tfidf_tune.training._lora import LoRASettings, is_adapter
from tfidf_tune.training._sharding import assign_parameters, local_tensor, parameters_by_name, whole_tensor

# Weights of an existing folder are always replaced: transformers might load them.
_WEIGHTS = (
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
_SAMPLE_BYTES = 2**20


class HFCheckpointer:
    """Reads a Hugging Face checkpoint folder and writes folders of the same kind.

    Weights are loaded one by one, from safetensors or, if there are none, from PyTorch's ``.bin`` files, of which only
    tensors are unpickled. Checkpoints have the names and layout of transformers (full models) or PEFT (adapters), with
    config and tokenizer files, and are written atomically. Config and tokenizer files are read by the constructor,
    weights by :meth:`load_weights`: after that, the folder may change.

    A model of :class:`~tfidf_tune.models.HFCausalLM` is loaded and saved by transformers, as a whole.

    Args:
        checkpoint_dir (str): local folder, or a model id of the Hugging Face hub, which is downloaded.
        revision (str | None): branch, tag or commit of a hub id. Default: None, its main branch.
        max_shard_size (str): largest weight file that is written. Default: "5GB".
        trust_remote_code (bool): run the Python files of a checkpoint whose architecture transformers lacks, and copy
            them into checkpoints. Default: False.

    Attributes:
        chat_template (str | None): written into checkpoints in place of those of the tokenizer. Default: None.
        companion_bytes (int): size of the files of a checkpoint that are not weights.
        transformers_config (PreTrainedConfig): the checkpoint's config.

    Raises:
        FileNotFoundError: If ``checkpoint_dir`` is not a folder and cannot be downloaded, or a file is missing.
        ValueError: If it is not a causal language model of plain weights, it has code that is not trusted, a file
            cannot be copied into checkpoints, or ``max_shard_size`` is not a size.
    """

    def __init__(
        self,
        *,
        checkpoint_dir: str,
        revision: str | None = None,
        max_shard_size: str = "5GB",
        trust_remote_code: bool = False,
    ) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.revision = revision
        self.max_shard_size = max_shard_size
        check_shard_size(max_shard_size)
        self.folder, self.transformers_config = find_checkpoint(
            checkpoint_dir, revision, trust_remote_code=trust_remote_code
        )
        self._config_file = read_json(self.folder / "config.json")
        self.hf_config: HFConfig = self.transformers_config.to_dict()
        self.weight_files = find_weight_files(self.folder)
        self._companions = read_companions(self.folder, has_code=trust_remote_code)
        self.chat_template: str | None = None
        self.companion_bytes = sum(map(len, self._companions.values()))
        # A hub id stays one: the folder of its snapshot is of this machine only.
        self._base_name = str(self.folder.resolve()) if Path(checkpoint_dir).expanduser().is_dir() else checkpoint_dir

    @property
    def family(self) -> ModelFamily:
        """Return the translation between the checkpoint and torchtune's modules.

        Raises:
            ValueError: If its architecture has none.
        """
        model_type = self.transformers_config.model_type
        if model_type not in FAMILIES:
            raise ValueError(
                f"the checkpoint {self.folder} is of the architecture '{model_type}', which torchtune's modules do not "
                f"have (only {', '.join(sorted(FAMILIES))}): set model._component_ to tfidf_tune.models.auto, or for "
                "LoRA tfidf_tune.models.lora_auto"
            )
        return FAMILIES[model_type]

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
            ValueError: If settings, names or shapes differ, or a file is damaged; the message names them.
        """
        if isinstance(model, HFCausalLM):
            layers = [model.hf_name(name) for name in model.layer_names]
            check_weights(self.folder, self.weight_files, self.transformers_config, layers)
            return
        family = self.family
        by_config = self._shapes_by_config()
        hf_weights: StateDict = {}
        files: dict[str, Path] = {}
        for file in self.weight_files:
            in_file = {name: value.to("meta") for name, value in read_weights(file).items()}
            hf_weights |= in_file
            files |= dict.fromkeys(in_file, file)
        try:
            weights = family.hf_to_tune(hf_weights, self.hf_config)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"weights and config.json of checkpoint {self.folder} do not match: {error}") from error
        expected = {name: value.shape for name, value in parameters_by_name(model).items() if not is_adapter(name)}
        found = {name: value.shape for name, value in weights.items()}
        # The most informative first: names, settings, shapes.
        problems = []
        kinds, found_kinds = ({re.sub(r"\.\d+\.", ".", name) for name in names} for names in (expected, found))
        if kinds - found_kinds and found_kinds - kinds:
            problems.append("the model of the config is of another architecture")
        elif _num_layers(expected) != _num_layers(found):
            problems.append(f"{_num_layers(found)} layers in the checkpoint, {_num_layers(expected)} in the model")
        problems += [
            f"no weight {family.hf_name(name)} in the checkpoint, which is {name} in the model"
            for name in sorted(expected.keys() - found.keys())
        ]
        problems += [f"weight {name} is not in the model" for name in sorted(found.keys() - expected.keys())]
        if expected.keys() ^ found.keys() <= {"output.weight"}:  # otherwise the model may lack these settings
            problems += family.differing_settings(model, self.hf_config)
        limit = self.hf_config.get("max_position_embeddings", self.hf_config.get("n_positions"))
        if limit is not None and getattr(model, "max_seq_len", 0) > limit:
            problems.append(f"max_seq_len is {limit} in the checkpoint, {model.max_seq_len} in the model")
        problems += [
            f"{name} is {tuple(found[name])} in the checkpoint, {tuple(expected[name])} in the model"
            for name in sorted(expected.keys() & found.keys())
            if found[name] != expected[name]
        ]
        if problems:
            raise ValueError(
                f"the model of the config does not fit the checkpoint {self.folder}, which is of the architecture "
                f"'{self.hf_config['model_type']}':\n{listed(problems)}\nmake `model` the same model, or change "
                "checkpointer.checkpoint_dir; if they are the same, download the checkpoint again"
            )
        if by_config != expected:  # a run would train to its end and write checkpoints that cannot be loaded
            shown = "\n".join(f"  {problem}" for problem in self._config_problems(by_config, expected))
            raise ValueError(
                f"{self.folder / 'config.json'} and the weights do not match, so transformers could not load the "
                f"checkpoints of the run:\n{shown}\ncorrect config.json, or download the checkpoint again"
            )
        self._check_tied_head(files)

    def _shapes_by_config(self) -> dict[str, torch.Size]:
        """Return the shapes of the model that transformers builds from config.json, under torchtune's names."""
        try:
            with torch.device("meta"):
                # Other attention kernels may not be installed, and change neither names nor shapes.
                built = build_hf(self.transformers_config, attn_implementation="eager").state_dict()
            return {name: value.shape for name, value in self.family.hf_to_tune(built, self.hf_config).items()}
        except Exception as error:  # transformers and torch raise anything here
            raise ValueError(
                f"{self.folder / 'config.json'}: transformers cannot build a model from it ({type(error).__name__}: "
                f"{first_line(error)}): correct it, or download the checkpoint again"
            ) from error

    def _config_problems(self, by_config: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size]) -> Iterator[str]:
        """Describe differences, once for all layers, with the keys of config.json that may explain them."""
        layers, found = _num_layers(by_config), _num_layers(shapes)
        if layers != found:
            yield f"{layers} layers by config.json{self._keys({layers}, 'layer')}, {found} in the weights"
            return
        differing = {name for name in by_config.keys() | shapes.keys() if by_config.get(name) != shapes.get(name)}
        for name in {re.sub(r"\.\d+\.", ".", name): name for name in sorted(differing, reverse=True)}.values():
            hf_name = self.family.hf_name(name)
            if name not in shapes:
                yield f"no weight {hf_name}, which config.json asks for{self._keys({True}, 'bias')}"
            elif name not in by_config:
                yield f"weight {hf_name}, which config.json does not ask for{self._keys({False}, 'bias')}"
            else:
                theirs, ours = tuple(by_config[name]), tuple(shapes[name])
                keys = self._keys(set(theirs) - set(ours))
                yield f"{hf_name} is {theirs} by config.json{keys}, {ours} in the weights"

    def _keys(self, values: Iterable[Any], part: str = "") -> str:
        """Return the keys of config.json with one of these values and ``part`` in their name."""
        kinds = {(type(value), value) for value in values}  # True is 1
        found = [
            f"{key} is {value}"
            for key, value in self.hf_config.items()
            if part in key and isinstance(value, int) and (type(value), value) in kinds
        ]
        return f" ({', '.join(found)})" if found else ""

    def _check_tied_head(self, files: Mapping[str, Path]) -> None:
        """Refuse files with a head that differs from the embeddings although config.json ties them.

        transformers then does not tie them: the run would train another model than it evaluates.
        """
        embedding = self.family.hf_name("tok_embeddings.weight")
        heads = [name for name in self.family.hf_names("output.weight") if name in files]
        if not (self.hf_config["tie_word_embeddings"] and heads):
            return
        first, second = (read_weights(files[name])[name] for name in (embedding, heads[0]))
        if not torch.equal(first, second.to(first.dtype)):
            raise ValueError(
                f"{self.folder / 'config.json'}: tie_word_embeddings is True, but {heads[0]} and {embedding} differ, "
                "and transformers then uses both: set it to false, with a model that has a head of its own, or "
                "download the checkpoint again"
            )

    def load_weights(
        self, model: nn.Module, *, device: torch.device, dtype: torch.dtype, storage_device: torch.device | None = None
    ) -> None:
        """Load the base weights, file by file; adapter weights are not changed.

        Args:
            model (nn.Module): torchtune model that :meth:`check_model` accepts, possibly on the meta device or sharded.
                Where it has NF4 tensors, weights are quantized.
            device (torch.device): of the weights.
            dtype (torch.dtype): of the weights, and the one that NF4 is computed in.
            storage_device (torch.device | None): where shards are kept. Default: None, ``device``.

        Raises:
            SetupError: If a weight is not floating point, or not finite in this dtype.
        """
        if isinstance(model, HFCausalLM):
            load_causal_lm(
                model,
                self.folder,
                self.transformers_config,
                device=device,
                dtype=dtype,
                storage_device=storage_device or device,
                check=_check_weight,
            )
            return
        quantized = {
            name for name, value in parameters_by_name(model).items() if isinstance(local_tensor(value), NF4Tensor)
        }

        def weights(file: Path) -> Iterator[tuple[str, Tensor]]:
            # A bar, because NF4 takes minutes on a CPU.
            bar = {"desc": f"loading {file.name}", "unit": "weight", "leave": False, "disable": not is_main_process()}
            for key, weight in tqdm(read_weights(file).items(), **bar):
                # A copy, because what was read may be a view of the file, and a .bin may hold transposed weights.
                hf_weight = {key: weight.to(device, dtype, copy=True, memory_format=torch.contiguous_format)}
                for name, value in self.family.hf_to_tune(hf_weight, self.hf_config).items():
                    _check_weight(f"{file}: weight {key}", weight.dtype, value)
                    yield name, to_nf4(value) if name in quantized else value

        for file in self.weight_files:
            assign_parameters(model, weights(file), storage_device or device)

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write all weights as a complete folder that ``transformers`` loads; LoRA adapters are merged.

        NF4 weights are dequantized. Files of a model in an existing folder are replaced, all others kept. Every process
        has to call; rank 0 writes.

        Raises:
            TrainingError: If it cannot be written.
        """
        meta = {name: value for part in self._hf_parts(model, "meta") for name, value in part.items()}
        dtype = str(next(iter(meta.values())).dtype).removeprefix("torch.")
        keys = [key for key in ("torch_dtype", "dtype") if key in self._config_file] or ["dtype"]

        def write(temporary: Path, parts: Iterator[StateDict]) -> None:
            if isinstance(model, HFCausalLM):
                write_causal_lm(temporary, self.transformers_config, parts, max_shard_size=self.max_shard_size)
            else:
                write_weights(temporary, meta, parts, max_shard_size=self.max_shard_size)
            write_json(temporary / "config.json", self._config_file | dict.fromkeys(keys, dtype))

        self._write(folder, self._hf_parts(model, "cpu"), write)

    def save_adapter(self, model: nn.Module, folder: Path) -> None:
        """Write the LoRA adapters as a folder that ``peft`` loads onto the unchanged base model, as :meth:`save_model`.

        Raises:
            TrainingError: If it cannot be written.
        """
        from peft import LoraConfig  # slow to import, which would delay setup errors
        from safetensors.torch import save_file

        lora = LoRASettings.require(model)
        adapters = {
            name: whole_tensor(value).cpu() for name, value in parameters_by_name(model).items() if is_adapter(name)
        }
        if isinstance(model, HFCausalLM):
            weights = {model.peft_name(name): value for name, value in adapters.items()}
            config: Any = model.peft_config
        else:
            weights = self.family.tune_to_peft(adapters, self.hf_config)
            config = LoraConfig(
                task_type="CAUSAL_LM",
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=self.family.peft_target_modules(lora.module_names),
            )
        adapter_config = replace(
            config, base_model_name_or_path=self._base_name, revision=self.revision, inference_mode=True
        )
        # peft makes it a set, whose order differs between runs.
        adapter_config.target_modules = sorted(adapter_config.target_modules or ())

        def write(temporary: Path, parts: Iterator[StateDict]) -> None:
            adapter_config.save_pretrained(temporary)
            (part,) = parts
            contiguous = {name: value.contiguous() for name, value in part.items()}
            save_file(contiguous, temporary / "adapter_model.safetensors")

        self._write(folder, iter([weights]), write)

    def _hf_parts(self, model: nn.Module, device: str) -> Iterator[StateDict]:
        """Yield the merged model in Hugging Face's names and layout, layer by layer; on meta without values."""
        if isinstance(model, HFCausalLM):
            yield from whole_parts(model, partial(_plain_tensor, device=device, copy=False))
            return
        lora = LoRASettings.of(model)
        for _, layer in groupby(parameters_by_name(model).items(), key=lambda item: _layer_of(item[0])):
            # Merging works in place, so it needs copies.
            part = {name: _plain_tensor(value, device, copy=lora is not None) for name, value in layer}
            if lora is not None:
                part = get_merged_lora_ckpt(part, rank=lora.rank, alpha=lora.alpha)
            yield self.family.tune_to_hf(part, self.hf_config)

    def _write(
        self, folder: Path, parts: Iterator[StateDict], write: Callable[[Path, Iterator[StateDict]], None]
    ) -> None:
        """Write parts that all processes gather; a failure of the writing process raises on all."""
        failure = None
        if is_main_process():
            try:
                with atomic_folder(folder, replace=_WEIGHTS) as temporary:
                    write(temporary, parts)
                    for name, content in self._other_files().items():
                        (temporary / name).parent.mkdir(exist_ok=True)
                        (temporary / name).write_bytes(content)
            except Exception as error:
                failure = error
        for _ in parts:  # every process takes part in every gathering, also in those that a failed write left out
            pass
        cause = gather_objects(None if failure is None else cause_of(failure))[0]
        if cause is not None:
            raise TrainingError(f"checkpoint {folder} could not be written: {cause}") from failure

    def _other_files(self) -> dict[str, bytes]:
        if self.chat_template is None:
            return self._companions
        kept = {name: content for name, content in self._companions.items() if "chat_template" not in name}
        return kept | {"chat_template.jinja": self.chat_template.encode()}


def _layer_of(name: str) -> str:
    """``layers.3.attn.q_proj.weight`` -> ``layers.3``; ``norm.scale`` -> ``norm``."""
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


def _num_layers(names: Iterable[str]) -> int:
    return len({_layer_of(name) for name in names if name.startswith("layers.")})


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
