"""The list of passages to act on: what each passage's own beginning brought out, and this training."""

import random

import numpy as np
import pandas as pd
import pytest

from tfidf_tune.audit._leaks import leaks, leaks_table, masked, mismatched_lms
from tfidf_tune.passages import Passage
from tfidf_tune.probe.memorization import compare_continuation

FRAME = [7] * 10


def sample(name, generated, reference, **changes):
    fields = {
        "passage_id": name,
        "kind": name.split("-")[0],
        "offset": 0,
        "prefix_length": 8,
        "attack": "greedy",
        "generated_ids": generated,
        "reference_ids": reference,
        "generated_text": " ".join(f"word{token}" for token in generated),
        "reference_text": "",
    }
    return compare_continuation(**fields | changes)


def table(samples):
    frame = pd.DataFrame([vars(one) for one in samples]).assign(sample=samples)
    frame["length"] = frame["reference_ids"].map(len)
    return frame.assign(repeats=np.nan)


def slow_lms(generated, reference):
    runs = {
        tuple(reference[start:end])
        for start in range(len(reference))
        for end in range(start, len(reference) + 1)
    }
    parts = [
        generated[start:end]
        for start in range(len(generated))
        for end in range(start, len(generated) + 1)
    ]
    return max(len(part) for part in parts if tuple(part) in runs)


def test_each_passage_is_compared_with_the_answer_for_one_other_asked_in_the_same_way():
    rng = random.Random(0)
    samples = []
    for number in range(7):
        for length in (8, 16):
            ids = [[rng.randrange(4) for _ in range(12)] for _ in range(2)]
            samples.append(sample(f"target-{number}", *ids, prefix_length=length))
    alone = sample("control-0", FRAME, FRAME)
    found = mismatched_lms(table([*samples, alone]))
    assert sorted(found.index) == [f"target-{number}" for number in range(7)]
    own = dict.fromkeys(found.index, 0)
    possible = {name: [] for name in found.index}
    for length in (8, 16):
        asked = [one for one in samples if one.prefix_length == length]
        for one in asked:
            others = [other for other in asked if other is not one]
            scores = [slow_lms(other.generated_ids, one.reference_ids) for other in others]
            possible[one.passage_id].append(scores)
            own[one.passage_id] = max(own[one.passage_id], one.lms)
    # One other passage at each length; the longer counts. It is not the passage itself.
    for name, value in found.items():
        of_8, of_16 = possible[name]
        assert value in {max(first, second) for first in of_8 for second in of_16}
    assert [*found] != [own[name] for name in found.index]
    # The same whatever the order.
    pd.testing.assert_series_equal(
        found.sort_index(), mismatched_lms(table(samples[::-1])).sort_index()
    )


def passage(name, positions):
    return Passage(name, "target", "", [1], len(positions), positions, "a.jsonl", "t", "f")


@pytest.fixture
def best():
    """A passage that is recited, a frame that every answer has, and a passage that is not."""
    own = [*range(20, 32)]
    return table(
        [
            sample("target-frame", FRAME, FRAME),
            sample("target-none", [1, 2, 3], own),
            sample("target-own", own, own),
        ]
    )


def test_only_what_the_own_beginning_and_this_training_brought_out_is_attributed(best):
    mismatched = pd.Series({"target-frame": 10.0, "target-none": 1.0, "target-own": 2.0})
    arguments = {
        "threshold": 3,
        "mismatched": mismatched,
        "nlls": {
            "target": pd.Series({"target-own": 0.5, "target-frame": 2.0, "target-none": 9.0}),
            "control": pd.Series({"control-0": 1.0, "control-1": 2.0, "control-2": 3.0}),
        },
        "passages": [passage("target-own", [[4, 17], [9, 0]]), passage("target-none", [])],
    }
    rows = leaks(best, before=None, **arguments)
    assert [*rows["passage_id"]] == ["target-own", "target-frame", "target-none"]
    assert [*rows["attributed"]] == ["yes", "no", "no"]
    assert rows["likelier"].to_list() == pytest.approx([100, 100 / 3, 0])
    assert rows.loc[0, ["file", "document", "token"]].to_list() == ["a.jsonl", 4, 17]
    assert rows["document"].isna().to_list() == [False, True, True]

    # The reference wrote it, too: not because of this training.
    before = pd.Series({"target-own": 12.0, "target-frame": 0.0, "target-none": 0.0})
    rows = leaks(best, before=before, **arguments)
    assert [*rows["attributed"]] == ["no", "no", "no"]
    assert [*rows["passage_id"]] == ["target-frame", "target-own", "target-none"]
    names = leaks_table(rows).frame.columns
    assert {"Before", "From another prefix", "File"} <= {*names}


def test_without_likelihoods_reference_and_probe_file_these_columns_are_left_out(best):
    rows = leaks(
        best, threshold=3, mismatched=pd.Series(dtype=float), before=None, nlls={}, passages=()
    )
    # Nothing is known of other beginnings: what is recited counts.
    assert [*rows["attributed"]] == ["yes", "yes", "no"]
    assert [*leaks_table(rows).frame.columns] == [
        "Passage",
        "Recited",
        "Of",
        "Attributed",
        "Attack",
        "Prompt (tokens)",
        "Answer, masked",
    ]


def test_a_masked_text_shows_the_beginnings_of_words_only():
    assert masked("Call Jane,\n 555-1234") == "C··· J···, ···-····"
    assert masked("é1 Ünder x") == "é· Ü···· x"
    assert masked("...") == ""
    text = " ".join(f"word{number}" for number in range(40))
    assert len(masked(text).split()) == 12
    assert "word" not in masked(text)
