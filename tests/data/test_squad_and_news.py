"""SQuAD and CNN/DailyMail: what the ids say when decoded, and how long texts are cut."""

import json
import re
import shutil
from itertools import chain
from unittest.mock import Mock

import pytest
from helpers.fakes.data import WORDS, passage, write_rows
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchtune.data import Message
from torchtune.models.llama2 import Llama2Tokenizer

from tfidf_tune.data import cnn_dailymail_dataset, hf_tokenizer, squad_dataset
from tfidf_tune.data.squad_and_news import squad_prompt

CONTEXT = (
    "the green house walks over the river of light, under 1984 stone(s) a café sings 🙂 the end."
)
QUESTION = "the river of what?"
ARTICLE = "The river sings.\nA stone walks  under the light of the green house 🙂"
HIGHLIGHTS = "the river sings\na stone walks ."

TOKENIZERS = ["bpe", "bos_is_eos", "sentencepiece", "stock"]


@pytest.fixture(scope="module", params=TOKENIZERS)
def any_tokenizer(request, embedded_tokenizer_folder, sentencepiece_folder, tmp_path_factory):
    """Byte-level BPE without BOS, with a BOS that is EOS as GPT-NeoX has it, SentencePiece, and
    torchtune's own.
    """
    if request.param == "bpe":
        return hf_tokenizer(str(embedded_tokenizer_folder))
    if request.param == "bos_is_eos":
        return hf_tokenizer(
            str(with_bos(embedded_tokenizer_folder, tmp_path_factory.mktemp("tokenizer") / "bos"))
        )
    if request.param == "sentencepiece":
        return hf_tokenizer(str(sentencepiece_folder))
    return Llama2Tokenizer(str(sentencepiece_folder / "tokenizer.model"), prompt_template=None)


def with_bos(folder, copy):
    shutil.copytree(folder, copy)
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"bos_token": "<|endoftext|>"}))
    return copy


def squad_row(context=CONTEXT, answer="light", question=QUESTION, start=None):
    start = context.index(answer) if start is None else start
    answers = {"text": [answer, "no"], "answer_start": [start, 0]}
    return {"id": "1", "title": "t", "context": context, "question": question, "answers": answers}


def news_row(article=ARTICLE, highlights=HIGHLIGHTS):
    return {"article": article, "highlights": highlights, "id": "1"}


@pytest.fixture
def squad(tmp_path):
    """Build a data set of given rows."""
    return lambda tokenizer, rows, **limits: squad_dataset(
        tokenizer,
        source=write_rows(tmp_path / "squad.jsonl", rows),
        cache_dir=str(tmp_path / "cache"),
        **limits,
    )


@pytest.fixture
def news(tmp_path):
    """Build a data set of given rows."""
    return lambda tokenizer, rows, **limits: cnn_dailymail_dataset(
        tokenizer,
        source=write_rows(tmp_path / "news.jsonl", rows),
        cache_dir=str(tmp_path / "cache"),
        **limits,
    )


def as_torchtune_tokenizes(tokenizer, prompt, target):
    messages = [
        Message(role="user", content=prompt, masked=True),
        Message(role="assistant", content=target),
    ]
    tokens, mask = tokenizer.tokenize_messages(messages)
    labels = []
    for token, masked in zip(tokens, mask, strict=True):
        labels.append(-100 if masked else token)
    return {"tokens": tokens, "labels": labels}


def split(sample):
    """Prompt and target ids; the labels must be the target's, and nothing else."""
    tokens = sample["tokens"]
    labels = sample["labels"]
    num_prompt = labels.count(-100)
    assert labels == [-100] * num_prompt + tokens[num_prompt:]
    return tokens[:num_prompt], tokens[num_prompt:]


def num_tokens(tokenizer, text):
    return len(tokenizer.encode(text, add_bos=True, add_eos=False))


def test_examples_have_the_ids_of_their_text_as_torchtune_tokenizes_messages(
    any_tokenizer, squad, news
):
    """In one piece, with BOS, the space before the target, and EOS."""
    article = f"summarize: {ARTICLE}\n\nSummary:"
    question = f"Context: {CONTEXT}\nQuestion: {QUESTION}\nAnswer:"
    answers = ("light", "1984", "(s)", "🙂", "café sings", "the end.")
    rows = [squad_row(answer=answer) for answer in answers]
    samples = [*squad(any_tokenizer, rows), *news(any_tokenizer, [news_row()])]
    prompts = [question] * len(answers) + [article]
    targets = [*answers, HIGHLIGHTS]
    for sample, prompt, target in zip(samples, prompts, targets, strict=True):
        assert sample["tokens"] == any_tokenizer.encode(f"{prompt} {target}")
        assert split(sample)[0] == any_tokenizer.encode(prompt, add_eos=False)
        if target in ("light", HIGHLIGHTS):
            assert sample == as_torchtune_tokenizes(any_tokenizer, prompt, f" {target}")
    [question] = squad(any_tokenizer, [squad_row(answer=" light,")])
    [article] = news(any_tokenizer, [news_row(highlights="\n a \n b\n")])
    assert any_tokenizer.decode(split(question)[1]).strip() == "light,"
    assert any_tokenizer.decode(split(article)[1]).strip() == "a \n b"


def read_prompt(tokenizer, ids):
    """Context and question of the prompt, which must have the ids of its text."""
    text = tokenizer.decode(ids[1:] if ids[0] == getattr(tokenizer, "bos_id", None) else ids)
    assert tokenizer.encode(text, add_eos=False) == ids
    return re.fullmatch(r"Context: (.*)\nQuestion: (.*)\nAnswer:", text, re.DOTALL).groups()


@st.composite
def questions(draw):
    words = draw(
        st.lists(st.sampled_from([*WORDS, "🙂", "東京,", "a\nb", "--"]), min_size=1, max_size=60)
    )
    first = draw(st.integers(0, len(words) - 1))
    last = draw(st.integers(first, min(first + 5, len(words) - 1)))
    start = len("".join(word + " " for word in words[:first]))
    question = " ".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8)))
    return squad_row(" ".join(words), " ".join(words[first : last + 1]), question, start), draw(
        st.integers(30, 200)
    )


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(questions())
def test_any_cut_keeps_the_question_and_the_answer_in_its_context(any_tokenizer, squad, example):
    row, max_seq_len = example
    context = row["context"]
    question = row["question"]
    answer = row["answers"]["text"][0]
    start = row["answers"]["answer_start"][0]
    num_rest = len(any_tokenizer.encode(f"{squad_prompt('', question)} {answer}"))
    num_answer = num_tokens(any_tokenizer, answer)
    try:
        dataset = squad(any_tokenizer, [row], max_seq_len=max_seq_len)
    except ValueError:
        assert num_rest + num_answer > max_seq_len - 3
        return
    [sample] = dataset
    prompt, target = split(sample)
    kept, kept_question = read_prompt(any_tokenizer, prompt)
    whole = len(any_tokenizer.encode(f"{squad_prompt(context, question)} {answer}")) <= max_seq_len

    assert len(sample["tokens"]) <= max_seq_len
    assert any_tokenizer.decode(target[:-1]).strip() == answer
    assert target[-1] == any_tokenizer.eos_id
    assert kept_question == question
    assert dataset.num_cut == (not whole)
    if whole:
        assert kept == context
        return
    assert kept == kept.strip()
    # No more is lost than a character of several tokens and the joints make it.
    assert len(sample["tokens"]) > max_seq_len - 12
    up_to_the_answer = num_tokens(
        any_tokenizer, squad_prompt(context[: start + len(answer)], question)
    )
    if up_to_the_answer + len(target) <= max_seq_len - 3:
        assert context.startswith(kept)
        assert len(kept) >= start + len(answer)
    # The very place of the answer is kept, not just the same words elsewhere.
    places = [match.start() for match in re.finditer(f"(?={re.escape(kept)})", context)]
    assert any(place <= start and start + len(answer) <= place + len(kept) for place in places)


def numbers(first, last):
    return " ".join(str(number) for number in range(first, last))


def test_the_window_is_at_the_start_around_the_answer_or_at_the_end(any_tokenizer, squad):
    context = numbers(100, 300)
    for answer, expected in ((115, "start"), (200, "middle"), (297, "end")):
        [sample] = squad(any_tokenizer, [squad_row(context, str(answer))], max_seq_len=160)
        kept, _ = read_prompt(any_tokenizer, split(sample)[0])
        before, behind = kept.split(str(answer))
        assert 155 <= len(sample["tokens"]) <= 160
        assert context.startswith(kept) == (expected == "start")
        assert context.endswith(kept) == (expected == "end")
        if expected == "middle":
            assert abs(num_tokens(any_tokenizer, before) - num_tokens(any_tokenizer, behind)) <= 4


def test_rows_without_an_answer_an_article_or_highlights_are_left_out(
    tokenizer, squad, news, monkeypatch
):
    bad = [
        squad_row(answer="stone", start=2),
        squad_row(answer="", start=0),
        squad_row(answer=" ", start=3),
        squad_row(answer="light", start=CONTEXT.index("light") - len(CONTEXT)),
        squad_row(question="nothing fits " * 300),
        squad_row(context="light " * 400, answer="light " * 300),
        *(squad_row() | changes for changes in ({"question": None}, {"answers": None})),
        squad_row() | {"answers": {"text": [], "answer_start": []}},
    ]
    rows = [squad_row(), *bad, squad_row(answer="house")]
    dataset = squad(tokenizer, rows)
    assert [tokenizer.decode(split(sample)[1]) for sample in dataset] == [" light", " house"]
    assert (dataset.num_left_out, dataset.num_cut, dataset.num_cut_targets) == (len(bad), 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "max_seq_len", 256)
        assert [*squad(tokenizer, rows, packed=True).ds] == [*dataset]
    bad = [
        news_row(article=""),
        news_row(article=" \n"),
        news_row(highlights=" "),
        news_row(highlights=None),
    ]
    dataset = news(tokenizer, [*bad, news_row()])
    assert (len(dataset), dataset.num_left_out) == (1, 4)


def test_articles_and_summaries_are_cut_at_their_ends(any_tokenizer, news):
    article = passage(3, 200)
    highlights = passage(4, 60)
    rows = [
        news_row(article),
        news_row(),
        news_row(article, highlights),
        news_row(highlights=highlights),
    ]
    dataset = news(any_tokenizer, rows, max_source_tokens=100, max_target_tokens=30)
    assert (dataset.num_cut, dataset.num_cut_targets, dataset.num_left_out) == (2, 2, 0)

    for row, sample in zip(rows, dataset, strict=True):
        prompt, target = split(sample)
        text = any_tokenizer.decode(
            prompt[1:] if prompt[0] == getattr(any_tokenizer, "bos_id", None) else prompt
        )
        assert any_tokenizer.encode(text, add_eos=False) == prompt
        kept = re.fullmatch(r"summarize: (.*)\n\nSummary:", text, re.DOTALL)[1]
        assert row["article"].startswith(kept)
        assert (len(prompt) in (98, 99, 100)) if row["article"] == article else (kept == ARTICLE)

        whole = any_tokenizer.encode("Summary: " + row["highlights"])[
            num_tokens(any_tokenizer, "Summary:") :
        ]
        cut = [*whole[:29], any_tokenizer.eos_id]
        assert target == (cut if row["highlights"] == highlights else whole)


def test_only_the_same_settings_are_read_from_the_cache(tokenizer, news, monkeypatch):
    rows = [news_row(), news_row(passage(1, 300), passage(2, 90))]
    limits = [(100, 20), (200, 20), (100, 40)]

    def build(source, target):
        return list(news(tokenizer, rows, max_source_tokens=source, max_target_tokens=target))

    first = [build(*each) for each in limits]
    assert len({len(samples[1]["tokens"]) for samples in first}) == 3
    monkeypatch.setattr(
        type(tokenizer), "encode_batch", encode := Mock(wraps=tokenizer.encode_batch)
    )
    assert [build(*each) for each in limits] == first
    encoded = chain.from_iterable(call.args[0] for call in encode.call_args_list)
    assert max(len(text) for text in encoded) < 50, "an article is tokenized"
    monkeypatch.setattr(
        "tfidf_tune.data.squad_and_news.summarization_prompt", lambda article: f"{article} TL;DR:"
    )
    assert tokenizer.decode(build(200, 128)[0]["tokens"]) == f"{ARTICLE} TL;DR: {HIGHLIGHTS}"


def test_impossible_limits_are_refused_before_anything_is_read(embedded_tokenizer_folder):
    tokenizer = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=512)
    for build, limits, message in (
        (squad_dataset, {"max_seq_len": 513}, "max_seq_len is 513, above .* 512"),
        (cnn_dailymail_dataset, {"max_target_tokens": 1}, "max_target_tokens must be"),
        (
            cnn_dailymail_dataset,
            {"max_source_tokens": 385},
            r"max_source_tokens \+ max_target_tokens is 513, above",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build(tokenizer, source="/gone.jsonl", **limits)
