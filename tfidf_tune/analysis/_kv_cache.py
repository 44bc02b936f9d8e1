"""A KV cache whose growth by one token costs one token, not the whole text again."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class ReservedLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one attention layer, in memory set aside for the whole text.

    transformers' own layer moves everything it holds into new memory for each token. Here ``keys`` and ``values``
    are views of the filled part, so that attention reads the same numbers.

    Args:
        keys (Tensor): ``[b, h, s, d]``, of the text so far.
        values (Tensor): ``[b, h, s, d]``.
        capacity (int): tokens of the whole text.
    """

    def __init__(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self._all_keys, self._all_values = (
            states.new_empty(*states.shape[:-2], capacity, states.shape[-1]) for states in (keys, values)
        )
        self.update(keys, values)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens.

        Args:
            key_states (Tensor): ``[b, h, n, d]``.
            value_states (Tensor): ``[b, h, n, d]``.
            *args (Any): what transformers hands to other layers.
            **kwargs (Any): the same.

        Returns:
            tuple[Tensor, Tensor]: keys and values of all tokens so far.
        """
        first = self.get_seq_length()
        end = first + key_states.shape[-2]
        self._all_keys[..., first:end, :] = key_states
        self._all_values[..., first:end, :] = value_states
        self.keys, self.values = self._all_keys[..., :end, :], self._all_values[..., :end, :]
        return self.keys, self.values


def reserve(cache: Any, capacity: int) -> None:
    """Give the layers that grow with the text the memory they will need.

    Other layers (a sliding window, say) stay as they are, and so does a cache of a model's own making.

    Args:
        cache (Any): what the model returned for the prompts; changed in place.
        capacity (int): tokens of the whole text, prompts included.
    """
    if isinstance(cache, DynamicCache):
        cache.layers = [
            ReservedLayer(layer.keys, layer.values, capacity)
            if type(layer) is DynamicLayer and layer.is_initialized
            else layer
            for layer in cache.layers
        ]
