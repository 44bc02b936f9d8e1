"""Data and tokenizers that do not fit a run are refused in one message; what modules check by
themselves, see there.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helpers.fakes.tiny_llama import BLOCK_SIZE
from helpers.refusals import BadInput, Site, assert_refused, each_row, value
from omegaconf import DictConfig
from tokenizers import Tokenizer
from torch.utils.data import Dataset

BLOCKS = {"_component_": "tfidf_tune.data.text_blocks_dataset", "block_size": BLOCK_SIZE}
TEXTS = {"_component_": "tfidf_tune.data.text_dataset"}
TEXT = b"the old sailor watched the harbour. " * 20


def blocks_of(name: str, content: bytes, **arguments: Any) -> Callable[[Site], DictConfig]:
    """Make a config that trains on blocks of a file with the given content."""

    def make(site: Site) -> DictConfig:
        (site.folder / name).write_bytes(content)
        return site.config(dataset={**BLOCKS, **arguments, "source": str(site.folder / name)})

    return make


def mix(*datasets: Mapping[str, Any], **overrides: Any) -> Callable[[Site], DictConfig]:
    """Make a config with several data sets of the same documents."""
    return lambda site: site.config(
        dataset=[{**dataset, "source": str(site.text_file)} for dataset in datasets], **overrides
    )


def masked(site: Site) -> DictConfig:
    """Make a config whose answers are cut off in torchtune's own data set, so that no label is
    left.
    """
    conversation = {
        "messages": [
            {"role": "user", "content": "word " * 500},
            {"role": "assistant", "content": "yes"},
        ]
    }
    (site.folder / "chat.jsonl").write_text(100 * (json.dumps(conversation) + "\n"))
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


def tokenizer(edit: Callable[[Path], object]) -> Callable[[Site], DictConfig]:
    """Make a config with an edited copy of the tokenizer."""

    def make(site: Site) -> DictConfig:
        folder = site.folder / "tokenizer"
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_bytes((site.checkpoint / name).read_bytes())
        edit(folder)
        return site.config(**{"tokenizer.path": str(folder)})

    return make


def add_tokens(folder: Path) -> None:
    edited = Tokenizer.from_file(str(folder / "tokenizer.json"))
    edited.add_tokens([f"extra{number}" for number in range(10)])
    edited.save(str(folder / "tokenizer.json"))


def leave_config_only(folder: Path) -> None:
    """Remove all files of the tokenizer."""
    for file in list(folder.iterdir()):
        file.unlink()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


class OtherTokens(Dataset[Any]):
    """Sequences of another tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        pass

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": [400] * BLOCK_SIZE, "labels": [400] * BLOCK_SIZE}


DATA = [
    BadInput(
        "random bytes",
        blocks_of("a.txt", bytes(range(256)) * 9),
        r"dataset: .*/a\.txt' is in UTF-16 or UTF-32: convert it",
    ),
    BadInput(
        "blocks too long",
        blocks_of("a.txt", TEXT, block_size=65),
        "block_size is 65, above max_seq_len 64.*: lower block_size",
    ),
    value("dataset.source", "/no/file.txt", r"dataset: no such file or folder: '/no/file\.txt'"),
    value(
        "dataset.source",
        "nobody/nothing",
        "dataset: 'nobody/nothing' is not on this machine, and the Hugging Face hub could not be",
    ),
    value(
        "dataset.num_targets",
        1000,
        "found .* passages .*, needed 2000. Lower num_base .*num_targets",
    ),
    value("dataset.num_base", 100_000, "found .* base blocks .*, needed 100000. Lower num_base"),
    value("dataset", [], r"has 0 sequences, the run 1 process\(es\): add data"),
    value(
        "dataset",
        {"_component_": "torch.nn.Identity"},
        "dataset: .*has no __len__, __getitem__: take, for example, tfidf_tune.data.",
    ),
    BadInput("one packed, one not", mix({**TEXTS, "packed": True}, BLOCKS), "dataset: .*packed"),
    BadInput(
        "packed rows with another collate function",
        mix({**TEXTS, "packed": True}, collate_fn="torchtune.data.padded_collate_dpo"),
        "collate_fn is .*padded_collate_dpo, .*: leave collate_fn out, or set dataset.packed to "
        "false",
    ),
    BadInput(
        "no label that is not masked",
        masked,
        "none of the 100 sequences has a label .*; raise the limit of tokens, or unmask some",
    ),
    value(
        "dataset",
        {"_component_": "test_bad_data.OtherTokens"},
        "token id 400, .* ids 0 to 319: use the model's tokenizer",
        begins=True,
    ),
]
TOKENIZERS = [
    value(
        "tokenizer.path",
        "/no/folder",
        "tokenizer: no such folder: '/no/folder': name a folder with tokenizer.json",
    ),
    BadInput(
        "no tokenizer",
        tokenizer(leave_config_only),
        "tokenizer: .*/tokenizer' has no tokenizer files: name a folder with tokenizer.json",
    ),
    BadInput(
        "more tokens than embeddings",
        tokenizer(add_tokens),
        "the id 329, .* ids 0 to 319: use the tokenizer that belongs to the model",
    ),
    value(
        "tokenizer.max_seq_len",
        65,
        r"tokenizer\.max_seq_len is 65, the model takes at most 64: lower it",
    ),
    value(
        "tokenizer",
        {"_component_": "torch.nn.Identity"},
        "tokenizer: .*has no encode: take, for example, tfidf_tune.data.hf_tokenizer",
    ),
]


@each_row([*DATA, *TOKENIZERS])
def test_wrong_data_or_tokenizers_are_refused_in_one_message(row, site):
    assert_refused(row, site)
