"""Hides three harmless messages of other libraries.

torchao 0.15, which torchtune needs, logs at import that its C++ extensions do not fit the installed torch; nothing here
uses them. torchtune's RMSNorm computes in float32 with weights in bf16, and torch warns that this has no fused kernel.
FSDP2 warns of layers that return a view, as some of transformers do, because changing it in place would be wrong.
"""

import logging
import warnings


def _is_wanted(record: logging.LogRecord) -> bool:
    return "Skipping import of cpp extensions" not in record.getMessage()


logging.getLogger("torchao").addFilter(_is_wanted)
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight", category=UserWarning)
