"""Batches of labels, weightings called on them, and comparisons of weights with the reference and
of states.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from helpers.references.tfidf import IGNORED, ReferenceTFIDF
from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting, TokenWeighting
from tfidf_tune.weighting import token_weighting as _weighting

EPS = torch.finfo(torch.float32).eps

# Relative error of a weight in fp32, worst case: tf 2 eps (log), idf 3 (ratio, log, sum; every idf
# is at least 1), their product 1; the mean of M <= 2**14 positive terms 14 (a cascade sum rounds
# log2 M times) and 1 for its division by M; the last division 1. That is 22, and 2 to spare for the
# reference's own end in tensors.
WEIGHT_RTOL = 24 * EPS


def random_labels(
    generator: torch.Generator, rows: int, length: int, vocab_size: int, ignored: float = 0.2
) -> Tensor:
    """Draw ids from both ends of the vocabulary, small distances from the ends far more often than
    large ones.
    """
    distance = vocab_size ** torch.rand(rows, length, generator=generator, dtype=torch.float64)
    distance = distance.long().clamp(1, vocab_size) - 1
    from_the_end = torch.rand(rows, length, generator=generator) < 0.5
    labels = torch.where(from_the_end, vocab_size - 1 - distance, distance)
    labels[torch.rand(rows, length, generator=generator) < ignored] = IGNORED
    return labels


def random_stream(
    seed: int, num_batches: int, max_rows: int, max_length: int, vocab_size: int
) -> list[Tensor]:
    """Batches of changing shapes with a valid token each; every third one has an empty row, if it
    has several.
    """
    generator = torch.Generator().manual_seed(seed)
    stream = []
    for i in range(num_batches):
        rows = int(torch.randint(1, max_rows + 1, (), generator=generator))
        length = int(torch.randint(1, max_length + 1, (), generator=generator))
        labels = random_labels(generator, rows, length, vocab_size)
        if i % 3 == 0 and rows > 1:
            labels[-1] = IGNORED
        labels[0, -1] = vocab_size - 1
        stream.append(labels)
    return stream


def assert_weights_equal_reference(
    weights: Tensor, expected: list[list[float]], rtol: float = WEIGHT_RTOL
) -> None:
    """No absolute tolerance: positions of weight 0 are exactly 0."""
    torch.testing.assert_close(
        weights.double(), torch.tensor(expected, dtype=torch.float64), rtol=rtol, atol=0.0
    )


def assert_window_equals_reference(window: DocumentWindow, reference: ReferenceTFIDF) -> None:
    """Exactly: these are integers."""
    counter: Counter[int] = Counter()
    for batch in reference.window:
        for document in batch:
            counter.update(document)
    tokens = sorted(
        {-2, -1, 0, *counter, window.vocab_size - 1, window.vocab_size, window.vocab_size + 2}
    )
    assert window.document_frequency(torch.tensor(tokens)).tolist() == [
        counter[token] for token in tokens
    ]
    assert int(window.num_documents) == reference.num_documents
    assert int(window.num_updates) >= len(reference.window)


def capped_rtol(labels: Tensor, expected: list[list[float]], cap: float | None) -> float:
    """WEIGHT_RTOL, and what a cap adds: the scale is (M - k cap) / rest of the weights.

    Rounding k cap costs eps / 2 of it, and the difference magnifies that.
    """
    if cap is None:
        return WEIGHT_RTOL
    num_valid = int((labels != IGNORED).sum())
    weights = chain.from_iterable(expected)
    num_capped = sum(weight >= cap * (1 - 1e-9) for weight in weights)
    rest = num_valid - num_capped * cap
    return WEIGHT_RTOL + (num_valid * EPS / rest if rest > 1e-6 else 0.0)


@contextmanager
def unchecked() -> Iterator[None]:
    """Let no weighting read values, as on a GPU."""
    with mock.patch.object(_weighting, "values_are_known", return_value=False):
        yield


class CalledWeighting:
    """A weighting, TF-IDF by default, whose mode is an argument of each call."""

    def __init__(
        self,
        make: Callable[..., TokenWeighting] = TFIDFWeighting,
        *,
        checked: bool = True,
        **arguments: Any,
    ) -> None:
        self.checked = checked
        self.weighting = make(**arguments)

    @property
    def window(self) -> DocumentWindow:
        return self.weighting.window

    def __call__(self, labels: Tensor, *, training: bool = True, **arguments: Any) -> Tensor:
        with nullcontext() if self.checked else unchecked():
            return self.weighting.train(training)(labels, **arguments)


def state_copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert before, "a window must have a state"
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
