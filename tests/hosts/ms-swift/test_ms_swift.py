"""ms-swift's own ``swift sft`` with token weights, on a tiny Llama on a CPU."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from docs_snippets import snippet
from safetensors.torch import load_file
from swift import sft_main
from swift.loss import BaseLoss, loss_map
from tiny_llama import make_llama, make_tokenizer
from torch.testing import assert_close

from tfidf_tune.integrations.ms_swift import TokenWeightingLoss, register_loss
from tfidf_tune.weighting import TFIDFWeighting, UniformWeighting

NUM_STEPS, ACCUMULATED = 4, 2
TEXT = "the cat sat on the mat and the dog ran to the red house by the river"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, questions with answers of several lengths, and the plugin of the page."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "text.txt").write_text(" ".join([TEXT] * 20))
    make_tokenizer(make_llama(folder, max_position_embeddings=512), folder / "text.txt")
    (folder / "tfidf_plugin.py").write_text(snippet("trainers.md", "ms-swift"))
    random.seed(0)
    for name, count in (("train", 16), ("val", 4)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                question, answer = (" ".join(random.choices(TEXT.split(), k=random.randint(2, 7))) for _ in range(2))
                messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
                file.write(json.dumps({"messages": messages}) + "\n")
    return folder


class ReferenceLoss(BaseLoss):
    """TF-IDF by hand; position i of the logits predicts token i + 1."""

    def __init__(self, args, trainer):
        super().__init__(args, trainer)
        self.weighting = TFIDFWeighting(num_batches=16)

    def __call__(self, outputs, labels, *, num_items_in_batch=None, **kwargs):
        each = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        if not self.trainer.model.training:
            return each.sum() / (labels[:, 1:] != -100).sum()
        return (each * self.weighting(labels[:, 1:].contiguous())).sum() / num_items_in_batch


class SpecialTokens(UniformWeighting):
    """Uniform weights that keep the special tokens which they get."""

    found = None

    def set_special_tokens(self, token_ids):
        SpecialTokens.found = [*token_ids]


@pytest.fixture
def run(folder, tmp_path, monkeypatch):
    """Run ``swift sft``; return losses, gradient norms, losses of evaluation and the parameters at the end."""
    monkeypatch.setitem(loss_map, "reference", ReferenceLoss)

    def run(name, loss_type=None, **settings):
        settings = {
            "model": folder,
            "model_type": "llama",
            "template": "chatml",
            "tuner_type": "full",
            "torch_dtype": "float32",
            "dataset": folder / "train.jsonl",
            "val_dataset": folder / "val.jsonl",
            "output_dir": tmp_path / name,
            "add_version": False,
            "check_model": False,
            "max_steps": NUM_STEPS,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": ACCUMULATED,
            "logging_steps": 1,
            "eval_steps": 2,
            "save_steps": 2,
            "optim": "sgd",
            "learning_rate": 0.3,
            "max_grad_norm": 100,
            "lr_scheduler_type": "constant",
            "report_to": "none",
            "external_plugins": folder / "tfidf_plugin.py",
        } | settings
        if loss_type is not None:
            settings["loss_type"] = loss_type
        sft_main([word for key, value in settings.items() for word in (f"--{key}", str(value))])
        output = settings["output_dir"]
        state = json.loads((output / f"checkpoint-{NUM_STEPS}" / "trainer_state.json").read_text())
        logs = state["log_history"]
        return (
            [(line["loss"], line["grad_norm"]) for line in logs if "loss" in line],
            [line["eval_loss"] for line in logs if "eval_loss" in line],
            load_file(output / f"checkpoint-{NUM_STEPS}" / "model.safetensors"),
        )

    return run


def test_uniform_weights_are_stock_ms_swift(run):
    stock = run("stock")
    register_loss("uniform", SpecialTokens())
    ours = run("ours", "uniform")

    assert [*map(len, ours[:2])] == [NUM_STEPS, NUM_STEPS // 2]
    assert_close(ours, stock, rtol=1e-5, atol=1e-6)
    assert SpecialTokens.found == [0]  # <|endoftext|>


def test_weights_are_those_of_the_labels(run):
    assert_close(run("ours", "tfidf"), run("reference", "reference"), rtol=1e-5, atol=1e-6)


def test_evaluation_leaves_the_window_alone(run):
    assert run("evaluated", "tfidf")[0] == run("alone", "tfidf", eval_strategy="no")[0]


def test_a_resumed_run_is_identical(run, tmp_path):
    whole = run("run", "tfidf")
    resumed = run("resumed", "tfidf", resume_from_checkpoint=tmp_path / "run" / "checkpoint-2")

    assert resumed[0] == whole[0]  # the log of the first half is in the checkpoint
    assert_close(resumed[2], whole[2], rtol=0, atol=0)
    windows = [
        torch.load(tmp_path / name / f"checkpoint-{NUM_STEPS}" / "token_weighting_0.pth") for name in ("run", "resumed")
    ]
    assert windows[0]["window.num_updates"] == NUM_STEPS * ACCUMULATED
    assert_close(*windows, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1, which would be ignored"),
        ({"enable_dft_loss": True}, "enable_dft_loss is on, but its loss would be ignored"),
        ({"loss_scale": "hermes"}, "the data has weights of its own"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(run, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        run("refused", "tfidf", **settings)


# These need flash attention, or several processes, before ms-swift makes the loss.
@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"padding_free": True}, "packing or padding_free is on, but a loss does not see"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size is 2, but weights need whole sequences"),
        ({"task_type": "seq_cls"}, "task_type is 'seq_cls': token weights are for 'causal_lm'"),
    ],
)
def test_templates_that_divide_or_join_sequences_are_refused(setting, message):
    template = {"task_type": "causal_lm", "padding_free": False, "sequence_parallel_size": 1} | setting
    with pytest.raises(ValueError, match=f"^{message}"):
        TokenWeightingLoss(None, SimpleNamespace(template=SimpleNamespace(**template)), weighting=UniformWeighting())


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="^name is 'cross_entropy', a loss of ms-swift"):
        register_loss("cross_entropy")
    with pytest.raises(ValueError, match="^weighting is 'tfidf': it has to be a weighting"):
        register_loss("mine", "tfidf")
    with pytest.raises(ValueError, match="^the weighting counts all tokens, but ms-swift passes only the labels"):
        register_loss("mine", TFIDFWeighting(counted="tokens"))
