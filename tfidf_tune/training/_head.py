"""What a model returns to the loss: logits in chunks, or what they are made of."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torchtune.modules import TiedLinear, TransformerDecoder

from tfidf_tune.loss import HeadInput, WeightedCrossEntropyLoss


def prepare_head(model: nn.Module, loss: WeightedCrossEntropyLoss) -> str | None:
    """Have a model return what the loss asks for: a :class:`HeadInput`, or chunks of logits.

    Args:
        model (nn.Module): torchtune model; changed in place, its weights and their names are not.
        loss (WeightedCrossEntropyLoss): the objective; says which head it wants and how many chunks.

    Returns:
        str | None: why the model returns logits although another head was asked for; None if it does as asked.
    """
    refusal = None if loss.head == "chunked" else _refusal(model)
    if loss.head == "chunked" or refusal:
        vars(model).pop("chunked_output", None)  # of an earlier call
        model.set_num_output_chunks(loss.num_output_chunks)  # type: ignore[operator]
        return refusal
    model.set_num_output_chunks(1)  # type: ignore[operator]
    # The output is taken inside the model's forward pass: under FSDP the head's weight is whole there.
    model.chunked_output = partial(_head_input, model)  # type: ignore[assignment]
    return None


def _head_input(model: Any, hidden: Tensor) -> HeadInput:
    head = model.output
    weight, bias = (head.tied_module.weight, None) if isinstance(head, TiedLinear) else (head.weight, head.bias)
    # Under autocast norms give float32, which the output projection would cast.
    return HeadInput(hidden.to(weight.dtype), weight, bias)


def _refusal(model: nn.Module) -> str | None:
    """Why logits of the model's head cannot be computed from a weight and a bias alone."""
    if not isinstance(model, TransformerDecoder):
        return f"the model is a {type(model).__name__}"
    head: Any = model.output
    if type(head) in (nn.Linear, TiedLinear):
        return None
    kind = "has adapters" if hasattr(head, "adapter_params") else f"is a {type(head).__name__}"
    return f"the output projection {kind}"
