"""The equations of the TF-IDF weights and loss, once more: float64, dictionaries and loops, no
tensors.

Written from the paper and the contract alone, so that it shares no idea with the implementation
that it judges.
"""

import math
from collections import Counter, deque

IGNORED = -100


class ReferenceTFIDF:
    """w = tf * idf / mean(tf * idf), the document frequencies counted anew over the whole window at
    every call.
    """

    def __init__(self, num_batches=16, tf="count", max_weight=None):
        self.tf = tf
        self.max_weight = max_weight
        # One entry for each mini-batch, one set of distinct tokens for each of its documents.
        self.window = deque(maxlen=num_batches)

    def __call__(self, labels, document_ids=None, training=True, counted=None):
        """Take labels as lists of ids, one list for each row; return weights as lists of floats.

        ``counted`` are the tokens that are counted in place of the labels and the document of each,
        as such lists.
        """
        return reference_unit_mean(
            self.raw(labels, document_ids, training, counted), labels, self.max_weight
        )

    def raw(self, labels, document_ids=None, training=True, counted=None):
        """The weights before they are scaled."""
        if document_ids is None:
            document_ids = [[0] * len(row) for row in labels]

        documents = {}
        for row, (tokens, ids) in enumerate(zip(*(counted or (labels, document_ids)), strict=True)):
            for token, document in zip(tokens, ids, strict=True):
                if token != IGNORED:
                    documents.setdefault((row, document), []).append(token)
        if not documents:
            return [[0.0] * len(tokens) for tokens in labels]
        if training:
            self.window.append([set(tokens) for tokens in documents.values()])

        document_frequency = Counter()
        for batch in self.window:
            for distinct in batch:
                document_frequency.update(distinct)
        counts = {key: Counter(tokens) for key, tokens in documents.items()}

        raw = []
        for row, (tokens, ids) in enumerate(zip(labels, document_ids, strict=True)):
            raw.append([])
            for token, document in zip(tokens, ids, strict=True):
                if token == IGNORED:
                    raw[-1].append(0.0)
                    continue
                idf = math.log((1 + self.num_documents) / (1 + document_frequency[token])) + 1
                raw[-1].append(self._term_frequency(counts[row, document][token]) * idf)
        return raw

    @property
    def num_documents(self):
        return sum(len(batch) for batch in self.window)

    def _term_frequency(self, count):
        return {"count": float(count), "log": 1 + math.log(count), "binary": 1.0}[self.tf]


def reference_unit_mean(raw, labels, cap=None):
    """Scale to mean 1 over the valid tokens; with a cap, find the scale c of min(c * w', cap) by
    bisection.
    """
    valid = []
    for weights, tokens in zip(raw, labels, strict=True):
        for weight, token in zip(weights, tokens, strict=True):
            if token != IGNORED:
                valid.append(weight)
    if not valid:
        return raw
    if cap is None:
        scale = len(valid) / math.fsum(valid)
        cap = math.inf
    else:
        # Nothing weighs anything; everything is at the cap, the mean at least 1.
        low = 0.0
        high = cap / min(valid)
        for _ in range(200):
            scale = (low + high) / 2
            mean = math.fsum(min(scale * weight, cap) for weight in valid) / len(valid)
            low, high = (scale, high) if mean < 1 else (low, scale)
    return [[min(scale * weight, cap) for weight in weights] for weights in raw]
