"""The rolling window alone: against sets and a counter, and what it costs."""

import copy
import pickle
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from label_batches import random_stream

from tfidf_tune.weighting import DocumentWindow, TFIDFWeighting

NOTHING = -1


def put(window, documents, vocab_size):
    """Hand over the distinct tokens of each document, with positions in between that count for nothing."""
    tokens = [token for document in documents for token in [*document, NOTHING]]
    window.update(torch.tensor(tokens), torch.tensor(len(documents)), vocab_size=vocab_size)


def random_documents(generator, vocab_size):
    sizes = torch.randint(1, vocab_size // 2, (int(torch.randint(1, 5, (), generator=generator)),), generator=generator)
    return [torch.randperm(vocab_size, generator=generator)[:size].tolist() for size in sizes.tolist()]


@pytest.mark.parametrize("num_batches", [1, 7])
def test_document_frequencies_equal_a_counter_over_the_last_batches(num_batches):
    generator = torch.Generator().manual_seed(num_batches)
    window, kept = DocumentWindow(num_batches), deque(maxlen=num_batches)
    for _ in range(2 * num_batches + 3):
        documents = random_documents(generator, vocab_size=23)
        put(window, documents, 23)
        kept.append(documents)
        counter = Counter(token for batch in kept for document in batch for token in document)
        assert window.document_frequency(torch.arange(23)).tolist() == [counter[i] for i in range(23)]
        assert int(window.num_documents) == sum(len(batch) for batch in kept)


def test_the_window_takes_4_bytes_for_each_of_its_tokens_and_each_entry_of_the_vocabulary():
    num_batches, tokens, vocab_size = 16, 4 * 512, 50_304
    window = DocumentWindow(num_batches)
    for _ in range(3):
        window.update(torch.arange(tokens) % vocab_size, torch.tensor(2), vocab_size=vocab_size)
    size = sum(buffer.numel() * buffer.element_size() for buffer in window.buffers())
    # Beside the two tables a number for each batch of the window, and a few scalars.
    assert size <= 4 * num_batches * tokens + 4 * vocab_size + 8 * num_batches + 64
    assert size >= 4 * num_batches * tokens + 4 * vocab_size, "the tables must be in registered buffers"
    assert set(window.state_dict()) == {name for name, _ in window.named_buffers()}


def test_ever_wider_batches_do_not_copy_the_window_at_every_call():
    window, storages = DocumentWindow(3), set()
    for width in range(1, 101):
        window.update(torch.arange(width), torch.tensor(1), vocab_size=100)
        storages.add((window.entries_KT.shape[1], window.entries_KT.data_ptr()))
    assert len({width for width, _ in storages}) <= 13  # 1.5 to the power of 12 is 130
    assert window.entries_KT.shape[1] <= 150


# ---- threads

LABELS = torch.arange(40).view(2, 20)


def test_an_update_during_another_threads_update_is_refused_and_changes_nothing(monkeypatch):
    weighting, expected = TFIDFWeighting(num_batches=2), TFIDFWeighting(num_batches=2)
    grow, of_the_other = DocumentWindow._grow, []

    def grow_while_another_thread_updates(window, *sizes):
        if window is weighting.window and not of_the_other:
            of_the_other.append(None)
            with ThreadPoolExecutor(1) as thread:
                of_the_other[0] = thread.submit(weighting, LABELS, vocab_size=40).exception()
        grow(window, *sizes)

    monkeypatch.setattr(DocumentWindow, "_grow", grow_while_another_thread_updates)
    for _ in range(2):
        assert torch.equal(weighting(LABELS, vocab_size=40), expected(LABELS, vocab_size=40))

    assert isinstance(of_the_other[0], RuntimeError)
    assert str(of_the_other[0]) == (
        "two threads update one window of token counts at the same time: give each thread its own loss, for example "
        "copy.deepcopy(loss)"
    )
    assert all(torch.equal(buffer, expected.state_dict()[name]) for name, buffer in weighting.state_dict().items())


def test_a_window_used_by_several_threads_stays_consistent():
    weighting = TFIDFWeighting(num_batches=3)
    stream = random_stream(seed=0, num_batches=200, max_rows=8, max_length=64, vocab_size=50)
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(weighting, labels, vocab_size=50) for labels in stream]
        assert {type(error) for future in futures if (error := future.exception())} <= {RuntimeError}

    in_the_ring = torch.bincount(weighting.window.entries_KT.flatten(), minlength=52)
    assert weighting.window.document_frequency(torch.arange(50)).tolist() == in_the_ring[1:51].tolist()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda window: pickle.loads(pickle.dumps(window))])
def test_a_copy_made_during_an_update_is_independent(copied):
    window = DocumentWindow(2)
    put(window, [[0, 1]], 2)
    with window.in_one_thread(True):
        copy_of_window = copied(window)
    put(copy_of_window, [[1]], 2)

    assert copy_of_window.document_frequency(torch.arange(2)).tolist() == [1, 2]
    assert window.document_frequency(torch.arange(2)).tolist() == [1, 1]
