"""Tables of rotary embeddings, which follow from a model's sizes and stand in no checkpoint."""

from typing import Any

import torch
from torch import nn


def build_rope_tables(model: nn.Module, device: torch.device) -> None:
    """Build the tables anew.

    Args:
        model (nn.Module): torchtune model; changed in place.
        device (torch.device): where they go. On the meta device they have their sizes alone, and cost no memory.
    """
    module: Any
    for module in model.modules():
        if not hasattr(module, "rope_init"):
            continue
        if device.type != "meta":
            with device:
                module.rope_init()
            module.to(device)
        elif next(module.buffers(), None) is None:
            _build_on_meta(module)


def _build_on_meta(module: Any) -> None:
    """Build the tables of Llama 3, whose ``rope_init`` leaves them out on the meta device, where a step then fails."""
    max_seq_len, module.max_seq_len = module.max_seq_len, 1
    with torch.device("cpu"):
        module.rope_init()  # one row: the size of the whole table is not known to fit
    module.max_seq_len = max_seq_len
    module.to("meta")
    module.build_rope_cache(max_seq_len)
