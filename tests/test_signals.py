"""Ctrl-C during imports, a closed pipe, a closed terminal: in processes of their own that import no
torch.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

# Sends SIGINT when the command begins to import a library; what the import makes of it differs.
INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {module!r}:
            {body}
sys.meta_path.insert(0, Finder())
from tfidf_tune import cli
sys.argv = ["tfidf-tune", *{arguments!r}]
cli.main()
"""
SEND = "os.kill(os.getpid(), signal.SIGINT)"
AS_ANOTHER_ERROR = (
    f"exec('try:\\n {SEND}\\nexcept BaseException as error:\\n raise ImportError(name) from error')"
)
IN_A_CALLBACK = f"type('Dying', (), {{'__del__': lambda self: {SEND}}})()"


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize(
    ("module", "arguments", "body"),
    [
        ("torch", ["run", "full_finetune", "--config", "demo/llama_3M_full_memorization"], SEND),
        ("numpy", ["compare", "."], AS_ANOTHER_ERROR),
        ("lm_eval", ["eval", "ls"], IN_A_CALLBACK),
    ],
)
def test_ctrl_c_during_imports_ends_with_its_exit_code(module, arguments, body):
    ended = run(INTERRUPTED.format(module=module, arguments=arguments, body=body))

    assert (ended.returncode, ended.stderr) == (130, "")


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", None])
def test_ctrl_c_ends_processes_that_import_a_recipe_under_torchrun(variable):
    """Other processes that import the package keep Python's behavior."""
    code = INTERRUPTED.format(module="torch", arguments=[], body=SEND).partition(
        "from tfidf_tune import cli"
    )[0]
    environment = os.environ | ({variable: "1"} if variable else {})

    ended = run(f"{code}import tfidf_tune.recipes.full_finetune", env=environment)

    if variable:
        assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
    else:
        assert ended.stderr.endswith("KeyboardInterrupt\n")


def test_the_exit_code_is_that_of_the_first_signal():
    """torchrun sends SIGTERM to processes that already clean up after Ctrl-C."""
    ended = run("""
import os, signal
from tfidf_tune._signals import ENDING, ended_by
with ended_by(ENDING, lambda name: None):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
""")

    assert ended.returncode == 128 + signal.SIGINT


def test_a_closed_pipe_ends_the_command_silently():
    reader, writer = os.pipe()
    os.close(reader)

    ended = subprocess.run(
        [sys.executable, "-m", "tfidf_tune.cli", "ls"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)

    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_removed_working_directory_is_one_message(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    code = f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n"

    ended = run(
        f"{code}from tfidf_tune import cli; sys.argv = ['tfidf-tune', 'compare', 'runs']; "
        "cli.main()"
    )

    assert ended.returncode == 2
    assert (
        ended.stderr
        == "error: the working directory does not exist any more: change to another one\n"
    )


def test_after_a_hangup_a_process_may_still_print(tmp_path):
    """A run finishes its step and saves: what it prints meanwhile must not end it."""
    code = """
import fcntl, os, signal, sys, termios, time
from pathlib import Path
from tfidf_tune._signals import handle
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
os.dup2(terminal, 1)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
came = []
handle([signal.SIGHUP], lambda number, frame: came.append(number))
Path(sys.argv[2], "ready").touch()
while not came:
    time.sleep(0.01)
print("saved", flush=True)
Path(sys.argv[2], "saved").touch()
"""
    master, slave = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, os.ttyname(slave), str(tmp_path)])
    os.close(slave)
    while not (tmp_path / "ready").exists() and process.poll() is None:
        time.sleep(0.01)
    os.close(master)

    assert process.wait() == 0
    assert (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        ("SystemExit('error: no')", 2, "error: no\n"),
        ("SystemExit(1)", 2, ""),  # as libraries end
        ("KeyError('a bug')", 2, "KeyError: 'a bug'\n"),
        ("ValueError('wrong')", 2, "error: wrong\n"),
        ("type('PanicException', (BaseException,), {})('of Rust')", 2, "PanicException: of Rust\n"),
        ("SystemExit(0)", 0, ""),
        ("SystemExit(143)", 143, ""),
        ("AboveLimit('limit exceeded: lms')", 1, "limit exceeded: lms\n"),
    ],
)
def test_only_a_value_above_its_limit_ends_with_1(raised, code, said):
    ended = run(f"""
import sys
from tfidf_tune import cli
from tfidf_tune._signals import AboveLimit
from tfidf_tune.commands import compare

def fail(arguments):
    raise {raised}

compare.main = fail
cli.require_extras = lambda *names: None
sys.argv = ["tfidf-tune", "compare", "runs"]
cli.main()
""")
    assert ended.returncode == code
    assert ended.stderr.endswith(said)
    assert ended.stderr.count(said.strip() or "Traceback") <= 1
