"""Uniform weights are the stock trainer, runs resume exactly, and processes share
what they should.
"""

import os
from importlib.metadata import version

import pytest
import torch
from datasets import Dataset
from helpers.processes.ranks import on_every_rank
from helpers.processes.trainers import load, logs_of, make_trainer, metrics_of, ragged_rows
from packaging.version import Version
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.distributed import DistributedConfig
from trl import SFTTrainer

from tfidf_tune.integrations.transformers import TokenWeightingTrainer, _WeightStatistics
from tfidf_tune.integrations.trl import TokenWeightingSFTTrainer
from tfidf_tune.training._distributed import gather_tensors
from tfidf_tune.weighting import TFIDFWeighting, UniformWeighting

STEPS = 2
RESUMED_AT = 2
TOTAL = 4
WEIGHTED = {Trainer: TokenWeightingTrainer, SFTTrainer: TokenWeightingSFTTrainer}
COUNTED = {TokenWeightingTrainer: "labels", TokenWeightingSFTTrainer: "tokens"}


def check_uniform_is_stock(folder):
    """Losses and gradient norms of the steps, and the loss of evaluation."""
    settings = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 8,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    options = {"settings": settings, "eval_dataset": Dataset.from_list(ragged_rows(10, seed=1))}
    for stock, weighted in WEIGHTED.items():
        found = []
        for trainer_class, added in ((stock, {}), (weighted, {"weighting": UniformWeighting()})):
            trainer = make_trainer(
                trainer_class, folder / "tiny", folder / "out", ragged_rows(200), **options, **added
            )
            trainer.train()
            names = ("loss", "grad_norm", "eval_loss")
            values = []
            for entry in trainer.state.log_history:
                values += [entry[name] for name in names if name in entry]
            found.append(values)
        assert len(found[0]) == 2 * STEPS + 1
        torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=0)


def check_resumed_runs(folder):
    """An uninterrupted run and one that is resumed from its checkpoint are equal; returns the
    entries of a window.
    """
    settings = {"max_steps": TOTAL, "gradient_accumulation_steps": 2}
    settings |= {"save_strategy": "steps", "save_steps": RESUMED_AT}
    for trainer_class, counted in COUNTED.items():
        own_folder = folder / trainer_class.__name__
        logs = []
        states = []
        for checkpoint in (None, str(own_folder / f"checkpoint-{RESUMED_AT}")):
            weighting = TFIDFWeighting(num_batches=3, counted=counted)
            trainer = make_trainer(
                trainer_class,
                folder / "tiny",
                own_folder,
                ragged_rows(100),
                settings=settings,
                weighting=weighting,
            )
            trainer.train(resume_from_checkpoint=checkpoint)
            logs.append(metrics_of(logs_of(trainer)).tolist())
            states.append({**trainer.model.state_dict(), **weighting.state_dict()})
        assert len(logs[0]) == TOTAL
        assert logs[1][RESUMED_AT - TOTAL :] == logs[0][RESUMED_AT:]
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    return states[0]["window.entries_KT"]


def shared_window(folder, world_size=1, *, counted="labels", fused_head=False, is_sharded=False):
    """Metrics with a window of all processes, on eight rows a step however many processes there
    are.
    """
    model = folder / "tiny"
    if is_sharded:  # by FSDP2
        model = load(model, distributed_config=DistributedConfig(fsdp_size=world_size))
    trainer = make_trainer(
        TokenWeightingTrainer,
        model,
        folder / "out",
        ragged_rows(100),
        fused_head=fused_head,
        settings={"max_steps": STEPS, "per_device_train_batch_size": 8 // world_size},
        weighting=TFIDFWeighting(num_batches=2, sync=True, counted=counted),
    )
    trainer.train()
    assert isinstance(trainer.model.get_output_embeddings().weight, DTensor) == is_sharded
    return torch.tensor(metrics_of(logs_of(trainer)))


def weighed_batches(rank):
    """Two mini-batches of a process: mean cross-entropy, weights and labels; weights of process 1
    are up to 2.
    """
    generator = torch.Generator().manual_seed(rank)
    for number in range(2):
        labels = torch.randint(9, (2 - rank, 4), generator=generator)
        labels[:, : 1 + number] = -100
        valid = labels != -100
        weights = torch.rand(labels.shape, generator=generator) * (1 + rank) * valid
        yield torch.rand((), generator=generator), weights, labels


def statistics_of_all():
    """The statistics of all tokens of both processes; the largest weight is of process
    1, above 1.
    """
    batches = [*weighed_batches(0), *weighed_batches(1)]
    weights = torch.cat([weights[labels != -100] for _, weights, labels in batches])
    numbers = torch.tensor([int((labels != -100).sum()) for *_, labels in batches])
    means = torch.stack([mean for mean, *_ in batches])
    assert weights.max() > 1
    return {
        "cross_entropy": float((means * numbers).sum() / numbers.sum()),
        "weight_mean": float(weights.mean()),
        "weight_std": float(weights.std(correction=0)),
        "weight_max": float(weights.max()),
    }


def gathered_statistics(rank):
    statistics = _WeightStatistics(torch.device("cpu"))
    for batch in weighed_batches(rank):
        statistics.add(*batch)
    return statistics.take(lambda values: gather_tensors(values).flatten(0, 1))


def all_on_rank(rank, folder):
    """All of these, in one of two processes that torchrun might have started."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1"}
    check_uniform_is_stock(folder)
    return {
        "statistics": gathered_statistics(rank),
        "window": check_resumed_runs(folder),
        # The fused head uses its weight outside of the wrapped model.
        "labels": [
            shared_window(folder, 2, **o) for o in ({}, {"fused_head": True}, {"is_sharded": True})
        ],
        "tokens": [shared_window(folder, 2, counted="tokens")],
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_checkpoint):
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "tiny").symlink_to(tiny_checkpoint)
    return folder


@pytest.mark.skipif(
    Version(version("transformers")) < Version("5.20"),
    reason="earlier ones cannot resume or shard on two CPUs",
)
def test_two_processes(folder):
    """They do the same; with a window for all of them, also through the fused head and with FSDP2,
    they are one.
    """
    ranks = on_every_rank(2, folder, all_on_rank, folder)

    for rank in ranks:
        assert rank["statistics"] == pytest.approx(statistics_of_all(), rel=1e-5)
    assert not torch.equal(*(rank["window"] for rank in ranks)), "each process has its own window"
    expected = {counted: shared_window(folder, counted=counted) for counted in ("labels", "tokens")}
    assert (expected["tokens"] - expected["labels"])[:, -2:].abs().min() > 1e-4, "prompts count"
    assert expected["labels"][:, -2].min() > 0.1, "weights differ"
    for rank in ranks:
        for counted, values in expected.items():
            for found in rank[counted]:
                torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-6)
