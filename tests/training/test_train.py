"""The training step and loop on a tiny torchtune model; signals, after which the step is finished
and the run saved.
"""

import copy
import json
import os
import signal
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers.fakes.tiny_llama import TINY_LLAMA
from helpers.fakes.tiny_models import MODELS
from helpers.fakes.tiny_run import run_recipe
from helpers.fakes.training_steps import make_batch, step_and_gradients
from helpers.operations import Recorder, assert_no_synchronisation
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from torchtune.models.llama2 import llama2

from tfidf_tune import _signals
from tfidf_tune._signals import stop_request
from tfidf_tune.data import collate_packed
from tfidf_tune.loss import CrossEntropyLoss, WeightedCrossEntropyLoss
from tfidf_tune.training import (
    FinetuneConfig,
    Run,
    TrainState,
    _train,
    agree_on_step,
    check_config,
    prepare_head,
    train,
    train_step,
)
from tfidf_tune.training._metrics import JSONLinesLogger, ProgressLog
from tfidf_tune.training._run import milestone_steps
from tfidf_tune.weighting import (
    GoldfishWeighting,
    MiLeWeighting,
    RepetitionWeighting,
    TFIDFWeighting,
    shift_labels,
)

CPU = torch.device("cpu")
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


@pytest.fixture
def model(device) -> nn.Module:
    torch.manual_seed(0)
    model = llama2(**TINY_LLAMA)
    model.set_num_output_chunks(8)
    return model.to(device)


def test_the_step_follows_the_cross_entropy_of_the_next_token(model):
    batch = make_batch(3)
    reference = copy.deepcopy(model).cpu()
    logits = torch.cat(reference(batch["tokens"]), dim=1)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
    expected.backward()
    expected_gradients = {name: p.grad for name, p in reference.named_parameters()}

    result, gradients = step_and_gradients(model, CrossEntropyLoss(), batch)

    torch.testing.assert_close(result.metrics["loss"], expected.detach())
    torch.testing.assert_close(gradients, expected_gradients)
    assert result.num_tokens == 3 * 23


def test_gradients_are_clipped_and_the_norm_before_is_reported(model):
    batch = make_batch(2)
    unclipped, free = step_and_gradients(model, CrossEntropyLoss(), batch)
    norm = torch.sqrt(sum(g.square().sum() for g in free.values()))

    result, clipped = step_and_gradients(model, CrossEntropyLoss(), batch, clip_grad_norm=0.1)

    torch.testing.assert_close(
        torch.sqrt(sum(g.square().sum() for g in clipped.values())), torch.tensor(0.1)
    )
    torch.testing.assert_close(result.metrics["grad_norm"], norm)
    torch.testing.assert_close(unclipped.metrics["grad_norm"], norm)


def test_metrics_of_an_accumulated_step_cover_all_its_mini_batches(model):
    """Weights also where their mean is not 1."""
    weighting, same = (
        RepetitionWeighting(h=2, k=2, span=1, min_length=1, sample=1, alpha=1.0, num_buckets=2**16)
        for _ in range(2)
    )
    loss = WeightedCrossEntropyLoss(same)
    batches = [make_batch(2, seed=0), make_batch(2, seed=0)]
    batches[1]["tokens"][:, 16:] = batches[1]["labels"][:, 16:] = 7
    batches[1]["labels"][:, :4] = -100
    labels = [shift_labels(batch["labels"]) for batch in batches]
    weights = torch.cat([weighting(label, vocab_size=320)[label != -100] for label in labels])

    plain, _ = step_and_gradients(model, CrossEntropyLoss(), *batches)
    result, _ = step_and_gradients(model, loss, *batches)
    single = [step_and_gradients(model, CrossEntropyLoss(), batch)[0] for batch in batches]

    assert 0.5 < weights.mean() < 0.95
    assert [plain.metrics[f"weight_{name}"] for name in ("mean", "std", "max")] == [1, 0, 1]
    torch.testing.assert_close(result.metrics["weight_mean"], weights.mean())
    torch.testing.assert_close(result.metrics["weight_std"], weights.std(correction=0))
    torch.testing.assert_close(result.metrics["weight_max"], weights.max())
    # Each mini-batch counts by its number of tokens.
    losses = torch.stack([step.metrics["loss"] for step in single])
    tokens = torch.tensor([step.num_tokens for step in single])
    torch.testing.assert_close(
        result.metrics["cross_entropy"], (losses * tokens).sum() / tokens.sum()
    )
    assert not any(value.requires_grad for value in result.metrics.values()), (
        "no graph stays in memory"
    )


WEIGHTINGS = {
    "TF-IDF": TFIDFWeighting(),
    "repetition": RepetitionWeighting(num_buckets=2**16),
    "MiLe": MiLeWeighting(),
    "Goldfish": GoldfishWeighting(),
}


STEPS = [
    *(("llama", name) for name in WEIGHTINGS),
    *((name, "TF-IDF") for name in ("qwen2-tied", "gpt_neox", "gptj")),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "weighting"), STEPS)
def test_a_step_on_a_device_neither_reads_from_it_nor_makes_tensors_on_the_host(
    name, weighting, packed, monkeypatch
):
    """Either would make a GPU wait. The meta device stands for it."""
    loss = WeightedCrossEntropyLoss(copy.deepcopy(WEIGHTINGS[weighting])).to("meta").train()
    with torch.device("meta"):
        model = MODELS[name].build(lora=name == "llama")
    prepare_head(model, loss)
    batches = [make_batch(3, seed=seed) for seed in range(2)]
    if packed:
        rows = {"seq_lens": torch.tensor([10, 14])}
        batches = [
            collate_packed(
                [{**rows, "tokens": row, "labels": row} for row in one["tokens"]], device="cuda"
            )
            for one in batches
        ]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    agreed = agree_on_step(batches)
    # There is none on the meta device.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    step = partial(train_step, model, loss, optimizer, scaler=NO_SCALER, clip_grad_norm=1.0)

    with Recorder() as recorder:
        result = step(agreed, device=torch.device("meta"))

    assert_no_synchronisation(recorder)
    assert {value.device.type for value in result.metrics.values()} == {"meta"}


def test_milestones_fall_on_the_first_step_at_which_the_share_is_done():
    for total, expected in (
        (100, {10: 10, 25: 25, 50: 50, 75: 75, 100: 100}),
        (21, {3: 10, 6: 25, 11: 50, 16: 75, 21: 100}),
        (3, {1: 25, 2: 50, 3: 100}),  # one for each step
    ):
        assert milestone_steps([100, 10, 25, 50, 75, 10], total) == expected


def test_metrics_are_logged_every_n_steps_and_at_the_end(tmp_path, capsys):
    """JSON has neither NaN nor infinity, which a gradient norm is where fp16 overflows: they become
    null.
    """

    def refuse(constant):
        raise AssertionError(constant)

    progress = ProgressLog(
        [JSONLinesLogger(tmp_path / "metrics.jsonl")], total_steps=5, log_every_n_steps=2
    )
    progress.start()
    for step in range(1, 6):
        progress.step(
            step, {"loss": torch.tensor(float(step)), "grad_norm": torch.tensor(float("inf"))}, 7
        )
    progress.close()

    found = (tmp_path / "metrics.jsonl").read_text().splitlines()
    lines = [json.loads(line, parse_constant=refuse) for line in found]
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in lines] == [
        (2, 2.0, None),
        (4, 4.0, None),
        (5, 5.0, None),
    ]
    assert all(line["tokens_per_second_per_gpu"] > 0 for line in lines)
    bar = capsys.readouterr().err
    assert all(text in bar for text in ("loss 5.0000", "tokens/s", "5/5"))


def test_the_loop_sets_training_mode_and_leaves_saves_out_of_the_clock(recipe_config):
    def collate(rows):
        calls.append("batch")
        return {"tokens": torch.stack(rows), "labels": torch.stack(rows)}

    cfg = check_config(recipe_config(batch_size=2, save_at_percent=[50, 100]), FinetuneConfig)
    rows = [*make_batch(6)["tokens"]]
    calls = []
    loader = DataLoader(
        rows, batch_size=2, sampler=StatefulDistributedSampler(rows, 1, 0), collate_fn=collate
    )
    network = torch.nn.Sequential(torch.nn.Embedding(320, 320)).eval()
    loss = CrossEntropyLoss().eval()
    progress = SimpleNamespace(
        total_steps=3,
        start=lambda: calls.append("start"),
        step=lambda step, *_: calls.append(f"step {step}"),
        restart_clock=lambda: calls.append("restart"),
        note=calls.append,
    )
    resume = SimpleNamespace(
        step=0,
        is_kept=True,
        restore_random_states=lambda: calls.append("random states"),
        save=lambda step, *_: calls.append(f"resume {step}"),
    )

    train(
        cfg,
        TrainState(network, loss, torch.optim.SGD(network.parameters(), lr=0.0), None, NO_SCALER),
        loader,
        Run(CPU, torch.float32, 0, Path("run")),
        progress,
        resume,
        save=lambda folder: calls.append(str(folder)),
    )

    assert network.training
    assert loss.training
    # The second batch is fetched before the metrics of the first step are read, which waits for a
    # GPU; the one after a milestone only when that is saved, because an error in the data must not
    # cost the checkpoint.
    assert calls == [
        "start",
        "random states",
        "batch",
        "batch",
        "step 1",
        "step 2",
        "run/checkpoint_50pct",
        "resume 2",
        "restart",
        "batch",
        "step 3",
        "run/checkpoint_100pct",
        "resume 3",
        "restart",
    ]


SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]


@pytest.fixture(autouse=True)
def no_nohup():
    """The tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def clock(monkeypatch):
    time = [100.0]
    monkeypatch.setattr(_signals.time, "monotonic", lambda: time[0])
    return time


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_a_signal_is_one_request_until_the_block_ends_and_a_later_one_ends_at_once(
    clock, number, code
):
    """A terminal sends Ctrl-C to every process, and torchrun repeats it."""
    before = {each: signal.getsignal(each) for each, _ in SIGNALS}
    with stop_request() as request:
        assert request.signal_number == 0
        for _ in range(4):
            send(number)
            clock[0] += 0.7
        assert request.signal_number == number
        clock[0] += 3.1
        with pytest.raises(SystemExit) as ended:
            send(number)

    assert ended.value.code == code
    assert {each: signal.getsignal(each) for each, _ in SIGNALS} == before


def test_a_signal_in_the_last_step_lets_the_run_finish(recipe_config, monkeypatch):
    original = _train.train_step

    def train_step(*args, **kwargs):
        send(signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(_train, "train_step", train_step)

    assert (run_recipe(recipe_config(max_steps=1)) / "checkpoint_100pct").is_dir()
