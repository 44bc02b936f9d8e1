"""What repeats in a text: copies and stretches, against texts in which they were put, and the
advice for each text.
"""

import random
from itertools import product
from pathlib import Path

import pytest
from helpers.fakes.data import changed, random_text, write_folder

from tfidf_tune.corpus import repeated_text
from tfidf_tune.corpus.advice import DOCUMENTS, FRAME, NOTHING, STRETCHES, advice_for
from tfidf_tune.corpus.jobs import TaskRunner
from tfidf_tune.corpus.repeated_text import find_repeated_text
from tfidf_tune.corpus.sources import EMBEDDED, tasks_of
from tfidf_tune.corpus.window_index import window_spacing

# A window is 80 bytes, one of so many words starts a window, and a word here has 4 bytes with its
# space.
SPACING = window_spacing(80)
WORD = 4


def found_in(folder, texts, **options):
    files = tasks_of([write_folder(folder / "texts", texts)])
    return find_repeated_text(files, folder / "work", **options)


def with_passage(number, passage):
    """A document of its own with a passage in the middle."""
    words = random_text(number).split()
    return " ".join([*words[:100], passage, *words[100:]])


@pytest.fixture(scope="module")
def texts():
    """80 documents: of the first five there are three, the next four have near copies, and passages
    are in others.
    """
    made = [random_text(seed) for seed in range(80)]
    for text in made[:5]:
        made += [text, text]
    made += [changed(made[seed], 0.01, seed) for seed in range(5, 9)]
    made += [with_passage(600 + number, random_text(500, 120)) for number in range(3)]
    made += [with_passage(700 + number, random_text(501, 60)) for number in range(12)]
    made += [with_passage(800 + number, random_text(502, 80)) for number in range(2)]
    # 120 bytes, fewer than 50 tokens.
    made += [with_passage(900 + number, random_text(503, 30)) for number in range(6)]
    random.Random(0).shuffle(made)
    return made


def test_copies_and_stretches_are_counted_where_they_were_put(texts, tmp_path):
    found = found_in(tmp_path, [*texts, "", " \n "])
    assert (found.documents, found.words) == (len(texts), sum(len(text.split()) for text in texts))
    assert found.num_bytes == sum(len(text.encode()) for text in texts)
    assert found.exact_copies == 10
    assert found.near_copies == 14
    assert found.differing_copies == 14
    # Of the stretches all but the first and last words are found.
    assert [group[:3] for group in found.by_copies] == [(2, 2, 1), (3, 4, 1), (9, 16, 1)]
    lengths = {2: 80 * WORD, 3: 120 * WORD, 12: 60 * WORD}
    most_missed = 2 * SPACING * WORD
    assert {stretch.copies for stretch in found.largest_stretches} == set(lengths)
    for stretch in found.largest_stretches:
        assert lengths[stretch.copies] - most_missed <= stretch.num_bytes <= lengths[stretch.copies]
    for group, copies in zip(found.by_copies, (2, 3, 12), strict=True):
        copied = (copies - 1) * lengths[copies]
        assert copied - (copies - 1) * most_missed <= group.copied_bytes <= copied
    assert found.copied_bytes_inside == sum(group.copied_bytes for group in found.by_copies)
    # Documents that are removed are copies from beginning to end; near copies differ in a few
    # words.
    removed = sum(sorted(len(text) for text in texts if texts.count(text) > 1)[:10])
    near = 4 * 200 * WORD
    assert (
        abs(found.copied_bytes - found.copied_bytes_inside - removed - near) < 4 * 200 * 0.05 * WORD
    )
    assert [group.copies for group in found.largest_documents] == [3] * 5 + [2] * 4
    # A stretch is described where it occurs first.
    first = next(stretch for stretch in found.largest_stretches if stretch.copies == 12)
    file, line = first.place.split(", line ")
    own = Path(file.strip("'")).read_text().splitlines()[int(line) - 1]
    assert first.excerpt in own
    assert first.excerpt[:40] in random_text(501, 60)


def test_several_jobs_find_the_same(texts, tmp_path):
    files = tasks_of([write_folder(tmp_path / "texts", texts)])
    one = find_repeated_text(files, tmp_path / "one")
    assert find_repeated_text(files, tmp_path / "two", runner=TaskRunner(num_jobs=2)) == one
    assert find_repeated_text(files, tmp_path / "advice", for_advice=True).repeats == one.repeats


def test_a_frame_is_counted_by_documents_and_not_by_occurrences(tmp_path):
    passage = random_text(500, 80)
    texts = [random_text(seed) for seed in range(100)]
    # In one document 40 times, in 10 others once: eleven of 111 documents.
    often = " ".join(f"{passage} {random_text(seed, 20)}" for seed in range(1000, 1040))
    for name in ("few", "more"):
        (tmp_path / name).mkdir()
    in_few = found_in(
        tmp_path / "few",
        [*texts, *(with_passage(600 + seed, passage) for seed in range(10)), often],
    )
    assert in_few.frames == []
    assert max(stretch.copies for stretch in in_few.largest_stretches) == 50
    in_more = found_in(
        tmp_path / "more",
        [*texts, *(with_passage(600 + seed, passage) for seed in range(12)), often],
    )
    assert [(frame.documents, frame.copies) for frame in in_more.frames] == [(13, 52)]


def texts_of(kind):
    texts = [random_text(seed) for seed in range(200)]
    if kind == "exact copies":
        texts += texts[:5]
    if kind == "copies that differ":
        texts += [changed(text, 0.1, seed) for text, seed in product(texts[:5], range(2))]
    if kind == "stretches":
        texts += [with_passage(600 + number, random_text(500, 150)) for number in range(10)]
    if kind == "both":
        texts += [
            *texts[:5],
            *(with_passage(600 + number, random_text(500, 150)) for number in range(10)),
        ]
    if kind == "frame":
        texts = [
            *texts,
            *texts[:50],
            *(with_passage(600 + number, random_text(500)) for number in range(30)),
        ]
    if kind == "copied often":  # no frame of the documents that stay
        texts += [texts[0]] * 100
    return texts


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("nothing", [NOTHING]),
        ("exact copies", [DOCUMENTS]),
        ("copies that differ", [STRETCHES]),
        ("stretches", [STRETCHES]),
        ("both", [DOCUMENTS, STRETCHES]),
        ("frame", [FRAME]),
        ("copied often", [DOCUMENTS]),
    ],
)
def test_each_text_gets_its_advice(kind, advice, tmp_path):
    assert advice_for(found_in(tmp_path, texts_of(kind)).repeats) == advice


def test_the_embedded_text_has_copies_of_documents_and_stretches(tmp_path):
    found = find_repeated_text([EMBEDDED], tmp_path, for_advice=True)
    assert 0 < found.near_copies < 0.02 * found.documents
    assert 0.05 < found.copied_share < 0.1
    assert advice_for(found.repeats) == [DOCUMENTS, STRETCHES]


def test_few_stretches_change_no_advice(tmp_path):
    found = found_in(tmp_path, texts_of("nothing"))
    limit = found.num_bytes // 100
    for changes, advice in (
        ({"copied_bytes_inside": limit}, NOTHING),
        ({"copied_bytes_inside": limit + 1}, STRETCHES),
        ({"differing_copies": 2}, NOTHING),
        ({"differing_copies": 3}, STRETCHES),
    ):
        assert advice_for(found.repeats._replace(**changes)) == [advice]


def test_a_text_of_other_scripts_and_of_lines_without_words(tmp_path):
    characters = random.Random(1).sample([chr(code) for code in range(0x4E00, 0x5E00)], 400)
    han = "".join(characters[:120])
    texts = [han + "".join(own) for own in (characters[120:240], characters[240:360])]
    texts += ["-" * 500, "=" * 300 + " a", ""]
    found = found_in(tmp_path, texts)
    (stretch,) = (stretch for stretch in found.largest_stretches if stretch.excerpt[0] in han)
    assert 120 * 3 - 2 * SPACING * 3 <= stretch.num_bytes <= 120 * 3
    assert repeated_text.LEAST_TOKENS == 50
