"""Can the texts of targets and controls be told apart without the model?

Membership inference compares how likely a model finds targets and controls. If the two differ as
texts (subject, time, source, format), a model that saw neither finds one of them likelier. Blind
baselines of this kind beat published attacks on published sets (Das et al. 2024,
https://arxiv.org/abs/2406.16201). So the same question is put to a classifier that sees the texts
only.
"""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from tfidf_tune.passages import Passage
from tfidf_tune.results.intervals import ALPHA, MIN_UNITS, SEED, clustered_auc

_NUM_FOLDS = 5
_MOST_PASSAGES = 500  # of targets, and of controls; a few seconds
# Every text that is not blank has one. Chinese and Japanese have no spaces: a character is a word.
_WORD_OR_SIGN = r"[\u2e80-\u9fff]|\w+|[^\w\s]"
_RIDGE = 1.0  # the penalty, for rows of length one
_NUM_SHUFFLES = 999


class Blind(NamedTuple):
    """How well a classifier tells targets from controls by their texts alone.

    Attributes:
        auc (float): probability that a target looks more like a target than a control does; 0.5 is
            chance.
        low (float): lower end of its 95 % interval.
        high (float): upper end.
        p_value (float): one-sided, of an AUC so high by chance, from labels that are shuffled.
    """

    auc: float
    low: float
    high: float
    p_value: float

    @property
    def tells_apart(self) -> bool:
        """Whether the texts differ: the interval lies above chance, and so high an AUC is no
        chance.
        """
        return self.low > 0.5 and self.p_value <= ALPHA


class BlindText(NamedTuple):
    """What the classifier is given of a passage.

    Attributes:
        text (str): the passage.
        is_target (bool): whether it is a target.
        document (Hashable): passages with the same value are of one document.
    """

    text: str
    is_target: bool
    document: Hashable


def blind_baseline(texts: Sequence[BlindText]) -> Blind | None:
    """Tell targets from controls by words and characters, in documents that were not learned from.

    Ridge regression on TF-IDF of words, pairs of words and runs of 3 to 5 characters. Five-fold
    cross-validation: each fold is classified by what was learned from the four others. All passages
    of a document are in one fold; otherwise the subject of a document would give them away, which
    says nothing about other documents::

        fold 0    documents 3, 7    classified by what was learned from folds 1, 2, 3 and 4
        fold 1    documents 1, 4    classified by what was learned from folds 0, 2, 3 and 4
        ...

    The bootstrap takes the scores as given. But they were learned, and vary 1.3 to 1.6 times as
    much as its interval says: of random divisions of one pool 8 to 11 % instead of 2.5 % had an
    interval above 0.5. So the classifier also learns from 999 shuffles of the labels, and the AUC
    must be among the highest 5 % of theirs. Ridge regression learns from all shuffles at once.

    Args:
        texts (Sequence[BlindText]): the passages. Of more than 500 of a kind as many are drawn.

    Returns:
        Blind | None: the AUC with the interval of
            :func:`~tfidf_tune.results.intervals.clustered_auc`; None with fewer than 10 targets or
            controls that are not blank.
    """
    chosen = _drawn([text for text in texts if text.text.strip()])
    is_target = np.array([text.is_target for text in chosen], dtype=bool)
    num_targets = int(is_target.sum())
    if min(num_targets, len(chosen) - num_targets) < MIN_UNITS:
        return None
    documents = _numbered(chosen)
    folds = _folds(is_target, documents)
    shuffled = _labels_by_chance(is_target, documents, folds)
    labels = np.column_stack([is_target, shuffled])
    scores = _scores_out_of_fold([text.text for text in chosen], labels, folds)
    aucs = _aucs(scores, labels)
    # The first column has the true labels.
    auc, interval = clustered_auc(
        scores[is_target, 0],
        scores[~is_target, 0],
        documents[is_target],
        documents[~is_target],
    )
    num_as_high = int((aucs[1:] >= aucs[0]).sum())
    p_value = (1 + num_as_high) / (1 + _NUM_SHUFFLES)
    return Blind(auc=auc, low=interval.low, high=interval.high, p_value=p_value)


def blind_texts(samples: pd.DataFrame, passages: Sequence[Passage]) -> list[BlindText]:
    """Return the texts of passages that a model was asked for.

    They are those of the probe file if it has all of these passages. Otherwise they are the longest
    prompt of each passage with its continuation, and each counts as a document of its own.

    Args:
        samples (pandas.DataFrame): a row for each prompt with the columns "passage_id", "kind",
            "prompt" and "sample".
        passages (Sequence[Passage]): the probe file; empty if it is not at hand.
    """
    asked = set(samples["passage_id"])
    known = [passage for passage in passages if passage.id in asked]
    if len(known) == len(asked):
        return _texts_of_passages(known)
    longest: dict[str, BlindText] = {}
    for row in samples.itertuples():
        text = row.prompt + row.sample.reference_text
        shorter = longest.get(row.passage_id)
        if shorter is None or len(text) > len(shorter.text):
            longest[row.passage_id] = BlindText(
                text=text, is_target=row.kind == "target", document=row.passage_id
            )
    return list(longest.values())


def _texts_of_passages(passages: Sequence[Passage]) -> list[BlindText]:
    """Return the texts of a probe file.

    A document is known by its number in the file, of targets and controls alike. A passage without
    one, as a canary or an answer, counts as a document of its own.
    """
    texts = []
    for passage in passages:
        document: Hashable = passage.id
        if passage.document is not None:
            document = (passage.source, passage.document)
        is_target = passage.kind == "target"
        texts.append(BlindText(text=passage.text, is_target=is_target, document=document))
    return texts


def _drawn(texts: Sequence[BlindText]) -> list[BlindText]:
    """Draw as many targets and controls as the classifier takes, by a fixed seed."""
    rng = np.random.default_rng(SEED)
    chosen = []
    for is_target in (True, False):
        of_kind = [text for text in texts if text.is_target == is_target]
        if len(of_kind) > _MOST_PASSAGES:
            numbers = rng.choice(len(of_kind), _MOST_PASSAGES, replace=False)
            of_kind = [of_kind[number] for number in sorted(numbers)]
        chosen += of_kind
    return chosen


def _numbered(texts: Sequence[BlindText]) -> npt.NDArray[np.int64]:
    """Return the number of each passage's document.

    If the targets, or the controls, are of fewer documents than there are folds, nothing could be
    learned about other documents: then each of these passages counts as a document of its own.
    """
    num_documents = {}
    for is_target in (True, False):
        num_documents[is_target] = len({t.document for t in texts if t.is_target == is_target})
    numbers: dict[Hashable, int] = {}
    numbered = []
    for position, text in enumerate(texts):
        document = text.document
        if num_documents[text.is_target] < _NUM_FOLDS:
            document = ("alone", position)
        numbered.append(numbers.setdefault(document, len(numbers)))
    return np.array(numbered)


def _folds(
    is_target: npt.NDArray[np.bool_], documents: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return the fold of each passage: documents as a whole, targets and controls evenly."""
    from sklearn.model_selection import StratifiedGroupKFold

    dealt = StratifiedGroupKFold(n_splits=_NUM_FOLDS, shuffle=True, random_state=SEED)
    folds = np.zeros(len(is_target), dtype=np.int64)
    nothing = np.zeros((len(is_target), 1))  # the texts play no part in the division
    for number, (_, held_out) in enumerate(dealt.split(nothing, is_target, documents)):
        folds[held_out] = number
    return folds


def _labels_by_chance(
    is_target: npt.NDArray[np.bool_],
    documents: npt.NDArray[np.int64],
    folds: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Return labels ``[n, 999]`` that are shuffled within each fold.

    All targets of a document get one label, and so do all of its controls.
    """
    rng = np.random.default_rng(SEED)
    pairs = np.stack([documents, is_target], axis=1)
    _, first, unit_of = np.unique(pairs, axis=0, return_index=True, return_inverse=True)
    labels = np.tile(is_target[first], (_NUM_SHUFFLES, 1))
    for number in range(_NUM_FOLDS):
        (in_fold,) = np.nonzero(folds[first] == number)
        labels[:, in_fold] = rng.permuted(labels[:, in_fold], axis=1)
    return np.asarray(labels[:, unit_of.ravel()].T)


def _scores_out_of_fold(
    texts: Sequence[str], labels: npt.NDArray[np.bool_], folds: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return how much each text looks like a target to a classifier that has not seen its fold,
    ``[n, k]`` for each of k columns of labels.

    Ridge regression in terms of the similarity K of texts, K = X Xᵀ for features X::

        scores of a fold = K[fold, others] (K[others, others] + I)⁻¹ labels[others]

    The factor before the labels is the same for all columns, and is computed once.
    """
    features = _features(texts)
    similarity = (features @ features.T).toarray()
    scores = np.zeros(labels.shape)
    for number in range(_NUM_FOLDS):
        (held_out,) = np.nonzero(folds == number)
        (learned,) = np.nonzero(folds != number)
        if len(held_out) == 0:
            continue
        # Without their mean: a fold with more targets than others must not move its scores.
        values = labels[learned].astype(np.float64)
        values -= values.mean(axis=0)
        penalized = similarity[np.ix_(learned, learned)] + _RIDGE * np.eye(len(learned))
        factor = np.linalg.solve(penalized, similarity[np.ix_(learned, held_out)])
        scores[held_out] = factor.T @ values
    # Equal texts are ties, whatever the order in which products were summed.
    return scores.round(9)


def _aucs(
    scores: npt.NDArray[np.float64], labels: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Return the AUC of each column, from the ranks of its targets."""
    from scipy.stats import rankdata

    ranks = rankdata(scores, axis=0)
    num_targets = labels.sum(axis=0)
    num_controls = len(labels) - num_targets
    wins = (ranks * labels).sum(axis=0) - num_targets * (num_targets + 1) / 2
    return np.asarray(wins / (num_targets * num_controls))


def _features(texts: Sequence[str]) -> Any:
    """Return TF-IDF of words and of runs of characters, a sparse row of length one for each text.

    Document frequencies are those of all folds: they do not know which passages are targets.
    """
    from scipy.sparse import hstack
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.preprocessing import normalize

    words = TfidfVectorizer(
        analyzer="word", token_pattern=_WORD_OR_SIGN, ngram_range=(1, 2), sublinear_tf=True
    )
    # Within words; scripts without spaces are long words. Here capitals count.
    characters = TfidfVectorizer(
        analyzer="char_wb", ngram_range=(3, 5), lowercase=False, sublinear_tf=True
    )
    both = hstack([words.fit_transform(texts), characters.fit_transform(texts)])
    return normalize(both.tocsr())
