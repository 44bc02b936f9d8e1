"""A model behind an OpenAI-compatible server: the same as through transformers, whatever goes wrong in between."""

import json

import pytest
import task_fakes
from lm_eval.api.instance import Instance
from openai_server import serving
from tiny_llama import teach

from tfidf_tune.compare import import_results
from tfidf_tune.data import read_probe_file
from tfidf_tune.probe import planned_attacks
from tfidf_tune.tasks import SERVER_NAME, evaluate, save_token_ids_tokenizer, tasks_folder
from tfidf_tune.tasks._server import ServerLM

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
    model = teach(task_fakes.random_model(), probe_file)
    return task_fakes.checkpoint(tmp_path_factory.mktemp("plain") / "model", tokenizers["plain"], model)


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
def ask(host, url):
    """Ask for a continuation of each prompt, with settings of the server."""

    def ask(prompt, **more):
        server = ServerLM("m", url, "", **{"max_retries": 2, "timeout": 60} | more)
        return server.generate_until([Instance("generate_until", {}, (prompt, {"max_gen_toks": 3}), 0)])

    return ask


def settings(probe_file, names=("greedy",), **more):
    attacks = planned_attacks(names, prefix_lengths=(4, 8), num_samples=2, top_k=3)
    return {"probe_file": str(probe_file), "max_new_tokens": 6, "prefix_lengths": [4, 8],
            "attacks": [vars(one) for one in attacks], **more}  # fmt: skip


def evaluated(url, reciting, probe_file, folder, *, prompts="text", names=("greedy",), tasks=TASKS, **more):
    arguments = {"model": "m", "base_url": url, "tokenizer": str(reciting), "max_retries": 2, **more}
    metadata = settings(probe_file, names, prompts=prompts)
    evaluate(arguments, tasks, folder, metadata=metadata, model_name=SERVER_NAME)
    return import_results([folder])


@pytest.fixture(scope="module")
def by_transformers(reciting, probe_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    arguments = {"pretrained": str(reciting), "dtype": "float32"}
    evaluate(arguments, TASKS, folder, metadata=settings(probe_file), device="cpu")
    return import_results([folder])


def values(results):
    rows = results.scores.astype({"metric": str, "kind": str, "unit": str})
    return rows.set_index(["metric", "kind", "unit", "prefix"]).sort_index()["value"]


@pytest.mark.parametrize("prompts", ["text", "ids_to_text"])
def test_the_same_passages_give_the_same_scores_through_server_and_transformers_and_no_file_has_the_key(
    host, url, reciting, probe_file, by_transformers, tmp_path, prompts
):
    more = {"num_concurrent": 3, "journal": str(tmp_path / "requests.jsonl")}
    results = evaluated(url, reciting, probe_file, tmp_path, prompts=prompts, **more)
    theirs, ours = values(results), values(by_transformers)
    missing = {"min_k_plus_plus"}  # needs all probabilities
    assert set(ours.index.get_level_values(0)) - set(theirs.index.get_level_values(0)) == missing
    both = theirs.to_frame("theirs").join(ours.rename("ours"))
    assert both["ours"].notna().all()
    for metric, same in both.groupby(level=0):
        assert same["theirs"].tolist() == pytest.approx(same["ours"].tolist(), rel=1e-4), metric
    assert (both.loc["lms", "ours"] > 3).any()  # it recites
    (run,) = results.checkpoints
    assert run.checkpoint == "m"
    assert {type(payload["prompt"]) for _, payload in host.asked} == {str if prompts == "text" else list}
    assert host.keys == {f"Bearer {KEY}"}
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 3
    assert not any(KEY in text for text in written)


def test_a_refused_key_is_not_in_the_message(host, ask, capfd):
    host.faults += ["401"]
    with pytest.raises(ConnectionError, match=r"status 401: .*\*\*\*.*OPENAI_API_KEY") as error:
        ask("one two")
    assert KEY not in "".join([str(error.value), *capfd.readouterr()])


def test_a_request_that_fails_is_made_again(host, ask):
    expected = ask("one two")
    for fault in ("429", "500", "cut", "slow", "html", "no text", "two"):
        host.asked.clear()
        host.faults.append(fault)
        assert ask("one two", timeout=1 if fault == "slow" else 60) == expected, fault
        assert len(host.asked) == 2, fault


def test_wrong_likelihoods_are_refused_and_the_same_command_goes_on(host, url, reciting, probe_file, tmp_path):
    server = ServerLM("m", url, "")
    text = read_probe_file(probe_file)[0].text
    for fault, message in (
        ("positive", "it gives 0.5 as a log-probability"),
        ("nan", "it gives nan as a log-probability"),
        ("zeros", "all 0"),
        ("too many", "log-probabilities for"),
        ("another prompt", "it echoes another prompt than was sent"),
    ):
        host.faults += [fault] * 3
        with pytest.raises(ConnectionError, match=f"request for a: .*{message}.*, 3 times"):
            server.loglikelihood([Instance("loglikelihood", {"passage_id": "a"}, (text[:3], text[3:]), 0)])

    journal = tmp_path / "requests.jsonl"
    host.faults += [""] * 9 + ["nan"] * 3
    with pytest.raises(
        ConnectionError,
        match=r"request for (target|control)-.*Run the same command to continue: 9 answers are saved in",
    ):
        evaluated(url, reciting, probe_file, tmp_path, journal=str(journal))
    host.asked.clear()
    assert len(journal.read_text().splitlines()) == 9
    evaluated(url, reciting, probe_file, tmp_path, journal=str(journal))
    assert len(host.asked) == 8 + 4 - 9  # prompts and passages


def test_a_server_without_log_probabilities_or_with_wrong_ones_is_recognised(host, url):
    def server():  # each asks anew
        return ServerLM("m", url, "", max_retries=2)

    assert server().likelihood_problem() is None
    host.faults += ["", "shifted"]
    assert server().likelihood_problem() == "its log-probabilities do not fit its own continuation"
    host.echoes = False
    assert "gives no log-probabilities of the prompt" in server().likelihood_problem()
    host.faults += ["", "400"]
    assert "status 400" in server().likelihood_problem()
    host.faults += ["500"] * 9
    with pytest.raises(ConnectionError, match="status 500"):
        server().likelihood_problem()


def test_settings_that_cannot_work_are_refused():
    for values, message in (
        ({"base_url": "localhost:8000"}, "base_url is 'localhost:8000'"),
        ({"timeout": 0}, "timeout is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ServerLM("m", tokenizer="", **{"base_url": "http://x/v1"} | values)


def test_chats_and_samples_are_sent_as_such(host, url, reciting, probe_file, tmp_path):
    evaluated(url, reciting, probe_file, tmp_path, names=("chat", "sampling"), tasks=TASKS[:1])
    chats = [payload for path, payload in host.asked if path == "/v1/chat/completions"]
    samples = [payload for path, payload in host.asked if path == "/v1/completions"]
    passages = read_probe_file(probe_file)
    assert len(chats) == len(passages)
    assert all(payload["messages"][-1]["content"].startswith("Continue the following text") for payload in chats)
    assert sorted(payload["seed"] for payload in samples) == [0] * len(passages) + [1] * len(passages)
    assert {(payload["temperature"], payload["top_k"], payload["max_tokens"]) for payload in samples} == {(1.0, 3, 6)}


@pytest.mark.usefixtures("host")
def test_local_completions_of_the_harness_gets_ids_and_answers_with_text(
    url, reciting, probe_file, by_transformers, stock_command, tmp_path
):
    save_token_ids_tokenizer(str(reciting), tmp_path / "ids")
    named = {"model": "m", "base_url": f"{url}/completions", "tokenizer": tmp_path / "ids"}
    named |= {"tokenizer_backend": "huggingface", "num_concurrent": 1}
    stock_command(
        *("lm_eval", "--model", "local-completions", "--tasks", TASKS[0], "--include_path", str(tasks_folder())),
        *("--model_args", ",".join(f"{key}={value}" for key, value in named.items()), "--batch_size", "1"),
        *("--metadata", json.dumps(settings(probe_file, prompts="ids_to_text") | {"attacks": None})),
        *("--log_samples", "--output_path", str(tmp_path / "out")),
    )
    assert values(import_results([tmp_path / "out"]))["lms"].tolist() == values(by_transformers)["lms"].tolist()
