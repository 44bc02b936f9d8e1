"""``evaluate`` as a library function."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from task_fakes import MEMORIZATION, run_tasks

from tfidf_tune.tasks import evaluate


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
