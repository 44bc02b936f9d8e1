"""Token-level perplexity on unseen text."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from tfidf_tune.analysis._loading import require_known_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.inference_mode()
def token_perplexity(model: "PreTrainedModel", blocks: npt.NDArray[np.integer], *, batch_size: int = 16) -> float:
    """Return the perplexity over the ``n · (s - 1)`` predictions of ``n`` non-overlapping blocks of ``s`` tokens.

    Section "Perplexity" of the paper, ``D`` the evaluated positions::

        PPL = exp( 1/|D| · sum over t in D of -ln P(x_t | x_<t) )

    ``x_<t`` are the ids before ``t`` in the same block: the first id of a block is only context, no BOS is
    added. Logits are converted to float32, the sum is in float64.

    Args:
        model (PreTrainedModel): causal language model; it is put in eval mode.
        blocks (np.ndarray): integer ``[n, s]`` token ids without padding.
        batch_size (int): blocks in a forward pass.

    Returns:
        float: the perplexity, at least 1.

    Raises:
        ValueError: If the blocks predict no token, or an id is outside the model's vocabulary.
    """
    num_blocks, block_size = blocks.shape
    num_predictions = num_blocks * (block_size - 1)
    if num_predictions < 1:
        raise ValueError(
            f"Blocks of shape {list(blocks.shape)} predict no token: give at least one block of two tokens, "
            "from more text or with a smaller block size."
        )
    require_known_ids(model, blocks)
    model.eval()
    device = next(model.parameters()).device
    total = 0.0
    for start in range(0, num_blocks, batch_size):
        ids_bs = torch.as_tensor(blocks[start : start + batch_size], dtype=torch.long, device=device)
        logits_bsv = model(input_ids=ids_bs, use_cache=False).logits[:, :-1].float()
        nll = F.cross_entropy(logits_bsv.flatten(0, 1), ids_bs[:, 1:].flatten(), reduction="none")
        total += nll.cpu().double().sum().item()
    return float(np.exp(total / num_predictions))
