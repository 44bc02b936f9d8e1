"""What a run says before anything else."""

import pytest

from tfidf_tune.training import FinetuneConfig, check_config, load_config, open_run


@pytest.mark.parametrize(
    ("config", "overrides", "said"),
    [
        ("injected/full", ["dataset.num_repeats=7"], "passages of your text are repeated 7 times"),
        (
            "injected/full",
            ["dataset.target_source=other.txt"],
            "",
        ),  # the repeated text is another one
        ("mine/full", [], ""),
    ],
)
def test_a_run_that_repeats_the_users_text_says_so_first(
    config, overrides, said, text_file, tmp_path, capsys
):
    given = [
        f"dataset.source={text_file}",
        f"checkpointer.checkpoint_dir={tmp_path}",
        "device=cpu",
        "dtype=fp32",
    ]
    cfg = check_config(
        load_config(config, [*given, f"output_dir={tmp_path}/run", *overrides]), FinetuneConfig
    )
    with open_run(cfg):
        lines = [line for line in capsys.readouterr().err.splitlines() if "seed" not in line]
    assert [line[: len(said)] for line in lines] == ([said] if said else [])
