import json
import re
import shutil
from functools import partial
from types import SimpleNamespace
from unicodedata import normalize

import pytest
import sentencepiece
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torchtune.data import Message
from torchtune.models.llama2 import Llama2Tokenizer
from transformers import (
    AutoTokenizer,
    BertTokenizer,
    ByT5Tokenizer,
    GPT2Tokenizer,
    PreTrainedTokenizerFast,
)

from tfidf_tune.data import hf_tokenizer, tokenizer_fingerprint

TEXT = "Hello  world,\n\nthe café <unk> costs 12 €. 🙂 "


@pytest.fixture(scope="module")
def sp_tokenizer(sentencepiece_folder):
    return hf_tokenizer(str(sentencepiece_folder))


def edited(folder, target, **changes):
    """A copy of a tokenizer folder with changed entries in tokenizer_config.json;
    None removes one.
    """
    shutil.copytree(folder, target)
    file = target / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(target)


def turn():
    prompt = Message(role="user", content="the river: ", masked=True)
    return [prompt, Message(role="assistant", content="green house", masked=False)]


def test_text_is_encoded_as_by_transformers_with_bos_and_eos(
    tokenizer, embedded_tokenizer_folder, sp_tokenizer
):
    expected = AutoTokenizer.from_pretrained(str(embedded_tokenizer_folder)).encode(
        TEXT, add_special_tokens=False
    )
    assert tokenizer.encode(TEXT, add_bos=False, add_eos=False) == expected
    assert tokenizer.encode_batch([TEXT, "a"])[0] == expected
    assert tokenizer.encode(TEXT) == [*expected, tokenizer.eos_id]  # this tokenizer has no BOS
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "a<|endoftext|>"
    assert sp_tokenizer.encode("the", add_eos=False) == [
        sp_tokenizer.bos_id,
        *sp_tokenizer.encode_batch(["the"])[0],
    ]
    assert sp_tokenizer.encode("the", add_bos=False)[-1] == sp_tokenizer.eos_id


def test_an_unusable_tokenizer_is_refused_by_name(embedded_tokenizer_folder, tmp_path, monkeypatch):
    def unreachable(path, **options):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files")

    def damaged(path, **options):
        raise OSError("not a tokenizer")

    for path in ("./nowhere", "~/nowhere", "runs/model/nowhere"):
        with pytest.raises(FileNotFoundError, match=f"no such folder: '{path}'"):
            hf_tokenizer(path)
    with pytest.raises(
        ValueError, match=r"has no tokenizer files: .*tokenizer\.json or tokenizer\.model"
    ):
        hf_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"no-eos' has no EOS token.*tokenizer_config\.json"):
        hf_tokenizer(edited(embedded_tokenizer_folder, tmp_path / "no-eos", eos_token=None))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(
        ValueError,
        match=r"^'owner/name' is not on this machine, and .*hub could not be reached: give the path "
        r"of the folder of a model, or one with tokenizer\.json or tokenizer\.model, [^\n]*$",
    ):
        hf_tokenizer("owner/name")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", damaged)
    with pytest.raises(
        ValueError, match=r"cannot load a tokenizer from 'owner/name'.*OSError: not a tokenizer"
    ):
        hf_tokenizer("owner/name")


def test_only_a_sentencepiece_model_encodes_as_sentencepiece_does(
    sp_tokenizer, sentencepiece_folder
):
    reference = sentencepiece.SentencePieceProcessor(
        model_file=str(sentencepiece_folder / "tokenizer.model")
    )
    text = "the river  sings\n\nover café 1984 🙂"
    assert sp_tokenizer.encode(text, add_bos=False, add_eos=False) == reference.encode(text)
    assert (sp_tokenizer.bos_id, sp_tokenizer.eos_id) == (reference.bos_id(), reference.eos_id())
    assert sp_tokenizer.decode(reference.encode(text)) == text


def test_messages_are_tokenized_as_torchtune_tokenizes_them(sp_tokenizer, sentencepiece_folder):
    stock = Llama2Tokenizer(str(sentencepiece_folder / "tokenizer.model"), prompt_template=None)
    messages = [
        Message(role="system", content="not a stone\n", masked=True),
        Message(role="user", content="the river", masked=True),
        Message(role="assistant", content="green house"),
    ]
    assert sp_tokenizer.tokenize_messages(messages) == stock.tokenize_messages(messages)


@pytest.mark.parametrize("kind", ["tokenizer", "sp_tokenizer"])
def test_messages_give_the_ids_of_their_text_in_one_piece(kind, request):
    """The space that ends a prompt must neither be lost nor be doubled, whatever the tokenizer."""
    tokenizer = request.getfixturevalue(kind)
    tokens, mask = tokenizer.tokenize_messages(turn())
    assert tokens == tokenizer.encode("the river: green house")
    assert len(mask) == len(tokens)
    assert tokenizer.decode(
        [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    ).strip() == ("green house")


def test_messages_are_cut_at_max_seq_len_and_end_in_eos(tokenizer, embedded_tokenizer_folder):
    short = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=4)
    tokens, mask = short.tokenize_messages(turn())
    assert len(tokens) == len(mask) == 4
    assert tokens[-1] == short.eos_id

    sample = tokenizer({"messages": turn(), "id": 3})
    assert set(sample) == {"id", "tokens", "mask"}
    assert sample["tokens"][-1] == tokenizer.eos_id
    assert tokenizer.eos_id not in tokenizer({"messages": turn()}, inference=True)["tokens"]
    messages = [Message(role="assistant", content="a "), Message(role="user", content="b")]
    # No space into the next turn.
    assert tokenizer.decode(tokenizer.tokenize_messages(messages)[0]) == "ab"


@pytest.mark.parametrize("kind", ["tokenizer", "sp_tokenizer"])
def test_a_loaded_tokenizer_is_taken_as_it_is_in_whatever_way_it_was_used(kind, request, tmp_path):
    ours = request.getfixturevalue(kind)
    ours.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded(TEXT, truncation=True, max_length=3)  # a fast tokenizer keeps such settings

    from_object = hf_tokenizer(loaded)

    assert (from_object.name, from_object.fingerprint) == (str(tmp_path), ours.fingerprint)
    assert from_object.encode(TEXT) == ours.encode(TEXT)


def rebuilt(kind, folder):
    """A tokenizer that ``transformers`` makes from a vocabulary, by the name of its class or of its
    model.
    """
    words = [
        "[UNK]",
        "[PAD]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *"abcdefghijklmnopqrstuvwxyz",
        "##r",
        "the",
        "river",
    ]
    if kind == "GPT2Tokenizer":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = ["<|endoftext|>", *alphabet, "th", "the"]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        return GPT2Tokenizer(vocab=vocabulary, merges=[("t", "h"), ("th", "e")])
    if kind == "BertTokenizer":
        return BertTokenizer(
            vocab={word: number for number, word in enumerate(words)}, eos_token="[SEP]"
        )
    unigram = Tokenizer(
        models.Unigram([(word, -float(number)) for number, word in enumerate(words)], unk_id=0)
    )
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=unigram, eos_token="[SEP]", pad_token="[PAD]")


@pytest.mark.parametrize(
    "kind", ["tokenizer", "sp_tokenizer", "GPT2Tokenizer", "BertTokenizer", "Unigram", "ByT5"]
)
def test_the_fingerprint_stays_when_a_tokenizer_is_used_saved_and_loaded_again(
    kind, request, tmp_path
):
    if kind.endswith("tokenizer"):
        first = request.getfixturevalue(kind)
    elif kind == "ByT5":  # none of the library tokenizers
        first = hf_tokenizer(ByT5Tokenizer())
    else:
        first = hf_tokenizer(rebuilt(kind, tmp_path))
    first.save_pretrained(tmp_path / "first")
    second = AutoTokenizer.from_pretrained(tmp_path / "first")
    second(["the", "the river"], truncation=True, max_length=3, return_token_type_ids=False)
    hf_tokenizer(second).save_pretrained(tmp_path / "second")
    # As an evaluation loads it: with BOS, padded on the left.
    third = AutoTokenizer.from_pretrained(
        tmp_path / "second", padding_side="left", add_bos_token=True
    )
    third.pad_token = third.eos_token
    third(["the", "the river"], padding=True)
    assert hf_tokenizer(third).fingerprint == hf_tokenizer(second).fingerprint == first.fingerprint


def test_the_fingerprint_depends_on_all_that_decides_on_ids(
    tokenizer, embedded_tokenizer_folder, tmp_path
):
    def changed(name, change):
        shutil.copytree(embedded_tokenizer_folder, tmp_path / name)
        file = tmp_path / name / "tokenizer.json"
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))
        return hf_tokenizer(str(tmp_path / name))

    def swap(data):
        vocabulary = data["model"]["vocab"]
        # Two bytes that UTF-8 does not use, so that no text shows the difference.
        vocabulary["À"], vocabulary["Á"] = vocabulary["Á"], vocabulary["À"]

    def swap_merges(data):
        merges = data["model"]["merges"]
        merges[-2:] = merges[:-3:-1]

    def add_token(data):
        last = max(data["model"]["vocab"].values())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        data["added_tokens"].append({"id": last + 1, "content": "zebra", **flags})

    digits = {"type": "Digits", "individual_digits": True}
    changes = {
        "vocabulary": swap,
        "merges": swap_merges,
        "added token": add_token,
        "prefix": lambda data: data["pre_tokenizer"].update(add_prefix_space=True),
        "digits": lambda data: data.update(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, data["pre_tokenizer"]]}
        ),
        "word": lambda data: data.update(
            normalizer={"type": "Replace", "pattern": {"String": "zebra"}, "content": "horse"}
        ),
    }
    for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase"):
        changes[form] = lambda data, form=form: data.update(normalizer={"type": form})
    fingerprints = {name: changed(name, change).fingerprint for name, change in changes.items()}
    assert len({tokenizer.fingerprint, *fingerprints.values()}) == 1 + len(changes)


def test_what_does_not_decide_on_ids_is_not_in_the_fingerprint(
    tokenizer, embedded_tokenizer_folder, tmp_path
):
    """And neither are settings that are off, which another version of ``tokenizers``
    may not have.
    """
    folder = tmp_path / "other"
    shutil.copytree(embedded_tokenizer_folder, folder)
    data = json.loads((folder / "tokenizer.json").read_text())
    data["truncation"] = {
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
        "direction": "Right",
    }
    data["post_processor"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    del data["model"]["ignore_merges"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    assert hf_tokenizer(str(folder)).fingerprint == tokenizer.fingerprint


def test_a_tokenizer_without_rules_to_read_is_known_by_the_ids_of_a_text():
    """torchtune's, for example: forms of characters, cases, line ends and joined emoji show in the
    ids.
    """

    def of(change):
        encode = lambda text, add_bos, add_eos: [ord(character) for character in change(text)]  # noqa: E731
        return tokenizer_fingerprint(SimpleNamespace(vocab_size=9, encode=encode))

    forms = [partial(normalize, form) for form in ("NFC", "NFD", "NFKC", "NFKD")]
    others = [
        str.lower,
        lambda text: text.replace("\r\n", "\n"),
        lambda text: text.replace("\r", "\n"),
        lambda text: text.replace("\u200d", ""),
        str,  # nothing
        lambda text: re.sub(" +", " ", text),
        lambda text: re.sub(r"\s", " ", text),
        lambda text: re.sub(r"\d", "0", text),
        str.strip,
    ]
    found = [of(change) for change in [*forms, *others]]
    assert len({*found}) == len(found)
