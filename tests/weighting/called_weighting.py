"""TF-IDF weightings that are called like functions, with the checks of values on a CPU or, as on a GPU, without."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch import Tensor

from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting, _weighting


@contextmanager
def unchecked() -> Iterator[None]:
    """Let no weighting read values, as on a GPU."""
    with mock.patch.object(_weighting, "values_are_known", return_value=False):
        yield


class CalledWeighting:
    """A TF-IDF weighting whose mode is an argument of each call."""

    def __init__(self, *, checked: bool = True, **arguments: Any) -> None:
        self.checked = checked
        self.weighting = TFIDFWeighting(**arguments)

    @property
    def window(self) -> DocumentWindow:
        return self.weighting.window

    def __call__(self, labels: Tensor, *, training: bool = True, **arguments: Any) -> Tensor:
        with nullcontext() if self.checked else unchecked():
            return self.weighting.train(training)(labels, **arguments)
