"""The command ``tfidf-tune``.

Help, versions, lists and usage errors are answered without importing torch, which takes seconds.
"""

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import tfidf_tune
from tfidf_tune._checks import closest
from tfidf_tune._printing import prepare_output, visible
from tfidf_tune._quiet import hide_messages
from tfidf_tune._signals import FAILED, ended_by, exit_code
from tfidf_tune.commands import require_extras

# Name -> purpose, extras that it needs. Each is the module of this name in tfidf_tune.commands.
_COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "demo": (
        "train a small Llama under CE and TF-IDF on this computer and show what each recites",
        ("all",),
    ),
    "run": ("run a recipe with a config, on one process or many", ("torchtune",)),
    "ls": ("list recipes and configs", ()),
    "cp": ("copy a recipe or config to edit it", ()),
    "cat": ("print a recipe or config", ()),
    "validate": ("check a config without running it", ("torchtune",)),
    # Each has its own extras.
    "data": (
        "show examples of a training config; export its weights; remove copies",
        (),
    ),
    "weights": (
        "show the weights that TF-IDF gives the tokens of your own text",
        ("eval", "report"),
    ),
    "eval": ("lm-evaluation-harness with our tasks and token-exact prompts", ("eval",)),
    "compare": ("tables, intervals, figures and an HTML report of evaluated runs", ("report",)),
    "audit": (
        "ask any model whether it recites your text, and report: one command",
        ("eval", "report"),
    ),
    "probe": (
        "the same step by step: make a probe file, audit a model with it",
        ("eval", "report"),
    ),
    "tasks": ("print the folder of our tasks, for lm_eval --include_path", ()),
}
_EXIT_CODES = """exit codes:
  0          done, and within all limits
  1          a measured value is above its limit (--fail-above), and nothing else
  2          a usage error, any other error, or an audit without an all-clear
  128 + n    ended by signal n"""


def main() -> None:
    """Run the command line.

    Exit codes: 0, done and within all limits; 1, a measured value is above its limit, and nothing
    else; 2, a usage error, any other error, or an audit without an all-clear; 128 + n after signal
    n, so 130 after Ctrl-C and 141 if the reader of the output has closed it.
    """
    hide_messages()
    hook = sys.unraisablehook
    sys.unraisablehook = _end_if_interrupted
    try:
        with ended_by([signal.SIGINT], lambda name: None):
            try:
                _run_command(sys.argv[1:])
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except SystemExit as ended:
        ended.code = exit_code(ended)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException:  # also a panic of a library in Rust
        traceback.print_exc()
        sys.exit(FAILED)
    finally:
        sys.unraisablehook = hook


def _end_if_interrupted(unraisable: "sys.UnraisableHookArgs") -> None:
    """Handle a Ctrl-C inside a callback of the import system, where Python would only print and
    ignore it.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    sys.__unraisablehook__(unraisable)


def _run_command(arguments: Sequence[str]) -> None:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(
            f"usage: tfidf-tune [--version] COMMAND ...\n\n{_list()}\n{_EXIT_CODES}\n\n"
            "Run `tfidf-tune COMMAND --help` for details."
        )
    elif command == "--version":
        print(f"tfidf-tune {tfidf_tune.__version__}")
    elif command not in _COMMANDS:
        print(
            f"error: no command {command!r}{closest(command, _COMMANDS)}\n\n{_list()}",
            file=sys.stderr,
        )
        sys.exit(2)
    else:
        _start(command, [*arguments[1:]])


def _list() -> str:
    lines = [f"  {name:<10} {purpose}\n" for name, (purpose, _) in _COMMANDS.items()]
    return f"commands:\n{''.join(lines)}"


def _start(command: str, arguments: list[str]) -> None:
    """Run a command. User-facing errors of our own commands are one message,
    without a traceback.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit("error: the working directory does not exist any more: change to another one")
    # The harness's commands have a help, too.
    asked = (arguments[:1] or ["--help"]) if command == "eval" else arguments
    if {"-h", "--help"}.isdisjoint(asked):
        require_extras(command, *_COMMANDS[command][1])
    command_main = import_module(f"tfidf_tune.commands.{command}").main
    if (
        command == "run"
    ):  # a recipe reports its own errors; what it does not expect keeps its traceback
        command_main(arguments)
        return
    prepare_output()
    try:
        command_main(arguments)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        is_full = "requested and" in str(error) or getattr(error, "errno", None) in (
            errno.ENOSPC,
            errno.EDQUOT,
        )
        advice = ": make room, and run the same command again" if is_full else ""
        sys.exit(f"error: {visible(str(error))}{advice}")
    except MemoryError as error:
        sys.exit(
            f"error: out of memory{f' ({error})' if str(error) else ''}: use less text or a "
            "smaller batch size"
        )


if __name__ == "__main__":
    main()
