"""Steps that learn nothing, by NaN, infinity or weights of 0: noticed without waiting for a GPU, and not saved."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tfidf_tune.training._distributed import gather_objects
from tfidf_tune.training._errors import TrainingError
from tfidf_tune.training._sharding import local_tensor, parameters_by_name

_REMEDY = "try a lower learning rate, fp32, clipping"
# This many bad steps in a row are not chance: even if batches are so small that one step in ten has no token left, ten
# in a row come once in 10 billion steps.
_MAX_IN_A_ROW = 10
_MAX_INDICES_SHOWN = 32


class StepGuard:
    """Stops a run, or skips a step, if loss or gradient is not finite; stops a run whose weights are all 0.

    ``indices_of`` gives the items of the data set of a step, ``note`` reports a skipped one. On a GPU the
    loss is read only at logged or saved steps, unless ``looks_at_each_step``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        skip: bool,
        total_steps: int,
        indices_of: Callable[[int], list[int]],
        note: Callable[[str], None],
    ) -> None:
        self.looks_at_each_step = skip or device.type == "cpu"
        self._skip = skip
        self._max_weightless = min(_MAX_IN_A_ROW, total_steps)
        self._indices_of = indices_of
        self._note = note
        self._num_skipped = 0  # in a row
        # On the device, so that reading can wait. Step (0: none yet), loss and gradient norm of the first that is not
        # finite; steps in a row whose weights are all 0, and the one at which there were too many (0: none yet).
        self._first = torch.zeros(3, dtype=torch.float64, device=device)
        self._num_weightless, self._weightless_step = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, step: int, is_finite: Tensor, metrics: Mapping[str, Tensor], *, num_tokens: int) -> None:
        """Record a step, from 1; a step without tokens says nothing about weights."""
        loss = metrics["loss"]
        found = torch.stack([torch.full_like(loss, step), loss, metrics["grad_norm"]]).double()
        self._first = torch.where(~is_finite & (self._first[0] == 0), found, self._first)
        if num_tokens:
            self._num_weightless = (self._num_weightless + 1) * (metrics["weight_max"] == 0)
            is_too_many = self._num_weightless == self._max_weightless
            self._weightless_step = torch.maximum(self._weightless_step, is_too_many * step)

    def check(self) -> None:
        """Check the recorded steps, which waits for the device.

        Raises:
            TrainingError: If one was not finite and is not skipped, too many in a row were, or too many in a row had
                weights of 0.
        """
        number, loss, grad_norm, weightless_step = torch.cat([self._first, self._weightless_step.view(1)]).tolist()
        if weightless_step:
            raise TrainingError(
                f"the weights of all tokens were 0 in {self._max_weightless} steps in a row, up to step "
                f"{int(weightless_step)}, so that nothing was learned from them: set the weighting in `loss` to hold "
                "back less (a smaller gamma, alpha or p, a larger k), or raise batch_size"
            )
        if not number:
            self._num_skipped = 0
            return
        indices = self._indices_of(int(number))
        shown = ", ".join(map(str, indices[:_MAX_INDICES_SHOWN]))
        more = f" and {len(indices) - _MAX_INDICES_SHOWN} more" if len(indices) > _MAX_INDICES_SHOWN else ""
        found = (
            f"loss {loss:g} and gradient norm {grad_norm:g} at step {int(number)} (items {shown}{more} of the data set)"
        )
        if not self._skip:
            raise TrainingError(f"not finite: {found}: {_REMEDY}, or on_non_finite=skip")
        self._num_skipped += 1
        if self._num_skipped >= _MAX_IN_A_ROW:
            raise TrainingError(f"not finite, {_MAX_IN_A_ROW} steps in a row: {found}: {_REMEDY}")
        self._note(f"step skipped, not finite: {found}")
        self._first.zero_()


def require_finite(model: nn.Module, step: int) -> None:
    """Raise a TrainingError if a trained weight of any process is not finite; every process has to call."""
    trained = ((name, value) for name, value in parameters_by_name(model).items() if value.requires_grad)
    lost = next((name for name, value in trained if not local_tensor(value).isfinite().all()), None)
    if name := next((found for found in gather_objects(lost) if found), None):
        raise TrainingError(f"{name} is not finite after step {step}: {_REMEDY}")
