"""The first hour with one's own text: one command trains, and the commands that it prints work as
they are.
"""

import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from helpers.fakes.tiny_llama import TINY_LLAMA
from helpers.fakes.tiny_run import write_documents
from helpers.processes.recipes import run_command as run_forked
from omegaconf import OmegaConf

from tfidf_tune._processes import OWN_COMMAND
from tfidf_tune.corpus.advice import DOCUMENTS, FRAME, NOTHING, STRETCHES
from tfidf_tune.data import hf_tokenizer, load_documents
from tfidf_tune.passages import read_probe_file
from tfidf_tune.results import import_results
from tfidf_tune.training import _entry, _next_steps

SIZES = ", ".join(f"{key}: {value}" for key, value in TINY_LLAMA.items())
ADAPTERS = "lora_attn_modules: [q_proj, v_proj], lora_rank: 8, lora_alpha: 16"
LORA = f"model={{_component_: torchtune.models.llama2.lora_llama2, {ADAPTERS}, {SIZES}}}"
FULL = f"model={{_component_: torchtune.models.llama2.llama2, {SIZES}}}"


@pytest.fixture
def command(run_command, only_our_tasks, monkeypatch, capfd, tmp_path):
    """Run a command in a folder with texts; return what it printed."""
    folder = tmp_path / "my folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    texts = write_documents(folder / "texts.txt").read_text().split("\n")
    for name, part in (("my_texts", texts[:30]), ("held_out", texts[30:])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part)
        )

    def run(*arguments):
        capfd.readouterr()
        run_command(*arguments)
        return "".join(capfd.readouterr())

    run.folder = folder
    return run


def printed_commands(output):
    return [words[1:] for words in next_commands(output) if words[0] == "tfidf-tune"]


def next_commands(output):
    return [
        shlex.split(line)
        for line in output.splitlines()
        if line.startswith(("  tfidf-tune ", "  tune "))
    ]


def run_in_shell(script, folder):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-euxc", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended


def test_three_commands_lead_from_a_text_to_a_verdict(
    command, run_command, tiny_checkpoint, monkeypatch
):
    """The baseline, then weights: the third, which compares them, is run by the second. The
    baseline is with a copy.
    """
    setup = [
        "--config",
        "mine/lora",
        f"checkpointer.checkpoint_dir={tiny_checkpoint}",
        "dataset.source=my_texts.jsonl",
        LORA,
        "epochs=1",
        "evaluate=true",
    ]

    def in_this_process(arguments, **_):  # which saves the imports
        run_command(*arguments[len(OWN_COMMAND) :])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(_entry, "subprocess", SimpleNamespace(run=in_this_process))
    command("cp", "lora_finetune", "mine.py")
    baseline = command("run", "./mine.py", *setup, "loss=ce", "output_dir=runs/mine_lora_ce")
    (train,) = printed_commands(baseline)
    # As the advice for this text says.
    assert train == ["run", "./mine.py", *setup, "loss=repetition", "output_dir=runs/mine_lora"]
    evaluated = baseline.index("$ tfidf-tune eval runs/mine_lora_ce\n")
    assert evaluated < baseline.index("Next:\n")  # what is left is last

    output = command("run", "lora_finetune", *setup)

    for name, printed in (("mine_lora_ce", baseline), ("mine_lora", output)):
        run = command.folder / "runs" / name
        passages = read_probe_file(run / "probe.jsonl")
        number = len(passages) // 2
        found = re.search(
            rf"Data: 30 documents, (\d+) blocks of 64 tokens \(\S+ tokens\); {number} targets of \d+ tokens, each "
            rf"\d+( to \d+)? times? in the text; {number} controls, held out\n",
            printed,
        )
        num_steps = len((run / "metrics.jsonl").read_text().splitlines())
        assert num_steps == math.ceil(int(found[1]) / 4)
        assert f"Training: {num_steps} steps (1 epoch)\n" in printed
        names = ", ".join(f"checkpoint_{percent}pct" for percent in (25, 50, 75, 100))
        assert f"Checkpoints in runs/{name}: {names}\n" in printed
        held_out = [
            json.loads(line)["text"] for line in (run / "held_out.jsonl").read_text().splitlines()
        ]
        assert held_out == [passage.text for passage in passages if passage.kind == "control"]
        assert not [
            noise
            for noise in ("Custom kwargs", "not a git repository", "cpp ext")
            if noise in printed
        ]
    assert printed_commands(output) == []
    assert "$ tfidf-tune compare runs/mine_lora_ce runs/mine_lora\n" in output
    report = " ".join(output.split())
    assert "# Repetition against CE" in report
    assert "its perplexity is" in report

    # The same again: nothing is trained or evaluated a second time.
    results = {path: path.stat().st_mtime_ns for path in Path("runs").rglob("results_*.json")}
    again = command("run", "lora_finetune", *setup, "resume_from_checkpoint=True")
    assert "the run is finished: all " in again
    assert "all models of runs/mine_lora are evaluated already: runs/mine_lora/evaluation" in again
    setup.remove("evaluate=true")
    unasked = command("run", "lora_finetune", *setup, "resume_from_checkpoint=True")
    assert "Evaluation in runs/mine_lora/evaluation\n" in unasked
    assert printed_commands(unasked) == [["compare", "runs/mine_lora_ce", "runs/mine_lora"]]
    assert results == {
        path: path.stat().st_mtime_ns for path in Path("runs").rglob("results_*.json")
    }


def test_the_printed_commands_evaluate_the_passages_of_every_data_set(command, tiny_checkpoint):
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "her", "dog", "ran"]
    orders = [random.Random(seed).sample(words, len(words)) for seed in range(40)]
    rows = [{"prompt": "say it ", "completion": " ".join(order)} for order in orders]
    (command.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = {
        "_component_": "tfidf_tune.data.text_blocks_dataset",
        "source": "my_texts.jsonl",
        "block_size": 32,
        "holdout": 0.1,
        "probe_file": "${output_dir}/text.jsonl",
    }
    answers = {
        "_component_": "tfidf_tune.data.sft_dataset",
        "source": "rows.jsonl",
        "targets": "random",
        "num_targets": 12,
        "num_controls": 12,
        "min_target_tokens": 8,
        "probe_file": "${output_dir}/answers.jsonl",
    }
    config = {
        "base": "mine/full",
        "dataset": [text, answers],
        "output_dir": "runs/both",
        "max_steps": 1,
    }
    OmegaConf.save(config, command.folder / "both.yaml")
    model = [f"checkpointer.checkpoint_dir={tiny_checkpoint}", FULL]
    output = command("run", "full_finetune", "--config", "both.yaml", *model)

    run = command.folder / "runs" / "both"
    every = read_probe_file(run / "all_passages.jsonl")
    parts = [read_probe_file(run / name) for name in ("text.jsonl", "answers.jsonl")]
    assert [one.token_ids for one in every] == [
        one.token_ids for one in itertools.chain.from_iterable(parts)
    ]
    held_out = [
        json.loads(line)["text"] for line in (run / "held_out.jsonl").read_text().splitlines()
    ]
    assert held_out == [one.text for one in parts[0] if one.kind == "control"]
    evaluate, train = printed_commands(output)
    command(*evaluate)
    asked = {
        sample.passage_id
        for sample, _ in import_results([run / "evaluation"]).checkpoints[0].samples
    }
    assert asked == {one.id for one in every}
    evaluate, compare = printed_commands(command(*train))
    assert compare == ["compare", "runs/both_ce", "runs/both"]
    command(*evaluate)
    assert "# Repetition against CE" in command(*compare)
    audit = command("probe", "audit", "--results", "runs/both/evaluation", "--accept-unproven")
    assert "The page: " in audit
    again = command(
        "probe",
        "audit",
        "runs/both/checkpoint_100pct",
        "--probe-file",
        "runs/both/all_passages.jsonl",
        "--prefix-lengths",
        "8",
        "--accept-unproven",
    )
    assert "The page: " in again


def test_the_commands_that_are_printed_after_each_run_lead_to_a_verdict_and_are_never_refused(
    command, tiny_checkpoint, monkeypatch, tmp_path
):
    """In the folder "." and in others without a name of their own; the command is not
    on the PATH.
    """
    setup = [
        "run",
        "full_finetune",
        "--config",
        "mine/full",
        f"checkpointer.checkpoint_dir={tiny_checkpoint}",
        f"dataset.source={command.folder / 'my_texts.jsonl'}",
        FULL,
        "max_steps=2",
        "save_at_percent=[100]",
        "save_every_n_steps=1",
        "keep_last_n_checkpoints=2",
    ]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    script = str(Path(sys.executable).with_name("tfidf-tune"))

    def printed_by(*arguments):
        """The commands that a run prints, all of them with the path by which it was started."""
        lines = [
            shlex.split(line) for line in command(*arguments).splitlines() if line.startswith("  /")
        ]
        assert {words[0] for words in lines} == {script}
        return [words[1:] for words in lines]

    (command.folder / "run").mkdir()
    monkeypatch.chdir(command.folder / "run")
    repetition = (
        "{_component_: tfidf_tune.loss.WeightedCrossEntropyLoss, weighting: {_component_: "
        "WEIGHTING}}"
    )
    loss = "loss=" + repetition.replace("WEIGHTING", "tfidf_tune.weighting.RepetitionWeighting")
    _, train = printed_by(*setup, loss, "output_dir=.")
    baseline = command.folder / "run_ce"
    assert train == [*setup, "loss=ce", f"output_dir={baseline}"]
    of_baseline, of_first, compare = printed_by(*train)
    assert compare == ["compare", str(baseline), str(command.folder / "run")]
    # A run that has begun and is not trained is resumed, with its own objective.
    shutil.copytree(command.folder / "run", tmp_path / "begun" / "run")
    shutil.rmtree(tmp_path / "begun" / "run" / "checkpoint_100pct")
    shutil.rmtree(tmp_path / "begun" / "run" / "resume" / "step_2")
    _, begun = printed_by(*train[:-1], f"output_dir={tmp_path / 'begun' / 'run_ce'}")
    assert begun[-1] == "resume_from_checkpoint=True"
    of_begun = printed_by(*begun)
    # A command for the other run would begin it.
    assert "resume_from_checkpoint=True" not in itertools.chain.from_iterable(of_begun)
    written = OmegaConf.load(tmp_path / "begun" / "run" / "config.yaml").loss
    assert written == OmegaConf.load("config.yaml").loss
    for evaluation in (of_baseline, of_first):
        command(*evaluation)
    assert "# Repetition against CE" in command(*compare)
    # Whatever the folder is called, and even if files beside it cannot be read.
    (command.folder / "_ce_weighted").mkdir()
    (command.folder / "_ce_weighted" / "config.yaml").write_text("a: [")
    _, train = printed_by(*setup, "loss=ce", "output_dir=../_ce")
    assert train[-1] == "output_dir=../_ce_weighted"
    # Where nothing repeats, cross-entropy needs no other model.
    monkeypatch.setattr(_next_steps, "advised_setting", lambda cfg: NOTHING.setting)
    evaluate, audit = printed_by(*setup, "loss=ce", "output_dir=alone_ce")
    assert evaluate == ["eval", "alone_ce"]
    results = ["--results", "alone_ce/evaluation", "--output-dir", "alone_ce/audit"]
    assert audit == ["probe", "audit", *results]


def test_the_other_model_of_a_baseline_is_what_the_advice_names(tmp_path):
    for advice, settings in (
        (DOCUMENTS, ["dataset.deduplicate=minhash", "loss=ce"]),
        (STRETCHES, ["loss=repetition"]),
        (FRAME, ["loss=ce", "dataset.deduplicate=minhash"]),
    ):
        found = _next_steps._settings_of_other(
            tmp_path / "x", ["run", "--config", "mine/lora"], advice.setting, is_baseline=True
        )
        assert found == [*settings, f"output_dir={tmp_path / 'x'}"]


@pytest.mark.parametrize(
    ("folder", "other"),
    [
        ("/", "/_ce"),
        ("..", "/a_ce"),
        ("x/..", "/a/b_ce"),
        ("x/_ce", "x/_ce_ce"),
        ("x", "x_ce"),
        ("x_dedup", "x_ce"),
    ],
)
def test_the_other_model_has_a_folder_beside_any_folder(monkeypatch, folder, other):
    monkeypatch.setattr(Path, "resolve", lambda self: Path(os.path.normpath(Path("/a/b") / self)))
    assert str(_next_steps._other_folder(Path(folder), is_baseline=False)) == other


def test_answers_are_asked_for_once_by_the_command_that_a_run_prints(command, tiny_checkpoint):
    """Prefix lengths do not count for them."""
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "her", "dog", "ran"]
    orders = [random.Random(seed).sample(words, len(words)) for seed in range(10)]
    rows = [{"prompt": "say it ", "completion": " ".join(order)} for order in orders]
    (command.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = command(
        "run",
        "full_finetune",
        "--config",
        "mine/full_chat",
        f"checkpointer.checkpoint_dir={tiny_checkpoint}",
        FULL,
        "dataset.source=rows.jsonl",
        "dataset.max_seq_len=64",
        "dataset.num_controls=2",
        "dataset.targets=random",
        "dataset.num_targets=2",
        "dataset.min_target_tokens=8",
        "max_steps=1",
    )
    evaluate, train = printed_commands(output)
    assert evaluate == ["eval", "runs/mine_full_chat"]
    assert train[:2] == ["run", "full_finetune"]
    assert train[-2:] == ["loss=ce", "output_dir=runs/mine_full_chat_ce"]
    command(*evaluate)
    # Of two controls.
    results = [
        "--results",
        "runs/mine_full_chat/evaluation",
        "--accept-unproven",
    ]
    assert "The page: " in command("probe", "audit", *results)


@pytest.mark.skipif(
    not version("torchao").startswith("0.15"), reason="torchtune's own command needs torchao 0.15"
)
def test_the_commands_of_torchtune_and_the_harness_in_readme_run_as_they_stand(
    command, tiny_checkpoint
):
    """A tiny checkpoint takes the place of each model, and texts the place of what is on the hub.

    Each command in a fork that has the imports, as its script would start it.
    """
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    (block,) = (
        block
        for block in re.findall(r"^```bash\n(.*?)^```", readme, re.M | re.S)
        if "\nlm_eval " in block
    )
    small = (
        "dataset.source=my_texts.jsonl dataset.num_targets=2 dataset.block_size=64 "
        "dataset.min_target_tokens=64"
    )
    hub = "dataset.target_source=null dataset.num_base=-1 dataset.layout=concatenated"
    tiny = (
        f"checkpointer.checkpoint_dir={tiny_checkpoint} '{LORA}' max_steps=1 save_at_percent=[100] "
        "device=cpu"
    )
    script = block.replace("EleutherAI/pythia-1.4b", str(tiny_checkpoint))
    script = re.sub(r"(?m)^(tune run (?:.*\\\n)*.*)$", rf"\1 {tiny}", script)
    script = script.replace("1.1B_lora_memorization", f"1.1B_lora_memorization {small} {hub}")
    script = script.replace(
        "--tasks tfidf_memorization_p50", "--tasks tfidf_memorization_prefixes --device cpu"
    )
    script = script.replace("probe.jsonl", "probe.jsonl 'prefix_lengths=[16]'")
    script = script.replace('"$(tfidf-tune tasks)"', command("tasks").strip())
    typed = [shlex.split(line) for line in script.replace("\\\n", "").splitlines()]
    functions = {"tune": "torchtune._cli.tune:main", "lm_eval": "lm_eval.__main__:cli_evaluate"}
    folder = Path(sys.executable).parent
    path = f"{folder}:{os.environ['PATH']}"
    for name, *arguments in typed:
        ended = run_forked(
            functions[name], arguments, command.folder, script=folder / name, PATH=path
        )
        assert ended.codes == [0], ended.output[-3000:]
    runs = command.folder / "runs"
    assert {path.name for path in runs.iterdir()} == {
        "tinyllama_1.1B_lora_memorization",
        "mine_lora",
    }
    assert "|tfidf_memorization_prefixes|" in ended.output  # of all commands
    baselines = [words for words in next_commands(ended.output) if words[0] == "tune"]
    for printed, words, name in zip(
        baselines, typed[:2], ("tinyllama_1.1B_lora_memorization", "mine_lora"), strict=True
    ):
        assert printed == [*words, "loss=ce", f"output_dir=runs/{name}_ce"]


def test_the_commands_that_a_run_of_several_processes_prints_run_as_they_stand(
    command, run_command, tiny_checkpoint
):
    """With a recipe in a folder, and paths that a shell, the harness and YAML would take apart."""
    output_dir = 'runs/it\'s "a", b [1] ü'
    command("cp", "full_finetune", "own recipes/mine.py", "--make-parents")
    setup = [
        "tfidf-tune",
        "run",
        "--nproc_per_node",
        "2",
        "own recipes/mine.py",
        "--config",
        "mine/full",
        f"checkpointer.checkpoint_dir={tiny_checkpoint}",
        "dataset.source=my_texts.jsonl",
        FULL,
        "max_steps=1",
        "save_at_percent=[100]",
        "keep_last_n_checkpoints=0",
        "device=cpu",
    ]
    typed = shlex.join([*setup, f"output_dir={output_dir}"])
    evaluate, train = next_commands(run_in_shell(typed, command.folder).stderr)
    assert train == [*setup, "loss=ce", f"output_dir={output_dir}_ce"]
    run_command(*evaluate[1:], "--limit", "2")

    run = command.folder / output_dir
    entry = json.loads((run / "metrics.jsonl").read_text())
    config = OmegaConf.load(run / "config.yaml")
    assert entry["num_sequences"] == 2 * config.batch_size * config.gradient_accumulation_steps
    (results,) = (run / "evaluation" / "checkpoint_100pct").rglob("results_*.json")
    recorded = json.loads(results.read_text())["configs"]["tfidf_memorization_prefixes"][
        "metadata"
    ]["run"]
    assert (recorded["folder"], recorded["num_sequences"]) == (str(run), entry["num_sequences"])


@pytest.mark.skipif(
    version("trl").startswith("1.14."),
    reason="TRL 1.14 needs loss_type='nll', see docs/trainers.md",
)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's
def test_the_trainer_of_readme_runs_as_it_stands(command, tiny_checkpoint):
    readme = Path(__file__).parents[1].joinpath("README.md").read_text()
    (block,) = (
        block
        for block in re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
        if "SFTTrainer" in block
    )
    (command.folder / "my_model").symlink_to(tiny_checkpoint)
    names = {
        "dataset": datasets.Dataset.from_list(
            [{"text": "the old sailor"}, {"text": "a quiet child painted"}]
        )
    }
    exec(block, names)
    assert names["trainer"].state.global_step == 3


def test_all_weights_can_be_trained_the_same_way(command, tiny_checkpoint):
    arguments = [
        f"checkpointer.checkpoint_dir={tiny_checkpoint}",
        "dataset.source=my_texts.jsonl",
        FULL,
        "max_steps=2",
    ]
    output = command("run", "full_finetune", "--config", "mine/full", *arguments)
    assert "Training: 2 steps (3 epochs, max_steps 2)\n" in output
    assert "Checkpoints in runs/mine_full: checkpoint_50pct, checkpoint_100pct\n" in output


def test_without_a_holdout_all_of_the_text_is_trained_on_and_nothing_is_measured(
    command, tiny_checkpoint
):
    arguments = [
        f"checkpointer.checkpoint_dir={tiny_checkpoint}",
        "dataset.source=my_texts.jsonl",
        FULL,
        "max_steps=1",
    ]
    output = command(
        "run", "full_finetune", "--config", "mine/full", *arguments, "dataset.holdout=0"
    )
    tokenizer = hf_tokenizer(str(tiny_checkpoint))
    num_tokens = sum(
        len(tokenizer.encode(text, add_bos=False)) for text in load_documents("my_texts.jsonl")
    )
    assert f"Data: 30 documents, {num_tokens // 64} blocks of 64 tokens" in output
    assert not {"probe.jsonl", "held_out.jsonl"} & {
        path.name for path in (command.folder / "runs/mine_full").iterdir()
    }
    assert printed_commands(output) == []

    run = command.folder / "runs" / "mine_full"
    config = OmegaConf.load(run / "config.yaml")
    assert (config.device, config.dtype) == (
        ("cuda", "bf16") if torch.cuda.is_available() else ("cpu", "fp32")
    )
    assert config.keep_last_n_checkpoints == 1
    assert list(config.loss.weighting) == ["_component_"]
    comments = [
        line for line in (run / "config.yaml").read_text().splitlines() if line.startswith("# ")
    ]
    assert {"# loss.weighting.min_length: 50", '# checkpointer.max_shard_size: "5GB"'} <= set(
        comments
    )
    assert not [
        line for line in comments if line.startswith(("# optimizer.lr:", "# dataset.num_base:"))
    ]
