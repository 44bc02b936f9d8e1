"""The weightings beside TF-IDF once more: Python's own integers and floats, loops over tokens, no tensors.

Written from the equations and the contract. The constants of the hash stand here a second time on purpose: another
hash would hide other tokens of a corpus, so that a run could not be repeated.
"""

import math
from collections import Counter, deque

from tfidf_reference import IGNORED, reference_unit_mean

PRIME, BASE, MULTIPLIER, HASH_RANGE = 2**31 - 1, 1_000_003, 0x45D9F3B, 2**32


def reference_mix(number):
    """Two rounds of x ^ (x >> 16) times an odd number, and a last shift, in 32 bits."""
    number %= HASH_RANGE
    for _ in range(2):
        number = (number ^ (number >> 16)) * MULTIPLIER % HASH_RANGE
    return number ^ (number >> 16)


def reference_context_hash(context, length, seed=0):
    """Of the tokens before a position in the order of the text; only the last ``length`` of them count."""
    polynomial = seed * BASE**length
    for distance, token in enumerate(reversed(context[-length:])):
        polynomial += (token + 1) * BASE**distance
    return reference_mix(polynomial % PRIME)


def reference_pair_hash(first, second):
    """Of a hash and a number."""
    return reference_mix((first % PRIME * BASE + second + 1) % PRIME)


def contexts_of(labels, document_ids=None):
    """For each position the labels of its document right before it, as far as none is ignored."""
    contexts = []
    for row, tokens in enumerate(labels):
        contexts.append([])
        for position in range(len(tokens)):
            first = position
            while first > 0 and tokens[first - 1] != IGNORED:
                if document_ids is not None and document_ids[row][first - 1] != document_ids[row][position]:
                    break
                first -= 1
            contexts[-1].append(tokens[first:position])
    return contexts


def reference_goldfish(labels, document_ids=None, *, strategy="hash", k=4, h=13, seed=0, special=()):
    """The weights of the tokens that are kept, as lists of floats."""
    contexts = contexts_of(labels, document_ids)

    def is_kept(token, context):
        if token in special:
            return True
        if strategy == "static":
            return (len(context) + 1) % k != 0
        return len(context) < h or reference_context_hash(context, h, seed) * k >= HASH_RANGE

    kept = [
        [float(token != IGNORED and is_kept(token, context)) for token, context in zip(*row, strict=True)]
        for row in zip(labels, contexts, strict=True)
    ]
    return mean_1(kept, labels)


def reference_token_drop(labels, *, p, seed, num_batches_seen, rank=0, special=()):
    """The weights of the tokens that are kept, as lists of floats."""
    batch = reference_pair_hash(reference_pair_hash(reference_mix(num_batches_seen), seed), rank)
    kept, position = [], 0
    for tokens in labels:
        kept.append([])
        for token in tokens:
            is_dropped = token not in special and reference_pair_hash(batch, position) < p * HASH_RANGE
            kept[-1].append(float(token != IGNORED and not is_dropped))
            position += 1
    return mean_1(kept, labels)


class ReferencePowerLaw:
    """w = (freq + epsilon) ** -alpha / mean, over the labels of all training batches so far, this one included."""

    def __init__(self, alpha=0.5, epsilon=1.0):
        self.alpha = alpha
        self.epsilon = epsilon
        self.counts = Counter()

    def __call__(self, labels, training=True):
        tokens = [token for row in labels for token in row if token != IGNORED]
        if training:
            self.counts.update(tokens)
        raw = [
            [0.0 if token == IGNORED else (self.counts[token] + self.epsilon) ** -self.alpha for token in row]
            for row in labels
        ]
        return mean_1(raw, labels)


def reference_difficulty(kind, gamma, log_probabilities, labels):
    """Weights of ``mile`` or ``focal`` from the log-probabilities of the whole vocabulary, nested lists."""

    def raw_weight(token, of_vocabulary):
        if token == IGNORED:
            return 0.0
        if kind == "focal":
            return (-math.expm1(of_vocabulary[token])) ** gamma
        entropy = -math.fsum(math.exp(value) * value for value in of_vocabulary if value > -math.inf)
        return (1 + entropy) ** gamma

    raw = [
        [raw_weight(*token) for token in zip(*row, strict=True)] for row in zip(labels, log_probabilities, strict=True)
    ]
    return mean_1(raw, labels)


def reference_product(first, second, labels):
    """Of weights as nested lists."""
    raw = [[u * v for u, v in zip(*row, strict=True)] for row in zip(first, second, strict=True)]
    return mean_1(raw, labels)


class ReferenceRepetition:
    """(1 + f) ** -alpha with f counted over n-grams as tuples; hashes and buckets do not occur."""

    def __init__(self, h, alpha=1.0, num_batches=1024):
        self.h = h
        self.alpha = alpha
        self.window = deque(maxlen=num_batches)

    def __call__(self, labels, document_ids=None, training=True):
        seen = sum(self.window, Counter())
        ngrams = [
            [self.ngram(*pair) for pair in zip(*row, strict=True)]
            for row in zip(labels, contexts_of(labels, document_ids), strict=True)
        ]
        counted = Counter(ngram for row in ngrams for ngram in row if ngram is not None)
        if training and counted:
            self.window.append(counted)
        return [
            [0.0 if token == IGNORED else (1 + seen[ngram]) ** -self.alpha for token, ngram in zip(*row, strict=True)]
            for row in zip(labels, ngrams, strict=True)
        ]

    def ngram(self, token, context):
        """None where there is no token, or not context enough."""
        return None if token == IGNORED or len(context) < self.h else (*context[-self.h :], token)


def mean_1(raw, labels):
    """Scaled to mean 1 over the valid tokens; zeros where no token weighs anything."""
    return reference_unit_mean(raw, labels) if any(weight > 0 for row in raw for weight in row) else raw
