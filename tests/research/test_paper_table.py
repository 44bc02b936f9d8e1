"""The paper's tables as data, and next to a run's values."""

from itertools import product

import pytest
from helpers.fakes.runs import answers, blocks, evaluation, results, run, summaries, targets

from research.paper import paper_report, paper_results

LORA = [
    "TinyLlama 1.1B (LoRA)",
    "Pythia 1.4B (QLoRA)",
    "GPT-J 6B (LoRA)",
    "Llama-2 7B (QLoRA)",
    "Llama-2 13B (QLoRA)",
]


def test_the_data_file_has_the_tables_of_the_paper():
    paper = paper_results()
    # Six models under two objectives: 5 + 1 + 4 + 2 measures.
    assert paper.groupby("table").size().tolist() == [60, 12, 48, 24]
    assert not paper.duplicated(["table", "model", "objective", "measure"]).any()
    values = paper.set_index(["table", "measure", "objective", "model"])["value"].sort_index()
    lms = values[1, "Avg LMS"].unstack("objective")
    reduction = 1 - lms["TF-IDF"] / lms["CE"]
    # What the text of the paper says of its own tables.
    assert reduction["TinyLlama 1.1B (full)"] == pytest.approx(0.58, abs=0.005)
    assert reduction[LORA].mean() == pytest.approx(0.14, abs=0.005)
    assert values[4, "F1 %", "TF-IDF", "TinyLlama 1.1B (full)"] == 84.18
    assert values[3, "ROUGE-1", "TF-IDF", "Llama-2 7B (QLoRA)"] == 33.0


def test_values_of_a_run_are_shown_next_to_those_of_the_paper():
    def made(objective, model, lms):
        asked = {
            "samples": targets(*lms),
            "blocks": blocks(12.0),
            "summaries": summaries(30),
            "answers": answers(100),
        }
        return run(objective, [evaluation(**asked)], model=model, learning_rate=1e-4)

    models = ("Pythia 1.4B (QLoRA)", "Mine")
    runs = [made(name, model, (4, 7)) for model, name in product(models, ("CE", "TF-IDF", "IDF"))]
    (table,) = (one for one in paper_report(results(*runs)).tables if one.name == "paper")
    rows = {(row[1], row[2], row[3]): row[4:] for row in table.rows}
    assert {row[0] for row in table.rows} == {"Pythia 1.4B (QLoRA), lr 0.0001"}
    # Two objectives, twelve measures; IDF and Mine are not the paper's.
    assert len(table.rows) == 24
    assert rows["TF-IDF", "Max LMS", 1] == (7.0, 7.0)
    assert rows["CE", "Avg LMS", 1] == (2.44, 5.5)
    assert rows["CE", "Perplexity", 2] == (17.23, pytest.approx(12.0))
    assert rows["TF-IDF", "ROUGE-L", 3] == (20.8, 24.0)
    assert rows["CE", "F1 %", 4] == (73.92, 100.0)
    assert "without an interval" in table.notes[0]
