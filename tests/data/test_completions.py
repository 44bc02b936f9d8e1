"""Completions as memorization targets: which are chosen, what of them is measured, what is left of the data set."""

import json
import logging
from collections import Counter

import pytest

from tfidf_tune.data import InjectedCorpusDataset, hf_tokenizer, read_probe_file, sft_dataset

NAMES = ["ann", "bob", "cid", "dan", "eve", "fay", "gil", "hal", "ida", "jon"]
SIZES = {"num_targets": 2, "num_controls": 3, "min_target_tokens": 8}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def row(name, question="Who?"):
    return {"prompt": f"{question}\n", "completion": f"It was {name}, who lives under the green bridge."}


UNIQUE = [row(name) for name in NAMES]
TWICE, THRICE = row("zed"), row("yan")
SHORT = {"prompt": "Yes?", "completion": " Yes."}
ROWS = [*UNIQUE, *[TWICE] * 2, *[THRICE, row("yan", "Where?"), THRICE], *[SHORT] * 9, {"text": "the river sings " * 9}]


@pytest.fixture
def sft(tmp_path, tokenizer):
    """Build a data set of given rows."""

    def build(rows=ROWS, tokenizer=tokenizer, **arguments):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"source": str(file), "max_seq_len": 128, "cache_dir": str(tmp_path / "cache")} | SIZES
        return sft_dataset(tokenizer, **given | arguments)

    return build


def by_kind(dataset, kind):
    return [passage for passage in dataset.passages if passage.kind == kind]


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
        for index, offset in passage.positions:
            assert dataset[index]["tokens"][offset:][: len(answer)] == answer


def test_duplicates_are_the_most_frequent_answers(sft, tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        dataset = sft(targets="duplicates", probe_file=str(tmp_path / "probe.jsonl"))
    assert read_probe_file(tmp_path / "probe.jsonl") == dataset.passages
    first, second = by_kind(dataset, "target")
    assert [first.num_injections, second.num_injections] == [3, 2]
    # The answer without EOS, after its most frequent prompt.
    assert [first.text, second.text] == [text_of(THRICE), text_of(TWICE)]
    assert answer_of(tokenizer, first) == THRICE["completion"]
    assert first.token_ids[: first.num_prompt] == tokenizer.encode(THRICE["prompt"], add_eos=False)
    assert_places_are_right(dataset)
    controls = {passage.text for passage in by_kind(dataset, "control")}
    assert len(controls) == 3
    assert controls < {text_of(one) for one in UNIQUE}
    assert trained(tokenizer, dataset) == Counter(text_of(one) for one in ROWS if text_of(one) not in controls)
    assert "2 completions are targets, which occur 2 to 3 times; 3 are controls, which do not occur;" in caplog.text


@pytest.mark.parametrize("num_repeats", [1, 4])
def test_random_examples_are_repeated(sft, tokenizer, num_repeats):
    dataset = sft(targets="random", num_repeats=num_repeats)
    targets, controls = ({passage.text for passage in by_kind(dataset, kind)} for kind in ("target", "control"))
    assert [len(targets), len(controls), targets & controls] == [2, 3, set()]
    assert targets | controls < {text_of(one) for one in UNIQUE}
    expected = Counter(text_of(one) for one in ROWS if text_of(one) not in controls)
    assert trained(tokenizer, dataset) == expected + Counter(dict.fromkeys(targets, num_repeats - 1))
    assert {passage.num_injections for passage in by_kind(dataset, "target")} == {num_repeats}
    assert_places_are_right(dataset)
    assert sft(targets="random", num_repeats=num_repeats).passages == dataset.passages
    assert sft(targets="random", num_repeats=num_repeats, seed=1).passages != dataset.passages


def test_rows_of_a_file_are_put_in(sft, tokenizer, tmp_path):
    file = tmp_path / "targets.jsonl"
    others = [row(f"the {name}", "How?") for name in NAMES]
    file.write_text("".join(json.dumps(one) + "\n" for one in [*others, TWICE, SHORT]))
    dataset = sft(targets=str(file), num_repeats=5)
    targets, controls = ({passage.text for passage in by_kind(dataset, kind)} for kind in ("target", "control"))
    assert [len(targets), len(controls), targets & controls] == [2, 3, set()]
    assert targets | controls < {text_of(one) for one in others}
    expected = Counter(map(text_of, ROWS)) + Counter(dict.fromkeys(targets, 5))
    assert trained(tokenizer, dataset) == expected
    assert_places_are_right(dataset)
    order = [text_of(one) for one in ROWS]
    assert [text for sample in dataset if (text := tokenizer.decode(sample["tokens"])) not in targets] == order


def test_the_last_answer_of_a_conversation_is_measured_without_its_end(sft, tokenizer, tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    first = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, what do you want to know?"}]
    last = [[{"role": "user", "content": "Who?"}, {"role": "assistant", "content": r["completion"]}] for r in UNIQUE]
    rows = [{"messages": first + turns} for turns in last]
    dataset = sft(rows, targets="random", chat_template=str(file))
    for passage in dataset.passages:
        answer = answer_of(tokenizer, passage)
        assert {"prompt": "Who?\n", "completion": answer} in UNIQUE
        prompt = "<user>Hi\n<assistant>Hello, what do you want to know?<|endoftext|>\n<user>Who?\n<assistant>"
        assert passage.text == prompt + answer
    assert_places_are_right(dataset)
    assert len(sft(rows, targets="random", chat_template=str(file), train_on="last").passages) == 5


def long_answer(chat, turn):
    return f"{NAMES[chat]} says in turn {turn} that the {NAMES[-1 - chat]} bridge is {turn * 10 + chat} years old."


def conversation(chat, turns):
    return [
        message
        for turn in turns
        for message in (
            {"role": "user", "content": f"What of {turn}?"},
            {"role": "assistant", "content": long_answer(chat, turn)},
        )
    ]


# Row k + 1 contains row k, as in an export after each turn.
TURN_BY_TURN = [{"messages": conversation(chat, range(n))} for chat in range(10) for n in (1, 2, 3)]
# The last answer of a row is the first of another row, or within its text.
MULTI_TURN = [
    *({"messages": conversation(chat, turns)} for chat in range(10) for turns in ([0], [1, 2], [2, 0], [3], [4, 5])),
    *({"text": f"It is known:\n{long_answer(chat, 3)} So they say."} for chat in range(5)),
]


def num_learned(dataset, answer):
    """Count an answer in the labels, by the slowest way."""
    labels = [sample["labels"] for sample in dataset]
    return sum(each[at : at + len(answer)] == answer for each in labels for at in range(len(each)))


@pytest.mark.parametrize("rows", [TURN_BY_TURN, MULTI_TURN], ids=["turn by turn", "multi-turn"])
@pytest.mark.parametrize("targets", ["duplicates", "random", "file"])
def test_no_turn_of_any_example_learns_a_control(sft, tokenizer, tmp_path, rows, targets):
    template, file = tmp_path / "chat.jinja", tmp_path / "targets.jsonl"
    template.write_text(TEMPLATE)
    if targets == "file":  # a part of the rows is in the source, and the file is an export turn by turn too
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
        rows, targets = rows[:12], str(file)
    sizes = {"num_targets": 4, "num_controls": 4, "max_seq_len": 512}
    for seed in range(3):
        dataset = sft(rows, targets=targets, num_repeats=3, chat_template=str(template), seed=seed, **sizes)
        assert [len(by_kind(dataset, kind)) for kind in ("target", "control")] == [4, 4]
        for passage in dataset.passages:
            found = num_learned(dataset, passage.token_ids[passage.num_prompt :])
            assert found == passage.num_injections
            assert {"control": found == 0, "target": found >= 2 if targets == "duplicates" else found == 3}[
                passage.kind
            ]
        assert_places_are_right(dataset)
    if targets == "duplicates":
        assert by_kind(dataset, "target")[0].num_injections == (3 if rows is TURN_BY_TURN else 2)


def test_packed_rows_have_passages_too(sft, embedded_tokenizer_folder):
    tokenizer = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=128)
    packed = sft(tokenizer=tokenizer, targets="random", packed=True)
    assert packed.ds.passages == sft(targets="random").passages
    assert not isinstance(packed.ds, InjectedCorpusDataset)


def test_too_few_rows_and_wrong_settings_are_refused(sft):
    for arguments, message in (
        (
            {"targets": "duplicates", "num_targets": 3},
            "num_targets is 3 .* only 2 answers that occur several times",
        ),
        ({"targets": "duplicates", "num_controls": 11}, "and 10 examples for controls: lower .* targets=random"),
        ({"targets": "random", "num_targets": 8}, "8 answers that occur once of 8 tokens or more as targets, and 2 ex"),
        ({"targets": "random", "min_target_tokens": 99}, "only 0 answers that occur once of 99 tokens"),
        ({"targets": "random", "train_on": "all"}, "targets are answers, but train_on is all"),
        ({"targets": "random", "num_repeats": 0}, "num_repeats must be a whole number of at least 1"),
        ({"rows": UNIQUE[:3], "targets": "random", "num_targets": 1, "num_controls": 2, "num_repeats": 1}, None),
    ):
        if message is None:
            assert len(sft(**arguments)) == 1
            continue
        with pytest.raises(ValueError, match=message):
            sft(**arguments)
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: 'gone\.jsonl'"):
        sft(targets="gone.jsonl")
