"""NaN and infinity: noticed without waiting for a GPU at each step, never saved, and told with where they came from."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tfidf_tune.training._distributed import gather_objects
from tfidf_tune.training._errors import TrainingError
from tfidf_tune.training._parameters import local_tensor, parameters_by_name

_REMEDY = "try a lower learning rate, fp32, clipping"
# So many steps in a row without a finite loss are no accident any more.
_MAX_SKIPPED = 10
_MAX_INDICES_TOLD = 32


class NonFiniteGuard:
    """Stops a run whose loss or gradient is not finite, or leaves out the step.

    Args:
        device (torch.device): of the model.
        skip (bool): leave out such a step, instead of stopping.
        indices_of (Callable[[int], list[int]]): which items of the data set a step was trained on.
        note (Callable[[str], None]): takes what the user is told of a step that is left out.

    Attributes:
        looks_at_each_step (bool): whether a step has to wait for its loss. On a CPU that costs nothing; on a GPU a
            run that only has to stop looks when it logs or saves.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        skip: bool,
        indices_of: Callable[[int], list[int]],
        note: Callable[[str], None],
    ) -> None:
        self.looks_at_each_step = skip or device.type == "cpu"
        self._skip = skip
        self._indices_of = indices_of
        self._note = note
        self._num_skipped = 0  # in a row
        # Step (0: none yet), loss and gradient norm of the first; on the device, so that reading can wait.
        self._first = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, step: int, is_finite: Tensor, loss: Tensor, grad_norm: Tensor) -> None:
        """Take in a step.

        Args:
            step (int): from 1.
            is_finite (Tensor): bool scalar.
            loss (Tensor): scalar.
            grad_norm (Tensor): scalar.
        """
        found = torch.stack([torch.full_like(loss, step), loss, grad_norm]).double()
        self._first = torch.where(~is_finite & (self._first[0] == 0), found, self._first)

    def check(self) -> None:
        """Look at the steps taken in, which waits for the device.

        Raises:
            TrainingError: If one was not finite and such steps are not left out, or too many in a row were.
        """
        number, loss, grad_norm = self._first.tolist()
        if not number:
            self._num_skipped = 0
            return
        indices = self._indices_of(int(number))
        shown = ", ".join(map(str, indices[:_MAX_INDICES_TOLD]))
        more = f" and {len(indices) - _MAX_INDICES_TOLD} more" if len(indices) > _MAX_INDICES_TOLD else ""
        told = (
            f"loss {loss:g} and gradient norm {grad_norm:g} at step {int(number)} (items {shown}{more} of the data set)"
        )
        if not self._skip:
            raise TrainingError(f"not finite: {told}: {_REMEDY}, or on_non_finite=skip")
        self._num_skipped += 1
        if self._num_skipped >= _MAX_SKIPPED:
            raise TrainingError(f"not finite, {_MAX_SKIPPED} steps in a row: {told}: {_REMEDY}")
        self._note(f"step skipped, not finite: {told}")
        self._first.zero_()


def require_finite(model: nn.Module, step: int) -> None:
    """Let no checkpoint be written of a model that is lost; every process of the run has to ask.

    Args:
        model (nn.Module): torchtune model, perhaps sharded.
        step (int): optimizer steps done.

    Raises:
        TrainingError: If a trained weight is not finite.
    """
    lost = next(
        (
            name
            for name, parameter in parameters_by_name(model).items()
            if parameter.requires_grad and not local_tensor(parameter).isfinite().all()
        ),
        None,
    )
    if name := next((found for found in gather_objects(lost) if found), None):
        raise TrainingError(f"{name} is not finite after step {step}: {_REMEDY}")
