"""The objectives that a config names: each is the weighted cross-entropy with a weighting of its own.

All of them take, beside their own arguments, those of :class:`WeightedCrossEntropyLoss`: ``num_output_chunks``,
``head`` and ``accumulate_in_fp32``.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from tfidf_tune.loss._weighted_cross_entropy import WeightedCrossEntropyLoss
from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishStrategy,
    GoldfishWeighting,
    MiLeWeighting,
    Normalization,
    PowerLawWeighting,
    ProductWeighting,
    RepetitionWeighting,
    TermFrequency,
    TFIDFWeighting,
    TokenDropWeighting,
    TokenWeighting,
    UniformWeighting,
)

_Init = TypeVar("_Init", bound=Callable[..., None])


def _with_loss_options(init: _Init) -> _Init:
    """Show in a signature what ``**options`` stands for, so that a config is checked before anything is built."""
    own = inspect.signature(init)
    named = [parameter for parameter in own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    taken = {parameter.name for parameter in named}
    options = [
        parameter
        for parameter in inspect.signature(WeightedCrossEntropyLoss.__init__).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in taken
    ]
    init.__signature__ = own.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return init


class CrossEntropyLoss(WeightedCrossEntropyLoss):
    """Plain cross-entropy: weight 1 for every token, all else as in the weighted losses.

    Args:
        ignore_index (int): label of the positions that do not count. Default: -100.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(self, *, ignore_index: int = -100, **options: Any) -> None:
        super().__init__(UniformWeighting(ignore_index=ignore_index), ignore_index=ignore_index, **options)


class TFIDFCrossEntropyLoss(WeightedCrossEntropyLoss):
    """Cross-entropy weighted by TF-IDF over a rolling window, see :class:`~tfidf_tune.weighting.TFIDFWeighting`.

    Args:
        num_batches (int): mini-batches in the window, the current one included. Default: 16.
        tf (TermFrequency): ``count`` (the paper), ``log`` or ``binary``. Default: "count".
        max_weight (float | None): largest weight, from 1 to 1e9. Default: None, no cap.
        ignore_index (int): label of the positions that do not count. Default: -100.
        sync (bool): whether all ranks share one window, and with it their weights. Default: False.
        normalization (Normalization | None): whether weights have mean 1 over the mini-batch of a ``rank`` or over
            all of them, ``global``. Default: None, ``global`` with ``sync`` and ``rank`` without.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(
        self,
        *,
        num_batches: int = 16,
        tf: TermFrequency = "count",
        max_weight: float | None = None,
        ignore_index: int = -100,
        sync: bool = False,
        normalization: Normalization | None = None,
        **options: Any,
    ) -> None:
        weighting = TFIDFWeighting(
            num_batches=num_batches,
            tf=tf,
            max_weight=max_weight,
            ignore_index=ignore_index,
            sync=sync,
            normalization=normalization,
        )
        super().__init__(weighting, ignore_index=ignore_index, **options)


class GoldfishCrossEntropyLoss(WeightedCrossEntropyLoss):
    """The Goldfish loss: one token in k never counts, see :class:`~tfidf_tune.weighting.GoldfishWeighting`.

    Args:
        strategy (GoldfishStrategy): ``hash`` or ``static``. Default: "hash".
        k (int): one token in k is left out, 2 to 2**31. Default: 4.
        h (int): tokens of context that are hashed, 1 to 1024. Default: 13.
        seed (int): of the hash. Default: 0.
        ignore_index (int): label of the positions that do not count. Default: -100.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(
        self,
        *,
        strategy: GoldfishStrategy = "hash",
        k: int = 4,
        h: int = 13,
        seed: int = 0,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        weighting = GoldfishWeighting(strategy=strategy, k=k, h=h, seed=seed, ignore_index=ignore_index)
        super().__init__(weighting, ignore_index=ignore_index, **options)


class TokenDropCrossEntropyLoss(WeightedCrossEntropyLoss):
    """Cross-entropy of a random part of the tokens, see :class:`~tfidf_tune.weighting.TokenDropWeighting`.

    Args:
        p (float): share of the tokens that is dropped, from 0 to 0.99. Default: 0.25.
        seed (int): another drops other tokens. Default: 0.
        ignore_index (int): label of the positions that do not count. Default: -100.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(self, *, p: float = 0.25, seed: int = 0, ignore_index: int = -100, **options: Any) -> None:
        weighting = TokenDropWeighting(p=p, seed=seed, ignore_index=ignore_index)
        super().__init__(weighting, ignore_index=ignore_index, **options)


class MiLeCrossEntropyLoss(WeightedCrossEntropyLoss):
    """The MiLe loss, weights by entropy, see :class:`~tfidf_tune.weighting.MiLeWeighting`.

    Args:
        gamma (float): from 0, which is plain cross-entropy, to 20. Default: 1.0.
        ignore_index (int): label of the positions that do not count. Default: -100.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(self, *, gamma: float = 1.0, ignore_index: int = -100, **options: Any) -> None:
        weighting = MiLeWeighting(gamma=gamma, ignore_index=ignore_index)
        super().__init__(weighting, ignore_index=ignore_index, **options)


class FocalCrossEntropyLoss(WeightedCrossEntropyLoss):
    """The focal loss, weights by improbability, see :class:`~tfidf_tune.weighting.FocalWeighting`.

    Args:
        gamma (float): from 0, which is plain cross-entropy, to 20. Default: 2.0.
        ignore_index (int): label of the positions that do not count. Default: -100.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(self, *, gamma: float = 2.0, ignore_index: int = -100, **options: Any) -> None:
        weighting = FocalWeighting(gamma=gamma, ignore_index=ignore_index)
        super().__init__(weighting, ignore_index=ignore_index, **options)


class PowerLawCrossEntropyLoss(WeightedCrossEntropyLoss):
    """Cross-entropy weighted by a power of token frequency, see :class:`~tfidf_tune.weighting.PowerLawWeighting`.

    Args:
        alpha (float): from 0, which is plain cross-entropy, to 4. Default: 0.5.
        epsilon (float): added to the counts, from 1e-8 to 1e6. Default: 1.0.
        ignore_index (int): label of the positions that do not count. Default: -100.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(self, *, alpha: float = 0.5, epsilon: float = 1.0, ignore_index: int = -100, **options: Any) -> None:
        weighting = PowerLawWeighting(alpha=alpha, epsilon=epsilon, ignore_index=ignore_index)
        super().__init__(weighting, ignore_index=ignore_index, **options)


class ProductCrossEntropyLoss(WeightedCrossEntropyLoss):
    """Cross-entropy weighted by the product of two weightings, see :class:`~tfidf_tune.weighting.ProductWeighting`.

    In a config each factor is a component: ``first: {_component_: tfidf_tune.weighting.GoldfishWeighting, k: 3}``.

    Args:
        first (TokenWeighting): a factor.
        second (TokenWeighting): the other one.
        ignore_index (int): label of the positions that do not count, the same as that of the factors. Default: -100.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(
        self, *, first: TokenWeighting, second: TokenWeighting, ignore_index: int = -100, **options: Any
    ) -> None:
        weighting = ProductWeighting(first, second, ignore_index=ignore_index)
        super().__init__(weighting, ignore_index=ignore_index, **options)


class RepetitionCrossEntropyLoss(WeightedCrossEntropyLoss):
    """Cross-entropy in which repeated text counts less, see :class:`~tfidf_tune.weighting.RepetitionWeighting`.

    Args:
        h (int): tokens of context, 1 to 1024. Default: 4.
        alpha (float): exponent, above 0, up to 4. Default: 1.0.
        num_batches (int): mini-batches in the window. Default: 1024.
        num_buckets (int | None): entries of the table of counts. Default: None, by the size of the window.
        ignore_index (int): label of the positions that do not count. Default: -100.
        sync (bool): whether all ranks share one window. Default: False.
        **options (Any): of :class:`WeightedCrossEntropyLoss`.
    """

    @_with_loss_options
    def __init__(
        self,
        *,
        h: int = 4,
        alpha: float = 1.0,
        num_batches: int = 1024,
        num_buckets: int | None = None,
        ignore_index: int = -100,
        sync: bool = False,
        **options: Any,
    ) -> None:
        weighting = RepetitionWeighting(
            h=h, alpha=alpha, num_batches=num_batches, num_buckets=num_buckets, ignore_index=ignore_index, sync=sync
        )
        super().__init__(weighting, ignore_index=ignore_index, **options)
