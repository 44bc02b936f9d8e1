"""The predicted size of a weighting's state equals that of its buffers in use."""

import pytest
import torch
from code_paths import code_path

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    UniformWeighting,
)

ROWS, LENGTH, VOCAB_SIZE = 3, 40, 97
MADE = {
    "uniform": UniformWeighting,
    "tfidf": lambda: TFIDFWeighting(num_batches=5),
    "goldfish": GoldfishWeighting,
    "focal": FocalWeighting,
    "mile": MiLeWeighting,
    "repetition": lambda: RepetitionWeighting(num_buckets=1000),
}


@pytest.mark.parametrize(("name", "path"), [*((name, "host") for name in MADE), ("tfidf", "device")])
def test_the_size_predicted_before_the_first_batch_is_that_of_the_buffers(name, path):
    weighting = MADE[name]()
    predicted = weighting.num_state_bytes(ROWS, LENGTH, vocab_size=VOCAB_SIZE)
    if not weighting.needs_predictions:
        labels = torch.randint(VOCAB_SIZE, (ROWS, LENGTH))
        with code_path(path):
            # A window grows to what it needs.
            for length in (LENGTH // 2 if name == "tfidf" else LENGTH, LENGTH, LENGTH):
                weighting(labels[:, :length], vocab_size=VOCAB_SIZE)
    assert predicted == sum(buffer.nbytes for buffer in weighting.buffers())
    assert predicted == weighting.num_state_bytes(ROWS, LENGTH, vocab_size=VOCAB_SIZE)
    assert weighting.num_state_bytes(1, 1, vocab_size=1) == predicted  # nothing shrinks
    assert (predicted > 16) == (name in ("tfidf", "repetition"))


def test_a_shared_window_holds_the_tokens_of_all_ranks():
    """Its size for four ranks is that for one process with four times the rows; a table has a fixed size."""
    kind, table = TFIDFWeighting, RepetitionWeighting(sync=True)
    size = {"vocab_size": VOCAB_SIZE}
    assert kind(sync=True).num_state_bytes(2, LENGTH, num_ranks=4, **size) == kind().num_state_bytes(8, LENGTH, **size)
    assert kind().num_state_bytes(2, LENGTH, num_ranks=4, **size) == kind().num_state_bytes(2, LENGTH, **size)
    assert table.num_state_bytes(2, LENGTH, num_ranks=4, **size) == table.num_state_bytes(2, LENGTH, **size)
