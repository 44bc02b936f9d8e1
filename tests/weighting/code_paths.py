"""Choose the code path of a weighting, whatever the device of its labels."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting, _labels, _repetition, _tfidf

CODE_PATHS = ["host", "device"]


@contextmanager
def code_path(path: str) -> Iterator[None]:
    """Let every weighting use the code path of a CPU (``host``) or of a GPU (``device``)."""
    on_host = mock.Mock(return_value=path == "host")
    with ExitStack() as patches:
        for module in (_labels, _repetition, _tfidf):
            patches.enter_context(mock.patch.object(module, "on_host", on_host))
        yield


class OneCodePath:
    """A TF-IDF weighting that always uses the same code path."""

    def __init__(self, path: str, **arguments: Any) -> None:
        self.path = path
        self.weighting = TFIDFWeighting(**arguments)

    @property
    def window(self) -> DocumentWindow:
        return self.weighting.window

    def __call__(self, labels: Tensor, *, training: bool = True, **arguments: Any) -> Tensor:
        with code_path(self.path):
            return self.weighting.train(training)(labels, **arguments)
