"""What tests do to one process of a run; handed to it as ``partial(hook, ...)``, called with its rank."""

import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor

from tfidf_tune import training
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import HFCheckpointer, TrainState, _checkpointer, _snapshot, _train
from tfidf_tune.training._sharding import local_tensor, parameters_by_name


def _before_call(owner: Any, name: str, number: int, work: Callable[..., None]) -> None:
    """Do something with the arguments of a function before its call of that number, from 1."""
    function, calls = getattr(owner, name), 0

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            work(*args, **kwargs)
        return function(*args, **kwargs)

    setattr(owner, name, counted)


def send_itself(number: signal.Signals, step: int, ranks: tuple[int, ...], rank: int) -> None:
    """Send these processes a signal when a step begins."""
    if rank in ranks:
        _before_call(_train, "train_step", step, lambda *_, **__: os.kill(os.getpid(), number))


def lose_loss(step: int, rank: int) -> None:
    """Let the loss of rank 1 be NaN in a step of one mini-batch."""
    if rank != 1:
        return
    terms, calls = WeightedCrossEntropyLoss.terms, 0

    def lost(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        found = terms(*args)
        return found._replace(loss=found.loss * torch.nan) if calls == step else found

    WeightedCrossEntropyLoss.terms = lost


def lose_weights(first_steps: tuple[int, ...], rank: int) -> None:
    """Let the weights of each rank be 0 from a step of its own on, in steps of one mini-batch."""
    terms, calls = WeightedCrossEntropyLoss.terms, 0

    def lost(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        found = terms(*args)
        return found._replace(loss=found.loss * 0, weights=found.weights * 0) if calls >= first_steps[rank] else found

    WeightedCrossEntropyLoss.terms = lost


def overflow_shard(step: int, rank: int) -> None:
    """Let a gradient be infinite in the shard of rank 1 when a step's gradients are unscaled."""

    def overflow(_: Any, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
        assert all(isinstance(gradient, DTensor) for gradient in gradients)
        gradients[0]._local_tensor.fill_(torch.inf)

    if rank == 1:
        _before_call(torch.amp.GradScaler, "unscale_", step, overflow)


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def fail_milestone(rank: int) -> None:
    """Let rank 0 write one layer of its second milestone, then fail."""

    def fail(folder: Path, meta: Any, parts: Any, **_: Any) -> None:
        next(parts)
        _refuse()

    if rank == 0:
        _before_call(_checkpointer, "write_weights", 2, fail)


def fail_resume_file(failing_rank: int, rank: int) -> None:
    """Let a process fail at its own file of the second resume checkpoint."""
    if rank == failing_rank:
        _before_call(_snapshot.torch, "save", 2, _refuse)


def refuse_checkpoint(rank: int) -> None:
    """Let rank 1 alone find its checkpoint unreadable."""

    def refuse(*_: Any) -> None:
        raise ValueError("the copy of this machine is damaged")

    if rank == 1:
        _before_call(HFCheckpointer, "check_model", 1, refuse)


def save_random_state(folder: Path, rank: int) -> None:
    """Write down the state of the generator that dropout draws from."""
    torch.save(torch.get_rng_state(), folder / f"random_state_{rank}.pt")


def save_what_is_loaded(folder: Path, rank: int) -> None:
    """Write down what this process holds of each weight when training begins: values, and bytes of memory."""

    def save(_: Any, state: TrainState, *__: Any, **___: Any) -> None:
        held = {name: local_tensor(value) for name, value in parameters_by_name(state.model).items()}
        values = {name: _plain(value).detach().clone() for name, value in held.items()}
        num_bytes = {name: _num_bytes(value) for name, value in held.items()}
        torch.save({"values": values, "num_bytes": num_bytes}, folder / f"loaded_{rank}.pt")

    _before_call(training, "train", 1, save)


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.get_original_weight() if isinstance(value, NF4Tensor) else value


def _num_bytes(value: torch.Tensor) -> int:
    """Bytes of the storage that a tensor keeps alive, be it a view of a part."""
    if isinstance(value, NF4Tensor):
        names, _ = value.__tensor_flatten__()
        return sum(_num_bytes(getattr(value, name)) for name in names if isinstance(getattr(value, name), torch.Tensor))
    return value.untyped_storage().nbytes()
