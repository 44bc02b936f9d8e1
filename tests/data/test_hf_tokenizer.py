import json
import shutil

import pytest
import sentencepiece
from torchtune.data import Message
from torchtune.datasets import PackedDataset, SFTDataset, TextCompletionDataset
from torchtune.models.llama2 import Llama2Tokenizer
from transformers import AutoTokenizer

from tfidf_tune.data import hf_tokenizer, tokenizer_fingerprint, tokenizer_name

TEXT = "Hello  world,\n\nthe café <unk> costs 12 €. 🙂 "


@pytest.fixture(scope="module")
def sp_tokenizer(sentencepiece_folder):
    return hf_tokenizer(str(sentencepiece_folder))


def edited(folder, target, **changes):
    """A copy of a tokenizer folder with other entries in tokenizer_config.json; None removes one."""
    shutil.copytree(folder, target)
    file = target / "tokenizer_config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return str(target)


def turn():
    return [
        Message(role="user", content="the river: ", masked=True),
        Message(role="assistant", content="green house", masked=False),
    ]


def test_encodes_what_transformers_encodes(tokenizer, embedded_tokenizer_folder):
    expected = AutoTokenizer.from_pretrained(str(embedded_tokenizer_folder)).encode(TEXT, add_special_tokens=False)
    assert tokenizer.encode(TEXT, add_bos=False, add_eos=False) == expected
    assert tokenizer.encode_batch([TEXT, "a"])[0] == expected


def test_decodes_what_it_encoded(tokenizer):
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_special_tokens_stay_in_the_text_on_request(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a"), skip_special_tokens=False) == "a<|endoftext|>"


def test_adds_eos_and_no_bos_where_there_is_none(tokenizer):
    assert tokenizer.bos_id is None
    assert tokenizer.encode("a") == [*tokenizer.encode_batch(["a"])[0], tokenizer.eos_id]


def test_adds_bos_where_there_is_one(sp_tokenizer):
    assert sp_tokenizer.encode("the", add_eos=False) == [sp_tokenizer.bos_id, *sp_tokenizer.encode_batch(["the"])[0]]
    assert sp_tokenizer.encode("the", add_bos=False)[-1] == sp_tokenizer.eos_id


def test_attributes_are_those_of_the_tokenizer(tokenizer, embedded_tokenizer_folder):
    assert tokenizer.vocab_size == 512
    assert tokenizer.special_tokens == {"<|endoftext|>": tokenizer.eos_id}
    assert tokenizer.name == str(embedded_tokenizer_folder)
    assert tokenizer.stop_tokens == [tokenizer.eos_id]
    assert tokenizer.max_seq_len is None


def test_vocab_size_counts_added_tokens(embedded_tokenizer_folder, tmp_path):
    hf = AutoTokenizer.from_pretrained(str(embedded_tokenizer_folder))
    hf.add_tokens(["<|added|>"])
    hf.save_pretrained(str(tmp_path))
    assert hf_tokenizer(str(tmp_path)).vocab_size == 513


def test_pad_is_eos_where_there_is_no_pad_token(embedded_tokenizer_folder, tmp_path):
    folder = edited(embedded_tokenizer_folder, tmp_path / "no-pad", pad_token=None)
    assert hf_tokenizer(folder).pad_id == hf_tokenizer(folder).eos_id


def test_pad_token_is_used_where_there_is_one(embedded_tokenizer_folder, tmp_path):
    tokenizer = hf_tokenizer(edited(embedded_tokenizer_folder, tmp_path / "pad", pad_token="!"))
    assert tokenizer.pad_id == tokenizer.special_tokens["!"] != tokenizer.eos_id


def test_a_tokenizer_without_eos_is_refused_by_name(embedded_tokenizer_folder, tmp_path):
    folder = edited(embedded_tokenizer_folder, tmp_path / "no-eos", eos_token=None)
    with pytest.raises(ValueError, match=r"no-eos' has no EOS token.*tokenizer_config\.json"):
        hf_tokenizer(folder)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere", "~/nowhere", "../nowhere", "runs/model/nowhere"])
def test_a_missing_folder_is_named(path):
    with pytest.raises(FileNotFoundError, match=f"no such folder: '{path}'"):
        hf_tokenizer(path)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from .*tokenizer\.json or tokenizer\.model"):
        hf_tokenizer(str(tmp_path))


def test_the_hub_error_is_passed_on(monkeypatch):
    def unreachable(path):
        raise OSError("We couldn't connect")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(ValueError, match=r"cannot load a tokenizer from 'owner/name'.*OSError: We couldn't connect"):
        hf_tokenizer("owner/name")


def test_a_sentencepiece_model_alone_encodes_as_sentencepiece_does(sp_tokenizer, sentencepiece_folder):
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


def test_a_space_is_not_carried_into_the_next_turn(tokenizer):
    messages = [Message(role="assistant", content="a "), Message(role="user", content="b")]
    assert tokenizer.decode(tokenizer.tokenize_messages(messages)[0]) == "ab"


def test_messages_are_cut_at_max_seq_len_and_end_in_eos(embedded_tokenizer_folder):
    tokenizer = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=4)
    tokens, mask = tokenizer.tokenize_messages(turn())
    assert len(tokens) == len(mask) == 4
    assert tokens[-1] == tokenizer.eos_id


def test_media_messages_are_refused_by_torchtune(tokenizer):
    with pytest.raises(RuntimeError, match="Unsupported message content type"):
        tokenizer.tokenize_messages([Message(role="user", content=[{"type": "image", "content": None}])])


def test_a_sample_is_transformed_in_place(tokenizer):
    sample = tokenizer({"messages": turn(), "id": 3})
    assert set(sample) == {"id", "tokens", "mask"}
    assert sample["tokens"][-1] == tokenizer.eos_id


def test_inference_leaves_the_end_open(tokenizer):
    assert tokenizer.eos_id not in tokenizer({"messages": turn()}, inference=True)["tokens"]


def test_stock_torchtune_datasets_take_it(embedded_tokenizer_folder, tmp_path):
    tokenizer = hf_tokenizer(str(embedded_tokenizer_folder), max_seq_len=16)
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "the river sings"}\n' * 4)
    source = {"source": "json", "data_files": str(file), "split": "train", "cache_dir": str(tmp_path / "hf")}
    text = TextCompletionDataset(tokenizer, **source)
    assert text[0]["tokens"] == tokenizer.encode("the river sings")
    assert len(PackedDataset(text, max_seq_len=16, padding_idx=tokenizer.pad_id)[0]["tokens"]) == 16
    chat = SFTDataset(message_transform=lambda sample: {"messages": turn()}, model_transform=tokenizer, **source)
    assert chat[0]["labels"][0] == -100


def test_the_fingerprint_survives_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "saved")
    assert hf_tokenizer(str(tmp_path / "saved")).fingerprint == tokenizer.fingerprint


def test_the_fingerprint_tells_vocabularies_apart(tokenizer, embedded_tokenizer_folder, tmp_path):
    shutil.copytree(embedded_tokenizer_folder, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    data = json.loads(file.read_text())
    vocabulary = data["model"]["vocab"]
    # Two bytes that no UTF-8 text has: no sample text could tell.
    vocabulary["À"], vocabulary["Á"] = vocabulary["Á"], vocabulary["À"]
    file.write_text(json.dumps(data))
    other = hf_tokenizer(str(tmp_path / "other"))
    assert other.encode(TEXT) == tokenizer.encode(TEXT)
    assert other.fingerprint != tokenizer.fingerprint


def test_the_fingerprint_tells_ways_of_encoding_apart(tokenizer, embedded_tokenizer_folder, tmp_path):
    shutil.copytree(embedded_tokenizer_folder, tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    data = json.loads(file.read_text())
    data["pre_tokenizer"]["add_prefix_space"] = True
    file.write_text(json.dumps(data))
    assert hf_tokenizer(str(tmp_path / "other")).fingerprint != tokenizer.fingerprint


def test_torchtune_tokenizers_have_a_name_and_fingerprint_too(sentencepiece_folder, sp_tokenizer):
    stock = Llama2Tokenizer(str(sentencepiece_folder / "tokenizer.model"))
    assert tokenizer_name(stock) == "Llama2Tokenizer"
    assert len(tokenizer_fingerprint(stock)) == 16
    assert tokenizer_fingerprint(sp_tokenizer) == sp_tokenizer.fingerprint
    assert tokenizer_name(sp_tokenizer) == sp_tokenizer.name
