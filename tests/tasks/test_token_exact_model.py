"""``--model tfidf-hf`` compared with the harness's own ``hf``."""

import dataclasses
import shutil

import pytest
import torch
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import embedded_ids, prompts_seen
from helpers.fakes.tiny_llama import VOCAB_SIZE, make_llama, teach
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import greedy_continuations, load_model
from tfidf_tune.tasks import MODEL_NAME, register_model, tasks_folder
from tfidf_tune.tasks._requests import token_ids_request
from tfidf_tune.tasks._transformers import TokenExactHFLM


def continuations(prompts, **arguments):
    arguments = {"until": [], "do_sample": False, "max_gen_toks": 12} | arguments
    return [
        Instance("generate_until", doc={}, arguments=(prompt, arguments), idx=0)
        for prompt in prompts
    ]


@pytest.fixture(scope="module")
def ours(llama):
    return TokenExactHFLM(str(llama), device="cpu", dtype="float32", batch_size=2)


@pytest.fixture(scope="module")
def stock(llama):
    return HFLM(str(llama), device="cpu", dtype="float32", batch_size=2)


@pytest.fixture(scope="module")
def id_prompts(probe_file):
    lengths = (5, 9, 5, 7, 9, 5, 5)
    ids = read_probe_file(probe_file)[0].token_ids
    return [ids[first : first + length] for first, length in enumerate(lengths)]


def test_a_batch_of_ids_is_continued_as_one_by_one(ours, id_prompts, llama):
    register_model()
    register_model()
    assert (get_model(MODEL_NAME), get_model("hf")) == (TokenExactHFLM, HFLM)
    automatic = TokenExactHFLM(str(llama), device="cpu", dtype="float32", batch_size="auto")
    model = load_model(llama)
    expected = [
        " ".join(map(str, greedy_continuations(model, [prompt], 12, eos_id=0)[0]))
        for prompt in id_prompts
    ]
    for lm in (ours, automatic):
        assert (
            lm.generate_until(continuations(map(token_ids_request, id_prompts)), True) == expected
        )
    assert len(set(expected)) == len(expected)
    requests = [
        continuations([token_ids_request(prompt)], max_gen_toks=length)[0]
        for length, prompt in enumerate(id_prompts, start=1)
    ]
    assert [len(response.split()) for response in ours.generate_until(requests, True)] == [
        *range(1, 8)
    ]


def test_the_longest_prompts_come_first_and_nothing_is_padded(ours, id_prompts):
    with embedded_ids() as calls:
        ours.generate_until(continuations(map(token_ids_request, id_prompts), max_gen_toks=2), True)
    first_calls = [call for call in calls if call.shape[1] > 1]
    assert [tuple(call.shape) for call in first_calls] == [(2, 9), (1, 7), (2, 5), (2, 5)]
    assert sorted(prompts_seen(calls)) == sorted(id_prompts)


def test_the_likelihood_of_ids_is_that_of_these_ids(ours, stock, id_prompts, llama):
    ids = id_prompts[1]
    pair = (token_ids_request(ids[:3]), " " + " ".join(map(str, ids[3:])))
    with embedded_ids() as calls:
        [(log_likelihood, is_greedy)] = ours.loglikelihood(
            [Instance("loglikelihood", doc={}, arguments=pair, idx=0)], True
        )
    assert prompts_seen(calls) == [ids[:-1]]
    with torch.no_grad():
        log_probs = load_model(llama)(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert log_likelihood == pytest.approx(
        sum(log_probs[i - 1, ids[i]].item() for i in range(3, 9)), rel=1e-5
    )
    assert not is_greedy


def test_unsupported_requests_are_refused(ours, id_prompts, llama, padded):
    prompt = token_ids_request(id_prompts[0])
    unknown = ours.model.get_input_embeddings().weight.shape[0]
    for arguments in (
        {"do_sample": True, "temperature": 0.7},
        {"do_sample": True},
        {"temperature": 0.7},
    ):
        request = Instance("generate_until", doc={}, arguments=(prompt, arguments), idx=0)
        with pytest.raises(ValueError, match=r"not sampled by --gen_kwargs .*leave it out"):
            ours.generate_until([request], True)

    ours.generate_until(continuations([token_ids_request([5] * 250)], max_gen_toks=6), True)
    for too_much, num_tokens, message in (
        ([5] * 250, 7, r"a prompt and its continuation are 257 tokens together, more than .* 256"),
        ([1, unknown], 6, f"Token id {unknown} is outside the model's vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.generate_until(
                continuations([token_ids_request(too_much)], max_gen_toks=num_tokens), True
            )
    for scored, message in (
        (" 5" * 256, "257 tokens together"),
        (f" {unknown}", f"Token id {unknown} is outside"),
    ):
        pair = Instance("loglikelihood", doc={}, arguments=(token_ids_request([5]), scored), idx=0)
        with pytest.raises(ValueError, match=message):
            ours.loglikelihood([pair], True)
    with pytest.raises(ValueError, match="peft and delta cannot be used together"):
        TokenExactHFLM(str(llama), peft=str(padded / "no_op"), delta=str(llama), device="cpu")


# PEFT warns about an adapter that holds the head or the embedding.
peft_talks = pytest.mark.filterwarnings(
    "ignore:Setting `save_embedding", "ignore:Model has `tie_word_embeddings=True`"
)


@pytest.fixture(scope="module")
def padded(tokenizers, tmp_path_factory):
    """A model with 64 rows more than the tokenizer has tokens, and an adapter on it that changes
    nothing.
    """
    folder = tmp_path_factory.mktemp("padded")
    base = task_fakes.checkpoint(
        folder / "base", tokenizers["plain"], task_fakes.random_model(vocab_size=384)
    )
    for name, targets in {"no_op": ["q_proj"], "head": ["lm_head"]}.items():
        settings = LoraConfig(r=2, target_modules=targets)
        get_peft_model(load_model(base), settings).save_pretrained(
            folder / name, save_embedding_layers=name == "head"
        )
    return folder


ADAPTED_EMBEDDINGS = {
    "a new embedding": {"modules_to_save": ["embed_tokens"]},
    "a new head": {"modules_to_save": ["lm_head"]},
    "a new embedding, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "LoRA on the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA on the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "trainable tokens": {"trainable_token_indices": {"embed_tokens": [3, 5]}},
}


@peft_talks
@pytest.mark.filterwarnings(
    "ignore:Model with `tie_word_embeddings=True`", "ignore:.*ensure_weight_tying"
)
@pytest.mark.parametrize(("tied", "num_new"), [(True, 0), (True, 10), (False, 0)])
@pytest.mark.parametrize("settings", ADAPTED_EMBEDDINGS.values(), ids=ADAPTED_EMBEDDINGS)
def test_an_adapter_of_the_embedding_is_measured_as_peft_loads_it(
    tokenizers, tmp_path, settings, tied, num_new
):
    """Also on a tied base, whose head an adapter can part from the embedding, and with rows for new
    tokens.
    """
    torch.manual_seed(1)
    make_llama(tmp_path / "base", tie_word_embeddings=tied)
    shutil.copytree(tokenizers["plain"], tmp_path / "base", dirs_exist_ok=True)

    def base():
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        if num_new:
            # More rows than the tokenizer has tokens, as a number that is a multiple of 64 has.
            model.resize_token_embeddings(
                VOCAB_SIZE + num_new, pad_to_multiple_of=64, mean_resizing=False
            )
        return model

    config = LoraConfig(r=2, init_lora_weights=False, **({"target_modules": ["q_proj"]} | settings))
    trained = get_peft_model(base(), config)
    with torch.no_grad():
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    adapter = tmp_path / "adapter"
    trained.save_pretrained(adapter)
    tokenizer = AutoTokenizer.from_pretrained(tokenizers["plain"])
    tokenizer.add_tokens([f"<|new {number}|>" for number in range(num_new)])
    tokenizer.save_pretrained(adapter)

    ids = torch.tensor([[3, 4, 5, 6, 7, 3, VOCAB_SIZE - 1]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base(), adapter)(input_ids=ids).logits
        torch.testing.assert_close(trained.eval()(input_ids=ids).logits, expected)
        harness_model = TokenExactHFLM(
            str(tmp_path / "base"), peft=str(adapter), tokenizer=str(adapter), device="cpu"
        )
        for model in (harness_model.model, load_model(adapter, base=tmp_path / "base")):
            assert not model.training
            torch.testing.assert_close(model(input_ids=ids).logits, expected)


def test_neither_chat_template_nor_system_instruction_changes_a_prompt(llama, probe_file, tmp_path):
    register_model()
    chatty = tmp_path / "model"
    shutil.copytree(llama, chatty)
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(chatty)
    metadata = {
        "prompts": "token_ids",
        "pretrained": str(chatty),
        "probe_file": str(probe_file),
        "max_new_tokens": 3,
    }
    with embedded_ids() as calls:
        simple_evaluate(
            MODEL_NAME,
            {"pretrained": str(chatty), "dtype": "float32"},
            ["tfidf_memorization_p32"],
            device="cpu",
            task_manager=TaskManager(
                include_path=str(tasks_folder()), include_defaults=False, metadata=metadata
            ),
            metadata=metadata,
            system_instruction="You are kind.",
            apply_chat_template=True,
        )
    expected = [passage.token_ids[:32] for passage in read_probe_file(probe_file)]
    assert sorted(prompts_seen(calls)) == sorted(expected)


def test_weights_of_four_bits(llama):
    four, full = (
        TokenExactHFLM(str(llama), device="cpu", dtype="float32", **more)
        for more in ({"load_in_4bit": True}, {})
    )
    kinds = {type(module).__name__ for module in four.model.modules()}
    assert "Linear4bit" in kinds
    assert four.model.get_memory_footprint() < full.model.get_memory_footprint()


@pytest.mark.parametrize("task", ["tfidf_memorization_p32", "tfidf_membership"])
def test_a_model_that_diverged_is_refused_by_the_name_of_the_passage(
    task, llama, tokenizers, probe_file, tmp_path
):
    model = load_model(llama)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")
    folder = task_fakes.checkpoint(tmp_path / "diverged", tokenizers["plain"], model)
    with pytest.raises(
        ValueError, match=r"passage (target|control)-\d+ are NaN or infinite in float32"
    ):
        task_fakes.run_tasks(folder, task, tmp_path / "out", probe_file=probe_file)


def test_an_eos_in_the_passage_does_not_end_its_continuation(reciting, tokenizers, tmp_path):
    """As in a text that is already in a chat template: the model recites the end of a turn, and
    what follows it.
    """
    eos = hf_tokenizer(str(tokenizers["plain"])).eos_id
    _, whole, *_ = task_fakes.passages_of(tokenizers["plain"])
    with_eos = dataclasses.replace(
        whole, token_ids=[*whole.token_ids[:40], eos, *whole.token_ids[41:]]
    )
    file = task_fakes.probe_file(tmp_path / "probe.jsonl", [with_eos])
    model = teach(load_model(reciting), file)
    folder = task_fakes.checkpoint(tmp_path / "model", tokenizers["plain"], model)

    done = task_fakes.run_tasks(folder, "tfidf_memorization_p32", tmp_path / "out", probe_file=file)

    [doc] = done.docs("tfidf_memorization_p32")
    assert eos in doc["sample"]["generated_ids"]
    assert (doc["sample"]["lms"], doc["sample"]["verbatim"]) == (128, True)
