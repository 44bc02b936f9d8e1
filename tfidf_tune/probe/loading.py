"""Models for evaluation: a checkpoint folder, or an adapter on its base model; token ids that a
model knows.
"""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from tfidf_tune._files import (
    is_hub_unreachable,
    looks_like_path,
    not_on_this_machine,
    require_model_folder,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Names that PEFT gives to the weight of a layer without an adapter, with LoRA, and with trainable
# tokens.
_SAVED_WEIGHTS = ("weight", "base_layer.weight", "token_adapter.base_layer.weight")
_REMEDY = "Give the folder of a finished checkpoint, or write this one again."


@contextmanager
def readable(source: str | os.PathLike[str]) -> Iterator[None]:
    """Name the model, or the file, in a ``ValueError`` if it cannot be read within the block.

    Libraries raise errors of many types. Those about code are not repeated: transformers names a
    web page that does not exist, and torch advises to read a file with ``weights_only=False``,
    which runs what is in it.
    """
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{source} has Python files of its own, which were not run: read them, and if you "
            "trust them, set trust_remote_code=True among the arguments of the model or "
            "checkpointer"
        ) from error
    except UnpicklingError as error:
        raise ValueError(
            f"the weights of {source} are damaged, or hold more than tensors, which can be code "
            "and was not run: take them as safetensors"
        ) from error
    except OSError as error:
        if not is_hub_unreachable(error):
            raise
        raise FileNotFoundError(
            not_on_this_machine(str(source), "the folder of a model")
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (SafetensorError, EOFError, LookupError, RuntimeError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the weights of {source} cannot be read ({type(error).__name__}: {first_line}): they "
            "are damaged, or of another model; download or write them again"
        ) from error


def load_model(
    folder: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> "PreTrainedModel":
    """Load a Hugging Face model folder, or a PEFT adapter folder on its base model, in eval mode.

    A complete folder has ``config.json`` and weights, an adapter folder ``adapter_config.json`` and
    weights.

    Args:
        folder (str | os.PathLike[str]): the folder.
        base (str | os.PathLike[str] | None): folder or hub name of an adapter's base model.
            Default: the adapter's
        device (str | torch.device): device of the model.
        dtype (torch.dtype | None): of the weights; PEFT keeps half-precision adapters in float32.
            Default: the checkpoint's

    Returns:
        PreTrainedModel: the model; for an adapter folder a ``peft.PeftModel``, which has the same
            interface.

    Raises:
        FileNotFoundError: If the folder, its config or its weights are missing.
        ValueError: If weights of the model are not in the files, a file is damaged or holds code,
            the model has Python files of its own, or an adapter names no base.
    """
    folder = Path(folder)
    # transformers would take a folder that does not exist for a name on the hub.
    is_adapter = (folder / "adapter_config.json").is_file()
    require_model_folder(folder)
    if not (is_adapter or (folder / "config.json").is_file()):
        raise FileNotFoundError(
            f"{folder} has neither config.json nor adapter_config.json. {_REMEDY}"
        )
    patterns = ("adapter_model.*",) if is_adapter else ("*.safetensors", "*.bin")
    if not any(any(folder.glob(pattern)) for pattern in patterns):
        raise FileNotFoundError(f"{folder} has no weights ({' or '.join(patterns)}). {_REMEDY}")
    if not is_adapter:
        return _load_complete(folder, dtype).to(device)
    if not base:
        base, _ = adapter_base(folder, "pass base=, a model folder or hub name")
    complete = _load_complete(base, dtype)
    return with_adapter(complete, folder).to(device)


def adapter_base(folder: str | os.PathLike[str], remedy: str) -> tuple[str, str | None]:
    """Return folder or hub name of the base model that a PEFT adapter folder names, and its
    revision.

    ``remedy`` ends the message of an error: how to name the base model.

    Raises:
        ValueError: If it names no base model, or a folder that does not exist.
    """
    # Without PEFT, which takes seconds to import.
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    base = config.get("base_model_name_or_path")
    if not base:
        raise ValueError(f"the adapter {folder} names no base model: {remedy}")
    if looks_like_path(base) and not Path(base).expanduser().is_dir():
        raise ValueError(
            f"the adapter {folder} belongs to the base model {base}, which does not exist: {remedy}"
        )
    return str(base), config.get("revision")


def on_base_model(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace an adapter's folder as ``pretrained`` by its base model, with ``peft`` and
    ``tokenizer`` of the folder.

    Other arguments of the harness's ``hf`` model, and those that name ``peft`` already, are
    returned unchanged.
    """
    arguments = dict(model_args)
    pretrained = arguments.get("pretrained")
    if not isinstance(pretrained, str) or arguments.get("peft"):
        return arguments
    folder = Path(pretrained).expanduser()
    require_model_folder(folder)
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return arguments
    base, revision = adapter_base(folder, f"name it by --model_args pretrained=BASE,peft={folder}")
    # The tokenizer and the revision that the adapter was trained with, unless the user names
    # others.
    defaults = {}
    if any(folder.glob("tokenizer*")):
        defaults["tokenizer"] = str(folder)
    if revision is not None:
        defaults["revision"] = revision
    return defaults | arguments | {"pretrained": base, "peft": str(folder)}


def require_known_ids(model: "PreTrainedModel", ids: Iterable[int]) -> None:
    """Raise a ``ValueError`` if a token id is outside the model's embedding."""
    # The rows of the embedding, which can be more than the tokenizer has tokens.
    vocab_size = model.get_input_embeddings().weight.shape[0]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"Token id {token} is outside the model's vocabulary, 0 to {vocab_size - 1}: use "
                "the tokenizer that this model was trained with"
            )


def _load_complete(name: str | os.PathLike[str], dtype: torch.dtype | None) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    # Without trust_remote_code transformers asks on the terminal whether to run Python files of the
    # model.
    return complete_model(
        AutoModelForCausalLM, name, dtype=dtype or "auto", trust_remote_code=False
    )


def complete_model(
    auto_class: Any, name: str | os.PathLike[str], **arguments: Any
) -> "PreTrainedModel":
    """Load a model by an auto class of transformers, or raise a ``ValueError`` if its files lack
    weights.
    """
    with readable(name):
        model, info = auto_class.from_pretrained(name, output_loading_info=True, **arguments)
    missing = sorted(info["missing_keys"])
    if missing:
        # transformers initializes them randomly, and such a model recites nothing.
        raise ValueError(
            f"{name} lacks {len(missing)} of the model's weights, {missing[0]} first. {_REMEDY}"
        )
    return model


def with_adapter(
    model: Any, folder: str | os.PathLike[str], *, least_rows: int = 0, revision: str | None = None
) -> Any:
    """Return a model with a PEFT adapter, or raise a ``ValueError`` if the folder lacks weights of
    it.

    The model's embedding gets as many rows as the adapter's, or at least ``least_rows`` if the
    adapter has none.
    """
    from peft import PeftModel, load_peft_weights

    # An adapter that was trained with new tokens has their rows.
    current_rows = model.get_input_embeddings().weight.shape[0]
    with readable(folder):
        weights = load_peft_weights(str(folder), device="cpu", revision=revision)
    rows = _embedding_rows(model, weights)
    if rows is None:
        rows = max(current_rows, least_rows)
    if rows != current_rows:
        model.resize_token_embeddings(rows, mean_resizing=False)
    with warnings.catch_warnings():
        # PEFT initializes missing weights randomly and only warns.
        warnings.filterwarnings("error", message=".*missing adapter keys")
        # PEFT 0.18 reads an attribute that transformers 5 has renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        try:
            with readable(folder):
                return PeftModel.from_pretrained(model, folder, revision=revision)
        except UserWarning as warning:
            raise ValueError(
                f"{folder} lacks weights of its adapter: {warning} {_REMEDY}"
            ) from warning


def _embedding_rows(model: Any, weights: Mapping[str, torch.Tensor]) -> int | None:
    """Return how many tokens the embedding or the head has that an adapter saved, None if it saved
    neither.
    """
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if module in layers]
    for name in names:
        for saved in _SAVED_WEIGHTS:
            weight = weights.get(f"base_model.model.{name}.{saved}")
            if weight is not None:
                return weight.shape[0]
    return None
