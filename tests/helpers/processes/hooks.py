"""What tests do to the processes of a run: each hook is called in a process with its rank, before
the run begins.

``partial(at_call, "_train.train_step", partial(send, signal.SIGTERM), nth=5, ranks=(1,))``
"""

import itertools
import os
import resource
import signal
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torchao.dtypes.nf4tensor import NF4Tensor

from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.training import TrainState
from tfidf_tune.training._distributed import local_tensor, parameters_by_name


def at_call(
    name: str,
    action: Callable[..., object],
    rank: int,
    *,
    nth: int = 1,
    ranks: Collection[int] = (0, 1),
) -> None:
    """Call an action with the arguments of the n-th call of a function of ``tfidf_tune.training``,
    before that call.
    """
    *owners, last = name.split(".")
    owner: Any = import_module("tfidf_tune.training")
    for inner in owners:
        owner = (
            import_module(f"tfidf_tune.training.{inner}")
            if inner[0] == "_"
            else getattr(owner, inner)
        )
    original = getattr(owner, last)
    calls = itertools.count(1)

    def function(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            action(*args, **kwargs)
        return original(*args, **kwargs)

    if rank in ranks:
        setattr(owner, last, function)


def ignore_disk(_: int) -> None:
    """Do not compare the size of the checkpoints with the free disk space."""
    import_module("tfidf_tune.training").check_resources = lambda *_: None


def send(number: signal.Signals, *_: object, **__: object) -> None:
    """Send this process a signal."""
    os.kill(os.getpid(), number)


def at_step(
    step: int, number: signal.Signals, rank: int, *, ranks: Collection[int] = (0, 1)
) -> None:
    """Send these processes a signal in a step, counted from the start of the process."""
    at_call("_train.train_step", lambda *_, **__: send(number), rank, nth=step, ranks=ranks)


def hang_up(before: Callable[[int], None], nohup: bool, rank: int) -> None:
    """Set how SIGHUP is handled at the start, as nohup does or not, then call another hook."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    before(rank)


def spoil_terms(
    fields: tuple[str, ...], factor: float, steps: Mapping[int, Collection[int]], rank: int
) -> None:
    """Multiply terms of the loss by a factor in some steps of some ranks; each step is one
    mini-batch.
    """
    original = WeightedCrossEntropyLoss.terms
    calls = itertools.count(1)

    def terms(*args: Any, **options: Any) -> Any:
        found = original(*args, **options)
        if next(calls) in steps.get(rank, ()):
            found = found._replace(**{name: getattr(found, name) * factor for name in fields})
        return found

    WeightedCrossEntropyLoss.terms = terms  # type: ignore[method-assign]


def refuse(*_: object, **__: object) -> None:
    """Fail as a full disk does."""
    raise OSError(28, "No space left on device")


def write_one_part(folder: Path, meta: Any, parts: Any, **_: Any) -> None:
    """Take one layer of a checkpoint, then fail."""
    next(parts)
    refuse()


def damage_base(rank: int) -> None:
    """Let process 1 find its base checkpoint damaged, and hardly wait for a message
    of process 0.
    """

    def refuse_checkpoint(*_: object) -> None:
        raise ValueError("the copy of this machine is damaged")

    import_module("tfidf_tune.training._entry")._SECONDS_FOR_MAIN_PROCESS = 0.1
    at_call("_checkpointer.HFCheckpointer.check_model", refuse_checkpoint, rank, ranks=(1,))


def limit_files(*_: object, **__: object) -> None:
    """Let this process write no file above 8 KiB: a log, but no weights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**13, 2**13))


def overflow_shard(_: Any, optimizer: torch.optim.Optimizer) -> None:
    """Make a gradient infinite in the shard of this process."""
    groups = [group["params"] for group in optimizer.param_groups]
    gradients = [parameter.grad for parameter in itertools.chain.from_iterable(groups)]
    assert all(isinstance(gradient, DTensor) for gradient in gradients)
    gradients[0]._local_tensor.fill_(torch.inf)


def overflow_at(step: int, rank: int) -> None:
    """Let rank 1 overflow when a step's gradients are unscaled."""
    unscale = torch.amp.GradScaler.unscale_
    calls = itertools.count(1)

    def unscale_(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if next(calls) == step and rank == 1:
            overflow_shard(scaler, optimizer)
        unscale(scaler, optimizer)

    torch.amp.GradScaler.unscale_ = unscale_


def save_random_state(folder: Path, rank: int) -> None:
    """Save the state of the generator that dropout draws from."""
    torch.save(torch.get_rng_state(), folder / f"random_state_{rank}.pt")


def save_loaded_bytes(folder: Path, rank: int) -> None:
    """Save how many bytes of each weight this process holds when training begins."""

    def save(_: Any, state: TrainState, *__: Any, **___: Any) -> None:
        held = {
            name: local_tensor(value) for name, value in parameters_by_name(state.model).items()
        }
        torch.save(
            {name: _num_bytes(value) for name, value in held.items()}, folder / f"loaded_{rank}.pt"
        )

    at_call("train", save, rank)


def _num_bytes(value: torch.Tensor) -> int:
    """Bytes of the storage that a tensor keeps alive, be it a view of a part."""
    if isinstance(value, NF4Tensor):
        names, _ = value.__tensor_flatten__()
        return sum(
            _num_bytes(getattr(value, name))
            for name in names
            if isinstance(getattr(value, name), torch.Tensor)
        )
    return value.untyped_storage().nbytes()
