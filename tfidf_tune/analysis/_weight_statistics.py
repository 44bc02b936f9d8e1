"""Which tokens and which frequencies gain and lose weight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfidf_tune.analysis._token_weights import WeightedBlocks
from tfidf_tune.weighting import TermFrequency

_BAND_EDGES = (10, 100, 1000)


@dataclass(frozen=True)
class TokenStatistics:
    """What one token of the vocabulary got over all its occurrences as a label.

    Args:
        token_id (int): the token.
        count (int): occurrences.
        num_blocks (int): blocks that contain it.
        mean_count (float): occurrences in its block, mean over occurrences.
        mean_idf (float): mean over occurrences.
        mean_weights (Mapping[TermFrequency, float]): TF form -> mean weight over occurrences.
    """

    token_id: int
    count: int
    num_blocks: int
    mean_count: float
    mean_idf: float
    mean_weights: Mapping[TermFrequency, float]


@dataclass(frozen=True)
class FrequencyBand:
    """Tokens of similar frequency in the text.

    Args:
        first_rank (int): rank of its most frequent token, from 1.
        last_rank (int): rank of its least frequent token, included.
        token_share (float): fraction of the text's label tokens.
        weight_shares (Mapping[TermFrequency, float]): TF form -> fraction of the total weight.
        mean_weights (Mapping[TermFrequency, float]): TF form -> mean weight of the band's occurrences.
        median_weights (Mapping[TermFrequency, float]): TF form -> their median.
    """

    first_rank: int
    last_rank: int
    token_share: float
    weight_shares: Mapping[TermFrequency, float]
    mean_weights: Mapping[TermFrequency, float]
    median_weights: Mapping[TermFrequency, float]


def token_statistics(weighted: WeightedBlocks) -> list[TokenStatistics]:
    """Summarize the weights of each token.

    Args:
        weighted (WeightedBlocks): the weighted blocks.

    Returns:
        list[TokenStatistics]: the most frequent token first; of equally frequent ones the lower id.
    """
    ids, terms, count = np.unique(weighted.labels, return_inverse=True, return_counts=True)
    terms = terms.ravel()
    in_blocks = weighted.labels + np.arange(len(weighted.labels), dtype=np.int64)[:, None] * (int(ids[-1]) + 1)
    num_blocks = np.bincount(np.searchsorted(ids, np.unique(in_blocks) % (int(ids[-1]) + 1)))

    def mean(values: "np.typing.NDArray[np.generic]") -> "np.typing.NDArray[np.float64]":
        return np.bincount(terms, weights=values.ravel()) / count

    mean_count, mean_idf = mean(weighted.counts), mean(weighted.idf)
    mean_weights = {form: mean(weights) for form, weights in weighted.weights.items()}
    return [
        TokenStatistics(
            token_id=int(ids[i]),
            count=int(count[i]),
            num_blocks=int(num_blocks[i]),
            mean_count=float(mean_count[i]),
            mean_idf=float(mean_idf[i]),
            mean_weights={form: float(means[i]) for form, means in mean_weights.items()},
        )
        for i in np.argsort(-count, kind="stable")
    ]


def most_weighted(
    statistics: Sequence[TokenStatistics], form: TermFrequency, *, min_count: int, limit: int, up: bool
) -> list[TokenStatistics]:
    """Choose the tokens that gain, or lose, the most weight.

    Args:
        statistics (Sequence[TokenStatistics]): of all tokens.
        form (TermFrequency): the TF form.
        min_count (int): tokens that occur less often are left out.
        limit (int): at most so many.
        up (bool): those above 1, the highest first; otherwise those below 1, the lowest first.

    Returns:
        list[TokenStatistics]: the tokens; of equal ones the more frequent first.
    """
    sign = -1 if up else 1
    chosen = [token for token in statistics if token.count >= min_count and sign * (token.mean_weights[form] - 1) < 0]
    chosen.sort(key=lambda token: (sign * token.mean_weights[form], -token.count, token.token_id))
    return chosen[:limit]


def frequency_bands(weighted: WeightedBlocks) -> list[FrequencyBand]:
    """Compare the 10 most frequent tokens of the text, the 11th to 100th, the 101st to 1000th and the rest.

    Args:
        weighted (WeightedBlocks): the weighted blocks.

    Returns:
        list[FrequencyBand]: bands that have tokens, the most frequent first.
    """
    _, terms, count = np.unique(weighted.labels, return_inverse=True, return_counts=True)
    rank = np.empty(len(count), dtype=np.int64)
    rank[np.argsort(-count, kind="stable")] = np.arange(len(count))
    rank_of_position = rank[terms.ravel()]
    bands = []
    weights = {form: values.ravel().astype(np.float64) for form, values in weighted.weights.items()}
    for first, last in zip((0, *_BAND_EDGES), (*_BAND_EDGES, len(count)), strict=True):
        if first >= len(count):
            break
        inside = (rank_of_position >= first) & (rank_of_position < last)
        bands.append(
            FrequencyBand(
                first_rank=first + 1,
                last_rank=min(last, len(count)),
                token_share=float(inside.mean()),
                weight_shares={form: float(values[inside].sum() / values.sum()) for form, values in weights.items()},
                mean_weights={form: float(values[inside].mean()) for form, values in weights.items()},
                median_weights={form: float(np.median(values[inside])) for form, values in weights.items()},
            )
        )
    return bands
