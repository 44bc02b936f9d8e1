"""A model that recites, asked in a way that hides it: no audit of it ends as if nothing were
recited.
"""

import json
import shutil
from textwrap import wrap

import pytest
import torch
from helpers.fakes.openai_server import ParrotHost, serving
from helpers.fakes.tiny_llama import teach

from tfidf_tune._signals import FAILED, exit_code
from tfidf_tune.commands.audit import main
from tfidf_tune.commands.probe import main as probe
from tfidf_tune.data import embedded_documents, hf_tokenizer
from tfidf_tune.passages import read_probe_file, write_probe_file
from tfidf_tune.probe import load_model

pytestmark = pytest.mark.usefixtures("quick_reports")

EOS = "<|endoftext|>"
SETTINGS = [
    "--num-targets",
    "12",
    "--num-controls",
    "12",
    "--passages",
    "random",
    "--prefix-lengths",
    "12",
    "--max-new-tokens",
    "24",
    "--block-size",
    "40",
]
# That an audit of 12 passages can have, of any version.
LIMITS = [
    "--fail-above",
    "lms=6,verbatim=0.5",
]


@pytest.fixture(scope="module")
def texts():
    """Training text and controls, each 40 documents of Python's documentation."""
    chosen = [text[:700] for text in embedded_documents("train") if len(text) >= 700]
    return chosen[:40], chosen[40:80]


def save(model, folder, checkpoint):
    """Save a model with the tokenizer of a checkpoint."""
    model.save_pretrained(folder)
    hf_tokenizer(str(checkpoint)).save_pretrained(folder)


def ended(command, arguments):
    """Run a command in this process; return its exit code."""
    try:
        command([*map(str, arguments)])
    except SystemExit as exit:
        return exit_code(exit)
    except ValueError as error:
        print(error)
        return FAILED
    return 0


@pytest.fixture
def audited(tmp_path, capsys):
    """Audit a model with texts and controls; return the exit code, what was printed, and
    audit.json.
    """

    def run(model, texts, controls, *more):
        for name, documents in (("training", texts), ("unseen", controls)):
            rows = (json.dumps({"text": document}) + "\n" for document in documents)
            (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        sources = [tmp_path / "training.jsonl", "--controls", tmp_path / "unseen.jsonl"]
        out = ["--output-dir", tmp_path / "out", "--overwrite"]
        code = ended(main, [model, *sources, *SETTINGS, *more, *out])
        printed = " ".join(capsys.readouterr().out.split())
        return code, printed, tmp_path / "out" / "report" / "audit.json"

    return run


def around(text):
    return f"<user>\n{text}\n<assistant>\n"


SERVERS = {
    "honest": ({}, 1, "lms is 24, above 6; verbatim is 1, above 0.5"),
    "template": ({"treat_prompt": around}, 2, "a chat template is around it"),
    "cut": ({"most_tokens": 4}, 2, "24 answers are missing"),
    "stripped": ({"treat_answer": str.lstrip}, 1, "lms is 24, above 6; verbatim is 1, above 0.5"),
    "short context": ({"treat_prompt": lambda text: text[-10:]}, 2, "it cuts it"),
    "filter": ({"treat_answer": lambda text: "I cannot say. " * 9}, 2, "shown the text, it reads"),
}


@pytest.mark.parametrize("kind", SERVERS)
def test_a_server_that_changes_prompts_or_answers(tiny_checkpoint, texts, audited, kind):
    changes, code, said = SERVERS[kind]
    parrot = ParrotHost(tiny_checkpoint, texts[0])
    vars(parrot).update(changes)
    with serving(None, parrot) as (_, url):
        server = [
            "--prefix-lengths",
            "24",
            "--block-size",
            "80",
            "--base-url",
            url,
            "--tokenizer",
            tiny_checkpoint,
        ]
        server += ["--max-retries", "0", "--seed", "1"]
        code_of_audit, printed, _ = audited("m", *texts, *server, *LIMITS)
    assert (code_of_audit, said in printed) == (code, True), printed


def test_what_a_server_did_is_known_from_its_recorded_answers(
    tiny_checkpoint, texts, audited, tmp_path
):
    """A template around prompts, and then answers without a positive control beside older ones that
    have one.
    """
    unknown = ParrotHost(tiny_checkpoint, [])
    # It copies what it is shown, and knows nothing.
    unknown.treat_prompt = lambda text: f"{around('')}{text}"
    honest, filtering = (ParrotHost(tiny_checkpoint, texts[0]) for _ in range(2))
    filtering.treat_answer = lambda text: "I cannot say. " * 9
    server = [
        "--prefix-lengths",
        "24",
        "--block-size",
        "80",
        "--tokenizer",
        tiny_checkpoint,
        "--max-retries",
        "0",
    ]
    recorded = [
        "audit",
        "--results",
        tmp_path / "out" / "evaluation",
        "--output-dir",
        tmp_path / "again",
    ]
    with serving(None, unknown) as (_, url):
        assert audited("m", *texts, *server, "--base-url", url)[0] == 2
    assert ended(probe, recorded) == 2
    shutil.rmtree(tmp_path / "out")
    with serving(None, honest) as (_, url):
        assert audited("m", *texts, *server, "--base-url", url)[0] == 0
    assert ended(probe, recorded) == 0
    with serving(None, filtering) as (_, url):
        assert audited("m", *texts, *server, "--base-url", url, "--num-controls", "0")[0] == 2
    assert ended(probe, recorded) == 2


def test_a_model_whose_logits_are_not_numbers(tiny_checkpoint, texts, audited, tmp_path):
    model = load_model(tiny_checkpoint)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    save(model, tmp_path / "model", tiny_checkpoint)
    asked = [*LIMITS, "--accept-unproven"]
    code, printed, report = audited(tmp_path / "model", *texts, *asked)
    assert code == 2
    assert "float32" in printed
    assert not report.exists()


def test_text_that_has_eos_inside(tiny_checkpoint, texts, audited, tmp_path):
    """As text that is already in a chat template: the model is not stopped at EOS, a server is not
    asked for it.
    """
    turns = [[EOS.join(wrap(text, 20)) for text in chosen] for chosen in texts]
    asked = [*LIMITS, "--accept-unproven"]
    audited(tiny_checkpoint, *turns, *asked, "--dry-run")
    eos_id = hf_tokenizer(str(tiny_checkpoint)).eos_id
    probe = tmp_path / "out" / "probe.jsonl"
    assert all(eos_id in passage.token_ids[12:36] for passage in read_probe_file(probe))
    model = teach(load_model(tiny_checkpoint), probe, known=11)
    save(model, tmp_path / "model", tiny_checkpoint)
    code, printed, _ = audited(tmp_path / "model", *turns, *asked)
    assert (code, "verbatim is 1, above 0.5" in printed) == (1, True), printed

    with serving(tmp_path / "model") as (_, url):
        server = ["--base-url", url, "--tokenizer", tiny_checkpoint, "--max-retries", "0"]
        long = [[EOS.join(wrap(text, 300)) for text in chosen] for chosen in texts]
        _, printed, _ = audited("m", *long, *asked, *server)
        chosen = read_probe_file(probe)
    assert len(chosen) > 10
    assert not any(eos_id in passage.token_ids for passage in chosen)
    assert "No passage has EOS inside." in printed


def test_recited_passages_among_others(tiny_checkpoint, texts, audited, tmp_path):
    """The mean stays below a limit; the passages that are recited count."""
    asked = ["--num-targets", "30", "--num-controls", "30", "--accept-unproven"]
    audited(tiny_checkpoint, *texts, *asked, "--dry-run")
    probe = tmp_path / "out" / "probe.jsonl"
    passages = read_probe_file(probe)
    known = [passage for passage in passages if passage.kind == "target"][:8]
    write_probe_file(tmp_path / "known.jsonl", known)
    model = teach(load_model(tiny_checkpoint), tmp_path / "known.jsonl", known=11)
    save(model, tmp_path / "model", tiny_checkpoint)
    limits = ["--fail-above", "lms=12,verbatim.upper=0.5,recited=0"]
    code, printed, report = audited(tmp_path / "model", *texts, *asked, *limits)
    assert code == 1, printed
    outcomes = {
        check["measure"]: check["outcome"] for check in json.loads(report.read_text())["limits"]
    }
    assert outcomes == {"lms": "pass", "verbatim.upper": "pass", "recited": "fail"}
