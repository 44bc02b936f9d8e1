"""Power-law weights: the more frequent a token, the less it counts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune.weighting._arguments import require_number
from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import known_labels, valid_labels
from tfidf_tune.weighting._ranks import LabelExchange
from tfidf_tune.weighting._term_statistics import unit_mean


class PowerLawWeighting(TokenWeighting):
    r"""Power-law decay weights by the frequency of a token in the training text.

    .. math::
        w'_i = \frac{1}{(\mathrm{freq}(x_i) + \epsilon)^\alpha}, \qquad
        w_i = \frac{w'_i}{\frac{1}{M}\sum_j w'_j}

    with freq the number of times that a token has been a label so far, the current mini-batch included. Source: Shao
    et al., "Power-Law Decay Loss for Large Language Model Finetuning" (2025), which counts in a corpus beforehand and
    leaves alpha and epsilon to the user; the scaling to mean 1 is added here.

    The counts are the state, an int64 for each entry of the vocabulary. In ``.eval()`` mode they are read only. With
    several processes each counts its own labels.

    Args:
        alpha (float): from 0, which is plain cross-entropy, to 4. Default: 0.5.
        epsilon (float): added to the counts, from 1e-8 to 1e6. Default: 1.0.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Raises:
        ValueError: If ``alpha`` or ``epsilon`` is out of its range.
    """

    counts: Tensor

    def __init__(self, *, alpha: float = 0.5, epsilon: float = 1.0, ignore_index: int = -100) -> None:
        super().__init__()
        # At the limits unseen tokens weigh 1e32, and tokens seen 2 ** 25 times 2 ** -100: float32 sums hold both.
        require_number(
            "alpha",
            alpha,
            0,
            4,
            "weights fall by this power of the frequency",
            reason="a larger one can make all weights 0 in float32",
        )
        require_number(
            "epsilon",
            epsilon,
            1e-8,
            1e6,
            "it is added to the frequency",
            reason="another one can make weights 0 or infinite in float32",
        )
        self.alpha = alpha
        self.epsilon = epsilon
        self.ignore_index = ignore_index
        self.register_buffer("counts", torch.zeros(0, dtype=torch.int64))

    def num_state_bytes(self, batch_size: int, seq_len: int, *, vocab_size: int, num_ranks: int = 1) -> int:
        """Tell the bytes of the counts, whatever the mini-batch."""
        return self.counts.itemsize * max(vocab_size, len(self.counts))

    @torch.no_grad()
    def forward(
        self,
        labels: Tensor,
        *,
        vocab_size: int | None = None,
        document_ids: Tensor | None = None,
        begun: LabelExchange | None = None,
        predictions: Predictions | None = None,
    ) -> Tensor:
        """Compute the weights of a mini-batch and, in ``.train()`` mode, count its labels; float32 ``[b, s]``.

        Raises:
            ValueError: If ``labels`` is not 2-D, or, on CPU, an id is outside the vocabulary.
        """
        valid = valid_labels(labels, vocab_size, self.ignore_index)
        labels = labels.long()  # narrower integers may not hold vocab_size
        _, known = known_labels(labels, vocab_size, self.ignore_index)
        tokens = torch.where(known, labels, 0)
        counts = self._long_enough(vocab_size or int(tokens.amax()) + 1 if tokens.numel() else 0, labels.device)
        if self.training:
            self.counts = counts.index_add_(0, tokens.flatten(), known.flatten().long())
        return unit_mean((counts.take(tokens).float() + self.epsilon).pow(-self.alpha), valid)

    def _long_enough(self, vocab_size: int, device: torch.device) -> Tensor:
        missing = vocab_size - len(self.counts)
        counts = self.counts.to(device)
        return F.pad(counts, (0, missing)) if missing > 0 else counts

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "counts")
        if saved is not None:  # its length comes with the data, not with the constructor
            self.counts = torch.empty(saved.shape, dtype=self.counts.dtype, device=self.counts.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
