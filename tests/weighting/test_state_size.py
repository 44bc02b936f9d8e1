"""What a weighting says of the size of its state is what its buffers take once it is in use."""

import pytest
import torch
from ways import going

from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    MiLeWeighting,
    PowerLawWeighting,
    ProductWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    TokenDropWeighting,
    UniformWeighting,
)

ROWS, LENGTH, VOCAB_SIZE = 3, 40, 97
MADE = {
    "uniform": UniformWeighting,
    "tfidf": lambda: TFIDFWeighting(num_batches=5),
    "goldfish": GoldfishWeighting,
    "token drop": TokenDropWeighting,
    "focal": FocalWeighting,
    "mile": MiLeWeighting,
    "power law": PowerLawWeighting,
    "repetition": lambda: RepetitionWeighting(num_batches=7),
    "repetition, its own table": lambda: RepetitionWeighting(num_batches=7, num_buckets=1000),
    "product": lambda: ProductWeighting(TFIDFWeighting(num_batches=5), RepetitionWeighting(num_batches=7)),
}


@pytest.mark.parametrize(("name", "way"), [*((name, "host") for name in MADE), ("product", "device")])
def test_the_state_is_as_large_as_was_told_before_the_first_batch(name, way):
    weighting = MADE[name]()
    told = weighting.num_state_bytes(ROWS, LENGTH, vocab_size=VOCAB_SIZE)
    if not weighting.needs_predictions:
        labels = torch.randint(VOCAB_SIZE, (ROWS, LENGTH))
        with going(way):
            for _ in range(3):
                weighting(labels, vocab_size=VOCAB_SIZE)
    assert told == sum(buffer.nbytes for buffer in weighting.buffers())
    assert told == weighting.num_state_bytes(ROWS, LENGTH, vocab_size=VOCAB_SIZE)
    assert weighting.num_state_bytes(1, 1, vocab_size=1) == told  # nothing shrinks
    assert (told > 16) == ("tfidf" in name or "power" in name or "repetition" in name or name == "product")


@pytest.mark.parametrize("kind", [TFIDFWeighting, RepetitionWeighting])
def test_a_shared_window_holds_the_tokens_of_all_ranks(kind):
    """That of four ranks is that of one process with four times the rows."""
    size = {"vocab_size": VOCAB_SIZE}
    assert kind(sync=True).num_state_bytes(2, LENGTH, num_ranks=4, **size) == kind().num_state_bytes(8, LENGTH, **size)
    assert kind().num_state_bytes(2, LENGTH, num_ranks=4, **size) == kind().num_state_bytes(2, LENGTH, **size)
    product = ProductWeighting(kind(sync=True), kind())
    parts = kind().num_state_bytes(8, LENGTH, **size) + kind().num_state_bytes(2, LENGTH, **size)
    assert product.num_state_bytes(2, LENGTH, num_ranks=4, **size) == parts
