"""``tfidf-tune audit`` as a process and in this one: from texts to a report, a file for programs
and an exit code.
"""

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise

import peft
import pytest
from helpers.fakes.openai_server import Clock, serving
from helpers.fakes.tiny_llama import teach
from helpers.fakes.tiny_run import run_config, run_recipe

from tfidf_tune.audit import AuditSpec, audit, audit_results, estimate
from tfidf_tune.commands.audit import main
from tfidf_tune.commands.probe import main as probe
from tfidf_tune.data import hf_tokenizer
from tfidf_tune.passages import ProbeSpec, read_probe_file, write_probe_file
from tfidf_tune.probe import load_model
from tfidf_tune.probe.sample_fields import Unanswered
from tfidf_tune.tasks._token_ids_lm import TokenIdRequests

pytestmark = pytest.mark.usefixtures("quick_reports")

QUICK = [
    "--num-targets",
    "12",
    "--num-controls",
    "12",
    "--block-size",
    "24",
    "--passages",
    "random",
    "--prefix-lengths",
    "6",
    "12",
    "--max-new-tokens",
    "8",
    "--batch-size",
    "12",
    "--accept-unproven",  # the models are too small to read what they are shown
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory, text_file):
    """Training text and controls, of the same kind."""
    folder = tmp_path_factory.mktemp("texts")
    lines = text_file.read_text().splitlines()
    for name, chosen in (("training", lines[:200]), ("unseen", lines[200:400])):
        rows = (
            json.dumps({"text": "\n".join(chosen[start : start + 4])}) + "\n"
            for start in range(0, 200, 4)
        )
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def command(texts):
    return lambda model, out, *more: [
        str(model),
        str(texts / "training.jsonl"),
        "--controls",
        str(texts / "unseen.jsonl"),
        *QUICK,
        "--output-dir",
        str(out),
        *map(str, more),
    ]


@pytest.fixture(scope="module")
def reciting(tiny_checkpoint, command, tmp_path_factory):
    """The tiny Llama, trained on the passages until it recites them."""
    folder = tmp_path_factory.mktemp("reciting")
    main(command(tiny_checkpoint, folder / "first", "--dry-run"))
    model = teach(load_model(tiny_checkpoint), folder / "first" / "probe.jsonl", known=11)
    model.save_pretrained(folder / "model")
    hf_tokenizer(str(tiny_checkpoint)).save_pretrained(folder / "model")
    return folder / "model"


def test_a_job_fails_on_the_model_that_recites_and_passes_on_the_one_that_does_not(
    reciting, tiny_checkpoint, command, run_command, tmp_path, capsys
):
    limits = "lms=4,verbatim.upper=0.3,extraction@0.5=0.1"
    asked = [
        "--fail-above",
        limits,
        "--json",
        "--attacks",
        "greedy",
        "sampling",
        "--num-samples",
        "2",
    ]
    with pytest.raises(SystemExit) as ended:
        run_command("audit", *command(reciting, tmp_path / "reciting", *asked))
    assert (ended.value.code, str(ended.value)) == (
        1,
        "limit exceeded: lms, verbatim.upper, extraction@0.5",
    )
    of_reciting = json.loads(capsys.readouterr().out)
    run_command("audit", *command(tiny_checkpoint, tmp_path / "other", *asked))
    found = {"reciting": of_reciting, "other": json.loads(capsys.readouterr().out)}
    for name, printed in found.items():
        assert printed == json.loads(
            (tmp_path / name / "report" / "audit.json").read_text(encoding="utf-8")
        )
        assert printed["passed"] == (name == "other")
    assert found["reciting"]["measures"]["lms"]["value"] > 7  # of 8; a few passages start alike
    assert found["reciting"]["measures"]["verbatim"]["value"] == 1
    assert found["other"]["measures"]["verbatim"]["value"] == 0
    assert found["reciting"]["attacks"] == ["greedy", "sampling"]
    assert found["reciting"]["num_prompts"] == 24 * 3
    page = (tmp_path / "reciting" / "report" / "index.html").read_text(encoding="utf-8")
    assert re.search(r"FAIL: lms is 7\.\d+, above 4; verbatim\.upper is 1, above 0\.3; ", page)


def test_a_second_run_asks_for_the_same_passages_and_refuses_others(
    reciting, command, tmp_path, capsys
):
    out = tmp_path / "out"
    main(command(reciting, out, "--dry-run"))
    probe = (out / "probe.jsonl").read_bytes()
    main(command(reciting, out, "--dry-run"))
    assert (out / "probe.jsonl").read_bytes() == probe
    assert "Passages: from " in capsys.readouterr().out
    with pytest.raises(
        ValueError,
        match=r"passages of an earlier audit, .* has changed: --seed was 0, is 1\. Name another --output-dir",
    ):
        main(command(reciting, out, "--seed", "1"))
    assert (out / "probe.jsonl").read_bytes() == probe
    main(command(reciting, out, "--seed", "1", "--overwrite", "--dry-run"))
    assert (out / "probe.jsonl").read_bytes() != probe


def test_what_has_changed_since_an_earlier_audit_is_said_in_words(
    reciting, command, texts, tmp_path
):
    out = tmp_path / "out"
    folder = shutil.copytree(texts, tmp_path / "texts")
    asked = [word.replace(str(texts), str(folder)) for word in command(reciting, out, "--dry-run")]
    main(asked)
    other = shutil.copy(folder / "unseen.jsonl", folder / "other.jsonl")
    more = shutil.copy(folder / "unseen.jsonl", folder / "more.jsonl")
    changes = {
        f"the controls were from {folder}/unseen.jsonl, are from {other}": ["--controls", other],
        f"{more} was not there before": [],
    }
    for phrase, options in changes.items():
        words = [*asked, *options] if options else [asked[0], str(more), *asked[1:]]
        with pytest.raises(ValueError, match=re.escape(f"has changed: {phrase}. Name")) as refused:
            main([*map(str, words)])
        assert not re.search("[0-9a-f]{16}", str(refused.value).replace(str(tmp_path), ""))


def test_an_adapter_without_a_tokenizer_has_that_of_its_base(
    tiny_checkpoint, command, tmp_path, capsys
):
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    peft.get_peft_model(load_model(tiny_checkpoint), config).save_pretrained(tmp_path / "adapter")
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    saved["base_model_name_or_path"] = str(tiny_checkpoint)
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(saved))
    main(command(tmp_path / "adapter", tmp_path / "out", "--json", "--fail-above", "verbatim=0.5"))
    assert json.loads(capsys.readouterr().out)["passed"]
    assert {one.tokenizer for one in read_probe_file(tmp_path / "out" / "probe.jsonl")} == {
        str(tiny_checkpoint)
    }


def test_behind_a_server_the_same_texts_give_the_same_report(
    reciting, command, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with serving(reciting) as (host, url):
        server = [
            "--base-url",
            url,
            "--tokenizer",
            reciting,
            "--api-key-variable",
            "MY_KEY",
            "--max-retries",
            "0",
        ]
        arguments = command(
            "m", tmp_path / "served", "--json", *server, "--send", "ids", "--price", "1", "2"
        )
        host.faults += [""] * 20 + ["500"]
        message = r"status 500: .*; see to the server.*\. Run the same command to continue"
        with pytest.raises(ConnectionError, match=message):
            main(arguments)
        assert re.search(
            r"116 requests, about .*; at most about 0\.\d\d at 1 and 2 for a million tokens",
            capsys.readouterr().err,
        )
        main(arguments)
        sent = [json.dumps(payload) for path, payload in host.asked]
        assert len(sent) == len(set(sent)) + 1 + 4  # what failed, and the tests of the server
    found = json.loads(capsys.readouterr().out)
    main(command(reciting, tmp_path / "local", "--json"))
    local = json.loads(capsys.readouterr().out)
    for measure in ("lms", "excess", "verbatim", "auc"):
        for end in ("value", "upper"):
            ours, theirs = (one["measures"][measure][end] for one in (local, found))
            assert theirs == pytest.approx(ours, rel=1e-4), (measure, end)
    assert found["passages"] == local["passages"]
    written = [file.read_text(errors="replace") for file in tmp_path.rglob("*") if file.is_file()]
    assert not any("sk-secret" in text for text in written)


def test_a_server_is_asked_as_the_options_of_sampling_and_pace_say(
    tiny_checkpoint, command, tmp_path, monkeypatch
):
    clock = Clock(monkeypatch)
    options = ["--num-samples", 2, "--temperature", 0.5, "--top-k", 3, "--requests-per-minute", 30]
    with serving(tiny_checkpoint) as (host, url):
        server = [
            "--base-url",
            url,
            "--tokenizer",
            tiny_checkpoint,
            "--attacks",
            "sampling",
            *options,
        ]
        host.models = [{"id": "m"}]  # nothing fails, so that there are no pauses of retries
        main(command("m", tmp_path, *server))
    samples = [payload for _, payload in host.asked if payload["temperature"]]
    assert len(samples) == 24 * 2
    assert {(payload["temperature"], payload["top_k"]) for payload in samples} == {(0.5, 3)}
    assert {payload["seed"] for payload in samples} == {0, 1}
    gaps = [later - earlier for earlier, later in pairwise(clock.awake)]
    assert len(gaps) >= len(host.asked) - 1
    assert {*gaps} == {2}  # one client asks for all


def test_a_finished_audit_of_a_server_is_asked_again_and_an_unfinished_one_goes_on_only_with_the_same_model(
    reciting, tiny_checkpoint, command, tmp_path, capsys
):
    with serving(tiny_checkpoint) as (host, url):
        server = [
            "--base-url",
            url,
            "--tokenizer",
            reciting,
            "--max-retries",
            "0",
            "--fail-above",
            "lms=5",
        ]
        arguments = command("m", tmp_path, *server, "--prefix-lengths", "6")
        before = {"id": "m", "created": 1, "root": "before"}
        host.models = [before]
        host.fingerprint = "fp_1"
        main(arguments)
        assert "PASS: lms is" in capsys.readouterr().out
        host.asked.clear()
        host.model = load_model(reciting).eval()  # under the same name
        with pytest.raises(SystemExit, match="limit exceeded: lms"):
            main(arguments)
        number = len(host.asked)
        assert number > 24 * 1.5  # a prompt and a likelihood of each passage; a few are the same
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "SHA256SUMS",
            "evaluation",
            "passages.json",
            "plan.json",
            "probe.jsonl",
            "report",
        ]

        def cut():  # in the middle
            host.asked.clear()
            host.faults += [""] * 24 + ["500"]
            with pytest.raises(ConnectionError, match="status 500"):
                main(arguments)
            capsys.readouterr()

        cut()
        for models, fingerprint, what in (
            ([before | {"root": "after"}], "fp_1", 'model.root was "before", is "after"'),
            ([before], "fp_2", "system_fingerprint was fp_1, is fp_2"),
        ):
            host.models = models
            host.fingerprint = fingerprint
            with pytest.raises(ValueError, match=f"{what}. Name another output, or "):
                main(arguments)
        host.models = [before | {"created": 2, "permission": [{"created": 2}]}]
        host.fingerprint = "fp_1"
        num_asked = len(host.asked)
        with pytest.raises(SystemExit):
            main(arguments)
        assert re.search(
            r"Goes on: \d\d answers of an audit that ended early on 20\d\d-",
            capsys.readouterr().out,
        )
        assert len(host.asked) - num_asked < number - 15
        cut()
        host.models = None
        num_asked = len(host.asked)
        with pytest.raises(SystemExit):
            main([*arguments, "--overwrite"])
        assert len(host.asked) - num_asked == number


def test_texts_with_fewer_passages_than_wanted_give_what_they_have(
    reciting, command, tmp_path, capsys
):
    arguments = command(
        reciting, tmp_path, "--num-targets", "400", "--num-controls", "500", "--block-size", "400"
    )
    main([*arguments, "--dry-run"])
    kinds = [one.kind for one in read_probe_file(tmp_path / "probe.jsonl")]
    assert 10 < kinds.count("target") < 400
    assert 0 < kinds.count("control") < 500
    assert (
        "no more passages of 400 tokens without overlap: 400 targets and 500 controls"
        in capsys.readouterr().out
    )
    main([*arguments, "--json", "--overwrite", "--num-targets", "1", "--num-controls", "1"])
    assert json.loads(capsys.readouterr().out)["measures"]["auc"]["upper"] is None
    with pytest.raises(ValueError, match="found 0 passages of 100000 tokens"):
        main([*arguments, "--overwrite", "--block-size", "100000"])


def test_an_audit_in_python_gives_what_the_command_writes(reciting, texts, tmp_path):
    sizes = {"num_targets": 12, "num_controls": 12, "block_size": 24, "passages": "random"}
    passages = ProbeSpec(
        (str(texts / "training.jsonl"),), controls_source=str(texts / "unseen.jsonl"), **sizes
    )
    spec = AuditSpec(
        model=str(reciting),
        passages=passages,
        prefix_lengths=(6, 12),
        max_new_tokens=8,
        output_dir=tmp_path,
        limits="lms=4,excess=7,recited=0",
    )
    notes = []
    result = audit(spec, notes.append)
    assert result.exceeded == ["lms"]
    assert re.search(
        r"UNDECIDED: recited=0: a control is recited for 8 tokens, and \d+ targets",
        result.report.verdict,
    )
    assert result.page.is_file()
    assert result.summary == json.loads(
        (result.page.parent / "audit.json").read_text(encoding="utf-8")
    )
    assert result.report.verdict == result.summary["verdict"]
    assert notes[0].startswith("Text: 50 documents")
    probe_file = tmp_path / "probe.jsonl"
    again = audit(
        replace(spec, passages=probe_file, limits=None, output_dir=tmp_path / "of_a_file")
    )
    assert again.summary["measures"] == result.summary["measures"]
    older = min((tmp_path / "evaluation").iterdir())
    assert result.unproven.startswith("recited=0 is undecided: a control is recited for 8 tokens")
    assert (
        audit_results(older, tmp_path / "again").summary["measures"] == result.summary["measures"]
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"batch_size": 0},
        {"prefix_lengths": (0,)},
        {"prefix_lengths": ()},
        {"budget": 0},
        {"offset": -1},
        {"backend": "jax"},
        {"attacks": ["magic"]},
        {"limits": "recall=1"},
    ],
)
def test_wrong_values_are_refused_by_name_in_python(wrong, reciting, texts, tmp_path):
    passages = ProbeSpec((str(texts / "training.jsonl"),))
    with pytest.raises(ValueError, match="recall" if "limits" in wrong else next(iter(wrong))):
        audit(AuditSpec(model=str(reciting), passages=passages, output_dir=tmp_path, **wrong))


def test_an_estimate_counts_the_tokens_of_the_passages(reciting, texts, tmp_path):
    passages = ProbeSpec(
        (str(texts / "training.jsonl"),), num_targets=3, num_controls=2, block_size=24
    )
    spec = AuditSpec(
        model=str(reciting),
        passages=passages,
        prefix_lengths=(6, 12),
        max_new_tokens=8,
        output_dir=tmp_path,
    )
    expected = (
        # 5 (24 + 6 + 12) + 40 (6 + 48 + 6), 5 (1 + 16) + 40 * 48, with two times 20 requests of the
        # positive control
        "55 requests, about 2,610 tokens in prompts and at most 2,005 in continuations."
    )
    assert estimate(spec) == expected
    assert estimate(replace(spec, passages=tmp_path / "probe.jsonl")) == expected


def test_limits_that_the_chosen_passages_or_the_server_rule_out_are_refused_before_the_model_is_asked(
    reciting, command, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "tfidf_tune.tasks.evaluate", lambda *_, **__: pytest.fail("the model was asked")
    )
    few = ["--num-targets", "400", "--block-size", "400", "--fail-above", "verbatim.upper=0.01"]
    with pytest.raises(
        ValueError,
        match=r"--fail-above: .*verbatim\.upper=0\.01 \(with \d+ targets .* it takes 299\)",
    ):
        main(command(reciting, tmp_path / "few", *few))
    with serving(reciting) as (host, url):
        host.echoes = False
        server = ["--base-url", url, "--tokenizer", reciting]
        likelihoods = r"\(likelihoods are missing: .*no log-probabilities of the prompt \(echo and logprobs\)\)"
        with pytest.raises(
            ValueError, match=rf"--fail-above: .*auc=0\.9 {likelihoods}; extraction@0\.5=0\.1 "
        ):
            main(
                command(
                    "m",
                    tmp_path / "served",
                    *server,
                    "--fail-above",
                    "lms=7,auc=0.9,extraction@0.5=0.1",
                )
            )


def test_withheld_answers_are_counted_and_no_limit_passes_on_them(
    tiny_checkpoint, command, tmp_path, capsys, monkeypatch
):
    answered = TokenIdRequests.generate_until

    def withheld(*asked):
        """Two prompts, and then the last of two samples of a prompt; the positive control comes
        after them.
        """
        made = answered(*asked)
        for index in (0, 1, 24 * 2 + 24 * 2 - 1):
            made[index] = Unanswered()
        return made

    monkeypatch.setattr(TokenIdRequests, "generate_until", withheld)
    asked = [
        "--attacks",
        "greedy",
        "sampling",
        "--num-samples",
        "2",
        "--fail-above",
        "lms=5,verbatim=0.99",
    ]
    arguments = command(tiny_checkpoint, tmp_path, *asked)
    with pytest.raises(
        SystemExit,
        match=r"lms=5 is undecided: 3 answers are missing; verbatim=0\.99 is undecided: 3 answers",
    ):
        main(arguments)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Answers withheld by the server or empty: 3, which count as not recited." in shown
    assert "UNDECIDED: lms=5: 3 answers are missing; verbatim=0.99: 3 answers are missing" in shown
    main([*arguments, "--json", "--accept-unanswered", "--overwrite"])
    accepted = json.loads(capsys.readouterr().out)
    assert (accepted["num_unanswered"], accepted["passed"]) == (3, True)
    assert "Answers withheld by the server or empty: 3" in accepted["verdict"]
    monkeypatch.undo()
    recorded = [
        "--results",
        str(max((tmp_path / "evaluation").iterdir())),
        "--output-dir",
        str(tmp_path / "again"),
    ]
    recorded.append("--accept-unproven")
    with pytest.raises(SystemExit, match="lms=5 is undecided"):
        probe(["audit", *recorded, "--fail-above", "lms=5"])
    probe(["audit", *recorded, "--fail-above", "lms=5", "--accept-unanswered"])


@pytest.fixture(scope="module")
def held_out_run(tiny_checkpoint, text_file, tmp_path_factory):
    """A run of the recipe on a text, of which it held out controls."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("\n".join(text_file.read_text().splitlines()[:60]))
    own = {
        "dataset.target_source": None,
        "dataset.num_base": -1,
        "dataset.num_targets": 10,
        "dataset.num_repeats": 1,
    }
    return run_recipe(run_config(folder / "run", tiny_checkpoint, folder / "text.txt", **own))


@pytest.mark.parametrize("passages", ["duplicates", "near-duplicates", "random"])
def test_no_target_overlaps_what_the_run_of_a_checkpoint_held_out(
    held_out_run, passages, tmp_path, capsys
):
    milestone = held_out_run / "checkpoint_100pct"
    text = held_out_run.parent / "text.txt"
    tokenizer = hf_tokenizer(str(milestone))
    documents = [list(ids) for ids in tokenizer.encode_batch(text.read_text().splitlines())]

    def places(one):
        size = len(one.token_ids)
        found = []
        for number, ids in enumerate(documents):
            starts = [
                start for start in range(len(ids)) if ids[start : start + size] == one.token_ids
            ]
            found += [(number, start) for start in starts]
        assert found
        return [{(n, i + k) for k in range(size)} for n, i in found]

    run_passages = read_probe_file(held_out_run / "probe.jsonl")
    held_out = set()
    for one in run_passages:
        if one.kind == "control":
            held_out.update(*places(one))

    def num_held_out(model, out, *options):
        more = [
            "--num-targets",
            "60",
            "--num-controls",
            "0",
            "--passages",
            passages,
            "--block-size",
            "40",
        ]
        # As the run of the milestone, which the other model does not have.
        more += [
            "--sample-by",
            "line",
        ]
        main(
            [
                str(model),
                str(text),
                *QUICK,
                *more,
                *options,
                "--output-dir",
                str(out),
                "--json",
                "--dry-run",
            ]
        )
        chosen = read_probe_file(out / "probe.jsonl")
        assert len(chosen) > 15
        return sum(all(place & held_out for place in places(one)) for one in chosen)

    said = "Left out of the targets: 10 passages that training held out, by "
    elsewhere = shutil.copytree(milestone, tmp_path / "model")
    assert num_held_out(elsewhere, tmp_path / "unknown") > 0
    assert said not in capsys.readouterr().err
    assert num_held_out(milestone, tmp_path / "known") == 0
    assert f"{said}{held_out_run / 'probe.jsonl'}" in capsys.readouterr().err
    if passages == "random":  # whatever the passages are, the option is read before they are chosen
        assert num_held_out(milestone, tmp_path / "all", "--held-out", "") > 0


def test_the_controls_of_a_checkpoint_are_what_its_run_held_out_unless_they_are_named(
    held_out_run, tmp_path, capsys
):
    milestone = held_out_run / "checkpoint_100pct"
    held_out = (held_out_run / "held_out.jsonl").read_text()
    text = tmp_path / "text.jsonl"  # in another column than the run's file
    lines = (held_out_run.parent / "text.txt").read_text().splitlines()
    text.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines))

    def controls(model, name, *more):
        asked = [str(model), str(text), *QUICK, "--column", "body", *more, "--dry-run"]
        main([*asked, "--output-dir", str(tmp_path / name)])
        chosen = read_probe_file(tmp_path / name / "probe.jsonl")
        return [passage for passage in chosen if passage.kind == "control"]

    taken = controls(milestone, "run")
    assert taken
    for control in taken:
        assert json.dumps(control.text)[1:-1] in held_out
    said = f"Controls: the text that the run of the model held out, {held_out_run}/held_out.jsonl;"
    assert said in capsys.readouterr().out
    # The model has no run, or others are named, or targets may be of what was held out.
    elsewhere = shutil.copytree(milestone, tmp_path / "model")
    unseen = tmp_path / "unseen.jsonl"
    unseen.write_text(json.dumps({"body": "Nobody wrote this line before. " * 40}))
    for name, model, more in (
        ("elsewhere", elsewhere, []),
        ("named", milestone, ["--controls", str(unseen)]),
        ("none", milestone, ["--held-out", ""]),
    ):
        for control in controls(model, name, *more):
            assert json.dumps(control.text)[1:-1] not in held_out
        assert "the run of the model held out" not in capsys.readouterr().out
    with pytest.raises(
        ValueError, match=r"held out, has passages of 32 tokens, .*: give --block-size 32 --prefix"
    ):
        controls(milestone, "long", "--block-size", "33")


def test_a_probe_file_without_targets_is_refused_before_the_model_is_loaded(
    held_out_run, tmp_path, monkeypatch
):
    controls = [
        one for one in read_probe_file(held_out_run / "probe.jsonl") if one.kind == "control"
    ]
    write_probe_file(tmp_path / "probe.jsonl", controls)
    monkeypatch.setattr("tfidf_tune.tasks.evaluate", None)
    spec = AuditSpec(
        model=str(held_out_run / "checkpoint_100pct"), passages=tmp_path / "probe.jsonl"
    )
    for ask in (audit, estimate):
        with pytest.raises(
            ValueError,
            match="none of the 10 passages in .* is a target, so that there is nothing to",
        ):
            ask(replace(spec, output_dir=tmp_path / "out"))


def test_the_run_of_a_checkpoint_is_recorded_and_a_damaged_probe_file_is_an_error(
    held_out_run, tmp_path, capsys
):
    run = shutil.copytree(held_out_run, tmp_path / "run")
    arguments = [str(run / "checkpoint_100pct"), str(held_out_run.parent / "text.txt"), *QUICK]
    arguments += ["--output-dir", str(tmp_path / "out"), "--json"]
    main(arguments)
    recorded = json.loads(capsys.readouterr().out)["inputs"]["held_out"]
    assert (recorded["file"], recorded["passages"]) == (str(run / "probe.jsonl"), 10)
    page = (tmp_path / "out" / "report" / "report.md").read_text(encoding="utf-8")
    assert "10 passages that training held out, by " in page
    lines = (run / "probe.jsonl").read_text().splitlines(keepends=True)
    (run / "probe.jsonl").write_text("".join(lines[:-1]))
    changed = (
        "which has what training held out, has changed: it had 10 passages, has 9. Name another"
    )
    with pytest.raises(
        ValueError, match=rf"out/probe\.jsonl has the passages of an earlier audit, .*{changed}"
    ):
        main(arguments)
    (run / "probe.jsonl").write_text("{")
    with pytest.raises(
        ValueError, match=f"{run}/probe.jsonl, line 1 is not a passage of a probe file"
    ):
        main(arguments)
    (run / "probe.jsonl").unlink()
    capsys.readouterr()
    main([*arguments, "--overwrite", "--dry-run"])  # nothing is known
    assert "Left out" not in capsys.readouterr().err
    # A run of several data sets has a file of all their passages.
    (run / "probe.jsonl").write_text("".join(lines[:1]))
    (run / "all_passages.jsonl").write_text("".join(lines))
    main([*arguments, "--overwrite", "--dry-run"])
    assert (
        f"10 passages that training held out, by {run / 'all_passages.jsonl'}"
        in capsys.readouterr().err
    )


def test_a_budget_leaves_out_attacks_and_says_so(reciting, command, tmp_path, capsys):
    main(
        command(
            reciting,
            tmp_path,
            "--json",
            "--attacks",
            "greedy",
            "truncated",
            "sampling",
            "--budget",
            "100",
        )
    )
    printed = capsys.readouterr()
    assert json.loads(printed.out)["attacks"] == ["greedy"]
    assert "The budget of 100 requests leaves out: truncated, sampling." in printed.err


@pytest.mark.parametrize(
    "more",
    [["--attacks", "offset", "--offsets", "17"], ["--offset", "11"]],
    ids=" ".join,
)
def test_prompts_may_take_all_tokens_of_a_passage_but_one(
    tiny_checkpoint, command, tmp_path, capsys, more
):
    main(command(tiny_checkpoint, tmp_path, *more, "--dry-run"))
    assert "requests, about" in capsys.readouterr().err


def test_what_cannot_work_is_refused_before_texts_are_read(
    reciting, command, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "tfidf_tune.passages.make_probe", lambda *_: pytest.fail("the texts were read")
    )
    server = ["--base-url", "http://localhost/v1"]
    for more, named in (
        (
            ["--fail-above", "recall=1"],
            "--fail-above 'recall=1': write MEASURE=LIMIT, .*; measures are recited",
        ),
        (["--attacks", "magic"], "attacks is 'magic': possible are greedy, offset"),
        (
            ["--attacks", "greedy", "--offset", "3"],
            "--offset 3 is without effect on --attacks: use --offsets 3",
        ),
        (
            ["--num-concurrent", "4", "--send", "ids"],
            "--send, --num-concurrent: for a model behind a server, which --base-url names",
        ),
        (
            ["--offsets", "18"],
            "--offsets is a setting of the attack offset, .*: add offset to --attacks, or leave it "
            "out",
        ),
        (
            ["--attacks", "greedy", "noise", "--top-k", "5"],
            "--top-k is .*: add sampling to --attacks, or leave it out",
        ),
        (
            ["--attacks", "sampling", "--prompt-noise", "0.2"],
            "--prompt-noise is .*: add noise to --attacks, or leave it out",
        ),
        (server, "a model behind a server needs --tokenizer"),
        (
            [*server, "--tokenizer", "t", "--model-args", "a=1", "--device", "cuda"],
            "--device, --model-args: for a model that is loaded here, not behind --base-url",
        ),
        (
            ["--backend", "vllm"],
            "--backend vllm needs the package vllm: pip install vllm, or --backend transformers",
        ),
        (
            ["--executor", "slurm"],
            "slurm needs executor_args partition and time: partition=NAME,time=",
        ),
        (
            ["--model-args", "batch_size=3,device=cpu"],
            "--model-args: batch_size, device cannot be among .*: use the options of the same name",
        ),
        (
            [*server, "--tokenizer", "t", "--api-key-variable", "sk-live-0123456789abcdef"],
            "api_key_variable does not name .*: give the name of the variable",
        ),
        (
            [*server, "--tokenizer", "t", "--api-key-variable", "NOT_SET", "--dry-run"],
            "api_key_variable does not name .*: give the name of the variable",
        ),
        (
            ["--budget", "87"],
            "a budget of 87 requests .*24 passages and 64 others.*: raise it, or choose fewer "
            "passages",
        ),
        (
            ["--attacks", "truncated", "--prefix-lengths", "1"],
            "truncated .*the longest of the prefix lengths is 1: raise it to 2 or more, or leave "
            "out",
        ),
        (["--fail-above", ""], "--fail-above '': write MEASURE=LIMIT, such as recited=0"),
        (
            ["--fail-above", "verbatim=5"],
            "--fail-above 'verbatim=5': .*verbatim is at most 1, and not in percent",
        ),
        (["--fail-above", "auc.upper=1"], "auc.upper=1': .*auc.upper is at most 1"),
        (["--fail-above", "recited=12"], r"recited=12 \(at most 12 are possible\): lower it"),
        (["--fail-above", "lms=8"], r"lms=8 \(at most 8 are possible\): lower it"),
        (
            ["--prefix-lengths", "24"],
            "--block-size is 24, prompts take 24 tokens .*--prefix-lengths.*: a passage needs one "
            "more",
        ),
        (
            ["--attacks", "greedy", "offset", "--offsets", "3", "18"],
            "--block-size is 24, prompts take 24 tokens .*--offsets",
        ),  # 18 and the shortest
        (["--offset", "12"], "--block-size is 24, prompts take 24 tokens .*--offset"),
        (
            ["--fail-above", "lms=7,verbatim.upper=0.05"],
            r"verbatim\.upper=0\.05 \(with 12 targets .*, it takes 59",
        ),
        (
            ["--fail-above", "extraction@0.5:9.upper=0.2,verbatim=-1"],
            "extraction@0.5:9.upper=0.2 .*it takes 14.*verbatim=-1 .*it is always above",
        ),
        (
            ["--fail-above", "lms.upper=7,auc.upper=0.6", "--num-controls", "9"],
            "auc.upper=0.6 .*10 targets and controls, there are 9",
        ),
        (
            ["--fail-above", "lms.upper=7", "--num-targets", "9"],
            "lms.upper=7 .*10 targets, there are 9",
        ),
        (
            ["--fail-above", "excess=1,auc=0.9", "--num-controls", "0"],
            "excess=1 .*no controls.*auc=0.9 .*no controls",
        ),
    ):
        with pytest.raises(ValueError, match=named) as refused:
            main(command(reciting, tmp_path / "out", *more))
        assert "sk-live" not in str(refused.value)
    with pytest.raises(
        FileNotFoundError, match="no folder .*gone: name a Hugging Face model .* or a hub id"
    ):
        main(command(tmp_path / "gone", tmp_path / "out"))
    assert not (tmp_path / "out" / "probe.jsonl").exists()
