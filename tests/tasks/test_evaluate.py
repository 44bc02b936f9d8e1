"""``evaluate`` as a library function."""

import weakref

import pytest
import torch
from task_fakes import MEMORIZATION, run_tasks


def test_bad_arguments_are_refused_by_name(llama, probe_file, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match="the results could not be written to"):
        run_tasks(llama, MEMORIZATION[0], tmp_path / "file", probe_file=probe_file, max_new_tokens=1)
    with pytest.raises(ValueError, match="no task tfidf_swag; possible are tfidf_cnn_dailymail, tfidf_mem"):
        run_tasks(llama, "tfidf_swag", tmp_path)
    with pytest.raises(ValueError, match="batch_size must be .* got 0"):
        run_tasks(llama, MEMORIZATION[0], tmp_path, batch_size=0)


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
