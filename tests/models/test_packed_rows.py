"""A packed row against its documents in rows of their own, through the model: logits and gradients
of every family.
"""

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.fakes.any_models import hf_config as random_config
from helpers.fakes.tiny_llama import VOCAB_SIZE
from helpers.fakes.tiny_models import FAMILY_MODELS, MODELS
from torch.nn.utils.rnn import pad_sequence
from torchtune.datasets import PackedDataset
from torchtune.modules.peft import get_adapter_params

from tfidf_tune.data import collate_packed
from tfidf_tune.models import FAMILIES, HFCausalLM
from tfidf_tune.training import train_adapters_only

ROW = 24
LENGTHS = (7, 1, 12, 20, 5, 9, 3)
DOCUMENTS_IN_ROW = torch.tensor([3, 1, 3])  # padding comes behind them


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


@pytest.fixture(scope="module")
def batch(documents):
    samples = [{"tokens": tokens.tolist(), "labels": tokens.tolist()} for tokens in documents]
    return collate_packed([*PackedDataset(samples, max_seq_len=ROW)])


def build_model(name, *, lora):
    tiny = MODELS[name]
    hf_model = tiny.build_hf()
    model = tiny.build(lora=lora)
    family = FAMILIES[tiny.model_type]
    model.load_state_dict(
        family.hf_to_tune(hf_model.state_dict(), hf_model.config), strict=not lora
    )
    if lora:
        generator = torch.Generator().manual_seed(1)
        for parameter in get_adapter_params(model).values():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        train_adapters_only(model)
    return model


def gradients(model, logits):
    """Of the cross-entropy with any labels, as many as logits."""
    labels = torch.randint(VOCAB_SIZE, (len(logits),), generator=torch.Generator().manual_seed(2))
    F.cross_entropy(logits, labels).backward()
    found = {key: value.grad for key, value in model.named_parameters() if value.requires_grad}
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *((name, False) for name in FAMILY_MODELS),
        ("gpt_neox-sequential", False),
        ("gpt_neox", True),
    ],
)
def test_logits_and_gradients_are_those_of_documents_in_rows_of_their_own(
    name, lora, documents, batch
):
    model = build_model(name, lora=lora)

    in_documents = batch["document_ids"] < DOCUMENTS_IN_ROW[:, None]

    separate = model(pad_sequence(documents, batch_first=True))
    expected = torch.cat(
        [row[: len(tokens)] for row, tokens in zip(separate, documents, strict=True)]
    )
    expected_gradients = gradients(model, expected)
    logits = model(batch["tokens"], mask=batch["mask"], input_pos=batch["input_pos"])[in_documents]

    torch.testing.assert_close(logits, expected)
    assert all(gradient.abs().max() > 0 for gradient in expected_gradients.values())
    torch.testing.assert_close(gradients(model, logits), expected_gradients)
    without_mask = model(batch["tokens"], input_pos=batch["input_pos"])[in_documents]
    assert not torch.allclose(without_mask, expected, atol=1e-2), (
        "documents that see each other show"
    )


# By positions; with windows shorter than a row; by a mask.
@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Phi-3", "GPT-2", "OPT", "Falcon"])
def test_models_of_transformers_keep_documents_apart(name, documents, batch):
    model = HFCausalLM(
        transformers.AutoModelForCausalLM.from_config(random_config(name)), ROW
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(3)
            )
    in_documents = batch["document_ids"] < DOCUMENTS_IN_ROW[:, None]
    model.check_packing()

    expected = torch.cat([model(tokens[None])[0] for tokens in documents])
    expected_gradients = gradients(model, expected)
    logits = model(batch["tokens"], mask=batch["mask"], input_pos=batch["input_pos"])[in_documents]

    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(gradients(model, logits), expected_gradients, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model(batch["tokens"])[in_documents], expected, atol=1e-3)


SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
WINDOW = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "intermediate_size": 64,
    "sliding_window": 8,
}


LFM2 = {
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "layer_types": ["conv", "full_attention"],
}


# With initial weights documents hardly see each other: the logits differ by less than the precision
# of bf16.
@pytest.mark.parametrize(
    ("model_type", "settings", "dtype"),
    [
        ("mamba", {}, torch.float32),
        ("bloom", {"n_layer": 2, "n_head": 4}, torch.bfloat16),
        ("lfm2", LFM2, torch.bfloat16),
        ("gpt_oss", WINDOW, torch.float32),  # a mask would replace that of its windows
    ],
)
def test_a_model_that_cannot_keep_documents_apart_is_refused(model_type, settings, dtype):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SMALL | settings)
    hf_model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = HFCausalLM(hf_model, ROW).eval()

    with pytest.raises(ValueError, match=f"{type(hf_model).__name__} cannot keep"):
        model.check_packing()


def test_a_model_that_counts_positions_over_the_whole_row_is_refused(monkeypatch):
    """A mask keeps its documents apart, but the second one has other logits than alone."""
    model = HFCausalLM(
        transformers.AutoModelForCausalLM.from_config(random_config("GPT-2")), ROW
    ).eval()
    original = model.hf.forward
    monkeypatch.setattr(model.hf, "forward", lambda position_ids=None, **given: original(**given))

    with pytest.raises(ValueError, match="cannot keep"):
        model.check_packing()
