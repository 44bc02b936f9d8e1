"""Canaries are checked in the batches of real trainers, before training."""

import os
import random

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from helpers.fakes.tiny_llama import make_llama, make_tokenizer
from helpers.processes.ranks import on_every_rank
from helpers.processes.trainers import CHECKPOINTING, load, logs_of
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

from tfidf_tune.integrations.transformers import TokenWeightingTrainer
from tfidf_tune.passages import InjectedCanaries, check_canaries, write_probe_file

BLOCK = 32
COMMON = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "per_device_train_batch_size": 4,
    "num_train_epochs": 1,
    CHECKPOINTING: False,
    "bf16": False,
}

# Attention kernels that know documents of packed rows are for GPUs.
pytestmark = pytest.mark.filterwarnings("ignore:.*flash.?attention.*")


def lora() -> LoraConfig:
    """A new config for each model: PEFT writes the model's folder into the config, and warns when
    the config is used with another model."""
    return LoraConfig(
        task_type="CAUSAL_LM", target_modules="all-linear", r=4, lora_dropout=0.5, bias="none"
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, text_file):
    folder = make_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=512)
    return make_tokenizer(folder, text_file)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint)


def texts(number=24):
    return [
        "the old sailor watched " + "a paper boat " * (1 + index % 4) for index in range(number)
    ]


def inject(tokenizer, column="text", row=None, **options):
    """Canaries, and a data set with them that has other columns too."""
    arguments = {"num_targets": 3, "num_controls": 2, "repeats": (2, 3, 4), "block_size": BLOCK}
    canaries = InjectedCanaries(tokenizer, **(arguments | options))
    columns = {"text": texts(), "title": ["a title"] * 24}
    if column in ("prompt", "completion"):
        columns = {"prompt": ["who saw it? "] * 24, "completion": texts()}
    return canaries, canaries.inject(Dataset.from_dict(columns), column=column, row=row)


def make_sft(checkpoint, folder, dataset, model=None, peft_config=None, collator=None, **settings):
    return SFTTrainer(
        load(checkpoint) if model is None else model,
        SFTConfig(str(folder), **(COMMON | settings)),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        peft_config=peft_config,
        data_collator=collator,
    )


def make_plain(
    checkpoint, folder, dataset, collator=None, model=None, trainer_class=Trainer, **settings
):
    """A Trainer of transformers, whose rows the user has tokenized."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = dataset
    if isinstance(dataset, Dataset):
        rows = dataset.map(lambda row: tokenizer(row["text"]), remove_columns=dataset.column_names)
    return trainer_class(
        load(checkpoint) if model is None else model,
        TrainingArguments(str(folder), **(COMMON | settings)),
        train_dataset=rows,
        data_collator=collator or DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"padding_free": True, "max_length": None},
        {"packing": True, "max_length": 256},
        {"train_sampling_strategy": "group_by_length"},
        {"num_train_epochs": 3, "gradient_accumulation_steps": 4},
    ],
    ids=["padded", "padding-free", "packed", "by length", "epochs"],
)
def test_canaries_arrive_in_trl(checkpoint, tokenizer, tmp_path, settings):
    canaries, dataset = inject(tokenizer)
    trainer = make_sft(checkpoint, tmp_path, dataset, **settings)
    found = canaries.check(trainer)

    assert (found.num_targets, found.num_controls) == (3, 2)
    assert found.num_seen == found.num_inserted == 9
    assert found.num_batches == len(trainer.get_train_dataloader())
    # The first token of a row is predicted by nothing.
    assert found.tokens_with_loss == dict.fromkeys(
        ["target-0000", "target-0001", "target-0002"], BLOCK - 1
    )
    assert found.num_trainable == found.num_with_gradient > 10
    assert "3 canaries arrive: 9 of 9 insertions" in str(found)
    assert "None of 2 controls" in str(found)


def test_the_probe_file_is_enough_for_a_check(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer)
    canaries.write_probe_file(tmp_path / "probe.jsonl")
    trainer = make_sft(checkpoint, tmp_path, dataset)
    assert check_canaries(trainer, tmp_path / "probe.jsonl") == canaries.check(trainer)
    short = make_sft(checkpoint, tmp_path, dataset, max_length=20)
    with pytest.raises(ValueError, match="arrives whole 0 of"):
        check_canaries(short, tmp_path / "probe.jsonl")
    write_probe_file(tmp_path / "controls.jsonl", canaries.passages[-2:])
    with pytest.raises(ValueError, match=r"controls\.jsonl has no targets"):
        check_canaries(trainer, tmp_path / "controls.jsonl")


def test_canaries_arrive_in_completions_and_chats(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer, column="completion", row={"prompt": ""})
    trainer = make_sft(checkpoint, tmp_path, dataset, peft_config=lora())
    found = canaries.check(trainer)
    assert found.num_seen == 9
    assert 0 < found.num_with_gradient < found.num_trainable  # LoRA's B is zero

    canaries, dataset = inject(tokenizer)
    chats = dataset.map(
        lambda row: {"messages": [{"role": "assistant", "content": row["text"]}]},
        remove_columns=dataset.column_names,
    )
    trainer = make_chats(checkpoint, tmp_path, chats, "<|endoftext|>{{ message.content }}")
    found = canaries.check(trainer)
    assert {*found.tokens_with_loss.values()} == {BLOCK}


def make_chats(checkpoint, folder, chats, message):
    """A trainer whose tokenizer has a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = (
        "{% for message in messages %}" + message + "<|endoftext|>{% endfor %}"
    )
    return SFTTrainer(
        load(checkpoint),
        SFTConfig(str(folder), **COMMON),
        train_dataset=chats,
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_canaries_arrive_in_the_trainer_of_transformers(checkpoint, tokenizer, tmp_path, side):
    canaries, dataset = inject(tokenizer)
    padding = AutoTokenizer.from_pretrained(checkpoint, padding_side=side)
    collator = DataCollatorForLanguageModeling(padding, mlm=False)
    trainer = make_plain(checkpoint, tmp_path, dataset, collator)
    assert canaries.check(trainer).num_seen == 9
    trainer = make_plain(checkpoint, tmp_path, dataset, DataCollatorWithFlattening())
    assert {*canaries.check(trainer).tokens_with_loss.values()} == {BLOCK - 1}


def test_bos_and_eos_stand_beside_the_canary(sentencepiece_folder, checkpoint, tmp_path):
    from tfidf_tune.data import hf_tokenizer

    hf_tokenizer(str(sentencepiece_folder)).save_pretrained(tmp_path / "saved")
    tokenizer = AutoTokenizer.from_pretrained(
        tmp_path / "saved", add_bos_token=True, add_eos_token=True
    )
    canaries, dataset = inject(tokenizer)
    rows = [tokenizer(text)["input_ids"] for text in dataset["text"]]
    batches = [{"input_ids": [row], "labels": [row]} for row in rows]
    assert {*canaries.check_batches(batches).tokens_with_loss.values()} == {BLOCK}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_length": 20},
            r"target-0000 arrives whole 0 of 2 times \(2 other canaries .*It is cut: .* 20 of its 32 "
            r"tokens.*Set max_length well above 32.*max_length=20",
        ),
        (
            {"packing": True, "packing_strategy": "wrapped", "max_length": 40},
            r"split over rows: .* of its 32 tokens. Set packing=False.*'wrapped'",
        ),
        ({"dataset_text_field": "title"}, r"whole 0 of 2 .*at most 0 of its 32.*another column"),
        (
            {"num_train_epochs": 0.25},
            r"Training ends after 3 of the 9 batches.*max_steps to 9 or more",
        ),
        ({"max_steps": 1}, r"Training ends after 1 of the 9 batches"),
    ],
    ids=["truncated", "wrapped", "other column", "part of an epoch", "max_steps"],
)
def test_settings_of_trl_that_lose_canaries(checkpoint, tokenizer, tmp_path, settings, message):
    canaries, dataset = inject(tokenizer)
    dataset = dataset.map(lambda row: {"title": row["title"] or "no title"})
    trainer = make_sft(checkpoint, tmp_path, dataset, **settings)
    with pytest.raises(ValueError, match=message):
        canaries.check(trainer)


def test_a_prompt_without_loss(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer, column="prompt", row={"completion": " it was"})
    trainer = make_sft(checkpoint, tmp_path, dataset)
    with pytest.raises(
        ValueError, match="only 0 of its 32 tokens have loss .*completion_only_loss"
    ):
        canaries.check(trainer)
    trainer = make_sft(checkpoint, tmp_path, dataset, completion_only_loss=False)
    assert canaries.check(trainer).num_seen == 9


def test_a_chat_template_that_joins_tokens(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer)
    chats = dataset.map(
        lambda row: {"messages": [{"role": "assistant", "content": row["text"]}]},
        remove_columns=dataset.column_names,
    )
    trainer = make_chats(checkpoint, tmp_path, chats, "say: {{ message.content }}")
    first = canaries.passages[0].token_ids[0]
    expected = rf"other token ids: \d+ of 32 .*token 0 is \d+ instead of {first}.*chat template"
    with pytest.raises(ValueError, match=expected):
        canaries.check(trainer)


def test_rows_that_are_left_out_or_added(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer)
    unique = Dataset.from_dict({"text": list(dict.fromkeys(dataset["text"]))})
    with pytest.raises(ValueError, match="whole 1 of 2 times .*removal of duplicates"):
        canaries.check(make_sft(checkpoint, tmp_path, unique))

    class WithoutLongRows(DataCollatorForSeq2Seq):
        def __call__(self, features, return_tensors=None):
            short = [each for each in features if len(each["input_ids"]) < 30] or features[:1]
            short = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in short]
            return super().__call__(short, return_tensors)

    trainer = make_plain(checkpoint, tmp_path, dataset, WithoutLongRows(tokenizer))
    with pytest.raises(ValueError, match="arrives whole . of . times.*the data collator"):
        canaries.check(trainer)
    control = Dataset.from_dict({"text": ["See: \n" + canaries.passages[-1].text]})
    with pytest.raises(ValueError, match="control-0001 is in the training data 1 times.*seed"):
        canaries.check(make_sft(checkpoint, tmp_path, concatenate_datasets([dataset, control])))
    # Of 33 rows in batches of 4 the last one is dropped: a target.
    place = canaries.passages[0].positions[0][0]
    rows = dataset.select([*(row for row in range(33) if row != place), place])
    trainer = make_plain(
        checkpoint,
        tmp_path,
        rows,
        dataloader_drop_last=True,
        train_sampling_strategy="sequential",
    )
    with pytest.raises(ValueError, match="dataloader_drop_last=True leaves rows out"):
        canaries.check(trainer)


def test_labels_that_teach_something_else(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer)

    class Shifted(DataCollatorForLanguageModeling):
        def __call__(self, features, return_tensors=None):
            batch = super().__call__(features, return_tensors)
            batch["labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
            return batch

    trainer = make_plain(checkpoint, tmp_path, dataset, Shifted(tokenizer, mlm=False))
    with pytest.raises(ValueError, match="shifted already.*check_batches"):
        canaries.check(trainer)
    found = canaries.check_batches(trainer.get_train_dataloader(), model=trainer.model)
    assert {*found.tokens_with_loss.values()} == {BLOCK - 1}

    class Masked(DataCollatorForLanguageModeling):
        def __call__(self, features, return_tensors=None):
            batch = super().__call__(features, return_tensors)
            batch["labels"] = torch.where(batch["labels"] == -100, -100, 5)
            return batch

    trainer = make_plain(checkpoint, tmp_path, dataset, Masked(tokenizer, mlm=False))
    with pytest.raises(ValueError, match="labels are not the input_ids.*mlm=False"):
        canaries.check(trainer)


def test_adapters_that_cannot_learn(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer)
    trainer = make_plain(checkpoint, tmp_path, dataset)
    trainer.model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model is trainable.*is_trainable"):
        canaries.check(trainer)

    model = get_peft_model(load(checkpoint), lora())
    model.merge_adapter()
    trainer = make_plain(checkpoint, tmp_path, dataset, model=model)
    with pytest.raises(ValueError, match="loss of target-0000 has no gradient .*merged"):
        canaries.check(trainer)
    model.unmerge_adapter()
    found = canaries.check(trainer)
    assert found.num_with_gradient < found.num_trainable
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["two dtypes", "prompt tuning", "checkpointing"])
def test_models_of_every_kind_have_gradients(checkpoint, tokenizer, tmp_path, kind):
    canaries, dataset = inject(tokenizer)
    model = load(checkpoint)
    settings = {}
    adapter = None
    if kind == "two dtypes":
        model.model.to(torch.bfloat16)
        settings["bf16"] = True
    elif kind == "prompt tuning":
        adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    else:
        settings[CHECKPOINTING] = True
        adapter = lora()
    trainer = make_sft(checkpoint, tmp_path, dataset, model, adapter, **settings)
    assert canaries.check(trainer).num_with_gradient > 0


@pytest.mark.parametrize("kind", ["LoRA", "by length", "weighted", "TRL", "own loader"])
def test_training_is_not_changed(checkpoint, tokenizer, tmp_path, kind):
    """Losses, weights and random states, bit for bit; rows are shuffled, and dropout is random."""
    canaries, dataset = inject(tokenizer)
    results = []
    for is_checked in (False, True):
        if kind == "TRL":
            settings = {"packing": True, "max_length": 128}
            trainer = make_sft(checkpoint, tmp_path, dataset, peft_config=lora(), **settings)
        else:
            torch.manual_seed(0)
            settings = {"num_train_epochs": 2}
            if kind == "by length":
                settings["train_sampling_strategy"] = "group_by_length"
            model = get_peft_model(load(checkpoint), lora())
            if kind == "weighted":
                settings |= {"trainer_class": TokenWeightingTrainer, "dataloader_num_workers": 2}
            trainer = make_plain(checkpoint, tmp_path, dataset, model=model, **settings)
        if kind == "own loader":
            loader = DataLoader(
                trainer.train_dataset,
                batch_size=4,
                shuffle=True,
                generator=torch.Generator().manual_seed(3),
                collate_fn=trainer.data_collator,
            )
            loader = trainer.accelerator.prepare(loader)
            trainer.get_train_dataloader = lambda loader=loader: loader
        modes = [module.training for module in trainer.model.modules()]
        if is_checked:
            canaries.check(trainer)
            canaries.check_batches(trainer.get_train_dataloader(), model=trainer.model)
        assert [module.training for module in trainer.model.modules()] == modes
        trainer.train()
        logs = [(entry["loss"], entry["grad_norm"]) for entry in logs_of(trainer)]
        weights = torch.cat([value.flatten() for value in trainer.model.state_dict().values()])
        states = [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),
        ]
        results.append((logs, weights.tolist(), states))
    assert len(results[0][0]) > 2
    assert results[0] == results[1]


def test_streams(checkpoint, tokenizer, tmp_path):
    canaries, dataset = inject(tokenizer)
    stream = dataset.select_columns("text").to_iterable_dataset()
    trainer = make_sft(checkpoint, tmp_path, stream, max_steps=100)
    assert canaries.check(trainer).num_seen == 9
    trainer = make_sft(checkpoint, tmp_path, stream, max_steps=2)
    with pytest.raises(ValueError, match="arrives whole . of . times"):
        canaries.check(trainer)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            raise AssertionError("read")

    trainer = make_plain(checkpoint, tmp_path, Stream(), max_steps=2)
    with pytest.raises(ValueError, match=r"stream \(Stream\).*check_batches"):
        canaries.check(trainer)


def check_on_two_ranks(rank, checkpoint, folder):
    """Return what a process sees, and the error, in one of two that torchrun might have started."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
    }
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    canaries, dataset = inject(tokenizer)
    found = []
    for options in ({}, {"distributed_config": DistributedConfig(fsdp_size=2)}):
        model = load(checkpoint, **options)
        result = canaries.check(make_plain(checkpoint, folder, dataset, model=model))
        found.append([result.num_seen, result.num_batches, result.num_trainable])
    short = dataset.map(lambda row: {"text": row["text"][:20]})
    try:
        canaries.check(make_plain(checkpoint, folder, short))
    except ValueError as refused:
        found.append(str(refused))
    return found


def test_processes_add_up_what_they_see(checkpoint, tmp_path):
    first, second = on_every_rank(2, tmp_path, check_on_two_ranks, checkpoint, tmp_path)
    assert first == second
    # 33 rows in batches of 4 for two processes: the last ones have rows of the beginning too.
    assert first[0][0] >= 9
    assert first[0][1:] == [10, 21]
    assert first[1] == [*first[0][:2], None]
    assert "target-0000 arrives whole 0 of 2 times" in first[2]
