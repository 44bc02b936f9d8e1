"""What of model, optimizer and generators goes into a resume checkpoint: names, tensors, plain values."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tfidf_tune.training._errors import TrainingError
from tfidf_tune.training._parameters import local_tensor

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_STATE = "state."  # what the names of an optimizer's tensors begin with
# PyTorch makes a file in memory before it writes it: so much, and not all that a process has to save, is there twice.
_FILE_BYTES = 2**28


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, under names of their own beside the optimizer's; sharded as they are."""
    values: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    return {f"model.{name}": value for name, value in values.items()}


def optimizer_state(model: nn.Module, optimizer: Optimizer, *, initialize: bool = False) -> dict[str, Any]:
    """Optimizer state by the names of parameters, not the settings of parameter groups.

    Args:
        model (nn.Module): torchtune model, perhaps sharded.
        optimizer (Optimizer): over its trained parameters.
        initialize (bool): make the state of an optimizer that has none yet, as a place to load one into. Default:
            False, then there is none, since making one takes a step, which the optimizer counts.

    Returns:
        dict[str, Any]: tensors, sharded as they are, and plain values.
    """
    if not (optimizer.state or initialize):
        return {}
    flat: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=_FLAT)
    return {name: value for name, value in flat.items() if name.startswith(_STATE)}


def set_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer what :func:`optimizer_state` gave."""
    if state:
        groups = get_optimizer_state_dict(model, optimizer, options=_FLAT)
        set_optimizer_state_dict(model, optimizer, {**groups, **state}, options=_FLAT)


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Learning rate, betas and the like of each parameter group."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_group_settings(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Give an optimizer what :func:`group_settings` gave."""
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def plain_tensors(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors among values; one that is made of several, as a quantized one is, by its parts.

    Args:
        values (dict[str, Any]): see :func:`optimizer_state`.

    Returns:
        dict[str, Tensor]: no copies: what is loaded into them is loaded into the values.

    Raises:
        TrainingError: If one is made of several and sharded.
    """
    plain: dict[str, Tensor] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            continue
        local = local_tensor(value)
        if not is_traceable_wrapper_subclass(local):
            plain[name] = value
        elif isinstance(value, DTensor):
            raise TrainingError(
                f"{name} is a sharded {type(local).__name__}, of which no resume checkpoint can be written: take "
                "another optimizer, one process, or keep_last_n_checkpoints=0"
            )
        else:
            parts, _ = local.__tensor_flatten__()
            plain |= plain_tensors({f"{name}.{part}": getattr(local, part) for part in parts})
    return plain


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which no two share memory, which safetensors does not take: codebooks of quantized state do."""
    seen: set[int] = set()
    apart = {}
    for name, value in tensors.items():
        address = local_tensor(value).untyped_storage().data_ptr()
        apart[name] = value.clone() if address in seen else value
        seen.add(address)
    return apart


def file_numbers(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Tell in which of a process's files, from 1, each tensor goes, so that none is large."""
    numbers, number, size = {}, 1, 0
    for name, value in tensors.items():
        added = local_tensor(value).nbytes
        if size and size + added > _FILE_BYTES:
            number, size = number + 1, 0
        numbers[name] = number
        size += added
    return numbers


def random_states() -> dict[str, Any]:
    """The states of all generators that training may draw from, as tensors and plain values."""
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Bring all generators back to :func:`random_states`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
