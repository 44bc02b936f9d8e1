"""torchtitan's own Trainer with token weights, on a small Llama on a CPU.

torchtitan knows no CPU: its questions about the device (see conftest.py) and its time limits are replaced, and
attention is PyTorch's, because flex attention has no backward pass on a CPU. Everything else is torchtitan's.
"""

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
import torchtitan.trainer
from datasets import Dataset
from docs_snippets import snippet
from tokenizers import ByteLevelBPETokenizer
from torch.testing import assert_close
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import ConfigManager
from torchtitan.hf_datasets import DatasetConfig, text_datasets
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from tfidf_tune.integrations.torchtitan import TokenWeightingTrainer, with_token_weighting
from tfidf_tune.weighting import MiLeWeighting, TFIDFWeighting, UniformWeighting

NUM_STEPS, ACCUMULATED, END = 4, 2, 0
TEXTS = [f"the cat {number % 7} sat on the mat" * (1 + number % 3) for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name, value in {
        "LOCAL_RANK": 0,
        "RANK": 0,
        "WORLD_SIZE": 1,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 0,
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torchtitan.trainer.dist_utils, "set_pg_timeouts", lambda **arguments: None)
    monkeypatch.setattr(torchtitan.trainer.time, "sleep", lambda seconds: None)
    data = DatasetConfig(
        path="", loader=lambda path: Dataset.from_dict({"text": TEXTS}), sample_processor=lambda sample: sample["text"]
    )
    monkeypatch.setitem(text_datasets.DATASETS, "cats", data)


@pytest.fixture
def make_config(tokenizer_folder, tmp_path):
    def make(*, steps=NUM_STEPS, validate=True, checkpoint=False):
        config = llama3_debugmodel()
        model = config.model_spec.model
        model.layers = model.layers[:2]
        for layer in model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
        config.hf_assets_path = str(tokenizer_folder)
        config.dump_folder = str(tmp_path)
        config.activation_checkpoint = None
        config.dataloader.dataset = config.validator.dataloader.dataset = "cats"
        config.lr_scheduler.warmup_steps = 0
        config.lr_scheduler.decay_ratio = None
        config.training.local_batch_size, config.training.global_batch_size = 2, 2 * ACCUMULATED
        config.training.seq_len, config.training.steps = 48, steps
        config.training.mixed_precision_param = "float32"
        config.training.disable_cuda_graphs = True
        config.validator.enable, config.validator.freq, config.validator.steps = validate, 2, 2
        config.checkpoint.enable, config.checkpoint.interval = checkpoint, 2
        config.debug.seed = 1
        return config

    return make


@dataclass
class Outcome:
    trainer: object
    steps: dict
    validation: dict


def train(config):
    """Run a Trainer of torchtitan; return the losses and gradient norms that it logs."""
    trainer = config.build()
    outcome = Outcome(trainer, {}, {})

    def log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        outcome.steps[step] = (global_avg_loss, grad_norm)

    trainer.metrics_processor.log = log
    trainer.metrics_processor.log_validation = lambda *, loss, step: outcome.validation.update({step: loss})
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()
    return outcome


class ReferenceLoss(BaseLoss):
    """TF-IDF from whole logits, document by document; a document ends with the label END."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config, *, compile_config=None):
        self.weighting = TFIDFWeighting(num_batches=16)

    def __call__(self, pred, labels, global_valid_tokens=None, **kwargs):
        each = F.cross_entropy(pred.transpose(1, 2), labels, reduction="none")
        if global_valid_tokens is None:
            return each.sum(), {}
        documents = [[sum(token == END for token in row[:end]) for end in range(len(row))] for row in labels.tolist()]
        weights = self.weighting(labels, document_ids=torch.tensor(documents))
        return (each * weights).sum() / global_valid_tokens, {}


class SpecialTokens(UniformWeighting):
    """Uniform weights that keep the special tokens which they get."""

    found = None

    def set_special_tokens(self, token_ids):
        SpecialTokens.found = [*token_ids]


def test_uniform_weights_are_stock_torchtitan(make_config):
    stock = train(make_config())
    ours = train(with_token_weighting(make_config(), SpecialTokens()))

    assert len(ours.steps) == NUM_STEPS
    assert ours.validation
    assert_close(ours.steps, stock.steps, rtol=1e-5, atol=1e-6)
    assert_close(ours.validation, stock.validation, rtol=1e-5, atol=1e-6)
    assert SpecialTokens.found == [0]  # <|endoftext|>


@pytest.mark.parametrize("num_chunks", [8, 1])
def test_weights_are_those_of_whole_documents(make_config, num_chunks):
    config = make_config()
    config.loss = ReferenceLoss.Config()
    expected = train(config)
    config = make_config()
    config.loss.num_chunks = num_chunks
    found = train(with_token_weighting(config, TFIDFWeighting(num_batches=16)))

    assert isinstance(found.trainer.loss_fn, ChunkedLossWrapper)
    assert found.trainer.loss_fn.num_chunks == num_chunks
    assert_close(found.steps, expected.steps, rtol=1e-5, atol=1e-6)
    assert_close(found.validation, expected.validation, rtol=1e-5, atol=1e-6)


def test_validation_leaves_the_window_alone(make_config):
    validated, alone = (train(with_token_weighting(make_config(validate=validate))) for validate in (True, False))

    assert validated.steps == alone.steps
    assert validated.trainer.loss_fn.weighting.window.num_updates == NUM_STEPS * ACCUMULATED


def test_a_resumed_run_is_identical(make_config):
    whole = train(with_token_weighting(make_config(checkpoint=True)))
    config = make_config(checkpoint=True)
    config.checkpoint.load_step = 2
    resumed = train(with_token_weighting(config))

    assert [*resumed.steps] == [3, 4]
    assert resumed.steps == {step: whole.steps[step] for step in (3, 4)}
    assert resumed.trainer.loss_fn.weighting.window.num_updates == NUM_STEPS * ACCUMULATED


def test_the_config_of_the_page_is_read_by_the_command_line(monkeypatch, make_config):
    module = ModuleType("my_configs")
    exec(snippet("trainers.md", "torchtitan"), vars(module))
    monkeypatch.setitem(sys.modules, "my_configs", module)
    config = ConfigManager().parse_args(["--module=my_configs", "--config=weighted", "--training.steps=7"])

    assert isinstance(config, TokenWeightingTrainer.Config)
    assert config.training.steps == 7
    assert config.loss.weighting.window.num_batches == 16
    own = make_config(steps=1)
    own.loss = config.loss
    module.llama3_debugmodel = lambda: own
    assert len(train(module.weighted()).steps) == 1


def test_what_cannot_work_is_refused(make_config):
    config = with_token_weighting(make_config())
    config.parallelism.context_parallel_degree = 2
    with pytest.raises(ValueError, match="^parallelism.context_parallel_degree is 2, but the weights need whole"):
        config.build()
    config = with_token_weighting(make_config())
    config.training.disable_cuda_graphs = False
    with pytest.raises(ValueError, match="^training.disable_cuda_graphs is False, but token weights have not been"):
        config.build()
    with pytest.raises(ValueError, match="^weighting is a MiLeWeighting, which needs the model's predictions"):
        with_token_weighting(make_config(), MiLeWeighting())
    with pytest.raises(ValueError, match="^the weighting counts all tokens, but torchtitan passes only the labels"):
        with_token_weighting(make_config(), TFIDFWeighting(counted="tokens"))
    config = with_token_weighting(make_config())
    config.loss = make_config().loss
    with pytest.raises(ValueError, match="^loss is a ChunkedLossWrapper.Config, without weights"):
        config.build()
