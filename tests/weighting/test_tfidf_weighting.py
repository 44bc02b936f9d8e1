"""TF-IDF weights against the slow reference, and every convention of the contract, in both ways."""

import inspect
import math
import re

import pytest
import torch
from label_batches import (
    WEIGHT_RTOL,
    assert_streams_agree,
    assert_weights_equal_reference,
    capped_rtol,
    random_labels,
    random_stream,
)
from tfidf_reference import IGNORED, ReferenceTFIDF
from ways import WAYS, going
from window_state import assert_same_state, state_copy

from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting

TF_FORMS = ["count", "log", "binary"]


@pytest.fixture(params=WAYS, autouse=True)
def way(request):
    with going(request.param):
        yield request.param


def window_of(weighting):
    (window,) = (module for module in weighting.modules() if isinstance(module, DocumentWindow))
    return window


# ---- the formula


def test_the_weights_of_a_batch_worked_out_by_hand():
    labels = torch.tensor([[7, 7, 3, IGNORED], [7, 9, 4, 4]])
    # N = 2; df(7) = 2, so idf(7) = 1; df = 1 for the others, so their idf is ln(3/2) + 1.
    rare = math.log(1.5) + 1
    raw = [[2.0, 2.0, rare, 0.0], [1.0, rare, 2 * rare, 2 * rare]]
    mean = (2.0 + 2.0 + rare + 1.0 + rare + 2 * rare + 2 * rare) / 7
    weights = TFIDFWeighting(num_batches=4)(labels)
    assert_weights_equal_reference(weights, [[weight / mean for weight in row] for row in raw])


@pytest.mark.parametrize("tf", TF_FORMS)
@pytest.mark.parametrize(
    ("window", "steps", "max_rows", "max_length", "vocab_size"),
    [(1, 5, 3, 40, 17), (2, 9, 4, 9, 50_304), (5, 13, 3, 200, 300), (16, 40, 4, 24, 128_256), (64, 70, 3, 16, 97)],
)
def test_the_weights_equal_the_reference_on_batches_of_changing_shapes(
    tf, window, steps, max_rows, max_length, vocab_size
):
    stream = random_stream(window, steps, max_rows, max_length, vocab_size)
    assert steps > window, "batches must fall out of the window"
    weighting, reference = TFIDFWeighting(num_batches=window, tf=tf), ReferenceTFIDF(window, tf)
    assert_streams_agree(weighting, reference, stream, vocab_size)


@pytest.mark.parametrize("length", [1, 2, 3, 127, 1024, 4095, 4096])
def test_the_weights_equal_the_reference_at_every_length(length):
    generator = torch.Generator().manual_seed(length)
    stream = [random_labels(generator, 2, length, 32_000) for _ in range(4)]
    assert_streams_agree(TFIDFWeighting(num_batches=2), ReferenceTFIDF(2), stream, 32_000)


def test_the_default_is_the_papers_window_of_16_and_counts():
    stream = random_stream(seed=3, num_batches=20, max_rows=3, max_length=12, vocab_size=30)
    assert_streams_agree(TFIDFWeighting(), ReferenceTFIDF(16, "count"), stream, 30)


def test_the_first_and_the_last_id_of_the_vocabulary_are_counted():
    labels = torch.tensor([[0, 128_255, 128_255], [0, 128_254, 1]])
    weighting, reference = TFIDFWeighting(num_batches=2), ReferenceTFIDF(2)
    assert_streams_agree(weighting, reference, [labels, labels[:, :2], labels[:1]], 128_256)
    found = window_of(weighting).document_frequency(torch.tensor([0, 1, 2, 128_254, 128_255]))
    assert found.tolist() == [3, 0, 0, 1, 2]


def test_the_batch_that_falls_out_of_the_window_no_longer_counts():
    weighting = TFIDFWeighting(num_batches=2, tf="binary")
    weighting(torch.tensor([[1, 2], [1, 2]]))
    weighting(torch.tensor([[1, 3]]))
    weighting(torch.tensor([[1, 3]]))
    window = window_of(weighting)
    assert int(window.num_documents) == 2
    assert window.document_frequency(torch.tensor([1, 2, 3])).tolist() == [2, 0, 2]


def test_n_counts_only_sequences_with_a_valid_token():
    labels = torch.tensor([[1, 2], [1, IGNORED], [IGNORED, IGNORED]])
    weighting = TFIDFWeighting(num_batches=1)
    weights = weighting(labels)
    assert int(window_of(weighting).num_documents) == 2
    # With N = 2: idf(1) = 1 and idf(2) = ln(3/2) + 1. With N = 3 the ratio would be 1.315.
    assert float(weights[0, 1] / weights[0, 0]) == pytest.approx(math.log(1.5) + 1, rel=WEIGHT_RTOL)


def test_term_frequency_is_counted_in_the_sequence_and_not_in_the_batch():
    weights = TFIDFWeighting(num_batches=1)(torch.tensor([[5, 5, 5], [5, 6, 7]]))
    assert float(weights[0, 0] / weights[1, 0]) == pytest.approx(3.0, rel=WEIGHT_RTOL)


# ---- properties of the weights


def test_the_mean_weight_of_the_valid_tokens_is_1():
    stream = random_stream(seed=11, num_batches=12, max_rows=4, max_length=60, vocab_size=200)
    weighting = TFIDFWeighting(num_batches=4)
    means = [float(weighting(labels)[labels != IGNORED].double().mean()) for labels in stream]
    assert len(means) == 12
    # Every weight is off by the same mean, and by its own last division: the bound of a single weight.
    assert means == pytest.approx([1.0] * 12, rel=WEIGHT_RTOL)


def test_ignored_positions_weigh_0():
    labels = random_labels(torch.Generator().manual_seed(0), 3, 50, 20, ignored=0.5)
    weights = TFIDFWeighting()(labels)
    assert (labels == IGNORED).any()
    assert torch.equal(weights == 0, labels == IGNORED)


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("right", [0, 5])
@pytest.mark.parametrize("below", [0, 2])
def test_padding_with_ignored_positions_changes_no_weight(left, right, below):
    stream = random_stream(seed=5, num_batches=7, max_rows=3, max_length=20, vocab_size=40)
    plain, padded = TFIDFWeighting(num_batches=3), TFIDFWeighting(num_batches=3)
    for labels in stream:
        wide = torch.nn.functional.pad(labels, (left, right, 0, below), value=IGNORED)
        weights = padded(wide)[: labels.shape[0], left : left + labels.shape[1]]
        torch.testing.assert_close(weights, plain(labels), rtol=2 * WEIGHT_RTOL, atol=0.0)


def test_relabelling_the_tokens_by_a_permutation_changes_no_weight():
    stream = random_stream(seed=6, num_batches=7, max_rows=3, max_length=20, vocab_size=40)
    permutation = torch.arange(40).roll(7)
    plain, relabelled = TFIDFWeighting(num_batches=3), TFIDFWeighting(num_batches=3)
    for labels in stream:
        other = torch.where(labels == IGNORED, IGNORED, permutation[labels.clamp(min=0)])
        assert not torch.equal(other, labels)
        weights = relabelled(other, vocab_size=40)
        torch.testing.assert_close(weights, plain(labels, vocab_size=40), rtol=2 * WEIGHT_RTOL, atol=0.0)


def test_the_order_of_the_rows_does_not_matter():
    stream = random_stream(seed=7, num_batches=7, max_rows=4, max_length=20, vocab_size=40)
    plain, flipped = TFIDFWeighting(num_batches=3), TFIDFWeighting(num_batches=3)
    assert any(labels.shape[0] > 1 for labels in stream)
    for labels in stream:
        weights = flipped(labels.flip(0)).flip(0)
        torch.testing.assert_close(weights, plain(labels), rtol=2 * WEIGHT_RTOL, atol=0.0)


def test_the_order_of_the_tokens_in_a_row_does_not_matter():
    stream = random_stream(seed=8, num_batches=7, max_rows=4, max_length=20, vocab_size=40)
    plain, flipped = TFIDFWeighting(num_batches=3), TFIDFWeighting(num_batches=3)
    for labels in stream:
        weights = flipped(labels.flip(1)).flip(1)
        torch.testing.assert_close(weights, plain(labels), rtol=2 * WEIGHT_RTOL, atol=0.0)


def test_tokens_that_are_all_alike_get_uniform_weights():
    weights = TFIDFWeighting()(torch.arange(12).view(3, 4))
    torch.testing.assert_close(weights, torch.ones(3, 4), rtol=WEIGHT_RTOL, atol=0.0)


def test_the_weights_are_float32_and_carry_no_gradient():
    weights = TFIDFWeighting()(torch.tensor([[1, 2, 2]]))
    assert weights.dtype == torch.float32
    assert not weights.requires_grad


# ---- forms of the labels


def test_int32_labels_give_the_weights_of_int64_labels():
    stream = random_stream(seed=9, num_batches=6, max_rows=3, max_length=30, vocab_size=128_256)
    wide, narrow = TFIDFWeighting(num_batches=2), TFIDFWeighting(num_batches=2)
    for labels in stream:
        weights = narrow(labels.int(), vocab_size=128_256)
        assert torch.equal(weights, wide(labels, vocab_size=128_256))


def test_non_contiguous_labels_give_the_weights_of_contiguous_ones():
    stream = random_stream(seed=10, num_batches=6, max_rows=4, max_length=30, vocab_size=50)
    plain, strided = TFIDFWeighting(num_batches=2), TFIDFWeighting(num_batches=2)
    for labels in stream:
        every_second = labels.repeat_interleave(2, dim=1)[:, ::2]
        transposed = labels.t().contiguous().t()
        assert not every_second.is_contiguous()
        expected = plain(labels)
        before = state_copy(strided)
        assert torch.equal(strided(every_second), expected)
        strided.load_state_dict(before)
        assert torch.equal(strided(transposed), expected)


def test_the_window_does_not_share_memory_with_the_labels():
    labels = torch.tensor([[1, 2, 2, 4]])
    weighting = TFIDFWeighting(num_batches=2)
    weighting(labels)
    before = state_copy(weighting)
    labels.fill_(9)
    assert_same_state(weighting, before)


def test_the_labels_are_left_as_they_are():
    labels = random_labels(torch.Generator().manual_seed(1), 2, 30, 12)
    copy = labels.clone()
    TFIDFWeighting()(labels)
    assert torch.equal(labels, copy)


# ---- the vocabulary


def test_the_constructor_knows_no_vocabulary_size():
    assert not [name for name in inspect.signature(TFIDFWeighting).parameters if "vocab" in name]


def test_a_growing_vocabulary_keeps_what_was_counted():
    stream = [
        torch.tensor([[0, 1, 1]]),
        torch.tensor([[1, 900, 2], [0, 900, IGNORED]]),
        torch.tensor([[1, 50_000]]),
        torch.tensor([[1, 900, 0, 50_000]]),
    ]
    assert_streams_agree(TFIDFWeighting(num_batches=3), ReferenceTFIDF(3), stream)


def test_a_vocabulary_that_is_smaller_in_a_later_batch_keeps_what_was_counted():
    weighting, reference = TFIDFWeighting(num_batches=2), ReferenceTFIDF(2)
    batches = [(torch.tensor([[3, 99]]), 100), (torch.tensor([[3, 4]]), 5), (torch.tensor([[3, 99, 99, 4]]), 100)]
    for labels, vocab_size in batches:
        weights = weighting(labels, vocab_size=vocab_size)
        assert_weights_equal_reference(weights, reference(labels.tolist()))


def test_the_vocabulary_size_does_not_change_the_weights():
    stream = random_stream(seed=12, num_batches=6, max_rows=3, max_length=30, vocab_size=50)
    unknown, exact, large = (TFIDFWeighting(num_batches=2) for _ in range(3))
    for labels in stream:
        expected = unknown(labels)
        assert torch.equal(exact(labels, vocab_size=50), expected)
        assert torch.equal(large(labels, vocab_size=5000), expected)


# ---- evaluation, empty batches


@pytest.mark.parametrize("tf", TF_FORMS)
def test_eval_reads_the_window_without_adding_the_batch(tf):
    stream = random_stream(seed=13, num_batches=14, max_rows=3, max_length=25, vocab_size=60)
    weighting, reference = TFIDFWeighting(num_batches=4, tf=tf), ReferenceTFIDF(4, tf)
    for i, labels in enumerate(stream):
        training = i % 2 == 0
        weights = weighting.train(training)(labels, vocab_size=60)
        assert_weights_equal_reference(weights, reference(labels.tolist(), training=training))


def test_eval_leaves_the_state_bitwise_as_it_was():
    stream = random_stream(seed=14, num_batches=4, max_rows=3, max_length=25, vocab_size=60)
    weighting = TFIDFWeighting(num_batches=3)
    for labels in stream:
        weighting(labels)
    before = state_copy(weighting)
    weighting.eval()
    # Wider than anything before and with ids beyond all that were seen.
    weighting(torch.arange(300).view(2, 150), vocab_size=1000)
    weighting(torch.tensor([[5000]]))
    assert_same_state(weighting, before)


def test_eval_on_an_empty_window_weighs_by_term_frequency_alone():
    weights = TFIDFWeighting().eval()(torch.tensor([[4, 4, 8, IGNORED]]))
    torch.testing.assert_close(weights, torch.tensor([[2, 2, 1, 0]]) * 3 / 5, rtol=WEIGHT_RTOL, atol=0.0)


def test_eval_gives_ids_that_the_window_has_not_seen_a_document_frequency_of_0():
    weighting = TFIDFWeighting(num_batches=2)
    weighting(torch.tensor([[1, 2], [1, 3]]), vocab_size=4)
    weights = weighting.eval()(torch.tensor([[1, 900_000]]))
    # N = 2, df(1) = 2 and df(900000) = 0.
    assert float(weights[0, 1] / weights[0, 0]) == pytest.approx(math.log(3) + 1, rel=WEIGHT_RTOL)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("seen", [0, 1, 3])
def test_a_batch_without_a_valid_token_changes_nothing_and_weighs_0(training, seen):
    weighting = TFIDFWeighting(num_batches=2)
    for labels in random_stream(seed=15, num_batches=seen, max_rows=2, max_length=9, vocab_size=20):
        weighting(labels, vocab_size=20)
    before = state_copy(weighting)
    weights = weighting.train(training)(torch.full((2, 5), IGNORED), vocab_size=20)
    assert torch.equal(weights, torch.zeros(2, 5))
    if seen == 0:
        # The tables may have been laid out, but they hold nothing.
        assert int(window_of(weighting).num_documents) == 0
    else:
        assert weighting(torch.tensor([[19]]), vocab_size=20).item() == 1.0  # the window works on
        weighting.load_state_dict(before)


def test_the_stream_goes_on_after_a_batch_without_a_valid_token():
    stream = random_stream(seed=16, num_batches=9, max_rows=3, max_length=15, vocab_size=30)
    empty = torch.full((2, 40), IGNORED)
    with_empty = [empty, *stream[:2], empty, *stream[2:6], empty, empty, *stream[6:]]
    assert_streams_agree(TFIDFWeighting(num_batches=3), ReferenceTFIDF(3), with_empty)


def test_a_batch_without_a_valid_token_takes_no_place_in_the_window():
    weighting = TFIDFWeighting(num_batches=2)
    weighting(torch.tensor([[1, 2]]))
    weighting(torch.tensor([[1, 3]]))
    before = state_copy(weighting)
    weighting(torch.full((1, 2), IGNORED))
    assert_same_state(weighting, before)


# ---- the cap


@pytest.mark.parametrize("tf", TF_FORMS)
@pytest.mark.parametrize("cap", [1.25, 1.6, 2.3, 1000.0])
def test_capped_weights_equal_the_reference(tf, cap):
    stream = random_stream(seed=17, num_batches=10, max_rows=3, max_length=80, vocab_size=60)
    weighting, reference = TFIDFWeighting(num_batches=3, tf=tf, max_weight=cap), ReferenceTFIDF(3, tf, cap)
    for labels in stream:
        expected = reference(labels.tolist())
        assert_weights_equal_reference(weighting(labels), expected, capped_rtol(labels, expected, cap))


@pytest.mark.parametrize("cap", [1.0, 1.1, 1.3, 1.7])
def test_the_cap_is_never_exceeded_and_the_mean_stays_1(cap):
    stream = random_stream(seed=18, num_batches=10, max_rows=3, max_length=80, vocab_size=60)
    weighting = TFIDFWeighting(num_batches=3, max_weight=cap)
    reached = 0
    for labels in stream:
        weights = weighting(labels)[labels != IGNORED]
        assert float(weights.max()) <= torch.tensor(cap).item()  # the cap as fp32 holds it
        reached += int(weights.max() == torch.tensor(cap))
        assert float(weights.double().mean()) == pytest.approx(1.0, rel=WEIGHT_RTOL)
    assert reached > 3, "the cap must bind in some of the batches"


def test_a_cap_of_1_makes_the_weights_uniform():
    stream = random_stream(seed=19, num_batches=6, max_rows=3, max_length=80, vocab_size=60)
    weighting = TFIDFWeighting(num_batches=3, max_weight=1.0)
    for labels in stream:
        assert torch.equal(weighting(labels), (labels != IGNORED).float())


def test_a_cap_that_no_weight_reaches_changes_nothing():
    labels = torch.tensor([[1, 1, 1, 2, 3], [1, 4, 5, 6, 7]])
    free = TFIDFWeighting()(labels)
    capped = TFIDFWeighting(max_weight=100.0)(labels)
    torch.testing.assert_close(capped, free, rtol=2 * WEIGHT_RTOL, atol=0.0)


# ---- several documents in a row


def packed_batch(generator, rows=3, length=40, vocab_size=30, num_documents=4):
    """Rows with interleaved documents, and the same documents in rows of their own, with the place of each token."""
    labels = random_labels(generator, rows, length, vocab_size)
    document_ids = torch.randint(0, num_documents, (rows, length), generator=generator)
    labels[0][document_ids[0] == 1] = IGNORED  # a document without a valid token
    unpacked = torch.full((rows * num_documents, length), IGNORED)
    for row in range(rows):
        for position in range(length):
            unpacked[row * num_documents + document_ids[row, position], position] = labels[row, position]
    return labels, document_ids, unpacked


def packed_again(weights_of_unpacked, document_ids, num_documents=4):
    rows, length = document_ids.shape
    first = num_documents * torch.arange(rows)[:, None]
    return weights_of_unpacked[first + document_ids, torch.arange(length)]


@pytest.mark.parametrize("tf", TF_FORMS)
def test_packed_documents_weigh_as_in_rows_of_their_own(tf):
    generator = torch.Generator().manual_seed(20)
    packed, alone = TFIDFWeighting(num_batches=2, tf=tf), TFIDFWeighting(num_batches=2, tf=tf)
    for _ in range(5):
        labels, document_ids, unpacked = packed_batch(generator)
        weights = packed(labels, document_ids=document_ids)
        expected = packed_again(alone(unpacked), document_ids)
        torch.testing.assert_close(weights, expected, rtol=2 * WEIGHT_RTOL, atol=0.0)


def test_packed_documents_count_as_in_rows_of_their_own():
    generator = torch.Generator().manual_seed(21)
    packed, alone = TFIDFWeighting(num_batches=2), TFIDFWeighting(num_batches=2)
    for _ in range(5):
        labels, document_ids, unpacked = packed_batch(generator)
        packed(labels, document_ids=document_ids)
        alone(unpacked)
    ids = torch.arange(30)
    assert int(window_of(packed).num_documents) == int(window_of(alone).num_documents) > 12
    expected = window_of(alone).document_frequency(ids)
    assert torch.equal(window_of(packed).document_frequency(ids), expected)
    assert int(expected.max()) > 1


def test_packed_documents_equal_the_reference():
    generator = torch.Generator().manual_seed(22)
    weighting, reference = TFIDFWeighting(num_batches=2), ReferenceTFIDF(2)
    for training in [True, True, False, True, True, False]:
        labels, document_ids, _ = packed_batch(generator)
        weights = weighting.train(training)(labels, document_ids=document_ids)
        assert_weights_equal_reference(weights, reference(labels.tolist(), document_ids.tolist(), training))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("labels_dtype", [torch.int32, torch.int64])
def test_document_ids_may_be_any_numbers_that_are_not_negative(dtype, labels_dtype):
    labels, document_ids, _ = packed_batch(torch.Generator().manual_seed(23), vocab_size=128_256)
    names = torch.tensor([2**31 - 1, 0, 123_456, 77])
    expected = TFIDFWeighting()(labels, vocab_size=128_256, document_ids=document_ids)
    weighting = TFIDFWeighting()
    weights = weighting(labels.to(labels_dtype), vocab_size=128_256, document_ids=names[document_ids].to(dtype))
    torch.testing.assert_close(weights, expected, rtol=2 * WEIGHT_RTOL, atol=0.0)


def test_int32_document_ids_do_not_run_over_when_they_meet_the_vocabulary():
    labels = torch.tensor([[5, 5, 7]])
    # 2**16 documents before it, times 2**16 tokens, is 0 in 32 bits.
    far = torch.tensor([[0, 2**16, 0]], dtype=torch.int32)
    weights = TFIDFWeighting()(labels.int(), vocab_size=2**16, document_ids=far)
    expected = TFIDFWeighting()(labels, vocab_size=2**16, document_ids=torch.tensor([[0, 1, 0]]))
    assert torch.equal(weights, expected)


def test_the_document_id_of_an_ignored_position_does_not_matter():
    labels = torch.tensor([[1, 2, 1, IGNORED, IGNORED]])
    plain, odd = TFIDFWeighting(), TFIDFWeighting()
    expected = plain(labels, document_ids=torch.tensor([[0, 0, 1, 1, 1]]))
    weights = odd(labels, document_ids=torch.tensor([[0, 0, 1, 7, 0]]))
    assert torch.equal(weights, expected)
    assert int(window_of(odd).num_documents) == 2


def test_the_same_document_id_in_two_rows_stands_for_two_documents():
    weighting = TFIDFWeighting()
    weighting(torch.tensor([[1, 1], [1, 1]]), document_ids=torch.zeros(2, 2, dtype=torch.int64))
    assert int(window_of(weighting).num_documents) == 2
    assert window_of(weighting).document_frequency(torch.tensor([1])).tolist() == [2]


def test_one_document_in_each_row_is_the_default():
    labels = random_labels(torch.Generator().manual_seed(24), 3, 30, 20)
    weights = TFIDFWeighting()(labels, document_ids=torch.tensor([[5], [0], [5]]).expand(3, 30))
    assert torch.equal(weights, TFIDFWeighting()(labels))


# ---- arguments


@pytest.mark.parametrize("num_batches", [0, -1])
def test_a_window_of_less_than_one_batch_is_an_error(num_batches):
    with pytest.raises(ValueError, match="num_batches"):
        TFIDFWeighting(num_batches=num_batches)


def test_an_unknown_term_frequency_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="sublinear"):
        TFIDFWeighting(tf="sublinear")


@pytest.mark.parametrize("cap", [0.99, 1e39, float("inf"), float("nan"), "3"])
def test_a_cap_that_is_not_a_number_of_its_range_is_an_error(cap):
    with pytest.raises(ValueError, match=rf"max_weight is {re.escape(repr(cap))}: .* from 1 to 1e.09 .*null for none"):
        TFIDFWeighting(max_weight=cap)
