"""The registered experiment: its text, its records' measures, and its analysis."""

import hashlib
import io
import json
import math
import random
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.fakes import runs as fake
from helpers.fakes.probe import a_passage, random_ids, tiny_llama
from omegaconf import OmegaConf

from research.decisive import __main__ as decisive_command
from research.decisive import afterwards, analysis, counts, facts, records
from research.decisive.parts import PARTS
from research.decisive.texts import SMALL, Change, Texts, write_inputs
from research.experiment import load_experiment
from research.files import write_texts
from tfidf_tune.passages import read_probe_file, write_probe_file

REGISTRATION = Path(analysis.__file__).parents[1] / "decisive.yaml"
WORDS = [first + second for first in "bcdfghklmn" for second in ("ale", "ing", "out", "ure", "ast")]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Documentation of random words, in files that the hash of their name divides."""
    file = tmp_path_factory.mktemp("archive") / "source.tar.gz"
    rng = random.Random(0)
    with tarfile.open(file, "w:gz") as members:
        for number in range(300):
            paragraphs = [" ".join(rng.choices(WORDS, k=60)) for _ in range(12)]
            content = "\n\n".join(paragraphs).encode()
            member = tarfile.TarInfo(f"source-1.0/docs/page{number}.txt")
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    return file


@pytest.fixture(scope="module")
def sizes():
    return replace(
        SMALL,
        passage_words=12,
        least_tokens=1,
        most_tokens=100,
        num_targets={8: (2, 1), 2: (3, 1)},
    )


@pytest.fixture(scope="module")
def inputs(archive, sizes, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("decisive") / "seed0"
    content = write_inputs(Texts(archive), tokenizer, sizes, folder, "registered", 0)
    return folder, content


def texts_of(file):
    return [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]


def test_targets_have_their_copies_and_controls_are_in_no_text(inputs):
    folder, content = inputs
    training = texts_of(folder / "train.jsonl")
    passages = read_probe_file(folder / "probe.jsonl")
    other_text = "\n".join([*training, *texts_of(folder / "held_out.jsonl")])
    assert content["targets"] == 2 + 5 + 3 + 5
    assert content["controls"] == 2 * content["targets"]
    for passage in passages:
        if passage.kind == "control":
            assert passage.text not in other_text
        elif passage.source == "exact":
            assert training.count(passage.text) == passage.num_injections
    changed = [one for one in passages if one.source == "replaced 20 %" and one.num_injections == 8]
    (passage,) = changed
    words = passage.text.split()
    distances = []
    for text in training:
        copy = text.split()
        if len(copy) == len(words):
            distances.append(sum(a != b for a, b in zip(words, copy, strict=True)))
    # Of 8 copies with 12 words each every word is changed with a probability of a fifth.
    near = [distance for distance in distances if distance <= 7]
    assert len(near) >= 7
    assert 5 <= sum(near) <= 40


def test_another_seed_has_other_passages_and_development_other_text(
    archive, sizes, inputs, tokenizer, tmp_path
):
    folder, _ = inputs
    write_inputs(Texts(archive), tokenizer, sizes, tmp_path / "seed1", "registered", 1)
    write_inputs(Texts(archive), tokenizer, sizes, tmp_path / "other", "development", 0)
    targets = []
    for place in (folder, tmp_path / "seed1"):
        passages = read_probe_file(place / "probe.jsonl")
        targets.append({one.text for one in passages if one.kind == "target"})
    assert len(targets[0] & targets[1]) < len(targets[0]) / 2
    sections = [
        {text for text in texts_of(place / "train.jsonl") if len(text) > 500}
        for place in (folder, tmp_path / "seed1", tmp_path / "other")
    ]
    assert sections[0] == sections[1]
    assert not sections[0] & sections[2]


def test_counts_say_what_is_removed_and_what_is_shared(inputs, tokenizer, tmp_path):
    folder = shutil.copytree(inputs[0], tmp_path / "seed0")
    targets = [one for one in read_probe_file(folder / "probe.jsonl") if one.kind == "target"]
    # Of another seed, half of the targets are the same in words of another beginning and end.
    other = shutil.copytree(folder, tmp_path / "seed1")
    half = [replace(one, text=f"another {one.text} word") for one in targets[::2]]
    write_probe_file(other / "probe.jsonl", half)
    # Held-out text has the words of a target with 16 copies, and, with a word between, not all.
    exact = next(one for one in targets if one.source == "exact")
    others = [one for one in targets if one != exact]
    write_probe_file(folder / "probe.jsonl", [replace(exact, num_injections=16), *others])
    words = exact.text.split()
    assert len(words) == 12
    held_out = texts_of(folder / "held_out.jsonl")
    held_out += [f"before {exact.text} after", " ".join([*words[:6], "between", *words[6:]])]
    training = [*texts_of(folder / "train.jsonl")[:80], exact.text, exact.text]
    write_texts(folder / "held_out.jsonl", held_out)
    write_texts(folder / "train.jsonl", training)

    found = counts.counts_of(folder, [other], tokenizer)
    assert found["documents"] == len(training)
    assert found["removed"]["usual"] == num_near_copies(training, 5, 0.8) > 0
    assert found["shared_targets"] == [len(half)]
    assert found["held_out_with_targets"] == 1
    num_words = sum(len(text.split()) for text in held_out)
    assert found["words_of_training"] == pytest.approx(12 / num_words)


def num_near_copies(texts, n, threshold):
    """How many texts are as similar to an earlier one that stays: all pairs."""
    kept = []
    for text in texts:
        words = text.lower().split()
        own = {tuple(words[first : first + n]) for first in range(len(words) - n + 1)}
        similarities = [len(own & ngrams) / len(own | ngrams) for ngrams in kept]
        if max(similarities, default=0) < threshold:
            kept.append(own)
    return len(texts) - len(kept)


def test_changes_replace_insert_and_drop_words():
    rng = random.Random(0)
    words = [str(number) for number in range(2000)]
    for kind, length in (("replaced", 2000), ("inserted", 2200), ("dropped", 1800)):
        copy = Change(kind, 0.1).applied(words, ["other"], rng)
        assert abs(len(copy) - length) <= (0 if kind == "replaced" else 60)
        own = [word for word in copy if word != "other"]
        assert own == sorted(own, key=int)
        assert len(own) == (2000 if kind == "inserted" else pytest.approx(1800, abs=60))


def test_questions_follow_the_records_and_begin_with_the_right_answer(inputs):
    folder, _ = inputs
    training = texts_of(folder / "train.jsonl")
    lines = (folder / "facts.jsonl").read_text(encoding="utf-8").splitlines()
    for question in map(json.loads, lines):
        customer = question["prompt"].split("Customer: ")[1].split(".")[0]
        own = [text for text in training if f"Customer: {customer}." in text]
        assert len(own) == 8
        field = question["field"].capitalize()
        assert all(f"{field}:{question['answers'][0]}" in text for text in own)
        assert len(set(question["answers"])) == 4


def record(objective, seed, rate, perplexity, recited):
    return {
        "model": "Llama 0.65M",
        "checkpoint": "checkpoint_100pct",
        "objective": objective,
        "seed": seed,
        "learning_rate": rate,
        "perplexity": perplexity,
        "targets": [
            {"copies": 16, "change": "replaced 10 %", "lms": recited + 2.0},
            {"copies": 1, "change": "replaced 10 %", "lms": 100.0},
            {"copies": 16, "change": "exact", "lms": 50.0},
        ],
        "controls": [{"lms": 1.0}, {"lms": 3.0}],
    }


def test_arms_are_compared_at_the_lowest_perplexity_that_both_reach():
    """The example of the module: at 18, A has 1 + 4 * part, B 0.7."""
    runs = []
    for seed in range(3):
        runs += [
            record("A", seed, 0.001, 20.0, 1.0),
            record("A", seed, 0.002, 16.0, 5.0 + seed),
            record("A", seed, 0.004, 17.0, 50.0),  # beyond the lowest perplexity
            record("B", seed, 0.001, 19.0, 0.5),
            record("B", seed, 0.002, 18.0, 0.7),
        ]
    part = math.log(20 / 18) / math.log(20 / 16)
    expected = [1 + part * (4 + seed) - 0.7 for seed in range(3)]
    found = analysis.contrast(runs, "A", "B", analysis.differs)
    assert found.mean == pytest.approx(sum(expected) / 3)
    assert found.num_seeds == 3
    assert found.low < found.mean < found.high
    assert analysis.contrast(runs, "A", "A", analysis.differs).mean == 0
    assert analysis.cost(runs, "A", "B").mean == pytest.approx(math.log(16 / 18))
    # C has a lower perplexity than B at its only rate, and is read there.
    runs += [record("C", seed, 0.001, 15.0, 3.0) for seed in range(3)]
    for theirs, is_beyond in (("A", False), ("C", True)):
        pairs = analysis.at_equal_perplexity(runs, "B", theirs, analysis.differs)
        assert [pair.is_beyond for pair in pairs] == [is_beyond] * 3


def test_what_is_registered_is_computed_from_records_of_all_arms():
    registration = OmegaConf.to_container(OmegaConf.load(REGISTRATION))
    arms = set()
    for comparison in registration["secondary"]:
        arms |= {comparison["ours"], comparison["theirs"]}
    experiment = load_experiment(str(REGISTRATION.with_name("decisive") / "small.yaml"))
    assert arms | {registration["primary"]["theirs"]} <= set(experiment.objectives)
    runs = []
    for seed in range(3):
        for place, arm in enumerate(experiment.objectives):
            one = record(arm, seed, 0.001, 20.0 + 0.01 * seed * place, place + 0.1 * seed * place)
            runs.append(one | {"facts_known": 0.1 * place})
            # Neither a moment before the end nor another model counts.
            runs.append(one | {"checkpoint": "checkpoint_20pct", "perplexity": 1.0})
            runs.append(one | {"model": "Llama 10M", "perplexity": 1.0})
    found = analysis.registered(runs, registration)
    places = {arm: place for place, arm in enumerate(experiment.objectives)}
    primary = places["Repetition"] - places["CE MinHash best"]
    assert found["primary"].mean == pytest.approx(1.1 * primary)
    for comparison, estimate in found["secondary"]:
        expected = places[comparison["ours"]] - places[comparison["theirs"]]
        factor = {"differ": 1.1, "exact": 0.0, "facts": 0.1}[comparison["what"]]
        assert estimate.mean == pytest.approx(factor * expected)
    # Holm's correction of p-values, by its definition.
    alone = []
    for comparison, _ in found["secondary"]:
        single = registration | {"secondary": [comparison]}
        ((_, estimate),) = analysis.registered(runs, single)["secondary"]
        alone.append(estimate.p_value)
    corrected = [0.0] * len(alone)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(alone)), key=lambda place: alone[place])):
        largest = max(largest, min(1.0, (len(alone) - rank) * alone[place]))
        corrected[place] = largest
    shown = [estimate.p_value for _, estimate in found["secondary"]]
    assert shown == pytest.approx(corrected)
    assert sum(corrected) > sum(alone)
    # The upper end of the interval has to be below the margin, not the mean.
    estimate, is_below = found["non_inferiority"]["CE"]
    assert is_below
    between = math.expm1((estimate.mean + estimate.high) / 2)
    rule = registration["non_inferiority"] | {"margin": between}
    strict = analysis.registered(runs, registration | {"non_inferiority": rule})
    assert not strict["non_inferiority"]["CE"][1]


def test_a_curve_is_read_at_its_ends_beyond_them():
    points = [analysis.Point(0.001, 20.0, 1.0), analysis.Point(0.002, 16.0, 5.0)]
    assert [analysis.recited_at(points, at) for at in (30.0, 20.0, 16.0, 10.0)] == [1, 1, 5, 5]


def test_the_score_of_ngrams_and_the_stop_by_it():
    reference = [1, 2, 3, 4, 5, 6, 7]
    # Of the reference's 4, 3 and 2 n-grams of 4, 5 and 6 tokens, 2, 1 and none are there.
    share = records._share_of_ngrams(reference, [9, 2, 3, 4, 5, 6, 9])
    assert share == pytest.approx((2 / 4 + 1 / 3 + 0) / 3)
    assert records._share_of_ngrams(reference, reference) == 1
    runs = [
        {"checkpoint": name, "targets": [{"ngrams": value}, {"ngrams": 0.0}]}
        for name, value in (("25", 0.0), ("50", 0.1), ("75", 0.3), ("100", 0.1))
    ]
    assert analysis.stopped_early(runs, 0.1)["checkpoint"] == "50"
    assert analysis.stopped_early(runs, 0.01)["checkpoint"] == "25"


def test_records_are_kept_as_columns_and_read_as_rows(tmp_path):
    rows = [{"copies": 64, "lms": 1.23456}, {"copies": 1, "lms": 2.0}]
    file = tmp_path / "records.jsonl"
    line = {"targets": records._columns(rows), "controls": {"lms": [0.5]}}
    file.write_text(json.dumps(line) + "\n")
    (read,) = records.read_records(file)
    assert read["targets"] == [{"copies": 64, "lms": 1.235}, {"copies": 1, "lms": 2.0}]
    assert read["controls"] == [{"lms": 0.5}]


def test_a_finished_model_is_asked_how_likely_continuations_are_and_what_brings_them_back(
    tmp_path, monkeypatch
):
    """Against the definition: a forward pass for each token."""
    model = tiny_llama()
    run = SimpleNamespace(folder=tmp_path / "run", objective="CE", seed=0)
    model.save_pretrained(run.folder / "checkpoint_100pct")
    folder = tmp_path / "inputs" / "small" / "seed0"
    folder.mkdir(parents=True)
    passages = []
    for number, copies in enumerate((16, 4, 1, 0, 0, 0)):
        ids = random_ids(2 * afterwards._TOKENS + 5, seed=number)
        kind = "target" if copies else "control"
        passages.append(replace(a_passage(f"p{number}", ids, kind), num_injections=copies))
    write_probe_file(folder / "probe.jsonl", passages)
    monkeypatch.setattr(afterwards, "INPUTS", tmp_path / "inputs")
    monkeypatch.setattr(afterwards, "hf_tokenizer", lambda _: None)
    monkeypatch.setattr(afterwards, "facts_of", lambda *_: {"facts_known": 0.5})
    monkeypatch.setattr(afterwards, "MOST_STEPS", 1)
    answers = afterwards.answers_of(run)
    # The target with one copy is not asked for, and there are as many controls as targets.
    assert answers["passages"]["copies"] == [16, 4, 0, 0]
    assert answers["passages"]["steps"] == [None] * 4
    asked = [*passages[:2], *passages[3:5]]
    for passage, nll in zip(asked, answers["passages"]["nll"], strict=True):
        expected = 0.0
        for end in range(afterwards._TOKENS, 2 * afterwards._TOKENS):
            logits = model(input_ids=torch.tensor([passage.token_ids[:end]])).logits[0, -1]
            expected -= logits.log_softmax(-1)[passage.token_ids[end]].item()
        assert nll == pytest.approx(expected, abs=2e-3)


def test_a_passage_shares_no_run_of_words_with_other_text(tokenizer, tmp_path):
    """All passages of the file are in base text as well, but for one paragraph."""
    names = {"base": None, "passages": None}
    for number in range(1000):
        name = f"docs/page{number}.txt"
        digest = hashlib.sha256(name.encode()).digest()
        if digest[0] / 256 >= 0.6:  # of development
            continue
        share = digest[1] / 256
        if share < 0.15:
            names["passages"] = name
        elif share >= 0.21:  # others are held out
            names["base"] = name
    rng = random.Random(1)
    shared = [" ".join(rng.choices(WORDS, k=60)) for _ in range(6)]
    own = [" ".join(rng.choices(WORDS, k=60)) for _ in range(3)]
    file = tmp_path / "source.tar.gz"
    with tarfile.open(file, "w:gz") as members:
        for place, paragraphs in (("base", shared), ("passages", shared + own)):
            content = "\n\n".join(paragraphs).encode()
            member = tarfile.TarInfo(f"source-1.0/{names[place]}")
            member.size = len(content)
            members.addfile(member, io.BytesIO(content))
    sizes = replace(
        SMALL, passage_words=12, least_tokens=1, most_tokens=100, num_targets={2: (1, 0)}
    )
    write_inputs(Texts(file), tokenizer, sizes, tmp_path / "seed0", "registered", 0)
    passages = read_probe_file(tmp_path / "seed0" / "probe.jsonl")
    assert len(passages) == 3
    assert all(any(one.text in paragraph for paragraph in own) for one in passages)


def test_facts_are_asked_of_customers_and_of_strangers(tokenizer, tmp_path):
    """Against the definition: a forward pass for each token of an answer."""
    prompt = "Customer: Bafigo. Warehouse:"
    questions = [{"prompt": prompt, "answers": [" Alder.", " Birch.", " Cedar."]}]
    (asked,) = facts.about_strangers(questions, ["Dekula"])
    assert asked["prompt"] == "Customer: Dekula. Warehouse:"
    model = tiny_llama(vocab_size=tokenizer.vocab_size)
    expected = []
    for answer in questions[0]["answers"]:
        ids = tokenizer.encode(prompt + answer, add_bos=False, add_eos=False)
        given = len(tokenizer.encode(prompt, add_bos=False, add_eos=False))
        total = 0.0
        for end in range(given, len(ids)):
            logits = model(input_ids=torch.tensor([ids[:end]])).logits[0, -1]
            total += logits.log_softmax(-1)[ids[end]].item()
        expected.append(total)
    (scores,) = facts.answer_scores(model, tokenizer, questions)
    assert scores == pytest.approx(expected, rel=1e-4)
    (tmp_path / "facts.jsonl").write_text(json.dumps(questions[0]) + "\n")
    record = {"text": "Customer: Dekula. Warehouse: Alder."}
    (tmp_path / "new_records.jsonl").write_text(json.dumps(record) + "\n")
    (of_stranger,) = facts.answer_scores(model, tokenizer, [asked])
    found = facts.facts_of(model, tokenizer, tmp_path)
    assert found["facts_known"] == (scores[0] > max(scores[1:]))
    assert found["facts_of_strangers"] == (of_stranger[0] > max(of_stranger[1:]))
    margins = [one[0] - (one[1] + one[2]) / 2 for one in (scores, of_stranger)]
    assert found["facts_margin"] == pytest.approx(margins[0] - margins[1])


def test_a_checkpoint_is_recorded_once_and_other_settings_are_refused(tmp_path, monkeypatch):
    def a_run(objective, settings, done):
        names = {"model": "Llama 0.65M", "objective": objective, "learning_rate": 0.004, "seed": 0}
        return SimpleNamespace(
            **names,
            settings=settings,
            evaluations={50: None, 100: None},
            is_done=lambda percent: percent in done,
            folder=tmp_path / objective,
            title=objective,
        )

    runs = [a_run("CE", {"max_steps": 5}, {50, 100}), a_run("TF-IDF", {"max_steps": 5}, {50})]
    asked = []

    def recorded(folder, checkpoint, inputs):
        asked.append((folder.name, checkpoint, inputs.name))
        (run,) = [run for run in runs if run.folder == folder]
        names = ("model", "objective", "learning_rate", "seed")
        return {name: getattr(run, name) for name in names} | {"checkpoint": checkpoint}

    monkeypatch.setattr(decisive_command, "RECORDS", tmp_path)
    monkeypatch.setattr(decisive_command, "expand", lambda experiment: runs)
    monkeypatch.setattr(decisive_command, "record_of", recorded)
    part = PARTS["small"]
    assert decisive_command._keep_records(None, part) == {"TF-IDF"}
    expected = [("CE", 50), ("CE", 100), ("TF-IDF", 50)]
    assert asked == [(name, f"checkpoint_{percent}pct", "seed0") for name, percent in expected]
    # The same command again: what is recorded is not asked for.
    runs[1] = a_run("TF-IDF", {"max_steps": 5}, {50, 100})
    assert decisive_command._keep_records(None, part) == set()
    assert asked[3:] == [("TF-IDF", "checkpoint_100pct", "seed0")]
    lines = (tmp_path / part.records).read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4
    runs[0] = a_run("CE", {"max_steps": 6}, {50, 100})
    with pytest.raises(ValueError, match="has CE, checkpoint_50pct, with other settings"):
        decisive_command._keep_records(None, part)


def test_a_record_has_of_each_passage_the_means_of_its_prompts(tmp_path):
    run = tmp_path / "run"
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    passages = []
    samples = []
    likelihoods = []
    for number in range(24):
        kind = ("target", "control")[number % 2]
        words = " ".join(WORDS[(number + step) % len(WORDS)] for step in range(20))
        passage = a_passage(f"p{number:02d}", [1, 2], kind)
        copies = 16 if kind == "target" else 0
        passages.append(replace(passage, text=words, num_injections=copies, source="exact"))
        likelihoods.append(fake.likelihoods(passage.id, kind, nll=number / 10))
        for prefix_length, lms in ((24, number % 7), (40, 2)):
            near = {"edit_distance": lms / 8, "common_subsequence": lms}
            samples.append(
                fake.sample(passage.id, lms, kind=kind, prefix_length=prefix_length, **near)
            )
    write_probe_file(inputs / "probe.jsonl", passages)
    (inputs / "content.json").write_text('{"targets": 12}')
    evaluated = fake.evaluation(samples=samples, passages=tuple(likelihoods))
    fake.write_run(run, fake.run("CE", [evaluated], seed=3, learning_rate=0.004))
    (file,) = (run / "evaluation").rglob("results_*.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    content["results"] = {
        "tfidf_membership": {"auc_loss,none": 0.7, "auc_loss_stderr,none": "N/A", "nll,none": 1.0},
        "tfidf_wikitext2_ppl": {"token_perplexity,none": 15.0},
        "tfidf_other_ppl": {"token_perplexity,none": 2.0},
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    trained = {"seconds": 9.0, "provenance": {"date": "2026-11-29"}}
    (run / "trained.json").write_text(json.dumps(trained))
    record = records.record_of(run, "checkpoint_100pct", inputs)
    assert record["objective"] == "CE"
    assert (record["seed"], record["learning_rate"]) == (3, 0.004)
    assert (record["perplexity"], record["frame_perplexity"]) == (15.0, 2.0)
    assert record["auc"] == {"loss": 0.7}
    assert record["content"] == {"targets": 12}
    assert "facts_known" not in record
    own = [number for number in range(24) if number % 2 == 0]
    targets = record["targets"]
    assert targets["copies"] == [16] * 12
    assert targets["change"] == ["exact"] * 12
    assert targets["lms"] == [(number % 7 + 2) / 2 for number in own]
    assert targets["nll"] == [number / 10 for number in own]
    assert targets["edit_distance"] == pytest.approx([lms / 8 for lms in targets["lms"]], abs=1e-3)
    # Of a reference of 8 tokens, two recited ones are no n-gram of 4, and five are two of five.
    shares = []
    for number in own:
        recited = number % 7
        of_lengths = [max(0, recited - n + 1) / (8 - n + 1) for n in (4, 5, 6)]
        shares.append(sum(of_lengths) / 3 / 2)
    assert targets["ngrams"] == pytest.approx(shares, abs=1e-3)
    assert len(record["controls"]["lms"]) == 12
    assert "copies" not in record["controls"]
