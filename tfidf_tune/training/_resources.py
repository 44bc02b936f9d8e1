"""What a run needs: the bytes of weights, optimizer state and checkpoints, tried and compared
before it begins.
"""

import shutil
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.benchmark import Timer
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import nearest_folder
from tfidf_tune._printing import counted
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.models import LoRASettings, dequantize_4bit, is_adapter
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._distributed import (
    is_main_process,
    local_tensor,
    plain_tensors,
    print_once,
)
from tfidf_tune.training._errors import SetupError, setup_errors
from tfidf_tune.training._run import Run
from tfidf_tune.training.components import build_optimizer, find_component

_SAMPLE = 64  # sequences whose lengths are averaged
# of the matrices that are multiplied
_LEAST_SIZE = 128
_LARGEST_SIZE = 8192
# Longer than the time for which another process may take a core away: then a product that takes a
# hundredth of this waits for it each time.
_MEASURED_SECONDS = 0.05
_TRIALS = 5  # of each size
_MOST_SECONDS = 2.0  # of all trials together
# A matrix, because some optimizers keep less for matrices; large, because others pad.
_DUMMY_SHAPE = (
    1024,
    1024,
)


def check_resources(
    cfg: FinetuneConfig,
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    run: Run,
    checkpointer: HFCheckpointer,
) -> None:
    """Try the optimizer, print the bytes of weights and optimizer state, and compare checkpoints
    with the free disk.

    The model is on the meta device, with ``requires_grad`` as in training.

    Raises:
        SetupError: If the optimizer or its schedule cannot be built, takes no step, or cannot be
            saved, or the checkpoints do not fit on the disk.
    """
    # Weights and optimizer state.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    num_frozen = _num_weights(model) - num_trained
    dtype = trained[0].dtype if trained else run.dtype
    optimizer_bytes = round(_bytes_per_weight(cfg, dtype, run) * num_trained)
    text = (
        f"{num_trained:,} parameters are trained, {num_frozen:,} frozen: weights "
        f"{format_bytes(_num_bytes(model.parameters()))}, optimizer state "
        f"{format_bytes(optimizer_bytes)}"
    )
    world_size, _ = get_world_size_and_rank()
    if world_size > 1:
        text += f", over {world_size} processes"
    print_once(text)

    # A milestone is a model or an adapter, with its tokenizer. A threshold of the monitor adds the
    # checkpoint that it keeps, or the checkpoint that it ends the run with.
    saves_adapters = LoRASettings.of(model) is not None and not getattr(cfg, "merge_adapter", False)
    size = getattr(checkpointer, "companion_bytes", 0)
    for name, parameter in model.named_parameters():
        if is_adapter(name) == saves_adapters:
            weight = dequantize_4bit(parameter, "meta")
            size += weight.numel() * weight.dtype.itemsize
    number = len(set(cfg.save_at_percent))
    monitor = cfg.memorization_monitor
    if monitor is not None and monitor.stop_above is not None:
        number += 1
    needed = number * size

    # A resume checkpoint is what is trained and its optimizer. While the newest is written, the
    # disk holds one more than are kept.
    number_to_resume = cfg.keep_last_n_checkpoints
    size_to_resume = _num_bytes([*trained, *loss.state_dict().values()]) + optimizer_bytes
    if number_to_resume > 0:
        needed += (number_to_resume + 1) * size_to_resume
    free = shutil.disk_usage(nearest_folder(run.output_dir)).free
    if needed > free:
        raise SetupError(
            f"{number} checkpoints of {format_bytes(size)} and {number_to_resume} to resume from "
            f"of {format_bytes(size_to_resume)} do not fit into {run.output_dir}, where "
            f"{format_bytes(free)} are free: choose another output_dir, fewer save_at_percent or a "
            "lower keep_last_n_checkpoints"
        )


def _bytes_per_weight(cfg: FinetuneConfig, dtype: torch.dtype, run: Run) -> float:
    """Measure the optimizer's state after a step of a dummy; refuse a state that resume checkpoints
    cannot hold.
    """
    component = cfg.optimizer["_component_"]
    where = f"config: optimizer: {component}"
    # The dummy is sharded as the run's weights are, because some optimizers cannot update shards;
    # only for PyTorch's optimizers, because others may take long to compile.
    weight = torch.zeros(_DUMMY_SHAPE, dtype=dtype, device=run.device)
    module = find_component("optimizer", component).__module__
    if dist.is_initialized() and module.startswith("torch.optim."):
        mesh = init_device_mesh(run.device.type, (dist.get_world_size(),))
        weight = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        where += (
            ", which has to update parameters that FSDP2 has sharded: set fused=False, or take "
            "torch.optim.AdamW"
        )
    dummy = nn.Parameter(weight)
    optimizer, _ = build_optimizer(cfg, [dummy], total_steps=1)
    dummy.grad = torch.zeros_like(dummy)
    with setup_errors(where):
        optimizer.step()
    state = [
        local_tensor(value)
        for value in optimizer.state[dummy].values()
        if isinstance(value, Tensor) and value.dim()
    ]
    quantized = [type(value).__name__ for value in state if is_traceable_wrapper_subclass(value)]
    if quantized and dist.is_initialized() and cfg.keep_last_n_checkpoints:
        raise SetupError(
            f"config: optimizer: {component} keeps its state as {quantized[0]}, which a sharded "
            "resume checkpoint cannot hold: choose another optimizer, one process, or "
            "keep_last_n_checkpoints=0"
        )
    return _num_bytes(state) / local_tensor(dummy).numel()


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    size = 0
    for tensor in tensors:
        for part in plain_tensors(tensor).values():
            size += part.nbytes
    return size


def _num_weights(model: nn.Module) -> int:
    """Count the weights of a model; a tensor of 4 bits holds two in an element."""
    return sum(dequantize_4bit(parameter, "meta").numel() for parameter in model.parameters())


def format_bytes(size: int) -> str:
    """Format bytes as MiB or GiB."""
    gibibytes = size / 2**30
    return f"{gibibytes:,.2f} GiB" if gibibytes >= 1 else f"{size / 2**20:.2f} MiB"


def print_least_time(
    cfg: FinetuneConfig, model: nn.Module, dataset: Any, run: Run, num_steps: int
) -> None:
    """Print how long so many steps take at least, from the products of matrices alone and their
    rate on this device.

    A token takes two operations for each weight in the forward pass and two in the backward pass,
    and two more for each weight that is trained: 6 billion for a model of a billion weights, all
    trained, so that 100,000 tokens take a minute at 10 TFLOPS.
    """
    if not is_main_process() or num_steps == 0:
        return
    # The tokens, by the mean length of some sequences.
    step_size = max(1, len(dataset) // _SAMPLE)
    lengths = []
    for index in range(0, len(dataset), step_size):
        item = dataset[index]
        if not isinstance(item, Mapping) or "tokens" not in item:  # of a data set of the user
            return
        lengths.append(len(item["tokens"]))
    num_sequences = cfg.batch_size * cfg.gradient_accumulation_steps * num_steps
    num_tokens = num_sequences * sum(lengths) / len(lengths)

    # The operations, and the time that they take.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    num_trained = sum(parameter.numel() for parameter in trained)
    operations = (4 * _num_weights(model) + 2 * num_trained) * num_tokens
    # At this rate they take a second, and a higher one makes no difference.
    seconds = operations / _operations_per_second(run, sufficient_rate=operations)
    print_once(f"Time: at least {format_seconds(seconds)}, by the products of matrices alone")


def _operations_per_second(run: Run, *, sufficient_rate: float) -> float:
    """Measure the highest rate at which the device multiplies matrices of the run's dtype.

    A trial can take a hundred times as long as the next one if other processes use the cores, so
    the fastest of a few counts, and the size with the highest rate. A rate that is sufficient ends
    the measurement.
    """
    # The largest matrices have the highest rate, but some dtypes take seconds for them on a CPU.
    end = time.monotonic() + _MOST_SECONDS
    highest_rate = 0.0
    size = _LEAST_SIZE
    while True:
        matrix = torch.ones(size, size, dtype=run.dtype, device=run.device)
        # It multiplies twice before each trial.
        timer = Timer(
            "matrix @ matrix", globals={"matrix": matrix}, num_threads=torch.get_num_threads()
        )
        seconds = timer.timeit(1).median
        for _ in range(_TRIALS - 1):
            if time.monotonic() > end:
                break
            seconds = min(seconds, timer.timeit(1).median)
        highest_rate = max(highest_rate, 2 * size**3 / seconds)
        is_long_enough = seconds > _MEASURED_SECONDS or size == _LARGEST_SIZE
        if is_long_enough or highest_rate >= sufficient_rate or time.monotonic() > end:
            return highest_rate
        size *= 2


def format_seconds(seconds: float) -> str:
    """Format a time as seconds, minutes, hours or days, to two digits."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        number = seconds / size
        if number >= 10:
            return f"{number:,.0f} {unit}"
        if number >= 2:
            return f"{number:.2g} {unit}"
    return counted(max(1, round(seconds)), "second")
