"""The demo: which commands it prints and runs, and what it does a second time."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from lm_eval._cli.utils import MergeDictAction

from tfidf_tune._processes import OWN_COMMAND, harness_settings
from tfidf_tune.commands import demo
from tfidf_tune.training import FinetuneConfig, check_config, load_config


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Run the demo in an empty folder; its commands only leave the files that they end with.
    Returns the commands.
    """
    monkeypatch.chdir(tmp_path)
    commands = []

    class Ended:
        """A command that has ended as soon as it is started."""

        def __init__(self, command, *, stdout, stderr, env):
            assert command[: len(OWN_COMMAND)] == OWN_COMMAND
            name, *arguments = command[len(OWN_COMMAND) :]
            commands.append([name, *arguments])
            options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
            if name == "run" and "ends=3" not in arguments:
                for percent in (25, 100):
                    (tmp_path / options["output_dir"] / f"checkpoint_{percent}pct").mkdir(
                        parents=True
                    )
            if name == "eval":
                for checkpoint in (tmp_path / arguments[0]).glob("checkpoint_*pct"):
                    folder = tmp_path / arguments[0] / "evaluation" / checkpoint.name / "model"
                    folder.mkdir(parents=True)
                    (folder / "samples_tfidf_wikitext2_ppl_2026.jsonl").touch()
            if stdout is not None:
                stdout.write("the reason")
            self.returncode = 3 if "ends=3" in arguments else 0

        def poll(self):
            return self.returncode

    monkeypatch.setattr(subprocess, "Popen", Ended)
    monkeypatch.setattr(demo, "_SECONDS_BETWEEN_LOOKS", 0)
    monkeypatch.setattr(demo, "make_random_model", lambda folder: None)

    def start(*arguments):
        commands.clear()
        code = 0
        try:
            demo.main(list(arguments))
        except SystemExit as ended:
            code = ended.code
        return code, [*commands]

    return start


@pytest.mark.parametrize(
    "path", ["runs/a", "runs/a, b", "it's", '"x"', "a [1] {b} (c)", "c=d e", "ü#1"]
)
def test_settings_of_an_evaluation_are_read_back_by_the_harness(path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--metadata", nargs="+", action=MergeDictAction)
    settings = {"probe_file": path, "block_size": 64, "prefix_lengths": [16, 32]}
    assert parser.parse_args(["--metadata", *harness_settings(settings)]).metadata == settings


def test_the_demo_prints_what_it_runs_and_does_nothing_twice(ran, capsys):
    code, commands = ran("--seed", "7")

    printed = [
        line[2:].partition(" >")[0]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("$ ")
    ]
    assert sorted(printed) == sorted(shlex.join(["tfidf-tune", *command]) for command in commands)
    assert code == 0
    assert [command[0] for command in commands] == ["run"] * 4 + ["eval"] * 3 + ["compare"]
    assert commands[-1][1:4] == [
        f"Llama 650K:{name}=runs/demo/seed7/{folder}"
        for name, folder in (("CE", "ce"), ("TF-IDF", "tf-idf"), ("Repetition", "repetition"))
    ]
    assert ran("--seed", "7") == (0, commands[-1:])
    assert [command[0] for command in ran("--seed", "8")[1]] == ["run"] * 3 + ["eval"] * 3 + [
        "compare"
    ]


def test_an_interrupted_training_of_the_demo_begins_again(ran, tmp_path):
    start = tmp_path / "runs/demo/start"
    (start / "checkpoint_25pct").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"start is not of a demo that was interrupted"):
        ran()
    assert [*start.iterdir()]

    (start / "config.yaml").touch()
    assert len(ran()[1]) == 8
    assert not (start / "config.yaml").exists()


def test_the_configs_of_the_demo_are_valid(ran, tiny_checkpoint):
    trainings = [command for command in ran()[1] if command[0] == "run"]
    for _, recipe, _, config, _, *overrides in trainings:
        cfg = load_config(config, [f"checkpointer.checkpoint_dir={tiny_checkpoint}", *overrides])
        assert check_config(cfg, FinetuneConfig).epochs == (4 if config.endswith("start") else 1)
        assert recipe == "full_finetune"


def test_a_failing_command_ends_the_demo_with_its_code_and_last_lines(ran, capsys):
    assert ran("ends=3")[0] == 3
    assert capsys.readouterr().err.endswith("\nthe reason\n")  # after the bar
    assert len(ran("ends=3")[1]) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_demo_and_its_commands(tmp_path, number):
    """Of three commands that would never end, two are started; the first waits before it ends."""
    code = """
import signal, sys
from pathlib import Path
from tfidf_tune.commands import demo
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if the tests were started by nohup
waits = "import signal, sys, time\\n" \
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.2), sys.exit(143)))\\n" \
    "print('ready', flush=True)\\n" \
    "time.sleep(600)"
demo.OWN_COMMAND = [sys.executable, "-c", waits]
demo._run([(Path(name), [name]) for name in ("one", "two", "three")])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stderr=subprocess.PIPE,
        text=True,
    )
    logs = [tmp_path / "one", tmp_path / "two"]
    while not all(log.exists() and log.read_text() for log in logs):
        assert process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)

    _, printed = process.communicate()
    assert process.returncode == 128 + number
    assert printed.endswith(
        "the same command goes on from here; what is finished is not done again\n"
    )
    assert len(children) == 2
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "three").exists()


def test_a_second_signal_kills_the_commands_of_the_demo(monkeypatch):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "print(flush=True); time.sleep(600)",
        ],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    wait = process.wait
    answers = [SystemExit(143)]

    def interrupted():
        if answers:
            raise answers.pop()
        return wait()

    monkeypatch.setattr(process, "wait", interrupted)
    with pytest.raises(SystemExit):
        demo._end([process])
    assert process.returncode == -signal.SIGKILL
    process.stdout.close()
