"""Adapter folders in place of a model: found by their ``adapter_config.json``, loaded on the base that it names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfidf_tune.analysis import adapter_base


def on_base_model(model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Replace an adapter's folder as ``pretrained`` by its base model, with ``peft`` and ``tokenizer`` of the folder.

    Other arguments, and those that name ``peft`` already, are returned unchanged.

    Args:
        model_args (Mapping[str, Any]): of the harness's ``hf`` model.

    Returns:
        dict[str, Any]: the arguments.

    Raises:
        ValueError: If the adapter names no base model, or a folder that does not exist.
    """
    arguments = dict(model_args)
    pretrained = arguments.get("pretrained")
    if not isinstance(pretrained, str) or arguments.get("peft"):
        return arguments
    folder = Path(pretrained).expanduser()
    if not (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file():
        return arguments
    base, revision = adapter_base(folder, f"name it by --model_args pretrained=BASE,peft={folder}")
    if any(folder.glob("tokenizer*")):
        arguments.setdefault("tokenizer", str(folder))
    if revision is not None:
        arguments.setdefault("revision", revision)
    return arguments | {"pretrained": base, "peft": str(folder)}
