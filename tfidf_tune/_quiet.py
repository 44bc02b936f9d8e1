"""Keeps two harmless lines of other libraries out of sight; all else that they say stays.

torchao 0.15 logs at import that its C++ extensions do not fit the installed torch; torchtune needs that torchao, and
none of what is used here needs the extensions. torchtune's RMSNorm computes in float32 with weights in bf16, and torch
warns that it has no fused kernel for that.
"""

import logging
import warnings


def _is_wanted(record: logging.LogRecord) -> bool:
    return "Skipping import of cpp extensions" not in record.getMessage()


logging.getLogger("torchao").addFilter(_is_wanted)
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight", category=UserWarning)
