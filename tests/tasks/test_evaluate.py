"""``evaluate`` as a library function."""

import inspect

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
