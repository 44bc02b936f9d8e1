"""The drop-in for torchtune's own recipes: what they look at, and that it is the TF-IDF loss all the same."""

import inspect

import pytest
import torch
from loss_reference import assert_loss_equals_reference, loss_and_gradient, random_batch, reference_loss
from omegaconf import OmegaConf
from tfidf_reference import ReferenceTFIDF
from torchtune.config import instantiate
from torchtune.modules import loss as torchtune_loss
from torchtune.training import compile_loss

from tfidf_tune.loss import TFIDFCrossEntropyLoss
from tfidf_tune.loss.stock import CEWithChunkedOutputLoss


@pytest.fixture
def eager_backend(monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_it_takes_the_arguments_of_the_tfidf_loss():
    expected = inspect.signature(TFIDFCrossEntropyLoss).parameters
    assert inspect.signature(CEWithChunkedOutputLoss).parameters == expected
    assert CEWithChunkedOutputLoss().num_output_chunks == 8
    assert CEWithChunkedOutputLoss(num_output_chunks=3).num_output_chunks == 3


def test_its_value_and_gradient_are_those_of_the_tfidf_loss():
    ours, stock = TFIDFCrossEntropyLoss(num_batches=2), CEWithChunkedOutputLoss(num_batches=2)
    for seed in range(4):
        logits, labels = random_batch(seed, length=21 - seed)
        expected, expected_gradient = loss_and_gradient(ours, logits, labels, num_chunks=8)
        loss, gradient = loss_and_gradient(stock, logits, labels, num_chunks=8)
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)


def test_the_arguments_reach_the_weights():
    logits, labels = random_batch(1)
    loss = CEWithChunkedOutputLoss(num_batches=3, tf="log", max_weight=1.2)(logits, labels)
    weights = ReferenceTFIDF(3, "log", 1.2)(labels.tolist())
    assert_loss_equals_reference(loss, reference_loss(logits, labels, weights)[0])


def test_counting_all_tokens_is_refused_because_stock_recipes_pass_only_labels():
    with pytest.raises(
        ValueError, match="counts all tokens, but a stock recipe of torchtune .* set counted to 'labels'"
    ):
        CEWithChunkedOutputLoss(counted="tokens")


def test_a_config_makes_it_from_its_dotted_path():
    config = OmegaConf.create({"_component_": "tfidf_tune.loss.stock.CEWithChunkedOutputLoss", "num_batches": 4})
    loss = instantiate(config)
    assert type(loss) is CEWithChunkedOutputLoss
    assert type(loss).__name__ == "CEWithChunkedOutputLoss", "the name that the stock recipes compare"
    assert isinstance(loss, torchtune_loss.CEWithChunkedOutputLoss)
    assert loss.weighting.window.num_batches == 4


# Dynamo looks at `.grad` of the chunks and hides the warning by a filter of its own, which ours comes before.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compile_loss_keeps_the_result(eager_backend):
    ours = TFIDFCrossEntropyLoss(num_batches=2)
    loss = CEWithChunkedOutputLoss(num_batches=2)
    loss.load_state_dict(ours.state_dict())
    compiled = compile_loss(loss, verbose=False)
    assert type(compiled) is CEWithChunkedOutputLoss
    assert compiled.state_dict().keys() == ours.state_dict().keys()
    for seed in range(3):
        logits, labels = random_batch(seed)
        expected, expected_gradient = loss_and_gradient(ours, logits, labels, num_chunks=8)
        loss, gradient = loss_and_gradient(compiled, logits, labels, num_chunks=8)
        # The eager backend runs the same operations.
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)
