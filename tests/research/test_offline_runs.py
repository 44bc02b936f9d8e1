"""The script for borrowed GPUs does steps once, goes on where it was stopped, and reports what it did not do."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "research" / "gpu" / "run.sh"
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs GNU tar, timeout and realpath")


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the script, and with a package that nothing may import from there."""
    folder = tmp_path / "checkout"
    for name in ("research/offline_runs", "tests", "tfidf_tune"):
        (folder / name).mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "research" / "gpu")
    (folder / "pyproject.toml").touch()
    (folder / "tfidf_tune" / "__init__.py").write_text("raise ImportError\n")
    return folder


@pytest.fixture
def command(checkout, tmp_path):
    """Make the command that runs the script with steps: names, modules that they need, and commands."""

    def make(steps, *options, work="work"):
        file = tmp_path / "steps.txt"
        file.write_text("# comment\n\n" + "".join(f"{name} | {needs} | {line}\n" for name, needs, line in steps))
        options = [*options, "--work", str(tmp_path / work), "--steps", str(file), "--device", "cpu"]
        return ["bash", str(checkout / "research" / "gpu" / "run.sh"), *options]

    return make


def run(command):
    """The states in the table at the end, by step, and all that was printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout
    table = done.stdout.split("\n\n")[-2]
    return dict(line.split(maxsplit=1) for line in table.strip().splitlines()), done.stdout


def test_steps(command, tmp_path):
    """A failure ends nothing and is not repeated unless asked; a step whose module is missing is left out."""
    order = tmp_path / "order"
    steps = [
        ("first", "json", f"echo first >> {order}; echo '{{}}' > records/first.json"),
        ("broken", "", f"echo broken >> {order}; echo the reason; exit 3"),
        ("lacking", "json no_such_module", f"echo lacking >> {order}"),
        ("imports", "", f'{{ python -c "import tfidf_tune"; pwd; }} && echo imports >> {order}'),
    ]
    states, output = run(command(steps))
    assert states["first"].startswith("done, ")
    assert states["broken"] == "failed with status 3, logs/broken.txt"
    assert "the reason" in output
    assert states["lacking"] == "skipped, needs no_such_module"
    assert states["imports"].startswith("done, ")
    assert order.read_text().split() == ["first", "broken", "imports"]

    with tarfile.open(tmp_path / "work" / "records.tar.gz") as archive:
        assert {"done/first", "failed/broken", "logs/broken.txt", "records/first.json"} <= {*archive.getnames()}
    # On another machine, to which only the records were carried.
    states, _ = run(command(steps, "--records", str(tmp_path / "work" / "records.tar.gz"), work="elsewhere"))
    assert states["first"].startswith("done before")
    assert states["broken"].startswith("failed before, failed with status 3")
    assert order.read_text().split() == ["first", "broken", "imports"]
    states, _ = run(command(steps, "--again"))
    assert states["broken"] == "failed with status 3, logs/broken.txt"
    assert order.read_text().split() == ["first", "broken", "imports", "broken"]


def test_no_time_is_left(command):
    states, _ = run(command([("one", "", "true")], "--minutes", "0"))
    assert states == {"one": "to do"}
    states, _ = run(command([("one", "", "true")]))
    assert states["one"].startswith("done, ")


def test_stopped(command, tmp_path):
    """A signal ends the step, which the next run begins with; the records are packed all the same."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    steps = [("long", "", f"echo begun > {begun}; sleep 1000"), ("next", "", "true")]
    process = subprocess.Popen(command(steps), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    begun.read_text()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert "long                   to do, stopped after" in output
    assert "next                   to do\n" in output
    assert (tmp_path / "work" / "records.tar.gz").is_file()
    # The others have their turn first, so that a step that never ends in time does not keep all from running.
    states, _ = run(command([("long", "", "true"), steps[1]]))
    assert {name: state.split(",")[0] for name, state in states.items()} == {"next": "done", "long": "done"}
    assert [*states] == ["next", "long"]


def test_killed(command, tmp_path):
    """What was done before is in the records, and the next run does not do it again."""
    steps = [
        ("first", "", "echo 1 > records/first"),
        ("killed", "", "kill -KILL $(sed -n 's/^PPid://p' /proc/$PPID/status); sleep 5"),
    ]
    killed = subprocess.run(command(steps), capture_output=True, env=ENVIRONMENT)
    assert killed.returncode == -signal.SIGKILL
    with tarfile.open(tmp_path / "work" / "records.tar.gz") as archive:
        assert {"done/first", "records/first"} <= {*archive.getnames()}
    states, _ = run(command([steps[0], ("killed", "", "true")]))
    assert [state.split(",")[0] for state in states.values()] == ["done before", "done"]


def test_folders_of_others(command, checkout, tmp_path):
    """A run on a CPU is none on a GPU, and a checkout is no folder to work in."""
    steps = [("one", "", "true")]
    run(command(steps))
    for options, named in (
        (["--device", "cuda"], "work is for --device cpu"),
        (["--work", str(checkout)], "is a checkout"),
        (["--minutes", "0.5"], "--minutes is 0.5: give a whole number"),
        (["--work", str(tmp_path / "new"), "--steps", "none.txt"], "there is no .*none.txt"),
    ):
        refused = subprocess.run([*command(steps), *options], capture_output=True, text=True, env=ENVIRONMENT)
        assert refused.returncode == 1
        assert re.search(named, refused.stderr)
    assert (checkout / "tests").is_dir()
    # Nor are the records of another device, which the archive may have.
    shutil.copy(tmp_path / "work" / "records.tar.gz", checkout)
    states, output = run([*command(steps, work="other"), "--device", "cuda"])
    assert states["one"].startswith("done, ")
    assert "Not used, because it is of another device: " in output


def test_records_that_cannot_be_written_stay_as_they_were(command, tmp_path):
    """They are too large; all steps have their turn. A folder that is missing is made."""
    records = tmp_path / "new" / "records.tar.gz"
    steps = [("one", "", "echo 1 > records/one"), ("large", "", "head -c 2000000 /dev/urandom > records/large")]
    run(command([steps[0]], "--records", str(records)))
    before = records.read_bytes()
    states, output = run(["env", "MAX_MB=1", *command([*steps, ("next", "", "true")], "--records", str(records))])
    assert [state.split(",")[0] for state in states.values()] == ["done before", "done", "done"]
    assert "error: no new " in output
    assert records.read_bytes() == before
    assert not [*tmp_path.glob("**/new.*")]


def test_one_run_in_a_folder_at_a_time(command, tmp_path):
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    first = subprocess.Popen(command([("long", "", f"echo begun > {begun}; sleep 1000")]), env=ENVIRONMENT)
    begun.read_text()
    second = subprocess.run(command([("long", "", "true")]), env=ENVIRONMENT, capture_output=True, text=True)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 0
    assert second.returncode == 1
    assert "another run is in" in second.stderr


def test_evaluated_weights_stay_behind(command, tmp_path):
    """They would be the most of the records, and an experiment goes on without them; one that is done has a report."""
    run_folder = "runs/demo/model/ce/seed0"
    weights = [f"{run_folder}/checkpoint_{percent}pct/model.safetensors" for percent in (50, 100)]
    results = f"{run_folder}/evaluation/checkpoint_50pct/part1"
    made = [f"mkdir -p {results} && touch {results}/evaluated.json"]
    made += [f"mkdir -p $(dirname {path}) && touch {path}" for path in weights]
    made += ["mkdir -p runs/whole", "touch runs/whole/report.md"]
    run(command([("experiment", "", " && ".join(made)), ("whole", "", "cp runs/whole/report.md records")]))
    with tarfile.open(tmp_path / "work" / "records.tar.gz") as archive:
        names = archive.getnames()
    assert weights[0] not in names
    assert weights[1] in names
    assert "records/report.md" in names
    assert not [name for name in names if name.startswith("runs/whole")]


def test_wheels(checkout, command, tmp_path):
    """Missing packages are installed, present ones kept with what they need; a foreign wheel is reported."""

    def wheel(name, tag, requires=""):
        (checkout / "wheels").mkdir(exist_ok=True)
        with zipfile.ZipFile(checkout / "wheels" / f"{name}-1.0-{tag}.whl", "w") as file:
            about = f"{name}-1.0.dist-info"
            file.writestr(f"{name}.py", f"tag = {tag!r}\n")
            file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
            file.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
            file.writestr(f"{about}/RECORD", "")

    wheel("carried", "py3-none-any", "Requires-Dist: pytest>=2\nRequires-Dist: no-such-package\n")
    wheel("foreign", "cp27-cp27m-win32")
    wheel("pytest", "py3-none-any", "Requires-Dist: pluggy==1.0\n")
    wheel("pluggy", "py3-none-any")  # another than the pytest that stays works with
    steps = [
        ("works", "carried", 'python -c "import carried, pytest; pytest.fixture"'),
        ("cannot", "carried foreign", "true"),
    ]
    states, output = run(command(steps))
    assert "Installing 2 packages" in output
    assert "carried needs no-such-package; here: None" in output
    assert "not installed: foreign-1.0-cp27-cp27m-win32.whl: ERROR: " in output
    assert states["works"].startswith("done, ")
    assert states["cannot"] == "skipped, needs foreign"
    assert "Installing" not in run(command(steps))[1]


def test_too_large_to_carry(tmp_path):
    """Nothing is left that looks like an archive, and the message names the largest files."""
    (tmp_path / "gpu" / "wheels").mkdir(parents=True)
    (tmp_path / "gpu" / "wheels" / "large.whl").write_bytes(bytes(1_500_000))
    pack = ["bash", str(SCRIPT), "--pack", str(tmp_path / "gpu.tar"), str(tmp_path / "gpu")]
    done = subprocess.run(pack, capture_output=True, text=True, env={**os.environ, "MAX_MB": "1"})
    assert done.returncode == 1
    assert "gpu.tar would have 1 MB, 1 is the limit" in done.stderr
    assert "1.5M gpu/wheels/large.whl" in done.stderr
    assert not (tmp_path / "gpu.tar").exists()
    assert subprocess.run(pack, env={**os.environ, "MAX_MB": "2"}).returncode == 0
    assert (tmp_path / "gpu.tar").is_file()
