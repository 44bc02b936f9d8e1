"""The command ``tfidf-tune``: our commands, and torchtune's with our recipes and configs registered.

Help, versions, lists and usage errors are answered without importing torch, which takes seconds.
"""

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

import tfidf_tune
from tfidf_tune._extras import require_extras
from tfidf_tune._printing import replace_unencodable, visible
from tfidf_tune._signals import ended_by


class _Command(NamedTuple):
    """A command: its line in the help, and the extras without which it cannot run."""

    purpose: str
    extras: tuple[str, ...]


# Each is the module of this name in tfidf_tune.commands.
_OURS = {
    "demo": _Command("train a small Llama under CE and TF-IDF on this computer and show what each recites", ("all",)),
    "eval": _Command("lm-evaluation-harness with our tasks and token-exact prompts", ("eval",)),
    "experiment": _Command("train and evaluate models, objectives and seeds from one file, and compare them", ("all",)),
    "compare": _Command("tables, intervals, figures and an HTML report of evaluated runs", ("report",)),
    "weights": _Command("show the weights that TF-IDF gives the tokens of your own text", ("eval", "report")),
    "probe": _Command("make a probe file from your own text; audit a model with it", ("eval", "report")),
    "tasks": _Command("print the folder of our tasks, for lm_eval --include_path", ()),
    "validate": _Command("check a config without running it", ("torchtune",)),
}
_TORCHTUNES = {
    "run": _Command("run a recipe with a config, on one process or many", ("torchtune",)),
    "ls": _Command("list recipes and configs", ("torchtune",)),
    "cp": _Command("copy a recipe or config to edit it", ("torchtune",)),
    "cat": _Command("print a config", ("torchtune",)),
    "download": _Command("download a model from the Hugging Face hub", ("torchtune",)),
}
_ALL = _OURS | _TORCHTUNES


def main() -> None:
    """Run the command line. The exit code is 130 after Ctrl-C and 141 if the reader of the output has closed it."""
    hook, sys.unraisablehook = sys.unraisablehook, _end_if_interrupted
    try:
        with ended_by([signal.SIGINT], lambda name: None):
            try:
                _run_command(sys.argv[1:])
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at exit
        sys.exit(128 + signal.SIGPIPE)
    finally:
        sys.unraisablehook = hook


def _end_if_interrupted(unraisable: "sys.UnraisableHookArgs") -> None:
    """Handle a Ctrl-C inside a callback of the import system, where Python would only print and ignore it."""
    if unraisable.exc_type is KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)
    sys.__unraisablehook__(unraisable)


def _run_command(arguments: Sequence[str]) -> None:
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help"):
        print(f"usage: tfidf-tune [--version] COMMAND ...\n\n{_list()}\ntfidf-tune COMMAND --help says more.")
    elif command == "--version":
        print(f"tfidf-tune {tfidf_tune.__version__}")
    elif command not in _ALL:
        close = difflib.get_close_matches(command, _ALL, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        print(f"error: no command {command!r}{hint}\n\n{_list()}", file=sys.stderr)
        sys.exit(2)
    elif not _has_working_directory():
        sys.exit("error: the working directory does not exist any more: change to another one")
    else:
        _start(command, [*arguments[1:]])


def _list() -> str:
    def lines(commands: dict[str, _Command]) -> str:
        return "".join(f"  {name:<10} {command.purpose}\n" for name, command in commands.items())

    theirs = "commands of torchtune, which know our recipes and configs"
    return f"commands:\n{lines(_OURS)}\n{theirs}:\n{lines(_TORCHTUNES)}"


def _has_working_directory() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _start(command: str, arguments: list[str]) -> None:
    """Run a command. User-facing errors of our own commands are one message, without a traceback."""
    is_help = command in _OURS and command != "eval" and not {"-h", "--help"}.isdisjoint(arguments)
    if not is_help:
        require_extras(command, *_ALL[command].extras)
    if command in _TORCHTUNES:
        from tfidf_tune.commands._torchtune import run_torchtune

        run_torchtune(command, arguments)
        return
    replace_unencodable()
    module = import_module(f"tfidf_tune.commands.{command}")
    try:
        module.main(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {visible(str(error))}")
    except MemoryError as error:
        sys.exit(f"error: out of memory{f' ({error})' if str(error) else ''}: use less text or a smaller batch size")


if __name__ == "__main__":
    main()
