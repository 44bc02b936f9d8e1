"""The state of a window, kept aside and compared bit for bit."""

import torch
from torch import Tensor, nn


def state_copy(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module: nn.Module, before: dict[str, Tensor]) -> None:
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert before, "a window must have a state"
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name
