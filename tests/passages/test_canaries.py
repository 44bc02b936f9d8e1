import itertools
from collections import Counter

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from helpers.fakes.data import passage
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from tfidf_tune.data import HFTokenizer, hf_tokenizer, tokenizer_fingerprint
from tfidf_tune.passages import InjectedCanaries, read_probe_file

BLOCK = 56
NUM_ROWS = 60
TEXTS = [
    f"The secret of {name} is {name * 3}."
    for name in ("anna", "bert", "carla", "dora", "emil", "fritz")
]

pytestmark = pytest.mark.filterwarnings(
    # SFTTrainer turns its own default on under the old name.
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def tokenizers(embedded_tokenizer_folder, sentencepiece_folder, tmp_path_factory):
    """As transformers loads them: byte-level BPE, and SentencePiece, which adds a space before a
    text, with BOS.
    """
    folder = tmp_path_factory.mktemp("saved")
    hf_tokenizer(str(sentencepiece_folder)).save_pretrained(folder)
    return {
        "byte_level": AutoTokenizer.from_pretrained(embedded_tokenizer_folder),
        "sentencepiece": AutoTokenizer.from_pretrained(folder, add_bos_token=True),
    }


@pytest.fixture(scope="module")
def dataset():
    """Text, and columns of all kinds that a host may keep."""
    features = Features(
        {
            "id": Value("int32"),
            "text": Value("large_string"),
            "label": ClassLabel(names=["good", "bad"]),
            "tags": List(Value("string")),
            "origin": {"url": Value("string")},
        }
    )
    rows = {
        "id": range(NUM_ROWS),
        "text": [None, *(passage(seed, 12) for seed in range(1, NUM_ROWS))],
        "label": [0] * NUM_ROWS,
        "tags": [["a", "b"]] * NUM_ROWS,
        "origin": [{"url": "here"}] * NUM_ROWS,
    }
    return Dataset.from_dict(rows, features=features)


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def injected(request, tokenizers, dataset):
    tokenizer = tokenizers[request.param]
    canaries = InjectedCanaries(
        tokenizer, num_targets=6, num_controls=5, repeats=(2, 8, 3), block_size=BLOCK, seed=1
    )
    return tokenizer, canaries, canaries.inject(dataset, row={"label": 1})


def tokenized_by_trl(tokenizer, dataset, folder):
    settings = {
        "bf16": False,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    arguments = SFTConfig(str(folder), **settings)
    trainer = SFTTrainer(model, arguments, train_dataset=dataset, processing_class=tokenizer)
    return [list(ids) for ids in trainer.train_dataset["input_ids"]]


def count(token_ids, rows):
    size = len(token_ids)
    number = 0
    for row in rows:
        starts = range(len(row) + 1 - size)
        number += sum(row[start : start + size] == token_ids for start in starts)
    return number


def test_the_pipeline_sees_each_target_as_often_as_the_probe_file_says(injected, tmp_path):
    tokenizer, canaries, result = injected
    canaries.write_probe_file(tmp_path / "probe.jsonl")
    passages = read_probe_file(tmp_path / "probe.jsonl")
    # TRL takes none; it is the first of all rows.
    without_null = result.filter(lambda row: row["text"] is not None)
    rows = tokenized_by_trl(tokenizer, without_null, tmp_path)

    assert [each.id for each in passages] == [
        *(f"target-{number:04d}" for number in range(6)),
        *(f"control-{number:04d}" for number in range(5)),
    ]
    assert [each.num_injections for each in passages] == [2, 8, 3] * 2 + [0] * 5
    assert [count(each.token_ids, rows) for each in passages] == [
        each.num_injections for each in passages
    ]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for each in passages:
        assert len(each.token_ids) == BLOCK
        assert each.text == each.text.strip()
        assert each.tokenizer_fingerprint == tokenizer_fingerprint(HFTokenizer(tokenizer))
        assert each.positions == sorted(each.positions)
        for row, offset in each.positions:
            assert (result[row]["text"], offset) == (each.text, 0)
            assert tokenizer(each.text)["input_ids"][: BLOCK + len(bos)] == bos + each.token_ids
    long_parts = [
        {tuple(each.token_ids[start : start + 50]) for start in range(BLOCK + 1 - 50)}
        for each in passages
    ]
    assert all(first.isdisjoint(second) for first, second in itertools.combinations(long_parts, 2))


def test_everything_follows_from_the_seed_and_each_text_is_as_often_target_as_control(
    tokenizers, dataset
):
    def make(seed):
        canaries = InjectedCanaries(
            tokenizers["byte_level"],
            texts=TEXTS,
            num_targets=2,
            num_controls=2,
            repeats=2,
            seed=seed,
        )
        return canaries.inject(dataset).to_list(), canaries.passages

    made = [make(seed) for seed in range(40)]

    assert make(7) == made[7]
    injected = itertools.chain.from_iterable(passages[:2] for _, passages in made)
    assert len({str(each.positions) for each in injected}) > 70
    # expected: 40 seeds * 2 of 6 texts = 13.3 each, with a standard deviation of 3.0
    for chosen in (slice(0, 2), slice(2, 4)):
        times = Counter()
        for _, passages in made:
            times.update(each.text for each in passages[chosen])
        assert set(times) == set(TEXTS)
        assert 5 <= min(times.values()) <= max(times.values()) <= 22


@pytest.mark.parametrize("is_random", [True, False])
def test_the_probe_file_says_which_canaries_are_random(tokenizers, dataset, tmp_path, is_random):
    canaries = InjectedCanaries(
        tokenizers["byte_level"], texts=TEXTS, num_targets=2, is_random=is_random
    )
    canaries.inject(dataset)
    canaries.write_probe_file(tmp_path / "probe.jsonl")
    written = [each.is_random for each in read_probe_file(tmp_path / "probe.jsonl")]
    assert written == [is_random or None] * 4


def test_what_the_data_set_contains_is_not_a_canary(tokenizers, dataset):
    tokenizer = tokenizers["byte_level"]
    half = Dataset.from_dict({"text": [f"As I said: {text} So it is." for text in TEXTS[:3]]})
    for seed in range(5):
        canaries = InjectedCanaries(
            tokenizer, texts=TEXTS, num_targets=2, num_controls=1, seed=seed
        )
        canaries.inject(half)
        assert {each.text for each in canaries.passages} == set(TEXTS[3:])
    with pytest.raises(
        ValueError,
        match="is 4, but .* only 3 texts or passages that the column 'text' does not contain",
    ):
        InjectedCanaries(tokenizer, texts=TEXTS, num_targets=2).inject(half)


def test_settings_that_cannot_be_met_are_refused(tokenizers, dataset):
    tokenizer = tokenizers["byte_level"]
    short = AutoTokenizer.from_pretrained(tokenizer.name_or_path, model_max_length=64)
    for arguments, message in (
        ({"tokenizer": "folder"}, "tokenizer is a str"),
        ({"repeats": (1, 4), "num_targets": 1}, "num_targets .* got 1"),
        *(({"repeats": repeats}, "repeats must be") for repeats in (2.5, [3, 0])),
        ({"tokenizer": short}, "above max_seq_len 64, .*: lower block_size"),
        ({"tokenizer": short, "texts": [*TEXTS, "a b " * 99]}, "the longest of texts"),
        ({"texts": [*TEXTS, ""]}, r"texts\[6\] is ''"),
        ({"is_random": True}, "is_random is for texts of your own"),
        ({"texts": [TEXTS[0][:-5], *TEXTS]}, r"texts\[0\] is .* no part of another"),
    ):
        with pytest.raises(ValueError, match=message):
            InjectedCanaries(**{"tokenizer": tokenizer, "num_targets": 2} | arguments)
    with pytest.raises(ValueError, match="num_targets.* is 8, but there are only 6 texts"):
        InjectedCanaries(tokenizer, texts=TEXTS, num_targets=4).inject(dataset)


def test_a_data_set_that_cannot_carry_canaries_is_refused_and_nothing_is_done_twice(
    tokenizers, dataset, tmp_path
):
    canaries = InjectedCanaries(tokenizers["byte_level"], texts=TEXTS, num_targets=2)
    for arguments, message in (
        ((DatasetDict(train=dataset),), "column 'text' of text; this DatasetDict"),
        ((dataset.to_iterable_dataset(),), "this IterableDataset"),
        ((dataset, "id"), "a column 'id' of text"),
        (
            (dataset, "text", {"labels": 1, "text": "a"}),
            r"row gives values for \['labels', 'text'\]",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            canaries.inject(*arguments)
    with pytest.raises(ValueError, match="no canaries yet"):
        canaries.write_probe_file(tmp_path / "probe.jsonl")
    canaries.inject(dataset)
    with pytest.raises(ValueError, match=r"inject\(\) was called before"):
        canaries.inject(dataset)
