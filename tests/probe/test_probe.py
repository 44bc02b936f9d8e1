from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers.fakes.probe import (
    VOCAB_SIZE,
    SuccessorModel,
    WordTokenizer,
    a_passage,
    greedy_without_cache,
    random_ids,
    tiny_llama,
)
from helpers.references.probe import probe
from transformers import AutoModelForCausalLM, GPTJConfig, MistralConfig

from tfidf_tune.probe import greedy_continuations

WIDE = {
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": None,
}
COUNTING = a_passage("counting", [*range(40)])  # what SuccessorModel has memorized
LONG = a_passage("long", [*range(VOCAB_SIZE)] * 4)
SHORT = {"prefix_lengths": (8, 12, 20), "max_new_tokens": 32}


def until_eos(rows, eos_id):
    ended = []
    for row in rows:
        end = row.index(eos_id) if eos_id in row else len(row)
        ended.append(row[:end])
    return ended


@pytest.fixture(scope="module")
def samples(llama, recited, unseen):
    return probe(llama, WordTokenizer(), [*recited, *unseen], **SHORT)


def test_memorized_passages_are_recited_and_others_are_not(samples, recited, unseen):
    passages = [*recited, *unseen]
    expected = [(length, passage.id) for length, passage in product((8, 12, 20), passages)]
    assert [(sample.prefix_length, sample.passage_id) for sample in samples] == expected
    for sample in samples:
        if sample.kind == "target":
            assert (sample.prefix_match, sample.lms, sample.rouge_l, sample.verbatim) == (
                32,
                32,
                100.0,
                True,
            )
        else:
            assert sample.lms < 6
            assert not sample.verbatim


def test_neither_the_batch_size_nor_dropout_changes_the_result(llama, recited, unseen, samples):
    assert probe(llama, WordTokenizer(), [*recited, *unseen], batch_size=4, **SHORT) == samples
    assert len({tuple(sample.generated_ids) for sample in samples}) > 6
    [sample] = probe(
        tiny_llama(attention_dropout=0.5).train(), WordTokenizer(), recited[:1], prefix_lengths=(8,)
    )
    assert sample.verbatim


def test_the_model_gets_the_ids_after_the_offset_and_no_bos():
    model = SuccessorModel()
    passages = [a_passage("a", random_ids(20, 1)), a_passage("b", random_ids(20, 2))]
    samples = probe(
        model, WordTokenizer(), passages, prefix_lengths=(5,), max_new_tokens=4, offset=3
    )
    assert model.calls[0] == [passage.token_ids[3:8] for passage in passages]
    assert [sample.reference_ids for sample in samples] == [
        passage.token_ids[8:12] for passage in passages
    ]
    assert {sample.offset for sample in samples} == {3}
    found = [
        (one.prefix_length, len(one.reference_ids)) for one in probe(model, WordTokenizer(), [LONG])
    ]
    assert found == [(32, 128), (50, 128), (100, 128)]  # the paper's


def test_a_short_passage_is_compared_to_its_end():
    model = SuccessorModel()
    short = a_passage("short", [*range(10)])
    samples = probe(
        model, WordTokenizer(), [short, COUNTING], prefix_lengths=(7,), max_new_tokens=8
    )
    assert [sample.generated_ids for sample in samples] == [[7, 8, 9], [*range(7, 15)]]
    assert [sample.verbatim for sample in samples] == [True, True]
    assert len(model.calls) == 8
    probe(model, WordTokenizer(), [short], prefix_lengths=(7,))
    assert len(model.calls) == 8 + 3  # no more tokens than any reference has


def test_the_continuation_ends_before_eos():
    model = SuccessorModel()
    passages = [replace(COUNTING, token_ids=[*COUNTING.token_ids[:9], 3, 3, 3, 3])] * 2
    first, _ = probe(
        model, WordTokenizer(eos_id=9), passages, prefix_lengths=(5,), max_new_tokens=8
    )
    assert (first.generated_ids, first.generated_text) == ([5, 6, 7, 8], "w5 w6 w7 w8")
    assert (first.prefix_match, first.lms, first.verbatim) == (4, 4, False)
    assert len(model.calls) == 5  # it stops when all rows have ended
    passages = [replace(COUNTING, token_ids=[*COUNTING.token_ids[:5], 3, 3, 3, 3])]
    [sample] = probe(
        model, WordTokenizer(eos_id=5), passages, prefix_lengths=(5,), max_new_tokens=8
    )
    assert (sample.generated_ids, sample.prefix_match, sample.lms, sample.rouge_l) == (
        [],
        0,
        0,
        0.0,
    )


def test_an_eos_that_the_passage_has_does_not_end_the_continuation():
    """As in text that is already in a chat template, whose turns end with EOS."""
    [sample] = probe(
        SuccessorModel(), WordTokenizer(eos_id=9), [COUNTING], prefix_lengths=(5,), max_new_tokens=8
    )
    assert (sample.generated_ids, sample.verbatim) == ([*range(5, 13)], True)


@pytest.mark.parametrize(
    "config",
    [
        None,
        GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **WIDE),
        MistralConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=8,
            **WIDE,
        ),
    ],
    ids=lambda config: config.model_type if config else "llama",
)
def test_greedy_continuations_equal_a_plain_loop_without_cache(config, llama):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval() if config else llama
    prompts = [random_ids(11, seed) for seed in range(3)]
    expected = [greedy_without_cache(model, [prompt], 30)[0] for prompt in prompts]
    assert greedy_continuations(model, prompts, 30) == expected
    assert len(set(expected[0])) > 5  # no loop of one id, which any decoding would get right
    for eos_id in {row[-1] for row in expected[:2]} | {row[3] for row in expected[:2]}:
        ended = until_eos(expected, eos_id)
        assert greedy_continuations(model, prompts, 30, eos_id=eos_id) == ended


def test_prompts_of_different_lengths_are_continued_as_each_by_itself(llama):
    prompts = [random_ids(length, seed) for seed, length in enumerate((3, 17, 9, 9, 1))]
    numbers = [20, 5, 0, 12, 16]
    pairs = zip(prompts, numbers, strict=True)
    expected = []
    for prompt, number in pairs:
        continuation = greedy_without_cache(llama, [prompt], number)[0] if number else []
        expected.append(continuation)
    assert greedy_continuations(llama, prompts, numbers) == expected
    eos_id = expected[0][2]
    ended = until_eos(expected, eos_id)
    assert greedy_continuations(llama, prompts, numbers, eos_id=eos_id) == ended
    # The EOS in a prompt is read while the other row, a shorter one, ends: the longer one goes on.
    assert greedy_continuations(SuccessorModel(), [[8], [20, 9, 30]], 4, eos_id=9) == [
        [],
        [31, 32, 33, 34],
    ]


def test_a_completion_is_asked_for_once_from_its_own_prompt():
    completion = a_passage("completion", [*range(12)], num_prompt=9)
    settings = {"prefix_lengths": (4, 5), "max_new_tokens": 2, "offset": 1}
    plain, own, other = probe(
        SuccessorModel(),
        WordTokenizer(),
        [a_passage("plain", [*range(30)]), completion],
        **settings,
    )
    assert (own.passage_id, own.prefix_length, own.offset) == ("completion", 0, 0)
    assert own.reference_ids == own.generated_ids == [9, 10]
    assert [plain.prefix_length, other.prefix_length] == [4, 5]
    assert own.prompt_label == "target completion, its own prompt"


def test_the_generation_config_of_the_model_does_not_change_the_text(llama):
    penalized = tiny_llama()
    penalized.generation_config.update(
        repetition_penalty=5.0, no_repeat_ngram_size=2, do_sample=True
    )
    prompts = [random_ids(11, seed) for seed in range(4)]
    assert greedy_continuations(penalized, prompts, 40) == greedy_continuations(llama, prompts, 40)


def test_passages_that_cannot_be_probed_are_refused_before_any_work():
    tiny = a_passage("tiny", [*range(10)])
    for tokenizer, passage, message in (
        (WordTokenizer(fingerprint="f2"), COUNTING, "fingerprint 'f1'; .* has 'f2'"),
        (WordTokenizer(), tiny, "'tiny' has 10 tokens, no more than .*10"),
        (WordTokenizer(), COUNTING, "Token id 39 is outside the model's vocabulary, 0 to 38"),
    ):
        model = SuccessorModel(vocab_size=39)
        with pytest.raises(ValueError, match=message):
            probe(
                model,
                tokenizer,
                [a_passage("good", [*range(20)]), passage],
                prefix_lengths=(5, 8),
                offset=2,
            )
        assert model.calls == []
