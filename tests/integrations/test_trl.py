"""Token weights in TRL's SFTTrainer, on data sets that it prepares itself."""

import copy

import pytest
import torch
from datasets import Dataset
from helpers.processes.trainers import CHECKPOINTING, load, logs_of, make_trainer, ragged_rows
from peft import LoraConfig, PromptTuningConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.weighting import IGNORE_INDEX, TFIDFWeighting, UniformWeighting

TEXTS = Dataset.from_list(
    [
        {"text": "a quiet child painted " + "the paper boat " * (1 + number % 4)}
        for number in range(40)
    ]
)
ANSWERS = Dataset.from_list(
    [
        {"prompt": f"who saw {number}? ", "completion": "the old sailor " * (1 + number % 3)}
        for number in range(40)
    ]
)
KINDS = {
    "padded": (TEXTS, {}),
    "padding-free": (TEXTS, {"padding_free": True, "max_length": None}),
    "packed": (TEXTS, {"packing": True, "max_length": 64}),
    "completions": (ANSWERS, {}),
    "accumulation": (ANSWERS, {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2}),
    "prompt tuning": (TEXTS, {}),
    "LoRA, bf16": (TEXTS, {"bf16": True}),
}
ADAPTERS = {
    "LoRA, bf16": LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4),
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
}

# Attention kernels that know documents of packed rows are for GPUs; transformers builds a mask from
# the positions.
pytestmark = pytest.mark.filterwarnings("ignore:.*flash.?attention.*")


class RecordingTFIDF(TFIDFWeighting):
    """TF-IDF that keeps the batches and the weights."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def weigh(self, batch):
        weights = super().weigh(batch)
        self.seen.append((batch, weights))
        return weights


def make(trainer_class, checkpoint, folder, kind, **options):
    dataset, settings = KINDS[kind]
    common = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "loss_type": "nll",
        "max_steps": 3,
        CHECKPOINTING: False,
        "bf16": False,
    }
    torch.manual_seed(0)
    return trainer_class(
        load(checkpoint),
        SFTConfig(str(folder), **(common | settings)),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        # PEFT writes the model's folder into the config.
        peft_config=copy.deepcopy(ADAPTERS.get(kind)),
        **options,
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("padded", "completions")])
def test_uniform_weights_are_the_stock_trainer(tiny_checkpoint, tmp_path, kind):
    """In all that it logs, entropy and accuracy among it."""
    logs = []
    for trainer_class, options in (
        (SFTTrainer, {}),
        (TokenWeightingSFTTrainer, {"weighting": UniformWeighting()}),
    ):
        trainer = make(trainer_class, tiny_checkpoint, tmp_path, kind, **options)
        trainer.train()
        logs.append(logs_of(trainer))
    for stock, ours in zip(*logs, strict=True):
        assert ours["weight_mean"] == ours["weight_max"] == 1
        if kind != "prompt tuning":  # whose first tokens the trainers do not count, but do predict
            assert ours["cross_entropy"] == pytest.approx(ours["loss"], rel=1e-4)
        for name, value in stock.items():
            assert ours[name] == pytest.approx(value, rel=1e-4), name


@pytest.mark.parametrize("kind", ["padded", "padding-free", "packed", "completions"])
def test_each_text_is_a_document(tiny_checkpoint, tmp_path, kind):
    """The weights are those of TF-IDF on the texts, each in a row of its own, and the loss has
    them.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    trainer = make(
        TokenWeightingSFTTrainer, tiny_checkpoint, tmp_path, kind, weighting=RecordingTFIDF()
    )
    trainer.train()

    alone = TFIDFWeighting()
    seen = set()
    for batch, weights in trainer.weighting.seen:
        documents = (
            torch.zeros_like(batch.labels) if batch.document_ids is None else batch.document_ids
        )
        assert (batch.document_ids is None) == (kind in ("padded", "completions"))
        valid = batch.labels != IGNORE_INDEX
        found = []
        for ids, weight, where, is_valid in zip(
            batch.labels, weights, documents, valid, strict=True
        ):
            for document in where.unique():
                inside = (where == document) & is_valid
                if inside.any():
                    found.append((ids[inside], weight[inside]))
        rows = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in found], True, IGNORE_INDEX)
        expected = alone(rows, vocab_size=320)
        for row, (ids, weight) in zip(expected, found, strict=True):
            torch.testing.assert_close(weight, row[: len(ids)])
            seen.add(tokenizer.decode(ids))
    if kind == "completions":
        assert seen == {" the old sailor" * number + " <|endoftext|>" for number in (1, 2, 3)}
    else:  # a text without its first token, which nothing predicts
        texts = [tokenizer(text + tokenizer.eos_token)["input_ids"][1:] for text in TEXTS["text"]]
        assert seen == {tokenizer.decode(ids) for ids in texts}


def test_labels_are_checked(tiny_checkpoint, tmp_path):
    shifted = [
        {"input_ids": row["input_ids"][:-1], "labels": row["input_ids"][1:]}
        for row in ragged_rows(8)
    ]
    trainer = make_trainer(TokenWeightingSFTTrainer, tiny_checkpoint, tmp_path, shifted)
    with pytest.raises(ValueError, match="the labels are shifted already"):
        trainer.train()
