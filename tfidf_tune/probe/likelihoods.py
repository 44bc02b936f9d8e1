"""The likelihood of each token of a text under a model, from one forward pass over the complete
text.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tfidf_tune._checks import check_at_least
from tfidf_tune.probe.finite import NonFiniteLogits
from tfidf_tune.probe.loading import require_known_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAST_LOG_PROBABILITY = -1e4  # of which exp is 0 in float32
NUM_TEXTS_FOR_BOS = 20
"""Most texts that are scored with and without BOS, to find out if a model was trained with it."""
_LEAST_DEVIATION = 1e-6  # so that a uniform distribution gives 0, and a certain one a finite number


class TokenLikelihoods(NamedTuple):
    """What a model predicts for each token of a text after the first.

    Attributes:
        nll (np.ndarray): float64 ``[s - 1]``, ``-ln P(x_t | x_<t)``.
        standardized (np.ndarray | None): float64 ``[s - 1]``, see :func:`token_likelihoods`; None
            if only the probability of the token is known, as of a model behind a server.
        greedy (np.ndarray | None): bool ``[s - 1]``, whether no other token is more probable; None
            if a server does not say which one is the most probable.
    """

    nll: npt.NDArray[np.float64]
    standardized: npt.NDArray[np.float64] | None
    greedy: npt.NDArray[np.bool_] | None


@torch.no_grad()
def token_likelihoods(
    model: "PreTrainedModel",
    texts: Sequence[Sequence[int]],
    *,
    batch_size: int = 16,
    progress: Callable[[int], None] | None = None,
) -> list[TokenLikelihoods]:
    """Score each token of each text, given those before it.

    The standardized log-probability is that of Min-K%++ (Zhang et al. 2024,
    https://arxiv.org/abs/2404.02936), with ``v`` distributed as the model predicts::

        z_t = (ln P(x_t | x_<t) - mu_t) / sigma_t
        mu_t = E[ln P(v | x_<t)]        sigma_t = sqrt(E[(ln P(v | x_<t) - mu_t)^2])

    ``sigma_t`` is at least 1e-6. The logits are converted to float32. Texts of a batch are sorted
    by length and padded at their end, which a causal model does not see.

    Args:
        model (PreTrainedModel): causal language model; it is put in eval mode.
        texts (Sequence[Sequence[int]]): token ids, at least two each; no BOS is added.
        batch_size (int): texts in a forward pass.
        progress (Callable[[int], None] | None): called after each batch with its number of texts.

    Raises:
        ValueError: If ``batch_size`` is below 1, a text has fewer than two tokens, or an id is
            outside the vocabulary.
        NonFiniteLogits: If the largest logit after some id of a text is NaN or infinite.
    """
    check_at_least(1, batch_size=batch_size)
    # Everything is checked before the first forward pass.
    for number, ids in enumerate(texts):
        if len(ids) < 2:
            raise ValueError(
                f"Text {number} has {len(ids)} tokens, so nothing is predicted: give at least two."
            )
        require_known_ids(model, ids)
    model.eval()
    device = next(model.parameters()).device
    scored: dict[int, TokenLikelihoods] = {}
    # Too little memory is noticed immediately.
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        # The last id is only scored. Any id serves as padding: nothing after a text's end is
        # scored.
        given = [torch.tensor(texts[index][:-1]) for index in batch]
        ids_bs = pad_sequence(given, batch_first=True).to(device)
        logits_bsv = model(input_ids=ids_bs, use_cache=False).logits
        # Text by text, because copies in float32 are large.
        for index, logits_sv in zip(batch, logits_bsv, strict=True):
            following_s = torch.tensor(texts[index][1:], device=device)
            tokens = _scores(logits_sv[: len(following_s)].float(), following_s)
            if tokens is None:
                raise NonFiniteLogits(index, logits_sv.dtype)
            scored[index] = tokens
        if progress is not None:
            progress(len(batch))
    return [scored[index] for index in range(len(texts))]


def _scores(logits_sv: Tensor, ids_s: Tensor) -> TokenLikelihoods | None:
    """Score ids by their logits, float32; return None if the largest logit of a position is NaN or
    infinite.
    """
    log_probs_sv = logits_sv.log_softmax(dim=-1)
    chosen_s = log_probs_sv.gather(-1, ids_s[:, None])[:, 0]
    # If the largest logit is NaN or infinite, all logarithms of probabilities are NaN.
    highest_s = log_probs_sv.amax(dim=-1)
    greedy_s = chosen_s == highest_s
    probs_sv = log_probs_sv.exp()
    # Tokens of probability 0 do not count, even if their logit is -inf. In place, because a
    # vocabulary is large.
    bounded_sv = log_probs_sv.clamp_min_(_LEAST_LOG_PROBABILITY)
    mean_s = (probs_sv * bounded_sv).sum(dim=-1)
    deviation_s = bounded_sv.sub_(mean_s[:, None]).square_().mul_(probs_sv).sum(dim=-1).sqrt()
    standardized_s = (chosen_s - mean_s) / deviation_s.clamp_min(_LEAST_DEVIATION)
    if highest_s.isnan().any():
        return None
    return TokenLikelihoods(
        nll=-chosen_s.double().cpu().numpy(),
        standardized=standardized_s.double().cpu().numpy(),
        greedy=greedy_s.cpu().numpy(),
    )


def is_mean_positive(differences: npt.NDArray[np.float64]) -> bool:
    """Return whether the 95 % interval of the mean of paired differences is above 0, by Student's
    t.
    """
    from scipy import stats  # takes a second to import

    number = len(differences)
    if number < 2:
        return False
    quantile = stats.t.ppf(0.975, number - 1)
    half_width = quantile * differences.std(ddof=1) / math.sqrt(number)
    return bool(differences.mean() > half_width)
