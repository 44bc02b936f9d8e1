"""Power-law weights: the more frequent a token, the smaller its weight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune._checks import require_number
from tfidf_tune.weighting._formula import unit_mean
from tfidf_tune.weighting._labels import IGNORE_INDEX, TokenBatch, known_labels
from tfidf_tune.weighting._weighting import TokenWeighting


class PowerLawWeighting(TokenWeighting):
    r"""Weights that fall with a power of a token's frequency in the training text.

    .. math::
        w'_i = \frac{1}{(\mathrm{freq}(x_i) + \epsilon)^\alpha}, \qquad
        w_i = \frac{w'_i}{\frac{1}{M}\sum_j w'_j}

    where freq is the number of times that a token has been a label so far, the current mini-batch included. Source:
    Shao et al., "Power-Law Decay Loss for Large Language Model Finetuning" (2025), which counts in a corpus beforehand
    and leaves alpha and epsilon to the user; the scaling to mean 1 is added here.

    The counts are the state, an int64 for each entry of the vocabulary. In ``.eval()`` mode they are not updated. With
    several processes each counts its own labels.

    Args:
        alpha (float): from 0, which is plain cross-entropy, to 4. Default: 0.5.
        epsilon (float): added to the counts, from 1e-8 to 1e6. Default: 1.0.

    Raises:
        ValueError: If ``alpha`` or ``epsilon`` is out of its range.
    """

    counts: Tensor

    def __init__(self, *, alpha: float = 0.5, epsilon: float = 1.0) -> None:
        super().__init__()
        # At the limits unseen tokens weigh 1e32, and tokens seen 2 ** 25 times 2 ** -100: float32 sums hold both.
        reason = "a larger one can make all weights 0 in float32"
        require_number("alpha", alpha, 0, 4, "weights fall by this power of the frequency", reason=reason)
        reason = "another one can make weights 0 or infinite in float32"
        require_number("epsilon", epsilon, 1e-8, 1e6, "it is added to the frequency", reason=reason)
        self.alpha = alpha
        self.epsilon = epsilon
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Return the bytes of the counts, which do not depend on the mini-batch."""
        return self.counts.itemsize * max(vocab_size, len(self.counts))

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights of a mini-batch and, in ``.train()`` mode, count its labels; float32 ``[b, s]``."""
        labels, vocab_size = batch.labels, batch.vocab_size
        known = known_labels(labels, vocab_size)
        tokens = torch.where(known, labels, 0)
        counts = self._long_enough(vocab_size or int(tokens.amax()) + 1 if tokens.numel() else 0, labels.device)
        if self.training:
            self.counts = counts.index_add_(0, tokens.flatten(), known.flatten().long())
        return unit_mean((counts.take(tokens).float() + self.epsilon).pow(-self.alpha), labels != IGNORE_INDEX)

    def _long_enough(self, vocab_size: int, device: torch.device) -> Tensor:
        missing = vocab_size - len(self.counts)
        counts = self.counts.to(device)
        return F.pad(counts, (0, missing)) if missing > 0 else counts

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "counts")
        if saved is not None:  # its length comes with the data, not with the constructor
            self.counts = torch.empty(saved.shape, dtype=self.counts.dtype, device=self.counts.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
