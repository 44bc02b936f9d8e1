import json
import shutil

import pytest
import sentencepiece
from torchtune.data import Message
from torchtune.models.llama2 import Llama2Tokenizer
from transformers import AutoTokenizer

from tfidf_tune.data import hf_tokenizer

TEXT = "Hello  world,\n\nthe café <unk> costs 12 €. 🙂 "


@pytest.fixture(scope="module")
def sp_tokenizer(sentencepiece_folder):
    return hf_tokenizer(str(sentencepiece_folder))


def edited(folder, target, **changes):
    """A copy of a tokenizer folder with changed entries in tokenizer_config.json; None removes one."""
    shutil.copytree(folder, target)
    file = target / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(target)


def turn():
    prompt = Message(role="user", content="the river: ", masked=True)
    return [prompt, Message(role="assistant", content="green house", masked=False)]


def test_text_is_encoded_as_by_transformers_with_bos_and_eos(tokenizer, embedded_tokenizer_folder, sp_tokenizer):
    expected = AutoTokenizer.from_pretrained(str(embedded_tokenizer_folder)).encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT, add_bos=False, add_eos=False) == expected
    assert tokenizer.encode_batch([TEXT, "a"])[0] == expected
    assert tokenizer.encode(TEXT) == [*expected, tokenizer.eos_id]  # this tokenizer has no BOS
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "a<|endoftext|>"
    assert sp_tokenizer.encode("the", add_eos=False) == [sp_tokenizer.bos_id, *sp_tokenizer.encode_batch(["the"])[0]]
    assert sp_tokenizer.encode("the", add_bos=False)[-1] == sp_tokenizer.eos_id


def test_an_unusable_tokenizer_is_refused_by_name(embedded_tokenizer_folder, tmp_path, monkeypatch):
    def unreachable(path, **options):
        raise OSError("We couldn't connect")

    for path in ("./nowhere", "~/nowhere", "runs/model/nowhere"):
        with pytest.raises(FileNotFoundError, match=f"no such folder: '{path}'"):
            hf_tokenizer(path)
    with pytest.raises(ValueError, match=r"has no tokenizer files: .*tokenizer\.json or tokenizer\.model"):
        hf_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"no-eos' has no EOS token.*tokenizer_config\.json"):
        hf_tokenizer(edited(embedded_tokenizer_folder, tmp_path / "no-eos", eos_token=None))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from 'owner/name'.*OSError: We couldn't connect"):
        hf_tokenizer("owner/name")


def test_only_a_sentencepiece_model_encodes_as_sentencepiece_does(sp_tokenizer, sentencepiece_folder):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
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
    assert tokenizer.decode([token for token, masked in zip(tokens, mask, strict=True) if not masked]).strip() == (
        "green house"
    )


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
    assert tokenizer.decode(tokenizer.tokenize_messages(messages)[0]) == "ab"  # no space into the next turn


@pytest.mark.parametrize("kind", ["tokenizer", "sp_tokenizer"])
def test_a_loaded_tokenizer_is_taken_as_it_is_in_whatever_way_it_was_used(kind, request, tmp_path):
    ours = request.getfixturevalue(kind)
    ours.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded(TEXT, truncation=True, max_length=3)  # a fast tokenizer keeps such settings

    from_object = hf_tokenizer(loaded)

    assert (from_object.name, from_object.fingerprint) == (str(tmp_path), ours.fingerprint)
    assert from_object.encode(TEXT) == ours.encode(TEXT)


def test_the_fingerprint_depends_on_vocabulary_and_encoding(tokenizer, embedded_tokenizer_folder, tmp_path):
    def changed(name, change):
        shutil.copytree(embedded_tokenizer_folder, tmp_path / name)
        file = tmp_path / name / "tokenizer.json"
        data = json.loads(file.read_text())
        change(data)
        file.write_text(json.dumps(data))
        return hf_tokenizer(str(tmp_path / name))

    def swap(data):
        vocabulary = data["model"]["vocab"]
        # Two bytes that UTF-8 does not use, so that no sample text shows the difference.
        vocabulary["À"], vocabulary["Á"] = vocabulary["Á"], vocabulary["À"]

    swapped = changed("swapped", swap)
    assert swapped.encode(TEXT) == tokenizer.encode(TEXT)
    prefixed = changed("prefixed", lambda data: data["pre_tokenizer"].update(add_prefix_space=True))
    assert len({tokenizer.fingerprint, swapped.fingerprint, prefixed.fingerprint}) == 3
