"""What a run tells its user: the bytes that it needs, the data, the checkpoints, the next commands."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import nearest_folder
from tfidf_tune._printing import counted
from tfidf_tune._processes import harness_settings
from tfidf_tune.data import InjectedCorpusDataset, SequenceDataset, TextBlocksDataset, is_packed
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.models import LoRASettings, dequantize_4bit, is_adapter
from tfidf_tune.passages import Passage
from tfidf_tune.probe import run_of
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._data import held_out_texts, parts_of, passages_of, probe_files
from tfidf_tune.training._distributed import is_main_process, local_tensor, plain_tensors, print_once
from tfidf_tune.training._errors import SetupError, setup_errors
from tfidf_tune.training._folder import EVALUATION, HELD_OUT, RESUME_FOLDER
from tfidf_tune.training._run import Run, milestone_name
from tfidf_tune.training.components import build_optimizer, find_component

_DUMMY_SHAPE = (1024, 1024)  # a matrix, because some optimizers keep less for matrices; large, because others pad


def check_resources(
    cfg: FinetuneConfig, model: nn.Module, loss: WeightedCrossEntropyLoss, run: Run, checkpointer: HFCheckpointer
) -> None:
    """Try the optimizer, print the bytes of weights and optimizer state, and compare checkpoints with the free disk.

    The model is on the meta device, with ``requires_grad`` as in training.

    Raises:
        SetupError: If the optimizer or its schedule cannot be built, takes no step, or cannot be saved, or the
            checkpoints do not fit on the disk.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    num_frozen = sum(dequantize_4bit(p, "meta").numel() for p in model.parameters() if not p.requires_grad)
    optimizer_bytes = round(_bytes_per_weight(cfg, next((p.dtype for p in trained), run.dtype), run) * num_trained)
    world_size, _ = get_world_size_and_rank()
    print_once(
        f"{num_trained:,} parameters are trained, {num_frozen:,} frozen: weights "
        f"{format_bytes(_num_bytes(model.parameters()))}, optimizer state {format_bytes(optimizer_bytes)}"
        f"{f', over {world_size} processes' if world_size > 1 else ''}"
    )

    # A milestone is a model or an adapter, with its tokenizer; a resume checkpoint, what is trained and its optimizer.
    saves_adapters = LoRASettings.of(model) is not None and not getattr(cfg, "merge_adapter", False)
    saved = [dequantize_4bit(p, "meta") for n, p in model.named_parameters() if is_adapter(n) == saves_adapters]
    size = sum(p.numel() * p.dtype.itemsize for p in saved) + getattr(checkpointer, "companion_bytes", 0)
    # A threshold of the monitor adds the checkpoint that it keeps, or the checkpoint that it ends the run with.
    has_threshold = cfg.memorization_monitor is not None and cfg.memorization_monitor.stop_above is not None
    number, number_to_resume = len(set(cfg.save_at_percent)) + has_threshold, cfg.keep_last_n_checkpoints
    size_to_resume = _num_bytes([*trained, *loss.state_dict().values()]) + optimizer_bytes
    # While the newest checkpoint is written, the disk holds one more than are kept.
    needed = number * size + (number_to_resume + 1) * size_to_resume * (number_to_resume > 0)
    free = shutil.disk_usage(nearest_folder(run.output_dir)).free
    if needed > free:
        to_resume = f"{number_to_resume} to resume from of {format_bytes(size_to_resume)}"
        what = f"{number} checkpoints of {format_bytes(size)} and {to_resume} do not fit into {run.output_dir}"
        remedy = "choose another output_dir, fewer save_at_percent or a lower keep_last_n_checkpoints"
        raise SetupError(f"{what}, where {format_bytes(free)} are free: {remedy}")


def _bytes_per_weight(cfg: FinetuneConfig, dtype: torch.dtype, run: Run) -> float:
    """Measure the optimizer's state after a step of a dummy; refuse a state that resume checkpoints cannot hold."""
    component = cfg.optimizer["_component_"]
    # The dummy is sharded as the run's weights are, because some optimizers cannot update shards; only for PyTorch's
    # optimizers, because others may take long to compile.
    weight = torch.zeros(_DUMMY_SHAPE, dtype=dtype, device=run.device)
    is_sharded = dist.is_initialized() and find_component("optimizer", component).__module__.startswith("torch.optim.")
    if is_sharded:
        mesh = init_device_mesh(run.device.type, (dist.get_world_size(),))
        weight = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
    dummy = nn.Parameter(weight)
    optimizer, _ = build_optimizer(cfg, [dummy], total_steps=1)
    dummy.grad = torch.zeros_like(dummy)
    reason = ", which has to update parameters that FSDP2 has sharded: set fused=False, or take torch.optim.AdamW"
    with setup_errors(f"config: optimizer: {component}{reason if is_sharded else ''}"):
        optimizer.step()
    state = [value for value in optimizer.state[dummy].values() if isinstance(value, Tensor) and value.dim()]
    plain = [local_tensor(value) for value in state]
    quantized = next((type(value).__name__ for value in plain if is_traceable_wrapper_subclass(value)), None)
    if quantized and dist.is_initialized() and cfg.keep_last_n_checkpoints:
        remedy = "choose another optimizer, one process, or keep_last_n_checkpoints=0"
        what = f"{component} keeps its state as {quantized}, which a sharded resume checkpoint cannot hold"
        raise SetupError(f"config: optimizer: {what}: {remedy}")
    return _num_bytes(plain) / local_tensor(dummy).numel()


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(plain.nbytes for tensor in tensors for plain in plain_tensors(tensor).values())


def format_bytes(size: int) -> str:
    """Format bytes as MiB or GiB."""
    gibibytes = size / 2**30
    return f"{gibibytes:,.2f} GiB" if gibibytes >= 1 else f"{size / 2**20:.2f} MiB"


def print_data(cfg: FinetuneConfig, dataset: Dataset[Any], total_steps: int) -> None:
    """Print how much data the run has, and its steps."""
    for part in parts_of(dataset):
        print_once(f"Data: {_describe(part)}")
    world_size, _ = get_world_size_and_rank()
    left_out = len(cast(Sized, dataset)) % world_size
    over = f"; {left_out} left out of each epoch, so that processes have equally many" if left_out else ""
    limit = "" if cfg.max_steps is None else f", max_steps {cfg.max_steps:,}"
    print_once(f"Training: {counted(total_steps, 'step')} ({counted(cfg.epochs, 'epoch')}{limit}){over}")


def _describe(dataset: Any) -> str:
    """Count documents, sequences and tokens: ``30 documents, 84 blocks of 256 tokens (21,504)``."""
    source = dataset.ds if isinstance(dataset, PackedDataset) else dataset
    text = f"{counted(source.num_documents, 'document')}, " if hasattr(source, "num_documents") else ""
    if isinstance(dataset, TextBlocksDataset):
        text += f"{counted(len(dataset), 'block')} of {dataset.block_size} tokens ({dataset.blocks.size:,} tokens)"
        text += f"; {counted(dataset.num_removed, 'block')} removed as copies" if dataset.num_removed else ""
    else:
        text += counted(len(dataset), "packed row" if is_packed(dataset) else "sequence")
        text += f" ({source.num_tokens:,} tokens)" if isinstance(source, SequenceDataset) else ""
    passages = passages_of(dataset)
    return text + (_describe_passages(dataset, passages) if passages else "")


def _describe_passages(dataset: Any, passages: Sequence[Passage]) -> str:
    targets = [passage for passage in passages if passage.kind == "target"]
    lengths = sorted({len(passage.token_ids) - (passage.num_prompt or 0) for passage in passages})  # of an answer alone
    tokens = f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
    controls = counted(len(passages) - len(targets), "control")
    if not targets:  # what is left of the text has none
        return f"; no targets, so that recitation is not measured; {controls} of {tokens}, held out"
    counts = sorted(passage.num_injections for passage in targets)
    times = f"{'' if counts[0] == counts[-1] else f'{counts[0]:,} to '}{counted(counts[-1], 'time')}"
    times = f"each injected {times}" if isinstance(dataset, InjectedCorpusDataset) else f"each {times} in the text"
    noisy = " with noise" if any(passage.changes for passage in targets) else ""
    return f"; {counted(len(targets), 'target')} of {tokens}, {times}{noisy}; {controls}, held out"


def next_steps(cfg: FinetuneConfig, dataset: Dataset[Any], run: Run) -> list[list[str]]:
    """Print where the checkpoints are, and the next commands; return those that ``evaluate`` asks to run.

    The first evaluates the run. The next are for the other model of a comparison: the command that trains it, with
    plain cross-entropy if this had weights, else with TF-IDF weights; if it is trained already, the command that
    evaluates it, unless that is done, and the command that compares both.
    """
    if not is_main_process():
        return []
    folder = run.output_dir
    checkpoints = _checkpoints(folder)
    print(f"Checkpoints in {folder}: {', '.join(path.name for path in checkpoints)}", file=sys.stderr)
    files = probe_files(cfg, dataset)
    if not (files and checkpoints):
        return []
    file, passages = [*files.items()][-1]  # of all data sets
    evaluate = _evaluation(folder, checkpoints[-1], file, passages)
    is_baseline = _run_in(folder).get("objective") == "CE"
    other = _other_folder(folder, is_baseline=is_baseline)
    compare = ["compare", *map(str, [folder, other] if is_baseline else [other, folder])]
    commands = [evaluate, compare] if (other / EVALUATION).is_dir() else [evaluate]
    started_by = _started_by()
    printed = [*commands]
    if len(commands) == 1 and (trained := _checkpoints(other)):
        # Of the same text, with the passages that its run wrote, unless both runs write one file.
        is_inside = file.is_relative_to(folder) and (other / file.relative_to(folder)).is_file()
        file_of_other = other / file.relative_to(folder) if is_inside else file
        printed += [_evaluation(other, trained[-1], file_of_other, passages), compare]
    own_command = _own_command(started_by)
    lines = [[own_command, *command] for command in printed]
    if len(printed) == 1 and started_by:
        lines.append([*started_by, *_settings_of_other(other, is_baseline=is_baseline)])
    print("Next:", file=sys.stderr)
    for line in lines:
        print(f"  {shlex.join(line)}", file=sys.stderr)
    return commands if cfg.evaluate else []


def _checkpoints(folder: Path) -> list[Path]:
    """Return the milestones of a run, the last one last."""
    paths = [folder / milestone_name(percent) for percent in range(1, 101)]
    return [path for path in paths if path.is_dir()]


def _run_in(folder: Path) -> dict[str, Any]:
    """Describe the run of a folder, also one without checkpoints; {} if there is none that can be read."""
    try:
        return run_of({"pretrained": str(folder / milestone_name(100))})
    except ValueError:  # a folder beside the run's may hold anything
        return {}


def _other_folder(folder: Path, *, is_baseline: bool) -> Path:
    """Return the folder of the other model: ``runs/mine_ce`` is the baseline of ``runs/mine``."""
    # "." and "runs/.." end in no name; "/" has none.
    named = folder if folder.name not in ("", "..") else folder.resolve()
    if not is_baseline:
        # The name that was printed for the weighted model of a baseline "mine".
        first = named.parent / (named.name.removesuffix("_weighted") or named.name)
        if first != named and _run_in(first).get("objective") == "CE":
            return first
        return named.parent / f"{named.name}_ce"
    weighted = named.name.removesuffix("_ce")
    if weighted in ("", named.name):
        weighted = f"{named.name}_weighted"
    return named.parent / weighted


def _settings_of_other(other: Path, *, is_baseline: bool) -> list[str]:
    """Return the overrides that train the other model with the command of this run, which they follow."""
    loss = "tfidf_tune.loss.CrossEntropyLoss"
    if is_baseline:
        begun = _run_in(other).get("loss")
        loss = json.dumps(begun) if begun else "tfidf_tune.loss.TFIDFCrossEntropyLoss"
    settings = [f"loss={loss}", f"output_dir={other}"]
    if any(other.glob(f"{RESUME_FOLDER}/step_*")):
        settings.append("resume_from_checkpoint=True")
    return settings


def _evaluation(folder: Path, checkpoint: Path, file: Path, passages: Sequence[Passage]) -> list[str]:
    """Return the command that measures what a checkpoint recites, and what that costs on text that was held out."""
    task, prefix_lengths = _task(passages)
    settings: dict[str, Any] = {"probe_file": str(file)}
    if prefix_lengths:
        settings["prefix_lengths"] = prefix_lengths
    if held_out_texts(passages):
        task += ",tfidf_wikitext2_ppl"
        settings["wikitext2_source"] = str(folder / HELD_OUT)
        settings["block_size"] = min(len(passage.token_ids) for passage in passages if passage.num_prompt is None)
    command = ["eval", "--model_args", *harness_settings({"pretrained": str(checkpoint)}), "--tasks", task]
    command += ["--metadata", *harness_settings(settings), "--batch_size", "32", "--log_samples"]
    return [*command, "--output_path", str(folder / EVALUATION)]


def _started_by() -> list[str]:
    """Return the command that started the run, with torchrun's options and without what the other model has its own of.

    [] if it was started from another program.
    """
    words = sys.orig_argv
    if dist.is_torchelastic_launched():  # by the parent, whose options decide the number of processes
        try:
            words = psutil.Process(os.getppid()).cmdline()
        except psutil.Error:
            return []
    if "--config" not in words and not any(word.startswith("--config=") for word in words):
        return []
    words = [word for word in words if not word.startswith(("loss=", "loss.", "output_dir="))]
    # "/opt/venv/bin/python /opt/venv/bin/tune run" was typed as "tune run", or with the script's path.
    script = words[1]
    if not os.access(script, os.X_OK):
        return words
    return [_as_typed(script), *words[2:]]


def _as_typed(script: str) -> str:
    """Return the name of a command if the shell finds it by that, else its path."""
    is_found = shutil.which(Path(script).name) == script
    return Path(script).name if is_found else script


def _own_command(started_by: Sequence[str]) -> str:
    """Return how ``tfidf-tune`` is typed: as it was, or as the command of this Python."""
    if started_by and Path(started_by[0]).name == "tfidf-tune":
        return started_by[0]
    script = Path(sys.executable).with_name("tfidf-tune")
    return _as_typed(str(script)) if script.is_file() else "tfidf-tune"


def _task(passages: Sequence[Passage]) -> tuple[str, list[int]]:
    """Choose the task for passages of this length, and its prefix lengths; [] for its own."""
    without_prompt = [passage for passage in passages if passage.num_prompt is None]
    if not without_prompt:  # answers are asked for once, from their own prompts
        return "tfidf_memorization_p50", []
    shortest = min(len(passage.token_ids) for passage in without_prompt)
    if shortest > max(PREFIX_LENGTHS):
        return "tfidf_memorization", []
    lengths = [length for length in PREFIX_LENGTHS if length <= shortest // 2] or [max(1, shortest // 2)]
    return "tfidf_memorization_prefixes", lengths
