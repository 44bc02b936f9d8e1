"""Hides five harmless messages of other libraries.

torchao 0.15, which torchtune needs, logs at import that its C++ extensions do not fit the installed torch; nothing here
uses them. torchtune's RMSNorm computes in float32 with weights in bf16, and torch warns that this has no fused kernel.
bitsandbytes logs at import that a package with another kernel is missing; that kernel is not used. FSDP2 warns of
layers that return a view, as some of transformers do, because changing it in place would be wrong.
lm-evaluation-harness explains --metadata once for each of our tasks.
"""

import logging
import warnings

_HIDDEN = {
    "torchao": "Skipping import of cpp extensions",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    "lm_eval.api.task": "Custom kwargs can be passed to `--metadata`",
}


def _is_wanted(record: logging.LogRecord) -> bool:
    return _HIDDEN[record.name] not in record.getMessage()


for name in _HIDDEN:
    logging.getLogger(name).addFilter(_is_wanted)
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight", category=UserWarning)
