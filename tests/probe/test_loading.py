import json
import re
import shutil
import warnings

import pytest
import torch
from helpers.fakes.probe import random_ids, tiny_llama
from helpers.fakes.tiny_run import Payload
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from tfidf_tune.audit import AuditSpec
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.probe import load_model
from tfidf_tune.probe.loading import on_base_model
from tfidf_tune.training import HFCheckpointer

# PEFT 0.18, which the fixtures call themselves, reads an attribute that transformers 5 has renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


@pytest.fixture(scope="module")
def complete(tmp_path_factory, llama):
    folder = tmp_path_factory.mktemp("complete")
    llama.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapted(complete):
    """The model with a LoRA adapter whose B is not 0, so that it changes the output."""
    torch.manual_seed(1)
    model = tiny_llama()
    model.name_or_path = str(complete)
    config = LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config).eval()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, adapted):
    folder = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(tmp_path):
    return lambda folder: shutil.copytree(folder, tmp_path / "copy")


@torch.no_grad()
def logits(model):
    return model(input_ids=torch.tensor([random_ids(20, 0)])).logits


def without_one_weight(folder, file_name):
    state = load_file(folder / file_name)
    del state[sorted(state)[1]]
    save_file(state, folder / file_name, metadata={"format": "pt"})
    return folder


def test_the_dtype_is_that_of_the_checkpoint_unless_given(tmp_path, llama):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(tmp_path).dtype == torch.bfloat16
    assert load_model(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_an_adapter_folder_gives_the_adapted_model_on_the_base_it_names(adapter, adapted, llama):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = load_model(adapter)
    assert not model.training
    torch.testing.assert_close(logits(model), logits(adapted))
    assert not torch.allclose(logits(model), logits(llama), atol=1e-2)


def test_an_adapter_in_half_precision_is_held_in_float32(adapter):
    model = load_model(adapter, dtype=torch.bfloat16)
    dtypes = {"lora" in name: weight.dtype for name, weight in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize(
    ("kind", "file_name"),
    [("complete", "model.safetensors"), ("adapter", "adapter_model.safetensors")],
)
def test_incomplete_and_damaged_weights_are_refused(request, copy, kind, file_name):
    folder = without_one_weight(copy(request.getfixturevalue(kind)), file_name)
    with pytest.raises(ValueError, match=r"lacks .*weights"):  # and not filled with noise
        load_model(folder)
    (folder / file_name).write_bytes((folder / file_name).read_bytes()[:-100])
    with pytest.raises(
        ValueError, match="weights of .* cannot be read .SafetensorError: .* damaged"
    ):
        load_model(folder)
    (folder / file_name).unlink()
    with pytest.raises(FileNotFoundError, match=r"has no weights \(.*\*"):
        load_model(folder)


@pytest.mark.parametrize(
    ("kind", "pickled"), [("complete", "pytorch_model.bin"), ("adapter", "adapter_model.bin")]
)
def test_no_code_in_weights_is_run(request, copy, kind, pickled):
    folder = copy(request.getfixturevalue(kind))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.save({"weight": Payload(folder / "executed")}, folder / pickled)
    with pytest.raises(
        ValueError,
        match=r"copy are damaged, or hold more than tensors, .*: take them as safetensors",
    ):
        load_model(folder)
    assert not (folder / "executed").exists()


def test_the_folder_of_a_run_is_refused_with_the_names_of_its_checkpoints(adapter, tmp_path):
    """By whatever takes a model: the audit, the probes, the harness and training."""
    run = tmp_path / "runs" / "mine"
    for name in ("checkpoint_50pct", "checkpoint_100pct"):
        shutil.copytree(adapter, run / name)
    (run / "resume").mkdir()
    takers = (
        lambda: AuditSpec(model=str(run), passages="probe.jsonl"),
        lambda: load_model(run),
        lambda: hf_tokenizer(str(run)),
        lambda: on_base_model({"pretrained": str(run)}),
        lambda: HFCheckpointer(checkpoint_dir=str(run)),
    )
    named = (
        f"{run} is no model, but has models inside: name one: {run}/checkpoint_50pct, {run}/check"
    )
    for take in takers:
        with pytest.raises(ValueError, match=re.escape(named)):
            take()


def test_a_folder_without_a_checkpoint_is_refused(adapter, copy, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"checkpoint_10pct has neither config\.json"):
        load_model(tmp_path / "checkpoint_10pct")
    with pytest.raises(
        FileNotFoundError, match=r"has neither config\.json nor adapter_config\.json"
    ):
        load_model(tmp_path)
    nameless = copy(adapter)
    config = json.loads((nameless / "adapter_config.json").read_text())
    (nameless / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": None})
    )
    with pytest.raises(ValueError, match="names no base model: pass base="):
        load_model(nameless)
