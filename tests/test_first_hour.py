"""The first hour with one's own text: one command trains, and the commands that it prints work as they are."""

import json
import math
import random
import shlex

import pytest
import torch
from omegaconf import OmegaConf
from tiny_llama import TINY_LLAMA
from tiny_run import write_documents

from tfidf_tune.data import read_probe_file

SIZES = ", ".join(f"{key}: {value}" for key, value in TINY_LLAMA.items())
ADAPTERS = "lora_attn_modules: [q_proj, v_proj], lora_rank: 8, lora_alpha: 16"
LORA = f"model={{_component_: torchtune.models.llama2.lora_llama2, {ADAPTERS}, {SIZES}}}"
FULL = f"model={{_component_: torchtune.models.llama2.llama2, {SIZES}}}"


@pytest.fixture
def command(run_command, only_our_tasks, monkeypatch, capfd, tmp_path):
    """Run a command in a folder with texts; return what it printed."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    texts = write_documents(folder / "texts.txt").read_text().split("\n")
    for name, part in (("my_texts", texts[:30]), ("held_out", texts[30:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))

    def run(*arguments):
        capfd.readouterr()
        run_command(*arguments)
        return "".join(capfd.readouterr())

    run.folder = folder
    return run


def printed_commands(output):
    return [shlex.split(line)[1:] for line in output.splitlines() if line.startswith("  tfidf-tune ")]


def test_two_runs_on_own_text_are_evaluated_and_compared_by_the_commands_that_they_print(command, tiny_checkpoint):
    """The second with a copy of the recipe."""
    setup = [
        "--config", "mine/lora", f"checkpointer.checkpoint_dir={tiny_checkpoint}", "dataset.source=my_texts.jsonl",
        LORA, "epochs=1",
    ]  # fmt: skip
    outputs = [command("run", "lora_finetune", *setup)]
    command("cp", "lora_finetune", "mine.py")
    baseline = ["loss=tfidf_tune.loss.CrossEntropyLoss", "output_dir=runs/ce"]
    outputs.append(command("run", "./mine.py", *setup, *baseline))

    run = command.folder / "runs" / "mine_lora"
    passages = read_probe_file(run / "probe.jsonl")
    [num_tokens] = {len(passage.token_ids) for passage in passages}
    num_targets = len(passages) // 2
    num_steps = len((run / "metrics.jsonl").read_text().splitlines())
    data = f"{num_targets} targets of {num_tokens} tokens, repeated 10 times each; {num_targets} controls, held out\n"
    for name, output in zip(("mine_lora", "ce"), outputs, strict=True):
        assert f"blocks of 64 tokens ({int(block_count(output)) * 64:,} tokens); {data}" in output
        assert "Data: 30 documents, " in output
        assert math.ceil(int(block_count(output)) / 4) == num_steps
        assert f"Training: {num_steps} steps (1 epoch)\n" in output
        names = ", ".join(f"checkpoint_{percent}pct" for percent in (25, 50, 75, 100))
        assert f"Checkpoints in runs/{name}: {names}\n" in output
        evaluate, audit, cost, compare = printed_commands(output)
        assert "on text of yours that it was not trained on (put your .jsonl or .txt for HELD_OUT)" in output
        printed = command(*evaluate) + command(*(one.replace("HELD_OUT", "held_out.jsonl") for one in cost))
        assert not [noise for noise in ("Custom kwargs", "not a git repository", "cpp ext") if noise in printed]
    assert "The page: " in command(*audit)
    assert compare == ["compare", "runs/ce", "OTHER_RUN"]
    report = " ".join(command(*compare[:-1], "runs/mine_lora").split())
    assert "# TF-IDF against CE" in report
    assert "its perplexity is" in report


def test_answers_are_asked_for_once_by_the_command_that_a_run_prints(command, tiny_checkpoint):
    """Prefix lengths do not count for them."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "her", "dog", "ran"]
    orders = [random.Random(seed).sample(words, len(words)) for seed in range(10)]
    rows = [{"prompt": "say it ", "completion": " ".join(order)} for order in orders]
    (command.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = command(
        "run", "full_finetune", "--config", "any/full_sft", f"checkpointer.checkpoint_dir={tiny_checkpoint}", FULL,
        "dataset.source=rows.jsonl", "dataset.max_seq_len=64", "dataset.num_controls=2", "dataset.targets=random",
        "dataset.num_targets=2", "dataset.min_target_tokens=8",
        "max_steps=1",
    )  # fmt: skip
    evaluate, audit, cost, _ = printed_commands(output)
    assert evaluate[evaluate.index("--tasks") + 1] == "tfidf_memorization_p50"
    assert not [one for one in evaluate if "prefix_lengths" in one]
    assert "wikitext2_source=HELD_OUT" in cost
    assert "HELD_OUT" not in str(evaluate)
    command(*evaluate)
    assert "The page: " in command(*audit)


def block_count(output):
    return output.split("Data: 30 documents, ")[1].split(" block")[0]


def test_all_weights_can_be_trained_the_same_way(command, tiny_checkpoint):
    arguments = [f"checkpointer.checkpoint_dir={tiny_checkpoint}", "dataset.source=my_texts.jsonl", FULL, "max_steps=2"]
    output = command("run", "full_finetune", "--config", "mine/full", *arguments)
    assert "Training: 2 steps (3 epochs, max_steps 2)\n" in output
    assert "Checkpoints in runs/mine_full: checkpoint_50pct, checkpoint_100pct\n" in output

    run = command.folder / "runs" / "mine_full"
    config = OmegaConf.load(run / "config.yaml")
    assert (config.device, config.dtype) == (("cuda", "bf16") if torch.cuda.is_available() else ("cpu", "fp32"))
    assert config.keep_last_n_checkpoints == 1
    assert "tf" not in config.loss
    comments = [line for line in (run / "config.yaml").read_text().splitlines() if line.startswith("# ")]
    assert {'# loss.tf: "count"', "# loss.num_batches: 16", '# checkpointer.max_shard_size: "5GB"'} <= set(comments)
    assert not [line for line in comments if line.startswith(("# optimizer.lr:", "# dataset.num_base:"))]
