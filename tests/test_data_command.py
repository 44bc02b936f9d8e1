"""``tfidf-tune data preview``: the examples that training sees, with the tokens that are learned marked."""

import json

import pytest
from docs_snippets import snippet
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import config_path
from tfidf_tune.commands.data import main
from tfidf_tune.data import train_embedded_tokenizer
from tfidf_tune.training import build_dataset, check_config, instantiate

ROWS = [
    {"prompt": "who saw the harbour? ", "completion": "the old sailor"},
    {"prompt": "\x1b[31mwho?", "completion": " a quiet child"},
    {"prompt": "who? " * 40, "completion": "my neighbour"},
]


@pytest.fixture
def preview(recipe_config, tmp_path, capsys):
    """Run the command on a data set of the tiny Llama's config."""

    def run(dataset, *arguments, lora=False, **overrides):
        cfg = recipe_config(lora=lora, **overrides)
        cfg.dataset = dataset
        OmegaConf.save(cfg, tmp_path / "config.yaml")
        main(["preview", str(tmp_path / "config.yaml"), *arguments])
        return capsys.readouterr().out, cfg

    return run


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return {"_component_": "tfidf_tune.data.sft_dataset", "source": str(file), "max_seq_len": 32}


def built(cfg):
    checked = check_config(cfg, FinetuneConfig)
    tokenizer = instantiate(checked, "tokenizer")
    tokenizer.max_seq_len = 64
    return build_dataset(checked, tokenizer), tokenizer


def test_learned_tokens_are_in_brackets_and_counted(preview, rows):
    output, cfg = preview(rows, "batch_size=1")
    dataset, _ = built(cfg | {"batch_size": 1})
    assert "rows.jsonl: 3 rows with prompt and completion; 2 examples, 0 of them cut after 32 tokens; 1 row l" in output
    assert "\nwho saw the harbour?[[ the old sailor<|endoftext|>]]\n" in output
    assert "\n\\u001b[31mwho?[[ a quiet child<|endoftext|>]]\n" in output
    lengths = sorted(len(sample["tokens"]) for sample in dataset)
    num_learned = sum(label != -100 for sample in dataset for label in sample["labels"])
    assert output.endswith(
        f"\n2 examples: {sum(lengths)} tokens, {num_learned / sum(lengths):.1%} of them learned; "
        f"{lengths[0]} to {lengths[-1]} tokens in an example, median {lengths[1]}\n"
    )
    assert "\x1b" not in output


def test_packed_rows_are_shown_as_their_examples_and_one_example_is_not_plural(preview, rows, tmp_path):
    output, _ = preview(rows | {"packed": True}, "--number", "9", lora=True)
    assert output.count("\nExample ") == 2
    assert "\n1 packed row: " in output
    assert " tokens in 2 examples, " in output
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    output, _ = preview(rows)
    assert "rows.jsonl: 1 row with prompt and completion; 1 example, 0 of them cut" in output
    assert "\n1 example: " in output


def test_any_data_set_of_the_recipes(preview, text_file, tmp_path):
    blocks = {"_component_": "tfidf_tune.data.text_blocks_dataset", "source": str(text_file), "block_size": 16}
    output, cfg = preview(blocks, "--number", "1")
    dataset, tokenizer = built(cfg)
    first, rest = (tokenizer.decode(ids) for ids in (dataset[0]["tokens"][:1], dataset[0]["tokens"][1:]))
    assert f"\n{first}[[{rest}]]\n" in output
    assert f"{len(dataset):,} examples: {16 * len(dataset):,} tokens, {15 / 16:.1%} of them learned" in output

    file = tmp_path / "instructions.json"
    file.write_text(json.dumps([{"input": "who saw it?", "output": "the old sailor"}]))
    theirs = {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": str(file)}
    for number in (0, 1):
        output, _ = preview(theirs | {"split": "train"}, "--number", str(number))
        assert ("\nwho saw it?[[the old sailor<|endoftext|>]]\n" in output) == bool(number)


def test_the_page_shows_what_the_command_prints(preview, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = train_embedded_tokenizer(tmp_path / "bpe-512", vocab_size=512)
    (tmp_path / "chats.jsonl").write_text(snippet("data.md", "Preview", "json"))
    (tmp_path / "chatml.jinja").write_text(snippet("data.md", "Preview", "jinja"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save_pretrained(folder)
    dataset = OmegaConf.load(config_path("any/lora_sft")).dataset
    dataset |= {"source": "chats.jsonl", "chat_template": "chatml.jinja", "max_seq_len": 128}

    output, _ = preview(dataset, **{"tokenizer.path": str(folder), "model.max_seq_len": 128})

    assert output == snippet("data.md", "Preview", "text")
