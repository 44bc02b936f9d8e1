"""Messages of other libraries that are about nothing that a user of ours can change.

They are hidden by programs, which are our command line and a recipe, and not by what is imported
into another program.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_HIDDEN = {
    # They do not fit the torch, and are not used.
    "torchao": (
        "Skipping import of cpp extensions",
        "Failed to load ",
    ),
    # Torchao 0.17 and later.
    "torch.utils._pytree": ("is an Enum subclass and is now natively supported",),
    # A kernel that is not used.
    "bitsandbytes.backends.cpu.ops": ("Failed to load CPU gemm_4bit_forward",),
    # Repeated for each of our tasks.
    "lm_eval.api.task": ("Custom kwargs can be passed to `--metadata`",),
    # Recitation is asked for without a template on purpose.
    "lm_eval.evaluator": ("chat template is not applied",),
}


class _Wanted(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _HIDDEN[record.name])


_WANTED = _Wanted()


def hide_messages() -> None:
    """Hide the messages until the process ends; to be called before their
    libraries are imported.
    """
    for name in _HIDDEN:
        logging.getLogger(name).addFilter(_WANTED)
    # Layers of transformers that return a view, because changing it in place under FSDP2 would be
    # wrong.
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning
    )
    # torchtune's RMSNorm computes in float32 with weights in bf16, for which torch has no fused
    # kernel.
    warnings.filterwarnings(
        "ignore", message="Mismatch dtype between input and weight", category=UserWarning
    )


@contextmanager
def hidden_log_messages() -> Iterator[None]:
    """Hide what libraries log while they are imported in the block, and leave their loggers as they
    were.
    """
    wanted = _Wanted()
    for name in _HIDDEN:
        logging.getLogger(name).addFilter(wanted)
    try:
        yield
    finally:
        for name in _HIDDEN:
            logging.getLogger(name).removeFilter(wanted)
