"""What a run tells its user: the bytes that it needs, the data, the checkpoints, the next commands."""

import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence, Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import Dataset
from torchtune.datasets import PackedDataset
from torchtune.utils import get_world_size_and_rank

from tfidf_tune._files import nearest_folder
from tfidf_tune._printing import counted
from tfidf_tune.data import InjectedCorpusDataset, Passage, SequenceDataset, TextBlocksDataset, is_packed
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.models import LoRASettings, dequantize_4bit, is_adapter
from tfidf_tune.training._checkpointer import HFCheckpointer
from tfidf_tune.training._components import build_optimizer, find_component
from tfidf_tune.training._config import FinetuneConfig
from tfidf_tune.training._data import parts_of, probe_files
from tfidf_tune.training._distributed import is_main_process, local_tensor, plain_tensors, print_once
from tfidf_tune.training._errors import SetupError, setup_errors
from tfidf_tune.training._run import Run, milestone_name

_DUMMY_SHAPE = (1024, 1024)  # a matrix, because some optimizers keep less for matrices; large, because others pad
_PREFIX_LENGTHS = (32, 50, 100)  # of the task tfidf_memorization


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
    size_to_resume = _num_bytes([*trained, *loss.buffers()]) + optimizer_bytes
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
        return text + (_describe_passages(dataset.passages) if isinstance(dataset, InjectedCorpusDataset) else "")
    text += counted(len(dataset), "packed row" if is_packed(dataset) else "sequence")
    return f"{text} ({source.num_tokens:,} tokens)" if isinstance(source, SequenceDataset) else text


def _describe_passages(passages: Sequence[Passage]) -> str:
    targets = [passage for passage in passages if passage.kind == "target"]
    lengths = sorted({len(passage.token_ids) for passage in passages})
    tokens = f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
    times = max(passage.num_injections for passage in targets)
    controls = counted(len(passages) - len(targets), "control")
    noisy = " with noise" if any(passage.changes for passage in targets) else ""
    return f"; {counted(len(targets), 'target')} of {tokens}, repeated {times} times each{noisy}; {controls}, held out"


def print_next_steps(cfg: FinetuneConfig, dataset: Dataset[Any], run: Run) -> None:
    """Print where the checkpoints are, and the commands that evaluate and compare the run."""
    if not is_main_process():
        return
    folder = run.output_dir
    checkpoints = [path for percent in range(1, 101) if (path := folder / milestone_name(percent)).is_dir()]
    print(f"Checkpoints in {folder}: {', '.join(path.name for path in checkpoints)}", file=sys.stderr)
    for file, passages in list(probe_files(cfg, dataset))[:1]:
        results, probe_file = shlex.quote(str(folder / "evaluation")), shlex.quote(f"probe_file={file}")
        evaluate = f"tfidf-tune eval --model_args {shlex.quote(f'pretrained={checkpoints[-1]}')} --tasks"
        output = f"--batch_size 32 --log_samples --output_path {results}"
        task, prefix_lengths = _task(passages)
        # Blocks as long as in the training text, which the model surely takes.
        sizes = [part.block_size for part in parts_of(dataset) if isinstance(part, TextBlocksDataset)]
        block_size = f" block_size={min(sizes)}" if sizes else ""
        print(
            "Next, measure what it recites, and make a page of it:",
            f"  {evaluate} {task} --metadata {probe_file}{prefix_lengths} {output}",
            f"  tfidf-tune probe audit --results {results}",
            "Measure the cost, on text of yours that it was not trained on (put your .jsonl or .txt for HELD_OUT):",
            f"  {evaluate} tfidf_wikitext2_ppl --metadata wikitext2_source=HELD_OUT{block_size} {output}",
            "With another run, for example of loss=tfidf_tune.loss.CrossEntropyLoss, evaluated by the same commands:",
            f"  tfidf-tune compare {shlex.quote(str(folder))} OTHER_RUN",
            sep="\n",
            file=sys.stderr,
        )


def _task(passages: Sequence[Passage]) -> tuple[str, str]:
    """Choose the task for passages of this length, and its prefix lengths."""
    if all(passage.num_prompt is not None for passage in passages):  # asked for once, from their own prompts
        return "tfidf_memorization_p50", ""
    shortest = min(len(passage.token_ids) for passage in passages)
    if shortest > max(_PREFIX_LENGTHS):
        return "tfidf_memorization", ""
    lengths = [length for length in _PREFIX_LENGTHS if length <= shortest // 2] or [max(1, shortest // 2)]
    return "tfidf_memorization_prefixes", f" 'prefix_lengths=[{','.join(map(str, lengths))}]'"
