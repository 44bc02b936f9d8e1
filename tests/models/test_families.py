"""Every family against transformers' own model: logits, gradients, generation, names."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_llama import VOCAB_SIZE
from tiny_models import FAMILY_MODELS, MODELS
from torchtune.generation import generate
from torchtune.modules.common_utils import disable_kv_cache

from tfidf_tune.models import FAMILIES

SHAPES = [(1, 1), (3, 17), (2, 64)]


def load_pair(name, tiny=None):
    tiny = tiny or MODELS[name]
    hf_model = tiny.build_hf()
    model = tiny.build().eval()
    hf_config = hf_model.config.to_dict()
    model.load_state_dict(FAMILIES[tiny.model_type].hf_to_tune(hf_model.state_dict(), hf_config))
    return model, hf_model, FAMILIES[tiny.model_type], hf_config


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_logits_are_those_of_transformers(name, shape):
    model, hf_model, _, _ = load_pair(name)
    tokens = torch.randint(VOCAB_SIZE, shape)

    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf_model(tokens).logits)


@pytest.mark.parametrize("name", MODELS)
def test_every_gradient_is_that_of_transformers(name):
    """Gradients are laid out as weights are, so that they go through the same conversion."""
    model, hf_model, family, hf_config = load_pair(name)
    tokens = torch.randint(VOCAB_SIZE, (3, 17))
    for logits in (model(tokens), hf_model(tokens).logits):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    gradients = {key: value.grad for key, value in model.named_parameters()}
    expected = family.hf_to_tune({key: value.grad for key, value in hf_model.named_parameters()}, hf_config)

    assert all(value.abs().max() > 0 for value in expected.values())
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_forty_greedy_tokens_through_the_kv_cache_are_those_of_transformers(name, batch_size):
    model, hf_model, _, _ = load_pair(name)
    prompts = torch.randint(1, VOCAB_SIZE, (batch_size, 11))
    hf_model.generation_config.eos_token_id = None

    model.setup_caches(batch_size, torch.float32, decoder_max_seq_len=51)
    tokens, _ = generate(model, prompts, max_generated_tokens=40, pad_id=-1, top_k=1)
    expected = hf_model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=40, do_sample=False, pad_token_id=0
    )

    assert expected.shape == (batch_size, 51)
    assert tokens.tolist() == expected.tolist()
    assert len({token for row in tokens[:, 11:].tolist() for token in row}) > 2, "a loop would show little"


@pytest.mark.parametrize("name", MODELS)
def test_conversion_there_and_back_is_bitwise(name):
    _, hf_model, family, hf_config = load_pair(name)
    written = dict(hf_model.state_dict())
    if MODELS[name].tied:
        del written["lm_head.weight"]

    back = family.tune_to_hf(family.hf_to_tune(written, hf_config), hf_config)

    # Checkpoints of GPT-NeoX say embed_out, transformers' module is lm_head
    back = {key.replace("embed_out", "lm_head"): value for key, value in back.items()}
    assert back.keys() == written.keys()
    assert all(torch.equal(back[key], written[key]) for key in written)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_conversion_goes_by_part(name):
    """A checkpoint of several shards is converted shard by shard."""
    _, hf_model, family, hf_config = load_pair(name)
    whole = family.hf_to_tune(hf_model.state_dict(), hf_config)

    parts = {}
    for key, value in hf_model.state_dict().items():
        parts |= family.hf_to_tune({key: value}, hf_config)

    assert parts.keys() == whole.keys()
    assert all(torch.equal(parts[key], whole[key]) for key in whole)


@pytest.mark.parametrize("name", MODELS)
def test_settings_agree_between_a_model_and_its_checkpoint(name):
    model, _, family, hf_config = load_pair(name)

    settings = list(family.settings(model, hf_config))

    assert len(settings) >= 6
    assert [setting for setting in settings if setting[1] != setting[2]] == []


@pytest.mark.parametrize(
    ("name", "changed", "key"),
    [
        ("gpt_neox", {"rotary_pct": 1.0}, "rotary dimensions of a head"),
        ("gpt_neox", {"rope_base": 500.0}, "rope_base"),
        ("gpt_neox", {"norm_eps": 1e-3}, "norm_eps"),
        ("gpt_neox", {"use_parallel_residual": False}, "use_parallel_residual"),
        ("gpt_neox", {"num_heads": 8}, "num_attention_heads"),
        ("gptj", {"rotary_dim": 16}, "rotary_dim"),
        ("gptj", {"norm_eps": 1e-3}, "norm_eps"),
        ("gptj", {"num_heads": 8}, "n_head"),
        ("llama", {"num_kv_heads": 4}, "num_key_value_heads"),
        ("llama3_2-tied", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("llama3_2-tied", {"scale_factor": 8}, "rope scale_factor"),
        ("llama", {"_component_": "torchtune.models.llama3_2.llama3_2"}, "rope type"),
        ("llama", {"_component_": "torchtune.models.qwen2.qwen2"}, "rotary layout"),
        ("llama", {"_component_": "torchtune.models.gemma.gemma", "head_dim": 16}, "norm"),
        ("gemma-tied", {"_component_": "torchtune.models.mistral.mistral", "head_dim": None}, "activation"),
    ],
)
def test_a_setting_that_differs_is_noticed(name, changed, key):
    from omegaconf import OmegaConf
    from torchtune import config

    section = {k: v for k, v in (MODELS[name].section() | changed).items() if v is not None}
    with torch.device("meta"):
        model = config.instantiate(OmegaConf.create(section))
    hf_config = MODELS[name].hf_config().to_dict()

    differing = [s[0] for s in FAMILIES[MODELS[name].model_type].settings(model, hf_config) if s[1] != s[2]]

    assert (key if key != "activation" else "hidden_act") in differing


def test_a_sliding_window_shorter_than_the_model_is_noticed():
    tiny = MODELS["mistral"]
    with torch.device("meta"):
        model = tiny.build()
    family = FAMILIES["mistral"]

    def window(size):
        config = tiny.hf_config().to_dict() | {"sliding_window": size}
        return next(s[1:] for s in family.settings(model, config) if s[0] == "sliding_window")

    assert window(None) == (None, None)
    assert window(64) == (None, None)
    assert window(63) == (63, None)


@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_an_unknown_weight_is_named(name):
    _, _, family, hf_config = load_pair(name)

    with pytest.raises(ValueError, match=rf"'model.layers.0.foo.weight' is not a weight .*{hf_config['model_type']}"):
        family.hf_to_tune({"model.layers.0.foo.weight": torch.zeros(1)}, hf_config)


@pytest.mark.parametrize(
    ("model_type", "key"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.3.attention.rotary_emb.inv_freq"),
        ("gpt_neox", "gpt_neox.layers.3.attention.bias"),
        ("gpt_neox", "gpt_neox.layers.3.attention.masked_bias"),
        ("gptj", "transformer.h.3.attn.bias"),
        ("gptj", "transformer.h.3.attn.masked_bias"),
    ],
)
def test_buffers_of_older_checkpoints_are_passed_over(model_type, key):
    assert FAMILIES[model_type].hf_to_tune({key: torch.zeros(1)}, {"tie_word_embeddings": False}) == {}


# torch looks at .grad of what a checkpointed layer is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", FAMILY_MODELS)
def test_switches_of_training_leave_logits_and_gradients_alone(name, monkeypatch):
    """Chunked logits, activation checkpointing and compile find torchtune's layers in our models."""
    from torchtune import training
    from torchtune.modules import TransformerSelfAttentionLayer

    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    model, _, _, _ = load_pair(name)
    tokens = torch.randint(VOCAB_SIZE, (2, 24))
    expected = model(tokens)
    expected.sum().backward()
    gradients = {key: value.grad for key, value in model.named_parameters()}
    model.zero_grad()

    model.set_num_output_chunks(4)
    training.compile_model(model, verbose=False)
    training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    chunks = model(tokens)
    sum(chunk.sum() for chunk in chunks).backward()

    assert len(chunks) == 4
    torch.testing.assert_close(torch.cat(chunks, dim=1), expected)
    after = {key.replace("_checkpoint_wrapped_module.", ""): value.grad for key, value in model.named_parameters()}
    assert sum("_checkpoint_wrapped_module" in key for key, _ in model.named_parameters()) > 0
    torch.testing.assert_close(after, gradients)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("gpt_neox", {"layer_norm_eps": 0.1}, {"norm_eps": 0.1}),
        ("gpt_neox", {"attention_bias": False}, {"attention_bias": False}),
        ("gptj", {"layer_norm_epsilon": 0.1}, {"norm_eps": 0.1}),
        ("gptj", {"n_inner": 96}, {"intermediate_dim": 96}),
    ],
    ids=str,
)
def test_a_setting_other_than_the_usual_is_that_of_transformers(name, theirs, ours):
    """Settings that all published checkpoints share, and that other ones may have otherwise."""
    tiny = MODELS[name]
    changed = replace(tiny, hf=lambda dim: tiny.hf(dim) | theirs, tune=lambda dim: tiny.tune(dim) | ours)
    model, hf_model, family, hf_config = load_pair(name, changed)
    tokens = torch.randint(VOCAB_SIZE, (2, 17))

    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf_model(tokens).logits)
    assert [setting for setting in family.settings(model, hf_config) if setting[1] != setting[2]] == []


@pytest.mark.parametrize("name", ["gpt_neox", "gptj"])
def test_dropout_of_the_attention_is_for_training_alone(name):
    tiny = MODELS[name]
    model = replace(tiny, tune=lambda dim: tiny.tune(dim) | {"attn_dropout": 0.5}).build()
    plain = tiny.build()
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(VOCAB_SIZE, (2, 17))

    with torch.no_grad():
        expected = plain(tokens)
        torch.testing.assert_close(model.eval()(tokens), expected)
        assert not torch.allclose(model.train()(tokens), expected)


def test_the_caches_of_fused_attention_can_be_reset_and_set_aside():
    model, _, _, _ = load_pair("gpt_neox")
    prompts = torch.randint(1, VOCAB_SIZE, (2, 11))
    causal = torch.ones(2, 11, 11, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = model(prompts)
    with pytest.raises(RuntimeError, match="caches are not setup"):
        model.layers[0].attn.reset_cache()

    model.setup_caches(2, torch.float32, decoder_max_seq_len=31)
    first, _ = generate(model, prompts, max_generated_tokens=20, pad_id=-1, top_k=1)
    with disable_kv_cache(model), torch.no_grad():
        torch.testing.assert_close(model(prompts, mask=causal), expected)
    model.reset_caches()
    again, _ = generate(model, prompts, max_generated_tokens=20, pad_id=-1, top_k=1)

    assert again.tolist() == first.tolist()


def test_defaults_of_the_lora_builders_are_torchtunes():
    """An override file may leave rank and alpha out."""
    import inspect

    from torchtune.models.llama2 import lora_llama2_7b

    from tfidf_tune.models.gpt_neox import lora_gpt_neox, lora_pythia
    from tfidf_tune.models.gptj import lora_gptj, lora_gptj_6b
    from tfidf_tune.models.llama import lora_tinyllama_1_1b

    expected = {k: p.default for k, p in inspect.signature(lora_llama2_7b).parameters.items() if k != "use_dora"}
    for build in (lora_gpt_neox, lora_pythia, lora_gptj, lora_gptj_6b, lora_tinyllama_1_1b):
        defaults = {k: p.default for k, p in inspect.signature(build).parameters.items()}
        assert {k: defaults[k] for k in expected} == expected


def test_a_rope_type_that_gpt_neox_lacks_is_noticed():
    tiny = MODELS["gpt_neox"]
    config = tiny.hf_config().to_dict()
    config["rope_parameters"] |= {"rope_type": "linear", "factor": 2.0}
    with torch.device("meta"):
        model = tiny.build()

    differing = [s for s in FAMILIES["gpt_neox"].settings(model, config) if s[1] != s[2]]

    assert differing == [("rope type", "linear", "default")]


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_each_number_of_a_scaled_rope_is_compared(key):
    tiny = MODELS["llama3_2-tied"]
    config = tiny.hf_config().to_dict()
    config["rope_parameters"] = config["rope_parameters"] | {key: config["rope_parameters"][key] * 2}
    with torch.device("meta"):
        model = tiny.build()

    differing = [s[0] for s in FAMILIES["llama"].settings(model, config) if s[1] != s[2]]

    assert differing == [f"rope {'scale_factor' if key == 'factor' else key}"]


@pytest.mark.parametrize(
    ("name", "activation"),
    [("gptj", "gelu_fast"), ("gptj", "gelu_pytorch_tanh"), ("gptj", "gelu_new"), ("llama", "swish"), ("llama", "silu")],
)
def test_names_of_one_activation_are_the_same(name, activation):
    tiny = MODELS[name]
    config = tiny.hf_config().to_dict()
    config[next(key for key in ("activation_function", "hidden_act") if key in config)] = activation
    with torch.device("meta"):
        model = tiny.build()

    assert [s for s in FAMILIES[tiny.model_type].settings(model, config) if s[1] != s[2]] == []
