"""The command ``tfidf-tune``, in this process where torchtune's commands only print."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest

from tfidf_tune import _extras, cli

PRODUCT = (
    "base: tinyllama/1.1B_full_memorization\n"
    "loss:\n"
    "  _component_: tfidf_tune.loss.WeightedCrossEntropyLoss\n"
    "  weighting:\n"
    "    _component_: tfidf_tune.weighting.ProductWeighting\n"
    "    second: {_component_: tfidf_tune.weighting.TFIDFWeighting}\n"
    "    first: {_component_: tfidf_tune.weighting.GoldfishWeighting"
)


@pytest.fixture
def run_command(monkeypatch):
    def run(*arguments):
        from torchtune import _recipe_registry

        monkeypatch.setattr(_recipe_registry, "_ALL_RECIPES", list(_recipe_registry._ALL_RECIPES))
        for module in ("ls", "cp", "cat", "run"):
            __import__(f"torchtune._cli.{module}")
        monkeypatch.setattr(sys, "argv", ["tfidf-tune", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        cli.main()

    return run


def test_ls_shows_our_recipes_with_their_configs_and_torchtunes(run_command, capsys):
    run_command("ls")

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["lora_finetune", "demo/llama_650K_lora_memorization"] in lines
    assert ["gptj/6B_lora_memorization"] in lines
    assert ["full_finetune", "demo/gpt_neox_660K_full_memorization"] in lines
    assert ["demo/llama_3M_full_memorization"] in lines
    assert ["pythia/1.4B_qlora_memorization"] in lines
    assert ["tinyllama/1.1B_full_memorization"] in lines
    assert any(line[0] == "full_finetune_single_device" for line in lines)


def test_cat_prints_a_config_by_name(run_command, capsys):
    run_command("cat", "tinyllama/1.1B_lora_memorization")

    assert "lora_rank: 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "file"), [("full_finetune", "mine.py"), ("tinyllama/1.1B_full_memorization", "mine.yaml")]
)
def test_cp_copies_recipes_and_configs(run_command, tmp_path, name, file):
    run_command("cp", name, str(tmp_path / file))

    assert "checkpoint" in (tmp_path / file).read_text()


def test_validate_takes_a_name(run_command, capsys):
    run_command("validate", "tinyllama/1.1B_full_memorization")

    assert "well-formed" in capsys.readouterr().out


def test_validate_takes_a_config_of_torchtunes_own_recipes(run_command, tmp_path, capsys):
    run_command("cp", "llama2/7B_full", str(tmp_path / "mine.yaml"))
    run_command("validate", str(tmp_path / "mine.yaml"))

    assert "well-formed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["pythia/1.4B_qlora_qa", "tinyllama/1.1B_full_summarization"])
def test_validate_knows_configs_that_build_on_others(run_command, capsys, name):
    run_command("validate", name)

    assert "Config is well-formed!" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: pythia/1.4B_qlora_qa\noutput_dri: x", "no key 'output_dri'; did you mean 'output_dir'"),
        ("base: pythia/1.4B_qlora_qa\nmodel: {lora_rnk: 3}", "no argument 'lora_rnk'; did you mean 'lora_rank'"),
        (f"{PRODUCT}, kk: 3}}", "loss.weighting.first: .* has no argument 'kk'; did you mean 'k'"),
        (f"{PRODUCT}, k: 1}}", "config: loss.weighting.first: k is 1: one token in k"),
        (
            PRODUCT.replace("_component_: tfidf_tune.weighting.GoldfishWeighting", "k: 4}"),
            "loss.weighting: first is {.*}: it has to be a w",
        ),
        (
            "base: demo/llama_3M_full_memorization\nloss: {_component_: torch.nn.CrossEntropyLoss}",
            "makes CrossEntropyLoss, not one of tfidf_tune's objectives: take",
        ),
        ("base: demo/llama_3M_full_memorization\nmodel: ???", "missing model"),
        ("base: demo/llama_3M_full_memorization\nmodel: ${model}", "Recursive interpolation"),
        ("model: null\ncheckpointer: {a: HFCheckpointer}", "missing batch_size"),
        ("a: ${b", "error: config .*'a'"),
        ("model: {_component_: torch.nn.Linear, size: 3}", "got an unexpected keyword argument 'size'"),
        ("model: {_component_: 3}", "config: model: _component_ is 3, it has to be a dotted path"),
        ("base: nowhere", "no config file nowhere"),
        ("a: [", "error: "),
        ("", "mine.yaml is empty"),
    ],
)
def test_validate_refuses_what_the_recipe_would(run_command, tmp_path, text, message):
    (tmp_path / "mine.yaml").write_text(text)

    with pytest.raises(SystemExit, match=message):
        run_command("validate", str(tmp_path / "mine.yaml"))


def test_validate_refuses_a_name_that_is_no_config(run_command):
    with pytest.raises(SystemExit, match="no config of that name; there are: demo/"):
        run_command("validate", "tinyllama/2B")


def test_without_a_command_it_says_what_there_is(run_command, capsys):
    run_command()

    out = capsys.readouterr().out
    assert "demo" in out
    assert "validate" in out


def test_demo_explains_its_options(run_command, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command("demo", "--help")

    assert ended.value.code == 0
    assert "--seed" in capsys.readouterr().out


@pytest.mark.parametrize(("error", "told"), [(MemoryError(), ""), (MemoryError("for 8 TiB"), " (for 8 TiB)")])
def test_too_little_memory_is_one_message(run_command, monkeypatch, error, told):
    def main(arguments):
        raise error

    monkeypatch.setattr("tfidf_tune.commands.probe.main", main)
    with pytest.raises(SystemExit) as ended:
        run_command("probe", "make")
    assert ended.value.code == f"error: out of memory{told}: use less text or a smaller batch size"


def test_the_version_is_that_of_the_package(run_command, capsys):
    run_command("--version")

    assert capsys.readouterr().out == f"tfidf-tune {version('tfidf-tune')}\n"


def test_an_unknown_command_lists_ours_with_a_suggestion(run_command, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command("comapre")

    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: no command 'comapre'; did you mean 'compare'?\n")
    for command in ("demo", "probe", "tasks", "run", "validate", "ls"):
        assert re.search(rf"^  {command} ", said, re.MULTILINE)


# Of the libraries that take long to import; pyyaml and lm_eval's parsers are light.
HEAVY = {"torch", "numpy", "transformers", "datasets", "omegaconf", "torchao", "pandas", "scipy", "pydantic", "rich"}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["--version"],
        ["comapre"],
        ["tasks"],
        ["ls"],
        ["cat", "nothing"],
        *([command, "--help"] for command in (*cli._OURS, "ls", "cp", "cat")),
        *([command, "--no-such-option"] for command in (*cli._OURS, "ls", "cp", "cat")),
        ["run"],
        ["run", "full_finetun", "--config", "x"],
        ["run", "full_finetune"],
        ["download"],
        ["probe", "audit", "--no-such-option"],
        ["weights", "my.txt"],
    ],
    ids=" ".join,
)
def test_what_needs_no_library_imports_none(arguments):
    """At most 0.3 s on an idle machine; held by what is imported, because a clock depends on the machine."""
    code = f"""
import atexit, sys
atexit.register(lambda: print(sorted({HEAVY!r} & sys.modules.keys()), file=sys.stderr))
sys.argv = ["tfidf-tune", *{arguments!r}]
from tfidf_tune import cli
cli.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "Traceback" not in ended.stderr
    assert ended.stderr.endswith("[]\n")


def test_a_command_whose_extra_is_missing_names_it(run_command, monkeypatch):
    """tests/test_packaging.py does the same for every command in an environment without the extras."""
    monkeypatch.setattr(_extras, "_is_installed", lambda name: name not in ("lm-eval", "rouge-score"))

    with pytest.raises(SystemExit) as ended:
        run_command("probe", "make")

    assert ended.value.code == (
        "error: tfidf-tune probe needs packages that are not installed (lm-eval, rouge-score): "
        "pip install 'tfidf-tune[eval]'"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "full_finetun"], "no recipe 'full_finetun'; did you mean 'full_finetune'"),
        (["run", "full_finetun", "--config", "x"], "no recipe 'full_finetun'; did you mean 'full_finetune'"),
        (
            ["run", "../mine.py", "--config", "x"],
            r"no recipe '\.\./mine\.py'\. .* Python file in the working directory",
        ),
        (["run", "full_finetune", "--config"], "tfidf-tune run: error: argument --config: expected one argument"),
        (["run", "full_finetune"], "tfidf-tune run: error: argument --config is required"),
        (["cp", "nothing", "."], "tfidf-tune cp: error: Invalid file name: nothing. Try `tfidf-tune ls` to see"),
        (["run"], "tfidf-tune run: error: arguments are missing"),
        (["run", "--nproc_per_node", "2", "full_finetun", "--config", "x"], "no recipe 'full_finetun'; did you mean"),
        (["download"], "usage: tfidf-tune download <repo-id>"),
        (["validate"], "usage: tfidf-tune validate <config>"),
        (["validate", "a.yaml", "b.yaml"], "tfidf-tune validate: error: unrecognized arguments: b.yaml"),
    ],
)
def test_a_command_that_is_not_understood_is_one_message(run_command, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        run_command(*arguments)

    said = f"{capsys.readouterr().err}{ended.value.code}"
    assert re.search(message, said)
    assert not re.search(r"(?<![\w-])tune (run|ls|cp)", said)


def test_the_help_of_torchtunes_commands_calls_them_ours(run_command, capsys):
    for command in ("run", "ls", "cp", "cat", "validate"):
        with pytest.raises(SystemExit):
            run_command(command, "--help")

        said = capsys.readouterr().out
        assert f"tfidf-tune {command}" in said
        assert not re.search(r"(?<![\w-])tune (run|ls|cp|cat|validate)", said)


def test_a_recipe_of_the_users_own_is_found_below_the_working_directory(run_command, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text("print('mine ran')")
    monkeypatch.chdir(tmp_path)

    run_command("run", "./mine.py", "--config", "x")

    assert capsys.readouterr().out == "mine ran\n"
