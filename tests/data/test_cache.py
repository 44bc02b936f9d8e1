"""The key of a cache has all that its contents follow from: each argument of each data set is
changed in one cache.
"""

import inspect
import json
import random
import zlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import datasets
import pytest
import torch
from helpers.fakes.data import WORDS, write_rows
from transformers import AddedToken, AutoTokenizer

import tfidf_tune.data
from tfidf_tune.data import (
    TextSource,
    cnn_dailymail_dataset,
    hf_tokenizer,
    injected_corpus_dataset,
    sft_dataset,
    squad_dataset,
    text_blocks,
    text_blocks_dataset,
    text_dataset,
)
from tfidf_tune.data.sequences import unpacked
from tfidf_tune.data.text import without_shared_text
from tfidf_tune.passages import ProbeSpec
from tfidf_tune.passages.choosing import search_arguments

# Where something is written changes nothing in it.
WITHOUT_EFFECT = {"cache_dir", "probe_file"}


class Pair(NamedTuple):
    """Two values of an argument, with which the result differs if other arguments have certain
    values.
    """

    first: Any
    second: Any
    others: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """A function with a cache, the arguments that all its pairs have, and pairs of each of its
    arguments.
    """

    function: Callable[..., Any]
    given: dict[str, Any]
    pairs: dict[str, list[Pair]]


def texts(seed):
    """Random texts, then copies of the first: an equal one, one of another end, one with a special
    token.
    """
    rng = random.Random(seed)
    drawn = [
        (" ".join(rng.choices(WORDS, k=40)), " ".join(rng.choices(WORDS, k=30))) for _ in range(30)
    ]
    drawn += [tuple(text + end for text in drawn[0]) for end in ("", " once", "<|mark|>")]
    return [{"text": text, "other": other} for text, other in drawn]


def answers(seed):
    return [
        {"prompt": "Who?", "completion": f" {row['text']}", "other": row["other"]}
        for row in texts(seed)
    ]


def questions(seed):
    rows = [(row["text"], row["text"].find("1984")) for row in texts(seed)]
    return [
        {
            "context": text,
            "question": "When?",
            "answers": {"text": ["1984"], "answer_start": [start]},
        }
        for text, start in rows
        if start >= 0
    ]


def articles(seed):
    return [{"article": row["text"], "highlights": row["other"]} for row in texts(seed)]


KINDS = {"texts": texts, "answers": answers, "questions": questions, "articles": articles}


def sources(kind, name, split):
    """Pairs of a source: of the hub, and a file whose contents change."""
    return {
        "source": [
            Pair(f"a/{kind}", f"b/{kind}"),
            Pair(f"changing_{kind}.jsonl", f"changing_{kind}.jsonl"),
        ],
        name: [Pair("c", "d")],
        split: [Pair("train", "test")],
    }


def tokenizers(*names):
    return {"tokenizer": [Pair("plain", name) for name in names]}


def blocks(seed):
    """A function of a tokenizer."""
    return lambda tokenizer: text_blocks(
        tokenizer, [row["text"] for row in texts(seed)], block_size=16
    )


NEAR = {"threshold": 0.9, "ngram": 1}
DEDUPLICATE = [
    Pair("none", "exact"),
    Pair("exact", NEAR),
    Pair(NEAR, NEAR | {"threshold": 0.99}),
    Pair(NEAR, NEAR | {"ngram": 30}),
]
TEMPLATE = {"apply_chat_template": True, "chat_template": "short.jinja"}
MEASURED = {
    "targets": "random",
    "num_targets": 2,
    "num_controls": 2,
    "num_repeats": 3,
    "min_target_tokens": 8,
}
WITHOUT_COPIES = MEASURED | {"deduplicate": "exact"}
# All examples without a copy are targets, so that a seed changes nothing but the order.
SAME_EXAMPLES = WITHOUT_COPIES | {"num_targets": 29, "num_controls": 0}
# Passages have the names of their source and of the tokenizer.
SAME_TEXT = Pair("texts.jsonl", "same_texts.jsonl")


def measured(first, second):
    """Pairs of an argument that decides about targets, with and without removal of copies."""
    return [Pair(first, second, MEASURED), Pair(first, second, WITHOUT_COPIES)]


CASES = [
    Case(
        text_blocks_dataset,
        {"source": "a/texts", "block_size": 16},
        {
            **tokenizers("eos", "vocabulary"),
            **sources("texts", "source_name", "source_split"),
            "source_column": [Pair("text", "other")],
            "sample_by": [Pair("line", "document", {"source": "lines.txt"})],
            "block_size": [Pair(16, 24)],
            "num_blocks": [Pair(None, 3), Pair(2, 3)],
            "holdout": [Pair(0.0, 0.3), Pair(0.1, 0.2)],
            "deduplicate": DEDUPLICATE,
        },
    ),
    Case(
        text_blocks_dataset,
        {"source": "a/texts", "block_size": 16, "holdout": 0.3},
        {**tokenizers("renamed"), "source": [SAME_TEXT]},
    ),
    Case(
        text_dataset,
        {"source": "a/texts", "max_seq_len": 512},
        {
            **tokenizers("eos", "bos", "vocabulary"),
            **sources("texts", "source_name", "source_split"),
            "source_column": [Pair("text", "other")],
            "sample_by": [Pair("line", "document", {"source": "lines.txt"})],
            "max_seq_len": [Pair(32, 48)],
            "add_bos": [Pair(True, False, {"tokenizer": "bos"})],
            "add_eos": [Pair(True, False)],
            "packed": [Pair(True, False)],
            "deduplicate": DEDUPLICATE,
        },
    ),
    Case(
        text_dataset,
        {"source": "a/texts", "max_seq_len": 512, "deduplicate": NEAR | {"threshold": 0.99}},
        tokenizers("special"),
    ),
    Case(
        injected_corpus_dataset,
        {
            "source": "a/texts",
            "target_source": "b/texts",
            "layout": "concatenated",
            "num_base": 8,
            "num_targets": 3,
            "num_repeats": 2,
            "min_target_tokens": 20,
            "block_size": 16,
        },
        {
            **tokenizers("eos", "vocabulary", "renamed"),
            **sources("texts", "source_name", "source_split"),
            "source_column": [Pair("text", "other")],
            "sample_by": [Pair("line", "document", {"source": "lines.txt", "num_base": -1})],
            "num_base": [Pair(8, 9), Pair(8, -1)],
            "target_source": [
                Pair("b/texts", "c/texts"),
                Pair("b/texts", None, {"num_base": -1}),
                SAME_TEXT,
            ],
            "target_name": [Pair("c", "d")],
            "target_split": [Pair("train", "test")],
            "target_column": [Pair("text", "other")],
            "num_targets": [Pair(3, 4), Pair(3, None)],
            "min_target_tokens": [Pair(20, 120)],
            "num_repeats": [Pair(2, 3)],
            "num_controls": [Pair(None, 1)],
            "block_size": [Pair(16, 20)],
            "layout": [Pair("aligned", "concatenated")],
            "noise": [Pair(0.0, 0.2), Pair(0.2, 0.3)],
            "noise_kind": [Pair("replace", "drop", {"noise": 0.2})],
            "deduplicate": [Pair("none", "exact", {"layout": "aligned"})],
            "seed": [Pair(0, 1)],
        },
    ),
    Case(
        sft_dataset,
        {"source": "a/answers"},
        {
            **tokenizers("eos", "bos", "vocabulary"),
            **sources("answers", "source_name", "source_split"),
            "source_column": [Pair(None, "completion"), Pair("other", "completion")],
            "max_seq_len": [Pair(32, 48), Pair(32, 512, {"deduplicate": "exact"})],
            "train_on": [Pair("completions", "all")],
            "system": [Pair(None, "Be brief."), Pair("Be quick.", "Be brief.")],
            "chat_template": [Pair("short.jinja", "long.jinja", TEMPLATE)],
            "apply_chat_template": [Pair(None, True, TEMPLATE)],
            "targets": [
                Pair(None, "random", MEASURED),
                Pair("random", "changing_answers.jsonl", WITHOUT_COPIES),
            ],
            "num_targets": measured(2, 3),
            "num_controls": measured(2, 3),
            "num_repeats": measured(2, 3),
            "min_target_tokens": measured(8, 120),
            "seed": [*measured(0, 1), Pair(0, 1, SAME_EXAMPLES)],
            "deduplicate": DEDUPLICATE,
            "packed": [Pair(True, False)],
        },
    ),
    Case(
        squad_dataset,
        {"source": "a/questions"},
        {
            **tokenizers("eos", "bos", "vocabulary"),
            **sources("questions", "name", "split"),
            "max_seq_len": [Pair(64, 80)],
            "packed": [Pair(True, False)],
        },
    ),
    Case(
        cnn_dailymail_dataset,
        {"source": "a/articles", "max_source_tokens": 256},
        {
            **tokenizers("eos", "bos", "vocabulary"),
            **sources("articles", "name", "split"),
            "max_source_tokens": [Pair(64, 80)],
            "max_target_tokens": [Pair(16, 24)],
            "packed": [Pair(True, False)],
        },
    ),
    Case(
        without_shared_text,
        {"blocks": blocks(0), "num_tokens": 12, "place": TextSource("texts.jsonl")},
        {
            **tokenizers("vocabulary"),
            "blocks": [Pair(blocks(0), blocks(1))],
            "num_tokens": [Pair(2, 12, {"place": TextSource("a/texts")})],
            "place": [Pair(TextSource("texts.jsonl"), TextSource("texts.jsonl", column="other"))],
        },
    ),
]


@pytest.fixture(scope="module")
def tokenizers_by_name(embedded_tokenizer_folder, tmp_path_factory):
    """Tokenizers that differ in one property; where it is not the vocabulary, their fingerprints
    are equal.
    """
    folder = tmp_path_factory.mktemp("tokenizers")
    marks = ["<|end|>", "<|begin|>", "<|mark|>"]
    special_tokens = {
        "plain": {"additional_special_tokens": marks},
        "renamed": {"additional_special_tokens": marks},
        "eos": {"additional_special_tokens": marks, "eos_token": "<|end|>"},
        "bos": {"additional_special_tokens": marks, "bos_token": "<|begin|>"},
        "special": {"additional_special_tokens": marks[:2]},
        "vocabulary": {"additional_special_tokens": marks},
    }
    made = {}
    for name, changes in special_tokens.items():
        tokenizer = AutoTokenizer.from_pretrained(embedded_tokenizer_folder)
        # As special tokens are.
        tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
        tokenizer.add_special_tokens(changes)
        tokenizer.save_pretrained(folder / name)
        if name == "vocabulary":
            swap_ids_of_digits(folder / name / "tokenizer.json")
        made[name] = hf_tokenizer(str(folder / name), max_seq_len=512)
        made[name].name = "other" if name == "renamed" else "mine"
    others = {tokenizer.fingerprint for name, tokenizer in made.items() if name != "vocabulary"}
    assert len(others) == 1
    assert made["vocabulary"].fingerprint not in others
    return made


def swap_ids_of_digits(file):
    data = json.loads(file.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary |= {"9": vocabulary["8"], "8": vocabulary["9"]}
    file.write_text(json.dumps(data))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with files; data sets of the hub have rows that follow
    from their names.
    """

    def load_dataset(source, name, *, split, streaming):
        seed = zlib.crc32(f"{source} {name} {split}".encode()) % 1000
        kind = source.partition("/")[2]
        return datasets.Dataset.from_list(KINDS[kind](seed)).to_iterable_dataset()

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    for name in ("texts.jsonl", "same_texts.jsonl"):
        write_rows(tmp_path / name, texts(0))
    (tmp_path / "lines.txt").write_text("\n".join(row["text"] for row in texts(0)))
    for name, end in (("short", "."), ("long", ". Yes.")):
        (tmp_path / f"{name}.jinja").write_text(
            f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"
        )
    return tmp_path


def contents(dataset):
    """The rows of a data set, its passages and its counts."""
    rows = [{key: torch.as_tensor(value).tolist() for key, value in row.items()} for row in dataset]
    fields = vars(unpacked(dataset)).items()
    return rows, {
        name: value
        for name, value in fields
        if name in ("passages", "counts") or name.startswith("num_")
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_nothing_is_read_from_the_cache_of_other_arguments(
    case, tokenizers_by_name, folder, monkeypatch
):
    def build(cache, version, arguments):
        monkeypatch.setenv("TFIDF_TUNE_CACHE", str(folder / cache))
        for kind, rows in KINDS.items():
            write_rows(folder / f"changing_{kind}.jsonl", rows(version))
        arguments = {"tokenizer": "plain"} | case.given | arguments
        arguments["tokenizer"] = tokenizers_by_name[arguments["tokenizer"]]
        if case.function is without_shared_text:
            arguments["blocks"] = arguments["blocks"](tokenizers_by_name["plain"])
            return without_shared_text(**arguments).tolist()
        return contents(case.function(**arguments))

    for argument, pairs in case.pairs.items():
        for number, pair in enumerate(pairs):
            before = build("shared", 0, pair.others | {argument: pair.first})
            shared = build("shared", 1, pair.others | {argument: pair.second})
            fresh = build(f"{argument}-{number}", 1, pair.others | {argument: pair.second})
            assert shared == fresh, (
                f"{argument}: {pair.second} is read from the cache of {pair.first}"
            )
            assert fresh != before, (
                f"{argument}: {pair.first} and {pair.second} should give different results"
            )


def test_each_argument_of_each_data_set_is_tried():
    tried = {}
    for case in CASES:
        tried.setdefault(case.function, set()).update(case.pairs)
    for function, arguments in tried.items():
        assert arguments == inspect.signature(function).parameters.keys() - WITHOUT_EFFECT, (
            function.__name__
        )
    public = [getattr(tfidf_tune.data, name) for name in tfidf_tune.data.__all__]
    with_cache = {one for one in public if "cache_dir" in inspect.signature(one).parameters}
    assert with_cache | {without_shared_text} == tried.keys()


def test_an_interrupted_search_of_passages_goes_on_with_the_same_tokenizer_only(
    tokenizers_by_name, folder
):
    spec = ProbeSpec((str(folder / "texts.jsonl"),))
    found = {
        name: search_arguments(tokenizer, spec) for name, tokenizer in tokenizers_by_name.items()
    }
    same = {name for name, arguments in found.items() if arguments == found["plain"]}
    assert same == {"plain", "renamed"}
