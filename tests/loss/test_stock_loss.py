"""The drop-in for torchtune's own recipes: what they look at, and that it is the TF-IDF loss all the same."""

import inspect

import pytest
import torch
from loss_reference import LOSS_RTOL, assert_loss_equals_reference, loss_and_gradient, random_batch, reference_loss
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


def test_the_class_has_the_name_that_the_stock_recipes_compare():
    assert CEWithChunkedOutputLoss().__class__.__name__ == "CEWithChunkedOutputLoss"


def test_it_is_torchtunes_chunked_loss_for_isinstance():
    assert isinstance(CEWithChunkedOutputLoss(), torchtune_loss.CEWithChunkedOutputLoss)


def test_it_has_the_number_of_chunks_that_the_recipes_set_the_model_to():
    assert CEWithChunkedOutputLoss().num_output_chunks == 8
    assert CEWithChunkedOutputLoss(num_output_chunks=3).num_output_chunks == 3


def test_it_takes_the_arguments_of_the_tfidf_loss():
    expected = inspect.signature(TFIDFCrossEntropyLoss).parameters
    assert inspect.signature(CEWithChunkedOutputLoss).parameters == expected


def test_its_value_and_gradient_are_those_of_the_tfidf_loss():
    ours, stock = TFIDFCrossEntropyLoss(num_batches=2), CEWithChunkedOutputLoss(num_batches=2)
    for seed in range(4):
        logits, labels = random_batch(seed, length=21 - seed)
        expected, expected_gradient = loss_and_gradient(ours, logits, labels, num_chunks=8)
        loss, gradient = loss_and_gradient(stock, logits, labels, num_chunks=8)
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)


def test_its_value_is_not_that_of_plain_cross_entropy():
    logits, labels = random_batch(0)
    chunks = list(logits.chunk(8, dim=1))
    plain = torchtune_loss.CEWithChunkedOutputLoss()(chunks, labels)
    assert abs(float(CEWithChunkedOutputLoss()(chunks, labels) / plain) - 1) > 10 * LOSS_RTOL


def test_the_arguments_reach_the_weights():
    logits, labels = random_batch(1)
    loss = CEWithChunkedOutputLoss(num_batches=3, tf="log", max_weight=1.2)(logits, labels)
    weights = ReferenceTFIDF(3, "log", 1.2)(labels.tolist())
    assert_loss_equals_reference(loss, reference_loss(logits, labels, weights)[0])


def test_its_state_is_that_of_the_tfidf_loss():
    ours, stock = TFIDFCrossEntropyLoss(num_batches=2), CEWithChunkedOutputLoss(num_batches=2)
    ours(*random_batch(0))
    stock.load_state_dict(ours.state_dict())
    logits, labels = random_batch(1)
    assert torch.equal(stock(logits, labels), ours(logits, labels))


def test_a_config_makes_it_from_its_dotted_path():
    config = OmegaConf.create({"_component_": "tfidf_tune.loss.stock.CEWithChunkedOutputLoss", "num_batches": 4})
    loss = instantiate(config)
    assert isinstance(loss, CEWithChunkedOutputLoss)
    assert loss.weighting.window.num_batches == 4


def test_compile_loss_keeps_the_class(eager_backend):
    loss = CEWithChunkedOutputLoss()
    compiled = compile_loss(loss, verbose=False)
    assert type(compiled) is CEWithChunkedOutputLoss
    assert compiled.__class__.__name__ == "CEWithChunkedOutputLoss"


# Dynamo looks at `.grad` of the chunks and hides the warning by a filter of its own, which ours comes before.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compile_loss_keeps_the_result(eager_backend):
    ours = TFIDFCrossEntropyLoss(num_batches=2)
    compiled = compile_loss(CEWithChunkedOutputLoss(num_batches=2), verbose=False)
    for seed in range(3):
        logits, labels = random_batch(seed)
        expected, expected_gradient = loss_and_gradient(ours, logits, labels, num_chunks=8)
        loss, gradient = loss_and_gradient(compiled, logits, labels, num_chunks=8)
        # The eager backend runs the same operations.
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)


def test_compile_loss_leaves_the_state_as_it_is(eager_backend):
    loss = CEWithChunkedOutputLoss(num_batches=2)
    loss(*random_batch(0))
    before = {name: tensor.clone() for name, tensor in loss.state_dict().items()}
    after = compile_loss(loss, verbose=False).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
