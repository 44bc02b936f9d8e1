"""Statistics of the weights between two logs of a trainer."""

from collections.abc import Callable

import torch
from torch import Tensor


class WeightStatistics:
    """Sums up cross-entropy and weights of mini-batches on the device; only :meth:`take` waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
        self._largest = torch.zeros(1, device=device)

    def add(self, cross_entropy: Tensor, weights: Tensor, valid: Tensor) -> None:
        """Add the mean cross-entropy of a mini-batch, its weights, and where it has labels, ``[b, s]`` both."""
        num_valid = valid.sum()
        # Deviations from 1, where most weights are: small differences would be lost in a mean of squares.
        deviations = ((weights - 1).square_() * valid).sum()
        self._sums += torch.stack([num_valid, cross_entropy * num_valid, weights.sum(), deviations])
        torch.maximum(self._largest, weights.max(), out=self._largest)

    def take(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Return the statistics over all processes since the last call, and start again; empty without a token.

        Args:
            gather (Callable[[Tensor], Tensor]): joins the tensors ``[1, n]`` of all processes along the first
                dimension.
        """
        num_valid, cross_entropy, weights, deviations = gather(self._sums[None]).sum(0).tolist()
        largest = gather(self._largest[None]).max().item()
        self._sums.zero_()
        self._largest.zero_()
        if num_valid == 0:
            return {}
        mean = weights / num_valid
        return {
            "cross_entropy": cross_entropy / num_valid,
            "weight_mean": mean,
            "weight_std": max(deviations / num_valid - (mean - 1) ** 2, 0.0) ** 0.5,
            "weight_max": largest,
        }
