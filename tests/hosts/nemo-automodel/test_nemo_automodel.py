"""NeMo AutoModel's own command and recipe with token weights, on a tiny Llama on a CPU.

The recipe builds its model on a CUDA device only, and resets CUDA's memory statistics: these two functions are
replaced. Data sets, training loop, validation and checkpoints are NeMo AutoModel's.
"""

import copy
import json
import random
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F
import yaml
from docs_snippets import snippet
from nemo_automodel.cli import app
from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
from nemo_automodel.recipes.llm import train_ft
from tiny_llama import make_llama, make_tokenizer
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tfidf_tune.integrations.nemo_automodel import TokenWeightedCrossEntropy, TokenWeightingRecipe
from tfidf_tune.weighting import MiLeWeighting, Predictions, TFIDFWeighting, UniformWeighting

NUM_STEPS, ACCUMULATED = 4, 2
OURS = yaml.safe_load(snippet("trainers.md", "NeMo AutoModel", "yaml"))
STOCK = {"recipe": "TrainFinetuneRecipeForNextTokenPrediction"}
TEXT = "the cat sat on the mat and the dog ran to the red house by the river"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and questions with answers of several lengths."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(" ".join([TEXT] * 20))
    make_tokenizer(make_llama(folder), folder / "text.txt")
    random.seed(0)
    rows = [{part: " ".join(random.choices(TEXT.split(), k=random.randint(2, 7))) for part in "qa"} for _ in range(16)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """Run the command ``automodel`` on a config; return what it logged in training and in validation."""
    torchrun = {"LOCAL_RANK": 0, "RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": "test"}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    models = []

    def build_model(cfg_model, *args, **kwargs):
        models.append(AutoModelForCausalLM.from_pretrained(cfg_model.pretrained_model_name_or_path))
        return models[-1]

    monkeypatch.setattr(train_ft, "build_model", build_model)

    def run(sections, name, *, validate=True, **overrides):
        data = {
            "_target_": "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset."
            "ColumnMappedTextInstructionDataset",
            "path_or_dataset_id": str(folder / "data.jsonl"),
            "column_mapping": {"question": "q", "answer": "a"},
            "answer_only_loss_mask": True,
        }
        loader = {
            "_target_": "torchdata.stateful_dataloader.StatefulDataLoader",
            "collate_fn": "nemo_automodel.components.datasets.utils.default_collater",
        }
        config = {
            "step_scheduler": {
                "global_batch_size": 2 * ACCUMULATED,
                "local_batch_size": 2,
                "ckpt_every_steps": 2,
                "val_every_steps": 1,
                "max_steps": NUM_STEPS,
            },
            "dist_env": {"backend": "gloo"},
            "model": {
                "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
                "pretrained_model_name_or_path": str(folder),
            },
            "checkpoint": {"enabled": True, "checkpoint_dir": str(tmp_path / name), "save_consolidated": False},
            "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
            "dataset": data,
            "dataloader": loader | {"shuffle": True},
            "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.3},
            "clip_grad_norm": {"max_norm": 100.0},
            "distributed": {"strategy": "ddp"},
        }
        if validate:
            config |= {"validation_dataset": data, "validation_dataloader": loader}
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(config | sections | overrides))
        for log in (tmp_path / name).glob("*.jsonl"):
            log.unlink()
        monkeypatch.setattr(sys, "argv", ["automodel", str(file)])
        try:
            app.main()
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
        logs = ((tmp_path / name / f"{kind}.jsonl") for kind in ("training", "validation"))
        training, validation = ([json.loads(line) for line in log.open()] if log.exists() else [] for log in logs)
        return (
            [(line["step"], line["loss"], line["grad_norm"]) for line in training],
            [line["val_loss"] for line in validation],
            models[-1].state_dict(),
        )

    return run


class SpecialTokens(UniformWeighting):
    """Uniform weights that keep the special tokens which they get."""

    found = None

    def set_special_tokens(self, token_ids):
        SpecialTokens.found = [*token_ids]


def with_weighting(**section):
    sections = copy.deepcopy(OURS)
    sections["loss_fn"]["weighting"] = section
    return sections


class ReferenceLoss(MaskedCrossEntropy):
    """TF-IDF by hand: labels are those that the loss gets."""

    def __init__(self):
        super().__init__()
        self.weighting = TFIDFWeighting(num_batches=16)

    def forward(self, logits, labels, num_label_tokens=None):
        each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        if num_label_tokens is None:
            return each.sum()
        return (each * self.weighting(labels)).sum() / num_label_tokens


def test_uniform_weights_are_the_stock_recipe(run):
    stock = run(STOCK, "stock")
    ours = run(with_weighting(_target_=f"{__name__}.SpecialTokens"), "ours")

    assert [step for step, *_ in ours[0]] == [*range(NUM_STEPS)]
    assert len(ours[1]) == NUM_STEPS
    assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    assert SpecialTokens.found == [0]  # <|endoftext|>


def test_weights_are_those_of_the_labels(run):
    reference = {"_target_": f"{__name__}.ReferenceLoss"}
    assert_close(run(OURS, "ours"), run(STOCK | {"loss_fn": reference}, "reference"), rtol=1e-5, atol=1e-6)


def test_validation_leaves_the_window_alone(run):
    validated, alone = (run(OURS, f"validate_{validate}", validate=validate) for validate in (True, False))

    assert validated[1]
    assert not alone[1]
    assert validated[0] == alone[0]


def test_a_resumed_run_is_identical(run, tmp_path):
    whole = run(OURS, "run")
    shutil.rmtree(tmp_path / "run" / f"epoch_0_step_{NUM_STEPS - 1}")
    resumed = run(OURS, "run")  # continues after the latest checkpoint

    assert resumed[0] == whole[0][2:]
    assert_close(resumed[2], whole[2], rtol=0, atol=0)


def test_predictions_and_weights_of_the_recipe_are_used():
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 11, requires_grad=True)
    labels = torch.randint(11, (2, 5))
    labels[0, 2] = -100
    own = torch.rand(2, 5)
    each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    log_softmax = logits.log_softmax(-1)
    predictions = Predictions(-each.detach(), -(log_softmax.exp() * log_softmax).sum(-1).detach())
    expected = (MiLeWeighting()(labels, predictions=predictions) * own * each).sum() / 9
    loss = TokenWeightedCrossEntropy(MiLeWeighting())

    assert_close(loss(logits, labels, num_label_tokens=9, loss_weights=own), expected)


def test_what_cannot_work_is_refused(run):
    with pytest.raises(
        ValueError, match="^loss_fn is .*MaskedCrossEntropy.*, without weights: set loss_fn._target_ to"
    ):
        run({"recipe": OURS["recipe"]}, "no_loss")
    with pytest.raises(ValueError, match="^packed sequences are on, but the loss does not see where a document ends"):
        run(OURS, "packed", packed_sequence={"packed_sequence_size": 32})
    with pytest.raises(ValueError, match="^distributed.cp_size is 2, but weights need the whole sequences"):
        run(OURS, "parallel", distributed={"strategy": "fsdp2", "cp_size": 2})
    with pytest.raises(ValueError, match="^weighting is 'tfidf': it has to be a weighting"):
        TokenWeightedCrossEntropy("tfidf")
    with pytest.raises(ValueError, match="^the weighting counts all tokens, but NeMo AutoModel passes only the labels"):
        TokenWeightedCrossEntropy(TFIDFWeighting(counted="tokens"))
    assert OURS["recipe"].rpartition(".")[2] == TokenWeightingRecipe.__name__
