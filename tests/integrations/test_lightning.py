"""The module of the documentation in Lightning's own Trainer: weights, accumulation, validation,
checkpoints.
"""

import os
import warnings

import lightning
import pytest
import torch
import torch.nn.functional as F
from helpers.docs_snippets import snippet
from helpers.fakes.label_batches import assert_same_state
from helpers.processes.ranks import on_every_rank
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from tfidf_tune.loss import CrossEntropyLoss
from tfidf_tune.weighting import TFIDFWeighting, shift_labels

pytestmark = [
    # The data is in memory.
    pytest.mark.filterwarnings("ignore:The '[a-z_]+' does not have many workers"),
    # Lightning's own use of torch.
    pytest.mark.filterwarnings(
        "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"
    ),
]
NUM_STEPS = 4
ACCUMULATED = 2


def module_of_the_page(checkpoint):
    """The module, which trains the tiny model by SGD, so that gradients of another
    size are seen.
    """
    namespace = {}
    exec(snippet("trainers.md", "Lightning"), namespace)
    module = namespace["Finetuning"](AutoModelForCausalLM.from_pretrained(checkpoint))
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.3)
    return module


@pytest.fixture
def make_module(tiny_checkpoint):
    def make(loss=None):
        module = module_of_the_page(tiny_checkpoint)
        if loss is not None:
            module.loss = loss
        return module

    return make


def batches(seed, count):
    """Mini-batches of different lengths, with ignored positions, from few tokens, so that many
    repeat.
    """
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(count):
        ids = torch.randint(1, 12, (2, 9 + 3 * (index % 3)), generator=generator)
        labels = ids.clone()
        labels[0, : 1 + index % 4] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


EPOCH = batches(0, NUM_STEPS * ACCUMULATED // 2)


class Recorder(lightning.Callback):
    def __init__(self):
        self.losses = []
        self.validation = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item() * ACCUMULATED)

    def on_validation_end(self, trainer, module):
        self.validation.append(trainer.callback_metrics["val_loss"].item())


def fit(module, folder, steps=NUM_STEPS, *, validate=True, checkpoint=None):
    recorder = Recorder()
    trainer = lightning.Trainer(
        accelerator="cpu",
        accumulate_grad_batches=ACCUMULATED,
        callbacks=[recorder],
        check_val_every_n_epoch=None,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=1.0 if validate else 0,
        logger=False,
        max_steps=steps,
        num_sanity_val_steps=1 if validate else 0,
        val_check_interval=ACCUMULATED,
    )
    data = DataLoader(EPOCH, batch_size=None)
    trainer.fit(module, data, DataLoader(batches(1, 2), batch_size=None), ckpt_path=checkpoint)
    return recorder, trainer


def by_hand(model, weighting):
    """The losses of a loop without Lightning, from unreduced cross-entropies; ``model`` is trained."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    losses = []
    for index, batch in enumerate(EPOCH + EPOCH):
        logits = model(batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        loss = (weighting(labels.contiguous()) * each).sum() / (labels != -100).sum()
        (loss / ACCUMULATED).backward()
        losses.append(loss.item())
        if (index + 1) % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_losses_and_parameters_are_those_of_a_loop_by_hand(make_module, tmp_path):
    module = make_module()
    reference = make_module().model
    expected = by_hand(reference, TFIDFWeighting(num_batches=16))

    recorder, _ = fit(module, tmp_path)

    torch.testing.assert_close(recorder.losses, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        module.model.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-6
    )


def test_validation_is_plain_and_leaves_the_window_alone(make_module, tmp_path):
    validated, plain = (make_module(loss) for loss in (None, CrossEntropyLoss()))
    recorder, trainer = fit(validated, tmp_path / "a")
    without, _ = fit(make_module(), tmp_path / "b", validate=False)

    assert recorder.validation
    assert recorder.losses == without.losses
    assert validated.loss.weighting.window.num_updates == NUM_STEPS * ACCUMULATED
    plain.load_state_dict(validated.state_dict(), strict=False)
    found, expected = (
        trainer.validate(module, DataLoader(batches(1, 2), batch_size=None), verbose=False)[0][
            "val_loss"
        ]
        for module in (validated, plain)
    )
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_resumed_run_is_identical(make_module, tmp_path):
    whole = make_module()
    expected, _ = fit(whole, tmp_path / "whole")
    _, trainer = fit(make_module(), tmp_path / "half", NUM_STEPS // 2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = make_module()
    recorder, _ = fit(resumed, tmp_path / "half", checkpoint=tmp_path / "half.ckpt")

    assert recorder.losses == expected.losses[NUM_STEPS // 2 * ACCUMULATED :]
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=0, atol=0)


class ProcessesOfTheTest(LightningEnvironment):
    creates_processes_externally = True


def batches_of_rank(rank):
    """Rows of other lengths than those of another rank."""
    return [
        {name: part[:, rank:] for name, part in batch.items()} for batch in batches(2 + rank, 4)
    ]


def fit_on_rank(rank, checkpoint, folder):
    """Return the state of the weighting."""
    os.environ["LOCAL_RANK"] = str(rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning
        module = module_of_the_page(checkpoint)
        trainer = lightning.Trainer(
            accelerator="cpu",
            default_root_dir=folder,
            devices=2,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            limit_val_batches=0,
            logger=False,
            max_epochs=1,
            plugins=[ProcessesOfTheTest()],
            strategy="ddp",
            use_distributed_sampler=False,
        )
        trainer.fit(module, DataLoader(batches_of_rank(rank), batch_size=None))
    return dict(module.loss.weighting.state_dict())


def test_two_processes_keep_the_window_of_their_own_rows(tiny_checkpoint, tmp_path):
    for rank, state in enumerate(
        on_every_rank(2, tmp_path, fit_on_rank, tiny_checkpoint, tmp_path)
    ):
        alone = TFIDFWeighting(num_batches=16)
        for batch in batches_of_rank(rank):
            alone(
                shift_labels(batch["labels"]),
                vocab_size=state["window.document_frequency_E"].shape[0] - 2,
            )
        assert_same_state(alone, state)
