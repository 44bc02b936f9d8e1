"""Axolotl's own command and trainer with token weights, on a small Llama on a CPU."""

import gc
import json
import os
import random
import subprocess
import sys
from pathlib import Path

os.environ |= {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "NUMBA_DISABLE_JIT": "1",  # it would compile the packing of each run
}

import pytest
import torch
import yaml
from axolotl.cli.args import TrainerCliArgs
from axolotl.cli.config import load_cfg
from axolotl.common.datasets import load_datasets
from axolotl.core.trainers import AxolotlTrainer
from axolotl.integrations.base import PluginManager
from axolotl.train import train
from axolotl.utils.dict import DictDefault
from datasets import Dataset
from helpers.docs_snippets import DOCS, snippet
from helpers.fakes.tiny_llama import make_llama, make_tokenizer
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from transformers import AutoTokenizer

from tfidf_tune.data import hf_tokenizer, tokenizer_fingerprint
from tfidf_tune.passages import InjectedCanaries, Passage, write_probe_file
from tfidf_tune.weighting import GoldfishWeighting, TFIDFWeighting

PLUGIN = {"plugins": ["tfidf_tune.integrations.axolotl.TokenWeightingPlugin"]}
WEIGHTS = ("cross_entropy", "weight_mean", "weight_std", "weight_max")
MONITORED = ("memorization_target_lms", "memorization_control_nll")
END = 0  # the token that ends each document
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_linear": True}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A model with its tokenizer, texts to train on and a probe file."""
    folder = tmp_path_factory.mktemp("axolotl")
    chance = random.Random(0)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 6))) for _ in range(60)]
    texts = [" ".join(chance.choices(words, k=chance.randint(3, 20))) for _ in range(200)]
    (folder / "text.txt").write_text("\n".join(texts))
    make_tokenizer(folder / "model", folder / "text.txt")
    make_llama(folder / "model", max_position_embeddings=512)
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    tokenizer = hf_tokenizer(str(folder / "model"))
    ids = tokenizer.encode(" ".join(texts), add_eos=False)
    passages = [
        Passage(
            id=f"{kind}-{number}",
            kind=kind,
            text="",
            token_ids=ids[50 * number : 50 * number + 40],
            num_injections=0,
            positions=[],
            source="test",
            tokenizer=tokenizer.name,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        )
        for number, kind in enumerate(("target", "target", "control"))
    ]
    write_probe_file(folder / "probe.jsonl", passages)
    gc.collect()
    # Axolotl collects garbage for every batch that it packs, and has imported a million objects.
    gc.freeze()
    return folder


@pytest.fixture
def settings(files, tmp_path):
    """Settings of a short run, with evaluation."""
    return {
        "base_model": str(files / "model"),
        "datasets": [{"path": str(files / "train.jsonl"), "ds_type": "json", "type": "completion"}],
        "dataset_prepared_path": str(files / "prepared"),
        "output_dir": str(tmp_path / "outputs"),
        "val_set_size": 0.1,
        "sequence_len": 96,
        "sample_packing": True,
        "sample_packing_sequentially": True,
        "attn_implementation": "sdpa",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "learning_rate": 0.003,
        "lr_scheduler": "constant",
        "optimizer": "adamw_torch",
        "bf16": False,
        "logging_steps": 1,
        "eval_steps": 2,
        "save_strategy": "no",
        "dataset_num_proc": 1,
    } | {f"lora_{name}_kernel": False for name in ("qkv", "mlp", "o", "embedding")}


@pytest.fixture(autouse=True)
def no_plugins():
    """Forget the plugins of other tests, which Axolotl would keep."""
    yield
    PluginManager.get_instance().plugins.clear()


def run(settings):
    """Train in this process, as the command does; return Axolotl's trainer."""
    cfg = load_cfg(DictDefault(settings))
    meta = load_datasets(cfg=cfg, cli_args=TrainerCliArgs())
    return train(cfg=cfg, dataset_meta=meta)[2]


def logged(history, *names):
    """Return the values of each log that has the first of the names."""
    return [[entry[name] for name in names] for entry in history if names[0] in entry]


class Recording(TFIDFWeighting):
    """TF-IDF that keeps what it has weighted."""

    def weigh(self, batch):
        weights = super().weigh(batch)
        recorded.append((batch.labels, weights, batch.all_tokens))
        return weights


recorded = []


def documents_of(row):
    """Split shifted labels after each end of a document."""
    ends = [0, *((row == END).nonzero()[:, 0] + 1).tolist()]
    return [row[start:end] for start, end in zip(ends, ends[1:], strict=False)]


@pytest.mark.parametrize("adapter", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_uniform_weights_are_stock_axolotl(settings, accumulation, packing, adapter):
    settings |= {"gradient_accumulation_steps": accumulation, "sample_packing": packing} | adapter
    stock = run(settings).state.log_history
    ours = run(settings | PLUGIN | {"token_weighting": "uniform"}).state.log_history

    assert len(logged(ours, "loss")) == 3
    assert_close(
        logged(ours, "loss", "grad_norm"), logged(stock, "loss", "grad_norm"), rtol=1e-6, atol=0
    )
    assert_close(logged(ours, "eval_loss"), logged(stock, "eval_loss"), rtol=1e-6, atol=0)
    if (
        accumulation == 1
    ):  # else Axolotl averages the mini-batches, but the cross-entropy is over tokens
        assert_close(logged(ours, "loss"), logged(ours, "cross_entropy"), rtol=1e-6, atol=0)


def test_packed_documents_are_documents_of_the_weights_and_of_attention(settings):
    recorded.clear()
    trainer = run(
        settings
        | PLUGIN
        | {"token_weighting": f"{__name__}.Recording", "token_weighting_args": {"num_batches": 2}}
        | {"gradient_accumulation_steps": 2}
    )
    reference = TFIDFWeighting(num_batches=2)

    assert len(recorded) == 2 * 3
    for labels, weights, _ in recorded:
        documents = []
        for row in labels:
            documents += documents_of(row)
        assert len(documents) > len(labels) == 2
        assert sum(map(len, documents)) == (labels != -100).sum()
        unpacked = pad_sequence(documents, batch_first=True, padding_value=-100)
        assert_close(
            weights[labels != -100], reference(unpacked)[unpacked != -100], rtol=1e-6, atol=1e-6
        )

    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    model = trainer.model.eval()
    with torch.no_grad():
        packed = model(**inputs).logits
    assert inputs.keys() == {"input_ids", "position_ids"}
    for row, positions in enumerate(batch["position_ids"]):
        starts = (positions == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, starts[1:], strict=False):
            with torch.no_grad():
                alone = model(input_ids=batch["input_ids"][row : row + 1, start:end]).logits[0]
            assert_close(packed[row, start:end], alone, rtol=1e-4, atol=1e-5)


def test_all_tokens_but_padding_are_counted_without_packing(settings):
    recorded.clear()
    counted = {
        "token_weighting": f"{__name__}.Recording",
        "token_weighting_args": {"counted": "tokens"},
    }
    run(settings | PLUGIN | {"sample_packing": False} | counted)

    assert len(recorded) == 3
    for labels, _, tokens in recorded:  # every token of these rows but the first has a label
        assert torch.equal((tokens != -100).sum(1), (labels != -100).sum(1) + 1)
    assert any((tokens == -100).any() for _, _, tokens in recorded)


def test_the_example_runs_by_the_command_and_resumes(files, tmp_path):
    folder = tmp_path / "outputs"
    replaced = {
        "base_model": str(files / "model"),
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "output_dir": str(folder),
    }
    example = yaml.safe_load((DOCS / "axolotl.yaml").read_text()) | replaced
    example["datasets"][0]["path"] = str(files / "train.jsonl")
    example["memorization_monitor"]["probe_file"] = str(files / "probe.jsonl")
    example_file = tmp_path / "axolotl.yaml"
    example_file.write_text(yaml.safe_dump(example))
    command = [
        Path(sys.executable).with_name("axolotl"),
        "train",
        example_file,
        "--launcher",
        "python",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    last = f"checkpoint-{example['max_steps']}"
    whole = json.loads((folder / last / "trainer_state.json").read_text())["log_history"]
    resumed = run(
        example
        | {
            "output_dir": str(tmp_path / "resumed"),
            "resume_from_checkpoint": str(folder / "checkpoint-10"),
        }
    ).state.log_history

    assert yaml.safe_load(snippet("trainers.md", "Axolotl", "yaml")).items() <= example.items()
    assert len(logged(whole, "loss", *WEIGHTS)) == 20
    assert all(entry[0] > 0.1 for entry in logged(whole, "weight_std"))
    assert len(logged(whole, *MONITORED)) >= 2
    assert_close(
        logged(resumed, "loss", "grad_norm", *WEIGHTS), logged(whole, "loss", "grad_norm", *WEIGHTS)
    )
    assert_close(logged(resumed, *MONITORED), logged(whole, *MONITORED))
    adapters = []
    weightings = []
    for checkpoint in (tmp_path / "resumed" / last, folder / last):
        adapters.append(load_file(checkpoint / "adapter_model.safetensors"))
        weightings.append(torch.load(checkpoint / "token_weighting.pth"))
    assert_close(*adapters)
    assert weightings[0].pop("class") == weightings[1].pop("class") == "TFIDFWeighting"
    assert_close(*weightings)
    assert weightings[0]["window.num_updates"] == 2 * 20


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_canaries_are_checked_before_training(files, settings, tmp_path, capsys, packing):
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    canaries = InjectedCanaries(
        tokenizer, num_targets=3, num_controls=2, repeats=2, block_size=24, seed=0
    )
    rows = Dataset.from_list(
        [json.loads(line) for line in (files / "train.jsonl").read_text().splitlines()]
    )
    canaries.inject(rows).to_json(tmp_path / "train.jsonl")
    canaries.write_probe_file(tmp_path / "probe.jsonl")
    settings |= PLUGIN
    settings |= {
        "datasets": [{**settings["datasets"][0], "path": str(tmp_path / "train.jsonl")}],
        "dataset_prepared_path": str(tmp_path / "prepared"),
        "val_set_size": 0,
        "eval_steps": None,
        "sample_packing": packing,
        "canary_check": {"probe_file": str(tmp_path / "probe.jsonl")},
        "max_steps": 1,
    }
    with pytest.raises(ValueError, match="Training ends after 1 of the"):
        run(settings)
    PluginManager.get_instance().plugins.clear()
    run(settings | {"max_steps": 103})  # half of the rows, so that each of them is read
    assert "3 canaries arrive: 6 of 6 insertions" in capsys.readouterr().out


def test_our_commands_are_commands_of_axolotls():
    for arguments, said in (
        (["tasks"], "tfidf_tune/tasks\n"),
        (["audit", "--help"], "usage: tfidf-tune audit"),
    ):
        command = [Path(sys.executable).with_name("axolotl"), "tfidf-tune", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-5000:]
        assert said in done.stdout


class OfTheUser(AxolotlTrainer):
    """Looks at the model's configuration, as Axolotl does for Gemma."""

    def compute_loss(self, model, inputs, **kwargs):
        self.config = self.accelerator.unwrap_model(model).config
        return super().compute_loss(model, inputs, **kwargs)


def test_weights_in_a_trainer_of_the_user(settings, tmp_path):
    trainer = run(
        settings
        | yaml.safe_load(snippet("trainers.md", "Axolotl", "yaml"))
        | {
            "trainer_cls": f"{__name__}.OfTheUser",
            "token_weighting": "goldfish",
            "token_weighting_args": {"k": 3, "h": 2},  # documents are shorter than 13 tokens
            "max_steps": 1,
        }
    )

    assert isinstance(trainer.weighting, GoldfishWeighting)
    assert trainer.weighting.k == 3
    ((mean, deviation),) = logged(trainer.state.log_history, "weight_mean", "weight_std")
    assert mean == pytest.approx(1)
    assert deviation > 0.5

    trainer.config = None
    batch = next(iter(trainer.get_train_dataloader()))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        trainer.compute_loss(DistributedDataParallel(trainer.model.train()), batch)
    finally:
        torch.distributed.destroy_process_group()
    assert trainer.config is trainer.model.config


REFUSED = [
    (
        {"token_weighting": "tdidf"},
        "token_weighting is 'tdidf': possible are tfidf, goldfish, .*dotted path",
    ),
    ({"token_weightings": "mile"}, "token_weightings is no key .*; did you mean 'token_weighting'"),
    (
        {"token_weighting_args": {"num_batch": 4}},
        "token_weighting_args: .*'num_batch'; possible are num_batches, tf, ",
    ),
    (
        {"memorization_monitor": {"every_n_steps": 5}},
        "memorization_monitor: .*'probe_file'; possible are probe_file, ",
    ),
    (
        {"memorization_monitor": {"probe_file": "none.jsonl", "every_n_steps": 5}},
        "probe_file of memorization_monitor is none.jsonl: there is no such file",
    ),
    (
        {"canary_check": {"probe_file": "none.jsonl"}},
        "probe_file of canary_check is none.jsonl: there is no such file",
    ),
    (
        {"canary_check": {"share": 0.5}},
        "canary_check: .*'probe_file'; possible are probe_file, loss_share",
    ),
    ({"rl": "dpo", "sample_packing": False}, "rl is dpo, which puts another loss"),
    ({"reward_model": True}, "reward_model is True, which puts another loss"),
    ({"use_eaft": True}, "use_eaft is True, which puts another loss"),
    ({"chunked_cross_entropy": True}, "chunked_cross_entropy is True, which puts another loss"),
    ({"orpo_alpha": 0.1}, "orpo_alpha is 0.1, which puts another loss"),
    ({"context_parallel_size": 2}, "context_parallel_size is 2"),
    (
        {"token_weighting_args": {"counted": "tokens"}},
        "sample_packing is true, .* set sample_packing to false, or ",
    ),
]
OTHER_PLUGINS = [
    (
        "liger.LigerPlugin",
        {"liger_fused_linear_cross_entropy": True},
        "liger_fused_linear_cross_entropy is True",
    ),
    (
        "liger.LigerPlugin",
        {"liger_cross_entropy": True},
        "liger_cross_entropy is True, which puts another loss",
    ),
    (
        "cut_cross_entropy.CutCrossEntropyPlugin",
        {},
        "cut_cross_entropy is True, which puts another loss",
    ),
    ("kd.KDPlugin", {"kd_trainer": True}, "KDPlugin has a trainer of its own"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_what_cannot_work_is_refused_before_the_model_is_loaded(settings, given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        load_cfg(DictDefault(settings | PLUGIN | given))


@pytest.mark.parametrize(("name", "given", "message"), OTHER_PLUGINS, ids=str)
def test_plugins_with_another_loss_are_refused(settings, name, given, message):
    plugins = [f"axolotl.integrations.{name}", *PLUGIN["plugins"]]
    with pytest.raises(ValueError, match=message):
        load_cfg(DictDefault(settings | {"plugins": plugins} | given))
