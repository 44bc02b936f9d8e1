"""Hugging Face checkpoints on disk: found or downloaded, refused if they cannot be trained, read
and written.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from tfidf_tune._files import (
    is_hub_unreachable,
    looks_like_path,
    not_on_this_machine,
    require_model_folder,
)
from tfidf_tune.models.causal_lm import build_hf
from tfidf_tune.probe.loading import readable
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import cause_of, listed

# In the order of preference: a single file, the index of shards.
_NAMES = {
    "model.safetensors": "model.safetensors.index.json",
    "pytorch_model.bin": "pytorch_model.bin.index.json",
}
_GENERATION = "generation_config.json"
_SMALL_FILES = ("config.json", "adapter_config.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")

# The files besides weights that are copied. Those of tokenizers are declared by transformers in
# `vocab_files_names` of its classes, and in constants of its `tokenization_utils_base`.
COMPANIONS = (
    _GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
_MAX_BYTES = 2**28  # the largest tokenizers have about 30 MB


def find_checkpoint(
    checkpoint_dir: str, revision: str | None, *, trust_remote_code: bool
) -> tuple[Path, PreTrainedConfig, list[Path]]:
    """Find a checkpoint's folder, config and weight files; from the hub, weights are downloaded
    last.
    """
    folder = Path(checkpoint_dir).expanduser()
    is_local = folder.is_dir()
    if is_local and revision is not None:
        raise ValueError(
            f"revision '{revision}' is given for the local folder {checkpoint_dir}: leave it out"
        )
    if not is_local:
        if looks_like_path(checkpoint_dir):
            raise FileNotFoundError(_no_folder(checkpoint_dir))
        patterns = list(_SMALL_FILES)
        if trust_remote_code:
            patterns.append("*.py")
        folder = _download(checkpoint_dir, revision, patterns)
    config = read_config(folder, trust_remote_code=trust_remote_code)
    if not is_local:
        # Some repositories have both kinds of weights, older ones the second.
        for weights in _WEIGHTS:
            patterns = [weights, *_SMALL_FILES, "*.index.json", *COMPANIONS]
            folder = _download(checkpoint_dir, revision, patterns)
            if any(folder.glob(weights)):
                break
    return folder, config, _find_weight_files(folder)


def is_complete_folder(checkpoint_dir: str) -> bool:
    """Return whether a checkpoint is on this machine, and False for an id of the hub, which is not
    looked up.

    Raises:
        FileNotFoundError: If it is a path that does not exist, or config or weights are missing.
        ValueError: If its config cannot be read.
    """
    folder = Path(checkpoint_dir).expanduser()
    if not folder.is_dir() and not looks_like_path(checkpoint_dir):
        return False
    if not folder.is_dir():
        raise FileNotFoundError(_no_folder(checkpoint_dir))
    read_json(folder / "config.json")
    _find_weight_files(folder)
    return True


def _no_folder(checkpoint_dir: str) -> str:
    return f"no such folder {checkpoint_dir}: name the folder of a model, or its id on the hub"


def _download(checkpoint_dir: str, revision: str | None, patterns: list[str]) -> Path:
    try:
        return Path(snapshot_download(checkpoint_dir, revision=revision, allow_patterns=patterns))
    except Exception as error:
        if is_hub_unreachable(error):
            raise FileNotFoundError(
                not_on_this_machine(checkpoint_dir, "the folder of a model")
            ) from error
        raise FileNotFoundError(
            f"{checkpoint_dir} is neither a local folder nor on the hub ({type(error).__name__}: "
            f"{' '.join(str(error).split())})"
        ) from error


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a config with transformers' defaults and current names; refuse what
    cannot be trained.
    """
    require_model_folder(folder)
    if (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        raise ValueError(
            f"{folder} is an adapter of {base}: set checkpointer.checkpoint_dir={base}, or merge it"
        )
    values = read_json(folder / "config.json")
    quantization = values.get("quantization_config")
    if quantization:
        raise ValueError(
            f"the checkpoint {folder} is quantized ({quantization}): name the original model"
        )
    with readable(folder):
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as error:  # transformers raises anything here
            raise ValueError(f"{folder / 'config.json'}: {' '.join(str(error).split())}") from error
    own_classes = values.get("auto_map", {})
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_classes
    reads_media = hasattr(config, "vision_config") or hasattr(config, "audio_config")
    reads_more = config.is_encoder_decoder or reads_media
    if reads_more or not is_causal:
        raise ValueError(
            f"the checkpoint {folder} is of the architecture '{config.model_type}': name a causal "
            "language model for text alone"
        )
    return config


def _find_weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint: safetensors, or PyTorch's format where
    there are none.
    """
    for single, index in _NAMES.items():
        if (folder / index).is_file():
            weight_map = read_json(folder / index).get("weight_map")
            names = []
            if isinstance(weight_map, dict):
                names = sorted(set(weight_map.values()))
            wrong = [
                name for name in names if Path(name).name != name or not (folder / name).is_file()
            ]
            if wrong or not names:
                raise FileNotFoundError(
                    f"{folder / index} names {wrong or 'nothing'}, not files of the same folder"
                )
            return [folder / name for name in names]
        if (folder / single).is_file():
            return [folder / single]
    raise FileNotFoundError(
        f"the checkpoint {folder} lacks {' or '.join(_NAMES)}, or shards with an index"
    )


def check_files(
    folder: Path, config: PreTrainedConfig, weight_files: list[Path]
) -> tuple[Any, list[str]]:
    """Return transformers' model on the meta device, and weights that it does not use; refuse what
    it cannot load.
    """
    weights: dict[str, Tensor] = {}
    for file in weight_files:
        weights |= read_weights(file)
    # Other attention kernels may not be installed, and change neither names nor shapes;
    # transformers notes the choice.
    hf_config = deepcopy(config)
    try:
        with suppress(OSError):  # transformers ignores a file that is not JSON
            GenerationConfig.from_pretrained(folder)
        with torch.device("meta"):
            model: Any = build_hf(hf_config, attn_implementation="eager")
        on_meta = {name: value.to("meta") for name, value in weights.items()}
        with quiet():
            model, info = type(model).from_pretrained(
                None,
                config=hf_config,
                state_dict=on_meta,
                attn_implementation="eager",
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # transformers and torch raise anything here
        raise ValueError(
            f"{folder / 'config.json'} or generation_config.json: transformers loads none "
            f"({cause_of(error)})"
        ) from error

    # Weights that differ from config.json in name or shape.
    problems = [
        f"{name} is {tuple(shape)} in the files, {tuple(needed)} by config.json"
        for name, shape, needed in sorted(info["mismatched_keys"])
    ]
    problems += [f"{name} is missing in the files" for name in sorted(info["missing_keys"])]
    # Other whole numbers may be buffers; a quantized checkpoint always has weights of another
    # dtype.
    for name, value in weights.items():
        is_trainable = value.dtype.is_floating_point and value.dtype.itemsize > 1
        if name.endswith("weight") and not is_trainable:
            problems.append(f"{name} is of {value.dtype}, not floating point of 16 bits or more")
    for head, embedding in model.get_expanded_tied_weights_keys().items():
        names = (head, embedding, embedding.removeprefix(f"{model.base_model_prefix}."))
        tied = [weights[name] for name in names if name in weights]
        if not all(torch.equal(tied[0], other) for other in tied):  # transformers would use both
            problems.append(
                f"tie_word_embeddings is True by config.json, but {head} and {embedding} differ"
            )
    # Behind the layers of config.json some models have layers that predict more tokens, and are not
    # used.
    num_more = getattr(config, "num_nextn_predict_layers", None) or 0
    num_layers = getattr(config, "num_hidden_layers", math.inf) + num_more
    unused = sorted(info["unexpected_keys"])
    for name in unused:
        layer = re.search(r"(?:^|\.)(\d+)\.", name)
        if layer is not None and int(layer[1]) >= num_layers:
            problems.append(f"{name} is of a layer that config.json does not have")
    if problems:
        raise ValueError(
            f"weights and config.json of the {config.model_type} in {folder} do not match:\n"
            f"{listed(problems)}\ncorrect config.json, or name another checkpoint"
        )
    return model, unused


@contextmanager
def quiet(*, shows_bar: bool = False) -> Iterator[None]:
    """Silence transformers' report about weights, which :func:`check_files` has; a bar is of one
    process.
    """
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


def read_weights(file: Path) -> dict[str, Tensor]:
    """Map the weights of a file into memory; each is read from disk when it is used."""
    with readable(file):
        if file.suffix == ".safetensors":
            content: dict[str, Tensor] = load_file(file)
        else:
            # Unpickles only tensors.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    is_state_dict = isinstance(content, dict) and all(
        isinstance(value, Tensor) for value in content.values()
    )
    if not is_state_dict:
        raise ValueError(f"{file} does not hold weights by name: convert it to safetensors")
    return content


def write_weights(
    folder: Path,
    meta: dict[str, Tensor],
    parts: Iterable[dict[str, Tensor]],
    *,
    max_shard_size: str,
) -> None:
    """Write weights as ``model.safetensors``, or as shards with an index; ``meta`` has all in the
    order of parts.
    """
    # Unlike with huggingface_hub.save_torch_state_dict, memory never holds more than a shard and a
    # part. If the first shard has the layers 0 and 1 and a part is a layer, the shard is written
    # when layer 1 has come; what has come of the next shard waits.
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_shard_size)
    waiting = {name: set(weights) for name, weights in split.filename_to_tensors.items()}
    pending: dict[str, Tensor] = {}
    for part in parts:
        pending |= part
        complete = [name for name, weights in waiting.items() if weights <= pending.keys()]
        for name in complete:
            shard = {}
            for weight in sorted(waiting.pop(name)):
                shard[weight] = pending.pop(weight).contiguous()
            save_file(shard, folder / name, metadata={"format": "pt"})
            shard.clear()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / _NAMES["model.safetensors"], index)


def read_companions(folder: Path, *, has_code: bool = False) -> dict[str, bytes]:
    """Read the files that are copied into every checkpoint, with ``has_code`` the Python files too,
    by name.
    """
    # Links are followed within the folder and the cache of the Hugging Face hub, whose snapshots
    # consist of links.
    snapshot = folder.resolve()
    roots = [snapshot, Path(HF_HUB_CACHE).resolve()]
    if snapshot.parent.name == "snapshots":  # of a cache elsewhere: <repository>/snapshots/<commit>
        roots.append(snapshot.parents[1])
    patterns = list(COMPANIONS)
    if has_code:
        patterns.append("*.py")
    companions = {}
    # Dangling links included.
    for path in sorted([*folder.glob("*"), *folder.glob("*/*.jinja")]):
        name = path.relative_to(folder).as_posix()
        if any(fnmatch(name, pattern) for pattern in patterns):
            companions[name] = _read(path, roots)
    return companions


def _read(path: Path, roots: list[Path]) -> bytes:
    target = path.resolve()
    # A link to another place would be shared with the checkpoints, and reading a pipe would wait.
    is_within = target.is_file() and any(target.is_relative_to(root) for root in roots)
    if not is_within or target.stat().st_size > _MAX_BYTES:
        raise ValueError(
            f"{path} would be copied into each checkpoint, but {target} is not a file of its "
            f"folder of at most {_MAX_BYTES // 2**20} MiB: remove it"
        )
    return target.read_bytes()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    if not path.is_file():
        raise FileNotFoundError(f"the checkpoint {path.parent} lacks {path.name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
