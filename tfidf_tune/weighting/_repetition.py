"""Repetition weights: tokens that were often learned after the same tokens are held back.

Counts are kept by hash in a table of a fixed size. Shapes do not depend on values, so that nothing
waits for a GPU: keys that are not kept are ``NO_TOKEN``.

Shape suffixes: H hashes, C choices of context, B rows, S positions in a row, N positions of all
rows or keys of all positions, L levels of counts.
"""

from itertools import combinations
from math import comb
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfidf_tune._checks import require_bool, require_integer, require_number
from tfidf_tune.weighting._context_hashes import (
    BASE,
    HASH_RANGE,
    LONGEST_CONTEXT,
    descending_powers,
    documents_around,
    hash_skip_grams,
    positions_in_document,
)
from tfidf_tune.weighting.token_weighting import (
    IGNORE_INDEX,
    NO_TOKEN,
    OneThread,
    TokenBatch,
    TokenWeighting,
    differs_from_previous,
)

_SECOND_BASE = 1_299_709
_MOST_CHOICES = 64
# An entry of the table is the fingerprint of a key, 20 bits, followed by its count, 11 bits. An
# example with the default settings, 2**24 buckets and a sample of 8:
#
#   first hash      123,456,789   below 2**32 / 8, so that the key is kept
#   bucket            6,016,277   123,456,789 % 2**24
#   second hash     987,654,321
#   fingerprint         944,305   its lowest 20 bits
#   entry       944,305 << 11 | 3   the key was in 3 documents
#
# Another key of the same bucket in 2 documents lowers the count to 3 - 2 = 1; in 1 further document
# it takes the bucket, because no more than 1 is left, and begins with a count of 1.
_COUNT_BITS = 11
_LARGEST_COUNT = 2**_COUNT_BITS - 1
_PRINT_BITS = 31 - _COUNT_BITS
_PRINT_MASK = 2**_PRINT_BITS - 1
_LEVELS = sorted({0, 1, *(2 << e for e in range(10)), *(3 << e for e in range(9))})
_SHARE_BITS = 40


class RepetitionWeighting(TokenWeighting):
    r"""Weights that fall with the number of documents that have held the surroundings of a token
    before.

    .. math::
        c_i = \max_S n(x_{i-S}, x_i), \qquad
        f_i = Q_q(c_j : |j - i| \le \mathrm{span} / 2), \qquad
        w_i = \min\left(1, \frac{e}{1 + f_i}\right)^{\alpha}

    where S is any choice of k of the last h tokens, which keep their places, and :math:`n` the
    number of earlier documents that hold these tokens and :math:`x_i` after them. With k = h - 1 a
    copy is found although some of its tokens were changed. :math:`f_i` is the upper q-quantile of
    the counts around token i in its document. It distinguishes copies, where almost all tokens are
    repeated, from common phrases, where few are: text without copies keeps its full weight, and
    changed tokens within a copy lose theirs too. e is the number of exposures: so many documents
    with the same text keep their full weight. With e = 1 and :math:`\alpha = 2` a passage counts
    1 + 1/4 + 1/9 + ..., about 1.7 times in 1,000 copies, with e = 4 about 8.4 times. Not from a
    paper: research/results/evidence.md says how it was chosen, docs/results.md measures it.

    Weights are not scaled to mean 1: repeated text loses weight, and nothing gains any. Documents
    of one mini-batch do not count for each other; a row is a document, unless document ids are
    given. Further epochs are exempt: where ``first_pass`` of :class:`TokenBatch` is False, every
    document was counted before, so that :math:`\max(c_j - 1, 0)` takes the place of :math:`c_j`,
    and nothing more is counted. In ``.eval()`` mode nothing is counted either.

    - Only one key, a hash of S, its tokens and :math:`x_i`, in ``sample`` is counted and looked up.
      The hash decides, so that copies have the same ones. A count is known at positions with such a
      key and at least h labels before them in their document. Without any in the span f is 0.
    - Short answers are often repeated legitimately. Where fewer than ``min_length`` labels follow
      each other in a document, such as in an answer after a masked prompt, f is 0.
    - f is rounded down to one of the levels 0, 1, 2, 3, 4, 6, 8, 12, ..., 1024: the largest that at
      least a share of 1 - q of the known counts in the span reach, and at least one of them. With
      span = 1 f is the count itself.
    - The table holds one key for each bucket, with a fingerprint that tells it from the others, and
      its count, up to 2,047. Another key of the same bucket takes 1 off the count for each document
      that holds it, and takes the bucket when nothing would be left (as in the majority vote of
      Boyer and Moore, 1981). A key that was counted once thus stays for num_buckets * sample / C(h,
      k) tokens of new text on average, by default 27 million, one that was counted c times for c
      times as long. Of several keys of a mini-batch in one bucket only one is counted.

    The state is the table, 4 bytes for each bucket, whatever the length of the run. With ``sync``
    the documents of all ranks are counted. A weighting is not thread-safe, see
    :class:`TFIDFWeighting`.

    Args:
        h (int): tokens of context, 1 to 1024. Default: 5.
        k (int | None): of them, those that have to be the same, 1 to h, so that C(h, k) is at most
            64. Default: 4. None: h, plain contexts.
        alpha (float): exponent, above 0, up to 4. Default: 2.0.
        exposures (float): e, how many documents with the same text keep their full weight, 1 to
            2,047. Default: 1.0.
        span (int): odd number of tokens whose counts are pooled, 1 (not pooled) to 4095. Default:
            65.
        quantile (float): q, 0 to 1. Default: 0.75.
        min_length (int): number of labels from which on repetition counts, 1 to 1,000,000. Default:
            50, the length of continuations in studies of extraction (Carlini et al. 2022,
            https://arxiv.org/abs/2202.07646).
        sample (int): one key in so many is counted, 1 to 64. Default: 8.
        num_buckets (int): length of the table, 1 to 2**30, times ``sample`` at most 2**31. Default:
            2**24.
        sync (bool): whether the documents of all ranks are counted, as in :class:`TFIDFWeighting`.
            Default: False.

    Raises:
        ValueError: If an argument is out of its range.
    """

    table: Tensor
    contexts: Tensor
    powers: Tensor
    levels: Tensor

    def __init__(
        self,
        *,
        h: int = 5,
        k: int | None = 4,
        alpha: float = 2.0,
        exposures: float = 1.0,
        span: int = 65,
        quantile: float = 0.75,
        min_length: int = 50,
        sample: int = 8,
        num_buckets: int = 2**24,
        sync: bool = False,
    ) -> None:
        super().__init__()
        require_integer(
            "h", h, 1, "a token is looked up with the h tokens before it", LONGEST_CONTEXT
        )
        if k is None:
            k = h
        require_integer(
            "k", k, 1, f"it is how many of the {h} tokens of context have to be the same", h
        )
        if comb(h, k) > _MOST_CHOICES:
            raise ValueError(
                f"h is {h} and k is {k}: the {comb(h, k)} choices of k of h tokens are more than "
                f"{_MOST_CHOICES}, set k to h - 1 or h, or a smaller h"
            )
        # Counts are below 2 ** 11, and (2 ** 11) ** -4 is a float32.
        require_number(
            "alpha", alpha, 0, 4, "weights fall by this power of the count", positive=True
        )
        require_number(
            "exposures",
            exposures,
            1,
            _LARGEST_COUNT,
            "so many documents with the same text keep their full weight",
        )
        require_integer("span", span, 1, "counts of so many tokens are pooled", 4095)
        if span % 2 == 0:
            raise ValueError(f"span is {span}: the token is in its middle, set it to an odd number")
        require_number("quantile", quantile, 0, 1, "it is that of the counts in the span")
        require_integer(
            "min_length", min_length, 1, "repetition counts from so many labels on", 10**6
        )
        require_integer("sample", sample, 1, "one key in so many is counted", 64)
        require_integer(
            "num_buckets", num_buckets, 1, "it is the length of the table of counts", 2**30
        )
        if num_buckets * sample > HASH_RANGE // 2:
            raise ValueError(
                f"num_buckets is {num_buckets} and sample {sample}: keys are hashes of 31 bits, "
                f"set num_buckets to at most {HASH_RANGE // 2 // sample}"
            )
        require_bool("sync", sync)
        self.h = h
        self.k = k
        self.alpha = alpha
        self.exposures = exposures
        self.span = span
        self.quantile = quantile
        self.min_length = min_length
        self.sample = sample
        self.num_buckets = num_buckets
        self.sync = sync
        self.choices = list(combinations(range(1, h + 1), k))
        self.register_buffer("table", torch.zeros(num_buckets, dtype=torch.int32))
        self.register_buffer("contexts", torch.tensor([h, k, sample]))  # of the keys in the table
        powers = descending_powers([BASE, _SECOND_BASE], h + 2)
        self.register_buffer("powers", powers, persistent=False)
        self.register_buffer("levels", torch.tensor(_LEVELS, dtype=torch.int32), persistent=False)
        self._one_thread = OneThread()

    def weigh(self, batch: TokenBatch) -> Tensor:
        """Compute the weights of a mini-batch, at most 1, and, in ``.train()`` mode, count its
        keys.
        """
        counts_once = self.training and batch.first_pass
        # Looked up before they are counted: documents of one mini-batch do not count for each
        # other.
        valid = batch.labels != IGNORE_INDEX
        positions = positions_in_document(valid, batch.document_ids)
        with self._one_thread.locked(counts_once):
            keys = self._keys(batch.labels, valid, positions)
            counts = self._look_up(keys)
            if counts_once:
                self._put_in(keys, batch.document_ids)
        # The document itself is among those that were counted in the first epoch; an unknown count
        # stays unknown.
        if not batch.first_pass:
            counts = torch.where(counts > 0, counts - 1, counts)
        # One count for each position: its own, or the quantile of those around it within its
        # document.
        first, last = documents_around(positions)
        repeats = counts.clamp_min(0) if self.span == 1 else self._pooled(counts, first, last)
        # Short answers are exempt. The last position may be an ignored label that ends a run of
        # labels.
        num_labels = last - first + valid.gather(1, last)
        long_enough = num_labels >= self.min_length
        repeats = repeats * long_enough
        excess = ((1 + repeats.float()) / self.exposures).clamp_min(1)
        return excess.pow(-self.alpha) * valid

    def _keys(self, labels: Tensor, valid: Tensor, positions: Tensor) -> Tensor:
        """Return the keys, buckets followed by fingerprints, int64 ``[c, b, s]``; ``NO_TOKEN``
        where none is kept.
        """
        # The first hash samples the keys and chooses the bucket; the second, independent of it, is
        # the fingerprint.
        hashes_CBS, prints_CBS = hash_skip_grams(labels, self.choices, self.powers).unbind()
        has_context_BS = valid & (positions >= self.h)
        kept_CBS = (hashes_CBS * self.sample < HASH_RANGE) & has_context_BS
        buckets_CBS = hashes_CBS % self.num_buckets
        keys_CBS = (buckets_CBS << _PRINT_BITS) | (prints_CBS & _PRINT_MASK)
        return torch.where(kept_CBS, keys_CBS, NO_TOKEN)

    def _look_up(self, keys_CBS: Tensor) -> Tensor:
        """Return the largest count of each position, int32 ``[b, s]``, and -1 where
        none is known.
        """
        # All keys that are not kept read one bucket, which costs a CPU nothing.
        buckets_CBS = (keys_CBS >> _PRINT_BITS).clamp_min_(0)
        entries_CBS = self.table.index_select(0, buckets_CBS.flatten()).view_as(keys_CBS)
        is_counted_CBS = entries_CBS >> _COUNT_BITS == keys_CBS & _PRINT_MASK
        # A kept key that the bucket does not hold counts 0, no key -1.
        counts_CBS = (entries_CBS & _LARGEST_COUNT).mul_(is_counted_CBS)
        largest_BS: Tensor = counts_CBS.masked_fill_(keys_CBS == NO_TOKEN, -1).amax(0)
        return largest_BS

    def _put_in(self, keys_CBS: Tensor, document_ids_BS: Tensor | None) -> None:
        """Count every key once for each document; without keys do nothing.

        A key of another fingerprint takes the bucket when it is in at least as many documents of
        this batch as the bucket counts, and then begins with its full number of documents.
        """
        # Number the documents of all rows in ascending order. A prompt, whose labels are ignored,
        # does not split one.
        ids_BS = document_ids_BS
        if ids_BS is None:
            ids_BS = torch.zeros_like(keys_CBS[0])
        numbers_N = differs_from_previous(ids_BS).flatten().cumsum(0)
        documents_N = numbers_N[:, None].expand(-1, len(keys_CBS)).flatten()
        # Sort all keys, so that equal keys are neighbours. The sort is stable: of equal keys the
        # positions of each document are neighbours too.
        keys_N, order_N = keys_CBS.permute(1, 2, 0).flatten().sort(stable=True)
        buckets_N = keys_N >> _PRINT_BITS
        prints_N = keys_N & _PRINT_MASK

        # At the last position of each key: the number of documents since its first one.
        is_other_key_N = differs_from_previous(keys_N)
        sorted_documents_N = documents_N.index_select(0, order_N)
        is_other_document_N = differs_from_previous(sorted_documents_N)
        totals_N = (is_other_document_N | is_other_key_N).cumsum(0)
        first_N = torch.where(is_other_key_N, totals_N, 0).cummax(0).values
        num_documents_N = (totals_N - first_N).add_(1).clamp_max_(_LARGEST_COUNT)
        # Of a bucket's keys the last one, which is the largest, is counted.
        is_counted_N = differs_from_previous(buckets_N).roll(-1) & (keys_N != NO_TOKEN)

        # Read the present entries; keys that are not kept read the first bucket, and change
        # nothing.
        buckets_N = buckets_N.clamp_min_(0)
        entries_N = self.table.index_select(0, buckets_N)
        counts_N = entries_N & _LARGEST_COUNT
        # The vote. What the entry becomes: the same key with a higher count, another with a lower
        # count, or this key.
        raised_N = entries_N + torch.minimum(num_documents_N, _LARGEST_COUNT - counts_N)
        taken_over_N = (prints_N << _COUNT_BITS).add_(num_documents_N)
        lowered_N = torch.where(
            counts_N > num_documents_N, entries_N - num_documents_N, taken_over_N
        )
        changed_N = torch.where(entries_N >> _COUNT_BITS == prints_N, raised_N, lowered_N)
        # Added, because every device adds integers in any order with one result.
        change_N = torch.where(is_counted_N, changed_N - entries_N, 0).int()
        self.table.index_add_(0, buckets_N, change_N)

    def _pooled(self, counts_BS: Tensor, first_BS: Tensor, last_BS: Tensor) -> Tensor:
        """Return the upper quantile of the known counts in the span around each position, integer
        ``[b, s]``.
        """
        num_rows, length = counts_BS.shape
        radius = self.span // 2
        # The span of each position, cut where its document begins and ends, as a range of all rows
        # in one line.
        here_S = torch.arange(length, device=counts_BS.device)
        row_B1 = torch.arange(0, num_rows * length, length, device=counts_BS.device)[:, None]
        begin_N = (torch.maximum(here_S - radius, first_BS) + row_B1).flatten()
        end_N = (torch.minimum(here_S + radius, last_BS) + row_B1).flatten() + 1
        # How many counts of the span reach each level, by the difference of two running sums,
        # whatever the span is. Level 0 is reached by all known counts, which are at least 0; the
        # others are -1.
        reaches_LN = counts_BS.flatten() >= self.levels[:, None]
        sums_LN = F.pad(reaches_LN.cumsum(1, dtype=torch.int32), (1, 0))
        begin_LN = begin_N.expand(len(sums_LN), -1)
        end_LN = end_N.expand(len(sums_LN), -1)
        reached_LN = sums_LN.gather(1, end_LN) - sums_LN.gather(1, begin_LN)
        # The quantile is the highest level that enough of them reach. Shares are integers, so that
        # every device rounds the same way.
        share = int((1 - self.quantile) * 2**_SHARE_BITS)
        needed_N = -(-share * reached_LN[0].long() >> _SHARE_BITS)
        level_N = (reached_LN[1:] >= needed_N.clamp_min(1)).sum(0)
        return self.levels.index_select(0, level_N).view_as(counts_BS)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        contexts = state_dict.get(prefix + "contexts")
        table = state_dict.get(prefix + "table")
        if contexts is not None and table is not None:
            saved = [*contexts.tolist(), len(table)]
            settings = [*self.contexts.tolist(), self.num_buckets]
            # Raised before anything is loaded, so that the present state stays intact.
            if saved != settings:
                raise ValueError(
                    f"the saved counts are of h, k, sample, num_buckets = {saved}, not {settings}: "
                    "set these to the former, or start with a new state"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)
