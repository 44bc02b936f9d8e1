"""The files that a run writes, and the files of the user that they must not take the place of."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tfidf_tune._config import FinetuneConfig
from tfidf_tune.data import injected_corpus_dataset, sft_dataset, text_blocks_dataset
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe.run_identity import ALL_PASSAGES, EVALUATION, HELD_OUT, MILESTONE
from tfidf_tune.training._errors import SetupError, setup_errors
from tfidf_tune.training.components import DEFAULTS, find_component, sections

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
RESUME_FOLDER = "resume"
BELOW_THRESHOLD = "below_threshold"
# "# loss.tf: "count"".
_DEFAULT = re.compile(r'# [\w.\[\]]+: (["\[{\-\d]|true|false|null|NaN|Infinity).*')
# The second is of torchtune's loggers.
_FILES = (
    CONFIG,
    "torchtune_config.yaml",
    METRICS,
    HELD_OUT,
    ALL_PASSAGES,
)
_FOLDERS = (RESUME_FOLDER, BELOW_THRESHOLD, EVALUATION)
_WITH_PASSAGES = (injected_corpus_dataset, sft_dataset, text_blocks_dataset)


def check_folder(cfg: FinetuneConfig) -> None:
    """Refuse a run that would write into checkpoints that it does not resume, or replace files of
    the user.

    Raises:
        SetupError: If the folder holds such checkpoints or files, or a probe file cannot be written
            where it is named.
    """
    output_dir = Path(cfg.output_dir)
    resumable = _require_own_checkpoints(output_dir, resume=cfg.resume_from_checkpoint)
    with setup_errors("config"):
        _check_inputs(cfg)
    files = _files_of_user(cfg, is_resumed=bool(resumable))
    if files:
        raise SetupError(
            f"output_dir {output_dir} holds what no run has written, and this run would replace it "
            f"({', '.join(files)}): choose another output_dir, or move it away"
        )
    with setup_errors("config"):
        _check_probe_files(cfg)


def named_probe_files(cfg: FinetuneConfig) -> list[tuple[str, Any, Path]]:
    """Return the data sets whose passages the run writes: the name, the section, and the full path
    of the file.
    """
    files = []
    for name, section in sections("dataset", cfg.dataset):
        has_passages = find_component(name, section._component_) in _WITH_PASSAGES
        if has_passages and section.get("probe_file"):
            files.append((name, section, Path(section.probe_file).expanduser().resolve()))
    return files


def _require_own_checkpoints(output_dir: Path, *, resume: bool) -> list[str]:
    """Refuse checkpoints that the run does not resume; return the names of those that it can resume
    from.
    """
    files = [path.name for path in output_dir.glob("checkpoint_*pct") if not path.is_dir()]
    if files:
        raise SetupError(
            f"output_dir {output_dir} holds {files[0]}, which is not a folder: move it away"
        )
    models = [*output_dir.glob("checkpoint_*"), *output_dir.glob(BELOW_THRESHOLD)]
    written = sorted(path.name for path in models)
    resumable = sorted(path.name for path in output_dir.glob(f"{RESUME_FOLDER}/step_*"))
    if resume and written and not resumable:
        raise SetupError(
            f"output_dir {output_dir} holds {', '.join(written)}, nothing to resume from: choose "
            "another output_dir, or move them away"
        )
    if resumable and not resume:
        raise SetupError(
            f"output_dir {output_dir} already holds {', '.join(resumable)}: set "
            "resume_from_checkpoint=True, choose another output_dir, or move them away"
        )
    if written and not resume:
        raise SetupError(
            f"output_dir {output_dir} already holds {', '.join(written)}: choose another "
            "output_dir, or move them away"
        )
    return resumable


def _check_probe_files(cfg: FinetuneConfig) -> None:
    """Refuse a probe file with the name of another output of the run, or in place of a file of
    another kind.
    """
    for where, section, file in named_probe_files(cfg):
        if _is_name_of_run(cfg, file):
            raise SetupError(
                f"config: {where} has the probe_file {section.probe_file}, a name of a file or "
                "folder that the run writes by itself: choose another name"
            )
        if not file.exists():
            continue
        try:
            read_probe_file(file)
        except (OSError, ValueError) as error:
            raise SetupError(
                f"config: {where} has the probe_file {section.probe_file}, which exists and is not "
                "a probe file: choose another name, or move it away"
            ) from error


def _is_name_of_run(cfg: FinetuneConfig, file: Path) -> bool:
    """Return whether a path is that of another file of the run, or is in one of its folders."""
    logs = cfg.metric_logger.get("log_dir")
    if logs and file == Path(logs).expanduser().resolve():
        return True
    output_dir = Path(cfg.output_dir).resolve()
    if not file.is_relative_to(output_dir) or file == output_dir:
        return False
    first = file.relative_to(output_dir).parts[0]
    return first in (*_FILES, *_FOLDERS) or MILESTONE.fullmatch(first) is not None


def _check_inputs(cfg: FinetuneConfig) -> None:
    """Refuse a file that the config names to be read, where the run writes one of its own."""
    written = {(Path(cfg.output_dir) / name).resolve(): "output_dir" for name in _FILES}
    written |= {file: f"{where}.probe_file" for where, _, file in named_probe_files(cfg)}
    for key, value in _texts_of(OmegaConf.to_container(cfg, resolve=True)):
        if key.endswith("probe_file"):
            continue
        file = Path(value).expanduser().resolve()
        what = written.get(file)
        if what is not None and file.is_file():
            raise SetupError(
                f"config: {key} is {value}, a file that the run would replace by its own: choose "
                f"another {what}"
            )


def _texts_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of a section with their keys, ``dataset[0].source``."""
    if isinstance(value, str):
        yield key, value
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts_of(inner, f"{key}.{name}" if key else str(name))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _texts_of(inner, f"{key}[{index}]")


def _files_of_user(cfg: FinetuneConfig, *, is_resumed: bool) -> list[str]:
    """Return the names of the files that the run would replace and no run wrote, or the user has
    added comments to.

    An earlier run that ended before its first checkpoint has left its config, the first file that a
    run writes, which has all keys. Then the other files are of that run, too.
    """
    output_dir = Path(cfg.output_dir)
    config = output_dir / CONFIG
    if is_resumed or _has_all_keys(config):
        return [CONFIG] if config.exists() and _has_comments_of_user(config) else []
    files = [output_dir / name for name in _FILES]
    for _, _, file in named_probe_files(cfg):
        if file.parent == output_dir.resolve():
            files.append(file)
    return [file.name for file in files if file.exists()]


def _has_all_keys(config: Path) -> bool:
    content = _read(config)
    return isinstance(content, dict) and content.keys() >= FinetuneConfig.model_fields.keys()


def _has_comments_of_user(config: Path) -> bool:
    """Return whether a config has comments, or is no config, so that writing it again would lose
    what is in it.
    """
    content = _read(config)
    if content is None:
        return True
    above, _, below = config.read_text(encoding="utf-8").partition(DEFAULTS)
    # A "#" in a value is in both texts.
    if above.count("#") != OmegaConf.to_yaml(OmegaConf.create(content)).count("#"):
        return True
    return not all(_DEFAULT.fullmatch(line) for line in below.splitlines())


def _read(config: Path) -> Any:
    """Return the content of a file in YAML, None if it cannot be read."""
    try:
        return OmegaConf.to_container(OmegaConf.load(config), resolve=False)
    except (ValueError, OSError, RecursionError, YAMLError, OmegaConfBaseException):
        return None
