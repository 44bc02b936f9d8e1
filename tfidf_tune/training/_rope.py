"""Tables of rotary embeddings, which follow from a model's sizes and stand in no checkpoint."""

from typing import Any

import torch
from torch import nn


def build_rope_tables(model: nn.Module, device: torch.device) -> None:
    """Build the tables anew.

    Args:
        model (nn.Module): torchtune model; changed in place.
        device (torch.device): where they go. On the meta device they have their sizes alone.
    """
    module: Any
    for module in model.modules():
        if hasattr(module, "rope_init"):
            # Llama 3's are not made on the meta device, where a forward pass then fails.
            with torch.device("cpu") if device.type == "meta" else device:
                module.rope_init()
            module.to(device)
