"""The snippets of docs/trainers.md run as they stand there; those of some trainers have tests of
their own.
"""

import pytest
import torch
from datasets import Dataset
from helpers.docs_snippets import snippet
from helpers.fakes.tiny_llama import make_llama, make_tokenizer
from helpers.processes.trainers import load, logs_of, make_trainer, ragged_rows
from transformers import Trainer
from trl import SFTTrainer

from tfidf_tune import TFIDFCrossEntropyLoss
from tfidf_tune.integrations.transformers import TokenWeightingTrainer, trainer_loss
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer

TEXTS = Dataset.from_dict(
    {"text": ["the old sailor watched a paper boat", "my neighbour forgot the evening train"] * 8}
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, text_file):
    """A model with room for canaries of 256 tokens."""
    return make_tokenizer(
        make_llama(tmp_path_factory.mktemp("llama"), max_position_embeddings=512), text_file
    )


@pytest.fixture
def names(checkpoint, tmp_path, monkeypatch):
    """What the snippets take for granted, for a trainer of transformers or TRL."""
    monkeypatch.chdir(tmp_path)

    def make(stock, **settings):
        like = make_trainer(
            stock,
            checkpoint,
            tmp_path / "run",
            ragged_rows(20),
            settings={"max_steps": 2, **settings},
        )
        like.args.dataset_kwargs = None  # TRL prepares the data itself
        dataset = TEXTS if stock is SFTTrainer else like.train_dataset
        return {
            "model": load(checkpoint),
            "args": like.args,
            "dataset": dataset,
            "tokenizer": like.processing_class,
        }

    return make


@pytest.mark.parametrize(
    ("heading", "stock", "weighted"),
    [
        ("transformers", Trainer, TokenWeightingTrainer),
        ("TRL", SFTTrainer, TokenWeightingSFTTrainer),
    ],
)
def test_trainers(names, heading, stock, weighted):
    code = snippet("trainers.md", heading)
    given = names(stock)
    if stock is Trainer:  # whose default collator takes rows of one length
        given["dataset"] = [{"input_ids": [3, 1, 2, 1, 5], "labels": [3, 1, 2, 1, 5]}] * 16
    exec(code, given)

    assert len(code.splitlines()) == 5
    assert type(given["trainer"]) is weighted
    assert len(logs_of(given["trainer"])) == 2
    assert all(entry["weight_std"] > 0 for entry in logs_of(given["trainer"]))


def test_canaries_with_the_monitor(names, capsys):
    # Two steps of half of the 216 rows: the check wants a whole epoch.
    given = names(SFTTrainer, per_device_train_batch_size=108) | {"SFTTrainer": SFTTrainer}
    exec(snippet("trainers.md", "Canaries"), given)
    assert "20 canaries arrive: 200 of 200 insertions in 2 batches" in capsys.readouterr().out
    code = snippet("trainers.md", "Canaries", number=1)
    exec(code, given | {"loader": given["trainer"].get_train_dataloader()})
    assert "200 of 200 insertions" in capsys.readouterr().out
    given["trainer"].train()

    measured = [
        entry for entry in given["trainer"].state.log_history if "memorization_target_lms" in entry
    ]
    assert [entry["step"] for entry in measured] == [0, 2]


def test_the_two_traps_and_trainer_loss(names, checkpoint, tmp_path):
    """A bare function has the loss of as many batches as are accumulated; trainer_loss has that of
    our trainer.
    """
    settings = {"max_steps": 2, "gradient_accumulation_steps": 4}
    given = names(Trainer, **settings) | {
        "Trainer": Trainer,
        "TFIDFCrossEntropyLoss": TFIDFCrossEntropyLoss,
    }
    given["dataset"] = rows = [{"input_ids": [3, 1, 2, 1, 5], "labels": [3, 1, 2, 1, 5]}] * 16
    found = []
    for number in (0, 1):
        given["model"] = load(checkpoint)
        exec(snippet("trainers.md", "If the class cannot be changed", number=number), given)
        given["trainer"].train()
        found.append([(entry["loss"], entry["grad_norm"]) for entry in logs_of(given["trainer"])])
    ours = make_trainer(
        TokenWeightingTrainer, checkpoint, tmp_path / "ours", rows, settings=settings
    )
    ours.train()
    assert found[0][0][0] == pytest.approx(4 * found[1][0][0], rel=0.05)
    expected = [(entry["loss"], entry["grad_norm"]) for entry in logs_of(ours)]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected), rtol=1e-5, atol=0)
    # Evaluation counts nothing.
    loss = TFIDFCrossEntropyLoss()
    trainer = make_trainer(
        Trainer, checkpoint, tmp_path, rows, compute_loss_func=trainer_loss(loss)
    )
    trainer.evaluate(rows)
    assert int(loss.weighting.window.num_updates) == 0


def test_any_other_trainer(names):
    given = names(Trainer)
    exec(snippet("trainers.md", "Any other trainer"), given)
    ids = torch.tensor([[3, 1, 2, 1, 5]])
    loss = given["weighted_loss"](given["model"](ids).logits, ids)

    assert loss.requires_grad
    assert len({*given["token_loss"].weighting(ids)[0].tolist()}) > 1
