"""Rows of chats, prompts, instructions and texts: the same ids and labels as TRL, and every row
accounted for.
"""

import json
import logging
from itertools import groupby, product
from pathlib import Path

import pytest
import trl
from datasets import Dataset, load_dataset
from helpers.fakes.data import write_rows
from helpers.processes.trainers import CHECKPOINTING
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from tfidf_tune.data import hf_tokenizer, sft_dataset, text_blocks_dataset, text_dataset

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# Templates whose training variant in TRL marks the same tokens as the rule for templates without
# marks.
MARKED = [
    "phi3",
    "gemma",
    "llama3",
    "qwen3_instruct_2507",
    "lfm2",
    "cohere",
    "nemotron_3_nano",
    "qwen2_5",
]
ONE_TURN = {"phi3"}  # ends each conversation with a token that is not between turns
# These variants also learn tokens of the generation prompt, in front of an answer.
LEARNED_PROMPT = {"nemotron_3_nano": "<think>", "qwen2_5": "\n"}

QUESTION = {"role": "user", "content": "What is 2+2?"}
SURE = {"role": "user", "content": "Sure?"}
FOUR = {"role": "assistant", "content": "It is four."}
YES = {"role": "assistant", "content": "Yes, café 🙂 it is"}
LONG_CHAT = [QUESTION, FOUR, SURE, YES]
SYSTEM = {"role": "system", "content": "Be brief."}
ALPACA = {"instruction": "Add.", "input": "2 and 2", "output": "4 of them"}


@pytest.fixture(scope="module")
def folder(embedded_tokenizer_folder, tmp_path_factory):
    """A tiny Llama and a tokenizer with a BOS and the template of an instructed Qwen3."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = AutoTokenizer.from_pretrained(
        embedded_tokenizer_folder, bos_token="<|begin|>", pad_token="<|pad|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = (TEMPLATES / "qwen3_instruct_2507.jinja").read_text()
    tokenizer.save_pretrained(folder)
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat_tokenizer(folder):
    return hf_tokenizer(str(folder))


@pytest.fixture
def sft(tmp_path):
    """Build a data set of given rows."""

    def build(tokenizer, rows, **arguments):
        given = {"max_seq_len": 512, "cache_dir": str(tmp_path / "cache")} | arguments
        return sft_dataset(tokenizer, source=write_rows(tmp_path / "rows.jsonl", rows), **given)

    return build


def template(name):
    return str(TEMPLATES / f"{name}.jinja")


def learned(tokenizer, sample):
    """Decode each run of labels."""
    runs = groupby(
        zip(sample["tokens"], sample["labels"], strict=True), key=lambda pair: pair[1] != -100
    )
    return [
        tokenizer.decode([token for token, _ in run], False) for is_label, run in runs if is_label
    ]


ROWS_OF_TRL = {
    "messages": (
        [{"messages": LONG_CHAT}, {"messages": [SYSTEM, QUESTION, FOUR]}],
        {"assistant_only_loss": True},
    ),
    "tools": (
        [
            {
                "messages": LONG_CHAT,
                "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
            }
        ],
        {"assistant_only_loss": True},
    ),
    "conversations": (
        [
            {
                "conversations": [
                    {"from": "user", "value": "Who?"},
                    {"from": "assistant", "value": "the sailor"},
                ]
            }
        ],
        {},
    ),
    "prompt and completion": (
        [
            {"prompt": "What is 2+2?", "completion": " four"},
            {"prompt": "A house", "completion": "hold<|endoftext|>"},
        ],
        {},
    ),
    "messages as prompt and completion": ([{"prompt": LONG_CHAT[:3], "completion": [YES]}], {}),
    "all tokens": (
        [{"prompt": "What is 2+2?", "completion": " four"}],
        {"completion_only_loss": False},
    ),
    "text": ([{"text": "the old sailor\nsings"}], {}),
    "cut": ([{"prompt": "What is 2+2?", "completion": " four, " * 40}], {"max_length": 20}),
}


@pytest.mark.parametrize("kind", ROWS_OF_TRL)
def test_ids_and_labels_are_those_of_trl(folder, sft, tmp_path, kind):
    rows, settings = ROWS_OF_TRL[kind]
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = hf_tokenizer(reference)
    settings = {"max_length": 512, "bf16": False, CHECKPOINTING: False} | settings
    trainer = SFTTrainer(
        LlamaForCausalLM.from_pretrained(folder),
        SFTConfig(str(tmp_path / "trl"), use_cpu=True, report_to=[], disable_tqdm=True, **settings),
        train_dataset=load_dataset(
            "json",
            data_files=write_rows(tmp_path / "trl.jsonl", rows),
            split="train",
            cache_dir=str(tmp_path / "hf"),
        ),
        processing_class=reference,
    )
    batches = [trainer.data_collator([row]) for row in trainer.train_dataset]
    expected = [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]

    train_on = "all" if kind in ("all tokens", "conversations") else "completions"
    dataset = sft(tokenizer, rows, max_seq_len=settings["max_length"], train_on=train_on)
    found = [(sample["tokens"], sample["labels"]) for sample in dataset]

    if not any(
        isinstance(value, list) for value in rows[0].values()
    ):  # TRL adds a BOS only if the tokenizer does
        found = [
            (tokens[1:], labels[1:]) for tokens, labels in found if tokens[0] == tokenizer.bos_id
        ]
        if kind == "cut":
            expected = [(tokens[:-1], labels[:-1]) for tokens, labels in expected]
    assert found == expected
    assert kind == "cut" or all(-100 in labels for _, labels in found) == (
        train_on != "all" and kind != "text"
    )


@pytest.mark.parametrize("name", MARKED)
def test_answers_are_found_without_marks_in_the_template(chat_tokenizer, sft, name):
    rows = [{"messages": LONG_CHAT[:2]}, {"messages": LONG_CHAT}][: 1 if name in ONE_TURN else 2]
    marked = sft(chat_tokenizer, rows, chat_template=template(f"{name}_training"))
    plain = sft(chat_tokenizer, rows, chat_template=template(name))
    for sample, expected, num_answers in zip(plain, marked, (1, 2), strict=False):
        assert sample["tokens"] == expected["tokens"]
        answers = [
            LEARNED_PROMPT.get(name, "") + answer for answer in learned(chat_tokenizer, sample)
        ]
        assert answers == learned(chat_tokenizer, expected)
        assert len(answers) == num_answers
        assert all(
            turn["content"] in answer for turn, answer in zip((FOUR, YES), answers, strict=False)
        )


@pytest.mark.parametrize(
    ("name", "train_on", "is_warned"),
    [
        ("glm4moe", "completions", True),
        ("glm4moe", "all", False),
        ("glm4moe_training", "completions", False),
    ],
)
def test_a_template_that_ends_no_turn_is_reported(
    chat_tokenizer, sft, caplog, name, train_on, is_warned
):
    rows = [{"messages": LONG_CHAT[:2]}]
    for _ in range(2):  # also from the cache
        caplog.clear()
        [sample] = sft(chat_tokenizer, rows, chat_template=template(name), train_on=train_on)
        assert ("the chat template writes nothing after an answer" in caplog.text) == is_warned
    assert not is_warned or learned(chat_tokenizer, sample)[0].endswith(FOUR["content"])


@pytest.mark.parametrize("suffix", ["", "_training"])
def test_the_last_answer_all_answers_or_all_tokens(chat_tokenizer, sft, suffix):
    file = template(f"qwen3_instruct_2507{suffix}")
    first = "It is four.<|im_end|>\n"
    last = "Yes, café 🙂 it is<|im_end|>\n"
    for train_on, expected in (("completions", [first, last]), ("last", [last])):
        [sample] = sft(
            chat_tokenizer, [{"messages": LONG_CHAT}], chat_template=file, train_on=train_on
        )
        assert [answer.lstrip() for answer in learned(chat_tokenizer, sample)] == expected
    [sample] = sft(chat_tokenizer, [{"messages": LONG_CHAT}], chat_template=file, train_on="all")
    assert sample["labels"] == sample["tokens"]
    # The first answer belongs to the prompt of this row.
    [sample] = sft(
        chat_tokenizer, [{"prompt": LONG_CHAT[:3], "completion": [YES]}], chat_template=file
    )
    assert [answer.lstrip() for answer in learned(chat_tokenizer, sample)] == [last]


# Thought and answer are marked by themselves, with unmarked text between them.
MARKED_IN_PARTS = r"""
{%- for message in messages %}{{ "<|im_start|>" + message.role + "\n" }}
{%- if message.role == "assistant" %}
{%- generation %}{{ message.reasoning_content }}{%- endgeneration %}{{ "\n" }}
{%- generation %}{{ message.content + "<|im_end|>" }}{%- endgeneration %}
{%- else %}{{ message.content + "<|im_end|>" }}{%- endif %}{{ "\n" }}{%- endfor %}"""


def test_the_last_answer_is_all_that_a_template_marks_of_it(chat_tokenizer, sft, tmp_path):
    file = tmp_path / "parts.jinja"
    file.write_text(MARKED_IN_PARTS)
    messages = [
        QUESTION,
        FOUR | {"reasoning_content": "2 and 2"},
        SURE,
        YES | {"reasoning_content": "I am"},
    ]
    first = ["2 and 2", FOUR["content"] + "<|im_end|>"]
    last = ["I am", YES["content"] + "<|im_end|>"]
    [sample] = sft(chat_tokenizer, [{"messages": messages}], chat_template=str(file))
    assert learned(chat_tokenizer, sample) == first + last
    empty = {"role": "assistant", "content": " "}
    for more in (
        [],
        [SURE],
        [SURE, empty],
    ):  # neither a question nor an empty answer is the last answer
        rows = [{"messages": messages + more}]
        [sample] = sft(chat_tokenizer, rows, chat_template=str(file), train_on="last")
        assert learned(chat_tokenizer, sample) == last
    # What is not learned of an earlier turn is no matter to the last one.
    rows = [{"messages": [QUESTION, messages[1] | {"weight": 0}, *messages[2:]]}]
    [sample] = sft(chat_tokenizer, rows, chat_template=str(file), train_on="last")
    assert learned(chat_tokenizer, sample) == last
    with pytest.raises(ValueError, match="does not tell a message of weight 0 from the others"):
        sft(chat_tokenizer, rows, chat_template=str(file))


@pytest.mark.parametrize("suffix", ["", "_training"])
def test_of_a_question_that_holds_its_answer_nothing_is_learned(chat_tokenizer, sft, suffix):
    question = {"role": "user", "content": f"{FOUR['content']} {FOUR['content']}"}
    cases = (
        ({"messages": [question, FOUR]}, 2, ["It is four.<|im_end|>"]),
        ({"messages": [question, FOUR, question, FOUR]}, 2, ["It is four.<|im_end|>"] * 2),
        ({"prompt": "four four? four", "completion": " four"}, 3, ["four<|endoftext|>"]),
    )
    rows = [row for row, _, _ in cases]
    dataset = sft(chat_tokenizer, rows, chat_template=template(f"qwen3_instruct_2507{suffix}"))
    for sample, (_, num_in_question, answers) in zip(dataset, cases, strict=True):
        assert [answer.strip() for answer in learned(chat_tokenizer, sample)] == answers
        start = next(place for place, label in enumerate(sample["labels"]) if label != -100)
        assert chat_tokenizer.decode(sample["tokens"][:start]).count("four") == num_in_question


def test_a_system_message_is_put_where_there_is_none(chat_tokenizer, sft):
    rows = [{"messages": [SYSTEM, QUESTION, FOUR]}, {"messages": [QUESTION, FOUR]}]
    given, added = sft(chat_tokenizer, rows, system="Be brief.")
    assert given == added
    [sample] = sft(chat_tokenizer, [{"prompt": "2+2?", "completion": " 4"}], system="Be brief.")
    assert chat_tokenizer.decode(sample["tokens"]) == "Be brief.\n\n2+2? 4"


@pytest.mark.parametrize(
    "name", ["qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen2_5", "llama3"]
)
def test_no_header_is_learned_where_the_assistant_starts(chat_tokenizer, sft, name):
    [sample] = sft(
        chat_tokenizer, [{"messages": [YES, QUESTION, FOUR]}], chat_template=template(name)
    )
    first, last = (answer.lstrip() for answer in learned(chat_tokenizer, sample))
    assert first.startswith(YES["content"])
    assert last.startswith(FOUR["content"])
    [sample] = sft(
        chat_tokenizer, [{"prompt": [], "completion": [YES]}], chat_template=template(name)
    )
    assert [answer.lstrip() for answer in learned(chat_tokenizer, sample)] in (
        [first],
        [first + "<|endoftext|>"],
    )


@pytest.mark.parametrize("suffix", ["", "_training"])
def test_an_empty_answer_is_not_learned(chat_tokenizer, sft, suffix):
    file = template(f"qwen3_instruct_2507{suffix}")
    empty = {"role": "assistant", "content": " "}
    call = {"function": {"name": "add", "arguments": {"a": 2}}}
    rows = [
        {"messages": [QUESTION, empty]},
        {
            "prompt": [QUESTION],
            "completion": [empty | {"content": None, "tool_calls": None, "id": "a1"}],
        },
        {"messages": [QUESTION, empty, SURE, YES]},
        {"messages": [QUESTION, empty | {"tool_calls": [call]}]},
        ALPACA | {"output": ""},
    ]
    dataset = sft(chat_tokenizer, rows, chat_template=file)
    assert (dataset.num_left_out, dataset.counts["num_unlabelled"]) == (3, 0)
    (answer,), (calls,) = (learned(chat_tokenizer, sample) for sample in dataset)
    assert answer.lstrip() == YES["content"] + "<|im_end|>\n"
    assert '{"name": "add", "arguments": {"a": 2}}' in calls


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
NOTHING = {"role": "assistant", "content": ""}
AGENT_ROWS = [
    {"messages": [QUESTION, NOTHING | {"tool_calls": [CALL]}]},
    {"messages": [QUESTION, NOTHING | {"reasoning_content": "Two and two."}]},
    {
        "messages": [
            QUESTION,
            NOTHING | {"tool_calls": [CALL]},
            {"role": "tool", "content": "4"},
            FOUR,
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    },
    {"messages": [QUESTION, FOUR | {"reasoning_content": "Two and two."}]},
]
CHATML = """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
KNOWS_NOTHING = (
    "the chat template does not write tool_calls of 2 messages, reasoning_content of 2 messages, "
    "tools of 1 row; it writes nothing of 3 answers (not learned)"
)
NO_THOUGHTS = (
    "the chat template does not write reasoning_content of 2 messages; it writes nothing of 1 "
    "answer (not learned)"
)
# What the template does not write of the rows, and which of these strings the answers of each row
# contain.
UNWRITTEN = {
    "ChatML": (KNOWS_NOTHING, [["It is four."], ["It is four."]]),
    "llama3": (KNOWS_NOTHING, [["It is four."], ["It is four."]]),
    "llama3_training": (KNOWS_NOTHING, [["It is four."], ["It is four."]]),
    "qwen3_instruct_2507": (NO_THOUGHTS, [['"add"'], ['"add"', "It is four."], ["It is four."]]),
    "qwen3_training": (
        "",
        [['"add"'], ["Two and two."], ['"add"', "It is four."], ["Two and two."]],
    ),
}


@pytest.mark.parametrize("name", UNWRITTEN)
def test_what_the_template_does_not_write_is_said_and_is_no_answer(
    chat_tokenizer, sft, tmp_path, caplog, name
):
    file = tmp_path / "chatml.jinja"
    file.write_text(CHATML)
    given = {"chat_template": str(file) if name == "ChatML" else template(name)}
    said, expected = UNWRITTEN[name]
    for _ in ("built", "from the cache"):
        caplog.clear()
        found = [
            learned(chat_tokenizer, sample) for sample in sft(chat_tokenizer, AGENT_ROWS, **given)
        ]
        lines = [
            record.getMessage()
            for record in caplog.records
            if "does not write" in record.getMessage()
        ]
        whats = [line.partition(": ")[2].rpartition(": ")[0] for line in lines]
        assert whats == ([said] if said else [])
        for answers, parts in zip(found, expected, strict=True):
            assert len(answers) == len(parts)
            assert all(part in answer for answer, part in zip(answers, parts, strict=True))
    if name == "llama3":
        # Not the last answer, nor a row with no other.
        messages = [QUESTION, FOUR, SURE, NOTHING | {"tool_calls": [CALL]}]
        [sample] = sft(chat_tokenizer, [{"messages": messages}], train_on="last", **given)
        assert [answer.strip() for answer in learned(chat_tokenizer, sample)] == [
            "It is four.<|eot_id|>"
        ]
        for train_on in ("completions", "all"):
            with pytest.raises(
                ValueError,
                match="none at all: .* does not write tool_calls of 1 message; it writes nothing",
            ):
                sft(chat_tokenizer, AGENT_ROWS[:1], train_on=train_on, **given)
        # This template would print None.
        with pytest.raises(
            ValueError,
            match="none at all: .* does not write tool_calls of 1 message; it writes nothing",
        ):
            sft(
                chat_tokenizer,
                [{"messages": [QUESTION, {**NOTHING, "content": None, "tool_calls": [CALL]}]}],
                **given,
            )


def test_one_of_two_fields_is_written_and_contents_are_not(chat_tokenizer, sft, tmp_path, caplog):
    """Of thoughts that are there twice the template writes one; it writes no content with them, and
    no other role.
    """
    file = tmp_path / "thoughts.jinja"
    file.write_text(
        "{% for m in messages if m.role != 'tool' %}[{{ m.role }}]{{ m.reasoning or m.thinking or "
        "m.content | upper }}[end]{% endfor %}"
    )
    thoughts = {"reasoning": "Two and two.", "thinking": "Two and two."}
    rows = [
        {"messages": [QUESTION, FOUR | thoughts, {"role": "tool", "content": "five"}, SURE, YES]}
    ]
    [sample] = sft(chat_tokenizer, rows, chat_template=str(file))
    assert (
        "does not write content of 2 messages, reasoning of 1 message: by dataset.chat_template"
        in caplog.text
    )
    assert [answer.rpartition("]")[0] for answer in learned(chat_tokenizer, sample)] == [
        "[assistant]Two and two.[end",
        f"[assistant]{YES['content'].upper()}[end",
    ]


def test_columns_of_parquet_add_nothing_to_tools_and_their_calls(chat_tokenizer, tmp_path):
    def row(argument):
        call = {
            "type": "function",
            "function": {"name": argument, "arguments": {argument: {f"in {argument}": 1}}},
        }
        schema = {"name": argument, "parameters": {"properties": {argument: {"type": "integer"}}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [QUESTION, answer], "tools": [{"type": "function", "function": schema}]}

    file = str(tmp_path / "rows.parquet")
    rows = [row("a"), row("b"), {"messages": [QUESTION, FOUR], "tools": None}]
    Dataset.from_list(rows).to_parquet(file)
    settings = {"max_seq_len": 1024, "cache_dir": str(tmp_path / "cache")}
    found = [*sft_dataset(chat_tokenizer, source=file, **settings)]
    for sample, row in zip(found, rows, strict=True):  # a file of one row has no other columns
        [expected] = sft_dataset(
            chat_tokenizer, source=write_rows(tmp_path / "row.jsonl", [row]), **settings
        )
        assert sample == expected
        assert "null" not in chat_tokenizer.decode(sample["tokens"])


def test_answers_are_those_of_the_assistant(chat_tokenizer, sft):
    rows = [
        {
            "conversations": [
                {"from": "human", "value": "Who?"},
                {"from": role, "value": "the sailor"},
            ]
        }
        for role in ("gpt", "bot")
    ]
    [sample] = sft(chat_tokenizer, rows)
    assert [answer.lstrip() for answer in learned(chat_tokenizer, sample)] == [
        "the sailor<|im_end|>\n"
    ]
    with pytest.raises(ValueError, match="the others none at all: .* an answer's is 'assistant'"):
        sft(chat_tokenizer, rows[1:])


def test_what_says_that_it_is_not_learned_is_not(chat_tokenizer, sft):
    for off in ({"weight": 0}, {"train": False}, {"train": 0.0}, {"loss": False}):
        rows = [{"messages": [QUESTION, FOUR | off, SURE, YES | {"weight": 1, "train": True}]}]
        for given in ({}, {"chat_template": template("qwen3_instruct_2507_training")}):
            [sample] = sft(chat_tokenizer, rows, **given)
            assert [answer.strip() for answer in learned(chat_tokenizer, sample)] == [
                YES["content"] + "<|im_end|>"
            ]
        with pytest.raises(ValueError, match="weight 0, but train_on is all"):
            sft(chat_tokenizer, rows, train_on="all")
        # The last answer is not learned, nor the answer before it in its place; messages of
        # ShareGPT have weights, too.
        switched_off = [QUESTION, YES, SURE, FOUR | off]
        for given in ({}, {"chat_template": template("qwen3_instruct_2507_training")}):
            with pytest.raises(ValueError, match="gives no example"):
                sft(chat_tokenizer, [{"messages": switched_off}], train_on="last", **given)
        as_sharegpt = [
            {"from": "human", "value": "2+2"},
            {"from": "gpt", "value": "It is four."} | off,
        ]
        with pytest.raises(ValueError, match="gives no example"):
            sft(chat_tokenizer, [{"conversations": as_sharegpt}])
    for wrong in ({"weight": 0.5}, {"weight": "0"}, {"train": "no"}):
        with pytest.raises(
            ValueError, match="weight, train, .* of a message is 0 or 1, true or false"
        ):
            sft(chat_tokenizer, [{"messages": [QUESTION, FOUR | wrong]}])


def test_history_and_system_of_alpaca_and_calls_of_sharegpt_are_learned(
    chat_tokenizer, tokenizer, sft, caplog
):
    row = ALPACA | {
        "system": SYSTEM["content"],
        "history": [[QUESTION["content"], FOUR["content"]]],
        "id": 7,
    }
    asked = {"role": "user", "content": "Add.\n\n2 and 2"}
    expected = {
        "messages": [SYSTEM, QUESTION, FOUR, asked, {"role": "assistant", "content": "4 of them"}]
    }
    with caplog.at_level("INFO", logger="tfidf_tune.data"):
        [sample] = sft(chat_tokenizer, [row])
    assert "; roles assistant (learned), system, user; not used: id; 1 example" in caplog.text
    assert [sample] == [*sft(chat_tokenizer, [expected])]
    # What a format does not use is said, and a row without the columns of any is left out.
    rows = [
        {"text": "one two", "system": "S", "prompt": "P"},
        expected | {"history": [["a", "b"]]},
        {"body": "three"},
    ]
    assert len(sft(chat_tokenizer, rows)) == 2
    assert "; not used: body, history, prompt, system; 2 examples" in caplog.text
    with pytest.raises(ValueError, match="column 'system' holds list, not text"):
        sft(chat_tokenizer, [row | {"system": ["a"]}])
    for wrong in (row, row | {"history": "x"}, row | {"history": [["a"]]}):
        with pytest.raises(ValueError, match="column 'history'"):
            sft(tokenizer, [wrong])
    call = '{"name": "add"}'
    turns = [
        ("human", "2+2"),
        ("function_call", call),
        ("observation", "4"),
        ("gpt", "It is four."),
    ]
    rows = [
        {
            "system": "Be brief.",
            "conversations": [{"from": role, "value": text} for role, text in turns],
        }
    ]
    [sample] = sft(chat_tokenizer, rows)
    assert [answer.strip() for answer in learned(chat_tokenizer, sample)] == [
        f"{call}<|im_end|>",
        "It is four.<|im_end|>",
    ]
    assert "Be brief." in chat_tokenizer.decode(sample["tokens"])


def test_contents_of_parts_are_joined_for_a_template_of_plain_text(chat_tokenizer, sft, tmp_path):
    def parts(*texts):
        return [{"type": "text", "text": text} for text in texts]

    rows = [
        {"messages": [QUESTION, {"role": "assistant", "content": content}]}
        for content in ("It is four.", parts("It is", " four."), ["It is ", "four."])
    ]
    (file := tmp_path / "plain.jinja").write_text(  # it refuses lists
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    )
    for given in ({}, {"chat_template": str(file)}):
        first, *others = sft(chat_tokenizer, rows, **given)
        assert others == [first, first]
    # The answer's text is in the question; the template writes nothing for lists, or would print
    # them.
    for content in ("m.content if m.content is string", "m.content | tojson"):
        file.write_text(
            f"{{% for m in messages %}}{{{{ m.role + ': ' + ({content}) + '\n' }}}}{{% endfor %}}"
        )
        asked = {"role": "user", "content": "Yes or no?"}
        answers = [{"role": "assistant", "content": content} for content in ("Yes", parts("Yes"))]
        first, other = sft(
            chat_tokenizer, [{"messages": [asked, one]} for one in answers], chat_template=str(file)
        )
        assert first == other
    image = [{"type": "image_url", "image_url": {"url": "x"}}, *parts("It")]
    with pytest.raises(ValueError, match="only text is learned, but a content is .*image_url"):
        sft(chat_tokenizer, [{"messages": [QUESTION, {"role": "assistant", "content": image}]}])


def test_bos_and_eos_that_a_text_has_are_not_doubled(chat_tokenizer, sft, tmp_path):
    begin = "<|begin|>"
    end = chat_tokenizer.decode([chat_tokenizer.eos_id], skip_special_tokens=False)
    texts = ["one two", f"{begin}one two", f"one two{end}", f"{begin}one two{end}"]
    first, *others = sft(chat_tokenizer, [{"text": text} for text in texts])
    assert others == [first] * 3
    rows = [
        {"prompt": prompt, "completion": f" two{ending}"}
        for prompt, ending in product(("one", f"{begin}one"), ("", end))
    ]
    first, *others = sft(chat_tokenizer, rows)
    assert others == [first] * 3
    answers = [FOUR, FOUR | {"content": FOUR["content"] + end}]
    (file := tmp_path / "ends.jinja").write_text(
        f"{{% for m in messages %}}{{{{ m.content + '{end}' }}}}{{% endfor %}}"
    )
    first, other = sft(
        chat_tokenizer, [{"messages": [QUESTION, one]} for one in answers], chat_template=str(file)
    )
    assert first == other
    source = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    given = {"source": source, "cache_dir": str(tmp_path / "more")}
    first, *others = text_dataset(chat_tokenizer, max_seq_len=64, **given)
    assert others == [first] * 3
    blocks = text_blocks_dataset(chat_tokenizer, block_size=1, **given).blocks.ravel().tolist()
    assert blocks.count(chat_tokenizer.eos_id) == 4


def test_contents_that_end_in_eos_are_kept_exactly(chat_tokenizer, sft, tmp_path):
    end = chat_tokenizer.decode([chat_tokenizer.eos_id], skip_special_tokens=False)
    contents = ["four", f"four{end}", f"four{end}{end}", f"four{end}four{end}"]
    for turn_end in (end, "<|im_end|>"):
        file = tmp_path / "ends.jinja"
        # The turn of the user ends in another token.
        file.write_text(
            "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{{ "
            f"'{turn_end}' if m.role == 'assistant' else '<|im_end|>' }}}}{{% endfor %}}"
        )
        for asked in contents:
            for content in contents:
                messages = [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": content},
                ]
                [sample] = sft(chat_tokenizer, [{"messages": messages}], chat_template=str(file))
                answer = content if content.endswith(turn_end) else content + turn_end
                expected = f"[user]{asked}<|im_end|>[assistant]{answer}"
                assert (
                    chat_tokenizer.decode(sample["tokens"], skip_special_tokens=False) == expected
                )


def test_instructions_with_and_without_a_chat_template(chat_tokenizer, tokenizer, sft):
    asked = {"role": "user", "content": "Add.\n\n2 and 2"}
    [as_chat] = sft(
        chat_tokenizer, [{"messages": [asked, {"role": "assistant", "content": "4 of them"}]}]
    )
    assert [*sft(chat_tokenizer, [ALPACA])] == [as_chat]
    [sample] = sft(tokenizer, [ALPACA])
    headings = "### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:\n"
    assert tokenizer.decode(sample["tokens"]) == headings + "4 of them"
    assert learned(tokenizer, sample) == ["4 of them<|endoftext|>"]
    [plain] = sft(chat_tokenizer, [ALPACA | {"input": ""}], apply_chat_template=False)
    assert (
        chat_tokenizer.decode(plain["tokens"])
        == "### Instruction:\nAdd.\n\n### Response:\n4 of them"
    )
    [sample] = sft(
        chat_tokenizer,
        [{"prompt": "Add.\n\n2 and 2", "completion": "4 of them"}],
        apply_chat_template=True,
    )
    assert sample == as_chat


def test_rows_are_cut_left_out_and_counted_in_one_line(chat_tokenizer, tokenizer, sft, caplog):
    answer = {"prompt": "2+2?", "completion": " four"}
    num_prompt = len(chat_tokenizer.encode("2+2?", add_eos=False))
    rows = [
        {"messages": [QUESTION]},
        {"prompt": "who", "completion": " "},
        {"prompt": "who", "completion": None},
        {"text": ""},
        {"prompt": "a house " * 30, "completion": "here"},
        answer,
        answer | {"completion": " four" * 40},
        {"messages": [QUESTION, FOUR]},
        {"text": "the river"},
    ]
    for _ in ("built", "from the cache"):
        caplog.clear()
        dataset = sft(chat_tokenizer, rows, max_seq_len=num_prompt + 30)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().endswith(
            "rows.jsonl: 2 rows with messages, 4 rows with prompt and completion, 2 rows with "
            "text; roles assistant (learned), user; 4 examples, 1 of them cut after "
            f"{num_prompt + 30} tokens; 5 rows left out, 4 without an answer and 1 with none of it "
            "before the cut"
        )
        assert (dataset.num_documents, dataset.num_cut, dataset.num_left_out) == (9, 1, 5)
    assert [len(sample["tokens"]) <= num_prompt + 30 for sample in dataset] == [True] * 4
    assert dataset[1]["labels"][-1] != chat_tokenizer.eos_id
    # One token predicts nothing.
    assert len(sft(tokenizer, [{"text": "<|endoftext|>"}, {"text": "the river"}])) == 1
    with pytest.raises(
        ValueError, match=r"no example: 1 of 1 rows have no answer in 2 tokens, .*raise"
    ):
        sft(chat_tokenizer, [answer], max_seq_len=2)


def test_packed_rows_hold_the_same_examples(chat_tokenizer, sft, monkeypatch):
    monkeypatch.setattr(chat_tokenizer, "max_seq_len", 128)
    rows = [{"messages": LONG_CHAT}, {"messages": LONG_CHAT[:2]}, ALPACA, {"text": "the river"}]
    examples = [*sft(chat_tokenizer, rows, max_seq_len=None)]
    found = []
    for row in sft(chat_tokenizer, rows, max_seq_len=None, packed=True):
        tokens, labels = (row[key].split(row["seq_lens"].tolist()) for key in ("tokens", "labels"))
        found += [
            {"tokens": a.tolist(), "labels": b.tolist()}
            for a, b in zip(tokens, labels, strict=True)
        ]
    assert [sample for sample in found if sample in examples] == examples


def test_what_cannot_be_read_is_refused(chat_tokenizer, tokenizer, sft, tmp_path):
    chat = [{"messages": LONG_CHAT}]
    refused = [{"text": "a"}, {"text": "b", "messages": [SYSTEM, QUESTION, FOUR]}]
    for rows, arguments, message in (
        (
            [{"question": "a", "answer": "b"}],
            {},
            r"rows.jsonl' has the columns \['answer', 'question'\]",
        ),
        ([{"messages": ["hi"]}], {}, "line 1: column 'messages' is not a list of messages"),
        ([{"messages": LONG_CHAT, "tools": "saw"}], {}, "line 1: column 'tools' is not JSON"),
        (
            [{"messages": LONG_CHAT, "tools": "[" * 50_000}],
            {},
            "line 1: column 'tools' is not JSON .*recursion",
        ),
        ([{"prompt": "a", "completion": 3}], {}, "line 1: column 'completion' holds int"),
        (
            refused,
            {"chat_template": template("gemma")},
            "line 2: the chat template refuses .*System role not supp",
        ),
        (chat, {"chat_template": template("qwen3")}, "writes the first 2 messages differently"),
        (chat, {"train_on": "last answers"}, "train_on is 'last answers'"),
    ):
        with pytest.raises(ValueError, match=message):
            sft(chat_tokenizer, rows, **arguments)
    for rows, arguments in ((chat, {}), ([ALPACA], {"apply_chat_template": True})):
        with pytest.raises(ValueError, match="no chat template"):
            sft(tokenizer, rows, **arguments)
    with pytest.raises(FileNotFoundError, match=r"'gone\.jinja'"):
        sft(chat_tokenizer, chat, chat_template="gone.jinja")
    assert len(sft(chat_tokenizer, chat, chat_template=template("qwen3"), train_on="last")) == 1
    assert list(tmp_path.glob("cache/.*")) == []
