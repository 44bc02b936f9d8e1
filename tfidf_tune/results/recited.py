"""How many passages are recited further than unseen text: an exact test that other passages cannot
dilute.
"""

import math
from typing import NamedTuple

import numpy as np
import pandas as pd

from tfidf_tune.results.intervals import ALPHA, binomial_upper_bound, holm


class TierTest(NamedTuple):
    """The test of the targets with about as many copies in the training text.

    Attributes:
        copies (str): how often they occur in the training text: "40", "2 to 3"; "unknown"; "all" of
            all targets.
        num_targets (int): targets in the tier.
        num_above (int): of them, those that are recited further than the threshold.
        expected (float): the number by chance, if targets and controls were exchangeable.
        p_value (float): of so many or more by chance; corrected by Holm's method over all tests.
        noticeable (int | None): the least number above the threshold that the test notices; None
            if it would not notice all of them.
    """

    copies: str
    num_targets: int
    num_above: int
    expected: float
    p_value: float
    noticeable: int | None

    @property
    def is_rejected(self) -> bool:
        """Whether the targets are recited further than unseen text."""
        return self.p_value <= ALPHA

    @property
    def that_occur(self) -> str:
        """How often the passages occur, after their number: " that occur 2 to 3 times"; "" if that
        is unknown, or not the same.
        """
        if self.copies in ("all", "unknown"):
            return ""
        verb = "occurs" if self.num_targets == 1 else "occur"
        times = "once" if self.copies == "1" else f"{self.copies} times"
        return f" that {verb} {times}"


class Recited(NamedTuple):
    """Targets that are recited further than unseen text.

    Attributes:
        threshold (float): LMS in tokens that at most ``num_allowed`` controls exceed.
        num_allowed (int): one in a hundred of the controls, rounded down.
        num_controls (int): passages that were never seen.
        tests (tuple[TierTest, ...]): of all targets first, then of the tiers of copies, if there
            are several.
        number (int): targets above the threshold in the tests that reject; 0 if none does.
        num_hidden (int): targets that are recited to their end, and have too few tokens to go above
            the threshold.
    """

    threshold: float
    num_allowed: int
    num_controls: int
    tests: tuple[TierTest, ...]
    number: int
    num_hidden: int = 0

    @property
    def all(self) -> TierTest:
        """The test of all targets."""
        return self.tests[0]

    @property
    def upper(self) -> float:
        """The one-sided 95 % bound of Clopper and Pearson for the share of such passages above the
        threshold.
        """
        return binomial_upper_bound(self.all.num_above, self.all.num_targets)

    @property
    def tiers(self) -> tuple[TierTest, ...]:
        """The tests of tiers; that of all targets if they are one tier."""
        return self.tests[1:] or self.tests


def recited_further(targets: pd.DataFrame, controls: pd.Series) -> Recited | None:
    """Count the targets that are recited further than unseen text; None without targets or
    controls.

    With n targets, m controls and ``c = floor(m / 100)``, the threshold t is the LMS that at most c
    controls exceed, as of :func:`tfidf_tune.probe.true_positive_rate`; ties count against
    recitation. If targets and controls are exchangeable, the K targets above t and the c controls
    above it are drawn from all n + m passages, and::

        P(K or more targets above t)
            = P(at most c controls among the K + c passages with the highest LMS)
            = hypergeom.cdf(c, n + m, m, K + c)

    For example, of 24 targets 3 are above all of 24 controls: n = m = 24, c = 0 and K = 3. By
    chance, the passage with the highest LMS of all 48 is a target with probability 24/48, the
    second of the other 47 then with 23/47 and the third with 22/46, so that
    P = 24/48 · 23/47 · 22/46 = 0.117, which may be chance; with 5 above all controls, P = 0.025.

    The test is made for all targets, and for each tier of copies (1, 2 to 3, 4 to 7, ..., unknown),
    so that 23 passages with many copies are found among 77 others. All p-values are corrected
    together. Targets with no more than t tokens to recite cannot be above t and are in no test.

    Args:
        targets (pandas.DataFrame): a row for each passage with the columns "lms", its longest over
            all prompts, "repeats", NaN or 0 if unknown, and "length", the most tokens that its
            answers were compared with.
        controls (pandas.Series): the longest LMS of each control.
    """
    num_controls = len(controls)
    if targets.empty or not num_controls:
        return None
    # The threshold: the highest LMS of the controls, but for one in a hundred of them.
    num_allowed = num_controls // 100
    ascending = np.sort(controls.to_numpy(float))
    threshold = float(ascending[num_controls - 1 - num_allowed])
    # Passages without enough tokens to go above it are in no test.
    is_short = targets["length"] <= threshold
    is_to_its_end = targets["lms"] >= targets["length"]
    num_hidden = int((is_short & is_to_its_end).sum())
    targets = targets[~is_short]
    # All targets, and if there are several tiers of copies, each of them.
    groups = [("all", targets)]
    tiers = tiers_of_copies(targets)
    if len(tiers) > 1:
        groups += tiers
    # A p-value for each, corrected together.
    nums_above = []
    p_values = []
    for _, group in groups:
        num_above = int((group["lms"] > threshold).sum())
        nums_above.append(num_above)
        p_values.append(chance_of(num_above, len(group), num_controls, num_allowed))
    tests = []
    rejected = [targets.iloc[:0]]
    for (copies, group), num_above, p_value in zip(groups, nums_above, holm(p_values), strict=True):
        num_targets = len(group)
        test = TierTest(
            copies=copies,
            num_targets=num_targets,
            num_above=num_above,
            expected=num_targets * (num_allowed + 1) / (num_controls + 1),
            p_value=float(p_value),
            noticeable=least_noticeable(num_targets, num_controls, len(groups)),
        )
        tests.append(test)
        if test.is_rejected:
            rejected.append(group)
    # A passage may be in two tests that reject, of all targets and of its tier: it counts once.
    is_above = pd.concat(rejected)["lms"] > threshold
    number = int(is_above.groupby(level=0).any().sum())
    return Recited(threshold, num_allowed, num_controls, tuple(tests), number, num_hidden)


def tiers_of_copies(targets: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Divide targets by their copies: unknown, 1, 2 to 3, 4 to 7, ...

    Args:
        targets (pandas.DataFrame): a row for each passage with the column "repeats", NaN or 0 if
            unknown.

    Returns:
        list[tuple[str, pandas.DataFrame]]: the copies in words, and the targets with so many.
    """
    repeats = targets["repeats"].fillna(0).astype(int)
    tiers = targets.groupby([number.bit_length() for number in repeats])
    return [(_copies(tier), tier) for _, tier in tiers]


def chance_of(num_above: int, num_targets: int, num_controls: int, num_allowed: int) -> float:
    """Return the probability of ``num_above`` or more exchangeable targets above the threshold; see
    above.
    """
    from scipy.stats import hypergeom

    num_passages = num_targets + num_controls
    num_highest = num_above + num_allowed
    return float(hypergeom.cdf(num_allowed, num_passages, num_controls, num_highest))


def least_noticeable(num_targets: int, num_controls: int, num_tests: int = 1) -> int | None:
    """Return the least number of targets above the threshold that the tests reject whatever the
    others; None: none.
    """
    num_allowed = num_controls // 100
    level = ALPHA / num_tests
    for number in range(1, num_targets + 1):
        if chance_of(number, num_targets, num_controls, num_allowed) <= level:
            return number
    return None


def _copies(tier: pd.DataFrame) -> str:
    known = tier["repeats"].fillna(0)
    if known.max() == 0:
        return "unknown"
    ends = dict.fromkeys(f"{number:.0f}" for number in (known.min(), known.max()))
    return " to ".join(ends)


def false_alarm_of_auc(limit: float, num_targets: int, num_controls: int) -> float:
    """Return how often the AUC of exchangeable passages is above a limit, by the normal
    approximation of the U test.
    """
    deviation = math.sqrt((num_targets + num_controls + 1) / (12 * num_targets * num_controls))
    return 0.5 * math.erfc((limit - 0.5) / deviation / math.sqrt(2))
