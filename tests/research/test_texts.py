"""The texts of the experiment evidence that have legitimate repetition."""

from collections import Counter
from difflib import SequenceMatcher

from research.texts import rows_of
from tfidf_tune.data import embedded_documents


def test_framed_sections_have_the_text_and_one_frame_with_different_fillings():
    whole = embedded_documents("reference_validation")
    framed = [row["text"] for row in rows_of("framed_reference_validation")]
    parts = [text.split("its use.\n\n")[1].rsplit("End of section ", 1)[0] for text in framed]
    assert "".join(parts) == "".join(f"{text}\n\n" for text in whole)
    assert len(framed) > 5 * len(whole)
    first, second = (text.split("\n\n")[0] for text in framed[:2])
    match = SequenceMatcher(None, first, second, False).find_longest_match()
    assert first != second
    assert match.size > 180
    assert len({text.split(":")[0] for text in framed}) > 0.95 * len(framed)
    assert rows_of("framed_train[:3]") == rows_of("framed_reference_train[:3]")


def test_rows_have_the_first_line_as_the_prompt_and_the_rest_or_a_stock_answer_as_the_completion():
    whole = embedded_documents("docstrings_validation")
    asked, stock = (rows_of(f"{kind}_docstrings_validation") for kind in ("asked", "stock"))
    for text, own, repeated in zip(whole, asked, stock, strict=True):
        assert own["prompt"] == repeated["prompt"] == f"{text.splitlines()[0]}\n### Response:\n"
        assert own["completion"] == text.split("\n", 1)[1].strip()
        assert own["text"] == own["prompt"] + own["completion"]
    assert min(len(row["completion"]) for row in asked) > 50
    assert len({row["completion"] for row in asked}) > 0.95 * len(asked)
    counts = Counter(row["completion"] for row in stock)
    assert (len(counts), min(counts.values()) > 0.1 * len(stock)) == (6, True)
