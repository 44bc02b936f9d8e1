"""FSDP2 over two processes: our models shard by layer as torchtune's do, and give what one process gives."""

import warnings
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import on_every_rank
from tiny_llama import VOCAB_SIZE
from tiny_models import MODELS
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchtune import training

from tfidf_tune.loss import CrossEntropyLoss, HeadInput
from tfidf_tune.models import FAMILIES
from tfidf_tune.training import prepare_head
from tfidf_tune.weighting import shift_labels

NAMES = ("gpt_neox", "gptj")
HEADS = (("llama", "fused"), ("qwen2-tied", "fused"), ("gptj", "fused"), ("qwen2-tied", "torch"))


def loaded(name: str) -> nn.Module:
    tiny = MODELS[name]
    hf_model = tiny.build_hf()
    model = tiny.build()
    model.load_state_dict(FAMILIES[tiny.model_type].hf_to_tune(hf_model.state_dict(), hf_model.config))
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def check_shards(rank: int) -> int:
    # torchtune's decoder gives a view; nothing here writes into it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    checks = [partial(check_model, name=name) for name in NAMES]
    checks += [partial(check_head, name=name, head=head) for name, head in HEADS]
    for check in checks:
        check(rank)
    return len(checks)


def check_model(rank: int, name: str) -> None:
    tokens = torch.randint(VOCAB_SIZE, (4, 12), generator=torch.Generator().manual_seed(0))
    whole, model = loaded(name), loaded(name)
    loss_of(whole, tokens).backward()

    training.shard_model(model, shard_conditions=[training.get_shard_conditions], cpu_offload=False)
    loss = loss_of(model, tokens.chunk(2)[rank])
    loss.backward()

    parameters = dict(model.named_parameters())
    assert sum(value.to_local().numel() for value in parameters.values()) < 0.6 * sum(
        value.numel() for value in whole.parameters()
    )
    assert_gradients_of_one_process(model, whole)


def assert_gradients_of_one_process(model: nn.Module, whole: nn.Module) -> None:
    parameters = dict(model.named_parameters())
    assert all(isinstance(value, DTensor) for value in parameters.values())
    for key, value in whole.named_parameters():
        torch.testing.assert_close(parameters[key].grad.full_tensor(), value.grad)


def check_head(rank: int, name: str, head: str) -> None:
    """The loss from hidden states and the head's weight, which the model hands out while it is gathered.

    The root, which has the head, must stay gathered until the backward pass, as ``fully_shard`` has it by default.
    """
    tokens = torch.randint(VOCAB_SIZE, (26, 24), generator=torch.Generator().manual_seed(0))
    whole, model = loaded(name), loaded(name)
    loss_function = CrossEntropyLoss(head=head)
    assert prepare_head(whole, loss_function) is None
    expected = loss_function(whole(tokens), shift_labels(tokens))
    expected.backward()

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert prepare_head(model, loss_function) is None
    ours = tokens.chunk(2)[rank]
    head_input = model(ours)
    assert isinstance(head_input, HeadInput)
    assert not isinstance(head_input.weight, DTensor)
    loss = loss_function(head_input, shift_labels(ours))
    del head_input
    loss.backward()

    mean = loss.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / 2, expected.detach())
    assert_gradients_of_one_process(model, whole)


def test_two_processes_have_the_gradients_of_one(tmp_path):
    assert on_every_rank(2, tmp_path, check_shards) == [len(NAMES) + len(HEADS)] * 2
