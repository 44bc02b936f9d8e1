"""The monitor in transformers' Trainer and TRL's SFTTrainer: what it logs, what it leaves alone,
what ends training.
"""

from dataclasses import replace
from itertools import product
from pathlib import Path

import datasets
import numpy as np
import peft
import pytest
import torch
import transformers
import trl
from helpers.docs_snippets import snippet
from helpers.fakes.tiny_llama import VOCAB_SIZE
from helpers.fakes.tiny_run import means_by_kind
from helpers.references.probe import probe

from tfidf_tune.data import hf_tokenizer, tokenizer_fingerprint
from tfidf_tune.integrations.monitor import MemorizationCallback
from tfidf_tune.passages import Passage, read_probe_file, write_probe_file
from tfidf_tune.probe import load_model

pytestmark = [
    # TRL sets it in its own arguments.
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning"),
    # PEFT 0.18 reads an attribute that transformers 5 has renamed.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

NUM_TOKENS = 40
PREFIX = 8
EVERY = 4
MEASURED = {
    f"memorization_{kind}_{name}"
    for kind, name in product(("target", "control"), ("lms", "prefix_match", "nll"))
}


@pytest.fixture(scope="module")
def probe_file(tmp_path_factory, tiny_checkpoint, text_file):
    """Four targets and four controls of 40 tokens."""
    tokenizer = hf_tokenizer(str(tiny_checkpoint))
    texts = text_file.read_text().splitlines()[:8]
    passages = []
    for number, text in enumerate(texts):
        kind = "target" if number < 4 else "control"
        passages.append(
            Passage(
                id=f"{kind}-{number}",
                kind=kind,
                text=text,
                token_ids=tokenizer.encode(text, add_eos=False)[:NUM_TOKENS],
                num_injections=0,
                positions=[],
                source="grammar",
                tokenizer=tokenizer.name,
                tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            )
        )
    file = tmp_path_factory.mktemp("probe") / "probe.jsonl"
    write_probe_file(file, passages)
    return file


@pytest.fixture
def make_trainer(tmp_path, tiny_checkpoint, probe_file):
    """Make a trainer on the targets: ``make_trainer("name", kind="SFTTrainer", max_steps=20)``."""

    def make(name="run", *, kind="Trainer", lora=False, tokenizer=tiny_checkpoint, **settings):
        return trainer_on(
            tiny_checkpoint, probe_file, tmp_path / name, kind, lora, tokenizer, **settings
        )

    return make


def trainer_on(
    checkpoint, probe_file, output_dir, kind="Trainer", lora=False, tokenizer=None, **settings
):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attention_dropout=0.1)
    if lora:
        torch.manual_seed(0)
        model = peft.get_peft_model(
            model, peft.LoraConfig(lora_dropout=0.1, target_modules="all-linear")
        )
    rows = [
        {"input_ids": passage.token_ids}
        for passage in read_probe_file(probe_file)
        if passage.kind == "target"
    ]
    arguments = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "max_steps": 10,
        "logging_steps": 2,
        "learning_rate": 2e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
    } | settings
    given = {
        "processing_class": tokenizer and transformers.AutoTokenizer.from_pretrained(tokenizer)
    }
    if kind == "SFTTrainer":
        return trl.SFTTrainer(
            model,
            trl.SFTConfig(**arguments),
            train_dataset=datasets.Dataset.from_list(rows),
            **given,
        )
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    return transformers.Trainer(
        model, transformers.TrainingArguments(**arguments), train_dataset=rows, **given
    )


def monitor(trainer, probe_file, every_n_steps=EVERY, **settings):
    settings = {"prefix_length": PREFIX, "batch_size": 3} | settings
    trainer.add_callback(
        MemorizationCallback(probe_file, every_n_steps, trainer=trainer, **settings)
    )
    return trainer


def measurements(trainer):
    """The monitor's entries by their step, none of which is measured twice, also where a run is
    resumed.
    """
    entries = [entry for entry in trainer.state.log_history if MEASURED & entry.keys()]
    by_step = {entry["step"]: entry for entry in entries}
    assert len(by_step) == len(entries)
    return by_step


def of_training(trainer):
    """The trainer's own entries, without times."""
    return [
        {
            name: value
            for name, value in entry.items()
            if not name.endswith(("_runtime", "_per_second"))
        }
        for entry in trainer.state.log_history
        if not MEASURED & entry.keys()
    ]


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_checkpointing": True, "max_steps": 42},
        {"kind": "SFTTrainer", "lora": True, "bf16": True},
    ],
    ids=str,
)
def test_training_is_the_same_with_and_without_the_monitor(
    make_trainer, probe_file, tiny_checkpoint, settings
):
    """Dropout is on. The monitor measures at steps with and without an entry of the trainer, and at
    the last.
    """
    alone = make_trainer("alone", **settings)
    alone.train()
    expected = weights(alone)
    state = torch.get_rng_state()
    monitored = monitor(make_trainer("monitored", **settings), probe_file)

    monitored.train()

    assert of_training(monitored) == of_training(alone)
    assert_equal(weights(monitored), expected)
    assert torch.equal(torch.get_rng_state(), state)
    num_steps = settings.get("max_steps", 10)
    assert [*measurements(monitored)] == [*range(0, num_steps, EVERY), num_steps]
    assert all(
        entry.keys() == {*MEASURED, "epoch", "step"} for entry in measurements(monitored).values()
    )
    first, *_, last = measurements(monitored).values()
    assert last["memorization_target_nll"] < first["memorization_target_nll"] - 0.1
    if "lora" in settings:
        return
    # The numbers are those of the probe on the checkpoint.
    monitored.save_model()
    model = load_model(monitored.args.output_dir)
    tokenizer = hf_tokenizer(str(tiny_checkpoint))
    samples = probe(model, tokenizer, read_probe_file(probe_file), prefix_lengths=(PREFIX,))
    expected = means_by_kind(samples)
    assert {name: last[name] for name in expected} == expected
    assert last["memorization_target_lms"] > last["memorization_control_lms"]


def test_a_run_that_the_threshold_ends_can_be_resumed(make_trainer, probe_file, capsys):
    """The resumed run has another threshold and ends as a run without a monitor; its log says once
    what ended it.
    """
    settings = {"max_steps": 24, "save_strategy": "steps", "save_steps": 100}
    alone = make_trainer("alone", **settings)
    alone.train()
    stopped = monitor(make_trainer("stopped", **settings), probe_file, stop_above=2.5)
    stopped.train()

    step = stopped.state.global_step
    assert 0 < step < 24
    assert [*measurements(stopped)] == [*range(0, step + 1, EVERY)]
    above = [entry["memorization_target_lms"] > 2.5 for entry in measurements(stopped).values()]
    assert above == [False] * (len(above) - 1) + [True]
    assert (
        capsys.readouterr().err.count(
            f"training stops after step {step}: the targets' mean LMS is "
        )
        == 1
    )

    resumed = monitor(make_trainer("stopped", **settings), probe_file)
    resumed.train(resume_from_checkpoint=f"{stopped.args.output_dir}/checkpoint-{step}")

    assert [*measurements(resumed)] == [*range(0, 25, EVERY)]
    assert measurements(resumed)[step] == measurements(stopped)[step]
    assert_equal(weights(resumed), weights(alone))


@pytest.mark.parametrize(("lora", "stop_above"), [(False, 3), (True, 0.9)])
def test_the_last_model_below_the_threshold_is_kept(
    make_trainer, probe_file, tiny_checkpoint, capsys, lora, stop_above
):
    trainer = make_trainer(lora=lora, max_steps=20, learning_rate=5e-2 if lora else 2e-2)
    leftover = Path(trainer.args.output_dir) / ".below_threshold"
    leftover.mkdir(parents=True)
    (leftover / "of a run that was killed").touch()
    monitor(trainer, probe_file, stop_above=stop_above, when_above="keep").train()

    assert trainer.state.global_step == 20
    lms = {step: entry["memorization_target_lms"] for step, entry in measurements(trainer).items()}
    step = max(step for step, mean in lms.items() if mean <= stop_above)
    assert 0 < step < 20
    assert {path.name for path in Path(trainer.args.output_dir).iterdir()} == {"below_threshold"}
    kept = Path(trainer.args.output_dir) / "below_threshold"
    samples = probe(
        load_model(kept, base=tiny_checkpoint if lora else None),
        hf_tokenizer(str(kept)),
        [passage for passage in read_probe_file(probe_file) if passage.kind == "target"],
        prefix_lengths=(PREFIX,),
    )
    assert np.mean([sample.lms for sample in samples]) == lms[step]
    assert (
        f"above stop_above={stop_above}; the last model below it is in {kept}\n"
        in capsys.readouterr().err
    )

    trainer.args.max_steps = 1  # the same trainer begins anew and replaces it
    trainer.train()
    again = make_trainer(lora=lora, max_steps=1)  # in the same folder
    with pytest.raises(ValueError, match="below_threshold is of another run: move it away"):
        monitor(again, probe_file, stop_above=stop_above, when_above="keep").train()
    assert any(kept.iterdir())


def test_the_snippet_of_the_page_works(make_trainer, probe_file, tmp_path, monkeypatch):
    passages = [
        replace(one, token_ids=one.token_ids[:20] * 3) for one in read_probe_file(probe_file)
    ]
    write_probe_file(tmp_path / "probe.jsonl", passages)
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(max_steps=1)

    exec(snippet("trainers.md", "The monitor"), {"trainer": trainer})
    trainer.train()

    assert [*measurements(trainer)] == [0, 1]


def test_wrong_settings_are_refused(make_trainer, probe_file):
    trainer = make_trainer()
    for settings, message in (
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"when_above": "end"}, "when_above is 'end'"),
        ({"prefix_length": NUM_TOKENS}, f"'target-0' has {NUM_TOKENS} tokens"),
        ({"stop_above": 100}, "stop_above is 100"),
    ):
        with pytest.raises(ValueError, match=message):
            monitor(trainer, probe_file, **settings)


def test_a_model_that_cannot_be_measured_is_refused(make_trainer, probe_file):
    trainer = make_trainer()
    sizes = {"vocab_size": VOCAB_SIZE}
    small = make_trainer().model
    small.resize_token_embeddings(VOCAB_SIZE // 8)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    t5 = transformers.T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, **sizes)
    gpt = transformers.OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2, **sizes)
    for model, message in (
        (small, "the ids 0 to 39"),
        (peft.get_peft_model(trainer.model, prompts), "prompt tuning"),
        (transformers.T5ForConditionalGeneration(t5), "T5ForConditionalGeneration"),
        (transformers.OpenAIGPTLMHeadModel(gpt), "OpenAIGPTLMHeadModel takes no past_key_values"),
    ):
        trainer.model = model
        with pytest.raises(ValueError, match=message):
            monitor(trainer, probe_file)
