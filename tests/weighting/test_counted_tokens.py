"""TF-IDF that counts all tokens of a sequence, masked prompts and first token included, padding
not.
"""

from typing import NamedTuple

import pytest
import torch
from helpers.docs_snippets import snippet
from helpers.fakes.label_batches import (
    CalledWeighting,
    assert_weights_equal_reference,
    assert_window_equals_reference,
    capped_rtol,
    random_labels,
)
from helpers.references.tfidf import IGNORED, ReferenceTFIDF

from tfidf_tune.weighting import TFIDFWeighting, TokenBatch, shift_labels, shift_tokens

VOCAB_SIZE = 40


class Rows(NamedTuple):
    """Rows before any shift: tokens, -100 in place of padding; the document of each token; where
    labels are masked.
    """

    tokens: torch.Tensor
    documents: torch.Tensor
    masked: torch.Tensor

    @property
    def labels(self):
        starts = torch.ones_like(self.masked)
        starts[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        return shift_labels(self.tokens.masked_fill(self.masked | starts, IGNORED))

    def batch(self, *, packed, vocab_size=VOCAB_SIZE):
        documents = shift_tokens(self.documents) if packed else None
        return TokenBatch(self.labels, documents, shift_tokens(self.tokens), vocab_size)

    def of_reference(self, reference, training=True):
        """The reference counts the tokens where they are, in documents that are not shifted."""
        documents = self.documents.roll(-1, dims=1).tolist()
        counted = (self.tokens.tolist(), self.documents.tolist())
        return reference(self.labels.tolist(), documents, training, counted)


def random_rows(generator, *, packed, rows=3, length=30):
    """Most documents begin with a masked prompt, rows end with padding; now and then a row is all
    prompt or padding.
    """
    tokens = random_labels(generator, rows, length, VOCAB_SIZE, ignored=0.0)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
    tokens[torch.arange(length) >= lengths[:, None]] = IGNORED
    starts = torch.rand(rows, length, generator=generator) < 0.1 * packed
    documents = starts.cumsum(1)
    place = torch.arange(length) - torch.where(starts, torch.arange(length), 0).cummax(1).values
    masked = place < torch.randint(0, 6 if packed else length, (rows, 1), generator=generator)
    masked[0] = torch.rand((), generator=generator) < 0.3
    if rows > 1 and torch.rand((), generator=generator) < 0.3:
        tokens[-1] = IGNORED
    return Rows(tokens, documents, masked)


def stream(seed, *, packed, num_batches=10):
    generator = torch.Generator().manual_seed(seed)
    for number in range(num_batches):
        rows = random_rows(
            generator, packed=packed, rows=1 + number % 4, length=8 + 5 * (number % 5)
        )
        if number == 4:  # no label at all
            rows.masked.fill_(True)
        yield rows


@pytest.mark.parametrize(
    ("tf", "cap", "packed", "vocab_size"),
    [("count", None, False, VOCAB_SIZE), ("log", 1.3, True, None)],
)
def test_weights_and_window_equal_the_reference(tf, cap, packed, vocab_size):
    weighting = CalledWeighting(num_batches=3, tf=tf, max_weight=cap, counted="tokens")
    reference = ReferenceTFIDF(3, tf, cap)
    of_labels = ReferenceTFIDF(3, tf, cap)
    differ = 0
    by_default = CalledWeighting(num_batches=3, tf=tf, max_weight=cap)
    for number, rows in enumerate(stream(1, packed=packed)):
        training = number % 4 != 3
        expected = rows.of_reference(reference, training)
        weights = weighting(rows.batch(packed=packed, vocab_size=vocab_size), training=training)
        assert weights.dtype == torch.float32
        assert_weights_equal_reference(weights, expected, capped_rtol(rows.labels, expected, cap))
        assert_window_equals_reference(weighting.window, reference)
        # By default masked prompts do not count, although they are passed.
        other = of_labels(rows.labels.tolist(), rows.documents.roll(-1, dims=1).tolist(), training)
        weights = by_default(rows.batch(packed=packed, vocab_size=vocab_size), training=training)
        assert_weights_equal_reference(weights, other, capped_rtol(rows.labels, other, cap))
        differ += expected != other
    assert differ > 5, "prompts must matter"


def test_the_loop_of_the_documentation_has_the_weights_of_the_reference():
    rows = random_rows(torch.Generator().manual_seed(8), packed=False)
    weighting = TFIDFWeighting(counted="tokens")
    given = {
        "input_ids": rows.tokens.masked_fill(rows.tokens == IGNORED, 5),  # a token of the text too
        "attention_mask": rows.tokens != IGNORED,
        "labels": rows.tokens.masked_fill(rows.masked, IGNORED),
        "logits": None,
        "loss": lambda logits, batch: given.update(weights=weighting(batch)),
    }
    exec(snippet("objective.md", "TF-IDF weights", number=1), given)
    assert_weights_equal_reference(given["weights"], rows.of_reference(ReferenceTFIDF()))


# ---- bad input


LABELS = torch.tensor([[IGNORED, 3, 4, IGNORED]])
TOKENS = torch.tensor([[2, 3, 4, 1]])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (None, "all_tokens"),
        (TOKENS[:, :3], r"tokens has shape \(1, 3\)"),
        (TOKENS.float(), "all_tokens are torch.float32"),
        (TOKENS.roll(1, dims=1), "2 labels are not the tokens at their positions"),
        (TOKENS.masked_fill(TOKENS == 1, 10), "tokens contain the id 10"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_and_leave_the_window(tokens, message):
    weighting = TFIDFWeighting(counted="tokens")
    with pytest.raises(ValueError, match=message):
        weighting(LABELS, all_tokens=tokens, vocab_size=10)
    assert int(weighting.window.num_updates) == 0


def test_on_a_gpu_a_label_that_is_not_the_token_at_its_position_gets_nan():
    weights = CalledWeighting(checked=False, counted="tokens")(
        LABELS, all_tokens=torch.tensor([[2, 3, 5, 1]]), vocab_size=10
    )
    assert weights.isnan().tolist() == [[False, False, True, False]]
