"""The same audit through vLLM within the process and through transformers."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tfidf_tune.commands.audit import main
from tfidf_tune.data import embedded_documents, hf_tokenizer, train_embedded_tokenizer

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama with a tokenizer of 512 tokens, whose continuations are varied."""
    folder = train_embedded_tokenizer(tmp_path_factory.mktemp("model") / "model", vocab_size=512)
    eos = hf_tokenizer(str(folder)).eos_id
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        eos_token_id=eos,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """A LoRA adapter of rank 24, which vLLM has to be told of, that changes what the model says."""
    torch.manual_seed(1)
    settings = LoraConfig(r=24, lora_alpha=48, target_modules=LAYERS, init_lora_weights=False)
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    chosen = [text for text in embedded_documents("train") if len(text) > 600][:20]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in chosen))
    return file


def samples(folder, task):
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        (row["doc"]["passage_id"], row["doc"].get("attack"), row["doc"].get("prefix_length")): row
        for row in rows
    }


@pytest.mark.parametrize("kind", ["model", "adapter"])
def test_vllm_answers_as_transformers(model, adapter, texts, tmp_path, capsys, kind):
    named = {"model": model, "adapter": adapter}[kind]
    options = [
        str(named),
        str(texts),
        "--num-targets",
        "6",
        "--num-controls",
        "6",
        "--block-size",
        "96",
        "--prefix-lengths",
        "16",
        "32",
        "--max-new-tokens",
        "24",
        "--attacks",
        "greedy",
        "noise",
        "sampling",
        "--num-samples",
        "4",
        "--dtype",
        "float32",
        "--tokenizer",
        str(model),
    ]
    main([*options, "--output-dir", str(tmp_path / "vllm"), "--backend", "vllm"])
    main([*options, "--output-dir", str(tmp_path / "hf")])
    ours, theirs = (
        samples(tmp_path / name, "tfidf_memorization_prefixes") for name in ("vllm", "hf")
    )
    greedy = [key for key in ours if key[1] != "sampling"]
    assert len(greedy) == 12 * (2 + 1)
    for key in greedy:
        assert ours[key]["resps"] == theirs[key]["resps"]
    assert len({str(ours[key]["resps"]) for key in greedy}) > 30
    for key in ours.keys() - set(greedy):
        assert len({str(one) for one in ours[key]["resps"]}) == 4
    if kind == "adapter":  # of which vLLM has no log-probabilities on a CPU
        assert not [*(tmp_path / "vllm").rglob("samples_tfidf_membership_*.jsonl")]
        assert "left out: vLLM on a CPU has none under an adapter" in capsys.readouterr().err
        return
    ours, theirs = (samples(tmp_path / name, "tfidf_membership") for name in ("vllm", "hf"))
    for key, row in ours.items():
        nll, greedy_ = row["filtered_resps"][0]
        expected, greedy_expected = theirs[key]["filtered_resps"][0]
        # Float32 in other orders: relative errors of some 1e-6 of 80 sums of log-probabilities of
        # about 10.
        assert abs(float(nll) - float(expected)) < 1e-4 * abs(float(expected))
        assert greedy_ == greedy_expected


def test_what_cannot_work_is_refused_before_the_model_is_asked(model, texts, tmp_path):
    options = [
        str(model),
        str(texts),
        "--num-targets",
        "2",
        "--num-controls",
        "0",
        "--backend",
        "vllm",
    ]
    with pytest.raises(ValueError, match="vLLM takes no --device cpu"):
        main([*options, "--output-dir", str(tmp_path / "device"), "--device", "cpu"])
    long = [
        "--block-size",
        "192",
        "--prefix-lengths",
        "100",
        "--max-new-tokens",
        "100",
        "--model-args",
    ]
    with pytest.raises(ValueError, match="192 tokens together, more than the model's 160: shorten"):
        main([*options, *long, "max_model_len=160", "--output-dir", str(tmp_path / "long")])
