"""``evaluate`` as a library function."""

import shutil
import weakref
from types import SimpleNamespace

import pytest
import torch
from task_fakes import MEMORIZATION, Output, run_tasks

from tfidf_tune.tasks import evaluate


def test_the_default_device_without_a_gpu_is_the_cpu(llama, probe_file, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    metadata = {"probe_file": str(probe_file), "max_new_tokens": 2}
    evaluate({"pretrained": str(llama)}, [MEMORIZATION[0]], tmp_path, metadata=metadata, limit=1)
    assert len(Output(tmp_path).docs(MEMORIZATION[0])) == 1


def test_bad_arguments_are_refused_by_name(llama, probe_file, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="the results could not be written to"):
        run_tasks(llama, MEMORIZATION[0], tmp_path / "file", probe_file=probe_file, max_new_tokens=1)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: SimpleNamespace(type="cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    for arguments, message in (
        ({"tasks": ["tfidf_squad", "tfidf_swag"]}, "no task tfidf_swag; possible are tfidf_cnn_dailymail, tfidf_mem"),
        ({"device": "cuda:2"}, "no device 'cuda:2' on this machine: choose one of cpu, cuda, cuda:0, cuda:1$"),
        ({"batch_size": 0}, "batch_size must be .* got 0"),
    ):
        settings = {"tasks": [MEMORIZATION[0]], "output_path": tmp_path, "device": "cuda:1"} | arguments
        with pytest.raises(ValueError, match=message):
            evaluate({"pretrained": str(llama)}, **settings)


def test_evaluations_in_one_process_keep_no_model_and_do_not_affect_each_other(llama, models, wiki_file, tmp_path):
    """Experiments evaluate the milestones of a run this way."""
    task, modules, num_calls = "tfidf_wikitext2_ppl", weakref.WeakSet(), []

    def record(module, args):
        modules.add(module)
        num_calls.append(1)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(record)
    try:
        first, other, again = (
            run_tasks(model, task, tmp_path / name, wikitext2_source=wiki_file, block_size=64).metrics(task)
            for name, model in {"1": llama, "2": models["gptj"], "3": llama}.items()
        )
    finally:
        hook.remove()
    assert first == again != other
    assert num_calls
    assert len(modules) == 0


def test_a_tokenizer_that_changed_in_its_folder_is_read_again(llama, tokenizers, probe_file, tmp_path):
    folder = shutil.copytree(llama, tmp_path / "model")
    settings = {"probe_file": probe_file, "max_new_tokens": 2, "limit": 1}
    run_tasks(folder, MEMORIZATION[0], tmp_path / "a", **settings)
    for file in tokenizers["llama"].iterdir():
        shutil.copy(file, folder)
    with pytest.raises(ValueError, match="was tokenized with fingerprint"):
        run_tasks(folder, MEMORIZATION[0], tmp_path / "b", **settings)
