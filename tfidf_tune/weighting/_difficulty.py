"""Weights from what the model predicts: MiLe, by the entropy, and Focal, by the probability of the
token.
"""

import torch
from torch import Tensor

from tfidf_tune._checks import require_number
from tfidf_tune.weighting.token_weighting import (
    IGNORE_INDEX,
    Predictions,
    TokenBatch,
    TokenWeighting,
    unit_mean,
)


class MiLeWeighting(TokenWeighting):
    r"""MiLe weights: tokens predicted with a high entropy get larger weights.

    .. math::
        w'_i = (1 + H_i)^\gamma, \qquad H_i = -\sum_v P(v | x_{<i}) \ln P(v | x_{<i}), \qquad
        w_i = \frac{w'_i}{\frac{1}{M}\sum_j w'_j}

    Source: Su et al., "MiLe Loss: a New Loss for Mitigating the Bias of Learning Difficulties in
    Generative Language Models" (2024): gamma = 1 there. No gradient goes through the weights. There
    is no state.

    Args:
        gamma (float): from 0, which is plain cross-entropy, to 20. Default: 1.0.

    Raises:
        ValueError: If ``gamma`` is out of its range.
    """

    needs_predictions = True

    def __init__(self, *, gamma: float = 1.0) -> None:
        super().__init__()
        # Entropies are below 22 nats for every vocabulary, and 23 ** 20 is less than 2 ** 91:
        # weights stay finite.
        require_number("gamma", gamma, 0, 20, "it is the exponent of the weights")
        self.gamma = gamma

    def weigh(self, batch: TokenBatch) -> Tensor:
        raw_weights = (1 + _predictions_of(batch).entropy).pow(self.gamma)
        return unit_mean(raw_weights, batch.labels != IGNORE_INDEX)


class FocalWeighting(TokenWeighting):
    r"""Focal weights: tokens that already have a high probability get smaller weights.

    .. math::
        w'_i = (1 - P(x_i | x_{<i}))^\gamma, \qquad w_i = \frac{w'_i}{\frac{1}{M}\sum_j w'_j}

    Source: Lin et al., "Focal Loss for Dense Object Detection" (2017), equation 4: gamma = 2 there.
    Unlike there, weights have mean 1 and no gradient goes through them. There is no state.

    Args:
        gamma (float): from 0, which is plain cross-entropy, to 20; the paper tries up to 5.
            Default: 2.0.

    Raises:
        ValueError: If ``gamma`` is out of its range.
    """

    needs_predictions = True

    def __init__(self, *, gamma: float = 2.0) -> None:
        super().__init__()
        # A batch whose tokens all have a probability of up to 0.96 keeps weights: 0.04 ** 20 is
        # more than 2 ** -100.
        require_number("gamma", gamma, 0, 20, "it is the exponent of the weights")
        self.gamma = gamma

    def weigh(self, batch: TokenBatch) -> Tensor:
        improbability = -torch.expm1(_predictions_of(batch).log_probability)
        raw_weights = improbability.clamp_min(0).pow(self.gamma)
        return unit_mean(raw_weights, batch.labels != IGNORE_INDEX)


def _predictions_of(batch: TokenBatch) -> Predictions:
    if batch.predictions is None:
        raise ValueError(
            "weights depend on what the model predicts: use them in a WeightedCrossEntropyLoss"
        )
    return batch.predictions
