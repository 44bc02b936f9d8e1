"""The script for borrowed GPUs does steps once, goes on where it was stopped, and reports what it
did not do.
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "research" / "offline_runs" / "run.sh"
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable}

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs GNU tar, timeout and realpath"
)


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the script, and with a package that nothing may import from there."""
    folder = tmp_path / "checkout"
    for name in ("research/offline_runs", "tests", "tfidf_tune"):
        (folder / name).mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "research" / "offline_runs")
    (folder / "pyproject.toml").touch()
    (folder / "tfidf_tune" / "__init__.py").write_text("raise ImportError\n")
    return folder


@pytest.fixture
def command(checkout, tmp_path):
    """Make the command that runs the script with steps: names, modules that they need, and
    commands.
    """

    def make(steps, *options, work="work"):
        file = tmp_path / "steps.txt"
        file.write_text(
            "# comment\n\n" + "".join(f"{name} | {needs} | {line}\n" for name, needs, line in steps)
        )
        options = [
            *options,
            "--work",
            str(tmp_path / work),
            "--steps",
            str(file),
            "--device",
            "cpu",
        ]
        return ["bash", str(checkout / "research" / "offline_runs" / "run.sh"), *options]

    return make


def run(command):
    """The states in the table at the end, by step, and all that was printed."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout
    table = done.stdout.split("\n\n")[-2]
    return dict(line.split(maxsplit=1) for line in table.strip().splitlines()), done.stdout


def test_steps(command, tmp_path):
    """A failure ends nothing and is not repeated unless asked; a step whose module is missing is
    left out.
    """
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
        assert {"done/first", "failed/broken", "logs/broken.txt", "records/first.json"} <= {
            *archive.getnames()
        }
    # On another machine, to which only the records were carried.
    states, _ = run(
        command(steps, "--records", str(tmp_path / "work" / "records.tar.gz"), work="elsewhere")
    )
    assert states["first"].startswith("done before")
    assert states["broken"].startswith("failed before, failed with status 3")
    assert order.read_text().split() == ["first", "broken", "imports"]
    states, _ = run(command(steps, "--again"))
    assert states["broken"] == "failed with status 3, logs/broken.txt"
    assert order.read_text().split() == ["first", "broken", "imports", "broken"]


def test_stopped(command, tmp_path):
    """A signal ends the step, which the next run begins with; the records are packed
    all the same.
    """
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
    # The others have their turn first, so that a step that never ends in time does not keep all
    # from running.
    states, _ = run(command([("long", "", "true"), steps[1]]))
    assert {name: state.split(",")[0] for name, state in states.items()} == {
        "next": "done",
        "long": "done",
    }
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
