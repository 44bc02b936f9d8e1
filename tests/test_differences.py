from tfidf_tune._checks import differences


def test_each_key_with_a_different_value_is_named():
    cases = [
        ({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1, 2]}, "a": 1}, []),
        ({"b": 1, "a": "x"}, {"b": None, "a": "y"}, ['a was "x", is "y"', "b was 1, is null"]),
        ({"a": 1}, {}, ["a was 1, is not set"]),
        ({}, {"a": None}, ["a was not set, is null"]),
        ({"a": 1}, {"a": True}, ["a was 1, is true"]),
        ({"a": 1}, {"a": 1.0}, ["a was 1, is 1.0"]),
        ({"o": {"lr": 1, "x": {"y": 1}}}, {"o": {"lr": 2, "x": {"y": 2}}}, ["o.lr was 1, is 2", "o.x.y was 1, is 2"]),
        ({"o": {"lr": 0.1}}, {"o": None}, ['o was {"lr": 0.1}, is null']),
        ({"o": [{"b": 1, "a": 2}]}, {"o": [{"a": 2, "b": 1}]}, []),
        ({"o": [1, 2]}, {"o": [2, 1]}, ["o was [1, 2], is [2, 1]"]),
    ]
    for before, now, expected in cases:
        assert differences(before, now) == expected
