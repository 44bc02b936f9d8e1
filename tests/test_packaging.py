"""The built distributions: what they hold, and what the core does in an environment
of torch only.
"""

import ast
import configparser
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections import Counter
from graphlib import TopologicalSorter
from importlib.metadata import distribution
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.processes.commands import run_in_forks
from lm_eval.api.model import LM
from packaging.requirements import Requirement

import tfidf_tune
from tfidf_tune.tasks import evaluation as _evaluate

ROOT = Path(__file__).parents[1]
PACKAGE = Path(tfidf_tune.__path__[0])
IGNORED = (
    ".git",
    ".venv*",
    "build",
    "dist",
    "site",
    "runs",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
)


# Room -> the rooms that it may import from.
ALLOWED_IMPORTS = {
    "report": set(),
    "weighting": set(),
    "loss": {"weighting"},
    "models": set(),
    "corpus": set(),
    "passages": {"corpus"},
    "data": {"corpus", "passages", "weighting"},
    "probe": {"corpus", "data", "passages"},
    "training": {"weighting", "loss", "models", "corpus", "data", "passages", "probe"},
    "integrations": {"weighting", "loss", "data", "passages", "probe"},
    "tasks": {"data", "passages", "probe"},
    "results": {"data", "probe", "report"},
    "compare": {"report", "results"},
    "audit": {"corpus", "data", "passages", "probe", "report", "results", "tasks"},
}

CORE = """
import importlib.util, io, torch, tfidf_tune, tfidf_tune.loss, tfidf_tune.weighting

for name in ("numpy", "torchtune", "transformers", "lm_eval", "yaml", "pandas", "scipy"):
    assert importlib.util.find_spec(name) is None, name
for module in (tfidf_tune, tfidf_tune.loss, tfidf_tune.weighting):
    for name in module.__all__:
        getattr(module, name)
torch.manual_seed(0)
labels = torch.randint(11, (2, 8))
logits = torch.randn(2, 8, 11, requires_grad=True)
hidden, weight = torch.randn(2, 8, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
loss = tfidf_tune.TFIDFCrossEntropyLoss(num_batches=2)
loss(logits, labels).backward()
loss(tfidf_tune.HeadInput(hidden, weight), labels.flip(0)).backward()
assert all(tensor.grad.isfinite().all() and tensor.grad.any() for tensor in (logits, hidden, weight))
file = io.BytesIO()
torch.save(loss.state_dict(), file)
file.seek(0)
restored = tfidf_tune.TFIDFCrossEntropyLoss(num_batches=2)
restored.load_state_dict(torch.load(file, weights_only=True))
new = torch.randint(11, (2, 8))
assert torch.equal(restored(logits, new), loss(logits, new))
"""

STATE_OF_THE_INTERPRETER = """
import importlib, logging, os, signal, sys, warnings
import torch

def state():
    names = logging.root.manager.loggerDict
    loggers = {name: names[name] for name in names if isinstance(names[name], logging.Logger)}
    return {
        "finders": [*sys.meta_path],
        "hooks": [sys.excepthook, sys.unraisablehook, sys.displayhook, *sys.path_hooks],
        "path": [*sys.path],
        "environment": dict(os.environ),
        "warnings": [*warnings.filters],
        "loggers": {
            name: (logger.level, [*logger.filters], [*logger.handlers], logger.propagate, logger.disabled)
            for name, logger in [*loggers.items(), ("", logging.root)]
        },
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "torch": [
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark, torch.initial_seed(),
            torch.get_rng_state().tolist(),
        ],
    }

before = state()
modules = {*sys.modules}
for name in sys.argv[1:]:
    importlib.import_module(name)
if "tfidf_tune.loss" in sys.argv:
    loss = importlib.import_module("tfidf_tune").TFIDFCrossEntropyLoss(num_batches=2)
    loss(torch.zeros(2, 4, 5, requires_grad=True), torch.zeros(2, 4, dtype=torch.int64)).backward()
after = state()
for name in after["loggers"].keys() - before["loggers"].keys():  # of a module of torch that is imported on demand
    before["loggers"][name] = (logging.NOTSET, [], [], True, False)
changed = [key for key in before if before[key] != after[key]]
assert not changed, {key: (before[key], after[key]) for key in changed}
new = {name for name in {*sys.modules} - modules if sys.modules[name] is not None}
packages = {name.partition(".")[0] for name in new}
assert not packages & {"torchao", "torchtune", "transformers", "omegaconf"}, packages
assert not {"tfidf_tune._torchao", "tfidf_tune._quiet"} & new
hollow = [name for name in new if getattr(sys.modules[name], "__file__", "") is None]
assert not hollow, hollow
"""

BESIDE_A_TRAINER = """
import importlib.util, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
import tfidf_tune.data, tfidf_tune.probe

for name in ("datasets", "pandas", "zstandard", "torchtune", "omegaconf", "lm_eval", "scipy"):
    assert importlib.util.find_spec(name) is None, name
for module in (tfidf_tune.data, tfidf_tune.probe):
    for name in module.__all__:
        getattr(module, name)
tokenizer = Tokenizer(models.WordLevel({"[END]": 0, "[UNK]": 1, "the": 2, "river": 3}, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]").save_pretrained(sys.argv[1])
for tokenizer in map(tfidf_tune.data.HFTokenizer, (sys.argv[1], AutoTokenizer.from_pretrained(sys.argv[1]))):
    assert tfidf_tune.data.tokenizer_name(tokenizer) == sys.argv[1]
    ids, fingerprint = tokenizer.encode("the river", add_eos=False), tfidf_tune.data.tokenizer_fingerprint(tokenizer)
    passage = tfidf_tune.passages.Passage("t0", "target", "the river", ids, 1, [], "mine", sys.argv[1], fingerprint)
    tfidf_tune.passages.write_probe_file(sys.argv[1] + "/probe.jsonl", [passage])
    assert tfidf_tune.passages.read_probe_file(sys.argv[1] + "/probe.jsonl") == [passage]
    tfidf_tune.probe.check_passages(tokenizer, [passage], 1)
"""


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The source distribution, and the wheel built from it, without network."""
    folder = tmp_path_factory.mktemp("build")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*IGNORED))
    built = subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            "--outdir",
            str(folder / "dist"),
            str(folder / "tree"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "absent from the `packages` configuration" not in built.stdout + built.stderr
    (source,), (wheel,) = (
        list((folder / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl")
    )
    return source, wheel


def in_tree(folder):
    return {
        file.relative_to(ROOT / folder).as_posix()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_the_wheel_holds_the_files_of_the_tree(distributions):
    expected = {f"tfidf_tune/{file}" for file in in_tree("tfidf_tune")}
    for folder in ("recipes", "configs"):
        expected |= {f"tfidf_tune/{folder}/{file}" for file in in_tree(folder)}

    names = {
        name for name in zipfile.ZipFile(distributions[1]).namelist() if ".dist-info/" not in name
    }

    assert names == expected


def test_the_source_distribution_holds_what_the_readme_and_contributors_need(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {
        "Makefile",
        "constraints.txt",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "CITATION.cff",
        "mkdocs.yml",
    } <= names
    assert {"SECURITY.md", ".pre-commit-config.yaml", ".github/workflows/test.yml"} <= names
    assert {f"examples/{file}" for file in in_tree("examples")} <= names
    assert {f"docs/{file}" for file in in_tree("docs")} <= names
    assert {f"tests/{file}" for file in in_tree("tests")} <= names


def test_test_files_have_different_names():
    """pytest imports them by their names alone, and refuses to collect the second."""
    names = Counter(
        file.name
        for file in (ROOT / "tests").rglob("test_*.py")
        if "other_trainers" not in file.parts
    )
    assert [name for name, number in names.items() if number > 1] == []


def test_workflows_run_targets_of_the_makefile():
    targets = set(
        " ".join(
            re.findall(r"^([\w. -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        ).split()
    )
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        called = re.findall(
            r"run: make ([\w.-]+)", file.read_text().replace("${{ matrix.versions }}", "lowest")
        )
        assert called
        assert set(called) <= targets


def test_the_harness_finds_our_models_and_axolotl_our_commands(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        (name,) = (
            name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")
        )
        entries = configparser.ConfigParser(delimiters=["="])
        entries.read_string(wheel.read(name).decode())
    models = dict(entries["lm_eval.models"])
    assert models == {
        name: target
        for name, target in _evaluate._MODELS.items()
        if name in ("tfidf-hf", "tfidf-vllm")
    }
    module, _, model = models["tfidf-hf"].partition(":")
    assert issubclass(getattr(importlib.import_module(module), model), LM)
    module, _, command = entries["axolotl.cli_commands"]["tfidf-tune"].partition(":")
    command = getattr(importlib.import_module(module), command)
    done = CliRunner().invoke(command, ["audit", "--help"], standalone_mode=False)
    assert (done.exit_code, done.output.split(" [")[0]) == (0, "usage: tfidf-tune audit")


def test_the_readme_links_to_files_and_that_of_the_wheel_only_to_addresses(distributions):
    archive = zipfile.ZipFile(distributions[1])
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    header, _, text = archive.read(name).decode().partition("\n\n")

    assert text.startswith("# tfidf-tune")
    assert "objective.md" in text
    assert not re.search(r"\]\((?!https?://|#)", text)
    assert "\nLicense-Expression: BSD-3-Clause" in header
    assert re.findall("^Requires-Dist: ([a-z-]+)[^;\n]*$", header, re.MULTILINE) == ["torch"]
    targets = re.findall(r"\]\((?!https?://|#)([^)#]*)", (ROOT / "README.md").read_text())

    assert "docs/install.md" in targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def requirements_of(*names):
    """The distributions that these need, themselves included."""
    found = {}
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = distribution(name)
            required = [Requirement(text) for text in found[name].requires or []]
            waiting += [
                each.name
                for each in required
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found.values()


def make_environment(folder, wheel, *names):
    """Python of an environment that holds the wheel, some distributions and what these need, linked
    from this one.
    """
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for each in requirements_of(*names):
        for top in {file.parts[0] for file in each.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(each.locate_file(top)).resolve())
    zipfile.ZipFile(wheel).extractall(site)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def python_of_core(distributions, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("core"), distributions[1], "torch")


def test_the_core_works_with_torch_only(python_of_core):
    # -I: the working directory and PYTHONPATH are not searched. The warning is torch's, which can
    # do without NumPy.
    command = [python_of_core, "-I", "-W", "ignore:Failed to initialize NumPy", "-c", CORE]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "names", [["tfidf_tune"], ["tfidf_tune.weighting"], ["tfidf_tune.loss"]], ids="".join
)
def test_importing_the_core_leaves_the_interpreter_as_it_was(names):
    """Finders, hooks, filters, loggers, signals and defaults of torch are the user's, whose program
    this is.
    """
    command = [sys.executable, "-c", STATE_OF_THE_INTERPRETER, *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_no_module_changes_other_libraries_when_it_is_imported():
    """At the top of a module are definitions, and statements that begin with a name that it
    defines.
    """
    changing = {}
    for file in PACKAGE.rglob("*.py"):
        body = ast.parse(file.read_text(encoding="utf-8")).body
        targets = []
        for node in body:
            if isinstance(node, ast.Assign):
                targets += node.targets
        own = {target.id for target in targets if isinstance(target, ast.Name)}
        for node in body:
            if not isinstance(node, (ast.Expr, ast.For, ast.While, ast.With, ast.Try, ast.Delete)):
                continue
            text = ast.unparse(node)
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if not is_docstring and re.match(r"\w+", text)[0] not in own:
                changing.setdefault(file.relative_to(PACKAGE).as_posix(), []).append(text)
    # What it is for.
    assert changing.keys() == {"_torchao.py"}, changing


def test_probe_files_and_tokenizers_work_with_transformers_only(distributions, tmp_path):
    """What the monitor needs beside a trainer whose pins allow no more than its own packages."""
    python = make_environment(tmp_path / "environment", distributions[1], "torch", "transformers")

    command = [python, "-I", "-c", BESIDE_A_TRAINER, tmp_path / "tokenizer"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_command_without_its_extra_says_what_to_install(python_of_core):
    commands = {
        "demo": "all",
        "eval --tasks tfidf_squad": "eval",
        "compare runs": "report",
        "weights text.txt --tokenizer folder": "eval,report",
        "data preview demo/llama_3M_full_memorization": "torchtune,report",
        "data dedup texts clean": "scale",
        "data holdout texts divided": "scale",
        "audit folder text.txt": "eval,report",
        "probe make text.txt --tokenizer folder --output probe.jsonl": "eval,report",
        "tasks --token-ids-tokenizer folder --tokenizer folder": "eval",
        "validate demo/llama_3M_full_memorization": "torchtune",
        "run full_finetune --config demo/llama_3M_full_memorization": "torchtune",
    }
    all_ended = run_in_forks([command.split() for command in commands], python_of_core)
    for (command, extras), ended in zip(commands.items(), all_ended, strict=True):
        assert (ended.code, ended.out) == (2, ""), command
        start = f"error: tfidf-tune {command.split()[0]} needs packages that are not installed ("
        assert ended.err.startswith(start)
        assert ended.err.endswith(f": pip install 'tfidf-tune[{extras}]'\n")
        assert ended.err.count("\n") == 1


def test_without_extras_help_is_there(python_of_core):
    ours = (
        "demo",
        "compare",
        "weights",
        "data",
        "data preview",
        "probe",
        "probe audit",
        "tasks",
        "validate",
        "cp",
    )
    commands = [
        "--help",
        "--version",
        "tasks",
        "ls",
        "cat mine/lora",
        *(f"{name} --help" for name in ours),
    ]
    all_ended = run_in_forks([command.split() for command in commands], python_of_core)
    for command, ended in zip(commands, all_ended, strict=True):
        assert (ended.code, ended.err) == (0, ""), command
        assert ended.out, command
    assert (Path(all_ended[2].out.strip()) / "tfidf_memorization.yaml").is_file()


def test_every_public_package_has_a_page_and_allowed_imports():
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")} - {
        "commands",
        "configs",
        "recipes",
    }

    assert {file.stem for file in (ROOT / "docs" / "api").glob("*.md")} == packages
    assert set(ALLOWED_IMPORTS) == packages


def test_every_public_name_is_documented():
    # Modules of their own, as their hosts are.
    integrations = [f"integrations.{name}" for name in ("transformers", "trl", "monitor")]
    for package in (ALLOWED_IMPORTS.keys() - {"integrations"}) | set(integrations):
        module = importlib.import_module(f"tfidf_tune.{package}")
        assert module.__all__
        for name in module.__all__:
            member = getattr(module, name)
            assert member.__doc__ or not (inspect.isclass(member) or inspect.isfunction(member)), (
                name
            )


def imports_of_rooms():
    """Yield the room, the file and the dotted name of each import of another room, relative to the
    package.
    """
    rooms = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name.name}" for name in node.names]
            for name in names:
                package, _, imported = name.partition(".")
                room = imported.split(".")[0]
                if (
                    place.parts[0] in rooms
                    and package == "tfidf_tune"
                    and room in rooms - {place.parts[0]}
                ):
                    yield place.parts[0], place, imported


def test_imports_between_rooms_go_one_way():
    for room, file, imported in imports_of_rooms():
        if room in ALLOWED_IMPORTS:
            assert imported.split(".")[0] in ALLOWED_IMPORTS[room], (file, imported)
    TopologicalSorter(ALLOWED_IMPORTS).prepare()  # which refuses a circle


def test_no_room_imports_what_is_private_in_another():
    private = [
        (str(file), imported)
        for _, file, imported in imports_of_rooms()
        if any(part.startswith("_") for part in imported.split(".")[1:])
    ]
    assert private == []


def test_what_torchtune_needs_is_imported_before_it():
    """In the room where modules import torchtune, in a module by itself, or in the function."""
    rooms = [
        file.parent
        for file in PACKAGE.rglob("__init__.py")
        if "import tfidf_tune._torchao" in file.read_text()
    ]
    assert {room.name for room in rooms} == {"models", "training"}
    num_found = 0
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        scopes = [
            node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.FunctionDef))
        ]
        for scope in scopes:
            imported = []
            for node in scope.body:
                if isinstance(node, ast.Import):
                    imported += [name.name for name in node.names]
                elif isinstance(node, ast.ImportFrom):
                    imported.append(node.module)
            first = next(
                (at for at, name in enumerate(imported) if name.partition(".")[0] == "torchtune"),
                None,
            )
            if first is not None and file.parent not in rooms:
                num_found += 1
                assert "tfidf_tune._torchao" in imported[:first], (file, imported)
    assert num_found > 5


def test_the_training_stack_is_imported_where_it_is_extended_and_elsewhere_inside_functions():
    """The extra ``eval``, which audits and comparisons need, does not install it."""
    allowed = {"recipes", "training", "models", "loss/stock.py", "_torchao.py", "_config.py"}
    stack = {"torchtune", "torchao", "torchdata", "omegaconf"}
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE)
        if {place.parts[0], place.as_posix()}.isdisjoint(allowed):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            imported = []
            for node in tree.body:
                if isinstance(node, ast.ImportFrom):
                    imported += [f"{node.module}.{name.name}" for name in node.names]
                elif isinstance(node, ast.Import):
                    imported += [name.name for name in node.names]
            assert not [name for name in imported if name.partition(".")[0] in stack], place
            if place.parts[0] in ALLOWED_IMPORTS:
                ours = {name.split(".")[1] for name in imported if name.startswith("tfidf_tune.")}
                assert ours.isdisjoint({"_torchao", "_config"}), place
