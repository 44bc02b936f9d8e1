"""The losses against float64, value and gradient, on whole logits and on chunks of them."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from label_batches import EPS, NO_LABEL_TYPES, assert_weights_equal_reference
from loss_reference import (
    LOSS_RTOL,
    GivenWeighting,
    assert_gradient_equals_reference,
    assert_loss_equals_reference,
    loss_and_gradient,
    random_batch,
    random_logits,
    reference_loss,
)
from tfidf_reference import IGNORED, ReferenceTFIDF

from tfidf_tune.loss import (
    CrossEntropyLoss,
    HeadInput,
    TFIDFCrossEntropyLoss,
    WeightedCrossEntropyLoss,
    fused_cross_entropy,
    linear_token_cross_entropy,
    token_cross_entropy,
    token_predictions,
)
from tfidf_tune.weighting import FocalWeighting, GatheredLabels, TFIDFWeighting, UniformWeighting

LOSSES = [CrossEntropyLoss, TFIDFCrossEntropyLoss]


def state_copy(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def assert_same_state(module, before):
    after = module.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def largest_share(weights, labels):
    return max(weight for row in weights for weight in row) / int((labels != IGNORED).sum())


# ---- against the reference


# 21 positions: not divisible by 2 and 8; 40 chunks are more than positions. None is whole logits.
@pytest.mark.parametrize("num_chunks", [None, 1, 2, 8, 21, 40])
@pytest.mark.parametrize("tf", ["count", "log", "binary"])
def test_the_tfidf_loss_and_its_gradient_equal_the_reference_over_several_steps(num_chunks, tf):
    loss_function = TFIDFCrossEntropyLoss(num_batches=2, tf=tf)
    weights_of = ReferenceTFIDF(2, tf)
    for seed, (rows, length) in enumerate([(3, 21), (1, 7), (2, 21), (4, 1), (2, 33)]):
        logits, labels = random_batch(seed, rows, length)
        weights = weights_of(labels.tolist())
        expected, expected_gradient = reference_loss(logits, labels, weights)
        loss, gradient = loss_and_gradient(loss_function, logits, labels, num_chunks=num_chunks)
        assert_loss_equals_reference(loss, expected)
        assert_gradient_equals_reference(gradient, expected_gradient, largest_share(weights, labels))


@pytest.mark.parametrize("num_output_chunks", [1, 3, 8, 21, 64])
def test_whole_logits_give_the_same_loss_in_any_number_of_chunks(num_output_chunks):
    logits, labels = random_batch(1)
    weights = ReferenceTFIDF(4)(labels.tolist())
    expected, expected_gradient = reference_loss(logits, labels, weights)
    loss_function = TFIDFCrossEntropyLoss(num_batches=4, num_output_chunks=num_output_chunks)
    loss, gradient = loss_and_gradient(loss_function, logits, labels)
    assert_loss_equals_reference(loss, expected)
    assert_gradient_equals_reference(gradient, expected_gradient, largest_share(weights, labels))


def test_chunks_of_unequal_lengths_are_matched_with_their_labels():
    logits, labels = random_batch(2)
    expected, _ = reference_loss(logits, labels, ReferenceTFIDF(4)(labels.tolist()))
    loss = TFIDFCrossEntropyLoss(num_batches=4)(list(logits.split([1, 13, 2, 5], dim=1)), labels)
    assert_loss_equals_reference(loss, expected)


def test_chunks_that_are_leaves_of_their_own_get_their_part_of_the_gradient():
    logits, labels = random_batch(3)
    weights = ReferenceTFIDF(4)(labels.tolist())
    _, expected = reference_loss(logits, labels, weights)
    chunks = [chunk.clone().requires_grad_() for chunk in logits.chunk(8, dim=1)]
    TFIDFCrossEntropyLoss(num_batches=4)(chunks, labels).backward()
    gradient = torch.cat([chunk.grad for chunk in chunks], dim=1)
    assert_gradient_equals_reference(gradient, expected, largest_share(weights, labels))


def test_the_list_of_chunks_is_left_as_it_is():
    logits, labels = random_batch(3)
    chunks = list(logits.chunk(8, dim=1))
    before = list(chunks)
    TFIDFCrossEntropyLoss()(chunks, labels)
    assert len(chunks) == len(before)
    assert all(chunk is other for chunk, other in zip(chunks, before, strict=True))


def test_the_cap_is_handed_on_to_the_weights():
    logits, labels = random_batch(4)
    weights = ReferenceTFIDF(4, max_weight=1.2)(labels.tolist())
    assert max(map(max, weights)) == pytest.approx(1.2)
    expected, _ = reference_loss(logits, labels, weights)
    assert_loss_equals_reference(TFIDFCrossEntropyLoss(num_batches=4, max_weight=1.2)(logits, labels), expected)


def test_document_ids_are_handed_on_to_the_weights():
    logits, labels = random_batch(5, length=20)
    document_ids = torch.arange(20).div(7, rounding_mode="floor").expand(3, 20)
    weights = ReferenceTFIDF(4)(labels.tolist(), document_ids.tolist())
    expected, _ = reference_loss(logits, labels, weights)
    whole, _ = reference_loss(logits, labels, ReferenceTFIDF(4)(labels.tolist()))
    assert abs(float(whole / expected) - 1) > 10 * LOSS_RTOL, "the documents must make a difference"
    loss = TFIDFCrossEntropyLoss(num_batches=4)(logits, labels, document_ids=document_ids)
    assert_loss_equals_reference(loss, expected)


@pytest.mark.parametrize("upstream", [3.0, -0.25])
@pytest.mark.parametrize("num_chunks", [None, 8])
def test_an_upstream_gradient_scales_the_gradient(upstream, num_chunks):
    logits, labels = random_batch(6)
    weights = ReferenceTFIDF(4)(labels.tolist())
    _, expected = reference_loss(logits, labels, weights, upstream)
    _, gradient = loss_and_gradient(TFIDFCrossEntropyLoss(num_batches=4), logits, labels, upstream, num_chunks)
    assert_gradient_equals_reference(gradient, expected, abs(upstream) * largest_share(weights, labels))


def test_the_weights_of_any_weighting_are_used():
    logits, labels = random_batch(7)
    weights = torch.rand(labels.shape, generator=torch.Generator().manual_seed(7)) * (labels != IGNORED)
    expected, expected_gradient = reference_loss(logits, labels, weights)
    loss, gradient = loss_and_gradient(WeightedCrossEntropyLoss(GivenWeighting(weights)), logits, labels)
    assert_loss_equals_reference(loss, expected)
    assert_gradient_equals_reference(gradient, expected_gradient, 1 / int((labels != IGNORED).sum()))


@pytest.mark.parametrize("num_chunks", [None, 4])
def test_the_weighting_is_asked_once_for_the_whole_batch_with_the_vocabulary_of_the_logits(num_chunks):
    logits, labels = random_batch(8, vocab_size=37)
    document_ids = torch.zeros_like(labels)
    weighting = GivenWeighting(torch.ones(labels.shape))
    given = logits if num_chunks is None else list(logits.chunk(num_chunks, dim=1))
    weighting.sync = True
    gathered = GatheredLabels(labels, document_ids, (slice(len(labels)), slice(labels.shape[1])))
    WeightedCrossEntropyLoss(weighting)(given, labels, document_ids, gathered)
    (batch,) = weighting.asked
    assert torch.equal(batch.labels, labels)
    assert batch.vocab_size == 37
    assert batch.document_ids is document_ids
    assert batch.gathered.own is gathered.own
    assert batch.predictions is None  # the weighting does not need them


@pytest.mark.parametrize("loss_class", LOSSES)
def test_int32_and_non_contiguous_labels_give_the_same_loss(loss_class):
    logits, labels = random_batch(9)
    expected = loss_class()(logits, labels)
    assert torch.equal(loss_class()(logits, labels.int()), expected)
    strided = labels.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(loss_class()(logits, strided), expected)


@pytest.mark.parametrize("loss_class", LOSSES)
def test_non_contiguous_logits_give_the_same_loss(loss_class):
    logits, labels = random_batch(10)
    strided = logits.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    torch.testing.assert_close(
        loss_class()(strided, labels), loss_class()(logits, labels), rtol=2 * LOSS_RTOL, atol=0.0
    )


def test_logits_at_ignored_positions_do_not_matter_and_get_no_gradient():
    logits, labels = random_batch(11)
    ignored = labels == IGNORED
    other = torch.where(ignored[..., None], 50.0, logits)
    loss, gradient = loss_and_gradient(TFIDFCrossEntropyLoss(), logits, labels)
    other_loss, _ = loss_and_gradient(TFIDFCrossEntropyLoss(), other, labels)
    assert torch.equal(other_loss, loss)
    assert ignored.any()
    assert not gradient[ignored].any()


# ---- plain cross-entropy


def fp32_cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@pytest.mark.parametrize("num_chunks", [None, 1, 8])
@pytest.mark.parametrize(("rows", "length"), [(1, 1), (2, 3), (3, 21), (4, 512), (1, 4096)])
def test_a_uniform_weighting_equals_pytorchs_cross_entropy_to_the_last_bits(rows, length, num_chunks):
    logits, labels = random_batch(length, rows, length, vocab_size=31)
    expected, expected_gradient = loss_and_gradient(fp32_cross_entropy, logits, labels)
    loss, gradient = loss_and_gradient(CrossEntropyLoss(), logits, labels, num_chunks=num_chunks)
    # The terms are the same bits; their sum is taken in another order than that of F.cross_entropy. 2 ulp of the
    # scalar for it, an ulp being at most eps of the value.
    torch.testing.assert_close(loss, expected, rtol=2 * EPS, atol=0.0)
    # The same softmax; the factor 1 / M goes in at another place, and rounds there.
    torch.testing.assert_close(gradient, expected_gradient, rtol=2 * EPS, atol=EPS / (rows * length))


def test_the_uniform_weighting_makes_any_weighted_loss_plain_cross_entropy():
    logits, labels = random_batch(13)
    loss = WeightedCrossEntropyLoss(UniformWeighting())(logits, labels)
    assert torch.equal(loss, CrossEntropyLoss()(logits, labels))


def test_uniform_data_make_the_tfidf_loss_plain_cross_entropy():
    logits, _ = random_batch(14, rows=3, length=10)
    labels = torch.arange(30).view(3, 10)
    loss = TFIDFCrossEntropyLoss()(logits, labels)
    torch.testing.assert_close(loss, fp32_cross_entropy(logits, labels), rtol=2 * LOSS_RTOL, atol=0.0)


# ---- bfloat16


@pytest.mark.parametrize("num_chunks", [None, 8])
@pytest.mark.parametrize("seed", range(3))
def test_on_bfloat16_logits_the_loss_is_no_further_from_the_truth_than_fp32(seed, num_chunks):
    logits, labels = random_batch(seed, 4, 64, 500, torch.bfloat16)
    truth, _ = reference_loss(logits, labels)
    budget = (fp32_cross_entropy(logits, labels).double() - truth).abs()
    loss, _ = loss_and_gradient(CrossEntropyLoss(), logits, labels, num_chunks=num_chunks)
    # 2 ulp for the other order of summation. The logits rounded to bf16 on the way would cost 2**-9, 16000 times that.
    assert float((loss.double() - truth).abs()) <= float(budget + 2 * EPS * truth)


@pytest.mark.parametrize("num_chunks", [None, 8])
@pytest.mark.parametrize("seed", range(3))
def test_on_bfloat16_logits_the_tfidf_loss_is_no_further_from_the_truth_than_fp32(seed, num_chunks):
    logits, labels = random_batch(seed, 4, 64, 500, torch.bfloat16)
    weights = torch.tensor(ReferenceTFIDF(4)(labels.tolist()), dtype=torch.float64)
    truth, expected_gradient = reference_loss(logits, labels, weights)
    loss, gradient = loss_and_gradient(TFIDFCrossEntropyLoss(num_batches=4), logits, labels, num_chunks=num_chunks)
    terms = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    naive = (terms.view_as(labels) * weights.float()).sum() / int((labels != IGNORED).sum())
    assert float((loss.double() - truth).abs()) <= float((naive.double() - truth).abs() + LOSS_RTOL * truth)
    # The gradient is bf16 as the logits are: half an ulp of bf16 (2**-8 of the value), beside the fp32 error.
    assert gradient.dtype == torch.bfloat16
    share = float(weights.max()) / int((labels != IGNORED).sum())
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2**-8 + LOSS_RTOL, atol=LOSS_RTOL * share)


# ---- empty batches


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("num_chunks", [None, 8])
@pytest.mark.parametrize("loss_class", LOSSES)
def test_a_batch_without_a_valid_token_gives_a_loss_of_0_with_gradients_of_0(loss_class, num_chunks, training):
    logits, labels = random_batch(15)
    loss_function = loss_class().train(training)
    loss_function(logits, labels)
    loss, gradient = loss_and_gradient(loss_function, logits, torch.full_like(labels, IGNORED), num_chunks=num_chunks)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(logits))


def test_a_batch_without_a_valid_token_leaves_the_window_as_it_was():
    logits, labels = random_batch(16)
    loss_function = TFIDFCrossEntropyLoss(num_batches=2)
    loss_function(logits, labels)
    before = state_copy(loss_function)
    loss_function(logits, torch.full_like(labels, IGNORED))
    assert_same_state(loss_function, before)


# ---- training, evaluation


def test_eval_of_the_loss_reads_the_window_and_leaves_it_as_it_was():
    reference, loss_function = ReferenceTFIDF(2), TFIDFCrossEntropyLoss(num_batches=2)
    logits, labels = random_batch(17)
    loss_function(logits, labels)
    reference(labels.tolist())
    before = state_copy(loss_function)
    assert before
    logits, labels = random_batch(18, rows=4, length=40)
    expected, _ = reference_loss(logits, labels, reference(labels.tolist(), training=False))
    assert_loss_equals_reference(loss_function.eval()(logits, labels), expected)
    assert_same_state(loss_function, before)


def test_a_loss_loaded_from_its_state_goes_on_as_if_never_saved():
    never_saved = TFIDFCrossEntropyLoss(num_batches=3)
    for seed in range(5):
        never_saved(*random_batch(seed, length=10 + seed))
    loaded = TFIDFCrossEntropyLoss(num_batches=3)
    loaded.load_state_dict(never_saved.state_dict())
    for seed in range(5, 9):
        logits, labels = random_batch(seed)
        assert torch.equal(loaded(logits, labels), never_saved(logits, labels))


def test_one_loss_call_is_one_update_of_the_window():
    reference, loss_function = ReferenceTFIDF(2), TFIDFCrossEntropyLoss(num_batches=2)
    for seed in range(3):
        logits, labels = random_batch(seed)
        loss_function(list(logits.chunk(8, dim=1)), labels)
        reference(labels.tolist())
    labels = random_batch(3)[1]
    weights = loss_function.weighting.eval()(labels)
    assert_weights_equal_reference(weights, reference(labels.tolist(), training=False))


# ---- terms


@pytest.mark.parametrize("num_chunks", [None, 8])
def test_terms_hold_the_unweighted_cross_entropy_without_gradient(num_chunks):
    logits, labels = random_batch(19)
    logits.requires_grad_()
    given = logits if num_chunks is None else list(logits.chunk(num_chunks, dim=1))
    terms = TFIDFCrossEntropyLoss().terms(given, labels)
    assert not terms.cross_entropy.requires_grad
    # Another order of summation than that of F.cross_entropy: 2 ulp.
    expected = fp32_cross_entropy(logits, labels).detach()
    torch.testing.assert_close(terms.cross_entropy, expected, rtol=2 * EPS, atol=0.0)


def test_terms_hold_the_weights_and_the_loss():
    logits, labels = random_batch(20)
    terms = TFIDFCrossEntropyLoss(num_batches=4).terms(logits, labels)
    assert torch.equal(terms.weights, TFIDFWeighting(num_batches=4)(labels, vocab_size=50))
    assert torch.equal(terms.loss, TFIDFCrossEntropyLoss(num_batches=4)(logits, labels))
    assert_weights_equal_reference(terms.weights, ReferenceTFIDF(4)(labels.tolist()))


def test_the_terms_of_a_batch_without_a_valid_token_are_0():
    logits, labels = random_batch(21)
    terms = TFIDFCrossEntropyLoss().terms(logits, torch.full_like(labels, IGNORED))
    assert terms.loss.item() == terms.cross_entropy.item() == 0.0
    assert not terms.weights.any()


# ---- arguments


@pytest.mark.parametrize("loss_class", LOSSES)
def test_flat_labels_are_an_error_that_names_the_class_for_the_stock_recipes(loss_class):
    logits, labels = random_batch(22)
    with pytest.raises(ValueError, match=r"tfidf_tune\.loss\.stock\.CEWithChunkedOutputLoss"):
        loss_class()(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("loss_class", [*LOSSES, partial(WeightedCrossEntropyLoss, FocalWeighting())])
def test_labels_that_are_no_signed_integers_are_an_error_whatever_the_loss_is_given(loss_class):
    """The message is that of the weightings; the functions that a loss is made of give it too."""
    logits, head = torch.zeros(2, 3, 5), HeadInput(torch.zeros(2, 3, 4), torch.zeros(5, 4))
    calls = [
        *(partial(loss_class(head=form), head) for form in ("fused", "torch")),
        partial(loss_class(), logits),
        partial(loss_class(), list(logits.chunk(2, dim=1))),
        partial(token_cross_entropy, logits),
        partial(linear_token_cross_entropy, head),
        partial(fused_cross_entropy, head, coefficients=torch.ones(2, 3)),
        partial(token_predictions, [logits]),
    ]
    for call, dtype in product(calls, NO_LABEL_TYPES):
        with pytest.raises(ValueError, match=rf"^labels are {dtype}, expected signed integers: .* labels\.long\(\)$"):
            call(labels=torch.ones(2, 3).to(dtype))


@pytest.mark.parametrize("num_chunks", [None, 8])
@pytest.mark.parametrize("length", [20, 22])
def test_labels_of_another_length_than_the_logits_are_an_error_that_leaves_the_window(length, num_chunks):
    logits, _ = random_batch(23, length=21)
    _, labels = random_batch(23, length=length)
    loss_function = TFIDFCrossEntropyLoss()
    before = state_copy(loss_function)
    given = logits if num_chunks is None else list(logits.chunk(num_chunks, dim=1))
    with pytest.raises(ValueError, match=rf"21.*{length}"):
        loss_function(given, labels)
    assert_same_state(loss_function, before)


def test_labels_of_another_number_of_rows_than_the_logits_are_an_error():
    logits, _ = random_batch(24, rows=2)
    _, labels = random_batch(24, rows=3)
    loss = TFIDFCrossEntropyLoss()

    with pytest.raises(ValueError, match=r"logits cover 2 rows of \d+ positions, labels have shape \(3, "):
        loss(logits, labels)

    assert loss.weighting.window.num_documents == 0


@pytest.mark.parametrize("loss_class", [CrossEntropyLoss, TFIDFCrossEntropyLoss])
def test_an_id_outside_the_vocabulary_of_the_logits_is_an_error_that_names_it(loss_class):
    logits, labels = random_batch(25, vocab_size=50)
    labels[0, 0] = 50
    with pytest.raises(ValueError, match=r"\b50\b"):
        loss_class()(logits, labels)


def test_less_than_one_chunk_is_an_error():
    with pytest.raises(ValueError, match="num_output_chunks"):
        TFIDFCrossEntropyLoss(num_output_chunks=0)


def test_the_logits_may_be_larger_than_the_vocabulary_of_the_batches_before():
    generator = torch.Generator().manual_seed(26)
    reference, loss_function = ReferenceTFIDF(3), TFIDFCrossEntropyLoss(num_batches=3)
    for vocab_size in (20, 70, 20, 300):
        _, labels = random_batch(vocab_size, vocab_size=vocab_size)
        logits = random_logits(generator, *labels.shape, vocab_size)
        expected, _ = reference_loss(logits, labels, reference(labels.tolist()))
        assert_loss_equals_reference(loss_function(logits, labels), expected)
