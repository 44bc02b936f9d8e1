"""Weights from how hard the model itself finds a token: MiLe and focal."""

import torch
from torch import Tensor

from tfidf_tune.weighting._arguments import require_number
from tfidf_tune.weighting._interface import Predictions, TokenWeighting
from tfidf_tune.weighting._labels import valid_labels
from tfidf_tune.weighting._ranks import LabelExchange
from tfidf_tune.weighting._term_statistics import unit_mean


class MiLeWeighting(TokenWeighting):
    r"""MiLe weights: tokens that are drawn from a distribution of high entropy count for more.

    .. math::
        w'_i = (1 + H_i)^\gamma, \qquad H_i = -\sum_v P(v | x_{<i}) \ln P(v | x_{<i}), \qquad
        w_i = \frac{w'_i}{\frac{1}{M}\sum_j w'_j}

    Source: Su et al., "MiLe Loss: a New Loss for Mitigating the Bias of Learning Difficulties in Generative Language
    Models" (2024): gamma = 1 there. No gradient goes through the weights. There is no state.

    Args:
        gamma (float): from 0, which is plain cross-entropy, to 20. Default: 1.0.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Raises:
        ValueError: If ``gamma`` is out of its range.
    """

    needs_predictions = True

    def __init__(self, *, gamma: float = 1.0, ignore_index: int = -100) -> None:
        super().__init__()
        # Entropies are below 22 nats whatever the vocabulary, and 23 ** 20 is less than 2 ** 91.
        _check_gamma(gamma, "a larger one can make weights infinite in float32")
        self.gamma = gamma
        self.ignore_index = ignore_index

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
        """Compute the weights of a mini-batch, float32 ``[b, s]``.

        Raises:
            ValueError: If ``labels`` is not 2-D, there are no ``predictions``, or, on CPU, an id is outside the
                vocabulary.
        """
        valid = valid_labels(labels, vocab_size, self.ignore_index)
        return unit_mean((1 + require_predictions(predictions).entropy).pow(self.gamma), valid)


class FocalWeighting(TokenWeighting):
    r"""Focal weights: tokens that the model already gives a high probability count for less.

    .. math::
        w'_i = (1 - P(x_i | x_{<i}))^\gamma, \qquad w_i = \frac{w'_i}{\frac{1}{M}\sum_j w'_j}

    Source: Lin et al., "Focal Loss for Dense Object Detection" (2017), equation 4: gamma = 2 there. Here weights have
    mean 1 and no gradient goes through them; in that paper neither is so. There is no state.

    Args:
        gamma (float): from 0, which is plain cross-entropy, to 20; the paper tries up to 5. Default: 2.0.
        ignore_index (int): label of the positions that do not count. Default: -100.

    Raises:
        ValueError: If ``gamma`` is out of its range.
    """

    needs_predictions = True

    def __init__(self, *, gamma: float = 2.0, ignore_index: int = -100) -> None:
        super().__init__()
        # A batch whose tokens all have a probability of up to 0.96 keeps weights: 0.04 ** 20 is more than 2 ** -100.
        _check_gamma(gamma, "a larger one can make all weights 0 in float32")
        self.gamma = gamma
        self.ignore_index = ignore_index

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
        """Compute the weights of a mini-batch, float32 ``[b, s]``.

        Raises:
            ValueError: If ``labels`` is not 2-D, there are no ``predictions``, or, on CPU, an id is outside the
                vocabulary.
        """
        valid = valid_labels(labels, vocab_size, self.ignore_index)
        improbability = -torch.expm1(require_predictions(predictions).log_probability)
        return unit_mean(improbability.clamp_min(0).pow(self.gamma), valid)


def require_predictions(predictions: Predictions | None) -> Predictions:
    """Refuse to go on without what the model predicts.

    Raises:
        ValueError: If it is None.
    """
    if predictions is None:
        raise ValueError(
            "these weights depend on what the model predicts: use them in a WeightedCrossEntropyLoss, or hand over "
            "predictions"
        )
    return predictions


def _check_gamma(gamma: float, reason: str) -> None:
    require_number("gamma", gamma, 0, 20, "it is the exponent of the weights", reason=reason)
