"""The reference of an audit: the model before the training in question, which is asked the same."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tfidf_tune._files import looks_like_path, require_model_folder
from tfidf_tune.audit._spec import BASE, AuditSpec
from tfidf_tune.probe.run_identity import START, checked_run, run_of

if TYPE_CHECKING:
    from lm_eval.api.model import LM

# Initializations of LoRA that change the base itself, which PEFT restores only with its files.
_CHANGING = ("pissa", "olora", "loftq", "corda", "eva")
# Arguments by which a model is another one than its name says: its own name is then a reference.
_OF_ANOTHER_MODEL = (
    "peft",
    "lora_local_path",
    "delta",
    "subfolder",
    "gguf_file",
    "load_in_4bit",
    "load_in_8bit",
    "quantization",
    "quantization_config",
    "gptqmodel",
    "autogptq",
)
# Modules with a row for each token.
_OF_TOKENS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out")


@dataclass(frozen=True)
class Reference:
    """How the model before training is asked.

    Attributes:
        kind (Literal["base", "model", "server"]): the audited adapter switched off; another model;
            a model behind another server.
        name (str): what it is called.
        model_name (str): of the harness.
        model_args (dict[str, Any]): of the harness's model.
    """

    kind: Literal["base", "model", "server"]
    name: str
    model_name: str
    model_args: dict[str, Any]


def reference_of(spec: AuditSpec, model_name: str, model_args: dict[str, Any]) -> Reference | None:
    """Resolve the reference of an audit, None without one.

    Raises:
        ValueError: If an adapter cannot be switched off, or there is none; if the reference is the
            audited model itself.
        FileNotFoundError: If the reference looks like a folder and there is none.
    """
    from tfidf_tune.tasks import MODEL_NAME, SERVER_NAME

    if spec.reference is None:
        return None
    if spec.reference == BASE:
        _require_switchable(spec, model_name, model_args)
        return Reference("base", str(model_args["pretrained"]), model_name, model_args)
    if _is_model_itself(spec, spec.reference):
        raise ValueError(
            f"--reference {spec.reference} is the audited model itself, so that no passage would "
            "differ: name the model before the training, or leave it out"
        )
    if spec.reference_url is not None:
        # The same way of asking, but for the address and the name.
        of_server = {"model": spec.reference, "base_url": spec.reference_url}
        return Reference("server", spec.reference, SERVER_NAME, model_args | of_server)
    name = spec.reference
    if looks_like_path(name):
        folder = Path(name).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"no folder {folder}: name the model before training, a Hugging Face model or hub "
                f"id, or {BASE} for the base of an adapter"
            )
        require_model_folder(folder)
        name = str(folder)
    arguments = {"pretrained": name}
    if spec.server is None:
        arguments |= {key: model_args[key] for key in ("dtype",) if key in model_args}
    if spec.tokenizer is not None:
        arguments["tokenizer"] = spec.tokenizer
    return Reference("model", name, MODEL_NAME, arguments)


def _is_model_itself(spec: AuditSpec, reference: str) -> bool:
    """Return whether a reference is what is audited, by its folder, hub id or server."""
    if spec.server is not None:
        if spec.reference_url is None:  # loaded here
            return False
        urls = {spec.reference_url.rstrip("/"), spec.server.base_url.rstrip("/")}
        return len(urls) == 1 and reference == spec.model
    if any(spec.model_args.get(name) for name in _OF_ANOTHER_MODEL):
        return False
    model_folder = Path(spec.model).expanduser()
    reference_folder = Path(reference).expanduser()
    if model_folder.is_dir() or reference_folder.is_dir():
        return model_folder.resolve() == reference_folder.resolve()
    # The reference is the main branch.
    revision = spec.model_args.get("revision") or "main"
    return reference == spec.model and revision == "main"


def _require_switchable(spec: AuditSpec, model_name: str, model_args: dict[str, Any]) -> None:
    """Raise a ValueError unless the model without its adapter is the model before training."""
    from tfidf_tune.tasks import MODEL_NAME

    folder = model_args.get("peft")
    if spec.server is not None:
        raise ValueError(
            f"--reference {BASE} is for an adapter that is loaded here, and {spec.model} is behind "
            "a server: name the model before training by --reference NAME --reference-url URL"
        )
    if folder is None:
        raise ValueError(
            f"--reference {BASE} is for an adapter, and {spec.model} is none: name the model "
            "before training by --reference MODEL"
        )
    if model_name != MODEL_NAME:
        raise ValueError(
            f"--reference {BASE} needs --backend transformers, which can switch an adapter off: "
            "or name the model before training by --reference MODEL"
        )
    config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    changed = ""
    initialization = str(config.get("init_lora_weights")).lower()
    if config.get("bias", "none") != "none":
        changed = f"trained biases (bias={config['bias']})"
    elif initialization.startswith(_CHANGING):
        changed = f"another start of its base (init_lora_weights={initialization})"
    elif config.get("trainable_token_indices"):
        changed = "trained rows of the embedding (trainable_token_indices)"
    else:
        changed = _whole_weights(Path(folder), config, str(model_args["pretrained"]))
    if changed:
        raise ValueError(
            f"the adapter {folder} has {changed}, so that the model without it is not the model "
            "before training: name that by --reference MODEL"
        )


def _whole_weights(folder: Path, config: dict[str, Any], base: str) -> str:
    """Return which weights of an adapter's file stay when it is switched off, "" if none.

    Those are weights of the base itself. PEFT keeps modules of ``modules_to_save`` beside the
    base's, but an embedding with other rows has resized the base's, too.
    """
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        return ""
    num_tokens = None
    if (Path(base) / "config.json").is_file():
        of_base = json.loads((Path(base) / "config.json").read_text(encoding="utf-8"))
        num_tokens = of_base.get("vocab_size")
    beside = tuple(config.get("modules_to_save") or ())
    with safe_open(file, framework="numpy") as weights:
        for name in weights.keys():  # noqa: SIM118 (no mapping)
            if "lora_" in name or not name.endswith((".weight", ".bias")):
                continue
            parts = name.split(".")
            if not any(part.endswith(beside) for part in parts):
                return f"weights of its base ({name})"
            rows = weights.get_slice(name).get_shape()[0]
            is_of_tokens = any(part.endswith(_OF_TOKENS) for part in parts)
            if is_of_tokens and num_tokens is not None and rows != num_tokens:
                return f"a resized embedding ({rows:,} tokens, its base has {num_tokens:,})"
    return ""


def described(reference: Reference, model_args: dict[str, Any]) -> dict[str, Any]:
    """Describe the reference for its results: the start of the audited run, which no objective has
    trained.
    """
    run = run_of(model_args)
    name = reference.name
    is_quantized = model_args.get("load_in_4bit") or model_args.get("load_in_8bit")
    if reference.kind == "base" and is_quantized:
        name += ", at the same quantization"
    named = str(model_args.get("peft") or model_args.get("pretrained") or model_args.get("model"))
    description = {
        "model": run.get("model", named),
        "objective": START,
        "learning_rate": None,
        "seed": None,
        "progress": 0,
        "folder": name,
        "recipe": None,
        "loss": None,
        "training_seconds": None,
        "provenance": None,
        "bos": run.get("bos"),
        "num_sequences": None,
    }
    return checked_run(description, Path(reference.name))


@contextmanager
def switched_off(model: "LM", reference: Reference) -> Iterator[None]:
    """Switch the adapter of a loaded model off, if it is the reference."""
    with model.model.disable_adapter() if reference.kind == "base" else nullcontext():
        yield


def token_nlls(model: "LM", reference: Reference, texts: Sequence[Sequence[int]]) -> list[Any]:
    """Return the NLL of each token of texts under the model without its adapter."""
    from tfidf_tune.probe import token_likelihoods

    with switched_off(model, reference):
        return [tokens.nll for tokens in token_likelihoods(model.model, texts)]
