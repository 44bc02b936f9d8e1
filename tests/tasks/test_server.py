"""A model behind an OpenAI-compatible server: the same as through transformers, whatever goes wrong
in between.
"""

import json
import math
import multiprocessing
import os
import signal
import time
from functools import partial

import pytest
from helpers.fakes import tasks as task_fakes
from helpers.fakes.openai_server import Clock, serving
from helpers.fakes.tiny_llama import teach
from lm_eval.api.instance import Instance

from tfidf_tune.audit import ServerSpec
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import planned_attacks
from tfidf_tune.probe.sample_fields import Unanswered
from tfidf_tune.results import import_results
from tfidf_tune.tasks import SERVER_NAME, evaluate, save_token_ids_tokenizer, tasks_folder
from tfidf_tune.tasks.bos import is_likelier_after_bos
from tfidf_tune.tasks.server import ServerLM, _Answer, _scored

KEY = "sk-secret-1234567890"
HANG_SECONDS = 600.0  # protects from a hang; no result depends on how fast a machine is
TASKS = ["tfidf_memorization_prefixes", "tfidf_membership"]


@pytest.fixture(scope="module")
def probe_file(tmp_path_factory, tokenizers):
    """Passages without characters of several tokens: a prompt that ends inside one
    changes as text.
    """
    words = [word for word in task_fakes.WORDS if word.isascii()]
    passages = task_fakes.passages_of(tokenizers["plain"], words=words, num_tokens=40)
    return task_fakes.probe_file(tmp_path_factory.mktemp("plain") / "probe.jsonl", passages)


@pytest.fixture(scope="module")
def reciting(tmp_path_factory, tokenizers, probe_file):
    model = teach(task_fakes.random_model(), probe_file)
    return task_fakes.checkpoint(
        tmp_path_factory.mktemp("plain") / "model", tokenizers["plain"], model
    )


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
    made.headers.clear()
    made.echoes = True
    made.models = None
    made.fingerprint = None
    made.elsewhere = ""
    made.num_taken = 0
    return made


@pytest.fixture
def url(served):
    return served[1]


@pytest.fixture
def ask(host, url):
    """Ask for a continuation of each prompt, with settings of the server."""

    def ask(prompt, **more):
        server = ServerLM("m", url, "", **{"max_retries": 2, "timeout": 60} | more)
        return server.generate_until(
            [Instance("generate_until", {}, (prompt, {"max_gen_toks": 3}), 0)]
        )

    return ask


def settings(probe_file, names=("greedy",), **more):
    attacks = planned_attacks(names, prefix_lengths=(4, 8), num_samples=2, top_k=3)
    return {
        "probe_file": str(probe_file),
        "max_new_tokens": 6,
        "prefix_lengths": [4, 8],
        "attacks": [vars(one) for one in attacks],
        **more,
    }


def evaluated(
    url,
    reciting,
    probe_file,
    folder,
    *,
    prompts="text",
    names=("greedy",),
    tasks=TASKS,
    reference=None,
    **more,
):
    arguments = {
        "model": "m",
        "base_url": url,
        "tokenizer": str(reciting),
        "max_retries": 2,
        **more,
    }
    metadata = settings(probe_file, names, prompts=prompts)
    if reference is not None:
        metadata["reference_model"] = str(reference)
    evaluate(arguments, tasks, folder, metadata=metadata, model_name=SERVER_NAME)
    return import_results([folder])


@pytest.fixture(scope="module")
def by_transformers(reciting, llama, probe_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    arguments = {"pretrained": str(reciting), "dtype": "float32"}
    metadata = settings(probe_file, reference_model=str(llama))
    evaluate(arguments, TASKS, folder, metadata=metadata, device="cpu")
    return import_results([folder])


def values(results):
    rows = results.scores.astype({"metric": str, "kind": str, "unit": str})
    return rows.set_index(["metric", "kind", "unit", "prefix"]).sort_index()["value"]


@pytest.mark.parametrize("prompts", ["text", "ids_to_text"])
def test_the_same_passages_give_the_same_scores_through_server_and_transformers_and_no_file_has_the_key(
    host, url, reciting, llama, probe_file, by_transformers, tmp_path, prompts
):
    more = {"num_concurrent": 3, "journal": str(tmp_path / "requests.jsonl"), "reference": llama}
    results = evaluated(url, reciting, probe_file, tmp_path, prompts=prompts, **more)
    theirs = values(results).drop("is_served", level=0)
    ours = values(by_transformers)
    missing = {"min_k_plus_plus"}  # needs all probabilities
    missing |= {"has_bos"} if prompts == "text" else set()  # the server decides
    assert set(ours.index.get_level_values(0)) - set(theirs.index.get_level_values(0)) == missing
    both = theirs.to_frame("theirs").join(ours.rename("ours"))
    assert both["ours"].notna().all()
    for metric, same in both.groupby(level=0):
        assert same["theirs"].tolist() == pytest.approx(same["ours"].tolist(), rel=1e-4), metric
    assert (both.loc["lms", "ours"] > 3).any()  # it recites
    assert {"wbc", "error_zone"} <= {*both.index.get_level_values(0)}
    (run,) = results.checkpoints
    assert run.checkpoint == "m"
    assert {type(payload["prompt"]) for _, payload in host.asked} == {
        str if prompts == "text" else list
    }
    # Nothing is sent but what the options name.
    assert {tuple(sorted(headers)) for headers in host.headers} == {
        (
            "Accept",
            "Accept-Encoding",
            "Authorization",
            "Connection",
            "Content-Length",
            "Content-Type",
            "Host",
            "User-Agent",
        )
    }
    assert {(headers["Authorization"], headers["User-Agent"]) for headers in host.headers} == {
        (f"Bearer {KEY}", "tfidf-tune")
    }
    written = [file.read_text() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 3
    assert not any(KEY in text for text in written)


def changed(**fields):
    """A fault: the answer's choice has other fields, and ``usage`` is that of the answer."""

    def change(answer):
        (choice,) = answer["choices"]
        logprobs = choice.get("logprobs") and choice["logprobs"] | fields.get("logprobs", {})
        new = choice | fields | ({"logprobs": logprobs} if logprobs else {})
        return (
            answer | {"choices": [new]} | ({"usage": fields["usage"]} if "usage" in fields else {})
        )

    return change


@pytest.mark.parametrize("key", [KEY, "sk-ab+cd/ef~gh.ij-kl_mn/op=="])
def test_the_key_is_in_no_message_no_answer_and_no_journal(
    host, url, tmp_path, monkeypatch, capfd, key
):
    """Neither where a server repeats it in an error that is cut, nor as a log-probability, nor as
    the answer.
    """
    monkeypatch.setenv("MY_KEY", key)

    def server(**more):
        return ServerLM(
            "m",
            url,
            "",
            api_key_variable="MY_KEY",
            max_retries=0,
            journal=str(tmp_path / "journal"),
            **more,
        )

    instance = Instance("loglikelihood", {}, ("one", " two"), 0)
    texts = []
    for fault in (
        ["401"],
        ["broken header"],
        [changed(logprobs={"token_logprobs": [f"Bearer {key}"]})] * 3,
        [lambda _: json.dumps({"choices": key}).encode()] * 3,
    ):
        host.faults += fault
        with pytest.raises(ConnectionError) as error:
            server().loglikelihood([instance])
        texts.append(str(error.value))
    host.faults += ["", *[changed(logprobs={"tokens": key})] * 3]
    texts.append(server().likelihood_problem())
    assert texts[-1].startswith("it sends a wrong answer (choices[0].logprobs.tokens: ")
    host.models = [{"id": "m", "root": f"of {key}"}]
    host.fingerprint = f"for {key}"
    asked = server()
    asked.generate_until([Instance("generate_until", {}, ("two", {"max_gen_toks": 3}), 0)])
    assert asked.description() == {"id": "m", "root": "of ***"}
    host.models = None
    host.fingerprint = None
    host.faults.append(changed(text=f"It is {key}."))
    texts += server().generate_until(
        [Instance("generate_until", {}, ("one", {"max_gen_toks": 3}), 0)]
    )
    assert texts[-1] == "It is ***."
    shown = [*texts, *capfd.readouterr(), (tmp_path / "journal").read_text()]
    assert not any(key in text for text in shown)
    monkeypatch.setenv("MY_KEY", key + "\u2019")
    with pytest.raises(
        ValueError, match="MY_KEY has characters that an API key cannot have: letters, digits"
    ) as refused:
        server()
    assert key not in str(refused.value)


SEE_TO = "; see to the server, the name of the model there, and the API key in OPENAI_API_KEY"
WRONG_ANSWERS = {
    **{
        f"token_logprobs {str(value)[:20]}": changed(logprobs={"token_logprobs": value})
        for value in (
            [10**400] * 9,
            [[-1.0]] * 9,
            "x",
            [True] * 9,
            [-1e308] * 9,
            [-math.inf] * 9,
            [None, *[-2e4] * 8],
        )
    },
    **{
        f"top_logprobs {str(value)[:20]}": changed(logprobs={"top_logprobs": value})
        for value in ([1], {"a": 1}, [None, *[{"a": 10**400}] * 8])
    },
    **{f"tokens {value}": changed(logprobs={"tokens": value}) for value in ([1] * 9, {"a": 1})},
    **{
        f"usage {value}": changed(usage=value)
        for value in ([], "x", 1.5, {"prompt_tokens": 1e999}, {"prompt_tokens": "3"})
    },
    **{
        f"{str(body)[:20]} ({len(body):,} bytes)": lambda _, body=body: body
        for body in (b"[" * 100_000, b'{"choices":' * 50_000, b"[1]", b"\xff", b"9" * 5000)
    },
    "choices as an object": lambda answer: json.dumps(answer | {"choices": {"a": 1}}).encode(),
}


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_a_wrong_answer_is_one_error_whatever_its_types(host, url, what):
    server = ServerLM("m", url, "", max_retries=0)
    host.faults += [WRONG_ANSWERS[what]] * 3
    place = "" if what.endswith("bytes)") else what.split(" ")[0]
    with pytest.raises(
        ConnectionError, match=rf"{url} .*sends a wrong answer \(.*{place}.*\), 3 times{SEE_TO}"
    ):
        server.loglikelihood(
            [Instance("loglikelihood", {}, ("one two three", " four five six seven"), 0)]
        )
    assert len(host.asked) == 3


def test_the_journal_of_one_server_does_not_answer_for_another(host, url, tmp_path):
    asked = [Instance("generate_until", {}, ("one two", {"max_gen_toks": 3}), 0)]
    for address in (url, url, url.replace("127.0.0.1", "localhost")):
        ServerLM("m", address, "", journal=str(tmp_path / "journal")).generate_until(asked)
    assert len(host.asked) == 2


@pytest.mark.parametrize("fault", ["dripping", "dripping headers", "silent"])
def test_the_timeout_is_for_the_whole_answer(host, ask, url, fault):
    host.faults.append(fault)
    with pytest.raises(
        ConnectionError, match=rf"{url} .*no whole answer within 0\.5 seconds{SEE_TO}"
    ):
        ask("one two", timeout=0.5, max_retries=0)


def test_a_large_or_compressed_answer_is_not_held_in_memory(host, ask, url, monkeypatch):
    monkeypatch.setattr("tfidf_tune.tasks.server._MOST_BYTES", 1 << 22)
    host.faults += ["large"] * 3
    with pytest.raises(
        ConnectionError, match=f"{url} .*sends an answer of more than 4 MiB, 3 times{SEE_TO}"
    ):
        ask("one two")
    assert 3 << 22 <= host.num_taken < 1 << 27  # what the sockets held
    host.faults += ["bomb"] * 3
    with pytest.raises(ConnectionError, match=f"{url} .*sends a wrong answer .*, 3 times{SEE_TO}"):
        ask("one two")


def test_an_answer_that_says_nothing_is_marked_also_from_the_journal(host, ask, tmp_path):
    for number, fields in enumerate(
        ({"finish_reason": "content_filter"}, {"text": ""}, {"text": " \n"}, {})
    ):
        journal = str(tmp_path / f"{number}")
        host.faults.append(changed(**fields))
        for _ in range(2):
            (text,) = ask("one two", journal=journal)
            assert isinstance(text, Unanswered) == bool(fields)
    assert len(host.asked) == 4


def test_a_redirect_is_not_followed_and_a_secret_in_the_address_is_not_repeated(host, ask, url):
    other = url.replace("127.0.0.1", "localhost")
    for status in ("301", "307", "308"):
        host.asked.clear()
        host.faults.append(status)
        host.elsewhere = f"{other}/completions"
        message = f"{url} .*status {status}, a redirect: name the server that answers as --base-url"
        with pytest.raises(ConnectionError, match=message):
            ask("one two")
        assert len(host.asked) == 1
    for wrong in (
        "http://host:99999/v1",
        "http://[::1/v1",
        "http://host:8x/v1",
        "http://h/\x7f",
        f"http://h/{'a' * 5000}",
    ):
        with pytest.raises(ValueError, match="base_url must be like"):
            ServerLM("m", wrong, "")
    for secret in (
        "http://user:PASSWORD@host/v1",
        "http://host/v1?key=PASSWORD",
        "http://host/v1#PASSWORD",
        "host/v1",
    ):
        for made in (partial(ServerLM, "m", tokenizer=""), ServerSpec):
            with pytest.raises(
                ValueError, match="base_url must be like http.*, without user name, password"
            ) as refused:
                made(base_url=secret)
            assert "PASSWORD" not in str(refused.value)


def test_requests_start_one_pause_apart_however_many_wait_and_also_where_one_is_made_again(
    host, url, monkeypatch
):
    """Thirty a minute; what was not used is not caught up."""
    clock = Clock(monkeypatch)
    server = ServerLM("m", url, "", num_concurrent=3, requests_per_minute=30)

    def ask(*words):
        clock.awake.clear()
        server.generate_until(
            [Instance("generate_until", {}, (word, {"max_gen_toks": 1}), 0) for word in words]
        )
        return clock.awake

    assert ask("one", "two", "three", "four") == [1000, 1002, 1004, 1006]
    clock.now += 60
    assert ask("five", "six") == [1066, 1068]
    host.faults.append("429")
    # Tried, paused for the 0 seconds that the server asks for, tried again.
    assert ask("seven") == [
        1070,
        1070,
        1072,
    ]


def test_ctrl_c_ends_waiting_requests(host, url):
    requests = [
        Instance("generate_until", {}, (f"one {number}", {"max_gen_toks": 3}), 0)
        for number in range(4)
    ]

    def wait():
        # Background jobs of a shell ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ServerLM("m", url, "", num_concurrent=4).generate_until(requests)

    host.faults += ["silent"] * 4
    waiting = multiprocessing.get_context("fork").Process(target=wait)
    waiting.start()
    while len(host.asked) < 4:
        assert waiting.is_alive()
        time.sleep(0.01)
    os.kill(waiting.pid, signal.SIGINT)  # once
    waiting.join(HANG_SECONDS)
    waiting.kill()  # a process that has ended already stays as it is
    waiting.join()
    assert waiting.exitcode == 1


def test_a_request_that_fails_is_made_again(host, ask):
    expected = ask("one two")
    for fault in ("429", "500", "cut", "silent", "html", "no text", "two"):
        host.asked.clear()
        host.faults.append(fault)
        assert ask("one two", timeout=1 if fault == "silent" else 60) == expected, fault
        assert len(host.asked) == 2, fault


def test_wrong_likelihoods_are_refused_and_the_same_command_goes_on(
    host, url, reciting, probe_file, tmp_path
):
    server = ServerLM("m", url, "")
    text = read_probe_file(probe_file)[0].text
    for fault, message in (
        ("positive", r"logprobs\.token_logprobs\[5\]: .* less than"),
        ("nan", r"logprobs\.token_logprobs\[5\]: .* finite"),
        ("zeros", "all 0"),
        ("too many", "log-probabilities for"),
        ("another prompt", "it echoes another prompt than was sent"),
    ):
        host.faults += [fault] * 3
        with pytest.raises(ConnectionError, match=f"request for a: .*{message}.*, 3 times"):
            server.loglikelihood(
                [Instance("loglikelihood", {"passage_id": "a"}, (text[:3], text[3:]), 0)]
            )

    journal = tmp_path / "requests.jsonl"
    host.faults += [""] * 9 + ["nan"] * 3
    with pytest.raises(
        ConnectionError,
        match=r"request for (target|control)-.*Run the same command to continue: 9 answers are saved in",
    ):
        evaluated(url, reciting, probe_file, tmp_path, journal=str(journal))
    host.asked.clear()
    assert len(journal.read_text().split("\n")) == 1 + 9
    evaluated(url, reciting, probe_file, tmp_path, journal=str(journal))
    assert len(host.asked) == 8 + 4 - 9  # prompts and passages


@pytest.mark.parametrize(
    ("given", "echoed", "num_ids", "first"),
    [
        ("the river", "the/ river/ sings", 3, 2),
        ("the river", "<s>/the/ river/ sings", 3, 3),  # of a server that puts a BOS first
        ("the 🙃", "the/ \ufffd/\ufffd/ sings", 4, 3),  # parts of a character have other lengths
        # Of tokens that are not known; the part that is scored starts at a token that has nothing
        # of the given one.
        ("the river", "the r/iver/ si/ngs", 0, 2),
        ("the river", "the/ river si/ngs", 0, 2),
        ("the river", "<|begin_of_text|>/the/ river/ sings", 0, 3),
        (" the river", "the/ river/ sings", 0, 2),  # of a server that strips the space
        (" the river", "<s>/ the/ river/ sings", 0, 3),
    ],
)
def test_the_likelihood_of_a_text_starts_at_the_first_token_after_what_is_given(
    given, echoed, num_ids, first
):
    tokens = echoed.split("/")
    number = len(tokens)
    # The log-probability of each token is its place; the last one had to be generated.
    values = [None, *(-float(place) for place in range(1, number + 1))]
    choice = {"logprobs": {"tokens": [*tokens, " and"], "token_logprobs": values}}
    answer = _Answer.model_validate({"choices": [choice], "usage": {"prompt_tokens": number}})
    nll, _, _, exact = _scored(
        answer, given, f"{given} sings", num_ids=num_ids, num_given=max(0, num_ids - 1)
    )
    assert nll == [*range(first, number)]
    assert exact == bool(num_ids)


def of_next_token(answer):
    """Answer as llama.cpp's server, which does not echo and has other fields for each token that it
    makes.
    """
    token = {"id": 5, "token": " of", "bytes": [32, 111, 102], "logprob": -0.5, "top_logprobs": []}
    answer["choices"][0] |= {"text": " of", "logprobs": {"content": [token]}}
    return answer


def test_a_server_without_log_probabilities_or_with_wrong_ones_is_recognised(host, url):
    def server():  # each asks anew
        return ServerLM("m", url, "", max_retries=2)

    assert server().likelihood_problem() is None
    host.faults += ["", "shifted"]
    assert server().likelihood_problem() == "its log-probabilities do not fit its own continuation"
    host.echoes = False
    assert "gives no log-probabilities of the prompt" in server().likelihood_problem()
    host.faults += ["", of_next_token, of_next_token, of_next_token]
    assert "gives no log-probabilities of the prompt" in server().likelihood_problem()
    host.faults += ["", "400"]
    assert "status 400" in server().likelihood_problem()
    host.faults += ["500"] * 9
    with pytest.raises(ConnectionError, match="status 500"):
        server().likelihood_problem()


def test_no_chat_template_is_recommended(host, url, reciting, probe_file, tmp_path, caplog):
    evaluated(url, reciting, probe_file, tmp_path, model="tiny-instruct")
    assert "chat template is not applied" not in caplog.text


def test_a_server_that_scores_nothing_gets_no_bos_and_says_only_why(host, url, caplog):
    host.echoes = False
    server = ServerLM("m", url, "")
    assert not is_likelier_after_bos(server, 1, [[5, 6, 7]])
    (record,) = caplog.records
    assert (
        "because the server scores no texts (it gives no log-probabilities of the prompt (echo and "
        "logprobs)), and it gets none: --bos true"
    ) in record.getMessage()


@pytest.mark.parametrize("likeliest", [None, [None, *[{}] * 40]], ids=["no list", "empty"])
def test_without_the_likeliest_token_the_error_zone_is_left_out(
    host, url, reciting, llama, probe_file, tmp_path, likeliest
):
    def leave_out(answer):
        (choice,) = answer["choices"]
        number = len(choice["logprobs"]["tokens"])
        given = None if likeliest is None else likeliest[:number]
        return changed(logprobs={"top_logprobs": given})(answer)

    host.faults += [leave_out] * 4
    results = evaluated(
        url, reciting, probe_file, tmp_path, tasks=["tfidf_membership"], reference=llama
    )
    assert len(host.asked) == 4
    metrics = {*results.scores["metric"].astype(str)}
    assert {"passage_nll", "reference_nll", "wbc"} <= metrics
    assert "error_zone" not in metrics


def test_settings_that_cannot_work_are_refused():
    for values, message in (
        ({"base_url": "localhost:8000"}, "base_url must be like http://"),
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
    assert all(
        payload["messages"][-1]["content"].startswith("Continue the following text")
        for payload in chats
    )
    assert sorted(payload["seed"] for payload in samples) == [0] * len(passages) + [1] * len(
        passages
    )
    assert {
        (payload["temperature"], payload["top_k"], payload["max_tokens"]) for payload in samples
    } == {(1.0, 3, 6)}


@pytest.mark.usefixtures("host")
def test_local_completions_of_the_harness_gets_ids_and_answers_with_text(
    url, reciting, probe_file, by_transformers, stock_command, tmp_path
):
    save_token_ids_tokenizer(str(reciting), tmp_path / "ids")
    named = {"model": "m", "base_url": f"{url}/completions", "tokenizer": tmp_path / "ids"}
    named |= {"tokenizer_backend": "huggingface", "num_concurrent": 1}
    stock_command(
        "lm_eval",
        "--model",
        "local-completions",
        "--tasks",
        TASKS[0],
        "--include_path",
        str(tasks_folder()),
        "--model_args",
        ",".join(f"{key}={value}" for key, value in named.items()),
        "--batch_size",
        "1",
        "--metadata",
        json.dumps(settings(probe_file, prompts="ids_to_text") | {"attacks": None}),
        "--log_samples",
        "--output_path",
        str(tmp_path / "out"),
    )
    assert (
        values(import_results([tmp_path / "out"]))["lms"].tolist()
        == values(by_transformers)["lms"].tolist()
    )


def test_a_gateway_with_another_model_for_some_requests_is_refused(host, url):
    server = ServerLM("m", url, "", max_retries=2, timeout=60)
    asked = [
        Instance("generate_until", {}, (text, {"max_gen_toks": 3}), 0)
        for text in ("one two", "three four")
    ]
    host.name = "m-2026"  # as hosted models are called
    server.generate_until(asked[:1])
    host.name = "small"
    with pytest.raises(
        ValueError, match="answers for m as m-2026 and as small: name a model, or a server, that"
    ):
        server.generate_until(asked[1:])
    host.name = None
    server.generate_until(asked[1:])


def test_a_run_that_goes_on_stops_at_the_first_answer_of_another_model(host, ask, tmp_path):
    journal = str(tmp_path / "journal")
    host.fingerprint = "fp_1"
    ask("one two", journal=journal)
    host.fingerprint = "fp_2"
    message = (
        "journal is of another model: system_fingerprint was fp_1, is fp_2. Name another output, "
        "or --overwrite"
    )
    with pytest.raises(ValueError, match=message):
        ask("three four", journal=journal)
    assert ask("one two", journal=journal)
    assert len(host.asked) == 2
    host.fingerprint = None
    assert ask("three four", journal=journal)


def test_what_a_server_does_to_prompts_is_seen_by_its_counts(host, url):
    plain = host.encode
    sent = [
        (text, len(plain(text)))
        for text in ("one two", "one two three four five six seven eight " * 4)
    ]
    for encode, expected in (
        (plain, ""),
        (lambda text: [0, *plain(text)], ""),  # a BOS
        (
            lambda text: [*range(9), *plain(text)],
            "counts 9 tokens more than each prompt has: a chat template",
        ),
        (lambda text: plain(text)[-6:], "it cuts it"),
        (lambda text: plain(text) + plain(text), ""),  # another tokenizer than the model's
    ):
        host.encode = encode
        found = ServerLM("m", url, "").prompt_obstacle(sent)
        assert expected in found if expected else found == ""
    host.encode = plain

    def without_usage(answer):
        return {key: value for key, value in answer.items() if key != "usage"}

    host.faults += [without_usage] * 2
    assert ServerLM("m", url, "").prompt_obstacle(sent) is None


def test_a_model_that_refuses_max_tokens_is_one_clear_error(host, url):
    host.faults += ["reasoning"] * 2
    with pytest.raises(
        ValueError,
        match="refuses max_tokens or temperature, as reasoning models do: such models cannot",
    ):
        ServerLM("m", url, "").prompt_obstacle([("one", 1), ("one two", 2)])


@pytest.mark.parametrize(
    ("num_made", "finish", "has_eos", "is_withheld"),
    [
        (4, "length", False, True),
        (4, "stop", False, False),
        (11, "length", False, False),
        (4, "stop", True, True),
        (12, "length", True, False),
    ],
)
def test_an_answer_that_is_cut_short_is_withheld(host, url, num_made, finish, has_eos, is_withheld):
    def cut(answer):
        choice = {"index": 0, "finish_reason": finish, "text": "one two"}
        return answer | {
            "choices": [choice],
            "usage": {"prompt_tokens": 2, "completion_tokens": num_made},
        }

    host.faults += [cut]
    request = Instance("generate_until", {"has_eos": has_eos}, ("one two", {"max_gen_toks": 12}), 0)
    (answer,) = ServerLM("m", url, "").generate_until([request])
    assert isinstance(answer, Unanswered) == is_withheld
    assert answer == "one two"
