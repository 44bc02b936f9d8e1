"""Memory and disk space of a run: printed before it begins, and refused where it cannot fit."""

import os
import shutil
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._files import nearest_folder
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.models import dequantize_4bit
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._components import instantiate
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._data import longest_sequence
from tfidf_tune.training._distributed import is_main_process
from tfidf_tune.training._errors import SetupError
from tfidf_tune.training._lora import LoRASettings, is_adapter
from tfidf_tune.training._memory_plan import MemoryPlan, format_bytes, plan_memory
from tfidf_tune.training._run import Run


def check_resources(
    cfg: FinetuneConfig,
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    dataset: Dataset[Any],
    run: Run,
    checkpointer: HFCheckpointer,
) -> None:
    """Print the memory plan and the size of checkpoints; refuse a run that does not fit into memory or on the disk.

    With ``refuse_if_too_large=False`` in the config it only prints. The model is on the meta device, with
    ``requires_grad`` as in training; the length of sequences is that of a sample of the data set.

    Raises:
        SetupError: If the run needs more than is available; the message has the sizes and the remedies.
    """
    world_size, _ = get_world_size_and_rank()
    seq_len = longest_sequence(dataset)
    vocab_size = model.get_parameter("tok_embeddings.weight").shape[0]
    plan = plan_memory(
        model,
        loss,
        partial(instantiate, cfg, "optimizer"),
        batch_size=cfg.batch_size,
        seq_len=seq_len,
        device=run.device,
        accumulate_gradients=cfg.gradient_accumulation_steps > 1,
        enable_activation_checkpointing=cfg.enable_activation_checkpointing or cfg.compile,
        autocast_dtype=torch.float16 if run.dtype is torch.float16 else None,
        num_shards=world_size,
        objective_state=loss.weighting.num_state_bytes(
            cfg.batch_size, seq_len, vocab_size=vocab_size, num_ranks=world_size
        ),
    )
    if plan.quantized_state and dist.is_initialized() and cfg.keep_last_n_checkpoints:
        raise SetupError(
            f"config: optimizer: {cfg.optimizer['_component_']} keeps its state as {plan.quantized_state}, which a "
            "resume checkpoint cannot hold where it is sharded: choose another optimizer, one process, or "
            "keep_last_n_checkpoints=0"
        )
    memory = available_memory(run.device)
    if run.device.type == "cpu":
        memory //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes of a machine share it
    saves_adapters = LoRASettings.of(model) is not None and not getattr(cfg, "merge_adapter", False)
    saved = [dequantize_4bit(p, "meta") for n, p in model.named_parameters() if is_adapter(n) == saves_adapters]
    size = sum(p.numel() * p.dtype.itemsize for p in saved)
    size += getattr(checkpointer, "companion_bytes", 0)
    # A threshold of the monitor adds the checkpoint that it keeps, or the one that it ends the run with.
    has_threshold = cfg.memorization_monitor is not None and cfg.memorization_monitor.stop_above is not None
    number, number_to_resume = len(set(cfg.save_at_percent)) + has_threshold, cfg.keep_last_n_checkpoints
    needed, checkpoints = number * size, f"{number} checkpoints of {format_bytes(size)}"
    if number_to_resume:
        needed += (number_to_resume + 1) * plan.saved_to_resume  # one more than are kept, while the newest is written
        checkpoints += f" and {number_to_resume} to resume from of {format_bytes(plan.saved_to_resume)}"
    disk = shutil.disk_usage(nearest_folder(run.output_dir)).free
    if cfg.refuse_if_too_large:
        check_fits(plan, memory)
    if cfg.refuse_if_too_large and needed > disk:
        raise SetupError(
            f"{checkpoints} do not fit into {run.output_dir}, where {format_bytes(disk)} are free: choose another "
            "output_dir, fewer save_at_percent, a lower keep_last_n_checkpoints (0 for none), or only adapters; "
            "refuse_if_too_large=False tries it anyway"
        )
    if is_main_process():
        where = f"{run.device}, one of {world_size} processes" if world_size > 1 else f"{run.device}"
        print(
            f"A step of {cfg.batch_size} x {seq_len} tokens on {where}:\n{plan.table(memory)}\n"
            f"{checkpoints}; {format_bytes(disk)} are free in {run.output_dir}",
            file=sys.stderr,
        )


def check_fits(plan: MemoryPlan, available: int) -> None:
    """Raise a SetupError if a plan needs more than the available bytes."""
    if plan.total > available:
        raise SetupError(
            f"the run needs {format_bytes(plan.total)} of memory or more, {format_bytes(available)} are available; the "
            f"largest part is {max(plan.parts, key=plan.parts.__getitem__)}:\n{plan.table(available)}\n"
            "activations and loss shrink with a smaller batch_size (and more gradient_accumulation_steps), with "
            "enable_activation_checkpointing=True and shorter sequences; gradients and optimizer state with LoRA; "
            "weights with dtype=bf16, or with LoRA and model.quantize_base=True; objective state with fewer "
            "mini-batches in its window (num_batches); refuse_if_too_large=False tries it anyway"
        )


def available_memory(device: torch.device) -> int:
    """Return the free bytes of a CUDA device, or of the host within the limits of its control group (v2)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([int(psutil.virtual_memory().available), *_control_group_memory()])


def _control_group_memory(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> Iterable[int]:
    """Yield the bytes left in the process's control group and its parents, as far as they have limits."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for group in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        for folder in (root / group, *(root / group).parents):
            limit = folder / "memory.max"
            if limit.is_file() and (most := limit.read_text().strip()) != "max":
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                used = int((folder / "memory.current").read_text())
                # File pages count as used, but are freed on demand.
                yield int(most) - used + int(statistics["active_file"]) + int(statistics["inactive_file"])
