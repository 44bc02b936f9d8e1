"""``tfidf_wikitext2_ppl``: equal to a plain loop over the blocks."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers.fakes import tasks as task_fakes
from helpers.fakes.tasks import FAMILIES, embedded_ids, prompts_seen, run_tasks
from lm_eval.models.huggingface import HFLM

from tfidf_tune.compare import comparison_report
from tfidf_tune.data import embedded_documents, hf_tokenizer, text_blocks
from tfidf_tune.probe import load_model
from tfidf_tune.results import import_results
from tfidf_tune.tasks.perplexity import perplexity

TASK = "tfidf_wikitext2_ppl"


def blocks_of(folder, wiki_file, block_size=64):
    lines = Path(wiki_file).read_text(encoding="utf-8").split("\n")
    return text_blocks(hf_tokenizer(str(folder)), lines, block_size=block_size)


@torch.no_grad()
def log_likelihoods(model, blocks):
    """Of each block: one row and one id at a time, in float64 from the logits on."""
    sums = []
    for block in torch.from_numpy(blocks).long():
        log_probs = model(input_ids=block[None, :-1]).logits[0].double().log_softmax(dim=-1)
        sums.append(sum(log_probs[i - 1, block[i]].item() for i in range(1, len(block))))
    return sums


@pytest.mark.parametrize("family", FAMILIES)
def test_it_equals_a_plain_loop(family, models, wiki_file, tmp_path):
    output = run_tasks(
        models[family], TASK, tmp_path, wikitext2_source=wiki_file, block_size=64, batch_size=3
    )
    blocks = blocks_of(models[family], wiki_file)
    expected = log_likelihoods(load_model(models[family]), blocks)
    docs = output.docs(TASK)
    assert [doc["block"] for doc in docs] == [*range(len(blocks))]
    assert {doc["num_predictions"] for doc in docs} == {63}
    assert [doc["log_likelihood"] for doc in docs] == pytest.approx(expected, rel=1e-5)
    metrics = output.metrics(TASK)
    assert metrics["token_perplexity"] == pytest.approx(
        math.exp(-sum(expected) / blocks[:, 1:].size), rel=1e-4
    )
    assert metrics["round_trip"] == 1.0


@pytest.mark.parametrize("log_likelihood", [-math.inf, math.nan, -1e5])
def test_one_block_of_a_model_that_diverged_makes_the_perplexity_infinite(log_likelihood):
    assert perplexity([(-20.0, 10), (-20.0, 10)]) == pytest.approx(math.exp(2))
    assert perplexity([(-20.0, 10), (log_likelihood, 10)]) == math.inf


def test_one_run_has_the_perplexity_of_a_second_text_and_reports_name_it(
    llama, wiki_file, tmp_path
):
    texts = embedded_documents("docstrings_validation")[:20]
    other_file = tmp_path / "other.jsonl"
    other_file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    blocks = text_blocks(hf_tokenizer(str(llama)), texts, block_size=64)[:5]
    settings = {
        "wikitext2_source": wiki_file,
        "other_source": other_file,
        "block_size": 64,
        "num_blocks": 5,
    }
    output = run_tasks(llama, [TASK, "tfidf_other_ppl"], tmp_path / "one", **settings)
    for task, expected in ((TASK, blocks_of(llama, wiki_file)[:5]), ("tfidf_other_ppl", blocks)):
        sums = log_likelihoods(load_model(llama), expected)
        assert [doc["log_likelihood"] for doc in output.docs(task)] == pytest.approx(sums, rel=1e-5)

    shutil.copytree(tmp_path / "one", tmp_path / "two")
    results = import_results([f"CE={tmp_path / 'one'}", f"Goldfish={tmp_path / 'two'}"])
    units = results.scores.groupby("metric", observed=True)["unit"].nunique()
    assert units.to_dict() == {"nll": 5, "other_nll": 5, "vocab_size": 1, "has_bos": 1}
    made = comparison_report(results)
    tables = {table.name: table for table in made.tables}
    expected = math.exp(-sum(sums) / (5 * 63))
    assert tables["other_perplexity"].frame["Other perplexity"].tolist() == pytest.approx(
        [expected] * 2, rel=1e-4
    )
    assert tables["perplexity"].frame["Perplexity"].tolist() != pytest.approx(
        [expected] * 2, rel=1e-2
    )
    size = hf_tokenizer(str(llama)).vocab_size  # the weights are random
    assert re.search(
        rf"Hardly learned: .*CE, seed unknown \(perplexity [\d,]+, vocabulary {size:,}\)",
        made.verdict,
    )


@pytest.mark.parametrize("num_blocks", [None, 2])
def test_blocks_that_share_text_with_what_was_trained_on_are_left_out(
    num_blocks, llama, wiki_file, tmp_path
):
    """Seen are most of a block, the end of the last, 11 tokens of another, and 16 over a border, 8
    on each side.
    """
    tokenizer = hf_tokenizer(str(llama))
    blocks = blocks_of(llama, wiki_file, 32)
    assert len(blocks) >= 6
    over_a_border = [*blocks[3, 24:], *blocks[4, :8]]
    seen = [blocks[1, 4:28], blocks[2, 20:31], over_a_border, blocks[-1, 18:]]
    train = tmp_path / "train.txt"
    train.write_text("\n".join(tokenizer.decode([int(token) for token in ids]) for ids in seen))
    lines = train.read_text().split("\n")
    trained = [tokenizer.encode(line.strip(), add_bos=False, add_eos=False) for line in lines]

    def windows(ids):
        return {tuple(ids[start : start + 12]) for start in range(len(ids) - 11)}

    trained_windows = set().union(*(windows(ids) for ids in trained))

    def shares(block):
        return not trained_windows.isdisjoint(windows(block))

    expected = [block for block in blocks.tolist() if not shares(block)][:num_blocks]
    assert shares(blocks[1].tolist())
    assert shares(blocks[-1].tolist())
    assert not shares(blocks[3].tolist())
    with embedded_ids() as calls:
        run_tasks(
            llama,
            TASK,
            tmp_path / "out",
            wikitext2_source=wiki_file,
            block_size=32,
            train_source=train,
            shared_tokens=12,
            **({} if num_blocks is None else {"num_blocks": num_blocks}),
        )
    assert sorted(prompts_seen(calls)) == sorted(block[:-1] for block in expected)


@pytest.mark.parametrize(
    ("tokenizer", "add_bos_token"),
    [("plain", None), ("adds_bos", None), ("sentencepiece", True), ("llama", False)],
)
def test_by_ids_the_bos_of_the_settings_is_seen_and_as_text_the_tokens_that_the_harness_scores_are_counted(
    tokenizer, add_bos_token, tokenizers, wiki_file, tmp_path, monkeypatch
):
    folder = tokenizers[tokenizer]
    model = task_fakes.checkpoint(tmp_path / "model", folder)
    blocks = blocks_of(folder, wiki_file, 32).tolist()
    settings = {"wikitext2_source": wiki_file, "block_size": 32, "batch_size": 1}
    with embedded_ids() as calls:
        run_tasks(model, TASK, tmp_path / "ids", bos=False, **settings)
    assert sorted(prompts_seen(calls)) == sorted(block[:-1] for block in blocks)
    bos_id = hf_tokenizer(str(folder)).bos_id
    if bos_id is not None:
        with embedded_ids() as calls:
            run_tasks(model, TASK, tmp_path / "with_bos", bos=True, **settings)
        assert sorted(prompts_seen(calls)) == sorted([bos_id, *block[:-1]] for block in blocks)

    model_args = {"pretrained": str(model), "dtype": "float32"}
    if add_bos_token is not None:
        model_args["add_bos_token"] = add_bos_token
    scored = []
    score = HFLM._loglikelihood_tokens

    def record(self, requests, **options):
        scored.extend((given, continuation) for _, given, continuation in requests)
        return score(self, requests, **options)

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", record)
    with embedded_ids() as calls:
        output = run_tasks(model_args, TASK, tmp_path / "out", prompts="text", **settings)
    docs = output.docs(TASK)
    assert [doc["num_predictions"] for doc in docs] == [
        len(continuation) for _, continuation in scored
    ]
    assert [doc["round_trip"] for doc in docs] == [
        given + continuation == block and len(given) == 1
        for (given, continuation), block in zip(scored, blocks, strict=True)
    ]
    assert sorted(prompts_seen(calls)) == sorted(
        (given + continuation)[:-1] for given, continuation in scored
    )
    ppl = math.exp(
        -sum(doc["log_likelihood"] for doc in docs)
        / sum(len(continuation) for _, continuation in scored)
    )
    assert output.metrics(TASK)["token_perplexity"] == pytest.approx(ppl)
    if tokenizer == "plain":
        assert 0 < output.metrics(TASK)["round_trip"] < 1


def test_blocks_that_are_too_many_tokens_as_text_are_refused(llama, tmp_path):
    """A character cut in half becomes a replacement character, of several tokens: the harness would
    fail on it.
    """
    file = tmp_path / "wiki.txt"
    file.write_text("\n".join("🙃" * 63 + "a" * shift for shift in range(4)), encoding="utf-8")
    settings = {"wikitext2_source": file, "block_size": 256}
    run_tasks(llama, TASK, tmp_path / "ids", **settings)
    with pytest.raises(
        ValueError, match=r"sequences of 2\d\d tokens exceed the model's limit of 256: lower"
    ):
        run_tasks(llama, TASK, tmp_path / "text", prompts="text", **settings)
