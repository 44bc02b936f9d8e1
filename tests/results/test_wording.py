"""How a value and its interval are written."""

import math

import pytest

from tfidf_tune.results.wording import cell

UNKNOWN = (math.nan, math.nan)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((6.254, (5.51, 7.006)), "6.25 (5.51 to 7.01)"),
        ((-0.04, (-0.31, -0.02), 1), "0.0 (-0.3 to 0.0)"),  # not -0.0
        ((-0.04, (-0.31, 0.02), 1, "+"), "+0.0 (-0.3 to +0.0)"),
        ((12.66, (3.1, 20.0), 1, "+", " %"), "+12.7 % (+3.1 to +20.0)"),
        ((12.66, UNKNOWN, 0, "", " %"), "13 %"),
        ((math.nan, UNKNOWN), None),
        ((math.inf, UNKNOWN, 1), "inf"),
    ],
)
def test_a_value_is_rounded_with_its_interval_and_unit(arguments, text):
    assert cell(*arguments) == text
