"""The weightings beside TF-IDF once more: Python's own integers and floats, loops over tokens, no
tensors.

Written from the equations and the contract. The constants of the hash stand here a second time on
purpose: another hash would hide other tokens of a corpus, so that a run could not be repeated.
"""

import math
from collections import Counter
from fractions import Fraction
from itertools import chain, combinations, groupby
from operator import itemgetter

from helpers.references.tfidf import IGNORED, reference_unit_mean

PRIME = 2**31 - 1
BASE = 1_000_003
SECOND_BASE = 1_299_709
MULTIPLIER = 0x45D9F3B
HASH_RANGE = 2**32


def reference_mix(number):
    """Two rounds of x ^ (x >> 16) times an odd number, and a last shift, in 32 bits."""
    number %= HASH_RANGE
    for _ in range(2):
        number = (number ^ (number >> 16)) * MULTIPLIER % HASH_RANGE
    return number ^ (number >> 16)


def reference_context_hash(context, length, seed=0):
    """Of the tokens before a position in the order of the text; only the last ``length`` of them
    count.
    """
    polynomial = seed * BASE**length
    for distance, token in enumerate(reversed(context[-length:])):
        polynomial += (token + 1) * BASE**distance
    return reference_mix(polynomial % PRIME)


def contexts_of(labels, document_ids=None):
    """For each position the labels of its document right before it, as far as none is ignored."""
    contexts = []
    for row, tokens in enumerate(labels):
        contexts.append([])
        for position in range(len(tokens)):
            first = position
            while first > 0 and tokens[first - 1] != IGNORED:
                if (
                    document_ids is not None
                    and document_ids[row][first - 1] != document_ids[row][position]
                ):
                    break
                first -= 1
            contexts[-1].append(tokens[first:position])
    return contexts


def reference_goldfish(
    labels, document_ids=None, *, strategy="hash", k=4, h=13, seed=0, special=()
):
    """The weights of the tokens that are kept, as lists of floats."""
    contexts = contexts_of(labels, document_ids)

    def is_kept(token, context):
        if token in special:
            return True
        if strategy == "static":
            return (len(context) + 1) % k != 0
        return len(context) < h or reference_context_hash(context, h, seed) * k >= HASH_RANGE

    kept = [
        [
            float(token != IGNORED and is_kept(token, context))
            for token, context in zip(*row, strict=True)
        ]
        for row in zip(labels, contexts, strict=True)
    ]
    return mean_1(kept, labels)


def reference_difficulty(kind, gamma, log_probabilities, labels):
    """Weights of ``mile`` or ``focal`` from the log-probabilities of the whole vocabulary, nested
    lists.
    """

    def raw_weight(token, of_vocabulary):
        if token == IGNORED:
            return 0.0
        if kind == "focal":
            return (-math.expm1(of_vocabulary[token])) ** gamma
        entropy = -math.fsum(
            math.exp(value) * value for value in of_vocabulary if value > -math.inf
        )
        return (1 + entropy) ** gamma

    raw = [
        [raw_weight(*token) for token in zip(*row, strict=True)]
        for row in zip(labels, log_probabilities, strict=True)
    ]
    return mean_1(raw, labels)


class ReferenceRepetition:
    """Fingerprints and counts in a dictionary by bucket, quantiles by sorting."""

    LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

    def __init__(
        self, *, h, k, alpha, span, quantile, sample, num_buckets, min_length=1, exposures=1.0
    ):
        self.min_length = min_length
        self.exposures = exposures
        self.h = h
        self.alpha = alpha
        self.span = span
        self.sample = sample
        self.num_buckets = num_buckets
        self.share = 1 - Fraction(str(quantile))
        self.choices = list(combinations(range(1, h + 1), k))
        self.table = {}
        self.num_taken = 0

    def __call__(self, labels, document_ids=None, training=True, first_pass=True):
        """Weights as lists of floats."""
        contexts = contexts_of(labels, document_ids)
        keys = [
            [self.keys(*pair) for pair in zip(*row, strict=True)]
            for row in zip(labels, contexts, strict=True)
        ]
        counts = [[self.count(of_token, first_pass) for of_token in row] for row in keys]
        if training and first_pass:
            self.put_in(keys, document_ids)
        raw = []
        for row, tokens in enumerate(labels):
            weights = []
            for position, token in enumerate(tokens):
                if token == IGNORED:
                    weights.append(0.0)
                else:
                    repeats = self.repeats(row, position, labels, contexts, counts)
                    share = self.exposures / (1 + repeats)
                    weights.append(min(1.0, share) ** self.alpha)
            raw.append(weights)
        return raw

    def keys(self, token, context):
        """Bucket and fingerprint of the choices that are kept."""
        if token == IGNORED or len(context) < self.h:
            return []
        found = []
        for number, choice in enumerate(self.choices, 1):
            hashed, other = (
                self.hashed(token, context, number, choice, base) for base in (BASE, SECOND_BASE)
            )
            if hashed * self.sample < HASH_RANGE:
                found.append((hashed % self.num_buckets, other % 2**20))
        return found

    def hashed(self, token, context, number, choice, base):
        polynomial = token + 1 + number * base ** (self.h + 1)
        return reference_mix(
            (polynomial + sum((context[-d] + 1) * base**d for d in choice)) % PRIME
        )

    def count(self, keys, first_pass):
        if not keys:
            return None
        counts = []
        for bucket, fingerprint in keys:
            own, count = self.table.get(bucket, (None, 0))
            counts.append(count if own == fingerprint else 0)
        count = max(counts)
        return count if first_pass else max(count - 1, 0)

    def put_in(self, keys, document_ids):
        """The majority vote: another key of a bucket lowers the count of the one that is there, or
        takes its place.
        """
        num_documents = Counter()
        for number, row in enumerate(keys):
            ids = document_ids[number] if document_ids else [0] * len(row)
            for _, document in groupby(zip(ids, row, strict=True), key=itemgetter(0)):
                keys_of_tokens = [of_token for _, of_token in document]
                num_documents.update(set(chain.from_iterable(keys_of_tokens)))
        largest = dict(sorted(num_documents))  # the last of each bucket
        for bucket, fingerprint in largest.items():
            number = num_documents[bucket, fingerprint]
            own, count = self.table.get(bucket, (fingerprint, 0))
            if own == fingerprint:
                self.table[bucket] = own, min(count + number, 2047)
            elif count > number:
                self.table[bucket] = own, count - number
            else:
                self.table[bucket] = fingerprint, number
                self.num_taken += 1

    def repeats(self, row, position, labels, contexts, counts):
        # A document goes from as many tokens back as there is context to where the next context is
        # shorter.
        first = position - len(contexts[row][position])
        last = position
        while last + 1 < len(labels[row]) and len(contexts[row][last + 1]) > 0:
            last += 1
        if sum(token != IGNORED for token in labels[row][first : last + 1]) < self.min_length:
            return 0
        if self.span == 1:
            return counts[row][position] or 0
        reach = self.span // 2
        around = counts[row][max(first, position - reach) : min(last, position + reach) + 1]
        known = sorted((count for count in around if count is not None), reverse=True)
        if not known:
            return 0
        quantile = known[max(math.ceil(self.share * len(known)), 1) - 1]
        return max((level for level in self.LEVELS if level <= quantile), default=0)


def mean_1(raw, labels):
    """Scaled to mean 1 over the valid tokens; zeros where no token weighs anything."""
    if any(weight > 0 for weight in chain.from_iterable(raw)):
        return reference_unit_mean(raw, labels)
    return raw
