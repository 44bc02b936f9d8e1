"""What an audit says that it is about, on the first screen of its page."""

from tfidf_tune._files import digest
from tfidf_tune.audit._judging import _subject

DATE = "2026-11-29T09:30:00+00:00"


def test_model_text_controls_and_passages_have_the_beginnings_of_their_hashes():
    texts = {
        f"/data/{name}.jsonl": letter * 64 for name, letter in zip("abcde", "12345", strict=True)
    }
    model = {"weights": "f" * 64, "config": "0" * 64}
    inputs = {"model": model, "texts": texts, "controls": "c" * 16, "probe_file": "d" * 64}
    assert _subject("runs/mine", inputs, DATE) == (
        f"Model: runs/mine ({digest(sorted(model.values()))[:8]}); text: a.jsonl (11111111), "
        "b.jsonl (22222222), c.jsonl (33333333) and 2 more; controls: unseen text (cccccccc); "
        "passages: probe file (dddddddd); 2026-11-29."
    )
    inputs["controls_source"] = "/runs/mine/held_out.jsonl"
    assert "; controls: held_out.jsonl (cccccccc); " in _subject("runs/mine", inputs, DATE)
    assert _subject("org/model", {"model": {}}, DATE) == "Model: org/model; 2026-11-29."
