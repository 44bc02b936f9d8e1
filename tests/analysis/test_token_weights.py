import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sentencepiece_model import train_sentencepiece
from tfidf_reference import ReferenceTFIDF
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tfidf_tune import TFIDFCrossEntropyLoss
from tfidf_tune.analysis import _weight_statistics
from tfidf_tune.analysis._token_weights import TERM_FREQUENCIES, read_blocks, typical_blocks, weigh_blocks
from tfidf_tune.analysis._weight_statistics import most_weighted, position_table, token_texts, word_parts
from tfidf_tune.data import TextBlocksDataset, hf_tokenizer, text_blocks_dataset
from tfidf_tune.training._data import build_dataloader
from tfidf_tune.weighting import shift_labels

VOCAB_SIZE = 40


def token_statistics(weighted):
    return _weight_statistics.token_statistics(position_table(weighted))


def frequency_bands(weighted):
    return _weight_statistics.frequency_bands(position_table(weighted))


def part_statistics(weighted, texts):
    return _weight_statistics.part_statistics(weighted, position_table(weighted), texts)


def split_statistics(weighted, texts):
    return _weight_statistics.split_statistics(weighted, position_table(weighted), texts)


def random_blocks(num_blocks, block_size=12, seed=0):
    """Token frequencies that fall off as those of text do."""
    rng = np.random.default_rng(seed)
    probabilities = 1 / np.arange(1, VOCAB_SIZE + 1)
    ids = rng.choice(VOCAB_SIZE, size=(num_blocks, block_size), p=probabilities / probabilities.sum())
    return ids.astype(np.int32)


@pytest.fixture(scope="module")
def weighted():
    return weigh_blocks(random_blocks(50), vocab_size=VOCAB_SIZE, batch_size=4, num_batches=3)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return hf_tokenizer(str(tiny_checkpoint))


# ---- the weights


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("max_weight", [None, 1.5])
def test_the_weights_are_exactly_those_of_a_training_run(shuffle, max_weight):
    blocks = random_blocks(50)
    weighted = weigh_blocks(
        blocks,
        vocab_size=VOCAB_SIZE,
        batch_size=4,
        num_batches=3,
        max_weight=max_weight,
        shuffle=shuffle,
        seed=7,
    )
    cfg = SimpleNamespace(shuffle=shuffle, batch_size=4, collate_fn="torchtune.data.padded_collate_sft")
    run = SimpleNamespace(seed=7, device=torch.device("cpu"))
    loader = build_dataloader(cfg, TextBlocksDataset(blocks), SimpleNamespace(pad_id=0), run)
    for form in TERM_FREQUENCIES:
        loss = TFIDFCrossEntropyLoss(num_batches=3, tf=form, max_weight=max_weight)
        seen = 0
        for step, batch in enumerate(loader, start=1):
            labels = shift_labels(batch["labels"])
            weights = loss.terms(torch.zeros(*labels.shape, VOCAB_SIZE), labels).weights.numpy()
            rows = np.flatnonzero(weighted.steps == step)
            # The recipe's rows come in the order of the sampler, ours in that of the text.
            mine = {tuple(weighted.blocks[row]): weighted.weights[form][row] for row in rows}
            for tokens, expected in zip(batch["tokens"].tolist(), weights, strict=True):
                np.testing.assert_array_equal(mine[tuple(tokens)], expected[:-1])
                seen += 1
        assert seen == len(weighted.blocks) == 48


@pytest.mark.parametrize("form", TERM_FREQUENCIES)
def test_the_weights_are_those_of_the_independent_reference(form):
    weighted = weigh_blocks(
        random_blocks(20), vocab_size=VOCAB_SIZE, batch_size=4, num_batches=2, max_weight=2.0, shuffle=False
    )
    reference = ReferenceTFIDF(num_batches=2, tf=form, max_weight=2.0)
    for first in range(0, 20, 4):
        expected = reference(weighted.labels[first : first + 4].tolist())
        np.testing.assert_allclose(weighted.weights[form][first : first + 4], expected, rtol=1e-5)


def test_tf_df_and_idf_are_those_of_the_window_at_the_blocks_own_step(weighted):
    sets = {step: [] for step in range(1, weighted.steps.max() + 1)}
    for step, labels in zip(weighted.steps, weighted.labels.tolist(), strict=True):
        sets[step].append(set(labels))
    for row, labels in enumerate(weighted.labels.tolist()):
        step = weighted.steps[row]
        window = [tokens for s in range(max(1, step - 2), step + 1) for tokens in sets[s]]
        assert weighted.num_documents[row] == len(window)
        assert weighted.counts[row].tolist() == [labels.count(token) for token in labels]
        frequency = [sum(token in tokens for tokens in window) for token in labels]
        assert weighted.document_frequency[row].tolist() == frequency
        idf = [math.log((1 + len(window)) / (1 + df)) + 1 for df in frequency]
        np.testing.assert_allclose(weighted.idf[row], idf, rtol=1e-6)


def test_blocks_come_back_in_the_order_of_the_text_and_an_incomplete_mini_batch_is_left_out(weighted):
    assert len(weighted.indices) == 48
    assert (np.diff(weighted.indices) > 0).all()
    np.testing.assert_array_equal(weighted.blocks, random_blocks(50)[weighted.indices])
    assert Counter(weighted.steps.tolist()) == dict.fromkeys(range(1, 13), 4)
    assert weighted.steps.tolist() != sorted(weighted.steps.tolist())  # mixed, as in training


def test_a_text_that_fills_no_mini_batch_is_one(weighted):
    small = weigh_blocks(random_blocks(3), vocab_size=VOCAB_SIZE, batch_size=8)
    assert small.indices.tolist() == [0, 1, 2]
    assert small.steps.tolist() == [1, 1, 1]
    assert small.num_documents.tolist() == [3, 3, 3]


def test_typical_blocks_have_a_full_window(weighted):
    rows = typical_blocks(weighted, 5)
    assert rows == [row for row in range(48) if weighted.steps[row] >= 3][:5]
    assert len(typical_blocks(weighted, 1000)) == 48 - 2 * 4


def test_where_the_window_never_fills_typical_blocks_are_of_the_latest_mini_batch():
    early = weigh_blocks(random_blocks(9), vocab_size=VOCAB_SIZE, batch_size=4, shuffle=False)
    assert typical_blocks(early, 10) == [4, 5, 6, 7]


def test_a_batch_size_of_zero_is_refused():
    with pytest.raises(ValueError, match="batch_size is 0"):
        weigh_blocks(random_blocks(3), vocab_size=VOCAB_SIZE, batch_size=0)


# ---- the text


def test_the_blocks_are_those_of_the_training_data_set(tokenizer, text_file):
    dataset = text_blocks_dataset(tokenizer, source=str(text_file), block_size=32)
    np.testing.assert_array_equal(read_blocks(tokenizer, [str(text_file)], block_size=32), dataset.blocks)


def test_several_files_are_one_text(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("the old sailor\n" * 9)
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": "a quiet child"}) + "\n")
    (tmp_path / "both.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*["the old sailor"] * 9, "a quiet child"])
    )
    with pytest.raises(ValueError, match="no column 'body'"):
        read_blocks(tokenizer, [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], block_size=8, column="body")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "a quiet child"}) + "\n")
    parts = read_blocks(tokenizer, [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], block_size=2)
    np.testing.assert_array_equal(parts, read_blocks(tokenizer, [str(tmp_path / "both.jsonl")], block_size=2))


def test_the_first_blocks_alone_can_be_asked_for(tokenizer, text_file):
    blocks = read_blocks(tokenizer, [str(text_file)], block_size=32)
    np.testing.assert_array_equal(read_blocks(tokenizer, [str(text_file)], block_size=32, num_blocks=3), blocks[:3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 1}, "block_size is 1"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"block_size": 10**6}, "fewer tokens than one block of 1000000"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(settings, message, tokenizer, text_file):
    with pytest.raises(ValueError, match=message):
        read_blocks(tokenizer, [str(text_file)], **settings)


def test_a_missing_file_is_found_before_another_is_read(tokenizer, tmp_path):
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(FileNotFoundError, match=r"missing\.txt"):
        read_blocks(tokenizer, [str(tmp_path / "broken.jsonl"), str(tmp_path / "missing.txt")])


# ---- statistics


def test_token_statistics_are_means_over_occurrences(weighted):
    statistics = token_statistics(weighted)
    labels = weighted.labels.tolist()
    positions = {}
    for row, tokens in enumerate(labels):
        for column, token in enumerate(tokens):
            positions.setdefault(token, []).append((row, column))
    assert statistics["id"].tolist() == sorted(positions, key=lambda t: (-len(positions[t]), t))
    for token in statistics.to_dict("records"):
        where = positions[token["id"]]
        assert token["count"] == len(where)
        assert token["blocks"] == len({row for row, _ in where})
        assert token["mean tf"] == pytest.approx(np.mean([labels[row].count(token["id"]) for row, _ in where]))
        assert token["mean idf"] == pytest.approx(np.mean([weighted.idf[at] for at in where]), rel=1e-6)
        for form in TERM_FREQUENCIES:
            mean = np.mean([weighted.weights[form][at] for at in where], dtype=np.float64)
            assert token[f"weight, {form}"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("form", TERM_FREQUENCIES)
def test_the_most_weighted_tokens_are_ranked_by_mean_weight(form, weighted):
    statistics = token_statistics(weighted)
    frequent = statistics[statistics["count"] >= 5]
    assert len(frequent) < len(statistics)
    by_weight = [token for _, token in sorted(zip(frequent[f"weight, {form}"], frequent["id"], strict=True))]
    up, down = (most_weighted(statistics, form, min_count=5, limit=4, up=up)["id"].tolist() for up in (True, False))
    assert up == by_weight[::-1][:4]
    assert down == by_weight[:4]


def test_no_token_is_both_up_and_down_weighted(weighted):
    statistics = token_statistics(weighted)
    up, down = (most_weighted(statistics, "log", min_count=1, limit=1000, up=up) for up in (True, False))
    assert (up["weight, log"] > 1).all()
    assert (down["weight, log"] < 1).all()
    assert len(up) + len(down) == len(statistics)


def test_frequency_bands_share_out_all_tokens_and_all_weight(weighted):
    bands = frequency_bands(weighted)
    count = Counter(weighted.labels.ravel().tolist())
    ranked = sorted(count, key=lambda token: (-count[token], token))
    assert bands["frequency rank"].tolist() == ["1 to 10", f"11 to {len(ranked)}"]
    for band, tokens in zip(bands.to_dict("records"), (ranked[:10], ranked[10:]), strict=True):
        inside = np.isin(weighted.labels, tokens)
        assert band["% of tokens"] == pytest.approx(100 * inside.mean())
        for form, weights in weighted.weights.items():
            assert band[f"% of weight, {form}"] == pytest.approx(100 * weights[inside].sum() / weights.sum(), rel=1e-5)
            assert band[f"mean, {form}"] == pytest.approx(weights[inside].mean(), rel=1e-5)
            assert band[f"median, {form}"] == np.median(weights[inside])
    assert bands["% of tokens"].sum() == pytest.approx(100)
    assert bands["% of weight, count"].sum() == pytest.approx(100)


def test_raw_counts_lift_a_word_that_fills_its_blocks_and_idf_alone_lowers_it():
    rng = np.random.default_rng(0)
    blocks = rng.integers(1, 1000, size=(64, 32))
    blocks[:, ::3] = 0  # "the": in every block, many times
    the = token_statistics(weigh_blocks(blocks, vocab_size=1000)).iloc[0]
    assert the["id"] == 0
    assert the["weight, count"] > 1 > the["weight, binary"]


# ---- words


@pytest.fixture(scope="module")
def sentencepiece_tokenizer(tmp_path_factory):
    sentences = ["the old sailor watched the harbour, the grey cat slept"] * 20
    folder = train_sentencepiece(tmp_path_factory.mktemp("sentencepiece"), sentences, vocab_size=300)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return hf_tokenizer(str(folder))


TEXT = "the old sailors' harbour: 1984 <x>  two"


def test_token_texts_of_byte_level_bpe_join_to_the_text(tokenizer):
    ids = tokenizer.encode(TEXT, add_bos=False, add_eos=False)
    texts = token_texts(tokenizer, np.array(ids))
    assert "".join(texts[token] for token in ids) == TEXT


def test_token_texts_of_sentencepiece_join_to_the_text_behind_its_leading_space(sentencepiece_tokenizer):
    ids = sentencepiece_tokenizer.encode(TEXT, add_bos=False, add_eos=False)
    texts = token_texts(sentencepiece_tokenizer, np.array([ids, ids]))
    assert "".join(texts[token] for token in ids) == " " + TEXT


def test_special_tokens_and_parts_of_characters_have_a_text(tokenizer, sentencepiece_tokenizer):
    for each in (tokenizer, sentencepiece_tokenizer):
        ids = [*each.encode("東", add_bos=False, add_eos=False), each.eos_id]
        texts = token_texts(each, np.array(ids))
        assert texts[each.eos_id] in ("<|endoftext|>", "</s>")
        assert [texts[token] for token in ids[-4:-1]] == ["\ufffd"] * 3


def test_token_texts_of_wordpiece_tell_continuations_from_starts():
    vocabulary = {"[UNK]": 0, "[SEP]": 1, "a": 2, "lob": 3, "##ster": 4}
    wordpiece = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    wordpiece.pre_tokenizer = pre_tokenizers.Whitespace()
    wordpiece.decoder = decoders.WordPiece(cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=wordpiece, unk_token="[UNK]", eos_token="[SEP]")
    tokenizer = SimpleNamespace(
        encode=lambda text, **_: fast.encode(text, add_special_tokens=False),
        decode=lambda ids, **_: fast.decode(ids, clean_up_tokenization_spaces=False),
    )
    assert token_texts(tokenizer, np.array([3, 4])) == {3: " lob", 4: "ster"}


TEXTS = dict(enumerate([" lob", "ster", " the", ",", " ", "an", "\n", "é", " (", "\ufffd", "_", " ́", "7"]))


@pytest.mark.parametrize(
    ("tokens", "parts"),
    [
        ([" lob", "ster", "an"], "SCC"),
        ([" the", " lob"], "SS"),
        ([" the", ",", "an"], "SoS"),
        ([" ", "an", "7"], "oSC"),
        ([" the", "\n", "an"], "SoS"),
        ([" (", "an", "é"], "oSC"),
        (["an", "\ufffd", "\ufffd"], "SCC"),
        (["an", "_", "an"], "SoS"),
        (["an", " ́"], "SS"),
    ],
)
def test_tokens_start_or_continue_a_word(tokens, parts):
    number = {text: token for token, text in TEXTS.items()}
    starts, continues = word_parts(np.array([[number[token] for token in tokens]]), TEXTS)
    found = [
        "S" if start else "C" if continued else "o" for start, continued in zip(starts[0], continues[0], strict=True)
    ]
    assert "".join(found) == parts


WORD_TEXTS = {0: " the", 1: " lob", 2: "ster", 3: "s", 4: ",", 5: " lobs", 6: "ter", 7: "<eos>"}


def word_blocks(num_blocks=24, block_size=16):
    """Blocks of the words the, lobs, lobster and lobsters, the last two split in different ways, and commas."""
    rng = np.random.default_rng(1)
    words = [[0], [0], [0], [1, 3], [1, 2], [5, 6], [1, 2, 3], [5, 6, 3], [4], [7]]
    stream = [token for choice in rng.integers(len(words), size=num_blocks * block_size) for token in words[choice]]
    return np.array(stream[: num_blocks * block_size], dtype=np.int32).reshape(num_blocks, block_size)


@pytest.fixture(scope="module")
def weighted_words():
    return weigh_blocks(word_blocks(), vocab_size=8, batch_size=2, num_batches=3)


def test_part_statistics_are_means_over_the_parts(weighted_words):
    starts, continues = (part[:, 1:] for part in word_parts(weighted_words.blocks, WORD_TEXTS))
    parts = part_statistics(weighted_words, WORD_TEXTS)
    assert parts["token"].tolist() == [
        "starts a word",
        "continues a word",
        "no word (punctuation, spaces, end of text)",
    ]
    for found, mask in zip(parts.to_dict("records"), (starts, continues, ~starts & ~continues), strict=True):
        assert found["% of tokens"] == pytest.approx(100 * mask.mean())
        assert found["mean idf"] == pytest.approx(weighted_words.idf[mask].mean(), rel=1e-5)
        for form, weights in weighted_words.weights.items():
            assert found[f"weight, {form}"] == pytest.approx(weights[mask].mean(), rel=1e-5)
    assert parts["% of tokens"].sum() == pytest.approx(100)


def test_split_words_are_compared_with_what_they_would_be_as_one_token(weighted_words):
    # Once more with strings: cut each block into words, those at its ends aside, and count documents by word.
    found = {}
    for row, tokens in enumerate(weighted_words.blocks.tolist()):
        words, current = [], None
        for column, token in enumerate(tokens):
            text = WORD_TEXTS[token]
            if text in (",", "<eos>"):
                current = None
            elif text.startswith(" ") or current is None:
                current = [column]
                words.append(current)
            else:
                current.append(column)
        whole = [word for word in words if word[0] > 0 and word[-1] < len(tokens) - 1]
        found[row] = [("".join(WORD_TEXTS[tokens[i]] for i in word).strip(), word) for word in whole]

    expected = {}
    for row, words in found.items():
        step = weighted_words.steps[row]
        window = [
            {word for word, _ in found[other]}
            for other in found
            if step - 2 <= weighted_words.steps[other] <= step and found[other]
        ]
        for word, columns in words:
            frequency = sum(word in others for others in window)
            entry = expected.setdefault(len(columns), {"words": [], "pieces": [], "weights": []})
            entry["words"].append(math.log((1 + len(window)) / (1 + frequency)) + 1)
            entry["pieces"] += [weighted_words.idf[row, i - 1] for i in columns]
            entry["weights"] += [weighted_words.weights["log"][row, i - 1] for i in columns]

    statistics = split_statistics(weighted_words, WORD_TEXTS)
    assert statistics.index.tolist() == sorted(expected) == [1, 2, 3]
    for num_pieces, split in statistics.iterrows():
        entry = expected[num_pieces]
        assert split["words"] == len(entry["words"])
        assert split["idf, word"] == pytest.approx(np.mean(entry["words"]), rel=1e-5)
        assert split["idf, tokens"] == pytest.approx(np.mean(entry["pieces"]), rel=1e-5)
        assert split["weight, log"] == pytest.approx(np.mean(entry["weights"]), rel=1e-5)


def test_longer_words_are_counted_with_those_of_four_pieces():
    blocks = np.array([[4, 1, 2, 3, 3, 3, 4, 1, 2, 3, 3, 4]])
    splits = split_statistics(weigh_blocks(blocks, vocab_size=8), WORD_TEXTS)
    assert splits[["tokens of the word", "words"]].values.tolist() == [["4 or more", 2]]


def test_a_text_without_whole_words_has_no_split_statistics():
    assert split_statistics(weigh_blocks(np.array([[4, 4, 7, 4]]), vocab_size=8), WORD_TEXTS).empty


def test_a_word_is_the_same_with_and_without_a_space_before_it():
    # " the" behind a word, "the" behind a comma: two tokens, one word, in one of two blocks.
    texts = {0: " the", 1: "the", 2: ",", 3: " lob"}
    blocks = np.array([[2, 0, 3, 2, 1, 2], [2, 3, 2, 3, 3, 2]])
    splits = split_statistics(weigh_blocks(blocks, vocab_size=4), texts)
    the, lob = math.log(3 / 2) + 1, math.log(3 / 3) + 1
    assert splits["idf, word"].tolist() == pytest.approx([(2 * the + 4 * lob) / 6])
    others = split_statistics(weigh_blocks(np.array([[2, 0, 2, 3, 3, 2], [2, 1, 2, 3, 3, 2]]), vocab_size=4), texts)
    assert others["idf, word"].tolist() == pytest.approx([1.0])  # each word is in both blocks


def test_a_window_longer_than_the_text_is_not_allocated():
    blocks = np.arange(64, dtype=np.int32).reshape(16, 4) % 7
    longest, whole = (weigh_blocks(blocks, vocab_size=7, batch_size=2, num_batches=n) for n in (10**15, 8))
    np.testing.assert_equal(longest.weights, whole.weights)
    assert longest.num_batches == 10**15
