"""Hugging Face checkpoints: checked against the model, read by shard, written whole."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict, snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torchtune.modules.peft import get_adapter_state_dict, get_merged_lora_ckpt

from tfidf_tune._files import atomic_folder, looks_like_path
from tfidf_tune.models import FAMILIES, HFConfig, ModelFamily, StateDict
from tfidf_tune.training._lora import LoRASettings

_WEIGHTS_INDEX = "model.safetensors.index.json"
_SINGLE_FILE = "model.safetensors"
# What makes a folder of weights a model that others can load: config, tokenizer, prompt templates.
_COMPANIONS = ("*.json", "*.model", "*.txt", "*.jinja")
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class HFCheckpointer:
    """Reads a Hugging Face checkpoint folder and writes folders of the same kind.

    Weights are read from safetensors alone, one shard at a time, straight into a model on the meta device. What is
    written has the names and layout of transformers (full models) or of PEFT (adapters), with config and tokenizer
    files beside it, under a temporary name that is changed when everything is there.

    Args:
        checkpoint_dir (str): local folder, or a model id of the Hugging Face hub, which is downloaded.

    Raises:
        FileNotFoundError: If ``checkpoint_dir`` is neither a folder nor can be had from the hub, or a file of the
            checkpoint is missing.
        ValueError: If its architecture is not one of the supported families.
    """

    def __init__(self, *, checkpoint_dir: str) -> None:
        self.checkpoint_dir = checkpoint_dir
        self.folder = _find_folder(checkpoint_dir)
        self.hf_config: HFConfig = _read_json(self.folder / "config.json")
        self.family: ModelFamily = _find_family(self.hf_config, self.folder)
        self.weight_files = _find_weight_files(self.folder)

    def check_model(self, model: nn.Module) -> None:
        """Compare a model with the checkpoint without reading weights; the model may be on the meta device.

        Args:
            model (nn.Module): torchtune model, with or without LoRA.

        Raises:
            ValueError: If settings, names or shapes differ, or a file is damaged; the message names them.
        """
        hf_weights = self._meta_weights()
        try:
            weights = self.family.hf_to_tune(hf_weights, self.hf_config)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"the checkpoint {self.folder} is not of the family that its config says: {error}"
            ) from error
        expected = {name: value.shape for name, value in _base_weights(model).items()}
        found = {name: value.shape for name, value in weights.items()}
        problems = [f"no weight {name} in the checkpoint" for name in expected.keys() - found.keys()]
        problems += [f"weight {name} is not in the model" for name in found.keys() - expected.keys()]
        problems += [
            f"{name} is {tuple(found[name])} in the checkpoint, {tuple(expected[name])} in the model"
            for name in expected.keys() & found.keys()
            if found[name] != expected[name]
        ]
        problems += [
            f"{name} is {theirs} in the checkpoint, {ours} in the model"
            for name, theirs, ours in self.family.settings(model, self.hf_config)
            if theirs != ours
        ]
        limit = self.hf_config.get("max_position_embeddings")
        if limit is not None and getattr(model, "max_seq_len", 0) > limit:
            problems.append(f"max_seq_len is {limit} in the checkpoint, {model.max_seq_len} in the model")
        if problems:
            shown = "\n".join(f"  {problem}" for problem in sorted(problems)[:5])
            more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"the model of the config does not fit the checkpoint {self.folder}:\n{shown}{more}\n"
                "change `model` or `checkpointer.checkpoint_dir` so that both are the same model"
            )

    def load_weights(self, model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        """Load the base weights, shard by shard; adapter weights are left as they are.

        Args:
            model (nn.Module): torchtune model that :meth:`check_model` accepts, perhaps on the meta device.
            device (torch.device): where the weights go.
            dtype (torch.dtype): dtype that they get.
        """
        for file in self.weight_files:
            with _open_weights(file) as shard:
                # A copy, because what safetensors gives may be a view of the file.
                state_dict = {
                    name: shard.get_tensor(name).to(device, dtype, copy=True)
                    for name in shard.keys()  # noqa: SIM118
                }
            model.load_state_dict(self.family.hf_to_tune(state_dict, self.hf_config), strict=False, assign=True)

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write all weights as a complete folder that ``transformers`` loads; LoRA adapters are merged.

        Args:
            model (nn.Module): torchtune model.
            folder (Path): what to write; it must not exist.
        """
        lora = LoRASettings.of(model)
        # Merging works in place, so it gets copies; without LoRA the model's own tensors do.
        state_dict = {key: value.detach().to("cpu", copy=lora is not None) for key, value in model.state_dict().items()}
        if lora is not None:
            state_dict = get_merged_lora_ckpt(state_dict, rank=lora.rank, alpha=lora.alpha)
        dtype = next(iter(state_dict.values())).dtype
        with atomic_folder(folder) as temporary:
            self._copy_companions(temporary)
            _write_json(temporary / "config.json", _with_dtype(self.hf_config, dtype))
            save_torch_state_dict(self.family.tune_to_hf(state_dict, self.hf_config), temporary)

    def save_adapter(self, model: nn.Module, folder: Path) -> None:
        """Write the LoRA adapters as a folder that ``peft`` loads onto the untouched base model.

        Args:
            model (nn.Module): torchtune model with LoRA.
            folder (Path): what to write; it must not exist.
        """
        from peft import LoraConfig  # imports transformers: seconds that a failing start need not cost
        from safetensors.torch import save_file

        lora = LoRASettings.require(model)
        weights = self.family.tune_to_peft(get_adapter_state_dict(model.state_dict()), self.hf_config)
        is_local = Path(self.checkpoint_dir).expanduser().is_dir()
        adapter_config = LoraConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(self.folder.resolve()) if is_local else self.checkpoint_dir,
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=self.family.peft_target_modules(lora.module_names),
            inference_mode=True,
        )
        with atomic_folder(folder) as temporary:
            self._copy_companions(temporary)
            adapter_config.save_pretrained(temporary)
            save_file(
                {key: value.contiguous() for key, value in weights.items()},
                temporary / "adapter_model.safetensors",
            )

    def _meta_weights(self) -> StateDict:
        """Names and shapes of all weights, from the headers of the files."""
        weights: dict[str, Tensor] = {}
        for file in self.weight_files:
            with _open_weights(file) as shard:
                for name in shard.keys():  # noqa: SIM118
                    weights[name] = torch.empty(shard.get_slice(name).get_shape(), device="meta")
        return weights

    def _copy_companions(self, folder: Path) -> None:
        """Copy what goes along unchanged: not config.json, which a model gets anew and which is not an adapter's."""
        for pattern in _COMPANIONS:
            for file in self.folder.glob(pattern):
                if file.name != "config.json" and not file.name.endswith(".index.json"):
                    shutil.copyfile(file, folder / file.name)


def _find_folder(checkpoint_dir: str) -> Path:
    folder = Path(checkpoint_dir).expanduser()
    if folder.is_dir():
        return folder
    if looks_like_path(checkpoint_dir):
        raise FileNotFoundError(f"no such folder {checkpoint_dir}")
    try:
        return Path(snapshot_download(checkpoint_dir, allow_patterns=["*.safetensors", *_COMPANIONS]))
    except Exception as error:
        raise FileNotFoundError(
            f"{checkpoint_dir} is no local folder and could not be had from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); give a folder, or check the id, the network "
            "and, for gated models, `hf auth login`"
        ) from error


def _find_family(hf_config: HFConfig, folder: Path) -> ModelFamily:
    model_type = hf_config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"the checkpoint {folder} is of the architecture '{model_type}'; supported: {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type]


def _find_weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS_INDEX).is_file():
        index = _read_json(folder / _WEIGHTS_INDEX)
        weight_map: dict[str, str] = index.get("weight_map", {})
        if not weight_map:
            raise ValueError(f"{folder / _WEIGHTS_INDEX} has no weight_map: fetch or write it again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / _SINGLE_FILE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"the checkpoint {folder} lacks {', '.join(missing)}; weights are read from safetensors alone "
            f"({_SINGLE_FILE}, or shards named by {_WEIGHTS_INDEX})"
        )
    return files


def _open_weights(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): fetch or write it again") from error


def _base_weights(model: nn.Module) -> dict[str, Tensor]:
    state_dict = model.state_dict()
    adapters = get_adapter_state_dict(state_dict, device=None)
    return {name: value for name, value in state_dict.items() if name not in adapters}


def _with_dtype(hf_config: HFConfig, dtype: torch.dtype) -> dict[str, Any]:
    key = "torch_dtype" if "torch_dtype" in hf_config else "dtype"
    return {**hf_config, key: _DTYPE_NAMES[dtype]}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"the checkpoint {path.parent} lacks {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
