"""The base model that a checkpoint names: found, and refused before a weight is read if it cannot be trained."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from tfidf_tune._files import looks_like_path
from tfidf_tune.training._errors import first_line
from tfidf_tune.training._hf_files import COMPANIONS, read_json

_SMALL_FILES = ("config.json", "adapter_config.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def find_checkpoint(
    checkpoint_dir: str, revision: str | None, *, trust_remote_code: bool
) -> tuple[Path, PreTrainedConfig]:
    """Return folder and config of a checkpoint; one on the hub is downloaded, its weights after :func:`read_config`.

    Raises:
        FileNotFoundError: If there is no such folder, or it cannot be downloaded.
        ValueError: As :func:`read_config`.
    """
    folder = Path(checkpoint_dir).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(
                f"revision '{revision}' is given for the local folder {checkpoint_dir}: only hub ids have revisions"
            )
        return folder, read_config(folder, trust_remote_code=trust_remote_code)
    if looks_like_path(checkpoint_dir):
        raise FileNotFoundError(f"no such folder {checkpoint_dir}")
    code = ["*.py"] if trust_remote_code else []
    snapshot = _download(checkpoint_dir, revision, [*_SMALL_FILES, *code])
    config = read_config(snapshot, trust_remote_code=trust_remote_code)
    for weights in _WEIGHTS:  # some repositories have both, older ones the second
        snapshot = _download(checkpoint_dir, revision, [weights, *_SMALL_FILES, "*.index.json", *COMPANIONS])
        if any(snapshot.glob(weights)):
            break
    return snapshot, config


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a config with transformers' defaults and current names; refuse what cannot be trained.

    Raises:
        FileNotFoundError: If there is no config.json.
        ValueError: If it is not of a causal language model with plain weights, or needs code that is not trusted.
    """
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = read_json(adapter).get("base_model_name_or_path") or "its base model"
        if (folder / "config.json").is_file():
            raise ValueError(
                f"{folder} has adapter_config.json beside config.json, and transformers would load an adapter with the "
                f"model: if the weights are those of a whole model, remove adapter_config.json; to train {base}, set "
                f"checkpointer.checkpoint_dir={base}"
            )
        raise ValueError(
            f"{folder} is an adapter of {base}, not a model: set checkpointer.checkpoint_dir={base} to train a new "
            "adapter, or merge this one into its base first (PEFT's merge_and_unload)"
        )
    files = sorted(folder.glob("*.gguf"))
    if files and not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ValueError(
            f"{folder} holds GGUF weights ({files[0].name}), which cannot be trained: name the folder or hub id of the "
            "original model, with config.json and safetensors; the page of a GGUF repository on the hub names it as "
            "base model"
        )
    values = read_json(folder / "config.json")
    if (quantization := values.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ValueError(
            f"the checkpoint {folder} is quantized (quantization_config: {method}): name the original model; "
            "model.quantize_base=True quantizes it for LoRA"
        )
    own_code = sorted(map(str, values.get("auto_map", {}).values())) if isinstance(values.get("auto_map"), dict) else []
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers raises anything here
        if own_code and not trust_remote_code:
            raise ValueError(
                f"the architecture '{values.get('model_type')}' of {folder} is not in transformers, and needs the "
                f"checkpoint's own code ({own_code[0]}): read that code, then set checkpointer.trust_remote_code=True "
                "to run it"
            ) from error
        raise ValueError(f"{folder / 'config.json'}: {type(error).__name__}: {first_line(error)}") from error
    _check_kind(config, values, folder)
    return config


def _check_kind(config: PreTrainedConfig, values: dict[str, Any], folder: Path) -> None:
    kind = None
    architectures = values.get("architectures") or []
    if config.is_encoder_decoder:
        kind = "has an encoder and a decoder"
    elif any(hasattr(config, f"{part}_config") for part in ("vision", "audio")):
        kind = "also reads images or sound"
    elif any("MaskedLM" in name for name in architectures) or (
        type(config) in MODEL_FOR_MASKED_LM_MAPPING and getattr(config, "is_decoder", None) is False
    ):
        kind = "is an encoder, not a decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in values.get("auto_map", {}):
        kind = "has no causal language model in transformers"
    if kind is not None:
        raise ValueError(
            f"the checkpoint {folder}, of the architecture '{config.model_type}', {kind}: name a checkpoint of a "
            "causal language model for text"
        )


def _download(checkpoint_dir: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(checkpoint_dir, revision=revision, allow_patterns=patterns))
    except Exception as error:
        remedy = "give a folder, or check the id and the network"
        if isinstance(error, GatedRepoError):
            remedy = (
                f"it is gated: accept its terms on https://huggingface.co/{checkpoint_dir}, and run `hf auth login`"
            )
        elif isinstance(error, RepositoryNotFoundError):
            remedy = "there is no such model, or it is private: check the id, or run `hf auth login`"
        raise FileNotFoundError(
            f"{checkpoint_dir} is not a local folder and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {first_line(error)}); {remedy}"
        ) from error
