"""``evaluate`` as a library function."""

import inspect
from types import SimpleNamespace

import pytest
from task_fakes import MEMORIZATION, Output

from tfidf_tune.tasks import evaluate


def test_the_cpu_is_taken_where_no_device_is_named_and_there_is_no_gpu(llama, probe_file, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert inspect.signature(evaluate).parameters["device"].default is None
    evaluate(
        {"pretrained": str(llama)},
        [MEMORIZATION[0]],
        tmp_path,
        metadata={"probe_file": str(probe_file), "max_new_tokens": 2},
        limit=1,
    )
    assert len(Output(tmp_path).docs(MEMORIZATION[0])) == 1


def test_the_devices_of_the_machine_can_be_chosen_and_no_others(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: SimpleNamespace(type="cuda"))
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 2)
    with pytest.raises(
        ValueError, match=r"no device 'cuda:2' on this machine: choose one of cpu, cuda, cuda:0, cuda:1$"
    ):
        evaluate({"pretrained": str(llama)}, [MEMORIZATION[0]], tmp_path, device="cuda:2")
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1, got 0"):
        evaluate({"pretrained": str(llama)}, [MEMORIZATION[0]], tmp_path, device="cuda:1", batch_size=0)
