"""``tfidf_memorization``: what the harness reports is what the library's probe measures."""

import dataclasses
import difflib
import itertools
import operator

import pandas as pd
import pytest
import torch
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import FAMILIES, MEMORIZATION, embedded_ids, prompts_seen, run_tasks
from helpers.references.probe import probe

from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.tasks.memorization import documents

SCORES = ("avg_prefix", "max_prefix", "avg_lms", "max_lms", "rouge_l", "verbatim_rate")
PREFIXES = "tfidf_memorization_prefixes"


def expected(model_folder, probe_file, *, base=None, **settings):
    """The library's own probe of the same model."""
    model = load_model(model_folder, base=base)
    return probe(
        model, hf_tokenizer(str(base or model_folder)), read_probe_file(probe_file), **settings
    )


def sampled(output, tasks=MEMORIZATION):
    samples = []
    for task in tasks:
        samples += [doc["sample"] for doc in output.docs(task)]
    return samples


def as_dicts(samples):
    return [dataclasses.asdict(sample) for sample in samples]


@torch.no_grad()
def continued_alone(model, prompts, num_tokens):
    """Reference by transformers: repeat the most probable next id, without a cache, until EOS,
    which is 0.
    """
    ids = torch.tensor(prompts)
    for _ in range(num_tokens):
        ids = torch.cat(
            [ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1
        )
    continuations = []
    for row in ids[:, len(prompts[0]) :].tolist():
        if 0 in row:
            row = row[: row.index(0)]
        continuations.append(row)
    return continuations


def scores_alone(generated, reference):
    """Prefix and LMS by the standard library."""
    longest = difflib.SequenceMatcher(
        None, generated, reference, autojunk=False
    ).find_longest_match()
    equal = itertools.takewhile(bool, map(operator.eq, generated, reference))
    return sum(equal), longest.size


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_and_means_are_those_of_the_probe(family, models, probe_file, tmp_path):
    settings = {"prefix_lengths": [16, 64], "max_new_tokens": 24, "offset": 7}
    output = run_tasks(models[family], PREFIXES, tmp_path, probe_file=probe_file, **settings)
    samples = expected(models[family], probe_file, **settings)
    assert sampled(output, [PREFIXES]) == as_dicts(samples)
    by_kind = pd.DataFrame(samples).groupby("kind")
    metrics = output.metrics(PREFIXES)
    for name, score in zip(
        SCORES, ("prefix_match", "prefix_match", "lms", "lms", "rouge_l", "verbatim"), strict=True
    ):
        values = by_kind[score].max() if name.startswith("max") else by_kind[score].mean()
        assert metrics[name] == pytest.approx(values["target"], rel=1e-12)
        assert metrics[f"control_{name}"] == pytest.approx(values["control"], rel=1e-12)
    assert (metrics["round_trip"], metrics["num_not_round_trip"]) == (1.0, 0.0)
    # Not the same whatever the model sees.
    assert len({tuple(sample.generated_ids) for sample in samples}) > 5


def test_scores_of_targets_and_controls_equal_those_of_a_loop_with_transformers(
    reciting, probe_file, tmp_path
):
    output = run_tasks(reciting, "tfidf_memorization", tmp_path, probe_file=probe_file)
    model = load_model(reciting)
    passages = read_probe_file(probe_file)
    for length, task in zip((32, 50, 100), MEMORIZATION, strict=True):
        # The loop without a cache takes long: 128 tokens only for the last.
        num_tokens = 128 if length == 100 else 8
        generated = continued_alone(
            model, [passage.token_ids[:length] for passage in passages], num_tokens
        )
        references = [passage.token_ids[length : length + 128] for passage in passages]
        samples = sampled(output, [task])
        assert [sample["generated_ids"][:num_tokens] for sample in samples] == generated
        scores = [
            scores_alone(sample["generated_ids"], ids)
            for sample, ids in zip(samples, references, strict=True)
        ]
        assert [(sample["prefix_match"], sample["lms"]) for sample in samples] == scores
        metrics = output.metrics(task)
        for prefix, kind in (("", "target"), ("control_", "control")):
            of_kind = [
                score
                for score, passage in zip(scores, passages, strict=True)
                if passage.kind == kind
            ]
            for name, values in zip(("prefix", "lms"), zip(*of_kind, strict=True), strict=True):
                assert metrics[f"{prefix}avg_{name}"] == sum(values) / 2
                assert metrics[f"{prefix}max_{name}"] == max(values)
            assert metrics[f"{prefix}verbatim_rate"] == float(kind == "target")
        assert [metrics[name] for name in SCORES] == [128, 128, 128, 128, 100, 1]

    group = {
        name: value
        for name, value in output.metrics("tfidf_memorization", "groups").items()
        if "stderr" not in name
    }
    assert group.keys() == {
        "avg_prefix",
        "avg_lms",
        "rouge_l",
        "verbatim_rate",
        "round_trip",
        "control_avg_prefix",
        "control_avg_lms",
        "control_rouge_l",
        "control_verbatim_rate",
    }
    for name, value in group.items():
        assert value == pytest.approx(sum(output.metrics(task)[name] for task in MEMORIZATION) / 3)
    assert group["avg_lms"] > group["control_avg_lms"] > 0


def test_settings_reach_the_probe(llama, probe_file, tmp_path, monkeypatch):
    monkeypatch.setenv("TFIDF_TUNE_PROBE_FILE", str(probe_file))
    model = {"pretrained": str(llama), "prompts": "token_ids"}
    for value, lengths in (
        ("[16,64]", [16, 64]),
        ("16 64", [16, 64]),
        (16, [16]),
        ([16, 16], [16]),
        ((3,), [3]),
        (..., [32, 50, 100]),  # by default those of the paper
    ):
        docs = documents(**model, **({} if value is ... else {"prefix_lengths": value}))["test"]
        expected = []
        for length in lengths:
            expected += [length] * 4
        assert [doc["prefix_length"] for doc in docs] == expected
        assert {doc["max_new_tokens"] for doc in docs} == {128}
    output = run_tasks(
        llama, MEMORIZATION[1], tmp_path / "one", prefix_lengths=[3], max_new_tokens=1, limit=3
    )
    docs = output.docs(MEMORIZATION[1])
    tokenizer = hf_tokenizer(str(llama))
    assert len(docs) == 3
    for doc, passage in zip(docs, read_probe_file(probe_file), strict=False):
        assert doc["prefix_length"] == 50  # a task of one length keeps it
        assert doc["prompt_text"] == tokenizer.decode(passage.token_ids[:50])
        assert (doc["num_injections"], doc["source"], doc["round_trip"]) == (
            passage.num_injections,
            "words",
            True,
        )


@pytest.mark.parametrize("tokenizer", ["adds_bos", "sentencepiece"])
def test_the_model_sees_exactly_the_first_ids_and_the_bos_of_the_settings(
    tokenizer, tokenizers, tmp_path
):
    """With any tokenizer, and also if a prefix ends within a character."""
    folder = tokenizers[tokenizer]
    model = task_fakes.checkpoint(tmp_path / "model", folder)
    passages = task_fakes.passages_of(folder, num_targets=5)
    file = task_fakes.probe_file(tmp_path / "probe.jsonl", passages)
    with embedded_ids() as calls:
        more = {"max_new_tokens": 2, "offset": 5, "bos": True}
        run_tasks(model, "tfidf_memorization", tmp_path / "out", probe_file=file, **more)
    prompts = [
        passage.token_ids[5 : 5 + length]
        for length, passage in itertools.product((32, 50, 100), passages)
    ]
    bos_id = hf_tokenizer(str(folder)).bos_id
    assert sorted(prompts_seen(calls)) == sorted([bos_id, *prompt] for prompt in prompts)
    with embedded_ids() as calls:
        more["bos"] = False
        run_tasks(model, "tfidf_memorization", tmp_path / "without", probe_file=file, **more)
    assert sorted(prompts_seen(calls)) == sorted(prompts)


def test_eos_ends_a_continuation(tokenizers, probe_file, tmp_path):
    model = task_fakes.random_model()
    ids = read_probe_file(probe_file)[0].token_ids
    # After the last id of the first prompt EOS is the most probable, and it stays so.
    model.lm_head.weight.data[0] = 50 * model.model(torch.tensor([ids[:32]]))[0][0, -1].detach()
    folder = task_fakes.checkpoint(tmp_path / "model", tokenizers["plain"], model)
    output = run_tasks(
        folder, MEMORIZATION[0], tmp_path / "out", probe_file=probe_file, max_new_tokens=20
    )
    samples = sampled(output, MEMORIZATION[:1])
    assert samples[0]["generated_ids"] == []
    assert (samples[0]["lms"], samples[0]["rouge_l"], samples[0]["verbatim"]) == (0, 0.0, False)
    assert samples == as_dicts(
        expected(folder, probe_file, prefix_lengths=(32,), max_new_tokens=20)
    )
