"""Token-weighted losses for language models, and measures of what a fine-tuned model recites."""

import logging
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Messages of other libraries that nothing here is about; hidden before anything imports these libraries.
_HIDDEN = {
    "torchao": ("Skipping import of cpp extensions", "Failed to load "),  # they do not fit the torch, and are not used
    "torch.utils._pytree": ("is an Enum subclass and is now natively supported",),  # torchao 0.17 and later
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),  # a kernel that is not used
    "lm_eval.api.task": ("Custom kwargs can be passed to `--metadata`",),  # repeated for each of our tasks
}


def _is_wanted(record: logging.LogRecord) -> bool:
    return not any(text in record.getMessage() for text in _HIDDEN[record.name])


for _name in _HIDDEN:
    logging.getLogger(_name).addFilter(_is_wanted)
# Layers of transformers that return a view, because changing it in place under FSDP2 would be wrong.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
# torchtune's RMSNorm computes in float32 with weights in bf16, for which torch has no fused kernel.
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight", category=UserWarning)


class _BeforeTorchtune:
    """Imports :mod:`tfidf_tune._torchao` before any part of torchtune but its command line."""

    def find_spec(self, name: str, *_: Any) -> None:
        """Find nothing: the other finders do."""
        if name.startswith("torchtune.") and not name.startswith("torchtune._") and self in sys.meta_path:
            sys.meta_path.remove(self)
            import_module("tfidf_tune._torchao")


sys.meta_path.insert(0, _BeforeTorchtune())

if TYPE_CHECKING:
    from tfidf_tune.loss import CrossEntropyLoss, HeadInput, TFIDFCrossEntropyLoss, WeightedCrossEntropyLoss
    from tfidf_tune.weighting import TFIDFWeighting

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """Import on first use: torch takes seconds, and much of the command line does without it."""
        if name == "__version__":
            from importlib.metadata import version

            return version("tfidf-tune")
        if name in ("loss", "weighting"):
            return import_module(f"tfidf_tune.{name}")
        if name in __all__:
            return getattr(import_module(f"tfidf_tune.{'weighting' if name == 'TFIDFWeighting' else 'loss'}"), name)
        raise AttributeError(f"module 'tfidf_tune' has no attribute {name!r}")


__all__ = ["CrossEntropyLoss", "HeadInput", "TFIDFCrossEntropyLoss", "TFIDFWeighting", "WeightedCrossEntropyLoss"]
