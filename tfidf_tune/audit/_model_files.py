"""The files that a model is loaded from, and their hashes: of a folder, or of a repository of the
Hugging Face hub, whose files are in the cache of this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tfidf_tune import _files
from tfidf_tune.audit._plan import Plan

# Files of a repository: of weights the first kind that it has, as transformers and PEFT choose.
_WEIGHTS = {
    "pretrained": (
        "model.safetensors",
        "model-*-of-*.safetensors",
        "pytorch_model.bin",
        "pytorch_model-*-of-*.bin",
    ),
    "peft": ("adapter_model.safetensors", "adapter_model.bin"),
}
_CONFIGS = {"pretrained": "config.json", "peft": "adapter_config.json"}
# Config, tokenizer, chat template, code and the index of shards.
_SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")


class ModelFiles(NamedTuple):
    """What a model is loaded from.

    ``hashes`` has the SHA-256 of each file by its path, or by the hub id and its name:
    ``owner/name/config.json``. It is empty if the weights were not found. ``commits`` has the
    commit of each repository by its hub id.
    """

    hashes: dict[str, str]
    commits: dict[str, str]


def with_commits(plan: Plan) -> Plan:
    """Name the commit of each repository that a model is loaded from, so that what is hashed is
    what is loaded, also if somebody uploads another model in the meantime.

    Files that are not in the cache are downloaded now. Loading the model would download them later.

    Raises:
        FileNotFoundError: If a model is neither here nor on the hub.
    """
    model_args = _with_commit(plan.model_args)
    reference = plan.reference
    if reference is not None:
        is_base = reference.kind == "base"
        args = model_args if is_base else _with_commit(reference.model_args)
        reference = replace(reference, model_args=args)
    return replace(plan, model_args=model_args, reference=reference)


def files_of(model_args: Mapping[str, Any], known: Mapping[str, str] | None = None) -> ModelFiles:
    """Hash the files of a model, and of its adapter, by the arguments of the harness's model.

    The hashes of files that are ``known`` already are taken from there: an adapter and its
    reference share the files of the base, which may be large.
    """
    from tfidf_tune.probe.loading import on_base_model

    hashes: dict[str, str] = {}
    commits: dict[str, str] = {}
    known = known or {}
    if model_args.get("subfolder"):  # what is loaded is not at the top of the folder
        return ModelFiles(hashes, commits)
    arguments = on_base_model(model_args)
    is_complete = True
    for role in _WEIGHTS:
        name = str(arguments.get(role) or "")
        if _is_repository(name):
            snapshot, files = _fetched(role, arguments)
            commits[name] = snapshot.name
            is_complete = is_complete and bool(files)
            for file in files:
                named = f"{name}/{file.name}"
                hashes[named] = known.get(named) or _files.file_sha256(file)
        elif name and Path(name).is_dir():
            for file in sorted(Path(name).iterdir()):
                if file.is_file():
                    hashes[str(file)] = known.get(str(file)) or _files.file_sha256(file)
    # The hashes of a config alone would say nothing about the model.
    return ModelFiles(hashes if is_complete else {}, commits)


def folder_of(model_args: Mapping[str, Any]) -> str:
    """Return the folder of a model: of a repository the one in the cache."""
    name = str(model_args["pretrained"])
    if not _is_repository(name):
        return name
    return str(_fetched("pretrained", model_args)[0])


def find_file(name: str, commits: Mapping[str, str]) -> Path | None:
    """Return the path of a file by its name in :class:`ModelFiles`; None if it is not here."""
    from huggingface_hub import try_to_load_from_cache

    for repository, commit in commits.items():
        if name.startswith(f"{repository}/"):
            in_repository = name.removeprefix(f"{repository}/")
            found = try_to_load_from_cache(repository, in_repository, revision=commit)
            # It can also say that the repository has no such file.
            return Path(found) if isinstance(found, str) else None
    return Path(name) if Path(name).is_file() else None


def _is_repository(name: str) -> bool:
    return name != "" and not Path(name).is_dir() and not _files.looks_like_path(name)


def _with_commit(model_args: dict[str, Any]) -> dict[str, Any]:
    from tfidf_tune.probe.loading import on_base_model

    arguments = on_base_model(model_args)
    roles = [role for role in _WEIGHTS if _is_repository(str(arguments.get(role) or ""))]
    # There is one revision for a model and its adapter, and two repositories share no commit.
    if len(roles) != 1 or model_args.get("subfolder"):
        return model_args
    snapshot, _ = _fetched(roles[0], arguments)
    return {**model_args, "revision": snapshot.name}


def _fetched(role: str, model_args: Mapping[str, Any]) -> tuple[Path, list[Path]]:
    """Return the folder of a repository in the cache, and its files that are loaded, none without
    weights; they are downloaded if they are not here.
    """
    weights: Sequence[str] = _WEIGHTS[role]
    if role == "pretrained" and model_args.get("gguf_file"):
        weights = [model_args["gguf_file"]]
    for pattern in weights:
        patterns = [*_SMALL_FILES, pattern]
        snapshot = _snapshot(role, model_args, patterns)
        if any(snapshot.glob(pattern)):
            files = {file for each in patterns for file in snapshot.glob(each)}
            return snapshot, sorted(files)
    return snapshot, []


def _snapshot(role: str, model_args: Mapping[str, Any], patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    repository = model_args[role]
    revision = str(model_args.get("revision") or "main")
    # As transformers and vLLM call it.
    cache_folder = model_args.get("cache_dir") or model_args.get("download_dir")
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=["*/*"],
            cache_dir=cache_folder,
            token=model_args.get("token"),
        )
    except OSError as error:
        # Without the hub, a model is loaded from the cache although not all of these files are
        # there, of which it needs a part.
        config = try_to_load_from_cache(
            repository, _CONFIGS[role], revision=revision, cache_dir=cache_folder
        )
        if isinstance(config, str):
            return Path(config).parent
        if _files.is_hub_unreachable(error):
            raise FileNotFoundError(
                _files.not_on_this_machine(repository, "the folder of a model")
            ) from error
        raise FileNotFoundError(
            f"{repository} is neither a local folder nor on the hub ({type(error).__name__}: "
            f"{' '.join(str(error).split())})"
        ) from error
    return Path(folder)
