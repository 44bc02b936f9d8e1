from types import SimpleNamespace

import pytest
import torch
from analysis_fakes import (
    VOCAB_SIZE,
    FakePassage,
    FingerprintedTokenizer,
    SuccessorModel,
    WordTokenizer,
    greedy_without_cache,
    random_ids,
    tiny_llama,
)
from transformers import AutoModelForCausalLM, DynamicCache, GPTJConfig, GPTNeoXConfig, LlamaConfig, MistralConfig

from tfidf_tune.analysis import (
    check_passages,
    compare_continuation,
    greedy_continuations,
    longest_memorized_substring,
    longest_prefix_match,
    probe,
    rouge_l,
    summarize,
)
from tfidf_tune.analysis._kv_cache import reserve

WIDE = {"vocab_size": VOCAB_SIZE, "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None}
COUNTING = FakePassage("counting", [*range(40)])  # what SuccessorModel knows by heart


@pytest.fixture(scope="module")
def samples(llama, recited, unseen):
    return probe(llama, WordTokenizer(), [*recited, *unseen])


def test_a_passage_that_the_model_knows_is_recited_in_full(samples):
    targets = [sample for sample in samples if sample.kind == "target"]
    assert len(targets) == 9
    for sample in targets:
        assert (sample.prefix_match, sample.lms, sample.rouge_l, sample.verbatim) == (128, 128, 100.0, True)


def test_a_passage_that_the_model_does_not_know_is_not_recited(samples):
    controls = [sample for sample in samples if sample.kind == "control"]
    assert len(controls) == 9
    for sample in controls:
        assert sample.lms < 6
        assert not sample.verbatim


def test_the_summary_separates_targets_from_controls(samples):
    summary = summarize(samples)
    assert (summary["target"].avg_lms, summary["target"].verbatim_rate) == (128.0, 1.0)
    assert summary["control"].verbatim_rate == 0.0


def test_samples_come_by_prefix_length_then_passage(samples, recited, unseen):
    expected = [(length, passage.id) for length in (32, 50, 100) for passage in [*recited, *unseen]]
    assert [(sample.prefix_length, sample.passage_id) for sample in samples] == expected


def test_the_model_gets_exactly_the_first_ids_and_no_bos():
    model = SuccessorModel()
    passages = [FakePassage("a", random_ids(20, 1)), FakePassage("b", random_ids(20, 2))]
    probe(model, WordTokenizer(), passages, prefix_lengths=(5,), max_new_tokens=1)
    assert model.calls == [[passage.token_ids[:5] for passage in passages]]


def test_the_reference_is_the_ids_right_after_the_prefix():
    passage = FakePassage("a", random_ids(20, 1))
    [sample] = probe(SuccessorModel(), WordTokenizer(), [passage], prefix_lengths=(5,), max_new_tokens=4)
    assert sample.reference_ids == passage.token_ids[5:9]


def test_the_offset_moves_prompt_and_reference():
    model = SuccessorModel()
    [sample] = probe(model, WordTokenizer(), [COUNTING], prefix_lengths=(5,), max_new_tokens=4, offset=3)
    assert model.calls[0] == [[3, 4, 5, 6, 7]]
    assert sample.generated_ids == sample.reference_ids == [8, 9, 10, 11]
    assert sample.offset == 3


def test_a_short_passage_is_compared_as_far_as_it_goes():
    short = FakePassage("short", [*range(10)])
    samples = probe(SuccessorModel(), WordTokenizer(), [short, COUNTING], prefix_lengths=(7,), max_new_tokens=8)
    assert [sample.generated_ids for sample in samples] == [[7, 8, 9], [*range(7, 15)]]
    assert [sample.verbatim for sample in samples] == [True, True]


def test_no_more_tokens_are_generated_than_any_reference_has():
    model = SuccessorModel()
    probe(model, WordTokenizer(), [FakePassage("short", [*range(10)])], prefix_lengths=(7,))
    assert len(model.calls) == 3


def test_the_continuation_ends_before_eos():
    [sample] = probe(SuccessorModel(), WordTokenizer(eos_id=9), [COUNTING], prefix_lengths=(5,), max_new_tokens=8)
    assert sample.generated_ids == [5, 6, 7, 8]
    assert sample.generated_text == "w5 w6 w7 w8"
    assert (sample.prefix_match, sample.lms, sample.verbatim) == (4, 4, False)


def test_a_continuation_that_starts_with_eos_recites_nothing():
    [sample] = probe(SuccessorModel(), WordTokenizer(eos_id=5), [COUNTING], prefix_lengths=(5,), max_new_tokens=8)
    assert (sample.generated_ids, sample.prefix_match, sample.lms, sample.rouge_l) == ([], 0, 0, 0.0)


def test_a_run_after_a_slip_counts_for_lms_and_not_for_the_prefix():
    slipped = FakePassage("slipped", [*range(8), 50, *range(9, 16)])
    [sample] = probe(SuccessorModel(), WordTokenizer(), [slipped], prefix_lengths=(5,), max_new_tokens=11)
    assert (sample.prefix_match, sample.lms, sample.verbatim) == (3, 7, False)


def test_the_result_does_not_depend_on_the_batch_size(llama, recited, unseen, samples):
    passages = [*recited, *unseen]
    for batch_size in (1, 4):
        assert probe(llama, WordTokenizer(), passages, batch_size=batch_size) == samples
    assert len({tuple(sample.generated_ids) for sample in samples}) > len(passages)


def test_progress_counts_to_the_number_of_samples():
    calls = []
    probe(
        SuccessorModel(),
        WordTokenizer(),
        [COUNTING] * 3,
        prefix_lengths=(5, 6),
        max_new_tokens=2,
        batch_size=2,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(2, 6), (3, 6), (5, 6), (6, 6)]


def test_a_model_left_in_training_mode_is_measured_without_dropout(recited):
    model = tiny_llama(attention_dropout=0.5).train()
    [sample] = probe(model, WordTokenizer(), recited[:1], prefix_lengths=(32,))
    assert sample.verbatim


def test_greedy_text_equals_a_plain_loop_without_cache(llama):
    prompts = [random_ids(11, seed) for seed in range(4)]
    expected = [greedy_without_cache(llama, prompt, 40) for prompt in prompts]
    assert greedy_continuations(llama, prompts, 40) == expected
    assert len(set(expected[0])) > 10  # no loop of one id, which any decoding would get right


def test_greedy_text_equals_that_of_transformers(llama):
    ids = torch.tensor([random_ids(11, seed) for seed in range(4)])
    theirs = llama.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=40,
        pad_token_id=0,
        eos_token_id=VOCAB_SIZE,
    )
    assert greedy_continuations(llama, ids.tolist(), 40) == theirs[:, 11:].tolist()


@pytest.mark.parametrize(
    "config",
    [
        GPTNeoXConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **WIDE),
        GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **WIDE),
        MistralConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            sliding_window=8, **WIDE,
        ),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_every_kind_of_cache_gives_the_text_that_no_cache_gives(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    prompts = [random_ids(11, seed) for seed in range(3)]
    expected = [greedy_without_cache(model, prompt, 30) for prompt in prompts]
    assert greedy_continuations(model, prompts, 30) == expected
    assert len(set(expected[0])) > 5


def test_the_cache_does_not_move_what_it_holds_and_returns_what_transformers_does():
    keys, values = torch.randn(2, 3, 4, 5, 6)
    ours, theirs = DynamicCache(), DynamicCache()
    for cache in (ours, theirs):
        cache.update(keys, values, layer_idx=0)
    reserve(ours, capacity=9)
    addresses = [states.data_ptr() for states in (ours.layers[0].keys, ours.layers[0].values)]
    for _ in range(4):
        token = torch.randn(2, 3, 4, 1, 6)
        for our_states, their_states in zip(ours.update(*token, 0), theirs.update(*token, 0), strict=True):
            assert torch.equal(our_states, their_states)
        assert [states.data_ptr() for states in (ours.layers[0].keys, ours.layers[0].values)] == addresses
    assert ours.get_seq_length() == theirs.get_seq_length() == 9


def test_memory_is_set_aside_only_in_layers_that_hold_the_whole_text():
    config = MistralConfig(num_hidden_layers=2, sliding_window=8)
    sliding, empty = DynamicCache(config=config), DynamicCache(config=LlamaConfig(num_hidden_layers=2))
    layers = [list(cache.layers) for cache in (sliding, empty)]
    reserve(sliding, capacity=9)
    reserve(empty, capacity=9)
    reserve(None, capacity=9)
    assert [cache.layers for cache in (sliding, empty)] == layers


def test_a_row_ends_before_its_eos_and_generation_with_the_last_row():
    model = SuccessorModel()
    assert greedy_continuations(model, [[3], [6], [9]], 20, eos_id=10) == [[4, 5, 6, 7, 8, 9], [7, 8, 9], []]
    assert len(model.calls) == 7
    assert greedy_continuations(model, [[3], [6]], 2, eos_id=10) == [[4, 5], [7, 8]]


def test_without_eos_nothing_ends_a_row():
    assert greedy_continuations(SuccessorModel(), [[9], [62]], 3) == [[10, 11, 12], [63, 0, 1]]


@pytest.mark.parametrize("num_tokens", [1, 17, 40])
def test_ending_rows_early_changes_none_of_their_ids(llama, num_tokens):
    prompts = [random_ids(11, seed) for seed in range(6)]
    whole = greedy_continuations(llama, prompts, num_tokens)
    for eos_id in {row[-1] for row in whole} | {row[0] for row in whole}:
        expected = [row[: row.index(eos_id)] if eos_id in row else row for row in whole]
        assert greedy_continuations(llama, prompts, num_tokens, eos_id=eos_id) == expected


def test_no_tokens_are_no_continuation():
    assert greedy_continuations(SuccessorModel(), [[3], [6]], 0, eos_id=10) == [[], []]


def test_the_probe_stops_when_all_rows_have_ended():
    model = SuccessorModel()
    samples = probe(model, WordTokenizer(eos_id=9), [COUNTING] * 2, prefix_lengths=(5,), max_new_tokens=30)
    assert len(model.calls) == 5
    assert [sample.generated_ids for sample in samples] == [[5, 6, 7, 8]] * 2


def test_a_continuation_is_scored_by_ids_and_by_text():
    given = {"passage_id": "a", "kind": "control", "offset": 3, "prefix_length": 5}
    generated, reference = [1, 2, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6]
    texts = {"generated_text": "the river sang", "reference_text": "the river sings"}
    sample = compare_continuation(**given, generated_ids=generated, reference_ids=reference, **texts)
    assert {name: getattr(sample, name) for name in (*given, *texts)} == given | texts
    assert (sample.generated_ids, sample.reference_ids) == (generated, reference)
    assert (sample.prefix_match, sample.lms, sample.verbatim) == (longest_prefix_match(generated, reference), 3, False)
    assert sample.rouge_l == rouge_l("the river sang", "the river sings")
    exact = compare_continuation(**given, generated_ids=reference, reference_ids=reference, **texts)
    assert (exact.prefix_match, exact.lms, exact.verbatim) == (6, 6, True)


def test_passages_can_be_checked_without_a_model():
    check_passages(FingerprintedTokenizer(), [COUNTING], 39)
    check_passages(WordTokenizer(), [COUNTING], 39)
    with pytest.raises(ValueError, match=r"'counting' has 40 tokens, none after the first 40 "):
        check_passages(FingerprintedTokenizer(), [COUNTING], 40)
    with pytest.raises(ValueError, match=r"fingerprint 'f1', .* has 'f2': probe with the tokenizer 'words'"):
        check_passages(FingerprintedTokenizer(fingerprint="f2"), [COUNTING], 5)


def test_ids_are_compared_with_the_largest_id_where_a_vocabulary_has_gaps():
    highest = max(COUNTING.token_ids)
    counted = SimpleNamespace(vocab_size=highest)
    with pytest.raises(ValueError, match=f"has the token id {highest}, but the tokenizer's ids end at {highest - 1}"):
        check_passages(counted, [COUNTING], 5)

    check_passages(SimpleNamespace(vocab_size=highest, max_token_id=highest), [COUNTING], 5)


def test_the_models_generation_config_does_not_change_the_text(llama):
    penalized = tiny_llama()
    penalized.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=2, do_sample=True)
    prompts = [random_ids(11, seed) for seed in range(4)]
    assert greedy_continuations(penalized, prompts, 40) == greedy_continuations(llama, prompts, 40)


def test_the_greedy_text_of_random_weights_differs_from_random_ids(llama):
    prompt = random_ids(32, 0)
    [generated] = greedy_continuations(llama, [prompt], 60)
    assert longest_memorized_substring(generated, random_ids(60, 1)) < 6


def test_a_passage_without_ids_after_the_prefix_is_named_before_any_work():
    model = SuccessorModel()
    passages = [COUNTING, FakePassage("tiny", [*range(10)])]
    with pytest.raises(ValueError, match=r"'tiny' has 10 tokens, none after the first 10 "):
        probe(model, WordTokenizer(), passages, prefix_lengths=(5, 8), offset=2)
    assert model.calls == []


def test_passages_of_another_tokenizer_are_refused_with_both_fingerprints():
    with pytest.raises(ValueError, match=r"'counting' .* fingerprint 'f1', .* has 'f2'"):
        probe(SuccessorModel(), FingerprintedTokenizer(fingerprint="f2"), [COUNTING], prefix_lengths=(5,))


def test_passages_of_the_same_tokenizer_are_probed():
    samples = probe(SuccessorModel(), FingerprintedTokenizer(), [COUNTING], prefix_lengths=(5,))
    assert samples[0].verbatim


def test_ids_outside_the_models_vocabulary_are_refused():
    with pytest.raises(ValueError, match=r"Token id 39 is outside the model's vocabulary, 0 to 38"):
        probe(SuccessorModel(vocab_size=39), WordTokenizer(), [COUNTING], prefix_lengths=(5,))
