"""Data and tokenizers that no run can begin with."""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zstandard
from bad_configs import changed
from omegaconf import DictConfig
from refusals import OPENED, BadInput, Site
from tiny_llama import BLOCK_SIZE
from tokenizers import Tokenizer
from torch.utils.data import Dataset

BLOCKS = "tfidf_tune.data.text_blocks_dataset"
TEXTS = "tfidf_tune.data.text_dataset"
SQUAD = "tfidf_tune.data.squad_dataset"
DAMAGED = r"config: dataset: cannot read '.*/{}'; is it a complete {} file\? \w+: "


def blocks_of(name: str, content: bytes | None, **arguments: Any) -> Callable[[Site], DictConfig]:
    """Blocks of a file with this content, which is not made if there is none."""
    return from_file(name, content, {"_component_": BLOCKS, "block_size": BLOCK_SIZE, **arguments})


def from_file(name: str, content: bytes | None, dataset: Mapping[str, Any]) -> Callable[[Site], DictConfig]:
    """A data set of a file with this content."""

    def make(site: Site) -> DictConfig:
        if content is not None:
            (site.folder / name).write_bytes(content)
        return site.config(dataset={**dataset, "source": str(site.folder / name)})

    return make


def texts(*datasets: Mapping[str, Any], **overrides: Any) -> Callable[[Site], DictConfig]:
    """A mix of data sets of the same documents."""
    return lambda site: site.config(
        dataset=[{**dataset, "source": str(site.text_file)} for dataset in datasets], **overrides
    )


def lines(*rows: Any) -> bytes:
    """Rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def mixed(site: Site) -> DictConfig:
    """A folder of files of two formats."""
    folder = site.folder / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a text")
    (folder / "b.jsonl").write_bytes(lines({"text": "a text"}))
    return site.config(dataset={"_component_": BLOCKS, "block_size": BLOCK_SIZE, "source": str(folder)})


def masked(site: Site) -> DictConfig:
    """Questions whose answers are cut off in torchtune's own data set, so that no label is left."""
    conversation = {"messages": [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "yes"}]}
    (site.folder / "chat.jsonl").write_bytes(lines(*[conversation] * 100))
    return site.config(
        dataset={
            "_component_": "torchtune.datasets.chat_dataset",
            "source": "json",
            "data_files": str(site.folder / "chat.jsonl"),
            "conversation_column": "messages",
            "conversation_style": "openai",
            "split": "train",
        }
    )


def tokenizer(edit: Callable[[Path], None]) -> Callable[[Site], DictConfig]:
    """A tokenizer of its own, changed."""

    def make(site: Site) -> DictConfig:
        folder = site.folder / "tokenizer"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((site.checkpoint / name).read_bytes())
        edit(folder)
        return site.config(**{"tokenizer.path": str(folder)})

    return make


def empty_folder(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def break_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')


def add_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"extra{number}" for number in range(10)])
    tokenizer.save(str(folder / "tokenizer.json"))


def leave_out_ids(folder: Path) -> None:
    """Give a token an id far beyond the number of tokens."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = 9999
    (folder / "tokenizer.json").write_text(json.dumps(content))


class OtherTokens(Dataset[Any]):
    """Sequences that another tokenizer made."""

    def __init__(self, tokenizer: Any) -> None:
        pass

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": [400] * BLOCK_SIZE, "labels": [400] * BLOCK_SIZE}


def remove_eos(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))


TEXT = b"the old sailor watched the harbour. " * 20
SQUAD_ROW = {"context": "a text", "question": "what?", "answers": {"text": ["text"], "answer_start": [2]}}
PARQUET = {"_component_": BLOCKS, "block_size": BLOCK_SIZE}

SOURCES = [
    BadInput(
        "a file that is not there", blocks_of("a.txt", None), r"config: dataset: no such file or folder: '.*/a\.txt'"
    ),
    BadInput(
        "an empty file", blocks_of("a.txt", b""), r"config: dataset: '.*/a\.txt' is empty: name a source with text"
    ),
    BadInput(
        "lines of spaces", blocks_of("a.txt", b" \n\t\n" * 50), r"found 0 blocks of 32 tokens in '.*/a\.txt', needed 1"
    ),
    BadInput(
        "a line of 50 MB",
        blocks_of("a.txt", TEXT + b"\n" + b"word " * 10_000_000),
        r"config: dataset: '.*/a\.txt', line 2: the text has 49,999,999 bytes, at most 10,000,000 .*: split it into",
    ),
    BadInput("an unknown format", blocks_of("a.docx", TEXT), r"'.*/a\.docx' has an unknown format: .* one of \.txt, "),
    BadInput(
        "two formats in a folder", mixed, r"'.*/texts' mixes files of the formats \['json', 'text'\]: name a file"
    ),
    BadInput("random bytes as text", blocks_of("a.txt", bytes(range(256)) * 9), DAMAGED.format(r"a\.txt", "text")),
    BadInput(
        "Latin-1 as UTF-8",
        blocks_of("a.txt", "café\n".encode("latin-1") * 99),
        r"a\.txt'; is it .* text .*UTF-?8|utf-8",
    ),
    BadInput("random bytes as JSON", blocks_of("a.jsonl", bytes(range(256)) * 9), DAMAGED.format(r"a\.jsonl", "json")),
    BadInput(
        "a broken line within JSON lines",
        blocks_of("a.jsonl", lines(*[{"text": "a text"}] * 30) + b'{"text": "a te\n' + lines(*[{"text": "b"}] * 30)),
        DAMAGED.format(r"a\.jsonl", "json"),
    ),
    BadInput(
        "JSON lines that end too soon",
        blocks_of("a.jsonl", lines({"text": "a"}) + b'{"te'),
        DAMAGED.format(r"a\.jsonl", "json"),
    ),
    BadInput(
        "JSON lines without the column", blocks_of("a.jsonl", lines({"body": "a"})), r"no column 'text': .*\['body'\]"
    ),
    BadInput("numbers for texts", blocks_of("a.jsonl", lines({"text": 3})), r"column 'text' of .* holds int, not text"),
    BadInput(
        "a name that is no column", blocks_of("a.txt", TEXT, source_column="body"), r"no column 'body': .*\['text'\]"
    ),
    BadInput(
        "gzip that ends too soon",
        blocks_of("a.txt.gz", gzip.compress(TEXT)[:-20]),
        DAMAGED.format(r"a\.txt\.gz", "text"),
    ),
    BadInput("text that calls itself gzip", blocks_of("a.txt.gz", TEXT), DAMAGED.format(r"a\.txt\.gz", "text")),
    BadInput(
        "zstandard that ends too soon",
        blocks_of("a.txt.zst", zstandard.compress(TEXT)[:-20]),
        r"cannot read '.*/a\.txt\.zst'; is it a complete text file\? It ends in the middle of a zstandard frame",
    ),
    BadInput("text that calls itself zstandard", blocks_of("a.txt.zst", TEXT), DAMAGED.format(r"a\.txt\.zst", "text")),
    BadInput("text that calls itself Parquet", blocks_of("a.parquet", TEXT), DAMAGED.format(r"a\.parquet", "parquet")),
    BadInput(
        "Parquet that ends too soon",
        blocks_of("a.parquet", b"PAR1" + bytes(99)),
        DAMAGED.format(r"a\.parquet", "parquet"),
    ),
    BadInput(
        "a hub id without a network",
        changed({"dataset.source": "nobody/nothing"}),
        r"cannot load the data set 'nobody/nothing' .*: check these names and the connection, or name a local",
    ),
]

SIZES = [
    BadInput(
        "too few blocks",
        blocks_of("a.txt", TEXT, num_blocks=999),
        r"found \d+ blocks of 32 tokens in .*, needed 999: lower num_blocks",
    ),
    BadInput(
        "no whole block",
        blocks_of("a.txt", b"a text"),
        r"found 0 blocks of 32 tokens in .*, needed 1: lower .*block_size",
    ),
    BadInput(
        "blocks longer than the model takes",
        blocks_of("a.txt", TEXT, block_size=65),
        r"block_size is 65, above max_seq_len 64.*: lower block_size",
    ),
    BadInput(
        "dataset.block_size: 0", blocks_of("a.txt", TEXT, block_size=0), r"block_size must be .* at least 1, got 0"
    ),
    BadInput(
        "dataset.block_size: 2.5",
        blocks_of("a.txt", TEXT, block_size=2.5),
        r"dataset: block_size is 2\.5, it has to be a whole number",
    ),
    BadInput(
        "fewer blocks than a step takes",
        blocks_of("a.txt", TEXT, num_blocks=2),
        r"has 2 sequences, one step takes .* = 4: lower",
    ),
    BadInput(
        "passages that are too short",
        changed({"dataset.min_target_tokens": 5000}),
        r"passages .*5000|5000.* min_target_tokens",
    ),
    BadInput("too few passages", changed({"dataset.num_targets": 1000}), r"1000.*(lower|num_targets)"),
    BadInput(
        "targets shorter than blocks",
        changed({"dataset.min_target_tokens": 8}),
        r"min_target_tokens 8 is below block_size 32.*raise",
    ),
    BadInput(
        "too few base blocks",
        changed({"dataset.num_base": 100_000}),
        r"found \d+ base blocks .*, needed 100000: lower num_base",
    ),
    BadInput(
        "dataset.num_targets: 0", changed({"dataset.num_targets": 0}), r"num_targets must be .* at least 1, got 0"
    ),
    BadInput(
        "dataset.num_repeats: -1", changed({"dataset.num_repeats": -1}), r"num_repeats must be .* at least 1, got -1"
    ),
    BadInput(
        "dataset.layout: rows",
        changed({"dataset.layout": "rows"}),
        r"layout must be 'aligned' or 'concatenated', got 'rows'",
    ),
    BadInput(
        "dataset.num_target: 3",
        changed({"dataset.num_target": 3}),
        r"no argument 'num_target'; did you mean 'num_targets'\?",
    ),
    BadInput(
        "no dataset.source",
        changed({"dataset": {"_component_": BLOCKS}}),
        r"config: dataset: tfidf_tune\S+ needs source",
    ),
    BadInput("dataset: []", changed({"dataset": []}), r"dataset is an empty list: name one data set or more"),
    BadInput(
        "a second data set that is none",
        texts({"_component_": TEXTS}, {"_component_": "tfidf_tune.data.x"}),
        r"config: dataset\[1\]: no component 'tfidf_tune\.data\.x'",
    ),
    BadInput(
        "one data set packed, one not",
        texts({"_component_": TEXTS, "packed": True}, {"_component_": BLOCKS, "block_size": BLOCK_SIZE}),
        r"dataset\[0\] packed, dataset\[1\] not: .* all have to be packed or none",
    ),
    BadInput(
        "packed rows that another function collates",
        texts({"_component_": TEXTS, "packed": True}, collate_fn="torchtune.data.padded_collate_dpo"),
        r"collate_fn is torchtune.*, but the data set is packed, .*: leave collate_fn out, or set dataset\.packed to",
    ),
    BadInput(
        "SQuAD without its columns",
        from_file("a.jsonl", lines({"text": "a"}), {"_component_": SQUAD, "max_seq_len": 64}),
        r"has no column \['answers', 'context', 'question'\], only \['text'\]",
    ),
    BadInput(
        "SQuAD with texts for answers",
        from_file("a.jsonl", lines(SQUAD_ROW | {"answers": "text"}), {"_component_": SQUAD, "max_seq_len": 64}),
        r"column 'answers' of .* holds str, not dict",
    ),
    BadInput(
        "SQuAD without an answer",
        from_file(
            "a.jsonl",
            lines(SQUAD_ROW | {"answers": {"text": ["no"], "answer_start": [0]}}),
            {"_component_": SQUAD, "max_seq_len": 64},
        ),
        r"gives no example: 1 rows .*name another source",
    ),
    BadInput(
        "prompts without room for a text",
        from_file("a.jsonl", lines(SQUAD_ROW), {"_component_": SQUAD, "max_seq_len": 4}),
        r"max_seq_len is 4, but .* take \d+: raise it",
    ),
    BadInput(
        "no label that is not masked",
        masked,
        r"none of the 100 sequences has a label to learn from: .* raise the limit of tokens, or unmask some",
    ),
]

TOKENIZERS = [
    BadInput(
        "a tokenizer that is not there",
        changed({"tokenizer.path": "/no/such/folder"}),
        r"tokenizer: no such folder: '/no/such/folder'\. .* holds tokenizer\.json",
    ),
    BadInput(
        "a tokenizer's empty folder",
        tokenizer(empty_folder),
        r"tokenizer: cannot load a tokenizer from .*must be a folder with tokenizer\.json",
    ),
    BadInput("a broken tokenizer.json", tokenizer(break_json), r"tokenizer: cannot load a tokenizer from "),
    BadInput(
        "a tokenizer larger than the model",
        tokenizer(add_tokens),
        r"the tokenizer has a token with the id 329, the model embeddings for the ids 0 to 319: use the tokenizer",
    ),
    BadInput(
        "an id beyond the model's embeddings",
        tokenizer(leave_out_ids),
        r"the tokenizer has a token with the id 9999, the model embeddings for the ids 0 to 319: use the tokenizer",
    ),
    BadInput(
        "tokens of another tokenizer",
        changed({"dataset": {"_component_": "bad_data.OtherTokens"}}),
        r"the data set has the token id 400, the model embeddings for the ids 0 to 319: make the data set with the",
        leaves=OPENED,
        only_training_shows=True,
    ),
    BadInput(
        "a tokenizer without EOS",
        tokenizer(remove_eos),
        r"has no EOS token, which ends every document: set \"eos_token\"|has no EOS token.*'set \"eos_token\"'",
    ),
    BadInput(
        "tokenizer.max_seq_len: 65",
        changed({"tokenizer.max_seq_len": 65}),
        r"tokenizer\.max_seq_len is 65, the model takes at most 64: lower it",
    ),
    BadInput(
        "tokenizer.max_seq_len: 0", changed({"tokenizer.max_seq_len": 0}), r"max_seq_len is 0, it has to be at least 1"
    ),
    BadInput(
        "torchtune's tokenizer of another kind",
        changed(
            {"tokenizer": {"_component_": "torchtune.models.llama2.llama2_tokenizer", "path": "/no/tokenizer.model"}}
        ),
        r"config: tokenizer: .*/no/tokenizer\.model",
    ),
    BadInput(
        "a component that is no tokenizer",
        changed({"tokenizer": {"_component_": "torch.nn.Identity"}}),
        r"config: tokenizer: torch\.nn\.Identity makes Identity, not a tokenizer: .*tfidf_tune\.data\.hf_tokenizer",
    ),
    BadInput(
        "a component that is no data set",
        changed({"dataset": {"_component_": "torch.nn.Identity"}}),
        r"config: dataset: torch\.nn\.Identity makes Identity, not a map-style data .*tune\.data\.text_blocks_dataset",
    ),
]

BAD_DATA = [*SOURCES, *SIZES, *TOKENIZERS]
