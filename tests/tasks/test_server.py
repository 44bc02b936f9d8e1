"""A model behind an OpenAI-compatible server: the same as through transformers, whatever goes wrong in between."""

import json
import os
import subprocess
import sys

import pytest
import task_fakes
from openai_server import serving

from tfidf_tune.compare import import_results
from tfidf_tune.data import read_probe_file
from tfidf_tune.probe import planned_attacks
from tfidf_tune.tasks import SERVER_NAME, evaluate, save_token_ids_tokenizer
from tfidf_tune.tasks._server import Request, Server, ServerLM, _text

KEY = "sk-secret-12345"
TASKS = ["tfidf_memorization_prefixes", "tfidf_membership"]


@pytest.fixture(scope="module")
def probe_file(tmp_path_factory, tokenizers):
    """Passages without characters of several tokens: a prompt that ends inside one changes as text."""
    words = [word for word in task_fakes.WORDS if word.isascii()]
    passages = task_fakes.passages_of(tokenizers["plain"], words=words, num_tokens=40)
    return task_fakes.probe_file(tmp_path_factory.mktemp("plain") / "probe.jsonl", passages)


@pytest.fixture(scope="module")
def reciting(tmp_path_factory, tokenizers, probe_file):
    model = task_fakes.teach(task_fakes.random_model("llama"), probe_file)
    return task_fakes.checkpoint(tmp_path_factory.mktemp("plain") / "model", model, tokenizers["plain"])


@pytest.fixture(scope="module")
def served(reciting):
    with serving(reciting) as (host, url):
        yield host, url


@pytest.fixture
def host(served, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made, _ = served
    made.asked.clear()
    made.faults.clear()
    made.keys.clear()
    made.echoes = True
    return made


@pytest.fixture
def url(served):
    return served[1]


@pytest.fixture
def model(host, url, reciting):
    return lambda **more: ServerLM("m", url, str(reciting), **{"max_retries": 2, "timeout": 60} | more)


def completion(prompt):
    payload = {"model": "m", "prompt": prompt, "max_tokens": 2, "temperature": 0.0}
    return Request("/completions", payload, "a", _text)


def settings(probe_file, **more):
    attacks = planned_attacks(["greedy"], prefix_lengths=(4, 8))
    return {"probe_file": str(probe_file), "max_new_tokens": 6, "prefix_lengths": [4, 8],
            "attacks": [vars(one) for one in attacks], **more}  # fmt: skip


def evaluated(url, reciting, probe_file, folder, *, prompts="text", **more):
    arguments = {"model": "m", "base_url": url, "tokenizer": str(reciting), "max_retries": 2, **more}
    evaluate(arguments, TASKS, folder, metadata=settings(probe_file, prompts=prompts), model_name=SERVER_NAME)
    return import_results([folder])


@pytest.mark.parametrize("prompts", ["text", "ids_to_text"])
def test_the_same_passages_give_the_same_scores_through_server_and_transformers(
    host, url, reciting, probe_file, tmp_path, prompts
):
    local = {"pretrained": str(reciting), "dtype": "float32"}
    evaluate(local, TASKS, tmp_path / "local", metadata=settings(probe_file), device="cpu")
    ours = import_results([tmp_path / "local"])
    theirs = evaluated(url, reciting, probe_file, tmp_path / "server", prompts=prompts, num_concurrent=3)
    key = ["metric", "kind", "unit", "prefix"]
    tables = []
    for one in (ours, theirs):
        rows = one.scores.astype({"metric": str, "kind": str, "unit": str})
        tables.append(rows.set_index(key).sort_index()["value"])
    missing = {"min_k_plus_plus"}  # needs all probabilities
    assert set(tables[0].index.get_level_values(0)) - set(tables[1].index.get_level_values(0)) == missing
    both = tables[1].to_frame("theirs").join(tables[0].rename("ours"))
    assert both["ours"].notna().all()
    for metric, own in both.groupby(level=0):
        assert own["theirs"].tolist() == pytest.approx(own["ours"].tolist(), rel=1e-4), metric
    assert (both.loc["lms", "ours"] > 3).any()  # it recites
    (run,) = theirs.checkpoints
    assert run.checkpoint == "m"
    sent = {type(payload["prompt"]) for path, payload in host.asked}
    assert sent == {str if prompts == "text" else list}


def test_no_key_is_in_a_file_or_message(host, url, reciting, probe_file, tmp_path, capfd):
    host.faults += ["401"]
    with pytest.raises(ConnectionError, match=r"status 401: .*\*\*\*.*; set the environment variable OPENAI_API_KEY"):
        evaluated(url, reciting, probe_file, tmp_path, journal=str(tmp_path / "requests.jsonl"))
    evaluated(url, reciting, probe_file, tmp_path, journal=str(tmp_path / "requests.jsonl"))
    assert host.keys == {f"Bearer {KEY}"}
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 3
    assert not any(KEY in text for text in (*written, *capfd.readouterr()))


@pytest.mark.parametrize("fault", ["429", "500", "503", "cut", "slow", "html", "early", "no text", "two"])
def test_a_request_that_fails_is_made_again(host, model, fault):
    request = Request(
        "/completions", {"model": "m", "prompt": "one two", "max_tokens": 3, "temperature": 0.0}, "a", _text
    )
    (expected,) = model().server.answers([request], "")
    host.faults.append(fault)
    assert model(timeout=1 if fault == "slow" else 60).server.answers([request], "") == [expected]
    assert len(host.asked) == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("positive", "it gives 0.5 as a log-probability"),
        ("nan", "it gives nan as a log-probability"),
        ("zeros", "all 0"),
        ("too many", "log-probabilities for"),
        ("another prompt", "it echoes another prompt than was sent"),
    ],
)
def test_wrong_likelihoods_are_refused_in_one_message(host, url, reciting, probe_file, tmp_path, fault, message):
    journal = tmp_path / "requests.jsonl"
    host.faults += [""] * 9 + [fault] * 3
    with pytest.raises(ConnectionError, match="request for (target|control)-") as error:
        evaluated(url, reciting, probe_file, tmp_path, journal=str(journal))
    assert message in str(error.value)
    assert ", 3 times" in str(error.value)
    assert f"The same command goes on from here: 9 answers are in {journal}" in str(error.value)
    num_asked, num_known = len(host.asked), len(journal.read_text().splitlines())
    assert num_known == 9
    evaluated(url, reciting, probe_file, tmp_path, journal=str(journal))
    assert len(host.asked) - num_asked == 8 + 4 - num_known  # prompts and passages


def test_a_journal_with_a_torn_line_goes_on(host, model, tmp_path):
    journal = tmp_path / "requests.jsonl"
    requests = [
        Request(
            "/completions", {"model": "m", "prompt": f"one {number}", "max_tokens": 2, "temperature": 0.0}, "a", _text
        )
        for number in range(6)
    ]
    first = model(journal=str(journal)).server.answers(requests, "")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3]) + lines[3][:20])
    host.asked.clear()
    assert model(journal=str(journal), num_concurrent=4).server.answers(requests, "") == first
    assert len(host.asked) == 3
    assert model(journal=str(journal)).server.answers(requests, "") == first
    assert len(host.asked) == 3


def test_a_server_without_log_probabilities_or_with_wrong_ones_is_recognised(host, model):
    assert model().likelihood_problem() is None
    host.faults += ["", "shifted"]
    assert model().likelihood_problem() == "its log-probabilities do not fit its own continuation"
    host.echoes = False
    assert "gives no log-probabilities of the prompt" in model().likelihood_problem()
    host.faults += ["", "400"]
    assert "status 400" in model().likelihood_problem()
    host.faults += ["500"] * 9
    with pytest.raises(ConnectionError, match="status 500"):
        model().likelihood_problem()


def test_requests_are_paced(host, model, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tfidf_tune.tasks._server.time.monotonic", lambda: now[0])
    monkeypatch.setattr("tfidf_tune.tasks._server.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    requests = [completion(f"a {number}") for number in range(5)]
    model(requests_per_minute=30).server.answers(requests, "")
    assert now[0] == pytest.approx(8)


def test_settings_that_cannot_work_are_refused():
    for values, message in (
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000': write it with its scheme"),
        ({"num_concurrent": 0}, "num_concurrent must be a whole number of at least 1"),
        ({"timeout": 0}, "timeout is 0"),
        ({"requests_per_minute": -1}, "requests_per_minute is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            Server(**{"base_url": "http://x/v1"} | values)


def test_chats_and_samples_are_sent_as_such(host, url, reciting, probe_file, tmp_path):
    attacks = planned_attacks(["chat", "sampling"], prefix_lengths=(4, 8), num_samples=2, top_k=3)
    arguments = {"model": "m", "base_url": url, "tokenizer": str(reciting)}
    metadata = settings(probe_file, prompts="text") | {"attacks": [vars(one) for one in attacks]}
    evaluate(arguments, TASKS[:1], tmp_path, metadata=metadata, model_name=SERVER_NAME)
    chats = [payload for path, payload in host.asked if path == "/v1/chat/completions"]
    samples = [payload for path, payload in host.asked if path == "/v1/completions"]
    passages = read_probe_file(probe_file)
    assert len(chats) == len(passages)
    assert all(payload["messages"][-1]["content"].startswith("Continue the following text") for payload in chats)
    assert sorted(payload["seed"] for payload in samples) == [0] * len(passages) + [1] * len(passages)
    assert {(payload["temperature"], payload["top_k"], payload["max_tokens"]) for payload in samples} == {(1.0, 3, 6)}


def test_local_completions_of_the_harness_gets_ids_and_answers_with_text(host, url, reciting, probe_file, tmp_path):
    save_token_ids_tokenizer(str(reciting), tmp_path / "ids")
    named = {"model": "m", "base_url": f"{url}/completions", "tokenizer": tmp_path / "ids"}
    named |= {"tokenizer_backend": "huggingface", "num_concurrent": 1}
    arguments = ",".join(f"{key}={value}" for key, value in named.items())
    folder = subprocess.run(
        [sys.executable, "-m", "tfidf_tune.cli", "tasks"], check=True, capture_output=True, text=True
    ).stdout.strip()
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", arguments),
        *("--tasks", "tfidf_memorization_prefixes", "--include_path", folder, "--output_path", str(tmp_path / "out")),
        *("--metadata", json.dumps(settings(probe_file, prompts="ids_to_text") | {"attacks": None})),
        *("--log_samples", "--batch_size", "1"),
    ]
    job = subprocess.run(command, capture_output=True, env=os.environ | {"OPENAI_API_KEY": KEY}, text=True, check=False)
    assert job.returncode == 0, job.stderr[-2000:]
    theirs = import_results([tmp_path / "out"])
    ours = evaluated(url, reciting, probe_file, tmp_path / "ours", prompts="ids_to_text")
    lms = [
        one.scores[one.scores["metric"] == "lms"].sort_values(["unit", "prefix"])["value"].tolist()
        for one in (theirs, ours)
    ]
    assert lms[0] == lms[1]
    assert max(lms[0]) > 3
