"""Packed rows in the recipes give the same run as each document in a row of its own."""

import pytest
import torch
from helpers.fakes.tiny_run import metrics_of, run_recipe

from tfidf_tune.data import hf_tokenizer, text_dataset
from tfidf_tune.probe import load_model

ROW = 64
METRICS = ("loss", "cross_entropy", "weight_mean", "weight_std", "weight_max", "grad_norm")
TFIDF = {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}
ALL_TOKENS = TFIDF | {"counted": "tokens"}
REPETITION = {
    "_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss",
    "weighting": {
        "_component_": "tfidf_tune.weighting.RepetitionWeighting",
        "h": 2,
        "k": 1,
        "alpha": 1.0,
        "sample": 1,
        "span": 5,
    },
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Ten documents of 5 to 41 tokens."""
    file = tmp_path_factory.mktemp("documents") / "documents.txt"
    words = ("the old sailor watched a paper boat and the grey cat followed " * 3).split()
    file.write_text(
        "\n".join(" ".join(words[number : number + 3 + 5 * (number % 4)]) for number in range(10))
    )
    return file


def section(file, cache, *, torchtunes, packed):
    if not torchtunes:
        return {
            "_component_": "tfidf_tune.data.text_dataset",
            "source": str(file),
            "packed": packed,
        }
    return {
        "_component_": "torchtune.datasets.text_completion_dataset",
        "source": "text",
        "data_files": str(file),
        "cache_dir": str(cache),
        "packed": packed,
        "split_across_pack": False,
    }


@pytest.mark.parametrize(
    ("loss", "lora", "torchtunes"),
    [(TFIDF, False, True), (ALL_TOKENS, True, False), (REPETITION, False, False)],
)
def test_a_packed_run_is_the_run_of_its_documents(
    recipe_config, documents, tiny_checkpoint, tmp_path, loss, lora, torchtunes
):
    """Four steps of all documents: metrics and weights agree up to rounding in fp32, which AdamW
    amplifies.
    """
    num_rows = len(
        text_dataset(hf_tokenizer(str(tiny_checkpoint), ROW), source=str(documents), packed=True)
    )
    assert 1 < num_rows < 10
    runs = [
        run_recipe(
            recipe_config(
                lora=lora,
                dataset=section(
                    documents, tmp_path / "cache", torchtunes=torchtunes, packed=packed
                ),
                loss=loss,
                batch_size=batch_size,
                epochs=4,
                save_at_percent=[100],
                output_dir=str(tmp_path / str(packed)),
            ),
            lora=lora,
        )
        for packed, batch_size in ((False, 10), (True, num_rows))
    ]

    alone, packed = (metrics_of(run, *METRICS) for run in runs)
    assert len(alone) == 4
    assert alone[-1, METRICS.index("weight_std")] > 1e-3, "weights differ"
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-7)
    if loss is not REPETITION:
        with torch.no_grad():
            expected, logits = (
                load_model(run / "checkpoint_100pct")(torch.arange(20)[None]).logits for run in runs
            )
        torch.testing.assert_close(
            logits, expected, rtol=0, atol=1e-3 * float(expected.abs().max())
        )
