"""Completions as memorization targets: which are chosen, what of them is measured, what is left of
the data set.
"""

import logging
import math
import random
from collections import Counter
from itertools import product

import pytest
from helpers.fakes.data import WORDS, controls_of, targets_of, write_rows
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tfidf_tune.data import hf_tokenizer, sft_dataset
from tfidf_tune.passages import read_probe_file

NAMES = ["ann", "bob", "cid", "dan", "eve", "fay", "gil", "hal", "ida", "jon"]
SIZES = {"num_targets": 2, "num_controls": 3, "min_target_tokens": 8}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ "
    "eos_token }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% "
    "endif %}"
)


def sentence(seed, num_words=16):
    """Words in a random order, so that two sentences share no long run."""
    return " ".join(random.Random(seed).choices(WORDS[:-1], k=num_words)).capitalize() + "."


def row(name, question="Who?"):
    return {"prompt": f"{question}\n", "completion": sentence(name)}


UNIQUE = [row(name) for name in NAMES]
TWICE = row("zed")
THRICE = row("yan")
SHORT = {"prompt": "Yes?", "completion": " Yes."}
ROWS = [
    *UNIQUE,
    *[TWICE] * 2,
    *[THRICE, row("yan", "Where?"), THRICE],
    *[SHORT] * 9,
    {"text": "the river sings " * 9},
]


@pytest.fixture
def sft(tmp_path, tokenizer):
    """Build a data set of given rows."""

    def build(rows=ROWS, tokenizer=tokenizer, **arguments):
        given = {
            "source": write_rows(tmp_path / "rows.jsonl", rows),
            "max_seq_len": 128,
            "cache_dir": str(tmp_path / "cache"),
        } | SIZES
        return sft_dataset(tokenizer, **given | arguments)

    return build


@pytest.fixture
def template(tmp_path):
    """A file with a chat template."""
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    return str(file)


def answer_of(tokenizer, passage):
    return tokenizer.decode(passage.token_ids[passage.num_prompt :])


def trained(tokenizer, dataset):
    """Count the texts of a data set."""
    return Counter(tokenizer.decode(sample["tokens"]) for sample in dataset)


def text_of(row):
    return row.get("prompt", "") + row.get("completion", row.get("text", "").strip())


def assert_places_are_right(dataset):
    for passage in dataset.passages:
        answer = passage.token_ids[passage.num_prompt :]
        assert len(passage.positions) == passage.num_injections
        least = math.ceil(0.9 * len(answer))
        for index, offset in passage.positions:
            assert longest_run(answer, dataset[index]["labels"][offset:][:least]) == least


def test_duplicates_are_the_most_frequent_answers(sft, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        dataset = sft(targets="duplicates", probe_file=str(tmp_path / "probe.jsonl"))
    assert read_probe_file(tmp_path / "probe.jsonl") == dataset.passages
    first, second = targets_of(dataset)
    assert [first.num_injections, second.num_injections] == [3, 2]
    # The answer without EOS, after its most frequent prompt.
    assert [first.text, second.text] == [text_of(THRICE), text_of(TWICE)]
    assert answer_of(tokenizer, first) == THRICE["completion"]
    assert first.token_ids[: first.num_prompt] == tokenizer.encode(THRICE["prompt"], add_eos=False)
    assert_places_are_right(dataset)
    controls = {passage.text for passage in controls_of(dataset)}
    assert len(controls) == 3
    assert controls < {text_of(one) for one in UNIQUE}
    assert trained(tokenizer, dataset) == Counter(
        text_of(one) for one in ROWS if text_of(one) not in controls
    )
    assert "2 completions are targets, which occur 2 to 3 times; 3 are controls" in caplog.text


@pytest.mark.parametrize("num_repeats", [1, 4])
def test_random_examples_are_repeated(sft, tokenizer, num_repeats):
    dataset = sft(targets="random", num_repeats=num_repeats)
    targets, controls = (
        {passage.text for passage in kind(dataset)} for kind in (targets_of, controls_of)
    )
    assert [len(targets), len(controls), targets & controls] == [2, 3, set()]
    assert targets | controls < {text_of(one) for one in UNIQUE}
    expected = Counter(text_of(one) for one in ROWS if text_of(one) not in controls)
    assert trained(tokenizer, dataset) == expected + Counter(
        dict.fromkeys(targets, num_repeats - 1)
    )
    assert {passage.num_injections for passage in targets_of(dataset)} == {num_repeats}
    assert_places_are_right(dataset)
    assert sft(targets="random", num_repeats=num_repeats).passages == dataset.passages
    assert sft(targets="random", num_repeats=num_repeats, seed=1).passages != dataset.passages


def test_copies_of_rows_are_removed_after_targets_were_chosen(sft, tokenizer):
    """A row that differs in its prompt stays."""
    once = {text_of(row): 1 for row in ROWS}
    assert trained(tokenizer, sft(targets=None, deduplicate="exact")) == once
    assert trained(tokenizer, sft(targets=None)).total() == len(ROWS)

    copied, removed = (
        sft(targets="random", num_repeats=5, deduplicate=method, seed=1)
        for method in ("none", "exact")
    )
    assert [one.token_ids for one in removed.passages] == [one.token_ids for one in copied.passages]
    assert trained(tokenizer, removed) == dict.fromkeys(trained(tokenizer, copied), 1)
    assert [one.num_injections for one in targets_of(copied)] == [5] * SIZES["num_targets"]
    assert [one.num_injections for one in targets_of(removed)] == [1] * SIZES["num_targets"]
    assert_places_are_right(removed)
    near = trained(tokenizer, sft(targets=None, deduplicate={"threshold": 0.5}))
    assert near.keys() < once.keys(), "the same answer to another question is a near copy"
    with pytest.raises(
        ValueError, match="deduplicate is 'fuzzy': possible are none, exact, minhash"
    ):
        sft(deduplicate="fuzzy")


def test_rows_of_a_file_are_put_in(sft, tokenizer, tmp_path):
    others = [row(f"{name} of the file", "How?") for name in NAMES]
    dataset = sft(
        targets=write_rows(tmp_path / "targets.jsonl", [*others, TWICE, SHORT]), num_repeats=5
    )
    targets, controls = (
        {passage.text for passage in kind(dataset)} for kind in (targets_of, controls_of)
    )
    assert [len(targets), len(controls), targets & controls] == [2, 3, set()]
    assert targets | controls < {text_of(one) for one in others}
    expected = Counter(map(text_of, ROWS)) + Counter(dict.fromkeys(targets, 5))
    assert trained(tokenizer, dataset) == expected
    assert_places_are_right(dataset)
    order = [text_of(one) for one in ROWS]
    texts = [tokenizer.decode(sample["tokens"]) for sample in dataset]
    assert [text for text in texts if text not in targets] == order


def test_the_last_answer_of_a_conversation_is_measured_without_its_end(sft, tokenizer, template):
    first = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, what do you want to know?"},
    ]
    last = [
        [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": r["completion"]}]
        for r in UNIQUE
    ]
    rows = [{"messages": first + turns} for turns in last]
    dataset = sft(rows, targets="random", chat_template=template)
    for passage in dataset.passages:
        answer = answer_of(tokenizer, passage)
        assert {"prompt": "Who?\n", "completion": answer} in UNIQUE
        prompt = (
            "<user>Hi\n<assistant>Hello, what do you want to "
            "know?<|endoftext|>\n<user>Who?\n<assistant>"
        )
        assert passage.text == prompt + answer
    assert_places_are_right(dataset)
    assert len(sft(rows, targets="random", chat_template=template, train_on="last").passages) == 5


def test_a_conversation_with_a_short_last_answer_is_not_measured_by_an_earlier_one(
    sft, tokenizer, template
):
    end = [{"role": "user", "content": "Thank you!"}, {"role": "assistant", "content": "Yes."}]
    rows = []
    completions = [row["completion"] for row in UNIQUE]
    for number, completion in enumerate(completions):
        turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": completion}]
        rows.append({"messages": turns if number < 5 else turns + end})
    dataset = sft(rows, targets="random", chat_template=template)
    assert {answer_of(tokenizer, passage) for passage in dataset.passages} == {*completions[:5]}


def long_answer(chat, turn):
    return sentence(turn * 10 + chat)


def conversation(chat, turns):
    messages = []
    for turn in turns:
        messages.append({"role": "user", "content": f"What of {turn}?"})
        messages.append({"role": "assistant", "content": long_answer(chat, turn)})
    return messages


# Row k + 1 contains row k, as in an export after each turn.
TURN_BY_TURN = [
    {"messages": conversation(chat, range(n))} for chat, n in product(range(10), (1, 2, 3))
]
# The last answer of a row is the first of another row, or within its text.
MULTI_TURN = [
    {"messages": conversation(chat, turns)}
    for chat, turns in product(range(10), ([0], [1, 2], [2, 0], [3], [4, 5]))
]
MULTI_TURN += [{"text": f"It is known:\n{long_answer(chat, 3)} So they say."} for chat in range(5)]


def longest_run(answer, labels):
    """Length of the longest run of tokens that two lists share, by the textbook's table."""
    longest = 0
    row = [0] * (len(labels) + 1)
    for token in answer:
        above = row
        row = [0]
        for before, label in zip(above, labels, strict=False):
            length = before + 1 if token == label else 0
            row.append(length)
        longest = max(longest, *row)
    return longest


def runs_of(dataset, passage):
    """Return the tokens of a passage's answer, and the longest runs of it that the rows learn."""
    answer = passage.token_ids[passage.num_prompt :]
    return len(answer), [longest_run(answer, sample["labels"]) for sample in dataset]


def assert_what_is_learned(dataset, injections):
    """Check the numbers of injections, and that no row learns a long run of a control."""
    for passage in dataset.passages:
        length, runs = runs_of(dataset, passage)
        if passage.kind == "control":
            assert max(runs) < min(0.9 * length, max(16, length / 2))
        else:
            assert sum(run >= 0.9 * length for run in runs) == passage.num_injections
            assert passage.num_injections in injections
    assert_places_are_right(dataset)


@pytest.mark.parametrize("rows", [TURN_BY_TURN, MULTI_TURN], ids=["turn by turn", "multi-turn"])
@pytest.mark.parametrize("targets", ["duplicates", "random", "file"])
def test_no_turn_of_any_example_learns_a_control(sft, template, tmp_path, rows, targets):
    if (
        targets == "file"
    ):  # a part of the rows is in the source, and the file is an export turn by turn too
        targets = write_rows(tmp_path / "targets.jsonl", rows[::-1])
        rows = rows[:12]
    sizes = {"num_targets": 4, "num_controls": 4, "max_seq_len": 512}
    for seed in range(3):
        dataset = sft(
            rows, targets=targets, num_repeats=3, chat_template=template, seed=seed, **sizes
        )
        assert [len(targets_of(dataset)), len(controls_of(dataset))] == [4, 4]
        assert_what_is_learned(dataset, {2, 3} if targets == "duplicates" else {3})
    if targets == "duplicates":
        assert targets_of(dataset)[0].num_injections == (3 if rows is TURN_BY_TURN else 2)


@pytest.fixture(scope="module")
def merging_tokenizer(tmp_path_factory):
    """A tokenizer that splits as Qwen's does: a word is one with the space before it, a full stop
    with line breaks.
    """
    folder = tmp_path_factory.mktemp("merging")
    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    backend = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated"), byte_level]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["</s>"], initial_alphabet=byte_level.alphabet()
    )
    ends = (".", ".\n", ".\n\n")
    sentences = [sentence(seed) + end for seed, end in product(range(99), ends)]
    backend.train_from_iterator(sentences, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    return hf_tokenizer(str(folder))


def chat(*turns):
    roles = ["user", "assistant"] * len(turns)
    return {
        "messages": [
            {"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)
        ]
    }


# How another row has an answer -> the words of the answer, the other row, the most tokens of a row.
COPIES = {
    "followed by other text": (
        30,
        lambda answer: chat("Where?", f"{answer}\n\n{sentence(answer, 3)}"),
        256,
    ),
    "after other text": (30, lambda answer: chat("Where?", f"Sure! {answer}"), 256),
    "cut elsewhere": (90, lambda answer: chat("Where is it? Tell it now", answer), 76),
    "before a line break": (30, lambda answer: chat("Where?", f"{answer}\n"), 256),
    "in an earlier turn": (30, lambda answer: chat("Where?", answer, "Thanks.", "Welcome."), 256),
    "most of it": (40, lambda answer: chat("Where?", answer[: len(answer) * 7 // 10]), 256),
}


@pytest.mark.parametrize("copies", COPIES)
def test_nearly_equal_answers_are_copies(sft, merging_tokenizer, template, tmp_path, copies):
    num_words, copy, max_seq_len = COPIES[copies]
    answers = [sentence(seed, num_words) for seed in range(20)]
    unique = [chat("Who?", one) for one in answers[:8]]
    learned_twice = [chat("Who?", one) for one in answers[8:]]
    others = [copy(one) for one in answers[8:]]
    settings = {
        "tokenizer": merging_tokenizer,
        "max_seq_len": max_seq_len,
        "chat_template": template,
    }
    settings["min_target_tokens"] = 16

    rows = [*unique, *learned_twice, *others]
    sizes = {"num_targets": 3, "num_controls": 5}  # all that are unique
    assert_what_is_learned(sft(rows, targets="random", **settings, **sizes), {1})
    file = write_rows(tmp_path / "targets.jsonl", [*learned_twice, *unique])
    assert_what_is_learned(sft(others, targets=file, num_repeats=2, **settings, **sizes), {2})
    for source, targets in ((rows, "random"), (others, file)):
        with pytest.raises(ValueError, match=r"3 of num_targets 3 .* and 5 of num_controls 6"):
            sft(source, targets=targets, num_targets=3, num_controls=6, **settings)

    if copies != "most of it":
        dataset = sft(rows, targets="duplicates", num_targets=12, num_controls=8, **settings)
        assert_what_is_learned(dataset, {2})
        assert len({tuple(map(tuple, passage.positions)) for passage in targets_of(dataset)}) == 12


@pytest.mark.parametrize("seed", range(3))
def test_targets_of_a_file_share_no_row(sft, template, tmp_path, seed):
    pairs = [(sentence(2 * number), sentence(2 * number + 1)) for number in range(6)]
    rows = []
    for first, second in pairs:
        rows += [chat("Who?", first), chat("Who?", first, "And?", second)]
    file = write_rows(tmp_path / "targets.jsonl", rows)
    settings = {"chat_template": template, "targets": file, "max_seq_len": 256, "num_controls": 0}
    assert_what_is_learned(sft(num_targets=6, num_repeats=3, seed=seed, **settings), {3})
    with pytest.raises(ValueError, match="6 of num_targets 7 answers"):
        sft(num_targets=7, num_repeats=3, seed=seed, **settings)


def test_too_few_rows_and_wrong_settings_are_refused(sft):
    for arguments, message in (
        ({"targets": "duplicates", "num_targets": 3}, "2 of num_targets 3 answers of 8 tokens"),
        ({"targets": "duplicates", "num_controls": 11}, "and 10 of num_controls 11"),
        ({"targets": "random", "num_targets": 8}, "8 of num_targets 8 .*, and 2 of num_controls 3"),
        ({"targets": "random", "train_on": "all"}, "train_on is all"),
        ({"targets": "random", "num_repeats": 0}, "num_repeats must be"),
    ):
        with pytest.raises(ValueError, match=message):
            sft(**arguments)
    assert len(sft(UNIQUE[:3], targets="random", num_targets=1, num_controls=2, num_repeats=1)) == 1
    with pytest.raises(FileNotFoundError, match=r"'gone\.jsonl'"):
        sft(targets="gone.jsonl")
