"""``tfidf-tune data preview``: the examples that training sees, with the tokens that are learned
marked.
"""

import json
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from helpers.docs_snippets import snippet
from helpers.fakes.data import write_rows
from helpers.fakes.tiny_run import read_metrics, run_recipe
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from tfidf_tune._checks import SetupError
from tfidf_tune._config import FinetuneConfig
from tfidf_tune._files import config_path
from tfidf_tune.commands.data import main
from tfidf_tune.data import embedded_documents, train_embedded_tokenizer
from tfidf_tune.loss import WeightedCrossEntropyLoss
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
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
    dataset, _ = built(OmegaConf.merge(cfg, {"batch_size": 1}))
    assert (
        "rows.jsonl: 3 rows with prompt and completion; 2 examples, 0 of them cut after 32 tokens; "
        "1 row l" in output
    )
    assert "\nwho saw the harbour?[[ the old sailor<|endoftext|>]]\n" in output
    assert "\n\\u001b[31mwho?[[ a quiet child<|endoftext|>]]\n" in output
    lengths = sorted(len(sample["tokens"]) for sample in dataset)
    labels = chain.from_iterable(sample["labels"] for sample in dataset)
    num_learned = sum(label != -100 for label in labels)
    assert output.endswith(
        f"\n2 examples: {sum(lengths)} tokens, {num_learned / sum(lengths):.1%} of them learned; "
        f"{lengths[0]} to {lengths[-1]} tokens in an example, median {lengths[1]}\n"
    )
    assert "\x1b" not in output


def test_packed_rows_are_shown_as_their_examples_and_one_example_is_not_plural(
    preview, rows, tmp_path
):
    output, _ = preview(rows | {"packed": True}, "--number", "9", lora=True)
    assert output.count("\nExample ") == 2
    assert "\n1 packed row: " in output
    assert " tokens in 2 examples, " in output
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    output, _ = preview(rows)
    assert "rows.jsonl: 1 row with prompt and completion; 1 example, 0 of them cut" in output
    assert "\n1 example: " in output


def test_any_data_set_of_the_recipes(preview, text_file, tmp_path):
    blocks = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": str(text_file),
        "block_size": 16,
    }
    output, cfg = preview(blocks, "--number", "1")
    dataset, tokenizer = built(cfg)
    first, rest = (
        tokenizer.decode(ids) for ids in (dataset[0]["tokens"][:1], dataset[0]["tokens"][1:])
    )
    assert f"\n{first}[[{rest}]]\n" in output
    assert (
        f"{len(dataset):,} examples: {16 * len(dataset):,} tokens, {15 / 16:.1%} of them learned"
        in output
    )

    file = tmp_path / "instructions.json"
    file.write_text(json.dumps([{"input": "who saw it?", "output": "the old sailor"}]))
    theirs = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "json",
        "data_files": str(file),
    }
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
    dataset = OmegaConf.load(config_path("mine/lora_chat")).dataset
    dataset.update({"source": "chats.jsonl", "chat_template": "chatml.jinja", "max_seq_len": 128})

    output, _ = preview(dataset, **{"tokenizer.path": str(folder), "model.max_seq_len": 128})

    assert output == snippet("data.md", "Preview", "text")


WEIGHTINGS = {
    "tfidf_tune.loss.TFIDFCrossEntropyLoss": {"num_batches": 3, "counted": "tokens"},
    "tfidf_tune.loss.WeightedCrossEntropyLoss": {
        "weighting": {
            "_component_": "tfidf_tune.weighting.RepetitionWeighting",
            "h": 2,
            "k": 2,
            "min_length": 2,
            "sample": 1,
        }
    },
}


@pytest.fixture
def export(recipe_config, rows, tmp_path):
    """Write a config of two epochs over rows of several lengths, and export its weights; return
    both.
    """

    def run(loss, *arguments, dataset=None):
        lines = [
            json.dumps({"prompt": f"{'who ' * (i % 5)}? ", "completion": f"{i % 3} " * (i % 4 + 1)})
            for i in range(22)
        ]
        Path(rows["source"]).write_text("\n".join(lines))
        cfg = recipe_config(epochs=2, gradient_accumulation_steps=2, loss=loss)
        cfg.dataset = dataset or rows
        OmegaConf.save(cfg, tmp_path / "config.yaml")
        main(
            [
                "export-weights",
                str(tmp_path / "config.yaml"),
                str(tmp_path / "weights.parquet"),
                *arguments,
            ]
        )
        return cfg, pq.read_table(tmp_path / "weights.parquet").to_pylist()

    return run


@pytest.mark.parametrize("component", WEIGHTINGS)
def test_exported_weights_are_those_of_the_run_in_its_order(component, export, monkeypatch, capsys):
    cfg, exported = export({"_component_": component, **WEIGHTINGS[component]})
    assert "Written: " in (out := capsys.readouterr().out)
    assert ", 44 sequences in 6 steps, seed 0\n" in out
    seen = []

    def recorded(loss, logits, batch):
        terms = terms_of(loss, logits, batch)
        seen.append((batch.labels, terms.weights))
        return terms

    terms_of = WeightedCrossEntropyLoss.terms
    monkeypatch.setattr(WeightedCrossEntropyLoss, "terms", recorded)
    folder = run_recipe(cfg)
    in_order = iter(exported)
    for labels, weights in seen:
        for label_row, weight_row in zip(labels.tolist(), weights.tolist(), strict=True):
            row = next(in_order)
            length = len(row["tokens"])
            assert row["labels"] == label_row[:length]
            assert set(label_row[length:]) <= {-100}
            assert row["weights"] == weight_row[:length]
            assert not any(weight_row[length:])
            follows = [*row["tokens"][1:], -100]
            assert all(
                label in (-100, token) for label, token in zip(row["labels"], follows, strict=True)
            )
            assert len(row["weights"]) == length > sum(label != -100 for label in row["labels"]) > 0
    assert next(in_order, None) is None
    assert len(set(chain.from_iterable(row["weights"] for row in exported))) > 3
    # By the table alone: the objective of the first step, from the model before training.
    first = [row for row in exported if row["step"] == 1]
    assert len(first) == 8
    assert [*dict.fromkeys(row["step"] for row in exported)] == [1, 2, 3, 4, 5, 6]
    model = load_model(cfg.checkpointer.checkpoint_dir)
    total = 0.0
    number = 0
    for row in first:
        tokens, labels, weights = (
            torch.tensor(row[name]) for name in ("tokens", "labels", "weights")
        )
        # 0 at -100.
        nll = torch.nn.functional.cross_entropy(
            model(tokens[None]).logits[0], labels, reduction="none"
        )
        total = total + float(weights @ nll.detach())
        number = number + int((labels != -100).sum())
    assert read_metrics(folder)[0]["loss"] == pytest.approx(total / number, rel=1e-5)


def test_an_export_of_text_has_its_probe_file_and_is_not_overwritten(
    export, rows, text_file, tmp_path
):
    loss = {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}
    dataset = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": str(text_file),
        "block_size": 32,
    }
    dataset |= {"holdout": 0.1, "probe_file": "${output_dir}/probe.jsonl"}
    cfg, exported = export(loss, "epochs=1", dataset=dataset)
    passages = read_probe_file(tmp_path / "weights.probe.jsonl")
    blocks = [tuple(row["tokens"]) for row in exported]
    controls = [tuple(one.token_ids) for one in passages if one.kind == "control"]
    assert controls
    assert not set(controls) & set(blocks)
    assert any(one.kind == "target" for one in passages)
    assert not Path(cfg.output_dir).exists()
    before = (tmp_path / "weights.parquet").read_bytes()
    with pytest.raises(SetupError, match=r"weights\.parquet exists: name another file"):
        export(loss)
    assert (tmp_path / "weights.parquet").read_bytes() == before


def test_an_export_of_several_data_sets_has_the_passages_of_all(export, tmp_path):
    datasets = []
    for name in ("train", "validation"):
        texts = [text[:700] for text in embedded_documents(name)[:50]]
        datasets.append(
            {
                "_component_": "tfidf_tune.data.text_blocks_dataset",
                "source": write_rows(tmp_path / f"{name}.jsonl", texts),
                "block_size": 32,
                "holdout": 0.1,
                "probe_file": f"${{output_dir}}/{name}.jsonl",
            }
        )
    loss = {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}
    cfg, _ = export(loss, "epochs=1", dataset=datasets)
    passages = read_probe_file(tmp_path / "weights.probe.jsonl")
    parts = [part.passages for part in built(cfg)[0]._datasets]
    expected = []
    for number, part in enumerate(parts):
        expected += [(f"dataset[{number}]/{passage.id}", passage.token_ids) for passage in part]
    assert [(passage.id, passage.token_ids) for passage in passages] == expected
    assert len({passage.source for passage in passages}) == 2


def test_what_cannot_be_exported_is_named(export, rows, tmp_path):
    focal = {"_component_": "tfidf_tune.weighting.FocalWeighting"}
    loss = {"_component_": "tfidf_tune.loss.WeightedCrossEntropyLoss", "weighting": focal}
    with pytest.raises(SetupError, match="loss: the weights of Focal depend on the predictions"):
        export(loss)
    with pytest.raises(SetupError, match=r"dataset\.packed is true"):
        export({"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"}, "dataset.packed=true")
    with pytest.raises(
        SetupError, match=r"collate_fn is torchtune\.data\.padded_collate, whose padding"
    ):
        export(
            {"_component_": "tfidf_tune.loss.TFIDFCrossEntropyLoss"},
            "collate_fn=torchtune.data.padded_collate",
        )
    with pytest.raises(
        SetupError, match=r"'dataset\.source=x': name a file with the ending \.parquet"
    ):
        main(["export-weights", "mine/lora", "dataset.source=x"])
    assert not [*tmp_path.glob("weights*"), *tmp_path.glob(".weights*")]
