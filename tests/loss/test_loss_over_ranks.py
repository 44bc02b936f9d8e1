"""The losses of two ranks, each by its share of the valid tokens, against that of the union batch
in float64.
"""

import pytest
import torch
import torch.distributed as dist
from helpers.processes.ranks import on_every_rank
from helpers.references.head import HeadBatch, Values, assert_equal_truth, random_head
from helpers.references.loss import (
    assert_gradient_equals_reference,
    assert_loss_equals_reference,
    reference_loss,
)
from helpers.references.tfidf import IGNORED, ReferenceTFIDF

from tfidf_tune.loss import HeadInput, TFIDFCrossEntropyLoss
from tfidf_tune.weighting import TokenBatch

NUM_RANKS = 2
NUM_STEPS = 6
WINDOW = 3
ROWS_OF_A_RANK = 2
VOCAB_SIZE = 37


def union_batch(step):
    """The rows of rank 0 first; in one step rank 1 has no valid token."""
    batch = random_head(4 * 24, seed=step, rows=NUM_RANKS * ROWS_OF_A_RANK, vocab_size=VOCAB_SIZE)
    if step == 3:
        batch.labels[ROWS_OF_A_RANK:] = IGNORED
    return batch


def losses_of_a_rank(rank):
    """Loss and gradients of each step, by the share of the valid tokens; the largest shape is known
    on odd steps.
    """
    results = {}
    rows = slice(rank * ROWS_OF_A_RANK, (rank + 1) * ROWS_OF_A_RANK)
    for head in ("chunked", "fused"):
        loss_function = TFIDFCrossEntropyLoss(num_batches=WINDOW, head=head, sync=True)
        results[head] = []
        for step in range(NUM_STEPS):
            (hidden, weight, bias), labels, _ = union_batch(step)
            share = (labels[rows] != IGNORED).sum() / (labels != IGNORED).sum()
            labels = labels[rows]
            batch = TokenBatch(labels, largest_shape=tuple(labels.shape) if step % 2 == 1 else None)
            inputs = HeadInput(hidden[rows], weight, bias)
            if head == "chunked":
                inputs = [(inputs.hidden @ inputs.weight.t() + inputs.bias)]
            inputs = [tensor.detach().requires_grad_() for tensor in inputs]
            given = HeadInput(*inputs) if head == "fused" else inputs[0]
            loss = loss_function(given, batch) * share
            results[head].append((loss.detach(), torch.autograd.grad(loss, inputs)))
    assert dist.get_world_size() == NUM_RANKS
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return on_every_rank(NUM_RANKS, tmp_path_factory.mktemp("ranks"), losses_of_a_rank)


def truth():
    """Each union batch and its weights, of one process that sees it."""
    weights_of = ReferenceTFIDF(WINDOW)
    for step in range(NUM_STEPS):
        batch = union_batch(step)
        yield batch, torch.tensor(weights_of(batch.labels.tolist()), dtype=torch.float64)


def test_with_sync_the_losses_add_up_to_that_of_the_union_and_so_do_the_gradients_of_the_logits(
    ranks,
):
    for step, ((head, labels, _), weights) in enumerate(truth()):
        logits = head.hidden @ head.weight.t() + head.bias
        expected, expected_gradient = reference_loss(logits, labels, weights)
        losses, gradients = zip(*(result["chunked"][step] for result in ranks), strict=True)
        largest = float(weights.max()) / int((labels != IGNORED).sum())
        assert_loss_equals_reference(sum(losses), expected)
        assert_gradient_equals_reference(
            torch.cat([logits for (logits,) in gradients]), expected_gradient, largest
        )


def test_with_sync_the_gradients_of_the_head_add_up_to_those_of_the_union(ranks):
    for step, (batch, weights) in enumerate(truth()):
        batch = HeadBatch(batch.head, batch.labels, weights / (batch.labels != IGNORED).sum())
        losses, gradients = zip(*(result["fused"][step] for result in ranks), strict=True)
        hidden, weight, bias = zip(*gradients, strict=True)
        values = Values(sum(losses), torch.zeros(()), torch.cat(hidden), sum(weight), sum(bias))
        assert_equal_truth(values._replace(losses=None), batch)
