"""Sends a weighting the way that a test is about, whatever device its labels are on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting, _labels, _repetition, _tfidf

WAYS = ["host", "device"]


@contextmanager
def going(way: str) -> Iterator[None]:
    """Every weighting called in this context goes the way of a CPU (``host``) or that of a GPU (``device``)."""
    on_host = mock.Mock(return_value=way == "host")
    with ExitStack() as patches:
        for module in (_labels, _repetition, _tfidf):
            patches.enter_context(mock.patch.object(module, "on_host", on_host))
        yield


class OneWay:
    """A TF-IDF weighting that goes one way at every call."""

    def __init__(self, way: str, **arguments: Any) -> None:
        self.way = way
        self.weighting = TFIDFWeighting(**arguments)

    @property
    def window(self) -> DocumentWindow:
        return self.weighting.window

    def __call__(self, labels: Tensor, *, training: bool = True, **arguments: Any) -> Tensor:
        with going(self.way):
            return self.weighting.train(training)(labels, **arguments)
