"""Token-weighted losses for language models, and measures of what a fine-tuned model recites."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfidf_tune.loss import (
        CrossEntropyLoss,
        HeadInput,
        TFIDFCrossEntropyLoss,
        WeightedCrossEntropyLoss,
    )
    from tfidf_tune.weighting import TFIDFWeighting

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """Import on first use: torch takes seconds, and much of the command line
        does without it.
        """
        if name == "__version__":
            from importlib.metadata import version

            return version("tfidf-tune")
        if name in ("loss", "weighting"):
            return import_module(f"tfidf_tune.{name}")
        if name in __all__:
            return getattr(
                import_module(f"tfidf_tune.{'weighting' if name == 'TFIDFWeighting' else 'loss'}"),
                name,
            )
        raise AttributeError(f"module 'tfidf_tune' has no attribute {name!r}")


__all__ = [
    "CrossEntropyLoss",
    "HeadInput",
    "TFIDFCrossEntropyLoss",
    "TFIDFWeighting",
    "WeightedCrossEntropyLoss",
]
