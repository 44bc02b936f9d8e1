"""``tfidf_memorization`` with noise in the prompts, with samples and with beam search."""

import pytest
import torch
from helpers.fakes.tasks import MEMORIZATION, embedded_ids, prompts_seen, run_tasks
from lm_eval.api.instance import Instance
from rouge_score.rouge_scorer import _lcs_table
from test_memorization_task import scores_alone
from torchmetrics.functional.text.helper import _edit_distance

from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results
from tfidf_tune.tasks._requests import parse_token_ids, token_ids_request
from tfidf_tune.tasks._transformers import TokenExactHFLM
from tfidf_tune.tasks.memorization import documents

TASK = MEMORIZATION[0]


@torch.no_grad()
def beam_search(model, ids, num_tokens, num_beams):
    """Reference: keep the beams of the highest sum of log-probabilities, one forward pass for each,
    no cache.
    """
    beams = [(0.0, [])]
    for _ in range(num_tokens):
        longer = []
        for score, chosen in beams:
            log_probs = (
                model(input_ids=torch.tensor([ids + chosen]))
                .logits[0, -1]
                .double()
                .log_softmax(dim=-1)
            )
            best = log_probs.topk(num_beams)
            longer += [
                (score + value, [*chosen, token])
                for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        beams = sorted(longer, reverse=True)[:num_beams]
    return beams[0][1]


def test_noise_replaces_a_share_of_the_prompt_and_keeps_the_answer(
    llama, reciting, probe_file, tmp_path
):
    settings = {"pretrained": str(llama), "prompts": "token_ids", "probe_file": str(probe_file)}
    settings |= {"prefix_lengths": [20, 50], "offset": 3}
    clean, noisy, again = (
        documents(**settings, prompt_noise=noise)["test"] for noise in (0, 0.1, 0.1)
    )
    assert set(clean["prompt_noise"]) == {None}
    assert noisy.to_list() == again.to_list()
    known = set()
    for passage in read_probe_file(probe_file):
        known.update(passage.token_ids)
    places = set()
    for before, after in zip(clean, noisy, strict=True):
        changed = [
            i
            for i, pair in enumerate(zip(before["prompt_ids"], after["prompt_ids"], strict=True))
            if len({*pair}) > 1
        ]
        assert len(changed) == before["prefix_length"] // 10
        assert {after["prompt_ids"][i] for i in changed} <= known
        assert after["reference_ids"] == before["reference_ids"]
        places.add(tuple(changed))
    assert len(places) == len(noisy)
    recited = {}
    for noise in (0, 0.5):
        with embedded_ids() as calls:
            output = run_tasks(
                reciting, TASK, tmp_path / str(noise), probe_file=probe_file, prompt_noise=noise
            )
        assert sorted(prompts_seen(calls)) == sorted(doc["prompt_ids"] for doc in output.docs(TASK))
        recited[noise] = (
            output.metrics(TASK)["avg_lms"],
            import_results([output.folder]).checkpoints[0].asked,
        )
    assert recited[0.5][0] < recited[0][0] == 128
    assert recited[0.5][1] != recited[0][1]  # so that they are not compared


def test_samples_are_distributed_as_the_model_predicts(llama, probe_file):
    ids = read_probe_file(probe_file)[0].token_ids[:32]
    model = TokenExactHFLM(str(llama), device="cpu", dtype="float32", batch_size=512)
    ways = {"do_sample": True, "temperature": 0.2, "top_k": 5}
    arguments = (token_ids_request(ids), {"until": [], "max_gen_toks": 1, **ways})
    requests = [
        Instance("generate_until", {"generation": ways}, arguments, idx=i) for i in range(2000)
    ]
    state = torch.random.get_rng_state()
    drawn = model.generate_until(requests, True)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(1)
    assert model.generate_until(requests[:1000], True) == drawn[:1000]  # seeded by the prompt
    with torch.no_grad():
        best = (load_model(llama)(torch.tensor([ids])).logits[0, -1] / 0.2).topk(5)
    for token, share in zip(
        best.indices.tolist(), best.values.softmax(dim=0).tolist(), strict=True
    ):
        assert drawn.count(str(token)) / len(drawn) == pytest.approx(share, abs=0.04)
    assert set(drawn) <= {str(token) for token in best.indices.tolist()}


def test_each_measure_is_the_best_of_all_samples(reciting, probe_file, tmp_path):
    settings = {"num_samples": 5, "temperature": 4.0, "top_k": 12, "max_new_tokens": 24}
    output = run_tasks(reciting, TASK, tmp_path, probe_file=probe_file, **settings)
    number_of_best = set()
    for logged in output.samples(TASK):
        sample = logged["doc"]["sample"]
        [responses] = {tuple(one[0] for one in logged["resps"])}
        generated = [parse_token_ids(response) for response in responses]
        assert len(generated) == 5
        reference = sample["reference_ids"]
        prefixes, lms = zip(*(scores_alone(ids, reference) for ids in generated), strict=True)
        common = [_lcs_table(ids, reference)[-1][-1] for ids in generated]
        distances = [
            _edit_distance(ids, reference) / max(len(ids), len(reference)) for ids in generated
        ]
        best = max(prefixes), max(lms), max(common), min(distances)
        names = ("prefix_match", "lms", "common_subsequence", "edit_distance")
        assert tuple(sample[name] for name in names) == pytest.approx(best)
        assert _lcs_table(sample["generated_ids"], reference)[-1][-1] == max(common)
        number_of_best.add(generated.index(sample["generated_ids"]))
    assert len(number_of_best) > 1
    assert import_results([output.folder]).checkpoints[0].samples  # the scores are consistent


def test_beams_are_those_of_a_plain_search_whatever_the_generation_config(
    llama, tokenizers, probe_file, tmp_path
):
    model = load_model(llama)
    model.generation_config.update(
        repetition_penalty=5.0, no_repeat_ngram_size=2, temperature=0.1, do_sample=True
    )
    model.save_pretrained(tmp_path / "model")
    for file in tokenizers["plain"].iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    settings = {"probe_file": probe_file, "max_new_tokens": 5}
    beams = run_tasks(tmp_path / "model", TASK, tmp_path / "beams", num_beams=4, **settings).docs(
        TASK
    )
    greedy = run_tasks(llama, TASK, tmp_path / "greedy", **settings).docs(TASK)
    generated = [doc["sample"]["generated_ids"] for doc in beams]
    assert generated == [beam_search(load_model(llama), doc["prompt_ids"], 5, 4) for doc in beams]
    assert generated != [doc["sample"]["generated_ids"] for doc in greedy]
