"""Hugging Face checkpoints: the base that a run begins from, and the folders that it writes."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn

from tfidf_tune._files import atomic_folder
from tfidf_tune.models import StateDict
from tfidf_tune.training._distributed import gather_objects, is_main_process
from tfidf_tune.training._errors import TrainingError, cause_of
from tfidf_tune.training._hf_files import find_checkpoint, read_companions, read_json, write_json
from tfidf_tune.training._implementations import implementation_of

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
        weight_files (list[Path]): the checkpoint's weight files.

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
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)  # refuses what is not a size
        self._base = find_checkpoint(checkpoint_dir, revision, trust_remote_code=trust_remote_code)
        self._max_shard_size = max_shard_size
        self._revision = revision
        # A hub id stays one: the folder of its snapshot is of this machine only.
        is_local = Path(checkpoint_dir).expanduser().is_dir()
        self._base_name = str(self._base.folder.resolve()) if is_local else checkpoint_dir
        self._config_file = read_json(self._base.folder / "config.json")
        self._companions = read_companions(self._base.folder, has_code=trust_remote_code)
        self.transformers_config = self._base.config
        self.weight_files = self._base.weight_files
        self.chat_template: str | None = None
        self.companion_bytes = sum(map(len, self._companions.values()))

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
        implementation_of(model).check(self._base)

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
            SetupError: If a weight is not floating point, or not finite in this dtype, or config.json ties head and
                embedding although the files have two weights.
        """
        implementation_of(model).load(self._base, device=device, dtype=dtype, storage_device=storage_device or device)

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write all weights as a complete folder that ``transformers`` loads; LoRA adapters are merged.

        NF4 weights are dequantized. Files of a model in an existing folder are replaced, all others kept. Every process
        has to call; rank 0 writes.

        Raises:
            TrainingError: If it cannot be written.
        """
        implementation = implementation_of(model)
        dtype = str(model.get_parameter("tok_embeddings.weight").dtype).removeprefix("torch.")
        keys = [key for key in ("torch_dtype", "dtype") if key in self._config_file] or ["dtype"]

        def write(temporary: Path, parts: Iterator[StateDict]) -> None:
            implementation.write(self._base, temporary, parts, max_shard_size=self._max_shard_size)
            write_json(temporary / "config.json", self._config_file | dict.fromkeys(keys, dtype))

        self._write(folder, implementation.parts(self._base, "cpu"), write)

    def save_adapter(self, model: nn.Module, folder: Path) -> None:
        """Write the LoRA adapters as a folder that ``peft`` loads onto the unchanged base model, as :meth:`save_model`.

        Raises:
            TrainingError: If it cannot be written.
        """
        weights, config = implementation_of(model).adapter(self._base)
        config = replace(config, base_model_name_or_path=self._base_name, revision=self._revision, inference_mode=True)
        # peft makes it a set, whose order differs between runs.
        config.target_modules = sorted(config.target_modules or ())

        def write(temporary: Path, parts: Iterator[StateDict]) -> None:
            config.save_pretrained(temporary)
            (part,) = parts
            contiguous = {name: value.contiguous() for name, value in part.items()}
            save_file(contiguous, temporary / "adapter_model.safetensors")

        self._write(folder, iter([weights]), write)

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
