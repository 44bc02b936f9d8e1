"""The state of a weighting as bytes, for checkpoints whose tensors have to keep their sizes; a window's tables grow."""

import io

import torch

from tfidf_tune.weighting import TokenWeighting


def to_bytes(weighting: TokenWeighting) -> bytes:
    """Return the state of a weighting."""
    file = io.BytesIO()
    torch.save(weighting.state_dict(), file)
    return file.getvalue()


def from_bytes(weighting: TokenWeighting, state: bytes) -> None:
    """Load a state that :func:`to_bytes` returned; tensors go to the device of the weighting's own."""
    weighting.load_state_dict(torch.load(io.BytesIO(state), map_location="cpu", weights_only=True))
