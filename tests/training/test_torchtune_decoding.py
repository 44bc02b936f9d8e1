"""Logits and greedy text of the models that recipes train, as the monitor takes them."""

import itertools

import pytest
import torch
from helpers.fakes.tiny_llama import VOCAB_SIZE
from helpers.fakes.tiny_models import FAMILY_MODELS, MODELS
from torchtune import modules
from torchtune.training import set_activation_checkpointing

from tfidf_tune.loss import CrossEntropyLoss
from tfidf_tune.probe import evaluating
from tfidf_tune.training import prepare_head
from tfidf_tune.training._monitor import PreparedModel

NUM_PROMPT = 7
NUM_NEW = 20


def random_model(name, dim=64, **settings):
    """Weights wide enough that greedy text does not fall into a loop at once."""
    torch.manual_seed(0)
    model = MODELS[name].build(dim, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2 and type(parameter.data) is torch.Tensor:
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    return model


def greedy_by_definition(model, prompts):
    """A forward pass over all ids for each new one."""
    ids = torch.tensor(prompts)
    for _ in range(NUM_NEW):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids[:, len(prompts[0]) :].tolist()


CASES = {
    **{name: (name, {}) for name in FAMILY_MODELS},
    "adapters": ("llama", {"lora": True, "lora_dropout": 0.5}),
    "nf4": ("llama", {"lora": True, "dim": 256, "quantize_base": True}),
}


@pytest.mark.parametrize(("case", "head"), list(zip(CASES, itertools.cycle(["fused", "chunked"]))))
def test_greedy_text_is_that_of_the_definition(case, head):
    name, settings = CASES[case]
    model = random_model(name, **settings)
    prompts = torch.randint(
        VOCAB_SIZE, (3, NUM_PROMPT), generator=torch.Generator().manual_seed(1)
    ).tolist()
    with torch.no_grad(), evaluating(model):
        expected = greedy_by_definition(model, prompts)
        shorter = greedy_by_definition(model, [prompts[1][:-2]])
        logits = model(torch.tensor(prompts))
    prepare_head(model, CrossEntropyLoss(head=head))
    set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    decoder = PreparedModel(model, torch.device("cpu"), torch.float32)

    with torch.no_grad(), evaluating(model):
        found = decoder.continuations(prompts, [NUM_NEW] * len(prompts))
        ragged = decoder.continuations([prompts[0], prompts[1][:-2]], [NUM_NEW, 3])
        last = decoder.logits(torch.tensor(prompts), 3)

    assert found == expected
    assert ragged == [expected[0], shorter[0][:3]]
    # No loops, which any decoding would get right.
    assert len(set(itertools.chain.from_iterable(expected))) > 9
    torch.testing.assert_close(last, logits[:, -3:])
    assert not model.caches_are_setup()
