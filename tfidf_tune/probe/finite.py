"""NaN and infinite logits: the model has diverged, or its values are too large for its dtype."""

import torch


class NonFiniteLogits(ValueError):
    """The largest logit after some ids of a prompt or text is NaN or infinite.

    Single logits of negative infinity are allowed: they mask the unused rows of a padded
    vocabulary. But then the largest logit is a number.

    Args:
        index (int): of the prompt or text, among those that the function was given.
        dtype (torch.dtype): of the logits.
        asked (str): what the model was asked, in a message: "passage target-0003". Default: "", by
            the index.
    """

    def __init__(self, index: int, dtype: torch.dtype, asked: str = "") -> None:
        self.index = index
        self.dtype = dtype
        name = str(dtype).removeprefix("torch.")
        super().__init__(
            f"the model's logits for {asked or f'text {index}'} are NaN or infinite in {name}: the "
            "model has diverged, or its values are too large for this dtype; nothing can be "
            "measured (try dtype=float32)"
        )
