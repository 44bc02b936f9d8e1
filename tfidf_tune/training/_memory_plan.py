"""The memory that a run will need, estimated by a training step on the meta device."""

import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torchtune import training

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.models import dequantize_4bit, is_4bit
from tfidf_tune.training._errors import cause_of
from tfidf_tune.training._model import prepare_head
from tfidf_tune.training._sharding import plain_tensors

_PROBE_SHAPE = (1024, 1024)  # a matrix, because some optimizers keep less for those; large, because others pad


@dataclass(frozen=True)
class MemoryPlan:
    """Numbers of parameters of a model, and the bytes that training it takes; None: not estimated."""

    num_trained: int
    num_frozen: int
    weights: int  # parameters as they are stored, and constant tables
    optimizer: int | None  # state after the first step
    gradients: int
    activations: int | None  # what the model's forward pass keeps, logits included
    loss: int | None  # what the loss keeps in addition
    step: int  # the peak of gradients, activations, loss and temporaries, which is less than their sum
    saved_to_resume: int  # a resume checkpoint on disk
    objective_state: int = 0  # a full window, for example
    quantized_state: str | None = None  # class of optimizer state that consists of several tensors
    not_estimated: tuple[str, ...] = ()  # what is missing in the above, and why

    @property
    def parts(self) -> dict[str, int]:
        """Return the bytes of each known part by its name; not all are needed at the same time."""
        parts = {
            "weights": self.weights,
            "optimizer state": self.optimizer,
            "gradients": self.gradients,
            "activations": self.activations,
            "loss": self.loss,
            "objective state": self.objective_state or None,
        }
        return {name: size for name, size in parts.items() if size is not None}

    @property
    def total(self) -> int:
        """Return the bytes needed at one time, a lower bound."""
        return self.weights + (self.optimizer or 0) + self.objective_state + self.step

    def table(self, available: int) -> str:
        """Format the plan and the available bytes, one part per line."""
        sizes = {**self.parts, "needed at least": self.total, "available": available}
        notes = {"needed at least": "  at the peak: activations are freed as gradients are computed"}
        lines = [f"parameters       {self.num_trained:,} trained, {self.num_frozen:,} frozen"]
        lines += [f"{name:<15} {format_bytes(size):>13}{notes.get(name, '')}" for name, size in sizes.items()]
        return "\n".join([*lines, *(f"not estimated: {reason}" for reason in self.not_estimated)])


def plan_memory(
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    build_optimizer: Callable[[list[nn.Parameter]], Optimizer],
    *,
    batch_size: int,
    seq_len: int,
    device: torch.device,
    accumulate_gradients: bool = False,
    enable_activation_checkpointing: bool = False,
    autocast_dtype: torch.dtype | None = None,
    num_shards: int = 1,
    objective_state: int = 0,
) -> MemoryPlan:
    """Estimate the memory for training by simulating a step on the meta device, without memory or computation.

    The plan is a lower bound: a run that exceeds the available memory by this plan cannot fit. It leaves out
    temporaries of kernels and of the optimizer's step, the data, and fragmentation.

    Args:
        model (nn.Module): torchtune model on the meta device, ``requires_grad`` as in training; not changed.
        loss (WeightedCrossEntropyLoss): the objective; not changed.
        build_optimizer (Callable[[list[nn.Parameter]], Optimizer]): builds the optimizer over some parameters.
        batch_size (int): sequences of a mini-batch.
        seq_len (int): tokens of each.
        device (torch.device): where the run computes; some kernels keep less on CUDA.
        accumulate_gradients (bool): whether a step has several mini-batches. Default: False.
        enable_activation_checkpointing (bool): whether layers keep only their input; also the bound for a compiled
            model, which keeps less than an uncompiled one. Default: False.
        autocast_dtype (torch.dtype | None): dtype of ``torch.autocast`` around the forward pass. Default: None.
        num_shards (int): processes that share weights, gradients and optimizer state. Default: 1.
        objective_state (int): bytes of the objective's state in each process. Default: 0.

    Returns:
        MemoryPlan: without the activations of a model that does not run on the meta device, and without the state of
        an optimizer that cannot take a step.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    step = gradients = sum(parameter.nbytes for parameter in trained)
    optimizer = quantized_state = activations = loss_bytes = None
    not_estimated = []
    # A model or optimizer of the user may raise anything here, which need not prevent training.
    try:
        optimizer, quantized_state = _measure_optimizer(build_optimizer, trained, device)
    except Exception as error:
        not_estimated.append(f"optimizer state ({cause_of(error)})")
    try:
        activations, loss_bytes, step = _simulate_step(
            model,
            loss,
            torch.zeros(batch_size, seq_len, dtype=torch.int64, device="meta"),
            _DeviceKernels(device, autocast_dtype),
            accumulate_gradients=accumulate_gradients,
            enable_activation_checkpointing=enable_activation_checkpointing,
        )
    except Exception as error:
        not_estimated.append(f"activations and loss ({cause_of(error)})")
    if loss.head == "torch":
        not_estimated.append("temporary memory of PyTorch's linear_cross_entropy")
    # A gradient has the size of its weight; each process saves its own objective.
    saved_to_resume = gradients + (optimizer or 0) + num_shards * objective_state
    if num_shards > 1:
        # A lower bound need not count what is gathered for a moment: layers, and gradients to be summed.
        gradients = -(-gradients // num_shards)
        optimizer = None if optimizer is None else -(-optimizer // num_shards)
        step = max(gradients, (activations or 0) + (loss_bytes or 0))
    return MemoryPlan(
        num_trained=sum(parameter.numel() for parameter in trained),
        num_frozen=sum(dequantize_4bit(p, "meta").numel() for p in model.parameters() if not p.requires_grad),
        weights=-(-_num_bytes(model.parameters()) // num_shards) + _num_bytes(model.buffers()),
        optimizer=optimizer,
        gradients=gradients,
        activations=activations,
        loss=loss_bytes,
        step=step,
        saved_to_resume=saved_to_resume,
        objective_state=objective_state,
        quantized_state=quantized_state,
        not_estimated=tuple(not_estimated),
    )


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(plain.nbytes for tensor in tensors for plain in plain_tensors(tensor).values())


def _measure_optimizer(
    build_optimizer: Callable[[list[nn.Parameter]], Optimizer], trained: list[nn.Parameter], device: torch.device
) -> tuple[int, str | None]:
    """Scale the state's bytes up from one parameter, scalars by the number of parameters; name a quantized class."""
    total, quantized = 0.0, None
    for dtype in {parameter.dtype for parameter in trained}:
        probe = nn.Parameter(torch.zeros(_PROBE_SHAPE, dtype=dtype, device=device))
        probe.grad = torch.zeros_like(probe)
        optimizer = build_optimizer([probe])
        optimizer.step()
        state = [value for value in optimizer.state[probe].values() if isinstance(value, Tensor)]
        sizes = [parameter.numel() for parameter in trained if parameter.dtype == dtype]
        total += _num_bytes(value for value in state if value.dim() == 0) * len(sizes)
        total += _num_bytes(value for value in state if value.dim()) * sum(sizes) / probe.numel()
        quantized = next((type(v).__name__ for v in state if is_traceable_wrapper_subclass(v)), quantized)
    return round(total), quantized


def _simulate_step(
    model: nn.Module,
    loss: WeightedCrossEntropyLoss,
    tokens: Tensor,
    kernels: "_DeviceKernels",
    *,
    accumulate_gradients: bool,
    enable_activation_checkpointing: bool,
) -> tuple[int, int, int]:
    """Return the bytes that the forward pass keeps, those that the loss adds, and the peak with all gradients."""
    # New parameters on the same data: torchao would quantize copies again, which takes seconds. Those of bitsandbytes,
    # which are always frozen, cannot be copied on the meta device.
    shared = {
        id(p): p if is_4bit(p) else nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in model.parameters()
    }
    model = copy.deepcopy(model, shared).train()
    prepare_head(model, loss)
    if enable_activation_checkpointing:
        layers: Any = model.layers
        training.set_activation_checkpointing(
            model,
            auto_wrap_policy={type(layer) for layer in layers},
            # The backward pass runs layers again, outside of the mode.
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, context_fn=lambda: (nullcontext(), kernels)),
        )
    gradients = []
    if accumulate_gradients:
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.grad = torch.empty_like(parameter)
            gradients.append(parameter.grad)
    with _LiveBytes([*model.parameters(), *model.buffers(), *gradients]) as live:
        with kernels:
            logits = model(tokens)
        activations = live.now
        objective, _ = loss.objective(logits, tokens, torch.zeros_like(tokens, dtype=torch.float32))
        loss_bytes = live.now - activations
        del logits  # as in training, where nothing but the graph holds them
        torch.autograd.backward(objective)
    return activations, loss_bytes, _num_bytes(gradients) + live.most


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that are made in the block; views and known tensors do not count.

    MemTracker of torch.distributed._tools gives the same bytes for full models, but cannot run frozen weights.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.most = 0
        self._storages = weakref.WeakSet(
            plain.untyped_storage() for tensor in known for plain in plain_tensors(tensor).values()
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for storage in (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor).values()):
            if storage not in self._storages:
                self._storages.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.most = max(self.most, self.now)


class _DeviceKernels(TorchFunctionMode):
    """Makes the meta device keep for the backward pass what the kernels of a real device keep."""

    def __init__(self, device: torch.device, autocast_dtype: torch.dtype | None) -> None:
        super().__init__()
        self._is_cuda = device.type == "cuda"
        self._autocast_dtype = autocast_dtype
        self._casts: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._autocast_dtype is not None and func in (F.linear, F.scaled_dot_product_attention):
            args = tuple(self._autocast(value, self._autocast_dtype) for value in args)
        if func is F.scaled_dot_product_attention:
            # On meta it would keep s x s probabilities, which the fused kernels of CPU and CUDA do not.
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]
        if self._is_cuda and func is F.dropout:
            return torch.native_dropout(args[0], kwargs["p"], kwargs["training"])[0]  # keeps bools, not floats
        if self._is_cuda and func is F.rms_norm:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            if len({tensor.dtype for tensor in tensors}) == 1:
                # The fused kernel, for one dtype only, keeps its input, not the normalized values.
                return checkpoint(func, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        return func(*args, **kwargs)

    def __exit__(self, *exception: Any) -> None:
        self._casts.clear()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _autocast(self, value: Any, dtype: torch.dtype) -> Any:
        """Cast as torch.autocast, which lacks the meta device, does: parameters once until it ends."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(dtype)
        return self._casts[id(value)]


def format_bytes(size: int) -> str:
    """Format bytes as MiB or GiB."""
    gibibytes = size / 2**30
    return f"{gibibytes:,.2f} GiB" if gibibytes >= 1 else f"{size / 2**20:.2f} MiB"
