"""The snippets of docs/trainers.md, executed as they stand in the page."""

from pathlib import Path

import pytest
from datasets import Dataset
from hosts import logs_of, ragged_rows
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from tfidf_tune import TFIDFCrossEntropyLoss
from tfidf_tune.data import read_probe_file

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
SIZES = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2
}  # fmt: skip
SECTIONS = {"transformers": 1, "TRL": 1, "Canaries": 1, "If the class cannot be changed": 2}


def snippets(section):
    parts = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0].split("```python\n")[1:]
    return [part.partition("```")[0] for part in parts]


@pytest.mark.parametrize("section", SECTIONS)
def test_snippets_work_as_they_stand(section, tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_trl = section in ("TRL", "Canaries")
    settings = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "max_steps": 2,
        "logging_steps": 1,
        "bf16": False,
        "activation_checkpointing": False,
    }
    texts = [{"text": f"the old sailor painted boat {number}"} for number in range(12)]
    rows = [{name: ids[:8] for name, ids in row.items()} for row in ragged_rows(40) if len(row["labels"]) >= 8]
    names = {
        "model": LlamaForCausalLM(LlamaConfig(**SIZES, name_or_path=str(tiny_checkpoint))),
        "tokenizer": AutoTokenizer.from_pretrained(tiny_checkpoint),
        "args": (SFTConfig if is_trl else TrainingArguments)(str(tmp_path / "run"), **settings),
        "dataset": Dataset.from_list(texts) if is_trl else rows,
        "Trainer": Trainer, "SFTTrainer": SFTTrainer, "TFIDFCrossEntropyLoss": TFIDFCrossEntropyLoss,
    }  # fmt: skip
    found = snippets(section)
    assert len(found) == SECTIONS[section]
    for snippet in found:
        exec(snippet, names)

    names["trainer"].train()
    assert len(logs_of(names["trainer"])) == 2
    if section == "Canaries":
        assert len(read_probe_file("probe.jsonl")) == 40
        measured = [entry for entry in names["trainer"].state.log_history if "memorization_target_lms" in entry]
        assert [entry["step"] for entry in measured] == [0, 2]
