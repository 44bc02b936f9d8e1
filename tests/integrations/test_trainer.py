"""What the mixin adds to the Trainer of transformers, and what it refuses."""

import logging

import pytest
import torch
import transformers
from helpers.processes.trainers import load, logs_of, make_trainer, ragged_rows
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer

from tfidf_tune.integrations.transformers import (
    TokenWeightingMixin,
    TokenWeightingTrainer,
    token_batch,
)
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.loss import CrossEntropyLoss
from tfidf_tune.weighting import (
    FocalWeighting,
    GoldfishWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    UniformWeighting,
)

COMPARED = ("loss", "cross_entropy", "grad_norm", "weight_std")


def tiny(model_type, checkpoint, **settings):
    """A random model of an architecture, with the vocabulary and tokenizer of the tiny Llama."""
    sizes = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **(sizes | settings))
    config.name_or_path = str(checkpoint)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train(trainer_class, model, folder, *, settings=None, rows=None, **options):
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2} | (settings or {})
    trainer = make_trainer(
        trainer_class, model, folder, rows or ragged_rows(40), settings=settings, **options
    )
    trainer.train()
    return trainer


def metrics(trainer, names=COMPARED):
    return torch.tensor(
        [[entry[name] for name in names] for entry in logs_of(trainer)], dtype=torch.float64
    )


@pytest.mark.parametrize(
    ("weighting", "lora", "bf16"),
    [(TFIDFWeighting, False, False), (FocalWeighting, True, False), (TFIDFWeighting, True, True)],
)
def test_the_fused_head_gives_the_same_training(tiny_checkpoint, tmp_path, weighting, lora, bf16):
    """Under autocast the output layer computes in bfloat16, of which an epsilon is 2**-8."""
    found = []
    for fused_head in (False, True):
        model = load(tiny_checkpoint)
        if lora:
            torch.manual_seed(0)
            model = get_peft_model(
                model, LoraConfig(target_modules="all-linear", r=4, task_type="CAUSAL_LM")
            )
        options = {"weighting": weighting(), "fused_head": fused_head, "settings": {"bf16": bf16}}
        found.append(train(TokenWeightingTrainer, model, tmp_path, **options))

    assert not any(module._forward_hooks for module in found[1].model.modules()), (
        "hidden states are not kept"
    )
    rtol = 2**-8 if bf16 else 1e-4
    torch.testing.assert_close(metrics(found[1]), metrics(found[0]), rtol=rtol, atol=1e-6)
    if not bf16:  # AdamW turns the rounding of small gradients into steps of full length
        for (name, weights), fused in zip(
            found[0].model.named_parameters(), found[1].model.parameters(), strict=True
        ):
            torch.testing.assert_close(fused, weights, rtol=rtol, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("mixtral", {"num_local_experts": 4, "router_aux_loss_coef": 0.5}),
        (
            "jetmoe",
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "kv_channels": 8,
                "aux_loss_coef": 0.5,
            },
        ),
        ("llama", {"attention_dropout": 0.2}),
    ],
)
def test_uniform_weights_are_the_stock_trainer(tiny_checkpoint, tmp_path, model_type, settings):
    """With the auxiliary loss of experts, however its factor is named, and with dropout."""
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in ragged_rows(40)]
    found = []
    for trainer_class, options in (
        (Trainer, {}),
        (TokenWeightingTrainer, {"weighting": UniformWeighting()}),
    ):
        model = tiny(
            model_type,
            tiny_checkpoint,
            **settings | ({"output_router_logits": True} if len(settings) > 1 else {}),
        )
        found.append(
            metrics(
                train(trainer_class, model, tmp_path, rows=rows, **options), ("loss", "grad_norm")
            )
        )

    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)


def test_evaluation_is_plain_and_changes_nothing(tiny_checkpoint, tmp_path):
    """Between steps, with a window and with a model that counts no items."""
    rows = ragged_rows(10, seed=1)
    without = train(TokenWeightingTrainer, tiny_checkpoint, tmp_path)
    settings = {"eval_strategy": "steps", "eval_steps": 1}
    between = train(
        TokenWeightingTrainer, tiny_checkpoint, tmp_path, settings=settings, eval_dataset=rows
    )

    assert torch.equal(metrics(between), metrics(without))
    assert all(
        torch.equal(value, without.weighting.state_dict()[name])
        for name, value in between.weighting.state_dict().items()
    )
    stock = make_trainer(Trainer, between.model, tmp_path, rows)
    assert between.evaluate()["eval_loss"] == stock.evaluate(rows)["eval_loss"]


def test_documents_begin_where_positions_do_not_go_on():
    """Some models count positions from 2."""
    collator = DataCollatorWithFlattening(position_ids_start=2)
    batch = collator([{"input_ids": [7] * length} for length in (3, 1, 2)])
    made = token_batch(batch, 6, needs_tokens=False, first_pass=True)
    # Of the labels, one position to the left.
    assert made.document_ids.tolist() == [[0, 0, 1, 2, 2, 2]]
    assert made.all_tokens is None


@pytest.mark.parametrize("trainer_class", [TokenWeightingTrainer, TokenWeightingSFTTrainer])
def test_further_epochs_are_no_repetitions_and_copies_are(tiny_checkpoint, tmp_path, trainer_class):
    """Twelve rows, three steps an epoch; the last row is a copy of the first. Resumed in the second
    epoch.
    """
    rows = torch.randint(10, 300, (12, 40), generator=torch.Generator().manual_seed(0))
    rows[11] = rows[0]
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows]
    settings = {"num_train_epochs": 3, "max_steps": -1, "save_strategy": "steps", "save_steps": 4}
    found = []
    for checkpoint in (None, str(tmp_path / "checkpoint-4")):
        trainer = make_trainer(
            trainer_class,
            tiny_checkpoint,
            tmp_path,
            rows,
            settings=settings,
            weighting=RepetitionWeighting(min_length=1, sample=1, num_buckets=2**20),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        found.append([entry["weight_mean"] for entry in logs_of(trainer)])
    with_copy = found[0][2]
    assert 0.8 < with_copy < 0.85
    assert found[0] == [1, 1, with_copy] + 2 * [with_copy, 1, with_copy]
    assert found[1][-5:] == found[0][-5:]


def test_a_new_model_gets_a_new_window(tiny_checkpoint, tmp_path):
    """With model_init, each call of train() is a run of its own, as in a hyperparameter search."""
    trainer = make_trainer(
        TokenWeightingTrainer,
        None,
        tmp_path,
        ragged_rows(40),
        settings={"max_steps": 3},
        model_init=lambda: load(tiny_checkpoint),
        tokenizer=tiny_checkpoint,
    )
    runs = []
    for _ in range(2):
        trainer.train()
        runs.append(metrics(trainer))
    assert torch.equal(*runs)


class WithoutModelLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["input_ids"]).logits
        return CrossEntropyLoss()(logits[:, :-1], inputs["labels"][:, 1:])


class MixedIn(TokenWeightingMixin, WithoutModelLoss):
    pass


SHIFTED = [
    {"input_ids": row["input_ids"][:-1], "labels": row["input_ids"][1:]} for row in ragged_rows(20)
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weighting": "tfidf"}, "weighting is 'tfidf'"),
        ({"fused_head": 1}, "fused_head is 1"),
        ({"compute_loss_func": print}, "compute_loss_func is set"),
        ({"settings": {"label_smoothing_factor": 0.1}}, "label_smoothing_factor is 0.1"),
        ({"rows": [{"input_ids": [1, 2, 3]}] * 8}, "a training batch has no labels"),
        ({"rows": SHIFTED}, "the labels are shifted already"),
        ({"trainer_class": MixedIn}, "a base of MixedIn computes the loss itself"),
        ({"model": "t5"}, "T5ForConditionalGeneration is an encoder-decoder model"),
        ({"model": "gemma2", "fused_head": True}, "fused_head .*Gemma2ForCausalLM caps its logits"),
        (
            {"model": "granite", "fused_head": True},
            "logits of GraniteForCausalLM are not those of its output layer",
        ),
        (
            {"model": "opt", "fused_head": True},
            "OPTForCausalLM does not take its hidden states from its base_model",
        ),
        (
            {"model": "lora_head", "fused_head": True},
            "set fused_head to False: the output layer is a peft.*Linear",
        ),
    ],
)
def test_bad_use_is_refused(tiny_checkpoint, tmp_path, options, message):
    options = {"model": tiny_checkpoint, "trainer_class": TokenWeightingTrainer, **options}
    model = options.pop("model")
    trainer_class = options.pop("trainer_class")
    if model == "t5":
        config = transformers.T5Config(
            vocab_size=320, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2
        )
        model = transformers.T5ForConditionalGeneration(config)
        model.config.name_or_path = str(tiny_checkpoint)
    elif model == "lora_head":
        model = get_peft_model(
            load(tiny_checkpoint), LoraConfig(target_modules=["lm_head"], task_type="CAUSAL_LM")
        )
    elif isinstance(model, str):
        model = tiny(
            model, tiny_checkpoint, **({"logits_scaling": 8.0} if model == "granite" else {})
        )

    with pytest.raises(ValueError, match=message):
        train(trainer_class, model, tmp_path, **options)


def test_what_is_no_prediction_of_the_next_token_is_refused(tiny_checkpoint, tmp_path):
    torch.manual_seed(0)  # and far from uniform predictions, whose losses are all alike
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    sizes["initializer_range"] = 0.5
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=320, **sizes))
    bert.config.name_or_path = str(tiny_checkpoint)
    with pytest.raises(
        ValueError,
        match="loss of BertForMaskedLM is .* next tokens .*: weights are for causal language",
    ):
        train(TokenWeightingTrainer, bert, tmp_path)
    # A first batch without any label says nothing; the next is checked.
    in_order = {"train_sampling_strategy": "sequential", "per_device_train_batch_size": 2}
    unlabelled = [row | {"labels": [-100] * len(row["input_ids"])} for row in ragged_rows(2)]
    with pytest.raises(ValueError, match="BertForMaskedLM"):
        train(
            TokenWeightingTrainer,
            bert,
            tmp_path,
            rows=[*unlabelled, *ragged_rows(40)],
            settings=in_order,
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.add_special_tokens(
        {"mask_token": tokenizer.eos_token, "pad_token": tokenizer.eos_token}
    )
    collator = transformers.DataCollatorForLanguageModeling(tokenizer)
    rows = [{"input_ids": row["input_ids"]} for row in ragged_rows(40)]
    with pytest.raises(
        ValueError, match="labels differ from input_ids: make them equal, or -100 .*mlm=False"
    ):
        train(TokenWeightingTrainer, tiny_checkpoint, tmp_path, rows=rows, data_collator=collator)


def test_a_training_that_begins_again_with_a_smaller_batch_begins_with_the_first_state(
    tiny_checkpoint, tmp_path
):
    class OutOfMemory(TokenWeightingTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if len(inputs["input_ids"]) == 4 and self.state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    # The failed attempt trains the model; without a rate it does not.
    settings = {"learning_rate": 0.0, "gradient_accumulation_steps": 1}
    options = {"weighting": TFIDFWeighting(), "settings": settings | {"auto_find_batch_size": True}}
    again = train(OutOfMemory, load(tiny_checkpoint), tmp_path, **options)
    assert again._train_batch_size < 4
    options = {"weighting": TFIDFWeighting()}
    options["settings"] = settings | {"per_device_train_batch_size": again._train_batch_size}
    once = train(TokenWeightingTrainer, load(tiny_checkpoint), tmp_path, **options)
    assert torch.equal(
        *(metrics(one, ("loss", "weight_mean", "weight_std"))[-3:] for one in (again, once))
    )


def test_a_state_of_another_weighting_is_refused(tiny_checkpoint, tmp_path, caplog, monkeypatch):
    saved = {"save_strategy": "steps", "save_steps": 3}
    train(TokenWeightingTrainer, tiny_checkpoint, tmp_path, settings=saved)
    folder = tmp_path / "checkpoint-3"
    other = make_trainer(
        TokenWeightingTrainer,
        tiny_checkpoint,
        tmp_path,
        ragged_rows(40),
        weighting=TFIDFWeighting(num_batches=5),
        settings={"max_steps": 4},
    )
    with pytest.raises(RuntimeError, match=r"(?s)TFIDFWeighting.*16 batches, this one 5"):
        other.train(resume_from_checkpoint=str(folder))
    for weighting in (
        RepetitionWeighting(),
        GoldfishWeighting(),
    ):  # with a state of its own, and without one
        name = type(weighting).__name__
        changed = make_trainer(
            TokenWeightingTrainer,
            tiny_checkpoint,
            tmp_path,
            ragged_rows(40),
            weighting=weighting,
            settings={"max_steps": 4},
        )
        message = rf"checkpoint-3 was trained with TFIDFWeighting, but this Trainer has {name}: resume with TFIDF"
        with pytest.raises(ValueError, match=message):
            changed.train(resume_from_checkpoint=str(folder))

    content = (file := folder / "token_weighting.pth").read_bytes()
    for damaged in (b"", content[: len(content) // 2], b"hello"):
        file.write_bytes(damaged)
        remedy = "resume from another checkpoint, or remove the file"
        with pytest.raises(ValueError, match=rf"{file} cannot be read \(.*Error\): {remedy}"):
            other.train(resume_from_checkpoint=str(folder))
    file.unlink()
    monkeypatch.setattr(logging.getLogger("tfidf_tune"), "propagate", True)
    other.train(resume_from_checkpoint=str(folder))
    assert "the weighting begins with an empty state" in caplog.text
