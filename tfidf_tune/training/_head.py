"""What a model returns to the loss: logits in chunks, or what they are computed from."""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchtune.modules import TiedLinear, TransformerDecoder

from tfidf_tune.loss import HeadInput, WeightedCrossEntropyLoss


def prepare_head(model: nn.Module, loss: WeightedCrossEntropyLoss) -> str | None:
    """Make a model return what the loss needs: a :class:`HeadInput`, or chunks of logits.

    Args:
        model (nn.Module): torchtune model; changed in place, its weights and their names are not.
        loss (WeightedCrossEntropyLoss): the objective, with its head and number of chunks.

    Returns:
        str | None: why the model returns logits although another head is set; None if it returns what is set.
    """
    refusal = None if loss.head == "chunked" else _refusal(model)
    if loss.head == "chunked" or refusal:
        vars(model).pop("chunked_output", None)  # of an earlier call
        model.set_num_output_chunks(loss.num_output_chunks)  # type: ignore[operator]
        return refusal
    model.set_num_output_chunks(1)  # type: ignore[operator]
    # The head's weight is read inside the model's forward pass, where FSDP2 has it unsharded, and used after it, where
    # it still is: by default the root's own parameters are not sharded again before the backward pass.
    model.chunked_output = partial(_head_input, model.output)  # type: ignore[assignment]
    return None


def _head_input(head: Any, hidden: Tensor) -> HeadInput:
    weight, bias = (head.tied_module.weight, None) if isinstance(head, TiedLinear) else (head.weight, head.bias)
    # Under autocast norms give float32, which the output projection would cast.
    return HeadInput(hidden.to(weight.dtype), weight, bias)


def _refusal(model: nn.Module) -> str | None:
    """Return why logits of the model's head cannot be computed from just a weight and a bias, if so."""
    if not isinstance(model, TransformerDecoder):
        return f"the model is a {type(model).__name__}"
    head: Any = model.output
    if hasattr(head, "adapter_params"):
        return "the output projection has adapters"
    if type(head) not in (nn.Linear, TiedLinear):
        return f"the output projection is a {type(head).__name__}"
    linear = head.tied_module if isinstance(head, TiedLinear) else head
    if is_traceable_wrapper_subclass(linear.weight) and not isinstance(linear.weight, DTensor):
        return f"the output projection's weight is a {type(linear.weight).__name__}"
    if isinstance(head, nn.Linear) and (head._forward_hooks or head._forward_pre_hooks):
        return "the output projection has hooks"
    return None
