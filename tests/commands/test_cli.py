"""The command ``tfidf-tune``, in this process where torchtune's commands only print."""

import re
import subprocess
from importlib.metadata import version
from itertools import product
from pathlib import Path

import pytest
from helpers.processes.commands import run_in_forks
from helpers.processes.recipes import run_command as run_forked

from tfidf_tune import cli
from tfidf_tune._files import config_path
from tfidf_tune._processes import OWN_COMMAND


@pytest.fixture
def failure(run_command, capsys):
    """Run a command that ends with an error; return its message."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            run_command(*arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err.strip()

    return run


def test_ls_shows_recipes_with_their_configs_those_for_any_model_first(run_command, capsys):
    run_command("ls")

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["lora_finetune", "mine/lora"]
    assert ["full_finetune", "mine/full"] in lines
    names = [line[-1] for line in lines if line]
    assert names.index("injected/lora") < names.index("demo/llama_650K_lora_memorization")
    first_of_full = names.index("mine/full")
    assert names.index("pythia/1.4B_qlora_memorization") < first_of_full
    assert names.index("tinyllama/1.1B_full_memorization") > first_of_full


def test_cat_and_cp_find_recipes_and_configs_by_name(run_command, failure, tmp_path, capsys):
    source = config_path("tinyllama/1.1B_lora_memorization")
    run_command("cat", "tinyllama/1.1B_lora_memorization")
    assert capsys.readouterr().out == Path(source).read_text()
    copied = {
        "full_finetune": ("mine", "mine.py"),
        "tinyllama/1.1B_full_memorization": ("mine.yaml", "mine.yaml"),
        "mine/lora": ("", "lora.yaml"),
    }
    for name, (destination, file) in copied.items():
        run_command("cp", name, str(tmp_path / destination))
        assert "checkpoint" in (tmp_path / file).read_text()
    (tmp_path / "mine.yaml").write_text("edited: true")
    run_command("cp", "mine/lora", str(tmp_path / "mine.yaml"), "--no-clobber")
    assert (tmp_path / "mine.yaml").read_text() == "edited: true"
    run_command("cp", "mine/lora", str(tmp_path / "new" / "mine.yaml"), "--make-parents")
    assert (tmp_path / "new" / "mine.yaml").is_file()
    for command in (["cat", "mine/lorra"], ["cp", "mine/lorra", str(tmp_path)]):
        assert "no recipe and no config 'mine/lorra'; did you mean 'mine/lora'?" in failure(
            *command
        )


def test_validate_accepts_our_configs_and_sends_others_to_torchtune(
    run_command, failure, tmp_path, capsys
):
    (tmp_path / "any.yaml").write_text(
        "base: injected/lora\ncheckpointer: {checkpoint_dir: mine}\ndataset: {source: mine}"
    )
    for config in (
        "pythia/1.4B_qlora_qa",
        "tinyllama/1.1B_full_summarization",
        str(tmp_path / "any.yaml"),
    ):
        run_command("validate", config)
        assert "Config is well-formed!" in capsys.readouterr().out
    (tmp_path / "theirs.yaml").write_text(
        "checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer}"
    )
    assert "`tune validate` checks configs of torchtune" in failure(
        "validate", str(tmp_path / "theirs.yaml")
    )


def test_validate_takes_what_run_takes(run_command, failure, capsys):
    given = ["checkpointer.checkpoint_dir=mine", "dataset.source=embedded"]
    for arguments in (["mine/lora", *given], ["--config", "mine/lora", *given]):
        run_command("validate", *arguments)
        assert "Config is well-formed!" in capsys.readouterr().out
        assert "'batch_sise'; did you mean 'batch_size'?" in failure(
            "validate", *arguments, "batch_sise=3"
        )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["dataset.source=gone.jsonl"], r"dataset\.source: no such file or folder: 'gone\.jsonl'"),
        (["checkpointer.checkpoint_dir=./gone"], r"checkpoint_dir: no such folder \./gone: name"),
        (["checkpointer.checkpoint_dir={folder}"], r"checkpoint_dir: .*config\.json"),
        (["dataset.deduplicate=true"], "deduplicate is 'true': possible are none, exact, minhash"),
        (["optimizer.lr=abc"], "lr is 'abc', it has to be a number"),
    ],
)
def test_validate_looks_at_what_a_config_names(
    failure, tiny_checkpoint, text_file, tmp_path, overrides, message
):
    given = [f"checkpointer.checkpoint_dir={tiny_checkpoint}", f"dataset.source={text_file}"]
    changes = [override.format(folder=tmp_path) for override in overrides]
    assert re.search(message, failure("validate", "mine/lora", *given, *changes))


def test_validate_says_what_it_does_not_look_up(run_command, tiny_checkpoint, text_file, capsys):
    given = [f"checkpointer.checkpoint_dir={tiny_checkpoint}", f"dataset.source={text_file}"]
    run_command("validate", "mine/lora", *given)
    assert capsys.readouterr() == ("Config is well-formed!\n", "")
    run_command("validate", "mine/lora", given[0], "dataset.source=owner/texts")
    assert "not looked up: dataset.source is owner/texts" in capsys.readouterr().err


# The errors of single keys are in tests/faults/test_bad_configs.py.
def test_validate_refuses_what_the_recipe_would(failure, tmp_path):
    cases = {
        "base: pythia/1.4B_qlora_qa\noutput_dri: x": "no key 'output_dri'; did you mean "
        "'output_dir'",
        "base: pythia/1.4B_qlora_qa\nmodel: {lora_rnk: 3}": "argument 'lora_rnk'; its arguments "
        "are .*lora_rank",
        "base: demo/llama_3M_full_memorization\nmodel: ???": "missing model",
        "a: ${b": r"error: config .*mine\.yaml: ",
    }
    for text, message in cases.items():
        (tmp_path / "mine.yaml").write_text(text)
        assert re.search(message, failure("validate", str(tmp_path / "mine.yaml"))), text
    assert "no config of that name; available are demo/" in failure("validate", "nothing")
    assert "no config of that name; did you mean 'mine/lora'?" in failure("validate", "my/lora")


def test_help_and_version(run_command, capsys):
    run_command()
    lists = capsys.readouterr().out
    for command in ("demo", "probe", "tasks", "run", "validate", "ls"):
        assert re.search(rf"^  {command} ", lists, re.MULTILINE)
    run_command("--version")
    assert capsys.readouterr().out == f"tfidf-tune {version('tfidf-tune')}\n"


def test_usage_errors_are_one_message(failure):
    unknown = "no recipe 'full_finetun'; did you mean 'full_finetune'"
    cases = {
        "comapre": r"^error: no command 'comapre'; did you mean 'compare'\?\n\ncommands:\n  demo ",
        "run full_finetun --config x": unknown,
        "run --nproc_per_node 2 full_finetun --config x": unknown,
        "run lora_dpo_distribted --config x": "did you mean 'lora_dpo_distributed'",
        "run dev/generate_v3 --config x": "did you mean 'dev/generate_v2'",
        "run ../mine.py --config x": r"no recipe '\.\./mine\.py'",
        "run full_finetune --config": "tfidf-tune run: error: argument --config is required, with "
        "a file",
        "cp mine/lora nowhere/x": "error: no folder nowhere: make it, or let --make-parents make "
        "it",
        "cp nothing .": "error: no recipe and no config 'nothing'. `tfidf-tune ls` lists them",
        "validate a.yaml b.yaml": "tfidf-tune validate: error: unrecognized arguments: b.yaml",
    }
    for arguments, message in cases.items():
        text = failure(*arguments.split())
        assert re.search(message, text), arguments
        assert not re.search(r"(?<![\w-])tune (run|ls|cp)", text)


def test_an_error_that_a_recipe_of_the_user_does_not_expect_keeps_its_traceback(
    failure, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_recipe.py").write_text("raise ValueError('a fault of the recipe')")
    message = failure("run", "broken_recipe.py", "--config", "x")
    assert message.startswith("Traceback")
    assert message.endswith("ValueError: a fault of the recipe")


def test_a_config_for_the_other_recipe_runs_with_another_model(failure):
    for key in ("model", "model._component_"):
        message = failure(
            "run",
            "full_finetune",
            "--config",
            "mine/lora",
            f"{key}=tfidf_tune.models.auto",
            "checkpointer.checkpoint_dir=./nowhere",
            "dataset.source=texts.txt",
        )
        assert message.endswith(
            "error: config: checkpointer: no such folder ./nowhere: name the folder of a model, or "
            "its id on the hub"
        )


# Of the libraries that take long to import; pyyaml, omegaconf and lm_eval's parsers are light.
HEAVY = {"torch", "numpy", "transformers", "datasets", "torchao", "pandas", "scipy", "rich"}


CHECK_KEYS = (
    "run lora_finetune --config mine/lora",
    "validate mine/lora",
    "data preview mine/lora",
)


def test_help_lists_and_usage_errors_import_no_heavy_library():
    """At most 0.3 s on an idle machine; held by what is imported, because a clock depends on the
    machine.
    """
    own = [name for name in cli._COMMANDS if name != "run"]
    given = (
        "",
        "--help",
        "--version",
        "comapre",
        "tasks",
        "ls",
        "cat nothing",
        "run",
        "run --help",
        "run full_finetune -h",
        "run full_finetun --config x",
        "run full_finetune",
        "weights my.txt",
        *(f"{name} {option}" for name, option in product(own, ("--help", "--no-such-option"))),
        "probe audit --no-such-option",
        "data preview nothing",
        "data preview --help",
        "validate nothing",
        "run lora_finetune --config=nothing",
        *(f"{command} output_dri=x ~loss" for command in CHECK_KEYS),
    )
    commands = [text.split() for text in given]
    for arguments, ended in zip(commands, run_in_forks(commands), strict=True):
        assert not HEAVY & set(ended.modules), arguments
        assert "Traceback" not in ended.err, arguments
        assert ("no key 'output_dri'; did you mean 'output_dir'?" in ended.err) == (
            "output_dri=x" in arguments
        )
        if arguments and arguments[0] in cli._COMMANDS:
            text = ended.out + ended.err
            assert (
                f"tfidf-tune {arguments[0]}" in text
                or "error: " in text
                or arguments in (["tasks"], ["ls"])
            ), text
            if arguments != ["ls"]:  # which says how to list torchtune's recipes
                assert not re.search(
                    r"(?<![\w-])(tune|lm-eval) (run|ls|cp|cat|validate|--)", text
                ), arguments


def test_control_characters_of_file_names_do_not_reach_the_terminal(tmp_path, tiny_checkpoint):
    file = tmp_path / "a\x1b]0;b\x07.jsonl"
    file.write_text('{"text": "one two three four"}\n{"text": null}\n' * 8)
    (broken := tmp_path / "a\x1b]0;c\x07.yaml").write_text("a: ${b")
    (no_text := tmp_path / "a\x1b]0;d\x07.csv").write_text("a")
    tokenizer = ["--tokenizer", str(tiny_checkpoint), "--block-size", "2"]
    for number, (arguments, code, message) in enumerate(
        (  # of a progress bar, of logging, and of two errors
            (
                ["data", "dedup", str(file), str(tmp_path / "out")],
                0,
                "Finding copies a{}b{}.jsonl (1 of 1)",
            ),
            (
                ["weights", str(file), *tokenizer, "--output-dir", str(tmp_path / "page")],
                0,
                "a{}b{}.jsonl: 8 of 16 rows",
            ),
            (["validate", str(broken)], 2, "a{}c{}.yaml"),
            (
                ["data", "dedup", str(no_text), str(tmp_path / "out2")],
                2,
                "has text of no known format",
            ),
        )
    ):
        (folder := tmp_path / f"run{number}").mkdir()
        ended = run_forked("tfidf_tune.cli:main", arguments, folder)
        assert (ended.codes, message.format("\\u001b]0;", "\\u0007") in ended.output) == (
            [code],
            True,
        ), ended.output
        assert not {"\x1b", "\x07"} & {*ended.output}


def test_a_command_in_a_process_of_its_own_finds_modules_of_the_user_after_those_that_are_installed(
    tmp_path,
):
    (tmp_path / "omegaconf.py").write_text(
        "raise ImportError('the file of the user, not the package')"
    )
    (tmp_path / "my_weights.py").write_text(
        "from tfidf_tune.weighting import UniformWeighting as Mine"
    )
    objective = ["loss=tfidf_tune.loss.WeightedCrossEntropyLoss", "loss.weighting=my_weights.Mine"]
    config = ["demo/llama_3M_full_memorization", "checkpointer.checkpoint_dir=mine"]
    command = [*OWN_COMMAND, "validate", *config, *objective]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "Config is well-formed!\n"), ended.stderr
