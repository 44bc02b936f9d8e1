"""Data and tokenizers that do not fit a run are refused in one message; what modules check by themselves, see there."""

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
    """Make a config whose answers are cut off in torchtune's own data set, so that no label is left."""
    conversation = {"messages": [{"role": "user", "content": "word " * 500}, {"role": "assistant", "content": "yes"}]}
    (site.folder / "chat.jsonl").write_text(100 * (json.dumps(conversation) + "\n"))
    return site.config(
        dataset={
            "_component_": "torchtune.datasets.chat_dataset", "source": "json",
            "data_files": str(site.folder / "chat.jsonl"), "conversation_column": "messages",
            "conversation_style": "openai", "split": "train",
        }
    )  # fmt: skip


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
    BadInput("random bytes", blocks_of("a.txt", bytes(range(256)) * 9), r"dataset: .*/a\.txt"),
    BadInput("blocks too long", blocks_of("a.txt", TEXT, block_size=65), "block_size is 65"),
    value("dataset.source", "/no/file.txt", r"dataset: .*'/no/file\.txt'"),
    value("dataset.source", "nobody/nothing", "'nobody/nothing'"),
    value("dataset.num_targets", 1000, "num_targets"),
    value("dataset.num_base", 100_000, "num_base"),
    value("dataset", [], "has 0 sequences"),
    value("dataset", {"_component_": "torch.nn.Identity"}, "dataset: .*__len__"),
    BadInput("one packed, one not", mix({**TEXTS, "packed": True}, BLOCKS), "dataset: .*packed"),
    BadInput(
        "packed rows with another collate function",
        mix({**TEXTS, "packed": True}, collate_fn="torchtune.data.padded_collate_dpo"),
        "collate_fn .*packed",
    ),
    BadInput("no label that is not masked", masked, "none of the 100 sequences has a label"),
    value("dataset", {"_component_": "test_bad_data.OtherTokens"}, "token id 400", begins=True),
]
TOKENIZERS = [
    value("tokenizer.path", "/no/folder", "tokenizer: .*'/no/folder'"),
    BadInput("no tokenizer", tokenizer(leave_config_only), "tokenizer: .*/tokenizer"),
    BadInput("more tokens than embeddings", tokenizer(add_tokens), "id 329"),
    value("tokenizer.max_seq_len", 65, r"tokenizer\.max_seq_len is 65"),
    value("tokenizer", {"_component_": "torch.nn.Identity"}, "tokenizer: .*encode"),
]


@each_row([*DATA, *TOKENIZERS])
def test_wrong_data_or_tokenizers_are_refused_in_one_message(row, site):
    assert_refused(row, site)
